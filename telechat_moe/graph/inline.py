"""Put the functions that micro-batches share in place of their calls.

MindSpore's front end writes the forward of a chunk as one function for all micro-batches; it returns its outputs
and a closure, the backward with what it needs. MindSpore's CPU backend calls no closure. Functions that a ``Switch``
chooses from stay functions.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from telechat_moe.errors import BadInputError
from telechat_moe.graph.mindir import Editor, MindIR, find_value, output_shapes
from telechat_moe.graph.nodes import STRUCTURE

WRITES = ("Assign", "AssignAdd")


class _Closure(NamedTuple):
    """A function and its first arguments."""

    function: str
    bound: tuple["_Value", ...] = ()


# The name of a node, a closure, or a tuple that holds closures.
_Value = str | _Closure | tuple["_Value", ...]


def inlined(mindir: bytes) -> bytes:
    """Return a serialised graph without calls; see :func:`inline`."""
    model = MindIR(mindir)
    inline(model)
    return model.proto.SerializeToString()


def inline(model: MindIR) -> None:
    """Replace the calls in the main graph, and keep the order of writes that they had."""
    if inline_calls(model):
        order_writes(model)


def inline_calls(model: MindIR) -> Mapping[str, str]:
    """Replace the calls in the main graph by the nodes of the functions, in the order of the calls.

    Returns:
        For each node of a call, the name that the call had in the main graph.

    Raises:
        BadInputError: The graph calls what is no function of it.
    """
    main = model.proto.graph
    functions = {function.name for function in model.proto.functions}
    if not any(node.op_type.removeprefix("REF::") in functions for node in main.node):
        return {}  # no micro-batches share a function; what a Switch chooses is called by another name
    inliner = _Inliner(model)
    result = inliner.run(main, {})
    main.output[0].name = inliner.name_of(result)
    del main.node[:]
    main.node.extend(inliner.fresh.node)
    called = {name for node in main.node for name in node.input}
    functions_left = [function for function in model.proto.functions if function.name in called]
    del model.proto.functions[:]
    model.proto.functions.extend(functions_left)
    return inliner.call_of


def order_writes(model: MindIR) -> None:
    """Let each write and read of a parameter wait for the write before it: in the front end's graph the order of the calls says so."""
    main = model.proto.graph
    fresh, written = type(main)(), dict[str, Any]()
    editor = Editor(model, fresh.node)

    def after(value: str, write: Any, name: str | None = None) -> str:
        (shape, element), *_ = output_shapes(write)
        return editor.depend(value, write.name, shape, element, write.domain, name)

    for node in main.node:
        primitive = model.primitive(node)
        kind = "" if primitive is None else primitive.op_type
        if kind in WRITES:
            if node.input[0] in written:
                node.input[1] = after(node.input[1], written[node.input[0]])
            written[node.input[0]] = node
        elif kind == "Load" and node.input[0] in written:
            after(node.input[0], written[node.input[0]], node.name)
            continue
        elif kind and kind not in STRUCTURE:
            for place, name in enumerate(node.input):
                if name in written:
                    node.input[place] = after(name, written[name])
        fresh.node.add().CopyFrom(node)
    del main.node[:]
    main.node.extend(fresh.node)


def _is_call(model: MindIR, node: Any) -> bool:
    return node.op_type.startswith("REF::") and model.primitive(node) is None


class _Inliner:
    def __init__(self, model: MindIR) -> None:
        self.model = model
        self.functions = {function.name: function for function in model.proto.functions}
        self.fresh = type(model.proto.graph)()
        self.editor = Editor(model, self.fresh.node)
        self.calls, self.present = 0, set[str]()
        # Functions share constants, each written where MindSpore met it first.
        nodes = (node for graph in model.graphs() for node in graph.node)
        self.constants = {node.name: node for node in nodes if node.op_type == "Constant"}
        self.call = ""
        self.call_of: dict[str, str] = {}

    def run(self, graph: Any, values: dict[str, _Value]) -> _Value:
        """Add the nodes of a graph whose inputs are ``values``; return its output."""
        mark = f"@{self.calls}" if graph is not self.model.proto.graph else ""
        self.calls += 1
        chosen = {
            name
            for node in graph.node
            if (p := self.model.primitive(node)) is not None and p.op_type == "Switch"
            for name in node.input[1:]
        }
        for node in graph.node:
            primitive = self.model.primitive(node)
            kind = "" if primitive is None else primitive.op_type
            inputs = [self._value(name, values) for name in node.input]
            callee: _Value = ""
            if _is_call(self.model, node):
                callee = self._value(node.op_type.removeprefix("REF::"), values)
            if isinstance(callee, _Closure):
                outer, self.call = self.call, self.call or node.name
                value = self._call(callee, inputs)
                self.call = outer
            elif kind == "Partial" and node.name not in chosen:
                function, *arguments = inputs
                if not isinstance(function, _Closure):
                    raise BadInputError(
                        f"{node.name}: a Partial of {function!r}, which is no function"
                    )
                value = _Closure(function.function, (*function.bound, *arguments))
            elif kind == "MakeTuple" and not all(isinstance(value, str) for value in inputs):
                value = tuple(inputs)
            elif kind == "TupleGetItem" and isinstance(inputs[0], tuple):
                value = inputs[0][self._index(node.input[1])]
            elif kind == "Depend" and not isinstance(inputs[0], str):
                value = inputs[0]
            else:
                value = self._add(node, inputs, mark if node.op_type != "Constant" else "")
            values[node.name] = value
        return self._value(graph.output[0].name, values)

    def _call(self, closure: _Closure, inputs: Sequence[_Value]) -> _Value:
        function = self.functions[closure.function]
        values = (*closure.bound, *inputs)
        if len(values) < len(function.input):
            raise BadInputError(
                f"{function.name} is called with {len(values)} of its {len(function.input)} inputs"
            )
        names = [parameter.name for parameter in function.input]
        return self.run(function, dict(zip(names, values, strict=False)))

    def _value(self, name: str, values: dict[str, _Value]) -> _Value:
        if name in values:
            return values[name]
        return _Closure(name) if name in self.functions else name

    def _index(self, name: str) -> int:
        return int(find_value(self.constants[name].attribute, "value"))

    def _add(self, node: Any, inputs: Sequence[_Value], mark: str) -> str:
        name = node.name + mark
        if name in self.present:  # a constant of a function that is called again
            return name
        names = [self.name_of(value) for value in inputs]
        for constant in names:
            if constant in self.constants and constant not in self.present:
                self._add(self.constants[constant], [], "")
        self.present.add(name)
        added = self.fresh.node.add()
        added.CopyFrom(node)
        added.name = name
        added.output[:] = [name]
        added.input[:] = names
        if self.call and node.op_type != "Constant":
            self.call_of[name] = self.call
        return name

    def name_of(self, value: _Value) -> str:
        """Return the node of a value; of a closure its function, of a tuple with closures a tuple of its nodes."""
        if isinstance(value, str):
            return value
        if isinstance(value, _Closure):
            return value.function
        return self.editor.pack([self.name_of(v) for v in value if isinstance(v, str)], (), 1, "")
