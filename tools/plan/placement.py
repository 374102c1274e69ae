"""The inner problem, solved and proven: branch and bound over linear programs whose rows are paths.

The makespan is the largest of the lengths of all paths through the schedule. A path's length is linear in the layers of the
chunks, so any few paths give a linear program that is a lower bound; the longest path at its solution is the next row, until
there is none that is longer (Kelley 1960). Its multipliers (:class:`Multipliers`) are the proof: they weigh paths, stages'
memory and parameters into one number for a layer in each chunk, and the least sum of those is found by sorting. They hold for
every configuration with the same schedule, so one program prunes many. Where the solution is not whole, layers of a chunk are
bounded from above and below, and each half is solved again.

Good placements come from rounding these solutions and from moving single layers off the longest path.
"""

import heapq
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from telechat_moe.tools.plan.linear_program import LinearProgram
from telechat_moe.tools.plan.pipeline import Path
from telechat_moe.tools.plan.placement_problem import Layers, Placed, Problem, structures

PS = 1e-12
GIB = 2.0**30
MILLION = 1e6
CLOSE = 1e-7
"""Relative difference below which two steps are the same."""

LACKING = 1e4
"""Seconds that a missing GiB or a layer too many costs in the program: more than any step, so that what does not fit is proven
not to fit by the same multipliers."""

WAYS = 5000
"""Ways to recompute layers that are looked at one by one."""

STARTS = 3
"""Paths that a linear program begins with, for each of a few placements."""


@dataclass(frozen=True)
class Box:
    """Some of the placements of a configuration."""

    low: np.ndarray
    """Layers of the larger kind of every chunk, at least and at most."""

    high: np.ndarray
    few_low: np.ndarray
    """The same of the smaller kind."""

    few_high: np.ndarray
    fewest: np.ndarray
    """Layers of the larger kind of every stage, at least and at most."""

    most: np.ndarray


@dataclass(frozen=True)
class Multipliers:
    """Weights that add rows of the program up to one bound; any that are not negative prove something."""

    share: float
    """Of the two lines of `Rest.lines`, the weight of the first; the second has the rest."""

    paths: tuple[tuple[int, float], ...]
    """Number of a path in its pool and its weight; they add up to 1."""

    counts: np.ndarray
    """Operations of the weighted paths, [3, chunks]."""

    sends: float
    parameters: np.ndarray
    """Weight of each stage's parameters, and of what some stage has at least, [2, stages + 1]; each row adds up to 1."""

    memory: np.ndarray
    """Seconds for a byte of each stage."""

    most: np.ndarray
    """Seconds for a layer of each stage, where so many at most fit or are fast enough."""

    fewest: np.ndarray
    """Seconds for a layer of each stage, where so many at least are asked for."""


class Pool:
    """Paths of one schedule."""

    def __init__(self) -> None:
        self.paths: list[Path] = []
        self._rows = np.zeros((64, 1))
        self._seen: dict[tuple[bytes, int], int] = {}

    def add(self, path: Path) -> int:
        """Keep a path; return its number."""
        key = path.counts.tobytes(), path.sends
        if key not in self._seen:
            self._seen[key] = len(self.paths)
            self.paths.append(path)
            row = np.append(path.counts.ravel(), path.sends)
            if len(self.paths) == 1:
                self._rows = np.zeros((64, row.size))
            elif len(self.paths) > len(self._rows):
                self._rows = np.vstack([self._rows, np.zeros_like(self._rows)])
            self._rows[len(self.paths) - 1] = row
        return self._seen[key]

    @property
    def counts(self) -> np.ndarray:
        """Counts and sends of every path, [paths, 3 chunks + 1]."""
        return self._rows[: len(self.paths)]


@dataclass
class Part:
    """Some of the placements, and why none is faster: multipliers, or parts that hold them all between them."""

    proof: Multipliers | None = None
    empty: bool = False
    """The box does not hold so many layers at all."""

    point: bool = False
    """All layers stand somewhere: each of the few ways to recompute was looked at."""

    cut: str = ""
    """What the parts differ in: `longest` (each stage in turn has more layers than `at` says), `structure` (where the layers
    of the smaller kind stand), `stage` or `chunk` (number `at[0]`: at most `at[1]` layers of the larger kind, or more)."""

    at: tuple[int, ...] = ()
    parts: list["Part"] = field(default_factory=list)

    def leaves(self) -> int:
        """Return how many parts are proven by themselves."""
        return sum(p.leaves() for p in self.parts) if self.parts else 1


@dataclass
class Answer:
    """What `Inner.solve` returns."""

    best: Placed | None
    bound: float
    """No placement is faster; at most what was asked for."""

    tree: Part
    root: list[Multipliers]
    """Of the first boxes, one for each stage that may be the longest: they are tried on other configurations."""

    nodes: int


@dataclass(order=True)
class _Node:
    bound: float
    number: int
    box: Box = field(compare=False)
    part: Part = field(compare=False)
    placed: bool = field(compare=False)
    """The layers of the smaller kind stand where they stand."""


@dataclass
class _Relaxed:
    bound: float
    counts: np.ndarray
    """Layers of the larger kind, of every chunk."""

    few: np.ndarray
    proof: Multipliers


class Inner:
    """One configuration."""

    def __init__(self, problem: Problem, pool: Pool) -> None:
        self.p, self.pool = problem, pool
        self.bulk = problem.layers[problem.bulk]
        self.other = problem.layers[1 - problem.bulk] if len(problem.layers) > 1 else None
        self.route = problem.pipeline.route
        self.lines = problem.rest.lines(problem.micro_batches)
        self.stage = np.zeros((problem.stages, problem.number))
        self.stage[self.route, np.arange(problem.number)] = 1
        work = np.where(self.stage @ problem.lowest > 0, problem.held, 0)
        self.room = np.array(problem.memory, dtype=np.float64) - np.maximum(work, problem.buffer)
        self.frame = _Frame(self)

    # bounds ---------------------------------------------------------------------------------------------------

    def whole(self) -> Box:
        """Return all placements, and some that do not exist: the layers of the smaller kind in any chunk that they can reach."""
        p, none = self.p, np.zeros(self.p.number, dtype=np.int64)
        low, high = p.lowest.copy(), none + self.bulk.count
        few_high = none.copy()
        if self.other:
            reach = np.arange(p.number) if p.bulk else np.arange(p.number)[::-1]
            few_high[reach <= self.other.count] = self.other.count
            low[few_high > 0] = 0
        stages = np.zeros(p.stages, dtype=np.int64)
        return Box(low, high, none, few_high, stages, stages + self.bulk.count)

    def fixed(self, box: Box, structure: tuple[int, ...]) -> Box:
        """Return the placements of a box whose layers of the smaller kind stand so."""
        p, few = self.p, np.array(structure)
        low, high = np.maximum(box.low, p.lowest - few), box.high.copy()
        low = np.maximum(low, 0)
        held = np.flatnonzero(few)
        if len(held):
            closed = slice(0, held[-1]) if p.bulk else slice(held[0] + 1, None)
            low[closed] = high[closed] = 0
        return replace(box, low=low, high=high, few_low=few, few_high=few)

    def most(self, box: Box, target: float) -> np.ndarray:
        """Return how many layers of the larger kind a stage can hold, and take less than `target`."""
        p, bulk = self.p, self.bulk
        room = self.room - self.stage @ (box.few_low * self._least_bytes(self.other))
        each = self._least_bytes(bulk)
        fit = np.floor((room + 0.1) / np.maximum(self.stage @ each / p.chunks, 1e-9))
        fit = np.where(room < 0, -1, fit)
        if math.isfinite(target):
            fit = np.minimum(fit, self._within(box, (target - self.least_rest())))
        return np.minimum(fit, box.most)

    def _least_bytes(self, layer: Layers | None) -> np.ndarray:
        """Return what a layer needs at least, of every chunk."""
        if layer is None:
            return np.zeros(self.p.number)
        kept = layer.entry if self.p.choice else layer.kept
        return (layer.states + np.array(kept, dtype=np.float64))[self.route]

    def _within(self, box: Box, makespan: float) -> np.ndarray:
        """Return the layers of the larger kind that each stage can have in a pipeline of so many seconds."""
        p = self.p
        spent = p.fixed.sum(axis=0) + box.few_low * (sum(self.other.times) if self.other else 0)
        one = max(sum(self.bulk.times), 1)
        left = makespan / PS / p.micro_batches - self.stage @ spent
        return np.floor(left / one + 1e-9)

    def longest(self, box: Box) -> tuple[int, ...]:
        """Return layers of every stage that are too few together: some stage has more. Empty: nothing is known."""
        p, number = self.p, self.bulk.count
        if p.stages == 1:
            return ()
        fit = self.most(box, math.inf)
        low, high = 0.0, float((self.stage @ p.fixed.sum(axis=0)).max()) * PS * p.micro_batches
        high += sum(self.bulk.times) * PS * p.micro_batches * (number + 1)
        for _ in range(50):
            middle = (low + high) / 2
            enough = np.maximum(np.minimum(self._within(box, middle), fit), 0).sum() >= number
            low, high = (low, middle) if enough else (middle, high)
        few = np.maximum(np.minimum(self._within(box, low), fit), 0)
        return tuple(int(n) for n in few) if few.sum() < number else ()

    def cut(self, box: Box, cut: str, at: tuple[int, ...]) -> list[Box]:
        """Return the boxes that a box is cut into; see :class:`Part`."""
        if cut == "structure":
            return [self.fixed(box, s) for s in structures(self.p)]
        if cut == "longest":
            more = [box.fewest.copy() for _ in at]
            for stage, n in enumerate(at):
                more[stage][stage] = max(more[stage][stage], n + 1)
            return [replace(box, fewest=m) for m in more]
        most, fewest = (box.most, box.fewest) if cut == "stage" else (box.high, box.low)
        most, fewest = most.copy(), fewest.copy()
        most[at[0]], fewest[at[0]] = at[1], at[1] + 1
        if cut == "stage":
            return [replace(box, most=most), replace(box, fewest=fewest)]
        return [replace(box, high=most), replace(box, low=fewest)]

    def holds(self, tree: Part, box: Box, target: float) -> bool:
        """Return whether a tree proves that no placement takes less than `target`: that of a neighbour, perhaps."""
        if tree.parts:
            boxes = self.cut(box, tree.cut, tree.at)
            return all(self.holds(p, b, target) for p, b in zip(tree.parts, boxes, strict=True))
        most = self.most(box, target)
        if not self._possible(box, most):
            return True
        if tree.point:
            one = self.exact(box)
            return self._few_ways(box) and (one is None or one.seconds >= target * (1 - CLOSE))
        return tree.proof is not None and self.bound(tree.proof, box, most) >= target * (1 - CLOSE)

    def _possible(self, box: Box, most: np.ndarray) -> bool:
        number = self.bulk.count
        below = np.maximum(self.stage @ box.low, box.fewest)
        above = np.minimum(self.stage @ box.high, most)
        return bool((below <= above).all() and below.sum() <= number <= above.sum())

    def least_rest(self) -> float:
        """Return what follows the pipeline at least: some stage has the average of the larger kind."""
        p = self.p
        _, base, slope = self.lines[0]
        return base + float(slope @ p.least_weight)

    def bound(self, proof: Multipliers, box: Box, most: np.ndarray) -> float:
        """Return what multipliers prove: the least sum over all placements in a box."""
        p = self.p
        (k0, c0, u0), (k1, c1, u1) = self.lines
        share = proof.share
        k, c, u = (share * a + (1 - share) * b for a, b in ((k0, k1), (c0, c1), (u0, u1)))
        counts = k * PS * proof.counts
        weigh = u[:, None] * proof.parameters  # seconds for a parameter of a stage
        weigh, least = weigh[:, :-1], weigh[:, -1]
        total = c + float((counts * p.fixed).sum()) + k * PS * proof.sends * p.send
        total += float((weigh * p.weight).sum() + least @ p.least_weight)
        total += float(proof.fewest @ box.fewest - proof.memory @ self.room - proof.most @ most)

        def each(layer: Layers) -> np.ndarray:
            found = _along(counts, layer.times) + (layer.weights @ weigh)[self.route]
            found += (proof.memory * (layer.states + np.array(layer.kept)))[self.route]
            if p.choice:
                saved = (proof.memory * _saved(layer))[self.route]
                found += np.minimum(counts[1] * layer.again - saved, 0.0)
            return found

        one = each(self.bulk) + (proof.most - proof.fewest)[self.route]
        total += _least(one, box.low, box.high, self.bulk.count)
        if self.other:
            total += _least(each(self.other), box.few_low, box.few_high, self.other.count)
        return total

    def relax(self, box: Box, most: np.ndarray, target: float, rounds: int) -> _Relaxed | None:
        """Return the best fractions of layers, rows added until the bound meets `target` or no path is longer.

        None: the box does not hold so many layers.
        """
        p = self.p
        if not self._possible(box, most):
            return None
        row = _Rows(self, box, most)
        row.start()
        center, step, still = row.x, 1.0, 0
        for turn in range(rounds):
            tried = row.x * step + center * (1 - step)
            before, center = row.value, tried
            makespan, path = p.pipeline.path(row.times(tried), p.send, seed=turn)
            row.add(self.pool.add(path))
            if not row.solve() or row.value >= target * (1 - CLOSE / 2):
                break
            still = still + 1 if row.value - before < 1e-6 * row.value else 0
            step = 1.0 if still > 2 else 0.5
            if makespan * PS <= row.makespan * (1 + 1e-6) or still > 5:
                break
        found = row.proof()
        return _Relaxed(self.bound(found, box, most), row.x[row.n], row.few(row.x), found)

    # the search -----------------------------------------------------------------------------------------------

    def solve(
        self,
        target: float,
        *,
        best: Placed | None = None,
        nodes: int = 400,
        until: float = math.inf,
        rng: random.Random | None = None,
    ) -> Answer:
        """Prove that no placement takes less than `target`, or find those that do.

        Args:
            target: Only placements below it are wanted, s.
            best: A placement that is known.
            nodes: Boxes that are looked at; then the bound stays where it is.
            until: `time.perf_counter()` after which the search ends.
            rng: For moves of the local search.
        """
        rng = rng or random.Random(1)
        tree, whole = Part(), self.whole()
        if few := self.longest(whole):
            tree.cut, tree.at = "longest", few
            tree.parts = [Part() for _ in few]
            boxes = self.cut(whole, "longest", few)
        else:
            boxes = [whole]
        parts = tree.parts or [tree]
        todo = [_Node(0.0, i, b, parts[i], not self.other) for i, b in enumerate(boxes)]
        first, number, seen, open_bound = len(todo), len(todo), 0, math.inf
        root: list[Multipliers] = []
        while todo:
            node = heapq.heappop(todo)
            limit = min(target, best.seconds if best else math.inf)
            if seen >= nodes + first or time.perf_counter() > until:
                open_bound = min(open_bound, node.bound)
                continue
            seen += 1
            most = self.most(node.box, limit)
            found = self.relax(node.box, most, limit, 60 if seen <= first else 12)
            node.part.proof, node.part.empty = found and found.proof, found is None
            if found and node.number < first:
                root.append(found.proof)
            if found is None or found.bound >= limit * (1 - CLOSE):
                continue
            if seen == 1 or seen % 16 == 0 or _integral(found.counts):
                patience = 2 if seen == 1 else int(seen % 16 == 0)
                got = self.improve(self.round(found.counts, found.few), rng, patience)
                best = min(
                    (one for one in (best, got) if one), key=lambda one: one.seconds, default=None
                )
                limit = min(target, best.seconds if best else math.inf)
                if found.bound >= limit * (1 - CLOSE):
                    continue
            cut, at = self._where(node, found)
            if not cut:
                one, node.part.point = self.exact(node.box), self._few_ways(node.box)
                best = one if one and one.seconds < limit else best
                open_bound = min(open_bound, math.inf if node.part.point else found.bound)
                continue
            boxes = self.cut(node.box, cut, at)
            node.part.cut, node.part.at = cut, at
            node.part.parts = [Part() for _ in boxes]
            for box, part in zip(boxes, node.part.parts, strict=True):
                number += 1
                placed = node.placed or cut == "structure"
                heapq.heappush(todo, _Node(found.bound, number, box, part, placed))
        limit = min(target, best.seconds if best else math.inf)
        return Answer(best, min(limit, open_bound), tree, root, seen)

    def _where(self, node: _Node, found: _Relaxed) -> tuple[str, tuple[int, ...]]:
        """Return where to cut a box, as :class:`Part` says it; nothing: there is nothing left to cut."""
        box = node.box
        if not node.placed:
            return "structure", ()
        stages = self.stage @ found.counts
        apart = np.abs(stages - np.rint(stages))
        if apart.max() > 1e-4:
            stage = int(apart.argmax())
            return "stage", (stage, math.floor(stages[stage]))
        apart = np.abs(found.counts - np.rint(found.counts))
        apart[box.low == box.high] = -1.0
        if apart.max() < 0:
            return "", ()
        # the last chunks stand beside MTP and head, which decide most: half the boxes of the most fractional one
        broken = np.flatnonzero(apart > 1e-4)
        chunk = int(broken[-1]) if len(broken) else int(apart.argmax())
        value = math.floor(found.counts[chunk] + 1e-6)
        return "chunk", (
            chunk,
            min(max(value, int(box.low[chunk])), int(box.high[chunk]) - 1),
        )

    def exact(self, box: Box) -> Placed | None:
        """Return the best placement of a box whose layers all stand somewhere; None: none fits, or there are too many."""
        p, counts = self.p, box.low + box.few_low
        found: Placed | None = None
        if not self._few_ways(box):
            return None
        for again in product(*self._ways(counts)):
            more = np.array(again)
            if (p.bytes(p.kinds(counts), p.kinds_again(counts, more)) <= p.memory).all():
                took = p.seconds(counts, more)
                if found is None or took < found.seconds:
                    found = Placed(layers=tuple(map(int, counts)), again=again, seconds=took)
        return found

    def _ways(self, counts: np.ndarray) -> list[range]:
        """Return how many layers each chunk may recompute: none where its stage fits as it is."""
        kinds = self.p.kinds(counts)
        over = self.p.bytes(kinds, np.zeros_like(kinds)) > self.p.memory
        some = over[self.route] & self.p.choice
        return [range(int(n) * int(s) + 1) for n, s in zip(counts, some, strict=True)]

    def _few_ways(self, box: Box) -> bool:
        if not (box.low == box.high).all():
            return False
        ways = self._ways(box.low + box.few_low)
        return math.prod(len(w) for w in ways) <= WAYS

    # placements -----------------------------------------------------------------------------------------------

    def finish(self, counts: np.ndarray) -> np.ndarray | None:
        """Return the recomputed layers of every chunk, as few as fit in memory; None: it does not fit."""
        p = self.p
        kinds, again = p.kinds(counts), np.zeros(p.number, dtype=np.int64)
        over = p.bytes(kinds, np.zeros_like(kinds)) > p.memory
        if not over.any():
            return again
        if not p.choice:
            return None
        for stage in np.flatnonzero(over).tolist():
            own = range(stage, p.number, p.stages)
            if p.schedule == "zb-v":
                own = np.flatnonzero(self.route == stage).tolist()
            if not self._recompute(stage, own, kinds, again):
                return None
        return again

    def _recompute(
        self, stage: int, own: Sequence[int], kinds: np.ndarray, again: np.ndarray
    ) -> bool:
        """Recompute as few layers of a stage as fit, its chunks in proportion; return whether they do."""
        p = self.p
        layers = [(int(kinds[:, c].sum()), c) for c in own]
        held = sum(
            int(kinds[g][c]) * (layer.states + layer.kept[stage])
            for g, layer in enumerate(p.layers)
            for c in own
        )
        work = max(p.held, p.buffer[stage])
        while held + work > p.memory[stage]:
            free = [(again[c] / n, c) for n, c in layers if again[c] < n]
            if not free:
                return False
            chunk = min(free)[1]
            g = int(len(p.layers) > 1 and again[chunk] >= kinds[0][chunk])
            layer = p.layers[g]
            held -= layer.kept[stage] - layer.entry[stage]
            work = max(work, layer.working)
            again[chunk] += 1
        return True

    def improve(self, counts: np.ndarray, rng: random.Random, patience: int = 4) -> Placed | None:
        """Move single layers off the longest path while that helps."""
        p = self.p
        again = self.finish(counts)
        if again is None:
            return None
        best = now = p.seconds(counts, again)
        kept, stall = (counts.copy(), again), 0
        counts = counts.copy()
        while stall < patience:
            moved = False
            for a, b in self._moves(counts, again, rng):
                counts[a] -= 1
                counts[b] += 1
                more = self.finish(counts)
                value = math.inf if more is None else p.seconds(counts, more)
                if more is not None and value < now * (1 - 1e-9):
                    now, again, moved = value, more, True
                    break
                counts[a] += 1
                counts[b] -= 1
            if now < best * (1 - 1e-9):
                best, kept, stall = now, (counts.copy(), again), 0
            if not moved:
                stall += 1
                counts, again = kept[0].copy(), kept[1]
                for _ in range(rng.randrange(1, 4)):
                    full = [c for c in range(p.number) if counts[c] > p.lowest[c]]
                    if full:
                        counts[rng.choice(full)] -= 1
                        counts[rng.randrange(p.number)] += 1
                more = self.finish(counts)
                if more is None:
                    counts, again = kept[0].copy(), kept[1]
                else:
                    again = more
                now = p.seconds(counts, again)
        return Placed(layers=tuple(map(int, kept[0])), again=tuple(map(int, kept[1])), seconds=best)

    def _moves(
        self, counts: np.ndarray, again: np.ndarray, rng: random.Random
    ) -> list[tuple[int, int]]:
        """Return moves (from, to) of a layer that shorten this longest path, those that do it most first."""
        p = self.p
        times = p.times(p.kinds(counts), p.kinds_again(counts, again))
        _, path = p.pipeline.path(times, p.send, seed=rng.randrange(1 << 30))
        self.pool.add(path)
        each = _along(path.counts, self.bulk.times)
        gain = each[:, None] - each[None, :]
        gain[counts <= p.lowest, :] = 0
        order = np.argsort(-gain, axis=None, kind="stable")[: 3 * p.number]
        return [divmod(int(i), p.number) for i in order if gain.flat[i] > 0]

    def round(self, counts: np.ndarray, few: np.ndarray) -> np.ndarray:
        """Return whole layers of every chunk near fractions of both kinds."""
        p = self.p
        total = sum(g.count for g in p.layers)
        near = counts + few
        whole = np.maximum(np.floor(near + 1e-6).astype(np.int64), p.lowest)
        while (left := total - int(whole.sum())) > 0:
            whole[np.argsort(whole - near, kind="stable")[:left]] += 1
        while (over := int(whole.sum()) - total) > 0:
            free = np.flatnonzero(whole > p.lowest)
            whole[free[np.argsort((near - whole)[free], kind="stable")[:over]]] -= 1
        return whole

    def even(self, rng: random.Random) -> np.ndarray:
        """Return layers by rounds: the chunks of a round have equally many, some rounds one more."""
        p = self.p
        total = sum(g.count for g in p.layers)
        counts = np.maximum(p.lowest, total // p.number)
        while counts.sum() > total:
            counts[rng.choice([c for c in range(p.number) if counts[c] > p.lowest[c]])] -= 1
        rounds = list(range(p.chunks))
        rng.shuffle(rounds)
        order = [r * p.stages + s for r in rounds for s in range(p.stages)]
        left, i = total - int(counts.sum()), 0
        while left:
            counts[order[i % len(order)]] += 1
            left, i = left - 1, i + 1
        return counts


def _integral(counts: np.ndarray) -> bool:
    return bool(np.abs(counts - np.rint(counts)).max() < 1e-6)


def _saved(layer: Layers) -> np.ndarray:
    """Return the bytes of each stage that recomputing a layer saves."""
    return np.array(layer.kept) - np.array(layer.entry or layer.kept)


def _along(counts: np.ndarray, times: tuple[int, int, int]) -> np.ndarray:
    f, x, w = times
    return f * counts[0] + x * counts[1] + w * counts[2]


def _least(each: np.ndarray, low: np.ndarray, high: np.ndarray, number: int) -> float:
    """Return the least cost of so many layers at so much each, every chunk between its bounds; infinity: impossible."""
    left = number - int(low.sum())
    if left < 0:
        return math.inf
    order = np.argsort(each, kind="stable")
    free = np.cumsum((high - low)[order])
    if left > free[-1]:
        return math.inf
    take = np.clip(left - (free - (high - low)[order]), 0, (high - low)[order])
    return float(each @ low + each[order] @ take)


class _Frame:
    """What the linear programs of all boxes of a configuration share: columns, and the rows that are no paths.

    x = [layers of the larger kind, of the smaller one, recomputed of each, makespan, U_0, U_1, step, what does not fit].
    """

    def __init__(self, inner: Inner) -> None:
        p = inner.p
        n, stages = p.number, p.stages
        widths = [n, n * bool(inner.other), n * p.choice, n * p.choice * bool(inner.other), 5]
        ends = np.cumsum(widths)
        slices = [slice(e - w, e) for e, w in zip(ends, widths, strict=True)]
        self.n, self.e, self.r, self.q = slices[:4]
        width, at = int(ends[-1]), int(ends[3])
        self.at, self.width = at, width
        self.kinds = [(inner.bulk, self.n, self.r)]
        if inner.other:
            self.kinds.append((inner.other, self.e, self.q))
        rows = np.zeros((4 + 5 * stages, width))
        right = np.zeros(len(rows))
        for i, (k, c, u) in enumerate(inner.lines):  # step >= k makespan + c + u U
            rows[i, at : at + 4], right[i] = (k, *(u * MILLION), -1), -c
        for i in range(2):  # U_i >= parameters of every stage, and of some stage at least
            own = slice(2 + i * (stages + 1), 2 + (i + 1) * (stages + 1))
            rows[own, at + 1 + i] = -1
            for layer, where, _ in self.kinds:
                rows[own, where][:-1] = inner.stage * layer.weights[i] / MILLION
            right[own] = -np.append(p.weight[i], p.least_weight[i]) / MILLION
        own = slice(4 + 2 * stages, 4 + 3 * stages)  # memory
        for layer, where, again in self.kinds:
            held = layer.states + np.array(layer.kept, dtype=np.float64)
            rows[own, where] = inner.stage * held[:, None] / GIB
            if p.choice:
                rows[own, again] = -inner.stage * _saved(layer)[:, None] / GIB
        rows[own, -1], right[own] = -1, inner.room / GIB
        self.most = slice(4 + 3 * stages, 4 + 4 * stages)  # layers of a stage
        rows[self.most, self.n], rows[self.most, -1] = inner.stage, -1
        self.fewest = slice(4 + 4 * stages, 4 + 5 * stages)
        rows[self.fewest, self.n], rows[self.fewest, -1] = -inner.stage, -1
        extra = []
        for layer, where, again in self.kinds:
            total = np.zeros(width)  # all layers
            total[where] = 1
            extra += [(total, layer.count), (-total, -layer.count)]
            for c in range(n if p.choice else 0):  # no more recomputed than there are
                row = np.zeros(width)
                row[again.start + c], row[where.start + c] = 1, -1
                extra.append((row, 0))
        self.rows = np.vstack([rows, *(row for row, _ in extra)])
        self.right = np.concatenate([right, [float(b) for _, b in extra]])
        self.cost = np.zeros(width)
        self.cost[-2:] = 1, LACKING
        self.paths: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        """Row of each path of the pool that was asked for, and its right-hand side."""


class _Rows:
    """The linear program of a box."""

    def __init__(self, inner: Inner, box: Box, most: np.ndarray) -> None:
        self.i, frame = inner, inner.frame
        self.frame, self.n, self.e = frame, frame.n, frame.e
        self.low, high = np.zeros(frame.width), np.full(frame.width, np.inf)
        self.low[self.n], high[self.n] = box.low, box.high
        high[frame.r] = box.high[: high[frame.r].size]
        if inner.other:
            self.low[self.e], high[self.e] = box.few_low, box.few_high
            high[frame.q] = box.few_high[: high[frame.q].size]
        self.program = LinearProgram(frame.cost, high - self.low)
        right = frame.right.copy()
        right[frame.most], right[frame.fewest] = most, -box.fewest
        self._add(frame.rows, right)
        self.paths: list[int] = []
        self.x, self.value, self.makespan = np.zeros(frame.width), 0.0, 0.0

    def _add(self, rows: np.ndarray, right: np.ndarray) -> None:
        self.program.add(rows, right - rows @ self.low)

    def few(self, x: np.ndarray) -> np.ndarray:
        """Return the layers of the smaller kind of every chunk."""
        return x[self.e] if self.i.other else np.zeros(self.i.p.number)

    def times(self, x: np.ndarray) -> np.ndarray:
        """Return the times of every chunk, [3, chunks]."""
        found = self.i.p.fixed.astype(np.float64)
        for layer, where, again in self.frame.kinds:
            found += np.multiply.outer(layer.times, x[where])
            if self.i.p.choice:
                found[1] += layer.again * x[again]
        return np.rint(found).astype(np.int64)

    def start(self) -> None:
        """Solve without a path, then with those of the pool that are longest there."""
        pool = self.i.pool
        self.solve()
        for _ in range(2 if pool.paths else 0):
            times = self.times(self.x).ravel()
            # No BLAS: its threads would spin beside thousands of such small products.
            one = np.einsum("pc,c->p", pool.counts, np.append(times, self.i.p.send).astype(float))
            for j in np.argsort(-one)[:STARTS]:
                self.add(int(j))
            self.solve()

    def add(self, number: int) -> None:
        """Add a path: the makespan is at least its length."""
        if number in self.paths:
            return
        frame = self.frame
        kept = frame.paths.get(number)
        if kept is None:
            p, path = self.i.p, self.i.pool.paths[number]
            row = np.zeros(frame.width)
            for layer, where, again in frame.kinds:
                row[where] = _along(path.counts, layer.times) * PS
                if p.choice:
                    row[again] = path.counts[1] * layer.again * PS
            row[frame.at] = -1
            fixed = float((path.counts * p.fixed).sum()) + path.sends * p.send
            kept = frame.paths[number] = row[None, :], np.array([-fixed * PS])
        self.paths.append(number)
        self._add(*kept)

    def solve(self) -> bool:
        """Solve; return whether the optimum was reached."""
        if not self.program.solve():
            return False
        self.x = self.program.x + self.low
        self.value, self.makespan = self.program.value, float(self.x[self.frame.at])
        self.dual = self.program.multipliers
        return True

    def proof(self) -> Multipliers:
        """Return the multipliers of the last solution."""
        y, stages, n = self.dual, self.i.p.stages, self.i.p.number
        parameters = y[2 : 4 + 2 * stages].reshape(2, stages + 1)
        sums = parameters.sum(axis=1, keepdims=True)
        even = np.full_like(parameters, 1 / (stages + 1))
        parameters = np.where(sums > 0, parameters / np.maximum(sums, 1e-300), even)
        own = y[4 + 2 * stages : 4 + 5 * stages].reshape(3, stages)
        weights = y[len(self.frame.right) :]
        used = np.flatnonzero(weights > 1e-9 * max(weights.sum(), 1e-300)) if len(weights) else []
        pool, pairs, counts, sends = self.i.pool, [], np.zeros((3, n)), 0.0
        for j in used:
            weight = float(weights[j] / weights[used].sum())
            path = pool.paths[self.paths[j]]
            pairs.append((self.paths[j], weight))
            counts += weight * path.counts
            sends += weight * path.sends
        share = float(np.clip(y[0], 0.0, 1.0))
        return Multipliers(
            share, tuple(pairs), counts, sends, parameters, own[0] / GIB, own[1], own[2]
        )
