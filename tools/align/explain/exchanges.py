"""Say what an exchange between ranks did instead of what it should: no reduction, another group, order or tensor."""

from collections.abc import Mapping
from typing import cast

import numpy as np

from telechat_moe.numerics import is_float
from telechat_moe.tools.align.dump.records import RankDump
from telechat_moe.tools.align.explain.differences import Difference, kind_of_integers
from telechat_moe.tools.align.judge.collectives import (
    ReceivedTensor,
    arguments_by_name,
    flat,
    kind_of,
    loaded,
)
from telechat_moe.tools.align.judge.data_flow import digest
from telechat_moe.tools.align.judge.verdict import Explanation, values_of
from telechat_moe.tools.align.operators.approx import Approx, Array


def kind_of_exchange(received: ReceivedTensor, dumps: Mapping[int, RankDump]) -> Explanation:
    """Return the kind of fault of what a rank received and the evidence for it; ``dumps`` has all ranks."""
    reduction = _wrong_reduction(received, dumps)
    if reduction is not None:
        return reduction
    verdict, call = received.verdict, received.call
    tensor = dict(call.tensors()).get(verdict.place)
    if tensor is None or tensor.read is None or not received.expected:
        return "wrong exchange", verdict.reason
    expected = received.expected[received.meeting.group.index(received.rank)]
    actual, value = tensor.load(), values_of(expected)
    if value.shape != actual.shape:
        return "shape", f"shape {list(actual.shape)}, expected {list(value.shape)}"
    if not isinstance(expected, Approx):
        return kind_of_integers(actual, value)
    bound = expected.bound(tensor.dtype)
    difference = Difference(actual.astype(np.float64), value, bound, call, tensor)
    answer = difference.pattern() or _elsewhere(actual, received, dumps)
    answer = answer or difference.remainder()
    return answer or ("wrong exchange", verdict.reason)


def _elsewhere(
    actual: Array, received: ReceivedTensor, dumps: Mapping[int, RankDump]
) -> Explanation | None:
    """Return which earlier tensor was received instead of the right one."""
    content = digest(actual)
    for rank, dump in dumps.items():
        for key, call in dump.calls.items():
            if key == received.meeting.keys.get(rank, received.call.key):
                break
            for place, tensor in call.made():
                alike = tensor.shape == actual.shape and tensor.read is not None
                if alike and digest(tensor.load()) == content:
                    return "wrong tensor", f"it is {place} of {key} of rank {rank}"
    return None


def _wrong_reduction(received: ReceivedTensor, dumps: Mapping[int, RankDump]) -> Explanation | None:
    """Return what a wrong exchange did instead: no reduction, another group, a doubled term, another order.

    The weight of each rank's contribution is found by least squares; those that explain the whole tensor answer.
    """
    values = list(flat(received.call.outputs))
    if len(values) != 1 or values[0].read is None or not is_float(values[0].dtype):
        return None
    x, dtype = values[0].load().astype(np.float64), values[0].dtype
    rank, (kind, group, *_) = received.rank, received.meeting
    for other, expected in zip(group, received.expected, strict=False):
        if other != rank and isinstance(expected, Approx) and expected.shape == x.shape:
            right = received.expected[group.index(rank)]
            equal = isinstance(right, Approx) and np.array_equal(expected.value, right.value)
            if not equal and np.all(np.abs(x - expected.value) <= expected.bound(dtype)):
                return "wrong order", f"rank {rank} has what rank {other} should have"
    if "reduce" not in kind or not np.any(x):
        return None
    parts = _parts(received, dumps, x)
    return _weighed(x, parts, received, dtype) or _other_reduction(x, parts, group, dtype)


def _parts(received: ReceivedTensor, dumps: Mapping[int, RankDump], x: Array) -> dict[int, Array]:
    """Return what each rank contributed to this rank's tensor."""
    contributions: dict[int, Array] = {}
    kind, group, keys, _ = received.meeting
    for rank, dump in dumps.items():
        call = dump.calls.get(keys.get(rank) or received.call.key)
        try:
            if call is None or kind_of(call) != kind:
                continue
            part = loaded(arguments_by_name(kind, call)["input"])
        except (LookupError, TypeError):
            continue
        value = part.value if isinstance(part, Approx) else part.astype(np.float64)
        if kind != "allreduce" and len(value) == len(x) * len(group):
            position = group.index(received.rank)
            value = value[position * len(x) : (position + 1) * len(x)]
        if value.shape == x.shape:
            contributions[rank] = value
    return contributions


def _weighed(
    x: Array, parts: dict[int, Array], received: ReceivedTensor, dtype: str
) -> Explanation | None:
    group, rank = received.meeting.group, received.rank
    ranks = [*(r for r in group if r in parts), *sorted(r for r in parts if r not in group)]
    if rank not in parts or not np.all(np.isfinite(x)):
        return None
    for these in (ranks[: len(group)], ranks):
        columns = np.stack([parts[r].reshape(-1) for r in these], 1)
        size = np.linalg.norm(columns, axis=0)
        size[size == 0] = 1.0
        if not np.all(np.isfinite(size)):
            return None
        share = cast("Array", np.linalg.lstsq(columns / size, x.reshape(-1), rcond=None)[0])
        weight = np.array([_simple(w, len(group)) for w in (share / size).tolist()])
        total = (Approx(columns, dtype, dtype) * weight).sum(1).reshape(*x.shape)
        if np.all(np.abs(x - total.value) <= 2 * total.bound(dtype)):
            named = {r: w for r, w in zip(these, weight.tolist(), strict=True) if w}
            return _explain_weights(named, group, rank)
    return None


def _simple(weight: float, n: int) -> float:
    """Return the nearest whole number or multiple of 1/n."""
    integer, part = float(np.rint(weight)), float(np.rint(weight * n)) / n
    return integer if abs(weight - integer) <= abs(weight - part) + 1e-3 else part


def _explain_weights(weights: dict[int, float], group: list[int], rank: int) -> Explanation | None:
    kinds, ranks = set(weights.values()), sorted(weights)
    if weights == {rank: 1.0}:
        return "missing reduction", f"rank {rank} kept its own values"
    if kinds == {1.0}:
        return "wrong group", f"summed over ranks {ranks}, not {group}"
    if len(kinds) != 1 or ranks != sorted(group):
        return ("wrong reduction", f"ranks count {weights}") if weights else None
    times = kinds.pop()
    if times == len(group):
        return "doubled reduction", f"summed over ranks {group} {len(group)} times"
    if abs(times * len(group) - 1) < 1e-9:
        return "scale", "the mean over the group, not the sum"
    return "scale", f"{times:g} times the sum over ranks {group}"


def _other_reduction(
    x: Array, parts: dict[int, Array], group: list[int], dtype: str
) -> Explanation | None:
    values = [parts[r] for r in group if r in parts]
    for name, function in (("max", np.maximum), ("min", np.minimum), ("product", np.multiply)):
        y = Approx(function.reduce(values), dtype)
        if len(values) == len(group) > 1 and np.all(np.abs(x - y.value) <= 2 * y.bound(dtype)):
            return "wrong reduction", f"the {name} over the group, not the sum"
    return None
