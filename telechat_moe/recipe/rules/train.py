"""Rules about learning rate, callbacks and the run as a whole."""

import re
from collections.abc import Iterator
from dataclasses import fields

from telechat_moe.recipe.schema import Recipe
from telechat_moe.recipe.schema.callbacks import (
    MFLossMonitor,
    MoEDropRateCallback,
    ProfileMonitor,
    TopkBiasBalanceCallback,
)
from telechat_moe.recipe.schema.model import ModelConfig
from telechat_moe.recipe.schema.optimizer import LrSchedule

Broken = tuple[str, str, str]
TRAINING = ("train", "finetune")

_WARMUP = ("type", "params", "learning_rate", "warmup_steps", "warmup_ratio", "warmup_lr_init")
_LR_KEYS: dict[str, tuple[str, ...]] = {
    "ConstantWarmUpLR": (*_WARMUP, "total_steps"),
    "LinearWithWarmUpLR": (*_WARMUP, "total_steps"),
    "CosineWithWarmUpLR": (
        *(*_WARMUP, "total_steps", "num_cycles", "lr_end", "decay_steps", "decay_ratio"),
    ),
    "CosineWithRestartsAndWarmUpLR": (
        *(*_WARMUP, "total_steps", "num_cycles", "lr_end", "decay_steps"),
    ),
    "PolynomialWithWarmUpLR": (*_WARMUP, "total_steps", "lr_end", "power", "decay_steps"),
    "WarmUpStableDecayLR": (
        *(*_WARMUP, "total_steps", "lr_end", "decay_start_steps", "decay_start_ratio"),
    ),
    "ConstantWithCoolDownLR": (
        *(*_WARMUP, "total_steps", "keep_steps", "decay_steps", "decay_ratio", "num_cycles"),
        *("lr_end1", "final_steps", "lr_end2"),
    ),
    "CosineAnnealingLR": ("type", "params", "base_lr", "t_max", "eta_min"),
    "CosineAnnealingWarmRestarts": ("type", "params", "base_lr", "t_0", "t_mult", "eta_min"),
}


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
        yield "lr_schedule", "beside grouped_lr_schedule", "only one of the two"
    if r.lr_schedule is None and r.grouped_lr_schedule is None and r.run_mode in TRAINING:
        yield "lr_schedule", "is missing", "lr_schedule or grouped_lr_schedule"
    if r.optimizer.learning_rate is not None and r.lr_schedule is not None:
        yield "optimizer.learning_rate", "beside lr_schedule", "remove it: the schedule holds"


def schedule_keys(r: Recipe) -> Iterator[Broken]:
    """Every schedule of MindFormers swallows keys that it does not know."""
    for at, schedule in _schedules(r):
        known = _LR_KEYS[schedule.type]
        for field in fields(schedule):
            if field.name not in known and getattr(schedule, field.name) is not None:
                yield at + field.name, f"not read by {schedule.type}", "remove it"
        rate = "base_lr" if "base_lr" in known else "learning_rate"
        if getattr(schedule, rate) is None:
            yield at + rate, "is missing", "the highest learning rate"


def schedule_steps(r: Recipe) -> Iterator[Broken]:
    """Warm-up and decay must fit into the schedule."""
    for at, s in _schedules(r):
        total = s.total_steps or -1
        if total == -1:
            total = r.train_steps or -1
        if s.total_steps == 0:
            yield at + "total_steps", "0", "-1 for all steps, or at least 1"
        if s.warmup_steps is not None and s.warmup_ratio is not None:
            yield at + "warmup_ratio", "beside warmup_steps", "only one of the two"
        warmup = s.warmup_steps or 0
        if s.warmup_ratio is not None and total > 0:
            warmup = int(s.warmup_ratio * total)
        if total > 0 and warmup > total:
            found = f"{warmup} steps of warm-up, the schedule has {total}"
            yield (
                at + ("warmup_steps" if s.warmup_steps else "warmup_ratio"),
                found,
                f"at most {total}",
            )
        if s.decay_steps is not None and total > 0 and warmup + s.decay_steps > total:
            found = f"{s.decay_steps} after {warmup} of warm-up, the schedule has {total}"
            yield at + "decay_steps", found, f"at most {total - warmup}"
        yield from _decay_start(at, s, warmup, total)


def _decay_start(at: str, s: LrSchedule, warmup: int, total: int) -> Iterator[Broken]:
    if s.type != "WarmUpStableDecayLR":
        return
    start, ratio = s.decay_start_steps, s.decay_start_ratio
    if (start is None) == (ratio is None):
        found = "neither or both of decay_start_steps and decay_start_ratio"
        yield at + "decay_start_steps", found, "exactly one of the two"
    elif start is not None and (start < warmup or (total > 0 and start > total)):
        expected = f"from {warmup} (end of warm-up) to {total} (end)"
        yield at + "decay_start_steps", str(start), expected


def schedule_rates(r: Recipe) -> Iterator[Broken]:
    """The rate rises to `learning_rate` and falls from it."""
    for at, s in _schedules(r):
        top = s.learning_rate if s.learning_rate is not None else s.base_lr
        if top is None:
            continue
        for key in ("lr_end", "lr_end1", "lr_end2", "eta_min", "warmup_lr_init"):
            low = getattr(s, key)
            if low is not None and low > top:
                yield at + key, f"{low:g}", f"at most the learning rate ({top:g})"


def regular_expressions(r: Recipe) -> Iterator[Broken]:
    """Patterns for parameter names must compile."""
    patterns = [
        (f"telechat_moe.weight_decay_exclude.{i}", text)
        for i, text in enumerate(r.telechat_moe.weight_decay_exclude)
    ]
    if r.grouped_lr_schedule is not None:
        for index, group in enumerate(r.grouped_lr_schedule.grouped):
            at = f"grouped_lr_schedule.grouped.{index}.params"
            patterns += [(f"{at}.{i}", text) for i, text in enumerate(group.params)]
    for index, rule in enumerate(r.model.model_config.param_init_std_rules or []):
        patterns.append((f"model.model_config.param_init_std_rules.{index}.target", rule.target))
    for key, text in patterns:
        try:
            re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            yield key, f"{text!r}: {error}", "a regular expression"


def callbacks(r: Recipe) -> Iterator[Broken]:
    """Two callbacks of a kind both act."""
    seen: dict[str, int] = {}
    for index, callback in enumerate(r.callbacks):
        if callback.type in seen:
            found = f"{callback.type} a second time, first callbacks.{seen[callback.type]}"
            yield f"callbacks.{index}.type", found, "each kind once"
        seen.setdefault(callback.type, index)


def bias_callback(r: Recipe) -> Iterator[Broken]:
    """Without the callback MindFormers never updates the expert bias."""
    m = r.model.model_config
    biased = isinstance(m, ModelConfig) and m.moe_router_enable_expert_bias and m.num_moe_layers
    if not biased or r.run_mode not in TRAINING:
        return
    if not any(isinstance(c, TopkBiasBalanceCallback) for c in r.callbacks):
        found = "no TopkBiasBalanceCallback, but moe_router_enable_expert_bias is True"
        yield "callbacks", found, "the callback: MindFormers updates the bias there"


def callback_copies(r: Recipe) -> Iterator[Broken]:
    """Callbacks repeat settings of other sections, and act on their own copy."""
    m, p = r.model.model_config, r.parallel_config
    steps = r.runner_config.gradient_accumulation_steps
    for index, c in enumerate(r.callbacks):
        copies: dict[str, tuple[object, object]] = {}
        if isinstance(c, TopkBiasBalanceCallback):
            copies = {
                "balance_via_topk_bias": (c.balance_via_topk_bias, m.moe_router_enable_expert_bias),
                "topk_bias_update_rate": (c.topk_bias_update_rate, m.moe_router_bias_update_rate),
                "expert_num": (c.expert_num, m.n_routed_experts),
                "micro_batch_num": (c.micro_batch_num, p.micro_batch_num),
                "gradient_accumulation_steps": (c.gradient_accumulation_steps or 1, steps),
            }
        elif isinstance(c, MFLossMonitor):
            interleave = c.micro_batch_interleave_num
            copies = {
                "micro_batch_num": (c.micro_batch_num, p.micro_batch_num),
                "gradient_accumulation_steps": (c.gradient_accumulation_steps, steps),
                "micro_batch_interleave_num": (interleave, r.micro_batch_interleave_num),
            }
        elif isinstance(c, MoEDropRateCallback):
            copies = {
                "capacity_factor": (c.capacity_factor, m.moe_expert_capacity_factor),
                "expert_num": (c.expert_num, m.n_routed_experts),
                "num_layers": (c.num_layers, m.num_hidden_layers),
                "mtp_depth": (c.mtp_depth, m.num_nextn_predict_layers),
            }
        for key, (written, meant) in copies.items():
            if written is not None and meant is not None and written != meant:
                expected = f"{meant}, as the rest of the recipe says"
                yield f"callbacks.{index}.{key}", str(written), expected


def profiling(r: Recipe) -> Iterator[Broken]:
    """Profiling ends after it begins."""
    if r.profile and r.profile_stop_step < r.profile_start_step:
        found = f"{r.profile_stop_step}, before profile_start_step ({r.profile_start_step})"
        yield "profile_stop_step", found, f"at least {r.profile_start_step}"
    for index, callback in enumerate(r.callbacks):
        if isinstance(callback, ProfileMonitor) and callback.stop_step < callback.start_step:
            found = f"{callback.stop_step}, before start_step ({callback.start_step})"
            yield f"callbacks.{index}.stop_step", found, f"at least {callback.start_step}"


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
        found = f"{guard.min_steps}, the window holds {guard.window}"
        yield "telechat_moe.loss_guard.min_steps", found, f"at most {guard.window}"
    if guard.action == "rollback" and r.checkpoints is None:
        found = "rollback, but no CheckpointMonitor saves anything to go back to"
        yield "telechat_moe.loss_guard.action", found, "the callback, or skip"


def sections(r: Recipe) -> Iterator[Broken]:
    """Keys that MindFormers drops or needs in silence."""
    if r.moe_config is not None:
        found = "a section that MindFormers drops with use_legacy False"
        yield "moe_config", found, "the keys of model.model_config instead"
    if r.model.arch is not None:
        found = "a section of MindFormers' old networks"
        yield "model.arch", found, "model.model_config.architectures instead"
    if r.runner_config.sink_size == 0:
        yield "runner_config.sink_size", "0", "-1 for an epoch, or at least 1"
    if r.parallel.auto_pipeline:
        yield "parallel.auto_pipeline", "True", "False: MindFormers refuses it"


RULES = (
    one_schedule,
    schedule_keys,
    schedule_steps,
    schedule_rates,
    regular_expressions,
    callbacks,
    bias_callback,
    callback_copies,
    profiling,
    spikes,
    sections,
)
DOCUMENTED = RULES
