"""The best layout of a model on a number of devices, with a proven bound.

1. every configuration of the outer space gets a lower bound (`bounds`), all at once in NumPy;
2. in the order of these bounds the inner problem (`placement`) is solved exactly, as long as a bound is below the best
   step found; what comes after cannot be better;
3. the step of a solution is what `step.evaluate` says, and it must agree with what the bound was made of.

The gradient reduction and the update depend on the fullest stage, which the inner problem does not know; it is solved again
with at most K bulk layers on a stage, for every K that could win, until the bounds meet.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from telechat_moe.tools.plan.architecture import Architecture
from telechat_moe.tools.plan.bounds import bottleneck, costs, rest_seconds, shortfall
from telechat_moe.tools.plan.closing import MOST_BOXES, Candidate, One, Setting
from telechat_moe.tools.plan.device import Device
from telechat_moe.tools.plan.placement import (
    NoPlacement,
)
from telechat_moe.tools.plan.space import (
    NAMES,
    POLICIES,
    Space,
    enumerate_space,
    space_columns,
)

RUNNERS_UP = 2
"""Configurations that are solved without their proof, for each that is wanted."""


@dataclass
class Plan:
    """What `search` returns."""

    architecture: Architecture
    device: Device
    space: Space
    room_bytes: float
    rows: np.ndarray
    """Every configuration."""

    bound_s: np.ndarray
    """Lower bound of each; infinity: it does not fit in memory."""

    missing: np.ndarray
    """Bytes that each lacks at least where it does not fit, and the tightest stage, [n, 2]."""

    best: list[Candidate]
    """Found, fastest first."""

    lower_bound_s: float
    """Proven: no layout of the space is faster."""

    seconds: float
    solved: int
    no_room: dict[int, NoPlacement] = field(default_factory=dict)
    """Configurations whose bound did not show it, but no placement fits."""

    timed_out: bool = False

    @property
    def gap(self) -> float:
        """Relative distance between the best step and the bound."""
        return self.best[0].step_s / self.lower_bound_s - 1 if self.best else math.inf

    @property
    def optimal(self) -> bool:
        """Whether nothing is faster, but for the rounding to whole ns."""
        return bool(self.best) and self.gap <= 1e-6


def usable(device: Device, memory_bytes: float | None) -> Device:
    """Return the device with as much memory as may be used."""
    if memory_bytes is None:
        return device
    return replace(device, memory_bytes=memory_bytes + device.reserved_bytes)


def search(
    a: Architecture,
    space: Space,
    device: Device,
    *,
    top: int = 10,
    limit_s: float = 300.0,
    done: Callable[[float, int], object] = lambda share, solved: None,
) -> Plan:
    """Find the fastest layout, and the next ones.

    Args:
        a: The model.
        space: What is free.
        device: Device and network; its memory less what is reserved is the limit of a stage.
        top: So many configurations are wanted: the fastest with its proof, the others as good as found.
        limit_s: After it the best found is returned, with the bound proven so far.
        done: Told how far it is.

    Raises:
        CheckFailedError: The planner's and the simulator's step differ: one of them was changed alone.
    """
    return _Search(a, space, device, top, limit_s, done).run()


class _Search:
    def __init__(
        self,
        a: Architecture,
        space: Space,
        device: Device,
        top: int,
        limit_s: float,
        done: Callable,
    ) -> None:
        self.a, self.space, self.device, self.top = a, space, device, top
        self.limit_s, self.done, self.began = limit_s, done, time.perf_counter()
        self.room = device.memory_bytes - device.reserved_bytes
        self.rows = enumerate_space(a, space)
        self.setting = Setting(a, space, device, self.room, self.rows)
        self.bound = np.full(len(self.rows), np.inf)
        self.missing = np.zeros((len(self.rows), 2))
        self.found: list[Candidate] = []
        self.no_room: dict[int, NoPlacement] = {}
        self.solved = 0

    def run(self) -> Plan:
        for pp in np.unique(self.rows[:, NAMES.index("pp")]):
            here = np.flatnonzero(self.rows[:, NAMES.index("pp")] == pp)
            self.bound[here] = self._bounds(here)
        first = self.bound.copy()
        order = np.argsort(self.bound, kind="stable")
        late, lower = False, math.inf
        for place, row in enumerate(order):
            if self.bound[row] >= self._limit(1):
                lower = min(lower, float(self.bound[row]))
                break
            if self._seconds() > self.limit_s:
                late, lower = True, min(lower, float(self.bound[row]))
                break
            self._look(int(row))
            self.done(place / len(order), self.solved)
        first_proven = {c.row for c in self.found}
        for row in [r for r in order if r not in first_proven][: RUNNERS_UP * self.top]:
            if late or self.bound[row] >= self._limit(self.top) or not np.isfinite(self.bound[row]):
                break
            self._look(int(row), close=False)
        self.found.sort(key=lambda c: (round(c.step_s, 7), c.row))
        if self.found:
            proven = [c.bound_s for c in self.found if c.row in first_proven]
            lower = min(lower, *proven, self.found[0].step_s)
        return Plan(
            architecture=self.a,
            device=self.device,
            space=self.space,
            room_bytes=self.room,
            rows=self.rows,
            bound_s=np.maximum(first, self.bound),
            missing=self.missing,
            best=self.found,
            lower_bound_s=lower,
            seconds=self._seconds(),
            solved=self.solved,
            no_room=self.no_room,
            timed_out=late,
        )

    def _seconds(self) -> float:
        return time.perf_counter() - self.began

    def _limit(self, place: int) -> float:
        """Return the step that a configuration must beat to be among the first ones."""
        steps = sorted(c.step_s for c in self.found)
        return steps[place - 1] if len(steps) >= place else math.inf

    def _bounds(self, here: np.ndarray) -> np.ndarray:
        rows = self.rows[here]
        x = space_columns(self.a, rows, self.space)
        c = costs(x, self.device, rows[:, NAMES.index("policy")] == POLICIES.index("full"))
        lacks = shortfall(c, self.a.dense_layers, self.a.moe_layers, self.room)
        self.missing[here] = np.column_stack(lacks)
        slowest, total = bottleneck(c, self.a.dense_layers, self.a.moe_layers, self.room)
        fits = np.isfinite(slowest)
        slowest = np.where(fits, slowest, 0.0)
        layers, moe = np.zeros((len(rows), 4)), self.a.moe_layers >= self.a.dense_layers
        count = max(self.a.moe_layers, self.a.dense_layers)
        layers[:, 1] = math.ceil(count / int(rows[0, NAMES.index("pp")]))  # some stage has so many
        late = c.late_most[:, 0]
        busy = late * slowest + c.late_most[:, 1]  # a longer stage costs more than it hides
        rest = c.rest_s + rest_seconds(x, self.device, layers, moe, busy)
        rest = np.where(c.micro_batches - c.share >= late, rest, c.rest_s)
        step = (c.micro_batches - c.share) * slowest + c.share * total + rest
        return np.where(fits, step, np.inf)

    def _look(self, row: int, close: bool = True) -> None:
        """Solve one configuration; keep the best placement, its step and its bound, closed or not."""
        rows = self.rows[row : row + 1]
        x = space_columns(self.a, rows, self.space)
        c = costs(x, self.device, rows[:, NAMES.index("policy")] == POLICIES.index("full"))
        one = One(self.setting, row, x, c)
        self.solved += 1
        best = one.best(self._limit(1), MOST_BOXES if close else 0)
        if best is None:
            self.bound[row] = np.inf
            if one.why is not None:
                self.no_room[row] = one.why
            return
        self.bound[row] = max(self.bound[row], best.bound_s)
        self.found.append(best)
