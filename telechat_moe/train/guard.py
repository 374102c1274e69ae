"""The loss-spike guard: which step counts as a spike, what is skipped, how a run goes back.

Before a step the guard says how high loss and gradient norm may be; the graph compares them and leaves the weights as
they are unless both are below (``step_norm_limit`` and ``step_loss_limit`` in :mod:`telechat_moe.train.step`). So the
decision is made before the update, and alike on all ranks, since they see the same sums.

Source: median and median absolute deviation of a window, as in OLMo's ``SkipStepOptimizer`` (which takes mean and
standard deviation); going back and leaving out the batches, PaLM (Chowdhery et al. 2022), section 5.1. The fixed
threshold is MindFormers' ``use_skip_data_by_global_norm``.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from telechat_moe.recipe import Recipe
from telechat_moe.recipe.schema.callbacks import MonitorConfig
from telechat_moe.recipe.schema.own import LossGuard

MAD_OF_SIGMA = 1.4826  # the standard deviation of normal values is so many times their median absolute deviation


class Limits(NamedTuple):
    """What loss and gradient norm must be below for a step to count; infinite: anything finite counts."""

    norm: float = math.inf
    loss: float = math.inf


@dataclass(frozen=True)
class SkippedStep:
    """A step whose update was not applied.

    Attributes:
        reason: ``gradient norm``, ``loss`` or ``not finite``.
        limit: What it had to be below; None if it is not finite.
        median: Median of the window; None if a fixed threshold holds, or the window is empty.
        window: Steps in the window.
    """

    step: int
    reason: str
    loss: float
    norm: float
    limit: float | None
    median: float | None
    window: int

    def describe(self) -> str:
        """Return what was wrong, for the user: the value, its limit, and the median that gave it."""
        if self.limit is None:
            return f"loss {self.loss:.4g}, gradient norm {self.norm:.4g}: not finite"
        value = self.norm if self.reason == "gradient norm" else self.loss
        of = f", median of {self.window} steps {self.median:.4g}" if self.median is not None else ""
        return f"{self.reason} {value:.4g} is not below {self.limit:.4g}{of}"

    def numbers(self) -> dict[str, Any]:
        """Return everything but the step, as JSON values; what is not finite is None."""
        numbers = {key: value for key, value in asdict(self).items() if key != "step"}
        for key in ("loss", "norm"):
            numbers[key] = numbers[key] if math.isfinite(numbers[key]) else None
        return numbers


class Guard:
    """Judge each step by the window of those that were applied before it, and by a norm that none may reach.

    Without ``rules``, the section `telechat_moe.loss_guard`, only ``fixed_norm`` counts.
    """

    def __init__(self, rules: LossGuard | None, fixed_norm: float = math.inf) -> None:
        self.rules, self.fixed_norm = rules, fixed_norm
        length = rules.window if rules is not None else 1
        self.losses: deque[float] = deque(maxlen=length)
        self.norms: deque[float] = deque(maxlen=length)

    @property
    def rolls_back(self) -> bool:
        """Whether a spike sends the run back to a checkpoint."""
        return self.rules is not None and self.rules.action == "rollback"

    def limits(self) -> Limits:
        """Return the limits of the next step, rounded to fp32 as the graph compares them."""
        rules = self.rules
        if rules is None or len(self.losses) < rules.min_steps:
            return Limits(_fp32(self.fixed_norm))
        norm = _limit(self.norms, rules.norm_factor, rules.sigma)
        loss = _limit(self.losses, rules.loss_factor, rules.sigma)
        return Limits(_fp32(min(norm, self.fixed_norm)), _fp32(loss))

    def limits_ahead(self) -> Limits:
        """Return limits of the step after the next one, before the next one is known: the true ones are not lower, if it is applied."""
        rules, size = self.rules, len(self.losses)
        if rules is None or min(size + 1, self.losses.maxlen or 1) < rules.min_steps:
            return Limits(_fp32(self.fixed_norm))
        norm = _lowest_limit(self.norms, rules.norm_factor, rules.sigma)
        loss = _lowest_limit(self.losses, rules.loss_factor, rules.sigma)
        return Limits(_fp32(min(norm, self.fixed_norm)), _fp32(loss))

    def judge(self, step: int, loss: float, norm: float, applied: bool) -> SkippedStep | None:
        """Take note of a step that was done; return what was wrong if it was not applied."""
        if applied:
            self.losses.append(loss)
            self.norms.append(norm)
            return None
        limits = self.limits()
        size = len(self.losses)
        finite = math.isfinite(loss + norm) and (norm >= limits.norm or loss >= limits.loss)
        if not finite:  # or its sums overflow in fp32
            return SkippedStep(step, "not finite", loss, norm, None, None, size)
        if norm >= limits.norm:
            fixed = limits.norm == _fp32(self.fixed_norm)
            median = None if fixed else statistics.median(self.norms)
            return SkippedStep(step, "gradient norm", loss, norm, limits.norm, median, size)
        median = statistics.median(self.losses)
        return SkippedStep(step, "loss", loss, norm, limits.loss, median, size)

    def state(self) -> dict[str, Any]:
        """Return losses and gradient norms of the window, as JSON values."""
        return {"losses": list(self.losses), "norms": list(self.norms)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue with the window of a checkpoint; a shorter window keeps the newest."""
        for values, saved in ((self.losses, state["losses"]), (self.norms, state["norms"])):
            values.clear()
            values.extend(float(x) for x in saved)


def _limit(values: deque[float], factor: float | None, sigma: float | None) -> float:
    """Return the lowest of the limits that are set; a median that is not above 0 has no multiples."""
    median, limits = statistics.median(values), [math.inf]
    if factor is not None and median > 0:
        limits.append(factor * median)
    if sigma is not None:
        spread = statistics.median(abs(x - median) for x in values)
        if spread > 0:
            limits.append(median + sigma * MAD_OF_SIGMA * spread)
    return min(limits)


def _lowest_limit(values: deque[float], factor: float | None, sigma: float | None) -> float:
    """Return what :func:`_limit` gives at least once any value has come into the window.

    Both medians rise with every value, so each has its bounds where that value is infinite.
    """
    staying = list(values)[len(values) == values.maxlen :]
    low, high = (statistics.median([*staying, x]) for x in (-math.inf, math.inf))
    limits = [math.inf]
    if factor is not None and high > 0:
        limits.append(factor * max(low, 0.0))
    if sigma is not None:
        spread = statistics.median([0.0, *(max(0.0, low - x, x - high) for x in staying)])
        limits.append(low + sigma * MAD_OF_SIGMA * spread)
    return min(limits)


def _fp32(x: float) -> float:
    return float(np.float32(x))


def of_recipe(recipe: Recipe) -> Guard:
    """Return the guard of a recipe: `telechat_moe.loss_guard`, and MindFormers' fixed threshold."""
    fixed, monitor = math.inf, recipe.monitor_config or MonitorConfig()
    if recipe.use_skip_data_by_global_norm:
        fixed = monitor.global_norm_spike_threshold
    return Guard(recipe.telechat_moe.loss_guard, fixed)


def max_in_a_row(recipe: Recipe) -> tuple[int, str]:
    """Return how many steps in a row may be skipped before training stops, and which key says so."""
    limit, monitor = recipe.telechat_moe.max_skipped_steps, recipe.monitor_config or MonitorConfig()
    if recipe.use_skip_data_by_global_norm:
        spikes = monitor.global_norm_spike_count_threshold - 1  # MindFormers stops at this one
        if spikes < limit:
            return spikes, "monitor_config.global_norm_spike_count_threshold - 1"
    return limit, "telechat_moe.max_skipped_steps"
