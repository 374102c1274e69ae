"""Discrete decisions: chosen experts, arg-max, order of a sort, tokens that an expert keeps.

A choice that differs between two runs (a flip) is no fault where the scores nearly tie. A flip is legal if

1. each run chose by its own scores;
2. the margin, the difference of the swapped candidates' scores in the *reference*, is within the bound of how far the
   two runs' scores may differ there;
3. the token's row of the router's input does not itself differ by several times what the profile allows.

The bound is propagated. The operators from the router's input to the scores (linear, sigmoid or softmax, bias ...) are
computed in float64 from the input of each run. Their scores may differ by the effect of the inputs' difference plus the
rounding bounds of both runs (``approx.py``). If the target's scores do not follow from its own input, every flip is
illegal. Where these operators are not in the dump, the bound is the profile's tolerance of the scores in the narrowest
type of the run.

The reference shows which input holds the scores, and along which dimension the choice was made: the indices of a choice
are those of its largest (or smallest) elements. So fused routers need no list of names.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from telechat_moe.tools.align.compare.profiles import Profile
from telechat_moe.tools.align.dump.records import Call, Phase, RankDump, TensorRecord, Value
from telechat_moe.tools.align.judge.replay import exactly, plain
from telechat_moe.tools.align.numerics import FLOATS, is_float
from telechat_moe.tools.align.operators import find
from telechat_moe.tools.align.operators.approx import Approx
from telechat_moe.tools.align.operators.registry import UNFIT

Array = np.ndarray[Any, np.dtype[Any]]

PRODUCTS = {"matmul", "rmatmul", "linear", "addmm", "baddbmm", "einsum"}
"""Formulas that may come between a router's input and its scores."""

VIEWS = {"reshape", "squeeze", "unsqueeze", "flatten"}
"""Formulas that change nothing but a tensor's shape."""

_ROWS = 4.0
"""By how much a token's row may differ more than most elements of its tensor (L2) while its flips stay legal."""

_BACK = 48  # calls to look back for the one that made a tensor
_DEPTH = 8  # operators from the scores back to the product


class Flip(NamedTuple):
    """A choice that the two runs made differently.

    Attributes:
        row: Row of the choice: the token, where tokens choose experts.
        gone: Candidates that only the reference chose; where only the order differs, the first one that moved.
        came: Candidates that only the target chose.
        margin: Largest difference of swapped candidates' scores in the reference.
        bound: How far that difference may vary between the two runs.
        legal: See the module; None: cannot be judged.
        why: Where the bound comes from, or what is wrong.
    """

    row: int
    gone: tuple[int, ...]
    came: tuple[int, ...]
    margin: float
    bound: float
    legal: bool | None
    why: str


@dataclass(frozen=True)
class Decision:
    """The flips of one call.

    Attributes:
        rows: Number of choices that it made.
        flips: The choices that differ.
        tokens: Indices of the affected rows in the token dimension.
        count: Length of that dimension.
    """

    rows: int
    flips: list[Flip]
    tokens: frozenset[int]
    count: int

    @property
    def legal(self) -> bool | None:
        """Whether all flips are legal; None: none is illegal, but some cannot be judged."""
        found = {f.legal for f in self.flips}
        return False if False in found else None if None in found else True


class _Choice(NamedTuple):
    """Scores [row, candidate] of both runs, the highest chosen first, and what was chosen [row, slot]."""

    scores: tuple[Array, Array]
    chosen: tuple[Array, Array]
    record: tuple[TensorRecord, TensorRecord]
    sign: float
    last: bool


def decide(
    reference: RankDump,
    target: RankDump,
    key: str,
    chosen: tuple[Array, Array],
    profile: Profile,
    follows: bool = False,
) -> Decision | None:
    """Return the flips between two runs of a call; None: no input explains its indices as a choice.

    Args:
        target: The run to judge, calls named as the reference's.
        chosen: Its indices in both runs, reference first.
        profile: Says how far tensors may differ.
        follows: Whether earlier legal flips explain differing inputs.
    """
    calls = reference.calls[key], target.calls[key]
    choice = _choice(calls, chosen)
    if choice is None:
        return None
    rows = np.flatnonzero((choice.chosen[0] != choice.chosen[1]).any(1))
    bounds = _Bounds.of((reference, target), key, choice, rows, profile)
    flips = [
        _flip(choice, int(row), i, bounds, profile, follows) for i, row in enumerate(rows.tolist())
    ]
    flips = [f for f in flips if f.margin or f.gone != f.came]
    count, candidates = choice.scores[0].shape
    if choice.last:
        return Decision(count, flips, frozenset(f.row for f in flips), count)
    moved = frozenset(i for f in flips for i in (*f.gone, *f.came))
    return Decision(count, flips, moved, candidates)


def _choice(calls: tuple[Call, Call], chosen: tuple[Array, Array]) -> _Choice | None:
    """Return the input that explains the reference's indices."""
    pairs = zip(_floats(calls[0]), _floats(calls[1]), strict=False)
    for (place, mine), (other, theirs) in pairs:
        if place != other or mine.shape != theirs.shape or mine.read is None or theirs.read is None:
            continue
        for axis in _axes(mine.shape, chosen[0].shape):
            one, other = (
                c if c.ndim == len(mine.shape) else np.expand_dims(c, axis) for c in chosen
            )
            indices = [_rows(c.astype(np.int64), axis) for c in (one, other)]
            scores = [_rows(np.asarray(r.load(), np.float64), axis) for r in (mine, theirs)]
            if any(i.size and not 0 <= i.min() <= i.max() < mine.shape[axis] for i in indices):
                continue
            for sign in (1.0, -1.0):
                if explained(scores[0] * sign, indices[0]).all():
                    both = (scores[0] * sign, scores[1] * sign)
                    last = axis == len(mine.shape) - 1
                    return _Choice(both, (indices[0], indices[1]), (mine, theirs), sign, last)
    return None


def explained_by_scores(reference: Call, target: Call, place: str) -> bool:
    """Return whether both runs' indices at a place are those of the largest, or smallest, of each run's own scores."""
    records = [dict(call.tensors()).get(place) for call in (reference, target)]
    if any(r is None or r.read is None for r in records):
        return False
    chosen = [np.asarray(r.load()) for r in records if r is not None]
    choice = _choice((reference, target), (chosen[0], chosen[1]))
    return choice is not None and bool(explained(choice.scores[1], choice.chosen[1]).all())


def _floats(call: Call) -> list[tuple[str, TensorRecord]]:
    return [(place, r) for place, r in call.given() if is_float(r.dtype) and r.shape]


def _axes(scores: tuple[int, ...], indices: tuple[int, ...]) -> list[int]:
    """Return the dimensions along which indices of that shape may have been chosen, the last first."""
    found: list[int] = []
    for d in reversed(range(len(scores))):
        kept = scores[:d] + scores[d + 1 :]
        same = len(indices) == len(scores) and indices[:d] + indices[d + 1 :] == kept
        if (same and indices[d] <= scores[d]) or indices == kept:
            found.append(d)
    return found


def _rows(x: Array, axis: int) -> Array:
    """Return an array as a matrix with one dimension along the rows."""
    return np.moveaxis(x, axis, -1).reshape(-1, x.shape[axis])


def explained(scores: Array, chosen: Array) -> Array:
    """Return for each row whether the chosen candidates are its highest scores, each chosen once."""
    picked = np.take_along_axis(scores, chosen, 1)
    rest = scores.copy()
    np.put_along_axis(rest, chosen, -np.inf, 1)
    distinct = np.ones(len(chosen), np.bool_)
    if chosen.shape[1] > 1:
        distinct = (np.diff(np.sort(chosen, 1), axis=1) > 0).all(1)
    return distinct & (picked.min(1) >= rest.max(1))


def _flip(
    choice: _Choice, row: int, i: int, bounds: "_Bounds", profile: Profile, follows: bool
) -> Flip:
    mine, theirs = (c[row].tolist() for c in choice.chosen)
    gone = tuple(e for e in mine if e not in theirs)
    came = tuple(e for e in theirs if e not in mine)
    pairs = [(e, f) for e in gone for f in came]
    if not pairs:  # only the order differs
        pairs = [(e, f) for e, f in zip(mine, theirs, strict=True) if e != f]
        gone, came = (pairs[0][0],), (pairs[0][1],)
    scores = choice.scores[0][row]
    margins = [float(abs(scores[e] - scores[f])) for e, f in pairs]
    allowed = [bounds.between(i, e, f, choice, row) for e, f in pairs]
    worst = max(range(len(pairs)), key=lambda j: (margins[j] > allowed[j], margins[j]))
    legal, why = _legal(choice, row, i, bounds, profile, follows, margins[worst] <= allowed[worst])
    return Flip(row, gone, came, margins[worst], allowed[worst], legal, why)


def _legal(
    choice: _Choice,
    row: int,
    i: int,
    bounds: "_Bounds",
    profile: Profile,
    follows: bool,
    within: bool,
) -> tuple[bool | None, str]:
    one = slice(row, row + 1)
    if not explained(choice.scores[1][one], choice.chosen[1][one])[0]:
        return False, "the target's own scores do not give this choice"
    if bounds.propagated and bounds.strange[i]:
        return False, "the target's scores are not what its router's input gives"
    if bounds.propagated and not follows and bounds.apart[i] > 1:
        said = f"{bounds.apart[i]:.3g} times what {profile.name} allows"
        return False, f"the router's input differs by {said}"
    if bounds.propagated:
        return within, "bound propagated from the router's input"
    if follows and not within:
        return None, "what made the scores is not in the dump, and earlier flips change them"
    return within, f"bound from {profile.name} in {bounds.dtype}"


@dataclass
class _Bounds:
    """How far the scores of the flipped rows may differ; arrays are [flip, candidate]."""

    propagated: bool
    dtype: str
    tolerance: tuple[float, float]
    change: Array = field(default_factory=lambda: np.zeros((0, 0)))
    rounding: Array = field(default_factory=lambda: np.zeros((0, 0)))
    strange: Array = field(default_factory=lambda: np.zeros(0))
    apart: Array = field(default_factory=lambda: np.zeros(0))

    @staticmethod
    def of(
        dumps: tuple[RankDump, RankDump],
        key: str,
        choice: _Choice,
        rows: Array,
        profile: Profile,
    ) -> "_Bounds":
        dtype = narrowest(dumps[1])
        bounds = _Bounds(False, dtype, profile.tolerance(profile.line(dtype)) or (0.0, 0.0))
        if not choice.last or not len(rows):
            return bounds
        runs: list[tuple[Approx, list[tuple[Array, str]]]] = []
        for dump, record in zip(dumps, choice.record, strict=True):
            made = _Scores(dump, key, record, rows)
            try:
                scores = made.evaluate()
            except UNFIT:
                return bounds
            if scores is None or scores.shape != (len(rows), choice.scores[0].shape[1]):
                return bounds
            runs.append((scores, made.leaves))
        kept = [s[rows] * choice.sign for s in choice.scores]
        errors = [r.bound(rec.dtype) for (r, _), rec in zip(runs, choice.record, strict=True)]
        with np.errstate(invalid="ignore"):  # infinity less infinity: what is masked in both runs
            off = [np.abs(r.value - s) > e for (r, _), s, e in zip(runs, kept, errors, strict=True)]
            if off[0].any():
                return bounds  # the reference does not show what the scores should be
            bounds.propagated = True
            bounds.change = np.nan_to_num(runs[1][0].value - runs[0][0].value, posinf=np.inf)
        bounds.rounding = errors[0] + errors[1]
        bounds.strange = off[1].any(1)
        bounds.apart = _apart(runs[0][1], runs[1][1], len(rows), profile)
        return bounds

    def between(self, i: int, e: int, f: int, choice: _Choice, row: int) -> float:
        """Return how far the difference of two candidates' scores may vary between the runs."""
        if self.propagated:
            change = abs(self.change[i, f] - self.change[i, e])
            return float(change + self.rounding[i, e] + self.rounding[i, f])
        rtol, atol = self.tolerance
        scores = np.abs(choice.scores[0][row, [e, f]])
        return float(np.sum(atol + rtol * scores))


def narrowest(dump: RankDump) -> str:
    """Return the floating-point type with the fewest bits among the tensors of a dump."""
    kinds = filter(is_float, dump.dtypes)
    return min(kinds, key=lambda k: FLOATS[k].bits, default="float32")


def _apart(
    mine: Sequence[tuple[Array, str]],
    theirs: Sequence[tuple[Array, str]],
    rows: int,
    profile: Profile,
) -> Array:
    """Return how far the rows of the inputs are apart, in L2, over what the profile allows."""
    found = np.zeros(rows)
    for (x, _), (y, dtype) in zip(mine, theirs, strict=True):
        allowed = profile.tolerance(profile.line(dtype))
        if x.shape != y.shape or allowed is None or len(x) != rows:
            continue
        rtol, atol = (_ROWS * part for part in allowed)
        limit = rtol * np.linalg.norm(x, axis=1) + atol * math.sqrt(x.shape[1])
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.linalg.norm(y - x, axis=1) / limit
        found = np.maximum(found, np.nan_to_num(ratio, nan=0.0, posinf=np.inf))
    return found


class _Scores:
    """Scores recomputed from the router's input, for some rows of the record that a call was given."""

    def __init__(self, dump: RankDump, key: str, record: TensorRecord, rows: Array) -> None:
        calls = list(dump.calls.values())
        at = next(i for i, call in enumerate(calls) if call.key == key)
        before = [c for c in calls[:at] if c.kind == "api" and c.phase is Phase.FORWARD]
        self._calls = before[-_BACK:]
        self._record, self._rows = record, rows
        self._count = math.prod(record.shape[:-1])
        self.leaves: list[tuple[Array, str]] = []

    def evaluate(self) -> Approx | None:
        """Return the scores of the rows; None: their calls are not in the dump, or none of them is a product."""
        value, crossed = self._value(self._record, len(self._calls), _DEPTH)
        return value.reshape(len(self._rows), -1) if crossed else None

    def _maker(self, record: TensorRecord, before: int) -> tuple[int, int] | None:
        """Return the last call before a position that made a tensor, and the number of the output."""
        wanted = record.load()
        for i in range(before - 1, -1, -1):
            for j, output in enumerate(self._calls[i].outputs):
                if not isinstance(output, TensorRecord) or output.read is None:
                    continue
                alike = output.dtype == record.dtype and math.prod(output.shape) == wanted.size
                if alike and np.array_equal(output.load().reshape(wanted.shape), wanted):
                    return i, j
        return None

    def _value(self, record: TensorRecord, before: int, depth: int) -> tuple[Approx, bool]:
        """Return a tensor's rows, recomputed if possible, and whether a product was among the operators."""
        made = self._maker(record, before) if depth else None
        if made is not None:
            i, j = made
            call = self._calls[i]
            formula = find(call.name)
            sources = [v for v in call.inputs if isinstance(v, TensorRecord)]
            view = formula is not None and formula.name in VIEWS and len(sources) == 1
            if view and self._fits(sources[0]) and sources[0].shape[-1] == record.shape[-1]:
                return self._value(sources[0], i, depth)
            if formula is not None and self._fits(call.outputs[j]):
                product = formula.name in PRODUCTS
                crossed = product

                def given(value: Value) -> Any:
                    nonlocal crossed
                    if not isinstance(value, TensorRecord):
                        return plain(value)
                    if not is_float(value.dtype):  # a mask
                        values = value.load()
                        return self._cut(values) if self._fits(value) else values
                    x, passed = self._value(value, i, 0 if product else depth - 1)
                    crossed = crossed or passed
                    return x

                arguments = formula.bind(
                    [given(v) for v in call.inputs], {n: given(v) for n, v in call.kwargs.items()}
                )
                result = list(formula.compute(arguments))[j]
                if isinstance(result, Approx):
                    return result, crossed
        return self._leaf(record, before), False

    def _fits(self, record: Value) -> bool:
        if not isinstance(record, TensorRecord) or len(record.shape) < 2:
            return False
        return math.prod(record.shape[:-1]) == self._count

    def _cut(self, values: Array) -> Array:
        return values.reshape(-1, values.shape[-1])[self._rows]

    def _leaf(self, record: TensorRecord, before: int) -> Approx:
        values = np.asarray(record.load(), np.float64)
        if self._fits(record):
            values = self._cut(values)
            self.leaves.append((values, self._narrow(record, before)))
        return exactly(values, record.dtype, False)

    def _narrow(self, record: TensorRecord, before: int) -> str:
        """Return the type that a tensor had before it was cast to a wider one."""
        made = self._maker(record, before)
        if made is None:
            return record.dtype
        inputs = [v for v in self._calls[made[0]].inputs if isinstance(v, TensorRecord)]
        if len(inputs) == 1 and inputs[0].shape == record.shape and is_float(inputs[0].dtype):
            return min(inputs[0].dtype, record.dtype, key=lambda k: FLOATS[k].bits)
        return record.dtype
