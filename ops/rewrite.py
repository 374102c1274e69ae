"""Fuse cells made of elementary primitives into programs of the virtual machine, without hand-written operators.

:func:`fuse_cells` goes through a built model. It calls a cell's ``construct`` with recorders in place of its named
primitives; if all of them are operations of the machine, the cell is replaced by one that runs the program, and the
program derived from it backward. Otherwise it looks into the cells inside. Shapes come from the names of the
arguments: ``x_TH`` has the symbols T and H.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from telechat_moe.ops import dvm
from telechat_moe.ops.dvm import Builder, ProgramError, ProgramValue, ir


class ExaminedCell(NamedTuple):
    """A cell that :func:`fuse_cells` examined.

    Attributes:
        name: Path of the cell in the model.
        cell: Name of its class.
        program: The program that replaces it; None if it is not replaced.
        reason: Why it is not replaced, or what was fused.
    """

    name: str
    cell: str
    program: dvm.DvmProgram | None
    reason: str


class _UnsupportedError(Exception):
    """The cell holds something that is no operation of the machine."""


def fuse_cells(model: nn.Cell) -> list[ExaminedCell]:
    """Replace what can be replaced inside ``model``, and say what was done with each cell.

    Parameters keep their names; call it before the model is compiled.
    """
    before = [p.name for p in model.get_parameters()]
    regions: list[ExaminedCell] = []
    _descend(model, "", regions)
    after = [p.name for p in model.get_parameters()]
    assert sorted(before) == sorted(after), "fusion changed the names of parameters"
    return regions


def explain(regions: list[ExaminedCell]) -> str:
    """Return one line a region that was fused, then the kinds of cells that were not, with reasons."""
    lines = [f"fused {r.name} ({r.cell}): {r.reason}" for r in regions if r.program is not None]
    plain = sorted({f"kept {r.cell}: {r.reason}" for r in regions if r.program is None})
    return "\n".join([*lines, *plain])


def _descend(parent: nn.Cell, path: str, regions: list[ExaminedCell]) -> None:
    for name, child in list(parent._cells.items()):
        if child is None:
            continue
        child_path = f"{path}.{name}" if path else name
        try:
            program, parameters = _trace(child)
        except (_UnsupportedError, ProgramError) as error:
            regions.append(ExaminedCell(child_path, type(child).__name__, None, str(error)))
            _descend(child, child_path, regions)
            continue
        stages = len(dvm.Compiled(program).explain()["stages"])
        work = sum(n.op not in (ir.LOAD, ir.STORE, ir.SCALAR) for n in program.nodes)
        reason = f"{work} operations in {stages} stage{'s' if stages > 1 else ''}"
        regions.append(ExaminedCell(child_path, type(child).__name__, program, reason))
        parent._cells[name] = FusedRegion(child, program, parameters)


# ---------------------------------------------------------------------- recording


class _Recorded:
    """A value while a construct is recorded; has what a construct uses of a tensor."""

    def __init__(self, value: ProgramValue) -> None:
        self.value = value
        self.dtype = ms.float32


class _Self:
    """A cell whose primitives record."""

    def __init__(self, cell: nn.Cell, tracer: _Tracer) -> None:
        self._cell, self._tracer = cell, tracer

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._cell, name)
        if isinstance(attribute, Parameter):
            return self._tracer.parameter(attribute)
        if isinstance(attribute, ops.Primitive):
            return lambda *args: self._tracer.operation(attribute, args)
        if isinstance(attribute, nn.Cell):
            construct: Any = type(attribute).construct  # called with a recorder for the cell
            return lambda *args: construct(_Self(attribute, self._tracer), *args)
        return attribute


class _Tracer:
    def __init__(self) -> None:
        self.k = Builder("construct")
        self.parameters: list[Parameter] = []
        self._loaded: dict[int, _Recorded] = {}

    def parameter(self, p: Parameter) -> _Recorded:
        if id(p) not in self._loaded:
            if p.dtype != ms.float32:
                raise _UnsupportedError(f"a {p.dtype} parameter")
            self.parameters.append(p)
            self._loaded[id(p)] = _Recorded(self.k.load(p.shape))
        return self._loaded[id(p)]

    def operation(self, primitive: ops.Primitive, args: tuple[Any, ...]) -> _Recorded:
        make = OPERATIONS.get(primitive.name)
        if make is None:
            raise _UnsupportedError(f"{primitive.name} is no operation of the machine")
        return _Recorded(make(self.k, primitive, *[self._operand(a) for a in args]))

    def _operand(self, x: Any) -> Any:
        if isinstance(x, _Recorded):
            return x.value
        if isinstance(x, Tensor):
            if x.size != 1:
                raise _UnsupportedError(f"a constant of shape {tuple(x.shape)}")
            return float(x.asnumpy().reshape(-1)[0])
        return x


def _mean(k: Builder, primitive: ops.Primitive, x: ProgramValue, axis: Any) -> ProgramValue:
    count = math.prod(k.extent(x, a) for a in _axes(x, axis))
    return _reduce("sum")(k, primitive, x, axis) * (1.0 / count)


def _axes(x: ProgramValue, axis: Any) -> list[int]:
    axes = [axis] if isinstance(axis, int) else list(axis)
    return [a % len(x.dims) for a in axes or range(len(x.dims))]


def _reduce(name: str) -> Callable[..., ProgramValue]:
    def make(k: Builder, primitive: ops.Primitive, x: ProgramValue, axis: Any = ()) -> ProgramValue:
        return getattr(k, name)(x, _axes(x, axis), keepdims=bool(primitive.keep_dims))

    return make


def _cast(k: Builder, primitive: ops.Primitive, x: ProgramValue, dtype: Any) -> ProgramValue:
    if dtype != ms.float32 or x.dtype != "float32":
        raise _UnsupportedError(f"a cast from {x.dtype} to {dtype}")
    return x


def _softmax(k: Builder, primitive: ops.Primitive, x: ProgramValue) -> ProgramValue:
    axis = primitive.axis if isinstance(primitive.axis, int) else primitive.axis[0]
    e = k.exp(x - k.max(x, axis))
    return e / k.sum(e, axis)


def _calls_method(name: str) -> Callable[..., ProgramValue]:
    return lambda k, primitive, *args: getattr(k, name)(*args)


OPERATIONS: dict[str, Callable[..., ProgramValue]] = {
    "Cast": _cast,
    "Square": lambda k, primitive, x: x * x,
    "SiLU": lambda k, primitive, x: x * k.sigmoid(x),
    "ReduceMean": _mean,
    "ReduceSum": _reduce("sum"),
    "ReduceMax": _reduce("max"),
    "ReduceMin": _reduce("min"),
    "Softmax": _softmax,
    "RealDiv": _calls_method("div"),
    "GreaterEqual": _calls_method("greater_equal"),
    "LessEqual": _calls_method("less_equal"),
    **{
        primitive: _calls_method(primitive.lower())
        for primitive in (
            *("Abs", "Add", "Cos", "Div", "Equal", "Erf", "Exp", "Greater", "Less", "Log"),
            *("Maximum", "Minimum", "Mul", "Neg", "Pow", "Reciprocal", "Rsqrt", "Select"),
            *("Sigmoid", "Sin", "Sqrt", "Sub", "Tanh"),
        )
    },
}


def _trace(cell: nn.Cell) -> tuple[dvm.DvmProgram, list[Parameter]]:
    """Return the program of a cell, and the parameters that are its last inputs."""
    tracer = _Tracer()
    widths = {p.shape for _, p in cell.parameters_and_names() if len(p.shape) == 1}
    construct: Any = type(cell).construct  # called with a recorder in place of the cell
    names = list(inspect.signature(construct).parameters)[1:]
    if not names or len(names) > 3:
        raise _UnsupportedError(f"{len(names)} arguments")
    values = []
    for name in names:
        shape: list[int | str] = list(name.rpartition("_")[2])
        if "_" not in name or not all(c.isupper() or c.isdigit() for c in map(str, shape)):
            raise _UnsupportedError(f"the argument {name} does not name its shape")
        if len(widths) == 1:  # a weight as wide as the rows
            shape[-1] = next(iter(widths))[0]
        values.append(_Recorded(tracer.k.load(shape)))
    try:
        result = construct(_Self(cell, tracer), *values)
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise _UnsupportedError(f"it does more than call primitives ({error})") from error
    results = result if isinstance(result, tuple) else (result,)
    if not all(isinstance(r, _Recorded) for r in results) or len(tracer.k.nodes) < 4:
        raise _UnsupportedError("there is nothing to fuse")
    for r in results:
        tracer.k.store(r.value)
    program = tracer.k.finish()
    if program.inputs > 4:
        raise _UnsupportedError(f"{program.inputs} inputs with parameters, at most 4")
    return program, tracer.parameters


# ---------------------------------------------------------------------- running


class FusedRegion(nn.Cell):
    """Replacement of a cell, which keeps its parameters: its program, with the parameters as last inputs."""

    def __init__(self, cell: nn.Cell, program: dvm.DvmProgram, parameters: list[Parameter]) -> None:
        super().__init__(auto_prefix=False)
        self.cell = cell
        self.inner = _INNER[program.inputs - 1](program)
        self.own = tuple(parameters)
        self.reshape = ops.Reshape()
        self.rank = len(program.load_of(0).dims)

    def construct(self, *inputs: Tensor) -> Any:
        """Return what the cell would; rows of higher rank (``[G, R, F]``) are rows all the same."""
        shape = inputs[0].shape
        if len(shape) == self.rank:
            return self.inner(*inputs, *self.own)
        rows = ()
        for x in inputs:
            rows += (self.reshape(x, (-1, x.shape[-1])),)
        return self.reshape(self.inner(*rows, *self.own), shape)


class _Inner(nn.Cell):
    """A program and its gradient; MindSpore wants the inputs of ``bprop`` one by one."""

    def __init__(self, program: dvm.DvmProgram) -> None:
        super().__init__(auto_prefix=False)
        self.many = program.outputs > 1
        self.forward = dvm.custom_op(program)
        self.backward = dvm.custom_op(dvm.grad(program))

    def gradients(self, inputs, dout):
        return self.backward(*inputs, *dout) if self.many else self.backward(*inputs, dout)


class _Inner1(_Inner):
    def construct(self, a):
        return self.forward(a)

    def bprop(self, a, out, dout):
        return (self.gradients((a,), dout),)


class _Inner2(_Inner):
    def construct(self, a, b):
        return self.forward(a, b)

    def bprop(self, a, b, out, dout):
        return self.gradients((a, b), dout)


class _Inner3(_Inner):
    def construct(self, a, b, c):
        return self.forward(a, b, c)

    def bprop(self, a, b, c, out, dout):
        return self.gradients((a, b, c), dout)


class _Inner4(_Inner):
    def construct(self, a, b, c, d):
        return self.forward(a, b, c, d)

    def bprop(self, a, b, c, d, out, dout):
        return self.gradients((a, b, c, d), dout)


_INNER: tuple[type[_Inner], ...] = (_Inner1, _Inner2, _Inner3, _Inner4)
