"""Rules about learning rate, callbacks and the run as a whole."""

import functools
import operator
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from telechat_moe.recipe.arithmetic import state_bytes
from telechat_moe.recipe.batch_schedule import BatchSchedule
from telechat_moe.recipe.schema import Broken, Recipe
from telechat_moe.recipe.schema.callbacks import ProfileMonitor, TopkBiasBalanceCallback
from telechat_moe.recipe.schema.model import ModelConfig
from telechat_moe.recipe.schema.optimizer import STABLE_DECAY, LrSchedule
from telechat_moe.recipe.schema.own import Saving
from telechat_moe.recipe.written import texts
from telechat_moe.units import size_text

MODEL = "model.model_config."
_LARGEST_STATE = 16 << 40  # bytes

_WARMUP = (
    *("type", "params", "learning_rate", "warmup_steps", "warmup_ratio", "warmup_lr_init"),
    "total_steps",
)
_LR_KEYS: dict[str, tuple[str, ...]] = {
    "ConstantWarmUpLR": _WARMUP,
    "LinearWithWarmUpLR": _WARMUP,
    "CosineWithWarmUpLR": (*_WARMUP, "num_cycles", "lr_end", "decay_steps", "decay_ratio"),
    "CosineWithRestartsAndWarmUpLR": (*_WARMUP, "num_cycles", "lr_end", "decay_steps"),
    "PolynomialWithWarmUpLR": (*_WARMUP, "lr_end", "power", "decay_steps"),
    **dict.fromkeys(STABLE_DECAY, (*_WARMUP, "lr_end", "decay_start_steps", "decay_start_ratio")),
    "ConstantWithCoolDownLR": (
        *(*_WARMUP, "keep_steps", "decay_steps", "decay_ratio", "num_cycles"),
        *("lr_end1", "final_steps", "lr_end2"),
    ),
    "CosineAnnealingLR": ("type", "params", "base_lr", "t_max", "eta_min"),
    "CosineAnnealingWarmRestarts": ("type", "params", "base_lr", "t_0", "t_mult", "eta_min"),
}


_BATCH, _MICRO = "runner_config.batch_size", "parallel_config.micro_batch_num"
_ACCUMULATION = "runner_config.gradient_accumulation_steps"
_COPIES: dict[str, dict[str, str]] = {
    "train_dataset": {"batch_size": _BATCH, "micro_batch_num": _MICRO},
    "model.model_config": {"batch_size": _BATCH},
    "TopkBiasBalanceCallback": {
        "balance_via_topk_bias": MODEL + "moe_router_enable_expert_bias",
        "topk_bias_update_rate": MODEL + "moe_router_bias_update_rate",
        "expert_num": MODEL + "n_routed_experts",
        "micro_batch_num": _MICRO,
        "gradient_accumulation_steps": _ACCUMULATION,
    },
    "MFLossMonitor": {
        "micro_batch_num": _MICRO,
        "gradient_accumulation_steps": _ACCUMULATION,
        "micro_batch_interleave_num": "micro_batch_interleave_num",
    },
    "MoEDropRateCallback": {
        "capacity_factor": MODEL + "moe_expert_capacity_factor",
        "expert_num": MODEL + "n_routed_experts",
        "num_layers": MODEL + "num_hidden_layers",
        "mtp_depth": MODEL + "num_nextn_predict_layers",
    },
}
"""Sections and callbacks: their keys that repeat another setting, and that setting."""
_ONE_BY_DEFAULT = ("TopkBiasBalanceCallback", "gradient_accumulation_steps")


def state(r: Recipe) -> Iterator[Broken]:
    """A device must hold its share of weights, gradients and moments; MindSpore says so only when memory is gone."""
    if not isinstance(r.model.model_config, ModelConfig):
        return
    share = state_bytes(r.model.model_config).total / r.devices
    if share > _LARGEST_STATE:
        problem = f"a model of {size_text(share * r.devices)} with gradients and moments, {size_text(share)} for each device"
        expected = f"at most {size_text(_LARGEST_STATE)}; no device has more"
        yield "model.model_config", problem, expected


def _schedules(r: Recipe) -> Iterator[tuple[str, LrSchedule]]:
    if r.lr_schedule is not None:
        yield "lr_schedule.", r.lr_schedule
    if r.grouped_lr_schedule is not None:
        yield "grouped_lr_schedule.default.", r.grouped_lr_schedule.default
        for index, group in enumerate(r.grouped_lr_schedule.grouped):
            yield f"grouped_lr_schedule.grouped.{index}.", group


def one_schedule(r: Recipe) -> Iterator[Broken]:
    """With both schedules MindFormers takes the groups and drops the other silently."""
    if r.lr_schedule is not None and r.grouped_lr_schedule is not None:
        yield "lr_schedule", "together with grouped_lr_schedule", "only one of the two"
    if r.lr_schedule is None and r.grouped_lr_schedule is None and r.trains:
        yield "lr_schedule", "is missing", "lr_schedule or grouped_lr_schedule"
    if r.optimizer.learning_rate is not None and r.lr_schedule is not None:
        problem = "together with lr_schedule"
        yield "optimizer.learning_rate", problem, "remove it: the schedule applies"


def schedule_keys(r: Recipe) -> Iterator[Broken]:
    """Every schedule of MindFormers swallows keys that it does not know."""
    for section_key, schedule in _schedules(r):
        readable = (*_LR_KEYS[schedule.type], "auto_register")
        for field in fields(schedule):
            if field.name not in readable and getattr(schedule, field.name) is not None:
                yield section_key + field.name, f"not read by {schedule.type}", "remove it"
        rate = "base_lr" if "base_lr" in readable else "learning_rate"
        if getattr(schedule, rate) is None:
            yield section_key + rate, "is missing", "the highest learning rate"


def schedule_steps(r: Recipe) -> Iterator[Broken]:
    """Warm-up and decay must fit into the schedule."""
    for section_key, s in _schedules(r):
        total = s.total_steps or -1
        if total == -1:
            total = r.train_steps or -1
        if s.total_steps == 0:
            yield section_key + "total_steps", "0", "-1 for all steps, or at least 1"
        if s.warmup_steps is not None and s.warmup_ratio is not None:
            yield section_key + "warmup_ratio", "together with warmup_steps", "only one of the two"
        warmup = s.warmup_steps or 0
        if s.warmup_ratio is not None and total > 0:
            warmup = int(s.warmup_ratio * total)
        if total > 0 and warmup > total:
            problem = f"{warmup} steps of warm-up, the schedule has {total}"
            key = "warmup_steps" if s.warmup_steps else "warmup_ratio"
            yield section_key + key, problem, f"at most {total}"
        if s.decay_steps is not None and total > 0 and warmup + s.decay_steps > total:
            problem = f"{s.decay_steps} after {warmup} of warm-up, the schedule has {total}"
            yield section_key + "decay_steps", problem, f"at most {total - warmup}"
        yield from _decay_start(section_key, s, warmup, total)


def _decay_start(section_key: str, s: LrSchedule, warmup: int, total: int) -> Iterator[Broken]:
    if s.type not in STABLE_DECAY:
        return
    start, ratio = s.decay_start_steps, s.decay_start_ratio
    if (start is None) == (ratio is None):
        problem = f"neither or both of decay_start_steps and decay_start_ratio with {s.type}"
        yield section_key + "decay_start_steps", problem, "exactly one of the two"
    elif start is not None and (start < warmup or (total > 0 and start > total)):
        expected = f"from {warmup} (end of warm-up) to {total} (end)"
        yield section_key + "decay_start_steps", str(start), expected


def decay_style(r: Recipe) -> Iterator[Broken]:
    """Only WSD has a decay of its own."""
    style, s = r.telechat_moe.lr_wsd_decay_style, r.lr_schedule
    if style is not None and (s is None or s.type not in STABLE_DECAY):
        problem = f"{style} with {s.type if s else 'grouped_lr_schedule'}"
        yield "telechat_moe.lr_wsd_decay_style", problem, "lr_schedule.type WarmUpStableDecayLR"


def batch_sizes(r: Recipe) -> Iterator[Broken]:
    """Megatron finds a batch that cannot be divided when training comes to it."""
    text, key = r.telechat_moe.step_batch_size_schedule, "telechat_moe.step_batch_size_schedule"
    length, rows = r.model.model_config.seq_length, r.micro_batch_samples
    if text is None or length is None:
        return
    for reason in _of_one_size(r):
        problem = f"{text!r} with {reason}, which knows steps of one size only"
        yield key, problem, "remove one of the two"
    try:
        batches = [batch for _, batch in BatchSchedule.parse(text, length).entries]
    except ValueError as error:
        yield key, repr(text), str(error)
        return
    stages, config = r.parallel_config.pipeline_stage, r.parallel.pipeline_config
    fewest = stages * (2 if config and config.pipeline_scheduler == "zero_bubble_v" else 1)
    for batch in batches:
        if batch % rows:
            several = rows > r.runner_config.batch_size
            unit = "runner_config.batch_size" + " x data_parallel" * several
            yield key, f"{batch} samples in {text!r}", f"multiples of {unit} ({rows})"
        elif batch < fewest * rows:
            parts = f"{batch // rows} micro-batches for {stages} stages"
            problem = f"{batch} samples in {text!r}, {parts}"
            yield key, problem, f"at least {fewest} micro-batches ({fewest * rows} samples)"
    if max(batches) != r.global_batch:
        steps = _MICRO if stages > 1 else "runner_config.gradient_accumulation_steps"
        largest, step = max(batches), r.global_batch
        problem = f"at most {largest} samples in {text!r}, a step of the recipe has {step}"
        yield key, problem, f"{step}, or {steps} {largest // rows}"
    if len(batches) == 1:
        yield key, f"{text!r}, one batch for all steps", "a second threshold, or remove it"


def _of_one_size(r: Recipe) -> list[str]:
    """Return what a recipe asks for that is decided for steps of one size."""
    keys = (
        *("telechat_moe.sharding.pipeline_schedule", "telechat_moe.balance_attention"),
        *("telechat_moe.moe.placement", "telechat_moe.sharding.overlap_exchange"),
        "swap_config.swap",
    )
    return [key for key in keys if operator.attrgetter(key)(r)]


def schedule_rates(r: Recipe) -> Iterator[Broken]:
    """The rate rises to `learning_rate` and falls from it."""
    for section_key, s in _schedules(r):
        top = s.learning_rate if s.learning_rate is not None else s.base_lr
        if top is None:
            continue
        for key in ("lr_end", "lr_end1", "lr_end2", "eta_min", "warmup_lr_init"):
            low = getattr(s, key)
            if low is not None and low > top:
                yield section_key + key, f"{low:g}", f"at most the learning rate ({top:g})"


def regular_expressions(r: Recipe) -> Iterator[Broken]:
    """Patterns for parameter names must compile."""
    key, excluded = "telechat_moe.weight_decay_exclude", r.telechat_moe.weight_decay_exclude
    patterns = [(f"{key}.{i}", text) for i, text in enumerate(excluded)]
    if r.grouped_lr_schedule is not None:
        for index, group in enumerate(r.grouped_lr_schedule.grouped):
            params_key = f"grouped_lr_schedule.grouped.{index}.params"
            patterns += [(f"{params_key}.{i}", text) for i, text in enumerate(group.params)]
    for index, rule in enumerate(r.model.model_config.param_init_std_rules or []):
        patterns.append((f"{MODEL}param_init_std_rules.{index}.target", rule.target))
    for key, text in patterns:
        try:
            re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            yield key, f"{text!r}: {error}", "a regular expression"


def callbacks(r: Recipe) -> Iterator[Broken]:
    """Two callbacks of a kind both act."""
    indices: dict[str, int] = {}
    for index, callback in enumerate(r.callbacks):
        if callback.type in indices:
            problem = f"{callback.type} a second time, first callbacks.{indices[callback.type]}"
            yield f"callbacks.{index}.type", problem, "each kind once"
        indices.setdefault(callback.type, index)


def bias_callback(r: Recipe) -> Iterator[Broken]:
    """Without the callback MindFormers never updates the expert bias."""
    m = r.model.model_config
    biased = isinstance(m, ModelConfig) and m.moe_router_enable_expert_bias and m.num_moe_layers
    if not biased or not r.trains:
        return
    if not any(isinstance(c, TopkBiasBalanceCallback) for c in r.callbacks):
        problem = "no TopkBiasBalanceCallback, but moe_router_enable_expert_bias is True"
        yield "callbacks", problem, "the callback: MindFormers updates the bias there"


def copies(r: Recipe) -> Iterator[Broken]:
    """Copies of settings must agree with them: callbacks, data and masks act on their own copy."""
    sections: list[tuple[str, Any]] = [
        ("train_dataset", getattr(r, "train_dataset", None)),
        ("model.model_config", r.model.model_config),
        *((f"callbacks.{i}", c) for i, c in enumerate(getattr(r, "callbacks", ()))),
    ]
    for section_key, section in sections:
        kind = getattr(section, "type", section_key)
        for key, source in _COPIES.get(kind, {}).items():
            written, meant = getattr(section, key, None), _value(r, source)
            if written is None and (kind, key) == _ONE_BY_DEFAULT:
                written = 1
            if written is not None and meant is not None and written != meant:
                yield f"{section_key}.{key}", str(written), f"{source} ({meant})"


def _value(r: Recipe, key: str) -> object:
    return functools.reduce(lambda section, name: getattr(section, name, None), key.split("."), r)


def profiling(r: Recipe) -> Iterator[Broken]:
    """Profiling ends after it begins."""
    if r.profile and r.profile_stop_step < r.profile_start_step:
        problem = f"{r.profile_stop_step}, before profile_start_step ({r.profile_start_step})"
        yield "profile_stop_step", problem, f"at least {r.profile_start_step}"
    for index, callback in enumerate(r.callbacks):
        if isinstance(callback, ProfileMonitor) and callback.stop_step < callback.start_step:
            problem = f"{callback.stop_step}, before start_step ({callback.start_step})"
            yield f"callbacks.{index}.stop_step", problem, f"at least {callback.start_step}"


def spikes(r: Recipe) -> Iterator[Broken]:
    """MindFormers overwrites the spike settings of `runner_wrapper` by those of the top level."""
    wrapper, guard = r.runner_wrapper, r.telechat_moe.loss_guard
    if wrapper.use_skip_data_by_global_norm is not None:
        expected = "use_skip_data_by_global_norm at the top level instead"
        yield "runner_wrapper.use_skip_data_by_global_norm", "overwritten", expected
    if wrapper.global_norm_spike_threshold is not None:
        expected = "monitor_config.global_norm_spike_threshold instead"
        yield "runner_wrapper.global_norm_spike_threshold", "overwritten", expected
    if guard is None:
        return
    if guard.min_steps > guard.window:
        problem = f"{guard.min_steps}, the window holds {guard.window}"
        yield "telechat_moe.loss_guard.min_steps", problem, f"at most {guard.window}"
    if guard.action == "rollback" and r.checkpoints is None:
        problem = "rollback, but no CheckpointMonitor saves anything to go back to"
        yield "telechat_moe.loss_guard.action", problem, "the callback, or skip"


def sections(r: Recipe) -> Iterator[Broken]:
    """Keys that MindFormers drops or needs in silence."""
    if r.moe_config is not None:
        problem = "a section that MindFormers drops with use_legacy False"
        yield "moe_config", problem, "the keys of model.model_config instead"
    if r.model.arch is not None:
        problem = "a section of MindFormers' old networks"
        yield "model.arch", problem, "model.model_config.architectures instead"
    if r.runner_config.sink_size == 0:
        yield "runner_config.sink_size", "0", "-1 for an epoch, or at least 1"
    if r.parallel.auto_pipeline:
        yield "parallel.auto_pipeline", "True", "False: MindFormers refuses it"


_NO_PATHS = ("telechat_moe.sample.prompts", "telechat_moe.conversations.message")


def home_folders(r: Recipe) -> Iterator[Broken]:
    """Nothing puts the folder of a user in the place of `~`: a folder of that name would be made."""
    for key, text in texts(r.given):
        if re.match(r"~[\w.-]*(/|$)", text) and not key.startswith(_NO_PATHS):
            yield key, f"{text}, and nothing puts a folder for ~", f"the whole path, or ./{text}"


def memory_of_saves(r: Recipe) -> Iterator[Broken]:
    """Parameters of a device are always copied into memory, in any trainer."""
    share, target = r.telechat_moe.saving.memory_share, r.context.device_target
    if share != Saving().memory_share and target != "CPU":
        problem = f"{share:g} on {target}, whose parameters are always copied into memory"
        yield "telechat_moe.saving.memory_share", problem, "remove it"


def converter_names(r: Recipe) -> Iterator[Broken]:
    """Keys that MindFormers' converter of the model type ignores, and then takes its default."""
    m = r.model.model_config
    for key, other, default in (
        ("qk_nope_head_dim", "qk_head_dim", 128),
        ("qk_rope_head_dim", "qk_pos_emb_head_dim", 64),
    ):
        width, copy = getattr(m, key), getattr(m, other)
        if copy is not None and width is not None and copy != width:
            yield MODEL + other, f"{copy}, but {key} is {width}", f"{width}"
        elif m.model_type == "telechat3_moe" and copy is None and width not in (None, default):
            problem = f"{width} without {other}; MindFormers ignores this key for telechat3_moe"
            expected = f"{other} {width} beside it (or MindFormers trains {default})"
            yield MODEL + key, problem, expected
    dtype, written = m.router_dense_type, r.given["model"]["model_config"]
    ignored = m.model_type == "deepseek_v3" and "moe_router_dtype" not in written
    if ignored and dtype not in ("float32", "fp32", None):
        problem = f"{dtype}; MindFormers ignores this key for deepseek_v3"
        yield MODEL + "router_dense_type", problem, "the key moe_router_dtype instead"
