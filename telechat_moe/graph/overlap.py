"""What may run beside each all-to-all of a stage, by the dependencies of its compiled graph.

With ``pp_1f1b_overlap`` MindSpore's scheduler pairs a backward pass with the forward pass that follows it: it marks the
two calls (``1f1b_index_bp``, ``1f1b_index_fp``) and leaves out the control edges between them, but for one that Ascend's
backend removes (``1b1f_call_call``). The backend then inlines both and orders them exchange by exchange: exchange j of
the forward pass is launched before part j of the backward pass, exchange j of the backward pass before part j + 1 of
the forward pass, where part j is what needs j exchanges of its own pass. The backend is not run here: what is said
is read from the marks and edges of the front end's graph, and the parts follow from the graph's dependencies.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from telechat_moe.graph.mindir import COLLECTIVES, ITEM_BYTES
from telechat_moe.graph.nodes import SAME_MEMORY, STRUCTURE, Graph, GraphNode, TypedShape, resolve

FORWARD, BACKWARD = "1f1b_index_fp", "1f1b_index_bp"
REMOVED = "1b1f_call_call"
"""Mark of control edges that the backend takes out."""

_MATRICES = ("MatMul", "GroupedMatmul")
_ATTENTION = {"FlashAttentionScore": 1.0, "FlashAttentionScoreGrad": 2.5}
"""FLOPs relative to two products of the causal half of all pairs."""


class Work(NamedTuple):
    """Computation: number of operators, their FLOPs, and the bytes that those without FLOPs read and write."""

    operators: int = 0
    flops: float = 0.0
    bytes: float = 0.0

    def plus(self, other: "Work") -> "Work":
        """Return the work of both together."""
        operators, flops = self.operators + other.operators, self.flops + other.flops
        return Work(operators, flops, self.bytes + other.bytes)


class OverlappedExchange(NamedTuple):
    """An all-to-all of a pass that overlaps.

    Attributes:
        name: Its node.
        pass_: ``F`` or ``B``.
        number: Its place in the pass; recomputed ones are not counted, as the backend does.
        concurrent: What neither leads to it nor follows from it in its own micro-batch.
        paired: The part of the paired micro-batch that the backend puts beside it.
    """

    name: str
    pass_: str
    number: int
    concurrent: Work
    paired: Work


class MarkedPair(NamedTuple):
    """A forward and a backward pass that the scheduler marks as a pair.

    Attributes:
        times: Pairs of these two functions in a step.
        free: Whether neither needs the other; else they run one after the other, and nothing of one is beside the other.
        forward: Parts of the forward pass, one more than its exchanges.
        backward: Parts of the backward pass.
        exchanges: Of both passes.
        functions: Names of the forward and the backward function.
    """

    times: int
    free: bool
    forward: list[Work]
    backward: list[Work]
    exchanges: list[OverlappedExchange]
    functions: tuple[str, str]


def pairs(
    main: Graph,
    functions: Mapping[str, Graph],
    kinds: Sequence[str],
    size: Callable[[TypedShape], int],
) -> list[MarkedPair]:
    """Return the pairs of passes that the scheduler marks; empty without ``pp_1f1b_overlap``.

    Args:
        main: The step.
        kinds: Primitives that the switch names.
        size: Gives the bytes of a tensor, dynamic ones with tokens spread evenly.
    """
    ends: dict[int, dict[str, str]] = {}
    for name, node in main.nodes.items():
        for mark in (FORWARD, BACKWARD):
            if not node.kind and (index := node.mark(mark)) is not None:
                ends.setdefault(index, {})[mark] = name
    before = _ancestors(main)
    place = {name: i for i, name in enumerate(main.nodes)}
    counts: Counter[tuple[str, str, bool]] = Counter()
    for end in ends.values():
        if len(end) < 2:
            continue
        f, b = end[FORWARD], end[BACKWARD]
        free = not (before[f] >> place[b] & 1 or before[b] >> place[f] & 1)
        names = [_function(main, functions, end[mark]) for mark in (FORWARD, BACKWARD)]
        if names[0] is not None and names[1] is not None:
            counts[names[0], names[1], free] += 1
    return [
        _pair(functions, (f, b), (times, free), kinds, size)
        for (f, b, free), times in counts.items()
    ]


def _function(main: Graph, functions: Mapping[str, Graph], call: str) -> str | None:
    return resolve(main, dict(functions), main.nodes[call].proto.op_type[5:], None)


def _ancestors(graph: Graph) -> dict[str, int]:
    """Return for each node the set of those that come before it, as bits by their position."""
    place = {name: i for i, name in enumerate(graph.nodes)}
    before: dict[str, int] = {}
    for name, node in graph.nodes.items():
        bits = 0
        inputs = list(node.proto.input)
        if node.kind == "Depend" and node.mark(REMOVED):
            inputs = inputs[:1]
        if not node.kind:  # a call uses the value that it calls
            inputs.append(node.proto.op_type[5:])
        for source in inputs:
            if source in before:
                bits |= before[source] | 1 << place[source]
        before[name] = bits
    return before


def _pair(
    functions: Mapping[str, Graph],
    names: tuple[str, str],
    times: tuple[int, bool],
    kinds: Sequence[str],
    size: Callable[[TypedShape], int],
) -> MarkedPair:
    passes = [_Pass(functions[name], kinds, size) for name in names]
    exchanges: list[OverlappedExchange] = []
    for own_pass, beside, letter, ahead in ((*passes, "F", 0), (*reversed(passes), "B", 1)):
        for index, name in enumerate(own_pass.exchanges):
            part = index + ahead
            paired = beside.parts[part] if times[1] and part < len(beside.parts) else Work()
            free = own_pass.free_of(name)
            exchanges.append(OverlappedExchange(name, letter, index, free, paired))
    return MarkedPair(*times, passes[0].parts, passes[1].parts, exchanges, names)


class _Pass:
    """One function: its exchanges in order, and its work by how many of them it needs."""

    def __init__(
        self, graph: Graph, kinds: Sequence[str], size: Callable[[TypedShape], int]
    ) -> None:
        self._before = _ancestors(graph)
        self._place = {name: i for i, name in enumerate(graph.nodes)}
        nodes = graph.nodes.values()
        self.exchanges = [n.name for n in nodes if n.kind in kinds and not n.mark("duplicated")]
        marks = sum(1 << self._place[name] for name in self.exchanges)
        self._work = {n.name: work_of(graph, n, size) for n in nodes if computes(n)}
        self.parts = [Work() for _ in range(len(self.exchanges) + 1)]
        for name, work in self._work.items():
            level = (self._before[name] & marks).bit_count()
            self.parts[level] = self.parts[level].plus(work)

    def free_of(self, exchange: str) -> Work:
        """Return the work that neither leads to an exchange nor follows from it."""
        total, place, ahead = Work(), self._place[exchange], self._before[exchange]
        for name, work in self._work.items():
            if not (self._before[name] >> place & 1 or ahead >> self._place[name] & 1):
                total = total.plus(work)
        return total


def computes(node: GraphNode) -> bool:
    """Return whether a node is computation: no collective, view, constant, call or structure."""
    others = STRUCTURE | SAME_MEMORY | {"Constant", ""}
    return node.kind not in others and node.kind not in COLLECTIVES


def work_of(graph: Graph, node: GraphNode, size: Callable[[TypedShape], int]) -> Work:
    """Return the work of a node.

    A product of [m, k] and [k, n] has 2 m k n FLOPs, twice the root of the product of the three sizes; with groups,
    divided by the root of their number. Attention counts the causal half.
    """
    inputs = [s for i in node.inputs for s in graph.shapes.get(i, [])[:1] if s[0]]
    outputs = [s for s in node.shapes if s[0]]
    moved = float(sum(map(size, (*inputs, *outputs))))
    flops = 0.0
    if any(word in node.kind for word in _MATRICES):
        tensors = sorted((s for s in (*inputs, *outputs) if len(s[0]) >= 2), key=size)[-3:]
        if len(tensors) == 3:
            groups = max((s[0][0] for s in tensors if len(s[0]) > 2), default=1)
            flops = 2 * math.sqrt(math.prod(_elements(s, size) for s in tensors) / max(groups, 1))
    elif node.kind in _ATTENTION and inputs:
        rows = max(inputs[0][0][:-1], default=0)
        heads = (_elements(inputs[0], size), _elements(inputs[2], size) if len(inputs) > 2 else 0)
        flops = _ATTENTION[node.kind] * rows * sum(heads)
    return Work(1, flops, 0.0 if flops else moved)


def _elements(shape: TypedShape, size: Callable[[TypedShape], int]) -> float:
    return size(shape) / ITEM_BYTES.get(shape[1], 4)


def plain(marked_pairs: Sequence[MarkedPair], described: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return pairs as plain data.

    Args:
        described: Node of an exchange to its :class:`telechat_moe.graph.read.Collective`.
    """

    def row(x: OverlappedExchange) -> dict[str, Any]:
        c = described[x.name]
        names = ("kind", "module", "group", "bytes")
        return {
            "pass": x.pass_,
            "index": x.number,
            **{name: getattr(c, name) for name in names},
            "ranks": list(c.ranks),
            "same": x.concurrent._asdict(),
            "paired": x.paired._asdict(),
        }

    return [
        {
            "times": pair.times,
            "free": pair.free,
            "forward": [work._asdict() for work in pair.forward],
            "backward": [work._asdict() for work in pair.backward],
            "exchanges": [row(x) for x in pair.exchanges],
        }
        for pair in marked_pairs
    ]
