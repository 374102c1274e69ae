"""Put taps into a MindIR graph: behind each operator a custom operator that writes down what it is given.

A graph that MindSpore has compiled for training holds forward, backward and updates in one (MindSpore's own dump of
such graphs needs Ascend). The graph is unchanged except for the order of writes to a weight: they follow the taps that
read it. The plan says which operator took its inputs from where, so that ``tools/align/capture/ms_read.py`` can assemble
the records.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, NamedTuple

import mindspore as ms
from mindspore import nn
from mindspore.graph.api import _cell_graph_executor as executor
from mindspore.train import mind_ir_pb2 as pb

from telechat_moe.graph.mindir import Editor, MindIR, output_shapes, value_of
from telechat_moe.graph.tap_plan import (
    FUSED_UPDATE,
    TYPES,
    Argument,
    Number,
    TappedOperator,
    TappedTensor,
    TapPlan,
    cell_of,
    constant_tensor,
    kind_of,
    layouts_of,
    scalar_of,
    update_of,
    weight_of,
    weights_of,
)
from telechat_moe.ops import native

_PASS = {"Depend", "Load", "UpdateState", "MakeTuple", "MakeList", "TupleGetItem", "ListGetItem"}
_CALLS = {"Partial", "Switch", "SwitchLayer", "Return", "call"}
_NO_MATTER = """
input_names output_names imply_path uniq_name func_name func_type reg_op_name multi_output cpp_infer_shape autodiff
side_effect_mem side_effect_io side_effect_propagate side_effect_backprop side_effect_backprop_mem instance_name
primitive_target IsFeatureMapInputList IsFeatureMapOutput in_layout out_layout in_strategy out_strategy
gen_strategy keep_alive keep_value_node_input comm_reuse no_eliminate rank_list group_rank_ids group_ranks
rank_size index fusion mean_flag module mirror_user_id BatchParallel self_define_shard recompute cust_aicpu
split_count num N n use_locking strided_slice_flag interleave_num micro_interleaved_add_flag checkpoint parameter_start
pipeline_begin pipeline_end pipeline_param recompute_comm_op grad_accu_num forward_end
"""
_NOISE = frozenset(_NO_MATTER.split())
"""Attributes that do not affect what is computed."""

_WRITES = {"AdamWeightDecay": 3, "ApplyMomentum": 2, "Assign": 1, "AssignAdd": 1, "AssignSub": 1}
"""The number of leading inputs that an operator writes; others with side effects write all weights they take."""


@dataclass(eq=False)
class _Variable:
    """A weight or state; its tensor changes when it is written."""

    tensor: TappedTensor


class _Monad(NamedTuple):
    """A value that orders side effects on memory, or on files and screens."""

    memory: bool


class _Named(NamedTuple):
    """A value with its name in a graph."""

    name: str
    value: Any


Selection = Callable[[TappedOperator], bool]


def tapped(
    mindir: bytes,
    library: str,
    selects: Selection = lambda node: True,
    states: bool = True,
    planned: bytes | None = None,
) -> tuple[bytes, TapPlan]:
    """Return a graph with taps behind the selected operators, and the plan of what they record.

    Args:
        library: Path of the library that has the operator ``Tap``.
        selects: Selects operators; it is called with an operator without its outputs.
        states: Record an optimizer's states before their update, too, not only after it.
        planned: The graph in another order, in which the plan has and numbers the main graph's operators.
    """
    model = MindIR(mindir)
    tapper = _Tapper(model, library, selects, states)
    if planned is not None:
        tapper.numbers = _numbers(MindIR(planned))
    main = model.proto.graph
    tapper.run(main, None)
    if planned is not None:
        place = {name: i for i, name in enumerate(tapper.numbers)}
        named = sorted(zip(tapper.names, tapper.plan.nodes, strict=True), key=lambda x: place[x[0]])
        tapper.plan.nodes[:] = [node for _, node in named]
    tapper.called = True
    run = {main.name}
    while tapper.waiting:
        name, arguments = tapper.waiting.popitem()
        function = next((f for f in model.proto.functions if f.name == name), None)
        if function is not None and name not in run:
            run.add(name)
            tapper.run(function, arguments)
    return model.proto.SerializeToString(), tapper.plan


def _numbers(model: MindIR) -> dict[str, int]:
    """Return the number of each operator of the main graph among those of its cell, kind and direction."""
    counts, numbers = Counter[Any](), dict[str, int]()
    for node in model.proto.graph.node:
        primitive = model.primitive(node)
        if primitive is not None and primitive.op_type not in _PASS | _CALLS:
            path, _, backward = cell_of(node.domain)
            place = (path, kind_of(primitive), backward)
            numbers[node.name] = counts[place]
            counts[place] += 1
    return numbers


class _Tapper:
    def __init__(self, model: MindIR, library: str, selects: Selection, states: bool) -> None:
        self.model, self.library, self.selects, self.states = model, library, selects, states
        self.plan = TapPlan()
        self.variables: dict[str, _Variable] = {}
        self.waiting: dict[str, list[_Named] | None] = {}
        self.counts = Counter[Any]()
        self.numbers: Mapping[str, int] = {}
        self.names: list[str] = []  # of the plan's nodes
        self.references = self._references()
        self.constants: dict[str, Any] = {}
        self.update_state = ""
        self.called = False  # whether a function may have run

    def _references(self) -> Counter[str]:
        """Return how often each function is referenced: one that is called only once has known arguments."""
        names = {f.name for f in self.model.proto.functions}
        nodes = (node for graph in self.model.graphs() for node in graph.node)
        used = (n for node in nodes for n in (*node.input, node.op_type.removeprefix("REF::")))
        return Counter(name for name in used if name in names)

    def run(self, graph: Any, arguments: list[_Named] | None) -> None:
        """Put taps behind the selected operators of a graph.

        Args:
            arguments: What the graph is called with, where that is known.
        """
        self.graph = graph
        self.env: dict[str, Any] = {}
        self.fresh = type(graph)()
        self.editor = Editor(self.model, self.fresh.node)
        self.monad: str | None = None
        self.begin = self.plan.taps
        for parameter in graph.parameter:
            name = parameter.ref_key or parameter.name.split(":")[-1]
            self.env[parameter.name] = self._variable(name, parameter)
        values = [a.value for a in arguments or ()] if self.references[graph.name] == 1 else []
        for entry, value in zip_longest(graph.input, values[: len(graph.input)]):
            if entry.name not in self.env:
                self.env[entry.name] = self._input(entry) if value is None else value
        for node in list(graph.node):
            self._node(node)
        self._close()
        del graph.node[:]
        graph.node.extend(self.fresh.node)

    def _variable(self, name: str, proto: Any) -> _Variable:
        """Return the weight or state of a name, which all graphs share."""
        shape, kind = tuple(proto.dims), TYPES.get(proto.data_type, "?")
        return self.variables.setdefault(name, _Variable(TappedTensor(shape, kind, parameter=name)))

    def _input(self, entry: Any) -> Any:
        if entry.tensor:
            tensor = entry.tensor[0]
            if tensor.ref_key:
                return self._variable(tensor.ref_key, tensor)
            return TappedTensor(tuple(tensor.dims), TYPES.get(tensor.data_type, "?"))
        kinds = pb.AttributeProto
        if entry.HasField("attr_info") and entry.attr_info.type in (kinds.UMONAD, kinds.IOMONAD):
            memory = entry.attr_info.type == kinds.UMONAD
            if memory:
                self.monad = entry.name
            return _Monad(memory)
        return Number(None)

    def _node(self, node: Any) -> None:
        name = node.output[0] if node.output else node.name
        if node.op_type == "Constant":
            self._keep(node)
            self.constants[name] = self._constant(node)
            return
        primitive = self.model.primitive(node)
        kind = primitive.op_type if primitive is not None else "call"
        values = [self.env.get(i, self.constants.get(i)) for i in node.input]
        if kind in _PASS:
            self._passing(kind, node, name, values)
        elif kind == "Custom" and kind_of(primitive) == "TelechatTap":  # between two passes
            self._keep(node)
        elif kind in _CALLS:
            self._order(node, values)
            self._keep(node)
            self.called |= kind == "call"
            self._calling(kind, node, name, values)
        else:
            self._operator(node, primitive, name, values)

    def _passing(self, kind: str, node: Any, name: str, values: list[Any]) -> None:
        if kind == "UpdateState":
            self._order(node, values)
        self._keep(node)
        if kind == "UpdateState":
            self.env[name] = values[0] if isinstance(values[0], _Monad) else _Monad(True)
            if self.env[name].memory:
                self.monad = name
        elif kind in ("MakeTuple", "MakeList"):
            self.env[name] = [_Named(i, v) for i, v in zip(node.input, values, strict=True)]
        elif kind in ("TupleGetItem", "ListGetItem"):
            packed, place = values[0], values[1]
            if isinstance(packed, list) and isinstance(place, Number):
                self.env[name] = packed[place.value].value
            else:
                self.env[name] = self._of_shapes(node)
        elif kind == "Load" and isinstance(values[0], _Variable):
            self.env[name] = values[0].tensor
        else:
            self.env[name] = values[0]

    def _calling(self, kind: str, node: Any, name: str, values: list[Any]) -> None:
        functions = {f.name for f in self.model.proto.functions}
        if kind == "Partial":
            arguments = [_Named(i, v) for i, v in zip(node.input[1:], values[1:], strict=True)]
            self.env[name] = Number(None)
            self.waiting.setdefault(node.input[0], arguments)
            return
        for i in node.input:
            if i in functions:
                self.waiting.setdefault(i, None)
        callee = node.op_type.removeprefix("REF::")
        if kind == "call" and callee in functions:
            arguments = [_Named(i, v) for i, v in zip(node.input, values, strict=True)]
            self.waiting.setdefault(callee, arguments)
        self.env[name] = self._of_shapes(node) if kind == "call" else Number(None)

    def _of_shapes(self, node: Any) -> Any:
        """Return fresh tensors for the outputs of a node."""
        tensors = [TappedTensor(shape, TYPES.get(kind, "?")) for shape, kind in output_shapes(node)]
        several = any(
            a.name == "shape" and a.type in (pb.AttributeProto.TUPLE, pb.AttributeProto.LIST)
            for a in node.attribute
        )
        if several:
            return [_Named("", t) for t in tensors]
        return tensors[0] if len(tensors) == 1 else Number(None)

    def _constant(self, node: Any) -> Any:
        kinds = pb.AttributeProto
        for attribute in node.attribute:
            if attribute.name != "value":
                continue
            if attribute.type in (kinds.UMONAD, kinds.IOMONAD):
                return _Monad(attribute.type == kinds.UMONAD)
            if attribute.type == kinds.TENSORS:
                return constant_tensor(attribute.tensors[0])
            if any(v.type == kinds.TENSORS for v in attribute.values):
                return [_Named("", constant_tensor(v.tensors[0])) for v in attribute.values]
            return Number(scalar_of(attribute))
        return Number(None)

    def _operator(self, node: Any, primitive: Any, name: str, values: list[Any]) -> None:
        self.env[name] = result = self._of_shapes(node)
        inputs = [_plain(v) for v in values if not isinstance(v, _Monad)]
        path, classes, backward = cell_of(node.domain)
        kind = kind_of(primitive)
        place = (path, kind, backward)
        attributes = {a.name: a for a in primitive.attribute}
        effect = "side_effect_mem" in attributes and bool(value_of(attributes["side_effect_mem"]))
        settings = {n: scalar_of(a) for n, a in attributes.items() if n not in _NOISE}
        writable = _WRITES.get(kind, len(values))
        writes = tuple(
            i for i, v in enumerate(values[:writable]) if effect and isinstance(v, _Variable)
        )
        shown = TappedOperator(
            path, classes, kind, backward, self.numbers.get(name, self.counts[place]), inputs, [], settings,
            self.graph.name, writes, weight_of(node), layouts_of(attributes),
        )  # fmt: skip
        self.counts[place] += 1
        weights = weights_of(shown)
        chosen = [i for i in range(weights) if self.selects(update_of(shown, [i]))]
        selected = bool(chosen) if weights else self.selects(shown)
        left_out = {i for i in range(4 * weights) if i % weights not in chosen}
        if selected:
            skipped = {*left_out, *(() if self.states else states_of(kind, writes))}
            for place, (i, value) in enumerate(zip(node.input, values, strict=True)):
                if place not in skipped:
                    self._see(i, value)
        if any(isinstance(v, _Monad) for v in values):
            self._order(node, values)
        self._keep(node)
        for i in writes:
            variable = values[i]
            old = variable.tensor
            variable.tensor = TappedTensor(old.shape, old.dtype, parameter=old.parameter)
        if not selected:
            return
        if writes:  # later operators, and taps, see the new values
            self._update(name)
            written = [i for i in writes if i not in left_out]
            for i in written:
                self._see(node.input[i], values[i])
            outputs = [values[i].tensor for i in written]
        else:
            outputs = self._tapped_outputs(name, result)
        shown = update_of(shown, chosen) if weights else shown
        self.plan.nodes.append(replace(shown, outputs=outputs))
        self.names.append(name)

    def _tapped_outputs(self, name: str, result: Any) -> list[Argument]:
        if isinstance(result, TappedTensor):
            self._see(name, result)
            return [result]
        outputs: list[Argument] = []
        for i, item in enumerate(result if isinstance(result, list) else []):
            get = self.editor.primitive("TupleGetItem")
            number = self.editor.constant(i)
            kind = next(k for k, v in TYPES.items() if v == item.value.dtype)
            part = self.editor.node(get, [name, number], item.value.shape, kind, "tap")
            self._see(part, item.value)
            outputs.append(item.value)
        return outputs

    def _see(self, name: str, value: Any) -> None:
        """Tap a value unless it is tapped already."""
        if isinstance(value, list):
            for item in value:
                if item.name:
                    self._see(item.name, item.value)
            return
        tensor = value.tensor if isinstance(value, _Variable) else value
        if (
            not isinstance(tensor, TappedTensor)
            or tensor.constant is not None
            or tensor.dtype == "?"
        ):
            return
        if tensor.early or self.graph.name in tensor.taps:
            return
        tensor.early = not self.called
        number = self.plan.taps
        self.plan.taps += 1
        tensor.taps[self.graph.name] = number
        if self.monad is None:
            self.monad = self._new_monad()
        # One after another: of several that an UpdateState waits for, MindSpore keeps the first.
        tap = self.editor.custom("Tap", self.library, writes=True, tap=number)
        self._update(self.editor.node(tap, [name, self.monad], [1], 1, "tap"))

    def _order(self, node: Any, values: Sequence[Any]) -> None:
        """Make a node with side effects wait for the taps before it."""
        for i, value in enumerate(values):
            if isinstance(value, _Monad) and value.memory and self.monad is not None:
                node.input[i] = self.monad

    def _update(self, name: str) -> None:
        """Add an UpdateState behind a node."""
        if not self.update_state:
            self.update_state = self.editor.primitive("UpdateState")
        inputs = [self.monad or self._new_monad(), name]
        node = self._added("updated", self.update_state, inputs)
        node.attribute.add(name="shape", type=pb.AttributeProto.UMONAD)
        self.monad = node.name

    def _new_monad(self) -> str:
        node = self._added("monad", "Constant", [])
        node.attribute.add(name="value", type=pb.AttributeProto.UMONAD)
        return node.name

    def _close(self) -> None:
        """Make the graph's result wait for its taps."""
        if self.begin == self.plan.taps or not self.graph.output:
            return
        result = self.graph.output[0]
        source = next((n for n in self.fresh.node if result.name in n.output), None)
        depend = self.editor.primitive("Depend", side_effect_propagate=1)
        node = self._added("result", depend, [result.name, self.monad or self._new_monad()])
        for attribute in source.attribute if source is not None else ():
            if attribute.name == "shape":
                node.attribute.add().CopyFrom(attribute)
        result.name = node.name

    def _added(self, prefix: str, kind: str, inputs: Sequence[str]) -> Any:
        """Add a node with one output of its own name."""
        return self.editor.add(self.editor.name(prefix), kind, inputs, "tap")

    def _keep(self, node: Any) -> None:
        self.fresh.node.add().CopyFrom(node)


def _plain(value: Any) -> Any:
    """Return a value in the form that the plan keeps."""
    if isinstance(value, _Variable):
        return value.tensor
    if isinstance(value, list):
        return [_plain(item.value) for item in value]
    return value if isinstance(value, TappedTensor | Number) else Number(None)


def states_of(kind: str, writes: Sequence[int]) -> Sequence[int]:
    """Return which inputs of an operator are the states of an optimizer."""
    weights = {"AdamWeightDecay": 1, "ApplyMomentum": 1, FUSED_UPDATE: len(writes) // 3}
    return writes[weights[kind] :] if kind in weights else ()


@dataclass
class Tapped:
    """A net with taps in its graph; it is called like the net and shares its weights."""

    net: Any  # a cell whose mode (training or not) is set
    selects: Selection = lambda node: True  # selects the operators to tap
    states: bool = True  # see `tapped`
    cell: Any = None
    plan: TapPlan = field(default_factory=TapPlan)

    def compile(self, *inputs: Any) -> None:
        """Compile the net, with its taps, for inputs of these shapes and types."""
        native.load()
        phase, _ = executor.compile(self.net, *inputs, phase="export.mindir")
        mindir = executor._get_func_graph_proto(self.net, phase, "mind_ir")
        content, self.plan = tapped(mindir, str(native.path()), self.selects, self.states)
        self.cell = nn.GraphCell(load(content))
        parameters = {p.name: p for p in self.net.get_parameters()}
        named = [(p, p.name.split(":")[-1]) for p in self.cell.get_parameters()]
        self.weights = [(p, parameters[name]) for p, name in named if name in parameters]
        self.started = False

    def __call__(self, *inputs: Any) -> Any:
        """Run the net; weights that the net writes change in the net itself, too."""
        if self.cell is None:
            self.compile(*inputs)
        assert self.cell is not None
        for parameter, original in self.weights:
            value = ms.Tensor(original.asnumpy())
            # After the first run a graph's branches keep using a parameter's old memory.
            if self.started:
                ms.ops.assign(parameter, value)
            else:
                parameter.set_data(value)
        result = self.cell(*inputs)
        self.started = True
        for parameter, original in self.weights:
            ms.ops.assign(original, ms.Tensor(parameter.asnumpy()))
        return result


def load(content: bytes) -> Any:
    """Return the graph in a serialised MindIR."""
    with tempfile.NamedTemporaryFile(suffix=".mindir") as file:
        file.write(content)
        file.flush()
        return ms.load(file.name)
