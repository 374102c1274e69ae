"""The published standard for migrated models, as MindFormers' guide words it ("Large Model Migration Precision Standard").

- first loss: absolute error below 0.005, or relative error below 0.5 %;
- average over the run: absolute error below 0.01, or relative error below 1 %;
- monitored, never judged: the average relative error of the global norm is at most 10 %;
- observed for 5,000 steps by default, never fewer than 1,000: with fewer there is no verdict;
- if the benchmark itself fluctuates more than this, the standard is relaxed to its fluctuation;
- the error must fluctuate around 0.

Where the guide leaves a choice open, it is made here: errors are averaged without their sign; the first base run is the
benchmark; its fluctuation is the largest such error between two base runs, times :data:`SLACK` because two or three
runs show it only roughly. "Around 0" has no number in the guide: the share of positive errors is reported, and
:mod:`telechat_moe.tools.loss.verdict` tests it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from telechat_moe.numerics import Array

FIRST = (0.005, 0.005)
"""Absolute and relative error of the first loss."""
AVERAGE = (0.01, 0.01)
"""Average absolute and relative error."""
NORM = 0.10
"""Average relative error of the global norm."""
STEPS = 1000
"""The fewest steps for a verdict."""
SLACK = (3.0, 1.5)
"""The allowed multiple of the base runs' own error: of the first loss, of the average."""


@dataclass(frozen=True)
class StandardCheck:
    """One line of the standard: the value found, the value allowed (with relaxation), and whether it is met."""

    absolute: float
    relative: float
    absolute_limit: float
    relative_limit: float
    relaxed: bool
    ok: bool


@dataclass(frozen=True)
class Gate:
    """The standard's answer: ``verdict`` is pass, fail or not judged."""

    verdict: str
    steps: int
    first: StandardCheck
    average: StandardCheck
    norm: float | None
    norm_ok: bool | None
    positive: float


def gate(
    bases: Sequence[Array],
    target: Array,
    norms: Sequence[Array],
    target_norm: Array,
    every: int = 1,
    min_steps: int = STEPS,
) -> Gate:
    """Judge a run by the standard, from losses and norms of the gradient (NaN: unknown) at the compared steps.

    Args:
        every: Training steps from one value to the next.
    """
    pairs = [_errors(base, other) for base, other in combinations(bases, 2)]
    absolute, relative = _errors(bases[0], target)
    first = _check((absolute[0], relative[0]), FIRST, [(a[0], r[0]) for a, r in pairs], SLACK[0])
    means, base_means = (absolute.mean(), relative.mean()), [(a.mean(), r.mean()) for a, r in pairs]
    average = _check(means, AVERAGE, base_means, SLACK[1])
    judged = np.isfinite(norms[0]) & np.isfinite(target_norm) & (norms[0] > 0)
    norm = None
    if judged.any():
        norm = float(np.mean(np.abs(target_norm[judged] - norms[0][judged]) / norms[0][judged]))
    steps = len(target) * every
    verdict = "not judged" if steps < min_steps else "pass" if first.ok and average.ok else "fail"
    positive = float((target > bases[0]).mean() + (target == bases[0]).mean() / 2)
    met = None if norm is None else norm <= NORM
    return Gate(verdict, steps, first, average, norm, met, positive)


def _errors(base: Array, other: Array) -> tuple[Array, Array]:
    with np.errstate(invalid="ignore", divide="ignore"):
        absolute = np.abs(other - base)
        return absolute, np.where(absolute == 0, 0.0, absolute / np.abs(base))


def _check(
    errors: tuple[float, float],
    limits: tuple[float, float],
    fluctuation: Sequence[tuple[float, float]],
    slack: float,
) -> StandardCheck:
    worst = (max([limit, *(f[i] * slack for f in fluctuation)]) for i, limit in enumerate(limits))
    absolute, relative = map(float, worst)
    ok = bool(errors[0] < absolute or errors[1] < relative)
    relaxed = (absolute, relative) != limits
    return StandardCheck(float(errors[0]), float(errors[1]), absolute, relative, relaxed, ok)
