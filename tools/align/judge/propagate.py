"""Follow a program: carry values and the roundings of correct runs along the data flow of all ranks of a step.

Each operator is recomputed as in ``replay``, but from what the calls before it make here, so that the program of one
run can be followed on the weights of another run and with the choices that it made (``pins.py``). What comes out is
what that run must have computed, whatever its layout, fused operators or order of sums, and however many tokens were
routed otherwise because their scores nearly tie.

Standard deviations of rounding errors go with the values: from outputs to the inputs that equal them, and through each
operator's own derivatives (to first order, errors of different elements independent). The other run rounds as often,
but at other points, so the squared difference of two runs is twice the sum of squares. Weights and data are exact.
"""

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from telechat_moe.narrowing import is_list
from telechat_moe.numerics import FLOATS, is_float, round_to
from telechat_moe.tools.align.dump.records import Call, Phase, RankDump, Scalar, TensorRecord, Value
from telechat_moe.tools.align.judge.collectives import bind, is_exchange, is_send, meetings
from telechat_moe.tools.align.judge.data_flow import DataFlow, Place, content_of, significant
from telechat_moe.tools.align.judge.pins import ReferenceChoices, TopChoice, TrackedValue, choice_of
from telechat_moe.tools.align.judge.points import factor_of
from telechat_moe.tools.align.judge.replay import arguments_of, exactly
from telechat_moe.tools.align.operators import find
from telechat_moe.tools.align.operators.approx import Approx, Array, gradients
from telechat_moe.tools.align.operators.registry import UNFIT
from telechat_moe.tools.align.thresholds import SIGMAS

MOST = 1 << 26
"""The most elements in a step that is followed: values and deviations need twelve bytes each."""

RowCounts = tuple[int, ...]

_COUNTS = 4096  # the most integers that a program may use as sizes
_FEW = 8  # different values of a constant
_BITS = 4  # significant bits of each


class Propagation:
    """The values and deviations of a step's tensors, whose dump must have values.

    Args:
        ranks: All ranks of a step.
        pins: What another run determines; None: nothing, all values are about those of the dump. Else fused
            operators round to bfloat16 within themselves where the other run's do.
        before: The step before.
    """

    def __init__(
        self,
        ranks: Sequence[RankDump],
        pins: ReferenceChoices | None = None,
        before: "Propagation | None" = None,
    ) -> None:
        self.pins = pins
        self.made: dict[tuple[int, Place], TrackedValue] = {}
        """Tensors by rank, call and place; one is missing where its call, or a call before it, cannot be recomputed."""
        self._flows = {dump.rank: DataFlow(dump) for dump in ranks}
        self._values_of_ranks: dict[int, dict[Any, TrackedValue | None]] = {
            r: {} for r in self._flows
        }
        """By the tensor's file, which all its uses may share, and by content."""
        self._before = before._values_of_ranks if before is not None else {}
        self._meetings = {(r, k): m for m in meetings(ranks) for r, k in m.keys.items()}
        self._sites: dict[int, dict[int, dict[str, Any]]] = {}
        self._stuck = False
        self._sizes = {r: ExchangeSizes() for r in self._flows}
        running = {dump.rank: self._rank(dump) for dump in ranks}
        while running:
            moved = False
            for rank, steps in list(running.items()):
                waits = next(steps, None)
                moved |= waits is None or waits
                if waits is None:
                    del running[rank]
            self._stuck |= not moved
        self._before = {}

    def of(self, rank: int, place: Place) -> TrackedValue | None:
        """Return a tensor; None: not known."""
        if (rank, place) in self.made:
            return self.made[rank, place]
        return self._input_value(rank, place, self._flows[rank].tensors[place])

    def applied(self, rank: int, key: str, place: str) -> TrackedValue | None:
        """Return a tensor; of a gradient as its update applies it; None: not known."""
        gradient, call = self.of(rank, (key, place)), self._flows[rank].dump.calls[key]
        if gradient is None or factor_of(call, place) is None:
            return gradient
        factor = self.of(rank, (key, "input.clip"))
        if factor is None:
            return None
        sigma = np.hypot(gradient.sigma * factor.value, gradient.value * factor.sigma)
        return TrackedValue(gradient.value * factor.value, sigma)

    def _rank(self, dump: RankDump) -> Generator[bool, None, None]:
        """Follow a rank; yield whenever it waits for others, and whether it has got on since."""
        values_by_key, tensors = self._values_of_ranks[dump.rank], self._flows[dump.rank].tensors
        pinned = self.pins.weights(dump) if self.pins is not None else {}
        narrow = [d for d in dump.dtypes if is_float(d) and FLOATS[d].bits < 32]
        for place, values in pinned.items():
            value = TrackedValue(values, np.zeros(()))
            self.made[dump.rank, place] = value
            values_by_key |= dict.fromkeys(_keys(tensors[place]), value)
            for dtype in narrow:  # copies of the weight that the step before left
                copy = round_to(tensors[place].load(), dtype)
                values_by_key.setdefault(content_of(copy), _rounded(value, self._finer(dtype)))
        for call in dump.calls.values():
            if call.kind != "api":
                continue
            for place, record in call.given():
                if record.read is None:
                    continue
                value = self._input_value(dump.rank, (call.key, place), record)
                if value is not None:  # what the call takes now, whatever is equal to it later
                    self.made.setdefault((dump.rank, (call.key, place)), value)
            outputs: dict[str, TrackedValue] = {}
            try:
                if is_exchange(call):
                    yield True
                    outputs = yield from self._exchange(dump.rank, call)
                else:
                    outputs = self._operator(dump, call)
            except UNFIT:
                pass
            self._keep(dump.rank, call, outputs)

    def _keep(self, rank: int, call: Call, outputs: dict[str, TrackedValue]) -> None:
        for place, record in call.made():
            if record.read is None:
                continue
            value, keys = outputs.get(place), _keys(record)
            if value is not None and self._fits(value.value.shape, record):
                value = _shaped(TrackedValue(value.value, value.sigma.astype(np.float32)), record)
                self.made[rank, (call.key, place)] = value
                empty = not math.prod(record.shape) and value.value.size  # as many others are
                self._values_of_ranks[rank] |= dict.fromkeys(keys, None if empty else value)
                if not is_float(record.dtype):
                    self._sizes[rank].keep(record.load(), value.value)
            else:  # what Send returns is never written, so others are equal to it by chance
                for key in keys[:-1] if is_send(call) else keys:
                    self._values_of_ranks[rank].setdefault(key, None)

    def _fits(self, shape: tuple[int, ...], record: TensorRecord) -> bool:
        """Return whether a tensor may have a shape: the record's, or more or fewer rows by other choices."""
        if math.prod(shape) == math.prod(record.shape):
            return True
        rows = len(shape) == len(record.shape) and shape[1:] == record.shape[1:]
        return rows and any(sizes.differ for sizes in self._sizes.values())

    def _input_value(self, rank: int, place: Place, record: TensorRecord) -> TrackedValue | None:
        """Return what a call is given here; None: not known."""
        values, keys = record.load(), _keys(record)
        for values_by_key in (self._values_of_ranks[rank], self._before.get(rank, {})):
            for key in keys:
                if key in values_by_key:
                    value = values_by_key[key]
                    return value and _shaped(value, record)
        if not self._comes_back(rank, place) or _is_constant(values):
            value = TrackedValue(values, np.zeros(()))
            if self.pins is None or self._finer(record.dtype) == record.dtype:
                return value
            exact = self.pins.exact(values, record.dtype)
            return _rounded(value, record.dtype) if exact is None else value._replace(value=exact)
        flow = self._flows[rank]
        parts = [self.made.get((rank, p)) for p in flow.summed_from(place)]
        terms = [_shaped(p, record) for p in parts if p is not None]
        shapes = {p.value.shape for p in terms}
        if not parts or len(terms) < len(parts) or len(shapes) > 1:
            return None
        squares = [np.square(np.broadcast_to(p.sigma, p.value.shape)) for p in terms]
        total = TrackedValue(np.sum([p.value for p in terms], 0), np.sqrt(np.sum(squares, 0)))
        # The dump's rounding hides small terms, unless all that was sent back is known.
        hidden = self._finer(record.dtype) != record.dtype and not flow.sent_back(place)
        return _rounded(total, record.dtype) if hidden else total

    def _finer(self, dtype: str) -> str:
        """Return the type that a tensor is followed in: the narrowest of the other run, if that is finer."""
        other = self.pins.kind if self.pins is not None and is_float(dtype) else dtype
        return other if other != dtype and FLOATS[other].unit < FLOATS[dtype].unit else dtype

    def _comes_back(self, rank: int, place: Place) -> bool:
        """Return whether a tensor may be a gradient, which some call must have made."""
        flow = self._flows[rank]
        is_backward = flow.dump.calls[place[0]].phase is Phase.BACKWARD
        return is_backward or place[1] == "input.grad" or place[0] in flow.late

    def _fed(self, rank: int, call: Call) -> dict[str, TrackedValue]:
        inputs = {place: self.of(rank, (call.key, place)) for place, _ in call.given()}
        available = {place: value for place, value in inputs.items() if value is not None}
        if len(available) < len(inputs):
            raise ValueError("what goes in is not known")
        return available

    def _rounding(self, place: str, value: Value) -> Value:
        """Return an argument; fused operators round within themselves where the other run's do."""
        if place == "input.bf16" and self.pins is not None and isinstance(value, Scalar):
            return replace(value, value=self.pins.kind == "bfloat16")
        return value

    def _operator(self, dump: RankDump, call: Call) -> dict[str, TrackedValue]:
        is_backward = call.phase is Phase.BACKWARD
        forward = dump.calls.get(call.forward_key)
        formula = find(forward.formula_name) if forward is not None else None
        if formula is None or forward is None:
            return {}
        inputs, stores = self._fed(dump.rank, forward), is_backward or formula.stores
        forward = self._sizes[dump.rank].resized(forward).changed(self._rounding)
        values = {p: _leaf(inputs[p], self._finer(t.dtype), stores) for p, t in forward.given()}
        arguments, tensors = arguments_of(forward, formula, is_backward, values)
        if not is_backward:
            arguments.made = [t for _, t in call.made()]
            results = list(formula.compute(arguments))
            choice = choice_of(call) if self.pins is not None else None
            if choice is not None and self.pins is not None:
                scores = _scores(choice, inputs, results)
                index = self.pins.chosen(dump, call, choice, scores)
                if index is not None:
                    arguments.made = choice.made(call, scores.value, index)
                    results = choice.pinned(scores.value, index, list(formula.compute(arguments)))
        else:
            outputs = [x for x in formula.compute(arguments) if isinstance(x, Approx)]
            inputs = self._fed(dump.rank, call)
            coming = (_leaf(inputs[p], self._finer(t.dtype), True) for p, t in call.given())
            floats = [x for x in coming if isinstance(x, Approx)]
            seeds = list(zip(outputs, floats, strict=False))
            results = [g for g in gradients(seeds, tensors) if g is not None]
        tracked, left = dict[str, TrackedValue](), iter(results)
        for place, record in call.made():
            x = next((r for r in left if not is_backward or self._fits(r.shape, record)), None)
            if x is not None:
                tracked[place] = _stored(x, self._finer(record.dtype), formula.exact)
        return tracked

    def _exchange(self, rank: int, call: Call) -> Generator[bool, None, dict[str, TrackedValue]]:
        """Return what an exchange gives, as soon as all its ranks have come to it."""
        meeting = self._meetings[rank, call.key]
        site = self._sites.setdefault(id(meeting), {})
        if rank in meeting.senders:
            site[rank] = {}  # until what goes in is known
            inputs, bound = self._fed(rank, call), bind(meeting.kind, call)
            place = next(p for p, t in call.given() if t is bound["input"])
            term = _term(inputs[place], self._finer(bound["input"].dtype))
            if bound.get("input_split_sizes") and isinstance(term, Approx):  # not the sizes
                bound |= self._split(rank, bound, len(term.value))
            site[rank] = {**bound, "input": term}
        outputs = call.made()
        if len(outputs) != 1:
            return {}
        while len(site) < len(meeting.senders):
            if self._stuck:
                return {}
            yield False
        if not all(site.values()):
            return {}
        contributions = [site[r] for r in meeting.senders]
        if "sent" in contributions[0]:
            sent = agreed(*([o[way] for o in contributions] for way in ("sent", "received")))
            pairs = zip(meeting.senders, sent, strict=True)
            site = {r: {**site[r], "input_split_sizes": [*n]} for r, n in pairs}
        x = meeting.received(site)[meeting.group.index(rank)]
        return {p: _stored(x, self._finer(t.dtype), True) for p, t in outputs}

    def _split(self, rank: int, bound: Mapping[str, Any], rows: int) -> dict[str, set[RowCounts]]:
        """Return how many rows a rank may send to each rank, and receive from each."""
        sizes, received = self._sizes[rank], bound.get("output_split_sizes")
        sent = sizes.options(bound["input_split_sizes"], rows)
        return {"sent": sent, "received": sizes.options(received) if received else set()}


def _leaf(tracked: TrackedValue, dtype: str, stores: bool) -> Approx | Array:
    """Return a tensor as an argument, with the deviations of its errors."""
    if not is_float(dtype):
        return tracked.value
    x = exactly(tracked.value, dtype, stores)
    sigma = tracked.sigma.astype(np.float64)  # squares of it overflow in float32
    x.sigma = np.hypot(x.sigma, sigma)
    x.limit = x.limit + 8 * sigma + np.finfo(np.float64).tiny  # never exact
    return x


def _scores(
    choice: TopChoice, inputs: dict[str, TrackedValue], results: Sequence[Any]
) -> TrackedValue:
    """Return the scores [row, candidate] that a choice is made by here."""
    place = choice.scores
    scores = inputs[place] if place.startswith("input") else results[int(place.split(".")[1])]
    wide = scores.value.shape[-1]
    value = scores.value.reshape(-1, wide).astype(np.float64)
    sigma = np.broadcast_to(scores.sigma, scores.value.shape).reshape(-1, wide)
    if choice.bias:
        value = value + inputs[choice.bias].value
    return TrackedValue(choice.sign * value, sigma)


def _term(tracked: TrackedValue, dtype: str) -> Approx | Array:
    if not is_float(dtype):
        return tracked.value
    sigma = tracked.sigma.astype(np.float64)
    return Approx(tracked.value, dtype, dtype, sigma, 8 * sigma)


def _keys(record: TensorRecord) -> list[Any]:
    """Return what a tensor is found by: its file, or else a digest of its values (and shape where they are all alike)."""
    content = content_of(record.load())
    return [content] if record.path is None else [record.path, content]


def _is_constant(values: Array) -> bool:
    """Return whether values are no gradients: all alike, or few numbers of few bits (masks, shares of ranks)."""
    few = np.unique(values)
    if few.size < 2 or few.size > _FEW or not np.all(np.isfinite(few)):
        return few.size < 2
    return all(significant(float(v)) <= _BITS for v in few)


def _shaped(tracked: TrackedValue, record: TensorRecord) -> TrackedValue:
    """Return a tensor in the shape of its record, unless other choices gave it other rows."""
    if tracked.value.size != math.prod(record.shape):
        return tracked
    sigma = tracked.sigma.reshape(record.shape) if tracked.sigma.ndim else tracked.sigma
    return TrackedValue(tracked.value.reshape(record.shape), sigma)


def _stored(x: Approx | Array, dtype: str, exact: bool) -> TrackedValue:
    """Return a result after it is stored in its tensor; integers are exact."""
    if not isinstance(x, Approx):
        return TrackedValue(np.asarray(x), np.zeros(()))
    tracked = TrackedValue(x.value, np.broadcast_to(x.sigma, x.shape))
    rounds = is_float(dtype) and not exact and FLOATS[dtype].unit > x.unit
    return _rounded(tracked, dtype) if rounds else tracked


def _rounded(tracked: TrackedValue, dtype: str) -> TrackedValue:
    smallest = 2.0 ** FLOATS[dtype].low  # below it, the spacing of numbers stays the same
    rounding = FLOATS[dtype].unit * 3**-0.5  # errors are uniform within one unit roundoff
    sigma = np.hypot(tracked.sigma, rounding * np.maximum(np.abs(tracked.value), smallest))
    return tracked._replace(sigma=sigma)


def allowed(squares: float, size: float) -> float:
    """Return the largest relative L2 distance of two correct runs, by the sum of squared deviations of one.

    As in all bounds, eight standard deviations: errors may have one cause, so their norm is as uncertain as one.
    """
    return SIGMAS * (2 * squares) ** 0.5 / size if size else 0.0


def can_follow(ranks: Sequence[RankDump]) -> bool:
    """Return whether the dump of a step has values, and not too many."""
    records = [t for dump in ranks for call in dump.calls.values() for _, t in call.tensors()]
    small = sum(math.prod(t.shape) for t in records) <= MOST
    return small and any(t.read is not None for t in records)


# ------------------------------------------------------------------ sizes that follow from choices


class ExchangeSizes:
    """The integers that the calls of a rank made in its dump, and what they make of other choices.

    Such as how many rows ranks exchange. A dump gives sizes as plain numbers, so a call's sizes are found by value: integers
    that an earlier call of the rank made, or sums of groups of them (counts of experts, added up for each rank).
    """

    def __init__(self) -> None:
        self.differ = False
        self._row_counts: dict[RowCounts, set[RowCounts]] = {}

    def keep(self, dumped: Array, followed: Array) -> None:
        """Keep a tensor of integers of the dump, and as it is with other choices."""
        if 1 < followed.size <= _COUNTS:
            old, new = (tuple(x.reshape(-1).tolist()) for x in (dumped, followed))
            self._row_counts.setdefault(old, set()).add(new)
            self.differ |= old != new

    def resized(self, call: Call) -> Call:
        """Return a call with its lists of sizes as they follow from the choices.

        Raises:
            ValueError: The dump does not tell which sizes they are.
        """
        kwargs = {name: self._sized(value) for name, value in call.kwargs.items()}
        return replace(call, inputs=[self._sized(v) for v in call.inputs], kwargs=kwargs)

    def _sized(self, value: Value) -> Value:
        content: object = value.value if isinstance(value, Scalar) else value
        items = content if is_list(content) else []
        numbers = [v.value if isinstance(v, Scalar) else v for v in items]
        if len(numbers) < 2 or not all(type(n) is int for n in numbers):
            return value
        options = self._row_counts.get(tuple(numbers), set())
        if len(options) > 1:
            raise ValueError("sizes that follow from other choices")
        for sizes in options:
            if isinstance(value, Scalar):
                return replace(value, value=[*sizes])
            return [Scalar("int", n) for n in sizes]
        return value

    def options(self, numbers: Sequence[int], rows: int | None = None) -> set[RowCounts]:
        """Return what the numbers of rows to or from each rank may be here; in all as many as ``rows``."""
        n = len(numbers)
        options = {
            _summed(new, n)
            for dumped, news in self._row_counts.items()
            for new in (news if _summed(dumped, n) == tuple(numbers) else ())
        } or {tuple(numbers)}
        return {sizes for sizes in options if rows is None or sum(sizes) == rows}


def agreed(sent: Sequence[set[RowCounts]], received: Sequence[set[RowCounts]]) -> list[RowCounts]:
    """Return the rows that each rank sends to each, of what all ranks may send and may receive (empty: it does not say).

    Raises:
        ValueError: Several are possible, or none.
    """
    left = -1
    while left != (left := sum(map(len, (*sent, *received)))):
        sent = [
            {
                s
                for s in options
                if all(any(r[i] == s[j] for r in to) for j, to in enumerate(received) if to)
            }
            for i, options in enumerate(sent)
        ]
        received = [
            {r for r in options if all(any(s[j] == r[i] for s in by) for i, by in enumerate(sent))}
            for j, options in enumerate(received)
        ]
    if any(len(options) != 1 for options in sent):
        raise ValueError("sizes that follow from other choices")
    return [next(iter(options)) for options in sent]


def _summed(numbers: RowCounts, groups: int) -> RowCounts:
    """Return the sums of as many groups of numbers; nothing where they cannot be divided."""
    length = len(numbers) // groups if groups else 0
    starts = range(0, len(numbers), length) if length * groups == len(numbers) else ()
    return tuple(sum(numbers[i : i + length]) for i in starts)
