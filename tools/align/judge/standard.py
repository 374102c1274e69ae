"""Judge the calls of a run by a published standard, in place of derived bounds.

Every tensor of a call must meet the standard against the reference's. A choice (of experts, arg-max, sort) that came
out otherwise is legal if isolated replay gives it from its own scores. From then on, calls that fail the standard are
judged by isolated replay, too, as their inputs may follow from the choice; so are all ranks, and the steps after it.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from telechat_moe.numerics import Array, is_float
from telechat_moe.tools.align.compare.checkpoints import merged
from telechat_moe.tools.align.compare.measures import Check
from telechat_moe.tools.align.compare.profiles import Profile
from telechat_moe.tools.align.compare.tensors import TensorComparison, compare, element
from telechat_moe.tools.align.dump.logical import Logical
from telechat_moe.tools.align.dump.records import Call, Dump, RankDump, TensorRecord, nbytes_of
from telechat_moe.tools.align.judge.coverage import Coverage, answer
from telechat_moe.tools.align.judge.distance import checksum, distance
from telechat_moe.tools.align.judge.outcome import Outcome
from telechat_moe.tools.align.judge.pairing import aligned, split
from telechat_moe.tools.align.judge.pins import by_own_scores
from telechat_moe.tools.align.judge.replay import replay_call
from telechat_moe.tools.align.judge.verdict import Verdict, not_judged

if TYPE_CHECKING:
    from telechat_moe.checkpoint.stored import Stored

LARGEST = 1 << 22
"""The most elements of a call that is replayed: in float64, with their bounds, they must fit into memory."""

_FOLLOWS = "follows from tokens that were routed differently"
_NO_VALUES = "no values, which a standard needs; without --standard, statistics can show a fault"


class JudgedTensor(NamedTuple):
    """What a standard says of a tensor of a step and rank; ``checks`` has its lines."""

    step: int
    rank: int
    verdict: Verdict
    checks: Sequence[Check] = ()


@dataclass(eq=False)
class Standard:
    """A published standard, and what it says of each tensor of a run."""

    profile: Profile
    reference: Dump
    target: Dump
    third: Dump | None = None  # a third run, for standards that need one
    replayed = 0  # how many tensors pass by isolated replay

    def __post_init__(self) -> None:
        self.tensors: list[JudgedTensor] = []
        self.flips: list[tuple[int, int, str]] = []
        """Choices that legally came out otherwise, as step, rank and key."""
        self._checks: dict[tuple[str, str], Sequence[Check]] = {}  # of the last call
        self._third_of = cache(self._aligned)

    def verdicts(self, call: Call, reference: RankDump, target: RankDump) -> list[Verdict]:
        """Return the verdicts of a call of the target on its tensors."""
        step, key = split(call.key, target.step)
        golden = reference.calls.get(call.key)
        if golden is None:
            return [not_judged(call.key, "the reference does not run this call")]
        third = self._third_of(step, target.rank)
        other = third.calls.get(key) if third is not None else None
        sides = [dict(c.tensors()) if c else {} for c in (call, golden, other)]
        places = sides[0] | sides[1]
        verdicts = [self._tensor(call.key, p, *(side.get(p) for side in sides)) for p in places]
        wrong = any(v.status == "diverged" for v in verdicts)
        if wrong and (step, self._orders.get((step, target.rank, key), math.inf)) >= self._first:
            verdicts = self._replayed(verdicts, call, reference, target)
        self.keep(step, target.rank, verdicts)
        return verdicts

    def keep(self, step: int, rank: int, verdicts: Sequence[Verdict]) -> None:
        """Add the verdicts of a call, which :meth:`of` may have given, to the tensors."""
        for v in verdicts:
            key = split(v.key, step)[1]
            checks = self._checks.get((v.key, v.place), ())
            self.tensors.append(JudgedTensor(step, rank, replace(v, key=key), checks))
        self._checks.clear()

    def of(
        self, key: str, place: str, arrays: Sequence[Array | Logical], dtype: str, golden: str
    ) -> Verdict:
        """Return what the standard says of a tensor: values of target, reference and maybe third run."""
        return self._verdict(key, place, compare(self.profile, arrays, dtype, golden), arrays[0])

    def as_json(self) -> dict[str, Any]:
        """Return the standard and the tensors, worst first, as plain JSON types."""
        order = ("diverged", "not judged", "pass")
        verdicts = [(t, t.verdict) for t in self.tensors]
        worst = sorted(verdicts, key=lambda t: (order.index(t[1].status), -t[1].ratio))
        cases, judged = self.profile.cases, sum(v.status != "not judged" for _, v in worst)
        few = f"{self.profile.name} requires {cases:,} cases; these dumps have {judged:,}"
        return {
            "name": self.profile.name,
            "source": self.profile.source,
            "notes": [few] if judged < cases else [],
            "replayed": self.replayed,
            "flips": [f"{key} of step {step}, rank {rank}" for step, rank, key in self.flips],
            "tensors": [
                {
                    "step": t.step,
                    "rank": t.rank,
                    "operator": v.key,
                    "tensor": v.place,
                    "status": v.status,
                    "observed_over_limit": finite(v.ratio),
                    "element": [*v.element],
                    "reason": v.reason,
                    "checks": [
                        {"metric": c.metric, "observed": finite(c.observed)}
                        | {"limit": c.limit, "ok": c.ok}
                        for c in t.checks
                    ],
                }
                for t, v in worst
            ],
        }

    def _tensor(
        self,
        key: str,
        place: str,
        target: TensorRecord | None,
        reference: TensorRecord | None,
        third: TensorRecord | None,
    ) -> Verdict:
        if target is None or reference is None:
            reason = f"the {'target' if target is None else 'reference'} has no tensor there"
            return not_judged(key, reason, place)
        if target.shape != reference.shape and target.layout != reference.layout:
            reason = f"laid out differently, {list(target.shape)} and {list(reference.shape)}"
            return not_judged(key, reason, place)
        if target.read is None or reference.read is None:
            return self._without_values(key, place, target, reference)
        arrays = [target.load(), reference.load()]
        if self.profile.third and is_float(target.dtype):
            if third is None or third.read is None or third.shape != target.shape:
                return not_judged(key, "the third run has no values of this tensor", place)
            arrays.append(third.load())
        return self.of(key, place, arrays, target.dtype, reference.dtype)

    def _without_values(
        self, key: str, place: str, target: TensorRecord, reference: TensorRecord
    ) -> Verdict:
        difference = distance(reference, target)
        sums = checksum(reference, target), checksum(target, reference)
        exact = self.profile.name == "bitwise" or not is_float(target.dtype)
        if difference is not None and difference.exact and not self.profile.nan_differs:
            size = math.prod(target.shape)
            return Verdict(key, place, "pass", reason="equal bits", elements=size)
        if exact and target.dtype == reference.dtype and None not in sums and sums[0] != sums[1]:
            return Verdict(key, place, "diverged", math.inf, "other bits")
        return not_judged(key, _NO_VALUES, place)

    def _verdict(
        self, key: str, place: str, result: TensorComparison, values: Array | Logical
    ) -> Verdict:
        worst = result.worst
        self._checks[key, place] = result.checks
        texts = [f"{worst.metric} {worst.observed:.3g}, limit {worst.limit:.3g}"] if worst else []
        texts += [result.note] if result.note else []
        ratio = worst.ratio if worst else math.inf if result.status == "diverged" else 0.0
        text, count = "; ".join(texts), math.prod(values.shape)
        return Verdict(key, place, result.status, ratio, text, result.element, elements=count)

    def _replayed(
        self, verdicts: list[Verdict], call: Call, reference: RankDump, target: RankDump
    ) -> list[Verdict]:
        """Return the verdicts of a call after a choice that came out otherwise; inputs are judged where they are made."""
        settings, forward = (run.calls.get(call.forward_key) for run in (reference, target))
        small = sum(math.prod(t.shape) for _, t in call.tensors()) <= LARGEST
        able = small and call.kind == "api"
        answers = replay_call(call, forward, settings) if able else []
        by_place = {v.place: v for v in answers if v.status != "not judged"}
        left: list[Verdict] = []
        for v in verdicts:
            chosen = _is_integer(dict(call.tensors())[v.place].dtype)
            replayed = by_place.get(v.place)
            if v.status != "diverged":
                left.append(v)
            elif replayed is not None:
                left.append(replace(replayed, reason=f"by replay: {replayed.reason}"))
                self.replayed += replayed.status == "pass"
            elif chosen and by_own_scores(reference.calls[call.key], call, v.place):
                left.append(Verdict(v.key, v.place, "pass", reason="chosen by its own scores"))
            elif v.place.startswith("output"):
                left.append(not_judged(v.key, _FOLLOWS, v.place))
            if chosen and v.status == "diverged" and left and left[-1].status == "pass":
                self.flips.append((split(call.key, target.step)[0], target.rank, v.key))
        return left

    def _aligned(self, step: int, rank: int) -> RankDump | None:
        third = self.third.ranks.get((step, rank)) if self.third is not None else None
        return third and aligned(self.reference.ranks[step, rank], third)[0]

    @cached_property
    def _orders(self) -> dict[tuple[int, int, str], int]:
        """The position of each call of the reference in its step."""
        dumps = self.reference.ranks.items()
        return {(*rank_key, key): i for rank_key, dump in dumps for i, key in enumerate(dump.calls)}

    @cached_property
    def _first(self) -> tuple[float, float]:
        """Step and position of the first call whose integers came out otherwise; infinite: none did."""
        positions = [(math.inf, math.inf)]
        for rank_key in self.reference.ranks.keys() & self.target.ranks.keys():
            golden = self.reference.ranks[rank_key]
            calls = aligned(golden, self.target.ranks[rank_key])[0].calls
            moved = (k for k, c in golden.calls.items() if k in calls and _chose(c, calls[k]))
            first = next(moved, None)
            if first is not None:
                positions.append((rank_key[0], self._orders[(*rank_key, first)]))
        return min(positions)


def judge_checkpoints(
    profile: Profile,
    reference: "Stored",
    target: "Stored",
    progress: Callable[[list[str]], Iterator[str]] = iter,
) -> tuple[Standard, Outcome]:
    """Return what a standard says of the tensors of two checkpoints, whose names ``progress`` wraps.

    Those that one of them lacks are not judged.

    Raises:
        LayoutError: Shards do not tile a tensor, or copies differ.
    """
    standard = Standard(profile, Dump(reference.path, {}), Dump(target.path, {}))
    coverage, judged, unknown = Coverage(), Counter[str](), Counter[str]()
    for name in progress(sorted(reference.tensors.keys() | target.tensors)):
        verdict = _stored(standard, name, reference, target)
        standard.keep(target.step, 0, [verdict])
        stored = target.tensors.get(name) or reference.tensors[name]
        nbytes = nbytes_of(stored.dtype, stored.shape)
        left = {verdict.reason: nbytes} if verdict.status == "not judged" else {}
        coverage.count(verdict.place, nbytes, left)
        judged[verdict.status] += 1
        unknown.update(left.keys())
    wrong, left = judged["diverged"], judged["not judged"]
    problem = f"{left} tensors were not compared" if left else ""
    verdict, reason = answer(bool(wrong), problem=problem)
    reason = f"{wrong} of {judged.total()} tensors do not meet {profile.name}" if wrong else reason
    verdicts = ((t.step, t.rank, t.verdict) for t in standard.tensors)
    statuses = [(step, rank, v.key, v.status, v.ratio) for step, rank, v in verdicts]
    return standard, Outcome(verdict, [], judged, unknown, reason, statuses, coverage)


def _stored(standard: Standard, name: str, reference: "Stored", target: "Stored") -> Verdict:
    golden, tensor = reference.tensors.get(name), target.tensors.get(name)
    if golden is None or tensor is None:
        path, present = (reference.path, golden) if tensor is None else (target.path, tensor)
        return not_judged(name, f"only in {path}", present.group if present else "")
    for property, expected, actual in (
        ("shape", list(golden.shape), list(tensor.shape)),
        ("type", golden.dtype, tensor.dtype),
    ):
        if expected != actual:
            return not_judged(name, f"{property} {actual}, reference {expected}", tensor.group)
    arrays = merged(tensor), merged(golden)
    verdict = standard.of(name, tensor.group, arrays, tensor.dtype, golden.dtype)
    if verdict.status != "diverged" or len(verdict.element) < len(tensor.shape):
        return verdict
    actual, expected = (element(x, verdict.element) for x in arrays)
    values = f"at {list(verdict.element)}: {actual!r}, reference {expected!r}"
    return replace(verdict, reason=f"{verdict.reason}; {values}")


def finite(x: float) -> float | None:
    """Return a number; None if it is infinite or NaN, which JSON has not."""
    return x if math.isfinite(x) else None


def _is_integer(dtype: str) -> bool:
    return dtype.startswith(("int", "uint", "bool"))


def _chose(golden: Call, target: Call) -> bool:
    reference_outputs = dict(golden.made())
    for place, record in target.made():
        other = reference_outputs.get(place)
        if (
            other is None
            or record.read is None
            or other.read is None
            or not _is_integer(record.dtype)
        ):
            continue
        difference = distance(other, record)
        if difference is None or difference.whole:
            return True
    return False
