"""Points: tensors that two runs must have in common, whatever their layouts, merged over all ranks.

They are gradients of weights, weights and states before and after their update, the choices of routers, and the tensors
that a map (:class:`Link`) names.
"""

import fnmatch
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.tools.align.dump.logical import CopiesDifferError, merge
from telechat_moe.tools.align.dump.ranges import LayoutError
from telechat_moe.tools.align.dump.records import Call, Dump, Phase, RankDump, TensorRecord
from telechat_moe.tools.align.dump.shard_values import Shard
from telechat_moe.tools.align.operators import find
from telechat_moe.tools.align.operators.indexing import CHOOSES

Array = np.ndarray[Any, np.dtype[Any]]

STATES = ("weight", "exp_avg", "exp_avg_sq", "momentum_buffer")


class Point(NamedTuple):
    """A tensor that both runs must have.

    Attributes:
        values: The whole tensor; None: not known.
        dtype: Type that the program computed in.
        rank: First rank that has it.
        place: Position of the tensor in the call.
        problem: Why it is not known: copies that differ, no layout.
        ranks: Ranks that have it.
        differs: Ranks whose copies must be equal hold different values.
    """

    values: Array | None
    dtype: str
    rank: int
    key: str
    place: str
    problem: str = ""
    ranks: tuple[int, ...] = ()
    differs: bool = False


@dataclass(frozen=True)
class Link:
    """An entry of a map: the names of one tensor in both runs.

    Attributes:
        name: Name in reports.
        reference: ``KEY PLACE`` in the reference; several tensors (experts) are stacked.
        target: The same in the target.
        transposed: The reference's last two dimensions are exchanged.
        in_any_order: Values along the last dimension are sorted before comparison (choices of a top-k).
    """

    name: str
    reference: tuple[str, ...]
    target: tuple[str, ...]
    transposed: bool = False
    in_any_order: bool = False


def read_map(path: Path) -> list[Link]:
    """Read a map: a JSON list of objects with ``name``, ``reference``, ``target``, maybe ``transposed``, ``sorted``.

    Raises:
        BadInputError: The file is not such a map.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        links = [
            Link(
                str(entry["name"]),
                _names(entry["reference"]),
                _names(entry["target"]),
                bool(entry.get("transposed", False)),
                bool(entry.get("sorted", False)),
            )
            for entry in found
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInputError(f"{path}: no map of tensors: {error}") from None
    if not links:
        raise BadInputError(f"{path}: the map is empty; `align map RECIPE` writes one")
    return links


def _names(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(map(str, entry))


def by_weight(a: Sequence[RankDump], b: Sequence[RankDump]) -> Iterator[tuple[str, Point, Point]]:
    """Yield the gradients, weights and states that both runs have, in the order of the target."""
    theirs = _named(a, weight_of)
    for weight, calls in _named(b, weight_of).items():
        if weight not in theirs:
            continue
        places = _places(theirs[weight][0][1])
        for name, place in _places(calls[0][1]).items():
            if name in places:
                one = _put_together(theirs[weight], places[name])
                other = _put_together(calls, place)
                assert one is not None
                assert other is not None
                yield f"{name[0]} of {weight}{name[1]}", one, other


def _named(
    ranks: Sequence[RankDump], name_of: Callable[[Call], str | None]
) -> dict[str, list[tuple[int, Call]]]:
    """Return the calls that a function gives a name, each with its rank, by name."""
    found: dict[str, list[tuple[int, Call]]] = {}
    for dump in ranks:
        for call in dump.calls.values():
            name = name_of(call)
            if name is not None:
                found.setdefault(name, []).append((dump.rank, call))
    return found


def _places(call: Call) -> dict[tuple[str, str], str]:
    """Return the tensors of an update by their meaning."""
    found = {("gradient", ""): "input.grad"}
    kept = [state for state in STATES if state in call.kwargs]
    for i, state in enumerate(kept):
        found[state, " before"] = f"input.{state}"
        if i < len(call.outputs):
            found[state, " after"] = f"output.{i}"
    return found


def weight_of(call: Call) -> str | None:
    """Return the weight that a call updates."""
    parts = call.name.split(".")
    if parts[0] != "Optimizer":
        return None
    if len(parts) > 2:
        return ".".join(parts[1:-1])
    named = (line.removeprefix("weight ") for line in call.stack if line.startswith("weight "))
    return next(named, None)


def point(ranks: Sequence[RankDump], key: str, place: str) -> Point:
    """Return a tensor merged over all ranks that have it."""
    calls = [(dump.rank, dump.calls[key]) for dump in ranks if key in dump.calls]
    missing = Point(None, "", ranks[0].rank, key, place, f"no tensor {key} {place}")
    return _put_together(calls, place) or missing


def _put_together(calls: Sequence[tuple[int, Call]], place: str) -> Point | None:
    """Merge one tensor of calls of several ranks, several calls of a rank in order; None: no rank has it."""
    pieces: list[Shard] = []
    count: Counter[int] = Counter()
    for rank, call in calls:
        record = dict(call.tensors()).get(place)
        if record is not None:
            pieces.append(Shard(rank, record, count[rank]))
            count[rank] += 1
    if not pieces:
        return None
    key, first = calls[0][1].key, pieces[0].values
    assert isinstance(first, TensorRecord)
    have = tuple(dict.fromkeys(p.rank for p in pieces))
    try:
        if len(pieces) == 1 and (first.layout is None or len(first.layout.ranks) == 1):
            return Point(
                _applied(calls[0][1], place, first.load()),
                first.dtype,
                have[0],
                key,
                place,
                ranks=have,
            )
        merged = merge(pieces, first.layout)
    except CopiesDifferError as error:
        return Point(None, first.dtype, have[0], key, place, str(error), have, True)
    except (LayoutError, BadInputError, LookupError) as error:
        return Point(None, first.dtype, have[0], key, place, str(error), have)
    values = _applied(calls[0][1], place, merged.values)
    return Point(values, merged.dtype, have[0], key, place, ranks=have)


def _applied(call: Call, place: str, values: Array) -> Array:
    """Return a gradient as its update applies it: an update that clips is given the gradient before clipping."""
    factor = factor_of(call, place)
    return values if factor is None else values * factor.load().astype(np.float64)


def factor_of(call: Call, place: str) -> TensorRecord | None:
    """Return what an update multiplies a gradient at a place by; None: nothing, or no gradient."""
    factor = call.kwargs.get("clip") if place == "input.grad" else None
    return factor if isinstance(factor, TensorRecord) and factor.read is not None else None


def linked(
    a: Sequence[RankDump], b: Sequence[RankDump], links: Sequence[Link]
) -> Iterator[tuple[str, Point, Point]]:
    """Yield the entries of a map: the name, and the whole tensors of both runs."""
    for link in links:
        points = [_stacked(a, link.reference, link.transposed), _stacked(b, link.target, False)]
        for i, p in enumerate(points):
            if link.in_any_order and p.values is not None:
                points[i] = p._replace(values=np.sort(p.values, -1))
        yield link.name, points[0], points[1]


def check_map(links: Sequence[Link], reference: Dump, target: Dump) -> None:
    """Check that a map names tensors of both runs.

    Raises:
        BadInputError: It names nothing of a run, or its sides are swapped.
    """
    runs = [
        [c for r in dump.ranks.values() for c in r.calls.values()] for dump in (reference, target)
    ]
    keys = [{call.key for call in calls} for calls in runs]
    updates = [{weight_of(call) for call in calls} for calls in runs]

    def names(side: tuple[str, ...], run: int) -> bool:
        pattern = side[0].rpartition(" ")[0] if side else ""
        if pattern.startswith("weight "):
            return pattern.removeprefix("weight ") in updates[run]
        return any(fnmatch.fnmatchcase(key, pattern) for key in keys[run])

    sides = [[(names(k.reference, i), names(k.target, 1 - i)) for k in links] for i in (0, 1)]
    right, swapped = (sum(map(all, side)) for side in sides)
    if right >= swapped and right:
        return
    if swapped:
        said = (
            "its sides are swapped; exchange the two dumps, or `reference` and `target` in the map"
        )
    else:
        lacks = [d for i, d in enumerate((reference, target)) if not any(s[i] for s in sides[0])]
        said = f"no entry names a tensor of {' or of '.join(str(d.root) for d in lacks) or 'both runs'}"
        said += "; expected names such as those of `align inspect --calls`"
    raise BadInputError(f"the map of {len(links)} entries does not fit: {said}")


def _stacked(ranks: Sequence[RankDump], names: Sequence[str], transposed: bool) -> Point:
    """Return the tensor with a name, or several tensors stacked."""
    found = [point(ranks, *_resolved(ranks, name)) for name in names]
    first = found[0]
    if unknown := next((p for p in found if p.values is None), None):
        return unknown
    parts = [p.values for p in found if p.values is not None]
    parts = [np.swapaxes(x, -1, -2) for x in parts] if transposed else parts
    return first._replace(values=np.stack(parts) if len(parts) > 1 else parts[0])


def _resolved(ranks: Sequence[RankDump], name: str) -> tuple[str, str]:
    """Return the key and the position for a name, whose key may be a pattern, or ``weight NAME`` for an update."""
    pattern, _, place = name.rpartition(" ")
    if pattern.startswith("weight "):
        wanted = pattern.removeprefix("weight ")
        keys = (k for r in ranks for k, call in r.calls.items() if weight_of(call) == wanted)
        return next(keys, pattern), place
    keys = (k for r in ranks for k in r.calls if fnmatch.fnmatchcase(k, pattern))
    return next(keys, pattern), place


def choices_of_both(
    a: Sequence[RankDump], b: Sequence[RankDump]
) -> Iterator[tuple[str, Point, Point, Point, Point]]:
    """Yield the choices that both runs make, in order: name, scores of both, chosen indices of both."""
    theirs = _named(a, _choice_of)
    for name, mine in _named(b, _choice_of).items():
        if name not in theirs:
            continue
        formula = find(mine[0][1].name)
        chosen = f"output.{CHOOSES[formula.name]}" if formula else ""
        found = [
            _put_together(calls, place)
            for place in ("input.0", chosen)
            for calls in (theirs[name], mine)
        ]
        if all(p is not None and p.values is not None for p in found):
            yield name, *found  # type: ignore[misc]


def _choice_of(call: Call) -> str | None:
    """Return the name of what a call chooses for; None: it does not choose."""
    formula = find(call.name) if call.phase is Phase.FORWARD else None
    said = (line for line in call.stack if line.startswith("choice "))
    return next(said, None) if formula is not None and formula.name == "topk" else None
