"""Check that a program can run: it is complete, each operation is on its stage, and nothing waits in a cycle.

Sends and receives count: every transfer between stages is two further operations. A send is posted after
its producer and a receive before its consumer, each in the order of its stage's program. With `rendezvous` a send ends
only when its receive has been posted and a stage waits for both, as blocking communication does.
"""

from collections import Counter
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.schedules.program import Kind, Program
from telechat_moe.tools.plan.schedules.simulate import Key, makes, needs

Event = tuple[str, int, int]
"""("op", stage, position); or ("send" or "recv", stage, its number on that stage)."""


def check(program: Program, rendezvous: bool = False) -> None:
    """Refuse a program that is incomplete or deadlocks.

    Args:
        program: The program.
        rendezvous: Whether sends block until they are received; programs that pass without may fail with it.

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

    Args:
        program: A complete program.
        rendezvous: Whether sends block.
    """
    graph = _graph(program, rendezvous)
    try:
        TopologicalSorter(graph.before).prepare()
    except CycleError as error:
        cycle: list[Event] = error.args[
            1
        ]  # each before the next; the first one is repeated at the end
        return [graph.text[event] for event in reversed(cycle[1:])]
    return []


@dataclass
class _Graph:
    """What each event waits for, and its text for messages."""

    before: dict[Event, list[Event]] = field(default_factory=dict[Event, list[Event]])
    text: dict[Event, str] = field(default_factory=dict[Event, str])

    def add(self, node: Event, text: str) -> Event:
        self.before[node] = []
        self.text[node] = text
        return node

    def edge(self, first: Event, then: Event) -> None:
        self.before[then].append(first)


def _graph(program: Program, rendezvous: bool) -> _Graph:
    graph = _Graph()
    maker: dict[Key, Event] = {}
    for s, ops in enumerate(program.ops):
        for i, op in enumerate(ops):
            node = graph.add(("op", s, i), f"stage {s}, operation {i}: {op}")
            maker.update(dict.fromkeys(makes(op), node))
    sent: dict[Event, list[Event]] = {}  # receives of what an operation sends
    receives: dict[Event, list[Event]] = {}  # of what an operation reads
    for node in list(graph.text):
        _, s, i = node
        for key in needs(program.ops[s][i], program.chunks):
            source = maker[key]
            if source[1] == s:
                graph.edge(source, node)
                continue
            what = f"{key[0]}(chunk {key[1]}, micro-batch {key[2]})"
            number = len(graph.text)
            send = graph.add(
                ("send", source[1], number), f"stage {source[1]}: send of {what} to stage {s}"
            )
            receive = graph.add(
                ("recv", s, number), f"stage {s}: receive of {what} from stage {source[1]}"
            )
            for first, then in ((source, send), (send, receive), (receive, node)):
                graph.edge(first, then)
            sent.setdefault(source, []).append(receive)
            receives.setdefault(node, []).append(receive)
    for s, ops in enumerate(program.ops):
        previous: list[Event] = []
        for i in range(len(ops)):
            node = ("op", s, i)
            for first in previous:
                for then in (*receives.get(node, ()), node):
                    graph.edge(first, then)
            previous = [node]
            if rendezvous:  # the stage continues when what it sends has been received
                previous += sent.get(node, ())
    return graph
