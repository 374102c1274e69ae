"""Number formats: rounding, spacing and unit roundoff of floating-point types, most of which NumPy lacks, and their bits."""

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

WIDENED = {"bfloat16", "float8_e4m3", "float8_e5m2"}
"""Types that NumPy lacks: files hold them widened to float32, or as their bits."""


def is_float(dtype: str) -> bool:
    """Return whether a canonical type name is a floating-point type."""
    return dtype in FLOATS


def spacing(x: Array, dtype: str) -> Array:
    """Return the distance from ``|x|`` to the next larger number of a type (one ULP), float64.

    Numbers below the smallest normal one, and zero, have its spacing.
    """
    f = FLOATS[dtype]
    magnitude = np.abs(np.asarray(x, np.float64))
    _, exponent = np.frexp(np.where(np.isfinite(magnitude), magnitude, 1.0))
    exponent = np.where(magnitude == 0, f.low, np.clip(exponent - 1, f.low, f.high))
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


def widen(bits: Array, dtype: str) -> Array:
    """Return bfloat16 or float8, given as its bits, in float32.

    Args:
        bits: uint16 or uint8.
        dtype: ``bfloat16``, ``float8_e4m3`` (finite, without infinity) or ``float8_e5m2``.
    """
    if dtype == "bfloat16":
        return np.left_shift(bits.astype(np.uint32), np.uint32(16)).view(np.float32)
    if dtype == "float8_e5m2":
        return (bits.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    # A float16 has the same fraction further left, and an exponent whose bias is 8 more.
    code = bits.astype(np.uint16)
    half = ((code & 0x80) << 8 | (code & 0x7F) << 7).view(np.float16)
    wide = half.astype(np.float32) * np.float32(256)
    return np.where(code & 0x7F == 0x7F, np.copysign(np.float32(np.nan), wide), wide)


def from_bytes(content: bytes, dtype: str) -> Array:
    """Return the flat values of a type's bytes; bfloat16 in float32."""
    if dtype == "bfloat16":
        return widen(np.frombuffer(content, np.uint16), dtype)
    return np.frombuffer(content, np.dtype(dtype))


def ulp_steps(target: Array, golden: Array, dtype: str) -> Array:
    """Return how many steps of a type lead from ``golden``, rounded to it, to ``target``; infinite if none do.

    Args:
        target: Numbers of the type, possibly widened.
        golden: Numbers of the same type, or of a wider one.
        dtype: Canonical name of the type.
    """
    golden = _rounded(golden, dtype)
    ordinal, special = _ordinal(target, dtype)
    other, also = _ordinal(golden, dtype)
    low, high = np.minimum(ordinal, other), np.maximum(ordinal, other)
    if ordinal.dtype == np.int64:  # the difference may only fit an unsigned integer
        steps = (high - low).view(np.uint64).astype(np.float64)
    else:
        steps = np.subtract(high, low, dtype=np.float64)
    if special or also:
        agree = (target == golden) | (np.isnan(target) & np.isnan(golden))
        never = ~(np.isfinite(target) & np.isfinite(golden))
        steps = np.where(agree, 0.0, np.where(never, np.inf, steps))
    return steps


def _rounded(x: Array, dtype: str) -> Array:
    """Return numbers rounded to a type; they may come from a wider one."""
    if dtype in ("float64", "float32", "float16"):
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(x.astype(dtype, copy=False))
    if dtype == "bfloat16" and x.dtype == np.float32:
        bits = np.ascontiguousarray(x).view(np.uint32)
        if not np.bitwise_or.reduce(bits) & np.uint32(0xFFFF):
            return x
    return round_to(x, dtype)


def _ordinal(x: Array, dtype: str) -> tuple[Array, bool]:
    """Return the ordinal of each value among the numbers of its type, 0 for 0, and whether any is infinite or NaN."""
    if dtype not in ("float64", "float32", "float16", "bfloat16"):
        table, finite = _numbers(dtype), np.isfinite(x)
        place = np.searchsorted(table, np.where(finite, np.abs(x), 0.0))
        return np.where(np.signbit(x), -place, place), not finite.all()
    kind = np.dtype(np.float32 if dtype == "bfloat16" else dtype)
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(x.astype(kind, copy=False))
    pattern = values.view(f"i{kind.itemsize}")
    magnitude = pattern & np.iinfo(pattern.dtype).max
    special = bool(magnitude.max() >= np.asarray(np.inf, kind).view(pattern.dtype))
    sign = pattern >> (8 * kind.itemsize - 1)  # 0 or -1
    if dtype == "bfloat16":
        magnitude >>= 16
    magnitude ^= sign
    magnitude -= sign
    return magnitude, special


@lru_cache(2)
def _numbers(dtype: str) -> Array:
    """Return the finite numbers of a type of 8 bits from 0 up."""
    numbers = widen(np.arange(128, dtype=np.uint8), dtype)
    return numbers[np.isfinite(numbers)]
