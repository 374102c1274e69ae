"""The inner problem as an integer program, for solvers that others wrote: CP-SAT (extra `plan`) and HiGHS (scipy).

Used to cross-check the planner (`tools/plan/search/placement.py`), whose programs have paths for rows and share no row of time with this file. One program for each way to put the layers of the
smaller kind. Integers n, r, q of every chunk: layers of the larger kind, recomputed ones of both; e: end of every operation.

    minimise   makespan + rest
    e_o >= e_p + send + time_o   for the operation before it on its stage and the one whose output it reads
    time_o = fixed + time * layers (+ recompute_time * recomputed),   e_o <= makespan
    sum of n = count,   n + others >= lowest,   r <= n,   memory of every stage
    U_i >= parameters of every stage,   rest = (reduce + update) U + start - hidden,   rest >= (exposed reduce + update) U + ...

What the longest stage hides of the reduction is not convex; programs are for problems without (`exposed` 1 or `late` 0).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.search.placement import PS
from telechat_moe.tools.plan.search.placement_problem import LayerGroup, PlacementProblem


@dataclass(frozen=True)
class Crossed:
    """What a solver says."""

    seconds: float | None
    """Of a step; None: nothing fits, or nothing was found in time."""

    bound: float
    proven: bool


@dataclass
class _Program:
    """Rows over integers (first `whole` columns) and reals, ``low <= x <= high``, to be minimised; ps, bytes."""

    cost: np.ndarray
    rows: np.ndarray
    right: np.ndarray
    low: np.ndarray
    high: np.ndarray
    whole: int


class _Rows:
    """The rows ``a x <= b`` of a structure; x = [n, r, q, ends of operations, makespan, U_0, U_1, rest]."""

    def __init__(self, p: PlacementProblem, structure: tuple[int, ...]) -> None:
        self.p, self.route, n = p, p.pipeline.route, p.number
        self.few = few = np.array(structure)
        self.bulk = p.layers[p.bulk]
        self.low, self.high = (
            np.maximum(p.lowest - few, 0),
            np.minimum(p.highest - few, self.bulk.count),
        )
        held = np.flatnonzero(few)
        if len(
            held
        ):  # only layers of the smaller kind before the last of them, or behind the first
            closed = slice(0, held[-1]) if p.bulk else slice(held[0] + 1, None)
            self.low[closed] = self.high[closed] = 0
        some = np.bincount(self.route, weights=p.lowest, minlength=p.stages) > 0
        self.room = np.array(p.memory) - np.maximum(np.where(some, p.working, 0), p.buffer)
        self.orders = [[int(op) for op in own] for own in p.pipeline.orders]
        ops = [op for own in self.orders for op in own]
        self.at = {op: 3 * n + i for i, op in enumerate(ops)}
        self.width, self.last = 3 * n + len(ops) + 4, 3 * n + len(ops)
        self.rows: list[np.ndarray] = []
        self.right: list[float] = []
        # layers that stand, the column of those that do not, the column of recomputed ones
        self.kinds: list[tuple[LayerGroup, np.ndarray, int, int]] = [(self.bulk, 0 * few, 0, n)]
        if len(p.layers) > 1:
            self.kinds.append((p.layers[1 - p.bulk], few, -1, 2 * n))

    def add(self, terms: dict[int, float], right: float) -> None:
        """Add a row."""
        row = np.zeros(self.width)
        for column, value in terms.items():
            row[column] += value
        self.rows.append(row)
        self.right.append(right)

    def operations(self) -> None:
        """Add when operations end."""
        p, n, m, route = self.p, self.p.number, self.p.micro_batches, self.route
        for own in self.orders:
            for i, op in enumerate(own):
                kind, c, micro = op // m // n, op // m % n, op % m
                terms, took = {self.at[op]: -1.0}, float(p.fixed[kind, c])
                for layer, held, column, recomputed in self.kinds:
                    took += float(layer.times[kind] * held[c])
                    terms |= {column + c: float(layer.times[kind])} if column >= 0 else {}
                    terms |= {recomputed + c: float(layer.recompute_time)} if kind == 1 else {}
                self.add(terms, -took)
                if i:
                    self.add({**terms, self.at[own[i - 1]]: 1.0}, -took)
                before = c - 1 if kind == 0 else c + 1 if kind == 1 else -1
                if 0 <= before < n:
                    send = p.send * (route[before] != route[c])
                    read = self.at[(kind * n + before) * m + micro]
                    self.add({**terms, read: 1.0}, -took - send)
            self.add({self.at[own[-1]]: 1.0, self.last: -1.0}, 0.0)

    def stages(self) -> None:
        """Add memory and parameters."""
        p, n = self.p, self.p.number
        bulk = self.bulk
        self.add(dict.fromkeys(range(n), 1.0), bulk.count)
        self.add(dict.fromkeys(range(n), -1.0), -bulk.count)
        for c in range(n):
            self.add({n + c: 1.0, c: -1.0}, 0.0)
        for s in range(p.stages):
            own = [int(c) for c in np.flatnonzero(self.route == s)]
            terms, have = {}, float(self.room[s])
            for layer, held, column, recomputed in self.kinds:
                each = layer.states + layer.activations[s]
                have -= float(held[own].sum()) * each
                terms |= dict.fromkeys((c + column for c in own if column >= 0), float(each))
                saved = layer.activations[s] - (layer.inputs or layer.activations)[s]
                terms |= dict.fromkeys((c + recomputed for c in own), -float(saved))
            self.add(terms, have)
            for i in range(2):
                fixed = p.stage_weights[i, s]
                fixed += sum(float(h[own].sum()) * g.weights[i] for g, h, _, _ in self.kinds)
                terms = dict.fromkeys(own, float(bulk.weights[i]))
                self.add({**terms, self.last + 1 + i: -1.0}, -fixed)
        slope = (np.array(p.tail.reduce) + np.array(p.tail.update)) / PS
        step = {self.last + 1: slope[0], self.last + 2: slope[1], self.last + 3: -1.0}
        self.add(step, -(p.tail.base + p.tail.start) / PS)


def structures(p: PlacementProblem) -> Iterator[tuple[int, ...]]:
    """Yield every way to put the layers of the smaller kind into chunks: how many each has."""
    if len(p.layers) == 1:
        yield (0,) * p.number
        return
    order = range(p.number) if p.bulk else range(p.number - 1, -1, -1)

    def put(left: int, chunks: list[int], counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if not left or not chunks:
            if not left:
                whole = counts + (0,) * len(chunks)
                yield whole if p.bulk else whole[::-1]
            return
        chunk, *behind = chunks
        fewest = 0 if chunk in (0, p.number - 1) else 1
        for count in range(fewest, min(left, int(p.highest[chunk])) + 1):
            yield from put(left - count, behind, (*counts, count))

    yield from put(p.layers[1 - p.bulk].count, list(order), ())


def _program(p: PlacementProblem, structure: tuple[int, ...]) -> _Program:
    """Return the program of a structure."""
    if p.tail.exposed < 1.0:
        raise BadInputError(
            "cross-check: reduction that hides behind the backward pass is not convex"
        )
    made, n = _Rows(p, structure), p.number
    made.operations()
    made.stages()
    low, high, cost = np.zeros(made.width), np.full(made.width, np.inf), np.zeros(made.width)
    low[:n], high[:n] = made.low, made.high
    high[n : 2 * n] = made.high * p.choice
    high[2 * n : 3 * n] = made.few * p.choice
    cost[[made.last, made.last + 3]] = 1.0
    return _Program(cost, np.array(made.rows), np.array(made.right), low, high, 3 * n)


def highs(p: PlacementProblem, limit_s: float = 30.0) -> Crossed:
    """Solve with HiGHS as scipy brings it, in floats.

    Raises:
        BadInputError: A part of the reduction is hidden.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    best, bound, proven = None, np.inf, True
    for structure in structures(p):
        m = _program(p, structure)
        # in ps and bytes it calls feasible programs infeasible
        size = np.where(np.arange(len(m.cost)) < m.whole, 1.0, np.abs(m.rows).max())
        rows = m.rows * size
        unit = np.maximum(np.abs(rows).max(axis=1, keepdims=True), 1.0)
        answer = milp(
            m.cost,
            constraints=LinearConstraint(rows / unit, -np.inf, m.right / unit[:, 0]),
            bounds=Bounds(m.low, m.high),
            integrality=np.arange(len(m.cost)) < m.whole,
            options={"time_limit": limit_s, "mip_rel_gap": 0.0},
        )
        if answer.status == 2:
            continue
        proven = proven and answer.status == 0
        dual = answer.mip_dual_bound
        longer = float(size[-1]) * PS
        bound = min(bound, -np.inf if dual is None else dual * longer)
        if answer.x is not None:
            best = min(np.inf if best is None else best, float(answer.fun) * longer)
    return Crossed(best, float(bound), proven)


def cp_sat(p: PlacementProblem, limit_s: float = 30.0) -> Crossed:
    """Solve with OR-Tools' CP-SAT, 2 threads; all coefficients must be whole, as in problems without a rest.

    Raises:
        BadInputError: A part of the reduction is hidden.
        ImportError: OR-Tools is not installed.
    """
    from ortools.sat.python import cp_model

    best, bound, proven = None, np.inf, True
    work = p.fixed.sum() + sum(g.count * (sum(g.times) + g.recompute_time) for g in p.layers)
    sends = 2 * p.number * p.micro_batches * p.send
    far = int(p.micro_batches * work + sends)  # one operation after the other
    far += int(p.stage_weights.sum()) + sum(g.count * sum(g.weights) for g in p.layers)
    for structure in structures(p):
        m, model = _program(p, structure), cp_model.CpModel()
        x = [
            model.new_int_var(int(low), far if np.isinf(high) else int(max(low, high)), "")
            for low, high in zip(m.low, m.high, strict=True)
        ]
        for row, right in zip(m.rows, m.right, strict=True):
            used = np.flatnonzero(row)
            model.add(sum(round(row[i]) * x[i] for i in used) <= round(right))
        model.minimize(sum(round(m.cost[i]) * x[i] for i in np.flatnonzero(m.cost)))
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = limit_s
        solver.parameters.num_workers = 2
        status = solver.solve(model)
        if status == cp_model.INFEASIBLE:
            continue
        proven = proven and status == cp_model.OPTIMAL
        bound = min(bound, solver.best_objective_bound * PS)
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            best = min(np.inf if best is None else best, solver.objective_value * PS)
    return Crossed(best, float(bound), proven)
