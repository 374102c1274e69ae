"""Operators that work element by element."""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from telechat_moe.narrowing import is_sequence
from telechat_moe.numerics import FLOATS
from telechat_moe.tools.align.operators.approx import Approx, Array, Back, where
from telechat_moe.tools.align.operators.registry import (
    Arguments,
    NotJudgedError,
    op,
    ops,
    primitive,
)

PAIR = "input other"


def floating(x: Any, like: Any = None) -> Approx:
    """Return a number or array as an exact :class:`Approx`."""
    if isinstance(x, Approx):
        return x
    return like.constant(x) if isinstance(like, Approx) else Approx(x)


def plain(x: Any) -> Any:
    """Return the values of an :class:`Approx`, or anything else as an array."""
    return x.value if isinstance(x, Approx) else np.asarray(x)


def like(x: Any, values: Any) -> Any:
    """Return values of the kind and type of an array, without error."""
    return x.constant(values) if isinstance(x, Approx) else np.asarray(values, plain(x).dtype)


def integers(x: Any) -> Array:
    """Return the values as an array of int64."""
    return plain(x).astype(np.int64)


def ints(values: Any) -> tuple[int, ...]:
    """Return sizes that are given one by one or as a list."""
    sizes: Sequence[Any] = values if is_sequence(values) else [values]
    if len(sizes) == 1 and is_sequence(sizes[0]):
        sizes = sizes[0]
    return tuple(int(plain(v)) for v in sizes)


def whole(*values: Any) -> bool:
    """Return whether none of the values is floating-point."""
    arrays = (v for v in values if v is not None)
    return not any(isinstance(v, Approx) or np.asarray(v).dtype.kind == "f" for v in arrays)


def _pair(a: Arguments) -> tuple[Any, Any]:
    """Return two operands: arrays where neither is floating-point, else both as :class:`Approx`."""
    if whole(a.input, a.other):
        return plain(a.input), plain(a.other)
    return floating(a.input, a.other), floating(a.other, a.input)


@primitive("Adds AssignAdd", "input other | alpha=1")
@op("add", "input other alpha=1")
def _add(a: Arguments) -> Any:
    if a.alpha == 1:
        return operator.add(*_pair(a))
    other = (plain(a.other) if whole(a.other) else floating(a.other)) * a.alpha
    return (plain(a.input) if whole(a.input, other) else floating(a.input, other)) + other


@primitive("AssignSub", "input other | alpha=1")
@op("sub subtract", "input other alpha=1")
def _sub(a: Arguments) -> Any:
    x, y = _pair(a)
    return x - (y if a.alpha == 1 else y * a.alpha)


def _scalar(x: Any, like: Approx) -> Approx:
    """Return a factor; kernels hold a Python number in float32, or in a tensor's narrower type."""
    if isinstance(x, Approx) or np.ndim(plain(x)):
        return floating(x, like)
    size = abs(float(plain(x))) * max(like.unit, FLOATS["float32"].unit)
    return like.like(np.asarray(float(plain(x))), size, size)


@op("lerp", "input end weight", stores=True)
def _lerp(a: Arguments) -> Any:
    x = floating(a.input)
    end = floating(a.end, x)
    return x + (end - x) * _scalar(a.weight, x)


@op("addcmul", "input tensor1 tensor2 | value=1", stores=True)
def _addcmul(a: Arguments) -> Any:
    x = floating(a.input)
    return x + floating(a.tensor1, x) * floating(a.tensor2, x) * _scalar(a.value, x)


@op("addcdiv", "input tensor1 tensor2 | value=1", stores=True)
def _addcdiv(a: Arguments) -> Any:
    x = floating(a.input)
    return x + floating(a.tensor1, x) / floating(a.tensor2, x) * _scalar(a.value, x)


def _larger(x: Any, y: Any) -> Any:
    """Return the larger value; of two equal ones either gets the gradient, or both get a share."""
    if not isinstance(x, Approx):
        return np.maximum(x, y)
    share = (np.sign(x.value - y.value) + 1) / 2
    slack = np.where(share == 0.5, 0.5, 0.0)
    result = where(share >= 0.5, x, y)

    def back(like: Approx, part: Array) -> Back:
        spread = like.spread(result.shape).parents[0][1]
        return lambda g: spread(g.times(part).plus(slack * np.abs(g.value)))

    result.parents = ((x, back(x, share)), (y, back(y, 1 - share)))
    return result


def _smaller(x: Any, y: Any) -> Any:
    return -_larger(-x, -y) if isinstance(x, Approx) else np.minimum(x, y)


def _pow(x: Any, y: Any) -> Any:
    if not isinstance(x, Approx):
        return x**y
    with np.errstate(all="ignore"):
        if np.all(x.value > 0):
            return x.constant(0.0) + (y * x.log()).exp()
        return x.constant(x.value**y.value)


@op("pow", "input other", stores=True)
def _power(a: Arguments) -> Any:
    if isinstance(a.input, Approx) and np.ndim(plain(a.other)) == 0:
        return a.input ** float(plain(a.other))
    return _pow(*_pair(a))


@op("div truediv true_divide divide RealDiv Divs", "input other | rounding_mode=None")
def _div(a: Arguments) -> Any:
    if a.rounding_mode == "floor" or (a.rounding_mode == "trunc" and whole(a.input, a.other)):
        return _floordiv(a)
    if a.rounding_mode is not None:
        raise NotJudgedError(f"div with rounding_mode {a.rounding_mode!r}")
    return floating(a.input, a.other) / a.other


def _of_integers(a: Arguments, operation: str, function: Callable[[Any, Any], Any]) -> Any:
    if not whole(a.input, a.other):
        raise NotJudgedError(f"{operation} of floating-point numbers jumps at rounding errors")
    return function(plain(a.input), plain(a.other))


def _floordiv(a: Arguments) -> Any:
    return _of_integers(a, "floor division", np.floor_divide)


op("floordiv floor_divide FloorDiv", PAIR, exact=True)(_floordiv)
op("mod remainder fmod", PAIR, exact=True)(lambda a: _of_integers(a, "remainder", np.remainder))
ops(
    {
        ("rsub", PAIR): lambda a: operator.sub(*_pair(a)[::-1]),
        ("mul multiply", PAIR): lambda a: operator.mul(*_pair(a)),
        ("maximum", PAIR): lambda a: _larger(*_pair(a)),
        ("minimum", PAIR): lambda a: _smaller(*_pair(a)),
        ("rtruediv rdiv", PAIR): lambda a: floating(a.other, a.input) / a.input,
        ("rpow", PAIR): lambda a: (floating(a.input) * np.log(float(plain(a.other)))).exp(),
        ("neg negative", "input"): lambda a: -a.input,
        ("abs absolute", "input"): lambda a: abs(a.input),
        ("square", "input"): lambda a: a.input * a.input,
    }
)
primitive("Muls", PAIR)(lambda a: operator.mul(*_pair(a)))


def of_input(function: Callable[[Approx], Approx]) -> Callable[[Arguments], Approx]:
    """Return the formula that is a function of ``input``."""
    return lambda a: function(floating(a.input))


for _name in ("exp", "log", "sqrt", "rsqrt", "sigmoid", "tanh", "erf", "sin", "cos"):
    op(_name, "input")(of_input(getattr(Approx, _name)))
ops(
    {
        ("reciprocal", "input"): of_input(lambda x: 1 / x),
        ("log1p", "input"): of_input(lambda x: x.apply(np.log1p, lambda x, y: 1 / (x + 1))),
        ("expm1", "input"): of_input(lambda x: x.apply(np.expm1, lambda x, y: y + 1)),
        ("silu swish", "input | inplace=False"): of_input(lambda x: x * x.sigmoid()),
        ("relu", "input | inplace=False"): of_input(  # NaN stays
            lambda x: x.times((~(x.value <= 0)).astype(np.float64))
        ),
    }
)


@op("gelu", "input | approximate='none'")
def _gelu(a: Arguments) -> Any:
    x = floating(a.input)
    if a.approximate == "tanh":
        inner = (x + x * x * x * 0.044715) * (2 / np.pi) ** 0.5
        return x * (inner.tanh() + 1.0) * 0.5
    return x * ((x * 0.5**0.5).erf() + 1.0) * 0.5


@op("softplus", "input beta=1.0 threshold=20.0")
def _softplus(a: Arguments) -> Any:
    x: Approx = floating(a.input) * a.beta
    slope = 1 / (1 + np.exp(-x.value))
    soft = x.apply(partial(np.logaddexp, 0), lambda x, y: x.sigmoid(), slope=slope)
    return where(x.value > a.threshold, x, soft) / a.beta


@op("leaky_relu", "input negative_slope=0.01 | inplace=False")
def _leaky(a: Arguments) -> Any:
    x = floating(a.input)
    return where(x.value > 0, x, x * a.negative_slope)


@op("clamp clip clamp_min ClampScalar clip_by_value", "input min=None max=None")
def _clamp(a: Arguments) -> Any:
    low = -np.inf if a.min is None else plain(a.min)
    high = np.inf if a.max is None else plain(a.max)
    if whole(a.input):
        return np.clip(plain(a.input), low, high)
    x = a.input
    inside = ((x.value >= low) & (x.value <= high)).astype(np.float64)
    passed = x.times(inside)
    return x.like(np.clip(x.value, low, high), passed.sigma, passed.limit, passed.parents)


@primitive("Select", "condition input other", exact=True)
@op("where select", "condition input=None other=None", exact=True)
def _choose(a: Arguments) -> Any:
    condition = plain(a.condition).astype(bool)
    if a.input is None and a.other is None:
        return list(np.nonzero(condition))
    x, y = _pair(a)
    return where(condition, x, y) if isinstance(x, Approx) else np.where(condition, x, y)


@op("masked_fill", "input mask value", exact=True)
def _masked_fill(a: Arguments) -> Any:
    mask = plain(a.mask).astype(bool)
    if whole(a.input):
        return np.where(mask, plain(a.value), plain(a.input))
    return where(mask, floating(a.value, a.input), a.input)


for _names, _function in {
    "eq Equal": np.equal,
    "ne NotEqual": np.not_equal,
    "lt Less": np.less,
    "le LessEqual": np.less_equal,
    "gt Greater": np.greater,
    "ge GreaterEqual": np.greater_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
    "and bitwise_and": np.bitwise_and,
    "or bitwise_or": np.bitwise_or,
    "xor": np.bitwise_xor,
}.items():
    op(_names, PAIR, exact=True)(lambda a, f=_function: f(plain(a.input), plain(a.other)))
_OF_NUMPY = "logical_not invert bitwise_not isnan isinf isfinite sign floor ceil round trunc"
for _name in _OF_NUMPY.split():
    _function = getattr(np, _name)
    op(_name, "input", exact=True)(lambda a, f=_function: _typed(a.input, f))


def _typed(x: Any, function: Callable[[Any], Any]) -> Any:
    result = function(plain(x))
    return x.constant(result) if isinstance(x, Approx) and result.dtype.kind == "f" else result


@op(
    "to cast float half bfloat16 type type_as astype double clone contiguous detach identity cpu "
    "npu cuda stop_gradient copy alias requires_grad depend long int bool data ToDtype",
    "input *rest | dtype=None copy=False non_blocking=False memory_format=None device=None",
    exact=True,
)
def _cast(a: Arguments) -> Any:
    return a.input  # the output's type shows the type of the cast


_FACTORY = "| dtype=None device=None requires_grad=False layout=None pin_memory=False"
for _name, _make in (("zeros", np.zeros), ("ones", np.ones)):
    for _names, _order in ((_name, "*size"), (f"new_{_name}", "input *size")):
        op(_names, f"{_order} {_FACTORY}", exact=True)(lambda a, make=_make: make(ints(a.size)))


def _filled(a: Arguments, value: Any) -> Any:
    return like(a.input, np.full(np.shape(plain(a.input)), float(plain(value))))


_LIKE = "| dtype=None device=None"
ops(
    {
        ("full", f"size fill_value {_FACTORY}"): lambda a: np.full(
            ints(a.size), plain(a.fill_value)
        ),
        ("zeros_like", f"input *rest {_LIKE}"): lambda a: _filled(a, 0.0),
        ("ones_like", f"input *rest {_LIKE}"): lambda a: _filled(a, 1.0),
        ("full_like", f"input fill_value {_LIKE}"): lambda a: _filled(a, a.fill_value),
        ("fill", "input value"): lambda a: np.full(np.shape(plain(a.input)), plain(a.value)),
        ("zero_", "input"): lambda a: np.zeros(np.shape(plain(a.input))),
        ("copy_", "input other | non_blocking=False"): lambda a: a.other,
    },
    exact=True,
)


@op("dropout", "input p=0.5 training=True inplace=False")
def _dropout(a: Arguments) -> Any:
    if a.training and a.p:
        raise NotJudgedError("dropout draws at random")
    return a.input
