"""Solve the inner problem with a proof: branch and bound over linear programs (`../native/placement*.cc`).

The rows of the linear programs are paths. The makespan is the length of the longest path through the schedule, and a
path's length is linear in the layers of the chunks. So any few paths give a linear program whose solution is a lower
bound; the longest path at this solution becomes the next row, until none is longer (Kelley 1960). The program's
multipliers are the proof. Where the solution is not whole, the layers of a stage or a chunk are bounded from above and
below, and each of these boxes starts from the same program. Good placements come from rounding these solutions and from
moving single layers off the longest path.

Multipliers combine paths through the schedule, stages' memory and parameters into one number for a layer in each chunk,
and sorting finds the least sum of these numbers. They are valid for every configuration with the same schedule, so one
program prunes many. All of this is defined once, in C++; `check_certificate.py` implements it a second time on purpose.
"""

import ctypes
import math
import random
import time
import weakref
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telechat_moe.tools.plan.native import address, load
from telechat_moe.tools.plan.search.pipeline_program import PipelineProgram
from telechat_moe.tools.plan.search.placement_problem import LayerPlacement, PlacementProblem

PS = 1e-12
CLOSE = 1e-7
"""Relative difference below which two steps are the same."""

CUTS = ("", "longest", "structure", "stage", "chunk")
"""How a box is divided into smaller ones, by the number in `ProofTree.boxes`: not at all; `longest` (each stage in turn
has more layers than `ProofTree.longest` says); `structure` (where the layers of the smaller kind are); `stage` or
`chunk` (at most a number of layers of the larger kind, or more)."""

EMPTY, EXHAUSTED = -1, -2
"""Proofs of a box without multipliers: the box has no room for that many layers; or all layers are placed, and each of
the few ways to recompute was examined."""


@dataclass(frozen=True)
class Multipliers:
    """Weights that combine rows of the program into one bound; any weights that are not negative prove a bound."""

    share: float
    """Weight of the first of the two lines of `StepTail.lines`; the second has 1 minus this weight."""
    paths: tuple[tuple[int, float], ...]
    """Number of a path in its pool and its weight; they add up to 1."""
    counts: NDArray[np.float64]
    """Operations of the weighted paths, [3, chunks]."""
    sends: float
    parameters: NDArray[np.float64]
    """Weights of each stage's parameters and of the largest stage's least ones, [2, stages + 1]; rows add up to 1."""
    memory: NDArray[np.float64]
    """Seconds for each byte of each stage."""
    limits: NDArray[np.float64]
    """Seconds for a layer of each stage, from the rows that limit the layers by memory and time."""
    fewest: NDArray[np.float64]
    """Seconds for a layer of each stage, from the rows that demand a least number of layers."""


@dataclass(frozen=True)
class ProofTree:
    """Why no placement is faster: the box of all placements, divided into boxes that are each proven separately."""

    search: "PlacementSearch"
    """The search whose multipliers prove the boxes: this configuration's, or that of one with the same schedule."""
    boxes: NDArray[np.int32]
    """One row for each box, [boxes, 6]; the first is the box of all placements. A row holds the kind of division (its
    number in `CUTS`), the chunk or stage and the layers of the division, the number of its first smaller box, how many
    of these there are, and the number of its proof."""
    longest: tuple[int, ...]
    """Layers of every stage that are too few in total."""


class PathPool:
    """Paths of one schedule, shared by the configurations that have it; `pool[number]` is the operations of one."""

    def __init__(self) -> None:
        self.handle = load().telechat_paths_new()
        weakref.finalize(self, load().telechat_paths_delete, self.handle)
        self.pipeline: PipelineProgram | None = None

    def __getitem__(self, number: int) -> NDArray[np.int32]:
        if self.pipeline is None:
            raise IndexError(number)
        ops = np.empty(self.pipeline.operations, dtype=np.int32)
        length = load().telechat_paths_at(self.handle, number, address(ops))
        return ops[:length]


@dataclass
class PlacementAnswer:
    """What `PlacementSearch.solve` returns."""

    search: "PlacementSearch"
    best: LayerPlacement | None
    bound: float
    """Lower bound of all placements, but no more than the target that was asked for."""
    nodes: int
    """Number of boxes that were examined."""
    tree: ProofTree
    """Proof that no placement is faster than `bound`, if the search came to its end."""
    first_proofs: tuple[int, ...]
    """Proofs of the first boxes."""

    @cached_property
    def first(self) -> list[Multipliers]:
        """Multipliers of the first boxes, one per stage that may be the longest, to try on other configurations."""
        return [self.search.multipliers(number) for number in self.first_proofs]


class PlacementSearch:
    """One configuration and what is known of its placements."""

    def __init__(self, problem: PlacementProblem, pool: PathPool) -> None:
        self.p, self.pool = problem, pool
        pool.pipeline = problem.pipeline
        self._program = problem.pipeline  # the search reads it
        longest = np.zeros(problem.stages, dtype=np.int32)
        self._handle = load().telechat_placement_new(
            self._program.handle, pool.handle, *map(address, (*_flat(problem), longest))
        )
        weakref.finalize(self, load().telechat_placement_delete, self._handle)
        self.longest: tuple[int, ...] = tuple(longest.tolist()) if longest[0] >= 0 else ()
        """Layers of every stage that are too few together: some stage has more. Empty: nothing is known."""

    def solve(self, target: float, *, nodes: int = 400, until: float = math.inf) -> PlacementAnswer:
        """Prove that no placement takes less than `target`, or find those that do; continue where the last call ended.

        Args:
            target: Only placements below it are wanted, s; not above that of the last call.
            nodes: How many further boxes are examined; after that the bound is returned as it is.
            until: `time.perf_counter()` after which the search ends.
        """
        bound, size = ctypes.c_double(), np.zeros(4, dtype=np.int32)
        left = until - time.perf_counter()
        load().telechat_placement_solve(
            self._handle, target, nodes, left, ctypes.byref(bound), address(size)
        )
        examined, count, first, _ = map(int, size)
        boxes, proofs = np.zeros((count, 6), dtype=np.int32), np.zeros(first, dtype=np.int32)
        load().telechat_placement_tree(self._handle, address(boxes), address(proofs))
        return PlacementAnswer(
            search=self,
            best=self._best(),
            bound=bound.value,
            nodes=examined,
            tree=ProofTree(self, boxes, self.longest),
            first_proofs=tuple(int(number) for number in proofs if number >= 0),
        )

    def proves(self, tree: ProofTree, target: float) -> bool:
        """Return whether a tree, possibly of another search, proves that no placement takes less than `target`."""
        longest = np.array(tree.longest, dtype=np.int32)
        boxes, layers = address(tree.boxes), address(longest)
        return load().telechat_placement_proves(
            self._handle, tree.search._handle, boxes, layers, len(longest), target
        )

    def empty(self) -> ProofTree:
        """Return the tree that proves a problem without placements."""
        return ProofTree(self, np.array([[0, 0, 0, -1, 0, EMPTY]], dtype=np.int32), ())

    def with_first(self, answer: PlacementAnswer) -> ProofTree:
        """Return the tree of the first boxes, proven with another configuration's multipliers."""
        proofs = answer.first_proofs
        boxes = [[0, 0, 0, -1, 0, proofs[0]]]
        if len(proofs) > 1 and self.longest:
            boxes = [[CUTS.index("longest"), 0, 0, 1, len(proofs), EMPTY]]
            boxes += [[0, 0, 0, -1, 0, number] for number in proofs]
        return ProofTree(answer.search, np.array(boxes, dtype=np.int32), self.longest)

    def structures(self) -> list[tuple[int, ...]]:
        """Return every way to put the layers of the smaller kind into chunks: how many each has."""
        number = load().telechat_placement_structures(self._handle, None)
        counts = np.zeros((number, self.p.number), dtype=np.int32)
        load().telechat_placement_structures(self._handle, address(counts))
        return [tuple(row) for row in counts.tolist()]

    def improve(
        self, counts: NDArray[Any], patience: int = 4, until: float = math.inf
    ) -> LayerPlacement | None:
        """Move single layers off the longest path while that helps; None: the placement does not fit.

        It begins with these layers of every chunk, continues `patience` times from a few layers moved at random after no
        move helps, and ends at `until` (`time.perf_counter()`) with what it has.
        """
        return self._best(np.ascontiguousarray(counts, dtype=np.int32), patience, until)

    def _best(
        self, start: NDArray[np.int32] | None = None, patience: int = 0, until: float = math.inf
    ) -> LayerPlacement | None:
        layers, recomputed = np.zeros((2, self.p.number), dtype=np.int32)
        seconds = load().telechat_placement_best(
            self._handle,
            None if start is None else address(start),
            patience,
            until - time.perf_counter(),
            *map(address, (layers, recomputed)),
        )
        if not seconds:
            return None
        return LayerPlacement(
            layers=tuple(layers.tolist()), recomputed=tuple(recomputed.tolist()), seconds=seconds
        )

    def multipliers(self, number: int) -> Multipliers:
        """Return a proof by its number."""
        p, look = self.p, load().telechat_placement_proof
        length = look(self._handle, number, None, None, None, None)
        per = 2 * (p.stages + 1)
        weights, shares = np.zeros(1 + per + 3 * p.stages), np.zeros(length)
        paths, counts = np.zeros(length, dtype=np.int32), np.zeros(3 * p.number + 1)
        look(self._handle, number, *map(address, (weights, paths, shares, counts)))
        memory, limits, fewest = weights[1 + per :].reshape(3, p.stages)
        return Multipliers(
            share=float(weights[0]),
            paths=tuple(zip(paths.tolist(), shares.tolist(), strict=True)),
            counts=counts[:-1].reshape(3, p.number),
            sends=float(counts[-1]),
            parameters=weights[1 : 1 + per].reshape(2, p.stages + 1),
            memory=memory,
            limits=limits,
            fewest=fewest,
        )

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


def _flat(p: PlacementProblem) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the whole numbers and the reals of a problem in the order in which placement.cc takes them."""
    bulk, tail = p.layers[p.bulk], p.tail
    kinds = [bulk, *(layer for layer in p.layers if layer is not bulk)]
    integers: list[Any] = [(p.stages, len(kinds), p.bulk, p.choice, p.send, p.working)]
    integers += [p.lowest, p.highest, p.fixed.ravel(), p.memory, p.buffer]
    reals: list[Any] = [p.stage_weights.ravel(), p.least_weight]
    reals += [(k, c, *u) for k, c, u in tail.lines(p.micro_batches)]
    reals += [(tail.base, tail.start, tail.exposed), tail.reduce, tail.update, tail.overlap_weights]
    for layer in kinds:
        integers += [(layer.count, *layer.times, layer.states, layer.recompute_time, layer.working)]
        integers += [layer.activations, layer.inputs or layer.activations]
        reals += [layer.weights]
    return (
        np.concatenate(integers, dtype=np.int64, casting="unsafe"),
        np.concatenate(reals, dtype=np.float64, casting="unsafe"),
    )
