"""One configuration of the outer space, solved to the end: placement and what depends on the fullest stage."""

import heapq
import math
from dataclasses import dataclass, replace

import numpy as np

from telechat_moe.errors import CheckFailedError
from telechat_moe.tools.plan.architecture import Architecture
from telechat_moe.tools.plan.bounds import Costs, rest_seconds
from telechat_moe.tools.plan.columns import Columns
from telechat_moe.tools.plan.device import Device
from telechat_moe.tools.plan.instances import (
    NS,
    c_kept,
    expressible,
    pipeline_seconds,
    placed_layout,
    problem_of,
)
from telechat_moe.tools.plan.layout import Layout
from telechat_moe.tools.plan.placement import (
    FAR,
    NoPlacement,
    Problem,
    Solution,
    solve,
    stage_times,
    structures,
)
from telechat_moe.tools.plan.space import (
    Space,
    layout_of,
)
from telechat_moe.tools.plan.step import evaluate

BUSY = 1e9
"""A backward pass, seconds, that hides everything that can be hidden."""

EXACT = 1e-9
"""Relative difference below which two bounds are the same."""

MOST_BOXES = 200
"""Boxes of one configuration; then its bound stays below its step."""

SHARES = 10**6
"""Denominator of `late` in whole numbers."""

AGREE = 1e-5
"""Relative difference between the planner's step and the simulator's that rounding to ns and bytes explains."""


@dataclass(frozen=True)
class Setting:
    """What all configurations share."""

    a: Architecture
    space: Space
    device: Device
    room: float
    """Bytes of a stage."""

    rows: np.ndarray
    """Every configuration."""


@dataclass
class Candidate:
    """A configuration that was looked at closely."""

    row: int
    layout: Layout
    step_s: float
    """By `step.evaluate`."""

    bound_s: float
    """No placement of this configuration is faster."""

    peak_bytes: float
    bubble: float
    problem: Problem
    solution: Solution
    rest_s: float


@dataclass
class Box:
    """Placements with so many bulk layers on the first stage, the fullest middle one, an odd one and the last.

    An odd stage is a middle one with layers of the other kind.
    """

    problem: Problem
    unit: float
    hides: bool
    """The bound counts what the longest stage hides of the gradient reduction."""

    low: tuple
    high: tuple
    answer: Solution
    extra: tuple[float, ...]
    bound: float
    final: bool = False
    tried: bool = False
    """It was a final box of the other kind."""


class One:
    """One configuration of the outer space, solved to the end."""

    def __init__(self, setting: Setting, row: int, x: Columns, c: Costs) -> None:
        self.s, self.row, self.x, self.c = setting, row, x, c
        self.layout = layout_of(setting.rows[row], setting.space)
        self.problem, self.unit = problem_of(setting.a, self.layout, c, setting.room)
        self.moe = setting.a.moe_layers >= setting.a.dense_layers
        self.why: NoPlacement | None = None
        self.longest = math.inf
        self.tables: dict[tuple, list[np.ndarray]] = {}

    def best(self, limit: float, most_boxes: int = 0) -> Candidate | None:
        """Return the best placement and a bound for all others of this configuration.

        Branch and bound over the bulk layers of the stages on which the gradient reduction and the update depend
        (:class:`Box`): a box `[low, high]` has the bound inner(high) + rest(low, high).
        """
        boxes: list[tuple[float, int, Box]] = []
        best: Candidate | None = None
        for pinned in structures(self.problem):
            problem = replace(self.problem, pinned=pinned)
            free = solve(problem)
            if not isinstance(free, Solution):
                self.why = free if isinstance(free, NoPlacement) else self.why
                continue
            best = self._better(best, problem, free)
            self.longest = best.step_s / max(self.problem.max_weight * self.unit, 1e-30)
            box = self._hide(problem, free)
            heapq.heappush(boxes, (box.bound, len(boxes), box))
        if best is None:
            return None
        closed, pushed = math.inf, len(boxes)
        while boxes and pushed < most_boxes:
            bound, _, box = heapq.heappop(boxes)
            if bound >= min(best.step_s, limit) * (1 - EXACT):
                closed = min(closed, bound)
                break
            for part in self._split(box):
                best = self._better(best, part.problem, part.answer)
                pushed += 1
                heapq.heappush(boxes, (max(bound, part.bound), pushed, part))
            if box.final:
                other = None if box.tried else self._other(box)
                if other is None:
                    closed = min(closed, bound)
                else:
                    pushed += 1
                    heapq.heappush(boxes, (max(bound, other.bound), pushed, other))
        closed = min([closed, *(box[0] for box in boxes)])
        best.bound_s = min(closed, best.step_s)
        return best

    def _better(self, best: Candidate | None, problem: Problem, answer: Solution) -> Candidate:
        found = self._candidate(problem, answer)
        return found if best is None or found.step_s < best.step_s else best

    def _split(self, box: "Box") -> list["Box"]:
        """Return two halves of a box: below, and from the number of layers on that its solution has somewhere."""
        at = self._ends(box.problem, box.answer)
        for d in range(4):
            if box.low[d] < at[d]:
                cut = at[d]
            elif at[d] < box.high[d] and box.extra[d] > 0 and self._one(box.problem, d):
                cut = at[d] + 1
            else:
                continue
            above = tuple(cut if e == d else n for e, n in enumerate(box.low))
            below = tuple(cut - 1 if e == d else n for e, n in enumerate(box.high))
            return [
                replace(
                    self._box(box.problem, box.unit, box.hides, low, high, answer), tried=box.tried
                )
                for low, high, holds in (
                    (above, box.high, cut <= at[d]),
                    (box.low, below, cut > at[d]),
                )
                if (answer := box.answer if holds else self._within(box.problem, low, high))
            ]
        box.final = True
        return []

    def _box(
        self, problem: Problem, unit: float, hides: bool, low: tuple, high: tuple, answer: Solution
    ) -> "Box":
        rest, extra = self._rest(problem, low, high, hides, answer)
        return Box(problem, unit, hides, low, high, answer, extra, answer.bound * unit + rest)

    def _hide(self, problem: Problem, free: Solution) -> "Box":
        """Return the whole box, with what a longer stage hides of the gradient reduction where there is more to hide.

        The reduction shows for max(all - B, some), B at most `late * T` and a bit. Either bound holds: all that can be
        hidden is, or every further second of T hides `late` of it. The better one is taken.
        """
        low, high = (0,) * 4, (problem.groups[problem.bulk].count,) * 4
        hidden = self._box(problem, self.unit, False, low, high, free)
        other = self._late(problem)
        answer = solve(other) if other else None
        if other is None or not isinstance(answer, Solution):
            return hidden
        shown = self._box(other, self.unit / SHARES, True, low, high, answer)
        return shown if shown.bound > hidden.bound else hidden

    def _late(self, problem: Problem) -> Problem | None:
        """Return the problem in which a second of T hides `late` of the reduction; None: that is more than it costs."""
        late = math.ceil(float(self.c.late[0]) * SHARES) * round(1 / NS / self.unit)
        weight = problem.max_weight * SHARES - late
        if weight < 0:
            return None
        return replace(problem, max_weight=weight, sum_weight=problem.sum_weight * SHARES)

    def _rest(
        self, problem: Problem, low: tuple, high: tuple, hides: bool, answer: Solution
    ) -> tuple[float, tuple[float, ...]]:
        """Return the least rest of a box, and how much longer than `late * T` the ends' backward passes may be."""
        c = self.c
        others = [0] * 4
        for g, places in enumerate(problem.pinned):
            for chunk in places if g != problem.bulk else ():
                others[self._place(problem, problem.stage_of_chunk[chunk])] += 1
        if not self._one(problem, 2):
            others[2] = min(others[2], 1)
        busy, extra = BUSY, (0.0,) * 4
        if hides:
            extra = self._beyond(
                problem, high, others, min((i[0] for i in answer.proof), default=0)
            )
            busy = max(extra)
        number = problem.groups[problem.bulk].count
        some = (0, math.ceil(number / problem.stages), 0, 0)  # some stage has so many
        found = rest_seconds(
            self.x, self.s.device, np.array([low, some], dtype=float), self.moe, busy, tuple(others)
        )
        return float(found.max()) + float(c.rest_s[0]), extra

    def _beyond(
        self, problem: Problem, high: tuple, others: list[int], least: int
    ) -> tuple[float, ...]:
        """Return how much longer than `late * T` the backward pass of the first, a middle and the last stage can be.

        T is the longest stage time, at least `least` and not so long that it alone is slower than the best step; a stage takes the fastest arrangement that fits, whose time says
        how much of it is recomputed.
        """
        c, late, once = self.c, float(self.c.late[0]), c_kept(self.problem)
        last, found = problem.stage_of_chunk[-1], [0.0] * 4
        for stage, times in enumerate(self._tables(problem)):
            d = self._place(problem, stage)
            numbers = np.flatnonzero(times[: high[d] + 1] < min(FAR, self.longest))
            here = sum(problem.stage_of_chunk[k] == stage for p in problem.pinned for k in p)
            fixed = (stage == 0) * c.late_s[0, 0] + (stage == last) * c.late_s[0, 1]
            fixed = fixed + here * c.late_s[0, 2]
            base = problem.fixed_time[stage] + here * once[1] + numbers * once[0]
            back = fixed + numbers * c.late_s[0, 3] + (times[numbers] - base) / NS
            beyond = back - late * np.maximum(times[numbers], least) / NS
            found[d] = max(found[d], float(beyond.max(initial=0.0)))
        return tuple(0.0 if b < 1e-9 else b for b in found)

    def _tables(self, problem: Problem) -> list[np.ndarray]:
        if problem.pinned not in self.tables:
            self.tables[problem.pinned] = stage_times(replace(self.problem, pinned=problem.pinned))
        return self.tables[problem.pinned]

    @staticmethod
    def _place(problem: Problem, stage: int) -> int:
        """Return which number of a box is about a stage."""
        if stage in (0, problem.stage_of_chunk[-1]):
            return 3 if stage else 0
        odd = {problem.stage_of_chunk[c] for places in problem.pinned for c in places}
        return 2 if stage in odd else 1

    def _one(self, problem: Problem, d: int) -> bool:
        """Return whether a number of a box is about one stage only."""
        return sum(self._place(problem, stage) == d for stage in range(problem.stages)) == 1

    def _within(self, problem: Problem, low: tuple, high: tuple) -> Solution | None:
        """Return the best placement with at most so many bulk layers, and at least so many where that is one stage."""
        place = [self._place(problem, stage) for stage in range(problem.stages)]
        most = tuple(high[d] for d in place)
        fewest = tuple(low[d] if self._one(problem, d) else 0 for d in place)
        answer = solve(replace(problem, most=most, fewest=fewest))
        return answer if isinstance(answer, Solution) else None

    def _ends(self, problem: Problem, answer: Solution) -> tuple[int, ...]:
        """Return a solution's numbers as a box has them."""
        found = [0] * 4
        for stage, n in enumerate(_bulk(problem, answer)):
            d = self._place(problem, stage)
            found[d] = max(found[d], n)
        return tuple(found)

    def _other(self, box: "Box") -> "Box | None":
        """Return a box with the other way of bounding the reduction: see `_hide`."""
        weights = {"max_weight": self.problem.max_weight, "sum_weight": self.problem.sum_weight}
        plain = replace(box.problem, **weights)
        other = plain if box.hides else self._late(plain)
        answer = self._within(other, box.low, box.high) if other else None
        if other is None or answer is None:
            return None
        unit = self.unit if box.hides else self.unit / SHARES
        return replace(self._box(other, unit, not box.hides, box.low, box.high, answer), tried=True)

    def _candidate(self, problem: Problem, answer: Solution) -> Candidate:
        placed = placed_layout(self.layout, problem, answer)
        table = evaluate(self.s.a, [placed], self.s.device)
        plain, times = self.problem, answer.stage_time
        predicted = plain.max_weight * max(times) + plain.sum_weight * sum(times)
        predicted *= self.unit
        makespan, peak = pipeline_seconds(table), float(table.memory.peak[0].max())
        exact = expressible(problem, answer)
        if exact and abs(predicted / makespan - 1) > AGREE:
            raise CheckFailedError(
                f"plan: {placed.short()}: the planner has {predicted:.6f} s for the pipeline, the simulator "
                f"{makespan:.6f} s; tools/plan/bounds.py and step.py disagree"
            )
        if exact and peak > self.s.room * (1 + AGREE):
            raise CheckFailedError(
                f"plan: {placed.short()}: {max(answer.stage_memory)} bytes for the planner, {peak:.0f} for the "
                "simulator; tools/plan/bounds.py and memory.py disagree"
            )
        return Candidate(
            row=self.row,
            layout=placed,
            step_s=float(table.step_s[0]),
            bound_s=0.0,
            peak_bytes=peak,
            bubble=float(table.bubble[0]),
            problem=problem,
            solution=answer,
            rest_s=float(table.step_s[0]) - predicted,
        )


def _bulk(problem: Problem, answer: Solution) -> list[int]:
    """Return the bulk items of each stage."""
    return [
        sum(sum(answer.items[chunk][problem.bulk]) for chunk in chunks)
        for chunks in problem.chunks_of
    ]
