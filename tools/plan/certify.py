"""Writes what :mod:`.check_certificate` reads: every configuration of the space, the layout, and the proof that none is faster."""

from typing import Any

from telechat_moe.errors import UsageError
from telechat_moe.tools.plan.bounds import problem_of
from telechat_moe.tools.plan.layout import Layout
from telechat_moe.tools.plan.placement import Inner, Multipliers, Part, Pool
from telechat_moe.tools.plan.placement_problem import Problem
from telechat_moe.tools.plan.search import Plan
from telechat_moe.tools.plan.space import describe, layout_of

NEIGHBOURS = 6
"""Proofs of configurations with the same schedule that are tried before another one is made."""


class _Writer:
    """Collects what configurations share: long lists of numbers, paths, multipliers."""

    def __init__(self) -> None:
        self.lists: dict[tuple, int] = {}
        self.schedules: dict[tuple, dict[str, Any]] = {}
        self.pools: dict[tuple, Pool] = {}
        self.proofs: list[dict[str, Any]] = []
        self._known: dict[int, int] = {}
        self._keep: list[Multipliers] = []

    def numbers(self, values: Any) -> int:
        """Return the number of a list."""
        key = tuple(values)
        return self.lists.setdefault(key, len(self.lists))

    def schedule(self, p: Problem, pool: Pool | None) -> int:
        """Return the number of a schedule."""
        key = (p.schedule, p.stages, p.micro_batches, p.chunks)
        if key not in self.schedules:
            self.schedules[key] = {
                "schedule": list(key),
                "paths": {},
                "drawn": False,
                "number": len(self.schedules),
            }
        if pool is not None:
            self.pools[key] = pool
        return self.schedules[key]["number"]

    def proof(self, p: Problem, proof: Multipliers) -> int:
        """Return the number of multipliers; their paths are written with the schedule."""
        if id(proof) not in self._known:
            key = (p.schedule, p.stages, p.micro_batches, p.chunks)
            for number, _ in proof.paths:
                path = self.pools[key].paths[number]
                self.schedules[key]["paths"][number] = path.ops.tolist()
            self._known[id(proof)] = len(self.proofs)
            self._keep.append(proof)  # so that its id stays its own
            self.proofs.append(
                {
                    "share": proof.share,
                    "paths": [[n, w] for n, w in proof.paths],
                    "parameters": proof.parameters.tolist(),
                    "memory": proof.memory.tolist(),
                    "most": proof.most.tolist(),
                    "fewest": proof.fewest.tolist(),
                }
            )
        return self._known[id(proof)]

    def tree(self, p: Problem, part: Part) -> Any:
        """Return a tree as nested lists: a proof's number; -1: empty; -2: one by one; or [cut, at, parts]."""
        if part.parts:
            return [part.cut, list(part.at), [self.tree(p, inner) for inner in part.parts]]
        if part.point:
            key = (p.schedule, p.stages, p.micro_batches, p.chunks)
            self.schedules[key]["drawn"] = True
            return -2
        return self.proof(p, part.proof) if part.proof is not None else -1

    def problem(self, p: Problem, pool: Pool | None) -> list[Any]:
        """Return a configuration."""
        rest = p.rest
        return [
            self.schedule(p, pool),
            [
                [
                    g.count,
                    list(g.times),
                    g.again,
                    g.states,
                    self.numbers(g.kept),
                    self.numbers(g.entry or g.kept),
                    g.working,
                    list(g.weights),
                ]
                for g in p.layers
            ],
            [list(p.first), list(p.last), p.send],
            [self.numbers(p.memory), self.numbers(p.buffer), p.held, int(p.choice)],
            [self.numbers(w) for w in p.weights],
            [
                rest.base, rest.start, list(rest.reduce), list(rest.update), rest.exposed, list(rest.late),
            ],
        ]  # fmt: skip


def _shape(layout: Layout) -> tuple[int, int, int]:
    return layout.pp, layout.micro_batches, layout.vpp


def _tree(plan: Plan, row: int, p: Problem, bound: float, made: dict[tuple, list[Part]]) -> Part:
    """Return the tree that proves a configuration; where many were pruned at once, it is made here."""
    layout = layout_of(plan.rows[row], plan.space)
    inner = Inner(p, plan.pools.setdefault((layout.schedule, *_shape(layout)), Pool()))
    whole, tree = inner.whole(), Part(empty=True)
    if plan.by[row] == -2:
        tree = plan.trees[row]
    elif plan.by[row] >= 0:
        proofs = plan.proofs[plan.by[row]][1]
        few = inner.longest(whole) if len(proofs) > 1 else ()
        tree = Part(proof=proofs[0])
        if few:
            tree = Part(cut="longest", at=few, parts=[Part(proof=proof) for proof in proofs])
    # the quick bounds of many at once are not always to the letter those of one
    own = made.setdefault((layout.schedule, *_shape(layout)), [])
    for known in (tree, *reversed(own)):
        if inner.holds(known, whole, bound):
            return known
    own.append(inner.solve(bound).tree)
    del own[:-NEIGHBOURS]
    return own[-1]


def certificate(plan: Plan) -> dict[str, Any]:
    """Return the certificate of a plan as plain data; its bound is what was proven, the best step or less.

    Raises:
        UsageError: The space has schedules that the checker does not know.
    """
    if plan.space.beyond_recipes:
        raise UsageError("--certificate: the checker knows 1F1B only, leave --beyond-recipes out")
    write, rows = _Writer(), []
    made: dict[tuple, list[Part]] = {}
    bound = min(plan.lower_bound_s, plan.best[0].step_s)
    for c, here in plan.costs.values():
        for at, row in enumerate(here):
            layout = layout_of(plan.rows[row], plan.space)
            p = problem_of(c, at, plan.architecture, layout, plan.room_bytes)
            key = (layout.schedule, *_shape(layout))
            tree = _tree(plan, int(row), p, bound, made)
            stated = write.problem(p, plan.pools[key])
            rows.append([int(row), describe(plan.rows[row]), stated, write.tree(p, tree)])
    best = plan.best[0]
    write.schedules[(best.layout.schedule, *_shape(best.layout))]["drawn"] = True
    return {
        "model": plan.architecture.name,
        "device": plan.device.name,
        "devices": plan.space.devices,
        "bound_s": bound,
        "layout": {
            "row": best.row,
            "layers": list(best.placed.layers),
            "again": list(best.placed.again),
            "step_s": best.step_s,
        },
        "lists": [list(key) for key in write.lists],
        "schedules": [
            {name: s[name] for name in ("schedule", "paths", "drawn")}
            for s in write.schedules.values()
        ],
        "proofs": write.proofs,
        "configurations": sorted(rows),
    }
