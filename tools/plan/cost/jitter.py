"""Sample what a step loses when times vary from operation to operation and from device to device.

Devices that exchange data inside an operation (tensor, context and expert parallelism) end it together, so it takes as
long as the slowest of them; a pipeline waits for its stages in its order; data parallelism waits for the slowest of the
pipelines. Each of the three waits is sampled, operation by operation.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from telechat_moe.errors import UsageError
from telechat_moe.tools.plan.cost.simulate_step import Step
from telechat_moe.tools.plan.schedules.program import Program, Times
from telechat_moe.tools.plan.schedules.simulate import durations, makes, needs, simulate

Array = NDArray[np.float64]

PIPELINES = 1024
"""Pipelines that are sampled; steps are drawn from them."""

DRAWS = 2_000_000
"""Pipelines that are drawn for all steps together; at least 500 steps."""

BLOCK = 256
"""Pipelines that are computed at once, which limits memory."""

GRID = np.linspace(-6, 7, 105)
"""Points of the grid, in standard deviations from the slowest device's mean."""


@dataclass(frozen=True)
class Varied:
    """A step under varying times, in seconds."""

    calm_s: float
    """The step without variation."""
    group_s: float
    """Added by waiting inside operations."""
    pipeline_s: float
    """Added by waiting between stages."""
    copies_s: float
    """Added by waiting between pipelines."""
    low_s: float
    """One step of twenty is faster."""
    high_s: float
    """One step of twenty is slower."""
    group: int
    """Devices that end an operation together."""
    copies: int
    """Pipelines that end a step together."""

    @property
    def step_s(self) -> float:
        """Mean step."""
        return self.calm_s + self.group_s + self.pipeline_s + self.copies_s

    def told(self) -> str:
        """Return what varying times cost, in words."""
        parts = (
            (f"inside operations, {self.group} devices", self.group_s),
            ("between stages", self.pipeline_s),
            (f"between pipelines, {self.copies}", self.copies_s),
        )
        waits = "; ".join(f"{name}: {seconds / self.calm_s:+.2%}" for name, seconds in parts)
        return (
            f"with varying times: mean step {self.step_s:.4f} s ({self.step_s / self.calm_s - 1:+.2%}), nine of ten from "
            f"{self.low_s:.4f} to {self.high_s:.4f} s; waiting {waits}"
        )


def slowest(rng: np.random.Generator, count: int, shape: tuple[int, ...]) -> Array:
    """Return the largest of `count` standard normal numbers, sampled by its distribution, Phi(z)**count."""
    from scipy.special import ndtri  # here, so that the planner starts without scipy

    return ndtri(rng.random(shape) ** (1.0 / count))


def factors(
    rng: np.random.Generator, jitter: float, spread: float, count: int, shape: tuple[int, int]
) -> Array:
    """Return the time of the slowest of `count` devices over that of the mean device, [operations, samples].

    Both deviations are log-normal with mean 1, so times stay positive. A device's own speed is the same in all
    operations of a sample. Given the speeds d_i, the largest of d_i + z_i has the distribution
    prod_i Phi((y - d_i) / sigma), which is inverted on a grid.
    """
    deep, wide = np.sqrt(np.log1p(jitter**2)), np.sqrt(np.log1p(spread**2))
    if not spread:
        return np.exp(deep * slowest(rng, count, shape) - deep**2 / 2) if jitter else np.ones(shape)
    from scipy.special import log_ndtr

    speeds = rng.normal(-(wide**2) / 2, wide, (count, shape[1]))
    most = speeds.max(0)
    if not jitter:
        return np.broadcast_to(np.exp(most), shape)
    found = np.empty(shape)
    for sample, top in enumerate(most):
        y = top + deep * GRID
        below = np.exp(log_ndtr((y - speeds[:, sample, None]) / deep).sum(0))
        found[:, sample] = np.interp(rng.random(shape[0]), below, y)
    return np.exp(found - deep**2 / 2)


def vary(step: Step, jitter: float, spread: float, seed: int = 0) -> Varied:
    """Sample a step.

    `jitter` is the standard deviation of an operation's time on a device, from one to the next, over its mean; `spread`
    that of a device's speed, which stays the same through the step.

    Raises:
        UsageError: A deviation below 0 or above 1.
    """
    for name, value in (("--jitter", jitter), ("--spread", spread)):
        if not 0 <= value <= 1:
            raise UsageError(f"{name} {value:g}: expected a share from 0 to 1, such as 0.02")
    x = step.layout
    here = x.dp * x.cp * x.tp
    group = min(max(x.tp * x.cp, x.ep * x.etp), here)
    copies = here // group
    rng = np.random.default_rng(seed)
    lasting = [d[:, None] for d in durations(step.program, step.times)]
    order = _order(step.program)
    spans: list[Array] = []
    even: list[Array] = []
    for _ in range(PIPELINES // BLOCK):
        each = [d * factors(rng, jitter, spread, group, (len(d), BLOCK)) for d in lasting]
        spans.append(_makespans(step.program, order, each, float(step.times.comm)))
        even += [e.sum(0) / d.sum() for e, d in zip(each, lasting, strict=True)]
    pool = np.concatenate(spans)
    calm = step.result.makespan
    inside = calm * (float(np.mean(even)) - 1)
    ends = rng.choice(pool, (max(DRAWS // copies, 500), copies)).max(1) if copies > 1 else pool
    return Varied(
        calm_s=step.step_s,
        group_s=inside,
        pipeline_s=float(pool.mean()) - calm - inside,
        copies_s=float(ends.mean() - pool.mean()),
        low_s=float(np.quantile(ends, 0.05)) + step.after_s,
        high_s=float(np.quantile(ends, 0.95)) + step.after_s,
        group=group,
        copies=copies,
    )


def _order(program: Program) -> list[tuple[int, int]]:
    """Return stage and number of all operations, each after the operations that it waits for."""
    one = np.ones(program.chunks)
    unit = simulate(program, Times(one, one, one, activation=one))
    found = [(float(t), s, i) for s, starts in enumerate(unit.start) for i, t in enumerate(starts)]
    return [(s, i) for _, s, i in sorted(found)]


def _makespans(
    program: Program, order: list[tuple[int, int]], lasting: list[Array], comm: float
) -> Array:
    """Return the makespan of each sample; `lasting` has operations and samples of each stage."""
    done: dict[tuple[str, int, int], tuple[Array, int]] = {}
    samples = lasting[0].shape[1]
    clock = [np.zeros(samples) for _ in range(program.stages)]
    for s, i in order:
        op, begin = program.ops[s][i], clock[s]
        for key in needs(op, program.chunks):
            when, at = done[key]
            begin = np.maximum(begin, when if at == s else when + comm)
        clock[s] = begin + lasting[s][i]
        for key in makes(op):
            done[key] = (clock[s], s)
    return np.maximum.reduce(clock)
