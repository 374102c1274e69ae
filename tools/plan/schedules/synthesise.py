"""Search a schedule for given times, memory and rules, never worse than the published ones, and bound it.

A schedule is made by list scheduling: each stage runs the operation that is due first among those that are ready and for
which there is memory. Due dates come from a pattern that repeats for each micro-batch (how far the chunks' forwards and
backwards are apart, how late dW may be, a shorter period while the pipeline fills), or from a published schedule.
Several patterns are tried on several placements; then single due dates of the best are moved as long as that does not
make it worse. The scheduler is native (`tools/plan/native/pipeline_schedule.cc`); `simulate` checks what it returns.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.native import address, load
from telechat_moe.tools.plan.schedules.bounds import MakespanBound, Rules, lower_bound
from telechat_moe.tools.plan.schedules.program import (
    Op,
    OpKind,
    Program,
    Times,
    loop_route,
    v_route,
)
from telechat_moe.tools.plan.schedules.published import PublishedSchedule, allowed, known, merge
from telechat_moe.tools.plan.schedules.simulate import Simulation, simulate

EFFORT = 20_000_000
"""Operations that all tries together may schedule, which takes about 2 s."""
PLACEMENTS = {"v": v_route, "loop": loop_route}
"""Placements of chunks on stages."""
_PAIR = 1 << 30


@dataclass(frozen=True)
class Pattern:
    """Due dates of a repeating pattern, in units of an operation's mean time unless stated otherwise."""

    hop_f: float
    """From a chunk's forward to the next chunk's, as a multiple of the average of its own time and the mean."""
    hop_b: float
    """The same for backwards."""
    turn: float
    """From the last forward to the first backward."""
    late_w: float
    """From D to W."""
    wait: float = 0.5
    """How much a due date is postponed for each unit of time that the stage would wait for the operation."""
    eager: float = 0.0
    """Share of W's time by which it may delay operations that become ready meanwhile."""
    warm: float = 1.0
    """Period of the first micro-batches, relative to the busiest stage's work for one micro-batch."""
    warm_n: float = 16.0
    """Number of these first micro-batches."""
    jump_b: float = 0.0
    """Time added between backwards where the model returns to a stage."""
    pace: float = 0.0
    """Time between entering micro-batches, relative to the busiest stage's work for one; 0: as soon as they fit."""
    burst: float = 0.0
    """How many micro-batches enter at once before that."""


PATTERNS = (
    Pattern(4, 3, 0, 100, 0, 0.5, 1, 16, 0, 0, 0),
    Pattern(1, 1, 2, 1000, 0.5, 0.5, 1, 24, 2, 0.95, 1),
    Pattern(2, 2, 20, 100, 5, 0.5, 0.5, 16, 0, 1, 8),
    Pattern(2, 2, 5, 100, 0.5, 0, 0.5, 16, 0, 0, 0),
    Pattern(2, 1, 0, 100, 5, 0, 1, 24, 0, 0.95, 2),
    Pattern(4, 3, 2, 30, 2, 0.5, 0.75, 24, 2, 0, 0),
    Pattern(3, 3, 2, 1000, 0.5, 0.5, 1, 4, 0, 0, 0),
    Pattern(0, 1, 5, 100, 5, 0.5, 1, 10, 5, 1.05, 1),
    Pattern(4, 2, 0, 1000, 5, 0, 0.5, 10, 0, 0, 0),
    Pattern(0, 3, 5, 1000, 2, 0.5, 1, 16, 0, 0.8, 2),
    Pattern(3, 3, 0, 3, 5, 1, 1, 4, 5, 1.1, 8),
    Pattern(1, 2, 5, 30, 5, 0.5, 0.5, 4, 0, 0, 0),
    Pattern(1, 2, 10, 30, 0, 0.5, 1, 16, 0, 1, 8),
    Pattern(0.5, 3, 2, 30, 0, 0.5, 1, 10, 0, 0, 0),
    Pattern(2, 1, 2, 10, 5, 0, 0.5, 4, 0, 1, 1),
    Pattern(0.5, 0.5, 2, 3, 2, 0, 0.75, 24, 0, 0.95, 2),
    Pattern(2, 2, 20, 100, 5, 0.5, 0.75, 24, 0, 0, 0),
    Pattern(1, 1, 2, 30, 0.5, 0, 0.75, 24, 0, 0, 0),
    Pattern(4, 3, 2, 10, 2, 0, 1, 4, 0, 0, 0),
    Pattern(3, 1, 0, 10, 2, 0.5, 0.75, 16, 0, 0, 0),
    Pattern(0.5, 3, 0, 1000, 0.5, 0.5, 0.75, 10, 0, 0, 0),
    Pattern(4, 1, 20, 1000, 5, 0.5, 0.75, 4, 0, 0, 0),
    Pattern(3, 0.5, 0, 10, 0, 0, 1, 24, 5, 0.8, 8),
    Pattern(1, 1, 0, 1000, 5, 0, 1, 10, 0, 1.1, 0),
    Pattern(4, 3, 5, 100, 0.5, 0.5, 0.75, 10, 0, 0, 0),
)
"""Patterns that are tried first, in this order: out of 350 random ones those that together came closest to the bound on
74 random cases; each is the one that helps most in addition to those before it."""


@dataclass(frozen=True)
class Synthesis:
    """The best schedule found."""

    result: Simulation
    """The simulated schedule; its program may have fewer chunks than were given, because some were merged."""
    times: Times
    """Times of the program's chunks."""
    bound: MakespanBound
    """Lower bound: no schedule on any allowed placement is shorter."""
    source: str
    """How it was found: `synthesised`, or the name of a published schedule."""
    table: tuple[PublishedSchedule, ...] = field(repr=False)
    """The published schedules on the same times."""
    tries: int
    """Number of schedules that were made."""

    @property
    def gap(self) -> float:
        """How far the schedule is above the bound: makespan / bound - 1."""
        return self.result.makespan / self.bound.makespan - 1

    @property
    def program(self) -> Program:
        """The program."""
        return self.result.program


def synthesise(
    times: Times,
    stages: int,
    micro_batches: int,
    memory: float | Sequence[float] | None = None,
    rules: Rules = Rules(),  # noqa: B008 - frozen
    placements: Sequence[str] = ("v", "loop"),
    effort: int = EFFORT,
    seed: int = 0,
) -> Synthesis:
    """Return the best schedule found, and how far it is from the best possible one at most.

    Args:
        times: Of each chunk along the model, P * V of them.
        memory: The most activations that a stage, or each stage, may hold, in the unit of `times.activation`;
            P (what 1F1B holds) where it is None.
        rules: What the schedule may do.
        placements: Keys of `PLACEMENTS` that may be used. With both, neighbouring chunks may also be merged.
        effort: About how many operations may be scheduled in all tries together.
        seed: Of the search; the same arguments give the same schedule.

    Raises:
        BadInputError: The chunks are not a multiple of P, or the memory holds not even one micro-batch.
        NativeError: The native library is missing.
    """
    search = _Search(times, stages, micro_batches, memory, rules, placements, seed)
    return search.run(effort)


class _Problem(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_int32) for n in ("stages", "chunks", "micros", "split", "pairs")),
        *(
            (n, ctypes.c_void_p)
            for n in ("route", "forward", "back", "weight", "talk_forward", "talk_back")
        ),
        *((n, ctypes.c_void_p) for n in ("activation", "cap")),
        *((n, ctypes.c_double) for n in ("comm", "kept")),
    ]


@dataclass
class _Instance:
    """One placement of one division of the model into chunks, and the best schedule found for it."""

    times: Times
    route: tuple[int, ...]
    stages: int
    micro_batches: int
    memory: NDArray[Any]
    rules: Rules

    def __post_init__(self) -> None:
        t = self.times
        split = self.rules.split
        self._arrays = [
            np.ascontiguousarray(self.route, dtype=np.int32),
            t.forward,
            t.dx if split else t.backward,
            t.dw if split else np.zeros(len(t.dw)),
            t.forward_exposed,
            t.backward_exposed,
            t.activation,
            self.memory,
        ]
        self._problem = _Problem(
            self.stages,
            len(self.route),
            self.micro_batches,
            split,
            self.rules.pairs,
            *(a.ctypes.data for a in self._arrays),
            t.comm,
            t.kept_for_w,
        )
        self.bound = lower_bound(
            t, self.route, self.stages, self.micro_batches, self.memory, self.rules
        )
        all_work = t.forward + self._arrays[2] + self._arrays[3]
        self.busiest = float(np.bincount(self.route, all_work, minlength=self.stages).max())
        self.operations = (3 if split else 2) * len(self.route) * self.micro_batches

    def follow(self, pattern: Pattern) -> "_Policy":
        """Return the due dates of a pattern, and when each micro-batch may enter."""
        t, n = self.times, len(self.route)
        dx, dw = self._arrays[2:4]
        kinds = 3 if self.rules.split else 2
        mean = float((t.forward + dx + dw).sum()) / (n * kinds)
        stage = np.array(self.route)
        link = np.append(np.where(stage[1:] != stage[:-1], t.comm, 0.0), 0.0)
        turns = np.append((np.arange(1, n) % self.stages == 0) * pattern.jump_b * mean, 0.0)
        hop_f = pattern.hop_f * (t.forward + mean) / 2 + link
        hop_b = pattern.hop_b * (dx + mean) / 2 + np.roll(link, 1) + np.roll(turns, 1)
        forward = np.cumsum(hop_f) - hop_f
        last = float(hop_f.sum()) + pattern.turn * mean
        backward = last + (np.cumsum(hop_b[::-1]) - hop_b[::-1])[::-1]
        i = np.arange(self.micro_batches, dtype=np.float64)
        begin = self.busiest * (
            pattern.warm * np.minimum(i, pattern.warm_n) + np.maximum(i - pattern.warm_n, 0)
        )
        offsets = np.stack([forward, backward, backward + pattern.late_w * mean])
        release = np.maximum(i - pattern.burst, 0.0) * pattern.pace * self.busiest
        wait_eager = np.array([pattern.wait, pattern.eager], float)
        return _Policy(offsets[:, :, None] + begin, release, wait_eager)

    def imitate(self, result: Simulation) -> "_Policy":
        """Return the due dates that reproduce a schedule on this placement: its start times."""
        due = np.zeros((3, len(self.route), self.micro_batches))
        for ops, starts in zip(result.program.ops, result.start, strict=True):
            for op, start in zip(ops, starts.tolist(), strict=True):
                for kind, chunk, micro in op.parts():
                    kinds = {OpKind.F: (0,), OpKind.D: (1,), OpKind.W: (2,), OpKind.B: (1, 2)}[kind]
                    due[kinds, chunk, micro] = start
        return _Policy(due, np.zeros(self.micro_batches), np.zeros(2))

    def climb(
        self, policy: "_Policy", steps: int, seed: int = 0
    ) -> tuple[float, "_Policy", "_Order"]:
        """Return makespan, improved policy and order; infinity where the memory does not suffice."""
        improved = _Policy(*(array.copy() for array in policy))
        due, release, wait = improved
        out, lengths = np.empty(self.operations, np.int32), np.empty(self.stages, np.int32)
        makespan = load().telechat_schedule_pipeline(
            ctypes.byref(self._problem),
            *map(address, (due, release, wait, wait[1:])),
            seed,
            steps,
            self.bound.makespan * (1 + 1e-12),
            *map(address, (out, lengths)),
        )
        return makespan, improved, (out, lengths)

    def decode(self, order: "_Order") -> tuple[tuple[Op, ...], ...]:
        """Return the operations of each stage."""
        out, lengths = order
        n, m = len(self.route), self.micro_batches
        kinds = (OpKind.F, OpKind.D, OpKind.W) if self.rules.split else (OpKind.F, OpKind.B)
        pair = OpKind.FD if self.rules.split else OpKind.FB
        result: list[tuple[Op, ...]] = []
        start = 0
        for length in lengths.tolist():
            ops: list[Op] = []
            for code in out[start : start + length].tolist():
                k, remainder = divmod(code & (_PAIR - 1), n * m)
                chunk, micro = divmod(remainder, m)
                if code & _PAIR:
                    first = ops.pop()
                    ops.append(Op(pair, first.chunk, first.micro, chunk, micro))
                else:
                    ops.append(Op(kinds[k], chunk, micro))
            result.append(tuple(ops))
            start += length
        return tuple(result)

    def program(self, ops: tuple[tuple[Op, ...], ...]) -> Program:
        """Return the program of these operations."""
        return Program("synthesised", self.stages, self.micro_batches, (self.route,), ops)


_Order = tuple[NDArray[Any], NDArray[Any]]
"""Operations as `pipeline_schedule.cc` numbers them, stage after stage, and how many each stage has."""


class _Policy(NamedTuple):
    """What the scheduler follows."""

    due: NDArray[Any]
    """Due dates of F, D and W, [3, chunks, micro-batches]."""
    release: NDArray[Any]
    """When each micro-batch may enter."""
    wait_eager: NDArray[Any]
    """`Pattern.wait` and `Pattern.eager`."""


_Found = tuple[Simulation, Times, str]
"""A schedule, the times of its chunks, and how it was found."""


class _Search:
    def __init__(
        self,
        times: Times,
        stages: int,
        micro_batches: int,
        memory: float | Sequence[float] | None,
        rules: Rules,
        placements: Sequence[str],
        seed: int,
    ) -> None:
        chunks = len(times.forward)
        if stages < 1 or micro_batches < 1 or chunks % stages or not chunks:
            raise BadInputError(
                f"schedule: {chunks} chunks, {stages} stages, {micro_batches} micro-batches; "
                "expected a multiple of the stages, and at least one of each"
            )
        self.stages, self.micro_batches, self.rules = stages, micro_batches, rules
        self.times = allowed(times.full(stages), rules)
        self.memory = np.broadcast_to(
            np.asarray(stages if memory is None else memory, dtype=np.float64), (stages,)
        ).copy()
        self.random = np.random.default_rng(seed)
        self.tries = 0
        self.instances = list(self._instances(placements))
        self.routes = [i.route for i in self.instances]
        if not self.instances:
            need = max(float(self.times.activation.sum()) / stages, 0.0)
            raise BadInputError(
                f"schedule: a stage may hold {self.memory.min():g} activations, and on no placement do its chunks' "
                f"for one micro-batch fit (about {need:g}); give more memory, or smaller micro-batches"
            )

    def _instances(self, placements: Sequence[str]) -> Iterator[_Instance]:
        finest = len(self.times.forward) // self.stages
        merged = [v for v in range(1, finest) if finest % v == 0] if len(placements) > 1 else []
        routes: set[tuple[int, ...]] = set()
        for chunks in (finest, *merged):
            times = merge(self.times, self.stages * chunks)
            for name in placements:
                route = PLACEMENTS[name](self.stages, chunks)
                if route in routes:
                    continue
                routes.add(route)
                need = np.bincount(route, times.activation, minlength=self.stages)
                if (need <= self.memory * (1 + 1e-9)).all():
                    yield _Instance(
                        times, route, self.stages, self.micro_batches, self.memory, self.rules
                    )

    def run(self, effort: int) -> Synthesis:
        table = tuple(known(self.times, self.stages, self.micro_batches, self.memory, self.rules))
        usable = [k for k in table if k.fits and k.copies == 1]
        usable = [k for k in usable if k.program.routes[0] in self.routes]
        bound = min((i.bound for i in self.instances), key=lambda b: b.makespan)
        schedules: list[_Found] = [(k.result, k.times, k.program.name) for k in usable]
        enough = bound.makespan * (1 + 1e-12)
        if all(result.makespan > enough for result, _, _ in schedules):
            schedules += self._search(usable, effort, enough)
        result, times, source = min(schedules, key=lambda schedule: schedule[0].makespan)
        if result.makespan < bound.makespan * (1 - 1e-9):
            raise AssertionError(f"{result.makespan} is below the bound {bound}")
        return Synthesis(result, times, bound, source, table, self.tries)

    def _search(
        self, usable: Sequence[PublishedSchedule], effort: int, enough: float
    ) -> list[_Found]:
        """Return the best schedule that the scheduler makes, if it makes one."""
        first: list[tuple[float, int, _Policy]] = []
        best: tuple[float, int, _Order | None] = (np.inf, -1, None)
        spent = 0

        def attempt(index: int, policy: _Policy, steps: int) -> None:
            nonlocal best, spent
            instance = self.instances[index]
            makespan, policy, order = instance.climb(policy, steps, self._below(1 << 62))
            spent += instance.operations * (steps + 1)
            self.tries += steps + 1
            first.append((makespan, index, policy))
            if makespan < best[0]:
                best = (makespan, index, order)

        for k in usable:
            index = self.routes.index(k.program.routes[0])
            attempt(index, self.instances[index].imitate(k.result), 0)
        for pattern in PATTERNS:
            for index, instance in enumerate(self.instances):
                if spent < effort / 2 and best[0] > enough:
                    attempt(index, instance.follow(pattern), 0)
        while spent < effort and best[0] > enough:
            first.sort(key=lambda f: f[0])
            first = first[:4]
            _, index, policy = first.pop(0 if len(first) == 1 else self._below(len(first)))
            steps_left = max(effort - spent, 0) // self.instances[index].operations
            attempt(index, policy, int(min(200, max(steps_left, 1))))
        claimed, index, order = best
        if order is None:
            return []
        instance = self.instances[index]
        return [self._judge(instance, instance.decode(order), claimed)]

    def _below(self, limit: int) -> int:
        return int(self.random.integers(limit))  # type: ignore[reportUnknownMemberType]

    def _judge(
        self, instance: _Instance, ops: tuple[tuple[Op, ...], ...], claimed: float
    ) -> _Found:
        """Simulate what the scheduler made, and use B where it is shorter than D and W."""
        program = instance.program(ops)
        result = simulate(program, instance.times)
        if result.makespan > claimed * (1 + 1e-9) or (result.peak > self.memory * (1 + 1e-9)).any():
            raise AssertionError(
                f"the scheduler claimed {claimed}, simulated {result.makespan}; memory {result.peak}"
            )
        # use B for each chunk where it is shorter than D and W; operations that wait for D then get it later
        shorter = instance.times.backward < (instance.times.dx + instance.times.dw) * (1 - 1e-12)
        for chunk in np.flatnonzero(shorter).tolist():
            tried = _fuse(ops, chunk)
            fused = simulate(instance.program(tried), instance.times)
            if fused.makespan <= result.makespan and (fused.peak <= self.memory * (1 + 1e-9)).all():
                ops, result = tried, fused
        return result, instance.times, "synthesised"


def _fuse(ops: tuple[tuple[Op, ...], ...], chunk: int) -> tuple[tuple[Op, ...], ...]:
    """Write B where D and W of a chunk and the same micro-batch follow each other."""
    result: list[tuple[Op, ...]] = []
    for stage_ops in ops:
        new: list[Op] = []
        for op in stage_ops:
            before = op._replace(kind=OpKind.D)
            if op.kind is OpKind.W and op.chunk == chunk and new and new[-1] == before:
                new[-1] = op._replace(kind=OpKind.B)
            else:
                new.append(op)
        result.append(tuple(new))
    return tuple(result)
