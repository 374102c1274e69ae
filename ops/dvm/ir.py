"""The graph of a program: nodes with symbolic shapes, checked while they are built, and its flat form.

The flat form is a list of integers that travels as an attribute of a MindSpore node (``ops/csrc/dvm/ir.h``)::

    [magic, inputs, outputs, symbols, nodes, node...]
    node = [operation, dtype, args, arg..., rank, extent..., attributes, attribute..., line]

An extent is a number, or -1 - k for symbol k; a float attribute is the bit pattern of its double.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from telechat_moe.errors import BadInputError

MAGIC = 0x44564D31
MAX_RANK = 4
MAX_NODES = 4096

DTYPES = ("float32", "float16", "bfloat16", "int32", "int64", "bool")
DTYPE_CODE = {name: code for code, name in enumerate(DTYPES)}

LOAD, SCALAR, STORE = 0, 1, 2
SELECT, CAST = 60, 61
SUM, MAX, MIN = 70, 71, 72
BROADCAST, RESHAPE, GATHER_LOAD = 80, 81, 82

_UNARY = (
    *("neg", "abs", "sqrt", "rsqrt", "exp", "log", "reciprocal", "floor", "ceil", "round", "trunc"),
    *("tanh", "sigmoid", "erf", "isfinite", "logical_not", "sin", "cos"),
)
_BINARY = (
    *("add", "sub", "mul", "div", "pow", "maximum", "minimum", "equal", "not_equal"),
    *("less", "less_equal", "greater", "greater_equal", "logical_and", "logical_or"),
)
UNARY = {name: code for code, name in enumerate(_UNARY, 10)}
BINARY = {name: code for code, name in enumerate(_BINARY, 40)}
REDUCE = {"sum": SUM, "max": MAX, "min": MIN}
COMPARE = frozenset(range(47, 53))
OPCODES = {
    **UNARY,
    **BINARY,
    **REDUCE,
    "load": LOAD,
    "scalar": SCALAR,
    "store": STORE,
    "select": SELECT,
    "cast": CAST,
    "broadcast": BROADCAST,
    "reshape": RESHAPE,
    "gather_load": GATHER_LOAD,
}
NAMES = {code: name for name, code in OPCODES.items()}


class ProgramError(BadInputError):
    """An operation cannot be built; the message says which, where, what was found and what was expected."""


class ProgramNode(NamedTuple):
    """One operation.

    Attributes:
        op: Code of the operation.
        dtype: Name; what a load reads and a store writes. Arithmetic is float32 (int32, bool).
        args: Earlier nodes.
        dims: Extents; -1 - k is symbol k.
        attrs: Integers: input, output, dimensions, or the bits of a float.
        line: Source line that built it.
    """

    op: int
    dtype: str
    args: tuple[int, ...]
    dims: tuple[int, ...]
    attrs: tuple[int, ...]
    line: int


class DvmProgram:
    """A finished graph.

    Attributes:
        nodes: In an order in which they can run.
        inputs: Number of inputs, each loaded once (a table that is gathered from, too).
        outputs: Number of outputs, each stored once.
        symbols: Names of the symbols.
        file: Source file of the lines.
    """

    __slots__ = ("_ints", "file", "inputs", "nodes", "outputs", "symbols")

    def __init__(
        self,
        nodes: Sequence[ProgramNode],
        inputs: int,
        outputs: int,
        symbols: Sequence[str],
        file: str = "?",
    ) -> None:
        self.nodes, self.inputs, self.outputs = list(nodes), inputs, outputs
        self.symbols, self.file = list(symbols), file
        self._ints: list[int] | None = None

    def to_ints(self) -> list[int]:
        """Return the flat form: a list of integers, as the opening of this file describes it."""
        if self._ints is None:
            flat = [MAGIC, self.inputs, self.outputs, len(self.symbols), len(self.nodes)]
            code = DTYPE_CODE
            for op, dtype, args, dims, attrs, line in self.nodes:
                flat += (op, code[dtype], len(args), *args, len(dims), *dims)
                flat += (len(attrs), *attrs, line)
            self._ints = flat
        return self._ints

    @classmethod
    def from_ints(cls, flat: Sequence[int]) -> DvmProgram:
        """Return the program of a flat form; symbols are named ``s0``, ``s1``, ...

        Raises:
            ProgramError: The list is no program.
        """
        if len(flat) < 5 or flat[0] != MAGIC:
            raise ProgramError("not a DVM program: it does not begin with the magic number")
        _, inputs, outputs, symbols, count = flat[:5]
        position, nodes = 5, []

        def take(n: int) -> tuple[int, ...]:
            nonlocal position
            if n < 0 or position + n > len(flat):
                raise ProgramError(f"the program ends inside node {len(nodes)}")
            position += n
            return tuple(flat[position - n : position])

        for _ in range(count):
            op, dtype, args = take(3)
            arguments = take(args)
            dims = take(take(1)[0])
            attrs = take(take(1)[0])
            nodes.append(ProgramNode(op, DTYPES[dtype], arguments, dims, attrs, take(1)[0]))
        return cls(nodes, inputs, outputs, [f"s{k}" for k in range(symbols)])

    def load_of(self, number: int) -> ProgramNode:
        """Return the node that loads an input."""
        return next(n for n in self.nodes if n.op == LOAD and n.attrs[0] == number)

    def store_of(self, number: int) -> ProgramNode:
        """Return the node that stores an output."""
        return next(n for n in self.nodes if n.op == STORE and n.attrs[0] == number)

    def __str__(self) -> str:
        lines = []
        for i, n in enumerate(self.nodes):
            shape = ", ".join(str(d) if d >= 0 else self.symbols[-1 - d] for d in n.dims)
            args = ", ".join(f"%{a}" for a in n.args)
            extra = ""
            if n.op == SCALAR:
                extra = f" {bits_float(n.attrs[0]):g}"
            elif n.attrs:
                extra = f" {list(n.attrs)}"
            lines.append(f"%{i} = {NAMES[n.op]}({args}){extra} : {n.dtype}[{shape}]")
        return "\n".join(lines)


def value_type(dtype: str) -> str:
    """Return the type of arithmetic on a value that memory holds as ``dtype``."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def float_bits(x: float) -> int:
    """Return the bit pattern of a double as a signed integer."""
    return struct.unpack("<q", struct.pack("<d", x))[0]


def bits_float(x: int) -> float:
    """Return the double of a bit pattern."""
    return struct.unpack("<d", struct.pack("<q", x))[0]
