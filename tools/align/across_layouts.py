"""Compare two runs whose calls differ: runs of other layouts, or written for other frameworks.

Each run is judged by itself: every operator is replayed from its own inputs, every collective from what all its ranks
sent, over the ranks that the layout of its input names. The tensors that both runs must have (*points*: gradients of
weights, weights and states before and after their update, and what a map names) are merged over all ranks and compared.
A fault that leaves every operator correct (other data, a missing collective, a weight sharded in the wrong position)
shows at a point; other faults show at their operator.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from telechat_moe.files import Progress
from telechat_moe.numerics import FLOATS, Array, is_float
from telechat_moe.tools.align.bisect import bisect
from telechat_moe.tools.align.dump.records import (
    Call,
    Dump,
    RankDump,
    TensorRecord,
    nbytes_of,
)
from telechat_moe.tools.align.explain.sides import ComparedPrograms
from telechat_moe.tools.align.judge.collectives import with_groups
from telechat_moe.tools.align.judge.comparison import ReferenceCache
from telechat_moe.tools.align.judge.coverage import SHARED, CoverageShare, answer
from telechat_moe.tools.align.judge.distance import (
    factor_between,
    relative_distance,
    rows_scaled,
)
from telechat_moe.tools.align.judge.outcome import Finding, Outcome
from telechat_moe.tools.align.judge.pairing import named_differently, narrowest_of
from telechat_moe.tools.align.judge.pins import (
    ReferenceChoices,
    TrackedValue,
    chose_otherwise,
    narrowest,
    set_part,
)
from telechat_moe.tools.align.judge.points import (
    STATES,
    SharedTensor,
    TensorPair,
    at_worst,
    by_use,
    by_weight,
)
from telechat_moe.tools.align.judge.precedence import in_order, is_before
from telechat_moe.tools.align.judge.propagate import Propagation, allowed, can_follow
from telechat_moe.tools.align.judge.replay import replay_call
from telechat_moe.tools.align.judge.shards import apart, in_shards, without_counterpart
from telechat_moe.tools.align.judge.standard import Standard
from telechat_moe.tools.align.judge.verdict import Explanation, Status, Verdict
from telechat_moe.tools.align.maps.links import Link, check_map, linked
from telechat_moe.tools.align.maps.tensor_map import tensor_map
from telechat_moe.tools.align.thresholds import AMPLIFIED, FIRST_ORDER, TOLERANCE, VAGUE

_FEW = 4  # tensors that are wrong by one factor for a reason of their own
_BEHIND = 1e9  # more than a run has calls

_STATE = re.compile(r"^(gradient|weight|exp_avg|exp_avg_sq|momentum_buffer) of | (before|after)$")

_ROWS = "scale of rows"
_OTHERWISE = "the programs compute it differently: all that is computed from it agrees"
_UNKNOWN: Explanation = ("unknown", "")
_ALONE = "most calls have no counterpart in the reference: their weights were not compared"
_LATE = "the steps before, in which runs part by rounding, are not in the dumps"


def across(
    reference: Dump,
    target: Dump,
    links: Sequence[Link] = (),
    tolerance: float | None = None,
    progress: Progress | None = None,
    standard: Standard | None = None,
) -> Outcome:
    """Compare a run with one of another layout or framework; see the module.

    Args:
        links: A map; if empty, gradients, weights and states are linked by the name of their weight.
        tolerance: The relative L2 distance allowed for whole tensors; None: derived, or else by type from :data:`TOLERANCE`.
        standard: Judges the shared tensors in place of distances.
    """
    steps = [step for step in target.steps if step in reference.steps]
    if not steps:
        return Outcome("inconclusive", reason="the dumps have no step in common")
    if links:
        check_map(links, reference, target)
    elif named_differently(reference.at(steps[0]), target.at(steps[0])):
        links = tensor_map(reference, target)
    grouped = with_groups(target)
    sharded = grouped if links else in_shards(reference, grouped)
    outcome = bisect(sharded, target, ReferenceCache(), itself=True, progress=progress)
    findings, judged = list(outcome.findings), dict(outcome.judged)
    recomputed = sum(judged.values())
    points, unknown = _Points(outcome, tolerance, standard), Counter(outcome.unknown)
    outcome.coverage.shares[SHARED] = CoverageShare()
    for step in steps:
        a, b = reference.at(step), target.at(step)
        pairs = linked(a, b, links) if links else [*by_weight(a, b)]
        if not links and not findings and not chose_otherwise(a, b):
            findings += apart(sharded.at(step), grouped.at(step), updates=bool(pairs))
        if not pairs and not links:
            pairs = by_use(a, b)
            if alone := without_counterpart(sharded.at(step), grouped.at(step)):
                outcome.coverage.count(SHARED, alone, {_ALONE: alone})
        points.begin(step, a, grouped.at(step), pinned=not links)
        for finding in (*points.choices(step, b), *points.at(step, b, pairs)):
            verdict = finding.verdict
            if progress is not None:
                progress("shared tensors", sum(judged.values()) - recomputed, None)
            judged[verdict.status] = judged.get(verdict.status, 0) + 1
            if verdict.status == "diverged":
                findings.append(finding)
            elif verdict.status == "not judged":
                unknown[verdict.reason] += 1
    calls = {f.verdict.key for f in outcome.findings}
    word, reason = answer(bool(findings), outcome.coverage)
    return replace(
        outcome, verdict=word, reason=reason, findings=in_order(findings, calls), settings=points.settings,
        judged=judged, unknown=unknown,
    )  # fmt: skip


# ------------------------------------------------------------------ comparison


class _Points:
    """Compares the whole tensors of both runs, step by step, after each operator of the target is judged by itself.

    The target's program is followed on the reference's weights and choices (``propagate.py``), so what differs legally,
    tokens that were routed otherwise and all that follows from them, does not come in.
    """

    def __init__(
        self, outcome: Outcome, tolerance: float | None, standard: Standard | None
    ) -> None:
        self.tolerance, self.coverage, self.standard = tolerance, outcome.coverage, standard
        wrong = {(step, key) for step, _, key, status, _ in outcome.calls if status != "pass"}
        self.right = {(step, key) for step, _, key, _, _ in outcome.calls} - wrong
        self.believed: ReferenceChoices | None = None
        self.followed: Propagation | None = None
        self.flipped = 0  # rows that chose otherwise, in this step or before
        self.kinds = "float32", "float32"
        """The narrowest types that reference and target compute in."""
        self.coarser = 1.0  # how much coarser the reference computes than the target; at least 1
        self.drift = 0.0  # how far weights are apart before the step, where it is not followed on the reference's
        self.exact = False  # whether what is allowed for the last point holds to first order
        self.step = -1
        self.late = False  # whether steps are not in the dumps that this one follows from
        self.last: dict[str, tuple[Array | None, Array | None]] = {}
        """Results of the updates of the step before, of both runs."""
        self.sides = ComparedPrograms([], [])
        self.wrong: list[tuple[SharedTensor, SharedTensor]] = []
        self.settings: list[str] = []

    def begin(self, step: int, a: Sequence[RankDump], b: Sequence[RankDump], pinned: bool) -> None:
        """Follow the target's program through a step."""
        self.kinds = narrowest_of(a), narrowest_of(b)
        units = [max(FLOATS[narrowest(r)].unit for r in ranks) for ranks in (a, b)]
        self.coarser = max(1.0, units[0] / units[1])
        self.last = self.last if step == self.step + 1 else {}
        self.late = not self.last and step > 0
        self.step, self.sides = step, ComparedPrograms(a, b)
        self.believed = ReferenceChoices(a, self.kinds[0], self.coarser) if pinned else None
        able = self.tolerance is None and can_follow(b)
        self.followed = Propagation(b, self.believed, self.followed) if able else None
        if pinned:
            self.flipped += chose_otherwise(a, b)

    def choices(self, step: int, b: Sequence[RankDump]) -> Iterator[Finding]:
        """Yield a finding for the scores of each choice of the step."""
        for chosen in self.believed.seen if self.believed is not None else ():
            call, worst = chosen.call, int(np.argmax(chosen.ratio))
            wrong, flips = int((chosen.ratio > 1).sum()), int(chosen.flipped.sum())
            status = "pass" if chosen.ratio[worst] <= 1 else "diverged"
            text = f"{flips} of {len(chosen.ratio)} rows chose otherwise, by nearly equal scores"
            if status == "diverged":
                allowed = chosen.apart[worst] / chosen.ratio[worst]
                text = (
                    f"{wrong} of {len(chosen.ratio)} rows choose by scores that are not the reference's: row {worst} "
                    f"differs by {chosen.apart[worst]:.2e}, {allowed:.0e} allowed"
                )
            if not chosen.comparable:
                status, text = "not judged", "the scores of both runs are other numbers"
            elif status == "diverged" and self.late:
                status, text = "not judged", f"{text}; {_LATE}"
            place = chosen.choice.chosen
            size = dict(call.tensors())[place].shape
            verdict = Verdict(
                call.key, place, status, float(chosen.ratio[worst]), text,
                (worst,), wrong, math.prod(size),
            )  # fmt: skip
            owner = next(r for r in b if r.rank == chosen.rank)
            order = list(owner.calls).index(call.key)
            yield self._counted(Finding(step, chosen.rank, order, verdict, call), "int32")

    def at(self, step: int, b: Sequence[RankDump], pairs: Iterable[TensorPair]) -> list[Finding]:
        """Return a finding for each point of a step; those that diverged in the order of the data flow."""
        updated: dict[str, tuple[Array | None, Array | None]] = {}
        findings: list[Finding] = []
        compared: list[tuple[Finding, tuple[SharedTensor, SharedTensor]]] = []
        for _, weight in groupby(pairs, lambda pair: _STATE.sub("", pair.name)):
            pairs_of_weight = [*weight]
            judged: dict[str, Status] = {}
            for pair in pairs_of_weight:
                name = pair.name
                if name.endswith(" after"):
                    updated[name.removesuffix(" after")] = pair.reference.values, pair.target.values
                finding = self._compare(pair, step, b)
                cause = self._follows(pair, finding, pairs_of_weight, judged)
                judged[name] = "pass" if cause else finding.verdict.status
                if cause:
                    verdict = replace(finding.verdict, status="pass", reason=f"{name}: {cause}")
                    finding = replace(finding, verdict=verdict, family="unknown", evidence="")
                bare_pair = at_worst(*pair[1:]), pair.target._replace(values=None)
                if finding.verdict.status == "pass":
                    self.sides.agreed.append(bare_pair)
                compared.append((finding, bare_pair))
        self.last = updated
        for finding, bare_pair in compared:
            verdict = finding.verdict
            if verdict.status == "diverged" and self.believed is None:
                verdict = self._otherwise(verdict, finding.family, bare_pair[1])
            if verdict.status == "diverged":
                self.wrong.append(bare_pair)
            dtype = bare_pair[1].dtype or "float32"
            findings.append(self._counted(replace(finding, verdict=verdict), dtype))
        if self.believed is None and not self.settings:
            self.settings = self.sides.settings(self.wrong)
        diverged = self.in_order([f for f in findings if f.verdict.status == "diverged"])
        return [*(f for f in findings if f.verdict.status != "diverged"), *diverged]

    def _otherwise(self, verdict: Verdict, family: str, target: SharedTensor) -> Verdict:
        """Return a verdict that allows for two programs: what differs, but makes the same of it, is not wrong."""
        status = "not judged" if family == _ROWS else verdict.status
        if self.sides.rejoins(target):
            status = "pass" if family == _ROWS else "not judged"
            verdict = replace(verdict, reason=f"{verdict.reason}; {_OTHERWISE}")
        return replace(verdict, status=status)

    def in_order(self, findings: list[Finding]) -> list[Finding]:
        """Return the findings of a step in the order of the data flow; the first with what is known about both sides."""
        points, self.wrong = self.wrong, []
        factors = Counter(f.evidence for f in findings if f.evidence)
        # One wrong gradient changes the norm, so clipping scales all others by one factor.
        clipped = {f.verdict.key for f in findings if factors[f.evidence] > _FEW}
        placed: list[tuple[Finding, SharedTensor, SharedTensor]] = []
        for f, (reference, target) in zip(findings, points, strict=True):
            late = _BEHIND * (f.verdict.key in clipped)
            placed.append((replace(f, order=self.sides.position(target) + late), reference, target))
        placed.sort(key=lambda p: (not is_before(p[0]), p[0].order))
        if placed:
            first, reference, target = placed[0]
            family, evidence, modules = self.sides.explained(reference, target)
            if first.evidence:
                family = first.family if family == "programs differ" else family
                evidence = f"{first.evidence}; {evidence}"
            first = replace(first, family=family, evidence=evidence, modules=modules)
            sent = self.sides.unmade(target) if self.believed is not None else None
            if sent is not None:
                rank, call, place = sent
                evidence = f"{place} of {call.key} is not what a call made; {first.verdict.reason}"
                verdict = replace(first.verdict, key=call.key, place=place, reason=evidence)
                first = replace(first, rank=rank, call=call, verdict=verdict)
            placed[0] = first, reference, target
        return [f for f, _, _ in placed]

    def _counted(self, finding: Finding, dtype: str) -> Finding:
        """Count a point in the coverage; return its finding."""
        verdict = finding.verdict
        size = nbytes_of(dtype, [verdict.elements])
        lacking = {verdict.reason: size} if verdict.status == "not judged" else {}
        self.coverage.count(SHARED, size, lacking)
        return finding

    def _follows(
        self,
        pair: TensorPair,
        finding: Finding,
        pairs: Sequence[TensorPair],
        judged: Mapping[str, Status],
    ) -> str:
        """Return why a state may be further off without a fault: its difference follows from tensors judged before.

        Adam divides by a root that may be almost zero: tiny differences can move a weight by the learning rate.
        """
        name, reference, target = pair
        state, _, when = name.rpartition(" ")
        status = finding.verdict.status
        if status == "pass" or target.values is None or reference.values is None or self.exact:
            return ""
        gradient = f"gradient of {state.partition(' of ')[2]}"
        if status == "not judged" and judged.get(gradient) != "pass":
            return ""
        if when == "after" and (finding.step, target.key) in self.right and finding.call:
            cause = "what the update makes of its gradient and states"
            return cause if _same_rule(finding.call, pairs) else ""
        last = self.last.get(state, (None, None))
        if when == "before" and all(
            x is not None and p.values is not None and np.array_equal(x, p.values)
            for x, p in zip(last, (reference, target), strict=True)
        ):
            return "what the update of the step before made"
        return ""

    def _compare(self, pair: TensorPair, step: int, ranks: Sequence[RankDump]) -> Finding:
        """Return the finding for a tensor that both runs have."""
        name, reference, target = pair
        x, y = target.values, reference.values
        owner = next((r for r in ranks if r.rank == target.rank and target.key in r.calls), None)
        call = owner.calls[target.key] if owner is not None else None
        order = list(owner.calls).index(target.key) if owner is not None else 0

        def finding(
            status: Status, reason: str, off: float = math.inf, kind: Explanation = _UNKNOWN
        ) -> Finding:
            size = max((v.size for v in (x, y) if v is not None), default=0)
            verdict = Verdict(target.key, target.place, status, off, reason, elements=size)
            return Finding(step, target.rank, order, verdict, call, *kind)

        if target.differs:
            kind = "missing reduction", "ranks that must hold the same do not"
            return finding("diverged", f"{name}: copies differ: {target.problem}", kind=kind)
        if x is None or y is None:
            text = f"a point is not known: {target.problem or reference.problem}"[:160]
            return finding("not judged", text, 0.0)
        if x.size != y.size:
            text = f"{list(x.shape)}, in the reference {list(y.shape)}"
            return finding("diverged", f"{name}: {text}", kind=("settings differ", text))
        if self.standard is not None:
            arrays = [x, y.reshape(x.shape)]
            verdict = self.standard.of(target.key, name, arrays, target.dtype, reference.dtype)
            self.standard.keep(step, target.rank, [verdict])
            return finding(verdict.status, f"{name}: {verdict.reason}", verdict.ratio)
        return finding(*self._by_distance(pair, ranks, x, y))

    def _by_distance(
        self, pair: TensorPair, ranks: Sequence[RankDump], x: Array, y: Array
    ) -> tuple[Status, str, float, Explanation]:
        """Return what a point comes to by how far the whole tensors x of the target and y are apart."""
        name, _, target = pair
        state, _, when = name.rpartition(" ")
        self.exact = self.believed is not None and when == "before" and state in self.last
        if self.exact:
            last = self.last[state][1]
            equal = last is not None and np.array_equal(last, x)
            text = f"{name}: {'' if equal else 'not '}what the update of the step before made"
            status, off = ("pass", 0.0) if equal else ("diverged", math.inf)
            return status, text, off, _UNKNOWN
        y = y.astype(np.float64)
        propagated = self._followed(target, y, ranks) if self.believed is not None else None
        if propagated is None and self.flipped and when != "before":
            text = f"{self.flipped} rows chose otherwise, and {name} cannot be followed"
            return "not judged", text, 0.0, _UNKNOWN
        x, squares = propagated or (x.astype(np.float64).reshape(y.shape), None)
        if self.believed is None:
            squares = self._squares(target, ranks, y.size)
        limit = self._limit(pair, y, squares, when == "before")
        self.exact = propagated is not None and limit < FIRST_ORDER
        if propagated is not None and limit > VAGUE:
            text = f"{name}: correct runs may differ by {limit:.1g}, too much to judge"
            return "not judged", text, 0.0, _UNKNOWN
        off = relative_distance(x, y, limit)
        if self.believed is None and when == "before" and math.isfinite(off):
            self.drift = max(self.drift, off * limit if state.startswith("weight ") else 0.0)
        text = f"{name}: relative L2 distance {off * limit:.2e} of the reference's, {limit:.0e} allowed"
        if off <= 1:
            return "pass", text, off, _UNKNOWN
        if self.late and (when == "before" or propagated is None) and self.believed is not None:
            return "not judged", f"{text}; {_LATE}", 0.0, _UNKNOWN
        kind = factor_between(x, y)
        if ".experts." in name and x.ndim > 1 and rows_scaled(x, y, 2 * limit):
            kind = _ROWS, "a factor for each row, such as the router's weights"
            text = f"{text}; {kind[1]}"
        return "diverged", text, off, kind

    def _tracked_values(
        self, target: SharedTensor, ranks: Sequence[RankDump]
    ) -> Iterator[tuple[int, TensorRecord, TrackedValue | None]]:
        """Yield of each rank that has a tensor its record, and it as the followed program makes it."""
        key, place = target.key, target.place
        for dump in ranks:
            if dump.rank in target.ranks and key in dump.calls:
                tracked = self.followed and self.followed.applied(dump.rank, key, place)
                yield dump.rank, dict(dump.calls[key].tensors())[place], tracked

    def _followed(
        self, target: SharedTensor, y: Array, ranks: Sequence[RankDump]
    ) -> tuple[Array, float] | None:
        """Return a tensor as the followed program makes it, and its sum of squared deviations; None: not known."""
        if self.followed is None or target.place.removeprefix("input.") in STATES:
            return None
        values, squares = np.full(y.shape, np.nan), np.zeros(y.shape)
        for rank, record, tracked in self._tracked_values(target, ranks):
            if tracked is None or not set_part(values, record, rank, tracked.value):
                return None
            sigma = np.broadcast_to(tracked.sigma, tracked.value.shape)
            set_part(squares, record, rank, np.square(sigma, dtype=np.float64))
        return None if np.isnan(values).any() else (values, float(squares.sum()))

    def _squares(self, target: SharedTensor, ranks: Sequence[RankDump], size: int) -> float | None:
        """Return the sum of squared deviations of a tensor of so many elements; None: not known."""
        tracked = [t for _, _, t in self._tracked_values(target, ranks)]
        means = [np.mean(np.square(t.sigma, dtype=np.float64)) for t in tracked if t is not None]
        if not tracked or len(means) < len(tracked) or self.coarser != 1:
            return None
        return float(np.mean(means)) * size

    def _limit(self, pair: TensorPair, y: Array, squares: float | None, before: bool) -> float:
        """Return how far apart whole tensors may be: derived where the program is followed, else by type."""
        if self.tolerance is not None:
            return self.tolerance
        kinds = [d for d in (pair.reference.dtype, pair.target.dtype) if is_float(d)]
        if not kinds:
            return 1e-12
        limit = max(FLOATS[d].unit for d in kinds)
        if squares is not None:
            limit = max(limit, self.coarser * allowed(squares, float(np.linalg.norm(y))))
        elif not before or self.last:
            narrow = min(kinds if before else (*kinds, self.kinds[1]), key=lambda d: FLOATS[d].bits)
            limit = TOLERANCE.get(narrow, TOLERANCE["bfloat16"])
        return limit + AMPLIFIED * self.drift


def _same_rule(update: Call, pairs: Sequence[TensorPair]) -> bool:
    """Return whether the reference's update is what the target's makes of the reference's gradient and states."""
    records: dict[tuple[str, str], TensorRecord] = {}
    for name, reference, _ in pairs:
        if reference.values is None:
            return True  # not known
        values = reference.values
        record = TensorRecord(reference.dtype, values.shape, read=lambda values=values: values)
        quantity, when = name.partition(" of ")[0], name.rpartition(" ")[2]
        records[quantity, when if when in ("before", "after") else ""] = record
    kwargs = dict(update.kwargs)
    states = [state for state in STATES if state in kwargs]
    needed = {(s, w) for s in states for w in ("before", "after")} | {("gradient", "")}
    if not needed <= records.keys():
        return True
    kwargs |= {s: records[s, "before"] for s in states} | {"grad": records["gradient", ""]}
    if "clip" in kwargs:  # gradients are as the update applies them
        kwargs["clip"] = TensorRecord("float32", (), read=lambda: np.ones((), np.float32))
    call = replace(update, kwargs=kwargs, outputs=[records[s, "after"] for s in states])
    return all(v.status != "diverged" for v in replay_call(call, call))
