"""Run a program node by node with NumPy: the reference that the virtual machine is tested against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import erf

from telechat_moe.numerics import round_to, widen
from telechat_moe.ops.dvm import ir
from telechat_moe.ops.dvm.ir import DvmProgram, ProgramError, ProgramNode

UNARY: dict[str, Any] = {
    **{n: getattr(np, n) for n in ("abs", "sqrt", "exp", "log", "floor", "ceil", "trunc", "tanh")},
    **{n: getattr(np, n) for n in ("sin", "cos", "isfinite", "logical_not")},
    "neg": np.negative,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "round": np.rint,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "erf": erf,
}
_NUMPY = {"sub": "subtract", "mul": "multiply", "div": "divide", "pow": "power"}
BINARY: dict[str, Any] = {name: getattr(np, _NUMPY.get(name, name)) for name in ir.BINARY}
REDUCE: dict[str, Any] = {"sum": np.sum, "max": np.max, "min": np.min}


def from_bits(x: np.ndarray) -> np.ndarray:
    """Return the float32 values of bfloat16 bits."""
    return widen(x, "bfloat16")


def to_bits(x: np.ndarray) -> np.ndarray:
    """Return the bfloat16 bits of floats, rounded to nearest even."""
    rounded = round_to(x.astype(np.float32), "bfloat16").astype(np.float32)
    return (rounded.view(np.uint32) >> 16).astype(np.uint16)


def interpret(
    program: DvmProgram, inputs: Sequence[np.ndarray], arithmetic: type = np.float64
) -> list[np.ndarray]:
    """Run a program; return its outputs, floats in ``arithmetic``, not rounded to the store's type.

    Args:
        inputs: As for the virtual machine; bfloat16 as bits in uint16.
        arithmetic: Float type of all intermediate values.

    Raises:
        ProgramError: Shapes do not agree, or an index is out of range.
    """
    symbols = bind(program, inputs)
    values: list[Any] = []
    outputs: list[np.ndarray] = [np.empty(0)] * program.outputs
    with np.errstate(all="ignore"):
        for node in program.nodes:
            value = _run(program, node, values, inputs, symbols, arithmetic)
            if node.op == ir.STORE:
                outputs[node.attrs[0]] = value
            values.append(value)
    return outputs


def bind(program: DvmProgram, inputs: Sequence[np.ndarray]) -> dict[int, int]:
    """Return the extent of each symbol.

    Raises:
        ProgramError: Two inputs disagree.
    """
    symbols: dict[int, int] = {}
    for i in range(program.inputs):
        for k, (d, n) in enumerate(zip(program.load_of(i).dims, inputs[i].shape, strict=True)):
            expected = symbols.setdefault(d, n) if d < 0 else d
            if expected != n:
                raise ProgramError(f"dimension {k} of input {i} is {n}, expected {expected}")
    return symbols


def _run(
    program: DvmProgram,
    node: ProgramNode,
    values: list[Any],
    inputs: Sequence[np.ndarray],
    symbols: dict[int, int],
    arithmetic: type,
) -> Any:
    name = ir.NAMES[node.op]
    args = [values[a] for a in node.args]
    shape = tuple(symbols[d] if d < 0 else d for d in node.dims)
    if node.op == ir.LOAD:
        return _loaded(inputs[node.attrs[0]], node.dtype, arithmetic)
    if node.op == ir.SCALAR:
        kind = {"int32": np.int32, "bool": np.bool_}.get(node.dtype, arithmetic)
        return np.array(ir.bits_float(node.attrs[0]), kind)
    if node.op == ir.STORE:
        return args[0]
    if node.op == ir.SELECT:
        return np.where(*args)
    if node.op == ir.CAST:
        return _cast(args[0], node.dtype, arithmetic)
    if node.op == ir.BROADCAST:
        return np.broadcast_to(args[0], shape)
    if node.op == ir.RESHAPE:
        return args[0].reshape(shape)
    if node.op == ir.GATHER_LOAD:
        table = program.load_of(node.attrs[0])
        index = args[0]
        if index.size and (index.min() < 0 or index.max() >= inputs[node.attrs[0]].shape[0]):
            raise ProgramError(f"{program.file}:{node.line}: gather_load: index out of range")
        return _loaded(inputs[node.attrs[0]], table.dtype, arithmetic)[index]
    if name in REDUCE:
        empty = {} if name == "sum" else {"initial": -np.inf if name == "max" else np.inf}
        return REDUCE[name](args[0], axis=node.attrs[1:], keepdims=True, **empty)
    return (UNARY[name] if name in UNARY else BINARY[name])(*args)


def _loaded(x: np.ndarray, dtype: str, arithmetic: type) -> np.ndarray:
    if dtype == "bfloat16":
        return from_bits(x).astype(arithmetic)
    return x.astype(arithmetic) if ir.value_type(dtype) == "float32" else x


def _cast(x: np.ndarray, dtype: str, arithmetic: type) -> np.ndarray:
    if dtype == "bool":
        return x != 0
    if dtype == "int32":
        return x.astype(np.int32)
    x = x.astype(arithmetic)
    return x if dtype == "float32" else round_to(x, dtype).astype(arithmetic)
