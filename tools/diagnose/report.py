"""The diagnosis of a run: what is wrong, in one sentence, as plain data."""

from dataclasses import asdict, dataclass
from typing import Any

from telechat_moe.tools.diagnose.bound import StageBound, stage_bounds, waiting
from telechat_moe.tools.diagnose.causes import KINDS, Cause
from telechat_moe.tools.diagnose.excess import FEWEST
from telechat_moe.tools.diagnose.judge import Judge
from telechat_moe.tools.diagnose.records import COMM, COUNTS, LOCAL, LOST, Records
from telechat_moe.units import ranges_text, seconds_text


@dataclass(frozen=True)
class Diagnosis:
    """What was found out about the time of a run.

    Attributes:
        records: What it is from.
        step_s: Median step, seconds.
        causes: What is wrong, what costs most first.
        bounds: What bounds each stage.
        waiting: Share of all ranks' time spent waiting for other ranks.
        not_judged: What could not be judged, with the reason.
    """

    records: Records
    step_s: float
    causes: list[Cause]
    bounds: list[StageBound]
    waiting: float
    not_judged: dict[str, str]

    @property
    def verdict(self) -> str:
        """``pass``, ``fail``, or ``inconclusive``: nothing was found, and a rank was not judged."""
        if self.causes:
            return "fail"
        return "inconclusive" if self.records.absent or "ranks" in self.not_judged else "pass"

    def left(self) -> list[str]:
        """Return what was not judged, a line for each reason."""
        names: dict[str, list[str]] = {}
        for name, reason in self.not_judged.items():
            names.setdefault(reason, []).append(name)
        return [f"{', '.join(those)}: {reason}" for reason, those in names.items()]

    def says(self) -> str:
        """Return the answer: one sentence with numbers and the next thing to do."""
        if not self.causes:
            bound = self.bounds[0]
            share = bound.shares[bound.bound]
            subject = "no rank, host or link" if self.verdict == "pass" else "nothing"
            return (
                f"{subject} stands out in {len(self.records.steps):,} steps of {len(self.records.ranks):,} ranks: a step takes "
                f"{seconds_text(self.step_s)}, bound by the {bound.bound} ({share:.0%} of the latest rank's time)"
            )
        first = self.causes[0]
        others = f"; {len(self.causes) - 1} more below" if len(self.causes) > 1 else ""
        return (
            f"{who(first)} {what_text(first)}: {seconds_text(first.seconds)} a step ({first.share:+.1%}) in steps "
            f"{first.first_step}-{first.last_step}, which costs the run {first.lost:.1%} of its time; "
            f"{KINDS[first.kinds[0]].advice}{others}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        records = self.records
        return {
            "verdict": self.verdict,
            "says": self.says(),
            "source": records.source,
            "ranks": len(records.ranks),
            "steps": [int(records.steps[0]), int(records.steps[-1])],
            "step_seconds": self.step_s,
            "waiting": self.waiting,
            "causes": [
                asdict(cause)
                | {"who": who(cause), "advice": [KINDS[k].advice for k in cause.kinds]}
                for cause in self.causes
            ],
            "bounds": [
                {"stage": b.stage, "bound": b.bound, "shares": b.shares, "steps": b.steps}
                for b in self.bounds
            ],
            "recorded": sorted(records.columns),
            "problems": records.problems,
            "not_judged": self.not_judged,
        }


def diagnose(records: Records) -> Diagnosis:
    """Return what the times of a run show: causes, bounds and what could not be judged."""
    return Diagnosis(
        records,
        records.step_seconds(),
        Judge(records).causes() if len(records.steps) >= FEWEST else [],
        stage_bounds(records),
        waiting(records),
        _not_judged(records),
    )


def who(cause: Cause) -> str:
    """Return whom a cause is about: ``rank 3``, ``host a (ranks 8-15)``, ``the link of rank 3``, ``every rank``."""
    ranks = ranges_text(cause.ranks)
    if cause.scope == "run":
        return "every rank"
    if cause.scope == "host":
        return f"host {cause.host} (ranks {ranks})"
    name = f"rank {ranks}" if len(cause.ranks) == 1 else f"one of ranks {ranks}"
    return f"{name} on {cause.host}" if cause.host else name


def what_text(cause: Cause) -> str:
    """Return what a cause is; where records cannot tell kinds apart, all of them."""
    return " or ".join(KINDS[kind].says for kind in cause.kinds)


def _not_judged(records: Records) -> dict[str, str]:
    """Return what cannot be judged from these records, and why."""
    reasons: dict[str, str] = {}
    if absent := records.absent:
        reasons[f"rank{'s' * (len(absent) > 1)} {ranges_text(absent)}"] = "no times were read"
    alone = [int(s) for s in sorted(set(records.stage.tolist())) if (records.stage == s).sum() == 1]
    if len(records.steps) < FEWEST:
        reasons["ranks"] = f"{len(records.steps)} steps; ranks are compared from {FEWEST} steps on"
    elif alone:
        reasons["ranks"] = (
            f"stage {ranges_text(alone)} has one rank, which has no peers to compare it with"
        )
    for name in (*LOCAL, *LOST, *COUNTS):
        if name not in records.columns:
            reasons[name] = "not recorded"
    if records.pairs:
        if all(len(pairs.ends) < 2 for pairs in records.pairs.values()):
            reasons["links"] = "one link, which has no peers to compare it with"
    elif not records.axes:
        reasons["links"] = "no times of collectives were recorded"
    elif all(len(set(records.groups[axis].tolist())) < 2 for axis in records.axes):
        reasons["links"] = (
            f"collectives of one group ({COMM}{records.axes[0]}): links have no peers to compare them with"
        )
    return reasons
