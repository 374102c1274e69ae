"""Search the best layout of a model on a number of devices under the event simulation, with a proven bound.

1. every configuration of the outer space gets a lower bound from its longest stage (`bounds.lower_bound`);
2. good placements of promising configurations give a step to beat;
3. the configuration with the least bound is bounded by a linear program (`placement`), then by programs of whole layers,
   until none can be faster than the best step by more than `GAP`;
4. the step of a placement is what `simulate_step` says, and it must agree with what the bounds are made of.
"""

import heapq
import math
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telechat_moe.errors import CheckFailedError
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.columns import Columns
from telechat_moe.tools.plan.cost.device import Device
from telechat_moe.tools.plan.cost.expert_exchange import choices, fastest
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.simulate_step import simulate_step
from telechat_moe.tools.plan.search.bounds import (
    Costs,
    costs,
    estimate,
    lower_bound,
    problem_of,
)
from telechat_moe.tools.plan.search.placement import PathPool, PlacementSearch
from telechat_moe.tools.plan.search.placement_problem import (
    LayerPlacement,
    PlacementProblem,
    ScheduleKey,
)
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
"""Number of schedules for which a placement is tried before anything is proven."""

POLISHED, PATIENCE = 6, 100
"""Placements of so many configurations are improved, from so many others near them, before and after the proof."""

REFINED, REFINE_S = 1e-5, 2.0
"""Gap to which the best configuration is placed in the end, and the seconds that this may take."""

STARTS = 4
"""Even placements from which each of them is placed again."""

WORKERS = 2
"""Depths whose configurations are bounded at once, in threads."""

GAP = 0.005
"""Relative distance of the best step to the proven bound at which the search ends: far below the model's error."""

RUNNERS_UP = 3
"""Configurations that are placed for each that is wanted in the ranked table."""

SHOWN = 10
"""Layouts that are simulated in full beyond those of the ranked table."""

AGREE = 1e-6
"""Relative difference between the planner's step and the simulator's that rounding to ps explains."""


@dataclass
class PlacedLayout:
    """A configuration whose layers were placed."""

    row: int
    layout: Layout
    step_s: float
    """Simulated."""
    bound_s: float
    """Lower bound: no placement of this configuration is faster."""
    peak_bytes: float
    """Peak memory as in the search, whose formula is linear in the layers of a stage: micro-batches in flight are a mean over its
    chunks, and a recomputed layer's working set comes on top of all that they keep."""
    simulated_bytes: float
    """Peak memory of the simulation, operation by operation."""
    bubble: float
    problem: PlacementProblem
    placed: LayerPlacement


@dataclass
class SearchResult:
    """What `search` returns; while it runs, what is known so far."""

    architecture: Architecture
    device: Device
    space: Space
    room_bytes: float
    rows: NDArray[np.int64]
    """Every configuration."""
    bound_s: NDArray[np.float64]
    """Lower bound of each; infinity: it does not fit in memory."""
    missing: NDArray[np.float64]
    """Bytes that each lacks where it does not fit, and the stage with the least room, [n, 2]."""
    best: list[PlacedLayout] = field(default_factory=list[PlacedLayout])
    """Candidates that were found, fastest first."""
    lower_bound_s: float = math.inf
    """Proven lower bound: no layout of the space is faster."""
    seconds: float = 0.0
    solved: int = 0
    tolerance: float = GAP
    """Gap at which the search ends."""
    costs: dict[int, tuple[Costs, NDArray[np.int64]]] = field(
        default_factory=dict[int, tuple[Costs, NDArray[np.int64]]]
    )
    """For each number of pipeline stages the costs, and the configurations that they belong to."""
    timed_out: bool = False

    @property
    def gap(self) -> float:
        """Relative distance between the best step and the bound."""
        return self.best[0].step_s / self.lower_bound_s - 1 if self.best else math.inf

    @property
    def optimal(self) -> bool:
        """Whether nothing is faster by more than the gap that was asked for."""
        return bool(self.best) and self.gap <= self.tolerance * (1 + AGREE)

    def problem(self, row: int) -> PlacementProblem:
        """Return the inner problem of a configuration."""
        layout = layout_of(self.rows[row], self.space)
        c, rows = self.costs[layout.pp]
        return problem_of(c, int(np.searchsorted(rows, row)), layout, self.room_bytes)


def usable(device: Device, memory_bytes: float | None) -> Device:
    """Return the device with its memory limited to what may be used."""
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
    tolerance: float = GAP,
    progress: Callable[[int], object] = lambda _solved: None,
) -> SearchResult:
    """Find the `top` fastest layouts: the first with its proof, the others without one.

    The limit of a stage is the memory of the device less what is reserved. The search ends when no layout can be faster
    than the best by more than `tolerance`; after `limit_s` seconds it returns what it has with the bound proven so far.
    `progress` is called with the number of configurations whose layers were placed by a program.

    Raises:
        CheckFailedError: The planner's and the simulator's step differ: one of them was changed alone.
    """
    began, rows = time.perf_counter(), enumerate_space(a, space)
    n = len(rows)
    plan = SearchResult(
        architecture=a,
        device=device,
        space=space,
        room_bytes=device.memory_bytes - device.reserved_bytes,
        rows=rows,
        bound_s=np.full(n, np.inf),
        missing=np.zeros((n, 2)),
        tolerance=tolerance,
    )
    _LayoutSearch(plan, top, began + limit_s, progress).run()
    plan.seconds = time.perf_counter() - began
    return plan


class _LayoutSearch:
    """A search in progress, which fills in a result."""

    def __init__(
        self, plan: SearchResult, top: int, until: float, progress: Callable[[int], object]
    ) -> None:
        self.plan, self.top, self.until, self.progress = plan, top, until, progress
        self.guess = np.full(len(plan.rows), np.inf)
        """Estimated step of each configuration, which orders the search."""

        self.pools: dict[ScheduleKey, PathPool] = {}
        self.searches: dict[int, PlacementSearch] = {}
        self.placed: dict[int, LayerPlacement] = {}
        self.best = math.inf
        self.rng = random.Random(1)

    def run(self) -> None:
        """Search; the result is in `plan`."""
        self._start()
        tried: set[ScheduleKey] = set()
        for row in np.argsort(self.guess, kind="stable"):
            if len(tried) >= FIRST or not np.isfinite(self.guess[row]) or self._late():
                break
            if (key := self._key(row)) not in tried:
                tried.add(key)
                self._try(int(row))
        for row in sorted(self.placed, key=lambda row: self.placed[row].seconds)[:POLISHED]:
            self._polish(row)
        self.plan.timed_out = self._prove()
        self._runners_up()
        for row in sorted(self.placed, key=lambda row: self.placed[row].seconds)[:POLISHED]:
            self._polish(row)
        self._refine()
        fastest = sorted(self.placed, key=lambda row: self.placed[row].seconds)
        best = self.plan.best
        # simulated in full; of the best one only where time is up
        for row in fastest[: SHOWN + self.top]:
            if best and self._late():
                break
            best.append(self._candidate(row, self.placed[row]))
        best.sort(key=lambda c: (round(c.step_s, 7), c.row))
        bound = self.plan.bound_s
        steps = [c.step_s for c in best[:1]] + [*bound[np.isfinite(bound)]]
        self.plan.lower_bound_s = float(min(steps, default=math.inf))
        for c in best:
            c.bound_s = min(float(bound[c.row]), c.step_s)

    def _start(self) -> None:
        """Bound every configuration by its longest stage."""
        column = {name: self.plan.rows[:, NAMES.index(name)] for name in NAMES}

        def bounds(pp: int) -> tuple[Costs, tuple[NDArray[Any], ...]]:
            rows = np.flatnonzero(column["pp"] == pp)
            x = space_columns(self.plan.architecture, self.plan.rows[rows], self.plan.space)
            x = Columns({**vars(x), "exchange": fastest(x, self.plan.device)})
            choice, room = np.isin(column["policy"][rows], CHOSEN), self.plan.room_bytes
            c = costs(x, self.plan.device, choice, room)
            bound, missing, stage = lower_bound(c, room)
            guess = estimate(c, column["vpp"][rows], bound)
            return c, (rows, bound, guess, np.column_stack([missing, stage]))

        depths = [int(pp) for pp in np.unique(column["pp"])]
        with ThreadPoolExecutor(WORKERS) as pool:
            for pp, (c, (rows, *values)) in zip(depths, pool.map(bounds, depths), strict=True):
                self.plan.costs[pp] = (c, rows)
                self.plan.bound_s[rows], self.guess[rows], self.plan.missing[rows] = values

    def _key(self, row: int) -> ScheduleKey:
        layout = layout_of(self.plan.rows[row], self.plan.space)
        return layout.schedule, layout.pp, layout.micro_batches, layout.vpp

    def _late(self) -> bool:
        return time.perf_counter() > self.until

    def _placements(self, row: int) -> PlacementSearch:
        if row not in self.searches:
            problem = self.plan.problem(row)
            if problem.key not in self.pools:
                self.pools[problem.key] = PathPool(problem.pipeline)
            self.searches[row] = PlacementSearch(problem, self.pools[problem.key])
        return self.searches[row]

    def _keep(self, row: int, placed: LayerPlacement | None) -> None:
        if placed and not any(placed.recomputed) and (twin := self._twin(row)) != row:
            self._keep(twin, placed)  # it recomputes nothing: that is the other configuration
        if placed and (row not in self.placed or placed.seconds < self.placed[row].seconds):
            self.placed[row] = placed
            self.best = min(self.best, placed.seconds)

    def _twin(self, row: int) -> int:
        """Return the same configuration without recomputation, or this one if that is not searched."""
        rows, policy = self.plan.rows, NAMES.index("policy")
        if rows[row, policy] not in CHOSEN:
            return row
        twin = row - int(rows[row, policy]) + POLICIES.index("none")
        expected = rows[row].copy()
        expected[policy] = POLICIES.index("none")
        return twin if twin >= 0 and (rows[twin] == expected).all() else row

    def _try(self, row: int) -> None:
        """Place a configuration's layers without a proof."""
        placements = self._placements(row)
        self._keep(row, placements.improve(placements.even(self.rng), until=self.until))

    def _polish(self, row: int) -> None:
        """Improve the best placement that is known of a configuration."""
        placements = self._placements(row)
        for start in (
            np.array(self.placed[row].layers),
            *(placements.even(self.rng) for _ in range(STARTS)),
        ):
            self._keep(row, placements.improve(start, patience=PATIENCE, until=self.until))

    def _refine(self) -> None:
        """Place the layers of the best configuration better than the proof needs, in a short time."""
        if not self.placed or self._late():
            return
        row = min(self.placed, key=lambda row: self.placed[row].seconds)
        until = min(self.until, time.perf_counter() + REFINE_S)
        answer = self._placements(row).solve(self.best * (1 - AGREE), REFINED, until)
        self._keep(row, answer.best)

    def _prove(self) -> bool:
        """Close configurations until none can beat the best step by more than the gap; return whether time was up."""
        bound, chosen = self.plan.bound_s, np.isin(self.plan.rows[:, NAMES.index("policy")], CHOSEN)
        queue = [
            (float(bound[row]), False, not chosen[row], row)
            for row in map(int, np.flatnonzero(bound < self.best))
        ]
        heapq.heapify(queue)
        while queue and queue[0][0] < self._target():
            if self._late():
                return True
            known, relaxed, _, row = heapq.heappop(queue)
            if known < bound[row]:  # by its twin
                heapq.heappush(queue, (float(bound[row]), relaxed, not chosen[row], row))
                continue
            placements = self._placements(row)
            if relaxed:
                answer = placements.solve(self._target(), self.plan.tolerance, self.until)
                self._keep(row, answer.best)
                self.plan.solved += 1
                self.progress(self.plan.solved)
            else:
                placements.relax(self._target(), self.until)
                heapq.heappush(queue, (max(known, placements.bound), True, not chosen[row], row))
            for twin in (
                row,
                self._twin(row),
            ):  # where nothing is recomputed, that is a placement of this one
                bound[twin] = max(
                    bound[twin],
                    min(placements.bound, self._target()) if relaxed else placements.bound,
                )
        return False

    def _target(self) -> float:
        """Return the step that a layout must beat to be of interest."""
        return self.best / (1 + self.plan.tolerance)

    def _runners_up(self) -> None:
        """Place more configurations, for the ranked table."""
        lowest = np.maximum(self.guess, self.plan.bound_s)
        order = np.lexsort((self.guess, np.where(np.isfinite(self.guess), lowest, np.inf)))
        tried = 0
        for row in order:
            steps = sorted(p.seconds for p in self.placed.values())
            if tried >= RUNNERS_UP * self.top or not np.isfinite(self.guess[row]) or self._late():
                break
            if len(steps) >= self.top and self.plan.bound_s[row] >= steps[self.top - 1]:
                continue
            if int(row) not in self.placed:
                tried += 1
                self._try(int(row))

    def _candidate(self, row: int, placed: LayerPlacement) -> PlacedLayout:
        layout = layout_of(self.plan.rows[row], self.plan.space)
        problem = self._placements(row).p
        recomputed = placed.recomputed if problem.choice else None
        layout = layout.with_changes(chunks=placed.layers, recompute_layers=recomputed)
        ways = choices(self.plan.architecture, layout, self.plan.device)
        layout = layout.with_changes(exchange=next(iter(ways), "alltoall"))
        step = simulate_step(self.plan.architecture, layout, self.plan.device)
        if abs(step.step_s / placed.seconds - 1) > AGREE:
            raise CheckFailedError(
                f"plan: {layout.short()}: the planner has {placed.seconds:.6f} s for the step, the simulator "
                f"{step.step_s:.6f} s; tools/plan/search/bounds.py and simulate_step.py disagree"
            )
        peak = float(step.table.memory.peak[0].max())
        if peak > self.plan.room_bytes * (1 + AGREE):
            raise CheckFailedError(
                f"plan: {layout.short()}: {peak:.0f} bytes of {self.plan.room_bytes:.0f}; tools/plan/search/bounds.py and memory.py disagree"
            )
        return PlacedLayout(
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
