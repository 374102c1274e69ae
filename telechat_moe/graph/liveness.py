"""Find the activations of a compiled step that are alive at once, each from its operator to its last reader.

The graph is walked in MindSpore's topological order, through the calls of networks that micro-batches share. Counted
are the outputs of forward, recomputed and backward operators. Not counted:

* parameters and states, and copies of weights (gathered or cast), which are in :attr:`Alive.copies`;
* gradients that only the update reads, which are as large as the accumulators (:attr:`.read.Memory.gradients`);
* constants, views, results in place, and what the update itself needs while no activation is alive;
* what a ``MoveTo`` took to the host's memory: its copy is in :attr:`Alive.host`, and a second one brings it back.

The backend may run another order and let operators share memory; both are invisible here.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from telechat_moe.graph.mindir import find_value
from telechat_moe.graph.nodes import SAME_MEMORY, STRUCTURE, Graph, GraphNode, TypedShape, module_of

IN_PLACE = {"AdamWeightDecay", "ApplyMomentum", "Assign", "AssignAdd"}
PASSES = ("forward", "recompute", "backward")


@dataclass(eq=False, slots=True)
class LiveTensor:
    """A tensor in memory.

    Attributes:
        size: Bytes.
        phase: Phase of its operator.
        node: Its operator; None: a parameter or an input.
        shape: Shape and type.
        weights: Whether it is computed from weights alone.
        born: Position of its operator in the step.
        dies: Position of its last reader.
        gradient: Whether only the update reads it.
        call: Number of the call that makes it; 0 = the main function.
        host: Whether it is in the host's memory.
    """

    size: int = 0
    phase: str = ""
    node: GraphNode | None = None
    shape: TypedShape = ((), 0)
    weights: bool = False
    born: int = -1
    dies: int = -1
    gradient: bool = False
    call: int = 0
    host: bool = False


class Closure(NamedTuple):
    """A function and the first values that it will be called with."""

    name: str
    values: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Alive:
    """The tensors that are alive at the peak.

    Attributes:
        peak: Bytes of activations.
        tensors: Those of the peak, ``(phase, module, primitive, shape)`` to bytes.
        left_behind: The most that the call of a forward pass leaves behind; without calls: what is alive when the first
            recomputed or backward operator runs.
        copies: Bytes of weights gathered or cast, at most.
        host: Bytes of activations in the host's memory, at most.
        moved: What goes there in a step, ``(module, operator, prefetch, shape)`` to how often and how many bytes.
    """

    peak: int
    tensors: dict[tuple[str, str, str, tuple[int, ...]], int] = field(repr=False)
    left_behind: int
    copies: int
    host: int
    moved: dict[tuple[str, str, int, tuple[int, ...]], tuple[int, int]] = field(repr=False)


def alive(main: Graph, functions: Mapping[str, Graph], size_of: Any) -> Alive:
    """Return what is alive at the peak of a step.

    Args:
        functions: All by name.
        size_of: Bytes of a shape, also of one that depends on the routing.
    """
    walk = _Walk(functions, size_of)
    walk.run(main, [LiveTensor() for _ in main.inputs], 0)
    return walk.found()


def most_alive(main: Graph, functions: Mapping[str, Graph], size_of: Any) -> int:
    """Return the bytes of all results of operators that are alive at once, at most; see :func:`alive`."""
    walk = _Walk(functions, size_of)
    walk.run(main, [LiveTensor() for _ in main.inputs], 0)
    change: Counter[int] = Counter()
    for tensor in walk.tensors:
        change[tensor.born] += tensor.size
        change[tensor.dies + 1] -= tensor.size
    return max(accumulate(change[i] for i in range(len(walk.phases))), default=0)


class _Walk:
    def __init__(self, functions: Mapping[str, Graph], size_of: Any) -> None:
        self.functions, self.size_of = functions, size_of
        self.tensors: list[LiveTensor] = []
        self.phases: list[str] = []  # of each operator of the step
        self.ends: dict[int, int] = {}  # of each forward call, the position after it
        self.moved: dict[tuple[str, str, int, tuple[int, ...]], tuple[int, int]] = {}
        self.calls = 0
        parameters = next(iter(functions.values())).model.proto.graph.parameter
        # Gradients are summed in parameters, too.
        self.parameters: dict[str, Any] = {
            p.name: LiveTensor(weights="accu_grads." not in p.name) for p in parameters
        }

    def run(self, function: Graph, arguments: Sequence[Any], call: int) -> Any:
        """Walk through a function; return its result."""
        values = self.parameters | dict(zip(function.inputs, arguments, strict=True))
        for node in function.nodes.values():
            values[node.name] = self._value(function, node, values, call)
        return values.get(function.result)

    def _read(self, name: str, values: Mapping[str, Any]) -> Any:
        if name in values:
            return values[name]
        return Closure(name) if name in self.functions else LiveTensor()

    def _value(self, function: Graph, node: GraphNode, values: Mapping[str, Any], call: int) -> Any:
        kind = node.kind
        if kind == "Constant":
            return LiveTensor(node=node)
        if not kind:
            return self._call(function, node, values)
        inputs = [self._read(name, values) for name in node.inputs]
        if kind == "MakeTuple":
            return tuple(inputs)
        if kind == "TupleGetItem":
            item, packed = function.item_of(node), inputs[0]
            if not isinstance(packed, tuple) or item is None:
                return packed
            # What ShapeCalc finds out about dynamic shapes is on the host, and its outputs are not written down.
            return packed[item] if item < len(packed) else LiveTensor()
        if kind == "Partial":
            first: Closure = inputs[0]
            return Closure(first.name, (*first.values, *inputs[1:]))
        if kind == "Switch":
            return inputs[1]  # a step that is applied
        if kind in SAME_MEMORY:
            return inputs[0]
        if kind in STRUCTURE:
            return None
        return self._operator(function, node, inputs, call)

    def _operator(self, function: Graph, node: GraphNode, inputs: Sequence[Any], call: int) -> Any:
        now, phase = len(self.phases), function.phases[node.name]
        update = phase == "optimizer" and node.kind != "Send"
        self.phases.append(phase)
        read = list(_tensors(inputs))
        for tensor in read:
            tensor.dies = now
            tensor.gradient = update
        if node.kind in IN_PLACE:
            return inputs[0]
        host = _to_host(function, node)
        data = [t for t in read if t.node is None or t.node.kind != "Constant"]
        weights = bool(data) and all(t.weights for t in data)
        outputs = [
            LiveTensor(
                self.size_of(shape), phase, node, shape, weights, now, now, call=call, host=host
            )
            for shape in node.shapes
        ]
        if host:
            source = read[0].node or node
            early = find_value(function.model.primitive(node.proto).attribute, "backward_prefetch")
            key = module_of(node.scope), source.kind, early or 0, node.shapes[0][0]
            times, size = self.moved.get(key, (0, 0))
            self.moved[key] = times + 1, size + outputs[0].size
        self.tensors += outputs
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _call(self, function: Graph, node: GraphNode, values: Mapping[str, Any]) -> Any:
        target = self._read(node.proto.op_type[5:], values)
        if not isinstance(target, Closure):
            return None
        self.calls += 1
        number = self.calls
        callee = self.functions[target.name]
        arguments = [*target.values, *(self._read(name, values) for name in node.inputs)]
        # An input that only orders effects is the last and may be left out.
        arguments = (arguments + [None] * len(callee.inputs))[: len(callee.inputs)]
        result = self.run(callee, arguments, number)
        if callee.part == "forward":
            self.ends[number] = len(self.phases)
        return result

    def found(self) -> Alive:
        """Return the peak of all that was walked through."""
        born: defaultdict[int, list[LiveTensor]] = defaultdict(list)
        dead: defaultdict[int, list[LiveTensor]] = defaultdict(list)
        for tensor in self.tensors:
            if tensor.phase in PASSES and not (tensor.phase == "backward" and tensor.gradient):
                born[tensor.born].append(tensor)
                dead[tensor.dies].append(tensor)
        now = copies = peak = most_copies = peak_position = host = most_host = 0
        turn = None
        for place, phase in enumerate(self.phases):
            if phase in ("recompute", "backward") and turn is None:
                turn = now
            for tensor in born[place]:
                now, copies = _add(now, copies, tensor, 1)
                host += tensor.size * tensor.host
            if phase in PASSES and now > peak:
                peak, peak_position = now, place
            most_copies, most_host = max(most_copies, copies), max(most_host, host)
            for tensor in dead[place]:
                now, copies = _add(now, copies, tensor, -1)
                host -= tensor.size * tensor.host
        counted = [t for tensors in born.values() for t in tensors if not t.weights and not t.host]
        at_peak: Counter[tuple[str, str, str, tuple[int, ...]]] = Counter()
        left_behind: Counter[int] = Counter()
        for tensor in counted:
            if tensor.born <= peak_position <= tensor.dies:
                module = module_of(tensor.node.scope) if tensor.node else ""
                kind = tensor.node.kind if tensor.node else ""
                at_peak[tensor.phase, module, kind, tensor.shape[0]] += tensor.size
            if tensor.call in self.ends and tensor.dies >= self.ends[tensor.call]:
                left_behind[tensor.call] += tensor.size
        return Alive(
            peak=peak,
            tensors=dict(at_peak.most_common()),
            left_behind=max(left_behind.values(), default=turn or 0),
            copies=most_copies,
            host=most_host,
            moved=self.moved,
        )


def _add(now: int, copies: int, tensor: LiveTensor, sign: int) -> tuple[int, int]:
    """Return the bytes of activations and of copies on the device with a tensor more or less."""
    if tensor.host:
        return now, copies
    if tensor.weights:
        return now, copies + sign * tensor.size
    return now + sign * tensor.size, copies


def _to_host(function: Graph, node: GraphNode) -> bool:
    """Tell whether a node takes a tensor to the host's memory."""
    if node.kind != "MoveTo":
        return False
    place = function.nodes.get(node.inputs[1])
    return place is not None and find_value(place.proto.attribute, "value") == "CPU"


def _tensors(values: Sequence[Any]) -> Iterator[LiveTensor]:
    for value in values:
        if isinstance(value, LiveTensor):
            yield value
        elif isinstance(value, Closure):
            yield from _tensors(value.values)
        elif isinstance(value, tuple):
            yield from _tensors(value)
