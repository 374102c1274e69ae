"""Replay collectives: compute what each rank should have received from what all ranks of the group sent.

Sums may be computed in the tensor's own type and in any order. Groups are taken from the reference run if there is one,
because a group that is wrong in the program is also wrong in its dump.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple, cast

import numpy as np

from telechat_moe.numerics import is_float
from telechat_moe.tools.align.dump.records import (
    Call,
    Dump,
    RankDump,
    Scalar,
    TensorLayout,
    TensorRecord,
    Value,
)
from telechat_moe.tools.align.judge.verdict import Verdict, judge, not_judged
from telechat_moe.tools.align.operators.approx import Approx, Array, concatenate

RankTensors = Sequence[Approx | Array]
ExchangeArguments = Sequence[Mapping[str, Any]]
"""The arguments of each rank's call, in the order of the group."""

_FAMILIES = ("Distributed", "MintDistributed", "Primitive", "Comm")


def _reduced(parts: RankTensors, op: str) -> Approx | Array:
    if not isinstance(parts[0], Approx):
        arrays = np.stack([np.asarray(p) for p in parts])
        return {"sum": arrays.sum, "max": arrays.max, "min": arrays.min}[op](0)
    terms = [p for p in parts if isinstance(p, Approx)]
    if op in ("sum", "mean", "avg"):
        total = concatenate([p.reshape(1, *p.shape) for p in terms], 0).sum(0)
        return total if op == "sum" else total / len(terms)
    values = np.stack([p.value for p in terms])
    return terms[0].constant(values.max(0) if op == "max" else values.min(0))


def _joined(parts: RankTensors) -> Approx | Array:
    if isinstance(parts[0], Approx):
        return concatenate([p for p in parts if isinstance(p, Approx)], 0)
    return np.concatenate([np.asarray(p) for p in parts], 0)


def _slices(x: Approx | Array, sizes: Sequence[int]) -> list[Approx | Array]:
    """Return consecutive rows of a tensor, as many as each size says."""
    return [x[e - s : e] for s, e in zip(sizes, accumulate(sizes), strict=True)]


def _all_reduce(parts: RankTensors, ranks: list[int], settings: ExchangeArguments) -> RankTensors:
    return [_reduced(parts, settings[0]["op"])] * len(parts)


def _all_gather(parts: RankTensors, ranks: list[int], settings: ExchangeArguments) -> RankTensors:
    return [_joined(parts)] * len(parts)


def _reduce_scatter(
    parts: RankTensors, ranks: list[int], settings: ExchangeArguments
) -> RankTensors:
    total = _reduced(parts, settings[0]["op"])
    return _slices(total, [total.shape[0] // len(parts)] * len(parts))


def _all_to_all(parts: RankTensors, ranks: list[int], settings: ExchangeArguments) -> RankTensors:
    """Exchange slices of the first dimension, or MindSpore's: split along one dimension, concatenate along another."""
    n, split, joint = len(parts), settings[0].get("split_dim"), settings[0].get("concat_dim")
    split, joint = (0, 0) if split is None else (int(split), int(cast("Any", joint)))

    def moved(x: Approx | Array, a: int, b: int) -> Approx | Array:
        if isinstance(x, Approx):
            return x.moved(lambda v: np.moveaxis(v, a, b))
        return np.moveaxis(x, a, b)

    sent: list[list[Approx | Array]] = []
    for part, arguments in zip(parts, settings, strict=True):
        rows = moved(part, split, 0)
        sizes = arguments.get("input_split_sizes") or [rows.shape[0] // n] * n
        slices = _slices(rows, [int(size) for size in sizes])
        sent.append([moved(moved(piece, 0, split), joint, 0) for piece in slices])
    return [moved(_joined(received), 0, joint) for received in zip(*sent, strict=True)]


def _broadcast(parts: RankTensors, ranks: list[int], settings: ExchangeArguments) -> RankTensors:
    source = settings[0].get("src", settings[0].get("root_rank", ranks[0]))
    return [parts[ranks.index(source) if source in ranks else 0]] * len(parts)


_INTO = ("output", "input", "op", "group")
_SPLIT = ("output", "input", "output_split_sizes", "input_split_sizes", "group")
Replay = Callable[[RankTensors, list[int], ExchangeArguments], RankTensors]
KINDS: Mapping[str, tuple[Replay, Sequence[str]]] = {
    "allreduce": (_all_reduce, ("input", "op", "group")),
    "allgather": (_all_gather, _INTO),
    "allgatherintotensor": (_all_gather, _INTO),
    "allgatherbase": (_all_gather, _INTO),
    "reducescatter": (_reduce_scatter, _INTO),
    "reducescattertensor": (_reduce_scatter, _INTO),
    "reducescatterbase": (_reduce_scatter, _INTO),
    "alltoall": (_all_to_all, _INTO),
    "alltoallsingle": (_all_to_all, _SPLIT),
    "broadcast": (_broadcast, ("input", "src", "group")),
}
"""Each kind of collective: what its ranks receive, and the names of its arguments."""


MESSAGE = "message"
"""The kind of a send and the receive that belongs to it, which are no collective."""


def kind_of(call: Call) -> str | None:
    """Return the kind of collective that a call is; None: it is not a collective."""
    short = _short(call).replace("_", "")
    return short if short in KINDS else None


def is_exchange(call: Call) -> bool:
    """Return whether a call is a collective, a send or a receive."""
    return kind_of(call) is not None or is_send(call) or _short(call) in _RECEIVE


def is_send(call: Call) -> bool:
    """Return whether a call sends a message; what it returns is never written."""
    return _short(call) in _SEND


class Meeting(NamedTuple):
    """The calls of several ranks that belong together: a collective, or a message."""

    kind: str  # kind of collective, as in `KINDS`, or `MESSAGE`
    # Ranks that belong together; of a message the one that sends, then the one that receives
    group: list[int]
    keys: dict[int, str]  # key of the call on each of them that is in the dump
    trusted_call: Call  # a call whose operation is believed

    def received(self, bound: Mapping[int, Mapping[str, Any]]) -> RankTensors:
        """Return what each rank of the group should receive, by what each has sent: its arguments, see :func:`bind`."""
        settings = [bound[r] for r in self.group if r in bound]
        parts = [arguments["input"] for arguments in settings]
        if self.kind == MESSAGE:
            return [parts[0]] * 2
        return KINDS[self.kind][0](parts, self.group, settings)

    @property
    def senders(self) -> list[int]:
        """The ranks that send something."""
        return self.group[:1] if self.kind == MESSAGE else self.group


class ReceivedTensor(NamedTuple):
    """What a rank received."""

    rank: int
    call: Call
    verdict: Verdict  # the verdict on what it received
    meeting: Meeting  # the calls that belong together
    expected: RankTensors = ()  # what each rank of the group should have received; empty: unknown


class ExchangeContext(NamedTuple):
    """What a rank received, with all ranks of the step in both runs."""

    received: ReceivedTensor
    target: Mapping[int, RankDump]
    reference: Mapping[int, RankDump]


def meetings(
    dumps: Sequence[RankDump], references: Mapping[int, RankDump] | None = None
) -> list[Meeting]:
    """Return the calls of all ranks of a step that belong together.

    The n-th call of a kind and group on one rank belongs to the n-th on the others, whatever its number in the dump.
    ``references`` are the same ranks of a trusted run, which gives the groups.
    """
    everybody = sorted(dump.rank for dump in dumps)
    members = _members((references or {}).get(dump.rank, dump) for dump in dumps)
    meetings_by_name: dict[tuple[str, tuple[int, ...], int], Meeting] = {}
    for dump in dumps:
        count: Counter[tuple[str, tuple[int, ...]]] = Counter()
        believed = (references or {}).get(dump.rank)
        for key, call in dump.calls.items():
            if not is_exchange(call):
                continue
            kind, trusted_call = kind_of(call) or MESSAGE, call
            if kind == MESSAGE:
                group = _ends(call, dump.rank)
            else:
                trusted_call = believed.calls.get(key, call) if believed else call
                group = group_of(trusted_call) or members.get(group_name(trusted_call), everybody)
            name = kind, (*group, *_tag(call))
            meeting = Meeting(kind, group, {}, trusted_call)
            meeting = meetings_by_name.setdefault((*name, count[name]), meeting)
            meeting.keys[dump.rank] = key
            count[name] += 1
    return [*meetings_by_name.values()]


def judged_collectives(
    dumps: Sequence[RankDump], references: Mapping[int, RankDump] | None = None
) -> Iterator[ReceivedTensor]:
    """Yield what each rank received from each collective and each message; arguments as of :func:`meetings`."""
    by_rank = {dump.rank: dump for dump in dumps}
    for meeting in meetings(dumps, references):
        yield from _judge_site(meeting, by_rank)


_SEND = {"send", "isend", "telechatsend"}
_RECEIVE = {"recv", "irecv", "receive", "telechatreceive"}


def _short(call: Call) -> str:
    family, _, operator = call.name.partition(".")
    return operator.split(".")[-1].lower() if family in _FAMILIES else ""


def _ends(call: Call, rank: int) -> list[int]:
    """Return which rank sends a message of a rank and which receives it; the rank alone: the dump does not show it."""
    arguments = (call.kwargs.get(name) for name in ("dst", "dest_rank", "src", "src_rank", "peer"))
    numbers = (v.value for v in (*arguments, *call.inputs) if isinstance(v, Scalar))
    peer = next((n for n in numbers if type(n) is int), None)
    if peer is None:
        return [rank]
    return [rank, peer] if is_send(call) else [peer, rank]


def _tag(call: Call) -> list[int]:
    """Return the tag of a message, by which MindSpore's ranks know it; empty where the dump has none."""
    value = call.kwargs.get("tag")
    return [value.value] if isinstance(value, Scalar) and type(value.value) is int else []


def _first(call: Call, of_result: bool) -> TensorRecord | None:
    """Return the tensor of a message: the result, or the tensor that torch writes into."""
    arguments = [*call.inputs, *call.kwargs.values()]
    records = flat([*call.outputs, *arguments] if of_result else arguments)
    return next((record for record in records if record.read is not None), None)


def group_of(call: Call) -> list[int] | None:
    """Return the global ranks of a collective's group; None: the dump does not name them."""
    for value in (*call.kwargs.values(), *call.inputs):
        if isinstance(value, Scalar) and isinstance(value.value, dict):
            group: dict[str, Any] = cast("Any", value).value
            ranks = group.get("group_ranks")
            if ranks:
                return [int(r) for r in ranks]
    return None


def _members(dumps: Iterable[RankDump]) -> dict[str, list[int]]:
    """Return the ranks that have collectives in each group that is known by its name only, as MindSpore's are."""
    members: dict[str, set[int]] = {}
    for dump in dumps:
        for call in dump.calls.values():
            if name := group_name(call):
                members.setdefault(name, set()).add(dump.rank)
    return {name: sorted(ranks) for name, ranks in members.items()}


def group_name(call: Call) -> str:
    """Return the name of a collective's group; empty: it has none, or is no collective."""
    kind = kind_of(call)
    name = arguments_by_name(kind, call).get("group") if kind is not None else None
    return name if isinstance(name, str) else ""


def _judge_site(meeting: Meeting, by_rank: Mapping[int, RankDump]) -> Iterator[ReceivedTensor]:
    kind, ranks, keys, trusted_call = meeting
    calls = {rank: by_rank[rank].calls[key] for rank, key in keys.items()}
    expected, reason = None, ""
    absent = [r for r in meeting.senders if r not in keys]
    if kind == MESSAGE and len(ranks) < 2:
        reason = "who sent it, or what came, is not in the dump"
    elif absent:
        reason = f"rank {absent[0]} of its group is not in the dump"
    else:
        try:
            bound = {rank: bind(kind, calls[rank]) for rank in meeting.senders}
            trusted = {} if kind == MESSAGE else arguments_by_name(kind, trusted_call)
            bound[ranks[0]]["op"] = _operation(trusted)
            for arguments in bound.values():
                arguments["input"] = loaded(arguments["input"])
            expected = meeting.received(bound)
        except (LookupError, ValueError, TypeError) as error:
            reason = f"arguments do not fit {trusted_call.name}: {error}"
    receivers = ranks if expected is not None else [*keys]
    for rank in ranks[-1:] if kind == MESSAGE else receivers:
        if (call := calls.get(rank)) is None or is_send(call):
            continue
        verdict = not_judged(call.key, reason)
        if expected is not None:
            verdict = _judge_rank(call, expected[ranks.index(rank)])
        yield ReceivedTensor(rank, call, verdict, meeting, expected or ())


def _judge_rank(call: Call, expected: Approx | Array) -> Verdict:
    written = _first(call, True) if _short(call) in _RECEIVE else None
    records = [written] if written is not None else list(flat(call.outputs))
    if not records:
        return not_judged(call.key, "what it received was not dumped")
    if records[0].shape == np.shape(expected.value if isinstance(expected, Approx) else expected):
        records = records[:1]  # torch's arguments follow
    arrays = [record.load() for record in records]
    values = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, 0)
    return judge(call.key, "output.0", values, expected, records[0].dtype)


def bind(kind: str, call: Call) -> dict[str, Any]:
    """Return the arguments of a call that sends something by name, with the operation that a collective sums by.

    Raises:
        LookupError: Its input is not in the dump.
    """
    arguments = {"input": _first(call, False)} if kind == MESSAGE else arguments_by_name(kind, call)
    if not isinstance(arguments.get("input"), TensorRecord):
        raise LookupError("its input was not dumped")
    return {**arguments, "op": _operation(arguments)}


def arguments_by_name(kind: str, call: Call) -> dict[str, Any]:
    """Return the arguments by name; for tensors, their records."""
    names = KINDS[kind][1]
    tensors = [v for v in call.inputs if isinstance(v, TensorRecord | list)]
    returns = names[0] == "output" and len(tensors) == 1 and "output" not in call.kwargs
    if returns and call.inputs[0] is not None:  # as msprobe writes torch's output
        names = names[1:]  # MindSpore's primitives return their result
    values: dict[str, Any] = dict(zip(names, call.inputs, strict=False))
    values |= {_OTHER.get(name, name): value for name, value in call.kwargs.items()}
    return {name: v.value if isinstance(v, Scalar) else v for name, v in values.items()}


_OTHER = {"tensor": "input", "input_tensor": "input", "output_tensor": "output", "x": "input"}


def _operation(arguments: Mapping[str, Any]) -> str:
    op = str(arguments.get("op") or "sum").lower()
    return "mean" if op == "reduceop.avg" else op.rsplit(".", 1)[-1]


def loaded(record: Any) -> Approx | Array:
    """Return what a rank sent, with its errors of rounding; LookupError: it was not dumped."""
    if not isinstance(record, TensorRecord):
        raise LookupError("its input was not dumped")
    values = record.load()
    return Approx(values, record.dtype, record.dtype) if is_float(record.dtype) else values


def flat(value: Value) -> Iterator[TensorRecord]:
    """Yield the tensors of an argument or of a list of arguments."""
    if isinstance(value, TensorRecord):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from flat(item)


def with_groups(dump: Dump) -> Dump:
    """Return a dump whose collectives name their groups, taken from the layouts of their inputs."""
    return Dump(dump.root, {key: _corrected(rank) for key, rank in dump.ranks.items()})


def _corrected(rank: RankDump) -> RankDump:
    calls = dict(rank.calls)
    for key, call in calls.items():
        layout = call.given()[0][1].layout if call.given() else None
        if kind_of(call) != "allreduce" or layout is None or not layout.partial:
            continue
        right = terms_of(layout, rank.rank)
        if right is not None and group_of(call) not in (None, right):
            group = Scalar("ProcessGroup", {"group_ranks": right, "group_id": "from the layout"})
            calls[key] = replace(call, kwargs={**call.kwargs, "group": group})
    return replace(rank, calls=calls)


def terms_of(layout: TensorLayout, rank: int) -> list[int] | None:
    """Return the ranks that hold the other terms of the sum of which a rank holds one."""
    if rank not in layout.ranks or math.prod(layout.mesh) != len(layout.ranks):
        return None
    places = np.arange(len(layout.ranks)).reshape(layout.mesh)
    coordinates = np.unravel_index(layout.ranks.index(rank), layout.mesh)
    axes = zip(layout.axes, coordinates, strict=True)
    index = tuple(slice(None) if axis in layout.partial else int(i) for axis, i in axes)
    return sorted(layout.ranks[int(p)] for p in np.ravel(places[index]))
