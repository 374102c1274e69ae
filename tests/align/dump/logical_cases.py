"""Random layouts, and an oracle that knows nothing of ranges: it asks of every single element which rank holds it."""

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np

from telechat_moe.tools.align.dump.records import FLAT, TensorLayout

DTYPES = ("float32", "float16", "int32", "int8", "bool", "float64", "uint16")


@dataclass
class Case:
    """A layout, the whole tensor's shape, and the shard of each (rank, call)."""

    layout: TensorLayout
    shape: tuple[int, ...]
    shards: dict
    give_shape: bool = True


class InvalidError(Exception):
    """The oracle's own verdict: layout and shards contradict each other."""


def need(condition, why):
    if not condition:
        raise InvalidError(why)


# ------------------------------------------------------------------------------------- oracle


def mesh_points(layout: TensorLayout):
    """Yield (rank, call, coordinates) of every shard, by counting."""
    need(len(layout.mesh) == len(layout.axes), "axes")
    need(len(set(layout.axes)) == len(layout.axes), "axes twice")
    need(all(n >= 1 for n in layout.mesh), "sizes")
    size = dict(zip(layout.axes, layout.mesh, strict=True))
    devices = [a for a in layout.axes if a not in layout.local and a != layout.calls]
    ranges = [range(size[a]) for a in devices]
    points = list(itertools.product(*ranges))
    need(len(points) == len(layout.ranks), "ranks")
    need(len(set(layout.ranks)) == len(layout.ranks), "rank twice")
    need(all(r >= 0 for r in layout.ranks), "rank")
    found = []
    for rank, point in zip(layout.ranks, points, strict=True):
        for call in range(size[layout.calls] if layout.calls else 1):
            place = dict(zip(devices, point, strict=True))
            if layout.calls:
                place[layout.calls] = call
            found.append((rank, call, place))
    return size, found


def check_words(layout: TensorLayout):
    used = [a for axes in layout.dims for a in axes] + list(layout.partial) + list(layout.flat)
    need(len(set(used)) == len(used), "used twice")
    named = set(used) | set(layout.interleaved) | set(layout.local)
    named |= {layout.calls} if layout.calls else set()
    need(named <= set(layout.axes), "unknown axis")
    cutting = {a for axes in layout.dims for a in axes}
    need(set(layout.local) <= cutting - {layout.calls}, "local")
    need(set(layout.interleaved) <= cutting, "interleaved")
    for axes in layout.dims:
        need(not (set(axes[:-1]) & layout.interleaved), "interleaved not last")
    kinds = set(layout.partial.values())
    need(kinds <= {"sum", "mean", "max", "min", "prod", "all"}, "kind")
    need(len(kinds) <= 1 or kinds <= {"sum", "mean"}, "mixed kinds")
    need(len(layout.block) <= len(layout.dims) and all(b >= 1 for b in layout.block), "block")
    for what in (layout.sizes, layout.owned, layout.padded):
        for d in what:
            flat = d == FLAT and layout.flat and what is not layout.owned
            need(0 <= d < len(layout.dims) or flat, "dimension")
    for d, axes in enumerate(layout.dims):
        explicit = (d in layout.sizes) + (d in layout.owned)
        need(explicit < 2, "twice")
        need(not (explicit and (layout.interleaved | layout.local) & set(axes)), "twice")


def dimension_length(layout, size, d, shape):
    """Return the length of a dimension with filler."""
    shards = 1
    for axis in layout.dims[d]:
        shards *= 1 if axis in layout.local else size[axis]
    length = layout.padded.get(d, shape[d])
    need(length >= shape[d], "filler")
    if d in layout.owned:
        need(len(layout.owned[d]) == shards, "owned")
        everything = sorted(i for part in layout.owned[d] for i in part)
        need(everything == list(range(length)), "owned")
    elif d in layout.sizes:
        need(len(layout.sizes[d]) == shards and min(layout.sizes[d]) >= 0, "sizes")
        need(sum(layout.sizes[d]) == length, "sizes")
    else:
        cut = 1
        for axis in layout.dims[d]:
            cut *= size[axis]
            if axis in layout.interleaved:
                cut *= layout.block[d] if d < len(layout.block) else 1
        need(length % cut == 0, "does not divide")
    return length


def held(layout, size, place, d, length):
    """Return the indices of a dimension that a shard holds, in its order, asking each index."""
    number = 0
    for axis in layout.dims[d]:
        if axis not in layout.local:
            number = number * size[axis] + place[axis]
    if d in layout.owned:
        return list(layout.owned[d][number])
    if d in layout.sizes:
        return [
            i
            for i in range(length)
            if sum(layout.sizes[d][:number]) <= i < sum(layout.sizes[d][: number + 1])
        ]
    found = []
    for i in range(length):
        inside, extent, order, mine = i, length, [], True
        for axis in layout.dims[d]:
            n = size[axis]
            if axis in layout.interleaved:
                block = layout.block[d] if d < len(layout.block) else 1
                digit = (inside // block) % n
            else:
                extent //= n
                digit, inside = divmod(inside, extent)
            if axis in layout.local:
                order.append(digit)
            else:
                mine = mine and digit == place[axis]
        if mine:
            found.append((order, i))
    return [i for _, i in sorted(found)]


def flat_range(layout, size, place, elements):
    """Return the range of a flat shard."""
    shards = math.prod(size[a] for a in layout.flat)
    total = layout.padded.get(FLAT, elements)
    need(total >= elements, "filler")
    if FLAT in layout.sizes:
        need(len(layout.sizes[FLAT]) == shards and sum(layout.sizes[FLAT]) == total, "flat")
        need(min(layout.sizes[FLAT]) >= 0, "flat")
        lengths = list(layout.sizes[FLAT])
    else:
        need(total % shards == 0, "flat")
        lengths = [total // shards] * shards
    number = 0
    for axis in layout.flat:
        number = number * size[axis] + place[axis]
    return sum(lengths[:number]), sum(lengths[: number + 1])


def where(layout, shape):
    """Return for every shard the element of the whole that stands at each of its places (None: filler)."""
    check_words(layout)
    need(len(layout.dims) == len(shape), "dimensions")
    size, points = mesh_points(layout)
    lengths = [dimension_length(layout, size, d, shape) for d in range(len(shape))]
    found = {}
    for rank, call, place in points:
        lists = [held(layout, size, place, d, n) for d, n in enumerate(lengths)]
        elements = [
            index if all(i < n for i, n in zip(index, shape, strict=True)) else None
            for index in itertools.product(*lists)
        ]
        local = tuple(len(x) for x in lists)
        if layout.flat:
            begin, end = flat_range(layout, size, place, len(elements))
            elements = (elements + [None] * (end - len(elements)))[begin:end]
            local = (end - begin,)
        term = tuple(place[a] for a in layout.partial)
        found[rank, call] = (local, elements, term)
    return size, found


def expected(case: Case):
    """Return the merged tensor, element by element.

    Raises:
        InvalidError: TensorLayout, shape and shards contradict each other.
    """
    layout, shape = case.layout, case.shape
    if not case.give_shape:
        need(not layout.flat and not layout.padded, "shape hidden")
        shape = told_shape(case)
    size, found = where(layout, shape)
    need(set(found) == set(case.shards), "shards")
    need(len({x.dtype for x in case.shards.values()}) == 1, "types")
    values = {}
    for key, (local, elements, term) in found.items():
        shard = case.shards[key]
        need(shard.shape == local, "shape")
        for element, value in zip(elements, shard.reshape(-1), strict=True):
            if element is not None:
                values.setdefault(element, {}).setdefault(term, []).append(value)
    whole = {}
    terms = math.prod(size[a] for a in layout.partial)
    divide = math.prod(size[a] for a, kind in layout.partial.items() if kind == "mean")
    kinds = set(layout.partial.values())
    for element in itertools.product(*map(range, shape)):
        need(element in values and len(values[element]) == terms, "hole")
        firsts = []
        for term in sorted(values[element]):
            copies = values[element][term]
            need(all(c.tobytes() == copies[0].tobytes() for c in copies), "copies differ")
            firsts.append(copies[0])
        whole[element] = combine(firsts, kinds, divide)
    return whole


def told_shape(case: Case):
    """Return the only shape that a layout and the first shard leave open."""
    layout = case.layout
    check_words(layout)
    need(len(layout.mesh) == len(layout.axes), "axes")
    size = dict(zip(layout.axes, layout.mesh, strict=True))
    shard = next(iter(case.shards.values()))
    need(shard.ndim == len(layout.dims), "dimensions")
    found = []
    for d, axes in enumerate(layout.dims):
        if d in layout.owned:
            found.append(sum(map(len, layout.owned[d])))
        elif d in layout.sizes:
            found.append(sum(layout.sizes[d]))
        else:
            found.append(shard.shape[d] * math.prod(size[a] for a in axes if a not in layout.local))
    return tuple(found)


def combine(values, kinds, divide):
    if not kinds:
        return values[0]
    if kinds <= {"sum", "mean"}:
        total = sum(v.item() for v in values)
        return total / divide if divide > 1 else total
    if kinds == {"prod"}:
        return math.prod(v.item() for v in values)
    if kinds == {"all"}:
        return all(v.item() for v in values)
    return max(values) if kinds == {"max"} else min(values)


# --------------------------------------------------------------------------------- random cases


def random_case(rng: np.random.Generator) -> Case:
    """Return a random tensor, spread over a random mesh in a random way."""
    while True:
        layout, shape = random_layout(rng)
        if math.prod(shape) > 2000 or math.prod(layout.mesh) > 64:
            continue
        try:
            _, found = where(layout, shape)
        except InvalidError:
            continue
        hides = bool(layout.flat or layout.padded)
        give = hides or bool(rng.integers(2))
        return Case(layout, shape, shard(rng, layout, shape, found), give)


def shard(rng, layout, shape, found):
    """Fill the shards; terms are random, copies equal, filler is noise."""
    dtype = np.dtype(rng.choice(DTYPES))
    if set(layout.partial.values()) == {"all"}:
        dtype = np.dtype(np.bool_)
    elif layout.partial:
        dtype = np.dtype(rng.choice(["float32", "float16", "int32"]))
    terms = {}
    shards = {}
    for key, (local, elements, term) in found.items():
        if term not in terms:
            terms[term] = noise(rng, shape, dtype, bool(layout.partial))
        shard = noise(rng, (len(elements),), dtype, True)
        for i, element in enumerate(elements):
            if element is not None:
                shard[i] = terms[term][element]
        shards[key] = shard.reshape(local)
    return shards


def noise(rng, shape, dtype, small):
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(dtype)
    if small:  # sums and products must be exact
        return np.asarray(rng.integers(-3, 4, shape)).astype(dtype)
    raw = rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    return np.ascontiguousarray(raw).view(dtype).reshape(shape)


def random_layout(rng) -> tuple[TensorLayout, tuple[int, ...]]:  # noqa: C901
    names = ["dp", "cp", "tp", "ep", "zero", "il", "micro"]
    count = int(rng.choice([0, 1, 2, 2, 3, 3, 4, 5]))
    axes = tuple(str(a) for a in rng.permutation(names)[:count])
    mesh = tuple(int(rng.choice([1, 2, 2, 3, 4])) for _ in axes)
    size = dict(zip(axes, mesh, strict=True))
    rank = int(rng.choice([0, 1, 2, 2, 3, 3, 4]))
    dims = [[] for _ in range(rank)]
    partial, flat, local, interleaved, calls = {}, [], set(), set(), None
    kind = str(rng.choice(["sum", "sum", "max", "min", "mean", "prod", "all"]))
    for axis in axes:
        role = rng.choice(["cut", "cut", "cut", "partial", "copy", "flat"])
        if axis == "micro" and rng.integers(2):
            calls = axis
        if role == "cut" and rank:
            d = int(rng.integers(rank))
            dims[d].insert(int(rng.integers(len(dims[d]) + 1)), axis)
            if axis == "il" and axis != calls:
                local.add(axis)
        elif role == "partial":
            partial[axis] = (
                kind if kind not in ("sum", "mean") else str(rng.choice(["sum", "mean"]))
            )
        elif role == "flat":
            flat.append(axis)
    devices = math.prod(n for a, n in size.items() if a not in local and a != calls)
    ranks = tuple(int(r) for r in rng.permutation(devices) + int(rng.integers(3)))
    shape, block = [], []
    sizes, owned, padded = {}, {}, {}
    for d, cut in enumerate(dims):
        shards = math.prod(size[a] for a in cut if a not in local)
        cells = math.prod(size[a] for a in cut)
        block.append(int(rng.integers(1, 3)))
        length = cells * int(rng.integers(1, 3))
        way = rng.choice(["even", "even", "interleaved", "sizes", "owned", "padded"])
        if way == "interleaved" and cut:
            interleaved.add(cut[-1])
            length = cells * block[d] * int(rng.integers(1, 3))
        elif way == "sizes" and cut and not local & set(cut):
            sizes[d] = tuple(int(x) for x in rng.integers(0, 4, shards))
            length = sum(sizes[d])
        elif way == "owned" and cut and not local & set(cut):
            order = rng.permutation(length)
            edges = np.sort(rng.integers(0, length + 1, shards - 1))
            owned[d] = tuple(tuple(int(i) for i in part) for part in np.split(order, edges))
        elif way == "padded":
            padded[d] = length
            length -= int(rng.integers(0, min(cells, length) + 1))
        shape.append(length)
    layout = TensorLayout(
        mesh,
        axes,
        ranks,
        tuple(map(tuple, dims)),
        partial,
        frozenset(interleaved),
        tuple(block),
        frozenset(local),
        calls,
        sizes,
        owned,
        padded,
        tuple(flat),
    )
    if flat:
        layout = random_flat(rng, layout, tuple(shape))
    return layout, tuple(shape)


def random_flat(rng, layout: TensorLayout, shape) -> TensorLayout:
    need(len(layout.mesh) == len(layout.axes), "axes")
    size = dict(zip(layout.axes, layout.mesh, strict=True))
    shards = math.prod(size[a] for a in layout.flat)
    try:
        _, found = where(replace(layout, flat=()), shape)
    except InvalidError:
        return layout
    lengths = {len(elements) for _, elements, _ in found.values()}
    if len(lengths) > 1:
        return replace(layout, flat=())
    (n,) = lengths
    if rng.integers(2):
        return replace(layout, padded={**layout.padded, FLAT: -(-n // shards) * shards})
    edges = np.sort(rng.integers(0, n + 1, shards - 1))
    parts = np.diff([0, *edges, n])
    return replace(layout, sizes={**layout.sizes, FLAT: tuple(int(x) for x in parts)})


# --------------------------------------------------------------------------------- corruptions


def corrupt(rng, case: Case) -> tuple[str, Case] | None:
    """Return a case with one thing changed, and what; None where there was nothing to change."""
    name = str(rng.choice(list(CORRUPTIONS)))
    changed = CORRUPTIONS[name](rng, replace(case, shards=dict(case.shards)))
    return None if changed is None else (name, changed)


def any_of(rng, items):
    items = list(items)
    return items[int(rng.integers(len(items)))] if items else None


def with_layout(case, **changes):
    return replace(case, layout=replace(case.layout, **changes))


def edited(items, i, value):
    return (*items[:i], value, *items[i + 1 :])


def change_mesh(rng, case):
    i = any_of(rng, range(len(case.layout.mesh)))
    if i is None:
        return None
    n = case.layout.mesh[i] + int(rng.choice([-1, 1, 2]))
    return with_layout(case, mesh=edited(case.layout.mesh, i, n))


def swap_mesh(rng, case):
    mesh = list(case.layout.mesh)
    if len(set(mesh)) < 2:
        return None
    return with_layout(case, mesh=tuple(mesh[1:] + mesh[:1]))


def drop_axis(rng, case):
    i = any_of(rng, range(len(case.layout.axes)))
    return (
        None
        if i is None
        else with_layout(case, axes=case.layout.axes[:i] + case.layout.axes[i + 1 :])
    )


def twice_axis(rng, case):
    if len(case.layout.axes) < 2:
        return None
    return with_layout(case, axes=edited(case.layout.axes, 0, case.layout.axes[1]))


def rename_axis(rng, case):
    i = any_of(rng, range(len(case.layout.axes)))
    return None if i is None else with_layout(case, axes=edited(case.layout.axes, i, "xp"))


def rank_twice(rng, case):
    ranks = case.layout.ranks
    return None if len(ranks) < 2 else with_layout(case, ranks=edited(ranks, 0, ranks[1]))


def rank_other(rng, case):
    i = int(rng.integers(len(case.layout.ranks)))
    return with_layout(case, ranks=edited(case.layout.ranks, i, int(rng.choice([99, -1]))))


def rank_missing(rng, case):
    return with_layout(case, ranks=case.layout.ranks[:-1])


def rank_more(rng, case):
    return with_layout(case, ranks=(*case.layout.ranks, max(case.layout.ranks) + 1))


def ranks_permuted(rng, case):
    return with_layout(case, ranks=tuple(int(r) for r in rng.permutation(case.layout.ranks)))


def piece_missing(rng, case):
    case.shards.pop(any_of(rng, case.shards))
    return case if case.shards else None


def piece_more(rng, case):
    key = any_of(rng, case.shards)
    case.shards[key[0] + 100, key[1]] = case.shards[key]
    return case


def pieces_swapped(rng, case):
    a, b = any_of(rng, case.shards), any_of(rng, case.shards)
    case.shards[a], case.shards[b] = case.shards[b], case.shards[a]
    return case


def piece_longer(rng, case):
    key = any_of(rng, case.shards)
    shard = case.shards[key]
    if not shard.ndim or not shard.size:
        return None
    d = int(rng.integers(shard.ndim))
    case.shards[key] = np.concatenate([shard, np.take(shard, [0], d)], d)
    return case


def piece_shorter(rng, case):
    key = any_of(rng, case.shards)
    shard = case.shards[key]
    if not shard.ndim or not shard.size:
        return None
    d = int(rng.integers(shard.ndim))
    case.shards[key] = np.take(shard, range(shard.shape[d] - 1), d)
    return case


def piece_transposed(rng, case):
    key = any_of(rng, case.shards)
    case.shards[key] = np.ascontiguousarray(case.shards[key].T)
    return case if case.shards[key].ndim > 1 else None


def piece_flattened(rng, case):
    key = any_of(rng, case.shards)
    case.shards[key] = case.shards[key].reshape(-1, 1)
    return case


def piece_type(rng, case):
    key = any_of(rng, case.shards)
    with np.errstate(all="ignore"):
        case.shards[key] = case.shards[key].astype(np.complex64)
    return case


def piece_bit(rng, case):
    key = any_of(rng, case.shards)
    shard = case.shards[key] = case.shards[key].copy()
    if not shard.size or shard.dtype == np.bool_ or case.layout.partial:
        return None
    raw = shard.reshape(-1).view(np.uint8)
    raw[int(rng.integers(raw.size))] ^= 1 << int(rng.integers(8))
    return case


def piece_negated(rng, case):
    key = any_of(rng, case.shards)
    if case.shards[key].dtype.kind != "f":
        return None
    case.shards[key] = np.negative(case.shards[key], out=case.shards[key].copy())
    return case


def dims_swapped(rng, case):
    dims = case.layout.dims
    return None if len(dims) < 2 else with_layout(case, dims=dims[1:] + dims[:1])


def dims_dropped(rng, case):
    return with_layout(case, dims=case.layout.dims[:-1]) if case.layout.dims else None


def dims_added(rng, case):
    return with_layout(case, dims=(*case.layout.dims, ()))


def axis_removed(rng, case):
    d = any_of(rng, [d for d, axes in enumerate(case.layout.dims) if axes])
    return (
        None
        if d is None
        else with_layout(case, dims=edited(case.layout.dims, d, case.layout.dims[d][1:]))
    )


def axis_added(rng, case):
    d, axis = any_of(rng, range(len(case.layout.dims))), any_of(rng, case.layout.axes)
    if d is None or axis is None:
        return None
    return with_layout(case, dims=edited(case.layout.dims, d, (*case.layout.dims[d], axis)))


def axis_unknown(rng, case):
    d = any_of(rng, range(len(case.layout.dims)))
    return None if d is None else with_layout(case, dims=edited(case.layout.dims, d, ("xp",)))


def axis_reversed(rng, case):
    d = any_of(rng, [d for d, axes in enumerate(case.layout.dims) if len(axes) > 1])
    return (
        None
        if d is None
        else with_layout(case, dims=edited(case.layout.dims, d, case.layout.dims[d][::-1]))
    )


def partial_kind(rng, case):
    axis = any_of(rng, case.layout.partial)
    kind = str(rng.choice(["avg", "total", "None", "", "max"]))
    return None if axis is None else with_layout(case, partial={**case.layout.partial, axis: kind})


def partial_dropped(rng, case):
    axis = any_of(rng, case.layout.partial)
    left = {a: k for a, k in case.layout.partial.items() if a != axis}
    return None if axis is None else with_layout(case, partial=left)


def partial_added(rng, case):
    axis = any_of(rng, [*case.layout.axes, "xp"])
    return with_layout(case, partial={**case.layout.partial, axis: "sum"})


def interleaved_other(rng, case):
    axis = any_of(rng, [*case.layout.axes, "xp"])
    return with_layout(case, interleaved=case.layout.interleaved ^ {axis})


def local_other(rng, case):
    axis = any_of(rng, [*case.layout.axes, "xp"])
    return with_layout(case, local=case.layout.local ^ {axis})


def calls_other(rng, case):
    axis = any_of(rng, [*case.layout.axes, "xp"])
    return with_layout(case, calls=None if case.layout.calls == axis else axis)


def block_other(rng, case):
    d = any_of(rng, range(len(case.layout.block)))
    if d is None:
        return None
    return with_layout(
        case, block=edited(case.layout.block, d, case.layout.block[d] + int(rng.choice([-2, 1, 2])))
    )


def block_longer(rng, case):
    return with_layout(case, block=(*case.layout.block, 1, 1))


def sizes_other(rng, case):
    d = any_of(rng, case.layout.sizes)
    if d is None:
        return None
    lengths = case.layout.sizes[d]
    i = int(rng.integers(len(lengths)))
    changed = any_of(
        rng, [edited(lengths, i, lengths[i] + 1), lengths[:-1], lengths[::-1], (*lengths, 0)]
    )
    return with_layout(case, sizes={**case.layout.sizes, d: changed})


def sizes_elsewhere(rng, case):
    d = int(rng.integers(-1, len(case.layout.dims) + 1))
    return with_layout(case, sizes={**case.layout.sizes, d: (1, 2)})


def owned_other(rng, case):
    d = any_of(rng, [d for d, parts in case.layout.owned.items() if any(parts)])
    if d is None:
        return None
    parts = case.layout.owned[d]
    p = any_of(rng, [p for p, part in enumerate(parts) if part])
    i = int(rng.integers(len(parts[p])))
    value = any_of(rng, [parts[p][i] + 1, -1, 1000])
    changed = any_of(
        rng,
        [
            edited(parts, p, edited(parts[p], i, value)),
            parts[:-1],
            edited(parts, p, parts[p][::-1]),
        ],
    )
    return with_layout(case, owned={**case.layout.owned, d: changed})


def padded_other(rng, case):
    d = any_of(rng, case.layout.padded)
    if d is None:
        return None
    n = case.layout.padded[d] + int(rng.choice([-3, -1, 1, 2]))
    return with_layout(case, padded={**case.layout.padded, d: n})


def padded_dropped(rng, case):
    return with_layout(case, padded={}) if case.layout.padded else None


def shape_other(rng, case):
    d = any_of(rng, range(len(case.shape)))
    if d is None or not case.give_shape:
        return None
    return replace(case, shape=edited(case.shape, d, case.shape[d] + int(rng.choice([1, 2]))))


def shape_hidden(rng, case):
    return replace(case, give_shape=False) if case.layout.flat or case.layout.padded else None


def flat_dropped(rng, case):
    return with_layout(case, flat=case.layout.flat[1:]) if case.layout.flat else None


def flat_added(rng, case):
    axis = any_of(rng, [*case.layout.axes, "xp"])
    return replace(with_layout(case, flat=(*case.layout.flat, axis)), give_shape=True)


CORRUPTIONS = {
    f.__name__: f
    for f in (
        change_mesh, swap_mesh, drop_axis, twice_axis, rename_axis, rank_twice, rank_other, rank_missing,
        rank_more, ranks_permuted, piece_missing, piece_more, pieces_swapped, piece_longer, piece_shorter,
        piece_transposed, piece_flattened, piece_type, piece_bit, piece_negated, dims_swapped, dims_dropped,
        dims_added, axis_removed, axis_added, axis_unknown, axis_reversed, partial_kind, partial_dropped,
        partial_added, interleaved_other, local_other, calls_other, block_other, block_longer, sizes_other,
        sizes_elsewhere, owned_other, padded_other, padded_dropped, shape_other, shape_hidden, flat_dropped,
        flat_added,
    )
}  # fmt: skip
