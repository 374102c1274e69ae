"""Operators that work element by element."""

from typing import Any

import numpy as np

from telechat_moe.tools.align.operators.approx import Approx, Array, where
from telechat_moe.tools.align.operators.registry import Arguments, NotJudgedError, op

PAIR = "input other"


def floating(x: Any, like: Any = None) -> Approx:
    """Return a number or array as an exact :class:`Approx`."""
    if isinstance(x, Approx):
        return x
    return like.constant(x) if isinstance(like, Approx) else Approx(x)


def plain(x: Any) -> Any:
    """Return the values."""
    return x.value if isinstance(x, Approx) else np.asarray(x)


def whole(*values: Any) -> bool:
    """Return whether none of the values is of floating point."""
    return not any(
        isinstance(v, Approx) or np.asarray(v).dtype.kind == "f" for v in values if v is not None
    )


@op("add", signature=PAIR, alpha=1)
def _add(a: Arguments) -> Any:
    other = (
        a.other
        if a.alpha == 1
        else plain(a.other) * a.alpha
        if whole(a.other)
        else floating(a.other) * a.alpha
    )
    if whole(a.input, a.other):
        return plain(a.input) + plain(other)
    return floating(a.input, other) + other


@op("sub", "subtract", signature=PAIR, alpha=1)
def _sub(a: Arguments) -> Any:
    if whole(a.input, a.other):
        return plain(a.input) - plain(a.other) * a.alpha
    other = a.other if a.alpha == 1 else floating(a.other, a.input) * a.alpha
    return floating(a.input, other) - other


@op("rsub", signature=PAIR)
def _rsub(a: Arguments) -> Any:
    if whole(a.input, a.other):
        return plain(a.other) - plain(a.input)
    return floating(a.other, a.input) - a.input


@op("mul", "multiply", signature=PAIR)
def _mul(a: Arguments) -> Any:
    if whole(a.input, a.other):
        return plain(a.input) * plain(a.other)
    return floating(a.input, a.other) * a.other


@op("div", "truediv", "true_divide", "divide", "RealDiv", signature=PAIR, rounding_mode=None)
def _div(a: Arguments) -> Any:
    if a.rounding_mode == "floor" or (a.rounding_mode == "trunc" and whole(a.input, a.other)):
        return _floordiv(a)
    if a.rounding_mode is not None:
        raise NotJudgedError(f"div with rounding_mode {a.rounding_mode!r}")
    return floating(a.input, a.other) / a.other


@op("rtruediv", "rdiv", signature=PAIR)
def _rdiv(a: Arguments) -> Any:
    return floating(a.other, a.input) / a.input


@op("floordiv", "floor_divide", "FloorDiv", signature=PAIR, exact=True)
def _floordiv(a: Arguments) -> Any:
    if not whole(a.input, a.other):
        raise NotJudgedError("floor division of floating-point numbers jumps at rounding errors")
    return plain(a.input) // plain(a.other)


@op("mod", "remainder", "fmod", signature=PAIR, exact=True)
def _mod(a: Arguments) -> Any:
    if not whole(a.input, a.other):
        raise NotJudgedError("remainder of floating-point numbers jumps at rounding errors")
    return plain(a.input) % plain(a.other)


@op("neg", "negative", signature="input")
def _neg(a: Arguments) -> Any:
    return -a.input


@op("abs", "absolute", signature="input")
def _abs(a: Arguments) -> Any:
    return a.input.abs() if isinstance(a.input, Approx) else np.abs(a.input)


@op("square", signature="input")
def _square(a: Arguments) -> Any:
    return a.input * a.input


@op("pow", signature=PAIR, stores=True)
def _pow(a: Arguments) -> Any:
    if isinstance(a.input, Approx) and np.ndim(plain(a.other)) == 0:
        return a.input ** float(plain(a.other))
    if whole(a.input, a.other):
        return plain(a.input) ** plain(a.other)
    base, exponent = floating(a.input, a.other), floating(a.other, a.input)
    with np.errstate(all="ignore"):
        value = base.value**exponent.value
        return (
            base.constant(0.0) + (exponent * base.log()).exp()
            if np.all(base.value > 0)
            else base.constant(value)
        )


@op("rpow", signature=PAIR)
def _rpow(a: Arguments) -> Any:
    base = float(plain(a.other))
    return (floating(a.input) * np.log(base)).exp()


for _name, _method in (
    ("exp", "exp"),
    ("log", "log"),
    ("sqrt", "sqrt"),
    ("sigmoid", "sigmoid"),
    ("tanh", "tanh"),
    ("erf", "erf"),
    ("sin", "sin"),
    ("cos", "cos"),
):
    op(_name, signature="input")(lambda a, method=_method: getattr(floating(a.input), method)())


@op("rsqrt", signature="input")
def _rsqrt(a: Arguments) -> Any:
    return floating(a.input).rsqrt()


@op("reciprocal", signature="input")
def _reciprocal(a: Arguments) -> Any:
    return 1 / floating(a.input)


@op("log1p", signature="input")
def _log1p(a: Arguments) -> Any:
    x = floating(a.input)
    return x.apply(np.log1p(x.value), 1 / (1 + x.value), lambda x, y: 1 / (x + 1))


@op("expm1", signature="input")
def _expm1(a: Arguments) -> Any:
    x = floating(a.input)
    return x.apply(np.expm1(x.value), np.exp(x.value), lambda x, y: y + 1)


@op("silu", "swish", signature="input", inplace=False)
def silu(a: Arguments) -> Any:
    """``x * sigmoid(x)``."""
    x = floating(a.input)
    return x * x.sigmoid()


@op("relu", signature="input", inplace=False)
def _relu(a: Arguments) -> Any:
    x = floating(a.input)
    return x.times((~(x.value <= 0)).astype(np.float64))  # NaN stays


@op("gelu", signature="input", approximate="none")
def _gelu(a: Arguments) -> Any:
    x = floating(a.input)
    if a.approximate == "tanh":
        inner = (x + x * x * x * 0.044715) * (2 / np.pi) ** 0.5
        return x * (inner.tanh() + 1.0) * 0.5
    return x * ((x * 0.5**0.5).erf() + 1.0) * 0.5


@op("softplus", signature="input beta threshold", beta=1.0, threshold=20.0)
def _softplus(a: Arguments) -> Any:
    x = floating(a.input) * a.beta
    slope = 1 / (1 + np.exp(-x.value))
    soft = x.apply(np.logaddexp(0, x.value), slope, lambda x, y: x.sigmoid())
    return where(x.value > a.threshold, x, soft) / a.beta


@op("leaky_relu", signature="input negative_slope", negative_slope=0.01, inplace=False)
def _leaky(a: Arguments) -> Any:
    x = floating(a.input)
    return where(x.value > 0, x, x * a.negative_slope)


@op(
    "clamp",
    "clip",
    "clamp_min",
    "ClampScalar",
    "clip_by_value",
    signature="input min max",
    min=None,
    max=None,
)
def _clamp(a: Arguments) -> Any:
    low = -np.inf if a.min is None else plain(a.min)
    high = np.inf if a.max is None else plain(a.max)
    if whole(a.input):
        return np.clip(plain(a.input), low, high)
    x = a.input
    inside = ((x.value >= low) & (x.value <= high)).astype(np.float64)
    kept = x.times(inside)
    return Approx(
        np.clip(x.value, low, high), x.stored, x.accumulated, kept.sigma, kept.limit, kept.parents
    )


@op("maximum", signature=PAIR)
def _maximum(a: Arguments) -> Any:
    if whole(a.input, a.other):
        return np.maximum(plain(a.input), plain(a.other))
    x, y = floating(a.input, a.other), floating(a.other, a.input)
    return _larger(x, y)


def _larger(x: Approx, y: Approx) -> Approx:
    """Return the larger one; of two equal ones either gets the gradient, or both a part of it."""
    share = (np.sign(x.value - y.value) + 1) / 2
    slack = np.where(share == 0.5, 0.5, 0.0)
    result = where(share >= 0.5, x, y)
    shape = result.shape

    def back(like: Approx, part: Array) -> Any:
        return lambda g: _fitted(g.times(part).plus(slack * np.abs(g.value)), like, shape)

    result.parents = ((x, back(x, share)), (y, back(y, 1 - share)))
    return result


def _fitted(g: Approx, like: Approx, shape: tuple[int, ...]) -> Approx:
    return like.spread(shape).parents[0][1](g)


@op("minimum", signature=PAIR)
def _minimum(a: Arguments) -> Any:
    if whole(a.input, a.other):
        return np.minimum(plain(a.input), plain(a.other))
    x, y = floating(a.input, a.other), floating(a.other, a.input)
    return -_larger(-x, -y)


@op("where", "select", signature="condition input other", input=None, other=None, exact=True)
def _where(a: Arguments) -> Any:
    condition = plain(a.condition).astype(bool)
    if a.input is None and a.other is None:
        return list(np.nonzero(condition))
    if whole(a.input, a.other):
        return np.where(condition, plain(a.input), plain(a.other))
    x, y = floating(a.input, a.other), floating(a.other, a.input)
    return where(condition, x, y)


@op("masked_fill", signature="input mask value", exact=True)
def _masked_fill(a: Arguments) -> Any:
    mask = plain(a.mask).astype(bool)
    if whole(a.input):
        return np.where(mask, plain(a.value), plain(a.input))
    return where(mask, floating(a.value, a.input), a.input)


_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_LONG = {
    "eq": "Equal",
    "ne": "NotEqual",
    "lt": "Less",
    "le": "LessEqual",
    "gt": "Greater",
    "ge": "GreaterEqual",
}
for _name, _function in _COMPARE.items():
    op(_name, _LONG[_name], signature=PAIR, exact=True)(
        lambda a, f=_function: f(plain(a.input), plain(a.other))
    )
for _name, _function in (
    ("logical_and", np.logical_and),
    ("logical_or", np.logical_or),
    ("logical_xor", np.logical_xor),
    ("and", np.bitwise_and),
    ("or", np.bitwise_or),
    ("xor", np.bitwise_xor),
    ("bitwise_and", np.bitwise_and),
    ("bitwise_or", np.bitwise_or),
):
    op(_name, signature=PAIR, exact=True)(lambda a, f=_function: f(plain(a.input), plain(a.other)))
for _name, _function in (
    ("logical_not", np.logical_not),
    ("invert", np.invert),
    ("bitwise_not", np.invert),
    ("isnan", np.isnan),
    ("isinf", np.isinf),
    ("isfinite", np.isfinite),
    ("sign", np.sign),
    ("floor", np.floor),
    ("ceil", np.ceil),
    ("round", np.rint),
    ("trunc", np.trunc),
):
    op(_name, signature="input", exact=True)(lambda a, f=_function: _typed(a.input, f))


def _typed(x: Any, function: Any) -> Any:
    result = function(plain(x))
    return x.constant(result) if isinstance(x, Approx) and result.dtype.kind == "f" else result


@op(
    *(
        "to",
        "cast",
        "float",
        "half",
        "bfloat16",
        "type",
        "type_as",
        "astype",
        "double",
        "clone",
        "contiguous",
    ),
    *(
        "detach",
        "identity",
        "cpu",
        "npu",
        "cuda",
        "stop_gradient",
        "copy",
        "alias",
        "requires_grad",
        "depend",
    ),
    *("long", "int", "bool", "data", "ToDtype"),
    signature="input *rest",
    exact=True,
    dtype=None,
    copy=False,
    non_blocking=False,
    memory_format=None,
    device=None,
)
def _cast(a: Arguments) -> Any:
    return a.input  # the output's type says what it becomes


@op("zeros_like", signature="input *rest", exact=True, dtype=None, device=None)
def _zeros_like(a: Arguments) -> Any:
    return _filled(a.input, 0.0)


@op("ones_like", signature="input *rest", exact=True, dtype=None, device=None)
def _ones_like(a: Arguments) -> Any:
    return _filled(a.input, 1.0)


@op("full_like", signature="input fill_value", exact=True, dtype=None, device=None)
def _full_like(a: Arguments) -> Any:
    return _filled(a.input, float(plain(a.fill_value)))


def _sizes(a: Arguments) -> tuple[int, ...]:
    size = a.size[0] if len(a.size) == 1 and isinstance(a.size[0], list | tuple) else a.size
    return tuple(int(plain(n)) for n in size)


_MADE = {"dtype": None, "device": None, "requires_grad": False, "layout": None, "pin_memory": False}


@op("zeros", signature="*size", exact=True, **_MADE)
def _zeros(a: Arguments) -> Any:
    return np.zeros(_sizes(a))


@op("ones", signature="*size", exact=True, **_MADE)
def _ones(a: Arguments) -> Any:
    return np.ones(_sizes(a))


@op("new_zeros", signature="input *size", exact=True, **_MADE)
def _new_zeros(a: Arguments) -> Any:
    return np.zeros(_sizes(a))


@op("new_ones", signature="input *size", exact=True, **_MADE)
def _new_ones(a: Arguments) -> Any:
    return np.ones(_sizes(a))


@op("full", signature="size fill_value", exact=True, **_MADE)
def _full(a: Arguments) -> Any:
    return np.full(tuple(int(n) for n in a.size), plain(a.fill_value))


@op("fill", signature="input value", exact=True)
def _fill(a: Arguments) -> Any:
    return np.full(np.shape(plain(a.input)), plain(a.value))


@op("dropout", signature="input p training inplace", p=0.5, training=True, inplace=False)
def _dropout(a: Arguments) -> Any:
    if a.training and a.p:
        raise NotJudgedError("dropout draws at random")
    return a.input


@op("diff", signature="input n dim", n=1, dim=-1, prepend=None, append=None)
def _diff(a: Arguments) -> Any:
    if a.n != 1 or (isinstance(a.input, Approx) and not (a.prepend is None and a.append is None)):
        raise NotJudgedError("diff of a higher order, or with something put before or behind")
    parts = [plain(p) for p in (a.prepend, a.input, a.append) if p is not None]
    last = sum(p.shape[a.dim] for p in parts)
    late, early = np.arange(1, last), np.arange(last - 1)
    if not isinstance(a.input, Approx):
        x = np.concatenate(parts, a.dim)
        return (
            x.take(late, a.dim) ^ x.take(early, a.dim)
            if x.dtype == bool
            else np.diff(x, axis=a.dim)
        )
    x = a.input
    return x.moved(lambda v: v.take(late, a.dim), True) - x.moved(
        lambda v: v.take(early, a.dim), True
    )


@op("copy_", signature="input other", exact=True, non_blocking=False)
def _copy_into(a: Arguments) -> Any:
    return a.other


def _filled(x: Any, value: float) -> Any:
    array: Array = np.full(np.shape(plain(x)), value)
    return x.constant(array) if isinstance(x, Approx) else array.astype(plain(x).dtype)
