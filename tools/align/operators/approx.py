"""Arithmetic that knows its own rounding errors: float64 values, each with the size of error that a program makes.

A reference formula written on :class:`Approx` gives the exact result (float64, far below any error of interest) and how
far a correct program strays from it. Such a program rounds each intermediate result to a *stored* type and adds up in
an *accumulating* type. Two sizes are carried along:

* ``sigma``: roundings are independent, of mean zero and at most a unit roundoff, so they add up as root of the sum of
  squares: the probabilistic model of Higham and Mary, "A new approach to probabilistic rounding error analysis" (2019);
* ``limit``: their sum, which nothing can exceed.

An element's :meth:`Approx.bound` is the smaller of ``limit`` and :data:`SIGMAS` ``sigma``, and the rounding of the result.
Sums may be made in any order: over n terms of mean m and variance v, the k-th partial sum is about
``|m| k + sqrt(v k)``, and each is rounded once. Where neighbours are alike (tokens of one document), the partial sums in
their order are larger: what they really are, at the ends of blocks of terms, counts as well.

Operations remember where they came from, so that :func:`gradients` differentiates a formula in the same arithmetic.
Derivatives are taken at the stored results, as programs do.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from telechat_moe.tools.align.numerics import FLOATS, Float, spacing

Array = np.ndarray[Any, np.dtype[Any]]
Axes = int | tuple[int, ...] | None
Back = Callable[["Approx"], "Approx"]

SIGMAS = 8.0
"""Standard deviations to a bound. With 10^8 elements 6 would do for normal errors; the sizes are estimates, too."""

_ROUNDING = 3**-0.5  # standard deviation of an error that is uniform in +-1 unit roundoff
_LOST = 1e-140  # squares of smaller deviations underflow
_FUNCTION_ULPS = 4.0  # exp, log, tanh ... of vector libraries: at most 4 ULP in float32


class Approx:
    """An array and how far off each element may be.

    Args:
        value: Exact values.
        stored: Type that a correct program rounds intermediate results to.
        accumulated: Type that it adds up in.
        sigma: Standard deviations of the errors, an array or 0.
        limit: Largest errors, an array or 0.
        parents: What it was computed from, each with the function from its gradient to theirs.
    """

    __array_ufunc__ = None  # NumPy arrays on the left hand over to the methods below
    __slots__ = ("accumulated", "limit", "parents", "sigma", "stored", "value")

    def __init__(
        self,
        value: Any,
        stored: str = "float32",
        accumulated: str | None = None,
        sigma: Any = 0.0,
        limit: Any = 0.0,
        parents: Sequence[tuple["Approx", Back]] = (),
    ) -> None:
        self.value: Array = np.asarray(value, np.float64)
        self.stored = stored
        self.accumulated = accumulated or ("float64" if stored == "float64" else "float32")
        self.sigma: Array = np.asarray(sigma, np.float64)
        self.limit: Array = np.asarray(limit, np.float64)
        self.parents = tuple(parents)

    @property
    def unit(self) -> float:
        """Unit roundoff of the stored type."""
        return FLOATS[self.stored].unit

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return self.value.shape

    @property
    def is_exact(self) -> bool:
        """Whether no error was made yet."""
        return not np.any(self.limit)

    def bound(self, dtype: str) -> Array:
        """Return how far a correct result, stored in a type, may be from :attr:`value`, per element."""
        usual = np.where(self.sigma < _LOST, self.limit, SIGMAS * self.sigma)
        inner = np.broadcast_to(np.minimum(usual, self.limit), self.shape)
        # In double precision the values here are not exact either.
        inner = inner * (2.0 if dtype == "float64" else 1.0)
        return inner + 0.5 * spacing(np.abs(self.value) + inner, dtype)

    # ------------------------------------------------------------------ making results

    def made(
        self,
        value: Any,
        terms: Sequence[tuple[Any, "Approx"]] = (),
        roundings: float = 1.0,
        parents: Sequence[tuple["Approx", Back]] = (),
        own: tuple[Any, Any] | None = None,
    ) -> "Approx":
        """Return a result.

        Args:
            value: Its exact values.
            terms: Derivative by each operand, and the operand.
            roundings: In unit roundoffs. What is above 1 is the error of a function, which is computed in the
                accumulating type, in float16 by some in that type itself, to one ULP.
            parents: See :class:`Approx`.
            own: Further error of the operation itself: standard deviation and limit.
        """
        value = np.asarray(value, np.float64)
        with np.errstate(all="ignore"):
            step = self._rounding(np.abs(value), roundings)
            variance, limit = np.square(step * _ROUNDING), step
            if own is not None:
                variance, limit = variance + np.square(own[0]), limit + own[1]
            for slope, operand in terms:
                if not operand.is_exact:
                    size = np.abs(slope)
                    variance = variance + np.square(size * operand.sigma)
                    limit = limit + size * operand.limit
            sigma = np.sqrt(variance)
        return Approx(value, self.stored, self.accumulated, _known(sigma), _known(limit), parents)

    def _rounding(self, size: Array, roundings: float) -> Array:
        """Return the largest error of one rounding of values of a size."""
        kind = FLOATS[self.stored]
        further = max(0.0, roundings - 1) * FLOATS[self.accumulated].unit
        if further and self.stored == "float16":
            further += kind.unit
        step = (min(roundings, 1.0) * kind.unit + further) * size
        least = 2.0**kind.low
        if roundings and np.any(size < 2 * least):
            # Below the smallest normal number: flushed to zero, or in float16 rounded to the last bit.
            lost = least * kind.unit if self.stored == "float16" else size
            step = np.where(
                size < 2 * least, np.where(size == 0, 0.0, np.maximum(step, lost)), step
            )
        over = (size > kind.largest) & np.isfinite(size)
        return np.where(over, np.inf, step) if np.any(over) else step

    def constant(self, value: Any) -> "Approx":
        """Return exact values with the same types."""
        return value if isinstance(value, Approx) else Approx(value, self.stored, self.accumulated)

    def stop(self) -> "Approx":
        """Return the same numbers without their history."""
        return Approx(self.value, self.stored, self.accumulated, self.sigma, self.limit)

    # ------------------------------------------------------------------ element by element

    def __add__(self, other: Any) -> "Approx":
        """Sum."""
        o = self.constant(other)
        parents = [(self, lambda g: _fit(g, self)), (o, lambda g: _fit(g, o))]
        return self.made(self.value + o.value, [(1.0, self), (1.0, o)], 1.0, parents)

    __radd__ = __add__

    def __sub__(self, other: Any) -> "Approx":
        """Difference."""
        return self + -self.constant(other)

    def __rsub__(self, other: Any) -> "Approx":
        """Difference."""
        return -self + other

    def __neg__(self) -> "Approx":
        """Negative, exact."""
        return self.times(np.asarray(-1.0))

    def __mul__(self, other: Any) -> "Approx":
        """Product."""
        o = self.constant(other)
        a, b = self.stop(), o.stop()
        parents = [(self, lambda g: _fit(g * b, self)), (o, lambda g: _fit(g * a, o))]
        both = None
        if not self.is_exact and not o.is_exact:
            both = self.sigma * o.sigma, self.limit * o.limit
        terms = [(o.value, self), (self.value, o)]
        return self.made(self.value * o.value, terms, 1.0, parents, both)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> "Approx":
        """Quotient; division by zero gives what IEEE 754 says."""
        o = self.constant(other)
        with np.errstate(all="ignore"):
            value = self.value / o.value
            slopes = [(1 / o.value, self), (value / o.value, o)]
        result = self.made(value, slopes)
        divisor, quotient = o.stop(), result.stop()
        result.parents = (
            (self, lambda g: _fit(g / divisor, self)),
            (o, lambda g: _fit(-(g * (quotient / divisor)), o)),
        )
        return result

    def __rtruediv__(self, other: Any) -> "Approx":
        """Quotient."""
        return self.constant(other) / self

    def apply(
        self,
        value: Array,
        slope: Array,
        derivative: Callable[["Approx", "Approx"], "Approx"],
        ulps: float = _FUNCTION_ULPS,
    ) -> "Approx":
        """Return the result of a function.

        Args:
            value: Its values.
            slope: Its derivatives, for the error of the argument.
            derivative: Makes the derivative from argument and result, as a backward kernel does.
            ulps: Accuracy of the function.
        """
        result = self.made(value, [(slope, self)], ulps)
        x, y = self.stop(), result.stop()
        # Some kernels scale the gradient first: in float16 what is below the smallest normal number loses digits.
        grain = 2.0**-25 if self.stored == "float16" else 0.0
        result.parents = ((self, lambda g: (g.plus(grain) if grain else g) * derivative(x, y)),)
        return result

    def exp(self) -> "Approx":
        """Exponential."""
        with np.errstate(over="ignore"):
            value = np.exp(self.value)
            slope = value
            if (
                not self.is_exact
            ):  # errors of the argument may be large: exp(x + e) - exp(x), not its first order
                most = np.clip(np.minimum(SIGMAS * self.sigma, self.limit), 1e-9, 700.0)
                slope = np.where(most > 0.01, value * np.expm1(most) / most, value)
        return self.apply(value, slope, lambda x, y: y)

    def log(self) -> "Approx":
        """Natural logarithm."""
        with np.errstate(all="ignore"):
            return self.apply(np.log(self.value), 1 / self.value, lambda x, y: 1 / x)

    def sqrt(self) -> "Approx":
        """Square root."""
        with np.errstate(all="ignore"):
            value = np.sqrt(self.value)
            return self.apply(value, 0.5 / value, lambda x, y: 0.5 / y, 1.0)

    def rsqrt(self) -> "Approx":
        """Reciprocal square root."""
        with np.errstate(all="ignore"):
            value = self.value**-0.5
            return self.apply(value, 0.5 * value / self.value, lambda x, y: -0.5 * (y * y * y))

    def sin(self) -> "Approx":
        """Sine; near its zeros the error is that of the argument's reduction."""
        slope = np.cos(self.value)
        return self.apply(np.sin(self.value), slope, lambda x, y: x.cos()).plus(self.unit)

    def cos(self) -> "Approx":
        """Cosine."""
        slope = np.sin(self.value)
        return self.apply(np.cos(self.value), slope, lambda x, y: -x.sin()).plus(self.unit)

    def sigmoid(self) -> "Approx":
        """Logistic function."""
        e = np.exp(-np.abs(self.value))
        value = np.where(self.value >= 0, 1 / (1 + e), e / (1 + e))
        return self.apply(value, value * (1 - value), lambda x, y: y * (1 - y), _FUNCTION_ULPS + 2)

    def tanh(self) -> "Approx":
        """Hyperbolic tangent."""
        value = np.tanh(self.value)
        return self.apply(value, 1 - value * value, lambda x, y: 1 - y * y)

    def erf(self) -> "Approx":
        """Error function; vector libraries use an approximation of constant absolute error."""
        from math import erf

        value = np.vectorize(erf, otypes=[np.float64])(self.value)
        slope = 2 / np.pi**0.5 * np.exp(-np.square(self.value))
        derivative = 2 / np.pi**0.5
        return self.apply(value, slope, lambda x, y: (-(x * x)).exp() * derivative).plus(
            8 * self.unit
        )

    def __pow__(self, exponent: Any) -> "Approx":
        """Power with a constant exponent."""
        n = float(exponent)
        if n == 2:
            return self * self
        with np.errstate(all="ignore"):
            value, slope = self.value**n, n * self.value ** (n - 1)
        ulps = 1.0 if n == 0.5 else 2 * _FUNCTION_ULPS
        return self.apply(value, slope, lambda x, y: x ** (n - 1) * n, ulps)

    def plus(self, error: Any) -> "Approx":
        """Return the same value with one more error of a given size."""
        sigma, limit = np.hypot(self.sigma, error), self.limit + error
        return Approx(self.value, self.stored, self.accumulated, sigma, limit, self.parents)

    def abs(self) -> "Approx":
        """Magnitude, exact."""
        return self.times(np.sign(self.value))

    def times(self, factor: Array) -> "Approx":
        """Return a product with -1, 0, 1 or other factors that round nothing.

        A factor of 0 is a mask: it leaves 0 of NaN and infinity, too.
        """
        size = np.abs(factor)
        with np.errstate(invalid="ignore"):  # 0 times what is not finite
            return Approx(
                np.where(size == 0, 0.0, self.value * factor),
                self.stored,
                self.accumulated,
                _known(self.sigma * size),
                _known(self.limit * size),
                [(self, lambda g: _fit(g.times(factor), self))],
            )

    # ------------------------------------------------------------------ reductions

    def sum(self, axis: Axes = None, keepdims: bool = False) -> "Approx":
        """Sum in any order."""
        value = self.value.sum(axis, keepdims=True)
        squares = np.square(self.value).sum(axis, keepdims=True)
        count = self.value.size // max(value.size, 1)
        shape = self.shape
        unit = FLOATS[self.accumulated].unit
        result = self._added(
            value,
            squares,
            count,
            None if self.is_exact else lambda x: np.broadcast_to(x, shape).sum(axis, keepdims=True),
            [(self, lambda g: g.spread(shape))],
            alike(self.value, axis),
            lost(self.value, value, squares, axis, unit),
            walk_along(self.value, axis),
        )
        return result if keepdims else result.moved(lambda x: _squeezed(x, axis))

    def _added(
        self,
        value: Array,
        squares: Array,
        count: Any,
        carry: Callable[[Array], Array] | None,
        parents: Sequence[tuple["Approx", Back]],
        same: Any = 0.0,
        missed: Any = 0.0,
        walk: Any = 0.0,
    ) -> "Approx":
        """Return a sum: roundings of the accumulation, errors of the terms, and the rounding when it is stored."""
        kind = FLOATS[self.accumulated]
        own_sigma, own_limit = sum_errors(value, squares, count, kind, same, walk)
        own_sigma = np.hypot(own_sigma, np.minimum(missed, own_limit))
        if carry is not None:
            own_sigma = np.sqrt(own_sigma**2 + carry(np.square(self.sigma)))
            own_limit = own_limit + carry(self.limit)
        same = self.stored == self.accumulated
        return self.made(value, (), 0.0 if same else 1.0, parents, (own_sigma, own_limit))

    def mean(self, axis: Axes = None, keepdims: bool = False) -> "Approx":
        """Mean."""
        total = self.sum(axis, keepdims)
        return total / (self.value.size / max(total.value.size, 1))

    def cumsum(self, axis: int) -> "Approx":
        """Running sum."""
        value, squares = self.value.cumsum(axis), np.square(self.value).cumsum(axis)
        shape = [1] * self.value.ndim
        shape[axis] = -1
        count = np.arange(1, self.shape[axis] + 1).reshape(shape)

        def back(g: "Approx") -> "Approx":
            return (
                g.moved(lambda x: np.flip(x, axis)).cumsum(axis).moved(lambda x: np.flip(x, axis))
            )

        carry = None
        if not self.is_exact:
            carry = lambda x: np.broadcast_to(x, self.shape).cumsum(axis)  # noqa: E731
        walk = np.square(value).cumsum(axis) / count
        same = alike(self.value, axis)
        return self._added(value, squares, count, carry, [(self, back)], same, 0.0, walk)

    def matmul(self, other: Any) -> "Approx":
        """Matrix product of arrays with two or more dimensions."""
        o = self.constant(other)
        value, walk = walk_of_product(self.value, o.value)
        squares = np.square(self.value) @ np.square(o.value)
        same = alike(self.value, -1) * alike(o.value, -2)
        own = sum_errors(value, squares, self.shape[-1], FLOATS[self.accumulated], same, walk)
        variance, limit = np.square(own[0]), own[1]
        for x, y, is_left in ((self, o, True), (o, self, False)):
            if not x.is_exact:
                sigma, most = (np.broadcast_to(v, x.shape) for v in (x.sigma, x.limit))
                whole = np.hypot(y.value, y.sigma), np.abs(y.value) + (y.limit if is_left else 0.0)
                pair = (np.square(sigma), np.square(whole[0])), (most, whole[1])
                (a, b), (c, d) = pair if is_left else [p[::-1] for p in pair]
                variance, limit = variance + a @ b, limit + c @ d
        a, b = self.stop(), o.stop()
        parents = [
            (self, lambda g: _fit(g.matmul(b.swap(-1, -2)), self)),
            (o, lambda g: _fit(a.swap(-1, -2).matmul(g), o)),
        ]
        same = self.stored == self.accumulated
        return self.made(value, (), 0.0 if same else 1.0, parents, (np.sqrt(variance), limit))

    # ------------------------------------------------------------------ moves

    def moved(self, move: Callable[[Array], Array], repeats: bool = False) -> "Approx":
        """Return all arrays moved by the same function (indices, shapes, transposition, repetition).

        Args:
            move: Takes an array of this shape.
            repeats: It may repeat elements or leave some out; then gradients are added up.
        """
        errors = [
            move(np.broadcast_to(e, self.shape)) if np.any(e) else 0.0
            for e in (self.sigma, self.limit)
        ]
        shape = self.shape

        def back(g: "Approx") -> "Approx":
            index = move(np.arange(self.value.size).reshape(shape)).reshape(-1)
            flat = g.moved(lambda x: x.reshape(-1))
            if not repeats and index.size == self.value.size:
                order = np.argsort(index)
                return flat.moved(lambda x: x[order].reshape(shape))
            return scatter_add((self.value.size,), index, flat).moved(lambda x: x.reshape(shape))

        return Approx(
            move(self.value), self.stored, self.accumulated, *errors, parents=[(self, back)]
        )

    def spread(self, shape: Sequence[int]) -> "Approx":
        """Return it repeated to a shape; its gradient is a sum, in the accumulating type."""
        shape = tuple(shape)
        errors = [np.broadcast_to(e, shape) if np.any(e) else 0.0 for e in (self.sigma, self.limit)]
        value = np.broadcast_to(self.value, shape)
        parents = [(self, lambda g: _fit(g, self))]
        return Approx(value, self.stored, self.accumulated, *errors, parents=parents)

    def reshape(self, *shape: int) -> "Approx":
        """Other shape."""
        return self.moved(lambda x: x.reshape(shape))

    def transpose(self, *axes: int) -> "Approx":
        """Other order of dimensions."""
        return self.moved(lambda x: x.transpose(*axes))

    def swap(self, a: int, b: int) -> "Approx":
        """Two dimensions exchanged."""
        return self.moved(lambda x: np.swapaxes(x, a, b))

    def __getitem__(self, key: Any) -> "Approx":
        """Part, or rows by index."""
        return self.moved(lambda x: x[key], repeats=True)


def sum_errors(
    total: Array, squares: Array, count: Any, kind: Float, same: Any = 0.0, walk: Any = 0.0
) -> tuple[Array, Array]:
    """Return standard deviation and limit of the error of a sum, from its terms' sum and sum of squares.

    Each term is rounded once (products) and each partial sum once: the k-th is about ``|m| k + sqrt(v k)``. Roundings
    of equal terms are equal, not independent. The limit is ``n u`` times the sum of magnitudes, by Cauchy's inequality.

    Args:
        total: Sum.
        squares: Sum of squares.
        count: Number of terms.
        kind: Type that they are added up in.
        same: Share of the pairs of terms that are equal, see :func:`alike`.
        walk: Mean square of the partial sums in the order of the terms, where known.
    """
    count = np.maximum(count, 1)
    mean = np.abs(total) / count
    variance = np.maximum(squares / count - mean**2, 0.0)
    partial = mean**2 * count**3 / 3 + variance * count**2 / 2
    partial = np.maximum(partial, count * walk)
    partial = partial * (1 + count * same)
    sigma = kind.unit * _ROUNDING * np.sqrt(partial + squares + total**2)
    flushed = count * 2.0**kind.low  # terms below the smallest normal number
    return sigma + flushed, kind.unit * (count + 1) * np.sqrt(count * squares) + flushed


def alike(x: Array, axis: Axes) -> Array:
    """Return the share of pairs of terms along an axis that are equal and not zero, estimated from three distances."""
    rows, axes = _terms(x, axis)
    count = rows.shape[-1]
    if count < 8:
        return np.zeros(())
    pairs = [(rows[..., lag:], rows[..., :-lag]) for lag in (1, count // 3, count // 2)]
    shares = [((a == b) & (a != 0)).mean(-1) for a, b in pairs]
    return np.expand_dims(np.mean(shares, 0), axes)


def walk_along(x: Array, axis: Axes) -> Array:
    """Return the mean square of the partial sums along axes, at the ends of blocks of terms."""
    rows, axes = _terms(x, axis)
    starts = _blocks(rows.shape[-1])
    if len(starts) < 2:
        return np.zeros(())
    partial = np.add.reduceat(rows, starts, -1).cumsum(-1)
    return np.expand_dims(np.square(partial).mean(-1), axes)


def walk_of_product(a: Array, b: Array) -> tuple[Array, Array]:
    """Return a matrix product, and the mean square of its partial sums at the ends of blocks of terms.

    Programs with two accumulators add up even and odd terms apart (OpenBLAS does, for AVX-512): where signs alternate,
    those partial sums are larger than the ones in order.
    """
    starts = _blocks(a.shape[-1])
    if len(starts) < 2:
        return a @ b, np.zeros(())
    even, odd = np.zeros(()), np.zeros(())
    walk, walk_apart = np.zeros(()), np.zeros(())
    for start, stop in zip(starts, [*starts[1:], None], strict=True):
        left, right = a[..., start:stop], b[..., start:stop, :]
        even = even + np.ascontiguousarray(left[..., ::2]) @ right[..., ::2, :]
        odd = odd + np.ascontiguousarray(left[..., 1::2]) @ right[..., 1::2, :]
        walk = walk + np.square(even + odd)
        walk_apart = walk_apart + (np.square(even) + np.square(odd)) / 2
    return even + odd, np.maximum(walk, walk_apart) / len(starts)


def _blocks(count: int) -> list[int]:
    """Return where blocks of about 32 terms or more begin, all at even terms, at most 16."""
    number = min(16, count // 32)
    return [i * count // number // 2 * 2 for i in range(number)]


def _terms(x: Array, axis: Axes) -> tuple[Array, list[int]]:
    """Return an array with the axes of a sum as its last, in one, and which they are."""
    axes = tuple(range(x.ndim)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    rest = _rest(x, axes)
    count = x.size // max(int(np.prod(rest, dtype=np.int64)), 1)
    rows = np.moveaxis(x, axes, range(-len(axes), 0)).reshape(*rest, count)
    return rows, [a % x.ndim for a in axes]


def lost(x: Array, total: Array, squares: Array, axis: Axes, unit: float) -> Array:
    """Return what a sum may lack because small terms vanish beside the partial sums, as a standard deviation."""
    partial = np.abs(total) + np.sqrt(squares)
    small = np.where(np.abs(x) < 2 * unit * partial, x, 0.0)
    if not np.any(small):
        return np.zeros(())
    whole = np.abs(small.sum(axis, keepdims=True)) / 4
    return whole + np.sqrt(np.square(small).sum(axis, keepdims=True))


def _rest(x: Array, axes: tuple[int, ...]) -> list[int]:
    taken = {a % x.ndim for a in axes}
    return [n for i, n in enumerate(x.shape) if i not in taken]


def where(condition: Array, a: Any, b: Any) -> Approx:
    """Choose by condition, exact."""
    known = a if isinstance(a, Approx) else b
    x, y = known.constant(a), known.constant(b)
    keep = condition.astype(np.float64)
    return Approx(
        np.where(condition, x.value, y.value),
        known.stored,
        known.accumulated,
        np.where(condition, x.sigma, y.sigma),
        np.where(condition, x.limit, y.limit),
        [(x, lambda g: _fit(g.times(keep), x)), (y, lambda g: _fit(g.times(1 - keep), y))],
    )


def concatenate(parts: Sequence[Approx], axis: int) -> Approx:
    """Put arrays one behind the other, exact."""
    ends = np.cumsum([p.shape[axis] for p in parts])
    parents = []
    for part, end in zip(parts, ends, strict=True):
        index = np.arange(end - part.shape[axis], end)
        parents.append((part, lambda g, index=index: g.moved(lambda x: x.take(index, axis), True)))
    first = parts[0]
    sigma = np.concatenate([np.broadcast_to(p.sigma, p.shape) for p in parts], axis)
    limit = np.concatenate([np.broadcast_to(p.limit, p.shape) for p in parts], axis)
    value = np.concatenate([p.value for p in parts], axis)
    return Approx(value, first.stored, first.accumulated, sigma, limit, parents)


def scatter_add(
    shape: tuple[int, ...], index: Any, parts: Approx, start: Approx | None = None
) -> Approx:
    """Add parts to zeros, or to what is there, at an index, as ``numpy.add.at`` does, in any order.

    Atomics add in the stored type.
    """

    def add(x: Any) -> Array:
        out = np.zeros(shape)
        np.add.at(out, index, np.broadcast_to(x, parts.shape))
        return out

    total, count, squares = add(parts.value), add(1.0), add(np.square(parts.value))
    if start is not None:
        total, count, squares = total + start.value, count + 1, squares + np.square(start.value)
    sigma, limit = sum_errors(total, squares, count, FLOATS[parts.stored])
    sigma, limit = (np.where(count > 1, x, 0.0) for x in (sigma, limit))
    if not parts.is_exact:
        sigma = np.sqrt(sigma**2 + add(np.square(parts.sigma)))
        limit = limit + add(parts.limit)
    parents: list[tuple[Approx, Back]] = [(parts, lambda g: g[index])]
    if start is not None:
        sigma, limit = np.hypot(sigma, start.sigma), limit + start.limit
        parents.append((start, lambda g: g))
    return Approx(total, parts.stored, parts.accumulated, sigma, limit, parents)


def gradients(
    outputs: Sequence[tuple[Approx, Approx]], inputs: Sequence[Approx]
) -> list[Approx | None]:
    """Return the gradient of each input.

    Args:
        outputs: Results with the gradients that come in.
        inputs: What they were computed from.

    Returns:
        Gradients in the order of ``inputs``; None: no output depends on it.
    """
    found: dict[int, Approx] = {}
    for output, gradient in outputs:
        found[id(output)] = found[id(output)] + gradient if id(output) in found else gradient
    for node in _sorted([output for output, _ in outputs]):
        gradient = found.get(id(node))
        if gradient is None:
            continue
        for parent, back in node.parents:
            part = back(gradient)
            found[id(parent)] = found[id(parent)] + part if id(parent) in found else part
    return [found[id(x)].stop() if id(x) in found else None for x in inputs]


def _sorted(roots: Sequence[Approx]) -> list[Approx]:
    """Return all that roots depend on, each before what it was computed from."""
    order: list[Approx] = []
    seen: set[int] = set()
    stack: list[tuple[Approx, bool]] = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack += [(parent, False) for parent, _ in node.parents]
    return order[::-1]


def _fit(g: Approx, like: Approx) -> Approx:
    """Return a gradient summed over the dimensions in which its owner was repeated."""
    extra = len(g.shape) - len(like.shape)
    sizes = zip(g.shape[extra:], like.shape, strict=True)
    axes = tuple(range(extra)) + tuple(extra + i for i, (a, b) in enumerate(sizes) if a != b)
    return g.sum(axes, keepdims=True).reshape(*like.shape) if axes else g


def _squeezed(x: Array, axis: Axes) -> Array:
    return x.reshape(()) if axis is None else x.squeeze(axis)


def _known(error: Array) -> Array:
    return np.where(np.isnan(error), 0.0, error)
