"""Write the certificate that :mod:`.check_certificate` reads.

It holds every configuration of the space, the layout, and the proof that none is faster.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telechat_moe.errors import UsageError
from telechat_moe.tools.plan.search.placement import (
    CUTS,
    EMPTY,
    EXHAUSTED,
    PathPool,
    PlacementSearch,
    ProofTree,
)
from telechat_moe.tools.plan.search.placement_problem import (
    LayerPlacement,
    PlacementProblem,
    ScheduleKey,
)
from telechat_moe.tools.plan.search.search import SearchResult
from telechat_moe.tools.plan.search.space import NAMES, SCHEDULES, describe

NEIGHBOURS = 6
"""Proofs of configurations with the same schedule that are tried before a new one is made."""


class CertificateWriter:
    """Collector of configurations and of what they share: arrays, schedules with their paths, proofs."""

    def __init__(self, pools: dict[ScheduleKey, PathPool]) -> None:
        self.pools = pools
        self.columns: list[str] = []
        self.rows: list[list[Any]] = []
        self.lists: dict[tuple[str, tuple[int, ...], bytes], tuple[int, NDArray[Any]]] = {}
        self.schedules: dict[ScheduleKey, int] = {}
        self.paths: list[dict[int, list[int]]] = []
        self.proofs: list[dict[str, Any]] = []
        self._written: dict[tuple[int, int], tuple[int, PlacementSearch]] = {}

    def add(self, row: int, name: str, p: PlacementProblem, tree: ProofTree) -> None:
        """Add a configuration and why none of its placements is faster."""
        proof, costs = self._tree(p, tree), self._costs(p)
        self.columns = list(costs)
        self.rows.append([row, name, list(costs.values()), proof])

    def certificate(
        self, bound_s: float, row: int, p: PlacementProblem, placed: LayerPlacement
    ) -> dict[str, Any]:
        """Return all as plain data, with the layout: a placement of a configuration."""
        self._schedule(p)
        kinds = p.kinds(np.array(placed.layers))
        return {
            "bound_s": bound_s,
            "layout": {
                "row": row,
                "kinds": [*([[0] * p.number] * (2 - len(kinds))), *kinds.tolist()],
                "again": list(placed.recomputed),
                "step_s": placed.seconds,
            },
            "lists": [array.tolist() for _, array in self.lists.values()],
            "schedules": [
                [*key[1:], paths] for key, paths in zip(self.schedules, self.paths, strict=True)
            ],
            "proofs": self.proofs,
            "columns": self.columns,
            "configurations": sorted(self.rows, key=lambda row: row[0]),
        }

    def _numbers(self, values: Any) -> int:
        """Return the number of an array."""
        array = np.asarray(values)
        key = array.dtype.char, array.shape, array.tobytes()
        return self.lists.setdefault(key, (len(self.lists), array))[0]

    def _schedule(self, p: PlacementProblem) -> int:
        """Return the number of a schedule."""
        number = self.schedules.setdefault(p.key, len(self.schedules))
        if number == len(self.paths):
            self.paths.append({})
        return number

    def _proof(self, p: PlacementProblem, search: PlacementSearch, proof: int) -> int:
        """Return the number of multipliers of a search; their paths are written with the schedule."""
        key = id(search), proof
        if key not in self._written:
            m = search.multipliers(proof)
            for number, _ in m.paths:
                kind, micro = np.divmod(self.pools[p.key][number], p.micro_batches)
                passes = np.where(kind < p.number, kind, 3 * p.number - 1 - kind)
                ops = passes * p.micro_batches + micro
                self.paths[self._schedule(p)][number] = ops.tolist()
            self._written[key] = len(self.proofs), search  # or another may get its id
            weights = {
                "share": m.share,
                "parameters": m.parameters,
                "memory": m.memory,
                "most": m.limits,
                "fewest": m.fewest,
            }
            lists = {name: np.maximum(w, 0).tolist() for name, w in weights.items()}
            self.proofs.append({"paths": [[n, w] for n, w in m.paths], **lists})
        return self._written[key][0]

    def _tree(self, p: PlacementProblem, tree: ProofTree, box: int = 0) -> Any:
        """Return the tree that the checker reads: a box divided in two, or a proof's number, -1 or nothing."""
        cut, place, layers, first, count, proof = map(int, tree.boxes[box])
        if not count:
            if proof in (EMPTY, EXHAUSTED):
                return None if proof == EMPTY else -1
            return self._proof(p, tree.search, proof)
        boxes = [self._tree(p, tree, first + i) for i in range(count)]
        bulk = p.bulk if len(p.layers) > 1 else 1
        if CUTS[cut] == "longest":  # where no stage has more, there are too few
            cuts = None
            for stage in reversed(range(count)):
                cuts = [2, stage, tree.longest[stage], cuts, boxes[stage]]
            return cuts
        if CUTS[cut] == "structure":
            chunks = list(range(p.number))[:: 1 if bulk else -1]
            ways = list(zip(tree.search.structures(), boxes, strict=True))
            return _nest(ways, 1 - bulk, chunks, p.layers[1 - bulk].count)
        return [2 if CUTS[cut] == "stage" else bulk, place, layers, *boxes]

    def _costs(self, p: PlacementProblem) -> dict[str, int]:
        """Return the costs of a configuration by name, as numbers of arrays."""
        # of one kind only: that kind twice, the first time without layers
        layers, tail = (p.layers[0], p.layers[-1]), p.tail
        inputs = [g.inputs if p.choice and g.inputs else g.activations for g in layers]
        values = {
            "schedule": self._schedule(p), "count": [0] * (2 - len(p.layers)) + [g.count for g in p.layers],
            "time": [(g.times[0], g.times[1] + g.times[2]) for g in layers],
            "again": [g.recompute_time * p.choice for g in layers],
            "full": [g.states + np.array(g.activations) for g in layers],
            "entry": [g.states + np.array(n) for g, n in zip(layers, inputs, strict=True)],
            "working": [g.working for g in layers], "weight": [g.weights for g in layers],
            "fixed": [p.fixed[0], p.fixed[1] + p.fixed[2]], "send": p.send, "memory": p.memory, "buffer": p.buffer,
            "held": p.working, "choice": int(p.choice), "highest": p.highest, "weights": p.stage_weights,
            "largest": np.ceil(p.least_weight), "base": tail.base, "start": tail.start, "reduce": tail.reduce,
            "update": tail.update, "exposed": tail.exposed, "hides": tail.overlap_weights,
        }  # fmt: skip
        return {name: self._numbers(value) for name, value in values.items()}


def _nest(ways: list[tuple[tuple[int, ...], Any]], kind: int, chunks: list[int], left: int) -> Any:
    """Return a tree that divides placements of a kind chunk by chunk; `left` layers are not in an earlier chunk."""
    if not left or not ways:
        return ways[0][1] if ways else None
    chunk, tree = chunks[0], None
    for count in range(left + 1):
        equal = [way for way in ways if way[0][chunk] == count]
        inner = _nest(equal, kind, chunks[1:], left - count)
        tree = [kind, chunk, count - 1, tree, inner] if count else inner
    return tree


def _tree(
    plan: SearchResult,
    row: int,
    p: PlacementProblem,
    bound: float,
    trees: dict[ScheduleKey, list[ProofTree]],
) -> ProofTree:
    """Return the tree that proves a configuration; it is made here for one that was pruned with many others."""
    search = PlacementSearch(p, plan.pools.setdefault(p.key, PathPool()))
    tree = search.empty()
    if plan.proven_by[row] == -2:
        tree = plan.answers[row].tree
    elif plan.proven_by[row] >= 0:
        tree = search.with_first(plan.proofs[int(plan.proven_by[row])])
    # the quick bounds of many configurations at once are not always exactly those of one
    neighbours = trees.setdefault(p.key, [])
    for candidate in (tree, *reversed(neighbours)):
        if search.proves(candidate, bound):
            return candidate
    neighbours.append(search.solve(bound).tree)
    del neighbours[:-NEIGHBOURS]
    return neighbours[-1]


def certificate(plan: SearchResult) -> dict[str, Any]:
    """Return the certificate of a plan as plain data; its bound is the one proven, at most the best step.

    Raises:
        UsageError: The space has schedules that the checker does not know.
    """
    if (plan.rows[:, NAMES.index("schedule")] == SCHEDULES.index("zb-v")).any():
        raise UsageError(
            "--certificate: the checker knows 1F1B only; with --beyond-recipes add --fix schedule=1f1b,interleaved"
        )
    writer = CertificateWriter(plan.pools)
    trees: dict[ScheduleKey, list[ProofTree]] = {}
    bound = min(plan.lower_bound_s, plan.best[0].step_s)
    for row in range(len(plan.rows)):
        p = plan.problem(row)
        writer.add(row, describe(plan.rows[row]), p, _tree(plan, row, p, bound, trees))
    best = plan.best[0]
    placed = replace(best.placed, seconds=best.step_s)
    return {
        "model": plan.architecture.name,
        "device": plan.device.name,
        "devices": plan.space.devices,
        **writer.certificate(bound, best.row, best.problem, placed),
    }
