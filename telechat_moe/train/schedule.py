"""Learning-rate schedules: pure functions of the step."""

import math
from collections.abc import Callable

Schedule = Callable[[int], float]


def warm_up(step: int, peak: float, warmup_steps: int) -> float:
    """Return the linear ramp ``peak * (step + 1) / warmup_steps``, for ``step < warmup_steps``."""
    return peak * (step + 1) / warmup_steps


def constant(peak: float, warmup_steps: int) -> Schedule:
    """Ramp up, then stay at ``peak``."""
    return lambda step: warm_up(step, peak, warmup_steps) if step < warmup_steps else peak


def cosine(peak: float, end: float, warmup_steps: int, total_steps: int) -> Schedule:
    """Ramp up, then fall from ``peak`` to ``end`` along half a cosine; stay there afterwards.

    Source: Loshchilov and Hutter 2017, equation 5.
    """

    def at(step: int) -> float:
        if step < warmup_steps:
            return warm_up(step, peak, warmup_steps)
        done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return end + 0.5 * (peak - end) * (1 + math.cos(math.pi * done))

    return at


def warmup_stable_decay(
    peak: float, end: float, warmup_steps: int, decay_start: int, total_steps: int
) -> Schedule:
    """Ramp up, stay at ``peak`` until ``decay_start``, then fall linearly to ``end`` (WSD).

    Source: Hu et al. 2024, "MiniCPM", section 4.2.
    """

    def at(step: int) -> float:
        if step < warmup_steps:
            return warm_up(step, peak, warmup_steps)
        done = (step - decay_start) / max(1, total_steps - decay_start)
        return peak + (end - peak) * min(1.0, max(0.0, done))

    return at
