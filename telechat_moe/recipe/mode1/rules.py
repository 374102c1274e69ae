"""Rules of mode 1: settings that MindFormers 2.1.0 takes, and with which it fails on the devices or does something else.

A rule is a public generator that yields (dotted key, what stands there, what is expected). Its docstring says what
happens otherwise. Most are rows of two tables: what acts only beside another setting, and what must divide what.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

from telechat_moe.recipe.check import section_keys
from telechat_moe.recipe.fields import Takes
from telechat_moe.recipe.mode1.schema import VERSION, DynamicRecipe
from telechat_moe.recipe.problems import Missing
from telechat_moe.recipe.schema import Broken
from telechat_moe.recipe.uses import written_keys

P = "parallelism."
DATA = "train_dataset.dataloader."
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_FUSED = ("swiglu", "fusedswiglu")

_Acts = Callable[[Any], object]
_WITH_STAGES: _Acts = lambda c: c.parallelism.pipeline_parallel > 1  # noqa: E731
_WITH_TENSORS: _Acts = lambda c: c.parallelism.tensor_parallel > 1  # noqa: E731
_EXCHANGE: _Acts = lambda c: (  # noqa: E731
    c.parallelism.expert_parallel > 1 and c.parallelism.moe_token_dispatcher_type == "alltoall"
)
_SPARSE: _Acts = lambda c: c.model.experimental_attention_variant == "dsa"  # noqa: E731
_ACT: tuple[tuple[str, _Acts, str], ...] = (
    ("training.max_consecutive_skipped_steps", lambda c: c.training.use_skip_step_on_nan, "use_skip_step_on_nan is False"),
    (P + "sequence_parallel", _WITH_TENSORS, "tensor_parallel is 1"),
    (P + "enable_mc2", _WITH_TENSORS, "tensor_parallel is 1"),
    (P + "enable_loss_parallel", _WITH_TENSORS, "tensor_parallel is 1"),
    (P + "npu_nums_per_device", lambda c: c.parallelism.moe_token_dispatcher_type != "alltoall", "tokens take one hop (alltoall)"),
    (P + "expert_parallel_async_d2h", _EXCHANGE, "there is no alltoall of expert_parallel above 1"),
    (P + "pipeline_parallel_schedule", _WITH_STAGES, "pipeline_parallel is 1"),
    (P + "pipeline_parallel_interleave_num", _WITH_STAGES, "pipeline_parallel is 1"),
    (P + "pipeline_parallel_layers_per_stage", _WITH_STAGES, "pipeline_parallel is 1"),
    (P + "pipeline_parallel_overlap_p2p", _WITH_STAGES, "pipeline_parallel is 1"),
    (P + "pipeline_parallel_p2p_transport", _WITH_STAGES, "pipeline_parallel is 1"),
    (P + "pipeline_parallel_overlap_b_f", lambda c: _WITH_STAGES(c) and _EXCHANGE(c), "it hides the alltoall of expert_parallel above 1 between stages"),
    (P + "pipeline_parallel_enable_dxdw_split", lambda c: c.parallelism.pipeline_parallel_overlap_b_f, "pipeline_parallel_overlap_b_f is False"),
    (P + "context_parallel_method", lambda c: c.parallelism.context_parallel > 1, "context_parallel is 1"),
    (P + "context_parallel_async", lambda c: c.parallelism.context_parallel_method != "colossal", "colossal has no overlap"),
    (P + "ulysses_degree_in_cp", lambda c: c.parallelism.context_parallel_method != "colossal", "colossal shares no heads"),
    ("recompute.full_recompute_layer", lambda c: c.recompute.mode != "None", "recompute.mode is None"),
    ("recompute.select_module", lambda c: c.recompute.mode == "select", "recompute.mode is not select"),
    ("recompute.exclude_op", lambda c: c.recompute.mode != "None", "recompute.mode is None"),
    ("recompute_comm.select_module", lambda c: c.recompute_comm.enable, "recompute_comm.enable is False"),
    ("swap.layer_swap", lambda c: c.swap.enable, "swap.enable is False"),
    ("swap.op_swap", lambda c: c.swap.enable, "swap.enable is False"),
    ("checkpoint.save_trainable_only", lambda c: c.lora_config, "there is no lora_config"),
    ("train_dataset.use_distribute_dataset", lambda c: c.parallelism.context_parallel > 1 or _WITH_TENSORS(c), "no devices share samples"),
    ("model.activation_func_clamp_value", lambda c: c.model.hidden_act in _FUSED, "hidden_act is neither swiglu nor fusedswiglu"),
    ("model.swiglu_limit", lambda c: c.model.hidden_act in _FUSED, "hidden_act is neither swiglu nor fusedswiglu"),
    ("model.enable_hc_head", lambda c: _with_streams(c.model), "enable_hyper_connections is not True"),
    ("model.dsa_index_topk_freq", lambda c: c.model.dsa_index_topk_freq == 1 or _SPARSE(c), "attention is not dsa"),
    ("model.dsa_indexer_types", lambda c: _SPARSE(c), "attention is not dsa"),
    ("model.dsa_warmup_layerwise_backward", lambda c: _SPARSE(c), "attention is not dsa"),
    ("model.bias_swiglu_fusion", lambda c: c.model.hidden_act == "swiglu", "hidden_act is not swiglu"),
)  # fmt: skip
"""Settings, when they act, and why they do not otherwise."""

_Number = Callable[[DynamicRecipe], "int | None"]
_DIVIDE: tuple[tuple[str, _Number, str, _Number], ...] = (
    (P + "tensor_parallel", lambda r: r.config.parallelism.tensor_parallel, "model.num_attention_heads", lambda r: r.config.model.num_attention_heads),
    (P + "tensor_parallel", lambda r: r.config.parallelism.tensor_parallel, "model.seq_length", lambda r: r.config.model.seq_length),
    (P + "tensor_parallel", lambda r: r.config.parallelism.tensor_parallel, "model.vocab_size", lambda r: r.config.model.vocab_size),
    (P + "tensor_parallel", lambda r: None if _latent(r) else r.config.parallelism.tensor_parallel, "model.num_key_value_heads", lambda r: r.config.model.num_key_value_heads),
    (P + "expert_parallel", lambda r: r.config.parallelism.expert_parallel, "model.n_routed_experts", lambda r: getattr(r.config.model, "n_routed_experts", None)),
    (P + "expert_parallel", lambda r: r.config.parallelism.expert_parallel, "data_parallel_shard x context_parallel x tensor_parallel", lambda r: r.domain and r.domain * r.config.parallelism.tensor_parallel),
    (P + "expert_parallel", lambda r: r.config.parallelism.expert_parallel, "global_batch_size / local_batch_size x context_parallel x tensor_parallel", lambda r: None if r.domain else _most_devices(r)),
    (P + "dense_fsdp_shard_size", lambda r: r.config.parallelism.dense_fsdp_shard_size, "data_parallel_shard x context_parallel", lambda r: r.domain),
    (P + "data_parallel_shard", lambda r: max(r.config.parallelism.data_parallel_shard, 1), "data-parallel devices", lambda r: r.data_parallel),
    (P + "context_parallel", lambda r: r.config.parallelism.context_parallel, "model.seq_length", lambda r: r.config.model.seq_length),
    (P + "context_parallel_method", lambda r: _heads_shared(r), "model.num_attention_heads", lambda r: r.config.model.num_attention_heads),
    ("model.n_group", lambda r: getattr(r.config.model, "n_group", None), "model.n_routed_experts", lambda r: r.config.model.n_routed_experts),
    ("model.topk_group", lambda r: _groups_chosen(r), "model.num_experts_per_tok", lambda r: r.config.model.num_experts_per_tok),
    ("model.o_groups", lambda r: getattr(r.config.model, "o_groups", None), "num_attention_heads x v_head_dim", lambda r: (r.config.model.num_attention_heads or 0) * (r.config.model.v_head_dim or 0)),
)  # fmt: skip
"""Settings, their numbers, and what these must divide."""

_TWINS = {"add_qkv_bias": ("attention_bias", False)}
_TWINS_V4: dict[str, tuple[str, object]] = {
    "dsa_indexer_n_heads": ("index_n_heads", 64),
    "dsa_indexer_head_dim": ("index_head_dim", 128),
    "dsa_indexer_topk": ("index_topk", 1024),
    "num_residual_streams": ("hc_mult", 4),
    "mhc_sinkhorn_iterations": ("hc_sinkhorn_iters", 20),
    "mhc_layernorm_epsilon": ("hc_eps", 1e-6),
    "csa_window_size": ("sliding_window", 128),
    "activation_func_clamp_value": ("swiglu_limit", 10.0),
}
"""Second names of keys that always have a value in MindFormers, and that value."""


def broken(recipe: DynamicRecipe, missing: Missing) -> Iterator[Broken]:
    """Yield (key, problem, expected) for each rule that a recipe breaks; a rule ends where it needs a missing value."""
    for name, rule in vars(sys.modules[__name__]).items():
        is_rule = inspect.isgeneratorfunction(rule) and rule.__module__ == __name__
        if is_rule and rule is not broken and not name.startswith("_"):
            yield from missing.until(rule(recipe))


def never_read(r: DynamicRecipe) -> Iterator[Broken]:
    """Nothing in MindFormers asks for these keys in mode 1."""
    for entry in written_keys("", r.config, r.written):
        if not entry.is_neutral():
            problem = f"{entry.plain()}, never read by MindFormers {VERSION} in mode 1"
            yield entry.key, problem, entry.field.metadata["remedy"]


def without_effect(r: DynamicRecipe) -> Iterator[Broken]:
    """These settings act only beside others; MindFormers drops them, most without a word."""
    for key, acts, reason in _ACT:
        path, _, name = key.rpartition(".")
        section = r.config
        for part in path.split("."):
            section = getattr(section, part)
        column = section_keys(cast("type[Any]", type(section))).fields.get(name)
        if column is None or acts(r.config):
            continue
        value = getattr(section, name)
        if value and not Takes().allows(value, column):
            text = f"{column.default}, or remove it" if column.default is not None else "remove it"
            yield key, f"{value}, without effect: {reason}", text


def divisors(r: DynamicRecipe) -> Iterator[Broken]:
    """What is split is split evenly; the first number that a setting does not divide says it."""
    uneven: dict[str, Broken] = {}
    for key, number, name, whole_number in _DIVIDE:
        divisor, dividend = number(r), whole_number(r) if number(r) else None
        if divisor and dividend and dividend % divisor:
            problem = f"{divisor}, with {name} {dividend}"
            uneven.setdefault(key, (key, problem, f"a divisor of {dividend}"))
    yield from uneven.values()


def _with_streams(m: Any) -> bool:
    """Return whether a network has several residual streams, as DeepSeek-V4 has by default."""
    written: bool | None = m.enable_hyper_connections
    return m.model_type == "deepseek_v4" if written is None else written


def _most_devices(r: DynamicRecipe) -> int:
    """Return the devices of a stage that the batch allows at most, where the recipe does not say how many."""
    t, p = r.config.training, r.config.parallelism
    return t.global_batch_size // t.local_batch_size * p.context_parallel * p.tensor_parallel


def _latent(r: DynamicRecipe) -> bool:
    return hasattr(r.config.model, "q_lora_rank")


def _groups_chosen(r: DynamicRecipe) -> int | None:
    m = r.config.model
    return getattr(m, "topk_group", None) or getattr(m, "moe_router_group_topk", None)


def _heads_shared(r: DynamicRecipe) -> int:
    """Return the devices over which context and tensor parallelism spread heads."""
    p = r.config.parallelism
    shared = {"ulysses": p.context_parallel, "hybrid": p.ulysses_degree_in_cp or 1}
    return p.tensor_parallel * shared.get(p.context_parallel_method, 1)


def batch(r: DynamicRecipe) -> Iterator[Broken]:
    """Every device takes the same samples in each micro-batch, also while the batch grows."""
    t, copies = r.config.training, r.data_parallel
    unit, key = t.local_batch_size * (copies or 1), "training.rampup_batch_size"
    name = "local_batch_size x data-parallel devices" if copies else "local_batch_size"
    if r.processes and r.processes % r.fixed_degrees:
        problem = f"tensor x context x pipeline = {r.fixed_degrees}, on {r.processes} devices"
        yield "parallelism", problem, f"a divisor of {r.processes}"
    if t.global_batch_size % unit:
        problem = f"{t.global_batch_size}, with {name} {unit}"
        yield "training.global_batch_size", problem, f"a multiple of {unit}"
    if t.rampup_batch_size is None:
        return
    first, increment, _ = t.rampup_batch_size
    growth = t.global_batch_size - first
    if first < 1 or increment < 1 or growth < 0 or growth % increment:
        problem = f"{first} in steps of {increment} to global_batch_size {t.global_batch_size}"
        yield key, problem, "a first batch above 0, and steps above 0 that lead to it"
    elif first % unit or (increment % unit and growth):
        yield key, f"{first} in steps of {increment}, with {name} {unit}", f"multiples of {unit}"


def tensor_parallel(r: DynamicRecipe) -> Iterator[Broken]:
    """Tensor parallelism splits the sequence outside of the products, and heads after the query latent."""
    p, m = r.config.parallelism, r.config.model
    if p.tensor_parallel == 1:
        return
    if not p.sequence_parallel:
        yield P + "sequence_parallel", f"False, with tensor_parallel {p.tensor_parallel}", "True"
    if _latent(r) and m.q_lora_rank == 0:
        yield "model.q_lora_rank", "0, with tensor_parallel above 1", "a width of the query latent"
    key = "moe_router_load_balancing_type"
    if getattr(m, key, None) == "global_aux_loss" and m.moe_aux_loss_coeff:
        yield f"model.{key}", "global_aux_loss, with tensor_parallel", "aux_loss or seq_aux_loss"


def sharding(r: DynamicRecipe) -> Iterator[Broken]:
    """Gradients are added up, because losses are scaled; tokens in two hops need experts on several nodes."""
    p = r.config.parallelism
    if not p.disable_gradient_division:
        problem = (
            "False: losses are divided by the devices already, gradients would be divided again"
        )
        yield P + "disable_gradient_division", problem, "True"
    if p.moe_token_dispatcher_type != "alltoall" and p.expert_parallel < p.npu_nums_per_device:
        problem = f"{p.moe_token_dispatcher_type}, with expert_parallel {p.expert_parallel}"
        expected = f"alltoall, or expert_parallel of {p.npu_nums_per_device} (a node) at least"
        yield P + "moe_token_dispatcher_type", problem, expected


def pipeline(r: DynamicRecipe) -> Iterator[Broken]:
    """Orders fit the chunks; ranges name each decoder layer once, at which MindFormers does not look."""
    p, layers = r.config.parallelism, r.config.model.num_hidden_layers
    stages, chunks = p.pipeline_parallel, p.pipeline_parallel_interleave_num
    order, key = p.pipeline_parallel_schedule, P + "pipeline_parallel_layers_per_stage"
    if stages == 1:
        return
    if (chunks == 1) == (order == "interleaved_1f1b") and (chunks == 1 or order == "gpipe"):
        expected = "1f1b or gpipe" if chunks == 1 else "interleaved_1f1b"
        yield P + "pipeline_parallel_schedule", f"{order}, with {chunks} chunks a stage", expected
    ranges: list[str] | str | None = p.pipeline_parallel_layers_per_stage
    if ranges == "auto":
        if layers and layers % (stages * chunks):
            problem = f"auto, with {layers} layers on {stages * chunks} chunks"
            yield key, problem, "ranges of layers"
        return
    parts = [text.split(",") for text in ranges or ()]
    if len(parts) != stages or any(len(part) != chunks for part in parts):
        expected = f"auto, or {stages} texts of {chunks} ranges each, such as '0-3' or '0-3,8-11'"
        yield key, f"{ranges}, with {stages} stages of {chunks} chunks", expected
        return
    in_order = [parts[stage][chunk].strip() for chunk in range(chunks) for stage in range(stages)]
    bounds = [_RANGE.fullmatch(text) for text in in_order]
    numbers = [n for m in bounds if m for n in range(int(m[1]), int(m[2] or m[1]) + 1)]
    if None in bounds or (layers and numbers != list(range(layers))):
        expected = f"the layers 0 to {(layers or 1) - 1} once, the first chunks of all stages first"
        yield key, str(ranges), expected


def context_parallel(r: DynamicRecipe) -> Iterator[Broken]:
    """Devices that share a sequence share heads within it as far as the method says, and need a mask of the kernel's."""
    p, m = r.config.parallelism, r.config.model
    cp, method, degree = p.context_parallel, p.context_parallel_method, p.ulysses_degree_in_cp
    fits = {
        "ulysses": degree in (None, cp),
        "hybrid": bool(degree and 1 < degree < cp and cp % degree == 0),
    }
    if cp == 1:
        return
    if not fits.get(method, True):
        expected = f"{cp}" if method == "ulysses" else f"a divisor of {cp} between 1 and {cp}"
        yield P + "ulysses_degree_in_cp", f"{degree}, with context_parallel {cp}", expected
    masked = m.use_attn_mask_compression or m.use_eod_attn_mask_compression or _compressed(r)
    if not masked and getattr(m, "experimental_attention_variant", None) != "dsa":
        problem = f"not True, with context_parallel {cp}"
        yield (
            "model.use_attn_mask_compression",
            problem,
            "True, or create_compressed_eod_mask: True",
        )


def _compressed(r: DynamicRecipe) -> bool:
    """Return whether document ends are a column instead of a mask."""
    loader = r.config.train_dataset.dataloader
    return bool(getattr(getattr(loader, "config", loader), "create_compressed_eod_mask", False))


def saving(r: DynamicRecipe) -> Iterator[Broken]:
    """Without a folder nothing is saved, and adapters are saved beside a whole model."""
    c = r.config.checkpoint
    if r.written.get("checkpoint") and c.enable_save and not c.save_path:
        expected = "a folder, or enable_save: False"
        yield "checkpoint.save_path", "empty, so that nothing is saved", expected
    if c.save_trainable_only and not c.base_load_path.strip():
        yield "checkpoint.base_load_path", "empty, with save_trainable_only", "the whole model"


def schedule(r: DynamicRecipe) -> Iterator[Broken]:
    """Warm-up and decay are steps or a share of training.steps; with both the share counts alone."""
    s, steps = r.config.lr_scheduler, r.config.training.steps
    for name in ("warmup", "decay", "decay_start"):
        key = f"lr_scheduler.{name}_steps"
        if not hasattr(s, f"{name}_steps"):
            continue
        count, ratio = getattr(s, f"{name}_steps"), getattr(s, f"{name}_ratio", None)
        needed = name == "decay_start" or (name == "warmup" and s.type != "CosineWithWarmUpLR")
        if count is None and ratio is None and needed:
            yield key, "is missing", f"a number of steps, or {name}_ratio"
        elif count is not None and ratio is not None:
            yield key, f"{count}, beside {name}_ratio, which counts alone", "one of them"
        elif count is not None and (count < 0 or (count > steps and s.type != "ConstantWarmUpLR")):
            yield key, f"{count}, of training.steps {steps}", f"0 to {steps}"


def data(r: DynamicRecipe) -> Iterator[Broken]:
    """The columns are those that the masks ask for, and the samples as long as the model's."""
    loader, m = r.config.train_dataset.dataloader, r.config.model
    if loader.type != "BlendedMegatronDatasetDataLoader":
        return
    c, names = loader.config, ["input_ids", "labels", "loss_mask", "position_ids"]
    length = m.seq_length or 4096  # MindFormers' default for each network
    if c.seq_length != length:
        problem = f"{c.seq_length}, but model.seq_length is {length}"
        yield DATA + "config.seq_length", problem, str(length)
    if c.create_compressed_eod_mask or c.create_attention_mask:
        names += ["actual_seq_len" if c.create_compressed_eod_mask else "attention_mask"]
    if loader.column_names != names:
        yield DATA + "column_names", f"{loader.column_names}, but the masks give others", str(names)
    for key, expected in (
        ("datasets_type", "GPTDataset"),
        ("sizes", "a list: samples for training, 0, 0"),
    ):
        if getattr(loader, key) is None:
            yield DATA + key, "is missing", expected
    if c.data_path is not None and c.split is None:
        yield DATA + "config.split", "is missing, with data_path", '"1, 0, 0"'


def balance(r: DynamicRecipe) -> Iterator[Broken]:
    """Attention is balanced by document ends, which not every source gives."""
    d, key = r.config.train_dataset, "train_dataset.balance_enabled"
    unfit = d.dataloader.type == "MindDataset" or getattr(d.dataloader, "streaming", None)
    if d.balance_enabled and (unfit or not _compressed(r)):
        expected = "False, or create_compressed_eod_mask: True of a source that is neither MindDataset nor streaming"
        yield key, "True, without the ends of all documents", expected


def network(r: DynamicRecipe) -> Iterator[Broken]:
    """MindFormers refuses these when the devices build the network."""
    m = r.config.model
    if m.hidden_act == "swiglu" and not m.bias_swiglu_fusion:
        yield "model.hidden_act", "swiglu, which mode 1 does not have alone", "fusedswiglu"
    if not _latent(r):
        return
    chosen, layers = _groups_chosen(r), m.num_hidden_layers or 1 << 30
    if chosen and chosen > (m.n_group or 0):
        yield "model.topk_group", f"{chosen}, with n_group {m.n_group}", "at most n_group"
    if m.moe_router_score_function == "softmax" and m.moe_router_enable_expert_bias is not False:
        problem = "softmax, with moe_router_enable_expert_bias"
        yield "model.moe_router_score_function", problem, "sigmoid or sqrtsoftplus"
    if m.moe_aux_loss_coeff and m.moe_router_load_balancing_type is None:
        problem = "is missing, with moe_aux_loss_coeff: mode 1 does not know its default, sub_seq_aux_loss"
        expected = "seq_aux_loss, aux_loss or global_aux_loss"
        yield "model.moe_router_load_balancing_type", problem, expected
    rope = m.position_embedding_type in (None, "rope") and m.model_type == "deepseek_v3"
    if rope and m.rotary_scaling_factor is None:
        problem = "left out; MindFormers takes 40 and multiplies attention scores by 1.59"
        yield "model.rotary_scaling_factor", problem, "1.0 with position_embedding_type rope"
    if m.add_bias_linear:
        yield "model.add_bias_linear", "True, with experts", "False"
    for name, limit in (
        ("first_k_dense_replace", layers),
        ("num_hash_layers", layers),
        ("num_nextn_predict_layers", 1),
    ):
        if (getattr(m, name, None) or 0) > limit:
            yield f"model.{name}", f"{getattr(m, name)}", f"at most {limit}"


def twins(r: DynamicRecipe) -> Iterator[Broken]:
    """MindFormers refuses a second name of a key whose first one says something else, be it only by default."""
    is_v4, written = r.config.model.model_type == "deepseek_v4", r.written["model"]
    for name, (first, default) in (_TWINS | (_TWINS_V4 if is_v4 else {})).items():
        value, other = written.get(name), written.get(first, default)
        if value is not None and value != other:
            where = "" if first in written else " by default"
            problem = f"{value}, but {first}, the same setting, is {other}{where}"
            yield f"model.{name}", problem, f"{first}: {value}"


def hybrid_attention(r: DynamicRecipe) -> Iterator[Broken]:
    """DeepSeek-V4's layers have a compression each, and heads of one width."""
    m = r.config.model
    if getattr(m, "experimental_attention_variant", None) not in (None, "dsv4_hybrid"):
        return
    ratios = getattr(m, "compress_ratios", None)
    if ratios is not None and r.layers is not None and len(ratios) != r.layers:
        problem = f"{len(ratios)} items, with {r.layers} layers, MTP included"
        yield "model.compress_ratios", problem, f"{r.layers} items"
    if (
        getattr(m, "sliding_window", None) not in (None, 128)
        and m.apply_dsa_kernel_fusion is not False
    ):
        problem = f"{m.sliding_window}, with apply_dsa_kernel_fusion, also where that is left out"
        yield "model.sliding_window", problem, "128, or apply_dsa_kernel_fusion: False"
    if not hasattr(m, "o_groups") or None in (m.qk_nope_head_dim, m.qk_rope_head_dim, m.v_head_dim):
        return
    if (width := m.qk_nope_head_dim + m.qk_rope_head_dim) != m.v_head_dim:
        yield "model.v_head_dim", f"{m.v_head_dim}, with query heads of {width}", f"{width}"


def recomputation(r: DynamicRecipe) -> Iterator[Broken]:
    """Modes need layers, which ranges name that rise."""
    c, comm = r.config.recompute, r.config.recompute_comm
    name = {"full": "full_recompute_layer", "select": "select_module"}.get(c.mode)
    if name and not getattr(c, name):
        yield f"recompute.{name}", f"nothing, with mode {c.mode}", "ranges of layers"
    if comm.enable and not comm.select_module:
        yield "recompute_comm.select_module", "nothing, with enable: True", "modules and ranges"
    yield from _ranges(r, "recompute.full_recompute_layer", c.full_recompute_layer)
    for key in ("recompute.select_module", "recompute.exclude_op", "recompute_comm.select_module"):
        section, _, name = key.partition(".")
        modules: dict[str, list[Any]] = getattr(getattr(r.config, section), name) or {}
        for module, ranges in modules.items():
            yield from _ranges(r, f"{key}.{module}", ranges)


def swapping(r: DynamicRecipe) -> Iterator[Broken]:
    """Activations come back from layers that exist, and not across pipeline stages."""
    c = r.config.swap
    if not c.enable:
        return
    if r.config.parallelism.pipeline_parallel > 1:
        yield "swap.enable", "True, with pipeline stages, which MindFormers refuses", "False"
    if r.layers is not None and c.default_prefetch >= r.layers:
        problem = f"{c.default_prefetch}, with {r.layers} layers"
        yield "swap.default_prefetch", problem, f"at most {r.layers - 1}"
    for name in ("layer_swap", "op_swap"):
        for index, item in enumerate(getattr(c, name) or ()):
            yield from _ranges(r, f"swap.{name}.{index}.layers", item.layers, c.default_prefetch)


def _ranges(
    r: DynamicRecipe, key: str, ranges: list[Any] | None, prefetch: int = 0
) -> Iterator[Broken]:
    """Yield the first range that is none, does not rise, or names layers that there are not."""
    last, end = -1, (1 << 30 if r.layers is None else r.layers - 1) - prefetch
    for text in ranges or ():
        match = _RANGE.fullmatch(str(text).strip())
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if low <= last or high < low or high > end:
            yield key, f"{text}", f"ranges that rise, such as '0-3', up to {end} (MTP comes last)"
            return
        last = high


def layers_of(ranges: list[Any] | None) -> set[int]:
    """Return the layers that ranges such as `0-3` name."""
    bounds = [str(text).strip().split("-") for text in ranges or ()]
    return {n for bound in bounds for n in range(int(bound[0]), int(bound[-1]) + 1)}


def remaining(r: DynamicRecipe) -> Iterator[Broken]:
    """Patterns are regular expressions, profiled steps are in order, and predicting needs its section."""
    c = r.config
    for name in ("target_modules", "exclude_layers") if c.lora_config else ():
        try:
            re.compile(getattr(c.lora_config, name) or "")
        except (re.error, OverflowError, RecursionError) as error:
            yield f"lora_config.{name}", f"{error}", "a regular expression"
    if c.profiler.start_step > c.profiler.end_step:
        problem = f"{c.profiler.start_step}, with end_step {c.profiler.end_step}"
        yield "profiler.start_step", problem, "at most end_step"
    if c.run_mode == "predict" and c.inference is None:
        yield (
            "inference",
            "is missing, with run_mode predict",
            "a section; input_data has the texts",
        )
