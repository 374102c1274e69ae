"""Judge calls that cannot be recomputed by the other run: inputs equal within what their noise allows, outputs not.

The relative distance between the runs is measured, row by row, for the inputs and the outputs of a call. The outputs
of a correct call answer to the distance of its inputs, times a gain, and to its own rounding; the gain is that of its
peers (calls of the same operator and widths in the same pair of runs), or else of most of its rows. Rows that an
operator makes small, compared with what it makes of others forward and backward, may gain more. Beyond :data:`BEYOND`
times that is a fault: of the whole, of a row, of an element, or of the mean scale of all rows. Where some
rows or columns differ much more than the rest (tokens that were routed otherwise), an operator that may mix them is
wrong only beyond what those explain. What lies between, or would hide a tensor that is all wrong, is not judged.

Dumps without values get the same rule: statistics can show a fault, never that there is none; checksums equality.
"""

from bisect import insort
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from statistics import median
from typing import Any

import numpy as np

from telechat_moe.numerics import FLOATS, is_float
from telechat_moe.tools.align.dump.records import Call, Phase, RankDump, TensorRecord
from telechat_moe.tools.align.judge.distance import Distance, differing, distance
from telechat_moe.tools.align.judge.pins import by_own_scores
from telechat_moe.tools.align.judge.verdict import Verdict, not_judged
from telechat_moe.tools.align.operators import find
from telechat_moe.tools.align.operators.approx import Array
from telechat_moe.tools.align.thresholds import (
    BEYOND,
    CANCELS,
    CHOSEN_WITHIN,
    FLIPS,
    GAINS,
    KERNEL_ROUNDINGS,
    OMITTED,
    OTHER_VALUES,
    PEAK,
    VAGUE,
)

_BASIS = "other run"
_AGREE = "statistics agree, and cannot show that values do"
_ALIKE = "differs, and integers with equal statistics, which it was given, need not be equal"
_ROWS = 32  # from which on rows show a gain; from _FEW on, roughly
_FEW = 4
_REPEATS = 10  # calls with equal inputs from which on it is known whether runs repeat their bits
_ROWWISE = frozenset(
    ("linear", "rms_norm", "layer_norm", "swiglu", "silu", "gelu", "sigmoid", "tanh", "add", "mul")
)  # operators whose rows do not mix


@dataclass
class _Response:
    # Distances of its inputs; a backward call's include those of its forward call
    inputs: list[Distance]
    outputs: dict[str, Distance | None]  # distance of each output; None: not known
    rounding: float  # its own rounding, relative
    # Distances of what it is given and of what it makes, then the same of its forward call
    flow: list[tuple[list[Distance], list[Distance]]]
    comparable: bool  # whether all inputs can be compared
    # Elements of integers or truth values that agree in their statistics, as others do, too; 0: there are none
    alike: int = 0

    @property
    def same(self) -> bool:
        return self.comparable and all(d.exact for d in self.inputs)

    @property
    def gain(self) -> float | None:
        """Distance of the outputs over that of the inputs; None: not known."""
        distances = [d.whole for d in self.outputs.values() if d and np.isfinite(d.whole)]
        size = float(np.sqrt(sum(d.whole**2 for d in self.inputs))) + self.rounding
        return max(distances) / size if distances and self.comparable and size else None

    @cached_property
    def worst(self) -> float | None:
        """The largest gain of a row; None: not known."""
        if not self.comparable:
            return None
        outputs = [d for d in self.outputs.values() if d is not None and d.basis == "values"]
        gains = [d.rows / (self.rows(len(d.rows)) + self.rounding) for d in outputs]
        finite = [float(g.max()) for g in gains if g.size and np.isfinite(g).all()]
        return max(finite) if finite else None

    @property
    def largest(self) -> float:
        return float(np.sqrt(sum(d.largest**2 for d in self.inputs)))

    def conditions(self, output: Distance) -> Array:
        """Return by how much each row of an output is smaller than what the call makes of other rows at most."""
        count, largest, output_factor = len(output.rows), 0.0, np.ones(1)
        for inputs, outputs in self.flow:
            squares = (np.square(_of_rows(d.sizes, count)) for d in inputs)
            sizes = np.sqrt(sum(squares, np.zeros(count)))
            for d in outputs:
                with np.errstate(divide="ignore", invalid="ignore"):
                    factor = np.nan_to_num(_of_rows(d.sizes, count) / sizes, nan=0.0, posinf=0.0)
                largest = max(largest, float(factor.max(initial=0.0)))
                output_factor = factor if d is output else output_factor
        with np.errstate(divide="ignore"):
            return np.clip(largest / output_factor, 1.0, CANCELS) if largest else np.ones(count)

    def rows(self, count: int) -> Array:
        """Return the distance of the inputs for each of so many rows of an output."""
        total = np.zeros(count)
        for d in self.inputs:
            aligned = d.rows if len(d.rows) == count else d.largest if d.uneven else d.whole
            total = total + np.square(aligned)
        return np.sqrt(total)


class OtherRun:
    """Judges calls of a rank by those of the trusted run, which have the same keys, or which it confirmed together."""

    def __init__(self, reference: RankDump, target: RankDump, sure: Container[str] = ()) -> None:
        self.reference, self.target, self._sure = reference, target, sure
        self._answer = cache(self._answer_of)

    def judged(self, call: Call, verdicts: Sequence[Verdict]) -> list[Verdict]:
        """Return the verdicts of a call; where one is "not judged", the other run's answer to it."""
        reference_call = self.reference.calls.get(call.key)
        unknown = {v.place: v.reason for v in verdicts if v.status == "not judged"}
        outputs = [place for place, _ in call.made()]
        if unknown and call.key in self._sure:
            return [_passed(call, place) for place in outputs]
        if not unknown or reference_call is None:
            return [*verdicts]
        if "" in unknown:  # the whole call
            unknown = dict.fromkeys(outputs, unknown[""])
        judged = [v for v in verdicts if v.place and v.place not in {*unknown} & {*outputs}]
        judged += [self._verdict(call, p, text) for p, text in unknown.items() if p in outputs]
        return judged or [*verdicts]

    def _verdict(self, call: Call, place: str, reason: str) -> Verdict:
        answer = self._answer(call.key)
        output = answer.outputs.get(place)
        if not answer.comparable or output is None:
            return not_judged(call.key, f"{reason}; nor by the other run", place)
        if answer.same and output.exact:
            return _passed(call, place)
        if "empty" in call.name.lower():
            return not_judged(call.key, f"{reason}: uninitialised memory", place)
        if not is_float(dict(call.tensors())[place].dtype):
            return self._integers(call, place, answer, output, reason)
        if output.basis == "checksum" and not output.exact:
            if answer.same and self._repeats:
                text = "has other bits, though the inputs are equal and other calls give equal bits"
                return _wrong(call, place, output, output.rows, text)
            text = "other bits: rounding or a fault, a checksum does not tell"
            return not_judged(call.key, f"{reason}; {place}: {text}", place)
        return self._floats(call, place, answer, output, reason)

    def _integers(
        self, call: Call, place: str, answer: _Response, output: Distance, reason: str
    ) -> Verdict:
        if not output.whole and output.basis == "statistics":
            return not_judged(call.key, f"{reason}; {_AGREE}", place)
        if not output.whole:
            return _passed(call, place)
        if self._may_differ(call, answer):
            return not_judged(call.key, f"{reason}; {place} {_ALIKE}", place)
        if not any(d.whole for d in answer.inputs):
            return _wrong(call, place, output, output.rows, "differs, though the inputs are equal")
        by_scores = by_own_scores(self.reference.calls[call.key], call, place)
        if by_scores is not None and by_scores:
            return _passed(call, place)
        if by_scores is not None:
            return _wrong(call, place, output, output.rows, "is not what its own scores give")
        text = f"{np.count_nonzero(output.rows)} of {len(output.rows)} rows chose otherwise"
        return not_judged(call.key, f"{reason}; {place}: {text}, from other inputs", place)

    def _floats(
        self, call: Call, place: str, answer: _Response, output: Distance, reason: str
    ) -> Verdict:
        input_rows = answer.rows(len(output.rows))
        for other, t in call.made():  # rows that chose otherwise
            d = answer.outputs.get(other)
            if d is not None and not is_float(t.dtype) and len(d.rows) == len(input_rows):
                input_rows = np.where(d.rows > 0, np.inf, input_rows)
        if output.basis == "statistics":
            input_rows = np.maximum(input_rows, self._usual[call.key])
        conditions = np.minimum(answer.conditions(output), self._worst(call))
        with np.errstate(invalid="ignore", divide="ignore"):
            gains = output.rows / (input_rows + answer.rounding) / conditions
            gains = np.nan_to_num(gains, nan=0.0, posinf=np.inf)
        usual, largest = self._gains(call, gains)
        uneven = any(d.uneven for d in answer.inputs) or bool(np.isinf(input_rows).any())
        worst = input_rows if _rowwise(call, place) else np.maximum(input_rows, answer.largest)
        limit = BEYOND * conditions * (largest * worst + answer.rounding)
        beyond = (output.rows > limit) & ((limit < VAGUE) | (output.rows > OTHER_VALUES))
        if beyond.any() and self._may_differ(call, answer):
            return not_judged(call.key, f"{reason}; {place} {_ALIKE}", place)
        few = float(np.mean(beyond)) <= CHOSEN_WITHIN and call.kind == "module"
        if beyond.any() and few and not self._repeats:
            text = f"{np.count_nonzero(beyond)} of {len(beyond)} rows differ, perhaps by choices within it"
            return not_judged(call.key, f"{reason}; {place}: {text}", place)
        if beyond.any() and output.basis == "statistics" and _is_rounding(answer, output):
            return not_judged(
                call.key, f"{reason}; {place} is what rounding leaves of larger numbers", place
            )
        if beyond.any():
            ratio = np.where(beyond, gains / BEYOND, 0.0)
            worst_row = int(np.argmax(ratio))
            text = f"differs by {output.rows[worst_row]:.2g} of its size, its inputs by {input_rows[worst_row]:.2g}"
            return _wrong(call, place, output, ratio, text)
        if np.any(gains > BEYOND * usual):
            text = "differs more than its inputs do, which may follow from them"
            return not_judged(call.key, f"{reason}; {place} {text}", place)
        odd = None if uneven else _odd(answer, output)
        if odd is not None:
            return _wrong(call, place, output, np.full(len(input_rows), odd[0]), odd[1])
        if output.basis == "statistics":
            return not_judged(call.key, f"{reason}; {_AGREE}", place)
        if np.mean(BEYOND * conditions * (usual * input_rows + answer.rounding) > VAGUE) > OMITTED:
            text = "inputs differ too much to judge it by the other run"
            return not_judged(call.key, f"{reason}; {text}", place)
        return _passed(call, place, float(gains.max(initial=0.0)) / BEYOND)

    def _answer_of(self, key: str) -> _Response:
        target_call, reference_call = self.target.calls[key], self.reference.calls[key]
        pairs, forward = [(target_call, reference_call)], target_call.forward_key
        if forward != key and forward in self.target.calls and forward in self.reference.calls:
            pairs.append((self.target.calls[forward], self.reference.calls[forward]))
        goldens = [dict(other.tensors()) for _, other in pairs]
        distances = [
            _distance(t, golden.get(place))
            for (call, _), golden in zip(pairs, goldens, strict=True)
            for place, t in call.given()
        ]
        inputs = [d for d in distances if d is not None]
        outputs = {p: _distance(t, goldens[0].get(p)) for p, t in target_call.made()}
        outgoing = [d for d in outputs.values() if d is not None]
        flow = [(inputs[: len(target_call.given())], outgoing)]
        flow += self._answer(forward).flow if pairs[1:] else []
        rounding, comparable = (
            _rounding_allowance(target_call, reference_call),
            len(inputs) == len(distances),
        )
        records = [t for c, _ in pairs for _, t in c.given()]
        alike = max([int(np.prod(t.shape)) for t in records if self._only_alike(key, t)], default=0)
        return _Response(inputs, outputs, rounding, flow if comparable else [], comparable, alike)

    def _only_alike(self, key: str, record: TensorRecord) -> bool:
        """Return whether an input is known by statistics alone, of integers that a call before may have made: not of data."""
        determined = record.read is not None or record.crc is not None or is_float(record.dtype)
        if determined or record.stats is None or record.stats.max == record.stats.min:
            return False  # or all elements are alike
        size = record.dtype, int(np.prod(record.shape))
        return self._order[key] > self._integers_made.get(size, len(self._order))

    def _may_differ(self, call: Call, answer: _Response) -> bool:
        """Return whether integers with equal statistics may differ: noise flips about one choice in its reciprocal."""
        return bool(answer.alike) and answer.alike * self._usual[call.key] > FLIPS

    @cached_property
    def _order(self) -> dict[str, int]:
        return {key: i for i, key in enumerate(self.target.calls)}

    @cached_property
    def _integers_made(self) -> dict[tuple[str, int], int]:
        """The position of the first call that makes integers of a type and size."""
        first: dict[tuple[str, int], int] = {}
        for i, call in enumerate(self.target.calls.values()):
            for _, t in call.made():
                if not is_float(t.dtype):
                    first.setdefault((t.dtype, int(np.prod(t.shape))), i)
        return first

    def _gains(self, call: Call, rows: Array) -> tuple[float, float]:
        """Return the gain that a call usually has, and the largest that it may have."""
        peers, alike = self._like(call)
        gains = [g for key in peers if (g := self._answer(key).gain) is not None]
        if gains:
            usual = float(np.clip(median(gains) if alike else max(gains), *GAINS))
            return usual, usual
        rows = rows[np.isfinite(rows)]
        if len(rows) < _FEW:
            return GAINS
        largest = np.quantile(rows, 0.9) if len(rows) >= _ROWS else 2 * np.median(rows)
        return GAINS[0], float(np.clip(largest, *GAINS))

    def _worst(self, call: Call) -> float:
        """Return how much more than usual a row may gain at most: several times what a row of its peers does."""
        peers, alike = self._like(call)
        worst = [g for key in peers if (g := self._answer(key).worst) is not None]
        return max(1.0, 2 * max(worst)) if worst and alike else CANCELS

    def _like(self, call: Call) -> tuple[list[str], bool]:
        """Return the peers of a call, and whether there are several with its widths; else those of any width."""
        kinds = _kind(call), _kind(call)[:2]
        alike, others = ([k for k in self._peers.get(n, []) if k != call.key] for n in kinds)
        return (alike, True) if len(alike) > 1 else (others, False)

    @cached_property
    def _peers(self) -> dict[Any, list[str]]:
        peers: dict[Any, list[str]] = {}
        for key, call in self.target.calls.items():
            if key in self.reference.calls:
                peers.setdefault(_kind(call), []).append(key)
                peers.setdefault(_kind(call)[:2], []).append(key)
        return peers

    @cached_property
    def _repeats(self) -> bool:
        """Whether the runs repeat each other's bits: nine of ten calls with equal inputs have equal outputs."""
        answers = [self._answer(k) for k in self.target.calls if k in self.reference.calls]
        equal = (a.outputs.values() for a in answers if a.same and a.outputs)
        repeated = [all(d and d.exact for d in outputs) for outputs in equal]
        return len(repeated) >= _REPEATS and sum(repeated) >= 0.9 * len(repeated)

    @cached_property
    def _usual(self) -> dict[str, float]:
        """How far outputs before each call are apart, nine of ten closer; infinite after other choices."""
        distances, usual, flipped = list[float](), dict[str, float](), 0.0
        for key, call in self.target.calls.items():
            usual[key] = max(flipped, distances[int(0.9 * len(distances))] if distances else 0.0)
            if key not in self.reference.calls:
                continue
            for place, d in self._answer(key).outputs.items():
                chosen = not is_float(dict(call.tensors())[place].dtype)
                if chosen and (d is None or d.whole):
                    flipped = np.inf
                elif d is not None and np.isfinite(d.whole):
                    insort(distances, d.whole)
        return usual


def _is_rounding(answer: _Response, output: Distance) -> bool:
    """Return whether an output is so small beside the inputs that it is their rounding."""
    sizes = [float(d.sizes.max()) for d in answer.flow[0][0] if d.sizes.size] if answer.flow else []
    return float(output.sizes.max()) * VAGUE <= answer.rounding * max(sizes, default=0.0)


def _odd(answer: _Response, output: Distance) -> tuple[float, str] | None:
    """Return what noise does not explain although the distance is small: a scale of all rows, or one element."""
    scale = BEYOND * output.spread + 4 * sum(abs(d.scale) for d in answer.inputs) + answer.rounding
    if abs(output.scale) > scale:
        text = f"is larger by {output.scale:.2g} on average, with {scale:.2g} allowed"
        return abs(output.scale) / scale, text
    peak = max([PEAK, *(4 * d.peak for d in answer.inputs)])
    if output.peak > peak:
        text = f"has an element that differs {output.peak:.3g} times as much as most, {peak:.3g} allowed"
        return output.peak / peak, text
    return None


def _passed(call: Call, place: str, ratio: float = 0.0) -> Verdict:
    size = int(np.prod(dict(call.tensors())[place].shape))
    return Verdict(call.key, place, "pass", ratio, elements=size, basis=_BASIS)


def _wrong(call: Call, place: str, output: Distance, ratio: Array, problem: str) -> Verdict:
    """Return the verdict that a tensor is wrong, by the ratio of each of its rows to what is allowed."""
    record = dict(call.tensors())[place]
    ratio = np.nan_to_num(ratio, nan=0.0, posinf=np.inf)
    worst, count = int(np.argmax(ratio)), len(ratio)
    size, wrong = int(np.prod(record.shape)), int((ratio > 1).sum())
    shape = record.shape[:-1] if len(record.shape) > 1 else record.shape
    fits = int(np.prod(shape)) == count > 1
    row = tuple(int(i) for i in np.unravel_index(worst, shape)) if fits else ()
    row_text = {True: f"row {list(row)}", False: "it"}[fits and wrong < count]
    text = f"{place} is not what the other run made: {row_text} {problem}; {wrong} of {count} rows beyond"
    if output.basis == "statistics":
        text = f"{place} is not what the other run made: by its statistics it {problem}; or a call before it moved values"
    elements = wrong * size // max(1, count)
    return Verdict(
        call.key, place, "diverged", float(ratio[worst]), text, row, elements, size, basis=_BASIS
    )


def _of_rows(sizes: Array, count: int) -> Array:
    """Return sizes by row: where a tensor has other rows, its size for each of them."""
    return sizes if len(sizes) == count else np.full(count, np.sqrt(np.mean(np.square(sizes))))


def _kind(call: Call) -> Any:
    """Return what peers have in common: operator, phase and widths of their tensors."""
    return call.name, call.phase, tuple((place, t.shape[-1:]) for place, t in call.tensors())


def _rowwise(call: Call, place: str) -> bool:
    formula = find(call.name)
    gradient = call.phase is Phase.BACKWARD and place != "output.0"
    return formula is not None and formula.name in _ROWWISE and not gradient


def _distance(record: TensorRecord, other: TensorRecord | None) -> Distance | None:
    if other is None or is_float(record.dtype) != is_float(other.dtype):
        return None
    return distance(other, record) if is_float(record.dtype) else differing(other, record)


def _rounding_allowance(call: Call, other: Call) -> float:
    """Return how far a call may be off by its own rounding, relative to its result."""
    records = [t for c in (call, other) for _, t in c.tensors() if is_float(t.dtype)]
    unit = max((FLOATS[t.dtype].unit for t in records), default=0.0)
    longest = max((n for t in records for n in t.shape), default=1)
    return unit + min(unit, FLOATS["float32"].unit) * (KERNEL_ROUNDINGS + longest**0.5)
