"""Statistics of a tensor, computed in chunks, whatever its size."""

import math

import numpy as np

from telechat_moe.tools.align.dump.records import Array, Stats
from telechat_moe.tools.align.dump.value_files import chunks
from telechat_moe.tools.align.numerics import dot

_CHUNK = 1 << 18


def stats(values: Array) -> Stats | None:
    """Return largest, smallest and mean value and L2 norm; None for no elements. NaN makes all of them NaN."""
    if values.size == 0:
        return None
    high, low, total, squares = -math.inf, math.inf, 0.0, 0.0
    for _, (part,) in chunks([values], _CHUNK):
        x = part.astype(np.float64)
        high, low = float(np.maximum(high, x.max())), float(np.minimum(low, x.min()))
        total += float(x.sum())
        squares += dot(x, x)
    if values.dtype.kind == "b":
        return Stats(high, low, None, None)
    return Stats(high, low, total / values.size, math.sqrt(squares))
