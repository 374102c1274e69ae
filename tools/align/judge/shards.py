"""Put a reference of another layout into the shards of the target, so that calls can be compared one by one.

Where ranks of both layouts run the same calls in one order but for collectives, the n-th of a micro-batch belong together. A tensor of the target is then one of the reference's, a block of it, made of blocks of it, or
a term of a sum. The values decide which, so what agrees with the reference shows nothing; what differs in every way is wrong.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from functools import cached_property
from itertools import product, takewhile
from typing import Any

import numpy as np

from telechat_moe.numerics import FLOATS, is_float, round_to
from telechat_moe.tools.align.dump.records import (
    Call,
    Dump,
    Phase,
    RankDump,
    Scalar,
    TensorRecord,
    Value,
    nbytes_of,
)
from telechat_moe.tools.align.judge.collectives import is_exchange, kind_of, meetings
from telechat_moe.tools.align.judge.data_flow import DataFlow, backward_key, digest
from telechat_moe.tools.align.judge.distance import factor_between
from telechat_moe.tools.align.judge.outcome import Finding
from telechat_moe.tools.align.judge.pins import choice_of, chose_otherwise
from telechat_moe.tools.align.judge.propagate import can_follow
from telechat_moe.tools.align.judge.verdict import Verdict
from telechat_moe.tools.align.operators import find
from telechat_moe.tools.align.operators.approx import Array
from telechat_moe.tools.align.thresholds import BEYOND, NEAR, WRONG_SHARE

_ROUNDING = 1e-6  # of a sum of float32
_FEW = 8  # fewer elements may agree by chance
_MOST = 64  # shards of a dimension
_EXTRA = 2  # calls that only one of two sequences makes which belong together; in long ones
_EXTRA_SHARE = 0.05  # this share of all calls, as of an embedding that is split by words
_SETTLED = 2  # tensors that show that what follows a wrong one is wrong, too
_WIDE = 0.01  # of what narrower types may differ by, in float32
_SOME = 16  # calls that show whether two sequences belong together


def in_shards(reference: Dump, target: Dump) -> Dump:
    """Return the reference in the target's shards; calls, ranks and steps without counterpart are the target's own."""
    ranks = dict(target.ranks)
    for step in target.steps if min(target.steps) == 0 else ():  # later ones may have parted
        runs = reference.at(step), target.at(step)
        calls = [[*r.calls.values()] for run in runs for r in run]
        eager = all(any(c.phase is Phase.BACKWARD for c in rank) for rank in calls)
        stages = any(is_exchange(c) and kind_of(c) is None for rank in calls for c in rank)
        if eager and not stages and all(runs) and all(map(can_follow, runs)):
            ranks |= {(step, dump.rank): dump for dump in _step(*runs)}
    return Dump(target.root, ranks)


def _step(reference: Sequence[RankDump], target: Sequence[RankDump]) -> list[RankDump]:
    calls_by_rank = {dump.rank: dump.calls for dump in target}
    groups = {(*m.group,) for m in meetings(target) if len(m.group) > 1}
    otherwise = chose_otherwise(reference, target) > 0
    factor = _micro_batches(reference, target)
    cut: dict[tuple[int, str], Call] = {}
    kinds: dict[Any, list[tuple[int, str]]] = {}
    for dump in target:
        sums = [[calls_by_rank[r] for r in g if r != dump.rank] for g in groups if dump.rank in g]
        chosen, alike, data = False, _names(dump) in map(_names, reference), _before_choices(dump)
        for key, mates in _mates(reference, dump).items():
            target_call, mate_key = dump.calls[key], mates[0].key
            same_calls = [r.calls[mate_key] for r in reference if mate_key in r.calls]
            terms = [[c.get(key) for c in ranks] for ranks in sums]
            call = _cut(target_call, mates, same_calls, terms, factor)
            chosen |= otherwise and choice_of(target_call) is not None
            if call is not None:
                call = _without_counts(target_call, call) if chosen else call
                call = call if alike else _indexed_otherwise(target_call, call, key in data)
                cut[dump.rank, key] = call
                kinds.setdefault(_kind(call, mates[0]), []).append((dump.rank, key))
    kinds.pop(None, None)
    for places in kinds.values():  # does it make shards of shards, or terms, at all?
        agree = [_agree(calls_by_rank[r][k], cut[r, k]) for r, k in places]
        right = sum(outputs_agree for _, outputs_agree in agree)
        if not right or 2 * right < sum(inputs_agree for inputs_agree, _ in agree):
            for r, k in places:
                cut[r, k] = replace(cut[r, k], outputs=calls_by_rank[r][k].outputs)
    return [
        replace(dump, calls={k: cut.get((dump.rank, k), c) for k, c in dump.calls.items()})
        for dump in target
    ]


def _micro_batches(reference: Sequence[RankDump], target: Sequence[RankDump]) -> float:
    """Return the ratio of the micro-batches of a rank, the reference's over the target's: that of the calls of most operators."""
    counts = [_names(run[0]) for run in (reference, target)]
    ratios = Counter(counts[0][name] / n for name, n in counts[1].items() if counts[0][name])
    return ratios.most_common(1)[0][0] if ratios else 1.0


def _without_counts(call: Call, cut: Call) -> Call:
    """Return a cut call with its own integers, unless it takes the reference's numbers: tokens of experts that others chose."""
    golden = dict(cut.tensors())
    distances = [_apart(t.load(), golden[p].load()) for p, t in call.given() if is_float(t.dtype)]
    if max(distances, default=1.0) < NEAR:
        return cut
    integers = {place: t for place, t in call.tensors() if not is_float(t.dtype)}
    return cut.changed(lambda place, value: integers.get(place, value), results=True)


def _before_choices(dump: RankDump) -> set[str]:
    """Return the calls before the first choice of experts, whose integers are data or count from where a shard begins."""
    return {*takewhile(lambda key: choice_of(dump.calls[key]) is None, dump.calls)}


def _indexed_otherwise(call: Call, cut: Call, data: bool) -> Call:
    """Return a cut call with its own integers where they differ: programs with other calls may count from another start.

    Of ``data`` all that no run masks by zero differ by the same number.
    """
    golden, integers = dict(cut.tensors()), dict[str, TensorRecord]()
    for place, t in call.tensors():
        if is_float(t.dtype) or np.array_equal(x := t.load(), y := golden[place].load()):
            continue
        counted = x.dtype.kind != "b" and np.unique((y - x)[(x != 0) & (y != 0)]).size <= 1
        if not data or counted or x.dtype.kind == "b":
            integers[place] = t
    return cut.changed(lambda place, value: integers.get(place, value), results=True)


def _names(dump: RankDump) -> Counter[str]:
    """Return how often a rank calls each operator forward."""
    return Counter(call.name for block in _blocks(dump) for call in block)


def is_own(reference: Call | None, target: Call | None) -> bool:
    """Return whether a call has the target's own tensors, because the reference has no counterpart."""
    if reference is None or target is None:
        return True
    pairs = zip(reference.tensors(), target.tensors(), strict=False)
    return all(a is b for (_, a), (_, b) in pairs)


def without_counterpart(sharded: Sequence[RankDump], target: Sequence[RankDump]) -> int:
    """Return the bytes that calls without counterpart take, if most forward calls of a rank have none; else 0."""
    size = 0
    for cut, dump in zip(sharded, target, strict=True):
        calls = [call for block in _blocks(dump) for call in block if call.inputs]
        alone = [call for call in calls if is_own(cut.calls[call.key], call)]
        if 2 * len(alone) > len(calls):
            size += sum(nbytes_of(t.dtype, t.shape) for call in alone for _, t in call.given())
    return size


def apart(
    sharded: Sequence[RankDump], target: Sequence[RankDump], updates: bool
) -> Iterator[Finding]:
    """Yield what is no shard or term of the reference; gradients only where no ``updates`` name them, else they are compared as a whole."""
    findings = [*_first_apart(sharded, target)]
    yield from findings if findings or updates else _gradients_apart(sharded, target)


def _first_apart(sharded: Sequence[RankDump], target: Sequence[RankDump]) -> Iterator[Finding]:
    """Yield for each rank the first tensor that is no shard of the reference's, nor a term of it, if none after it is.

    Forward, or else backward: where operators and collectives are right, a reduction is missing or there is one too many.
    """
    limit = _limit(sharded, target)
    for cut, dump in zip(sharded, target, strict=True):
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            calls = [c for c in dump.calls.values() if c.phase is phase and not is_exchange(c)]
            off = [item for c in calls for item in _distances(c, cut.calls[c.key])]
            first = next((i for i, (_, _, far) in enumerate(off) if far > limit), len(off))
            beyond = [far > limit for _, _, far in off[first:]]
            if len(beyond) < _SETTLED or not beyond[-1] or np.mean(beyond) <= WRONG_SHARE:
                continue
            call, place, far = off[first]
            values, golden = (dict(c.tensors())[place].load() for c in (call, cut.calls[call.key]))
            family, evidence = factor_between(values.astype(np.float64), golden.astype(np.float64))
            if place.startswith("output") or phase is Phase.BACKWARD:
                family = "missing reduction"
            elif evidence.partition(" ")[0] in map(str, range(2, len(target) + 1)):
                family = "doubled reduction"
            text = (
                f"{place} is neither the reference's nor a shard or a term of it (mean difference {far:.2f}), nor is "
                "what follows; what comes before is"
            )
            verdict = Verdict(call.key, place, "diverged", far / limit, text, elements=values.size)
            order = list(dump.calls).index(call.key)
            yield Finding(dump.step, dump.rank, order, verdict, call, family, evidence)
            break


def _limit(*runs: Sequence[RankDump]) -> float:
    """Return how far tensors may be apart by rounding alone, as a mean difference, in the narrowest type of two runs."""
    kinds = {d for ranks in runs for dump in ranks for d in dump.dtypes if is_float(d)}
    wide = all(FLOATS[d].bits >= FLOATS["float32"].bits for d in kinds)
    return NEAR * (_WIDE if wide else 1.0)


def _gradients_apart(sharded: Sequence[RankDump], target: Sequence[RankDump]) -> Iterator[Finding]:
    """Yield the first gradient that no call takes, as of a weight, that is neither the reference's nor a multiple of it.

    Each operator may be right where a program adds another term, as of an auxiliary loss. Experts count tokens of all ranks until
    gradients are reduced: those that an update takes are the reference's.
    """
    limit = _limit(sharded, target)
    for cut, dump in zip(sharded, target, strict=True):
        flow = DataFlow(dump)
        inputs = {flow.content.get((c.key, p)) for c in dump.calls.values() for p, _ in c.given()}
        backward = [i for k, i in flow.order.items() if dump.calls[k].phase is Phase.BACKWARD]
        for key, order in flow.order.items():
            call = dump.calls[key]
            if key not in flow.late and call.phase is not Phase.BACKWARD:
                continue
            updates = order > max(backward) and not is_exchange(call)
            for _, place, far in _distances(call, cut.calls[key]):
                result = place.startswith("output")
                end = flow.content.get((key, place)) not in inputs if result else updates
                if far <= limit or not end:
                    continue
                tensors = (dict(c.tensors())[place] for c in (call, cut.calls[key]))
                value, right = (t.load().astype(np.float64) for t in tensors)
                scaled = factor_between(value, right)[1]
                if scaled and _may_scale(call, place):
                    continue
                sources = flow.sources_of((key, place))
                lone = [s for s in sources if is_own(cut.calls[s[0]], dump.calls[s[0]])]
                text = f"{place} is no shard or term of the reference's (mean difference {far:.2g})"
                key, place = lone[0] if lone else (key, place)  # a call that only the target makes
                verdict = Verdict(key, place, "diverged", far / limit, text, elements=value.size)
                order, call = flow.order[key], dump.calls[key]
                yield Finding(dump.step, dump.rank, order, verdict, call, "programs differ", scaled)
                return


def _may_scale(call: Call, place: str) -> bool:
    """Return whether a gradient may still be a multiple of the reference's: one that was just made, or that is divided by the ranks."""
    formula = find(call.name)
    divided = formula is not None and formula.name in ("mul", "div")
    return place.startswith("output") or divided


def _distances(call: Call, cut: Call) -> Iterator[tuple[Call, str, float]]:
    """Yield how unlike the reference's the tensors of a call are that can show it."""
    golden = dict(cut.tensors())
    for place, record in call.tensors() if not is_own(cut, call) else ():
        if (
            golden[place] is not record
            and is_float(record.dtype)
            and math.prod(record.shape) >= _FEW
        ):
            yield call, place, _apart(record.load(), golden[place].load())


def _kind(call: Call, mate: Call) -> Any:
    """Return operator, phase and which dimensions are cut, of a call that takes shards; None: it takes none."""
    mate_shapes = {place: t.shape for place, t in mate.tensors()}
    cut = [
        (place, *(n == m for n, m in zip(t.shape, mate_shapes.get(place, ()), strict=False)))
        for place, t in call.tensors()
    ]
    inputs = {place for place, _ in call.given()}
    return (call.name, call.phase, *cut) if any(False in c for c in cut if c[0] in inputs) else None


def _agree(call: Call, cut: Call) -> tuple[bool, bool]:
    """Return whether a call's inputs are the reference's, and whether its outputs are, too."""
    golden = dict(cut.tensors())
    off = {place: _apart(t.load(), golden[place].load()) for place, t in call.tensors()}
    entering = max(off[place] for place, _ in call.given())
    leaving = [off[p] if math.prod(t.shape) >= _FEW else 1.0 for p, t in call.made()]
    alike = entering < NEAR
    return alike, alike and max(leaving, default=1.0) < BEYOND * (entering + _ROUNDING)


def _mates(reference: Sequence[RankDump], dump: RankDump) -> dict[str, list[Call]]:
    """Return for each call of a rank its counterparts on the ranks of the reference that computed the same."""
    mates: dict[str, list[Call]] = {}
    blocks = [_blocks(run) for run in reference]
    for part in _blocks(dump):
        matches = [[_matched(b, part) for b in of_rank] for of_rank in blocks]
        largest = max(share for of_rank in matches for share, _ in of_rank)
        for run, of_rank in zip(reference, matches, strict=True):
            best = max(of_rank, key=lambda m: m[0])
            for match in of_rank:
                computes_same = match is best and match[0] >= largest - NEAR
                for key, mate in match[1].items():
                    if not computes_same and not _other_rows(dump.calls[key], mate):
                        continue
                    mates.setdefault(key, []).append(mate)
                    mate_backward, own_backward = backward_key(mate.key), backward_key(key)
                    if mate_backward in run.calls and own_backward in dump.calls:
                        mates.setdefault(own_backward, []).append(run.calls[mate_backward])
    return mates


def _other_rows(call: Call, mate: Call) -> bool:
    """Return whether a call takes another number of rows, as of tokens of several micro-batches that chose an expert."""
    shapes = {place: t.shape for place, t in mate.given()}
    return any(
        place in shapes and t.shape[:1] != shapes[place][:1] and t.shape[1:] == shapes[place][1:]
        for place, t in call.given()
    )


class _Block(list[Call]):
    """Calls that belong together."""

    @cached_property
    def taken_once(self) -> dict[tuple[str, str, bytes], int]:
        """The call that takes a tensor, rounded to bfloat16, by its operator, place and content, where it is the only one."""
        takers: dict[tuple[str, str, bytes], list[int]] = {}
        for i, call in enumerate(self):
            for place, record in call.given():
                if is_float(record.dtype) and record.read and math.prod(record.shape) >= _MOST:
                    mark = digest(round_to(record.load().astype(np.float32), "bfloat16"))
                    takers.setdefault((call.name, place, mark), []).append(i)
        return {mark: indices[0] for mark, indices in takers.items() if len(indices) == 1}


def _blocks(dump: RankDump) -> list[_Block]:
    """Return the forward calls between backward calls: those of a micro-batch, or what follows the last one."""
    blocks = [_Block()]
    for call in dump.calls.values():
        if call.phase is Phase.BACKWARD:
            blocks += [_Block()] if blocks[-1] else []
        elif call.phase is Phase.FORWARD and call.kind == "api" and not is_exchange(call):
            blocks[-1].append(call)
    return blocks


def _matched(reference: _Block, target: _Block) -> tuple[float, dict[str, Call]]:
    """Return how far two sequences of calls agree, from 0 to 1, and the counterparts of the target's calls."""
    names = [[c.name for c in calls] for calls in (target, reference)]
    pairs = {c.key: mate for c, mate in zip(target, reference, strict=False)}
    if names[0] != names[1]:  # other layers, or a few calls that only one of them makes
        blocks = SequenceMatcher(None, *names, autojunk=False).get_matching_blocks()
        pairs = {target[b.a + i].key: reference[b.b + i] for b in blocks for i in range(b.size)}
        extra = max(_EXTRA, _EXTRA_SHARE * (len(target) + len(reference)))
        if len(target) + len(reference) - 2 * len(pairs) > extra:  # as of other experts
            pairs = _around_equals(reference, target)
    alike, count = 0.0, 0
    both = [c for c in target if c.key in pairs]
    for call in both[:: max(1, len(both) // _SOME)]:
        mate = dict(pairs[call.key].tensors())
        for place, record in call.tensors():
            count += 1
            comparable = place in mate and record.read and mate[place].read
            alike += 1 - _unlike(record.load(), mate[place].load()) if comparable else 0.0
    return alike / max(1, count), pairs


def _around_equals(reference: _Block, target: _Block) -> dict[str, Call]:
    """Return the counterparts of calls that take a tensor, such as a weight, that one call takes in each run, and of those around them."""
    mates = reference.taken_once
    anchors = sorted((i, mates[mark]) for mark, i in target.taken_once.items() if mark in mates)
    pairs: dict[int, int] = {}
    partners = set[int]()
    for step in (0, 1, -1):
        for i, j in anchors:
            a, b = i + step, j + step
            while 0 <= a < len(target) and 0 <= b < len(reference):
                if a in pairs or b in partners or target[a].name != reference[b].name:
                    break
                pairs[a] = b
                partners.add(b)
                a, b = (a + step, b + step) if step else (-1, -1)
    return {target[a].key: reference[b] for a, b in pairs.items()}


def _cut(
    call: Call,
    mates: list[Call],
    same_calls: list[Call],
    sums: list[list[Call | None]],
    factor: float,
) -> Call | None:
    """Return a call with the reference's tensors; None: some cannot be put together. The rest may have an expert's weight.

    Losses of as many micro-batches more, and their gradients, may be smaller by that ``factor``.
    """
    mate_tensors, others = [dict(m.tensors()) for m in mates], [[c for c in s if c] for s in sums]
    records: dict[str, TensorRecord] = {}
    numbers: dict[str, Value] = {}
    for place, record in call.tensors():
        mate_records = [t for m in mate_tensors if (t := m.get(place)) is not None and t.read]
        added = [[dict(c.tensors()).get(place, record) for c in calls] for calls in others]
        terms = [[t.load() for t in ts if t.read and t.shape == record.shape] for ts in added]
        once = {x.tobytes(): x for x in (t.load() for t in mate_records)}  # of copies one
        x = record.load() if mate_records and record.read else None
        values = None if x is None else _golden(x, [*once.values()], terms, factor)
        if x is None or values is None:
            return None
        if x.dtype.kind == "f" and _apart(x, values) > NEAR:
            uncut = [t.load() for c in same_calls for p, t in c.tensors() if p == place and t.read]
            options = [v for v in (values, _golden(x, uncut, [], 1)) if v is not None]
            values = _most_alike(x, [*options, *(factor * v for v in options if factor != 1)])
        dtype = mate_records[0].dtype
        records[place] = replace(record, dtype=dtype, read=lambda values=values: values)
    mates[0].changed(lambda place, value: numbers.setdefault(place, value))

    def of_reference(place: str, value: Value) -> Value:
        number = numbers.get(place)
        if isinstance(value, Scalar) and isinstance(number, Scalar) and type(number.value) is float:
            return number
        return records.get(place, value)

    return call.changed(of_reference, results=True)


def _golden(x: Array, mates: list[Array], terms: list[list[Array]], factor: float) -> Array | None:
    """Return what a tensor of the target should be by the reference's, in the way in which it is most like; None: in no way.

    The other ranks of each group, whose tensors ``terms`` are, may have to add it up.
    """
    options: list[Array] = []
    sums = [[np.zeros((), x.dtype)], *(t for t in terms if t and x.dtype.kind in "fi")]
    for others in sums:
        best = _most_alike(x, options)
        if best is not None and _apart(x, best) < NEAR:
            return best
        other_terms = np.sum(others, 0)
        assembled, free = np.zeros(x.shape, mates[0].dtype), np.ones(x.shape, np.bool_)
        left = sorted(mates, key=lambda mate: _unlike(x + other_terms, mate))
        for allowed in (None, free):  # first the best places, in which there may be copies
            for mate in [*left] if free.any() else ():
                part = _part(x + other_terms, mate, allowed)
                if part is not None and part[1].shape == x.shape:
                    options.append(part[1] - other_terms if other_terms.any() else part[1])
                elif part is not None and free[part[2]].all():
                    free[part[2]], assembled[part[2]] = False, part[1]
                    left = [m for m in left if m is not mate]
        if not free.any():
            options.append(assembled - other_terms if other_terms.any() else assembled)
    of_rows = [m for m in mates if m.ndim == x.ndim > 1 and m.shape[1:] == x.shape[1:]]
    if of_rows and not options:  # tokens of experts
        factors = {1.0, factor} if x.dtype.kind == "f" else {1}
        rows = [_rows(x, [f * m for m in of_rows]) for f in factors]
        options.append(min(rows, key=lambda y: _apart(x, y)))
    full_mates = [m for m in mates if m.shape == x.shape]
    options += [np.sum(full_mates, 0)] if x.dtype.kind == "f" and full_mates[1:] else []
    return _most_alike(x, options)


def _rows(x: Array, mates: list[Array]) -> Array:
    """Return what a tensor should be by the rows of others, each by the one that is most like it, in any order."""
    rows, pool = (y.reshape(len(y), -1).astype(np.float64) for y in (x, np.concatenate(mates)))
    direction = np.random.default_rng(0).standard_normal(rows.shape[1])
    order = np.argsort(pool @ direction)
    after = np.searchsorted((pool @ direction)[order], rows @ direction)
    nearest = [order[np.clip(after + step, 0, len(order) - 1)] for step in (-1, 0)]
    off = [np.abs(pool[i] - rows).sum(1) for i in nearest]
    chosen = np.where(off[0] <= off[1], nearest[0], nearest[1])
    return np.concatenate(mates)[chosen].reshape(x.shape)


def _part(x: Array, y: Array, free: Array | None = None) -> tuple[Array, Array, Any] | None:
    """Return the parts of two tensors that one of them has of the other, and their place in the first; None: none.

    It may be where the first is ``free``, if that is the larger one.
    """
    if x.ndim != y.ndim or x.shape == y.shape:
        return (x, y, ...) if x.shape == y.shape else None
    larger = y.size > x.size
    larger_tensor, part = (y, x) if larger else (x, y)
    places = _places(larger_tensor.shape, part.shape)
    able = (a for a in places if larger or free is None or free[a].all())
    block = _most_alike(part, able, larger_tensor.__getitem__)
    return None if block is None else (x, y[block], ...) if larger else (x[block], y, block)


def _unlike(x: Array, y: Array) -> float:
    """Return how unlike the parts are that two tensors have of each other."""
    part = _part(x, y)
    return 1.0 if part is None else _apart(*part[:2])


def _places(shape: tuple[int, ...], part: tuple[int, ...]) -> Iterator[Any]:
    """Yield where a shard may be in a tensor: a block, or one of each half of a dimension (gate and up, zigzag)."""
    choices: list[list[Array]] = []
    for n, size in zip(shape, part, strict=True):
        count = n // size if size and n % size == 0 and n <= _MOST * size else 0
        places = [*np.arange(n).reshape(count, -1)] if count else []
        if count > 1 and size % 2 == 0:
            low, high = np.arange(n).reshape(2, count, -1)
            halves = [*zip(low, high, strict=True), *zip(low, high[::-1], strict=True)]
            places += map(np.concatenate, halves)
        choices.append(places)
    yield from (np.ix_(*positions) for positions in product(*choices))


def _most_alike(x: Array, options: Iterable[Any], of: Callable[[Any], Array] = np.asarray) -> Any:
    """Return the option whose array is most like another, or the first that differs by rounding; None: there is none."""
    best, smallest = None, math.inf
    for option in options:
        off = _apart(x, of(option))
        best, smallest = (option, off) if off < smallest else (best, smallest)
        if smallest <= (NEAR if x.dtype.kind == "f" else 0.0):
            break
    return best


def _apart(x: Array, y: Array) -> float:
    """Return how unlike two arrays are: the mean of their elements' differences relative to their sizes, 0 to 1; zeros of both do not count."""
    some = (x != 0) | (y != 0)
    if not some.any():
        return 0.0
    a, b = (v[some].astype(np.float64) for v in np.broadcast_arrays(x, y))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        off = np.abs(a - b) / (np.abs(a) + np.abs(b))
    return float(np.where(a == b, 0.0, np.where(off <= 1, off, 1.0)).mean())
