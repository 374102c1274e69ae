"""Where the values of a piece come from, read in part: an array, a file, a record of a dump."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.tools.align.dump.ranges import Key
from telechat_moe.tools.align.dump.records import TensorRecord

Array = np.ndarray[Any, np.dtype[Any]]
Indexer = slice | Array
"""Positions along a dimension: a range, or numbers."""


class Source:
    """Values of one piece.

    Args:
        shape: Of the piece.
        dtype: Canonical name of the type that the program computed in.
        array: The values, if they are in memory.
        path: A ``.npy`` file, if not; only what is asked for is read.
        record: A record that loads them, if neither.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: str,
        array: Array | None = None,
        path: Path | None = None,
        record: TensorRecord | None = None,
    ) -> None:
        self.shape, self.dtype = tuple(shape), dtype
        self._array, self._path, self._record = array, path, record

    @staticmethod
    def of(values: "Source | TensorRecord | Array") -> "Source":
        """Return the source of an array or record.

        Raises:
            BadInputError: The record has no values.
        """
        if isinstance(values, Source):
            return values
        if isinstance(values, np.ndarray | np.generic):
            values = np.asarray(values)
            return Source(values.shape, values.dtype.name, array=values)
        if values.path is None and values.read is None:
            raise BadInputError("the values of this tensor were not dumped, only statistics")
        path = values.path if values.read is None else None
        return Source(values.shape, values.dtype, path=path, record=values)

    def take(self, indexers: Sequence[Indexer]) -> Array:
        """Return some elements, as ``numpy.ix_`` takes them; maybe a view, not to be changed.

        Raises:
            BadInputError: The file is missing, broken or of another shape.
        """
        values = self._open()
        if values.shape != self.shape:
            raise BadInputError(
                f"{self._path}: shape {list(values.shape)}, the dump says {list(self.shape)}"
            )
        if sum(not isinstance(i, slice) for i in indexers) > 1:
            grid = (np.arange(n)[i] for i, n in zip(indexers, self.shape, strict=True))
            return values[np.ix_(*grid)]
        return np.asarray(values[(*indexers, ...)])

    def holders(self, key: Key, indexers: Sequence[Indexer]) -> list[tuple[Key, Array]]:
        """Return who holds which of the elements that :meth:`take` returns, as masks."""
        del indexers
        return [(key, np.ones((), np.bool_))]

    def keys(self, key: Key) -> list[Key]:
        """Return who holds the piece."""
        return [key]

    def _open(self) -> Array:
        if self._array is not None:
            return self._array
        if self._path is not None:
            try:
                # Mapped for one read: pages that stay mapped count as resident.
                return np.load(self._path, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError, EOFError) as error:
                raise BadInputError(f"{self._path}: not a readable .npy file ({error})") from None
        assert self._record is not None
        try:
            return self._record.load()
        except LookupError as error:
            raise BadInputError(str(error)) from None


class Piece(NamedTuple):
    """Values that one rank holds.

    Attributes:
        rank: The rank.
        values: Array, record or source.
        call: Number of the call, where calls hold different parts (micro-batches).
    """

    rank: int
    values: Source | TensorRecord | Array
    call: int = 0


class Flattened:
    """Flat pieces of one region as if they were the region (ZeRO shards of a parameter).

    Args:
        shape: Of the region.
        pieces: The flat pieces in order: who holds it, the piece, its range in the flattened region.
    """

    def __init__(
        self, shape: Sequence[int], pieces: Sequence[tuple[Key, Source, tuple[int, int]]]
    ) -> None:
        self.shape = tuple(shape)
        self._pieces = list(pieces)

    def take(self, indexers: Sequence[Indexer]) -> Array:
        """See :meth:`Source.take`."""
        numbers = self._numbers(indexers)
        found: Array | None = None
        for _, source, (begin, end) in self._pieces:
            inside = (numbers >= begin) & (numbers < end)
            if not inside.any():
                continue
            chosen = numbers[inside] - begin
            low, high = int(chosen.min()), int(chosen.max()) + 1
            values = source.take((slice(low, high),))[chosen - low]
            if found is None:
                found = np.empty(numbers.shape, values.dtype)
            found[inside] = values
        if found is None:
            found = self._pieces[0][1].take((slice(0, 0),)).reshape(numbers.shape)
        return found

    def holders(self, key: Key, indexers: Sequence[Indexer]) -> list[tuple[Key, Array]]:
        """See :meth:`Source.holders`."""
        del key
        numbers = self._numbers(indexers)
        return [(k, (numbers >= begin) & (numbers < end)) for k, _, (begin, end) in self._pieces]

    def keys(self, key: Key) -> list[Key]:
        """See :meth:`Source.keys`."""
        del key
        return [k for k, _, _ in self._pieces]

    def _numbers(self, indexers: Sequence[Indexer]) -> Array:
        """Return the positions of elements in the flattened region."""
        found = np.zeros((), np.int64)
        for d, (i, n) in enumerate(zip(indexers, self.shape, strict=True)):
            found = np.add.outer(found, np.arange(n)[i] * math.prod(self.shape[d + 1 :]))
        return found


def intersect(
    runs: Sequence[tuple[int, int]], low: int, high: int
) -> tuple[Indexer, Indexer] | None:
    """Return where the part of a dimension between ``low`` and ``high`` lies in a piece.

    Args:
        runs: Ranges of the whole, in the order in which the piece holds them.
        low: Begin in the whole.
        high: End in the whole.

    Returns:
        Positions counted from ``low``, and positions in the piece; None: the piece has nothing there.
    """
    parts, local = [], 0
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
