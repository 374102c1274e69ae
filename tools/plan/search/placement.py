"""The inner problem, solved and proven: branch and bound over linear programs whose rows are paths (`ops/csrc/placement*.cc`).

The makespan is the largest of the lengths of all paths through the schedule. A path's length is linear in the layers of the
chunks, so any few paths give a linear program that is a lower bound; the longest path at its solution is the next row, until
there is none that is longer (Kelley 1960). Its multipliers are the proof. Where the solution is not whole, layers of a stage or
of a chunk are bounded from above and below, and each half goes on from that program (:mod:`.boxes` says what a tree of such
halves proves). Good placements come from rounding these solutions and from moving single layers off the longest path.
"""

import ctypes
import math
import random
import time
import weakref
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from telechat_moe.tools.plan.native import address, load
from telechat_moe.tools.plan.search.boxes import CLOSE, PS, Boxes, Multipliers, Part
from telechat_moe.tools.plan.search.pipeline_paths import Path, Pipeline
from telechat_moe.tools.plan.search.placement_problem import Placed, Problem

CUTS = ("", "longest", "structure", "stage", "chunk")
"""`Part.cut` by its number."""


class PathPool:
    """Paths of one schedule, shared by the configurations that have it."""

    def __init__(self) -> None:
        self.at = load().telechat_paths_new()
        weakref.finalize(self, load().telechat_paths_delete, self.at)
        self.pipeline: Pipeline | None = None

    @property
    def paths(self) -> "PathPool":
        """Paths by their numbers."""
        return self

    def __getitem__(self, number: int) -> Path:
        if self.pipeline is None:
            raise IndexError(number)
        ops = np.empty(self.pipeline.operations, dtype=np.int32)
        length = load().telechat_paths_at(self.at, number, address(ops))
        return self.pipeline.as_path(ops[:length])


@dataclass
class Answer:
    """What `Inner.solve` returns."""

    inner: "Inner"
    best: Placed | None
    bound: float
    """No placement is faster; at most what was asked for."""

    nodes: int
    """Boxes that were looked at."""

    firsts: tuple[int, ...]
    """Proofs of the first boxes."""

    @cached_property
    def root(self) -> list[Multipliers]:
        """Of the first boxes, one for each stage that may be the longest: they are tried on other configurations."""
        return [self.inner.multipliers(number) for number in self.firsts]

    @cached_property
    def tree(self) -> Part:
        """Why no placement is faster than `bound`, where the search came to its end."""
        return self.inner.tree()


class Inner(Boxes):
    """One configuration and what is known of it."""

    def __init__(self, problem: Problem, pool: PathPool) -> None:
        super().__init__(problem)
        self.pool = pool
        pool.pipeline = problem.pipeline
        self._given = _Given(problem)
        self._at = load().telechat_placement_new(ctypes.byref(self._given), pool.at)
        weakref.finalize(self, load().telechat_placement_delete, self._at)

    def solve(self, target: float, *, nodes: int = 400, until: float = math.inf) -> Answer:
        """Prove that no placement takes less than `target`, or find those that do; goes on where the last call ended.

        Args:
            target: Only placements below it are wanted, s; not above that of the last call.
            nodes: Further boxes that are looked at; then the bound stays where it is.
            until: `time.perf_counter()` after which the search ends.
        """
        bound, size = ctypes.c_double(), np.zeros(4, dtype=np.int32)
        load().telechat_placement_solve(
            self._at,
            target,
            nodes,
            until - time.perf_counter(),
            ctypes.byref(bound),
            address(size),
        )
        seen, self._parts, first, _ = map(int, size)
        self._few = np.zeros(self.p.stages, dtype=np.int32)
        self._table = np.zeros((self._parts, 6), dtype=np.int32)
        root = np.zeros(first, dtype=np.int32)
        load().telechat_placement_tree(
            self._at, address(self._table), address(self._few), address(root)
        )
        firsts = tuple(int(number) for number in root if number >= 0)
        return Answer(self, self._best(), bound.value, seen, firsts)

    def improve(
        self, counts: np.ndarray, patience: int = 4, until: float = math.inf
    ) -> Placed | None:
        """Move single layers off the longest path while that helps; None: the placement does not fit.

        Args:
            counts: Layers of every chunk to begin with.
            patience: Times that it goes on from a few layers moved by chance after nothing helps.
            until: `time.perf_counter()` after which it ends with what it has.
        """
        return self._best(np.ascontiguousarray(counts, dtype=np.int32), patience, until)

    def _best(
        self, start: np.ndarray | None = None, patience: int = 0, until: float = math.inf
    ) -> Placed | None:
        layers, again = np.zeros((2, self.p.number), dtype=np.int32)
        seconds = load().telechat_placement_best(
            self._at,
            None if start is None else address(start),
            patience,
            until - time.perf_counter(),
            address(layers),
            address(again),
        )
        if not seconds:
            return None
        return Placed(layers=tuple(layers.tolist()), again=tuple(again.tolist()), seconds=seconds)

    def tree(self, number: int = 0) -> Part:
        """Return the tree of boxes from a part on."""
        cut, at, value, first, count, proof = map(int, self._table[number])
        if not count:
            if proof < 0:
                return Part(empty=proof == -1, point=proof == -2)
            return Part(proof=self.multipliers(proof))
        parts = [self.tree(first + i) for i in range(count)]
        where = {1: tuple(map(int, self._few)), 2: ()}.get(cut, (at, value))
        return Part(cut=CUTS[cut], at=where, parts=parts)

    def multipliers(self, number: int) -> Multipliers:
        """Return a proof by its number."""
        p, look = self.p, load().telechat_placement_proof
        length = look(self._at, number, None, None, None, None)
        per = 2 * (p.stages + 1)
        weights, shares = np.zeros(1 + per + 3 * p.stages), np.zeros(length)
        paths, counts = np.zeros(length, dtype=np.int32), np.zeros(3 * p.number + 1)
        look(self._at, number, *map(address, (weights, paths, shares, counts)))
        memory, most, fewest = weights[1 + per :].reshape(3, p.stages)
        return Multipliers(
            share=float(weights[0]),
            paths=tuple(zip(paths.tolist(), shares.tolist(), strict=True)),
            counts=counts[:-1].reshape(3, p.number),
            sends=float(counts[-1]),
            parameters=weights[1 : 1 + per].reshape(2, p.stages + 1),
            memory=memory,
            most=most,
            fewest=fewest,
        )

    def even(self, rng: random.Random) -> np.ndarray:
        """Return layers by rounds: the chunks of a round have equally many, some rounds one more."""
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


class _GivenLayers(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int64),
        ("times", ctypes.c_int64 * 3),
        ("states", ctypes.c_int64),
        ("again", ctypes.c_int64),
        ("working", ctypes.c_int64),
        ("kept", ctypes.c_void_p),
        ("entry", ctypes.c_void_p),
        ("weights", ctypes.c_double * 2),
    )


class _Given(ctypes.Structure):
    """A problem as `tools/plan/native/placement.h` reads it."""

    _fields_ = (
        ("pipeline", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("stages", "kinds", "bulk", "choice", "send", "held")),
        ("layers", _GivenLayers * 2),
        *(
            (name, ctypes.c_void_p)
            for name in ("lowest", "highest", "fixed", "memory", "buffer", "weight")
        ),
        ("least", ctypes.c_double * 2),
        ("lines", ctypes.c_double * 4 * 2),
        ("base", ctypes.c_double),
        ("start", ctypes.c_double),
        ("reduce", ctypes.c_double * 2),
        ("update", ctypes.c_double * 2),
        ("exposed", ctypes.c_double),
        ("hides", ctypes.c_double * 2),
    )

    def __init__(self, p: Problem) -> None:
        rest = p.rest
        self._arrays: list[np.ndarray] = []
        layers = [
            _GivenLayers(
                count=g.count,
                times=(ctypes.c_int64 * 3)(*g.times),
                states=g.states,
                again=g.again,
                working=g.working,
                kept=self._numbers(g.kept),
                entry=self._numbers(g.entry or g.kept),
                weights=(ctypes.c_double * 2)(*g.weights),
            )
            for g in p.layers
        ]
        lines = [(k, c, *u) for k, c, u in rest.lines(p.micro_batches)]
        super().__init__(
            pipeline=p.pipeline.at,
            stages=p.stages,
            kinds=len(p.layers),
            bulk=p.bulk,
            choice=p.choice,
            send=p.send,
            held=p.held,
            layers=(_GivenLayers * 2)(*layers),
            lowest=self._numbers(p.lowest),
            highest=self._numbers(p.highest),
            fixed=self._numbers(p.fixed),
            memory=self._numbers(p.memory),
            buffer=self._numbers(p.buffer),
            weight=self._numbers(p.weight, np.float64),
            least=(ctypes.c_double * 2)(*p.least_weight),
            lines=(ctypes.c_double * 4 * 2)(*((ctypes.c_double * 4)(*line) for line in lines)),
            base=rest.base,
            start=rest.start,
            reduce=(ctypes.c_double * 2)(*rest.reduce),
            update=(ctypes.c_double * 2)(*rest.update),
            exposed=rest.exposed,
            hides=(ctypes.c_double * 2)(*rest.hides),
        )

    def _numbers(self, values: object, kind: type = np.int64) -> int:
        self._arrays.append(np.ascontiguousarray(values, dtype=kind))
        return self._arrays[-1].ctypes.data


__all__ = ["CLOSE", "PS", "Answer", "Inner", "Multipliers", "Part", "PathPool"]
