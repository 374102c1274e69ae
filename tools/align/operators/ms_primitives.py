"""MindSpore's primitives in a compiled graph, whose arguments differ from those of the functions of the same name."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from telechat_moe.narrowing import is_sequence
from telechat_moe.tools.align.operators.approx import (
    Approx,
    Array,
    Back,
    concatenate,
    scatter_add,
)
from telechat_moe.tools.align.operators.elementwise import (
    floating,
    integers,
    ints,
    of_input,
    plain,
    whole,
)
from telechat_moe.tools.align.operators.indexing import along
from telechat_moe.tools.align.operators.reductions import (
    layer_normed,
    log_softmax,
    softmax,
    softmax_gradient,
)
from telechat_moe.tools.align.operators.registry import (
    Arguments,
    NotJudgedError,
    find,
    ops,
    primitive,
)
from telechat_moe.tools.align.operators.shapes import arranged, cut, move, moves

EXP, EXP_SLOPE = 90.0, 9.0
"""Errors of MindSpore's exp on CPU, in roundings: a constant, and an amount for each unit of its argument.

Measured with 2.9 on 10^6 float32 numbers in [-1, 1], [-10, 10] and [-80, 80]: 78, 132, 683. Its vector code subtracts
``n ln 2`` with one float32 constant. Sigmoid, SiLU and softmax are built on it (53, 86, 685).
"""
TANH, LOG = 4000.0, 60.0
"""Measured: tanh reaches 1 too early (3,376); log near 1 has this absolute error."""

_TYPES = {30: "bool", 32: "int8", 33: "int16", 34: "int32", 35: "int64", 37: "uint8", 42: "float16",
          43: "float32", 44: "float64", 45: "bfloat16"}  # fmt: skip


def loose(x: Approx, argument: Any) -> Approx:
    """Return a value derived from an exponential, with the error of MindSpore's exponential."""
    size = (EXP + EXP_SLOPE * np.minimum(np.abs(plain(argument)), 100.0)) * x.unit * np.abs(x.value)
    sigma, limit = np.hypot(x.sigma, size / 3**0.5), x.limit + size
    return x.like(x.value, sigma, limit, [(x, lambda g: g)])


def _at_itself(x: Approx, y: Approx, slope: Callable[[Approx], Approx]) -> Approx:
    """Return a loose result y of x that is differentiated at itself, as kernels do."""
    result = y.stop()
    return y.like(y.value, y.sigma, y.limit, [(x, lambda g: g * slope(result))])


def _sigmoid(x: Approx) -> Approx:
    return _at_itself(x, loose(x.sigmoid(), x), lambda s: s * (1 - s))


def _tanh(x: Approx) -> Approx:
    return _at_itself(x, x.tanh().plus(TANH * x.unit), lambda y: 1 - y * y)


def _exp(x: Approx) -> Approx:
    return _at_itself(x, loose(x.exp(), x), lambda y: y)


@primitive("BiasAdd", "input bias")
def _bias_add(a: Arguments) -> Any:
    """Add a number to each channel, the second dimension."""
    x = floating(a.input)
    return x + floating(a.bias).reshape(-1, *[1] * (len(x.shape) - 2))


@primitive(
    "LayerNorm",
    "input weight bias | eps=1e-07 inverse=False",
    stores=True,
    eps=lambda a: (1e-7, 1e-5, 1e-6, 1e-8, 1e-12, 1e-3),
    inverse=lambda a: (False, True),
)
def _layer_norm(a: Arguments) -> Any:
    """Normalise over the dimensions of the weight; the third output is the variance, on Ascend ``1 / sqrt(v + eps)``."""
    x, weight = floating(a.input), floating(a.weight)
    dims = tuple(range(len(x.shape) - len(weight.shape), len(x.shape)))
    y, mean, variance = layer_normed(x, dims, float(a.eps))
    third = (variance + float(a.eps)).rsqrt() if a.inverse else variance
    return [y * weight + floating(a.bias), mean, third]


def _dims(a: Arguments) -> Sequence[int]:
    first = a.input[0] if is_sequence(a.input) else a.input
    return range(plain(first).ndim - 1, -1, -1)


def _parts(a: Arguments) -> Sequence[int]:
    return [len(a.made)] if a.made else []


@primitive("Split", "input dim=0 parts=1", exact=True, dim=_dims, parts=_parts)
def _split(a: Arguments) -> Any:
    shape = plain(a.input).shape
    return cut(a.input, [shape[int(a.dim)] // int(a.parts)] * int(a.parts), int(a.dim))


@primitive("Concat", "input dim=0", exact=True, dim=_dims)
def _concat(a: Arguments) -> Any:
    return arranged(lambda *xs: np.concatenate(xs, int(a.dim)), *a.input)


def _strided(x: Array, a: Arguments) -> Array:
    if a.ellipsis_mask or a.new_axis_mask:
        raise NotJudgedError("a slice with an ellipsis or a new axis")
    masks = int(a.begin_mask), int(a.end_mask), int(a.shrink_axis_mask)
    key: list[Any] = []
    for i, ends in enumerate(zip(ints(a.begin), ints(a.end), ints(a.strides), strict=True)):
        no_begin, no_end, single = (mask >> i & 1 for mask in masks)
        begin, end = None if no_begin else ends[0], None if no_end else ends[1]
        key.append(ends[0] if single else slice(begin, end, ends[2]))
    return x[tuple(key)]


def _sliced(x: Array, a: Arguments) -> Array:
    ranges = zip(ints(a.begin), ints(a.size), x.shape, strict=True)
    return x[tuple(slice(b, None if n == -1 else b + n) for b, n, _ in ranges)]


_MASKS = "begin_mask=0 end_mask=0 ellipsis_mask=0 new_axis_mask=0 shrink_axis_mask=0"
moves({("Transpose", "input order"): lambda x, a: x.transpose(ints(a.order))}, register=primitive)
moves(
    {
        ("StridedSlice", f"input begin end strides {_MASKS}"): _strided,
        ("Slice", "input begin size"): _sliced,
    },
    repeats=True,
    register=primitive,
)


@primitive("StridedSliceGrad", f"input shape begin end strides {_MASKS}", exact=True)
def _strided_grad(a: Arguments) -> Any:
    """Return the gradient of a slice at the places that it was taken from, and zeros elsewhere."""
    shape = tuple(ints(a.shape))
    place = _strided(np.arange(math.prod(shape)).reshape(shape), a).reshape(-1)
    return scatter_add((math.prod(shape),), place, floating(a.input).reshape(-1)).reshape(*shape)


@primitive("Gather", "input index dim batch_dims=0", exact=True)
def _gather(a: Arguments) -> Any:
    """Return rows by index; on CPU an index outside of the table gives zeros."""
    if int(plain(a.batch_dims)):
        raise NotJudgedError("gather with batch dimensions")
    index, axis = integers(a.index), int(plain(a.dim))
    size = plain(a.input).shape[axis]
    inside = (index >= 0) & (index < size)
    rows_index = np.where(inside, index, 0)
    rows = move(a.input, lambda x: x.take(rows_index, axis), True)
    if inside.all():
        return rows
    keep = inside.reshape(*inside.shape, *[1] * (plain(a.input).ndim - 1 - axis))
    return rows.times(keep.astype(np.float64)) if isinstance(rows, Approx) else rows * keep


@primitive("GatherDGradV2", "input dim index grad")
def _gather_d_grad(a: Arguments) -> Any:
    """Compute the gradient of ``gather_d``: values are added at the positions that they were taken from."""
    place = along(integers(a.index), int(plain(a.dim)))
    return scatter_add(plain(a.input).shape, place, floating(a.grad))


@primitive("UnsortedSegmentSum", "input index count")
def _segment_sum(a: Arguments) -> Any:
    """Sum rows by segment; rows of negative segments are left out."""
    index, x = integers(a.index), a.input
    rows = move(x, lambda v: v.reshape(-1, *v.shape[index.ndim :]))
    flat, count = index.reshape(-1), int(plain(a.count))
    keep = np.flatnonzero((flat >= 0) & (flat < count))
    return _scattered((count, *rows.shape[1:]), flat[keep], rows[keep])


def _scattered(shape: tuple[int, ...], index: Any, values: Any) -> Any:
    if isinstance(values, Approx):
        return scatter_add(shape, index, values)
    out = np.zeros(shape, values.dtype)
    np.add.at(out, index, values)
    return out


@primitive("ScatterNd", "index updates shape")
def _scatter_nd(a: Arguments) -> Any:
    index, shape = integers(a.index), ints(a.shape)
    place = tuple(index.reshape(-1, index.shape[-1]).T)
    row_shape = shape[index.shape[-1] :]
    updates = a.updates if isinstance(a.updates, Approx) else integers(a.updates)
    return _scattered(shape, place, updates.reshape(-1, *row_shape))


@primitive("TensorScatterAdd ScatterNdAdd", "input index updates")
def _tensor_scatter_add(a: Arguments) -> Any:
    index = integers(a.index)
    x = floating(a.input)
    place = tuple(index.reshape(-1, index.shape[-1]).T)
    parts = floating(a.updates).reshape(-1, *x.shape[index.shape[-1] :])
    return x + scatter_add(x.shape, place, parts)


@primitive("OneHot", "input depth on off dim=-1 | axis=-1", exact=True)
def _one_hot(a: Arguments) -> Any:
    """Return ``on`` at the index and ``off`` at the other positions of a new dimension."""
    index, axis = integers(a.input), int(plain(a.dim))
    hot = index[..., None] == np.arange(int(plain(a.depth)))
    values = np.where(hot, plain(a.on), plain(a.off))
    values = values if axis == -1 else np.moveaxis(values, -1, axis)
    return Approx(values) if isinstance(a.on, Approx) else values


@primitive("Cast", "input type", exact=True)
def _cast(a: Arguments) -> Any:
    named = isinstance(a.type, str)  # as msprobe writes mindspore.float32
    kind = a.type.lower() if named else _TYPES.get(int(plain(a.type)), "?")
    x = plain(a.input)
    if kind == "?":
        raise NotJudgedError(f"cast to the type with number {a.type}")
    if kind.startswith(("float", "bfloat")):
        return a.input if isinstance(a.input, Approx) else Approx(x)
    return x != 0 if kind == "bool" else np.trunc(x).astype(kind)


@primitive("AddN", "input")
def _add_n(a: Arguments) -> Any:
    parts = a.input
    if whole(*parts):
        return sum(plain(p) for p in parts)
    return concatenate([floating(p).reshape(1, *floating(p).shape) for p in parts], 0).sum(0)


def _axes(a: Arguments) -> range:
    return range(-1, -len(floating(a.input).shape) - 1, -1)


@primitive("Softmax SoftmaxExt", "input dim=-1", stores=True, dim=_axes)
def _softmax(a: Arguments) -> Any:
    x = floating(a.input)
    dim = a.dims(len(x.shape))[0]
    y = loose(softmax(x, dim), x.value - x.value.max(dim, keepdims=True))
    result = y.stop()
    y.parents = ((x, lambda g: softmax_gradient(result, g, (g * result).sum(dim, True))),)
    return y


@primitive("LogSoftmax LogSoftmaxExt", "input dim=-1", stores=True, dim=_axes)
def _log_softmax(a: Arguments) -> Any:
    x = floating(a.input)
    # The error of exp is relative, that of its logarithm absolute.
    return log_softmax(x, a.dims(len(x.shape))[0]).plus((EXP + LOG) * x.unit)


def _natural(a: Arguments) -> Approx:
    if (float(a.base), float(a.scale), float(a.shift)) != (-1.0, 1.0, 0.0):
        raise NotJudgedError("an exponential or logarithm of another base")
    return floating(a.input)


_BASE = "input | base=-1.0 scale=1.0 shift=0.0"
primitive("SiLU", "input", stores=True)(of_input(lambda x: x * _sigmoid(x)))
ops(
    {
        ("Sigmoid", "input"): of_input(_sigmoid),
        ("Tanh", "input"): of_input(_tanh),
        ("Exp", _BASE): lambda a: _exp(_natural(a)),
        ("Log", _BASE): lambda a: _natural(a).log().plus(LOG * floating(a.input).unit),
    },
    primitive,
)


@primitive("SiLUGrad", "grad input", stores=True)
def _silu_grad(a: Arguments) -> Any:
    """Compute ``g s (1 + x (1 - s))``."""
    x, s = floating(a.input), loose(floating(a.input).sigmoid(), a.input)
    return floating(a.grad) * (s * (1 + x * (1 - s)))


_Sum = Callable[[Approx], Approx]


def _of_output(slope: Callable[[Approx, Approx, _Sum], Approx]) -> Callable[[Arguments], Approx]:
    """Return a gradient from the result y, the coming gradient g, and how it is summed along ``dim``."""

    def formula(a: Arguments) -> Approx:
        y = floating(a.output)
        return slope(y, floating(a.grad), lambda x: x.sum(a.dims(len(y.shape)), True))

    return formula


primitive("ReluGrad", "grad output", exact=True)(
    lambda a: floating(a.grad).times((plain(a.output) > 0).astype(np.float64))
)
ops(
    {
        ("SigmoidGrad", "output grad"): _of_output(lambda y, g, _: g * (y * (1 - y))),
        ("TanhGrad", "output grad"): _of_output(lambda y, g, _: g * (1 - y * y)),
        ("RsqrtGrad", "output grad"): _of_output(lambda y, g, _: g * (y * y * y) * -0.5),
        ("SqrtGrad", "output grad"): _of_output(lambda y, g, _: g / (y * 2.0)),
        ("ReciprocalGrad", "output grad"): _of_output(lambda y, g, _: -(g * (y * y))),
        ("LogSoftmaxGrad", "output grad dim=-1"): _of_output(
            lambda y, g, total: g - loose(y.exp(), y) * total(g)
        ),
        ("SoftmaxBackward SoftmaxGrad", "grad output dim=-1"): _of_output(
            lambda y, g, total: softmax_gradient(y, g, total(g * y))
        ),
    },
    primitive,
    stores=True,
)


@primitive("PowTensorScalar", "input exponent", stores=True)
def _pow(a: Arguments) -> Any:
    n = float(plain(a.exponent))
    return floating(a.input) * 1.0 if n == 1 else floating(a.input) ** n


def _unchanged(x: Any) -> Any:
    return x if isinstance(x, Approx) else plain(x)


primitive("TensorMove Identity StopGradient", "input", exact=True)(lambda a: _unchanged(a.input))
primitive("Assign", "input value", exact=True)(lambda a: _unchanged(a.value))


def _composed(name: str, a: Arguments) -> Approx:
    """Compute a function that MindSpore makes of an exponential, whose error its gradient has, too; a logarithm's is absolute."""
    formula = find(name)
    assert formula is not None
    y = floating(formula.compute(a)[0])
    shares = EXP + EXP_SLOPE * np.minimum(np.abs(plain(a.input)), 100.0)

    def inexact(y: Approx, size: Any) -> Approx:
        share = shares if shares.shape == y.shape else shares.max(initial=EXP)
        error = share * y.unit * size
        return y.like(y.value, np.hypot(y.sigma, error / 3**0.5), y.limit + error, y.parents)

    def inexact_step(step: Back) -> Back:
        return lambda g: inexact(d := step(g), np.abs(d.value) + np.abs(g.value))

    y = inexact(y, np.abs(y.value) + float(name in ("softplus", "logsumexp")))
    y.parents = tuple((operand, inexact_step(step)) for operand, step in y.parents)
    return y


for _name in ("gelu", "softplus", "erf", "logsumexp"):
    primitive(f"mindtorch.{_name}", "input")(partial(_composed, _name))
