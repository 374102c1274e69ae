"""Kinds of faults that the values of a wrong tensor show, beside what it should hold.

Each kind is a hypothesis that must explain the whole tensor: under it, the difference is within the bound. The first
hypothesis that does is the answer; one that merely comes close is not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from telechat_moe.numerics import FLOATS, round_to, spacing
from telechat_moe.tools.align.dump.records import Call, TensorRecord
from telechat_moe.tools.align.judge.divergent_call import DivergentCall
from telechat_moe.tools.align.judge.verdict import Explanation
from telechat_moe.tools.align.operators.approx import Array

_MOST_ROUNDINGS = 64  # of a narrow accumulator, in units of the largest value


@dataclass(frozen=True)
class Difference:
    """A wrong floating-point tensor: what it holds, what it should hold, and how far it may be from that."""

    x: Array  # what it holds
    value: Array  # what it should hold
    bound: Array  # how far each element may be from it
    call: Call  # the call that made it or was given it
    tensor: TensorRecord  # its record in the call
    divergent: DivergentCall | None = None  # None: a collective

    @cached_property
    def wrong(self) -> Array:
        """Where it is wrong."""
        return np.abs(self.x - self.value) > self.bound

    @property
    def residual(self) -> Array:
        """The difference of each element, over its bound."""
        with np.errstate(all="ignore"):
            return (self.x - self.value) / np.where(self.bound > 0, self.bound, 1.0)

    def fits(self, explained: Array, room: Array | float = 0.0) -> bool:
        """Return whether an explanation holds for all elements, and leaves far less of the error than there was."""
        room = 2 * self.bound + spacing(self.x, self.tensor.dtype) + room
        return close(self.x, explained, room) and _better(self.x, explained, self.value)

    def pattern(self) -> Explanation | None:
        """Return the first hypothesis on single values and their order that explains the whole tensor."""
        return next(filter(None, (hypothesis(self) for hypothesis in _PATTERNS)), None)

    def remainder(self) -> Explanation | None:
        """Return what the differences have in common where no better explanation is known."""
        return _row_sum(self) or _precision(self) or _region(self)


def close(x: Array, value: Array, bound: Array) -> bool:
    """Return whether every element is within its bound; infinities and NaN must be equal."""
    with np.errstate(invalid="ignore"):
        good = (np.abs(x - value) <= bound) | (x == value) | (np.isnan(x) & np.isnan(value))
    return bool(good.all())


def kind_of_integers(actual: Array, value: Array) -> Explanation:
    """Return the kind of fault of integers that must be equal to others."""
    a, b = actual.reshape(-1), value.reshape(-1)
    if a.size == b.size and np.array_equal(np.sort(a), np.sort(b)):
        return "permutation", "the same numbers in another order"
    wrong = int((a != b).sum())
    if wrong == 1:
        return "single element", "one number differs"
    return "wrong index", f"{wrong} of {a.size} numbers differ"


def _not_finite(d: Difference) -> Explanation | None:
    bad = ~np.isfinite(d.x) & np.isfinite(d.value)
    if not bad.any():
        return None
    kind = "NaN" if np.isnan(d.x[bad]).any() else "infinity"
    return "not finite", f"{kind} in {int(bad.sum())} of {d.x.size} elements"


def _zero(d: Difference) -> Explanation | None:
    zero = not np.any(d.x) and np.any(np.abs(d.value) > d.bound)
    return ("zero", "every element is 0") if zero else None


def _single(d: Difference) -> Explanation | None:
    if d.wrong.sum() != 1 or d.x.size < 4:
        return None
    index = tuple(np.argwhere(d.wrong)[0].tolist())
    return "single element", f"{list(index)} only: {d.x[index]:.6g} for {d.value[index]:.6g}"


def _skipped(d: Difference) -> Explanation | None:
    is_output = any(t is d.tensor for _, t in d.call.made())
    for place, other in d.call.given() if is_output else ():
        comparable = place.startswith("input") and other.shape == d.x.shape and other.read
        if comparable and np.array_equal(other.load().astype(np.float64), d.x):
            return "skipped", f"the result is {place}, unchanged"
    return None


def _scale(d: Difference) -> Explanation | None:
    finite = np.isfinite(d.value)
    if not np.array_equal(d.x[~finite], d.value[~finite], equal_nan=True):
        return None
    x, value, bound = (y[finite] for y in (d.x, d.value, d.bound))
    square = float((value * value).sum())
    if not square:
        return None
    k = float((x * value).sum()) / square
    room = 2 * (1 + abs(k)) * bound + 1e-6 * np.abs(k * value) + spacing(x, d.tensor.dtype)
    if abs(k - 1) < 1e-9 or not (close(x, k * value, room) and _better(x, k * value, value)):
        return None
    if abs(k + 1) < 1e-3:
        return "sign", "every element has the other sign"
    multiple = next((n for n in range(2, 65) if abs(k - n) < 1e-3 * n), None)
    part = next((n for n in range(2, 65) if abs(k * n - 1) < 1e-3), None)
    if x.size < 2 and not (multiple or part):
        return None  # any single number is a multiple of another
    if multiple:
        return "scale", f"every element is {multiple} times what it should be"
    if part:
        return "scale", f"every element is 1/{part} of what it should be"
    return "scale", f"every element is {k:.6g} times what it should be"


def _moved(d: Difference) -> Explanation | None:
    x, value, bound = d.x, d.value, d.bound
    square = x.ndim >= 2 and x.shape[-1] == x.shape[-2]
    if square and close(x, np.swapaxes(value, -1, -2), np.swapaxes(bound, -1, -2)):
        return "transpose", "the last two dimensions are exchanged"
    for axis in range(x.ndim):
        order = _order(*(np.moveaxis(y, axis, 0) for y in (x, value, bound)))
        if order is None or np.array_equal(order, np.arange(len(order))):
            continue
        kind = "permutation" if len(set(order.tolist())) == len(order) else "duplicated"
        off = np.flatnonzero(order != np.arange(len(order)))
        text = f"{len(off)} of {len(order)} places of dimension {axis} hold another's values, {off[0]} those of {order[off[0]]}"
        return kind, text
    flat_x, ranked = np.sort(x, None), np.argsort(value, None)
    flat_v, flat_bound = value.reshape(-1)[ranked], bound.reshape(-1)[ranked]
    if x.size > 1 and np.any(flat_v != flat_v[0]) and close(flat_x, flat_v, flat_bound):
        return "permutation", "the same values in another order"
    return None


def _dropped(d: Difference) -> Explanation | None:
    x, wrong = d.x, d.wrong
    if x.ndim >= 2 and np.any(wrong) and np.all(x[wrong] == 0):
        rows = np.flatnonzero(wrong.reshape(len(x), -1).any(1))
        all_zero = not np.any(x[rows])
        return "dropped", f"rows {rows[:6].tolist()} are 0" if all_zero else "some elements are 0"
    return None


def _offset(d: Difference) -> Explanation | None:
    x, value = d.x, d.value
    places: list[tuple[str, int | None]] = [("element", None)]
    places += [(f"place of dimension {i}", i) for i in range(x.ndim) if x.shape[i] >= 4]
    for word, axis in places if x.size >= 4 and np.all(np.isfinite(x)) else ():
        c = np.median(x - value, axis, keepdims=axis is not None)
        if d.fits(value + c, 1e-7 * np.abs(c)):
            by = f"{float(c):.6g}" if axis is None else "the same"
            return "offset", f"every {word} is off by {by}"
    return None


def _row_sum(d: Difference) -> Explanation | None:
    """Test whether each row is off by its own multiple of the result or of an argument."""
    rows = d.wrong.reshape(-1, d.x.shape[-1]).any(1) if d.x.ndim > 1 else np.zeros(0)
    if len(rows) < 2 or rows.mean() < 0.5 or d.x.shape[-1] < 4 or d.divergent is None:
        return None
    forward = d.divergent.forward
    records = [*d.call.given(), *([*forward.given(), *forward.made()] if forward else ())]
    values = [(p, t.load()) for p, t in records if t.shape == d.x.shape and t.read is not None]
    for name, y in [("the result", d.value), *values]:
        square = np.square(y.astype(np.float64)).sum(-1, keepdims=True)
        k = ((d.x - d.value) * y).sum(-1, keepdims=True) / np.where(square > 0, square, 1.0)
        if d.fits(d.value + k * y, 2 * np.abs(k) * d.bound):
            return "missing row sum", f"each row is off by its own multiple of {name}"
    return None


def _precision(d: Difference) -> Explanation | None:
    """Test whether the result was rounded to, or accumulated in, a narrower type."""
    x, size = d.x, np.abs(d.value)
    for narrow in ("float16", "bfloat16", "float8_e4m3", "float8_e5m2"):
        if FLOATS[narrow].bits >= FLOATS[d.tensor.dtype].bits or np.any(round_to(x, narrow) != x):
            continue
        if close(x, d.value, d.bound + 2 * FLOATS[narrow].unit * size + 1e-30):
            return "wrong dtype", f"every value is one of {narrow}"
    # Rounded more often than it should have been: relative to the largest, an error like a sum in a narrow type.
    error, scale = np.abs(x - d.value), size.max() or 1.0
    is_output = d.divergent is None or d.divergent.verdict.place.startswith("output")
    for narrow in ("float16", "bfloat16") if is_output else ():
        unit = FLOATS[narrow].unit * scale
        small = error.max() <= _MOST_ROUNDINGS * unit
        if small and np.median(error) >= unit / 256 and _narrow(x, narrow, d.divergent):
            share = f"{error.max() / scale:.2g} of the largest value"
            return "accumulator", f"the error is that of sums in {narrow} ({share})"
    return None


def _region(d: Difference) -> Explanation | None:
    """Test whether one region is wrong and the rest right."""
    x, wrong = d.x, d.wrong
    for axis in () if wrong.mean() > 0.9 else range(x.ndim):
        hit = np.flatnonzero(wrong.any(tuple(i for i in range(x.ndim) if i != axis)))
        if len(hit) < 0.5 * x.shape[axis] or len(hit) == 1 < x.shape[axis]:
            return "part", f"dimension {axis}: only {hit[:6].tolist()} of {x.shape[axis]} wrong"
    return None


def _better(x: Array, explained: Array, value: Array) -> bool:
    """Return whether an explanation leaves far less of the difference than there was."""
    return bool(np.square(x - explained).sum() <= 0.1 * np.square(x - value).sum())


def _order(x: Array, value: Array, bound: Array) -> Array | None:
    """Return which row of ``value`` each row of ``x`` equals; None: some equal no row."""
    rows, a, b = len(x), x.reshape(len(x), -1), value.reshape(len(x), -1)
    if not 2 <= rows <= 4096 or a.shape[1] < 2:
        return None
    limit = bound.reshape(rows, -1)
    right = (np.abs(a - b) <= limit).all(1)
    order = np.arange(rows)
    free = ~right  # rows that are not matched by a right row
    for i in np.flatnonzero(~right):
        off = np.abs(b - a[i])
        fits = np.flatnonzero((off <= limit + np.abs(b) * 1e-6).all(1))
        if not len(fits):
            return None
        options = fits[free[fits]] if free[fits].any() else fits
        order[i] = options[np.argmin(off[options].sum(1))]
        free[order[i]] = False
    return order


def _narrow(x: Array, dtype: str, divergent: DivergentCall | None) -> bool:
    """Return whether a program that stores everything in a narrow type could have made a result; unknown: True."""
    output = divergent.in_narrow(dtype) if divergent is not None else None
    if output is None or output[0].size != x.size:
        return True
    return close(x, output[0].reshape(x.shape), output[1].reshape(x.shape))


_PATTERNS: tuple[Callable[[Difference], Explanation | None], ...] = (
    *(_not_finite, _zero, _single, _skipped, _scale, _moved, _dropped, _offset),
)
