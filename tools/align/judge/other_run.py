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
from dataclasses import dataclass, replace
from functools import cache, cached_property
from statistics import median
from typing import Any

import numpy as np

from telechat_moe.numerics import FLOATS, is_float
from telechat_moe.tools.align.dump.records import Call, Phase, RankDump, TensorRecord
from telechat_moe.tools.align.judge.distance import VAGUE, Distance, differing, distance
from telechat_moe.tools.align.judge.pins import by_own_scores
from telechat_moe.tools.align.judge.verdict import Verdict, not_judged
from telechat_moe.tools.align.operators import find
from telechat_moe.tools.align.operators.approx import Array

BEYOND = 8.0
"""By how much outputs may exceed the expected answer to their inputs' distance."""

GAINS = 1.0, 8.0
"""The smallest and the largest gain that peers or rows can show."""

_BASIS = "other run"
_AGREE = "statistics agree, and cannot show that values do"
_OTHER = 1.2  # relative distance that shows other values altogether, whatever the noise
_ROWS = 32  # from which on rows show a gain; from _FEW on, roughly
_FEW = 4
_CANCELS = 256.0  # the largest gain of a row that an operator makes small
_PEAK = 40.0  # of an element, relative to the root mean square of all; normal noise has 6
_OMITTED = 0.05  # share of rows that a pass may leave out
_REPEATS = 10  # calls with equal inputs from which on it is known whether runs repeat their bits
_ROUNDINGS = 16.0  # of float32 that a kernel may be off, such as exponentials, besides its sums
_ROWWISE = frozenset(
    ("linear", "rms_norm", "layer_norm", "swiglu", "silu", "gelu", "sigmoid", "tanh", "add", "mul")
)  # operators whose rows do not mix


@dataclass
class _Answer:
    """How a call answers to its inputs."""

    # Distances of its inputs; a backward call's include those of its forward call
    given: list[Distance]
    made: dict[str, Distance | None]  # distance of each output; None: not known
    own: float  # its own rounding, relative
    # Distances of what it is given and of what it makes, then the same of its forward call
    flow: list[tuple[list[Distance], list[Distance]]]
    known: bool  # whether all inputs can be compared

    @property
    def same(self) -> bool:
        """Whether all inputs are known to be equal."""
        return self.known and all(d.exact for d in self.given)

    @property
    def gain(self) -> float | None:
        """Distance of the outputs over that of the inputs; None: not known."""
        found = [d.whole for d in self.made.values() if d is not None and np.isfinite(d.whole)]
        came = float(np.sqrt(sum(d.whole**2 for d in self.given))) + self.own
        return max(found) / came if found and self.known and came else None

    @cached_property
    def worst(self) -> float | None:
        """The largest gain of a row; None: not known."""
        made = [d for d in self.made.values() if d is not None and d.basis == "values"]
        gains = [d.rows / (self.rows(len(d.rows)) + self.own) for d in made] if self.known else []
        finite = [float(g.max()) for g in gains if g.size and np.isfinite(g).all()]
        return max(finite) if finite else None

    @property
    def most(self) -> float:
        """The largest distance of a row or column of the inputs."""
        return float(np.sqrt(sum(d.most**2 for d in self.given)))

    def conditions(self, made: Distance) -> Array:
        """Return by how much each row of an output is smaller than what the call makes of other rows at most."""
        count, most, own = len(made.rows), 0.0, np.ones(1)
        for given, outputs in self.flow:
            came = np.sqrt(
                sum((np.square(_of_rows(d.sizes, count)) for d in given), np.zeros(count))
            )
            for d in outputs:
                with np.errstate(divide="ignore", invalid="ignore"):
                    factor = np.nan_to_num(_of_rows(d.sizes, count) / came, nan=0.0, posinf=0.0)
                most = max(most, float(factor.max(initial=0.0)))
                own = factor if d is made else own
        with np.errstate(divide="ignore"):
            return np.clip(most / own, 1.0, _CANCELS) if most else np.ones(count)

    def rows(self, count: int) -> Array:
        """Return the distance of the inputs for each of so many rows of an output."""
        total = np.zeros(count)
        for d in self.given:
            aligned = d.rows if len(d.rows) == count else d.most if d.uneven else d.whole
            total = total + np.square(aligned)
        return np.sqrt(total)


class OtherRun:
    """Judges calls of a rank by those of the trusted run, which have the same keys, or which it confirmed together."""

    def __init__(self, reference: RankDump, target: RankDump, sure: Container[str] = ()) -> None:
        self.reference, self.target, self._sure = reference, target, sure
        self._answer = cache(self._answer_of)

    def judged(self, call: Call, verdicts: Sequence[Verdict]) -> list[Verdict]:
        """Return the verdicts of a call; where one is "not judged", the other run's answer to it."""
        theirs = self.reference.calls.get(call.key)
        unknown = {v.place: v.reason for v in verdicts if v.status == "not judged"}
        made = [place for place, _ in call.made()]
        if unknown and call.key in self._sure:
            return [_passed(call, place) for place in made]
        if not unknown or theirs is None:
            return [*verdicts]
        if "" in unknown:  # the whole call
            unknown = dict.fromkeys(made, unknown[""])
        found = [v for v in verdicts if v.place and v.place not in {*unknown} & {*made}]
        found += [self._verdict(call, p, why) for p, why in unknown.items() if p in made]
        return found or [*verdicts]

    def _verdict(self, call: Call, place: str, why: str) -> Verdict:
        answer = self._answer(call.key)
        made = answer.made.get(place)
        if not answer.known or made is None:
            return not_judged(call.key, f"{why}; nor by the other run", place)
        if answer.same and made.exact:
            return _passed(call, place)
        if "empty" in call.name.lower():
            return not_judged(call.key, f"{why}: uninitialised memory", place)
        if not is_float(dict(call.tensors())[place].dtype):
            return self._integers(call, place, answer, made, why)
        if made.basis == "checksum" and not made.exact:
            if answer.same and self._repeats:
                said = "has other bits, though the inputs are equal and other calls give equal bits"
                return _wrong(call, place, made, made.rows, said)
            said = "other bits: rounding or a fault, a checksum does not tell"
            return not_judged(call.key, f"{why}; {place}: {said}", place)
        return self._floats(call, place, answer, made, why)

    def _integers(
        self, call: Call, place: str, answer: _Answer, made: Distance, why: str
    ) -> Verdict:
        if not made.whole and made.basis == "statistics":
            return not_judged(call.key, f"{why}; {_AGREE}", place)
        if not made.whole:
            return _passed(call, place)
        if not any(d.whole for d in answer.given):
            return _wrong(call, place, made, made.rows, "differs, though the inputs are equal")
        own = by_own_scores(self.reference.calls[call.key], call, place)
        if own is not None and own:
            return _passed(call, place)
        if own is not None:
            return _wrong(call, place, made, made.rows, "is not what its own scores give")
        said = f"{np.count_nonzero(made.rows)} of {len(made.rows)} rows chose otherwise"
        return not_judged(call.key, f"{why}; {place}: {said}, from other inputs", place)

    def _floats(self, call: Call, place: str, answer: _Answer, made: Distance, why: str) -> Verdict:
        came = answer.rows(len(made.rows))
        for other, t in call.made():  # rows that chose otherwise
            d = answer.made.get(other)
            if d is not None and not is_float(t.dtype) and len(d.rows) == len(came):
                came = np.where(d.rows > 0, np.inf, came)
        if made.basis == "statistics":
            came = np.maximum(came, self._usual[call.key])
        conditions = np.minimum(answer.conditions(made), self._worst(call))
        with np.errstate(invalid="ignore", divide="ignore"):
            gains = made.rows / (came + answer.own) / conditions
            gains = np.nan_to_num(gains, nan=0.0, posinf=np.inf)
        usual, largest = self._gains(call, gains)
        uneven = any(d.uneven for d in answer.given) or bool(np.isinf(came).any())
        worst = came if _rowwise(call, place) else np.maximum(came, answer.most)
        limit = BEYOND * conditions * (largest * worst + answer.own)
        beyond = (made.rows > limit) & ((limit < VAGUE) | (made.rows > _OTHER))
        if beyond.any():
            ratio = np.where(beyond, gains / BEYOND, 0.0)
            at = int(np.argmax(ratio))
            said = f"differs by {made.rows[at]:.2g} of its size, its inputs by {came[at]:.2g}"
            return _wrong(call, place, made, ratio, said)
        if np.any(gains > BEYOND * usual):
            said = "differs more than its inputs do, which may follow from them"
            return not_judged(call.key, f"{why}; {place} {said}", place)
        odd = None if uneven else _odd(answer, made)
        if odd is not None:
            return _wrong(call, place, made, np.full(len(came), odd[0]), odd[1])
        if made.basis == "statistics":
            return not_judged(call.key, f"{why}; {_AGREE}", place)
        if np.mean(BEYOND * conditions * (usual * came + answer.own) > VAGUE) > _OMITTED:
            said = "inputs differ too much to judge it by the other run"
            return not_judged(call.key, f"{why}; {said}", place)
        return _passed(call, place, float(gains.max(initial=0.0)) / BEYOND)

    def _answer_of(self, key: str) -> _Answer:
        ours, theirs = self.target.calls[key], self.reference.calls[key]
        pairs, forward = [(ours, theirs)], ours.forward_key
        if forward != key and forward in self.target.calls and forward in self.reference.calls:
            pairs.append((self.target.calls[forward], self.reference.calls[forward]))
        goldens = [dict(other.tensors()) for _, other in pairs]
        fed = [
            _distance(t, golden.get(place))
            for (mine, _), golden in zip(pairs, goldens, strict=True)
            for place, t in mine.given()
        ]
        given = [d for d in fed if d is not None]
        made = {p: _distance(t, goldens[0].get(p)) for p, t in ours.made()}
        flow = [(given[: len(ours.given())], [d for d in made.values() if d is not None])]
        flow += self._answer(forward).flow if pairs[1:] else []
        own, known = _own(ours, theirs), len(given) == len(fed)
        return _Answer(given, made, own, flow if known else [], known)

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
        most = np.quantile(rows, 0.9) if len(rows) >= _ROWS else 2 * np.median(rows)
        return GAINS[0], float(np.clip(most, *GAINS))

    def _worst(self, call: Call) -> float:
        """Return how much more than usual a row may gain at most: several times what a row of its peers does."""
        peers, alike = self._like(call)
        worst = [g for key in peers if (g := self._answer(key).worst) is not None]
        return max(1.0, 2 * max(worst)) if worst and alike else _CANCELS

    def _like(self, call: Call) -> tuple[list[str], bool]:
        """Return the peers of a call, and whether there are several with its widths; else those of any width."""
        alike, others = (
            [k for k in self._peers.get(kind, []) if k != call.key]
            for kind in (_kind(call), _kind(call)[:2])
        )
        return (alike, True) if len(alike) > 1 else (others, False)

    @cached_property
    def _peers(self) -> dict[Any, list[str]]:
        found: dict[Any, list[str]] = {}
        for key, call in self.target.calls.items():
            if key in self.reference.calls:
                found.setdefault(_kind(call), []).append(key)
                found.setdefault(_kind(call)[:2], []).append(key)
        return found

    @cached_property
    def _repeats(self) -> bool:
        """Whether the runs repeat each other's bits: nine of ten calls with equal inputs have equal outputs."""
        answers = [self._answer(k) for k in self.target.calls if k in self.reference.calls]
        found = [all(d and d.exact for d in a.made.values()) for a in answers if a.same and a.made]
        return len(found) >= _REPEATS and sum(found) >= 0.9 * len(found)

    @cached_property
    def _usual(self) -> dict[str, float]:
        """How far outputs before each call are apart, nine of ten closer; infinite after other choices."""
        before, usual, flipped = list[float](), dict[str, float](), 0.0
        for key, call in self.target.calls.items():
            usual[key] = max(flipped, before[int(0.9 * len(before))] if before else 0.0)
            if key not in self.reference.calls:
                continue
            for place, d in self._answer(key).made.items():
                chosen = not is_float(dict(call.tensors())[place].dtype)
                if chosen and (d is None or d.whole):
                    flipped = np.inf
                elif d is not None and np.isfinite(d.whole):
                    insort(before, d.whole)
        return usual


def _odd(answer: _Answer, made: Distance) -> tuple[float, str] | None:
    """Return what noise does not explain although the distance is small: a scale of all rows, or one element."""
    scale = BEYOND * made.spread + 4 * sum(abs(d.scale) for d in answer.given) + answer.own
    if abs(made.scale) > scale:
        said = f"is larger by {made.scale:.2g} on average, with {scale:.2g} allowed"
        return abs(made.scale) / scale, said
    peak = max([_PEAK, *(4 * d.peak for d in answer.given)])
    if made.peak > peak:
        said = (
            f"has an element that differs {made.peak:.3g} times as much as most, {peak:.3g} allowed"
        )
        return made.peak / peak, said
    return None


def _passed(call: Call, place: str, ratio: float = 0.0) -> Verdict:
    size = int(np.prod(dict(call.tensors())[place].shape))
    return Verdict(call.key, place, "pass", ratio, elements=size, basis=_BASIS)


def _wrong(call: Call, place: str, made: Distance, ratio: Array, said: str) -> Verdict:
    """Return the verdict that a tensor is wrong, by the ratio of each of its rows to what is allowed."""
    record = dict(call.tensors())[place]
    ratio = np.nan_to_num(ratio, nan=0.0, posinf=np.inf)
    at, count = int(np.argmax(ratio)), len(ratio)
    size, wrong = int(np.prod(record.shape)), int((ratio > 1).sum())
    shape = record.shape[:-1] if len(record.shape) > 1 else record.shape
    fits = int(np.prod(shape)) == count > 1
    row = tuple(int(i) for i in np.unravel_index(at, shape)) if fits else ()
    where = {True: f"row {list(row)}", False: "it"}[fits and wrong < count]
    text = f"{place} is not what the other run made: {where} {said}; {wrong} of {count} rows beyond"
    if made.basis == "statistics":
        text = f"{place} is not what the other run made: by its statistics it {said}; or a call before it moved values"
    elements = wrong * size // max(1, count)
    found = Verdict(call.key, place, "diverged", float(ratio[at]), text, row, elements, size)
    return replace(found, basis=_BASIS)


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


def _distance(mine: TensorRecord, other: TensorRecord | None) -> Distance | None:
    if other is None or is_float(mine.dtype) != is_float(other.dtype):
        return None
    return distance(other, mine) if is_float(mine.dtype) else differing(other, mine)


def _own(ours: Call, theirs: Call) -> float:
    """Return how far a call may be off by its own rounding, relative to its result."""
    records = [t for call in (ours, theirs) for _, t in call.tensors() if is_float(t.dtype)]
    unit = max((FLOATS[t.dtype].unit for t in records), default=0.0)
    longest = max((n for t in records for n in t.shape), default=1)
    return unit + min(unit, FLOATS["float32"].unit) * (_ROUNDINGS + longest**0.5)
