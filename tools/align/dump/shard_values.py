"""Values of a shard (an array, or a record of a dump), of which only the requested elements are read."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.tools.align.dump.ranges import ShardKey
from telechat_moe.tools.align.dump.records import Array, TensorRecord

Indexer = slice | Array
"""Positions along a dimension: a range, or their numbers."""


class ShardValues:
    """Values of one shard.

    Args:
        dtype: Canonical name of the type that the program computed in.
        load: Returns the values; of a mapped file only the requested elements are read.
    """

    def __init__(self, shape: Sequence[int], dtype: str, load: Callable[[], Array]) -> None:
        self.shape, self.dtype, self._load = tuple(shape), dtype, load

    @staticmethod
    def of(values: "ShardValues | TensorRecord | Array") -> "ShardValues":
        """Return the values of an array or record.

        Raises:
            BadInputError: The record has no values.
        """
        if isinstance(values, ShardValues):
            return values
        if isinstance(values, TensorRecord):
            if values.read is None:
                raise BadInputError("the values of this tensor were not dumped, only statistics")
            return ShardValues(values.shape, values.dtype, values.load)
        array = np.asarray(values)
        return ShardValues(array.shape, array.dtype.name, lambda: array)

    def take(self, indexers: Sequence[Indexer]) -> Array:
        """Return elements selected as by ``numpy.ix_``; the result may be a view and must not be changed.

        Raises:
            BadInputError: The file is missing, broken or of another shape.
        """
        values = self._load()
        if values.shape != self.shape:
            raise BadInputError(
                f"a shard has the shape {list(values.shape)}, the dump says {list(self.shape)}"
            )
        return np.asarray(values[picked(indexers, self.shape)])


class Shard(NamedTuple):
    """The values that one rank holds.

    Attributes:
        values: Array, record or source.
        call: Number of the call, where the calls of a rank hold different shards (micro-batches).
    """

    rank: int
    values: ShardValues | TensorRecord | Array
    call: int = 0


class RegionCopy:
    """One copy of a region: a rank's shard, or flat shards read as if they were the region (ZeRO).

    Args:
        shards: The shards in order: holder, values, range in the flattened region (None: all of it).
    """

    def __init__(
        self,
        shape: Sequence[int],
        shards: Sequence[tuple[ShardKey, ShardValues, tuple[int, int] | None]],
    ) -> None:
        self.shape, self._shards = tuple(shape), shards
        self.keys = [key for key, _, _ in shards]

    def read(self, indexers: Sequence[Indexer]) -> tuple[Array, list[tuple[ShardKey, Array]]]:
        """Return elements as :meth:`ShardValues.take`, and their holders, each with a mask of its elements."""
        key, first, flat = self._shards[0]
        if flat is None:
            return first.take(indexers), [(key, np.ones((), np.bool_))]
        numbers = np.zeros((), np.int64)  # positions in the flattened region
        for d, (i, n) in enumerate(zip(indexers, self.shape, strict=True)):
            numbers = np.add.outer(numbers, np.arange(n)[i] * math.prod(self.shape[d + 1 :]))
        found: Array | None = None
        holders: list[tuple[ShardKey, Array]] = []
        for key, source, part in self._shards:
            begin, end = part or (0, 0)
            inside = (numbers >= begin) & (numbers < end)
            holders.append((key, inside))
            if not inside.any():
                continue
            chosen = numbers[inside] - begin
            low, high = int(chosen.min()), int(chosen.max()) + 1
            values = source.take((slice(low, high),))[chosen - low]
            if found is None:
                found = np.empty(numbers.shape, values.dtype)
            found[inside] = values
        if found is None:
            found = first.take((slice(0, 0),)).reshape(numbers.shape)
        return found, holders


def picked(indexers: Sequence[Indexer], shape: Sequence[int]) -> Any:
    """Return positions along each dimension of an array as the index that selects all their combinations."""
    if sum(not isinstance(i, slice) for i in indexers) <= 1:
        return (*indexers, ...)
    return np.ix_(*(np.arange(n)[i] for i, n in zip(indexers, shape, strict=True)))


def intersect(
    runs: Sequence[tuple[int, int]], low: int, high: int
) -> tuple[Indexer, Indexer] | None:
    """Return the positions, in a shard, of the elements of a dimension between ``low`` and ``high``.

    Args:
        runs: Ranges of the whole dimension, in the order in which the shard holds them.
        low: First element in the whole dimension.
        high: One past the last element in the whole dimension.

    Returns:
        Positions counted from ``low``, and positions in the shard; None: the shard has nothing there.
    """
    parts: list[tuple[int, int, int]] = []
    local = 0
    for a, b in runs:
        begin, end = max(a, low), min(b, high)
        if begin < end:
            parts.append((begin - low, local + begin - a, end - begin))
        local += b - a
    if not parts:
        return None
    if len(parts) == 1:
        g, own, n = parts[0]
        return slice(g, g + n), slice(own, own + n)
    return (
        np.concatenate([np.arange(g, g + n) for g, _, n in parts]),
        np.concatenate([np.arange(own, own + n) for _, own, n in parts]),
    )
