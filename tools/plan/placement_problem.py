"""The inner problem as data: what is placed where, what it costs, and the ways to place what is few."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from telechat_moe.errors import BadInputError


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to compute an item, such as with or without recomputation."""

    name: str
    time: int
    """Forward and backward of a micro-batch, recomputation included, ns."""

    kept: int
    """Bytes that a micro-batch in flight keeps."""

    working: int = 0
    """Further bytes while one item is computed; a stage needs the largest of its items."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Equal items that follow each other in the model."""

    name: str
    count: int
    states: int
    """Bytes of parameters, gradients and optimizer of one item."""

    options: tuple[Option, ...]
    layer: bool = True
    """Counts as a decoder layer where a chunk needs at least one."""

    last: bool = False
    """Stands in the last chunk (otherwise anywhere that the order allows)."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is to be placed where. Times in ns, memory in bytes, all integers."""

    groups: tuple[Group, ...]
    stage_of_chunk: tuple[int, ...]
    """Along the model; every stage holds equally many chunks."""

    in_flight: tuple[int, ...]
    """Micro-batches that each chunk keeps at its stage's peak."""

    memory: tuple[int, ...]
    """Bytes of each stage."""

    fixed_time: tuple[int, ...]
    """Of each stage: embedding, transfers, what no item accounts for."""

    fixed_memory: tuple[int, ...]
    fixed_working: tuple[int, ...] = ()
    """Working set of each stage besides its items, such as logits; the larger of both counts. Empty: none."""

    max_weight: int = 1
    sum_weight: int = 0
    least: tuple[int, ...] = ()
    """Fewest decoder layers of each chunk; empty: 0 in the first and the last, 1 elsewhere."""

    most: tuple[int, ...] = ()
    """Most items of the largest group on each stage; empty: any number."""

    fewest: tuple[int, ...] = ()
    """Fewest of them on each stage; empty: none."""

    pinned: tuple[tuple[int, ...], ...] = ()
    """Chunks of the items of every group, none for the largest one: only this is looked at. Empty: all ways are."""

    spread: int = 1
    """Chunks of a stage differ by at most so many decoder layers; the first and the last chunk of the model may hold
    fewer. Schedules with several chunks go at the pace of the longest chunk of each round."""

    def __post_init__(self) -> None:
        stages, chunks = self.stages, len(self.stage_of_chunk)
        sizes = {
            "memory": (self.memory, stages),
            "fixed_time": (self.fixed_time, stages),
            "fixed_memory": (self.fixed_memory, stages),
            "in_flight": (self.in_flight, chunks),
            "least": (self.least or self.in_flight, chunks),
            "most": (self.most or self.memory, stages),
            "fewest": (self.fewest or self.memory, stages),
            "fixed_working": (self.fixed_working or self.memory, stages),
        }
        for name, (values, expected) in sizes.items():
            if len(values) != expected:
                raise BadInputError(
                    f"placement: {name} has {len(values)} numbers, expected {expected}"
                )
        if not self.groups or any(g.count < 1 or not g.options for g in self.groups):
            raise BadInputError("placement: every group needs at least one item and one option")
        if self.max_weight < 0 or self.sum_weight < 0 or self.spread < 0:
            raise BadInputError("placement: weights and spread must not be negative")

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return max(self.stage_of_chunk) + 1

    @cached_property
    def lowest(self) -> tuple[int, ...]:
        """Fewest decoder layers of each chunk."""
        chunks = len(self.stage_of_chunk)
        return self.least or tuple(int(0 < c < chunks - 1) for c in range(chunks))

    @cached_property
    def working(self) -> tuple[int, ...]:
        """Working set of each stage besides its items."""
        return self.fixed_working or (0,) * self.stages

    @cached_property
    def chunks_of(self) -> tuple[tuple[int, ...], ...]:
        """Chunks of each stage."""
        return tuple(
            tuple(c for c, at in enumerate(self.stage_of_chunk) if at == s)
            for s in range(self.stages)
        )

    @cached_property
    def bulk(self) -> int:
        """The largest group: the one that is divided by the shortest path."""
        return max(range(len(self.groups)), key=lambda g: self.groups[g].count)


def step_weights(micro_batches: int, chunks: int) -> tuple[int, int]:
    """Return the weights of the largest and of the summed stage times that give `chunks` times the step of 1F1B."""
    return micro_batches * chunks - 1, 1


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Items of each chunk, by group and option, and what that costs."""

    items: tuple[tuple[tuple[int, ...], ...], ...]
    """`[chunk][group][option]`: number of items."""

    stage_time: tuple[int, ...]
    stage_memory: tuple[int, ...]
    objective: int
    bound: int
    """Proven: nothing is better. Equal to the objective where `proof` is complete."""

    proof: tuple[tuple[int, int, int], ...]
    """Intervals `(low, high, least sum)` of the largest stage time, no gap between them: see :mod:`.certify`."""

    seconds: float

    @property
    def optimal(self) -> bool:
        """Whether bound and objective meet."""
        return self.bound == self.objective

    def layers(self, problem: Problem) -> tuple[int, ...]:
        """Return the decoder layers of each chunk."""
        return tuple(
            sum(sum(o) for o, g in zip(chunk, problem.groups, strict=True) if g.layer)
            for chunk in self.items
        )


@dataclass(frozen=True, kw_only=True)
class NoPlacement:
    """Why no placement exists."""

    stage: int
    """Where least is missing; -1: the layers do not fill the chunks."""

    missing: int
    """Bytes over the memory of that stage in the best case; 0 with stage -1."""

    seconds: float


def structures(problem: Problem) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield every way to put the items of all groups but the bulk into chunks, as `[group][item] -> chunk`.

    Items before the bulk rise from chunk 0, those behind it up to the last chunk.
    """
    if problem.pinned:
        if _filled(problem, problem.pinned):
            yield problem.pinned
        return
    chunks, bulk = len(problem.stage_of_chunk), problem.bulk
    need = problem.lowest
    heads = list(_walk(need, [g.count for g in problem.groups[:bulk]], (False,) * bulk))
    behind = problem.groups[bulk + 1 :]
    counts = [g.count for g in reversed(behind)]
    tails = list(_walk(need[::-1], counts, tuple(g.last for g in reversed(behind))))
    for head in heads:
        first = max((c for g in head for c in g), default=0)
        for mirrored in tails:
            tail = tuple(tuple(chunks - 1 - c for c in g[::-1]) for g in mirrored[::-1])
            places = (*head, (), *tail)
            if min((c for g in tail for c in g), default=chunks) >= first and _filled(
                problem, places
            ):
                yield places


def _walk(
    need: Sequence[int], counts: Sequence[int], pinned: Sequence[bool], start: int = 0
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield rising places of the items; no step passes over a chunk that needs layers and would get none."""
    if not counts:
        yield ()
        return
    for places in _steps(need, counts[0], start, 0 if pinned[0] else len(need) - 1):
        for rest in _walk(need, counts[1:], pinned[1:], places[-1]):
            yield (places, *rest)


def _steps(need: Sequence[int], count: int, start: int, end: int) -> Iterator[tuple[int, ...]]:
    if not count:
        yield ()
        return
    for chunk in range(start, end + 1):
        for rest in _steps(need, count - 1, chunk, end):
            yield (chunk, *rest)
        if need[chunk] and chunk > start:
            break  # the next one would leave this chunk empty


def _filled(problem: Problem, places: tuple[tuple[int, ...], ...]) -> bool:
    """Return whether every chunk that no bulk item can reach has the layers that it needs."""
    structure = Structure(problem, places)
    first, last = structure.open
    return all(
        least <= sum(n for n, g in zip(row, problem.groups, strict=True) if g.layer)
        for c, (row, least) in enumerate(zip(structure.count, problem.lowest, strict=True))
        if not first <= c <= last
    )


class Structure:
    """Counts of the special items by chunk, and the chunks that may hold bulk."""

    def __init__(self, problem: Problem, places: tuple[tuple[int, ...], ...]) -> None:
        chunks = len(problem.stage_of_chunk)
        self.count = [[0] * len(problem.groups) for _ in range(chunks)]
        for group, at in enumerate(places):
            for chunk in at:
                self.count[chunk][group] += 1
        before = [c for g in range(problem.bulk) for c in places[g]]
        behind = [c for g in range(problem.bulk + 1, len(places)) for c in places[g]]
        self.open = (max(before, default=0), min(behind, default=chunks - 1))


def stage_memory(problem: Problem, stage: int, items: Sequence) -> int:
    """Return the bytes of a stage."""
    total, working = problem.fixed_memory[stage], problem.working[stage]
    for chunk in problem.chunks_of[stage]:
        for group, numbers in zip(problem.groups, items[chunk], strict=True):
            for option, n in zip(group.options, numbers, strict=True):
                total += n * (group.states + problem.in_flight[chunk] * option.kept)
                working = max(working, option.working if n else 0)
    return total + working
