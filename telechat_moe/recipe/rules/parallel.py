"""Rules about devices: degrees, pipeline, data layout, recomputation."""

import math
from collections.abc import Iterator

from telechat_moe.recipe.arithmetic import least_bytes
from telechat_moe.recipe.experts import HOPS, drops, expert_degrees
from telechat_moe.recipe.schema import Broken, Recipe
from telechat_moe.recipe.schema.model import ModelConfig, OtherModelConfig
from telechat_moe.units import size_text

AT = "model.model_config."
TP = "parallel_config.model_parallel"
EP = "parallel_config.expert_parallel"
_NO_BFLOAT16 = dict.fromkeys(("bfloat16", "bf16"), "where MindSpore has no such operator")
_NO_FLOAT16 = dict.fromkeys(("float16", "fp16"), "where fused rotations compute in float32")
_OVERFLOW = dict.fromkeys(("float16", "fp16"), "where the gradient of 1 / rms overflows")
_UNFIT_ON_CPU = {
    "layernorm_compute_dtype": _NO_BFLOAT16 | _OVERFLOW,
    "rotary_dtype": _NO_BFLOAT16 | _NO_FLOAT16,
    "router_dense_type": _NO_BFLOAT16,
}
"""Types in which a graph on CPU does not compile, or gives no finite gradient, by key; and why."""
PARALLEL_MODES = (1, 2, "SEMI_AUTO_PARALLEL", "AUTO_PARALLEL")


def _degrees(r: Recipe) -> tuple[int, str]:
    names = ("data_parallel", "model_parallel", "context_parallel", "pipeline_stage")
    named = {name: int(getattr(r.parallel_config, name)) for name in names}
    product = math.prod(named.values())
    text = " x ".join(f"{name} ({n})" for name, n in named.items() if n > 1) or "all degrees 1"
    return product, f"{text} = {product}"


def device_count(r: Recipe, devices: int | None) -> Iterator[Broken]:
    """The product of the degrees must be the number of devices."""
    product, text = _degrees(r)
    if devices is not None and product != devices:
        p = r.parallel_config
        others = product // p.data_parallel
        advice = f"use {product} devices"
        if devices % others == 0:
            advice = f"set data_parallel to {devices // others} or {advice}"
        yield "parallel_config", f"{text}, but {devices} devices were given", advice


def use_parallel(r: Recipe) -> Iterator[Broken]:
    """Without `use_parallel` MindFormers trains on one device, whatever the degrees say."""
    product, text = _degrees(r)
    if not r.use_parallel and product > 1:
        yield "use_parallel", f"False, but {text}", "True, or all degrees 1"
    if not r.use_parallel and r.parallel_config.expert_parallel > 1:
        problem = f"{r.parallel_config.expert_parallel} with use_parallel False"
        yield EP, problem, "1 on one device"


def parallel_mode(r: Recipe) -> Iterator[Broken]:
    """Layouts only exist in the semi-automatic and automatic modes."""
    p, mode = r.parallel_config, r.parallel.parallel_mode
    split = max(p.model_parallel, p.pipeline_stage, p.context_parallel, p.expert_parallel)
    if not r.use_parallel or not r.trains or mode in PARALLEL_MODES or split == 1:
        return
    yield "parallel.parallel_mode", f"{mode}, but the model is split", "1 (semi-automatic)"


def device_number(r: Recipe) -> Iterator[Broken]:
    """MindSpore splits a model over 1, 2, 4 or a multiple of 8 devices (`device_num` of its front end)."""
    product, text = _degrees(r)
    if not r.use_parallel or r.parallel.parallel_mode not in PARALLEL_MODES:
        return
    if product % 8 and product not in (1, 2, 4):
        yield (
            "parallel_config",
            f"{text} devices",
            "degrees whose product is 1, 2, 4 or divisible by 8",
        )


def cpu(r: Recipe) -> Iterator[Broken]:
    """MindSpore on CPU: no device queue, bfloat16 only in fused products."""
    if r.context.device_target != "CPU":
        return
    if r.runner_config.sink_mode and r.trains:
        yield "runner_config.sink_mode", "True on CPU", "False: CPU has no device queue"
    m = r.model.model_config
    if m.params_dtype not in ("float32", "fp32", None):
        yield AT + "params_dtype", f"{m.params_dtype} on CPU", "float32: master weights are fp32"
    if m.compute_dtype in ("float16", "fp16"):
        yield AT + "compute_dtype", f"{m.compute_dtype} on CPU", "float32 or bfloat16"
    elif m.compute_dtype in ("bfloat16", "bf16"):
        backends = r.telechat_moe.operators
        for name in ("matmul", "grouped_matmul", "attention"):
            if (getattr(backends, name) or backends.default) == "plain":
                problem = f"{m.compute_dtype} with plain {name} on CPU"
                expected = "float32: MindSpore has no bfloat16 products there"
                yield AT + "compute_dtype", problem, expected
    if isinstance(m, ModelConfig):
        for key, reasons in _UNFIT_ON_CPU.items():
            if reason := reasons.get(getattr(m, key)):
                yield AT + key, f"{getattr(m, key)} on CPU, {reason}", "float32"


def tensor_parallel(r: Recipe) -> Iterator[Broken]:
    """Each device of tensor parallelism holds an equal part of heads, vocabulary and widths."""
    m, tp = r.model.model_config, r.parallel_config.model_parallel
    if tp == 1:
        return
    for key in (
        *("num_attention_heads", "num_key_value_heads", "vocab_size", "hidden_size"),
        *("intermediate_size", "moe_shared_expert_intermediate_size"),
    ):
        value = getattr(m, key)
        if value is not None and value % tp:
            yield TP, f"{tp}, with {key} {value}", f"a divisor of {key} ({value})"
    width = m.shared_width if isinstance(m, ModelConfig) else 0
    if width % tp and not m.moe_shared_expert_intermediate_size:
        yield TP, f"{tp}, with shared experts {width} wide", f"a divisor of {width}"


def sequence_parallel(r: Recipe) -> Iterator[Broken]:
    """MindFormers refuses sequence parallelism without tensor parallelism."""
    m, p = r.model.model_config, r.parallel_config
    key = "parallel_config.use_seq_parallel"
    if p.use_seq_parallel and p.model_parallel == 1 and r.use_parallel:
        yield key, "True with model_parallel 1", "False, or model_parallel > 1"
    if p.use_seq_parallel and m.seq_length is not None:
        part = p.model_parallel * p.context_parallel
        if m.seq_length % part:
            yield key, f"True with seq_length {m.seq_length}", f"seq_length a multiple of {part}"


def expert_parallel(r: Recipe) -> Iterator[Broken]:
    """Each device of expert parallelism holds as many experts as the others."""
    m, p = r.model.model_config, r.parallel_config
    ep = p.expert_parallel
    experts = m.n_routed_experts or (m.num_experts if isinstance(m, OtherModelConfig) else None)
    if ep == 1:
        return
    if experts is not None and experts % ep:
        yield EP, f"{ep}, with {experts} routed experts", f"a divisor of {experts}"
    stage = p.data_parallel * p.model_parallel * p.context_parallel
    if r.use_parallel and stage % ep and r.trains:
        problem = f"{ep}, with data_parallel ({p.data_parallel}) x model_parallel "
        problem += f"({p.model_parallel}) x context_parallel ({p.context_parallel})"
        yield EP, f"{problem} = {stage} devices per stage", f"a divisor of {stage}"


def expert_mesh(r: Recipe) -> Iterator[Broken]:
    """Experts take the innermost devices first: all of tensor, then of context, then of data parallelism."""
    m, p = r.model.model_config, r.parallel_config
    dp, cp, tp, ep = p.data_parallel, p.context_parallel, p.model_parallel, p.expert_parallel
    if not _trains_split(r) or ep == 1 or dp * cp * tp % ep:
        return
    text = f"{ep}, with data_parallel ({dp}) x context_parallel ({cp}) x model_parallel ({tp})"
    if r.telechat_moe.sharding.expert_tensor_parallel and tp > 1:
        if dp % ep:
            spread = f"which spreads experts over data_parallel ({dp})"
            yield EP, f"{ep} with expert_tensor_parallel, {spread}", f"a divisor of {dp}"
        width = m.moe_intermediate_size
        if width is not None and width % tp:
            key = "telechat_moe.sharding.expert_tensor_parallel"
            yield key, f"True with moe_intermediate_size {width}", f"a multiple of {tp}, or False"
        return
    fits = expert_degrees((tp, cp, dp))
    if ep not in fits:
        fits_text = ", ".join(map(str, fits))
        yield EP, text, f"one of {fits_text}: each degree is used up before the next, tensor first"


def rows(r: Recipe) -> Iterator[Broken]:
    """Rows of a micro-batch are spread evenly over the devices of a stage, and in the order of the sequences."""
    m, p, batch = r.model.model_config, r.parallel_config, r.runner_config.batch_size
    if not _trains_split(r) or m.seq_length is None:
        return
    devices = p.context_parallel * p.model_parallel
    told = p.use_seq_parallel or m.seq_length % p.context_parallel  # by the rules about sequences
    if batch * m.seq_length % devices and not told:
        problem = f"{batch} x seq_length {m.seq_length} = {batch * m.seq_length} rows for {devices} devices"
        problem += f" (context_parallel {p.context_parallel} x model_parallel {p.model_parallel})"
        yield "runner_config.batch_size", problem, f"rows a multiple of {devices}"
    if p.context_parallel > 1 and batch > 1:
        problem = f"{batch} with context_parallel {p.context_parallel}, which would put rows in another order"
        expected = "1; more data_parallel or micro-batches instead of more sequences"
        yield "runner_config.batch_size", problem, expected


def tied_table(r: Recipe) -> Iterator[Broken]:
    """A table that is head, too, stands on one pipeline stage."""
    m, p, key = r.model.model_config, r.parallel_config, AT + "tie_word_embeddings"
    if not m.tie_word_embeddings or not _trains_split(r):
        return
    if p.pipeline_stage > 1:
        problem = f"True with pipeline_stage {p.pipeline_stage}: its users are on different stages"
        yield key, problem, "False, or pipeline_stage 1"


def capacity_tokens(r: Recipe) -> Iterator[Broken]:
    """Tokens that share an expert's capacity are as many on each device; `alltoallv` drops none, unless tokens travel once a node."""
    m, p, settings = r.model.model_config, r.parallel_config, r.telechat_moe
    if not drops(m) or not r.trains:
        return
    factor, chosen = m.moe_expert_capacity_factor, settings.sharding.dispatcher
    if chosen == "alltoallv" and HOPS.get(m.moe_token_dispatcher_type or "") != "once":
        problem = f"alltoallv, which drops no token, with moe_expert_capacity_factor {factor:g}"
        yield "telechat_moe.sharding.dispatcher", problem, "alltoall, or no capacity factor"
    share, batch = settings.moe_capacity_tokens, r.runner_config.batch_size
    if share is None or m.seq_length is None:
        return
    cut = p.context_parallel * (1 if settings.sharding.expert_tensor_parallel else p.model_parallel)
    tokens = batch * m.seq_length // (cut if r.use_parallel else 1)
    if tokens % share:
        problem = f"{share}, with {tokens} tokens of a micro-batch on a device"
        yield "telechat_moe.moe_capacity_tokens", problem, f"a divisor of {tokens}"


def expert_backends(r: Recipe) -> Iterator[Broken]:
    """The plain experts take blocks of rows, the others rows sorted by expert, and so does `alltoallv`."""
    settings, section_key = r.telechat_moe, "telechat_moe.operators."
    permute, grouped = settings.operators.of("permute"), settings.operators.of("grouped_matmul")
    if not r.trains:
        return
    if (permute == "plain") != (grouped == "plain"):
        problem = f"{permute}, with {section_key}grouped_matmul {grouped}"
        yield f"{section_key}permute", problem, "one backend for both"
    if grouped == "plain" and settings.sharding.dispatcher == "alltoallv":
        key = "telechat_moe.sharding.dispatcher"
        problem = f"alltoallv, with {section_key}grouped_matmul plain"
        yield key, problem, "alltoall, or another backend"


def _trains_split(r: Recipe) -> bool:
    return r.use_parallel and r.trains


def dispatcher(r: Recipe) -> Iterator[Broken]:
    """MindFormers' hop between nodes needs expert parallelism over a node at least; `node_hops` is about our own."""
    m, ep = r.model.model_config, r.parallel_config.expert_parallel
    kind = m.moe_token_dispatcher_type
    kinds = ("alltoall", "alltoall_deredundency", "alltoall_zero_redundancy")
    if kind is None:
        return
    if kind not in kinds:
        yield AT + "moe_token_dispatcher_type", kind, "one of " + ", ".join(kinds)
    per_server = m.npu_nums_per_device or 8
    if kind == "alltoall_deredundency" and ep < per_server:
        problem = f"{kind} with expert_parallel {ep}"
        expected = f"expert_parallel of at least npu_nums_per_device ({per_server})"
        yield AT + "moe_token_dispatcher_type", problem, expected


def context_parallel(r: Recipe) -> Iterator[Broken]:
    """MindFormers splits sequences for the fused attention kernel only."""
    m, cp = r.model.model_config, r.parallel_config.context_parallel
    key = "parallel_config.context_parallel"
    if cp > 1 and m.use_flash_attention is False:
        yield key, f"{cp} with use_flash_attention False", "1, or use_flash_attention True"
    if cp > 1 and m.seq_length is not None and m.seq_length % cp:
        yield key, f"{cp} with seq_length {m.seq_length}", f"a divisor of {m.seq_length}"


def chunks(r: Recipe) -> int:
    """Return the chunks per stage as MindFormers counts them."""
    config = r.parallel.pipeline_config
    on = config is not None and config.pipeline_interleave
    return r.model.model_config.pp_interleave_num if on else 1


def device_memory(r: Recipe) -> Iterator[Broken]:
    """What every device must hold, even if all is sharded: MindSpore says it after the launch."""
    m, limit = r.model.model_config, getattr(r.context, "max_device_memory", None)
    if limit is None or not r.trains or not isinstance(m, ModelConfig):
        return
    devices, _ = _degrees(r)
    needed = least_bytes(r) // devices
    if needed > float(limit.removesuffix("GB")) * 2**30:
        problem = f"{limit}, but weights and moments take {size_text(needed)} on each of {devices} devices at least"
        yield "context.max_device_memory", problem, "more devices, or a smaller model"


def interleave(r: Recipe) -> Iterator[Broken]:
    """MindFormers sets `pp_interleave_num` to 1 silently when interleaving is off."""
    vpp, pp = r.model.model_config.pp_interleave_num, r.parallel_config.pipeline_stage
    if vpp > 1 and pp == 1:
        yield AT + "pp_interleave_num", f"{vpp} with pipeline_stage 1", "1 without stages"
    elif vpp > 1 and chunks(r) == 1:
        problem = f"{vpp}, but parallel.pipeline_config.pipeline_interleave is not on"
        yield AT + "pp_interleave_num", problem, "pipeline_interleave True, or 1"


def offset(r: Recipe) -> Iterator[Broken]:
    """MindFormers checks the sum before it repeats a flat list over chunks, and so loses layers."""
    m, pp, vpp = r.model.model_config, r.parallel_config.pipeline_stage, chunks(r)
    value, layers, key = m.offset, m.num_hidden_layers, AT + "offset"
    rows = offset_rows(value, pp, vpp)
    if pp == 1:
        if any(any(row) for row in rows or [[1]]):
            yield key, str(value), "0 without pipeline stages"
        return
    if layers is None:
        return
    total = pp * vpp
    mtp = m.num_nextn_predict_layers or 0
    if layers + mtp < total:
        problem = f"{layers} layers + {mtp} MTP on {pp} stages x {vpp} chunks"
        yield "parallel_config.pipeline_stage", problem, f"at least {total} layers"
        return
    base, remainder = divmod(layers, total)
    layout_text = f"{layers} layers on {pp} stages x {vpp} chunks = {base} each"
    if rows is None:
        shape = f"a list of {pp} numbers" if vpp == 1 else f"{vpp} lists of {pp} numbers each"
        yield key, str(value), f"0 or {shape}"
    elif (total := sum(map(sum, rows))) != remainder:
        problem = f"{value}, which sums to {total}; {layout_text} leaves {remainder} over"
        yield key, problem, f"a sum of {remainder}, such as {_example(remainder, pp, vpp)}"
    else:
        yield from _empty_chunks(rows, base, f"{value}; {layout_text}")


def offset_rows(
    value: int | list[int] | list[list[int]], pp: int, vpp: int
) -> list[list[int]] | None:
    """Return the offset of layers as [chunk][stage], or None if it has another shape."""
    if isinstance(value, int):
        return [[0] * pp] * vpp if not value else None
    rows = [row for row in value if isinstance(row, list)]
    flat = [item for item in value if isinstance(item, int)]
    if flat:
        rows = [flat] if vpp == 1 or not any(flat) else []
        rows = rows * vpp
    fits = len(rows) == vpp and all(len(row) == pp for row in rows)
    return rows if fits else None


def _empty_chunks(rows: list[list[int]], base: int, problem: str) -> Iterator[Broken]:
    counts = [base + extra for row in rows for extra in row]
    for index, count in enumerate(counts):
        if count < (0 if index in (0, len(counts) - 1) else 1):
            expected = "at least 1 layer in each chunk, 0 in the first and last"
            yield AT + "offset", f"{problem}, so chunk {index} has {count} layers", expected
            return


def _example(remainder: int, pp: int, vpp: int) -> list[int] | list[list[int]]:
    """Spread the layers that are left over chunks, those in the middle first."""
    order = sorted(range(pp * vpp), key=lambda i: (i == 0, i >= pp * vpp - 2, i))
    extra = [0] * (pp * vpp)
    for index in order[:remainder]:
        extra[index] = 1
    rows = [extra[i * pp : (i + 1) * pp] for i in range(vpp)]
    return rows[0] if vpp == 1 else rows


def micro_batches(r: Recipe) -> Iterator[Broken]:
    """Too few micro-batches leave stages idle; without stages MindFormers resets them to 1."""
    p, key = r.parallel_config, "parallel_config.micro_batch_num"
    pp, count = p.pipeline_stage, p.micro_batch_num
    if not r.trains:
        return
    if pp == 1 and count > 1:
        problem = f"{count} without pipeline stages, where it has no effect"
        yield key, problem, "1 (use runner_config.gradient_accumulation_steps)"
    if pp > 1 and count < pp:
        yield key, f"{count} for {pp} stages", f"at least pipeline_stage ({pp})"
    steps = r.runner_config.gradient_accumulation_steps
    if pp > 1 and steps > 1:
        problem = f"{steps} with pipeline stages, where it has no effect"
        yield "runner_config.gradient_accumulation_steps", problem, f"1 (use {key})"
    if r.micro_batch_interleave_num > 1:
        problem = f"{r.micro_batch_interleave_num} with use_legacy False"
        yield "micro_batch_interleave_num", problem, "1: the new networks refuse more"


def schedule(r: Recipe) -> Iterator[Broken]:
    """Each pipeline order has its own conditions, checked by MindSpore after the launch."""
    config, p = r.parallel.pipeline_config, r.parallel_config
    section_key = "parallel.pipeline_config."
    if config is None:
        return
    name, pp, vpp = config.pipeline_scheduler, p.pipeline_stage, chunks(r)
    if name != "1f1b" and not config.pipeline_interleave:
        problem = f"{name} without pipeline_interleave"
        yield section_key + "pipeline_scheduler", problem, "1f1b, or True there"
    if name == "seqvpp" and p.seq_split_num == 1:
        problem = f"{name} with parallel_config.seq_split_num 1"
        yield section_key + "pipeline_scheduler", problem, "another scheduler, or seq_split_num > 1"
    if name == "seqsmartvpp" and pp % 2 and pp > 1:
        problem = f"{name} with {pp} stages"
        yield section_key + "pipeline_scheduler", problem, "an even number of stages"
    if name == "zero_bubble_v" and (pp < 2 or vpp != 2 or p.micro_batch_num < 2 * pp):
        problem = f"{name} with {pp} stages, {vpp} chunks, {p.micro_batch_num} micro-batches"
        expected = "at least 2 stages, 2 chunks, micro_batch_num >= 2 x pipeline_stage"
        yield section_key + "pipeline_scheduler", problem, expected


def sequence_parts(r: Recipe) -> Iterator[Broken]:
    """Parts of a sequence are equal, and the balance loss knows of them."""
    m, p = r.model.model_config, r.parallel_config
    if p.seq_split_num > 1 and m.moe_router_load_balancing_type == "seq_aux_loss":
        problem = f"{p.seq_split_num} with moe_router_load_balancing_type seq_aux_loss"
        expected = "1, none, or in MindFormers' own networks sub_seq_aux_loss"
        yield "parallel_config.seq_split_num", problem, expected
    if p.seq_split_num > 1 and m.seq_length is not None and m.seq_length % p.seq_split_num:
        problem = f"{p.seq_split_num} with seq_length {m.seq_length}"
        yield "parallel_config.seq_split_num", problem, f"a divisor of {m.seq_length}"


def dataset_strategy(r: Recipe) -> Iterator[Broken]:
    """MindFormers ignores the strategy with `full_batch`, and else splits columns by position."""
    value, key, p = r.parallel.dataset_strategy, "parallel.dataset_strategy", r.parallel_config
    if not isinstance(value, list):
        yield from _no_strategy(r)
        return
    if r.parallel.full_batch:
        problem = "a list with full_batch True, where it has no effect"
        yield key, problem, "full_batch False, or no list"
        return
    data = r.train_dataset
    columns = data.construct_args_key or data.input_columns or []
    if columns and len(columns) != len(value):
        problem = f"{len(value)} entries for {len(columns)} columns ({', '.join(columns)})"
        yield key, problem, "one entry per column of construct_args_key"
    for index, axes in enumerate(value):
        name = columns[index] if index < len(columns) else f"column {index}"
        width = 4 if name == "attention_mask" else 2
        if axes[0] != p.data_parallel:
            yield f"{key}.{index}", f"{axes} for {name}", f"data_parallel ({p.data_parallel}) first"
        if columns and len(axes) != width:
            yield f"{key}.{index}", f"{axes} for {name}", f"{width} numbers, one per axis"
        if any(n > 1 for n in axes[1:]):
            yield f"{key}.{index}", f"{axes} for {name}", "1 on every axis after the first"


def _no_strategy(r: Recipe) -> Iterator[Broken]:
    p = r.parallel_config
    split = r.use_parallel and r.trains and p.model_parallel * p.context_parallel > 1
    strategy = r.parallel.dataset_strategy
    if split and not r.parallel.full_batch and strategy in (None, "data_parallel"):
        problem = "missing, with full_batch False and a split model"
        yield "parallel.dataset_strategy", problem, "a list, or full_batch True"


def recompute(r: Recipe) -> Iterator[Broken]:
    """Lists count layers per stage, or with `swap_config.swap` name them; MindFormers' core refuses sliced activations."""
    value, key = r.recompute_config.recompute, "recompute_config.recompute"
    if r.recompute_config.recompute_slice_activation:
        yield "recompute_config.recompute_slice_activation", "True", "False: the core refuses it"
    if isinstance(value, bool):
        return
    pp, vpp = r.parallel_config.pipeline_stage, chunks(r)
    layers = r.model.model_config.num_hidden_layers
    if r.swap_config.swap:
        wrong = [n for n in value if isinstance(n, bool | list) or n >= (layers or n + 1)]
        if wrong or not value:
            problem = f"{value} with swap_config.swap, where it names layers"
            yield key, problem, f"False, or layers from 0 to {(layers or 1) - 1}"
        return
    rows = [row for row in value if isinstance(row, list)] or [value]
    flat = rows[0] is value
    if any(len(row) != pp for row in rows) or (not flat and len(rows) != vpp):
        shape = f"a list of {pp} numbers" if vpp == 1 else f"{vpp} lists of {pp} numbers"
        yield key, str(value), f"True, False or {shape}: layers to recompute per stage"
        return
    count = sum(int(n) for row in rows for n in row if isinstance(n, int))
    if layers is not None and count > layers:
        yield key, f"{count} layers of {layers}", f"at most {layers} in all"
