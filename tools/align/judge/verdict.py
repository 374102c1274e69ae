"""Compare what a program computed with what it should have: verdicts with observed error over bound."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from telechat_moe.numerics import FLOATS, is_float
from telechat_moe.tools.align.operators.approx import Approx, Array

Status = Literal["pass", "diverged", "not judged"]
Explanation = tuple[str, str]
"""The kind of a fault, see ``explain/``, and the evidence for it."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on one tensor."""

    key: str  # key of the call in the dump
    place: str  # position of the tensor in the call, such as `output.0`; empty: the whole call
    status: Status  # see `Status`
    # Largest error over its bound; 0 where integers are equal, infinite where they are not
    ratio: float = 0.0
    reason: str = ""  # one sentence: where the error is largest, or why it was not judged
    element: tuple[int, ...] = ()  # index of that element
    wrong: int = 0  # number of elements beyond their bound
    elements: int = 0  # number of elements compared
    not_finite: int = 0  # number of wrong elements where NaN or infinity is found or expected
    # What it was judged by: `replay` (or data flow), `other run`
    basis: Literal["replay", "other run"] = "replay"


def judge(
    key: str,
    place: str,
    actual: Array,
    expected: Approx | Array,
    dtype: str,
    free: Array | None = None,
) -> Verdict:
    """Compare a tensor with its reference.

    Args:
        actual: What the program computed, widened.
        expected: What it should have computed; a plain array must be matched exactly.
        dtype: Type of the program's tensor.
        free: Where integers may differ (ties).
    """
    value = values_of(expected)
    if np.squeeze(value).shape != np.squeeze(actual).shape:
        reason = f"shape {list(actual.shape)}, expected {list(value.shape)}"
        return Verdict(key, place, "diverged", np.inf, reason, (), actual.size, actual.size)
    value = value.reshape(actual.shape)
    if not is_float(dtype):
        return _exact(key, place, actual, value, free)
    x = np.asarray(actual, np.float64)
    bound = (expected if isinstance(expected, Approx) else Approx(value)).bound(dtype)
    bound = bound.reshape(value.shape) + (0.0 if dtype == "float16" else 2.0 ** FLOATS[dtype].low)
    return _within(key, place, x, value, bound, dtype)  # subnormal numbers may be flushed to zero


def values_of(x: Approx | Array) -> Array:
    """Return the values of what a formula gives."""
    return x.value if isinstance(x, Approx) else np.asarray(x)


def _exact(key: str, place: str, actual: Array, value: Array, free: Array | None) -> Verdict:
    differs = actual.astype(np.float64) != value.astype(np.float64)
    if free is not None:
        differs &= ~free
    wrong = int(differs.sum())
    if not wrong:
        return Verdict(key, place, "pass", 0.0, elements=actual.size)
    index = tuple(np.argwhere(differs)[0].tolist())
    reason = f"at {list(index)}: {actual[index]}, expected {value[index]}"
    reason = f"{wrong} of {actual.size} elements differ; {reason}"
    return Verdict(key, place, "diverged", np.inf, reason, index, wrong, actual.size)


def _within(key: str, place: str, x: Array, value: Array, bound: Array, dtype: str) -> Verdict:
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(x - value)
        largest = FLOATS[dtype].largest
        over = np.isinf(x) & (np.sign(x) == np.sign(value)) & (np.abs(value) + bound >= largest)
        agree = (x == value) | (np.isnan(x) & np.isnan(value)) | over | np.isinf(bound)
        ratio = np.where(agree, 0.0, error / bound)
    ratio = np.where(np.isnan(ratio), np.inf, ratio)
    if not ratio.size:
        return Verdict(key, place, "pass")
    if np.all(np.isinf(bound) & np.isfinite(value)):
        reason = f"{place}: its terms exceed the largest number of its type"
        return not_judged(key, reason, place)
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(ratio)), ratio.shape))
    beyond = ratio > 1
    worst, wrong = float(ratio[index]), int(beyond.sum())
    odd = int((beyond & ~(np.isfinite(x) & np.isfinite(value))).sum()) if wrong else 0
    text = f"at {list(index)}: {x[index]:.9g}, expected {value[index]:.9g} +- {bound[index]:.3g}"
    text += f"; {wrong} of {x.size} elements beyond their bound" if wrong else ""
    status = "diverged" if wrong else "pass"
    return Verdict(key, place, status, worst, text, index, wrong, x.size, odd)


def not_judged(key: str, reason: str, place: str = "") -> Verdict:
    """Return a verdict that nothing can be said of a tensor, or of the whole call, with the reason."""
    return Verdict(key, place, "not judged", reason=reason)


def worst(verdicts: list[Verdict]) -> Verdict:
    """Return the verdict that decides for a call: a divergence, else one not judged, else the closest to its bound."""
    order = ("pass", "not judged", "diverged")
    return max(verdicts, key=lambda v: (order.index(v.status), v.ratio))
