"""Check that a program can run: it is complete, each operation is on its stage, and nothing waits in a cycle.

Sends and receives count: every transfer between stages is two further operations. A send is posted after
its producer and a receive before its consumer, each in the order of its stage's program. With `rendezvous` a send ends
only when its receive has been posted and a stage waits for both, as blocking communication does.
"""

import itertools
from collections import Counter, defaultdict
from graphlib import CycleError, TopologicalSorter

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.schedules.program import Kind, Program
from telechat_moe.tools.plan.schedules.simulate import Key, makes, needs


def check(program: Program, rendezvous: bool = False) -> None:
    """Refuse a program that is incomplete or deadlocks; with `rendezvous` sends block until they are received.

    Raises:
        BadInputError: An operation is missing or doubled, or operations wait in a cycle.
    """
    problems = complete(program)
    if problems:
        raise BadInputError(f"program {program.name}: " + "; ".join(problems[:5]))
    cycle = find_cycle(program, rendezvous)
    if cycle:
        raise BadInputError(
            f"program {program.name} deadlocks, each waits for the next:\n"
            + "\n".join(f"  {line}" for line in cycle)
        )


def complete(program: Program) -> list[str]:
    """Return what is wrong with the set of operations: one is missing, doubled, or on a stage without its chunk."""
    found: Counter[tuple[str, int, int]] = Counter()
    problems: list[str] = []
    for s, ops in enumerate(program.ops):
        for op in ops:
            for kind, chunk, micro in op.parts():
                if not (0 <= chunk < program.chunks and 0 <= micro < program.micro_batches):
                    problems.append(
                        f"stage {s}: {op} names a chunk or micro-batch that is not there"
                    )
                    continue
                if program.stage(chunk, micro) != s:
                    problems.append(
                        f"{op} is on stage {s}, its chunk on stage {program.stage(chunk, micro)}"
                    )
                for letter in "DW" if kind is Kind.B else kind.value:
                    found[letter, chunk, micro] += 1
    for letter in "FDW":
        for chunk in range(program.chunks):
            for micro in range(program.micro_batches):
                count = found[letter, chunk, micro]
                if count != 1:
                    problems.append(
                        f"{letter} of chunk {chunk}, micro-batch {micro}: {count} times, expected once"
                    )
    return problems


def find_cycle(program: Program, rendezvous: bool = False) -> list[str]:
    """Return operations that wait for each other in a cycle, as text; empty where there is none.

    The program is complete; with `rendezvous` sends block.
    """
    try:
        TopologicalSorter(_graph(program, rendezvous)).prepare()
    except CycleError as error:  # each before the next; the first one is repeated at the end
        cycle: list[str] = error.args[1]
        return cycle[:0:-1]
    return []


def _graph(program: Program, rendezvous: bool) -> dict[str, list[str]]:
    """Return what each operation, send and receive waits for; all are said as they are printed."""
    names = [
        [f"stage {s}, operation {i}: {op}" for i, op in enumerate(ops)]
        for s, ops in enumerate(program.ops)
    ]
    before: dict[str, list[str]] = {name: [] for own in names for name in own}
    maker: dict[Key, tuple[int, str]] = {}
    for s, ops in enumerate(program.ops):
        for op, name in zip(ops, names[s], strict=True):
            maker.update(dict.fromkeys(makes(op), (s, name)))
    sent: defaultdict[str, list[str]] = defaultdict(list)  # receives of what an operation sends
    receives: defaultdict[str, list[str]] = defaultdict(list)  # of what an operation reads
    for s, ops in enumerate(program.ops):
        for op, name in zip(ops, names[s], strict=True):
            for key in needs(op, program.chunks):
                source, made = maker[key]
                if source == s:
                    before[name].append(made)
                    continue
                what = f"{key[0]}(chunk {key[1]}, micro-batch {key[2]})"
                send = f"stage {source}: send of {what} to stage {s}"
                receive = f"stage {s}: receive of {what} from stage {source}"
                before |= {send: [made], receive: [send]}
                before[name].append(receive)
                sent[made].append(receive)
                receives[name].append(receive)
    for own in names:
        for last, name in itertools.pairwise(own):
            # with rendezvous the stage continues when what it sends has been received
            for first in (last, *(sent[last] if rendezvous else ())):
                for then in (*receives[name], name):
                    before[then].append(first)
    return before
