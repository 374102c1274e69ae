"""Count the numbers of a type between two values, as repeated ``nextafter`` would, without the walk."""

from functools import lru_cache

import numpy as np

from telechat_moe.tools.align.dump.value_files import widen
from telechat_moe.tools.align.numerics import Array, round_to


def ulp_steps(target: Array, golden: Array, dtype: str) -> Array:
    """Return how many steps of a type lead from ``golden``, rounded to it, to ``target``; infinite if none do.

    Args:
        target: Numbers of the type, possibly widened.
        golden: Numbers of the same type, or of a wider one.
        dtype: Canonical name of the type.
    """
    golden = _rounded(golden, dtype)
    own, special = _ordinal(target, dtype)
    other, also = _ordinal(golden, dtype)
    low, high = np.minimum(own, other), np.maximum(own, other)
    if own.dtype == np.int64:  # the difference may only fit an unsigned integer
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
        held = np.ascontiguousarray(x.astype(kind, copy=False))
    pattern = held.view(f"i{kind.itemsize}")
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
    found = widen(np.arange(128, dtype=np.uint8), dtype)
    return found[np.isfinite(found)]
