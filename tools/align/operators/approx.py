"""Arithmetic that tracks its own rounding errors: float64 values, each with the error that a program may make.

A reference formula written with :class:`Approx` gives the exact result (float64, far more exact than any error of
interest) and how far a correct program may deviate from it. Such a program rounds each intermediate result to a
*stored* type and sums in an *accumulating* type. Two sizes are propagated:

* ``sigma``: roundings are independent, of mean zero and at most a unit roundoff, so they add up as root of the sum of
  squares: the probabilistic model of Higham and Mary, "A new approach to probabilistic rounding error analysis" (2019);
* ``limit``: the sum of the largest errors, which nothing can exceed.

An element's :meth:`Approx.bound` is the smaller of ``limit`` and :data:`SIGMAS` ``sigma``, plus the result's rounding.
Sums may be made in any order: over n terms of mean m and variance v, the k-th partial sum is about
``|m| k + sqrt(v k)``, and each is rounded once. Where neighbours are alike (tokens of one document), the partial sums in
their order are larger: what they really are, at the ends of blocks of terms, counts as well.

Operations remember their operands, so that :func:`gradients` differentiates a formula in the same arithmetic.
Derivatives are taken at the stored results, as programs do.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from telechat_moe.numerics import FLOATS, Array, round_to, spacing
from telechat_moe.tools.align.operators.rounding_errors import (
    ROUNDING,
    ReducedAxes,
    alike,
    lost,
    rounding,
    sum_errors,
    walk_along,
    walk_of_product,
)
from telechat_moe.tools.align.thresholds import FUNCTION_ULPS, SIGMAS

Back = Callable[["Approx"], "Approx"]
Parents = Sequence[tuple["Approx", Back]]

_LOST = 1e-140  # squares of smaller deviations underflow


class Approx:
    """An array with the possible error of each element.

    Args:
        stored: Type that a correct program rounds intermediate results to.
        accumulated: Type that it sums in.
        sigma: Standard deviations of the errors, an array or 0.
        limit: Largest errors, an array or 0.
        parents: Its operands, each with the function from its gradient to the operand's.
    """

    __array_ufunc__ = None  # NumPy arrays on the left defer to the methods below
    __slots__ = ("accumulated", "limit", "parents", "sigma", "stored", "value")

    def __init__(
        self,
        value: Any,
        stored: str = "float32",
        accumulated: str | None = None,
        sigma: Any = 0.0,
        limit: Any = 0.0,
        parents: Parents = (),
    ) -> None:
        self.value: Array = np.asarray(value, np.float64)
        self.stored = stored
        self.accumulated = accumulated or ("float64" if stored == "float64" else "float32")
        self.sigma: Array = np.asarray(sigma, np.float64)
        self.limit: Array = np.asarray(limit, np.float64)
        self.parents: tuple[tuple[Approx, Back], ...] = tuple(parents)

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
        """Whether no error has been made yet."""
        return not np.any(self.limit)

    def bound(self, dtype: str) -> Array:
        """Return how far a correct result, stored in a type, may be from :attr:`value`, per element."""
        usual = np.where(self.sigma < _LOST, self.limit, SIGMAS * self.sigma)
        inner = np.broadcast_to(np.minimum(usual, self.limit), self.shape)
        # In double precision the values here are not exact either.
        inner = inner * (2.0 if dtype == "float64" else 1.0)
        return inner + 0.5 * spacing(np.abs(self.value) + inner, dtype)

    def result(
        self,
        value: Any,
        terms: Sequence[tuple[Any, "Approx"]] = (),
        roundings: float = 1.0,
        parents: Parents = (),
        added: tuple[Any, Any] | None = None,
    ) -> "Approx":
        """Return a result.

        Args:
            terms: Each operand with the derivative by it.
            roundings: Number of unit roundoffs. Those above 1 are the error of a function, which is computed in the
                accumulating type, or for float16 by some programs in float16, to one ULP.
            added: Additional error of the operation itself: standard deviation and limit.
        """
        value = np.asarray(value, np.float64)
        with np.errstate(all="ignore"):
            step = rounding(np.abs(value), roundings, self.stored, self.accumulated)
            variance, limit = np.square(step * ROUNDING), step
            if added is not None:
                variance, limit = variance + np.square(added[0]), limit + added[1]
            for slope, operand in terms:
                if not operand.is_exact:
                    size = np.abs(slope)
                    variance = variance + np.square(_carried(size, operand.sigma))
                    limit = limit + _carried(size, operand.limit)
            sigma = np.sqrt(variance)
        return self.like(
            value, _overflow_as_infinite(sigma, value), _overflow_as_infinite(limit, value), parents
        )

    def like(
        self, value: Any, sigma: Any = 0.0, limit: Any = 0.0, parents: Parents = ()
    ) -> "Approx":
        """Return other values with the same types."""
        return Approx(value, self.stored, self.accumulated, sigma, limit, parents)

    def constant(self, value: Any) -> "Approx":
        """Return exact values with the same types; an :class:`Approx` stays as it is."""
        return value if isinstance(value, Approx) else self.like(value)

    def stop(self) -> "Approx":
        """Return the same numbers without their history."""
        return self.like(self.value, self.sigma, self.limit)

    def __add__(self, other: Any) -> "Approx":
        o = self.constant(other)
        parents: Parents = [(self, lambda g: fit(g, self)), (o, lambda g: fit(g, o))]
        return self.result(self.value + o.value, [(1.0, self), (1.0, o)], 1.0, parents)

    __radd__ = __add__

    def __sub__(self, other: Any) -> "Approx":
        return self + -self.constant(other)

    def __rsub__(self, other: Any) -> "Approx":
        return -self + other

    def __neg__(self) -> "Approx":
        return self.times(np.asarray(-1.0))

    def __mul__(self, other: Any) -> "Approx":
        o = self.constant(other)
        a, b = self.stop(), o.stop()
        parents: Parents = [(self, lambda g: fit(g * b, self)), (o, lambda g: fit(g * a, o))]
        both = None
        if not self.is_exact and not o.is_exact:
            with np.errstate(all="ignore"):  # an error that is not known times none
                both = self.sigma * o.sigma, self.limit * o.limit
        terms = [(o.value, self), (self.value, o)]
        return self.result(self.value * o.value, terms, 1.0, parents, both)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> "Approx":
        """Return the quotient; division by zero gives what IEEE 754 says."""
        o = self.constant(other)
        with np.errstate(all="ignore"):
            value = self.value / o.value
            slopes = [(1 / o.value, self), (value / o.value, o)]
        result = self.result(value, slopes)
        divisor, quotient = o.stop(), result.stop()
        result.parents = (
            (self, lambda g: fit(g / divisor, self)),
            (o, lambda g: fit(-(g * (quotient / divisor)), o)),
        )
        return result

    def __rtruediv__(self, other: Any) -> "Approx":
        return self.constant(other) / self

    def apply(
        self,
        function: Callable[[Array], Array],
        derivative: Callable[[Any, Any], Any],
        ulps: float = FUNCTION_ULPS,
        slope: Array | None = None,
    ) -> "Approx":
        """Return the result of a function.

        Args:
            derivative: Computes the derivative from argument and result, as a backward kernel does.
            slope: Derivatives for the error of the argument, where ``derivative`` cannot compute them from arrays.
        """
        with np.errstate(all="ignore"):
            value = function(self.value)
            slope = derivative(self.value, value) if slope is None else slope
        result = self.result(value, [(slope, self)], ulps)
        x, y = self.stop(), result.stop()
        # Some kernels scale the gradient first: in float16 what is below the smallest normal number loses digits.
        grain = 2.0**-25 if self.stored == "float16" else 0.0
        result.parents = ((self, lambda g: (g.plus(grain) if grain else g) * derivative(x, y)),)
        return result

    def exp(self) -> "Approx":
        """Return the exponential, with the error of the argument to all orders."""
        with np.errstate(over="ignore"):
            slope = np.exp(self.value)
            if not self.is_exact:  # a large error e gives exp(x + e) - exp(x), not its first order
                largest = np.clip(np.minimum(SIGMAS * self.sigma, self.limit), 1e-9, 700.0)
                slope = np.where(largest > 0.01, slope * np.expm1(largest) / largest, slope)
        return self.apply(np.exp, lambda x, y: y, slope=slope)

    def log(self) -> "Approx":
        """Return the natural logarithm, NaN for negative values."""
        return self.apply(np.log, lambda x, y: 1 / x)

    def sqrt(self) -> "Approx":
        """Return the square root, which IEEE 754 rounds correctly."""
        return self.apply(np.sqrt, lambda x, y: 0.5 / y, 1.0)

    def rsqrt(self) -> "Approx":
        """Return the reciprocal square root, accurate to 4 ULP."""
        return self.apply(lambda x: x**-0.5, lambda x, y: -0.5 * (y * y * y))

    def sin(self) -> "Approx":
        """Return the sine; near its zeros the error is that of the argument's reduction."""
        return self.apply(np.sin, lambda x, y: x.cos(), slope=np.cos(self.value)).plus(self.unit)

    def cos(self) -> "Approx":
        """Return the cosine, with the error of the argument's reduction."""
        return self.apply(np.cos, lambda x, y: -x.sin(), slope=np.sin(self.value)).plus(self.unit)

    def sigmoid(self) -> "Approx":
        """Return the logistic function, accurate to 6 ULP."""

        def logistic(x: Array) -> Array:
            e = np.exp(-np.abs(x))
            return np.where(x >= 0, 1 / (1 + e), e / (1 + e))

        return self.apply(logistic, lambda x, y: y * (1 - y), FUNCTION_ULPS + 2)

    def tanh(self) -> "Approx":
        """Return the hyperbolic tangent, accurate to 4 ULP."""
        return self.apply(np.tanh, lambda x, y: 1 - y * y)

    def erf(self) -> "Approx":
        """Return the error function; vector libraries use an approximation of constant absolute error."""
        from scipy.special import erf

        factor = 2 / np.pi**0.5
        slope = factor * np.exp(-np.square(self.value))
        result = self.apply(erf, lambda x, y: (-(x * x)).exp() * factor, slope=slope)
        return result.plus(8 * self.unit)

    def __pow__(self, exponent: Any) -> "Approx":
        """Return the power with a constant exponent."""
        n = float(exponent)
        if n == 2:
            return self * self
        ulps = 1.0 if n == 0.5 else 2 * FUNCTION_ULPS
        return self.apply(lambda x: x**n, lambda x, y: x ** (n - 1) * n, ulps)

    def plus(self, error: Any) -> "Approx":
        """Return the same value with an additional error of a given size."""
        sigma, limit = np.hypot(self.sigma, error), self.limit + error
        return self.like(self.value, sigma, limit, self.parents)

    def __abs__(self) -> "Approx":
        """Return the magnitude, which is exact."""
        return self.times(np.sign(self.value))

    def times(self, factor: Array) -> "Approx":
        """Return the product with factors that need no rounding, such as -1, 0 or 1.

        A factor of 0 is a mask: it turns NaN and infinity into 0, too.
        """
        size = np.abs(factor)
        with np.errstate(invalid="ignore"):  # 0 times what is not finite
            return self.like(
                np.where(size == 0, 0.0, self.value * factor),
                np.where(size == 0, 0.0, self.sigma * size),
                np.where(size == 0, 0.0, self.limit * size),
                [(self, lambda g: fit(g.times(factor), self))],
            )

    def sum(self, axis: ReducedAxes = None, keepdims: bool = False) -> "Approx":
        """Return the sum along axes, whose terms may be added in any order."""
        value = self.value.sum(axis, keepdims=True)
        squares = np.square(self.value).sum(axis, keepdims=True)
        count = self.value.size // max(value.size, 1)
        shape, kind = self.shape, FLOATS[self.accumulated]
        terms = round_to(self.value, self.stored)  # what is nearly equal is equal once it is stored
        equal_share, walk = alike(terms, axis), walk_along(self.value, axis)
        errors = sum_errors(value, squares, count, kind, equal_share, walk)
        missed = lost(self.value, value, squares, axis, kind.unit)
        errors = np.hypot(errors[0], np.minimum(missed, errors[1])), errors[1]
        result = self._accumulated(
            value,
            errors,
            lambda x: np.broadcast_to(x, shape).sum(axis, keepdims=True),
            [(self, lambda g: g.spread(shape))],
        )
        return result if keepdims else result.moved(lambda x: x.squeeze(axis))

    def _accumulated(
        self,
        value: Array,
        errors: tuple[Array, Array],
        carry: Callable[[Array], Array],
        parents: Parents,
    ) -> "Approx":
        """Return a sum with the errors of the accumulation, those of its terms, and the final rounding."""
        sigma, limit = errors
        if not self.is_exact:
            sigma = np.sqrt(sigma**2 + carry(np.square(self.sigma)))
            limit = limit + carry(self.limit)
        return self._stored_sum(value, sigma, limit, parents)

    def _stored_sum(self, value: Array, sigma: Array, limit: Array, parents: Parents) -> "Approx":
        """Return a sum, which is rounded once more if the stored type is not the accumulating one."""
        roundings = 0.0 if self.stored == self.accumulated else 1.0
        return self.result(value, (), roundings, parents, (sigma, limit))

    def mean(self, axis: ReducedAxes = None, keepdims: bool = False) -> "Approx":
        """Return the mean along axes: the sum over their size."""
        total = self.sum(axis, keepdims)
        return total / (self.value.size / max(total.value.size, 1))

    def cumsum(self, axis: int) -> "Approx":
        """Return the running sum along an axis, in any order."""
        value, squares = self.value.cumsum(axis), np.square(self.value).cumsum(axis)
        shape = [1] * self.value.ndim
        shape[axis] = -1
        count = np.arange(1, self.shape[axis] + 1).reshape(shape)

        def flipped(x: "Approx") -> "Approx":
            return x.moved(lambda v: np.flip(v, axis))

        def carry(x: Array) -> Array:
            return np.broadcast_to(x, self.shape).cumsum(axis)

        walk = np.square(value).cumsum(axis) / count
        kind, equal_share = FLOATS[self.accumulated], alike(self.value, axis)
        errors = sum_errors(value, squares, count, kind, equal_share, walk)
        parents: Parents = [(self, lambda g: flipped(flipped(g).cumsum(axis)))]
        return self._accumulated(value, errors, carry, parents)

    def matmul(self, other: Any) -> "Approx":
        """Return the matrix product of arrays with two or more dimensions."""
        o = self.constant(other)
        value, walk = walk_of_product(self.value, o.value)
        squares = np.square(self.value) @ np.square(o.value)
        count, kind = self.shape[-1], FLOATS[self.accumulated]
        equal_share = alike(self.value, -1) * alike(o.value, -2)
        errors = sum_errors(value, squares, count, kind, equal_share, walk)
        variance, limit = np.square(errors[0]), errors[1]
        for x, y, is_left in ((self, o, True), (o, self, False)):
            if not x.is_exact:
                sigma, limits = (np.broadcast_to(v, x.shape) for v in (x.sigma, x.limit))
                sizes = np.hypot(y.value, y.sigma), np.abs(y.value) + (y.limit if is_left else 0.0)
                pair = (np.square(sigma), np.square(sizes[0])), (limits, sizes[1])
                (a, b), (c, d) = pair if is_left else [p[::-1] for p in pair]
                variance, limit = variance + a @ b, limit + c @ d
        a, b = self.stop(), o.stop()
        parents: Parents = [
            (self, lambda g: fit(g.matmul(b.swap(-1, -2)), self)),
            (o, lambda g: fit(a.swap(-1, -2).matmul(g), o)),
        ]
        return self._stored_sum(value, np.sqrt(variance), limit, parents)

    def moved(self, move: Callable[[Array], Array], repeats: bool = False) -> "Approx":
        """Return all arrays moved by the same function (indexing, reshaping, transposition, repetition).

        If it may repeat elements or leave some out (``repeats``), gradients are summed.
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

        return self.like(move(self.value), *errors, parents=[(self, back)])

    def spread(self, shape: Sequence[int]) -> "Approx":
        """Return the array repeated to a shape; its gradient is a sum in the accumulating type."""
        result = self.moved(lambda x: np.broadcast_to(x, tuple(shape)), True)
        result.parents = ((self, lambda g: fit(g, self)),)
        return result

    def reshape(self, *shape: int) -> "Approx":
        """Return the array in another shape of as many elements."""
        return self.moved(lambda x: x.reshape(shape))

    def transpose(self, *axes: int) -> "Approx":
        """Return the array with its dimensions in another order."""
        return self.moved(lambda x: x.transpose(*axes))

    def swap(self, a: int, b: int) -> "Approx":
        """Return the array with two dimensions exchanged."""
        return self.moved(lambda x: np.swapaxes(x, a, b))

    def __getitem__(self, key: Any) -> "Approx":
        """Return a slice, or rows by index."""
        return self.moved(lambda x: x[key], repeats=True)


def scatter_add(
    shape: tuple[int, ...], index: Any, parts: Approx, start: Approx | None = None
) -> Approx:
    """Add values to zeros, or to an existing array, at an index, as ``numpy.add.at`` does, in any order.

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
    return parts.like(total, sigma, limit, parents)


def where(condition: Array, a: Any, b: Any) -> Approx:
    """Choose ``a`` where a condition holds, else ``b``; exact."""
    like = a if isinstance(a, Approx) else b
    x, y = like.constant(a), like.constant(b)
    keep = condition.astype(np.float64)
    parents: Parents = [
        (x, lambda g: fit(g.times(keep), x)),
        (y, lambda g: fit(g.times(1 - keep), y)),
    ]
    fields = ((x.value, y.value), (x.sigma, y.sigma), (x.limit, y.limit))
    value, sigma, limit = (np.where(condition, a, b) for a, b in fields)
    return like.like(value, sigma, limit, parents)


def concatenate(parts: Sequence[Approx], axis: int) -> Approx:
    """Concatenate arrays along an axis, with their errors; exact."""
    ends = np.cumsum([p.shape[axis] for p in parts])
    parents: list[tuple[Approx, Back]] = []
    for part, end in zip(parts, ends, strict=True):
        take = partial(np.take, indices=np.arange(end - part.shape[axis], end), axis=axis)
        parents.append((part, partial(Approx.moved, move=take, repeats=True)))
    sigma = np.concatenate([np.broadcast_to(p.sigma, p.shape) for p in parts], axis)
    limit = np.concatenate([np.broadcast_to(p.limit, p.shape) for p in parts], axis)
    value = np.concatenate([p.value for p in parts], axis)
    return parts[0].like(value, sigma, limit, parents)


def fit(g: Approx, like: Approx) -> Approx:
    """Return a gradient summed over the dimensions in which its tensor was repeated."""
    extra = len(g.shape) - len(like.shape)
    sizes = zip(g.shape[extra:], like.shape, strict=True)
    axes = tuple(range(extra)) + tuple(extra + i for i, (a, b) in enumerate(sizes) if a != b)
    return g.sum(axes, keepdims=True).reshape(*like.shape) if axes else g


def _carried(size: Array, error: Array) -> Array:
    """Return an error times a derivative; where there is none, it stays so even if the derivative is infinite."""
    carried = size * error
    return np.where(error == 0, 0.0, carried) if np.isnan(carried).any() else carried


def _overflow_as_infinite(error: Array, value: Array) -> Array:
    """Return an error whose derivation overflowed as infinite; values that are not finite have none."""
    unknown = np.isnan(error)
    return np.where(unknown & np.isfinite(value), np.inf, np.where(unknown, 0.0, error))


def gradients(
    outputs: Sequence[tuple[Approx, Approx]],
    inputs: Sequence[Approx],
    between: list[Approx] | None = None,
) -> list[Approx | None]:
    """Return the gradient of each input, from results with their incoming gradients; None: no result depends on it.

    Those of intermediate results are appended to ``between``, the last result's first.
    """
    by_node: dict[int, Approx] = {}

    def add(node: Approx, part: Approx) -> None:
        by_node[id(node)] = by_node[id(node)] + part if id(node) in by_node else part

    for output, gradient in outputs:
        add(output, gradient)
    nodes = _sorted([output for output, _ in outputs])
    for node in nodes:
        for parent, backward in node.parents if id(node) in by_node else ():
            add(parent, backward(by_node[id(node)]))
    if between is not None:
        ends = {id(x) for x in (*inputs, *(output for output, _ in outputs))}
        between += [by_node[id(n)].stop() for n in nodes if id(n) in by_node and id(n) not in ends]
    return [by_node[id(x)].stop() if id(x) in by_node else None for x in inputs]


def _sorted(roots: Sequence[Approx]) -> list[Approx]:
    """Return everything that the roots depend on, each result before its operands."""
    order: list[Approx] = []
    visited: set[int] = set()
    stack: list[tuple[Approx, bool]] = [(root, False) for root in roots]
    while stack:
        node, finished = stack.pop()
        if finished:
            order.append(node)
        elif id(node) not in visited:
            visited.add(id(node))
            stack.append((node, True))
            stack += [(parent, False) for parent, _ in node.parents]
    return order[::-1]
