"""Rules for our own trainer: settings that would have no effect beside the others, or that it does not have.

Each takes the recipe and whether it is compiled only (`telechat-moe dryrun`, one device included) instead of trained.
"""

from collections.abc import Iterator
from typing import Any, cast

from telechat_moe.recipe import speed_up as switches
from telechat_moe.recipe.check import section_keys
from telechat_moe.recipe.experts import HOPS, dispatcher, drops, hop_between_nodes
from telechat_moe.recipe.rules.parallel import chunks as chunks_of
from telechat_moe.recipe.schema import Broken, Recipe
from telechat_moe.recipe.schema.model import NODE_DEVICES, ModelConfig

OWN = "telechat_moe."


def _changed(
    section_key: str, section: Any, keys: tuple[str, ...] = ()
) -> Iterator[tuple[str, str]]:
    """Yield the keys of a section, of ``keys`` if given, that do not have their default, and their values."""
    if section is None:
        return
    for name, field in section_keys(cast("type[Any]", type(section))).fields.items():
        value = getattr(section, name)
        if (not keys or name in keys) and value is not None and value != field.default:
            yield f"{section_key}.{name}", str(value)


def own_model(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """This package trains and compiles its own model; others are MindFormers'."""
    config = r.model.model_config
    if not isinstance(config, ModelConfig):
        expected = "telechat3_moe or deepseek_v3; check --for mindformers judges other models"
        problem = f"{config.model_type}, a model of MindFormers"
        if r.pretrained_model_dir:
            problem = f"not known: no dimensions of a model of ours in {r.pretrained_model_dir}/config.json"
        yield "model.model_config.model_type", problem, expected


def device_settings(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """Ascend devices have a memory, a compiler and a way of splitting graphs that CPU has not."""
    c, mode = r.context, r.parallel.parallel_mode
    if not compiled and c.device_target == "GPU":
        problem = "GPU, which the trainer of this package does not have"
        yield "context.device_target", problem, "Ascend or CPU"
    split = mode in (1, "SEMI_AUTO_PARALLEL")
    if not compiled and c.device_target == "Ascend" and r.devices > 1 and not split:
        problem = f"{mode} on Ascend, where each rank's graph is split semi-automatically"
        yield "parallel.parallel_mode", problem, "1"
    if compiled or c.device_target != "CPU":
        return
    level = c.jit_config.jit_level if c.jit_config is not None else None
    settings = {"max_device_memory": c.max_device_memory, "jit_config.jit_level": level}
    settings["mempool_block_size"] = c.mempool_block_size
    for key, value in settings.items():
        if value is not None:
            yield f"context.{key}", f"{value} on CPU, where it has no effect", "remove it"


def optimizer_shards(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """Optimizer states are sharded over devices, if the recipe says so, over equally many each."""
    on, config = r.parallel.enable_parallel_optimizer, r.parallel.parallel_optimizer_config
    dp = r.parallel_config.data_parallel
    size = config.optimizer_weight_shard_size if config is not None else None
    if on and r.devices > 1 and size not in (None, -1) and (size < 2 or dp % size):
        key = "parallel.parallel_optimizer_config.optimizer_weight_shard_size"
        expected = f"-1, or a divisor of data_parallel ({dp}) above 1"
        yield key, f"{size}, with data_parallel {dp}", expected
    if on and r.devices == 1:
        yield "parallel.enable_parallel_optimizer", "True on one device", "False, or more devices"
    if not on:
        section_key = "parallel.parallel_optimizer_config"
        for key, value in _changed(section_key, r.parallel.parallel_optimizer_config):
            problem = f"{value} with enable_parallel_optimizer False, where it has no effect"
            yield key, problem, "remove it, or enable_parallel_optimizer True"


def recomputed(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """The step of one process keeps all activations; repeated communication needs recomputation."""
    alone = r.devices == 1 and not compiled
    layers, parts = r.recompute_config.recompute, r.telechat_moe.sharding.recompute
    for key, value in (("recompute_config.recompute", layers), (f"{OWN}sharding.recompute", parts)):
        if value and alone:
            problem = f"{value} on one device, where `telechat-moe train` keeps all activations"
            yield key, problem, "remove it"
    if not r.recompute_config.mp_comm_recompute and not (layers or parts):
        problem = "False without recomputation, where it has no effect"
        yield "recompute_config.mp_comm_recompute", problem, "True, or remove it"


def expert_layout(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """How experts and activations are split matters where there are several devices."""
    p, sharding = r.parallel_config, r.telechat_moe.sharding
    if sharding.dispatcher != "auto" and r.devices == 1:
        problem = f"{sharding.dispatcher} on one device, where every expert is at hand"
        yield f"{OWN}sharding.dispatcher", problem, "auto, or more devices"
    if p.use_seq_parallel and r.devices == 1:
        problem = "True on one device, where it has no effect"
        yield "parallel_config.use_seq_parallel", problem, "False, or model_parallel > 1"
    if sharding.expert_tensor_parallel and (r.devices == 1 or p.model_parallel == 1):
        problem = "True with model_parallel 1, where it has no effect"
        yield f"{OWN}sharding.expert_tensor_parallel", problem, "False, or model_parallel > 1"


def moving_experts(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """Experts move within an expert group; results must not depend on where they are."""
    m, placement_key = r.model.model_config, f"{OWN}moe.placement"
    if r.telechat_moe.moe.placement is None or not isinstance(m, ModelConfig):
        return
    kind, form = m.moe_token_dispatcher_type, r.telechat_moe.sharding.dispatcher
    if r.devices == 1 or r.parallel_config.expert_parallel == 1:
        problem = "a section where every device has all experts"
        yield placement_key, problem, "remove it, or expert_parallel > 1"
    elif kind in HOPS:
        problem = f"a section with moe_token_dispatcher_type {kind}, which adds up a token's experts node by node"
        yield placement_key, problem, "remove it, or moe_token_dispatcher_type alltoall"
    elif form == "allgather":
        problem = f"a section with {OWN}sharding.dispatcher allgather, which adds up a token's experts device by device"
        yield placement_key, problem, "remove it, or dispatcher alltoall or alltoallv"
    factor = m.moe_expert_capacity_factor if drops(m) else None
    split = r.telechat_moe.sharding.expert_tensor_parallel
    unproven = {
        f"{OWN}sharding.expert_tensor_parallel": (split, False),
        "model.model_config.moe_expert_capacity_factor": (factor, None),
    }
    for key, (value, needed) in unproven.items():
        if value != needed:
            problem = f"a section with {key} {value}, where no run with moves was compared with one without"
            yield placement_key, problem, f"remove it, or {key} {needed}"


def _expert_devices(r: Recipe) -> int:
    """Return over how many devices each expert's widths are split."""
    p, split = r.parallel_config, r.telechat_moe.sharding.expert_tensor_parallel
    return p.model_parallel * p.context_parallel if split else 1


def node_hops(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """A hop between nodes needs an expert group that spreads over whole nodes, and rows that are not at hand."""
    m, p, settings = r.model.model_config, r.parallel_config, r.telechat_moe
    devices_key = "model.model_config.npu_nums_per_device"
    key = "model.model_config.moe_token_dispatcher_type"
    if not isinstance(m, ModelConfig):
        return
    kind, (hop, node) = m.moe_token_dispatcher_type, hop_between_nodes(m)
    if not hop:
        if m.npu_nums_per_device != NODE_DEVICES:
            problem = f"{m.npu_nums_per_device} with moe_token_dispatcher_type {kind or 'alltoall'}, where it has no effect"
            yield devices_key, problem, f"remove it, or one of {', '.join(HOPS)} there"
        return
    ep, stride = p.expert_parallel, _expert_devices(r)
    inner, remainder = divmod(node, stride)
    group = f"expert_parallel {ep}" + (f" with {stride} devices an expert" if stride > 1 else "")
    if r.devices == 1 or ep <= max(inner, 1):
        nodes = f"nodes of {node} devices, which takes no token to another node"
        expected = f"alltoall, or expert_parallel of several nodes (npu_nums_per_device {node})"
        yield key, f"{kind} with {group} and {nodes}", expected
    elif remainder or ep % inner:
        problem = f"{node} with {group}, which does not spread over whole nodes"
        sizes = [str(stride * n) for n in range(1, ep) if ep % n == 0]
        yield devices_key, problem, f"one of {', '.join(sizes)}"
    chosen, other = settings.sharding.dispatcher, f"{OWN}sharding.dispatcher"
    if chosen == "allgather":
        problem = f"allgather with {kind}: every device sees all tokens in one hop"
        yield other, problem, "auto, or moe_token_dispatcher_type alltoall"
    elif hop == "once" and chosen == "alltoall":
        problem = f"alltoall with {kind}: padded buffers would take every token to every node"
        yield other, problem, "auto, alltoallv, or moe_token_dispatcher_type alltoall_deredundency"
    elif hop == "once" and settings.operators.of("grouped_matmul") == "plain":
        problem = f"plain with {kind}, whose rows are sorted by expert"
        yield f"{OWN}operators.grouped_matmul", problem, "another backend"


def per_token_loss(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """Which tokens the loss is averaged over matters where a step has several micro-batches."""
    if r.model.model_config.calculate_per_token_loss and r.micro_batches == 1:
        problem = "True with one micro-batch a step, whose mean over tokens is that of the step"
        expected = "remove it, or more micro-batches"
        yield "model.model_config.calculate_per_token_loss", problem, expected


def dealt_samples(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """Samples cost unequally where attention stays within documents; a rank must take several for a choice of them."""
    key, config = f"{OWN}balance_attention", r.train_dataset.data_loader.config
    if not r.telechat_moe.balance_attention or config is None:
        return
    p = r.parallel_config
    ranks = p.data_parallel if r.use_parallel else 1
    if not config.reset_attention_mask:
        problem = "True with attention across documents, which costs all samples the same"
        expected = "remove it, or train_dataset.data_loader.config.reset_attention_mask True"
        yield key, problem, expected
    elif ranks == 1 and p.pipeline_stage == 1:
        problem = "True with one data-parallel rank and no pipeline, where nobody waits"
        yield key, problem, "remove it, or parallel_config.data_parallel > 1"
    elif r.global_batch == ranks:
        problem = "True with one sample a step for each rank, where there is no choice"
        yield key, problem, "remove it, or more micro-batches, or runner_config.batch_size > 1"


def samples(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """MindSpore compiles an interleaved pipeline with a backward pass only, and samples need logits without one."""
    if not compiled and r.telechat_moe.sample is not None and chunks_of(r) > 1:
        problem = f"a section with pp_interleave_num {chunks_of(r)}, whose stages compute no logits by themselves"
        expected = "remove it, or pp_interleave_num 1; or train on from the last checkpoint with another layout"
        yield f"{OWN}sample", problem, expected


def evaluation_batches(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """Without an interval nothing is evaluated; an interval of 0 that is written turns the section off."""
    written = r.given.get("telechat_moe", {}).get("evaluation", {})
    if r.telechat_moe.evaluation.interval == 0 and "interval" not in written:
        for key, value in _changed(f"{OWN}evaluation", r.telechat_moe.evaluation, ("batches",)):
            problem = f"{value} without an interval, where it has no effect"
            yield key, problem, "remove it, or write an interval"


def schedule_parts(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """Parts of the schedule that its other settings leave without a meaning."""
    s = r.lr_schedule
    if s is None:
        return
    warm = bool(s.warmup_steps or s.warmup_ratio)
    if s.warmup_lr_init and not warm:
        problem = f"{s.warmup_lr_init:g} without warm-up, where it has no effect"
        yield "lr_schedule.warmup_lr_init", problem, "remove it, or warmup_steps > 0"
    if s.decay_steps is not None and s.decay_ratio is not None:
        yield "lr_schedule.decay_ratio", "together with decay_steps", "only one of the two"


def guard_parts(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """Settings of the guard act where it goes back, and where it has a limit."""
    guard, section_key = r.telechat_moe.loss_guard, f"{OWN}loss_guard"
    if guard is None:
        return
    if guard.action == "skip":
        for key, value in _changed(section_key, guard, ("rollback_steps", "max_rollbacks")):
            problem = f"{value} with action skip, where it has no effect"
            yield key, problem, "remove it, or action rollback"
    if (guard.norm_factor, guard.loss_factor, guard.sigma) == (None, None, None):
        expected = "norm_factor, loss_factor or sigma, or no such section"
        yield section_key, "without any limit, where it has no effect", expected


def chunks(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """The order of a pipeline is 1F1B, whatever the scheduler, where a stage has one chunk of whole sequences (MindSpore 2.9)."""
    on = getattr(r.parallel.pipeline_config, "pipeline_interleave", False)
    stages, vpp = r.parallel_config.pipeline_stage, r.model.model_config.pp_interleave_num or 1
    if on and (stages == 1 or (vpp == 1 and r.parallel_config.seq_split_num == 1)):
        problem = f"True with {stages} stages of {vpp} chunks, where it has no effect"
        expected = "False, or pipeline_stage and model.model_config.pp_interleave_num > 1"
        yield "parallel.pipeline_config.pipeline_interleave", problem, expected


def passes(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """The planner's programs run on CPU processes; on Ascend MindSpore's scheduler orders the passes."""
    name, key = r.telechat_moe.sharding.pipeline_schedule, f"{OWN}sharding.pipeline_schedule"
    if name is None:
        return
    if r.parallel_config.pipeline_stage == 1:
        problem = f"{name} with one stage, where it has no effect"
        yield key, problem, "remove it, or pipeline_stage > 1"
    elif compiled or r.context.device_target != "CPU":
        problem = f"{name} in a graph for Ascend, whose order is MindSpore's"
        expected = (
            "remove it, and parallel.pipeline_config.pipeline_scheduler; CPU processes take it"
        )
        yield key, problem, expected


def background_exchange(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """Rows travel in the background where several CPU processes exchange them, and other micro-batches have work."""
    sharding, p, key = r.telechat_moe.sharding, r.parallel_config, f"{OWN}sharding.overlap_exchange"
    if not sharding.overlap_exchange or not isinstance(r.model.model_config, ModelConfig):
        return
    hop, node = hop_between_nodes(r.model.model_config)
    routed = sharding.dispatcher == "alltoallv" or (sharding.dispatcher == "auto" and hop == "once")
    if compiled or r.context.device_target != "CPU":
        problem = "True in a graph for Ascend, whose exchanges MindSpore overlaps"
        yield key, problem, f"remove it, and {switches.KEY} with pp_1f1b_overlap"
    elif r.devices == 1 or p.expert_parallel == 1:
        problem = "True where no rows travel: every device has all experts"
        yield key, problem, "remove it, or expert_parallel > 1"
    elif hop == "gather" and node == _expert_devices(r):
        problem = f"True with nodes of {node} devices, where a gather takes all rows to their expert and none is left to exchange"
        yield key, problem, "remove it, or npu_nums_per_device of more experts"
    elif not routed:
        problem = f"True with {OWN}sharding.dispatcher {sharding.dispatcher}, which exchanges in collectives of MindSpore"
        yield key, problem, "remove it, or dispatcher alltoallv"
    elif p.pipeline_stage > 1 and sharding.pipeline_schedule is None:
        problem = "True with MindSpore's own order of passes, which pairs none"
        yield key, problem, f"remove it, or {OWN}sharding.pipeline_schedule 1f1b-overlap"
    elif p.pipeline_stage == 1 and r.runner_config.gradient_accumulation_steps == 1:
        problem = "True with one micro-batch a step, beside whose exchanges no other one computes"
        yield key, problem, "remove it, or runner_config.gradient_accumulation_steps > 1"


def sequence_pipeline(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """Parts of sequences need a pipeline whose scheduler knows them."""
    p, vpp = r.parallel_config, r.model.model_config.pp_interleave_num or 1
    name = getattr(r.parallel.pipeline_config, "pipeline_scheduler", "1f1b")
    key, parts = "parallel.pipeline_config.pipeline_scheduler", p.seq_split_num
    stages = p.pipeline_stage
    by_parts = name in ("seqpipe", "seqvpp")
    if by_parts and parts == 1:
        problem = f"{name} with seq_split_num 1, which sends whole sequences"
        yield key, problem, "another scheduler, or parallel_config.seq_split_num > 1"
    elif parts > 1 and (stages == 1 or not by_parts):
        problem = f"{parts} with {stages} stages and the scheduler {name}"
        expected = "1, or pipeline_stage > 1 and pipeline_scheduler seqpipe or seqvpp"
        yield "parallel_config.seq_split_num", problem, expected
    elif name == "seqvpp" and (stages < parts or vpp == 1):
        problem = f"seqvpp with {stages} stages of {vpp} chunks and {parts} parts"
        yield key, problem, "seqpipe, or several chunks and at least as many stages as parts"


def whole_sequences(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """What a whole sequence decides is not known to a part of it."""
    m, data = r.model.model_config, r.train_dataset.data_loader.config
    if r.parallel_config.seq_split_num == 1:
        return
    context, model = f"with seq_split_num {r.parallel_config.seq_split_num}", "model.model_config."
    if not m.calculate_per_token_loss:
        problem = f"False {context}: the mean over a sequence is no mean of its parts'"
        yield f"{model}calculate_per_token_loss", problem, "True: sums add up"
    if m.moe_aux_loss_coeff and m.moe_router_load_balancing_type != "none":
        problem = f"{m.moe_aux_loss_coeff} {context}: the balance loss is no sum over parts"
        yield f"{model}moe_aux_loss_coeff", problem, "0, or moe_router_load_balancing_type none"
    if m.moe_token_drop_policy:
        problem = f"{m.moe_token_drop_policy} {context}: the capacity would be that of a part"
        yield f"{model}moe_token_drop_policy", problem, "False"
    for key in ("create_attention_mask", "reset_position_ids"):
        if data is not None and getattr(data, key):
            problem = f"True {context}, whose keys are counted from the first token of the sequence"
            yield f"train_dataset.data_loader.config.{key}", problem, "False"
    if layers := r.recompute_config.recompute:
        problem = f"{layers} {context}: attention would keep a part's keys twice"
        expected = f"False, or modules in {OWN}sharding.recompute"
        yield "recompute_config.recompute", problem, expected
    if r.telechat_moe.sharding.pipeline_schedule is not None:
        problem = f"{r.telechat_moe.sharding.pipeline_schedule} {context}, of which the planner knows nothing"
        yield f"{OWN}sharding.pipeline_schedule", problem, "remove it"


def speed_up(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """The switches for overlap belong to MindSpore's graph for Ascend, of several devices."""
    if switches.path_of(r) is None:
        return
    alone, cpu = r.devices == 1, not compiled and r.context.device_target == "CPU"
    if alone or cpu:
        context = "without effect " + ("on one device" if alone else "on CPU processes")
        problem = f"switches of MindSpore's graph for several Ascend devices, {context}"
        yield switches.KEY, problem, "remove it"
        return
    yield from switches.problems(r)
    yield from switches.needs(r)


def spike_limits(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """The fixed threshold holds with `use_skip_data_by_global_norm`."""
    keys = ("global_norm_spike_threshold", "global_norm_spike_count_threshold")
    if not r.use_skip_data_by_global_norm:
        for key, value in _changed("monitor_config", r.monitor_config, keys):
            problem = f"{value} with use_skip_data_by_global_norm False, where it has no effect"
            yield key, problem, "remove it, or True there"


def drop_rate(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """The share of dropped tokens that we log is that of the model's capacity."""
    for index, callback in enumerate(r.callbacks):
        factor = getattr(callback, "capacity_factor", None)
        if factor is not None and r.model.model_config.moe_expert_capacity_factor is None:
            problem = f"{factor:g} without moe_expert_capacity_factor, where nothing is dropped"
            yield f"callbacks.{index}.capacity_factor", problem, "remove it"


def strategy_text(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """A word for the whole strategy says what `full_batch` says."""
    p = r.parallel
    word = "full_batch" if p.full_batch else "data_parallel"
    if isinstance(p.dataset_strategy, str) and p.dataset_strategy != word:
        problem = f"{p.dataset_strategy} with full_batch {p.full_batch}"
        yield "parallel.dataset_strategy", problem, f"{word}, a list, or remove it"


def clipping(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """A largest norm without clipping has no effect."""
    wrapper = r.runner_wrapper
    if not wrapper.use_clip_grad and wrapper.max_grad_norm != 1.0:
        problem = f"{wrapper.max_grad_norm:g} with use_clip_grad False, where it has no effect"
        yield "runner_wrapper.max_grad_norm", problem, "remove it, or use_clip_grad True"


def saving_parts(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """Without a CheckpointMonitor nothing is saved."""
    if r.checkpoints is None:
        for key, value in _changed(f"{OWN}saving", r.telechat_moe.saving):
            problem = f"{value} without CheckpointMonitor, where nothing is saved"
            yield key, problem, "remove it, or the callback"


def block_rows(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """Fused experts have no blocks, and one capacity for all tokens; Ascend's product takes any number of rows."""
    settings = r.telechat_moe
    chosen = {settings.operators.of("permute"), settings.operators.of("grouped_matmul")}
    if r.devices > 1 or compiled or chosen == {"plain"}:
        return
    expected = "remove it, or operators.permute and grouped_matmul plain"
    if settings.moe_block_rows is not None:
        problem = f"{settings.moe_block_rows} with experts that may be fused, which have no blocks"
        yield f"{OWN}moe_block_rows", problem, expected
    if settings.moe_capacity_tokens is not None and r.context.device_target == "CPU":
        problem = f"{settings.moe_capacity_tokens} with experts that may be fused, which give one capacity to all tokens"
        yield f"{OWN}moe_capacity_tokens", problem, expected


def softmax_type(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """Fused attention, ours and Ascend's, has its softmax in float32."""
    m, backends = r.model.model_config, r.telechat_moe.operators
    ascend = compiled or r.context.device_target != "CPU"
    plain = backends.of("attention") == "plain" or (r.devices > 1 and backends.attention != "fused")
    if m.softmax_compute_dtype not in ("float32", "fp32", None) and (ascend or not plain):
        problem = f"{m.softmax_compute_dtype} with fused attention, whose softmax is in float32"
        expected = "float32, or operators.attention plain"
        yield "model.model_config.softmax_compute_dtype", problem, expected


def residual_type(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """Our CPU kernels round to bfloat16 inside of products; between them everything is float32."""
    m, key = r.model.model_config, "fp32_residual_connection"
    low = m.compute_dtype in ("bfloat16", "bf16") and r.context.device_target == "CPU"
    if low and not compiled and r.given["model"]["model_config"].get(key) is False:
        problem = "False on CPU, where the residual stream is float32"
        yield f"model.model_config.{key}", problem, "True, or remove it"


def dropped_tokens(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """Without a capacity nothing is dropped."""
    m, tokens = r.model.model_config, r.telechat_moe.moe_capacity_tokens
    without = "without moe_expert_capacity_factor, where it has no effect"
    if m.moe_expert_capacity_factor is None:
        if m.moe_token_drop_policy:
            key, problem = "model.model_config.moe_token_drop_policy", m.moe_token_drop_policy
            yield key, f"{problem} {without}", "False, or a capacity factor"
        if tokens is not None:
            key = f"{OWN}moe_capacity_tokens"
            yield key, f"{tokens} {without}", "remove it, or a capacity factor"
    elif r.telechat_moe.moe_block_rows is not None and not compiled:
        problem = f"{r.telechat_moe.moe_block_rows} with moe_expert_capacity_factor, where an expert's rows form no blocks"
        yield f"{OWN}moe_block_rows", problem, "remove it"


def balance(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """Expert groups need a loss over micro-batches on several devices."""
    m, group = r.model.model_config, r.telechat_moe.moe.balance_group
    if not isinstance(m, ModelConfig):
        return
    key, kind = f"{OWN}moe.balance_group", m.moe_router_load_balancing_type
    if group == "dp":
        return
    if kind != "aux_loss" or not m.moe_aux_loss_coeff:
        loss = kind if m.moe_aux_loss_coeff else "moe_aux_loss_coeff 0"
        problem = f"{group} with {loss}, where it has no effect"
        yield key, problem, "remove it, or moe_router_load_balancing_type aux_loss"
    elif r.devices == 1:
        yield key, f"{group} on one device, where it has no effect", "remove it, or more devices"


def operators(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """The graphs of several processes are made of plain operators but for attention, those for Ascend of its own or plain ones."""
    ascend = compiled or r.context.device_target != "CPU"
    if r.devices == 1 and not ascend:
        return
    many = f"on {r.devices} processes, which run plain operators"
    for key, value in _changed(f"{OWN}operators", r.telechat_moe.operators):
        if not ascend and key.endswith(".attention") and value == "fused":
            parts = r.parallel_config.seq_split_num
            if parts > 1:
                problem = f"fused with seq_split_num {parts}, which hides keys otherwise"
                yield key, problem, "plain or auto"
        elif value in ("fused", "True"):
            problem = f"{value} {'in a graph for Ascend' if ascend else many}"
            yield key, problem, "remove it" if value == "True" else "plain or auto"


def host_operators(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """The host takes primitives of a graph for Ascend that is run kernel by kernel, if it has them itself."""
    key, m = f"{OWN}operators.host", r.model.model_config
    chosen = r.telechat_moe.operators.host
    if not chosen or not isinstance(m, ModelConfig):
        return
    chosen_text = ", ".join(chosen)
    if not compiled and r.context.device_target == "CPU":
        problem = f"{chosen_text} on CPU, where the host computes everything anyway"
        yield key, problem, "remove it, or context.device_target Ascend (dryrun compiles it here)"
        return
    if not m.moe_layer_names:
        yield key, f"{chosen_text} in a model without routed experts", "remove it"
    if len(set(chosen)) < len(chosen):
        yield key, f"{chosen_text}: a part twice", "each part once"
    if r.context.jit_config is not None and r.context.jit_config.jit_level == "O2":
        problem = f"{chosen_text} with context.jit_config.jit_level O2, which runs the whole graph on the device"
        yield key, problem, "remove it, or jit_level O0 or O1"
    if "sort" in chosen and dispatcher(r, "Ascend") == "alltoallv":
        problem = (
            "sort where MoeTokenPermute sorts and copies rows in one, which the host does not have"
        )
        instead = "telechat_moe.sharding.dispatcher alltoall"
        if r.devices == 1:
            instead = "telechat_moe.operators.permute and grouped_matmul plain"
        yield key, problem, f"no sort, or {instead}"
