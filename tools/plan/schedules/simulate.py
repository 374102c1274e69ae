"""Compute when each operation of a program starts and ends: the longest path through its dependencies.

A stage computes one operation at a time, in the program's order. F of a chunk waits for F of the chunk before it, D and
B for D or B of the chunk after it (for their own F on the last chunk), W for its own D; between different stages
`Times.comm` passes, during which both may compute. Exact: no time steps, no tolerance. `check` refuses a program that cannot run.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.schedules.program import Op, OpKind, Program, Times


@dataclass(frozen=True)
class Simulation:
    """A program with the times of its operations."""

    program: Program
    start: tuple[NDArray[Any], ...]
    """Per stage: start of each of its operations."""
    end: tuple[NDArray[Any], ...]
    """Per stage: end of each of its operations."""
    makespan: float
    """From time 0 to the end of the last operation."""
    idle: NDArray[Any]
    """Per stage: share of the makespan in which it computes nothing."""
    bubble: float
    """Mean of `idle`: the idle share of the makespan, start-up included."""
    memory: tuple[NDArray[Any], ...]
    """Per stage: activations held while each of its operations runs, in the unit of `Times.activation`."""
    peak: NDArray[Any]
    """Per stage: the most activations held."""


def durations(program: Program, times: Times) -> tuple[NDArray[Any], ...]:
    """Return how long each operation of each stage takes.

    An overlapped pair takes the longest of the computation of both, the communication of both, and either operation
    alone.
    """
    times = times.full(program.stages)
    alone = {
        OpKind.F: times.forward,
        OpKind.B: times.backward,
        OpKind.D: times.dx,
        OpKind.W: times.dw,
    }

    def lasts(op: Op) -> float:
        first, *paired = (float(alone[kind][chunk]) for kind, chunk, _ in op.parts())
        if not paired:
            return first
        talk = float(times.forward_exposed[op.chunk]), float(times.backward_exposed[op.back_chunk])
        computed = first - talk[0] + paired[0] - talk[1]
        return max(first, paired[0], computed, talk[0] + talk[1])

    return tuple(np.array([lasts(op) for op in ops]) for ops in program.ops)


def memory(program: Program, times: Times) -> tuple[NDArray[Any], ...]:
    """Return per stage the activations held while each operation runs.

    F allocates its activations before it starts; D, B and W free theirs after they end, D and B need `Times.working` besides.
    So only the order matters, not the times.
    """
    times = times.full(program.stages)
    freed = {
        OpKind.F: 0.0,
        OpKind.B: 1.0,
        OpKind.D: 1.0 - times.kept_for_w,
        OpKind.W: times.kept_for_w,
    }
    result: list[NDArray[Any]] = []
    for ops in program.ops:
        during = np.empty(len(ops))
        activations = 0.0
        for i, op in enumerate(ops):
            parts = op.parts()
            activations += sum(float(times.activation[c]) for k, c, _ in parts if k is OpKind.F)
            needed = (float(times.working[c]) for k, c, _ in parts if k in (OpKind.D, OpKind.B))
            during[i] = activations + sum(needed)
            activations -= sum(freed[k] * float(times.activation[c]) for k, c, _ in parts)
        result.append(during)
    return tuple(result)


def simulate(program: Program, times: Times) -> Simulation:
    """Return the start and end of every operation; times are of each of the program's chunks.

    Raises:
        BadInputError: `times` has another number of chunks; or the program cannot finish, and what each stage waits for.
    """
    if len(times.forward) != program.chunks:
        raise BadInputError(
            f"program {program.name} has {program.chunks} chunks, its times {len(times.forward)}"
        )
    lasting = [d.tolist() for d in durations(program, times)]
    start, end = longest_paths(program, lasting, float(times.comm))
    makespan = max((e[-1] for e in end if len(e)), default=0.0)
    busy = np.array([sum(d) for d in lasting])
    idle = 1.0 - busy / makespan if makespan else np.zeros(program.stages)
    activations = memory(program, times)
    return Simulation(
        program,
        tuple(np.array(s) for s in start),
        tuple(np.array(e) for e in end),
        makespan,
        idle,
        float(idle.mean()),
        activations,
        np.array([h.max(initial=0.0) for h in activations]),
    )


ResultKey = tuple[str, int, int]
"""A result that an operation waits for or makes: "F", or "D" for the gradient of D or B; chunk; micro-batch."""


def needs(op: Op, chunks: int) -> list[ResultKey]:
    """Return the results that an operation needs before it starts."""
    results: list[ResultKey] = []
    for kind, chunk, micro in op.parts():
        if kind is OpKind.F:
            if chunk:
                results.append(("F", chunk - 1, micro))
        elif kind is OpKind.W:
            results.append(("D", chunk, micro))
        else:
            results.append(("F", chunk, micro))
            if chunk < chunks - 1:
                results.append(("D", chunk + 1, micro))
    return results


def makes(op: Op) -> list[ResultKey]:
    """Return the results of an operation that others wait for."""
    return [("F" if k is OpKind.F else "D", c, m) for k, c, m in op.parts() if k is not OpKind.W]


def longest_paths(
    program: Program, lasting: list[list[float]], comm: float
) -> tuple[list[list[float]], list[list[float]]]:
    """Return start and end of each operation of each stage; how long each takes may differ from micro-batch to micro-batch.

    Raises:
        BadInputError: The program cannot finish.
    """
    finished: dict[ResultKey, tuple[float, int]] = {}  # when, and on which stage
    waiting: dict[ResultKey, list[int]] = {}
    clock = [0.0] * program.stages
    start: list[list[float]] = [[] for _ in clock]
    end: list[list[float]] = [[] for _ in clock]
    chunks = program.chunks
    todo = list(range(program.stages))
    while todo:
        s = todo.pop()
        ops = program.ops[s]
        for i in range(len(end[s]), len(ops)):
            op = ops[i]
            begin = clock[s]
            for key in needs(op, chunks):
                maker = finished.get(key)
                if maker is None:
                    waiting.setdefault(key, []).append(s)
                    break
                begin = max(begin, maker[0] if maker[1] == s else maker[0] + comm)
            else:
                clock[s] = finish = begin + lasting[s][i]
                start[s].append(begin)
                end[s].append(finish)
                for key in makes(op):
                    finished[key] = (finish, s)
                    todo += waiting.pop(key, ())
                continue
            break
    stuck = [s for s in range(program.stages) if len(end[s]) < len(program.ops[s])]
    if stuck:
        raise BadInputError(_deadlock(program, stuck, [len(e) for e in end], finished))
    return start, end


def _deadlock(
    program: Program,
    stuck: list[int],
    position: list[int],
    finished: dict[ResultKey, tuple[float, int]],
) -> str:
    lines: list[str] = []
    for s in stuck[:8]:
        op = program.ops[s][position[s]]
        missing = next(k for k in needs(op, program.chunks) if k not in finished)
        lines.append(
            f"  stage {s} is stopped at its operation {position[s]}, {op}, and waits for "
            f"{missing[0]}(chunk {missing[1]}, micro-batch {missing[2]})"
        )
    return f"program {program.name} cannot finish (deadlock):\n" + "\n".join(lines)


def check(program: Program) -> None:
    """Refuse a program that is incomplete or deadlocks.

    Raises:
        BadInputError: An operation is missing or doubled, or stages wait for each other.
    """
    problems = _incompleteness(program)
    if problems:
        raise BadInputError(f"program {program.name}: " + "; ".join(problems[:5]))
    simulate(program, Times.even(1, program.chunks))


def _incompleteness(program: Program) -> list[str]:
    counts: Counter[tuple[str, int, int]] = Counter()
    problems: list[str] = []
    for s, ops in enumerate(program.ops):
        for op in ops:
            for kind, chunk, micro in op.parts():
                if not (0 <= chunk < program.chunks and 0 <= micro < program.micro_batches):
                    problems.append(
                        f"stage {s}: {op} names a chunk or micro-batch that is not there"
                    )
                    continue
                stage = program.stage(chunk, micro)
                if stage != s:
                    problems.append(f"{op} is on stage {s}, its chunk on stage {stage}")
                for letter in "DW" if kind is OpKind.B else kind.value:
                    counts[letter, chunk, micro] += 1
    for letter, chunk, micro in product("FDW", range(program.chunks), range(program.micro_batches)):
        count = counts[letter, chunk, micro]
        if count != 1:
            problems.append(
                f"{letter} of chunk {chunk}, micro-batch {micro}: {count} times, expected once"
            )
    return problems
