"""Compute the ranges of indices of the whole tensor that each shard of a layout holds, or refuse the layout.

Every refusal is a :class:`LayoutError` whose message says what contradicts what.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from telechat_moe.errors import TelechatMoeError
from telechat_moe.tools.align.dump.records import FLAT, TensorLayout

KINDS = ("sum", "mean", "max", "min", "prod", "all")
"""Reductions that a partial value may need."""

Shape = tuple[int, ...]
Runs = tuple[tuple[int, int], ...]
"""Ranges (begin, end) of a dimension of the whole, in the order in which a shard holds them."""

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


class ShardRanges(NamedTuple):
    """The ranges of a shard in the whole tensor.

    Attributes:
        dims: Its ranges in each dimension of the whole; a range beyond the end of a dimension is filler.
        term: The term of a reduction that it belongs to.
        flat: Its range in the flattened region ``dims``; None: it is the whole region.
    """

    dims: tuple[Runs, ...]
    term: int = 0
    flat: tuple[int, int] | None = None


@dataclass(frozen=True)
class ShardMap:
    """The ranges of all shards of a tensor; made and checked by :func:`locate` or :func:`locate_regions`.

    Attributes:
        places: The ranges of each shard.
        reduce: How the terms of a partial value combine; None: there is only one.
        terms: Number of terms.
        divide: Divisor of their sum (``mean``).
    """

    shape: Shape
    places: Mapping[ShardKey, ShardRanges]
    reduce: str | None = None
    terms: int = 1
    divide: int = 1


def locate(
    layout: TensorLayout, shapes: Mapping[ShardKey, Shape], shape: Shape | None = None
) -> ShardMap:
    """Return the ranges of the shards of a layout.

    Args:
        shape: Shape of the whole tensor; needed where filler hides it (``padded``, ``flat``).

    Raises:
        LayoutError: The layout contradicts itself, the shards, or the shape.
    """
    _check_axes(layout)
    reduce = _reduction(layout)
    sizes = dict(zip(layout.axes, layout.mesh, strict=True))
    found = coordinates(layout, sizes)
    _check_keys(found, shapes)
    lengths = _lengths(layout, sizes, shapes, shape)
    places: dict[ShardKey, ShardRanges] = {}
    flat_sizes: Sequence[int] | None = None
    for key, place in found.items():
        dims = tuple(_runs(layout, sizes, d, n, place) for d, n in enumerate(lengths))
        local = tuple(sum(b - a for a, b in runs) for runs in dims)
        flat = None
        if layout.flat:
            flat_sizes = _flat_sizes(layout, sizes, math.prod(local))
            p = position(layout.flat, sizes, place)
            begin = sum(flat_sizes[:p])
            flat = (begin, begin + flat_sizes[p])
            local = (flat_sizes[p],)
        if shapes[key] != local:
            raise LayoutError(
                f"{key} holds a shard of shape {list(shapes[key])}; a tensor {list(shape or lengths)} laid out as "
                f"{describe(layout)} has {list(local)} there"
            )
        term = position(tuple(layout.partial), sizes, place)
        places[key] = ShardRanges(dims, term, flat)
    whole = tuple(shape) if shape is not None else tuple(lengths)
    terms = math.prod(sizes[a] for a in layout.partial)
    divide = math.prod(sizes[a] for a, kind in layout.partial.items() if kind == "mean")
    _check_tiling(tuple(lengths), [p.dims for p in places.values()])
    return ShardMap(whole, places, reduce, terms, divide)


def locate_regions(
    regions: Mapping[ShardKey, Sequence[tuple[int, int]]],
    shapes: Mapping[ShardKey, Shape],
    shape: Shape,
) -> ShardMap:
    """Return the ranges of shards whose regions are given, as (begin, end) of every dimension.

    Raises:
        LayoutError: Regions overlap, leave gaps, or do not fit shards or shape.
    """
    if set(regions) != set(shapes):
        odd = sorted(set(regions) ^ set(shapes))[0]
        raise LayoutError(f"{odd} has {'no shard' if odd in regions else 'no region'}")
    if not regions:
        raise LayoutError("there are no shards")
    places: dict[ShardKey, ShardRanges] = {}
    for key, region in regions.items():
        if len(region) != len(shape) or any(
            not 0 <= a <= b <= n for (a, b), n in zip(region, shape, strict=False)
        ):
            raise LayoutError(f"{key}: region {_text(region)} does not lie within {list(shape)}")
        found = tuple(b - a for a, b in region)
        if found != shapes[key]:
            raise LayoutError(
                f"{key} holds a shard of shape {list(shapes[key])}, its region {_text(region)} is {list(found)}"
            )
        places[key] = ShardRanges(tuple(((a, b),) if b > a else () for a, b in region))
    counts = Counter(p.dims for p in places.values())
    if len(set(counts.values())) > 1:
        (rare, few), (_, many) = counts.most_common()[-1], counts.most_common()[0]
        raise LayoutError(
            f"region {_text(r[0] for r in rare if r)} has {few} copies, others {many}"
        )
    _check_tiling(tuple(shape), list(counts))
    return ShardMap(tuple(shape), places)


def describe(layout: TensorLayout) -> str:
    """Return a layout in a few words: ``dp2 tp4: [dp, -, tp], sum over tp``."""
    mesh = " ".join(f"{a}{n}" for a, n in zip(layout.axes, layout.mesh, strict=False))
    dims = ", ".join("*".join(axes) if axes else "-" for axes in layout.dims)
    text = f"{mesh or 'one device'}: [{dims}]"
    text += "".join(f", {kind} over {axis}" for axis, kind in layout.partial.items())
    return text + (f", flat over {'*'.join(layout.flat)}" if layout.flat else "")


# ---------------------------------------------------------------------------------- the layout itself


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
    used = [a for axes in layout.dims for a in axes] + list(layout.partial) + list(layout.flat)
    _once(used, "the axis {} is used twice: it can shard one dimension, or hold terms, or copies")
    known = set(layout.axes)
    named = {*used, *layout.interleaved, *layout.local, *([layout.calls] if layout.calls else [])}
    for axis in sorted(named - known):
        raise LayoutError(f"the axis {axis!r} is not one of the mesh: {', '.join(layout.axes)}")
    cutting = {a for axes in layout.dims for a in axes}
    for axis in sorted(layout.local):
        if axis not in cutting or axis == layout.calls:
            raise LayoutError(f"the axis {axis} is used in a tensor but shards no dimension of it")
    for axis in sorted(layout.interleaved - cutting):
        raise LayoutError(f"the axis {axis} is interleaved but shards no dimension")
    _check_dimensions(layout)


def _check_dimensions(layout: TensorLayout) -> None:
    """Refuse settings of dimensions that do not exist or are set twice."""
    rank = len(layout.dims)
    if len(layout.block) > rank or any(b < 1 for b in layout.block):
        raise LayoutError(f"blocks {list(layout.block)} do not fit {rank} dimensions")
    for what in ("sizes", "owned", "padded"):
        for d in getattr(layout, what):
            if not (0 <= d < rank or (d == FLAT and layout.flat and what != "owned")):
                raise LayoutError(f"{what} of dimension {d}: there are {rank} dimensions")
    for d in range(rank):
        explicit = [w for w in ("sizes", "owned") if d in getattr(layout, w)]
        special = layout.interleaved | layout.local
        if len(explicit) > 1 or (explicit and special & set(layout.dims[d])):
            raise LayoutError(
                f"dimension {d} is described twice: {', '.join(explicit)}, interleaved or local axes"
            )
        for axis in layout.interleaved.intersection(layout.dims[d][:-1]):
            raise LayoutError(
                f"dimension {d}: the interleaved axis {axis} must be the last that shards it"
            )


def _once(names: Iterable[object], sentence: str) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise LayoutError(sentence.format(name, count))


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


def coordinates(layout: TensorLayout, sizes: Mapping[str, int]) -> dict[ShardKey, dict[str, int]]:
    """Return the position of each shard in the mesh."""
    devices = [a for a in layout.axes if a not in layout.local and a != layout.calls]
    extent = [sizes[a] for a in devices]
    if math.prod(extent) != len(layout.ranks):
        raise LayoutError(
            f"the mesh {' x '.join(f'{a} {sizes[a]}' for a in devices) or '1'} has {math.prod(extent)} devices, "
            f"{len(layout.ranks)} ranks are listed"
        )
    _once(layout.ranks, "rank {} is listed {} times")
    if min(layout.ranks) < 0:
        raise LayoutError(f"rank {min(layout.ranks)} < 0")
    found: dict[ShardKey, dict[str, int]] = {}
    for i, rank in enumerate(layout.ranks):
        place = dict(zip(devices, map(int, np.unravel_index(i, extent)), strict=True))
        for call in range(sizes[layout.calls] if layout.calls else 1):
            found[ShardKey(rank, call)] = place | ({layout.calls: call} if layout.calls else {})
    return found


def _check_keys(coordinates: Mapping[ShardKey, object], shapes: Mapping[ShardKey, Shape]) -> None:
    for found, others, said in (
        (coordinates, shapes, "no shard of {}, which the layout lists"),
        (shapes, coordinates, "a shard of {}, which the layout does not list"),
    ):
        if odd := sorted(set(found) - set(others)):
            raise LayoutError(said.format(", ".join(map(str, odd[:8]))))


# -------------------------------------------------------------------------------------- cutting


def _lengths(
    layout: TensorLayout,
    sizes: Mapping[str, int],
    shapes: Mapping[ShardKey, Shape],
    shape: Shape | None,
) -> list[int]:
    """Return the length of each dimension, filler included."""
    rank = len(layout.dims)
    if shape is not None and len(shape) != rank:
        raise LayoutError(
            f"the whole tensor {list(shape)} has {len(shape)} dimensions, the layout {rank}"
        )
    if shape is None and (layout.flat or layout.padded):
        raise LayoutError(
            f"{describe(layout)} hides the shape of the whole tensor; it must be given"
        )
    first = next(iter(shapes.values()))
    if shape is None and len(first) != rank:
        raise LayoutError(f"a shard {list(first)} has {len(first)} dimensions, the layout {rank}")
    found: list[int] = []
    for d, axes in enumerate(layout.dims):
        shards = math.prod(sizes[a] for a in axes if a not in layout.local)
        told = None
        if d in layout.owned:
            told = _owned_length(layout.owned[d], shards, d)
        elif d in layout.sizes:
            told = _sizes_length(layout.sizes[d], shards, f"dimension {d}")
        given = layout.padded.get(d, None if shape is None else shape[d])
        if shape is not None and given is not None and given < shape[d]:
            raise LayoutError(f"dimension {d} is {shape[d]} long and only {given} with filler")
        if told is not None and given is not None and told != given:
            raise LayoutError(
                f"the shards of dimension {d} are {told} long together, the tensor {given}"
            )
        length = told if told is not None else given if given is not None else first[d] * shards
        found.append(length)
    return found


def _owned_length(owned: Sequence[Sequence[int]], shards: int, d: int) -> int:
    if len(owned) != shards:
        raise LayoutError(
            f"dimension {d} is sharded into {shards}, the indices of {len(owned)} shards are given"
        )
    counts = Counter(i for part in owned for i in part)
    total = sum(map(len, owned))
    for index, count in counts.items():
        if count > 1 or not 0 <= index < total:
            why = f"by {count} shards" if count > 1 else f"but the shards hold {total} in all"
            raise LayoutError(f"index {index} of dimension {d} is owned {why}")
    return total


def _sizes_length(lengths: Sequence[int], shards: int, what: str) -> int:
    if len(lengths) != shards or any(n < 0 for n in lengths):
        raise LayoutError(f"{what} is sharded into {shards}, the lengths {list(lengths)} are given")
    return sum(lengths)


def _flat_sizes(layout: TensorLayout, sizes: Mapping[str, int], elements: int) -> Sequence[int]:
    shards = math.prod(sizes[a] for a in layout.flat)
    padded = layout.padded.get(FLAT, elements)
    if FLAT in layout.sizes:
        total = _sizes_length(layout.sizes[FLAT], shards, "the flattened tensor")
        if total != padded:
            raise LayoutError(
                f"the flat shards have {total} elements together, the tensor {padded}"
            )
        return layout.sizes[FLAT]
    if padded < elements:
        raise LayoutError(
            f"the flattened tensor has {elements} elements, only {padded} with filler"
        )
    if padded % shards:
        raise LayoutError(
            f"{padded} flattened elements cannot be divided into {shards} equal shards"
        )
    return [padded // shards] * shards


def position(
    axes: Sequence[str],
    sizes: Mapping[str, int],
    place: Mapping[str, int],
    skip: Iterable[str] = (),
) -> int:
    """Return the number of a shard along axes, the first of which is the slowest."""
    number = 0
    for axis in axes:
        if axis not in skip:
            number = number * sizes[axis] + place[axis]
    return number


def _runs(
    layout: TensorLayout, sizes: Mapping[str, int], d: int, length: int, place: Mapping[str, int]
) -> Runs:
    """Return the ranges of one shard of a dimension."""
    axes = layout.dims[d]
    number = position(axes, sizes, place, layout.local)
    if d in layout.owned:
        return joined((i, i + 1) for i in layout.owned[d][number])
    if d in layout.sizes:
        begin = sum(layout.sizes[d][:number])
        return joined([(begin, begin + layout.sizes[d][number])])
    block = layout.block[d] if d < len(layout.block) else 1
    found: list[tuple[int, int]] = [(0, length)]
    for axis in axes:
        n = sizes[axis]
        choose: Sequence[int] = range(n) if axis in layout.local else (place[axis],)
        found = [
            run
            for part in found
            for p in choose
            for run in _cut(part, n, p, block if axis in layout.interleaved else 0, d, axis)
        ]
    return joined(found)


def _cut(
    run: tuple[int, int], n: int, p: int, block: int, d: int, axis: str
) -> list[tuple[int, int]]:
    """Return the ranges of shard p of n of a range; with blocks, shards take turns."""
    begin, length = run[0], run[1] - run[0]
    if length % (n * max(block, 1)):
        raise LayoutError(
            f"dimension {d}: {length} cannot be divided into {n} equal shards over {axis}"
            + (f" in blocks of {block}" if block > 1 else "")
        )
    if not block:
        part = length // n
        return [(begin + p * part, begin + (p + 1) * part)]
    return [(i, i + block) for i in range(begin + p * block, begin + length, n * block)]


def joined(runs: Iterable[tuple[int, int]]) -> Runs:
    """Return ranges without empty ones, with neighbours joined."""
    found: list[tuple[int, int]] = []
    for a, b in runs:
        if found and found[-1][1] == a:
            found[-1] = (found[-1][0], b)
        elif b > a:
            found.append((a, b))
    return tuple(found)


# ------------------------------------------------------------------------------------- coverage


def _check_tiling(lengths: Shape, regions: Sequence[tuple[Runs, ...]]) -> None:
    """Refuse regions that overlap or leave elements uncovered."""
    distinct = list(dict.fromkeys(regions))
    if math.prod(lengths) == 0:
        return
    per_dimension = [list(dict.fromkeys(r[d] for r in distinct)) for d in range(len(lengths))]
    grid = math.prod(map(len, per_dimension)) == len(distinct)
    if grid and all(_tiles(parts, n) for parts, n in zip(per_dimension, lengths, strict=True)):
        return
    edges = [
        np.unique([0, n, *(x for runs in parts for run in runs for x in run)])
        for parts, n in zip(per_dimension, lengths, strict=True)
    ]
    cells = [len(e) - 1 for e in edges]
    if math.prod(cells) > _MAX_CELLS:
        raise LayoutError(
            f"shards lie in too many ranges to check that they cover {list(lengths)} once"
        )
    count = np.zeros(cells, np.int32)
    for region in distinct:
        inside = [_inside(e, runs) for e, runs in zip(edges, region, strict=True)]
        count[np.ix_(*inside)] += 1
    wrong = np.argwhere(count != 1)
    if len(wrong):
        at = [int(e[i]) for e, i in zip(edges, wrong[0], strict=True)]
        times = int(count[tuple(wrong[0])])
        raise LayoutError(
            f"element {at} of {list(lengths)} is held by "
            + ("no shard" if not times else f"{times} different shards")
        )


def _tiles(parts: Sequence[Runs], length: int) -> bool:
    runs = sorted(run for part in parts for run in part)
    return (
        bool(runs)
        and runs[0][0] == 0
        and runs[-1][1] == length
        and all(a[1] == b[0] for a, b in pairwise(runs))
    )


def _inside(edges: NDArray[np.int64], runs: Runs) -> NDArray[np.int64]:
    """Return the numbers of the cells between edges that the ranges cover."""
    found = [np.arange(*np.searchsorted(edges, run), dtype=np.int64) for run in runs]
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _text(region: Iterable[tuple[int, int]]) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in region) + "]"
