"""The inner problem of the planner: layers into pipeline chunks, and which of them are recomputed. Exact.

A model is a sequence of groups of equal items (dense layers, MoE layers, MTP, head); a chunk holds a contiguous piece
of it. Time of a stage is the sum over its items and of what is fixed there; its memory is their states, what each keeps
for every micro-batch in flight, and the largest working set of one item. Wanted is the least

    a * max over stages of their time  +  b * sum over stages of their time

so that no stage needs more memory than it has. 1F1B with m micro-batches and V chunks a stage has the step
``(m - 1/V) * max + sum / V``, so ``a = m * V - 1`` and ``b = 1`` give V steps (:func:`step_weights`).

How it is solved: given how many items of each group a stage holds, it wants its own least time under its own memory,
whatever the others do. That makes a table ``time(stage, bulk items)``; what is left is to divide the bulk (the largest
group) among stages, which is a shortest path for a fixed limit T on the time of a stage. As T falls the sum rises, so
``a * low + b * sum(high)`` bounds every T in ``[low, high]`` from below, and bisection closes all intervals. All times
and bytes are integers, and the bounds are exact; they are written into the certificate (:mod:`.certify`).
"""

import time

import numpy as np

from telechat_moe.tools.plan.placement_problem import (
    Group,
    NoPlacement,
    Option,
    Problem,
    Solution,
    Structure,
    stage_memory,
    step_weights,
    structures,
)
from telechat_moe.tools.plan.placement_stage import FAR, StageTable, fill_stage

__all__ = [
    "FAR",
    "Group",
    "NoPlacement",
    "Option",
    "Problem",
    "Solution",
    "Structure",
    "solve",
    "stage_memory",
    "stage_times",
    "step_weights",
    "structures",
]


def solve(
    problem: Problem, *, at_least: int | None = None, limit_s: float = 60.0
) -> Solution | NoPlacement | None:
    """Return the best placement with its proof, or why there is none.

    Args:
        problem: See :class:`Problem`.
        at_least: Only solutions below this objective are wanted; None is returned where there is none.
        limit_s: When it has passed, the best found is returned with the bound proven so far.
    """
    return _Solver(problem, at_least, limit_s).run()


def stage_times(problem: Problem) -> list[np.ndarray]:
    """Return, for a pinned problem, the least time of each stage by number of bulk items; `FAR`: it does not fit."""
    structure, solver = Structure(problem, problem.pinned), _Solver(problem, None, 0.0)
    return [solver.table(structure, stage).time for stage in range(problem.stages)]


class _Solver:
    def __init__(self, problem: Problem, at_least: int | None, limit_s: float) -> None:
        self.p, self.limit_s = problem, limit_s
        self.began = time.perf_counter()
        self.best = FAR if at_least is None else at_least
        self.tables: dict[tuple, StageTable] = {}
        self.found: tuple[Structure, list[StageTable], list[int]] | None = None
        self.proof: list[tuple[int, int, int]] = []
        self.open_bound = FAR
        self.why = (-1, FAR)

    def run(self) -> Solution | NoPlacement | None:
        p = self.p
        todo = []
        for places in structures(p):
            structure = Structure(p, places)
            tables = [self.table(structure, s) for s in range(p.stages)]
            found = self._limits(tables)
            if found is not None:
                low, high, least = found
                todo.append(
                    (
                        p.max_weight * low + p.sum_weight * least,
                        len(todo),
                        low,
                        high,
                        least,
                        structure,
                        tables,
                    )
                )
            if time.perf_counter() - self.began > self.limit_s:
                break
        if not todo:
            return NoPlacement(
                stage=self.why[0], missing=self.why[1] % FAR, seconds=self._seconds()
            )
        for bound, _, low, high, least, structure, tables in sorted(todo, key=lambda t: t[:2]):
            if bound >= self.best:
                self.proof.append((low, high, least))
            else:
                self._bisect(structure, tables, low, high)
        return self._solution() if self.found else None

    def _seconds(self) -> float:
        return time.perf_counter() - self.began

    def table(self, structure: Structure, stage: int) -> StageTable:
        chunks = self.p.chunks_of[stage]
        special = tuple(tuple(structure.count[c]) for c in chunks)
        first, last = structure.open
        opened = tuple(first <= c <= last for c in chunks)
        key = (stage, special, opened)
        if key not in self.tables:
            self.tables[key] = StageTable(self.p, stage, special, opened)
        return self.tables[key]

    def _limits(self, tables: list[StageTable]) -> tuple[int, int, int] | None:
        """Return the least and the largest useful limit on a stage's time and the least sum; None: nothing fits."""
        for stage, table in enumerate(tables):
            if not table.choice:
                if table.missing < self.why[1]:
                    self.why = (stage, table.missing)
                return None
        least = least_sum(tables, FAR - 1)
        if least >= FAR:
            lacking = [(t.missing, s) for s, t in enumerate(tables) if 0 < t.missing < FAR]
            if lacking and min(lacking)[0] < self.why[1]:
                self.why = (min(lacking)[1], min(lacking)[0])
            return None
        times = np.unique(np.concatenate([t.time[t.time < FAR] for t in tables]))
        low, high = 0, len(times) - 1
        while low < high:
            middle = (low + high) // 2
            if reachable(tables, int(times[middle])):
                high = middle
            else:
                low = middle + 1
        return int(times[low]), int(times[-1]), least

    def _bisect(self, structure: Structure, tables: list[StageTable], low: int, high: int) -> None:
        """Close `[low, high]`: every limit in it gives no better objective than the best."""
        p = self.p
        times = np.unique(np.concatenate([t.time[t.time < FAR] for t in tables]))
        stack = [(int(np.searchsorted(times, low)), int(np.searchsorted(times, high)))]
        while stack:
            i, j = stack.pop()
            total, split = divide(tables, int(times[j]))
            top = max(int(t.time[n]) for t, n in zip(tables, split, strict=True))
            value = p.max_weight * top + p.sum_weight * total
            if value < self.best:
                self.best, self.found = value, (structure, tables, split)
            bound = p.max_weight * int(times[i]) + p.sum_weight * total
            if bound >= self.best or i == j:
                self.proof.append((int(times[i]), int(times[j]), total))
            elif self._seconds() > self.limit_s:
                self.open_bound = min(self.open_bound, bound)
            else:
                middle = (i + j) // 2
                stack += [(middle + 1, j), (i, middle)]

    def _solution(self) -> Solution:
        assert self.found is not None
        _, tables, split = self.found
        p = self.p
        items = [[(0,) * len(g.options) for g in p.groups] for _ in p.stage_of_chunk]
        times, memory = [], []
        for table, n in zip(tables, split, strict=True):
            fill_stage(p, table, n, items)
            times.append(int(table.time[n]))
            memory.append(stage_memory(p, table.stage, items))
        return Solution(
            items=tuple(tuple(chunk) for chunk in items),
            stage_time=tuple(times),
            stage_memory=tuple(memory),
            objective=self.best,
            bound=min(self.best, self.open_bound),
            proof=tuple(self.proof),
            seconds=self._seconds(),
        )


def reachable(tables: list[StageTable], limit: int) -> bool:
    """Return whether the bulk can be divided so that no stage takes longer than `limit`."""
    count = len(tables[0].time) - 1
    sums, mask = 1, (1 << (count + 1)) - 1
    for table in tables:
        sums = _shifted(sums, np.flatnonzero(table.time <= limit)) & mask
        if not sums:
            return False
    return bool(sums >> count & 1)


def _shifted(sums: int, numbers: np.ndarray) -> int:
    result = 0
    for n in numbers:
        result |= sums << int(n)
    return result


def least_sum(tables: list[StageTable], limit: int) -> int:
    """Return the least sum of stage times, each at most `limit`; FAR: impossible."""
    return int(_sums(tables, limit)[-1][-1])


def _sums(tables: list[StageTable], limit: int) -> list[np.ndarray]:
    """Return, after each stage, the least sum of times for every number of bulk items."""
    count = len(tables[0].time) - 1
    best = np.full(count + 1, FAR, dtype=np.int64)
    best[0] = 0
    found = [best]
    for table in tables:
        after = np.full(count + 1, FAR, dtype=np.int64)
        for n in np.flatnonzero(table.time <= limit):
            after[n:] = np.minimum(after[n:], best[: count + 1 - n] + table.time[n])
        best = np.minimum(after, FAR)
        found.append(best)
    return found


def divide(tables: list[StageTable], limit: int) -> tuple[int, list[int]]:
    """Return the least sum of stage times, each at most `limit`, and the bulk items of each stage."""
    found = _sums(tables, limit)
    left, split = len(tables[0].time) - 1, []
    for stage in range(len(tables) - 1, -1, -1):
        times, before = tables[stage].time, found[stage]
        for n in np.flatnonzero(times <= limit):
            if (
                n <= left
                and before[left - n] < FAR
                and before[left - n] + times[n] == found[stage + 1][left]
            ):
                split.append(int(n))
                left -= int(n)
                break
    return int(found[-1][-1]), split[::-1]
