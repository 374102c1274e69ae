"""Statistics of a tensor, computed in chunks, whatever its size."""

import math
from collections.abc import Iterator

import numpy as np

from telechat_moe.tools.align.dump.records import Array, Stats
from telechat_moe.tools.align.dump.value_files import release
from telechat_moe.tools.align.numerics import einsum

_CHUNK = 1 << 18


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
    return float(einsum("i,i->", x, y, dtype=np.float64))  # BLAS would wake all cores
