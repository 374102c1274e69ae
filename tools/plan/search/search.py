"""The best layout of a model on a number of devices under the event simulation, with a proven bound.

1. every configuration of the outer space gets a lower bound from its longest stage (`bounds.too_slow`), all at once in NumPy;
2. good placements of promising configurations give a step to beat;
3. in the order of the bounds a configuration's linear program is solved (`placement`); its multipliers are tried on all
   configurations with the same schedule, which prunes most; what stays below the best step is branched on;
4. the step of a placement is what `simulate_step` says, and it must agree with what the bounds are made of.
"""

import math
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from telechat_moe.errors import CheckFailedError
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.device import Device
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.simulate_step import simulate_step
from telechat_moe.tools.plan.search.bounds import (
    Costs,
    costs,
    estimate,
    problem_of,
    prove,
    too_slow,
)
from telechat_moe.tools.plan.search.placement import CLOSE, Answer, PathPool, PlacementSearch
from telechat_moe.tools.plan.search.placement_problem import Placed, Problem
from telechat_moe.tools.plan.search.space import (
    CHOSEN,
    NAMES,
    POLICIES,
    Space,
    enumerate_space,
    layout_of,
    space_columns,
)

FIRST = 40
"""Schedules of which a placement is tried before anything is proven."""

WORKERS = 2
"""Configurations that are looked at at a time, in threads."""

BOXES = (60, 5000)
"""Boxes of a configuration that are looked at beyond its first ones, at first and at most at a time."""

RUNNERS_UP = 3
"""Configurations that are placed for each that is wanted in the ranked table."""

SHOWN = 10
"""Layouts that are simulated in full beyond those of the ranked table."""

AGREE = 1e-6
"""Relative difference between the planner's step and the simulator's that rounding to ps explains."""


@dataclass
class Candidate:
    """A configuration that was looked at closely."""

    row: int
    layout: Layout
    step_s: float
    """Simulated."""

    bound_s: float
    """No placement of this configuration is faster."""

    peak_bytes: float
    """As searched: micro-batches in flight are a mean over a stage's chunks."""

    simulated_bytes: float
    """The same, operation by operation."""

    bubble: float
    problem: Problem
    placed: Placed


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
    """Bytes that each lacks where it does not fit, and the tightest stage, [n, 2]."""

    best: list[Candidate]
    """Found, fastest first."""

    lower_bound_s: float
    """Proven: no layout of the space is faster."""

    seconds: float
    solved: int
    proofs: list[Answer] = field(default_factory=list)
    """What prunes whole schedules by the multipliers of its first boxes."""

    by: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Which of them prunes each configuration; -1: its longest stage or its memory; -2: `answers`."""

    answers: dict[int, Answer] = field(default_factory=dict)
    pools: dict[tuple[str, int, int, int], PathPool] = field(default_factory=dict)
    costs: dict[int, tuple[Costs, np.ndarray]] = field(default_factory=dict)
    timed_out: bool = False

    @property
    def gap(self) -> float:
        """Relative distance between the best step and the bound."""
        return self.best[0].step_s / self.lower_bound_s - 1 if self.best else math.inf

    @property
    def optimal(self) -> bool:
        """Whether nothing is faster, but for rounding."""
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
        self.done, self.began = done, time.perf_counter()
        self.until = self.began + limit_s
        self.room = device.memory_bytes - device.reserved_bytes
        self.rows = enumerate_space(a, space)
        n = len(self.rows)
        self.bound, self.guess = np.full(n, np.inf), np.full(n, np.inf)
        self.missing, self.by = np.zeros((n, 2)), np.full(n, -1)
        self.costs: dict[int, tuple[Costs, np.ndarray]] = {}
        self.place = np.zeros(n, dtype=np.int64)
        """Row of each in the costs of its depth."""

        self.groups: dict[tuple[str, int, int, int], np.ndarray] = {}
        self.pools: dict[tuple[str, int, int, int], PathPool] = {}
        self.searches: dict[int, PlacementSearch] = {}
        self.proofs: list[Answer] = []
        self.answers: dict[int, Answer] = {}
        self.placed: dict[int, Placed] = {}
        self.best = math.inf
        self.solved = 0
        self.rng = random.Random(1)

    def run(self) -> Plan:
        self._start()
        first = np.argsort(self.guess, kind="stable")
        seen: set[tuple] = set()
        for row in first:
            if len(seen) >= FIRST or not np.isfinite(self.guess[row]) or self._late():
                break
            if (key := self._key(row)) not in seen:
                seen.add(key)
                self._try(int(row))
        late = self._prove()
        self._runners_up()
        first = sorted(self.placed, key=lambda row: self.placed[row].seconds)[: SHOWN + self.top]
        found: list[Candidate] = []
        for row in first:  # simulated in full; of the best one only where time is up
            if found and self._late():
                break
            found.append(self._candidate(row, self.placed[row]))
        found.sort(key=lambda c: (round(c.step_s, 7), c.row))
        lower = min(
            [c.step_s for c in found[:1]] + [*self.bound[np.isfinite(self.bound)]], default=math.inf
        )
        for c in found:
            c.bound_s = min(float(self.bound[c.row]), c.step_s)
        return Plan(
            architecture=self.a,
            device=self.device,
            space=self.space,
            room_bytes=self.room,
            rows=self.rows,
            bound_s=self.bound,
            missing=self.missing,
            best=found,
            lower_bound_s=float(lower),
            seconds=time.perf_counter() - self.began,
            solved=self.solved,
            proofs=self.proofs,
            by=self.by,
            answers=self.answers,
            pools=self.pools,
            costs=self.costs,
            timed_out=late,
        )

    def _start(self) -> None:
        """Bound every configuration by its longest stage."""
        column = {name: self.rows[:, NAMES.index(name)] for name in NAMES}

        def bounds(pp: int) -> tuple:
            here = np.flatnonzero(column["pp"] == pp)
            x = space_columns(self.a, self.rows[here], self.space)
            c = costs(x, self.device, np.isin(column["policy"][here], CHOSEN))
            bound, lacks, stage = too_slow(c, self.a, self.room)
            guess = estimate(c, self.a, column["vpp"][here], bound)
            return here, c, bound, guess, np.column_stack([lacks, stage])

        depths = [int(pp) for pp in np.unique(column["pp"])]
        with ThreadPoolExecutor(WORKERS) as pool:
            for pp, (here, c, *found) in zip(depths, pool.map(bounds, depths), strict=True):
                self.costs[pp] = (c, here)
                self.place[here] = np.arange(len(here))
                self.bound[here], self.guess[here], self.missing[here] = found
        keys = np.column_stack([column[n] for n in ("schedule", "pp", "micro_batches", "vpp")])
        unique, which = np.unique(keys, axis=0, return_inverse=True)
        for i, _ in enumerate(unique):
            some = np.flatnonzero(which.ravel() == i)
            self.groups[self._key(some[0])] = some

    def _key(self, row: int) -> tuple[str, int, int, int]:
        layout = layout_of(self.rows[row], self.space)
        return layout.schedule, layout.pp, layout.micro_batches, layout.vpp

    def _late(self) -> bool:
        return time.perf_counter() > self.until

    def _placements(self, row: int) -> PlacementSearch:
        if row not in self.searches:
            layout = layout_of(self.rows[row], self.space)
            c, _ = self.costs[layout.pp]
            problem = problem_of(c, int(self.place[row]), self.a, layout, self.room)
            pool = self.pools.setdefault(self._key(row), PathPool())
            self.searches[row] = PlacementSearch(problem, pool)
        return self.searches[row]

    def _keep(self, row: int, placed: Placed | None) -> None:
        if placed and not any(placed.again) and (twin := self._twin(row)) != row:
            self._keep(twin, placed)  # it recomputes nothing: a layout of its own
        if placed and (row not in self.placed or placed.seconds < self.placed[row].seconds):
            self.placed[row] = placed
            self.best = min(self.best, placed.seconds)

    def _twin(self, row: int) -> int:
        """Return the configuration that recomputes nothing and is like this one otherwise; itself if that is not searched."""
        at = NAMES.index("policy")
        if self.rows[row, at] not in CHOSEN:
            return row
        back = row - int(self.rows[row, at]) + POLICIES.index("none")
        same = np.delete(self.rows[back] == self.rows[row], at).all() if back >= 0 else False
        return back if same and self.rows[back, at] == POLICIES.index("none") else row

    def _try(self, row: int) -> None:
        """Place a configuration without a proof."""
        placements = self._placements(row)
        self._keep(row, placements.improve(placements.even(self.rng), 1, self.until))

    def _prune(self, key: tuple[str, int, int, int], answer: Answer) -> None:
        """Bound all configurations with the same schedule by the multipliers of one."""
        some = self.groups[key]
        some = some[(self.bound[some] < self.best) & np.isfinite(self.bound[some])]
        if not len(some):
            return
        c, _ = self.costs[key[1]]
        route = answer.search.p.pipeline.route
        bound = prove(c, self.place[some], self.a, answer.first, route, self.room, self.best)
        better = bound > self.bound[some]
        self.proofs.append(answer)
        self.bound[some[better]] = bound[better]
        self.by[some[better]] = len(self.proofs) - 1

    def _prove(self) -> bool:
        """Close configurations until no bound is below the best step; return whether time was up.

        The first boxes of all, in the order of their bounds; then more and more boxes of those with the least bounds.
        """
        first = np.ones(len(self.rows), dtype=bool)
        nodes = np.full(len(self.rows), BOXES[0])
        with ThreadPoolExecutor(WORKERS) as pool:
            while rows := self._next(first) or self._next(np.ones_like(first)):
                if self._late():
                    return True
                searches = [self._placements(row) for row in rows]
                each = [0 if first[row] else int(nodes[row]) for row in rows]
                answers = pool.map(
                    lambda i, n: i.solve(self.best, nodes=n, until=self.until), searches, each
                )
                for row, answer in zip(rows, list(answers), strict=True):
                    self._take(row, answer)
                    nodes[row] = min(nodes[row] * (1 if first[row] else 3), BOXES[1])
                    first[row] = False
                    self.done(0.0, self.solved)
        return False

    def _next(self, some: np.ndarray) -> list[int]:
        """Return the open configurations with the least bounds, no two with one schedule."""
        found: dict[tuple, int] = {}
        value = np.where(some & (self.bound < self.best * (1 - CLOSE)), self.bound, np.inf)
        for row in map(int, np.argsort(value, kind="stable")[: 4 * WORKERS]):
            if not np.isfinite(value[row]) or len(found) == WORKERS:
                break
            twin = self._twin(row)  # the smaller problem first: its proof often holds for both
            row = twin if np.isfinite(value[twin]) else row
            found.setdefault(self._key(row), row)
        return list(found.values())

    def _take(self, row: int, answer: Answer) -> None:
        """Keep what is known of a configuration."""
        initial = row not in self.answers
        self.solved += initial
        self.answers[row] = answer
        self._keep(row, answer.best)
        if answer.bound > self.bound[row]:
            self.bound[row], self.by[row] = answer.bound, -2
        if initial and len(answer.first_proofs) in (1, answer.search.p.stages):
            self._prune(self._key(row), answer)

    def _runners_up(self) -> None:
        """Place more configurations, for the ranked table."""
        order = np.argsort(
            np.where(np.isfinite(self.guess), np.maximum(self.guess, self.bound), np.inf)
        )
        tried = 0
        for row in order:
            steps = sorted(p.seconds for p in self.placed.values())
            if tried >= RUNNERS_UP * self.top or not np.isfinite(self.guess[row]) or self._late():
                break
            if len(steps) >= self.top and self.bound[row] >= steps[self.top - 1]:
                continue
            if int(row) not in self.placed:
                tried += 1
                self._try(int(row))

    def _candidate(self, row: int, placed: Placed) -> Candidate:
        layout = layout_of(self.rows[row], self.space)
        problem = self._placements(row).p
        again = placed.again if problem.choice else None
        layout = layout.but(chunks=placed.layers, recompute_layers=again)
        step = simulate_step(self.a, layout, self.device)
        if abs(step.step_s / placed.seconds - 1) > AGREE:
            raise CheckFailedError(
                f"plan: {layout.short()}: the planner has {placed.seconds:.6f} s for the step, the simulator "
                f"{step.step_s:.6f} s; tools/plan/search/bounds.py and simulate_step.py disagree"
            )
        peak = float(step.table.memory.peak[0].max())
        if peak > self.room * (1 + AGREE):
            raise CheckFailedError(
                f"plan: {layout.short()}: {peak:.0f} bytes of {self.room:.0f}; tools/plan/search/bounds.py and memory.py disagree"
            )
        return Candidate(
            row=row,
            layout=layout,
            step_s=step.step_s,
            bound_s=0.0,
            peak_bytes=peak,
            simulated_bytes=float(step.peak_bytes.max()),
            bubble=step.result.bubble,
            problem=problem,
            placed=placed,
        )


__all__ = ["Candidate", "Plan", "search", "usable"]
