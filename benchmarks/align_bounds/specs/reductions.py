"""Specify sums, softmaxes and norms."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.align_bounds.inputs import Machine, Sample, Source
from benchmarks.align_bounds.specs.table import exact, few, spec


def _over(*lengths: int, **options: Any) -> Callable[[Source], Sample]:
    def make(s: Source) -> Sample:
        n = s.length(*lengths)
        return Sample([s.x(s.rows(n) if s.size > n else 2, n, **options), -1])

    return make


def _var(m: Machine, x: Any, dim: int) -> Any:
    n = m.work(x.shape[-1])
    d = m.r(x - m.r(m.r(m.sum(x, -1, True)) / n))
    return m.r(m.sum(m.r(d * d))) / (n - 1)


def _exps(m: Machine, x: Any) -> Any:
    return m.r(np.exp(m.r(x - x.max(-1, keepdims=True))))


def softmax(m: Machine, x: Any, dim: int = -1) -> Any:
    """Return exponentials divided by their sum along the last axis."""
    e = _exps(m, x)
    return e / m.r(m.sum(e, -1, True))


def _softmax_by_reciprocal(m: Machine, x: Any, dim: int = -1) -> Any:
    e = _exps(m, x)
    return e * m.r(1 / m.r(m.sum(e, -1, True)))


def _softmax_online(m: Machine, x: Any, dim: int = -1) -> Any:
    """Return the softmax, computed tile by tile with a running maximum."""
    top = np.full((*x.shape[:-1], 1), -np.inf, m.work)
    total = np.zeros_like(top)
    for i in range(0, x.shape[-1], 16):
        tile = x[..., i : i + 16]
        new = np.maximum(top, tile.max(-1, keepdims=True))
        total = total * np.exp(top - new) + m.sum(np.exp(tile - new), -1, True)
        top = new
    return np.exp(x - top) / total


def log_softmax(m: Machine, x: Any, dim: int = -1) -> Any:
    """Return the shifted input minus the logarithm of its exponentials' sum along the last axis."""
    shifted = m.r(x - x.max(-1, keepdims=True))
    return shifted - m.r(np.log(m.r(m.sum(m.r(np.exp(shifted)), -1, True))))


def _logsumexp(m: Machine, x: Any, dim: int) -> Any:
    top = x.max(-1)
    return m.r(np.log(m.r(m.sum(_exps(m, x))))) + top


def _rms_norm(m: Machine, x: Any, shape: Any, weight: Any, eps: float) -> Any:
    mean = m.r(m.sum(m.r(x * x), -1, True)) / m.work(x.shape[-1])
    return m.r(x * m.r(1 / np.sqrt(m.r(m.r(mean) + m.work(eps))))) * weight


def _rms_norm_by_root(m: Machine, x: Any, shape: Any, weight: Any, eps: float) -> Any:
    mean = m.sum(x * x, -1, True) / m.work(x.shape[-1])
    return weight * (x / np.sqrt(mean + m.work(eps)))


def _layer_norm(m: Machine, x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    n = m.work(x.shape[-1])
    d = m.r(x - m.r(m.r(m.sum(x, -1, True)) / n))
    variance = m.r(m.r(m.sum(m.r(d * d), -1, True)) / n)
    return m.r(m.r(d * m.r(1 / np.sqrt(m.r(variance + m.work(eps))))) * weight) + bias


def _squares(s: Source) -> float | None:
    """Return how large values may be so that the sum of their squares stays within their type."""
    return 8.0 if s.dtype == "float16" else None


def _norm_sample(bias: bool) -> Callable[[Source], Sample]:
    def make(s: Source) -> Sample:
        n = s.length(64, 256, 512)
        weights = [s.weight(n), s.x(n)] if bias else [s.weight(n)]
        return Sample([s.x(s.rows(n), n, within=_squares(s)), (n,), *weights, 1e-5])

    return make


spec("sum", few(16, 128, 512), lambda m, x, d: m.sum(x), torch="sum")
spec("mean", few(16, 128, 512), lambda m, x, d: m.sum(x) / m.work(x.shape[-1]), torch="mean")
spec(
    "prod",
    lambda s: Sample([s.weight(s.size // 8, 16), -1]),
    lambda m, x, d: x.prod(-1, dtype=m.work),
    torch="prod",
    backward=False,
)
spec("cumsum", _over(16, 128, 512), lambda m, x, d: np.cumsum(x, -1, dtype=m.work), torch="cumsum")
spec("logsumexp", few(16, 128), _logsumexp, torch="logsumexp")
spec(
    "norm",
    lambda s: Sample([s.x(s.size // 8, 64, within=8.0), 2, -1]),
    lambda m, x, p, d: np.sqrt(m.r(m.sum(m.r(x * x)))),
    torch="norm",
)
spec("var", few(16, 128, within=8.0), _var, torch="var")
spec(
    "softmax",
    _over(16, 128, 512),
    softmax,
    _softmax_by_reciprocal,
    _softmax_online,
    torch="softmax",
)
spec("log_softmax", _over(16, 128, 512), log_softmax, torch="log_softmax")
spec("rms_norm", _norm_sample(False), _rms_norm, _rms_norm_by_root, torch="rms_norm")
spec("layer_norm", _norm_sample(True), _layer_norm, torch="layer_norm", backward=False)
for _name, _function in (("amax", np.max), ("amin", np.min), ("any", np.any), ("all", np.all)):
    exact(_name, few(16, 128), _function, _name)
for _name, _function, _index in (("max", np.max, np.argmax), ("min", np.min, np.argmin)):
    exact(_name, few(16, 128), lambda x, d, f=_function, g=_index: [f(x, d), g(x, d)], _name)
exact("ArgMaxWithValue", few(16, 128), lambda x, d: [np.argmax(x, d), np.max(x, d)])
