"""Make a map (``links.py``) of the tensors of two runs that were written for different frameworks.

Weights are paired by names (``weight_names.py``), others by their values in the first step that both runs have: by rows,
nearly equal, in any order, so that transposed, stacked and fused weights (q/k/v, gate and up, experts) are found. Of
each pair the map has gradients, states before and after, and in the forward pass what enters and leaves the calls that
use it; and of modules with known names the outputs.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain, product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.numerics import Array, is_float
from telechat_moe.tools.align.dump.records import Call, Dump, Phase, RankDump, TensorRecord
from telechat_moe.tools.align.judge.points import point, update_places
from telechat_moe.tools.align.maps.links import Link, WeightUses, as_rows, exchanged
from telechat_moe.tools.align.maps.weight_names import Roles, module_role, roles_of

_NEAR = 0.05  # relative L2 distance of rows that are nearly equal
_MOST = 0.9  # share of rows that must be found
_SKETCH = 32  # random directions by which equal rows are searched
_BLOCK = 2048


Places = dict[tuple[str, str], str]
_RunUses = tuple[WeightUses, WeightUses]  # of the reference, of the target


class _Weight(NamedTuple):
    """A weight of a run: its name, the call and position that hold its values, and what it is."""

    name: str
    record: TensorRecord
    places: Places
    roles: Roles | None


class _Group(NamedTuple):
    """Weights of both runs with the same content: parts in order, and how their rows correspond."""

    reference: list[_Weight]
    target: list[_Weight]
    width: int
    transposed: tuple[bool, bool]
    rows: tuple[int, ...]


def tensor_map(reference: Dump, target: Dump) -> list[Link]:
    """Return the entries of a map of two runs.

    Raises:
        BadInputError: No weight of one is one of the other's.
    """
    steps = [step for step in target.steps if step in reference.steps]
    a, b = ([r for step in steps[:1] for r in dump.at(step)] for dump in (reference, target))
    weights = list(_weights(a)), list(_weights(b))
    uses = WeightUses(a), WeightUses(b)
    groups = [*_by_names(*weights)]
    used = {w.name for g in groups for w in g.reference}, {w.name for g in groups for w in g.target}
    pairs = zip(weights, used, strict=True)
    left = [[w for w in run if w.name not in paired] for run, paired in pairs]
    groups += _by_values(left[0], left[1], uses)
    if not groups:
        count = " and ".join(str(len(w)) for w in weights)
        raise BadInputError(
            f"{reference.root}, {target.root}: no weight of one ({count} found) is one of the other's, by name or by "
            "values; expected updates by an optimizer or modules with parameters"
        )
    links = [link for group in groups for link in _of_weights(group)]
    forward = [link for group in groups for link in _of_uses(group, uses)]
    forward += _of_modules(a, b)
    return [*_with_orders(forward, uses), *_losses(a, b), *links]


def as_json(links: Sequence[Link]) -> str:
    """Return a map as ``links.read_map`` reads it."""
    plain = Link("", (), ())
    entries: list[dict[str, Any]] = []
    for link in links:
        entry = {k: v for k, v in asdict(link).items() if v != getattr(plain, k)}
        entry["sorted"] = entry.pop("in_any_order", False)
        entries.append({k: v for k, v in entry.items() if v is not False})
    return json.dumps(entries, indent=1) + "\n"


def _weights(ranks: Sequence[RankDump]) -> Iterator[_Weight]:
    """Yield the weights of a run that have names, once each."""
    names: set[str] = set()
    for name, call, place in chain.from_iterable(WeightUses.named(dump) for dump in ranks):
        record = dict(call.tensors()).get(place)
        if name not in names and record is not None and record.read is not None:
            names.add(name)
            places = update_places(call) if place == "input.weight" else {}
            yield _Weight(name, record, places, roles_of(name))


def _by_names(reference: list[_Weight], target: list[_Weight]) -> Iterator[_Group]:
    """Yield the weights of both runs that have roles in common; fused ones bring several together."""
    clusters: list[set[str]] = []
    for roles in (set(w.roles.names) for w in (*reference, *target) if w.roles is not None):
        touching = [c for c in clusters if c & roles]
        clusters = [c for c in clusters if not c & roles] + [roles.union(*touching)]
    for names in clusters:
        reference_parts, other = (_parts(run, names) for run in (reference, target))
        if reference_parts and other:
            group = _fitted(reference_parts, other)
            if group is not None:
                yield group
            elif not any(".experts." in name for name in names):  # those without tokens may lack
                yield _Group(reference_parts, other, 0, (False, False), ())


def _parts(run: list[_Weight], names: set[str]) -> list[_Weight]:
    parts = [(w.roles, w) for w in run if w.roles is not None and names.issuperset(w.roles.names)]
    order = sorted(names)
    return [w for _, w in sorted(parts, key=lambda f: (order.index(f[0].names[0]), f[0].expert))]


def _fitted(first: list[_Weight], other: list[_Weight]) -> _Group | None:
    """Return how the rows of two lists of weights correspond; None: their shapes do not fit.

    Names decide where they can, so that a weight in a wrong order is found; the order of fused parts, and of weights
    whose names say nothing, is that which makes nearly all rows equal.
    """
    best: tuple[float, _Group] | None = None
    shapes = [[w.record.shape for w in side] for side in (first, other)]
    free = any(w.roles is None or len(w.roles.names) > 1 for w in (*first, *other))
    if not free and len(shapes[0]) == 1 and shapes[0] == shapes[1] and len(shapes[0][0]) < 3:
        width = shapes[0][0][-1] if len(shapes[0][0]) == 2 else 1
        return _Group(first, other, width, (False, False), ())
    widths = {1} if len(shapes[1][0]) == 1 else {n for s in chain(*shapes) for n in s[-2:]}
    for width in sorted(widths, reverse=True):
        for turned in ((False, False), (True, True), (True, False), (False, True)):
            sides = [_rows(side, width, t) for side, t in zip((first, other), turned, strict=True)]
            if sides[0] is None or sides[1] is None or sides[0].shape != sides[1].shape:
                continue
            share, rows = _order(sides[0], sides[1], free)
            usual = all(t == (len(s[0]) == 3) for t, s in zip(turned, shapes, strict=True))
            candidate = share + 0.01 * usual, _Group(first, other, width, turned, rows)
            best = max((b for b in (best, candidate) if b is not None), key=lambda b: b[0])
    return best[1] if best is not None else None


def _rows(weights: Sequence[_Weight], width: int, transposed: bool) -> Array | None:
    parts = [as_rows(w.record.load(), width, transposed) for w in weights]
    fitting = [p for p in parts if p is not None]
    return np.concatenate(fitting) if len(fitting) == len(parts) else None


def _order(first: Array, other: Array, free: bool) -> tuple[float, tuple[int, ...]]:
    """Return the share of equal rows, and their order in the first array; empty: the same order."""
    share = float(np.mean(_nearly_equal(first, other)))
    if share >= 0.5 or first.shape[1] == 1 or not free:
        return share, ()
    order = _nearest(first, other)
    better = float(np.mean(_nearly_equal(first[order], other)))
    unique = len(np.unique(order)) == len(order)
    return (better, tuple(int(i) for i in order)) if unique and better >= _MOST else (share, ())


def _nearly_equal(x: Array, y: Array) -> Array:
    """Return which rows of two arrays are nearly equal."""
    size = np.linalg.norm(y, axis=1) + np.finfo(np.float32).tiny
    return np.linalg.norm(x - y, axis=1) <= _NEAR * size


def _nearest(first: Array, other: Array) -> Array:
    """Return for each row of the second array the nearest of the first, by some random directions."""
    draw = np.random.default_rng(0).standard_normal((first.shape[1], _SKETCH))
    x, y = first @ draw, other @ draw
    size = np.square(x).sum(1)
    blocks = [y[i : i + _BLOCK] for i in range(0, len(y), _BLOCK)]
    return np.concatenate([np.argmin(size - 2 * (b @ x.T), 1) for b in blocks])


def _by_values(reference: list[_Weight], target: list[_Weight], uses: _RunUses) -> list[_Group]:
    """Return the weights whose names say nothing but whose rows are nearly equal, fused or not.

    Weights with equal content (ones) are paired in the order in which the forward pass uses them.
    """
    clusters: list[tuple[list[_Weight], list[_Weight]]] = []
    for weight in target:
        rows = as_rows(weight.record.load(), weight.record.shape[-1], False)
        able = [r for r in reference if len(r.record.shape) > 1] if rows is not None else []
        fits = [r for r in able if _shares(r, weight)]
        touching = [c for c in clusters if any(r in c[0] for r in fits)]
        clusters = [c for c in clusters if not any(c is n for n in touching)]
        members = {id(r): r for r in (*fits, *(r for c in touching for r in c[0]))}
        if fits:
            targets = [t for c in touching for t in c[1]]
            clusters.append(([*members.values()], [*targets, weight]))
    groups = [g for members, other in clusters if (g := _fitted(members, other)) is not None]
    grouped = {id(w) for g in groups for w in (*g.reference, *g.target)}
    alike: dict[bytes, tuple[list[_Weight], list[_Weight]]] = {}
    for i, run in enumerate((reference, target)):
        lone = [w for w in run if id(w) not in grouped and len(w.record.shape) == 1]
        for weight in sorted(lone, key=lambda w, i=i: uses[i].first(w.name)):
            mark = np.float32(weight.record.load()).tobytes()
            alike.setdefault(mark, ([], []))[i].append(weight)
    for members, other in alike.values():
        pairs = zip(members, other, strict=True) if len(members) == len(other) else ()
        groups += [_Group([a], [b], 1, (False, False), ()) for a, b in pairs]
    return groups


def _shares(first: _Weight, other: _Weight) -> bool:
    """Return whether most rows of the smaller of two weights are rows of the other, either of them transposed."""
    for turned, other_turned in product((False, True), repeat=2):
        width = other.record.shape[-2 if other_turned else -1] if len(other.record.shape) > 1 else 0
        x = _rows([first], width, turned) if width else None
        y = _rows([other], width, other_turned) if width else None
        if x is None or y is None or x.shape[1] < 4:
            continue
        small, large = (x, y) if len(x) <= len(y) else (y, x)
        if np.mean(_nearly_equal(large[_nearest(large, small)], small)) >= _MOST:
            return True
    return False


def _of_weights(group: _Group) -> Iterator[Link]:
    """Yield gradients, and weights and states before and after their update; a weight without one: itself."""
    title = " and ".join(w.name for w in group.target)
    sides = group.reference, group.target
    places = [[w.places or {("weight", " before"): "weight"} for w in side] for side in sides]
    common = set(places[0][0]).intersection(*places[0], *places[1])
    for place in (w for w in places[1][0] if w in common):
        first, other = (
            tuple(f"weight {w.name} {p[place]}" for w, p in zip(*pair, strict=True))
            for pair in zip(sides, places, strict=True)
        )
        name = f"{place[0]} of {title}{place[1]}"
        yield Link(name, first, other, *group.transposed, width=group.width, rows=group.rows)


def _of_uses(group: _Group, uses: _RunUses) -> Iterator[Link]:
    """Yield what enters and leaves the calls that use the weights, where it must be the same."""
    first, other = group.reference, group.target
    experts = any(w.roles is not None and ".experts." in w.roles.names[0] for w in (*first, *other))
    fused = any(w.roles is not None and len(w.roles.names) > 1 for w in (*first, *other))
    title = other[0].name
    pairs = [*zip(uses, (first, other), strict=True)]
    if experts and fused:
        return

    def names(side: list[_Weight], end: str) -> tuple[str, ...]:
        return tuple(f"use {w.name} {end}" for w in side)

    if group.width > 1 and all(run.operand(side[0].name) for run, side in pairs):
        single = [side if experts else side[:1] for side in (first, other)]
        inputs = names(single[0], "operand"), names(single[1], "operand")
        yield Link(f"input of {title}", *inputs, joined="first")
    if all(run.result(side[0].name) for run, side in pairs):
        yield Link(
            f"output of {title}",
            names(first, "result"),
            names(other, "result"),
            joined="first" if experts else "last",
            rows=() if experts else group.rows,
        )


def _with_orders(links: Sequence[Link], uses: _RunUses) -> Iterator[Link]:
    """Yield links with the order of the reference's tokens: what values show, or else what most others have."""
    orders: list[tuple[Link, tuple[int, ...] | None]] = []
    for link in links:
        sides = [
            [point(run.ranks, *run.resolved(name)).values for name in names]
            for run, names in zip(uses, (link.reference, link.target), strict=True)
        ]
        sizes = [sum(x.size for x in side if x is not None) for side in sides]
        if link.joined == "first" and ".experts." in link.name and sizes[0] != sizes[1]:
            continue  # the programs pad the rows of experts differently
        first, other = (side[0] for side in sides)
        order = None if first is None or other is None else _token_order(first, other)
        orders.append((link, order))
    count = Counter(order for _, order in orders if order)
    usual = max(count, key=lambda order: count[order], default=())
    for link, order in orders:
        yield replace(link, tokens=usual if order is None else order)


def _token_order(first: Array, other: Array) -> tuple[int, ...] | None:
    """Return the reference's order of tokens, empty if it is the target's; None: no order makes the rows equal."""
    orders = [first.shape[:2]] if first.ndim > 2 else []
    orders += [other.shape[1::-1]] if other.ndim > 2 else []
    y = other.reshape(-1, other.shape[-1]) if other.ndim else other
    for order in [(), *(o for o in orders if min(o) > 1)]:
        x = exchanged(first, order) if order else first
        if x.size == y.size and np.mean(_nearly_equal(x.reshape(y.shape), y)) >= _MOST:
            return order
    return None


def _of_modules(a: Sequence[RankDump], b: Sequence[RankDump]) -> Iterator[Link]:
    """Yield the outputs of layers and feed-forward networks, and what routers choose."""
    first, other = (_modules(run) for run in (a, b))
    for role, (key, call) in other.items():
        if role not in first:
            continue
        reference_key, reference_call = first[role]
        keys = reference_key, key
        kinds = [[is_float(t.dtype) for _, t in c.made()[:2]] for c in (reference_call, call)]
        if not role.startswith("router"):
            for p, q in _outputs(reference_call, call):
                yield Link(role, (f"{keys[0]} {p}",), (f"{key} {q}",))
        elif all(sorted(kind) == [False, True] for kind in kinds):
            for choice, real in (("experts", False), ("weights", True)):
                names = [(f"{k} output.{n.index(real)}",) for k, n in zip(keys, kinds, strict=True)]
                yield Link(f"{choice} chosen by the {role}", names[0], names[1], in_any_order=True)


def _outputs(reference: Call, target: Call) -> list[tuple[str, str]]:
    """Return the outputs of two modules that belong together; none: a cell's result is not among those recorded.

    A cell of a graph also makes what its gradient needs; of several of one size those that agree are taken.
    """
    pairs = [
        (p, q)
        for (p, t), (q, u) in product(reference.made(), target.made())
        if is_float(t.dtype) and is_float(u.dtype) and prod(t.shape) == prod(u.shape)
    ]
    if len(pairs) > 1:
        first, other = dict(reference.made()), dict(target.made())
        readable = ((p, q) for p, q in pairs if first[p].read and other[q].read)
        agree = (
            k for k in readable if _token_order(first[k[0]].load(), other[k[1]].load()) is not None
        )
        return [next(agree, pairs[0])]
    graphs = any(call.name.startswith("Cell.") for call in (reference, target))
    return pairs or ([] if graphs else [("output.0", "output.0")])


def _modules(ranks: Sequence[RankDump]) -> dict[str, tuple[str, Call]]:
    modules: dict[str, tuple[str, Call]] = {}
    for call in (c for dump in ranks for c in dump.calls.values()):
        path = call.name.partition(".")[2].rpartition(".")[0]
        role = module_role(path) if call.kind == "module" and call.phase is Phase.FORWARD else None
        if role is not None and call.made():
            modules.setdefault(role, (f"{call.name}.forward.*", call))
    return modules


def _losses(a: Sequence[RankDump], b: Sequence[RankDump]) -> Iterator[Link]:
    runs = ([c for dump in run for c in dump.calls.values() if _is_loss(c)] for run in (a, b))
    names = [(f"{calls[0].name}.*.forward output.0",) for calls in runs if calls]
    if len(names) == 2:
        yield Link("loss", names[0], names[1])


def _is_loss(call: Call) -> bool:
    """Return whether a call makes the loss: one number by a cross entropy."""
    named = call.name.lower().replace("_", "").endswith("crossentropy")
    alone = [np.prod(t.shape) == 1 for _, t in call.made()[:1]]
    operator = call.kind == "api" and call.phase is Phase.FORWARD
    return named and operator and alone == [True]
