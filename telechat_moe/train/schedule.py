"""Learning-rate schedules: pure functions of the step, equal to the MindFormers classes that they name.

Where the batch of a run has changed, steps are those of the batch before, in parts of them too
(:mod:`telechat_moe.train.consumed`).
"""

import math
from collections.abc import Callable

from telechat_moe.errors import BadInputError
from telechat_moe.recipe import Recipe
from telechat_moe.recipe.batch_schedule import BatchSchedule
from telechat_moe.recipe.schema.optimizer import STABLE_DECAY, LrSchedule

RateSchedule = Callable[[float], float]


def constant(peak: float, warmup_steps: int, start: float = 0.0) -> RateSchedule:
    """Rise linearly from ``start`` to ``peak``, then keep that rate (``ConstantWarmUpLR``).

    Step 0 has the rate ``start``; step ``warmup_steps`` is the first at ``peak``.
    """

    def at(step: float) -> float:
        if step < warmup_steps:
            return start + (peak - start) * step / warmup_steps
        return peak

    return at


def cosine(
    peak: float,
    end: float,
    warmup_steps: int,
    total_steps: int,
    start: float = 0.0,
    decay_steps: int | None = None,
    cycles: float = 0.5,
) -> RateSchedule:
    """Warm up, then follow a cosine from ``peak`` to ``end`` (``CosineWithWarmUpLR``).

    The cosine is stretched over ``total_steps - warmup_steps``; from ``decay_steps`` on (default
    ``total_steps``) the rate is ``end``.

    Source: Loshchilov and Hutter 2017, equation 5.
    """
    rise = constant(peak, warmup_steps, start)
    last = total_steps if decay_steps is None else decay_steps

    def at(step: float) -> float:
        if step >= max(1, last):
            return end
        if step < warmup_steps:
            return rise(step)
        share = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        return end + (peak - end) * max(0.0, 0.5 * (1 + math.cos(2 * math.pi * cycles * share)))

    return at


DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda t: 1 - t,
    "cosine": lambda t: 0.5 * (1 + math.cos(math.pi * t)),
    "exponential": lambda t: 2 * 0.5**t - 1,
    "minus_sqrt": lambda t: 1 - math.sqrt(t),
}
"""What is left of the way from the peak to the end after the share ``t`` of the decay, by Megatron's names."""


def warmup_stable_decay(
    peak: float,
    end: float,
    warmup_steps: int,
    decay_start: int,
    total_steps: int,
    start: float = 0.0,
    style: str = "linear",
) -> RateSchedule:
    """Warm up, stay at ``peak`` until ``decay_start``, fall to ``end`` at ``total_steps``.

    MindFormers' ``WarmUpStableDecayLR`` (WSD) is linear and continues to fall afterwards; here the rate stays at ``end``.

    Args:
        style: One of :data:`DECAYS`.

    Source: Hu et al. 2024, "MiniCPM", section 4.2; Megatron-LM, ``lr_wsd_decay_style``.
    """
    rise, left = constant(peak, warmup_steps, start), DECAYS[style]

    def at(step: float) -> float:
        if step < decay_start:
            return rise(step)
        share = (step - decay_start) / max(1, total_steps - decay_start)
        return peak + (end - peak) * (1 - left(min(1.0, share)))

    return at


def from_recipe(recipe: Recipe, batches: BatchSchedule | None = None) -> RateSchedule:
    """Return the schedule of ``lr_schedule``.

    Args:
        batches: In whose steps it counts; None: the recipe's.

    Raises:
        BadInputError: The recipe has another type, or ``grouped_lr_schedule``.
    """
    section = recipe.lr_schedule
    if section is None or section.learning_rate is None:
        raise BadInputError(
            f"{recipe.source}: `telechat-moe train` needs lr_schedule with a learning_rate "
            "(grouped_lr_schedule is read by MindFormers only)"
        )
    rate = of_section(section, total_steps(recipe, batches), recipe.telechat_moe.lr_wsd_decay_style)
    if rate is None:
        raise BadInputError(
            f"{recipe.source}: lr_schedule.type {section.type!r} is read by MindFormers only; "
            "`telechat-moe train` has ConstantWarmUpLR, CosineWithWarmUpLR and WarmUpStableDecayLR"
        )
    return rate


def total_steps(recipe: Recipe, batches: BatchSchedule | None = None) -> int:
    """Return the steps of the whole run, counted in those of some batches."""
    return (batches or recipe.batches).total(recipe.epoch_samples, recipe.runner_config.epochs)


def of_section(section: LrSchedule, train_steps: int, style: str | None) -> RateSchedule | None:
    """Return the schedule of a section; None: its type is MindFormers' only.

    Args:
        train_steps: Steps of the whole run.
        style: `telechat_moe.lr_wsd_decay_style`.
    """
    total = train_steps
    if section.total_steps is not None and section.total_steps > 0:
        total = section.total_steps

    def steps(count: int | None, ratio: float | None, default: int) -> int:
        if ratio is not None:
            return int(total * ratio)
        return default if count is None or count < 0 else count

    peak, end = section.learning_rate or 0.0, section.lr_end or 0.0
    start = section.warmup_lr_init or 0.0
    warmup = steps(section.warmup_steps, section.warmup_ratio, 0)
    if section.type == "ConstantWarmUpLR":
        return constant(peak, warmup, start)
    if section.type == "CosineWithWarmUpLR":
        last = steps(section.decay_steps, section.decay_ratio, total)
        return cosine(peak, end, warmup, total, start, last, section.num_cycles or 0.5)
    if section.type in STABLE_DECAY:
        decay_start = steps(section.decay_start_steps, section.decay_start_ratio, total)
        return warmup_stable_decay(peak, end, warmup, decay_start, total, start, style or "linear")
    return None
