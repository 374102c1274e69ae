"""Plant faults in the real MindSpore model: one operator of a training step's own graph gives a wrong result.

The step of a recipe is compiled once and gets its taps (``capture/mindspore.py``). A fault is then put *between* an
operator and its taps, so that the dump shows the right operator with its right inputs and settings, and a wrong result,
as a wrong kernel would. Faults of the graph itself (data, a weight, a missing operator) are made before the step runs.
"""

import fnmatch
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from telechat_moe.graph.mindir import Editor, MindIR, output_shapes, value_of
from telechat_moe.numerics import Array
from telechat_moe.tools.align.dump.records import Dump, RankDump, TensorRecord
from telechat_moe.tools.align.dump.records import Value as DumpValue

if TYPE_CHECKING:
    from telechat_moe.recipe import Recipe

_FLOAT16, _FLOAT32 = 10, 1  # MindIR's numbers of types
_TYPE_ID = {_FLOAT16: 42, _FLOAT32: 43}  # the numbers that Cast takes


@dataclass
class Value:
    """A tensor of a graph that is being edited.

    Attributes:
        graph: Adds operators.
        kind: MindIR's number of its type.
    """

    graph: "_Fresh"
    name: str
    shape: tuple[int, ...]
    kind: int

    def __mul__(self, other: Any) -> "Value":
        """Multiply by numbers, element by element."""
        return self._made("Mul", [self.name, self._like(other)], self.shape)

    def __add__(self, other: Any) -> "Value":
        """Add numbers, element by element."""
        return self._made("Add", [self.name, self._like(other)], self.shape)

    def taken(self, order: Sequence[int], axis: int = 0) -> "Value":
        """Return rows in another order."""
        editor = self.graph.editor
        index = self.graph.tensor(np.asarray(order, np.int32))
        given = [self.name, index, editor.constant(axis), editor.constant(0)]
        return self._made(
            "Gather", given, (*self.shape[:axis], len(order), *self.shape[axis + 1 :])
        )

    def rolled(self, axis: int = 0) -> "Value":
        """Return rows shifted by one position."""
        n = self.shape[axis]
        return self.taken([(i - 1) % n for i in range(n)], axis)

    def reshaped(self, *shape: int) -> "Value":
        """Return the same values in another shape."""
        return self._made("Reshape", [self.name, self.graph.editor.constant(shape)], shape)

    def transposed(self) -> "Value":
        """Return a matrix transposed."""
        order = self.graph.editor.constant((1, 0))
        return self._made("Transpose", [self.name, order], self.shape[::-1])

    def misread(self) -> "Value":
        """Return a matrix as it is if read in the other order of its dimensions."""
        return self.reshaped(*self.shape[::-1]).transposed()

    def narrowed(self) -> "Value":
        """Return values rounded to float16."""
        return self._cast(_FLOAT16)._cast(self.kind)

    def _cast(self, kind: int) -> "Value":
        number = self.graph.editor.constant(_TYPE_ID[kind])
        return self._made("Cast", [self.name, number], self.shape, kind)

    def _like(self, numbers: Any) -> str:
        kind = np.float32 if self.kind == _FLOAT32 else np.int32
        return self.graph.tensor(np.broadcast_to(np.asarray(numbers, kind), self.shape))

    def _made(
        self, what: str, inputs: list[str], shape: Sequence[int], kind: int | None = None
    ) -> "Value":
        editor, kind = self.graph.editor, kind or self.kind
        name = editor.node(editor.primitive(what), inputs, shape, kind, "fault")
        return Value(self.graph, name, tuple(shape), kind)


class _Fresh:
    """A graph that is written anew, node by node."""

    def __init__(self, model: Any, nodes: Any) -> None:
        self.nodes, self.editor = nodes, Editor(model, nodes)

    def tensor(self, values: Array) -> str:
        """Add a constant tensor."""
        kinds = {"float32": _FLOAT32, "int32": 6}
        name = self.editor.zeros(values.shape, kinds[values.dtype.name])
        self.nodes[-1].attribute[0].tensors[0].raw_data = np.ascontiguousarray(values).tobytes()
        return name


Edit = Callable[[Value], Value]


@dataclass(frozen=True)
class Lie:
    """A fault that makes one operator's result wrong.

    Attributes:
        families: What it may rightly be called.
        operator: Pattern of the operator's name in a dump, such as ``*.layers.1.moe.experts.*GroupedMatmul``.
        key: Pattern of the key in the dump, where it is not the operator's name.
        result: Which output is wrong; None: none directly.
        argument: Which input the operator reads wrong; None: none.
        edit: Function that changes that tensor.
        settings: Attributes of the primitive that are changed.
        exchanged: Two inputs that the operator confuses with each other.
    """

    name: str
    families: str
    operator: str
    result: int | None = None
    argument: int | None = None
    edit: Edit | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    exchanged: tuple[int, int] | None = None
    key: str = ""


def lying(content: bytes, lie: Lie) -> tuple[bytes, str]:
    """Return a tapped graph in which one operator gives a wrong result, and (a pattern of) its key in a dump.

    Args:
        lie: The fault; of several operators that fit, the first gets it.

    Raises:
        LookupError: No operator fits.
    """
    model = MindIR(content)
    for graph in model.graphs():
        for node in graph.node:
            name = _name(model, node)
            if name and fnmatch.fnmatchcase(name, lie.operator):
                _rewritten(model, graph, node, lie)
                return model.proto.SerializeToString(), lie.key or f"{name}.0.forward"
    raise LookupError(f"no operator {lie.operator}")


def _name(model: Any, node: Any) -> str:
    """Return the name of an operator's calls in a dump; empty for a node that is no operator."""
    from telechat_moe.graph.tap_plan import cell_of, kind_of

    primitive = model.primitive(node)
    if primitive is None or node.domain.startswith("tap"):
        return ""
    path, _, backward = cell_of(node.domain)
    way = ["Gradients"] if backward else []
    return ".".join(["Primitive", *way, *path, kind_of(primitive)])


def _rewritten(model: Any, graph: Any, wrong: Any, lie: Lie) -> None:
    """Write a graph anew with a fault in one of its nodes."""
    name = wrong.output[0]
    places = {name: wrong} if lie.result is not None else {}
    if lie.result is not None and len(output_shapes(wrong)) > 1:
        numbers = {
            n.output[0]: next((value_of(a) for a in n.attribute if a.name == "value"), None)
            for n in graph.node
            if n.op_type == "Constant"
        }
        places = {
            n.output[0]: n
            for n in graph.node
            if (p := model.primitive(n)) is not None
            and p.op_type == "TupleGetItem"
            and n.input[0] == name
            and numbers.get(n.input[1]) == lie.result
        }
    shapes = {out: output_shapes(n)[0] for n in graph.node for out in n.output if output_shapes(n)}
    given = [(i.name, t) for i in graph.input for t in i.tensor]
    given += [(p.name, p) for p in graph.parameter]
    shapes |= {name: (tuple(t.dims), t.data_type) for name, t in given}
    nodes = type(graph)()
    fresh = _Fresh(model, nodes.node)
    for node in graph.node:
        shown = node.output[0] if node.output else None
        mine = shown == name
        if mine and lie.argument is not None:
            assert lie.edit is not None
            source = node.input[lie.argument]
            node.input[lie.argument] = lie.edit(Value(fresh, source, *shapes[source])).name
        if mine and lie.exchanged is not None:
            i, j = lie.exchanged
            node.input[i], node.input[j] = node.input[j], node.input[i]
        if mine and lie.settings:
            _set(model, node, lie.settings)
        if shown not in places:
            nodes.node.add().CopyFrom(node)
            continue
        assert lie.edit is not None
        right = nodes.node.add()
        right.CopyFrom(node)
        right.name = right.output[0] = fresh.editor.name("right")
        made = lie.edit(Value(fresh, right.name, *output_shapes(node)[0]))
        last = nodes.node[-1]
        assert last.output[0] == made.name
        last.name = last.output[0] = shown
    del graph.node[:]
    graph.node.extend(nodes.node)


def _set(model: Any, node: Any, settings: dict[str, Any]) -> None:
    """Give a node a primitive of its own with other attributes."""
    own = model.proto.primitives.add()
    own.CopyFrom(model.primitive(node))
    own.name = f"{own.name}_wrong"
    for attribute in own.attribute:
        if attribute.name in settings:
            value = settings[attribute.name]
            if isinstance(value, bool):
                attribute.i = int(value)
            else:
                attribute.f = value
    model.primitives[own.name] = own
    node.op_type = f"REF::{own.name}"


class _Watched:
    """A training step in the trainer that keeps its inputs."""

    def __init__(self, step: Any, inputs: list[tuple[Any, ...]]) -> None:
        self.step, self.inputs = step, inputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)

    def __call__(self, *inputs: Any) -> Any:
        self.inputs.append(inputs)
        return self.step(*inputs)


class RealStep:
    """The training step of a recipe for one device, compiled once, to be run with and without a fault."""

    def __init__(self, recipe: "Recipe", steps: int = 1) -> None:
        from mindspore.graph.api import _cell_graph_executor as executor

        from telechat_moe.graph.tap import tapped
        from telechat_moe.launch.sharded_run import record_steps
        from telechat_moe.ops import native
        from telechat_moe.train.trainer import Trainer

        native.load()
        trainer = Trainer(recipe, overwrite=True, plain=True)
        step = trainer.engine.train_step
        self.initial = {p.name: p.asnumpy().copy() for p in step.get_parameters()}
        self.inputs: list[tuple[Any, ...]] = []
        trainer.engine.train_step = _Watched(step, self.inputs)  # pyright: ignore[reportAttributeAccessIssue]
        record_steps(trainer, steps)
        phase, _ = executor.compile(step, *self.inputs[0], phase="export.mindir")
        mindir = executor._get_func_graph_proto(step, phase, "mind_ir")
        self.content, self.plan = tapped(mindir, str(native.path()))

    def run(
        self,
        lie: Lie | None = None,
        between: Callable[[int, dict[str, Any]], None] = lambda step, weights: None,
        inputs: Callable[[int, list[Any]], list[Any]] = lambda step, given: given,
    ) -> tuple[Dump, str]:
        """Run the steps from the first weights; return the dump, and the key of the operator with the wrong result.

        Args:
            lie: The fault; None: a right run.
            between: Given the number of the step that follows and the weights (MindSpore parameters by name).
            inputs: From the right inputs of a step to those that it is given.
        """
        from mindspore import Tensor, nn

        from telechat_moe.graph.tap import load
        from telechat_moe.ops.tap import recording
        from telechat_moe.tools.align.capture.ms_read import Reader

        content, key = lying(self.content, lie) if lie else (self.content, "")
        cell = nn.GraphCell(load(content))
        weights = {p.name.split(":")[-1]: p for p in cell.get_parameters()}
        for name, parameter in weights.items():
            if name in self.initial:
                parameter.set_data(Tensor(self.initial[name]))
        ranks: dict[tuple[int, int], RankDump] = {}
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            for step, given in enumerate(self.inputs):
                between(step, weights)
                taps = Path(folder, str(step))
                with recording(taps, "tensor"):
                    cell(*inputs(step, list(given)))
                calls = {
                    key: call.changed(_in_memory, results=True)
                    for key, call in Reader(self.plan, taps, "tensor").calls().items()
                }
                ranks[step, 0] = RankDump(step, 0, "mindspore", "tensor", "mix", calls)
        return Dump(Path("real"), ranks), key


def _in_memory(place: str, value: DumpValue) -> DumpValue:
    """Return an argument that no longer needs its file."""
    if not isinstance(value, TensorRecord) or value.read is None:
        return value
    values = np.array(value.load())
    return replace(value, read=lambda: values)
