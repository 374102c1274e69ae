"""Operators that work element by element."""

from collections.abc import Callable
from typing import Any

import numpy as np

from telechat_moe.tools.align.operators.approx import Approx, Array, Back
from telechat_moe.tools.align.operators.joining import where
from telechat_moe.tools.align.operators.registry import Arguments, NotJudgedError, op, primitive

PAIR = "input other"


def floating(x: Any, like: Any = None) -> Approx:
    """Return a number or array as an exact :class:`Approx`."""
    if isinstance(x, Approx):
        return x
    return like.constant(x) if isinstance(like, Approx) else Approx(x)


def plain(x: Any) -> Any:
    """Return the values."""
    return x.value if isinstance(x, Approx) else np.asarray(x)


def integers(x: Any) -> Array:
    """Return the values as int64."""
    return plain(x).astype(np.int64)


def whole(*values: Any) -> bool:
    """Return whether none of the values is floating-point."""
    return not any(
        isinstance(v, Approx) or np.asarray(v).dtype.kind == "f" for v in values if v is not None
    )


@primitive("Adds AssignAdd", "input other | alpha=1")
@op("add", "input other | alpha=1")
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


@primitive("AssignSub", "input other | alpha=1")
@op("sub subtract", "input other | alpha=1")
def _sub(a: Arguments) -> Any:
    if whole(a.input, a.other):
        return plain(a.input) - plain(a.other) * a.alpha
    other = a.other if a.alpha == 1 else floating(a.other, a.input) * a.alpha
    return floating(a.input, other) - other


@op("rsub", "input other")
def _rsub(a: Arguments) -> Any:
    if whole(a.input, a.other):
        return plain(a.other) - plain(a.input)
    return floating(a.other, a.input) - a.input


@primitive("Muls", "input other")
@op("mul multiply", "input other")
def _mul(a: Arguments) -> Any:
    if whole(a.input, a.other):
        return plain(a.input) * plain(a.other)
    return floating(a.input, a.other) * a.other


@op("div truediv true_divide divide RealDiv", "input other | rounding_mode=None")
def _div(a: Arguments) -> Any:
    if a.rounding_mode == "floor" or (a.rounding_mode == "trunc" and whole(a.input, a.other)):
        return _floordiv(a)
    if a.rounding_mode is not None:
        raise NotJudgedError(f"div with rounding_mode {a.rounding_mode!r}")
    return floating(a.input, a.other) / a.other


@op("rtruediv rdiv", "input other")
def _rdiv(a: Arguments) -> Any:
    return floating(a.other, a.input) / a.input


@op("floordiv floor_divide FloorDiv", "input other", exact=True)
def _floordiv(a: Arguments) -> Any:
    if not whole(a.input, a.other):
        raise NotJudgedError("floor division of floating-point numbers jumps at rounding errors")
    return plain(a.input) // plain(a.other)


@op("mod remainder fmod", "input other", exact=True)
def _mod(a: Arguments) -> Any:
    if not whole(a.input, a.other):
        raise NotJudgedError("remainder of floating-point numbers jumps at rounding errors")
    return plain(a.input) % plain(a.other)


@op("neg negative", "input")
def _neg(a: Arguments) -> Any:
    return -a.input


@op("abs absolute", "input")
def _abs(a: Arguments) -> Any:
    return a.input.abs() if isinstance(a.input, Approx) else np.abs(a.input)


@op("square", "input")
def _square(a: Arguments) -> Any:
    return a.input * a.input


@op("pow", "input other", stores=True)
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


@op("rpow", "input other")
def _rpow(a: Arguments) -> Any:
    base = float(plain(a.other))
    return (floating(a.input) * np.log(base)).exp()


for _name in ("exp", "log", "sqrt", "rsqrt", "sigmoid", "tanh", "erf", "sin", "cos"):
    op(_name, "input")(lambda a, method=_name: getattr(floating(a.input), method)())


@op("reciprocal", "input")
def _reciprocal(a: Arguments) -> Any:
    return 1 / floating(a.input)


@op("log1p", "input")
def _log1p(a: Arguments) -> Any:
    x = floating(a.input)
    return x.apply(np.log1p(x.value), 1 / (1 + x.value), lambda x, y: 1 / (x + 1))


@op("expm1", "input")
def _expm1(a: Arguments) -> Any:
    x = floating(a.input)
    return x.apply(np.expm1(x.value), np.exp(x.value), lambda x, y: y + 1)


@op("silu swish", "input | inplace=False")
def silu(a: Arguments) -> Any:
    """``x * sigmoid(x)``."""
    x = floating(a.input)
    return x * x.sigmoid()


@op("relu", "input | inplace=False")
def _relu(a: Arguments) -> Any:
    x = floating(a.input)
    return x.times((~(x.value <= 0)).astype(np.float64))  # NaN stays


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
    soft = x.apply(np.logaddexp(0, x.value), slope, lambda x, y: x.sigmoid())
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
    kept = x.times(inside)
    return x.like(np.clip(x.value, low, high), kept.sigma, kept.limit, kept.parents)


@op("maximum", "input other")
def _maximum(a: Arguments) -> Any:
    if whole(a.input, a.other):
        return np.maximum(plain(a.input), plain(a.other))
    x, y = floating(a.input, a.other), floating(a.other, a.input)
    return _larger(x, y)


def _larger(x: Approx, y: Approx) -> Approx:
    """Return the larger value; of two equal ones either gets the gradient, or both get a share."""
    share = (np.sign(x.value - y.value) + 1) / 2
    slack = np.where(share == 0.5, 0.5, 0.0)
    result = where(share >= 0.5, x, y)
    shape = result.shape

    def back(like: Approx, part: Array) -> Back:
        return lambda g: _fitted(g.times(part).plus(slack * np.abs(g.value)), like, shape)

    result.parents = ((x, back(x, share)), (y, back(y, 1 - share)))
    return result


def _fitted(g: Approx, like: Approx, shape: tuple[int, ...]) -> Approx:
    return like.spread(shape).parents[0][1](g)


@op("minimum", "input other")
def _minimum(a: Arguments) -> Any:
    if whole(a.input, a.other):
        return np.minimum(plain(a.input), plain(a.other))
    x, y = floating(a.input, a.other), floating(a.other, a.input)
    return -_larger(-x, -y)


@op("where select", "condition input=None other=None", exact=True)
def _where(a: Arguments) -> Any:
    condition = plain(a.condition).astype(bool)
    if a.input is None and a.other is None:
        return list(np.nonzero(condition))
    if whole(a.input, a.other):
        return np.where(condition, plain(a.input), plain(a.other))
    x, y = floating(a.input, a.other), floating(a.other, a.input)
    return where(condition, x, y)


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
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
}.items():
    op(_names, PAIR, exact=True)(lambda a, f=_function: f(plain(a.input), plain(a.other)))
for _name, _function in {
    "logical_not": np.logical_not,
    "invert": np.invert,
    "bitwise_not": np.invert,
    "isnan": np.isnan,
    "isinf": np.isinf,
    "isfinite": np.isfinite,
    "sign": np.sign,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.rint,
    "trunc": np.trunc,
}.items():
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


for _name, _value in (("zeros_like", 0.0), ("ones_like", 1.0)):
    op(_name, "input *rest | dtype=None device=None", exact=True)(
        lambda a, value=_value: _filled(a.input, value)
    )


@op("full_like", "input fill_value | dtype=None device=None", exact=True)
def _full_like(a: Arguments) -> Any:
    return _filled(a.input, float(plain(a.fill_value)))


def _sizes(a: Arguments) -> tuple[int, ...]:
    size = a.size[0] if len(a.size) == 1 and isinstance(a.size[0], list | tuple) else a.size
    return tuple(int(plain(n)) for n in size)


_FACTORY = "| dtype=None device=None requires_grad=False layout=None pin_memory=False"
for _name, _make in (("zeros", np.zeros), ("ones", np.ones)):
    op(_name, f"*size {_FACTORY}", exact=True)(lambda a, make=_make: make(_sizes(a)))
    op(f"new_{_name}", f"input *size {_FACTORY}", exact=True)(lambda a, make=_make: make(_sizes(a)))


@op("full", f"size fill_value {_FACTORY}", exact=True)
def _full(a: Arguments) -> Any:
    return np.full(tuple(int(n) for n in a.size), plain(a.fill_value))


@op("fill", "input value", exact=True)
def _fill(a: Arguments) -> Any:
    return np.full(np.shape(plain(a.input)), plain(a.value))


@op("dropout", "input p=0.5 training=True inplace=False")
def _dropout(a: Arguments) -> Any:
    if a.training and a.p:
        raise NotJudgedError("dropout draws at random")
    return a.input


@op("diff", "input n=1 dim=-1 | prepend=None append=None")
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


@op("copy_", "input other | non_blocking=False", exact=True)
def _copy_into(a: Arguments) -> Any:
    return a.other


def _filled(x: Any, value: float) -> Any:
    array: Array = np.full(np.shape(plain(x)), value)
    return x.constant(array) if isinstance(x, Approx) else array.astype(plain(x).dtype)
