"""The functions of a compiled graph: which node uses which value, in which phase of a step, how often.

Phases follow from the position of a node: MindSpore marks backward nodes (scope ``Gradients/``) and copies for
recomputation (``duplicated``); any other node belongs to the forward pass if its value reaches the network or the
backward pass, else to the step itself (norm, optimizer).

Where micro-batches share one network ("lazy inline"), it is a pair of functions that the main one calls for each
micro-batch: forward, whose name has ``▸``, and backward, ``◂``. Forward returns its outputs and a ``Partial``: the
backward function with the values that it keeps for it. A forward operator in the backward function is a
recomputed copy, marked or not.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from telechat_moe.graph.mindir import ITEM_BYTES, MindIR, find_value, output_shapes

PHASES = ("forward", "recompute", "backward", "optimizer")
_PASSING_ON = {"Depend", "Load", "TupleGetItem"}
STRUCTURE = _PASSING_ON | {"MakeTuple", "Partial", "Return", "Switch", "UpdateState"}
SAME_MEMORY = _PASSING_ON | {"ExpandDims", "Reshape", "Squeeze", "TensorMove", "TransposeExtView"}
TypedShape = tuple[tuple[int, ...], int]


class GraphNode(NamedTuple):
    """A node of a graph, with the fields that its readers need."""

    proto: Any
    kind: str
    inputs: tuple[str, ...]
    shapes: list[TypedShape]

    @property
    def name(self) -> str:
        """Return the name of the node, which is that of its output."""
        return self.proto.name

    @property
    def scope(self) -> str:
        """Path of the cell; without the mark of cells that are recomputed."""
        return self.proto.domain.replace("recompute_Default", "Default")

    def mark(self, name: str) -> Any:
        """Return an attribute that MindSpore's passes left on the node."""
        return find_value((*self.proto.node_attr, *self.proto.primal_attr), name)


def data_inputs(kind: str, inputs: Sequence[str]) -> tuple[str, ...]:
    """Return the inputs whose values a node uses; the others only order it."""
    if kind in ("Depend", "Load"):
        return tuple(inputs[:1])
    return () if kind == "UpdateState" else tuple(inputs)


class Graph:
    """One function of a model, with the phase of each node."""

    def __init__(self, model: MindIR, proto: Any) -> None:
        self.model, self.name = model, proto.name
        self.nodes: dict[str, GraphNode] = {}
        for node in proto.node:
            primitive = model.primitive(node)
            kind = primitive.op_type if primitive is not None else ""
            if node.op_type == "Constant":
                kind = "Constant"
            inputs, shapes = data_inputs(kind, node.input), output_shapes(node)
            self.nodes[node.name] = GraphNode(node, kind, inputs, shapes)
        self.result = proto.output[0].name if proto.output else ""
        self.inputs = tuple(entry.name for entry in proto.input)
        self.shapes = {name: node.shapes for name, node in self.nodes.items()}
        for parameter in proto.parameter:
            self.shapes[parameter.name] = [(tuple(parameter.dims), parameter.data_type)]
        for entry in proto.input:
            self.shapes[entry.name] = [(tuple(t.dims), t.data_type) for t in entry.tensor]

    @property
    def part(self) -> str | None:
        """``forward`` or ``backward`` of a network that micro-batches share, else None."""
        return "forward" if "▸" in self.name else "backward" if "◂" in self.name else None

    def item_of(self, node: GraphNode) -> int | None:
        """Return which item of a tuple a TupleGetItem takes; None: not known."""
        index = self.nodes.get(node.inputs[1])
        value = find_value(index.proto.attribute, "value") if index is not None else None
        return value if isinstance(value, int) else None

    @cached_property
    def calls(self) -> dict[str, GraphNode]:
        """Calls of a shared network by name, with the forward call that each belongs to (its own of a forward)."""
        calls: dict[str, GraphNode] = {}
        for name, node in self.nodes.items():
            callee = node.proto.op_type[5:]
            if not node.kind and "▸" in callee and callee not in self.nodes:
                calls[name] = node
        for name, node in self.nodes.items():
            if not node.kind and name not in calls:
                forward, _ = root_of(self, node.proto.op_type[5:])
                if forward in calls:
                    calls[name] = calls[forward]
        return calls

    @cached_property
    def phases(self) -> dict[str, str]:
        """Phase of each node; see the module's docstring."""
        fixed = {name: _fixed_phase(node) for name, node in self.nodes.items()}
        if self.part == "forward":
            return dict.fromkeys(fixed, "forward")
        if self.part == "backward":
            repeated = ("forward", "recompute")
            return {n: "recompute" if p in repeated else "backward" for n, p in fixed.items()}
        for name, call in self.calls.items():
            fixed[name] = "forward" if name == call.name else "backward"
        from_gradients: set[str] = set()
        to_network: set[str] = set()
        for name, node in self.nodes.items():  # a node follows the nodes that it uses
            if fixed[name] == "backward" or any(i in from_gradients for i in node.inputs):
                from_gradients.add(name)
        for name in reversed(self.nodes):
            node = self.nodes[name]
            if fixed[name] in ("forward", "backward", "recompute") or name in to_network:
                to_network.update(node.inputs)
        inner = {n: "backward" if n in from_gradients else "forward" for n in to_network}
        return {name: phase or inner.get(name, "optimizer") for name, phase in fixed.items()}


def _fixed_phase(node: GraphNode) -> str | None:
    """Return the phase that a node's marks say, None if they say none."""
    scope = node.scope
    if node.mark("duplicated"):
        return "recompute"
    if scope.startswith("Gradients"):
        return "backward"
    if re.match(r"Default/(optimizer|bias_update)-", scope):
        return "optimizer"
    return "forward" if scope.startswith("Default/network-") else None


def module_of(scope: str) -> str:
    """Return the dotted name of the module of a scope: ``layers.0.attention.q_up``."""
    cells = [part for part in scope.split("/") if re.search(r"-[A-Za-z_]\w*$", part)]
    cells = [part for part in cells if not re.search(r"-op\d+$", part)]
    names = [part.rsplit("-", 1) for part in cells]
    for place, (_, kind) in enumerate(names):
        if kind.endswith("CausalLM"):
            return ".".join(name for name, _ in names[place + 1 :]) or "model"
    return ".".join(name for name, _ in names if name not in ("network", "_backbone")) or "unknown"


def size_of(shape: TypedShape) -> int | None:
    """Return the bytes of a tensor, None if its shape is dynamic."""
    dims, element = shape
    if any(d < 0 for d in dims):
        return None
    return math.prod(dims) * ITEM_BYTES.get(element, 4)


def root_of(function: Graph, name: str) -> tuple[str, int | None]:
    """Return the name of the value whose memory a value shares, and which item of it, if it is a tuple."""
    item = None
    while (node := function.nodes.get(name)) is not None:
        if node.kind == "TupleGetItem":
            name, item = node.inputs[0], function.item_of(node)
            packed = function.nodes.get(name)
            if packed is not None and packed.kind == "MakeTuple" and item is not None:
                name, item = packed.inputs[item], None
        elif node.kind in SAME_MEMORY:
            name = node.inputs[0]
        else:
            break
    return name, item


def call_counts(model: MindIR, functions: dict[str, Graph]) -> dict[str, int]:
    """Return how often a step runs each function: the branch of a condition that is taken, and all calls."""
    calls = {name: list(_callees(function, functions)) for name, function in functions.items()}
    counts: Counter[str] = Counter()

    def enter(name: str, depth: int) -> None:
        counts[name] += 1
        if depth < 64:
            for callee in calls[name]:
                enter(callee, depth + 1)

    enter(model.proto.graph.name, 0)
    return {name: counts[name] for name in functions}


def _callees(function: Graph, functions: dict[str, Graph]) -> Iterator[str]:
    """Return the functions that a function calls, each as often as it does."""
    for node in function.nodes.values():
        if node.kind or not node.proto.op_type.startswith("REF::"):
            continue
        if target := resolve(function, functions, node.proto.op_type[5:], None):
            yield target


def resolve(
    function: Graph, functions: dict[str, Graph], name: str, item: int | None
) -> str | None:
    """Return the name of the function that a value is; ``item``: of which item of it, if it is a tuple."""
    if name in functions:
        return name
    node = function.nodes.get(name)
    if node is None:
        return None
    inputs = node.inputs
    if node.kind in ("Partial", "Depend", "Load"):
        return resolve(function, functions, inputs[0], item)
    if node.kind == "Switch":  # the branch for "true": a step that is applied
        return resolve(function, functions, inputs[1], item)
    if node.kind == "MakeTuple" and item is not None:
        return resolve(function, functions, inputs[item], None)
    if node.kind == "TupleGetItem":
        return resolve(function, functions, inputs[0], function.item_of(node))
    if not node.kind:  # a call: what the callee returns
        callee = resolve(function, functions, node.proto.op_type[5:], None)
        if callee is not None:
            inner = functions[callee]
            return resolve(inner, functions, inner.result, item)
    return None
