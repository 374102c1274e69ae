"""Recognise tensors that views and indexing made, which msprobe does not record: rows or columns of an earlier output.

Each row (or column) of the tensor must be one of the output's, to the last bit.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from telechat_moe.numerics import is_float
from telechat_moe.tools.align.judge.data_flow import DataFlow, Place
from telechat_moe.tools.align.operators.approx import Array

_LINES = 4  # fewer rows or columns may be equal by chance
_MOST = 400  # outputs before a call that are searched, the nearest first


class SelectedLines(NamedTuple):
    """The lines of an earlier output that a tensor consists of."""

    source: Place
    axis: int  # 0: rows of the last dimension, 1: columns
    lines: Array  # which ones, in order


def common_selection(
    place: Place, reference: DataFlow, target: DataFlow
) -> tuple[SelectedLines, SelectedLines] | None:
    """Return the lines of one earlier output that a tensor consists of in both runs; None: there is no such output."""
    by_source = {(s.source, s.axis): s for s in _selections(place, target)}
    for other in _selections(place, reference) if by_source else ():
        if (mate := by_source.get((other.source, other.axis))) is not None:
            return other, mate
    return None


def _selections(place: Place, flow: DataFlow) -> Iterator[SelectedLines]:
    tensor = flow.tensors[place]
    if tensor.read is None or not is_float(tensor.dtype) or 0 in (tensor.shape or (0,)):
        return
    values = tensor.load()
    lines = [_lines(values, axis) for axis in (0, 1)]
    for source in flow.outputs_before(place[0], _MOST):
        record = flow.tensors[source]
        if record.read is None or not is_float(record.dtype) or 0 in (record.shape or (0,)):
            continue
        for axis in (0, 1):
            if (
                _extent(record.shape, axis) != _extent(tensor.shape, axis)
                or lines[axis].size < _LINES
            ):
                continue
            pool = _lines(record.load(), axis)
            order = np.argsort(pool, kind="stable")
            index = np.searchsorted(pool, lines[axis], sorter=order).clip(0, pool.size - 1)
            if np.array_equal(pool[order[index]], lines[axis]):
                yield SelectedLines(source, axis, order[index])


def _extent(shape: tuple[int, ...], axis: int) -> int:
    """Return the number of elements of a row or column."""
    return shape[-1] if axis == 0 else int(np.prod(shape[:-1]))


def _lines(values: Array, axis: int) -> Array:
    """Return a mark of the bits of each row (axis 0) or column of the last dimension."""
    wide = np.ascontiguousarray(values, np.float64) + 0.0  # no negative zero
    bits = wide.view(np.uint64).reshape(-1, values.shape[-1])
    count = bits.shape[1 - axis]
    factors = np.arange(1, 2 * count, 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (bits ^ (bits >> np.uint64(29))) * (factors if axis == 0 else factors[:, None])
    return (mixed ^ (mixed >> np.uint64(31))).sum(1 - axis, dtype=np.uint64)
