"""Reverse-mode differentiation on the graph: the backward program of a program."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby

from telechat_moe.ops.dvm import ir
from telechat_moe.ops.dvm.builder import Builder, ProgramValue
from telechat_moe.ops.dvm.ir import DvmProgram, ProgramError, ProgramNode


class _Backward(Builder):
    """A builder whose nodes carry the lines of the forward program."""

    def __init__(self, program: DvmProgram) -> None:
        super().__init__(program.file)
        self.symbols = {name: i for i, name in enumerate(program.symbols)}
        self.at = 0
        self.values: list[ProgramValue] = []  # of the forward program's nodes
        self.adjoint: dict[int, ProgramValue] = {}

    def give(self, node: int, g: ProgramValue) -> None:
        """Add to the gradient of a node."""
        self.adjoint[node] = self.add(self.adjoint[node], g) if node in self.adjoint else g

    def _node(self, op, dtype, args, dims, attrs, line):
        return super()._node(op, dtype, args, dims, attrs, self.at)


def grad(program: DvmProgram, wrt: Sequence[int] | None = None) -> DvmProgram:
    """Return the backward program.

    Its inputs are those of ``program``, then a cotangent for each float output, shaped like it; its outputs are
    the gradients of the sum of outputs times cotangents, one for each input in ``wrt`` (None: all floats), in the input's type.
    Intermediate values are recomputed, which costs less than reading them from memory.

    Raises:
        ProgramError: A table that is gathered from, or an input that is no float, is in ``wrt``.
    """
    k = _Backward(program)
    floats = [i for i in range(program.inputs) if _is_float(program.load_of(i).dtype)]
    wrt = floats if wrt is None else list(wrt)
    for i in wrt:
        if i not in floats:
            raise ProgramError(f"input {i} is {program.load_of(i).dtype}: it has no gradient")
    _recompute(k, program)
    for number in range(program.outputs):
        store = program.store_of(number)
        if _is_float(store.dtype):
            k.give(store.args[0], _input(k, store, "float32"))
    for i in range(len(program.nodes) - 1, -1, -1):
        node = program.nodes[i]
        if i in k.adjoint and node.op not in (ir.LOAD, ir.STORE):
            k.at = node.line
            if node.op == ir.GATHER_LOAD:
                if node.attrs[0] in wrt:
                    raise ProgramError(
                        f"{program.file}:{node.line}: gather_load: found a table to differentiate by, "
                        "expected another input: its gradient would be a scatter"
                    )
                continue
            _propagate(k, node, k.values[i], k.adjoint[i])
    for number in wrt:
        load = program.load_of(number)
        index = program.nodes.index(load)
        k.at = load.line
        g = k.adjoint.get(index)
        if g is None:
            g = k._spread(k.scalar(0.0), load.dims, load.line)
        k.store(g, load.dtype)
    return _without_dead(k.finish())


def _is_float(dtype: str) -> bool:
    return ir.value_type(dtype) == "float32"


def _input(k: Builder, like: ProgramNode, dtype: str) -> ProgramValue:
    k.inputs += 1
    return k._node(ir.LOAD, dtype, (), like.dims, (k.inputs - 1,), like.line)


def _recompute(k: _Backward, program: DvmProgram) -> None:
    values = k.values
    for node in program.nodes:
        k.at = node.line
        if node.op == ir.STORE:
            values.append(values[node.args[0]])
            continue
        args = tuple(values[a].index for a in node.args)
        values.append(k._node(node.op, node.dtype, args, node.dims, node.attrs, node.line))
    k.inputs = program.inputs


GradientRule = Callable[[Builder, ProgramValue, ProgramValue, ProgramValue], ProgramValue]
UNARY: dict[str, GradientRule] = {
    "neg": lambda k, x, y, g: -g,
    "abs": lambda k, x, y, g: k.select(x > 0, g, k.select(x < 0, -g, 0.0)),
    "sqrt": lambda k, x, y, g: g * 0.5 / y,
    "rsqrt": lambda k, x, y, g: g * -0.5 * y * y * y,
    "exp": lambda k, x, y, g: g * y,
    "log": lambda k, x, y, g: g / x,
    "reciprocal": lambda k, x, y, g: -g * y * y,
    "tanh": lambda k, x, y, g: g * (1.0 - y * y),
    "sigmoid": lambda k, x, y, g: g * y * (1.0 - y),
    "erf": lambda k, x, y, g: g * (2 / math.sqrt(math.pi)) * k.exp(-x * x),
    "sin": lambda k, x, y, g: g * k.cos(x),
    "cos": lambda k, x, y, g: -g * k.sin(x),
}


def _propagate(k: _Backward, node: ProgramNode, y: ProgramValue, g: ProgramValue) -> None:
    name, add, args = ir.NAMES[node.op], k.give, [k.values[a] for a in node.args]
    if name in ir.BINARY:
        _binary(k, name, node, y, g)
    elif name in UNARY:
        add(node.args[0], UNARY[name](k, args[0], y, g))
    elif name in ir.REDUCE:
        x = args[0]
        spread = k._spread(g, x.dims, node.line)
        if name == "sum":
            add(node.args[0], spread)
        else:  # equal extremes share the gradient
            hit = k.select(k.equal(x, y), 1.0, 0.0)
            add(node.args[0], spread * hit / k.sum(hit, node.attrs[1:]))
    elif node.op == ir.SELECT:
        for i, (yes, no) in ((1, (g, 0.0)), (2, (0.0, g))):
            if _is_float(args[i].dtype):
                add(node.args[i], k.select(args[0], yes, no))
    elif node.op == ir.CAST:
        if _is_float(args[0].dtype) and _is_float(node.dtype):
            add(node.args[0], g)
    elif node.op == ir.RESHAPE:
        add(node.args[0], k._node(ir.RESHAPE, "float32", (g.index,), args[0].dims, (), node.line))
    elif node.op == ir.BROADCAST:
        add(node.args[0], _unspread(k, g, args[0].dims, node.line))


def _binary(k: _Backward, name: str, node: ProgramNode, y: ProgramValue, g: ProgramValue) -> None:
    i, j = node.args
    a, b, add = k.values[i], k.values[j], k.give
    if not _is_float(node.dtype):
        return
    if name in ("add", "sub"):
        add(i, g)
        add(j, g if name == "add" else -g)
    elif name == "mul" and i == j:
        add(i, g * 2.0 * a)
    elif name == "mul":
        add(i, g * b)
        add(j, g * a)
    elif name == "div":
        add(i, g / b)
        add(j, -g * y / b)
    elif name == "pow":
        add(i, g * b * k.pow(a, b - 1.0))
        add(j, k.select(a > 0, g * y * k.log(k.select(a > 0, a, 1.0)), 0.0))
    elif name in ("maximum", "minimum"):  # equal values share the gradient
        first = a > b if name == "maximum" else a < b
        half = k.select(k.equal(a, b), 0.5, 0.0)
        share = k.select(first, 1.0, half)
        add(i, g * share)
        add(j, g * (1.0 - share))


def _unspread(k: Builder, g: ProgramValue, dims: tuple[int, ...], line: int) -> ProgramValue:
    lead = len(g.dims) - len(dims)
    padded = (1,) * lead + dims
    axes = tuple(i for i, d in enumerate(g.dims) if padded[i] == 1 and d != 1)
    for run in _runs(axes):  # one run of dimensions at a time: leading ones, then trailing ones
        g = k.sum(g, run)
    return g if not lead else k._node(ir.RESHAPE, "float32", (g.index,), dims, (), line)


def _runs(axes: tuple[int, ...]) -> list[tuple[int, ...]]:
    runs = groupby(enumerate(axes), lambda item: item[1] - item[0])
    return [tuple(axis for _, axis in run) for _, run in runs]


def _without_dead(program: DvmProgram) -> DvmProgram:
    """Remove the nodes that no store needs; keep all inputs."""
    live = [n.op in (ir.STORE, ir.LOAD) for n in program.nodes]
    for i in range(len(program.nodes) - 1, -1, -1):
        if live[i]:
            for a in program.nodes[i].args:
                live[a] = True
    number: dict[int, int] = {}
    nodes = []
    for i, node in enumerate(program.nodes):
        if live[i]:
            number[i] = len(nodes)
            nodes.append(node._replace(args=tuple(number[a] for a in node.args)))
    return DvmProgram(nodes, program.inputs, program.outputs, program.symbols, program.file)
