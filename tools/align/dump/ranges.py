"""Compute the indices of the whole tensor that each shard of a layout holds, or refuse the layout.

Every refusal is a :class:`LayoutError` whose message says what contradicts what.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from telechat_moe.errors import TelechatMoeError
from telechat_moe.numerics import Array
from telechat_moe.tools.align.dump.records import FLAT, TensorLayout

KINDS = ("sum", "mean", "max", "min", "prod", "all")
"""Reductions that a partial value may need."""

TensorShape = tuple[int, ...]
ShardPositions = range | Array
"""Indices of a dimension of the whole, in the order in which a shard holds them."""

_MAX_CELLS = 1 << 26


class LayoutError(TelechatMoeError):
    """Shards and their layout contradict each other: nothing can be merged or compared (exit code 4)."""

    exit_code = 4


class ShardKey(NamedTuple):
    """The name of a shard: the rank that holds it and, if an axis consists of calls, the number of the call."""

    rank: int
    call: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" call {self.call}" if self.call else "")


class ShardIndices(NamedTuple):
    """What a shard holds of the whole tensor."""

    # Its indices in each dimension of the whole; those beyond the end of a dimension are filler
    dims: tuple[ShardPositions, ...]
    term: int = 0  # the term of a reduction that it belongs to
    # Its range in the flattened region `dims`; None: it is the whole region
    flat: tuple[int, int] | None = None

    @property
    def mark(self) -> tuple[Any, ...]:
        """The same for copies, and for nothing else."""
        dims = (d if isinstance(d, range) else d.tobytes() for d in self.dims)
        return *dims, self.term, self.flat


@dataclass(frozen=True)
class ShardMap:
    """What all shards of a tensor hold; made and checked by :func:`locate` or :func:`locate_regions`."""

    shape: TensorShape
    places: Mapping[ShardKey, ShardIndices]
    reduce: str | None = None  # how the terms of a partial value combine; None: there is only one
    divide: int = 1  # divisor of their sum (`mean`)


def locate(
    layout: TensorLayout, shapes: Mapping[ShardKey, TensorShape], shape: TensorShape | None = None
) -> ShardMap:
    """Return what the shards of a layout hold; ``shape`` of the whole is needed where filler hides it.

    Raises:
        LayoutError: The layout contradicts itself, the shards, or the shape.
    """
    _check_axes(layout)
    _check_dimensions(layout)
    coordinates = _coordinates(layout)
    _check_keys(coordinates, shapes, "no shard of {}, which the layout lists")
    _check_keys(shapes, coordinates, "a shard of {}, which the layout does not list")
    shards = _Shards(layout)
    lengths = _lengths(shards, shapes, shape)
    places: dict[ShardKey, ShardIndices] = {}
    for key, place in coordinates.items():
        dims = tuple(shards.indices(d, n, place) for d, n in enumerate(lengths))
        local, flat = tuple(map(len, dims)), None
        if layout.flat:
            indices = shards.indices(FLAT, shards.length(FLAT, math.prod(local)), place)
            flat = (int(indices[0]), int(indices[-1]) + 1) if len(indices) else (0, 0)
            local = (len(indices),)
        if shapes[key] != local:
            raise LayoutError(
                f"{key} holds a shard of shape {list(shapes[key])}; a tensor {list(shape or lengths)} laid out as "
                f"{describe(layout)} has {list(local)} there"
            )
        term = _position(layout.partial, shards.sizes, place)
        places[key] = ShardIndices(dims, term, flat)
    whole_shape = tuple(shape) if shape is not None else tuple(lengths)
    divide = math.prod(shards.sizes[a] for a, kind in layout.partial.items() if kind == "mean")
    return ShardMap(whole_shape, places, _reduction(layout), divide)


def locate_regions(
    regions: Mapping[ShardKey, Sequence[tuple[int, int]]],
    shapes: Mapping[ShardKey, TensorShape],
    shape: TensorShape,
) -> ShardMap:
    """Return what shards hold whose regions are given, as (begin, end) of every dimension.

    Raises:
        LayoutError: Regions overlap, leave gaps, or do not fit shards or shape.
    """
    _check_keys(regions, shapes, "{} has no shard")
    _check_keys(shapes, regions, "{} has no region")
    if not regions:
        raise LayoutError("there are no shards")
    for key, region in regions.items():
        if len(region) != len(shape) or any(
            not 0 <= a <= b <= n for (a, b), n in zip(region, shape, strict=False)
        ):
            raise LayoutError(f"{key}: region {_text(region)} does not lie within {list(shape)}")
        region_shape = tuple(b - a for a, b in region)
        if region_shape != shapes[key]:
            raise LayoutError(
                f"{key} holds a shard of shape {list(shapes[key])}, its region {_text(region)} is {list(region_shape)}"
            )
    places = {key: ShardIndices(tuple(range(a, b) for a, b in x)) for key, x in regions.items()}
    counts = Counter(p.dims for p in places.values())
    if len(set(counts.values())) > 1:
        (rare, few), (_, many) = counts.most_common()[-1], counts.most_common()[0]
        named = _text((indices[0], indices[-1] + 1) for indices in rare if len(indices))
        raise LayoutError(f"region {named} has {few} copies, others {many}")
    _check_tiling(shape, {tuple(region) for region in regions.values()})
    return ShardMap(shape, places)


def describe(layout: TensorLayout) -> str:
    """Return a layout in a few words: ``dp2 tp4: [dp, -, tp], sum over tp``."""
    mesh = " ".join(f"{a}{n}" for a, n in zip(layout.axes, layout.mesh, strict=False))
    dims = ", ".join("*".join(axes) if axes else "-" for axes in layout.dims)
    text = f"{mesh or 'one device'}: [{dims}]"
    text += "".join(f", {kind} over {axis}" for axis, kind in layout.partial.items())
    return text + (f", flat over {'*'.join(layout.flat)}" if layout.flat else "")


def _check_axes(layout: TensorLayout) -> None:
    """Refuse axes that are unknown, named twice or used twice."""
    if len(layout.mesh) != len(layout.axes):
        raise LayoutError(
            f"the mesh {list(layout.mesh)} has {len(layout.mesh)} axes, {len(layout.axes)} are named: "
            f"{', '.join(layout.axes)}"
        )
    _once(layout.axes, "the mesh names the axis {} twice")
    for axis, n in zip(layout.axes, layout.mesh, strict=True):
        if n < 1:
            raise LayoutError(f"the axis {axis} has {n} devices, expected 1 or more")
    cutting = [a for axes in layout.dims for a in axes]
    used = [*cutting, *layout.partial, *layout.flat]
    _once(used, "the axis {} is used twice: it can shard one dimension, or hold terms, or copies")
    named = {*used, *layout.interleaved, *layout.local, *([layout.calls] if layout.calls else [])}
    for axis in sorted(named.difference(layout.axes)):
        raise LayoutError(f"the axis {axis!r} is not one of the mesh: {', '.join(layout.axes)}")
    for axis in sorted((layout.local | layout.interleaved).difference(cutting)):
        raise LayoutError(f"the axis {axis} is local or interleaved but shards no dimension")
    if layout.calls in layout.local:
        raise LayoutError(f"the axis {layout.calls} lies within a tensor and cannot be its calls")


def _check_dimensions(layout: TensorLayout) -> None:
    """Refuse settings of dimensions that do not exist or are set twice."""
    rank = len(layout.dims)
    if len(layout.block) > rank or any(b < 1 for b in layout.block):
        raise LayoutError(f"blocks {list(layout.block)} do not fit {rank} dimensions")
    flat = {FLAT} if layout.flat else set[int]()
    for d in {*layout.sizes, *layout.padded} - flat | {*layout.owned}:
        if not 0 <= d < rank:
            raise LayoutError(f"settings of dimension {d}: there are {rank} dimensions")
    for d, axes in enumerate(layout.dims):
        special = (layout.interleaved | layout.local).intersection(axes)
        if (d in layout.sizes) + (d in layout.owned) + bool(special) > 1:
            raise LayoutError(
                f"dimension {d} is described twice, by sizes, owned indices, interleaved or local axes"
            )
        for axis in layout.interleaved.intersection(axes[:-1]):
            raise LayoutError(
                f"dimension {d}: the interleaved axis {axis} must be the last that shards it"
            )


def _once(names: Iterable[object], sentence: str) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise LayoutError(sentence.format(name, count))


def _check_keys(some: Iterable[ShardKey], others: Iterable[ShardKey], sentence: str) -> None:
    if odd := sorted(set(some) - set(others)):
        raise LayoutError(sentence.format(", ".join(map(str, odd[:8]))))


def _reduction(layout: TensorLayout) -> str | None:
    """Return how terms combine; refuse unknown kinds and kinds whose order matters."""
    kinds = list(dict.fromkeys(layout.partial.values()))
    for kind in set(kinds) - set(KINDS):
        raise LayoutError(f"partial value of kind {kind!r}, expected one of {', '.join(KINDS)}")
    sums = set(kinds) <= {"sum", "mean"}
    if len(kinds) > 1 and not sums:
        raise LayoutError(
            f"partial values of kinds {', '.join(kinds)}: the order of these changes the result"
        )
    return None if not kinds else "sum" if sums else kinds[0]


def _coordinates(layout: TensorLayout) -> dict[ShardKey, dict[str, int]]:
    """Return the position of each shard in the mesh."""
    sizes = zip(layout.axes, layout.mesh, strict=True)
    extent = {a: n for a, n in sizes if a not in layout.local and a != layout.calls}
    if math.prod(extent.values()) != len(layout.ranks):
        raise LayoutError(
            f"the mesh {' x '.join(f'{a} {n}' for a, n in extent.items()) or '1'} has "
            f"{math.prod(extent.values())} devices, {len(layout.ranks)} ranks are listed"
        )
    _once(layout.ranks, "rank {} is listed {} times")
    if min(layout.ranks) < 0:
        raise LayoutError(f"rank {min(layout.ranks)} < 0")
    calls = layout.mesh[layout.axes.index(layout.calls)] if layout.calls else 1
    coordinates: dict[ShardKey, dict[str, int]] = {}
    for rank, index in zip(layout.ranks, np.ndindex(*extent.values()), strict=True):
        for call in range(calls):
            place = dict(zip(extent, index, strict=True))
            coordinates[ShardKey(rank, call)] = place | (
                {layout.calls: call} if layout.calls else {}
            )
    return coordinates


def _lengths(
    shards: "_Shards", shapes: Mapping[ShardKey, TensorShape], shape: TensorShape | None
) -> list[int]:
    """Return the length of each dimension, filler included."""
    layout, first = shards.layout, next(iter(shapes.values()))
    rank = len(layout.dims)
    if shape is not None and len(shape) != rank:
        raise LayoutError(
            f"the whole tensor {list(shape)} has {len(shape)} dimensions, the layout {rank}"
        )
    if shape is not None:
        return [shards.length(d, n) for d, n in enumerate(shape)]
    if layout.flat or layout.padded:
        raise LayoutError(
            f"{describe(layout)} hides the shape of the whole tensor; it must be given"
        )
    if len(first) != rank:
        raise LayoutError(f"a shard {list(first)} has {len(first)} dimensions, the layout {rank}")
    return [
        shards.length(d, None if d in shards.positions else n * shards.number(d))
        for d, n in enumerate(first)
    ]


class _Shards:
    """The shards of each dimension of a layout; of :data:`FLAT` those of a flattened shard."""

    def __init__(self, layout: TensorLayout) -> None:
        self.layout = layout
        self.sizes = dict(zip(layout.axes, layout.mesh, strict=True))
        self.positions: dict[int, list[ShardPositions]] = {}
        """The indices of each shard of a dimension, where the layout lists them."""
        for d, lengths in layout.sizes.items():
            if any(n < 0 for n in lengths):
                raise LayoutError(f"{_name(d)} has shards of the lengths {list(lengths)}")
            ends = accumulate(lengths)
            self.positions[d] = [range(end - n, end) for n, end in zip(lengths, ends, strict=True)]
        for d, owned in layout.owned.items():
            counts = Counter(i for part in owned for i in part)
            for i, count in counts.items():
                if count > 1 or not 0 <= i < len(counts):
                    raise LayoutError(
                        f"index {i} of {_name(d)} is owned {count} times by shards that hold {len(counts)} in all"
                    )
            self.positions[d] = [np.array(part, np.int64) for part in owned]

    def axes(self, d: int) -> tuple[str, ...]:
        return self.layout.flat if d == FLAT else self.layout.dims[d]

    def number(self, d: int) -> int:
        return math.prod(self.sizes[a] for a in self.axes(d) if a not in self.layout.local)

    def length(self, d: int, unpadded: int | None) -> int:
        """Return the length of a dimension with filler; ``unpadded`` is that without, None if it is not known."""
        length = unpadded if unpadded is None else self.layout.padded.get(d, unpadded)
        if unpadded is not None and length is not None and length < unpadded:
            raise LayoutError(f"{_name(d)} is {unpadded} long and only {length} with filler")
        if d not in self.positions:
            assert length is not None  # the caller knows it
            return length
        if len(self.positions[d]) != self.number(d):
            raise LayoutError(
                f"{_name(d)} is sharded into {self.number(d)}, {len(self.positions[d])} shards are listed"
            )
        total = sum(map(len, self.positions[d]))
        if length is not None and length != total:
            raise LayoutError(f"the shards of {_name(d)} are {total} long together, it is {length}")
        return total

    def indices(self, d: int, length: int, place: Mapping[str, int]) -> ShardPositions:
        """Return the indices of one shard of a dimension."""
        if d in self.positions:
            axes = (a for a in self.axes(d) if a not in self.layout.local)
            return self.positions[d][_position(axes, self.sizes, place)]
        block = dict(enumerate(self.layout.block)).get(d, 1)
        parts: list[ShardPositions] = [range(length)]
        for axis in self.axes(d):
            n = self.sizes[axis]
            choose: Sequence[int] = range(n) if axis in self.layout.local else (place[axis],)
            turns = block if axis in self.layout.interleaved else 0
            parts = [_cut(part, n, p, turns, d, axis) for part in parts for p in choose]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _position(axes: Iterable[str], sizes: Mapping[str, int], place: Mapping[str, int]) -> int:
    """Return the number of a shard along axes, the first of which is the slowest."""
    number = 0
    for axis in axes:
        number = number * sizes[axis] + place[axis]
    return number


def _cut(part: ShardPositions, n: int, p: int, block: int, d: int, axis: str) -> ShardPositions:
    """Return shard p of n of some indices; with blocks, shards take turns."""
    if len(part) % (n * max(block, 1)):
        elements = "flattened elements" if d == FLAT else f"indices of dimension {d}"
        raise LayoutError(
            f"{len(part)} {elements} cannot be divided into {n} equal shards over {axis}"
            + (f" in blocks of {block}" if block > 1 else "")
        )
    if block:
        return np.asarray(part).reshape(-1, n, block)[:, p].reshape(-1)
    length = len(part) // n
    return part[p * length : (p + 1) * length]


def _check_tiling(shape: TensorShape, regions: Iterable[Sequence[tuple[int, int]]]) -> None:
    """Refuse regions that overlap or leave elements uncovered."""
    edges = [
        np.unique([0, n, *(x for region in regions for x in region[d])])
        for d, n in enumerate(shape)
    ]
    cells = [len(e) - 1 for e in edges]
    if math.prod(cells) > _MAX_CELLS:
        raise LayoutError(
            f"shards lie in too many regions to check that they cover {list(shape)} once"
        )
    count = np.zeros(cells, np.int32)
    for region in regions:
        ends = [np.searchsorted(e, run) for e, run in zip(edges, region, strict=True)]
        count[tuple(slice(a, b) for a, b in ends)] += 1
    for cell in np.argwhere(count != 1):
        index = [int(e[i]) for e, i in zip(edges, cell, strict=True)]
        times = int(count[tuple(cell)])
        holders = f"{times} different shards" if times else "no shard"
        raise LayoutError(f"element {index} of {list(shape)} is held by {holders}")


def _name(d: int) -> str:
    return "the flattened tensor" if d == FLAT else f"dimension {d}"


def _text(region: Iterable[tuple[int, int]]) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in region) + "]"
