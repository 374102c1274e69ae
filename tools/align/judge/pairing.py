"""Pair the calls of two runs by name, order and content."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any, cast

import numpy as np

from telechat_moe.numerics import FLOATS, is_float
from telechat_moe.tools.align.dump.records import Call, Dump, Phase, RankDump, Scalar, TensorRecord
from telechat_moe.tools.align.judge.collectives import is_exchange
from telechat_moe.tools.align.judge.data_flow import is_weight
from telechat_moe.tools.align.judge.distance import distance
from telechat_moe.tools.align.judge.pins import narrowest
from telechat_moe.tools.align.judge.points import weight_of
from telechat_moe.tools.align.operators import find

STEP = "|"
"""Separates the number of a step from the key of a call, where the steps of a rank are joined."""

_EXTRA = "+"  # appended to the key of a call that the reference does not make


def split(key: str, step: int) -> tuple[int, str]:
    """Return the step and the own key of a call; ``step`` where its key names none."""
    number, mark, own_key = key.partition(STEP)
    return (int(number), own_key) if mark else (step, key)


def differ_in_layout(reference: Dump, target: Dump) -> bool:
    """Return whether two runs have different layouts or frameworks, or other operators or inner types in a graph."""
    steps = [step for step in target.steps if step in reference.steps]
    if not steps:
        return False
    a, b = reference.at(steps[0]), target.at(steps[0])
    graphs = all(any(key.startswith("Primitive.") for key in ranks[0].calls) for ranks in (a, b))
    if graphs and narrowest_of(a) != narrowest_of(b):
        return True
    others = named_differently(a, b)
    alike = not graphs and frameworks(a) == frameworks(b) and not others
    if (graphs and others) or not (alike or _same_calls(a[0], b[0])):
        return True
    exchanges = {sum(map(is_exchange, ranks[0].calls.values())) for ranks in (a, b)}
    same_ranks = {r.rank for r in a} == {r.rank for r in b}
    if _cut_differently(a[0], b[0]) and (len(a) > 1 or not same_ranks):
        return True
    if len(exchanges) > 1 and not same_ranks:
        return True
    reference_layouts, target_layouts = _layouts(a), _layouts(b)
    return reference_layouts != target_layouts and bool(reference_layouts or target_layouts)


def named_differently(a: Sequence[RankDump], b: Sequence[RankDump]) -> bool:
    """Return whether no weight has a name in both runs; where one has no names, whether the frameworks differ."""
    names = [{weight_of(c) for r in ranks for c in r.calls.values()} - {None} for ranks in (a, b)]
    return not names[0] & names[1] if all(names) else frameworks(a) != frameworks(b)


def frameworks(ranks: Sequence[RankDump]) -> set[str]:
    """Return the frameworks of a run."""
    return {r.framework for r in ranks}


def _same_calls(a: RankDump, b: RankDump) -> bool:
    """Return whether most calls of two runs have equal keys, as of one script on torch and on MSAdapter."""
    keys = [{k for k, c in run.calls.items() if c.kind != "parameters_grad"} for run in (a, b)]
    return 2 * len(keys[0] & keys[1]) > max(map(len, keys))


def _cut_differently(a: RankDump, b: RankDump) -> bool:
    """Return whether weights of a rank have other shapes, in calls of equal keys, as of shards: msprobe writes no layout of torch."""
    for key, call in a.calls.items():
        other = b.calls.get(key)
        if other is not None and call.phase is Phase.FORWARD and call.kind == "api":
            shapes = dict(other.given())
            for place, tensor in call.given():
                if (
                    place in shapes
                    and is_weight(call, place)
                    and shapes[place].shape != tensor.shape
                ):
                    return True
    return False


def _layouts(ranks: Sequence[RankDump]) -> set[Any]:
    layouts = (t.layout for call in ranks[0].calls.values() for _, t in call.tensors())
    return {(x.mesh, x.axes) for x in layouts if x is not None}


def narrowest_of(ranks: Sequence[RankDump]) -> str:
    """Return the narrowest type that a run computes in, in tensors or within fused operators."""
    inner = (c.kwargs.get("bf16") for rank in ranks for c in rank.calls.values())
    kinds = [narrowest(rank) for rank in ranks]
    kinds += ["bfloat16"] if any(isinstance(v, Scalar) and v.value is True for v in inner) else []
    return min(kinds, key=lambda d: FLOATS[d].bits)


def aligned(reference: RankDump, target: RankDump) -> tuple[RankDump, dict[str, str]]:
    """Return the target with the reference's names and numbers of calls, and the original key of each call.

    An additional or missing call shifts the numbers of all later calls of its name; the order of the names shows which
    calls belong together. Where the runs share no names (other scopes, another front end), operators serve as names.
    """
    target_calls, reference_calls = _forwards(target), _forwards(reference)
    if [c.key for c in target_calls] == [c.key for c in reference_calls]:
        return target, {}
    new = {c.key: f"{_head(c.key)}{_EXTRA}.forward" for c in target_calls}
    pairs = paired(target_calls, reference_calls)
    new |= {target_calls[a].key: reference_calls[b].key for a, b in pairs}
    new_heads = {_head(key): _head(name) for key, name in new.items()}
    calls: dict[str, Call] = {}
    names: dict[str, str] = {}
    for key, call in target.calls.items():
        head = _head(key)
        name = new_heads.get(head, head) + key.removeprefix(head)
        alike = reference.calls.get(name)
        operator = call.name if alike is None or find(alike.name) is None else alike.name
        calls[name], names[name] = replace(call, key=name, name=operator), key
    return replace(target, calls=calls), names


def without_recomputation(dump: RankDump) -> RankDump:
    """Return a run without forward calls that have no backward call and repeat, to the last bit, one before a backward call."""
    before: set[bytes] = set()
    block: set[bytes] = set()
    repeats = set[str]()
    for key, call in dump.calls.items():
        if call.phase is Phase.BACKWARD:
            before, block = before | block, set()
        elif call.kind == "api" and not is_exchange(call):
            content = _content(call)
            lone = f"{_head(key)}.backward" not in dump.calls
            if lone and before and (not call.outputs or content in before):
                repeats.add(key)
            block.add(content)
    calls = {key: call for key, call in dump.calls.items() if key not in repeats}
    return replace(dump, calls=calls) if repeats else dump


def paired(target: Sequence[Call], reference: Sequence[Call]) -> Iterator[tuple[int, int]]:
    """Yield pairs of calls that belong together: by the order of names, else by name and content in any order."""
    names = [[call.name for call in calls] for calls in (target, reference)]
    if set(names[0]).isdisjoint(names[1]):
        names = [[_operator(call) for call in calls] for calls in (target, reference)]
    left, right = (set(range(len(calls))) for calls in (target, reference))
    matcher = SequenceMatcher(None, names[0], names[1], autojunk=False)
    blocks = matcher.get_matching_blocks()
    pairs = {a + i: b + i for a, b, size in blocks for i in range(size)}
    for before, after in pairwise(blocks):
        first, second = before.a + before.size, before.b + before.size
        gap = (after.b - second) - (after.a - first)
        if gap and (after.a == first or after.b == second):
            _moved(pairs, first - 1, gap, target, reference, names)
    yield from pairs.items()
    left -= pairs.keys()
    right -= set(pairs.values())
    waiting: dict[bytes, list[int]] = {}
    for b in sorted(right):
        waiting.setdefault(_content(reference[b]), []).append(b)
    for a in sorted(left):
        waiting_calls = waiting.get(_content(target[a]))
        if waiting_calls:
            yield a, waiting_calls.pop(0)


def _moved(
    pairs: dict[int, int],
    last: int,
    gap: int,
    target: Sequence[Call],
    reference: Sequence[Call],
    names: list[list[str]],
) -> None:
    """Move a gap of so many calls (negative: of the target's) between equal names to where what the calls take fits best.

    The names of updates repeat, so they do not show which weight's update one of the runs leaves out.
    """
    if gap < 0:
        inverse = {b: a for a, b in pairs.items()}
        last_pair = pairs[last]
        _moved(inverse, last_pair, -gap, reference, target, names[::-1])
        pairs.clear()
        pairs.update((a, b) for b, a in inverse.items())
        return
    moved: list[tuple[int, int]] = []
    best, change, smallest = 0, 0.0, 0.0
    while last in pairs and pairs[last] + gap < len(reference):
        b = pairs[last]
        if names[0][last] != names[1][b + gap]:
            break
        moved.append((last, b + gap))
        change += _mismatch(target[last], reference[b + gap])
        change -= _mismatch(target[last], reference[b])
        if change < smallest:
            best, smallest = len(moved), change
        last -= 1
    pairs.update(moved[:best])


def _mismatch(call: Call, other: Call) -> float:
    """Return how far what two calls take is apart, from 0 to 1."""
    total, tensors, others = 0.0, call.given(), dict(other.given())
    for place, tensor in tensors:
        mate = others.get(place)
        if mate is None or mate.shape != tensor.shape:
            total += 1.0
        elif is_float(tensor.dtype) and (far := distance(mate, tensor)) is not None:
            total += min(1.0, far.whole)
    return total / max(1, len(tensors))


def without_repeats(dump: RankDump, other: RankDump) -> RankDump:
    """Return a run without recomputation: calls that the other run lacks and that equal another call to the last bit.

    A backward call of such a call is assigned to the other.
    """
    forwards = _forwards(dump)
    only = {c.key for c in forwards if c.key not in other.calls and not is_exchange(c)}
    kinds = {_operator(dump.calls[key]) for key in only}
    first: dict[bytes, str] = {}
    for call in forwards:
        if call.key not in only and _operator(call) in kinds:
            first.setdefault(_content(call), call.key)
    repeats = {key: first[mark] for key in only if (mark := _content(dump.calls[key])) in first}
    if not repeats:
        return dump
    calls = {key: call for key, call in dump.calls.items() if key not in repeats}
    for key, first_key in repeats.items():
        backward, first_backward = (f"{_head(k)}.backward" for k in (key, first_key))
        if backward in calls and first_backward in calls:
            return dump
        if backward in calls:  # at its position in the order
            calls[first_key] = replace(dump.calls[key], key=first_key)
            moved = {backward: (first_backward, replace(calls[backward], key=first_backward))}
            calls = dict(moved.get(k, (k, c)) for k, c in calls.items())
    return replace(dump, calls=calls)


def _content(call: Call) -> bytes:
    """Return a digest of an operator's inputs and outputs; a unique one where values are not known."""
    unknown = any(t.read is None for _, t in call.tensors())
    return call.key.encode() if unknown else content_of(_operator(call), call)


def content_of(*values: Any) -> bytes:
    """Return a digest of arguments and whole calls, with the contents of their tensors."""
    mark: Any = hashlib.blake2b(digest_size=16)

    def add(value: Any) -> None:
        if isinstance(value, TensorRecord):
            mark.update(f"{value.dtype}{value.shape}".encode())
            if value.read is not None:
                mark.update(np.ascontiguousarray(value.load()))
        elif isinstance(value, Call):
            add([value.inputs, [*value.kwargs.items()], value.outputs])
        elif isinstance(value, list | tuple):
            for item in cast("Iterable[Any]", value):
                add(item)
        else:
            mark.update(repr(value).encode())

    add(values)
    return mark.digest()


def _head(key: str) -> str:
    return key.removesuffix(".forward").removesuffix(".backward")


def _operator(call: Call) -> str:
    """Return an operator's name without the scope or front end that it begins with."""
    formula = find(call.name)
    return formula.name if formula is not None else call.name.rsplit(".", 1)[-1]


def _forwards(dump: RankDump) -> list[Call]:
    """Return the operators' calls except backward ones, in order."""
    calls = dump.calls.values()
    return [c for c in calls if c.kind == "api" and c.phase is not Phase.BACKWARD]
