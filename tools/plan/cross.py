"""The inner problem as an integer program, for solvers that others wrote: CP-SAT (extra `plan`) and HiGHS (scipy).

Used to cross-check :mod:`.placement`; the planner itself needs neither. One program per structure: the items that are not
of the largest group stand in given chunks. Integers x[chunk, group, option] count items; T is the largest stage time:

    minimise   a T + b sum_s t_s
    t_s = fixed_s + sum time * x,   t_s <= T,   fixed memory_s + sum (states + flight * kept) x + W_s <= memory_s,
    W_s >= working * z,  x <= count * z  (z binary),   sum_options x = special count,   sum of the bulk = its count,
    lowest <= layers of a chunk,  layers of two chunks of a stage differ by at most the spread.
"""

import time
from dataclasses import dataclass

import numpy as np

from telechat_moe.tools.plan.placement import Problem, Structure, structures


@dataclass(frozen=True)
class Crossed:
    """What a solver says."""

    objective: int | None
    """None: nothing fits, or nothing was found in time."""

    bound: float
    proven: bool
    seconds: float


class _Program:
    """Linear rows over integer variables."""

    def __init__(self) -> None:
        self.bounds: list[tuple[int, int]] = []
        self.rows: list[tuple[dict[int, int], int | None, int | None]] = []
        self.cost: dict[int, int] = {}
        self.constant = 0

    def variable(self, low: int, high: int) -> int:
        self.bounds.append((low, high))
        return len(self.bounds) - 1

    def row(self, terms: dict[int, int], low: int | None, high: int | None) -> None:
        self.rows.append((terms, low, high))


def programs(p: Problem) -> list[_Program]:
    """Return the integer program of every structure."""
    return [_program(p, Structure(p, places)) for places in structures(p)]


def _program(p: Problem, structure: Structure) -> _Program:
    m, chunks = _Program(), len(p.stage_of_chunk)
    x: dict[tuple[int, int, int], int] = {}
    first, last = structure.open
    bulk: dict[int, int] = {}
    layers: list[dict[int, int]] = [{} for _ in range(chunks)]
    for c in range(chunks):
        for g, group in enumerate(p.groups):
            most = group.count if g != p.bulk or first <= c <= last else 0
            own = {}
            for o in range(len(group.options)):
                x[c, g, o] = m.variable(0, most)
                own[x[c, g, o]] = 1
            if g != p.bulk:
                m.row(own, structure.count[c][g], structure.count[c][g])
            else:
                bulk |= own
            if group.layer:
                layers[c] |= own
        m.row(layers[c], p.lowest[c], None)
    m.row(bulk, p.groups[p.bulk].count, p.groups[p.bulk].count)
    far = sum(p.fixed_time) + sum(g.count * max(o.time for o in g.options) for g in p.groups)
    longest = m.variable(0, far)
    m.cost[longest] = p.max_weight
    for s in range(p.stages):
        _stage(m, p, s, x, longest)
        own = {
            x[c, p.bulk, o] for c in p.chunks_of[s] for o in range(len(p.groups[p.bulk].options))
        }
        low, high = p.fewest[s : s + 1], p.most[s : s + 1]
        m.row(dict.fromkeys(own, 1), low[0] if low else None, high[0] if high else None)
        _spread(m, p, s, layers)
    return m


def _stage(
    m: _Program, p: Problem, s: int, x: dict[tuple[int, int, int], int], longest: int
) -> None:
    """Add time and memory of a stage."""
    took: dict[int, int] = {}
    held: dict[int, int] = {}
    working = m.variable(0, max([p.working[s], *(o.working for g in p.groups for o in g.options)]))
    m.row({working: 1}, p.working[s], None)
    for c in p.chunks_of[s]:
        for g, group in enumerate(p.groups):
            for o, option in enumerate(group.options):
                v = x[c, g, o]
                took[v] = option.time
                held[v] = group.states + p.in_flight[c] * option.kept
                if option.working > p.working[s]:
                    used = m.variable(0, 1)
                    m.row({v: 1, used: -group.count}, None, 0)
                    m.row({working: 1, used: -option.working}, 0, None)
    m.row({**took, longest: -1}, None, -p.fixed_time[s])
    m.row({**held, working: 1}, None, p.memory[s] - p.fixed_memory[s])
    m.constant += p.sum_weight * p.fixed_time[s]
    for v, t in took.items():
        m.cost[v] = m.cost.get(v, 0) + p.sum_weight * t


def _spread(m: _Program, p: Problem, s: int, layers: list[dict[int, int]]) -> None:
    """Add that the chunks of a stage are about equally long."""
    own = p.chunks_of[s]
    for c in own if len(own) > 1 else ():
        for d in own:
            if c not in (d, 0, len(p.stage_of_chunk) - 1):
                m.row({**layers[c], **dict.fromkeys(layers[d], -1)}, -p.spread, None)


def cp_sat(p: Problem, limit_s: float = 30.0) -> Crossed:
    """Solve with OR-Tools' CP-SAT, 2 threads.

    Raises:
        ImportError: OR-Tools is not installed.
    """
    from ortools.sat.python import cp_model

    began, best, bound, proven = time.perf_counter(), None, np.inf, True
    for m in programs(p):
        model = cp_model.CpModel()
        v = [model.new_int_var(low, high, f"v{i}") for i, (low, high) in enumerate(m.bounds)]
        for terms, low, high in m.rows:
            total = sum(k * v[i] for i, k in terms.items())
            if not terms:
                if (low or 0) > 0:
                    model.add_bool_or([])
                continue
            if low is not None:
                model.add(total >= low)
            if high is not None:
                model.add(total <= high)
        model.minimize(sum(k * v[i] for i, k in m.cost.items()) + m.constant)
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = limit_s
        solver.parameters.num_workers = 2
        status = solver.solve(model)
        if status == cp_model.INFEASIBLE:
            continue
        proven = proven and status == cp_model.OPTIMAL
        bound = min(bound, solver.best_objective_bound)
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            found = round(solver.objective_value)
            best = found if best is None else min(best, found)
    return Crossed(best, float(bound), proven, time.perf_counter() - began)


def highs(p: Problem, limit_s: float = 30.0) -> Crossed:
    """Solve with HiGHS as scipy brings it; its objective is a float, so integers above 2^53 lose digits."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_matrix

    began, best, bound, proven = time.perf_counter(), None, np.inf, True
    for m in programs(p):
        n = len(m.bounds)
        cost = np.array([m.cost.get(i, 0) for i in range(n)], dtype=float)
        # rows in units of their largest coefficient: in bytes HiGHS calls feasible programs infeasible
        unit = [max((abs(k) for k in terms.values()), default=1) for terms, _, _ in m.rows]
        cells = [
            (r, i, k / unit[r]) for r, (terms, _, _) in enumerate(m.rows) for i, k in terms.items()
        ]
        rows, columns, values = zip(*cells, strict=True)
        matrix = csr_matrix((values, (rows, columns)), shape=(len(m.rows), n))
        low = [-np.inf if r[1] is None else r[1] / u for r, u in zip(m.rows, unit, strict=True)]
        high = [np.inf if r[2] is None else r[2] / u for r, u in zip(m.rows, unit, strict=True)]
        answer = milp(
            cost,
            constraints=LinearConstraint(matrix, low, high),
            bounds=Bounds([b[0] for b in m.bounds], [b[1] for b in m.bounds]),
            integrality=np.ones(n),
            options={"time_limit": limit_s, "mip_rel_gap": 0.0},
        )
        if answer.status == 2:
            continue
        proven = proven and answer.status == 0
        dual = answer.mip_dual_bound
        bound = min(bound, (-np.inf if dual is None else dual) + m.constant)
        if answer.x is not None:
            found = sum(k * round(answer.x[i]) for i, k in m.cost.items()) + m.constant
            best = found if best is None else min(best, found)
    return Crossed(best, float(bound), proven, time.perf_counter() - began)
