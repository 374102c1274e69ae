"""Sizes of rounding errors: of a single rounding, and of sums and matrix products in any order."""

from typing import Any

import numpy as np

from telechat_moe.numerics import FLOATS, Array, Float

ReducedAxes = int | tuple[int, ...] | None

ROUNDING = 3**-0.5
"""Standard deviation of an error that is uniform in +-1 unit roundoff."""


def rounding(size: Array, roundings: float, stored: str, accumulated: str) -> Array:
    """Return the largest error of a result.

    Args:
        roundings: Number of unit roundoffs of the stored type; those above 1 count in the accumulating type.
    """
    kind = FLOATS[stored]
    further = max(0.0, roundings - 1) * FLOATS[accumulated].unit
    if further and stored == "float16":
        further += kind.unit
    step = (min(roundings, 1.0) * kind.unit + further) * size
    smallest = 2.0**kind.low
    small = size < 2 * smallest
    if roundings and np.any(small):
        # Below the smallest normal number: flushed to zero, or in float16 rounded to the last bit.
        missing = smallest * kind.unit if stored == "float16" else size
        step = np.where(small, np.where(size == 0, 0.0, np.maximum(step, missing)), step)
    over = size > kind.largest
    return np.where(over, np.where(np.isinf(size), 0.0, np.inf), step) if np.any(over) else step


def sum_errors(
    total: Array, squares: Array, count: Any, kind: Float, equal_share: Any = 0.0, walk: Any = 0.0
) -> tuple[Array, Array]:
    """Return standard deviation and limit of a sum's error, from the sum and the sum of squares of its terms.

    Each term is rounded once (products) and each partial sum once: the k-th is about ``|m| k + sqrt(v k)``. Roundings
    of equal terms are equal, not independent. The limit is ``n u`` times the sum of magnitudes, by Cauchy's inequality.

    Args:
        kind: Type that they are accumulated in.
        equal_share: Share of the pairs of terms that are equal, see :func:`alike`.
        walk: Mean square of the partial sums in the order of the terms, where known.
    """
    count = np.maximum(count, 1)
    mean = np.abs(total) / count
    variance = np.maximum(squares / count - mean**2, 0.0)
    partial = mean**2 * count**3 / 3 + variance * count**2 / 2
    partial = np.maximum(partial, count * walk)
    partial = partial * (1 + count * equal_share)
    sigma = kind.unit * ROUNDING * np.sqrt(partial + squares + total**2)
    flushed = count * 2.0**kind.low  # terms below the smallest normal number
    return sigma + flushed, kind.unit * (count + 1) * np.sqrt(count * squares) + flushed


def alike(x: Array, axis: ReducedAxes) -> Array:
    """Return the share of pairs of terms along an axis that are equal and not zero, estimated from three distances."""
    rows, axes = _terms(x, axis)
    count = rows.shape[-1]
    if count < 8:
        return np.zeros(())
    pairs = [(rows[..., lag:], rows[..., :-lag]) for lag in (1, count // 3, count // 2)]
    shares = [((a == b) & (a != 0)).mean(-1) for a, b in pairs]
    return np.expand_dims(np.mean(shares, 0), axes)


def walk_along(x: Array, axis: ReducedAxes) -> Array:
    """Return the mean square of the partial sums along axes, taken at the ends of blocks of terms."""
    rows, axes = _terms(x, axis)
    starts = _blocks(rows.shape[-1])
    if len(starts) < 2:
        return np.zeros(())
    partial = np.add.reduceat(rows, starts, -1).cumsum(-1)
    return np.expand_dims(np.square(partial).mean(-1), axes)


def walk_of_product(a: Array, b: Array) -> tuple[Array, Array]:
    """Return a matrix product, and the mean square of its partial sums at the ends of blocks of terms.

    Programs with two accumulators sum even and odd terms separately (OpenBLAS does, for AVX-512): where signs
    alternate, those partial sums are larger than the ones in order.
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


def lost(x: Array, total: Array, squares: Array, axis: ReducedAxes, unit: float) -> Array:
    """Return what a sum may lose because small terms vanish next to its partial sums, as a standard deviation."""
    partial = np.abs(total) + np.sqrt(squares)
    small = np.where(np.abs(x) < 2 * unit * partial, x, 0.0)
    if not np.any(small):
        return np.zeros(())
    total_lost = np.abs(small.sum(axis, keepdims=True)) / 4
    return total_lost + np.sqrt(np.square(small).sum(axis, keepdims=True))


def _terms(x: Array, axis: ReducedAxes) -> tuple[Array, list[int]]:
    """Return an array with the summed axes merged into its last one, and the numbers of these axes."""
    axes = tuple(range(x.ndim)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    summed = {a % x.ndim for a in axes}
    kept_shape = [n for i, n in enumerate(x.shape) if i not in summed]
    count = x.size // max(int(np.prod(kept_shape, dtype=np.int64)), 1)
    rows = np.moveaxis(x, axes, range(-len(axes), 0)).reshape(*kept_shape, count)
    return rows, [a % x.ndim for a in axes]


def _blocks(count: int) -> list[int]:
    """Return where blocks of about 32 terms or more begin: at most 16 blocks, all beginning at even terms."""
    number = min(16, count // 32)
    return [i * count // number // 2 * 2 for i in range(number)]
