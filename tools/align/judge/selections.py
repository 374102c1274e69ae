"""Recognise tensors that views and indexing made, which msprobe does not record: lines of an earlier output.

A line runs along one dimension, or along an equal share of it (heads). Each line of the tensor must be one of the
output's, to the last bit; or, for rotations, one whose elements are moved and negated alike in all lines.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from telechat_moe.numerics import FLOATS, is_float, round_to
from telechat_moe.tools.align.dump.records import TensorRecord
from telechat_moe.tools.align.judge.data_flow import DataFlow, Place
from telechat_moe.tools.align.operators.approx import Array

_LINES = 4  # fewer lines, or shorter ones, may be equal by chance
_SHORT = 128  # unless there are no more than so many to choose from, as of weights of experts
_SAMPLE = 8  # elements that are looked for before lines are
_MOST = 400  # outputs before a call that are searched, the nearest first

Way = tuple[object, ...]
"""How a tensor was made of an output's lines: the dimensions that they run along, their length, how they are turned."""


class SelectedLines(NamedTuple):
    """The lines of an earlier output that a tensor consists of."""

    source: Place
    way: Way
    lines: Array  # which ones, in order


def common_selection(
    place: Place, reference: DataFlow, target: DataFlow, chose: bool
) -> tuple[SelectedLines, SelectedLines] | None:
    """Return the lines of one earlier output that a tensor consists of in both runs; None: there is no such output.

    They must be the same ones, unless the runs ``chose`` otherwise and it consists of whole rows, columns or elements.
    """
    by_source = {(s.source, s.way): s for s in _selections(place, target)}
    for other in _selections(place, reference) if by_source else ():
        mate = by_source.get((other.source, other.way))
        if mate is not None and (
            np.array_equal(other.lines, mate.lines) or (chose and len(other.way) == 1)
        ):
            return other, mate
    return None


def _selections(place: Place, flow: DataFlow) -> Iterator[SelectedLines]:
    tensor = flow.tensors[place]
    if tensor.read is None or not tensor.shape or not np.prod(tensor.shape):
        return
    if tensor.dtype.startswith("complex"):  # the marks are of real numbers
        return
    floats = is_float(tensor.dtype)
    sample = np.abs(tensor.load().ravel()[:: max(1, int(np.prod(tensor.shape)) // _SAMPLE)])
    for source in flow.outputs_before(place[0], _MOST):
        record = flow.tensors[source]
        is_same_kind = is_float(record.dtype) == floats and not record.dtype.startswith("complex")
        if record.read is None or not np.prod(record.shape) or not is_same_kind:
            continue
        narrower = floats and FLOATS[tensor.dtype].bits < FLOATS[record.dtype].bits
        if not narrower and not _has(flow.magnitudes(source), sample):
            continue
        for way, lines, pool in _ways(tensor, record):
            index = _found(*(_marks(x) for x in (lines, pool)))
            if index is not None:
                yield SelectedLines(source, way, index)
            elif floats and len(way) == 1 and len(lines) >= _LINES:
                index = _found(*(_marks(np.abs(x), False) for x in (lines, pool)))
                turn = _turn(lines, pool[index]) if index is not None else None
                if index is not None and turn is not None:
                    yield SelectedLines(source, (*way, turn), index)


def _has(values: Array, sample: Array) -> bool:
    """Return whether each number of a sample is among sorted ones."""
    index = np.searchsorted(values, sample).clip(max=values.size - 1)
    return np.array_equal(values[index], sample)


def _ways(tensor: TensorRecord, record: TensorRecord) -> Iterator[tuple[Way, Array, Array]]:
    """Yield the lines of a tensor and those of an output that may be the same, with the way that they run."""
    values, output = tensor.load(), None
    for axis in (-1, -2)[: values.ndim]:
        length = values.shape[axis]
        for other in range(-1, -len(record.shape) - 1, -1):
            count = record.shape[other]
            width = min(length, count)
            if length % width or count % width or not _tells(values, width, record):
                continue
            output = _rounded(record, tensor) if output is None else output
            is_row = width == 1 or (length == count and axis == other == -1)
            way: Way = (width,) if is_row else (axis, other, width)
            yield way, _along(values, axis, width), _along(output, other, width)
    columns = int(np.prod(values.shape[:-1]))
    if columns == np.prod(record.shape[:-1]) and values.ndim > 1 and values.shape[-1] >= _LINES:
        output = _rounded(record, tensor) if output is None else output
        yield ("columns",), values.reshape(columns, -1).T, output.reshape(columns, -1).T


def _rounded(record: TensorRecord, tensor: TensorRecord) -> Array:
    """Return an output's values, in the type of a tensor that may be made of it if that is narrower."""
    values, dtypes = record.load(), (record.dtype, tensor.dtype)
    narrower = is_float(record.dtype) and FLOATS[dtypes[1]].bits < FLOATS[dtypes[0]].bits
    return round_to(values, tensor.dtype) if narrower else values


def _tells(values: Array, width: int, record: TensorRecord) -> bool:
    """Return whether lines so long are unlikely to be an output's by chance."""
    if values.dtype.kind != "f":
        return width >= 4 * _LINES and bool(values.min() != values.max())
    if width >= _LINES:
        return values.size // width >= _LINES
    return values.size >= 2 * _LINES and int(np.prod(record.shape)) <= _SHORT


def _along(values: Array, axis: int, width: int) -> Array:
    return np.moveaxis(values, axis, -1).reshape(-1, width)


def _found(lines: Array, pool: Array) -> Array | None:
    """Return which mark of a pool each mark is, the first of equal ones; None: some are none."""
    order = np.argsort(pool, kind="stable")
    index = np.searchsorted(pool, lines, sorter=order).clip(0, pool.size - 1)
    return order[index] if np.array_equal(pool[order[index]], lines) else None


def _turn(lines: Array, sources: Array) -> Way | None:
    """Return where the elements of each line come from, negative where negated; None: not all lines are turned alike."""
    sizes = np.sort(np.abs(sources), 1)
    distinct = np.flatnonzero((sizes[:, 1:] > sizes[:, :-1]).all(1) & (sizes[:, 0] > 0))
    if not distinct.size:
        return None
    x, y = lines[distinct[0]], sources[distinct[0]]
    order = np.argsort(np.abs(y))[np.argsort(np.argsort(np.abs(x)))]
    sign = np.sign(x) * np.sign(y[order])
    if not np.array_equal(lines, sources[:, order] * sign):
        return None
    return tuple((sign * (order + 1)).astype(int).tolist())


def _marks(lines: Array, ordered: bool = True) -> Array:
    """Return a mark of the bits of each line, which does not depend on the order of its elements if not ``ordered``."""
    wide = np.ascontiguousarray(lines, np.float64) + 0.0  # no negative zero
    bits = wide.view(np.uint64).reshape(lines.shape)
    factors = np.arange(1, 2 * lines.shape[1], 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    factor = factors if ordered else np.uint64(0x9E3779B97F4A7C15)
    mixed = (bits ^ (bits >> np.uint64(29))) * factor
    return (mixed ^ (mixed >> np.uint64(31))).sum(1, dtype=np.uint64)
