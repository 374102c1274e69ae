"""One stage of the inner problem: its least time for every number of bulk items."""

from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, product

import numpy as np

from telechat_moe.tools.plan.placement_problem import Option, Problem

FAR = 1 << 60
"""More than any time; tables hold it where nothing fits."""


def fronts(
    slots: Sequence[int], options: Sequence[Option]
) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return the best (kept bytes, time, items by option) of equal items at slots with so many micro-batches in flight.

    The items with the fewest bytes take the slots with the most micro-batches (rearrangement inequality), so the number
    of items of each option decides; dominated numbers are left out.
    """
    order = sorted(range(len(options)), key=lambda o: (options[o].kept, options[o].time))
    flight = np.concatenate([[0], np.cumsum(sorted(slots, reverse=True))])
    found: list[tuple[int, int, tuple[int, ...]]] = []
    for cuts in combinations_with_replacement(range(len(slots) + 1), len(options) - 1):
        ends = [0, *cuts, len(slots)]
        numbers = [ends[i + 1] - ends[i] for i in range(len(options))]
        kept = sum(
            options[o].kept * int(flight[ends[i + 1]] - flight[ends[i]])
            for i, o in enumerate(order)
        )
        took = sum(options[o].time * n for o, n in zip(order, numbers, strict=True))
        by_option = [0] * len(options)
        for o, n in zip(order, numbers, strict=True):
            by_option[o] = n
        found.append((kept, took, tuple(by_option)))
    return _pareto(found)


def _pareto(points: list) -> list:
    """Return the points that no other beats in memory and time, memory rising."""
    best, kept = FAR, []
    for point in sorted(points, key=lambda p: (p[0], p[1])):
        if point[1] < best:
            best = point[1]
            kept.append(point)
    return kept


class StageTable:
    """For one stage and special items: the least time for every number of bulk items."""

    def __init__(
        self,
        problem: Problem,
        stage: int,
        special: tuple[tuple[int, ...], ...],
        opened: tuple[bool, ...],
    ) -> None:
        self.problem, self.stage = problem, stage
        self.special, self.opened = special, opened
        self.chunks = problem.chunks_of[stage]
        count = problem.groups[problem.bulk].count
        self.time = np.full(count + 1, FAR, dtype=np.int64)
        self.choice: dict[int, tuple] = {}
        self.missing = FAR
        """Bytes that the cheapest arrangement lacks; FAR: no arrangement."""
        fewest = problem.fewest[stage] if problem.fewest else 0
        for n, splits in self._splits(min(count, problem.most[stage]) if problem.most else count):
            if n >= fewest:
                self._best(n, splits)
            if self.time[n] == FAR and self.choice and max(self.choice) < n:
                break  # one layer more never needs less memory

    def _splits(self, count: int) -> Iterator[tuple[int, list[tuple[int, ...]]]]:
        """Yield each number of bulk items and the ways to divide it among the stage's chunks."""
        p, bulk = self.problem, self.problem.groups[self.problem.bulk]
        others = [
            sum(n for n, g in zip(row, p.groups, strict=True) if g.layer) for row in self.special
        ]
        edge = {0, len(p.stage_of_chunk) - 1}
        if len(self.chunks) == 1:
            low = max(0, p.lowest[self.chunks[0]] - others[0])
            for n in range(low if self.opened[0] else 0, (count if self.opened[0] else 0) + 1):
                if n >= low or not bulk.layer:
                    yield n, [(n,)]
            return
        if len({p.in_flight[c] for c in self.chunks}) == 1:
            yield from self._one_split_each(count, others, edge)
            return
        by_total: dict[int, set[tuple[int, ...]]] = {}
        for top in range(count + max(others) + 1):
            ranges = self._ranges(top, count, others, edge)
            if any(not r for r in ranges):
                continue
            for split in product(*ranges):
                if (
                    sum(split) <= count
                    and max(n + o for n, o in zip(split, others, strict=True)) == top
                ):
                    by_total.setdefault(sum(split), set()).add(split)
        for n in sorted(by_total):
            yield n, sorted(by_total[n])

    def _ranges(self, top: int, count: int, others: list[int], edge: set[int]) -> list[range]:
        """Return how many bulk items each chunk may have where the fullest has `top` layers."""
        p, ranges = self.problem, []
        layer = p.groups[p.bulk].layer
        for chunk, other, is_open in zip(self.chunks, others, self.opened, strict=True):
            floor = p.lowest[chunk] if chunk in edge else max(p.lowest[chunk], top - p.spread)
            low = max(floor - other, 0) if layer else 0
            ranges.append(range(low, (min(top - other, count) if is_open else 0) + 1))
        return ranges

    def _one_split_each(
        self, count: int, others: list[int], edge: set[int]
    ) -> Iterator[tuple[int, list[tuple[int, ...]]]]:
        """Yield one division of each number: with equal micro-batches in flight all cost the same.

        The evenest one; what is over goes to chunks without embedding, MTP and head.
        """
        order = sorted(range(len(self.chunks)), key=lambda i: (self.chunks[i] in edge, i))
        ranges = [self._ranges(top, count, others, edge) for top in range(count + max(others) + 1)]
        limits = [
            (sum(r.start for r in rs), sum(r.stop - 1 for r in rs)) if all(rs) else None
            for rs in ranges
        ]
        for n in range(count + 1):
            fits = (t for t, limit in enumerate(limits) if limit and limit[0] <= n <= limit[1])
            top = next(fits, None)
            if top is None:
                continue
            split = [r.start for r in ranges[top]]
            while sum(split) < n:
                least = min(
                    split[i] + others[i] for i in order if split[i] < ranges[top][i].stop - 1
                )
                i = next(
                    i for i in order
                    if split[i] + others[i] == least and split[i] < ranges[top][i].stop - 1
                )  # fmt: skip
                split[i] += 1
            yield n, [tuple(split)]

    def _best(self, n: int, splits: list[tuple[int, ...]]) -> None:
        p = self.problem
        room = p.memory[self.stage] - p.fixed_memory[self.stage]
        for split in splits:
            for took, memory, numbers in self._arrangements(split):
                if memory > room:
                    self.missing = min(self.missing, memory - room)
                elif took < self.time[n]:
                    self.time[n] = took
                    self.choice[n] = (split, numbers)
        if self.time[n] < FAR:
            self.missing = 0

    def _arrangements(self, split: tuple[int, ...]) -> Iterator[tuple[int, int, tuple]]:
        """Yield (time, memory without what is fixed, options of each group), the fastest that fits and a smallest."""
        p, counts = self.problem, [list(row) for row in self.special]
        for row, n in zip(counts, split, strict=True):
            row[p.bulk] += n
        states = sum(n * g.states for row in counts for n, g in zip(row, p.groups, strict=True))
        groups = [g for g in range(len(p.groups)) if any(row[g] for row in counts)]
        slots = {
            g: [
                p.in_flight[c]
                for c, row in zip(self.chunks, counts, strict=True)
                for _ in range(row[g])
            ]
            for g in groups
        }
        room = p.memory[self.stage] - p.fixed_memory[self.stage]
        least = p.working[self.stage]
        levels = sorted({max(o.working, least) for g in groups for o in p.groups[g].options}) or [
            least
        ]
        for level in levels:
            allowed = [tuple(o for o in p.groups[g].options if o.working <= level) for g in groups]
            if any(not options for options in allowed):
                self.missing = min(self.missing, FAR - 1)
                continue
            merged: list = [(0, p.fixed_time[self.stage], ())]
            for g, options in zip(groups, allowed, strict=True):
                own = [
                    (kept, took, ((g, options, by),))
                    for kept, took, by in fronts(slots[g], options)
                ]
                merged = _pareto(
                    [(k1 + k2, t1 + t2, c1 + c2) for k1, t1, c1 in merged for k2, t2, c2 in own]
                )
            base = states + level
            fitting = [m for m in merged if m[0] + base <= room]
            chosen = fitting[-1] if fitting else merged[0]
            yield chosen[1], chosen[0] + base, chosen[2]


def fill_stage(problem: Problem, table: StageTable, n: int, items: list) -> None:
    """Write a stage's items, `[chunk][group][option]`: options with the fewest bytes where most is in flight."""
    split, chosen = table.choice[n]
    counts = [list(row) for row in table.special]
    for row, more in zip(counts, split, strict=True):
        row[problem.bulk] += more
    for g, options, by in chosen:
        order = sorted(range(len(options)), key=lambda o: (options[o].kept, options[o].time))
        queue = [problem.groups[g].options.index(options[o]) for o in order for _ in range(by[o])]
        slots = [
            (-problem.in_flight[c], c)
            for c, row in zip(table.chunks, counts, strict=True)
            for _ in range(row[g])
        ]
        for (_, chunk), option in zip(sorted(slots), queue, strict=True):
            held = list(items[chunk][g])
            held[option] += 1
            items[chunk][g] = tuple(held)
