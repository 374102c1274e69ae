"""Place the layers of one configuration with a proven bound: integer programs for HiGHS whose rows are paths.

The makespan is the length of the longest path through the schedule, and a path's length is linear in the layers of the
chunks. So any few paths give a program whose optimum is a lower bound; the longest path at its solution becomes the next
row, until none is longer (Kelley 1960): first with fractions of layers, then with whole ones.
"""

import math
import random
import time
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telechat_moe.tools.plan.cost.columns import Floats
from telechat_moe.tools.plan.native import address, load
from telechat_moe.tools.plan.search.pipeline_program import PipelineProgram
from telechat_moe.tools.plan.search.placement_problem import (
    BISECTIONS,
    LayerPlacement,
    PlacementProblem,
)

PS = 1e-12
ROUNDS = (60, 3, 40, 40)
"""Most programs of one configuration, or of one box, by what is whole in them."""

STARTS = 12
"""Known paths that a program begins with."""

KEPT = 40
"""Known paths that a box begins with."""

NEAR = 6
"""Known paths that are added at once where a solution makes them too long."""

MOVES = 25
"""Placements near a solution of whole layers whose longest paths are added as well."""

STALL = 3, 5e-4
"""Programs of fractions without so much relative gain, after which no more are solved."""

SLACK = 1e-6
"""HiGHS' tolerance: programs are in units in which the step is near 1."""

WHOLE = 1e-5
"""How far above a whole number HiGHS' tolerance may leave one."""

FRACTIONS, STAGES, LAYERS, ALL = range(4)
"""What is whole in a program: nothing; the layers of stages; those of chunks; everything that has to be."""


class PathPool:
    """Paths of one schedule, shared by the configurations that have it."""

    def __init__(self, program: PipelineProgram) -> None:
        self.program = program
        self.counts = np.zeros((0, 3 * program.chunks + 1))
        """Operations of each kind and chunk on a path, and its sends."""
        self.layers: Floats | None = None
        """Layers of each kind and chunk, [kinds, chunks], near which the last program's paths were the longest."""

    def longest(self, times: NDArray[Any], send: int, seed: int = 0) -> tuple[int, Floats]:
        """Return the makespan for times [3, chunks] in ps and the operations of a longest path."""
        counts = np.zeros(3 * self.program.chunks + 1, dtype=np.int64)
        picoseconds = np.ascontiguousarray(times, dtype=np.int64)
        path = load().telechat_pipeline_path
        makespan = path(self.program.handle, address(picoseconds), send, seed, address(counts))
        return makespan, counts.astype(np.float64)

    def add(self, path: Floats) -> int:
        """Keep a path; return its number."""
        numbers = np.flatnonzero((self.counts == path).all(axis=1))
        if len(numbers):
            return int(numbers[0])
        self.counts = np.vstack([self.counts, path])
        return len(self.counts) - 1

    def start(self, times: NDArray[Any], send: int) -> None:
        """Fill an empty pool with a longest path through each stage, where it is slower than the others."""
        if len(self.counts):
            return
        for stage in range(self.program.stages):
            slower = np.where(self.program.route == stage, 5, 4)
            self.add(self.longest(times * slower, 4 * send)[1])


@dataclass
class PlacementAnswer:
    """What `PlacementSearch.solve` returns."""

    best: LayerPlacement | None
    bound: float
    """Lower bound of all placements, but no more than the target that was asked for."""


class PlacementSearch:
    """One configuration and what is known of its placements."""

    def __init__(self, problem: PlacementProblem, pool: PathPool) -> None:
        self.p, self.pool = problem, pool
        self._handle = load().telechat_placement_new(
            pool.program.handle, *map(address, _flat(problem))
        )
        weakref.finalize(self, load().telechat_placement_delete, self._handle)
        self.best: LayerPlacement | None = None
        self.bound = 0.0
        self._program: _PlacementProgram | None = None

    def relax(self, target: float, until: float = math.inf) -> float:
        """Return a lower bound from fractions of layers: that of any placement, or more than `target`."""
        if self._program is None:
            self._program = _PlacementProgram(self.p, self.pool)
        bound, x = self._fractions(target, until)
        self.bound = max(self.bound, bound)
        if x is not None and self.bound < target:
            self.improve(self._program.rounded(x), until=until)
        return self.bound

    def _fractions(self, target: float, until: float) -> tuple[float, Floats | None]:
        """Return the bound that fractions of layers prove, and the last solution; None: there is none."""
        assert self._program is not None
        last, still, x = 0.0, 0, None
        for _ in range(ROUNDS[FRACTIONS]):
            answer = self._program.solve(math.inf, FRACTIONS, until - time.perf_counter())
            x = answer.x
            still = still + 1 if answer.bound < last * (1 + STALL[1]) else 0
            last = max(last, answer.bound)
            if last >= target or still >= STALL[0] or x is None or not self._program.separate(x):
                break
        return last, x

    def solve(self, target: float, gap: float, until: float = math.inf) -> PlacementAnswer:
        """Prove that no placement takes less than `target`, or find one within `gap` of the best that does.

        Some stage has more layers of the larger kind than are too few for all: there is a box of placements for each
        stage that can be the first of these, and each is closed by itself.

        Args:
            target: Only placements below it are wanted, s; may be infinite.
            gap: Relative distance between the best placement and the bound that is close enough.
            until: `time.perf_counter()` after which the search ends with the bound that it has.
        """
        if self.relax(target, until) < target:
            few = too_few(self.p)
            boxes = [self._close(few, stage, target, gap, until) for stage in range(self.p.stages)]
            self.bound = max(self.bound, min(boxes))
        return PlacementAnswer(self.best, min(self.bound, target))

    def _limit(self, target: float, gap: float) -> float:
        """Return the seconds at which a bound is high enough."""
        return min(target, self.best.seconds / (1 + gap)) if self.best else target

    def _close(
        self, few: NDArray[np.int64], stage: int, target: float, gap: float, until: float
    ) -> float:
        """Return a lower bound on the placements of a box, which is the limit where nothing is below it."""
        program = self._program
        assert program is not None
        program.box(few, stage)
        bound, _ = self._fractions(self._limit(target, gap), until)
        if bound >= self._limit(target, gap):
            return self._limit(target, gap)
        for level in (STAGES, LAYERS, ALL):
            if level == LAYERS and program.tighten(self._limit(target, gap), until):
                return max(bound, self._limit(target, gap))
            for _ in range(ROUNDS[level]):
                limit, left = self._limit(target, gap), until - time.perf_counter()
                any_below = 1.0 if math.isfinite(limit) else gap / 4
                answer = program.solve(limit, level, left, gap=any_below)
                bound = max(bound, min(answer.bound, limit))
                if answer.x is None:
                    return bound
                if level >= LAYERS:
                    self.improve(*program.layers(answer.x), until=until)
                if not program.separate(answer.x):
                    break
                program.explore(answer.x)
        # a solution is below the limit that no placement meets: what the program takes for possible is not exact there
        left = until - time.perf_counter()
        answer = program.solve(self._limit(target, gap), ALL, left, gap=gap / 4)
        return max(bound, min(answer.bound, self._limit(target, gap)))

    def improve(
        self,
        layers: NDArray[Any],
        recomputed: NDArray[Any] | None = None,
        patience: int = 1,
        until: float = math.inf,
    ) -> LayerPlacement | None:
        """Move single layers off the longest path while that helps; keep and return the best placement known.

        Args:
            layers: Layers of every chunk to begin with.
            recomputed: Recomputed layers of every chunk; None: as few as fit.
            patience: How often to continue from a few layers moved at random after no move helps.
            until: `time.perf_counter()` after which it ends with what it has.
        """
        counts, native = np.ascontiguousarray(layers, dtype=np.int32), load()
        fewest = np.zeros_like(counts)
        ways = [] if recomputed is None else [np.ascontiguousarray(recomputed, dtype=np.int32)]
        if counts.sum() == sum(g.count for g in self.p.layers):  # chunks may hold fewer
            fits = native.telechat_placement_finish(self._handle, address(counts), address(fewest))
            ways += [fewest] if fits else []
        for way in ways:
            moved, left = counts.copy(), until - time.perf_counter()
            arrays = address(moved), address(way)
            seconds = native.telechat_placement_improve(self._handle, *arrays, patience, left)
            if math.isfinite(seconds) and (not self.best or seconds < self.best.seconds):
                self.best = LayerPlacement(
                    layers=tuple(moved.tolist()), recomputed=tuple(way.tolist()), seconds=seconds
                )
        return self.best

    def even(self, rng: random.Random) -> NDArray[np.int64]:
        """Return the layers of every chunk: equal within a round of chunks, one more in some rounds."""
        p = self.p
        total = sum(g.count for g in p.layers)
        counts = np.clip(total // p.number, p.lowest, p.highest)
        while counts.sum() > total:
            counts[rng.choice([c for c in range(p.number) if counts[c] > p.lowest[c]])] -= 1
        rounds = list(range(p.chunks))
        rng.shuffle(rounds)
        order = [r * p.stages + s for r in rounds for s in range(p.stages)]
        left = total - int(counts.sum())
        while left and (counts < p.highest).any():
            for chunk in order:
                if left and counts[chunk] < p.highest[chunk]:
                    counts[chunk], left = counts[chunk] + 1, left - 1
        return counts


@dataclass
class _Solution:
    """What HiGHS finds."""

    bound: float
    """Lower bound, s; infinity: nothing is below the limit."""
    x: Floats | None
    """Values of the columns; None: none were found."""


class _PlacementProgram:
    """The program of a configuration: a matrix of rows ``low <= a x <= high``, to which paths are added.

    Columns, in units in which their values are near 1 or whole: layers of each kind in each chunk; layers of the larger
    kind of each stage; recomputed layers of each kind in each chunk; whether the first kind goes on behind a chunk;
    whether all of it is recomputed in a chunk; whether a stage recomputes layers of a kind; whether it is the one behind
    whose backward pass the reduction hides; working set of each stage; makespan, U_0, U_1, step and hidden seconds.
    """

    def __init__(self, p: PlacementProblem, pool: PathPool) -> None:
        self.p, self.pool = p, pool
        n, kinds, stages = p.number, len(p.layers), p.stages
        both = n * (kinds - 1)
        widths = [kinds * n, stages, kinds * n * p.choice, both, both * p.choice]
        widths += [kinds * stages * p.choice, stages, stages]
        starts = [int(start) for start in np.cumsum([0, *widths])]
        self.layer, self.stage, self.recomputed, self.front, self.every = starts[:5]
        self.redo, self.hides, self.working, self.span = starts[5:]
        self.step, self.hidden, self.width = self.span + 3, self.span + 4, self.span + 5
        mean = (p.fixed.sum() + sum(g.count * sum(g.times) for g in p.layers)) / stages
        self.second = max(mean * p.micro_batches * PS, p.tail.base, PS)
        """Seconds of a unit of time."""
        self.byte = float(max(*p.memory, 1))
        self.parameter = np.maximum(p.least_weight, 1.0)
        self.low, self.high = np.zeros(self.width), np.full(self.width, np.inf)
        columns = np.arange(self.width)
        of_stages = (columns >= self.stage) & (columns < self.recomputed)
        of_layers = (columns < self.recomputed) | (columns >= self.front) & (columns < self.every)
        self.level = np.array([0 * columns, of_stages, of_layers, columns < self.working])
        self._rows: list[dict[int, float]] = []
        self._limits: list[tuple[float, float]] = []
        self._counts()
        self._memory()
        self._tail()
        matrix = np.zeros((len(self._rows), self.width))
        for number, terms in enumerate(self._rows):
            matrix[number, list(terms)] = list(terms.values())
        self._whole_space = self.low.copy(), self.high.copy()
        self._base = matrix, np.array(self._limits)
        self._paths: set[int] = set()
        even = p.fixed + sum(np.outer(g.times, np.full(n, g.count / n)) for g in p.layers)
        pool.start(np.rint(even).astype(np.int64), p.send)
        self._begin(STARTS)

    def _begin(self, number: int) -> None:
        """Begin with so many of the known paths, those that are the longest near the last solution."""
        p, pool = self.p, self.pool
        self.matrix, self.limits = self._base
        self._paths.clear()
        if pool.layers is None:
            self._add(range(len(pool.counts)))
            return
        times = _with_layers(p, pool.layers)
        self._add(np.argsort(-self._lengths(times))[:number].tolist())

    def _row(self, terms: dict[int, float], low: float, high: float) -> None:
        self._rows.append(terms)
        self._limits.append((low, high))

    def _counts(self) -> None:
        """Add the rows of whole layers: all of them, in their order, in each chunk what it may hold."""
        p, n, kinds = self.p, self.p.number, range(len(self.p.layers))
        for g in kinds:
            columns = range(self.layer + g * n, self.layer + (g + 1) * n)
            self._row(dict.fromkeys(columns, 1.0), p.layers[g].count, p.layers[g].count)
            self.high[list(columns)] = np.minimum(p.highest, p.layers[g].count)
            for c in range(n) if p.choice else ():
                self._row({self.recomputed + g * n + c: 1.0, columns[c]: -1.0}, -np.inf, 0.0)
        for c in range(n):
            terms = {self.layer + g * n + c: 1.0 for g in kinds}
            self._row(terms, float(p.lowest[c]), float(p.highest[c]))
        for s in range(p.stages):
            terms = {
                self.layer + p.bulk * n + int(c): 1.0 for c in np.flatnonzero(p.pipeline.route == s)
            }
            self._row(terms | {self.stage + s: -1.0}, 0.0, 0.0)
        if len(kinds) == 2:
            self._order()

    def _order(self) -> None:
        """Add the rows of two kinds: behind a layer of the second there is none of the first."""
        p, n = self.p, self.p.number
        first, second = (g.count for g in p.layers)
        on = range(self.front, self.front + n)
        self.high[list(on)] = 1.0
        before = np.cumsum(p.lowest)  # fewest layers up to a chunk
        self.high[list(on)] = before < first
        self.low[list(on)] = p.lowest.sum() - before > second
        for c in range(n):
            if self.high[on[c]]:
                limit = min(int(p.highest[c]), second)
                self._row({self.layer + n + c: 1.0, on[c]: float(limit)}, -np.inf, limit)
            if p.choice and c <= first:
                self._first_ones(c)
            if c + 1 < n and not self.high[on[c]]:
                self.high[self.layer + c + 1] = 0.0
            elif c + 1 < n:
                limit = min(int(p.highest[c + 1]), first)
                self._row({self.layer + c + 1: 1.0, on[c]: -float(limit)}, -np.inf, 0.0)
                self._row({on[c + 1]: 1.0, on[c]: -1.0}, -np.inf, 0.0)

    def _first_ones(self, c: int) -> None:
        """Add the rows of a chunk whose first layers are recomputed: none of the second kind before all of the first."""
        p, n = self.p, self.p.number
        first, second = (float(min(int(p.highest[c]), g.count)) for g in p.layers)
        every, redone = self.every + c, self.recomputed + c
        self.high[every] = 1.0
        self._row({redone + n: 1.0, every: -second}, -np.inf, 0.0)
        self._row({self.layer + c: 1.0, redone: -1.0, every: first}, -np.inf, first)

    def _memory(self) -> None:
        """Add the rows of each stage's memory and working set."""
        p, n, byte = self.p, self.p.number, self.byte
        for s in range(p.stages):
            chunks = np.flatnonzero(p.pipeline.route == s).tolist()
            required = p.working if any(p.lowest[chunks]) else 0
            self.low[self.working + s] = max(required, p.buffer[s]) / byte
            if (
                required < p.working
            ):  # it may have no layers; with all of them it needs all of the working set
                share = -p.working / byte / sum(g.count for g in p.layers)
                columns = [self.layer + g * n + c for g in range(len(p.layers)) for c in chunks]
                terms = dict.fromkeys(columns, share) | {self.working + s: 1.0}
                self._row(terms, 0.0, np.inf)
            room: dict[int, float] = {self.working + s: 1.0}
            for g, kind in enumerate(p.layers):
                activations, inputs = kind.activations[s], (kind.inputs or kind.activations)[s]
                for c in chunks:
                    room[self.layer + g * n + c] = (kind.states + activations) / byte
                    if p.choice:
                        room[self.recomputed + g * n + c] = (inputs - activations) / byte
                if p.choice:
                    self._recompute(s, g, chunks)
            self._row(room, -np.inf, p.memory[s] / byte)

    def _recompute(self, s: int, g: int, chunks: list[int]) -> None:
        kind, redo = self.p.layers[g], self.redo + g * self.p.stages + s
        self.high[redo] = 1.0
        if kind.working / self.byte <= self.low[self.working + s]:
            return
        self._row({redo: kind.working / self.byte, self.working + s: -1.0}, -np.inf, 0.0)
        columns = [self.recomputed + g * self.p.number + c for c in chunks]
        limit_above = float(sum(min(self.p.highest[c], kind.count) for c in chunks))
        self._row(
            dict.fromkeys(columns, 1.0) | {redo: -min(limit_above, float(kind.count))}, -np.inf, 0.0
        )

    def _tail(self) -> None:
        """Add the rows of the largest stage and of the step."""
        p, n = self.p, self.p.number
        for i, unit in enumerate(self.parameter):
            self.low[self.span + 1 + i] = p.least_weight[i] / unit
            for s in range(p.stages):
                terms: dict[int, float] = {self.span + 1 + i: -1.0}
                for g, kind in enumerate(p.layers):
                    for c in np.flatnonzero(p.pipeline.route == s).tolist():
                        terms[self.layer + g * n + c] = kind.weights[i] / unit
                self._row(terms, -np.inf, -float(p.stage_weights[i, s]) / unit)
        for k, constant, slopes in p.tail.lines(p.micro_batches):
            slope = slopes * self.parameter / self.second
            terms = {self.span: k, self.step: -1.0} | {
                self.span + 1 + i: float(v) for i, v in enumerate(slope)
            }
            self._row(terms, -np.inf, -constant / self.second)
        self._hide()

    def _hide(self) -> None:
        """Add the rows of what a stage hides: step >= makespan + reduction + update + base - hidden."""
        p, n, tail = self.p, self.p.number, self.p.tail
        slope = (np.array(tail.reduce) + np.array(tail.update)) * self.parameter / self.second
        terms = {self.span: 1.0, self.step: -1.0, self.hidden: -1.0}
        terms |= {self.span + 1 + i: float(v) for i, v in enumerate(slope)}
        self._row(terms, -np.inf, -(tail.base + tail.start) / self.second)
        share, beyond = tail.overlap_limit
        self._row(
            {self.hidden: 1.0, self.span: -share / p.micro_batches}, -np.inf, beyond / self.second
        )
        stages = range(p.stages)
        self.high[self.hides : self.hides + p.stages] = 1.0
        self._row({self.hides + s: 1.0 for s in stages}, 1.0, 1.0)
        forward, backward = (w * PS / self.second for w in tail.overlap_weights)
        limit_above = (
            sum(g.count * (sum(g.times) + g.recompute_time) for g in p.layers) + p.fixed.sum()
        )
        limit_above *= float(max(forward, backward))
        for s in stages:
            chunks = np.flatnonzero(p.pipeline.route == s).tolist()
            terms = {self.hidden: 1.0, self.hides + s: limit_above}
            for g, kind in enumerate(p.layers):
                for c in chunks:
                    f, b, w = kind.times
                    terms[self.layer + g * n + c] = -forward * f - backward * (b + w)
                    if p.choice:
                        terms[self.recomputed + g * n + c] = -backward * kind.recompute_time
            fixed = forward * p.fixed[0, chunks].sum() + backward * p.fixed[1:, chunks].sum()
            self._row(terms, -np.inf, limit_above + float(fixed))

    def _add(self, numbers: Any) -> None:
        """Add paths of the pool as rows."""
        new = [i for i in numbers if i not in self._paths]
        self._paths.update(new)
        if not new:
            return
        p, n = self.p, self.p.number
        counts = self.pool.counts[new][:, :-1].reshape(len(new), 3, n)
        unit = PS / self.second
        rows = np.zeros((len(new), self.width))
        for g, kind in enumerate(p.layers):
            start = self.layer + g * n
            rows[:, start : start + n] = np.tensordot(counts, kind.times, (1, 0)) * unit
            if p.choice:
                start = self.recomputed + g * n
                rows[:, start : start + n] = counts[:, 1] * kind.recompute_time * unit
        rows[:, self.span] = -1.0
        fixed = (counts * p.fixed).sum(axis=(1, 2)) + self.pool.counts[new, -1] * p.send
        limits = np.column_stack([np.full(len(new), -np.inf), -fixed * unit])
        self.matrix = np.vstack([self.matrix, rows])
        self.limits = np.vstack([self.limits, limits])

    def box(self, few: NDArray[np.int64], stage: int) -> None:
        """Restrict the layers of the larger kind: the first stage with more than `few` is `stage`."""
        stages = slice(self.stage, self.stage + self.p.stages)
        number = np.arange(self.p.stages)
        self.low[:], self.high[:] = self._whole_space
        self._begin(KEPT)
        self.low[stages] = np.where(number == stage, few + 1, 0)
        self.high[stages] = np.where(number < stage, few, np.inf)

    def solve(self, limit: float, level: int, limit_s: float, gap: float = 0.0) -> _Solution:
        """Return the optimum below `limit` seconds, or one so near to it; `level` is one of those above."""
        if limit_s <= 0:
            return _Solution(-math.inf, None)
        high = self.high.copy()
        high[self.step] = limit / self.second
        cost = np.eye(1, self.width, self.step)[0]
        answer = self._milp(cost, high, level, limit_s, gap)
        if answer.status == 2:
            return _Solution(math.inf, None)
        bound = answer.mip_dual_bound if level else answer.fun
        bound_s = -math.inf if bound is None else bound * self.second * (1 - SLACK)
        return _Solution(bound_s, answer.x)

    def tighten(self, limit: float, until: float) -> bool:
        """Limit the layers of stages in a box to what is possible below a step; return whether the box is empty then."""
        high = self.high.copy()
        high[self.step] = limit / self.second
        for column in range(self.stage, self.stage + self.p.stages):
            if self.low[column] == high[column] or time.perf_counter() > until:
                continue
            answer = self._milp(-np.eye(1, self.width, column)[0], high, FRACTIONS, 1e6, 0.0)
            if answer.status == 2:
                return True
            if answer.fun is not None:
                limit_above = np.floor(-answer.fun + WHOLE)
                self.high[column] = high[column] = min(high[column], limit_above)
        return False

    def _milp(self, cost: Floats, high: Floats, level: int, limit_s: float, gap: float) -> Any:
        from scipy import optimize  # slow to import, and other verbs do without it

        solver: Any = optimize
        return solver.milp(
            cost,
            constraints=solver.LinearConstraint(self.matrix, *self.limits.T),
            bounds=solver.Bounds(self.low, high),
            integrality=self.level[level],
            options={
                "time_limit": min(limit_s, 1e6),
                "mip_rel_gap": gap,
                "presolve": level != FRACTIONS,  # it takes longer than these programs
            },
        )

    def rounded(self, x: Floats) -> NDArray[np.int64]:
        """Return whole layers of every chunk near a solution's."""
        p, n = self.p, self.p.number
        fractions = x[: len(p.layers) * n].reshape(-1, n).sum(axis=0)
        counts = np.clip(np.floor(fractions + 1e-6), p.lowest, p.highest).astype(np.int64)
        total = sum(g.count for g in p.layers)
        while (left := total - int(counts.sum())) and abs(left) <= total:
            free = counts < p.highest if left > 0 else counts > p.lowest
            if not free.any():
                break
            step = 1 if left > 0 else -1
            counts[int(np.where(free, step * (fractions - counts), -np.inf).argmax())] += step
        return counts

    def layers(self, x: Floats) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """Return the layers of every chunk of a solution, and the recomputed ones, the first of each chunk."""
        n, kinds = self.p.number, len(self.p.layers)
        both = np.rint(x[: kinds * n]).reshape(kinds, n)
        counts = both.sum(axis=0).astype(np.int64)
        if not self.p.choice:
            return counts, None
        redone = np.rint(x[self.recomputed : self.recomputed + kinds * n]).reshape(kinds, n)
        return counts, redone.sum(axis=0).astype(np.int64)

    def _lengths(self, times: NDArray[Any]) -> Floats:
        """Return how long known paths are for times [3, chunks], ps."""
        return self.pool.counts[:, :-1] @ times.ravel() + self.pool.counts[:, -1] * self.p.send

    def explore(self, x: Floats) -> None:
        """Add the longest paths of placements near a solution."""
        p, n, rng = self.p, self.p.number, random.Random(len(self._paths))
        layers = x[: len(p.layers) * n].reshape(-1, n)
        for seed in range(MOVES):
            moved = layers.copy()
            for _ in range(rng.randint(1, 2)):
                a, b = rng.randrange(n), rng.randrange(n)
                if moved[p.bulk, a] >= 1:
                    moved[p.bulk, a] -= 1
                    moved[p.bulk, b] += 1
            times = _with_layers(p, moved)
            self._add([self.pool.add(self.pool.longest(np.rint(times), p.send, seed)[1])])

    def separate(self, x: Floats) -> bool:
        """Add paths that are longer than a solution says; return whether there are any."""
        p, n = self.p, self.p.number
        times = p.fixed.astype(np.float64)
        for g, kind in enumerate(p.layers):
            times += np.outer(kind.times, x[self.layer + g * n : self.layer + (g + 1) * n])
            if p.choice:
                start = self.recomputed + g * n
                times[1] += kind.recompute_time * x[start : start + n]
        span = x[self.span] * self.second / PS * (1 + 2 * SLACK)
        lengths = self._lengths(times)
        self.pool.layers = x[: len(p.layers) * n].reshape(-1, n)
        longest = [int(i) for i in np.argsort(-lengths)[:NEAR] if lengths[i] > span]
        new = [i for i in longest if i not in self._paths]
        if not new:
            makespan, path = self.pool.longest(np.rint(times), p.send, len(self._paths))
            number = self.pool.add(path)
            new = [number] if makespan > span and number not in self._paths else []
        self._add(new)
        return bool(new)


def _with_layers(p: PlacementProblem, layers: Floats) -> Floats:
    """Return the operations' times, [operations, chunks], with so many layers of each kind, [kinds, chunks]."""
    times = p.fixed.astype(np.float64)
    for g, kind in enumerate(p.layers):
        times += np.outer(kind.times, layers[g : g + 1])
    return times


def too_few(p: PlacementProblem) -> NDArray[np.int64]:
    """Return layers of the larger kind of every stage that are too few together: the most in an equal time that is."""
    layer = p.layers[p.bulk]
    spent = np.bincount(p.pipeline.route, weights=p.fixed.sum(axis=0), minlength=p.stages)
    layer_time = max(sum(layer.times), 1)

    def few(time: float) -> NDArray[np.int64]:
        return np.maximum(np.floor((time - spent) / layer_time), 0).astype(np.int64)

    low, high = 0.0, float(spent.max() + layer_time * (layer.count + 1))
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if few(middle).sum() >= layer.count else (middle, high)
    return few(low)


def _flat(p: PlacementProblem) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the whole numbers and the reals of a problem in the order in which placement.cc takes them."""
    integers: list[Any] = [(p.stages, len(p.layers), p.choice, p.send, p.working)]
    integers += [p.lowest, p.highest, p.fixed.ravel(), p.memory, p.buffer]
    tail = p.tail
    reals: list[Any] = [p.stage_weights.ravel(), (tail.base, tail.start, tail.exposed)]
    reals += [tail.reduce, tail.update, tail.overlap_weights]
    for layer in p.layers:
        integers += [(layer.count, *layer.times, layer.states, layer.recompute_time, layer.working)]
        integers += [layer.activations, layer.inputs or layer.activations]
        reals += [layer.weights]
    return (
        np.concatenate(integers, dtype=np.int64, casting="unsafe"),
        np.concatenate(reals, dtype=np.float64, casting="unsafe"),
    )
