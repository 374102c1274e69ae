"""Predict days, device-hours and checkpoints of a run with failures (Young 1974, Daly 2006).

Failures are exponential: those of the whole run come every ``M = mtbf / devices`` seconds. A segment is `interval`
seconds of training and one checkpoint; a failure loses the segment and takes a restart, which may fail again.
"""

import math
from dataclasses import dataclass

from telechat_moe.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """What a run of so many steps takes."""

    steps: int
    training_s: float
    """Seconds of the steps alone."""
    interval_s: float
    """Seconds of training between checkpoints; infinity where nothing fails."""
    expected_s: float
    """Seconds until the end, with checkpoints, lost work and restarts."""
    failures: float
    checkpoints: float
    device_hours: float


def young(checkpoint_s: float, mtbf_s: float) -> float:
    """Return Young's seconds of training between checkpoints, ``sqrt(2 d M)``."""
    return math.sqrt(2 * checkpoint_s * mtbf_s)


def daly(checkpoint_s: float, mtbf_s: float) -> float:
    """Return Daly's seconds of training between checkpoints, of higher order in ``d / 2 M``."""
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    x = checkpoint_s / (2 * mtbf_s)
    return young(checkpoint_s, mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - checkpoint_s


def run_cost(
    steps: int,
    step_s: float,
    devices: int,
    *,
    mtbf_s: float = math.inf,
    checkpoint_s: float = 0.0,
    restart_s: float = 0.0,
    interval_s: float | None = None,
) -> RunCost:
    """Return what a run takes.

    Args:
        mtbf_s: Mean seconds between failures of one device; infinity: none fails.
        checkpoint_s: Seconds that training stands still for a checkpoint.
        restart_s: Seconds from a failure until training goes on.
        interval_s: Seconds of training between checkpoints; None: Daly's optimum.

    Raises:
        UsageError: The interval is 0, or failures come so often that the run does not end.
    """
    training = steps * step_s
    if math.isinf(mtbf_s):
        return RunCost(
            steps=steps,
            training_s=training,
            interval_s=math.inf,
            expected_s=training,
            failures=0.0,
            checkpoints=0.0,
            device_hours=training * devices / 3600,
        )
    mean = mtbf_s / devices
    interval = daly(checkpoint_s, mean) if interval_s is None else interval_s
    if interval <= 0:
        raise UsageError("a run with failures needs a checkpoint's seconds above 0, or an interval")
    interval = min(interval, training)
    exponent = (interval + checkpoint_s) / mean
    if exponent > 50 or restart_s > 50 * mean:
        raise UsageError(
            f"a failure every {mean:.0f} s: no segment of {interval + checkpoint_s:.0f} s ends; expected fewer "
            "devices, a larger --mtbf, or shorter checkpoints and restarts"
        )
    segments = training / interval
    expected = segments * mean * math.exp(restart_s / mean) * math.expm1(exponent)
    return RunCost(
        steps=steps,
        training_s=training,
        interval_s=interval,
        expected_s=expected,
        failures=expected / mean,
        checkpoints=segments,
        device_hours=expected * devices / 3600,
    )
