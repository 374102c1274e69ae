"""The entries of a map (:class:`Link`): which tensors of one run are which of another, and how their parts are joined."""

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.numerics import Array, is_float
from telechat_moe.reading import MALFORMED, parse_json
from telechat_moe.tools.align.dump.records import Call, Dump, Phase, RankDump
from telechat_moe.tools.align.judge.data_flow import DataFlow, Place, digest
from telechat_moe.tools.align.judge.points import SharedTensor, TensorPair, point, weight_of
from telechat_moe.tools.align.operators import find

_MANY = 2048  # rows of an expert that are not put in order


@dataclass(frozen=True)
class Link:
    """An entry of a map: the names of one tensor in both runs."""

    name: str  # name in reports
    # `KEY PLACE` in the reference, `weight NAME PLACE` in the update of a weight, `use NAME operand` or `use NAME
    # result` of the call that uses it; several tensors are joined
    reference: tuple[str, ...]
    target: tuple[str, ...]  # the same in the target
    transposed: bool = False  # the reference's last two dimensions are exchanged
    target_transposed: bool = False  # the target's are, where `width` is given
    # Values along the last dimension are sorted before comparison (choices of a top-k); of a tensor over all experts,
    # those of the chosen ones
    in_any_order: bool = False
    width: int = 0  # if given, weights are joined as rows of this length, see `as_rows`
    # Where the rows (of a result, the columns) of the reference are in the target's order; empty: the same
    rows: tuple[int, ...] = ()
    # Along which dimension several tensors are concatenated; empty: they are stacked
    joined: Literal["", "first", "last"] = ""
    # If given, the reference's rows are tokens in this order, as `[sequence, batch]`, and the target's in the other,
    # as `[batch, sequence]`
    tokens: tuple[int, ...] = ()


def read_map(path: Path) -> list[Link]:
    """Read a map: a JSON list of objects with the attributes of :class:`Link`; ``sorted`` means ``in_any_order``.

    Raises:
        BadInputError: The file is not such a map.
    """
    try:
        entries = parse_json(path.read_bytes())
        links = [_link(dict(entry)) for entry in entries]
    except (OSError, *MALFORMED) as error:
        raise BadInputError(f"{path}: no map of tensors: {error}") from None
    if not links:
        raise BadInputError(
            f"{path}: the map is empty; `align REFERENCE TARGET --map-out FILE` writes one"
        )
    return links


def _link(entry: dict[str, Any]) -> Link:
    def names(value: Any) -> tuple[str, ...]:
        return (value,) if isinstance(value, str) else tuple(map(str, value))

    entry["in_any_order"] = bool(entry.pop("sorted", False))
    for side in ("reference", "target"):
        entry[side] = names(entry[side])
    entry |= {name: tuple(entry.get(name, ())) for name in ("rows", "tokens")}
    entry["name"] = str(entry["name"])
    return Link(**entry)


def as_rows(x: Array, width: int, transposed: bool) -> Array | None:
    """Return a weight as rows ``[outputs, width]`` in float64; None: it has no such width.

    Stacked weights follow one another. A transposed weight has its inputs in the last dimension but one.
    """
    if width == 1:
        return x.astype(np.float64).reshape(-1, 1)
    if len(x.shape) < 2 or x.size % width:
        return None
    if not transposed:
        return x.astype(np.float64).reshape(-1, width) if x.shape[-1] == width else None
    if x.shape[-2] % width:
        return None
    turned = np.swapaxes(x.reshape(-1, width, x.shape[-1]), -1, -2)
    return turned.astype(np.float64).reshape(-1, width)


class WeightUses:
    """Where a run uses its weights in the forward pass: the calls that take them, perhaps cast, reshaped or transposed."""

    def __init__(self, ranks: Sequence[RankDump]) -> None:
        self.ranks = ranks
        self._flow, self._of = cache(self._forward), cache(self._use)

    @staticmethod
    def named(dump: RankDump) -> Iterator[tuple[str, Call, str]]:
        """Yield the weights that have names: of updates and of modules, each with its call and position."""
        for call in dump.calls.values():
            weight = weight_of(call)
            if weight is not None:
                yield weight, call, "input.weight"
            elif call.kind == "module" and call.phase is Phase.FORWARD:
                path = call.name.partition(".")[2].rpartition(".")[0]
                for name in call.parameters:
                    yield f"{path}.{name}", call, f"parameters.{name}"

    @cached_property
    def _places(self) -> dict[str, tuple[int, Place]]:
        places: dict[str, tuple[int, Place]] = {}
        for i, dump in enumerate(self.ranks):
            for name, call, place in self.named(dump):
                places.setdefault(name, (i, (call.key, place)))
        return places

    def _forward(self, number: int) -> DataFlow:
        """Return the data flow of the forward pass of a rank."""
        dump = self.ranks[number]
        calls = dump.calls.items()
        forward = {k: c for k, c in calls if c.kind == "api" and c.stage is Phase.FORWARD}
        return DataFlow(replace(dump, calls=forward))

    @cached_property
    def _contents(self) -> dict[str, bytes]:
        contents: dict[str, bytes] = {}
        for name, (i, (key, place)) in self._places.items():
            record = dict(self.ranks[i].calls[key].tensors())[place]
            if record.read is not None:
                contents[name] = digest(record.load())
        return contents

    def _use(self, name: str) -> tuple[DataFlow, Call, str] | None:
        """Return the first call that computes with a weight, and the weight's position in it."""
        if name not in self._contents:
            return None
        flow = self._flow(self._places[name][0])
        uses = [u for p in flow.given.get(self._contents[name], []) for u in _users(flow, p, 0)]
        use = min(uses, key=lambda p: flow.order[p[0]], default=None)
        return use and (flow, flow.dump.calls[use[0]], use[1])

    def first(self, name: str) -> float:
        """Return the position of the first use in the order of the run; infinite: there is none."""
        use = self._of(name)
        return np.inf if use is None else use[0].order[use[1].key]

    def operand(self, name: str) -> Place | None:
        """Return what the first use multiplies a matrix by; None: it has no such input."""
        for _, call, place in filter(None, [self._of(name)]):
            widths = dict(call.tensors())[place].shape[-2:]
            for other, t in call.given():
                if other != place and is_float(t.dtype) and t.shape and t.shape[-1] in widths:
                    return call.key, other
        return None

    def result(self, name: str) -> Place | None:
        """Return what the first use makes; None: it makes it of several matrices."""
        for flow, call, place in filter(None, [self._of(name)]):
            weights = {*self._contents.values()}
            matrices = (p for p, t in call.given() if p != place and len(t.shape) > 1)
            alone = not any(flow.content.get((call.key, p)) in weights for p in matrices)
            return (call.key, call.made()[0][0]) if alone and call.made() else None
        return None

    def resolved(self, name: str) -> Place:
        """Return the key and the position for a name; its key may be a pattern."""
        pattern, _, place = name.rpartition(" ")
        kind, _, weight = pattern.partition(" ")
        if kind == "use":
            use = self.operand(weight) if place == "operand" else self.result(weight)
            return use or (pattern, place)
        if kind == "weight":
            _, (key, holder) = self._places.get(weight, (0, (pattern, place)))
            return key, holder if place == "weight" else place
        keys = (k for r in self.ranks for k in r.calls if fnmatch.fnmatchcase(k, pattern))
        return next(keys, pattern), place


def _users(flow: DataFlow, place: Place, depth: int) -> Iterator[Place]:
    """Yield the calls that compute with an input, after moves of it alone: casts, transpositions, copies to a place."""
    call = flow.dump.calls[place[0]]
    formula = find(call.name)
    moves = formula is not None and formula.exact and len(call.given()) == 1
    outputs = flow.makers_of(call.key)
    copies = flow.content[place] in map(flow.content.get, outputs)
    if not (moves or copies) or depth > 8:
        yield place
        return
    for output in outputs:
        for taker in flow.taken.get(output, []):
            yield from _users(flow, taker, depth + 1)


def linked(
    a: Sequence[RankDump], b: Sequence[RankDump], links: Sequence[Link]
) -> Iterator[TensorPair]:
    """Yield the entries of a map: the name, and the whole tensors of both runs."""
    uses = WeightUses(a), WeightUses(b)
    for link in links:
        first = _joined(uses[0], link.reference, link, link.transposed)
        other = _joined(uses[1], link.target, link, link.target_transposed)
        if link.rows and first.values is not None:
            axis = -1 if link.joined else 0
            first = first._replace(values=np.take(first.values, link.rows, axis))
        if link.tokens and first.values is not None and other.values is not None:
            experts = link.joined == "first" and ".experts." in link.name
            turned = _by_expert(first, other) if experts else exchanged(first.values, link.tokens)
            first = first._replace(values=turned)
        if link.in_any_order and first.values is not None and other.values is not None:
            count = min(first.values.shape[-1], other.values.shape[-1])
            first = first._replace(values=_chosen(first.values, count))
            other = other._replace(values=_chosen(other.values, count))
        yield TensorPair(link.name, first, other)


def _chosen(x: Array, count: int) -> Array:
    """Return the sorted choices of a top-k, at least so many; of a tensor over all experts, the chosen ones."""
    number = 1 if x.dtype == np.bool_ else 0
    if number:
        x = np.where(x, np.arange(x.shape[-1]) + number, 0)
    used = int(np.count_nonzero(x.reshape(-1, x.shape[-1]), -1).max(initial=0))
    return np.sort(x, -1)[..., -max(count, used) :] - number


def exchanged(x: Array, tokens: Sequence[int]) -> Array:
    """Return a tensor whose rows are tokens ``[A, B]`` with the tokens as ``[B, A]``; others as they are."""
    if x.shape[:2] == tuple(tokens) and x.ndim > 2:
        return np.swapaxes(x, 0, 1)
    if x.ndim and x.shape[0] == np.prod(tokens):
        return np.swapaxes(x.reshape(*tokens, *x.shape[1:]), 0, 1).reshape(x.shape)
    return x


def _by_expert(reference: SharedTensor, other: SharedTensor) -> Array:
    """Return the rows of each expert of the reference in the order of the nearest rows of the target."""
    from scipy import optimize

    assert reference.values is not None
    assert other.values is not None
    rows, y = reference.values.copy(), other.values.reshape(-1, reference.values.shape[-1])
    sizes = np.array(reference.sizes or other.sizes or (y.size,)) // y.shape[-1]
    if y.shape == rows.shape and sizes.sum() == len(y):
        for part in np.split(np.arange(len(y)), np.cumsum(sizes)[:-1]):
            if len(part) > _MANY:
                continue
            a, b = rows[part].astype(np.float64), y[part].astype(np.float64)
            far = np.square(a).sum(-1) - 2 * b @ a.T
            order: Array = optimize.linear_sum_assignment(far)[1]  # pyright: ignore
            rows[part] = rows[part][order]
    return rows


def _joined(uses: WeightUses, names: Sequence[str], link: Link, transposed: bool) -> SharedTensor:
    """Return the tensor with a name, or several tensors joined."""
    points = [point(uses.ranks, *uses.resolved(name)) for name in names]
    if link.joined == "first":  # an expert without tokens makes no call
        points = [p for p in points if p.values is not None or p.differs] or points[:1]
    if unknown := next((p for p in points if p.values is None), None):
        return unknown
    parts = [p.values for p in points if p.values is not None]
    if link.joined:
        axis = 0 if link.joined == "first" else -1
        values = np.concatenate([x.reshape(-1, x.shape[-1]) for x in parts], axis)
    elif link.width:
        rows = [as_rows(x, link.width, transposed) for x in parts]
        fitting = [x for x in rows if x is not None]
        if len(fitting) < len(rows):
            problem = f"shapes {[x.shape for x in parts]}, no width {link.width}"
            return points[0]._replace(values=None, problem=problem)
        values = np.concatenate(fitting)
    else:
        shapes = {x.shape for x in parts}
        if len(shapes) > 1:
            problem = f"shapes {sorted(shapes)} cannot be joined"
            return points[0]._replace(values=None, problem=problem)
        parts = [np.swapaxes(x, -1, -2) for x in parts] if transposed else parts
        values = np.stack(parts) if len(parts) > 1 else parts[0]
    places = tuple((p.key, p.place) for p in points)
    return points[0]._replace(values=values, parts=places, sizes=tuple(x.size for x in parts))


def check_map(links: Sequence[Link], reference: Dump, target: Dump) -> None:
    """Check that a map names tensors of both runs.

    Raises:
        BadInputError: It names nothing of a run, or its sides are swapped.
    """
    dumps = reference, target
    keys = [{k for r in dump.ranks.values() for k in r.calls} for dump in dumps]
    weights = [{n for r in d.ranks.values() for n, _, _ in WeightUses.named(r)} for d in dumps]

    def names(side: tuple[str, ...], run: int) -> bool:
        pattern = side[0].rpartition(" ")[0] if side else ""
        kind, _, weight = pattern.partition(" ")
        if kind in ("weight", "use"):
            return weight in weights[run]
        return any(fnmatch.fnmatchcase(key, pattern) for key in keys[run])

    sides = [[(names(k.reference, i), names(k.target, 1 - i)) for k in links] for i in (0, 1)]
    right, swapped = (sum(map(all, side)) for side in sides)
    if right >= swapped and right:
        return
    lacks = [str(d.root) for i, d in enumerate(dumps) if not any(s[i] for s in sides[0])]
    text = f"no entry names a tensor of {' or of '.join(lacks) or 'both runs'}"
    text += "; expected names such as those of `align inspect --calls`"
    if swapped:
        text = "its sides are swapped; exchange the dumps, or `reference` and `target` in the map"
    raise BadInputError(f"the map of {len(links)} entries does not fit: {text}")
