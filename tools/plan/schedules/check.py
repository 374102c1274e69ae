"""Whether a program can run at all: complete, each operation on its stage, and no cycle of waiting.

Sends and receives are counted in: every transfer between stages is two operations of its own. A send is posted after
its producer and a receive before its consumer, each in the order of its stage's program. With `rendezvous` a send ends
only when its receive has been posted and a stage waits for both, as blocking communication does.
"""

from collections import Counter
from dataclasses import dataclass, field

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.schedules.program import Kind, Program
from telechat_moe.tools.plan.schedules.simulate import Key, makes, needs

Node = tuple[str, int, int]
"""("op", stage, position); or ("send" or "recv", stage, its number on that stage)."""


def check(program: Program, rendezvous: bool = False) -> None:
    """Refuse a program that is incomplete or deadlocks.

    Args:
        program: The program.
        rendezvous: Whether sends block until they are received; programs that pass without may fail with it.

    Raises:
        BadInputError: What is missing or double, or the cycle.
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
    """Return what is wrong with the set of operations: missing, twice, or on a stage without the chunk."""
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
    """Return operations that wait for each other in a circle, as text; empty where there is none.

    Args:
        program: A complete program.
        rendezvous: Whether sends block.
    """
    graph = _graph(program, rendezvous)
    after, text = graph.after, graph.text
    degree = Counter(n for followers in after.values() for n in followers)
    ready = [n for n in after if not degree[n]]
    left = set(after)
    while ready:
        node = ready.pop()
        left.discard(node)
        for n in after[node]:
            degree[n] -= 1
            if not degree[n]:
                ready.append(n)
    if not left:
        return []
    # every node that is left has a predecessor that is left: going back must come to a circle
    before: dict[Node, Node] = {}
    for node in left:
        for n in after[node]:
            if n in left:
                before[n] = node
    node = next(iter(left))
    path: list[Node] = []
    while node not in path:
        path.append(node)
        node = before[node]
    return [text[n] for n in path[path.index(node) :]]


@dataclass
class _Graph:
    """Who must come after each node, and how each node is written."""

    after: dict[Node, list[Node]] = field(default_factory=dict)
    text: dict[Node, str] = field(default_factory=dict)

    def add(self, node: Node, text: str) -> Node:
        self.after[node] = []
        self.text[node] = text
        return node

    def edge(self, first: Node, then: Node) -> None:
        self.after[first].append(then)


def _graph(program: Program, rendezvous: bool) -> _Graph:
    graph = _Graph()
    maker: dict[Key, Node] = {}
    for s, ops in enumerate(program.ops):
        for i, op in enumerate(ops):
            node = graph.add(("op", s, i), f"stage {s}, operation {i}: {op}")
            maker.update(dict.fromkeys(makes(op), node))
    sends: dict[Node, list[Node]] = {}
    receives: dict[Node, list[Node]] = {}
    for node in list(graph.after):
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
            sends.setdefault(source, []).append(send)
            receives.setdefault(node, []).append(receive)
    for s, ops in enumerate(program.ops):
        previous: list[Node] = []
        for i in range(len(ops)):
            node = ("op", s, i)
            for first in previous:
                for then in (*receives.get(node, ()), node):
                    graph.edge(first, then)
            previous = [node]
            if rendezvous:  # the stage goes on when what it sends has been received
                previous += [r for send in sends.get(node, ()) for r in graph.after[send]]
    return graph
