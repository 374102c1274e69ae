"""Compare what a program computed with what it should have: verdicts with observed error over bound."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from telechat_moe.tools.align.numerics import FLOATS, is_float
from telechat_moe.tools.align.operators.approx import Approx, Array

Status = Literal["pass", "diverged", "not judged"]


@dataclass(frozen=True)
class Verdict:
    """The verdict on one tensor.

    Attributes:
        key: Key of the call in the dump.
        place: Position of the tensor in the call, such as ``output.0``; empty for a call that was not judged.
        status: See :data:`Status`.
        ratio: Largest error over its bound; 0 where integers are equal, infinite where they are not.
        reason: One sentence: where the error is largest, or why it was not judged.
        element: Index of that element.
        wrong: Number of elements beyond their bound.
        elements: Number of elements compared.
        not_finite: Number of wrong elements where NaN or infinity is found or expected.
    """

    key: str
    place: str
    status: Status
    ratio: float = 0.0
    reason: str = ""
    element: tuple[int, ...] = ()
    wrong: int = 0
    elements: int = 0
    not_finite: int = 0


def judge(
    key: str,
    place: str,
    found: Array,
    expected: Approx | Array,
    dtype: str,
    free: Array | None = None,
) -> Verdict:
    """Compare a tensor with its reference.

    Args:
        key: Key of the call.
        place: Position of the tensor in the call.
        found: What the program computed, widened.
        expected: What it should have computed; a plain array must be matched exactly.
        dtype: Type of the program's tensor.
        free: Where integers may differ (ties).
    """
    value = expected.value if isinstance(expected, Approx) else np.asarray(expected)
    if value.shape != found.shape:
        try:
            value = (
                np.broadcast_to(value, found.shape)
                if value.size == 1
                else value.reshape(found.shape)
            )
        except ValueError:
            value = None
        if value is None or (
            value.size != 1 and np.squeeze(np.empty(found.shape)).shape != _squeezed(expected)
        ):
            said = f"shape {list(found.shape)}, expected {list(np.shape(_values(expected)))}"
            return Verdict(key, place, "diverged", np.inf, said, (), found.size, found.size)
    if not is_float(dtype):
        return _exact(key, place, found, value, free)
    x = np.asarray(found, np.float64)
    if isinstance(expected, Approx):
        bound = (
            np.broadcast_to(expected.bound(dtype), expected.shape).reshape(value.shape)
            if expected.value.size == value.size
            else np.broadcast_to(expected.bound(dtype), value.shape)
        )
    else:
        bound = Approx(value).bound(dtype)
    bound = bound + (0.0 if dtype == "float16" else 2.0 ** FLOATS[dtype].low)  # flushed to zero
    return _within(key, place, x, value, bound, dtype)


def _values(expected: Approx | Array) -> Array:
    return expected.value if isinstance(expected, Approx) else np.asarray(expected)


def _squeezed(expected: Approx | Array) -> tuple[int, ...]:
    return np.squeeze(_values(expected)).shape


def _exact(key: str, place: str, found: Array, value: Array, free: Array | None) -> Verdict:
    differs = found.astype(np.float64) != value.astype(np.float64)
    if free is not None:
        differs &= ~free
    wrong = int(differs.sum())
    if not wrong:
        return Verdict(key, place, "pass", 0.0, elements=found.size)
    at = tuple(int(i) for i in np.argwhere(differs)[0]) if found.ndim else ()
    said = (
        f"{wrong} of {found.size} elements differ; at {list(at)}: {found[at]}, expected {value[at]}"
    )
    return Verdict(key, place, "diverged", np.inf, said, at, wrong, found.size)


def _within(key: str, place: str, x: Array, value: Array, bound: Array, dtype: str) -> Verdict:
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(x - value)
        largest = FLOATS[dtype].largest
        over = np.isinf(x) & (np.sign(x) == np.sign(value)) & (np.abs(value) + bound >= largest)
        same = (x == value) | (np.isnan(x) & np.isnan(value)) | over | np.isinf(bound)
        ratio = np.where(same, 0.0, error / bound)
    ratio = np.where(np.isnan(ratio), np.inf, ratio)
    if not ratio.size:
        return Verdict(key, place, "pass")
    if np.all(np.isinf(bound) & np.isfinite(value)):
        why = f"{place}: what it is made of is beyond the largest number of its type"
        return Verdict(key, "", "not judged", reason=why)
    at = tuple(int(i) for i in np.unravel_index(int(np.argmax(ratio)), ratio.shape))
    beyond = ratio > 1
    worst, wrong = float(ratio[at]), int(beyond.sum())
    odd = int((beyond & ~(np.isfinite(x) & np.isfinite(value))).sum()) if wrong else 0
    said = f"at {list(at)}: {x[at]:.9g}, expected {value[at]:.9g} +- {bound[at]:.3g}" + (
        f"; {wrong} of {x.size} elements beyond their bound" if wrong else ""
    )
    return Verdict(key, place, "diverged" if wrong else "pass", worst, said, at, wrong, x.size, odd)


def not_judged(key: str, why: str) -> Verdict:
    """Return a verdict that nothing can be said, with the reason."""
    return Verdict(key, "", "not judged", reason=why)


def worst(verdicts: list[Verdict]) -> Verdict:
    """Return the verdict that decides for a call: a divergence, else one not judged, else the closest to its bound."""
    order: dict[Any, int] = {"diverged": 2, "not judged": 1, "pass": 0}
    return max(verdicts, key=lambda v: (order[v.status], v.ratio))
