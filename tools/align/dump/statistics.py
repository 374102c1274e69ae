"""Statistics of a tensor, and the numbers by which msprobe compares two; in chunks, whatever their size."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from telechat_moe.tools.align.dump.records import Stats
from telechat_moe.tools.align.dump.value_files import release

Array = np.ndarray[Any, np.dtype[Any]]

_CHUNK = 1 << 18
_EPSILON = float(np.finfo(float).eps)


@dataclass(frozen=True)
class Metrics:
    """What msprobe's tensor mode says of two tensors; None where it says nothing.

    Attributes:
        cosine: Cosine similarity, rounded to six digits above 0.9999 as msprobe does.
        euclidean: L2 norm of the difference.
        max_abs: Largest difference.
        max_rel: Largest difference over the golden value.
        thousandth: Share of elements with a relative difference below 0.1 %.
        five_thousandths: The same below 0.5 %.
        reason: Why something is None.
    """

    cosine: float | None = None
    euclidean: float | None = None
    max_abs: float | None = None
    max_rel: float | None = None
    thousandth: float | None = None
    five_thousandths: float | None = None
    reason: str = ""


def compare(target: Array, golden: Array) -> Metrics:
    """Return msprobe's numbers for two tensors.

    Infinities and NaN count as 0 where both have them; elsewhere nothing can be said.
    """
    target, golden = np.squeeze(target), np.squeeze(golden)
    if target.shape != golden.shape:
        return Metrics(reason=f"shapes {list(target.shape)} and {list(golden.shape)}")
    if target.size == 0:
        return Metrics(reason="no elements")
    scalar = target.ndim == 0
    dots = np.zeros(3)
    squares = largest = worst = 0.0
    below = [0, 0]
    for a, b in zip(_chunks(target), _chunks(golden), strict=True):
        if not np.array_equal(np.isnan(a), np.isnan(b)) or not np.array_equal(
            np.isinf(a), np.isinf(b)
        ):
            return Metrics(reason="infinities or NaN at different places")
        x, y = _finite(a), _finite(b)
        relative = _relative(x, y)
        if not (scalar and x.dtype.kind == "f"):
            x, y = x.astype(np.float64), y.astype(np.float64)
        difference = np.abs(x - y)
        dots += (_dot(x, y), _dot(x, x), _dot(y, y))
        squares += _dot(difference, difference)
        largest = max(largest, float(difference.max()))
        worst = max(worst, float(relative.max()))
        below[0] += int((relative < 0.001).sum())
        below[1] += int((relative < 0.005).sum())
    if scalar:
        return Metrics(max_abs=largest, max_rel=worst, reason="one element")
    shares = [n / target.size for n in below]
    cosine, reason = _cosine(*dots)
    return Metrics(cosine, math.sqrt(squares), largest, worst, *shares, reason=reason)


def stats(values: Array) -> Stats | None:
    """Return largest, smallest and mean value and L2 norm; None for no elements. NaN makes all of them NaN."""
    if values.size == 0:
        return None
    high, low, total, squares = -math.inf, math.inf, 0.0, 0.0
    for part in _chunks(values):
        x = part.astype(np.float64)
        high, low = float(np.maximum(high, x.max())), float(np.minimum(low, x.min()))
        total += float(x.sum())
        squares += _dot(x, x)
    if values.dtype.kind == "b":
        return Stats(high, low, None, None)
    return Stats(high, low, total / values.size, math.sqrt(squares))


def _chunks(values: Array) -> Iterator[Array]:
    flat = values.reshape(-1)
    for i in range(0, flat.size, _CHUNK):
        yield np.asarray(flat[i : i + _CHUNK])
        if i // _CHUNK % 64 == 63:
            release(values)


def _dot(x: Array, y: Array) -> float:
    return float(np.einsum("i,i->", x, y, dtype=np.float64))  # BLAS would wake all cores


def _finite(x: Array) -> Array:
    if x.dtype.kind != "f" or np.isfinite(x).all():
        return x
    return np.where(np.isfinite(x), x, np.zeros((), x.dtype))


def _relative(x: Array, y: Array) -> Array:
    kind = np.result_type(*(v.dtype if v.dtype.kind == "f" else np.float64 for v in (x, y)))
    kind = np.result_type(kind, np.float32)
    x, y = x.astype(kind), y.astype(kind)
    zero = y == 0
    epsilon = np.finfo(kind).eps
    x[zero] += epsilon
    y[zero] += epsilon
    with np.errstate(over="ignore"):
        return np.abs((x - y) / y)


def _cosine(dot: float, xx: float, yy: float) -> tuple[float | None, str]:
    x, y = math.sqrt(xx), math.sqrt(yy)
    if x <= _EPSILON and y <= _EPSILON:
        return 1.0, ""
    if x <= _EPSILON or y <= _EPSILON:
        return None, f"all zero in the {'target' if x <= _EPSILON else 'golden'} tensor"
    cosine = dot / (x * y)
    return (round(cosine, 6) if cosine > 0.9999 else cosine), ""
