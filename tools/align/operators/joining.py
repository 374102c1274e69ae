"""Functions that combine several :class:`Approx` into one without rounding."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from telechat_moe.numerics import Array
from telechat_moe.tools.align.operators.approx import Approx, Back, Parents, fit


def where(condition: Array, a: Any, b: Any) -> Approx:
    """Choose by condition, exact."""
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
    """Concatenate arrays along an axis; exact."""
    ends = np.cumsum([p.shape[axis] for p in parts])
    parents = [
        (part, _rows(np.arange(int(end) - part.shape[axis], int(end)), axis))
        for part, end in zip(parts, ends, strict=True)
    ]
    first = parts[0]
    sigma = np.concatenate([np.broadcast_to(p.sigma, p.shape) for p in parts], axis)
    limit = np.concatenate([np.broadcast_to(p.limit, p.shape) for p in parts], axis)
    value = np.concatenate([p.value for p in parts], axis)
    return first.like(value, sigma, limit, parents)


def _rows(index: Array, axis: int) -> Back:
    """Return the function that takes some rows of a gradient."""
    return lambda g: g.moved(lambda x: x.take(index, axis), True)
