"""Which operators of a compiled graph make the host wait for the device, or send it values."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from telechat_moe.graph.mindir import MindIR, find_value
from telechat_moe.graph.nodes import STRUCTURE, Graph, GraphNode, module_of

_WRITES = "sends its values to the host, which writes them"
_SIZED = "the host learns the size of its output before it can launch what uses it"
_ON_HOST = "the host computes it, and waits for what it gets from the device"
_SENDS = ("Print", "TensorDump")
_SENDS += ("HistogramSummary", "ImageSummary", "ScalarSummary", "TensorSummary")
_BY_VALUE = ("MaskedSelect", "NonZero", "NonZeroExt")
_BY_VALUE += ("Unique", "Unique2", "UniqueConsecutive", "UniqueDim")
_BRANCHES = "the host takes a branch by a value that the device computes"
_UNKNOWN = (
    "shapes are known only while it runs; the host computes them, without waiting for the device"
)


class GraphSync(NamedTuple):
    """Operators of one kind in one module and phase.

    Attributes:
        kind: Primitive.
        module: Dotted name of the cell, as in ``layers.0.attention``.
        phase: One of :data:`telechat_moe.graph.nodes.PHASES`.
        times: How often a step runs them.
        why: What they do to the host.
        waits: The host waits for the device.
        needed: It must: the sizes of an all-to-all are known to the device only, and HCCL takes them from the host.
    """

    kind: str
    module: str
    phase: str
    times: int
    why: str
    waits: bool
    needed: bool = False


def host_syncs(
    model: MindIR, functions: Mapping[str, Graph], times: Mapping[str, int]
) -> list[GraphSync]:
    """Return the operators that wait or send, and last, as one entry, those whose shapes are dynamic.

    Args:
        times: How often a step calls each, as :func:`.nodes.call_counts` returns it.
    """
    counts: Counter[tuple[str, str, str, str, bool, bool]] = Counter()
    unknown = 0
    for name, function in functions.items():
        sizes = _sizes(function) if times[name] else set()
        for node in function.nodes.values() if times[name] else ():
            phase, module = function.phases[node.name], module_of(node.scope)
            if node.kind == "Switch" and _constant(function, node.inputs[0]) is None:
                counts[node.kind, module, phase, _BRANCHES, True, False] += times[name]
            if not node.kind or node.kind in STRUCTURE or node.kind == "Constant":
                continue
            unknown += times[name] * any(d < 0 for dims, _ in node.shapes for d in dims)
            for reason, waits in _reasons(model, function, node):
                needed = waits and node.name in sizes
                counts[node.kind, module, phase, reason, waits, needed] += times[name]
    syncs = [
        GraphSync(kind, module, phase, count, reason, waits, needed)
        for (kind, module, phase, reason, waits, needed), count in counts.items()
    ]
    if unknown:
        syncs.append(GraphSync("dynamic shapes", "all", "all", unknown, _UNKNOWN, False))
    return syncs


def _sizes(function: Graph) -> set[str]:
    """Return the nodes whose values are the sizes of an exchange and nothing else."""
    users: dict[str, set[bool]] = {}
    for node in function.nodes.values():
        for i, name in enumerate(node.inputs):
            users.setdefault(name, set()).add(node.kind == "AlltoAllV" and i > 0)
    return {name for name, are_sizes in users.items() if are_sizes == {True}}


def _reasons(model: MindIR, function: Graph, node: GraphNode) -> Iterator[tuple[str, bool]]:
    """Yield what a node does to the host, and whether the host waits."""
    primitive = model.primitive(node.proto)
    if find_value(primitive.attribute, "primitive_target") == "CPU":
        yield _ON_HOST, True
    if node.kind in _SENDS:
        yield _WRITES, False
    if node.kind in _BY_VALUE:
        yield _SIZED, True
    if node.kind == "MoveTo":
        arguments = [_constant(function, name) for name in node.inputs[1:]]
        if "CPU" in arguments:
            waits = True in arguments
            yield "copies to the host" + (", which waits" if waits else ""), waits


def _constant(function: Graph, name: str) -> object:
    """Return the value of a constant input; None for another."""
    node = function.nodes.get(name)
    return None if node is None else find_value(node.proto.attribute, "value")
