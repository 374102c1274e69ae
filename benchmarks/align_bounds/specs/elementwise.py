"""Specify the operators that work element by element."""

from collections.abc import Callable
from math import erf
from typing import Any

import numpy as np

from benchmarks.align_bounds.inputs import Machine, Sample, Source
from benchmarks.align_bounds.specs.table import exact, one, pair, spec

_ERF = np.frompyfunc(erf, 1, 1)


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x))."""
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def _tanh_by_exp(m: Machine, x: Any) -> Any:
    e = np.exp(-2 * np.abs(x))
    return np.where(np.abs(x) < 0.5, np.tanh(x), np.sign(x) * (1 - e) / (1 + e)).astype(m.work)


def _gelu(m: Machine, x: Any, approximate: str = "none") -> Any:
    if approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(m.work((2 / np.pi) ** 0.5) * (x + m.work(0.044715) * x**3)))
    return x * m.work(0.5) * (1 + _ERF(x * m.work(0.5**0.5)).astype(m.work))


def _softplus(m: Machine, x: Any, beta: float, threshold: float) -> Any:
    return np.where(
        x * beta > threshold, x, np.logaddexp(m.work(0), x * m.work(beta)) / m.work(beta)
    )


for _name, _options, _programs in (
    ("neg", {}, [np.negative]), ("abs", {}, [np.abs]), ("square", {}, [np.square]),
    ("exp", {"within": 60.0}, [np.exp]),
    ("log", {"positive": True}, [np.log]), ("sqrt", {"positive": True}, [np.sqrt]),
    ("rsqrt", {"positive": True}, [lambda x: 1 / np.sqrt(x)]),
    ("sigmoid", {}, [sigmoid]), ("tanh", {}, [np.tanh]),
    ("sin", {"within": 100.0}, [np.sin]), ("cos", {"within": 100.0}, [np.cos]),
    ("reciprocal", {}, [np.reciprocal]),
    ("log1p", {"positive": True}, [np.log1p]), ("expm1", {"within": 60.0}, [np.expm1]),
    ("relu", {}, [lambda x: np.maximum(x, 0)]), ("sign", {}, [np.sign]), ("floor", {}, [np.floor]),
    ("ceil", {}, [np.ceil]), ("round", {}, [np.rint]), ("trunc", {}, [np.trunc]),
    ("isnan", {}, [np.isnan]), ("isinf", {}, [np.isinf]), ("isfinite", {}, [np.isfinite]),
    ("logical_not", {}, [np.logical_not]),
):  # fmt: skip
    spec(_name, one(**_options), *(lambda m, x, f=f: f(x) for f in _programs), torch=_name)
spec("tanh", one(), lambda m, x: np.tanh(x), _tanh_by_exp, torch="tanh")
spec("erf", one(), lambda m, x: _ERF(x).astype(m.work), torch="erf")
spec("silu", one(), lambda m, x: x * sigmoid(x), lambda m, x: x / (1 + np.exp(-x)), torch="silu")
spec(
    "gelu",
    lambda s: Sample([s.x(s.rows(64), 64)], {"approximate": s.rng.choice(["none", "tanh"])}),
    _gelu,
    torch="gelu",
)
spec("softplus", lambda s: Sample([s.x(s.rows(64), 64), 1.0, 20.0]), _softplus, torch="softplus")
spec(
    "leaky_relu",
    lambda s: Sample([s.x(s.rows(64), 64), 0.01]),
    lambda m, x, a: np.where(x > 0, x, x * m.work(a)),
    torch="leaky_relu",
)
spec(
    "clamp",
    lambda s: Sample([s.x(s.rows(64), 64), -0.5, 2.0]),
    lambda m, x, a, b: np.minimum(np.maximum(x, a), b),
    torch="clamp",
)
spec(
    "pow",
    lambda s: Sample(
        [
            s.x(s.rows(64), 64, positive=True, within=30.0),
            float(s.rng.choice([2, 3, 0.5, -0.5, 1.5])),
        ]
    ),
    lambda m, x, n: x ** m.work(n),
    torch="pow",
)
spec(
    "rpow", lambda s: Sample([s.x(s.rows(64), 64, within=8.0), 2.5]), lambda m, x, b: m.work(b) ** x
)
spec("add", pair(), lambda m, a, b: a + b, torch="add")
spec("sub", pair(), lambda m, a, b: a - b, torch="sub")
spec("rsub", pair(), lambda m, a, b: b - a, torch="rsub")
spec("mul", pair(), lambda m, a, b: a * b, torch="mul")
spec("div", pair(positive=True), lambda m, a, b: a / b, torch="div")
spec(
    "rtruediv",
    lambda s: Sample([s.x(s.rows(64), 64, positive=True), s.x(64)]),
    lambda m, a, b: b / a,
)
spec("maximum", pair(), lambda m, a, b: np.maximum(a, b), torch="maximum")
spec("minimum", pair(), lambda m, a, b: np.minimum(a, b), torch="minimum")
spec("copy_", lambda s: Sample([s.x(s.rows(64), 64), s.x(s.rows(64), 64)]), lambda m, a, b: b)
spec(
    "where",
    lambda s: Sample([s.mask(s.rows(64), 64), s.x(s.rows(64), 64), s.x(s.rows(64), 64)]),
    lambda m, c, a, b: np.where(c, a, b),
    torch="where",
)
spec(
    "masked_fill",
    lambda s: Sample([s.x(s.rows(64), 64), s.mask(s.rows(64), 64), -8.0]),
    lambda m, x, c, v: np.where(c, m.work(v), x),
    torch=lambda t, x, c, v: x.masked_fill(c, v),
)
for _name, _function in (
    ("eq", np.equal), ("ne", np.not_equal), ("lt", np.less), ("le", np.less_equal), ("gt", np.greater),
    ("ge", np.greater_equal), ("logical_and", np.logical_and), ("logical_or", np.logical_or),
    ("logical_xor", np.logical_xor),
):  # fmt: skip
    exact(_name, pair(), _function, _name)


def _whole_pair(s: Source) -> Sample:
    return Sample([s.ids(50, s.rows(64), 64), s.ids(50, s.rows(64), 64) + 1])


for _name, _function, _torch in (
    ("and", np.bitwise_and, "bitwise_and"), ("or", np.bitwise_or, "bitwise_or"), ("xor", np.bitwise_xor, "bitwise_xor"),
    ("floordiv", np.floor_divide, "floor_divide"), ("mod", np.mod, "remainder"),
):  # fmt: skip
    exact(_name, _whole_pair, _function, _torch)
for _name in ("invert", "bitwise_not"):
    exact(_name, lambda s: Sample([s.ids(50, s.rows(64), 64)]), np.invert, "bitwise_not")
for _name, _value in (("zeros_like", 0.0), ("ones_like", 1.0)):
    exact(_name, one(), lambda x, v=_value: np.full_like(x, v), _name)
exact("full_like", lambda s: Sample([s.x(s.rows(64), 64), 2.5]), np.full_like, "full_like")
exact("zero_", one(), np.zeros_like, lambda t, x: x.clone().zero_())
exact("fill", lambda s: Sample([s.x(s.rows(64), 64), 2.5]), np.full_like)
for _name, _value in (("zeros", 0.0), ("ones", 1.0)):
    exact(_name, lambda s: Sample([16, 64]), lambda *n, v=_value: np.full(n, v), _name)
    exact(f"new_{_name}", lambda s: Sample([s.x(2), 16, 64]), lambda x, *n, v=_value: np.full(n, v))
exact("full", lambda s: Sample([[16, 64], 2.5]), np.full, "full")
exact("to", one(), lambda x: x, lambda t, x: x.clone())
exact("dropout", lambda s: Sample([s.x(s.rows(64), 64), 0.1, False]), lambda x, p, t: x, "dropout")
spec("diff", one(), lambda m, x: x[:, 1:] - x[:, :-1], torch="diff")


# Of optimizers, which have no backward pass: torch's rounds within it, so the bounds of subnormal gradients do not hold.
def _three(**last: Any) -> Callable[[Source], Sample]:
    def make(s: Source) -> Sample:
        n = s.rows(64)
        return Sample([s.x(n, 64), s.x(n, 64), s.x(n, 64, **last)], {"value": 0.3})

    return make


spec(
    "addcmul",
    _three(),
    lambda m, x, a, b, value: x + m.work(value) * a * b,
    lambda m, x, a, b, value: x + a * (b * m.work(value)),
    torch="addcmul",
    backward=False,
)
spec(
    "addcdiv",
    _three(positive=True),
    lambda m, x, a, b, value: x + m.work(value) * (a / b),
    lambda m, x, a, b, value: x + m.work(value) * a / b,
    torch="addcdiv",
    backward=False,
)
spec(
    "lerp",
    lambda s: Sample([(x := s.x(s.rows(64), 64)), s.x(*x.shape), 0.3]),
    lambda m, x, end, weight: x + m.work(weight) * (end - x),
    torch="lerp",
    backward=False,
)
