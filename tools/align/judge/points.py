"""Points: tensors that two runs must have in common, whatever their layouts, merged over all ranks.

They are gradients of weights, weights and states around their update, choices of routers, and what a map names.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.numerics import Array
from telechat_moe.tools.align.dump.infer_layout import infer
from telechat_moe.tools.align.dump.logical import CopiesDifferError, Shard, logical
from telechat_moe.tools.align.dump.ranges import LayoutError
from telechat_moe.tools.align.dump.records import Call, Phase, RankDump, TensorRecord
from telechat_moe.tools.align.judge.data_flow import is_weight

STATES = ("weight", "exp_avg", "exp_avg_sq", "momentum_buffer")


class SharedTensor(NamedTuple):
    """A tensor that both runs must have."""

    values: Array | None  # the whole tensor; None: not known
    dtype: str  # type that the program computed in
    rank: int  # first rank that has it
    key: str
    place: str  # position of the tensor in the call
    problem: str = ""  # why it is not known: copies that differ, no layout
    ranks: tuple[int, ...] = ()  # ranks that have it
    differs: bool = False  # ranks whose copies must be equal hold different values
    # The tensors that it was put together from, if there are several
    parts: tuple[tuple[str, str], ...] = ()
    sizes: tuple[int, ...] = ()  # their numbers of elements


class TensorPair(NamedTuple):
    """A tensor of both runs, under its name in words."""

    name: str
    reference: SharedTensor
    target: SharedTensor


def by_weight(a: Sequence[RankDump], b: Sequence[RankDump]) -> Iterator[TensorPair]:
    """Yield the gradients, weights and states that both runs have, in the order of the target."""
    reference_calls = named(a, weight_of)
    for weight, calls in named(b, weight_of).items():
        if weight not in reference_calls:
            continue
        places = update_places(reference_calls[weight][0][1])
        for name, place in update_places(calls[0][1]).items():
            if name in places:
                reference_tensor = put_together(reference_calls[weight], places[name])
                target_tensor = put_together(calls, place)
                assert reference_tensor is not None
                assert target_tensor is not None
                name = f"{name[0]} of {weight}{name[1]}"
                yield TensorPair(name, reference_tensor, target_tensor)


def by_use(a: Sequence[RankDump], b: Sequence[RankDump]) -> Iterator[TensorPair]:
    """Yield the weights that calls of equal keys use, put together by their shapes: msprobe records no updates and no layout."""
    for key, call in a[0].calls.items() if a else ():
        if call.phase is not Phase.FORWARD or call.kind != "api":
            continue
        for place, _ in call.given():
            if is_weight(call, place) and all(key in dump.calls for dump in (*a, *b)):
                shards = [_shards(run, key, place) for run in (a, b)]
                for shape in _whole_shapes(*shards):
                    tensors = [_by_shape(run, key, place, shape) for run in shards]
                    if tensors[0] is not None and tensors[0].values is not None and tensors[1]:
                        yield TensorPair(f"weight {place} of {key} before", *filter(None, tensors))
                        break


def _shards(ranks: Sequence[RankDump], key: str, place: str) -> list[Shard]:
    """Return the tensor that each rank has in a call; empty if some have none."""
    records = [(dump.rank, dict(dump.calls[key].tensors()).get(place)) for dump in ranks]
    shards = [Shard(rank, record, 0) for rank, record in records if record and record.read]
    return shards if len(shards) == len(ranks) else []


def _whole_shapes(a: Sequence[Shard], b: Sequence[Shard]) -> Iterator[tuple[int, ...]]:
    """Yield the shapes that a tensor may have of which two runs have such shards, the smallest first."""
    shapes = [run[0].values.shape for run in (a, b) if run]
    if len(shapes) < 2 or len(shapes[0]) != len(shapes[1]):
        return
    smallest = [math.lcm(*sizes) for sizes in zip(*shapes, strict=True)]
    cut = [d for d, sizes in enumerate(zip(*shapes, strict=True)) if len({*sizes}) > 1]
    for times in range(1, min(len(a), len(b)) + 1) if len(cut) == 1 else (1,):
        yield tuple(n * times if d in cut else n for d, n in enumerate(smallest))


def _by_shape(
    shards: Sequence[Shard], key: str, place: str, shape: tuple[int, ...]
) -> SharedTensor | None:
    """Return a weight of all ranks as the one layout that a shape allows puts it together; None: there is no such layout."""
    dtype, ranks = str(shards[0].values.dtype), tuple(shard.rank for shard in shards)
    try:
        inferred = infer(shards, shape)
        if inferred.layout is None:
            copies = [c.problem for c in inferred.candidates]
            if len(copies) != 1 or copies[0] is None:
                return None
            return SharedTensor(None, dtype, ranks[0], key, place, copies[0], ranks, True)
        values = logical(shards, inferred.layout, shape).values
    except (LayoutError, BadInputError, CopiesDifferError):
        return None
    return SharedTensor(values, dtype, ranks[0], key, place, "", ranks)


def named(
    ranks: Sequence[RankDump], name_of: Callable[[Call], str | None]
) -> dict[str, list[tuple[int, Call]]]:
    """Return the calls that a function gives a name, each with its rank, by name."""
    calls_by_name: dict[str, list[tuple[int, Call]]] = {}
    for dump in ranks:
        for call in dump.calls.values():
            if (name := name_of(call)) is not None:
                calls_by_name.setdefault(name, []).append((dump.rank, call))
    return calls_by_name


def update_places(call: Call) -> dict[tuple[str, str], str]:
    """Return the tensors of an update by their meaning: (``weight``, `` before``), (``gradient``, ````) ..."""
    places = {("gradient", ""): "input.grad"}
    states = [state for state in STATES if state in call.kwargs]
    for i, state in enumerate(states):
        places[state, " before"] = f"input.{state}"
        if i < len(call.outputs):
            places[state, " after"] = f"output.{i}"
    return places


def weight_of(call: Call) -> str | None:
    """Return the weight that a call updates."""
    parts = call.name.split(".")
    if parts[0] != "Optimizer":
        return None
    if len(parts) > 2:
        return ".".join(parts[1:-1])
    names = (line.removeprefix("weight ") for line in call.stack if line.startswith("weight "))
    return next(names, None)


def point(ranks: Sequence[RankDump], key: str, place: str) -> SharedTensor:
    """Return a tensor merged over all ranks that have it."""
    calls = [(dump.rank, dump.calls[key]) for dump in ranks if key in dump.calls]
    missing = SharedTensor(None, "", ranks[0].rank, key, place, f"no tensor {key} {place}")
    return put_together(calls, place) or missing


def put_together(calls: Sequence[tuple[int, Call]], place: str) -> SharedTensor | None:
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
    alone = len(pieces) == 1 and (first.layout is None or len(first.layout.ranks) == 1)
    try:
        values = first.load() if alone else logical(pieces, first.layout).values
    except (LayoutError, BadInputError, LookupError) as error:
        differs = isinstance(error, CopiesDifferError)
        return SharedTensor(None, first.dtype, have[0], key, place, str(error), have, differs)
    factor = factor_of(calls[0][1], place)
    if factor is not None:
        values = values * factor.load().astype(np.float64)
    return SharedTensor(values, first.dtype, have[0], key, place, ranks=have)


def at_worst(reference: SharedTensor, target: SharedTensor) -> SharedTensor:
    """Return a point without its values, at the part (of a stack of experts) that differs most."""
    x, y = reference.values, target.values
    if len(reference.parts) > 1 and x is not None and y is not None and x.size == y.size:
        position = int(np.argmax(np.abs(x.reshape(-1) - y.reshape(-1))))
        part = int(np.searchsorted(np.cumsum(reference.sizes), position, "right"))
        key, place = reference.parts[part]
        reference = reference._replace(key=key, place=place)
    return reference._replace(values=None)


def factor_of(call: Call, place: str) -> TensorRecord | None:
    """Return what an update multiplies a gradient at a place by; None: nothing, or no gradient."""
    factor = call.kwargs.get("clip") if place == "input.grad" else None
    return factor if isinstance(factor, TensorRecord) and factor.read is not None else None
