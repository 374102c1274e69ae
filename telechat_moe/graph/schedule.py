"""Read from a rank's graph the order in which it works on its micro-batches.

Legend: ``F3`` forward of micro-batch 3, ``B3`` its backward, ``.1`` a second chunk of layers, ``:1`` the second part of
its sequences; ``sf`` / ``rf`` send and receive of an activation, ``sb`` / ``rb`` of a gradient, ``>5`` the other rank.
MindSpore pins the order of sends and receives; the position of a pass is the call of the network that micro-batches
share, else the middle one of its matrix products.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from telechat_moe.graph.nodes import SAME_MEMORY, Graph, GraphNode

PRODUCTS = ("MatMul", "BatchMatMul", "MatMulExt", "BatchMatMulExt")
PRODUCTS += ("FlashAttentionScore", "FlashAttentionScoreGrad", "GroupedMatmul", "GroupedMatmulV4")
SLICES = ("StridedSlice", "Slice", "SliceExt")


class PassEvent(NamedTuple):
    """A step of a rank's order.

    Attributes:
        kind: ``F``, ``B``, or ``sf``, ``sb``, ``rf``, ``rb``.
        chunk: Chunk of layers, 0 without interleaving.
        peer: Other rank of a send or receive.
        tag: MindSpore's number of the pair.
        bytes: Size of what is sent or received.
        part: Part of a sequence, 0 where sequences are whole.
    """

    kind: str
    micro: int
    chunk: int = 0
    peer: int | None = None
    tag: int | None = None
    bytes: int = 0
    part: int = 0

    def __str__(self) -> str:
        chunk = f".{self.chunk}" if self.chunk else ""
        part = f":{self.part}" if self.part else ""
        peer = f">{self.peer}" if self.peer is not None else ""
        return f"{self.kind}{self.micro}{chunk}{part}{peer}"


def micro_of(graph: Graph) -> dict[str, int]:
    """Return the micro-batch of each node that belongs to one.

    MindSpore marks slices of the batch and receives, and loses the mark of many nodes behind them; so it is carried
    along the data here. A node that mixes micro-batches has none, and a received weight belongs to all.
    """
    seeds = {
        name: node.mark("micro")
        for name, node in graph.nodes.items()
        if node.kind in SLICES and node.mark("micro") is not None and _of_batch(graph, node)
    }
    received = {
        name: node.mark("micro")
        for name, node in graph.nodes.items()
        if node.kind == "Receive" and node.mark("micro") is not None
    }
    if received:
        by_slice = _spread(graph, seeds)
        users = {name: _users(graph, name, by_slice) for name in received}
        seeds |= {name: micro for name, micro in received.items() if len(users[name]) < 2}
    return _spread(graph, seeds)


def _of_batch(graph: Graph, node: GraphNode) -> bool:
    """Return whether a slice is taken from an input of the step."""
    source = node.inputs[0]
    while (producer := graph.nodes.get(source)) is not None:
        if producer.kind not in SAME_MEMORY | {"Cast"}:
            return False
        source = producer.inputs[0]
    return True


def _spread(graph: Graph, seeds: Mapping[str, int]) -> dict[str, int]:
    micros_of: dict[str, frozenset[int]] = {}
    for name, node in graph.nodes.items():
        micros = frozenset[int]().union(*(micros_of[i] for i in node.inputs if i in micros_of))
        micros_of[name] = frozenset([seeds[name]]) if name in seeds else micros
    return {name: next(iter(micros)) for name, micros in micros_of.items() if len(micros) == 1}


def _users(graph: Graph, source: str, micro: Mapping[str, int]) -> set[int]:
    """Return the micro-batches of the forward nodes behind a node."""
    behind = {source}
    for name, node in graph.nodes.items():
        if graph.phases[name] == "forward" and any(i in behind for i in node.inputs):
            behind.add(name)
    return {micro[name] for name in behind if name in micro}


def events(graph: Graph, transfers: Mapping[str, PassEvent]) -> list[PassEvent]:
    """Return a rank's order; empty without micro-batches.

    Args:
        transfers: Sends and receives by name of the node.
    """
    if graph.calls:
        return [
            transfers[name] if name in transfers else pass_of(graph, name)
            for name in graph.nodes
            if name in transfers or name in graph.calls
        ]
    micro = micro_of(graph)
    places: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    order: list[tuple[float, PassEvent]] = []
    for place, (name, node) in enumerate(graph.nodes.items()):
        if name in transfers:
            order.append((place, transfers[name]))
            continue
        pass_ = _pass(graph, node)
        if pass_ and node.kind in PRODUCTS and name in micro:
            places[pass_, micro[name], node.mark("chunk") or 0].append(place)
    for (kind, number, chunk), positions in places.items():
        order.append((sorted(positions)[len(positions) // 2], PassEvent(kind, number, chunk)))
    return [event for _, event in sorted(order, key=lambda item: item[0])]


def pass_of(graph: Graph, name: str) -> PassEvent:
    """Return which pass a call of a shared network is.

    Marks of a backward call get lost, so those of its forward call count. Without a pipeline there are none, and calls
    are in order.
    """
    forward = graph.calls[name]
    micro = forward.mark("micro")
    if micro is None:
        micro = [call for key, call in graph.calls.items() if key == call.name].index(forward)
    kind = "F" if name == forward.name else "B"
    part = forward.mark("seq_chunk") or 0
    return PassEvent(kind, micro, forward.mark("chunk") or 0, part=part)


def _pass(graph: Graph, node: GraphNode) -> str | None:
    if node.mark("is_bp"):
        return "B"
    return {"forward": "F", "backward": "B"}.get(graph.phases[node.name])


def in_flight(order: Sequence[PassEvent]) -> int:
    """Return how many micro-batches have been through forward, in part at least, and not through backward, at most."""
    alive: set[tuple[int, int, int]] = set()
    peak = 0
    for event in order:
        if event.kind == "F":
            alive.add((event.micro, event.chunk, event.part))
        elif event.kind == "B":
            alive.discard((event.micro, event.chunk, event.part))
        peak = max(peak, len({(micro, chunk) for micro, chunk, _ in alive}))
    return peak


def unmatched(orders: Mapping[int, Sequence[PassEvent]]) -> list[str]:
    """Return sends without a receive on the other side, and the reverse, between the ranks given, by their kind.

    They are compared by micro-batch and size, not by MindSpore's numbers of the pairs: it numbers what it finds in a
    rank's graph, and where other stages are stubs that order differs.

    Args:
        orders: Rank to its order.
    """
    problems: dict[tuple[int, str, int], list[str]] = defaultdict(list)
    for rank, order in orders.items():
        counts = Counter((e.kind, e.peer, e.micro, e.bytes) for e in order)
        for (kind, peer, micro, size), times in counts.items():
            if peer is None or peer not in orders:
                continue
            other = ("r" if kind[0] == "s" else "s") + kind[1:]
            peer_times = sum(
                (e.kind, e.peer, e.micro, e.bytes) == (other, rank, micro, size)
                for e in orders[peer]
            )
            if peer_times != times:
                verb = "receives" if other[0] == "r" else "sends"
                problems[rank, kind, peer].append(
                    f"rank {rank}: {times} x {kind}{micro}>{peer} ({size} bytes); rank {peer} {verb} that {peer_times} times"
                )
    return [
        lines[0] + (f"; {len(lines) - 1} more like it" if len(lines) > 1 else "")
        for lines in problems.values()
    ]


class Slot(NamedTuple):
    """A pass on the drawn time line, in units of a forward pass."""

    event: PassEvent
    start: float
    end: float


def timeline(orders: Mapping[int, Sequence[PassEvent]]) -> dict[int, list[Slot]]:
    """Return when each pass would run if a forward took 1, a backward 2 and a transfer no time.

    A picture of the order and its waits, not a measurement. A receive from a rank that is not given, or without a
    send there, does not wait.
    """
    clock = dict.fromkeys(orders, 0.0)
    place = dict.fromkeys(orders, 0)
    sent: dict[tuple[int, int, str, int | None], float] = {}
    promised = {
        (rank, e.peer or 0, e.kind[1], e.tag)
        for rank, order in orders.items()
        for e in order
        if e.kind[0] == "s"
    }
    slots: dict[int, list[Slot]] = {rank: [] for rank in orders}
    moved = True
    while moved:
        moved = False
        for rank, order in orders.items():
            while place[rank] < len(order):
                event = order[place[rank]]
                if event.kind[0] == "r":
                    key = (event.peer or 0, rank, event.kind[1], event.tag)
                    if key in promised and key not in sent:
                        break
                    clock[rank] = max(clock[rank], sent.get(key, 0.0))
                elif event.kind[0] == "s":
                    sent[rank, event.peer or 0, event.kind[1], event.tag] = clock[rank]
                else:
                    end = clock[rank] + (1 if event.kind == "F" else 2)
                    slots[rank].append(Slot(event, clock[rank], end))
                    clock[rank] = end
                place[rank] += 1
                moved = True
    return slots
