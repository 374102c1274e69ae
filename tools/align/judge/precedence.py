"""Decide which evidence counts where several kinds of it meet: the one place for that.

============  ===========================================  ======================================================
evidence      presupposes                                  what it decides
============  ===========================================  ======================================================
edge, sum     both ends of an edge, in both runs           an alarm that no other evidence lifts
group         what every rank of a collective sent         collectives, in place of replay
replay        a formula, and the values of all operands    a pass or an alarm; what it leaves open, the other run
other run     the same call in both runs                   what replay or the group leaves open, nothing else
both runs     replay of the reference's call               lifts an alarm of a call that is as wrong in both runs
settings      the same call in both runs                   an alarm on a number that differs, though values pass
fused calls   calls that replace one another               lift "missing" and "extra"; an alarm on their results
lone call     nothing                                      an alarm, unless what follows agrees in both runs
layout        weights that both runs share                 an alarm after those on operators, at whole tensors
============  ===========================================  ======================================================

Of one call the first alarm in this order is reported, of a run the first call. A dump's own tensors, where the reference
is cut into the target's shards, can show a fault and never a pass.
"""

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from telechat_moe.tools.align.dump.records import Phase
from telechat_moe.tools.align.judge.data_flow import DataFlow, is_weight
from telechat_moe.tools.align.judge.fused_calls import FusedCallMatcher
from telechat_moe.tools.align.judge.outcome import Finding
from telechat_moe.tools.align.judge.points import STATES
from telechat_moe.tools.align.judge.verdict import Verdict, not_judged, worst
from telechat_moe.tools.align.thresholds import BOTH_WRONG


@dataclass(frozen=True)
class Evidence:
    """What there is on one call; functions are asked only if they can decide."""

    key: str
    group: list[Verdict] | None  # what its group leaves open, of a collective
    replay: Callable[[], list[Verdict]]
    other_run: Callable[[list[Verdict]], list[Verdict]]  # answers what others leave open
    reference_excess: Callable[[], float]  # how far the reference's call exceeds its bound
    settings: Callable[[], str]  # which number of the call is not the reference's; empty: none
    itself: bool  # whether the reference is the target itself, in part


def decide(evidence: Evidence) -> list[Verdict]:
    """Return the verdicts on the tensors of a call; the worst of them is that of the call."""
    verdicts = evidence.replay() if evidence.group is None else evidence.group
    answered = evidence.other_run(verdicts)
    if not evidence.itself or worst(answered).status == "diverged":
        verdicts = answered
    first = worst(verdicts)
    alarms = first.status == "diverged" and not evidence.itself
    if alarms and first.ratio <= BOTH_WRONG * evidence.reference_excess():
        text = f"{first.place}: beyond its bound in both runs (`align` of one run shows it)"
        open_verdict = not_judged(evidence.key, text, first.place)
        verdicts = [open_verdict if v is first else v for v in verdicts]
    if worst(verdicts).status != "diverged" and (text := evidence.settings()):
        verdicts = [*verdicts, Verdict(evidence.key, "", "diverged", float("inf"), text)]
    return verdicts


def follows_from_layout(verdict: Verdict, reference: DataFlow, target: DataFlow) -> bool:
    """Return whether an edge may differ because of another layout: of what only collectives or updates take."""
    place = verdict.key, verdict.place
    made_in_target = not reference.sources_of(place) and target.sources_of(place)
    return verdict.status == "not judged" or bool(made_in_target) or verdict.key in target.late


def excused(fused: FusedCallMatcher, wrong: Container[str]) -> frozenset[str]:
    """Return the calls of one run alone that are no fault by themselves: replaced, not judged, or explained by a wrong one."""
    alone = fused.new | fused.lost
    if any(key in wrong for key in fused.new):
        return alone
    return fused.right | fused.unjudged


def in_order(findings: Iterable[Finding], operators: Container[str] | None = None) -> list[Finding]:
    """Return findings, the one to report first.

    Args:
        operators: Of runs with other layouts, the calls of findings on operators: they precede whole tensors, and tensors that are
            wrong before the step precede both.
    """
    if operators is None:
        return sorted(findings, key=lambda f: (f.step, f.order, f.rank))
    return sorted(
        findings,
        key=lambda f: (f.step, not is_before(f), f.verdict.key not in operators, f.order, f.rank),
    )


def is_before(finding: Finding) -> bool:
    """Return whether a tensor is wrong before the step, so that nothing within it can have changed the tensor."""
    place, call = finding.verdict.place, finding.call
    is_used = call is not None and call.phase is Phase.FORWARD and is_weight(call, place)
    return is_used or place.startswith("parameters") or place.removeprefix("input.") in STATES
