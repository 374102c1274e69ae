"""Put a reference of another layout into the shards of the target, so that calls can be compared one by one.

Where ranks of both layouts run the same calls in one order but for collectives, the n-th of a micro-batch belong together. A tensor of the target is then one of the reference's, a block of it, made of blocks of it, or
a term of a sum. The values decide which, so what agrees with the reference shows nothing; what differs in every way is wrong.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from telechat_moe.numerics import is_float
from telechat_moe.tools.align.dump.records import Call, Dump, Phase, RankDump, TensorRecord
from telechat_moe.tools.align.judge.collectives import is_exchange, kind_of, meetings
from telechat_moe.tools.align.judge.data_flow import backward_key
from telechat_moe.tools.align.judge.other_run import BEYOND
from telechat_moe.tools.align.judge.pins import choice_of, chose_otherwise
from telechat_moe.tools.align.judge.propagate import can_follow
from telechat_moe.tools.align.operators.approx import Array

_NEAR = 0.1
"""How far apart (see :func:`_apart`) tensors are that differ by rounding, and ranks that have one micro-batch."""

_ROUNDING = 1e-6  # of a sum of float32
_FEW = 8  # fewer elements may agree by chance
_MOST = 64  # shards of a dimension
_SOME = 16  # calls that show whether two sequences belong together


def in_shards(reference: Dump, target: Dump) -> Dump:
    """Return the reference in the target's shards; calls, ranks and steps without counterpart are the target's own."""
    ranks = dict(target.ranks)
    for step in target.steps if min(target.steps) == 0 else ():  # later ones may have parted
        runs = reference.at(step), target.at(step)
        calls = [[*r.calls.values()] for run in runs for r in run]
        eager = all(any(c.phase is Phase.BACKWARD for c in own) for own in calls)
        stages = any(is_exchange(c) and kind_of(c) is None for own in calls for c in own)
        if eager and not stages and all(runs) and all(map(can_follow, runs)):
            ranks |= {(step, dump.rank): dump for dump in _step(*runs)}
    return Dump(target.root, ranks)


def _step(reference: Sequence[RankDump], target: Sequence[RankDump]) -> list[RankDump]:
    known = {dump.rank: dump.calls for dump in target}
    groups = {(*m.group,) for m in meetings(target) if len(m.group) > 1}
    otherwise = chose_otherwise(reference, target) > 0
    cut: dict[tuple[int, str], Call] = {}
    kinds: dict[Any, list[tuple[int, str]]] = {}
    for dump in target:
        sums = [[known[r] for r in g if r != dump.rank] for g in groups if dump.rank in g]
        chosen = False
        for key, mates in _mates(reference, dump).items():
            own, same = dump.calls[key], mates[0].key
            rest = [r.calls[same] for r in reference if same in r.calls]
            call = _cut(own, mates, rest, [[c.get(key) for c in ranks] for ranks in sums])
            chosen |= otherwise and choice_of(own) is not None
            if call is not None:
                cut[dump.rank, key] = call = _without_counts(own, call) if chosen else call
                kinds.setdefault(_kind(call, mates[0]), []).append((dump.rank, key))
    kinds.pop(None, None)
    for places in kinds.values():  # does it make shards of shards, or terms, at all?
        agree = [_agree(known[r][k], cut[r, k]) for r, k in places]
        right = sum(made for _, made in agree)
        if not right or 2 * right < sum(given for given, _ in agree):
            cut |= {(r, k): replace(cut[r, k], outputs=known[r][k].outputs) for r, k in places}
    return [
        replace(dump, calls={k: cut.get((dump.rank, k), c) for k, c in dump.calls.items()})
        for dump in target
    ]


def _without_counts(call: Call, cut: Call) -> Call:
    """Return a cut call with its own integers, unless it takes the reference's numbers: tokens of experts that others chose."""
    golden = dict(cut.tensors())
    given = [_apart(t.load(), golden[p].load()) for p, t in call.given() if is_float(t.dtype)]
    if max(given, default=1.0) < _NEAR:
        return cut
    own = {place: t for place, t in call.tensors() if not is_float(t.dtype)}
    return cut.changed(lambda place, value: own.get(place, value), results=True)


def is_own(reference: Call | None, target: Call | None) -> bool:
    """Return whether a call has the target's own tensors, because the reference has no counterpart."""
    if reference is None or target is None:
        return True
    pairs = zip(reference.tensors(), target.tensors(), strict=False)
    return all(one is other for (_, one), (_, other) in pairs)


def _kind(call: Call, mate: Call) -> Any:
    """Return operator, phase and which dimensions are cut, of a call that takes shards; None: it takes none."""
    theirs = {place: t.shape for place, t in mate.tensors()}
    cut = [
        (place, *(n == m for n, m in zip(t.shape, theirs.get(place, ()), strict=False)))
        for place, t in call.tensors()
    ]
    given = {place for place, _ in call.given()}
    return (call.name, call.phase, *cut) if any(False in c for c in cut if c[0] in given) else None


def _agree(call: Call, cut: Call) -> tuple[bool, bool]:
    """Return whether a call's inputs are the reference's, and whether its outputs are, too."""
    golden = dict(cut.tensors())
    off = {place: _apart(t.load(), golden[place].load()) for place, t in call.tensors()}
    given = max(off[place] for place, _ in call.given())
    made = [off[place] if math.prod(t.shape) >= _FEW else 1.0 for place, t in call.made()]
    return given < _NEAR, given < _NEAR and max(made, default=1.0) < BEYOND * (given + _ROUNDING)


def _mates(reference: Sequence[RankDump], dump: RankDump) -> dict[str, list[Call]]:
    """Return for each call of a rank its counterparts on the ranks of the reference that computed the same."""
    found: dict[str, list[Call]] = {}
    for block in _blocks(dump):
        best = [
            max((_matched(b, block) for b in _blocks(r)), key=lambda m: m[0]) for r in reference
        ]
        most = max(share for share, _ in best)
        for run, (share, pairs) in zip(reference, best, strict=True):
            for key, mate in pairs.items() if share >= most - _NEAR else ():
                found.setdefault(key, []).append(mate)
                back, own = backward_key(mate.key), backward_key(key)
                if back in run.calls and own in dump.calls:
                    found.setdefault(own, []).append(run.calls[back])
    return found


def _blocks(dump: RankDump) -> list[list[Call]]:
    """Return the forward calls between backward calls: those of a micro-batch, or what follows the last one."""
    found: list[list[Call]] = [[]]
    for call in dump.calls.values():
        if call.phase is Phase.BACKWARD:
            found += [[]] if found[-1] else []
        elif call.phase is Phase.FORWARD and call.kind == "api" and not is_exchange(call):
            found[-1].append(call)
    return found


def _matched(reference: list[Call], target: list[Call]) -> tuple[float, dict[str, Call]]:
    """Return how far two sequences of calls agree, from 0 to 1, and the counterparts of the target's calls."""
    if [c.name for c in reference] != [c.name for c in target]:
        return 0.0, {}  # other layers, perhaps
    pairs = {c.key: mate for c, mate in zip(target, reference, strict=True)}
    alike, count = 0.0, 0
    for call in target[:: max(1, len(target) // _SOME)]:
        mate = dict(pairs[call.key].tensors())
        for place, record in call.tensors():
            count += 1
            known = place in mate and record.read and mate[place].read
            alike += 1 - _unlike(record.load(), mate[place].load()) if known else 0.0
    return alike / max(1, count), pairs


def _cut(
    call: Call, mates: list[Call], rest: list[Call], sums: list[list[Call | None]]
) -> Call | None:
    """Return a call with the reference's tensors; None: some cannot be put together. The rest may have an expert's weight."""
    theirs, others = [dict(m.tensors()) for m in mates], [[c for c in s if c] for s in sums]
    found: dict[str, TensorRecord] = {}
    for place, record in call.tensors():
        own = [t for tensors in theirs if (t := tensors.get(place)) is not None and t.read]
        known = [[dict(c.tensors()).get(place, record) for c in calls] for calls in others]
        terms = [[t.load() for t in ts if t.read and t.shape == record.shape] for ts in known]
        once = {x.tobytes(): x for x in (t.load() for t in own)}  # of copies one
        x = record.load() if own and record.read else None
        values = None if x is None else _golden(x, [*once.values()], terms)
        if x is None or values is None:
            return None
        if x.dtype.kind == "f" and _apart(x, values) > _NEAR:
            more = [t.load() for c in rest for p, t in c.tensors() if p == place and t.read]
            options = [v for v in (values, _golden(x, more, [])) if v is not None]
            values = _most_alike(x, options)
        found[place] = replace(record, dtype=own[0].dtype, read=lambda values=values: values)
    return call.changed(lambda place, value: found.get(place, value), results=True)


def _golden(x: Array, mates: list[Array], terms: list[list[Array]]) -> Array | None:
    """Return what a tensor of the target should be by the reference's, in the way in which it is most like; None: in no way.

    Args:
        terms: The tensors of the other ranks of each group that may have to add it up.
    """
    options: list[Array] = []
    sums = [[np.zeros((), x.dtype)], *(t for t in terms if t and x.dtype.kind in "fi")]
    for others in sums:
        best = _most_alike(x, options)
        if best is not None and _apart(x, best) < _NEAR:
            return best
        rest = np.sum(others, 0)
        made, free = np.zeros(x.shape, mates[0].dtype), np.ones(x.shape, np.bool_)
        left = sorted(mates, key=lambda mate: _unlike(x + rest, mate))
        for allowed in (None, free):  # first the best places, in which there may be copies
            for mate in [*left] if free.any() else ():
                part = _part(x + rest, mate, allowed)
                if part is not None and part[1].shape == x.shape:
                    options.append(part[1] - rest if rest.any() else part[1])
                elif part is not None and free[part[2]].all():
                    free[part[2]], made[part[2]] = False, part[1]
                    left = [m for m in left if m is not mate]
        options += [] if free.any() else [made - rest if rest.any() else made]
    whole = [m for m in mates if m.shape == x.shape]
    options += [np.sum(whole, 0)] if x.dtype.kind == "f" and whole[1:] else []
    return _most_alike(x, options)


def _part(x: Array, y: Array, free: Array | None = None) -> tuple[Array, Array, Any] | None:
    """Return the parts of two tensors that one of them has of the other, and their place in the first; None: none.

    Args:
        free: Where the part may be in the first, if that is the larger one.
    """
    if x.ndim != y.ndim or x.shape == y.shape:
        return (x, y, ...) if x.shape == y.shape else None
    larger = y.size > x.size
    whole, part = (y, x) if larger else (x, y)
    able = (a for a in _places(whole.shape, part.shape) if larger or free is None or free[a].all())
    at = _most_alike(part, able, whole.__getitem__)
    return None if at is None else (x, y[at], ...) if larger else (x[at], y, at)


def _unlike(x: Array, y: Array) -> float:
    """Return how unlike the parts are that two tensors have of each other."""
    part = _part(x, y)
    return 1.0 if part is None else _apart(*part[:2])


def _places(whole: tuple[int, ...], part: tuple[int, ...]) -> Iterator[Any]:
    """Yield where a shard may be in a tensor: a block, or one of each half of a dimension (gate and up, zigzag)."""
    choices: list[list[Array]] = []
    for n, size in zip(whole, part, strict=True):
        count = n // size if size and n % size == 0 and n <= _MOST * size else 0
        places = [*np.arange(n).reshape(count, -1)] if count else []
        if count > 1 and size % 2 == 0:
            one, other = np.arange(n).reshape(2, count, -1)
            halves = [*zip(one, other, strict=True), *zip(one, other[::-1], strict=True)]
            places += map(np.concatenate, halves)
        choices.append(places)
    yield from (np.ix_(*at) for at in product(*choices))


def _most_alike(x: Array, options: Iterable[Any], of: Callable[[Any], Array] = np.asarray) -> Any:
    """Return the option whose array is most like another, or the first that differs by rounding; None: there is none."""
    best, least = None, math.inf
    for option in options:
        off = _apart(x, of(option))
        best, least = (option, off) if off < least else (best, least)
        if least <= (_NEAR if x.dtype.kind == "f" else 0.0):
            break
    return best


def _apart(x: Array, y: Array) -> float:
    """Return how unlike two arrays are: the mean of their elements' differences relative to their sizes, 0 to 1."""
    if not x.size:
        return 0.0
    a, b = (v.astype(np.float64) for v in (x, y))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        off = np.abs(a - b) / (np.abs(a) + np.abs(b))
    return float(np.where(a == b, 0.0, np.where(off <= 1, off, 1.0)).mean())
