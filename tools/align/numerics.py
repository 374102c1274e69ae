"""Rounding, spacing and unit roundoff of floating-point types, most of which NumPy lacks."""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


class Float(NamedTuple):
    """A binary floating-point format."""

    bits: int  # bits of the significand, including the hidden one
    low: int  # exponent of the smallest normal number
    high: int  # exponent of the largest number
    largest: float  # largest finite number

    @property
    def unit(self) -> float:
        """Unit roundoff: half the distance from 1 to the next number."""
        return 2.0**-self.bits


def _ieee(bits: int, low: int, high: int) -> Float:
    return Float(bits, low, high, (2.0 - 2.0 ** (1 - bits)) * 2.0**high)


FLOATS = {
    "float64": _ieee(53, -1022, 1023),
    "float32": _ieee(24, -126, 127),
    "tfloat32": _ieee(11, -126, 127),
    "float16": _ieee(11, -14, 15),
    "bfloat16": _ieee(8, -126, 127),
    "float8_e5m2": _ieee(3, -14, 15),
    "float8_e4m3": Float(4, -6, 8, 448.0),
}
"""By canonical name. ``tfloat32`` is what tensor cores and Ascend's HF32 keep of a float32 factor."""


def is_float(dtype: str) -> bool:
    """Return whether a canonical type name is a floating-point type."""
    return dtype in FLOATS


def spacing(x: Array, dtype: str) -> Array:
    """Return the distance from ``|x|`` to the next larger number of a type (one ULP), float64.

    Numbers below the smallest normal one have its spacing.
    """
    f = FLOATS[dtype]
    magnitude = np.abs(np.asarray(x, np.float64))
    _, exponent = np.frexp(np.where(np.isfinite(magnitude), magnitude, 1.0))
    exponent = np.clip(exponent - 1, f.low, f.high)
    return np.ldexp(1.0, exponent - (f.bits - 1))


def round_to(x: Array, dtype: str) -> Array:
    """Return float64 values rounded to the nearest number of a type, ties to even, as float64.

    Values beyond the largest number become infinity, or NaN in float8_e4m3, which has no infinity.
    """
    x = np.asarray(x, np.float64)
    if dtype == "float64":
        return x
    if dtype == "float32":
        with np.errstate(over="ignore"):
            return x.astype(np.float32).astype(np.float64)
    step = spacing(x, dtype)
    with np.errstate(invalid="ignore"):
        rounded = np.rint(x / step) * step
    beyond = np.abs(rounded) > FLOATS[dtype].largest
    over = np.nan if dtype == "float8_e4m3" else np.copysign(np.inf, x)
    return np.where(np.isfinite(x), np.where(beyond, over, rounded), x)


def ulps(found: Array, expected: Array, dtype: str) -> Array:
    """Return ``|found - expected|`` in ULPs of a type at ``expected``; equal infinities and two NaNs give 0."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    with np.errstate(invalid="ignore"):
        distance = np.abs(found - expected) / spacing(expected, dtype)
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    return np.where(same, 0.0, np.where(np.isnan(distance), np.inf, distance))


def widened(x: Array) -> Array:
    """Return elements in float64, maybe the same array; float16 by a table, which is faster than NumPy's conversion."""
    if x.dtype == np.float16:
        return _halves().take(np.ascontiguousarray(x).view(np.uint16), mode="clip")
    return x.astype(np.float64, copy=False)


def einsum(subscripts: str, *operands: Array, **options: Any) -> Array:
    """Return ``numpy.einsum``, whose stub leaves its type open."""
    return np.einsum(subscripts, *operands, **options)  # pyright: ignore[reportUnknownMemberType]


@lru_cache(1)
def _halves() -> Array:
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float64)


def dot(x: Array, y: Array) -> float:
    """Return the inner product of two vectors, on one core: BLAS would wake all of them."""
    return float(einsum("i,i->", x, y))
