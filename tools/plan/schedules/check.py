"""Check that a program can run: it is complete, each operation is on its stage, and no stage waits forever."""

from collections import Counter
from itertools import product

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.schedules.program import OpKind, Program, Times
from telechat_moe.tools.plan.schedules.simulate import simulate


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
