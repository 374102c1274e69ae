"""Boxes of placements and what proves that none in them is faster: the meaning of the planner's certificates.

Multipliers weigh paths through the schedule, stages' memory and parameters into one number for a layer in each chunk, and the
least sum of those is found by sorting. They hold for every configuration with the same schedule, so one program prunes many.
Where that does not reach, layers of a chunk or of a stage are bounded from above and below, and each half is proven by itself.
"""

import math
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from telechat_moe.tools.plan.search.placement_problem import Layers, Problem, structures

PS = 1e-12
CLOSE = 1e-7
"""Relative difference below which two steps are the same."""

WAYS = 1000
"""Ways to recompute layers that are looked at one by one."""


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


class Boxes:
    """The placements of one configuration."""

    def __init__(self, problem: Problem) -> None:
        self.p = problem
        self.bulk = problem.layers[problem.bulk]
        self.other = problem.layers[1 - problem.bulk] if len(problem.layers) > 1 else None
        self.route = problem.pipeline.route
        self.lines = problem.rest.lines(problem.micro_batches)
        self.stage = np.zeros((problem.stages, problem.number))
        self.stage[self.route, np.arange(problem.number)] = 1
        work = np.where(self.stage @ problem.lowest > 0, problem.held, 0)
        self.room = np.array(problem.memory, dtype=np.float64) - np.maximum(work, problem.buffer)

    def whole(self) -> Box:
        """Return all placements, and some that do not exist: the layers of the smaller kind in any chunk that they can reach."""
        p, none = self.p, np.zeros(self.p.number, dtype=np.int64)
        low, high = p.lowest.copy(), np.minimum(p.highest, self.bulk.count)
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
        low, high = np.maximum(box.low, p.lowest - few), np.minimum(box.high, p.highest - few)
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
            few, boxes = np.array(at), []
            for stage, n in enumerate(at):  # the first stage with more: none is in two boxes
                fewest, most = box.fewest.copy(), box.most.copy()
                fewest[stage] = max(fewest[stage], n + 1)
                most[:stage] = np.minimum(most[:stage], few[:stage])
                boxes.append(replace(box, fewest=fewest, most=most))
            return boxes
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
            return self.exact(box, target) >= target * (1 - CLOSE)
        return tree.proof is not None and self.bound(tree.proof, box, most) >= target * (1 - CLOSE)

    def _possible(self, box: Box, most: np.ndarray) -> bool:
        number = self.bulk.count
        below = np.maximum(self.stage @ box.low, box.fewest)
        above = np.minimum(self.stage @ box.high, most)
        return bool((below <= above).all() and below.sum() <= number <= above.sum())

    def rooms(self, box: Box, most: np.ndarray) -> np.ndarray:
        """Return the memory for layers: of a stage whose numbers of layers stand, what whole recomputed ones leave of it."""
        found = self.room.copy()
        if not self.p.choice:
            return found
        low = np.stack([np.maximum(self.stage @ box.low, box.fewest), self.stage @ box.few_low])
        high = np.stack([np.minimum(self.stage @ box.high, most), self.stage @ box.few_high])
        kinds = [self.bulk, *([self.other] if self.other else [])]
        for s in np.flatnonzero((low == high).all(axis=0)):
            number = [int(n) for n in low[: len(kinds), s]]
            held = [
                self._bytes(s, kinds, number, more)
                for more in product(*(range(n + 1) for n in number))
            ]
            found[s] = max(b for b, fits in [(-1.0, True), *held] if fits)
        return found

    def _bytes(
        self, s: int, kinds: list[Layers], number: list[int], again: tuple[int, ...]
    ) -> tuple[float, bool]:
        """Return the bytes of a stage's layers, so many of each kind recomputed, and whether they fit."""
        held, work = 0.0, self.p.memory[s] - self.room[s]
        for layer, n, r in zip(kinds, number, again, strict=True):
            held += n * (layer.states + layer.kept[s]) - r * float(_saved(layer)[s])
            work = max(work, layer.working * (r > 0))
        return held, held + work <= self.p.memory[s]

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
        room = self.rooms(box, most)
        total += float(proof.fewest @ box.fewest - proof.memory @ room - proof.most @ most)

        def each(layer: Layers) -> np.ndarray:
            found = _along(counts, layer.times) + (np.array(layer.weights) @ weigh)[self.route]
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

    def exact(self, box: Box, target: float) -> float:
        """Return a step, up to `target`, that none is below where all layers stand; 0: they do not, or there are too many ways.

        Of the ways to recompute more layers than one that takes too long already, whatever more of them hides, none is looked at.
        """
        p, counts = self.p, box.low + box.few_low
        if not (box.low == box.high).all():
            return 0.0
        start, lowest = 0 * counts, target
        for s in range(p.stages):
            some = self._fewest(s, counts)
            if some is None:
                return math.inf
            start = start + some
        todo = [(start, 0)]
        for again, at in todo:  # grows
            if self._fits(counts, again).all():
                lowest = min(lowest, p.seconds(counts, again))
            if not p.choice or p.seconds(counts, again, more=True) >= target * (1 - CLOSE):
                continue
            for c in range(at, p.number):
                if again[c] < counts[c]:
                    todo.append((again + (np.arange(p.number) == c), c))
            if len(todo) > WAYS:
                return 0.0
        return lowest

    def _fits(self, counts: np.ndarray, again: np.ndarray) -> np.ndarray:
        p = self.p
        return p.bytes(p.kinds(counts), p.kinds_again(counts, again)) <= np.array(p.memory)

    def _fewest(self, s: int, counts: np.ndarray) -> np.ndarray | None:
        """Return the fewest recomputed layers of each chunk of a stage in any way that fits; None: none does."""
        none = 0 * counts
        ways = [range(int(n) * int(s == r) + 1) for n, r in zip(counts, self.route, strict=True)]
        if self._fits(counts, none)[s] or (self.p.choice and math.prod(map(len, ways)) > WAYS):
            return none
        some = map(np.array, product(*ways)) if self.p.choice else ()
        fit = [again for again in some if self._fits(counts, again)[s]]
        return np.min(fit, axis=0) if fit else None


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
