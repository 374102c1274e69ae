"""Merge the shards of many ranks into one tensor, and compare the copies that several ranks hold.

Shards, replicas, partial sums, interleaved, expert-owned, flattened and micro-batch shards are all ranges of indices
(``ranges.py``). A layout that contradicts its shards is refused. Copies of one shard are compared: where they differ,
the finding names rank, element and values.

Values are read in blocks of the whole tensor, so a tensor of any size merges in bounded memory.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from telechat_moe.tools.align.dump.ranges import (
    LayoutError,
    ShardKey,
    ShardMap,
    locate,
    locate_regions,
)
from telechat_moe.tools.align.dump.records import TensorLayout, TensorRecord
from telechat_moe.tools.align.dump.shard_values import (
    Array,
    Indexer,
    RegionCopy,
    Shard,
    ShardValues,
    intersect,
    picked,
)
from telechat_moe.tools.align.dump.value_files import boxes, write_npy_header
from telechat_moe.tools.align.numerics import is_float, ulps

BLOCK_BYTES = 16 << 20


class Bound(NamedTuple):
    """How far copies of one shard may differ: ``atol + rtol |x|`` or a number of ULPs, whichever is more."""

    rtol: float = 0.0
    atol: float = 0.0
    ulp: float = 0.0


@dataclass(frozen=True)
class Difference:
    """A copy that is not equal to the first one.

    Attributes:
        key: Rank, and call, that holds it.
        reference: Rank and call of the first copy.
        elements: Number of elements that differ by more than the bound.
        index: Index of the first of them in the whole tensor.
        value: The copy's value at that index.
        expected: The first copy's value at that index.
    """

    key: ShardKey
    reference: ShardKey
    elements: int
    index: tuple[int, ...]
    value: Any
    expected: Any

    def __str__(self) -> str:
        return (
            f"{self.key} differs from {self.reference} in {self.elements:,} elements, first {list(self.index)}: "
            f"{self.value!r}, there {self.expected!r}"
        )


@dataclass
class Copies:
    """The results of comparing copies while a tensor was merged.

    Attributes:
        compared: Number of copies that were compared with the first copy; 0: every shard is held once.
        bitwise: Whether all copies are equal to the last bit.
        differences: Copies beyond the bound, by rank and call.
    """

    compared: int = 0
    bitwise: bool = True
    differences: dict[ShardKey, Difference] = field(default_factory=dict[ShardKey, Difference])

    @property
    def verdict(self) -> str:
        """``none`` (nothing to compare), ``bitwise``, ``within bound`` or ``differ``."""
        if not self.compared:
            return "none"
        if self.differences:
            return "differ"
        return "bitwise" if self.bitwise else "within bound"


class CopiesDifferError(LayoutError):
    """Copies of one shard differ: a fault of the run, or a layout that wrongly declares copies (exit code 4).

    Attributes:
        copies: The results of comparing copies.
    """

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        super().__init__("; ".join(map(str, list(copies.differences.values())[:4])))


class Merged(NamedTuple):
    """A merged tensor.

    Attributes:
        values: The whole tensor; sums, means and products of terms in float64 (integers: int64).
        dtype: Canonical name of the type that the program computed in.
        ranks: Ranks that contributed values.
        copies: The results of comparing copies.
    """

    values: Array
    dtype: str
    ranks: tuple[int, ...]
    copies: Copies


@dataclass(frozen=True)
class _Region:
    """A region of the whole tensor: for each term of a reduction its copies."""

    dims: tuple[Any, ...]
    terms: list[list[RegionCopy]]


class Logical:
    """A tensor that is merged as it is read.

    Args:
        shards: What the ranks hold.
        where: Ranges of the shards in the whole tensor.
        bound: How far copies may differ; None: not at all.
        keep: Whether to go on with the first copy where copies differ; otherwise :class:`CopiesDifferError` at the end.

    Raises:
        LayoutError: The shards are of different types.
    """

    def __init__(
        self,
        shards: Mapping[ShardKey, ShardValues],
        where: ShardMap,
        bound: Bound | None = None,
        keep: bool = False,
    ) -> None:
        self.shape, self.bound, self.keep, self.copies = where.shape, bound, keep, Copies()
        self.dtype = _one_dtype(shards)
        self._plan, self._regions = where, _regions(shards, where)
        self._seen: set[ShardKey] = set()
        first = [term[0] for region in self._regions for term in region.terms]
        self.ranks = tuple(sorted({key.rank for copy in first for key in copy.keys}))

    @property
    def mean(self) -> bool:
        """Whether values are means of terms."""
        return self._plan.divide > 1

    def blocks(self, limit: int = BLOCK_BYTES) -> Iterator[tuple[tuple[slice, ...], Array]]:
        """Yield the whole tensor in C order, block by block; a tensor without elements as one block.

        Args:
            limit: Approximate number of bytes of a block.

        Raises:
            CopiesDifferError: After the last block, if copies differ and ``keep`` is not set.
            BadInputError: A file is broken.
        """
        self.copies, self._seen = Copies(), set()
        empty = [tuple(slice(0, n) for n in self.shape)]
        for box in boxes(self.shape, max(1, limit // 8)) if math.prod(self.shape) else empty:
            yield box, self._block(box)
        if self.copies.differences and not self.keep:
            raise CopiesDifferError(self.copies)

    def merge(self) -> Merged:
        """Return the whole tensor in memory; raises like :meth:`blocks`."""
        whole: Array | None = None
        for box, block in self.blocks():
            if whole is None:
                whole = np.empty(self.shape, block.dtype)
            whole[box] = block
        assert whole is not None  # there is a block
        return Merged(whole, self.dtype, self.ranks, self.copies)

    def write(self, path: Path, dtype: str | None = None, limit: int = BLOCK_BYTES) -> None:
        """Write the whole tensor as a ``.npy`` file, block by block; raises like :meth:`blocks`.

        Args:
            dtype: NumPy type of the values in the file; None: that of :attr:`Merged.values`.
            limit: Approximate number of bytes of a block.
        """
        with path.open("wb") as file:
            for _, block in self.blocks(limit):
                stored = np.dtype(dtype or block.dtype)
                if not file.tell():
                    write_npy_header(file, stored, self.shape)
                file.write(np.ascontiguousarray(block, stored).data)

    def _block(self, box: tuple[slice, ...]) -> Array:
        target: Array | None = None
        for region in self._regions:
            found = [
                intersect(runs, s.start, s.stop) for runs, s in zip(region.dims, box, strict=True)
            ]
            if any(f is None for f in found) and target is not None:
                continue
            pairs = [f if f is not None else (slice(0, 0), slice(0, 0)) for f in found]
            values = self._reduced(region, [own for _, own in pairs], [g for g, _ in pairs], box)
            if target is None:
                target = np.empty([s.stop - s.start for s in box], values.dtype)
            assert target is not None
            target[picked([g for g, _ in pairs], target.shape)] = values
        assert target is not None  # a plan has a shard
        return target

    def _reduced(
        self, region: _Region, own: list[Indexer], where: list[Indexer], box: tuple[slice, ...]
    ) -> Array:
        total: Array | None = None
        for term in region.terms:
            first, references = term[0].read(own)
            for other in term[1:]:
                copy, holders = other.read(own)
                for (holder, mine), (reference, _) in zip(holders, references, strict=True):
                    self._compare(holder, copy, reference, first, mine, where, box)
            if self._plan.reduce is None:
                return first
            if total is None:
                total = _first_term(first, self._plan.reduce)
            else:
                _COMBINE[self._plan.reduce](total, first, out=total, casting="unsafe")
        assert total is not None
        return total / self._plan.divide if self._plan.divide > 1 else total

    def _compare(
        self,
        key: ShardKey,
        copy: Array,
        reference: ShardKey,
        first: Array,
        mine: Array,
        where: list[Indexer],
        box: tuple[slice, ...],
    ) -> None:
        """Compare a rank's elements of a copy with the first copy; record the differences."""
        if key not in self._seen and mine.any() and copy.size:
            self._seen.add(key)
            self.copies.compared += 1
        wrong = _unequal_bits(copy, first) & mine
        if not wrong.any():
            return
        self.copies.bitwise = False
        if self.bound is not None:
            wrong &= _beyond(copy, first, self.bound, self.dtype)
        count = int(wrong.sum())
        if not count:
            return
        if (known := self.copies.differences.get(key)) is not None:
            self.copies.differences[key] = replace(known, elements=known.elements + count)
            return
        at = tuple(int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape))
        numbers: list[Array] = [
            np.arange(s.start, s.stop)[w] for s, w in zip(box, where, strict=True)
        ]
        index = tuple(int(n[i]) for n, i in zip(numbers, at, strict=True))
        self.copies.differences[key] = Difference(
            key, reference, count, index, copy[at].item(), first[at].item()
        )


def logical(
    shards: Sequence[Shard],
    layout: TensorLayout | None = None,
    shape: Sequence[int] | None = None,
    *,
    bound: Bound | None = None,
    keep: bool = False,
) -> Logical:
    """Return the tensor that shards form; nothing is read yet.

    Args:
        shards: What the ranks hold, in any order.
        layout: Their layout; None: each shard is a record that has one.
        shape: Shape of the whole tensor; needed where filler hides it.

    Raises:
        LayoutError: Layout, shards and shape contradict each other; a shard is missing or present twice.
        BadInputError: Values were not dumped.
    """
    sources = _sources(shards)
    layout = layout if layout is not None else _common_layout(shards)
    shapes = {key: source.shape for key, source in sources.items()}
    where = locate(layout, shapes, None if shape is None else tuple(shape))
    return Logical(sources, where, bound, keep)


def logical_regions(
    shards: Sequence[Shard],
    regions: Mapping[int, Sequence[tuple[int, int]]]
    | Mapping[tuple[int, int], Sequence[tuple[int, int]]],
    shape: Sequence[int],
) -> Logical:
    """Return the tensor whose shards hold given regions, as (begin, end) of every dimension, by rank.

    Where the calls of a rank hold different shards (micro-batches, whose number may differ between ranks), the keys
    are (rank, call).
    """
    sources = _sources(shards)
    ranges = locate_regions(
        {ShardKey(*k) if isinstance(k, tuple) else ShardKey(k): r for k, r in regions.items()},
        {key: source.shape for key, source in sources.items()},
        tuple(shape),
    )
    return Logical(sources, ranges)


def merge(
    shards: Sequence[Shard],
    layout: TensorLayout | None = None,
    shape: Sequence[int] | None = None,
    *,
    bound: Bound | None = None,
    keep: bool = False,
) -> Merged:
    """Merge shards in memory; see :func:`logical`."""
    return logical(shards, layout, shape, bound=bound, keep=keep).merge()


def _common_layout(shards: Sequence[Shard]) -> TensorLayout:
    """Return the common layout of all records, of which there is one or more."""
    layouts = [s.values.layout if isinstance(s.values, TensorRecord) else None for s in shards]
    for shard, layout in zip(shards, layouts, strict=True):
        if layout is None:
            raise LayoutError(f"rank {shard.rank} does not say how its shard is laid out")
        if layout != layouts[0]:
            raise LayoutError(f"rank {shard.rank} names another layout than rank {shards[0].rank}")
    assert layouts[0] is not None
    return layouts[0]


# ------------------------------------------------------------------------------------- helpers


def _sources(shards: Sequence[Shard]) -> dict[ShardKey, ShardValues]:
    found: dict[ShardKey, ShardValues] = {}
    for shard in shards:
        key = ShardKey(shard.rank, shard.call)
        if key in found:
            raise LayoutError(f"{key} gives two shards")
        found[key] = ShardValues.of(shard.values)
    if not found:
        raise LayoutError("there are no shards")
    return found


def _one_dtype(shards: Mapping[ShardKey, ShardValues]) -> str:
    first, known = next(iter(shards.items()))
    for key, source in shards.items():
        if source.dtype != known.dtype:
            raise LayoutError(f"{key} holds {source.dtype}, {first} {known.dtype}")
    return known.dtype


def _regions(shards: Mapping[ShardKey, ShardValues], where: ShardMap) -> list[_Region]:
    """Group shards by region, term and flat range; copies in the order of keys."""
    grouped: dict[Any, dict[int, dict[Any, list[ShardKey]]]] = {}
    for key in sorted(where.places):
        place = where.places[key]
        terms = grouped.setdefault(place.dims, {})
        terms.setdefault(place.term, {}).setdefault(place.flat, []).append(key)
    regions: list[_Region] = []
    for dims, terms in grouped.items():
        shape = [sum(b - a for a, b in runs) for runs in dims]
        regions.append(_Region(dims, [_copies(shards, terms[t], shape) for t in sorted(terms)]))
    return regions


def _copies(
    shards: Mapping[ShardKey, ShardValues],
    parts: Mapping[Any, list[ShardKey]],
    shape: Sequence[int],
) -> list[RegionCopy]:
    """Return the copies of a region; flat shards are joined copy by copy."""
    ordered = sorted(f for f in parts if f and f[0] < f[1]) or list(parts)[:1]
    return [
        RegionCopy(shape, [(k, shards[k], flat) for k, flat in zip(keys, ordered, strict=True)])
        for keys in zip(*(parts[flat] for flat in ordered), strict=True)
    ]


def _first_term(x: Array, kind: str) -> Array:
    """Return a copy of the first term, in the type in which terms are combined."""
    if kind in ("max", "min"):
        return x.copy()
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
    if a.dtype != b.dtype:
        raise LayoutError(f"copies are stored as {a.dtype} and {b.dtype}")
    if a.dtype.itemsize in (1, 2, 4, 8):
        bits = np.dtype(f"u{a.dtype.itemsize}")
        return np.asarray(a.view(bits) != b.view(bits))
    return np.asarray(a != b)


def _beyond(a: Array, b: Array, bound: Bound, dtype: str) -> Array:
    """Return where two arrays differ by more than a bound; NaN against a number always does."""
    if a.dtype.kind not in "fiub":
        return np.ones(a.shape, np.bool_)
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        near = (
            (x == y)
            | (np.isnan(x) & np.isnan(y))
            | (np.abs(x - y) <= bound.atol + bound.rtol * np.abs(y))
        )
    if bound.ulp and is_float(dtype):
        near |= ulps(x, y, dtype) <= bound.ulp
    return ~near
