"""Find the first divergent call of a run.

Evidence on each call is collected in the order of the run; ``precedence.py`` decides. The first call that fails is the
fault; later failures may follow from it.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from telechat_moe.files import Progress
from telechat_moe.tools.align.dump.records import Call, Dump, Phase, RankDump, TensorRecord
from telechat_moe.tools.align.judge.collectives import (
    ExchangeContext,
    is_exchange,
    judged_collectives,
)
from telechat_moe.tools.align.judge.context import layer_of, phase_of, values_at
from telechat_moe.tools.align.judge.coverage import Coverage, answer
from telechat_moe.tools.align.judge.data_flow import DataFlow
from telechat_moe.tools.align.judge.divergent_call import DivergentCall
from telechat_moe.tools.align.judge.edges import broken_edges, wrong_sums
from telechat_moe.tools.align.judge.fused_calls import FusedCallMatcher
from telechat_moe.tools.align.judge.missing_calls import missing_calls
from telechat_moe.tools.align.judge.other_run import OtherRun
from telechat_moe.tools.align.judge.outcome import CallStatus, Finding, Outcome
from telechat_moe.tools.align.judge.pairing import (
    STEP,
    aligned,
    content_of,
    split,
    without_recomputation,
    without_repeats,
)
from telechat_moe.tools.align.judge.precedence import (
    Evidence,
    decide,
    excused,
    follows_from_layout,
    in_order,
)
from telechat_moe.tools.align.judge.replay import other_settings, replay_call, turns_weights
from telechat_moe.tools.align.judge.shards import is_own
from telechat_moe.tools.align.judge.standard import Standard
from telechat_moe.tools.align.judge.verdict import Verdict, not_judged, worst

RankDumps = Mapping[int, RankDump]
RunKey = tuple[int, tuple[str, ...]]


@dataclass
class ReferenceCache:
    """What comparisons with the same reference share: its data flow, and verdicts on calls with equal contents."""

    flows: dict[RunKey, DataFlow] = field(default_factory=dict[RunKey, DataFlow])
    verdicts: dict[bytes, list[Verdict]] = field(default_factory=dict[bytes, list[Verdict]])

    def flow(self, reference: RankDump) -> DataFlow:
        """Return the data flow of a rank of the reference."""
        run = reference.rank, tuple(reference.calls)
        if run not in self.flows:
            self.flows[run] = DataFlow(reference)
        return self.flows[run]


def compare(
    reference: Dump,
    target: Dump,
    cache: ReferenceCache | None = None,
    itself: bool = False,
    progress: Progress | None = None,
    standard: Standard | None = None,
) -> Outcome:
    """Compare a run with a reference of the same layout; see the module.

    Args:
        cache: Results of earlier comparisons with the same reference; new ones are added.
        itself: The reference is the target, perhaps with another layout's tensors (``shards.py``): to agree shows nothing.
        standard: Judge tensors by a published standard, in place of recomputation and data flow.
    """
    common = [key for key in sorted(target.ranks) if key in reference.ranks]
    if not common:
        return Outcome("inconclusive", reason="the dumps have no step and rank in common")
    run = _Comparison(cache, itself, progress or _quiet, standard)
    for place in sorted({*target.ranks} ^ {*reference.ranks}):
        run.alone(target if place in target.ranks else reference, place, place in target.ranks)
    names: dict[tuple[int, int], dict[str, str]] = {}
    targets: dict[tuple[int, int], RankDump] = {}
    references: dict[tuple[int, int], RankDump] = {}
    for place in common:
        golden, judged = reference.ranks[place], target.ranks[place]
        if golden.calls.keys() != judged.calls.keys():
            golden, judged = without_recomputation(golden), without_recomputation(judged)
        named_target, names[place] = aligned(golden, judged)
        targets[place] = without_repeats(named_target, golden)
        references[place] = without_repeats(golden, named_target)
        if not {*targets[place].calls} & {*references[place].calls}:
            text = f"step {place[0]}, rank {place[1]}: the dumps have no call in common"
            return Outcome("inconclusive", reason=text)
    findings: list[Finding] = []
    for step in sorted({step for step, _ in common}):
        target_ranks = {rank: dump for (s, rank), dump in targets.items() if s == step}
        reference_ranks = {rank: references[step, rank] for rank in target_ranks}
        findings += run.of_collectives(reference_ranks, target_ranks) if standard is None else []
    for rank in sorted({rank for _, rank in common}):
        steps = [step for step, other in common if other == rank]
        reference_run = _joined([references[s, rank] for s in steps])
        others = {r: dump for (s, r), dump in targets.items() if r != rank and s == steps[-1]}
        findings += run.of_rank(reference_run, _joined([targets[s, rank] for s in steps]), others)
    joined = len({step for step, _ in common}) > 1
    findings = [run.with_phase(f, joined) for f in findings]
    findings = in_order(findings)
    if findings:
        f = findings[0]
        calls = [run[f.step, f.rank].calls.get(f.verdict.key) for run in (references, targets)]
        values = values_at(f.verdict, None if is_own(*calls) else calls[0], calls[1])
        findings[0] = replace(f, values=values)
    findings = [_own_name(f, names[f.step, f.rank]) for f in findings]
    verdict, reason = answer(bool(findings), run.coverage)
    reasons = {with_steps(text): counts for text, counts in run.coverage.reasons.items()}
    coverage = replace(run.coverage, reasons=reasons)
    unknown = {with_steps(text): count for text, count in run.unknown.items()}
    return Outcome(verdict, findings, run.judged, unknown, reason, run.seen, coverage)


def _quiet(activity: str, count: int, total: int | None) -> None:
    """Show no progress."""


class _Comparison:
    def __init__(
        self,
        cache: ReferenceCache | None,
        itself: bool,
        progress: Progress,
        standard: Standard | None,
    ) -> None:
        self.cache, self.itself = cache or ReferenceCache(), itself
        self.progress, self.standard = progress, standard
        self.remembers = cache is not None
        self.judged, self.unknown = Counter[str](), Counter[str]()
        self.coverage = Coverage()
        self.open: dict[tuple[int, int, str], list[Verdict]] = {}  # of collectives and inputs
        self.seen: list[CallStatus] = []
        self.reference_flows: dict[int, DataFlow] = {}
        self.confirmed = set[str]()  # by the other run, among others
        self.turned: dict[int, bool] = {}  # by dump

    def alone(self, dump: Dump, place: tuple[int, int], is_target: bool) -> None:
        """Count a step and rank that only one run has; its calls are not judged."""
        reason = f"step {place[0]}, rank {place[1]} is only in the {'target' if is_target else 'reference'}"
        self.unknown[reason] += 1
        for call in dump.ranks[place].calls.values() if is_target else ():
            if call.kind == "api":
                self.coverage.add(call, [not_judged(call.key, reason)])

    def of_rank(self, reference: RankDump, target: RankDump, others: RankDumps) -> list[Finding]:
        if self.standard is not None:
            return self._by_standard(self.standard, reference, target)
        flows = reference_flow, target_flow = self.cache.flow(reference), DataFlow(target)
        self.reference_flows[target.rank] = reference_flow
        wrong: dict[str, Verdict] = {}
        for verdict in (*broken_edges(*flows), *wrong_sums(*flows)):
            if self.itself and follows_from_layout(verdict, *flows):
                continue
            if verdict.status == "diverged":
                wrong.setdefault(verdict.key, verdict)
            elif verdict.status == "pass":
                self.coverage.by_other_run += verdict.basis == "other run"
            else:
                self._count(verdict, target)
        replaced = FusedCallMatcher(*flows)
        for verdict in (*replaced.verdicts, *replaced.otherwise(), *replaced.by_other_run()):
            self._count(verdict, target)
            if verdict.status == "diverged":
                wrong.setdefault(verdict.key, verdict)
        begins = _begins(target)
        self.confirmed = replaced.confirmed
        self._replayed(reference, target, wrong)
        findings = [
            Finding(
                *_step_and_rank(target, key),
                target_flow.order[key] - begins[key],
                verdict,
                call,
            )
            for key, verdict in wrong.items()
            if (call := target.calls.get(key)) is not None
        ]
        right = excused(replaced, wrong)
        # Beside a fault a call that only one run makes is rather its cause than another way to the same result.
        strict = any(finding.verdict.status == "diverged" for finding in findings)
        for order, verdict, call, kind in missing_calls(*flows, begins, right, strict):
            place = _step_and_rank(target, call.key)
            if verdict.status == "diverged":
                findings.append(Finding(*place, order, verdict, call, kind))
            else:
                self.unknown[verdict.reason] += 1
        findings = in_order(findings)
        if findings and (call := findings[0].call) is not None:
            findings[0] = replace(
                findings[0],
                phase=phase_of(call, reference_flow),
                layer=layer_of(call, target_flow),
                about=_divergent_call(findings[0].verdict, call, *flows, others),
            )
        return [_in_step(f) for f in findings]

    def _replayed(self, reference: RankDump, target: RankDump, wrong: dict[str, Verdict]) -> None:
        calls = reference.calls
        if self.itself:
            calls = {k: c for k, c in calls.items() if not is_own(c, target.calls.get(k))}
        other = OtherRun(replace(reference, calls=calls), target, self.confirmed)
        kind = "api" if any(c.kind == "api" for c in target.calls.values()) else "module"
        backward = [c for c in target.calls.values() if c.phase is Phase.BACKWARD]
        returns = not all(map(_returns_nothing, backward))
        for i, (key, call) in enumerate(target.calls.items()):
            self.progress(f"rank {target.rank}: calls", i, len(target.calls))
            step, name = split(key, target.step)
            if call.kind != kind or call.only_numbers:
                continue
            if returns and _returns_nothing(call) and _returns_nothing(calls.get(key, call)):
                continue
            others, group = self.open.get((step, target.rank, name), []), None
            if is_exchange(call):
                group, others = [v for v in others if v.status == "not judged"], []
                if not group:
                    self.coverage.add(call, [])
                    continue
            evidence = Evidence(
                key,
                group,
                replay=partial(self._replay, call, reference, target),
                other_run=partial(other.judged, call),
                reference_excess=partial(self._excess, key, reference),
                settings=partial(other_settings, call, calls.get(key)),
                itself=self.itself,
            )
            first = self._see((step, target.rank, name), call, decide(evidence), others)
            if first.status == "diverged":
                wrong.setdefault(key, first)

    def _by_standard(
        self, standard: Standard, reference: RankDump, target: RankDump
    ) -> list[Finding]:
        """Return the calls of a rank with a tensor that fails a standard."""
        findings: list[Finding] = []
        begins = _begins(target)
        for i, (key, call) in enumerate(target.calls.items()):
            self.progress(f"rank {target.rank}: calls", i, len(target.calls))
            call_place = (*_step_and_rank(target, key), split(key, target.step)[1])
            verdicts = standard.verdicts(call, reference, target)
            if verdicts:
                first = self._see(call_place, call, verdicts)
                if first.status == "diverged":
                    kind = "beyond the standard", standard.profile.name
                    findings.append(Finding(*call_place[:2], i - begins[key], first, call, *kind))
        for key, call in reference.calls.items():
            if key not in target.calls:
                call_place = (*_step_and_rank(reference, key), split(key, reference.step)[1])
                self._see(call_place, call, [not_judged(key, "the target does not run this call")])
        return [_in_step(f) for f in findings]

    def _see(
        self,
        call_place: tuple[int, int, str],
        call: Call,
        verdicts: list[Verdict],
        others: Sequence[Verdict] = (),
    ) -> Verdict:
        """Count the verdicts of a call, ``others`` only in the coverage; return the one that decides."""
        first = worst(verdicts)
        self.judged.update(v.status for v in verdicts)
        self.coverage.add(call, [*verdicts, *others])
        self.seen.append((*call_place, first.status, first.ratio))
        if first.status == "not judged":
            self.unknown[first.reason] += 1
        return first

    def _replay(self, call: Call, reference: RankDump, target: RankDump) -> list[Verdict]:
        forward, settings = (run.calls.get(call.forward_key) for run in (target, reference))
        if not self.remembers:
            return replay_call(call, forward, settings, self._turned(reference))
        bare = settings and settings.changed(
            lambda _, v: None if isinstance(v, TensorRecord) else v
        )
        arguments = [bare.inputs, [*bare.kwargs.items()]] if bare else None
        mark = content_of(call.name, call.phase, call, forward is not call and forward, arguments)
        if mark not in self.cache.verdicts:
            self.cache.verdicts[mark] = replay_call(
                call, forward, settings, self._turned(reference)
            )
        return [replace(v, key=call.key) for v in self.cache.verdicts[mark]]

    def _turned(self, dump: RankDump) -> bool:
        """Return whether a dump holds the gradients of transposed weights."""
        if id(dump) not in self.turned:
            self.turned[id(dump)] = turns_weights(dump)
        return self.turned[id(dump)]

    def _excess(self, key: str, reference: RankDump) -> float:
        """Return how far the reference's own call exceeds its bound; 0 if it is right."""
        call = reference.calls.get(key)
        if call is None:
            return 0.0
        forward = reference.calls.get(call.forward_key)
        first = worst(replay_call(call, forward, turned=self._turned(reference)))
        return first.ratio if first.status == "diverged" else 0.0

    def _count(self, verdict: Verdict, target: RankDump) -> None:
        """Count a verdict on a collective or an input; an open one of a collective once the other run has judged it, too."""
        if verdict.status == "not judged":
            step, key = split(verdict.key, target.step)
            self.open.setdefault((step, target.rank, key), []).append(verdict)
            call = target.calls.get(verdict.key)
            if call is not None and is_exchange(call) and not call.only_numbers:
                return
            self.unknown[verdict.reason] += 1
        self.judged[verdict.status] += 1

    def of_collectives(
        self, references: Mapping[int, RankDump], targets: Mapping[int, RankDump]
    ) -> list[Finding]:
        """Return the collectives of a step that gave a rank something other than its group sent."""
        findings: list[Finding] = []
        for received in judged_collectives([targets[r] for r in sorted(targets)], references):
            verdict, rank = received.verdict, received.rank
            self._count(verdict, targets[rank])
            if verdict.status == "diverged":
                order = list(targets[rank].calls).index(verdict.key)
                about = ExchangeContext(received, targets, references)
                position = targets[rank].step, rank, order
                findings.append(Finding(*position, verdict, received.call, about=about))
        return findings

    def with_phase(self, f: Finding, joined: bool) -> Finding:
        if f.phase is not None or f.call is None or not is_exchange(f.call):
            return f
        name = f"{f.step}{STEP}{f.call.key}" if joined else f.call.key
        return replace(f, phase=phase_of(replace(f.call, key=name), self.reference_flows[f.rank]))


def _returns_nothing(call: Call) -> bool:
    """Return whether a module's backward call has no result to judge, as of one whose inputs need no gradient."""
    return call.kind == "module" and call.phase is Phase.BACKWARD and not call.outputs


def _step_and_rank(target: RankDump, key: str) -> tuple[int, int]:
    return split(key, target.step)[0], target.rank


def _begins(target: RankDump) -> dict[str, int]:
    """Return for each call the position of the first call of its step."""
    first: dict[int, int] = {}
    return {
        key: first.setdefault(split(key, target.step)[0], i) for i, key in enumerate(target.calls)
    }


def _own_name(finding: Finding, names: Mapping[str, str]) -> Finding:
    key = names.get(finding.verdict.key, finding.verdict.key)
    return _renamed(finding, key, finding.verdict.reason.replace(finding.verdict.key, key))


def _in_step(finding: Finding) -> Finding:
    """Return a finding of joined steps with its own step and key."""
    step, key = split(finding.verdict.key, finding.step)
    return _renamed(replace(finding, step=step), key, with_steps(finding.verdict.reason))


def with_steps(text: str) -> str:
    """Return a text in which the calls of joined steps are named as users know them."""
    return re.sub(r"\b(\d+)[|](\S+)", r"\2 of step \1", text)


def _renamed(finding: Finding, key: str, reason: str) -> Finding:
    call = replace(finding.call, key=key) if finding.call else None
    return replace(finding, verdict=replace(finding.verdict, key=key, reason=reason), call=call)


def _joined(dumps: list[RankDump]) -> RankDump:
    """Join the steps of a rank into one run, so that weights can be followed from an update to their next use."""
    if len(dumps) == 1:
        return dumps[0]
    calls: dict[str, Call] = {}
    for dump in dumps:
        for key, call in dump.calls.items():
            name = f"{dump.step}{STEP}{key}"
            calls[name] = replace(call, key=name)
    return replace(dumps[0], calls=calls)


def _divergent_call(
    verdict: Verdict, call: Call, reference_flow: DataFlow, target_flow: DataFlow, others: RankDumps
) -> DivergentCall:
    wrong_outputs = 1
    if call.phase is not Phase.BACKWARD and len(call.outputs) > 1:
        verdicts = replay_call(call, call, reference_flow.dump.calls.get(call.key))
        wrong_outputs = sum(v.status == "diverged" for v in verdicts)
    return DivergentCall(verdict, call, reference_flow, target_flow, others, wrong_outputs)
