"""Compare the tensors of two dumps by a published standard, one by one and in chunks, so that memory stays bounded.

Tensors are paired by step, rank, call and position; an additional or missing call does not shift the others
(``pairing.aligned``). A pair is judged by the best information that both dumps have: values; else fingerprints; else
checksum and statistics, which can show that tensors differ by more than a standard allows, but seldom that they do not.
Discrete decisions are judged by ``decisions.py``. After a legal flip the routing is pinned: tokens that were routed
alike are compared, and where tokens mix, calls are judged by isolated replay.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from telechat_moe.tools.align.compare.measures import Check, Chunk, Measure
from telechat_moe.tools.align.compare.pinning import Pinned
from telechat_moe.tools.align.compare.profiles import Profile
from telechat_moe.tools.align.compare.rows import Outcome, Row
from telechat_moe.tools.align.compare.without_values import without_values
from telechat_moe.tools.align.dump import value_files
from telechat_moe.tools.align.dump.records import (
    Call,
    Dump,
    RankDump,
    Scalar,
    TensorRecord,
    nbytes_of,
)
from telechat_moe.tools.align.judge.coverage import Coverage, answer
from telechat_moe.tools.align.judge.pairing import aligned
from telechat_moe.tools.align.numerics import FLOATS, is_float

Array = np.ndarray[Any, np.dtype[Any]]

CHUNK = 1 << 13
"""Elements of a chunk: in float64 they fit a core's cache, and malloc does not return them to the system each time."""

_EXTREME = {kind.largest for kind in FLOATS.values()} | {math.inf}
LACKING = {True: "left out", False: "not comparable"}
"""Status of what one run lacks, by whether the caller wants it left out."""
_SCALARS = 1e-6  # relative difference allowed for settings that were stored in a narrower type


class Pair(NamedTuple):
    """Two tensors at the same position; None: that dump lacks the tensor."""

    key: str
    place: str
    golden: TensorRecord | None
    target: TensorRecord | None
    bench: TensorRecord | None = None


def compare(
    reference: Dump,
    target: Dump,
    profile: Profile,
    bench: Dump | None = None,
    steps: Sequence[int] | None = None,
    common: bool = False,
    progress: Callable[[int, int], None] | None = None,
    problems: Sequence[Row] = (),
) -> Outcome:
    """Compare two dumps of the same layout.

    Args:
        bench: A third run, for standards that need one.
        steps: Compare only these steps.
        common: Calls and ranks that only one dump has do not make the runs incomparable.
        progress: Called with the number of calls done and the number of all calls.
        problems: Rows of tensors that could not be merged (``dump/merge.py``).

    Raises:
        BadInputError: A dump is broken.
    """
    wanted = [
        k for k in sorted({*reference.ranks, *target.ranks}) if steps is None or k[0] in steps
    ]
    rows = list(problems)
    flips: dict[str, list[str]] = {"legal": [], "illegal": [], "not judged": []}
    nbytes = 0
    common_ranks = reference.ranks.keys() & target.ranks.keys()

    @cache
    def first_flip(key: tuple[int, int]) -> int | None:
        return _first_flip(reference.ranks[key], target.ranks[key])

    was, mixed = None, False
    spread = False  # flips of this step change the weights of all ranks in the next
    for step, rank in wanted:
        if step != was:
            mixed, was = mixed or spread, step
        key = step, rank
        if key not in common_ranks:
            lacking = "target" if key in reference.ranks else "reference"
            said, status = f"the {lacking} has no such step and rank", LACKING[common]
            rows.append(Row(step, rank, "", "", "", "", (), status, reason=said))
            continue
        golden = reference.ranks[key]
        judge = _Rank(golden, target.ranks[key], profile, bench.ranks.get(key) if bench else None)
        pinned = Pinned(judge.golden, judge.target, profile, mixed)
        others = [k for k in wanted if k[0] == step and k != key and k in common_ranks]
        found = (first_flip(k) for k in others)
        pinned.foreign = min((f for f in found if f is not None), default=None)
        rows += judge.rows(pinned, common, progress)
        nbytes += judge.nbytes
        for name, said in pinned.said.items():
            flips[name] += said
        spread = spread or pinned.active
    return outcome_of(rows, flips, profile, nbytes, bench is None)


def outcome_of(
    rows: list[Row], flips: dict[str, list[str]], profile: Profile, nbytes: int, alone: bool
) -> Outcome:
    """Return the outcome that the rows of all tensors amount to; ``alone``: there is no third run."""
    counts = Counter(row.status for row in rows)
    notes: list[str] = []
    if profile.third and alone:
        notes.append(f"{profile.name} needs a third run: --benchmark DUMP")
    judged = counts["pass"] + counts["diverged"]
    if judged < profile.cases:
        notes.append(
            f"{profile.name} requires {profile.cases:,} cases; these dumps have {judged:,}"
        )
    coverage = Coverage()
    for row in rows:
        if row.status != "left out":
            size = nbytes_of(row.dtype, row.shape) if row.dtype else 0
            known = row.status in ("pass", "diverged")
            coverage.count(row.phase or "tensors", size, {} if known else {row.reason: size})
    lacking = counts["not comparable"]
    problem = f"{lacking} tensors have no counterpart (--common leaves them out)" if lacking else ""
    verdict, reason = answer(bool(counts["diverged"]), coverage, problem)
    return Outcome(verdict, reason, profile.name, rows, flips, notes, nbytes, coverage)


def _first_flip(golden: RankDump, target: RankDump) -> int | None:
    """Return the number of the first call whose choice differs; None: no call's does."""
    for i, (key, call) in enumerate(golden.calls.items()):
        other = target.calls.get(key)
        theirs = dict(other.tensors()) if other else {}
        for place, record in call.tensors():
            mine = theirs.get(place)
            if not place.startswith("output") or is_float(record.dtype) or mine is None:
                continue
            if record.read is None or mine.read is None or record.shape != mine.shape:
                continue
            if not np.array_equal(record.load(), mine.load()):
                return i
    return None


class _Rank:
    """Compares one rank of a step."""

    def __init__(
        self, golden: RankDump, target: RankDump, profile: Profile, bench: RankDump | None
    ) -> None:
        self.golden, self.profile = golden, profile
        self.target, self.names = aligned(golden, target)
        self.bench = aligned(golden, bench)[0] if bench else None
        self.nbytes = 0

    def rows(
        self,
        pinned: Pinned,
        common: bool,
        progress: Callable[[int, int], None] | None,
    ) -> Iterator[Row]:
        """Yield a row for each tensor in the order of the reference, then rows for what only the target has."""
        total = len(self.golden.calls)
        for i, (key, call) in enumerate(self.golden.calls.items()):
            if progress is not None:
                progress(i, total)
            other = self.target.calls.get(key)
            lacking = "not judged" if pinned.active and not common else LACKING[common]
            if other is None:
                said = "the target does not run this call"
                yield self._row(call, "", None, lacking, reason=said)
                continue
            pinned.enter(i, call)
            found = [self._judge(pair, call, pinned) for pair in self._pairs(call, other)]
            if not pinned.active:
                found += self._settings(call, other)
            yield from self._replayed(found, call, pinned)
        lacking = "not judged" if pinned.active and not common else LACKING[common]
        said = "the reference does not run this call"
        for key, call in self.target.calls.items():
            if key not in self.golden.calls:
                yield self._row(call, "", None, lacking, reason=said)

    def _pairs(self, call: Call, other: Call) -> Iterator[Pair]:
        third = self.bench.calls.get(call.key) if self.bench else None
        mine, theirs, thirds = (dict(c.tensors()) if c else {} for c in (call, other, third))
        for place in mine | theirs:
            bench = thirds.get(place) if place in mine else None
            yield Pair(call.key, place, mine.get(place), theirs.get(place), bench)

    def _row(
        self, call: Call, place: str, record: TensorRecord | None, status: str, **said: Any
    ) -> Row:
        return Row(
            self.golden.step,
            self.golden.rank,
            self.names.get(call.key, call.key),
            place,
            call.phase.value,
            record.dtype if record else "",
            record.shape if record else (),
            status,
            **said,
        )

    def _judge(self, pair: Pair, call: Call, pinned: Pinned) -> Row:
        golden, target, place = pair.golden, pair.target, pair.place
        if golden is None or target is None:
            lacking = "target" if target is None else "reference"
            said = f"the {lacking} has no tensor there"
            return self._row(call, place, target or golden, "not comparable", reason=said)
        if (problem := _unlike(golden, target, self.profile)) is not None:
            return self._row(call, place, target, problem[0], reason=problem[1])
        row = self._row(call, place, target, "pass", basis="values")
        measure = self.profile.measure(target.dtype, golden.dtype)
        if measure is None:
            said = f"{self.profile.name} has no line for {target.dtype} against {golden.dtype}"
            return replace(row, status="not judged", basis="", reason=said)
        if golden.read is None or target.read is None:
            return without_values(row, golden, target, self.profile)
        return self._by_values(row, pair, measure, pinned)

    def _by_values(self, row: Row, pair: Pair, measure: Measure, pinned: Pinned) -> Row:
        assert pair.golden is not None
        assert pair.target is not None
        arrays = [pair.target.load(), pair.golden.load()]
        if self.profile.third and is_float(pair.target.dtype):
            if pair.bench is None or pair.bench.read is None or pair.bench.shape != row.shape:
                said = "the third run has no values of this tensor"
                return replace(row, status="not judged", basis="", reason=said)
            arrays.append(pair.bench.load())
        self.nbytes += sum(a.nbytes for a in arrays)
        integers = not is_float(pair.target.dtype)
        if integers and row.place.startswith("output") and not np.array_equal(arrays[0], arrays[1]):
            decided = pinned.decide(pair.key, (arrays[1], arrays[0]))
            if decided is not None:
                status, said = decided
                return replace(
                    row, status=status, basis="decision", reason=said, elements=arrays[0].size
                )
        keep = pinned.keep(row.shape)
        if keep is not None:
            row = replace(row, basis="tokens", note=f"{int(keep.sum())} of {keep.size} tokens")
        for chunk in chunks(arrays, keep):
            measure.add(chunk)
        for array in arrays:
            value_files.release(array)
        return measured(row, measure, arrays[0], keep)

    def _settings(self, call: Call, other: Call) -> list[Row]:
        """Return a row for each number or flag that differs between the runs."""
        found: list[Row] = []
        positions = zip(call.inputs, other.inputs, strict=False)
        pairs = [(f"input.{i}", a, b) for i, (a, b) in enumerate(positions)]
        pairs += [(f"input.{n}", v, other.kwargs.get(n)) for n, v in call.kwargs.items()]
        for place, a, b in pairs:
            if isinstance(a, Scalar) and isinstance(b, Scalar) and _other(a.value, b.value):
                said = f"setting {b.value!r}, reference {a.value!r}"
                found.append(
                    self._row(other, place, None, "diverged", basis="setting", reason=said)
                )
        return found

    def _replayed(self, rows: list[Row], call: Call, pinned: Pinned) -> list[Row]:
        """Return the rows of a call; those that earlier flips may have changed are judged by replay."""
        wrong = [
            r for r in rows if r.status == "diverged" and r.basis not in ("decision", "setting")
        ]
        if not pinned.active or not wrong:
            return rows
        answers = pinned.replay(call.key)
        follows = "follows from tokens that were routed differently"
        found: list[Row] = []
        for row in rows:
            verdict = answers.get(row.place)
            if row in wrong and verdict is None:
                row = replace(row, status="not judged", basis="", checks=[], reason=follows)
            elif row in wrong and verdict is not None:
                row = replace(
                    row,
                    status=verdict.status,
                    basis="replay",
                    element=verdict.element,
                    checks=[Check("error / bound", verdict.ratio, 1.0, verdict.status == "pass")],
                    reason=verdict.reason,
                    note="replayed in isolation",
                )
            found.append(row)
        return found


def _other(a: Any, b: Any) -> bool:
    """Return whether two settings are different numbers or flags; texts, which name types and devices, never are."""
    if isinstance(a, bool) != isinstance(b, bool) or isinstance(a, str) != isinstance(b, str):
        return False
    if isinstance(a, int | float) and isinstance(b, int | float):
        if abs(a) in _EXTREME and abs(b) in _EXTREME:
            return False  # -3.4e38 of float32 is -65504 of float16: what masks are filled with
        both = isinstance(a, int) and isinstance(b, int)
        return a != b if both else not math.isclose(a, b, rel_tol=_SCALARS) and a == a
    return False


def _unlike(golden: TensorRecord, target: TensorRecord, profile: Profile) -> tuple[str, str] | None:
    """Return status and reason where two tensors cannot be compared element by element."""
    if golden.shape != target.shape:
        said = f"shape {list(target.shape)}, reference {list(golden.shape)}"
        if golden.layout != target.layout and (golden.layout or target.layout):
            return "not comparable", f"{said}: laid out differently (merge them)"
        return "diverged", said
    if golden.dtype == target.dtype:
        return None
    said = f"type {target.dtype}, reference {golden.dtype}"
    if profile.same_dtype:
        return "diverged", said
    if is_float(golden.dtype) != is_float(target.dtype):
        return "not comparable", said
    return None


def chunks(arrays: Sequence[Array], keep: Array | None = None) -> Iterator[Chunk]:
    """Yield chunks of tensors of one shape, in the order of their elements; with ``keep``, of those rows only."""
    begin = 0
    for _, parts in value_files.chunks(arrays, CHUNK) if keep is None else _kept(arrays, keep):
        target, golden, *bench = map(_reals, parts) if parts[0].dtype.kind == "c" else parts
        yield Chunk(target, golden, begin, bench[0] if bench else None)
        begin += target.size


def _kept(arrays: Sequence[Array], keep: Array) -> Iterator[tuple[int, list[Array]]]:
    rows = keep.reshape(-1)
    tables = [a.reshape(rows.size, -1) for a in arrays]
    step = max(1, 8 * CHUNK // max(1, tables[0].shape[1]))
    for i in range(0, rows.size, step):
        kept = [t[i : i + step][rows[i : i + step]] for t in tables]
        yield from value_files.chunks(kept, CHUNK)
        for array in arrays:
            value_files.release(array)


def _reals(x: Array) -> Array:
    x = np.ascontiguousarray(x)
    return x.view(x.real.dtype)


def measured(row: Row, measure: Measure, values: Array, keep: Array | None) -> Row:
    """Return a row with the results of a measure that has seen all chunks of the target's values.

    ``keep`` has the rows of tokens that were compared; None: all.
    """
    size = values.size
    if keep is not None and keep.size:
        size = size // keep.size * int(np.count_nonzero(keep))
    if not size:
        return replace(row, note="no elements")
    checks = measure.checks()
    if measure.undefined:
        return replace(row, status="not judged", basis="", reason=measure.undefined)
    status = "pass" if all(c.ok for c in checks) else "diverged"
    note = "; ".join(x for x in (row.note, measure.note) if x)
    row = replace(row, status=status, checks=checks, note=note, elements=size)
    at = row.worst.at if row.worst else None
    if at is None:
        return row
    if values.dtype.kind == "c":
        at //= 2
    if keep is not None:
        inner = values.size // keep.size
        at = int(np.flatnonzero(keep)[at // inner]) * inner + at % inner
    element = tuple(int(i) for i in np.unravel_index(at, values.shape)) if values.ndim else ()
    return replace(row, element=element)
