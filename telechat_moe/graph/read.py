"""What a rank's compiled graph does in a step: collectives, operators, bytes, the order of micro-batches.

A backward collective carries the id of its forward one, or the name of the parameter whose gradient it sums, so it is
attributed to a module without guessing from its scope, which MindSpore often gives another layer's name.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from telechat_moe.graph.compile import RankGraph
from telechat_moe.graph.host_syncs import GraphSync, host_syncs
from telechat_moe.graph.liveness import Alive, alive, most_alive
from telechat_moe.graph.mindir import COLLECTIVES, ITEM_BYTES, PEER, MindIR, find_value
from telechat_moe.graph.nodes import (
    PHASES,
    STRUCTURE,
    Graph,
    GraphNode,
    TypedShape,
    call_counts,
    module_of,
    size_of,
)
from telechat_moe.graph.overlap import pairs, plain
from telechat_moe.graph.schedule import PassEvent, events, micro_of

INTEGERS = (6, 7)  # MindIR's int32 and int64


class Devices(Protocol):
    """What the reader of a graph must know of the devices; ``telechat_moe.sharding.mesh.Mesh`` implements it."""

    @property
    def devices(self) -> int:
        """Number of devices."""
        ...

    @property
    def stage_devices(self) -> int:
        """Devices of a pipeline stage; their ranks follow each other."""
        ...

    def degrees(self) -> dict[str, int | bool]:
        """Return the parallel degrees by name."""
        ...

    def describe(self) -> str:
        """Return the degrees in a few words."""
        ...

    def stage(self, rank: int) -> int:
        """Return the pipeline stage of a rank."""
        ...

    def group_name(self, ranks: Sequence[int], rank: int) -> str:
        """Return a name for a group that ``rank`` is in."""
        ...

    def substitute(self, ranks: Sequence[int], old: int, new: int) -> list[int]:
        """Return the group of rank ``new`` that corresponds to a group of rank ``old``."""
        ...


class Expected(NamedTuple):
    """The expected sizes of exchanges that depend on the routing, with tokens spread evenly over experts.

    Attributes:
        elements: Elements of a device's shard of an AlltoAllV: tokens x top-k x hidden size.
        rows: Its rows, tokens x top-k.
    """

    elements: int
    rows: int = 0


class Collective(NamedTuple):
    """A collective of the graph, and how often a step runs it.

    Attributes:
        kind: Primitive.
        group: Axes of the mesh, ``dp``, ``dp x tp = ep``; ``pp`` between stages.
        ranks: Global ranks of the group that this rank is in; of Send and Receive: this rank and the other.
        phase: One of :data:`PHASES`.
        module: Module, for a gradient that of its parameter; ``unknown`` where MindSpore keeps none.
        purpose: ``activations``, ``weights`` (gathered from a sharded optimizer), ``gradients``, ``step``
            (norm, losses, loads) or ``pipeline``.
        micro: Micro-batch; None: not in one.
        shape: Shape of the output; -1 where it depends on the routing.
        times: Calls a step.
        bytes: The larger of input and output, one call; for AlltoAllV with evenly spread tokens.
        sent: What a device sends in a call: ring, or direct for exchanges.
        floor: For AlltoAllV: bytes that are certain whatever the routing; else as ``bytes``.
    """

    kind: str
    group: str
    ranks: tuple[int, ...]
    phase: str
    module: str
    purpose: str
    micro: int | None
    shape: tuple[int, ...]
    times: int
    bytes: int
    sent: int
    floor: int


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes that a rank holds, from the shapes in its graph.

    Attributes:
        parameters: Shapes of this rank's shards of weights and biases.
        optimizer: Moments.
        gradients: Accumulators where there are some; else one gradient for each trained parameter, which
            are all alive when the global norm is taken.
        other: Counters and shares.
        copies: Weights gathered from a sharded optimizer, or in the precision of products.
        activations: Most that is alive at once (:mod:`.liveness`).
        left_behind: The most that a forward pass leaves for its backward pass.
        alive: At the peak: phase, module, primitive and shape to bytes.
        host: Most activations that wait in the host's memory at once.
        moved: What goes there in a step: module, operator, prefetch and shape to how often and how many bytes.
    """

    parameters: int
    optimizer: int
    gradients: int
    other: int
    copies: int = 0
    activations: int = 0
    left_behind: int = 0
    alive: dict[tuple[str, str, str, tuple[int, ...]], int] = field(default_factory=dict)
    host: int = 0
    moved: dict[tuple[str, str, int, tuple[int, ...]], tuple[int, int]] = field(
        default_factory=dict
    )


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What :func:`read` found.

    Attributes:
        collectives: In the order of the graph.
        operators: Phase to kind to calls a step.
        memory: Bytes.
        parameters: Name to own shape.
        order: Order of the micro-batches; empty without them.
        overlap: Pairs of passes that run beside each other, as :func:`.overlap.plain` writes them.
        host_syncs: Operators that reach the host.
    """

    rank: int
    collectives: list[Collective]
    operators: dict[str, Counter[str]]
    memory: RankMemory
    parameters: dict[str, tuple[int, ...]]
    order: list[PassEvent]
    overlap: list[dict[str, Any]]
    host_syncs: list[GraphSync]

    @property
    def recomputed(self) -> Counter[str]:
        """Kind to number of recomputed forward operators."""
        return self.operators["recompute"]


def sent_bytes(kind: str, size: int, number: int) -> int:
    """Return what a device sends in a call, by the usual algorithms.

    Args:
        kind: Ring for AllReduce, AllGather, ReduceScatter; direct for AlltoAll and Send.
        size: Larger of input and output, bytes.
        number: Devices in the group.
    """
    if kind == "Send":
        return size
    if kind == "Receive":
        return 0
    rounds = 2 if kind == "AllReduce" else 1
    return rounds * size * (number - 1) // number


def read(
    graph: RankGraph, devices: Devices, expected: Expected, overlapped: Sequence[str] = ()
) -> Reading:
    """Read the graph of a rank.

    Args:
        overlapped: Collectives that ``pp_1f1b_overlap`` names.
    """
    model = MindIR(graph.mindir)
    functions = {proto.name: Graph(model, proto) for proto in model.graphs()}
    times = call_counts(model, functions)
    collectives: list[Collective] = []
    operators: dict[str, Counter[str]] = {phase: Counter() for phase in PHASES}
    links = _Links(functions.values())
    transfers: dict[str, PassEvent] = {}
    described: dict[str, Collective] = {}
    for name, function in functions.items():
        if not times[name]:
            continue
        micro = micro_of(function)
        for node in function.nodes.values():
            if not node.kind or node.kind == "Constant" or node.kind in STRUCTURE:
                continue
            operators[function.phases[node.name]][node.kind] += times[name]
            if node.kind in COLLECTIVES:
                site = _Site(graph, devices, expected, links, function, node)
                collectives.append(site.collective(times[name], micro.get(node.name)))
                described[node.name] = collectives[-1]
                if node.kind in PEER:
                    transfers[node.name] = site.transfer()
    main = functions[model.proto.graph.name]
    likely = _likely_size(expected)
    living = alive(main, functions, likely)
    shapes = {p.name.split(":")[-1]: p for p in model.proto.graph.parameter}
    return Reading(
        rank=graph.rank,
        collectives=collectives,
        operators=operators,
        memory=_memory(shapes, living),
        parameters={name: tuple(p.dims) for name, p in shapes.items()},
        order=events(main, transfers),
        overlap=plain(pairs(main, functions, overlapped, likely), described) if overlapped else [],
        host_syncs=host_syncs(model, functions, times),
    )


def peak(graph: RankGraph, expected: Expected) -> int:
    """Return how many bytes the results of a graph's operators take at once, at most; of one that is no training step."""
    model = MindIR(graph.mindir)
    functions = {proto.name: Graph(model, proto) for proto in model.graphs()}
    return most_alive(functions[model.proto.graph.name], functions, _likely_size(expected))


def _memory(parameters: dict[str, Any], living: Alive) -> RankMemory:
    sums = Counter(parameters=0, optimizer=0, gradients=0, other=0)
    trained = {n.removeprefix("adam_m.") for n in parameters if n.startswith("adam_m.")}
    accumulates = any(n.startswith("accu_grads.") for n in parameters)
    for name, proto in parameters.items():
        size = size_of((tuple(proto.dims), proto.data_type)) or 0
        if name.startswith(("adam_m.", "adam_v.")):
            sums["optimizer"] += size
        elif name.startswith("accu_grads."):
            sums["gradients"] += size
        elif name in trained or name.endswith(("weight", "bias")):
            sums["parameters"] += size
            sums["gradients"] += size if name in trained and not accumulates else 0
        else:
            sums["other"] += size
    return RankMemory(
        **sums,
        copies=living.copies,
        activations=living.peak,
        left_behind=living.left_behind,
        alive=living.tensors,
        host=living.host,
        moved=living.moved,
    )


def _likely_size(expected: Expected) -> Callable[[TypedShape], int]:
    """Return a function that gives a tensor's bytes, as if tokens were spread evenly over experts.

    Unknown are rows, and after an exchange the width: all elements in one dimension, both of two, the middle one in the
    gradient of the experts' weights.
    """
    rows, width = expected.rows, expected.elements // max(expected.rows, 1)

    def size(shape: TypedShape) -> int:
        dims, element = shape
        if any(d < 0 for d in dims):
            if len(dims) == 1:
                dims = (rows if element in INTEGERS else expected.elements,)
            elif dims[0] < 0 and len(dims) == 2 and dims[1] < 0:
                dims = (rows, width)
            else:
                unknown = rows if len(dims) == 2 else width
                dims = tuple(unknown if d < 0 else d for d in dims)
        return size_of((dims, element)) or 0

    return size


class _Links:
    """Find the forward node of a backward one."""

    def __init__(self, functions: Iterable[Graph]) -> None:
        self.forward: dict[str, GraphNode] = {}
        for function in functions:
            for node in function.nodes.values():
                if node.kind in COLLECTIVES and not node.scope.startswith("Gradients"):
                    mark = node.mark("unique_id")
                    if mark:  # the first: recomputed copies follow it
                        self.forward.setdefault(mark, node)

    def of(self, node: GraphNode) -> GraphNode | None:
        """Return the forward collective that a backward one is the derivative of."""
        return self.forward.get(node.mark("forward_unique_id") or "")


@dataclass
class _Site:
    """One collective that is being read."""

    graph: RankGraph
    devices: Devices
    expected: Expected
    links: _Links
    function: Graph
    node: GraphNode

    def __post_init__(self) -> None:
        self.primitive = self.function.model.primitive(self.node.proto)

    def attribute(self, name: str) -> Any:
        return find_value(self.primitive.attribute, name)

    def ranks(self) -> list[int]:
        """Return the group; of a Send or Receive: both ends."""
        ranks = list(self.graph.groups.get(self.attribute("group"), ()))
        return sorted((self.graph.rank, self.peer())) if self.node.kind in PEER else ranks

    def peer(self) -> int:
        """Return the other end of a Send or Receive."""
        return self.graph.groups[self.attribute("group")][self.attribute(PEER[self.node.kind])]

    def transfer(self) -> PassEvent:
        """Return the event of a Send or Receive in the order of micro-batches."""
        kind = "s" if self.node.kind == "Send" else "r"
        marks = ("micro", "chunk", "seq_chunk")
        micro, chunk, part = (self.attribute(n) or self.node.mark(n) or 0 for n in marks)
        return PassEvent(
            kind + self._pipeline_phase("")[0],
            micro,
            chunk,
            self.peer(),
            self.attribute("sr_tag") or 0,
            self._bytes(2)[0],
            part,
        )

    def collective(self, times: int, micro: int | None) -> Collective:
        """Return what the report says of this collective, which a step runs ``times`` times."""
        kind, ranks = self.node.kind, self.ranks()
        size, floor = self._bytes(len(ranks))
        phase = self.function.phases[self.node.name]
        pair = kind in PEER
        return Collective(
            kind=kind,
            group="pp" if pair else self.devices.group_name(ranks, self.graph.rank),
            ranks=tuple(ranks),
            phase=self._pipeline_phase(phase),
            module="boundary" if pair else self.module(),
            purpose=self._purpose(phase),
            micro=self.node.mark("micro") if pair else micro,
            shape=self.node.shapes[0][0] if self.node.shapes else (),
            times=times,
            bytes=size,
            sent=sent_bytes(kind, size, len(ranks)),
            floor=floor,
        )

    def _pipeline_phase(self, phase: str) -> str:
        if self.node.kind in PEER:
            backward = self.node.scope.startswith("Gradients") or self.attribute("is_bp")
            return "backward" if backward else "forward"
        return phase

    def _purpose(self, phase: str) -> str:
        if self.node.kind in PEER:
            return "pipeline"
        if "Mirror" in self.node.scope or "mirror" in self.primitive.instance_name:
            return "gradients"
        if "parallel_optimizer" in self.primitive.instance_name:
            return "gradients" if phase == "backward" else "weights"
        return "step" if phase == "optimizer" else "activations"

    def module(self) -> str:
        """Return the module: an attribute of our own, the forward node's, the parameter's, the scope's."""
        origin = self.node
        if self.node.scope.startswith("Gradients"):
            linked = self.links.of(self.node)
            if linked is None:
                return _parameter_module(self.node.mark("mirror_user_id"))
            origin = linked
        primitive = self.function.model.primitive(origin.proto)
        attribute = find_value(primitive.attribute, "module")
        if attribute:
            return str(attribute)
        if "parallel_optimizer" in primitive.instance_name:
            return _parameter_module(origin.mark("mirror_user_id"))
        if self.function.phases.get(origin.name) == "optimizer":
            return "step"
        return module_of(origin.scope)

    def _bytes(self, number: int) -> tuple[int, int]:
        """Return bytes of a call (larger of input and output), and those that are certain."""
        out = size_of(self.node.shapes[0]) if self.node.shapes else None
        source = self.node.inputs[0] if self.node.inputs else ""
        if self.node.kind == "AlltoAllV":
            into = [s for s in self.function.shapes.get(source, []) if s[0]]
            input_bytes = size_of(into[0]) if into else None
            certain = max(out or 0, input_bytes or 0)
            element = self.node.shapes[0][1] if self.node.shapes else 0
            if not certain:
                return self._even_elements() * ITEM_BYTES.get(element, 4), 0
            return certain, certain
        if self.node.kind == "Send":
            into = self.function.shapes.get(source, [])
            out = size_of(into[0]) if into else out
        size = out or 0
        if self.node.kind == "ReduceScatter":
            size *= number
        return size, size

    def _even_elements(self) -> int:
        """Return the elements of an AlltoAllV: so wide are its rows, and so many there are of those that were routed."""
        linked = self.links.of(self.node) if self.node.scope.startswith("Gradients") else None
        primitive = self.function.model.primitive((linked or self.node).proto)
        share = find_value(primitive.attribute, "even_share") or 1.0
        width = self.attribute("block_size")
        if not (width and self.expected.rows):
            return self.expected.elements
        return round(self.expected.rows * share * width)


def _parameter_module(name: str | None) -> str:
    """Return the module of a parameter."""
    return name.removesuffix(".weight").removesuffix(".bias") if name else "unknown"


class OperationSignature(NamedTuple):
    """What must be equal in an operation of two ranks of a stage."""

    kind: str
    shapes: tuple[tuple[tuple[int, ...], int], ...]
    ranks: tuple[int, ...]


def sequence(graph: RankGraph) -> list[OperationSignature]:
    """Return the operations of a rank in order, collectives with the global ranks of their groups."""
    model = MindIR(graph.mindir)
    steps = []
    for operation in model.operations():
        ranks: list[int] = []
        if operation.kind in COLLECTIVES:
            ranks = list(graph.groups.get(operation.attribute("group"), ()))
            if operation.kind in PEER:
                ranks = sorted((graph.rank, ranks[operation.attribute(PEER[operation.kind])]))
        steps.append(OperationSignature(operation.kind, tuple(operation.shapes()), tuple(ranks)))
    return steps


def differences(graph: RankGraph, other: RankGraph, devices: Devices) -> list[str]:
    """Return where a rank's graph is not the one derived from another rank of its stage, at most five.

    Compared: kinds, output shapes and types, and groups moved to the other rank, node by node. Constants, such
    as the first row of a rank's shard of the vocabulary, differ by design and are not compared.
    """
    derived = [
        step._replace(ranks=tuple(devices.substitute(step.ranks, graph.rank, other.rank)))
        for step in sequence(graph)
    ]
    compiled = [step._replace(ranks=tuple(sorted(step.ranks))) for step in sequence(other)]
    lines = [
        f"operation {place}: derived {_signature_text(a)}, compiled {_signature_text(b)}"
        for place, (a, b) in enumerate(zip(derived, compiled, strict=False))
        if a != b
    ]
    if len(derived) != len(compiled):
        lines.insert(0, f"{len(derived)} operations derived, {len(compiled)} compiled")
    return lines[:5]


def _signature_text(step: OperationSignature) -> str:
    shapes = " ".join(str(list(shape)) for shape, _ in step.shapes)
    ranks = f" over {list(step.ranks)}" if step.ranks else ""
    return f"{step.kind} {shapes}{ranks}"
