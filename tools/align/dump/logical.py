"""Merge the shards of many ranks into one tensor, and compare the copies that several ranks hold.

Shards, replicas, partial sums, interleaved, expert-owned, flattened and micro-batch shards are all indices
(``ranges.py``). A layout that contradicts its shards is refused. Copies that differ are named by rank, element and values.

Values are read in blocks of the whole tensor, so a tensor of any size merges in bounded memory.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.tools.align.dump.ranges import (
    LayoutError,
    ShardIndices,
    ShardKey,
    ShardMap,
    ShardPositions,
    locate,
    locate_regions,
)
from telechat_moe.tools.align.dump.records import Array, TensorLayout, TensorRecord
from telechat_moe.tools.align.dump.value_files import boxes

BLOCK_BYTES = 16 << 20
BlockSlices = tuple[slice, ...]
Indexer = slice | Array
"""Positions along a dimension: a range, or their numbers."""


class Shard(NamedTuple):
    """The values that one rank holds."""

    rank: int
    values: TensorRecord | Array  # array or record
    # Number of the call, where the calls of a rank hold different shards (micro-batches)
    call: int = 0


@dataclass(frozen=True)
class CopyDifference:
    """A copy that is not equal to the first one."""

    key: ShardKey  # rank, and call, that holds it
    reference: ShardKey  # rank and call of the first copy
    elements: int  # number of elements that differ
    index: tuple[int, ...]  # index of the first of them in the whole tensor
    value: Any  # the copy's value at that index
    expected: Any  # the first copy's value at that index

    def __str__(self) -> str:
        return (
            f"{self.key} differs from {self.reference} in {self.elements:,} elements, first {list(self.index)}: "
            f"{self.value!r}, there {self.expected!r}"
        )


@dataclass
class Copies:
    """The results of comparing copies while a tensor was merged."""

    # Copies that were compared with the first copy; none: every shard is held once
    compared: set[ShardKey] = field(default_factory=set[ShardKey])
    # Copies that differ, by rank and call
    differences: dict[ShardKey, CopyDifference] = field(
        default_factory=dict[ShardKey, CopyDifference]
    )

    def __str__(self) -> str:
        return "; ".join(map(str, list(self.differences.values())[:4]))


class CopiesDifferError(LayoutError):
    """Copies of one shard differ: a fault of the run, or a layout that wrongly declares copies (exit code 4)."""

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        super().__init__(str(copies))


class Logical:
    """A tensor that is merged as it is read; :attr:`copies` is what comparing copies came to when it last was.

    Raises:
        LayoutError: The shards are of different types.
    """

    def __init__(self, shards: Mapping[ShardKey, TensorRecord], shard_map: ShardMap) -> None:
        self.shape, self.copies = shard_map.shape, Copies()
        self._plan, self._shards, self._keys = shard_map, shards, sorted(shards)
        first = self._keys[0]
        self.dtype = shards[first].dtype
        for key in self._keys:
            if shards[key].dtype != self.dtype:
                raise LayoutError(f"{key} holds {shards[key].dtype}, {first} {self.dtype}")
        holders: dict[Any, int] = {}
        for key in self._keys:
            holders.setdefault(shard_map.places[key].mark, key.rank)
        self._copied = len(holders) < len(self._keys)
        self.ranks = tuple(sorted({*holders.values()}))

    def blocks(self, limit: int = BLOCK_BYTES) -> Iterator[tuple[BlockSlices, Array]]:
        """Yield the whole tensor in C order in blocks of about ``limit`` bytes; without elements as one block.

        Raises:
            CopiesDifferError: After the last block, if copies differ.
            BadInputError: A file is broken.
        """
        self.copies = Copies()
        empty = [tuple(slice(0, n) for n in self.shape)]
        for box in boxes(self.shape, max(1, limit // 8)) if math.prod(self.shape) else empty:
            yield box, self._block(box)
        if self.copies.differences:
            raise CopiesDifferError(self.copies)

    def at(self, index: Sequence[int]) -> Array:
        """Return one element, as an array without dimensions."""
        return self._block(tuple(slice(i, i + 1) for i in index)).reshape(())

    @cached_property
    def values(self) -> Array:
        """The whole tensor in memory; sums, means and products of terms in float64 (integers: int64).

        Raises like :meth:`blocks`.
        """
        values: Array = np.empty(0)
        for i, (box, block) in enumerate(self.blocks()):
            if i == 0:
                values = np.empty(self.shape, block.dtype)
            values[box] = block
        return values

    def _block(self, box: BlockSlices) -> Array:
        """Return a block of the whole, with terms combined."""
        reduce, terms = self._plan.reduce, dict[int, list[ShardKey]]()
        for key in self._keys:
            terms.setdefault(self._plan.places[key].term, []).append(key)
        total = self._term(terms.pop(0), box)
        if reduce is None:
            return total
        total = _widened(total, reduce)
        for _, keys in sorted(terms.items()):
            _COMBINE[reduce](total, self._term(keys, box), out=total, casting="unsafe")
        return total / self._plan.divide if self._plan.divide > 1 else total

    def _term(self, keys: Sequence[ShardKey], box: BlockSlices) -> Array:
        """Return a block of one term from the first copy of each element; compare the others with it."""
        extent = [s.stop - s.start for s in box]
        block: Array | None = None
        # The number of the shard that each element is from; 0: it is not known yet.
        holder: Array = np.zeros(extent if self._copied else 0, np.int32)
        for i, key in enumerate(keys, 1):
            part = _part(self._shards[key], self._plan.places[key], box)
            if part is None:
                continue
            index, values = part
            if block is None:
                block = np.empty(extent, values.dtype)
            if values.dtype != block.dtype:
                raise LayoutError(f"copies are stored as {values.dtype} and {block.dtype}")
            filled: Array = holder[index] > 0 if self._copied else np.zeros(())
            if not filled.any():
                block[index] = values
                if self._copied:
                    holder[index] = i
                continue
            self._compare(key, keys, box, index, values, block, holder)
            if not filled.all():
                block[index] = np.where(filled, block[index], values)
                holder[index] = np.where(filled, holder[index], i)
        if block is None:  # a block without elements
            block = np.empty(extent, self._shards[keys[0]].load().dtype)
        return block

    def _compare(
        self,
        key: ShardKey,
        keys: Sequence[ShardKey],
        box: BlockSlices,
        region: Any,
        values: Array,
        block: Array,
        holder: Array,
    ) -> None:
        """Compare a shard's values with those that are known at their positions of a block; record the differences."""
        first = block[region]
        self.copies.compared.add(key)
        wrong = _unequal_bits(values, first) & (holder[region] > 0)
        count = int(wrong.sum())
        if not count:
            return
        if (difference := self.copies.differences.get(key)) is not None:
            self.copies.differences[key] = replace(difference, elements=difference.elements + count)
            return
        first_wrong = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        number = np.arange(block.size).reshape(block.shape)[region][first_wrong]
        place = np.unravel_index(int(number), block.shape)
        index = tuple(s.start + int(i) for s, i in zip(box, place, strict=True))
        value, expected = (x[first_wrong].item() for x in (values, first))
        reference = keys[int(holder[region][first_wrong]) - 1]
        difference = CopyDifference(key, reference, count, index, value, expected)
        self.copies.differences[key] = difference


def logical(
    shards: Sequence[Shard],
    layout: TensorLayout | None = None,
    shape: Sequence[int] | None = None,
) -> Logical:
    """Return the tensor that shards form; nothing is read yet.

    Args:
        layout: Their layout; None: each shard is a record that has one.
        shape: Shape of the whole tensor; needed where filler hides it.

    Raises:
        LayoutError: Layout, shards and shape contradict each other; a shard is missing or present twice.
        BadInputError: Values were not dumped.
    """
    records = _records(shards)
    layout = layout if layout is not None else _common_layout(records)
    shapes = {key: record.shape for key, record in records.items()}
    shard_map = locate(layout, shapes, None if shape is None else tuple(shape))
    return Logical(records, shard_map)


def logical_regions(
    shards: Sequence[Shard],
    regions: Mapping[int, Sequence[tuple[int, int]]]
    | Mapping[tuple[int, int], Sequence[tuple[int, int]]],
    shape: Sequence[int],
) -> Logical:
    """Return the tensor whose shards hold given regions, as (begin, end) of every dimension, by rank.

    Where the calls of a rank hold different shards (micro-batches, not always as many), keys are (rank, call).
    """
    records = _records(shards)
    keyed = {ShardKey(*k) if isinstance(k, tuple) else ShardKey(k): r for k, r in regions.items()}
    shapes = {key: record.shape for key, record in records.items()}
    return Logical(records, locate_regions(keyed, shapes, tuple(shape)))


def _records(shards: Sequence[Shard]) -> dict[ShardKey, TensorRecord]:
    records: dict[ShardKey, TensorRecord] = {}
    for shard in shards:
        key = ShardKey(shard.rank, shard.call)
        if key in records:
            raise LayoutError(f"{key} gives two shards")
        values = shard.values
        if not isinstance(values, TensorRecord):
            array = np.asarray(values)
            values = TensorRecord(array.dtype.name, array.shape, read=partial(np.asarray, array))
        if values.read is None:
            raise BadInputError("the values of this tensor were not dumped, only statistics")
        records[key] = values
    if not records:
        raise LayoutError("there are no shards")
    return records


def _common_layout(records: Mapping[ShardKey, TensorRecord]) -> TensorLayout:
    first = next(iter(records))
    for key, record in records.items():
        if record.layout is None:
            raise LayoutError(f"{key} does not say how its shard is laid out")
        if record.layout != records[first].layout:
            raise LayoutError(f"{key} names another layout than {first}")
    layout = records[first].layout
    assert layout is not None
    return layout


def _part(record: TensorRecord, place: ShardIndices, box: BlockSlices) -> tuple[Any, Array] | None:
    """Return the positions in a block of what a shard holds of it, as an index, and the values; None: it holds nothing."""
    overlaps = [_overlap(i, s.start, s.stop) for i, s in zip(place.dims, box, strict=True)]
    pairs = [pair for pair in overlaps if pair is not None]
    if len(pairs) < len(overlaps):
        return None
    in_block, in_shard = [w for w, _ in pairs], [o for _, o in pairs]
    if place.flat is None:
        return _picked(in_block, [s.stop - s.start for s in box]), _read_elements(record, in_shard)
    begin, end = place.flat
    lengths = [*map(len, place.dims)]
    positions: list[Array] = [np.arange(n)[o] for n, o in zip(lengths, in_shard, strict=True)]
    inner = math.prod(lengths[1:])
    if positions and (
        int(positions[0].max() + 1) * inner <= begin or int(positions[0].min()) * inner >= end
    ):
        return None
    numbers: Array = np.zeros((), np.int64)  # positions in the flattened region
    for n, i in zip(lengths, positions, strict=True):
        numbers = np.add.outer(numbers * n, i)
    inside: Array = (numbers >= begin) & (numbers < end)
    if not inside.any():
        return None
    chosen: Array = numbers[inside] - begin
    low = int(chosen.min())
    values: Array = _read_elements(record, [slice(low, int(chosen.max()) + 1)])[chosen - low]
    if not box:
        return ..., values.reshape(())
    positions: list[Array] = [
        np.arange(s.stop - s.start)[w] for w, s in zip(in_block, box, strict=True)
    ]
    return tuple(a[n] for a, n in zip(positions, np.nonzero(inside), strict=True)), values


def _overlap(positions: ShardPositions, low: int, high: int) -> tuple[Indexer, Indexer] | None:
    """Return where a shard holds something between ``low`` and ``high``: counted from ``low``, and in it; None: nowhere."""
    if isinstance(positions, range):
        begin, end = max(positions.start, low), min(positions.stop, high)
        in_block, in_shard = (slice(begin - first, end - first) for first in (low, positions.start))
        return (in_block, in_shard) if begin < end else None
    inside = np.flatnonzero((positions >= low) & (positions < high))
    return (positions[inside] - low, inside) if inside.size else None


def _read_elements(record: TensorRecord, indexers: Sequence[Indexer]) -> Array:
    """Return elements of a record, maybe a view; of a mapped file only these are read."""
    values = record.load()
    if values.shape != record.shape:
        raise BadInputError(
            f"a shard has the shape {list(values.shape)}, the dump says {list(record.shape)}"
        )
    return np.asarray(values[_picked(indexers, record.shape)])


def _picked(indexers: Sequence[Indexer], shape: Sequence[int]) -> Any:
    """Return positions along each dimension of an array as the index that selects all their combinations."""
    if sum(not isinstance(i, slice) for i in indexers) <= 1:
        return (*indexers, ...)
    return np.ix_(*(np.arange(n)[i] for i, n in zip(indexers, shape, strict=True)))


def _widened(x: Array, kind: str) -> Array:
    """Return the first term in the type in which terms are combined."""
    if kind in ("max", "min"):
        return x
    if kind == "all":
        return x.astype(np.bool_)
    wide = {"f": np.float64, "i": np.int64, "u": np.int64, "b": np.int64}
    return x.astype(wide.get(x.dtype.kind, x.dtype))


_COMBINE = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "all": np.logical_and,
}


def _unequal_bits(a: Array, b: Array) -> Array:
    """Return where two arrays of one type differ in any bit."""
    if a.dtype.itemsize in (1, 2, 4, 8):
        bits = np.dtype(f"u{a.dtype.itemsize}")
        return np.asarray(a.view(bits) != b.view(bits))
    return np.asarray(a != b)
