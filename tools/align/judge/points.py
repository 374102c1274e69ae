"""Points: tensors that two runs must have in common, whatever their layouts, merged over all ranks.

They are gradients of weights, weights and states around their update, choices of routers, and what a map names.
"""

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
    """Yield the weights that calls of equal keys use, put together by their shapes: msprobe records no updates and no layout.

    One of the runs must have them whole, on one rank.
    """
    uncut_rank = next((run[0] for run in (a, b) if len(run) == 1), None)
    for key, call in uncut_rank.calls.items() if uncut_rank is not None else ():
        if call.phase is not Phase.FORWARD or call.kind != "api":
            continue
        for place, tensor in call.given():
            if is_weight(call, place) and all(key in dump.calls for dump in (*a, *b)):
                pair = [_by_shape(run, key, place, tensor) for run in (a, b)]
                if None not in pair:
                    yield TensorPair(f"weight {place} of {key} before", *filter(None, pair))


def _by_shape(
    ranks: Sequence[RankDump], key: str, place: str, uncut: TensorRecord
) -> SharedTensor | None:
    """Return a weight of all ranks as the one layout that its shapes allow puts it together; None: there is no such layout."""
    records = [(dump.rank, dict(dump.calls[key].tensors()).get(place)) for dump in ranks]
    shards = [Shard(rank, record, 0) for rank, record in records if record and record.read]
    if len(shards) != len(ranks):
        return None
    try:
        layout = infer(shards, uncut.shape).layout
        values = None if layout is None else logical(shards, layout, uncut.shape).values
    except (LayoutError, BadInputError, CopiesDifferError):
        return None
    have = tuple(shard.rank for shard in shards)
    return (
        None if values is None else SharedTensor(values, uncut.dtype, have[0], key, place, "", have)
    )


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
