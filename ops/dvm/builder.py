"""Build programs in Python, with the names of the upstream DVM API.

>>> from telechat_moe.ops import dvm
>>> def rms_norm(k, x, w):
...     mean = k.sum(x * x, -1) / k.extent(x, -1)
...     k.store(x * k.rsqrt(mean + 1e-6) * w)
>>> program = dvm.build(rms_norm, ("T", 1024), (1024,))
>>> program.symbols
['T']
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from telechat_moe.ops.dvm import ir
from telechat_moe.ops.dvm.ir import DvmProgram, ProgramError, ProgramNode

SymbolicShape = Sequence[int | str]

_new = tuple.__new__  # of a named tuple in a third of the time
_KIND = {dtype: ir.value_type(dtype) for dtype in ir.DTYPES}
_NUMBERS = ("float32", "int32")
_TYPES = {  # what an operation takes, if it is not numbers (binary) or float32 (unary)
    "logical_not": ("bool",),
    "logical_and": ("bool",),
    "logical_or": ("bool",),
    "div": ("float32",),
    "pow": ("float32",),
    "neg": _NUMBERS,
    "abs": _NUMBERS,
}
# operation -> code, types it takes, type of its result if not theirs
_UNARY = {
    name: (op, _TYPES.get(name, ("float32",)), "bool" if name == "isfinite" else "")
    for name, op in ir.UNARY.items()
}
_BINARY = {
    name: (op, _TYPES.get(name, _NUMBERS), "bool" if op in ir.COMPARE else "")
    for name, op in ir.BINARY.items()
}


def _operators(
    name: str,
) -> tuple[
    Callable[[ProgramValue, Any], ProgramValue], Callable[[ProgramValue, Any], ProgramValue]
]:
    """Return the methods that record an operation with the value on the left and on the right."""

    def left(self: ProgramValue, other: Any) -> ProgramValue:
        return self.builder._binary(name, self, other)

    def right(self: ProgramValue, other: Any) -> ProgramValue:
        return self.builder._binary(name, other, self)

    return left, right


class ProgramValue:
    """A node of a program being built; supports arithmetic and comparison operators."""

    __slots__ = ("builder", "dims", "dtype", "index")

    def __init__(self, builder: Builder, index: int, dtype: str, dims: tuple[int, ...]) -> None:
        self.builder, self.index, self.dtype, self.dims = builder, index, dtype, dims

    __add__, __radd__ = _operators("add")
    __sub__, __rsub__ = _operators("sub")
    __mul__, __rmul__ = _operators("mul")
    __truediv__, __rtruediv__ = _operators("div")
    __pow__ = _operators("pow")[0]
    __lt__ = _operators("less")[0]
    __le__ = _operators("less_equal")[0]
    __gt__ = _operators("greater")[0]
    __ge__ = _operators("greater_equal")[0]

    def __neg__(self) -> ProgramValue:
        return self.builder._unary("neg", self)

    def __bool__(self) -> bool:
        raise ProgramError("a value of a program has no truth while it is built; use k.select")


class Builder:
    """Collect the nodes of a program; the ``k`` of a kernel function."""

    if TYPE_CHECKING:  # operations are added below, from the tables of ir.py

        def __getattr__(self, name: str) -> Callable[..., ProgramValue]: ...

    def __init__(self, file: str = "?") -> None:
        self.nodes: list[ProgramNode] = []
        self.symbols: dict[str, int] = {}
        self.inputs = self.outputs = 0
        self.file = file
        self._scalars: dict[tuple[str, float], int] = {}

    # ------------------------------------------------------------------ inputs and outputs

    def load(self, shape: SymbolicShape, dtype: str = "float32") -> ProgramValue:
        """Return a new input; a text extent is a symbol, equal wherever its name is."""
        line = _line()
        if dtype not in ir.DTYPE_CODE:
            self._refuse("load", line, f"data type {dtype!r}", f"one of {', '.join(ir.DTYPES)}")
        if len(shape) > ir.MAX_RANK:
            self._refuse("load", line, f"rank {len(shape)}", f"at most {ir.MAX_RANK}")
        dims = tuple(self._extent(x, line) for x in shape)
        self.inputs += 1
        return self._node(ir.LOAD, dtype, (), dims, (self.inputs - 1,), line)

    def scalar(self, value: float, dtype: str = "float32") -> ProgramValue:
        """Return a constant."""
        key = (dtype, value)
        index = self._scalars.get(key)
        if index is not None and value == value:
            return ProgramValue(self, index, dtype, ())
        bits = ir.float_bits(float(value))
        node = self._node(ir.SCALAR, dtype, (), (), (bits,), _line())
        self._scalars[key] = node.index
        return node

    def store(self, x: ProgramValue, dtype: str | None = None) -> None:
        """Make a value the next output, in its own type or another float type."""
        line = _line()
        dtype = x.dtype if dtype is None else dtype
        if ir.value_type(dtype) != ir.value_type(x.dtype):
            self._refuse("store", line, f"a {x.dtype} value", f"a cast to {dtype} first")
        self.outputs += 1
        self._node(ir.STORE, dtype, (x.index,), x.dims, (self.outputs - 1,), line)

    def gather_load(self, table: ProgramValue, index: ProgramValue) -> ProgramValue:
        """Return the rows ``table[index]``; both are inputs, the index int32 or int64."""
        line = _line()
        if self.nodes[table.index].op != ir.LOAD or self.nodes[index.index].op != ir.LOAD:
            self._refuse("gather_load", line, "a computed table or index", "loads")
        if index.dtype not in ("int32", "int64"):
            self._refuse("gather_load", line, f"a {index.dtype} index", "int32 or int64")
        dims = (*index.dims, *table.dims[1:])
        if not table.dims or len(dims) > ir.MAX_RANK:
            self._refuse("gather_load", line, f"rank {len(dims)}", f"at most {ir.MAX_RANK}")
        number = self.nodes[table.index].attrs[0]
        dtype = ir.value_type(table.dtype)
        return self._node(ir.GATHER_LOAD, dtype, (index.index,), dims, (number,), line)

    # ------------------------------------------------------------------ operations

    def select(self, condition: ProgramValue, x: Any, y: Any) -> ProgramValue:
        """Return x where the condition holds, else y."""
        line = _line()
        first = x if isinstance(x, ProgramValue) else y
        dtype = ir.value_type(first.dtype) if isinstance(first, ProgramValue) else "float32"
        x, y = self._value(x, dtype), self._value(y, dtype)
        if condition.dtype != "bool":
            self._refuse("select", line, f"a {condition.dtype} condition", "bool")
        if ir.value_type(x.dtype) != ir.value_type(y.dtype):
            self._refuse("select", line, f"{x.dtype} and {y.dtype}", "one type")
        dims = self._joint("select", line, condition.dims, x.dims, y.dims)
        args = tuple(self._spread(v, dims, line).index for v in (condition, x, y))
        return self._node(ir.SELECT, ir.value_type(x.dtype), args, dims, (), line)

    def cast(self, x: ProgramValue, dtype: str) -> ProgramValue:
        """Return the value in another type; to float16 and bfloat16 it is rounded."""
        line = _line()
        if dtype not in ir.DTYPE_CODE or dtype == "int64" or x.dtype == "int64":
            self._refuse(
                "cast", line, f"{x.dtype} to {dtype}", "float32, int32, bool or a half type"
            )
        if x.dtype == "int32" and dtype not in ("float32", "int32"):
            self._refuse("cast", line, f"int32 to {dtype}", "a cast to float32 first")
        if x.dtype == dtype:
            return x
        return self._node(ir.CAST, dtype, (x.index,), x.dims, (), line)

    def broadcast(self, x: ProgramValue, shape: SymbolicShape) -> ProgramValue:
        """Return x stretched to ``shape``, as NumPy does."""
        line = _line()
        dims = tuple(self._extent(d, line) for d in shape)
        if self._joint("broadcast", line, x.dims, dims) != dims:
            self._refuse(
                "broadcast", line, self._text(x.dims), f"a shape within {self._text(dims)}"
            )
        return self._spread(x, dims, line)

    def reshape(self, x: ProgramValue, shape: SymbolicShape) -> ProgramValue:
        """Return x in another shape with as many elements (of symbols: the same symbols)."""
        line = _line()
        dims = tuple(self._extent(d, line) for d in shape)
        if _factors(dims) != _factors(x.dims):
            self._refuse("reshape", line, self._text(x.dims), f"the elements of {self._text(dims)}")
        if len(dims) > ir.MAX_RANK:
            self._refuse("reshape", line, f"rank {len(dims)}", f"at most {ir.MAX_RANK}")
        if dims == x.dims:
            return x
        return self._node(ir.RESHAPE, ir.value_type(x.dtype), (x.index,), dims, (), line)

    def extent(self, x: ProgramValue, dim: int) -> int:
        """Return a constant extent.

        Raises:
            ProgramError: It is a symbol: its number is not known while the program is built.
        """
        d = x.dims[dim]
        if d < 0:
            expected = "a constant; pass the number as an input"
            self._refuse("extent", _line(), f"the symbol {self._name(d)}", expected)
        return d

    # ------------------------------------------------------------------ the rest

    def finish(self) -> DvmProgram:
        """Return the program.

        Raises:
            ProgramError: Nothing is stored, or there are too many nodes.
        """
        if not self.outputs:
            raise ProgramError(f"{self.file}: the program stores nothing; end it with k.store")
        if len(self.nodes) > ir.MAX_NODES:
            raise ProgramError(
                f"{self.file}: {len(self.nodes)} nodes, at most {ir.MAX_NODES}; split the program"
            )
        return DvmProgram(self.nodes, self.inputs, self.outputs, list(self.symbols), self.file)

    def _unary(self, name: str, x: ProgramValue) -> ProgramValue:
        line = _line()
        op, types, result = _UNARY[name]
        kind = _KIND[x.dtype]
        if kind not in types:
            self._refuse(name, line, x.dtype, " or ".join(types))
        return self._node(op, result or kind, (x.index,), x.dims, (), line)

    def _binary(self, name: str, x: Any, y: Any) -> ProgramValue:
        line = _line()
        op, types, result = _BINARY[name]
        if not isinstance(x, ProgramValue):
            x = self._value(x, _KIND[y.dtype])
        elif not isinstance(y, ProgramValue):
            y = self._value(y, _KIND[x.dtype])
        kind = _KIND[x.dtype]
        if kind != _KIND[y.dtype]:
            self._refuse(name, line, f"{x.dtype} and {y.dtype}", "one type; cast one")
        if kind not in types:
            self._refuse(name, line, x.dtype, " or ".join(types))
        dims = x.dims
        if dims != y.dims:
            dims = self._joint(name, line, dims, y.dims)
            if x.dims != dims:
                x = self._spread(x, dims, line)
            if y.dims != dims:
                y = self._spread(y, dims, line)
        return self._node(op, result or kind, (x.index, y.index), dims, (), line)

    def _reduce(
        self, name: str, x: ProgramValue, dims: Any = None, keepdims: bool = True
    ) -> ProgramValue:
        line = _line()
        if ir.value_type(x.dtype) != "float32":
            self._refuse(name, line, x.dtype, "float32")
        rank = len(x.dims)
        chosen = range(rank) if dims is None else [dims] if isinstance(dims, int) else dims
        for d in chosen:
            if not -rank <= d < rank:
                self._refuse(
                    name, line, f"dimension {d} of {self._text(x.dims)}", "one that is there"
                )
        axes = tuple(sorted({d % rank for d in chosen}))
        if not axes:
            self._refuse(name, line, "no dimension to reduce", "one or more")
        reduced = tuple(1 if i in axes else d for i, d in enumerate(x.dims))
        attrs = (int(keepdims), *axes)
        y = self._node(ir.REDUCE[name], "float32", (x.index,), reduced, attrs, line)
        if keepdims:
            return y
        return self.reshape(y, tuple(d for i, d in enumerate(x.dims) if i not in axes))

    def _node(
        self,
        op: int,
        dtype: str,
        args: tuple[int, ...],
        dims: tuple[int, ...],
        attrs: tuple[int, ...],
        line: int,
    ) -> ProgramValue:
        nodes = self.nodes
        nodes.append(_new(ProgramNode, (op, dtype, args, dims, attrs, line)))
        return ProgramValue(self, len(nodes) - 1, dtype, dims)

    def _value(self, x: Any, dtype: str) -> ProgramValue:
        return x if isinstance(x, ProgramValue) else self.scalar(x, dtype)

    def _spread(self, x: ProgramValue, dims: tuple[int, ...], line: int) -> ProgramValue:
        if x.dims == dims:
            return x
        return self._node(ir.BROADCAST, ir.value_type(x.dtype), (x.index,), dims, (), line)

    def _joint(self, name: str, line: int, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        if len(shapes) == 2 and not all(shapes):  # a single number stretches to anything
            return shapes[0] or shapes[1]
        rank = max(map(len, shapes))
        dims = [1] * rank
        for shape in shapes:
            for i, d in enumerate(shape, rank - len(shape)):
                if dims[i] == 1:
                    dims[i] = d
                elif d not in (1, dims[i]):
                    texts = " and ".join(self._text(s) for s in shapes)
                    self._refuse(name, line, texts, "shapes that broadcast (equal symbols or 1)")
        return tuple(dims)

    def _extent(self, x: int | str, line: int) -> int:
        if isinstance(x, str):
            return -1 - self.symbols.setdefault(x, len(self.symbols))
        if x < -len(self.symbols):
            self._refuse("shape", line, f"extent {x}", "a number or a symbol's name")
        return x

    def _name(self, d: int) -> str:
        return str(d) if d >= 0 else list(self.symbols)[-1 - d]

    def _text(self, dims: tuple[int, ...]) -> str:
        return "[" + ", ".join(self._name(d) for d in dims) + "]"

    def _refuse(self, op: str, line: int, actual: str, expected: str) -> None:
        raise ProgramError(f"{self.file}:{line}: {op}: found {actual}, expected {expected}")


def _factors(dims: tuple[int, ...]) -> tuple[int, list[int]]:
    return math.prod(d for d in dims if d >= 0), sorted(d for d in dims if d < 0)


def _line() -> int:
    """Return the line of the nearest frame outside this file."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_lineno


def _add_operations() -> None:
    def method(record: Callable[..., ProgramValue], name: str) -> Callable[..., ProgramValue]:
        def operation(self: Builder, *args: Any, **options: Any) -> ProgramValue:
            return record(self, name, *args, **options)

        operation.__name__ = name
        operation.__doc__ = f"``{name}``, element by element or over dimensions, as in NumPy."
        return operation

    recorders = (
        (Builder._unary, ir.UNARY),
        (Builder._binary, ir.BINARY),
        (Builder._reduce, ir.REDUCE),
    )
    for record, names in recorders:
        for name in names:
            setattr(Builder, name, method(record, name))


_add_operations()


def build(
    function: Callable[..., None], *inputs: tuple[SymbolicShape, str] | SymbolicShape
) -> DvmProgram:
    """Trace ``function(k, *values)`` into a program.

    Args:
        function: Calls the methods of ``k`` on its values and stores results.
        *inputs: Shape of each input, or ``(shape, dtype)``.

    Raises:
        ProgramError: An operation cannot be built; names it and its line.
    """
    k = Builder(function.__code__.co_filename)
    values = []
    for spec in inputs:
        if len(spec) == 2 and isinstance(spec[0], (tuple, list)):
            values.append(k.load(spec[0], spec[1]))  # type: ignore[arg-type]
        else:
            values.append(k.load(spec))  # type: ignore[arg-type]
    function(k, *values)
    return k.finish()
