"""Closed-form bubbles, each under the convention of the paper that gives it.

All take equal stages and no communication time. F, D and W are the times of one chunk; FB that of a forward and a full
backward overlapped. `simulate` agrees with each of them wherever its condition holds; a test goes through all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.schedules.simulate import Simulation


class Convention(str, Enum):
    """What a paper counts as idle."""

    MAKESPAN = "idle time of a stage within the makespan, start-up included"
    """Ours; also that of GPipe, Megatron-LM, DualPipe and of ZB-H1."""
    SPAN = "most idle time of any stage between its own first and last operation"
    """That of the zero-bubble paper, which lets each stage begin its next step by itself."""


@dataclass(frozen=True)
class Chunk:
    """Times of one chunk, equal for all."""

    forward: float = 1.0
    dx: float = 1.0
    dw: float = 1.0
    overlapped: float | None = None
    """FB; F + D + W where it is None."""

    @property
    def both(self) -> float:
        """FB."""
        return self.forward + self.backward if self.overlapped is None else self.overlapped

    @property
    def backward(self) -> float:
        """B = D + W."""
        return self.dx + self.dw


@dataclass(frozen=True)
class Formula:
    """A closed form."""

    idle: Callable[[int, int, Chunk], float]
    """Idle time of a stage from P, chunks of a stage V, times of a chunk."""
    convention: Convention
    condition: str
    """When it is exact, for people."""
    holds: Callable[[int, int, int, Chunk], bool]
    """When it is exact, from P, m, V, times."""
    source: str


def _always(_p: int, _m: int, _v: int, _t: Chunk) -> bool:
    return True


def _short_w(t: Chunk) -> bool:
    return t.dw <= min(t.forward, t.dx)


FORMULAS = {
    "gpipe": Formula(
        lambda p, _v, t: (p - 1) * (t.forward + t.backward),
        Convention.MAKESPAN,
        "any m",
        _always,
        "Huang et al. 2019, arXiv 1811.06965",
    ),
    "1f1b": Formula(
        lambda p, _v, t: (p - 1) * (t.forward + t.backward),
        Convention.MAKESPAN,
        "any m",
        _always,
        "Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1",
    ),
    "interleaved": Formula(
        # per-chunk times: a stage's are V times as long, so this is its (P - 1)(F + B) / V
        lambda p, _v, t: (p - 1) * (t.forward + t.backward),
        Convention.MAKESPAN,
        "m a multiple of P",
        lambda p, m, _v, _t: m % p == 0,
        "Narayanan et al. 2021, arXiv 2104.04473, section 2.2.2",
    ),
    "zb-h1": Formula(
        lambda p, _v, t: (p - 1) * (t.forward + t.dx - t.dw),
        Convention.MAKESPAN,
        "m >= P, W <= F, W <= D",
        lambda p, m, _v, t: m >= p and _short_w(t),
        "Qi et al. 2024, arXiv 2401.10241, table 2",
    ),
    "zb-h2": Formula(
        lambda p, _v, t: (p - 1) * (t.forward + t.dx - 2 * t.dw),
        Convention.SPAN,
        "m >= 2P - 1, W <= F, W <= D",
        lambda p, m, _v, t: m >= 2 * p - 1 and _short_w(t),
        "Qi et al. 2024, arXiv 2401.10241, table 2",
    ),
    "zb-v": Formula(
        lambda _p, _v, _t: 0.0,
        Convention.SPAN,
        "m >= 2P - 1, F = D = W",
        lambda p, m, _v, t: m >= 2 * p - 1 and t.forward == t.dx == t.dw,
        "Qi et al. 2024, arXiv 2401.10241, section 6",
    ),
    "dualpipe": Formula(
        lambda p, _v, t: (p / 2 - 1) * (t.both + t.backward - 3 * t.dw),
        Convention.MAKESPAN,
        "P and m even, m >= 2P, F = D, W <= F",
        lambda p, m, _v, t: (
            p % 2 == 0 and m % 2 == 0 and m >= 2 * p and t.forward == t.dx and _short_w(t)
        ),
        "DeepSeek-V3, arXiv 2412.19437, table 2",
    ),
    "dualpipev": Formula(
        lambda p, _v, t: (p - 1) * (t.both + t.backward - 3 * t.dw),
        Convention.MAKESPAN,
        "m >= 2P, F = D, W <= F",
        lambda p, m, _v, t: m >= 2 * p and t.forward == t.dx and _short_w(t),
        "DualPipe on half as many devices, github.com/deepseek-ai/DualPipe",
    ),
}
"""By the name of the program."""


def closed_form(
    name: str, stages: int, micro_batches: int, chunks: int = 1, times: Chunk | None = None
) -> float:
    """Return the idle time of a stage, in the unit of `times`, under the formula's own convention.

    Args:
        name: A key of `FORMULAS`.
        stages: P.
        micro_batches: m.
        chunks: Chunks of a stage, V.
        times: Of one chunk.

    Raises:
        BadInputError: The formula does not hold there.
    """
    times = times or Chunk()
    formula = FORMULAS[name]
    if not formula.holds(stages, micro_batches, chunks, times):
        raise BadInputError(
            f"closed form of {name}: P {stages}, m {micro_batches}, V {chunks}, {times}; "
            f"it holds for {formula.condition}"
        )
    return formula.idle(stages, chunks, times)


def idle_share(idle: float, micro_batches: int, chunks: int, times: Chunk) -> float:
    """Return idle / (work + idle), where a stage's work is m V (F + D + W)."""
    return idle / (micro_batches * chunks * (times.forward + times.backward) + idle)


def measured(result: Simulation, convention: Convention) -> float:
    """Return what a formula of this convention should be equal to, from a simulation.

    The most idle of all stages; in the unit of the times.
    """
    idle = result.idle * result.makespan
    if convention is Convention.MAKESPAN:
        return float(idle.max())
    outside = (
        start[0] + result.makespan - end[-1]
        for start, end in zip(result.start, result.end, strict=True)
    )
    return float(max(i - o for i, o in zip(idle, outside, strict=True)))
