"""The verdict of every verb, and the coverage that it rests on: how many calls and bytes were judged, phase by phase.

There are three verdicts: ``pass``, ``diverged`` and ``inconclusive``. What was not judged is never a pass: a pass needs
:data:`ENOUGH` of the calls and of the bytes in each phase of the step that the dumps hold.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from telechat_moe.tools.align.dump.records import Call, Phase
from telechat_moe.tools.align.judge.verdict import Verdict
from telechat_moe.tools.align.thresholds import ENOUGH

VERDICTS = ("diverged", "inconclusive", "pass")
"""The verdicts, worst first."""

SHARED = "shared tensors"
"""In place of a phase: the tensors that two runs of other layouts or frameworks must both have."""

_ADVICE = {
    r"were not dumped|no values|statistics|checksum": "values: msprobe's task `tensor` instead of `statistics`",
    r"inputs differ too much|may follow from them": "the same step with the same routing, or with weights and all arguments",
    r"no formula for": "values of this call in both runs (msprobe: task `tensor`), to judge it by the other run",
    r"argument '(weight|gamma|bias|other|mat2)'": "weights: msprobe's level `L1` or `mix`, which records all arguments",
    r"argument '\w+' is not in the dump": "all arguments of this call: msprobe's level `L1` or `mix`",
    r"forward call is not in the dump": "the forward pass of the same step, with the backward pass",
    r"an input comes from|only in the reference": "the calls between: no `list` or `scope` in msprobe's configuration",
    r"rank \d+ of its group|what rank \d+ sent": "every rank of the group",
    r"step \d+, rank \d+ is only": "the same steps and ranks in both runs",
    r"no output was dumped|no gradient of": "inputs and outputs of this call, forward and backward",
    r"laid out differently": "the layouts of both runs (--layouts FILE)",
    r"a point is not known|not known in the": "this tensor in both runs, with its layout",
}


@dataclass
class CoverageShare:
    """What was judged of a phase: calls (of `compare`: tensors), and bytes of their tensors."""

    calls: int = 0
    judged_calls: int = 0
    bytes: int = 0
    judged_bytes: int = 0

    @property
    def least(self) -> float:
        """The smaller of the shares of calls and of bytes that were judged."""
        shares = [self.judged_calls / self.calls] if self.calls else []
        shares += [self.judged_bytes / self.bytes] if self.bytes else []
        return min(shares, default=0.0)


@dataclass
class Coverage:
    """What was judged, by phase, and why the rest was not."""

    # By phase, or `SHARED`
    shares: dict[str, CoverageShare] = field(default_factory=dict[str, CoverageShare])
    # For each reason the number of calls and the bytes that were not judged
    reasons: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    by_other_run: int = 0  # tensors that were judged by the other run alone

    def count(self, phase: str, nbytes: int, lacking: Mapping[str, int]) -> None:
        """Count a call or tensor of some bytes; ``lacking`` has the bytes not judged, by reason."""
        share = self.shares.setdefault(phase, CoverageShare())
        share.calls += 1
        share.bytes += nbytes
        share.judged_calls += not lacking
        share.judged_bytes += max(0, nbytes - sum(lacking.values()))
        for reason, size in lacking.items():
            counts = self.reasons.setdefault(reason, [0, 0])
            counts[0] += 1
            counts[1] += size

    def add(self, call: Call, verdicts: Iterable[Verdict]) -> None:
        """Count a call: its outputs, and inputs that could not be judged."""
        verdicts = [*verdicts]
        self.by_other_run += sum(v.basis == "other run" for v in verdicts)
        sizes = {place: t.nbytes for place, t in call.tensors()}
        outputs = {place for place, _ in call.made()}
        unknown = {v.place: v.reason for v in verdicts if v.status == "not judged"}
        total = sum(sizes[place] for place in {*outputs, *(unknown.keys() & sizes.keys())})
        call_reason = next((text for place, text in unknown.items() if place not in sizes), None)
        lacking = dict[str, int]()
        for place, reason in ({"": call_reason} if call_reason is not None else unknown).items():
            lacking[reason] = lacking.get(reason, 0) + (sizes[place] if place else total)
        phase = Phase.BACKWARD if call.stage is Phase.REDUCTION else call.stage
        self.count(phase.value, total, lacking)

    def lacks(self) -> str:
        """Return in words which phases were judged too little for a pass; empty: none."""
        if not any(s.judged_calls for s in self.shares.values()):
            agree = sum(n for text, (n, _) in self.reasons.items() if "statistics agree" in text)
            statistics = f"; statistics of {agree:,} agree, which does not show that values do"
            return "not a single tensor could be judged" + (statistics if agree else "")
        few = [_sentence(name, s) for name, s in self.shares.items() if s.least < ENOUGH]
        return f"{'; '.join(few)}; a pass needs {ENOUGH:.0%} of both" if few else ""

    def as_json(self) -> dict[str, Any]:
        """Return ``coverage`` and ``to_dump`` of a report, as plain JSON types."""
        worst = sorted(self.reasons.items(), key=lambda item: -item[1][1])
        return {
            "coverage": {name: vars(share) for name, share in self.shares.items()},
            "by_other_run": self.by_other_run,
            "to_dump": [
                {"reason": reason, "calls": calls, "bytes": size, "dump": advice(reason)}
                for reason, (calls, size) in worst
            ],
        }


def _sentence(name: str, share: CoverageShare) -> str:
    if not share.calls:
        return f"{name}: none was compared; name some with --map, or dump the updates of weights in both runs"
    size = share.judged_bytes / share.bytes if share.bytes else 0.0
    unit = "tensors" if name == SHARED else "calls"
    return f"{name}: {share.judged_calls:,} of {share.calls:,} {unit} and {size:.0%} of the bytes were judged"


def advice(reason: str) -> str:
    """Return what to dump so that something is judged that was not for this reason; empty: nothing helps."""
    return next((text for pattern, text in _ADVICE.items() if re.search(pattern, reason)), "")


def answer(wrong: bool, coverage: Coverage | None = None, problem: str = "") -> tuple[str, str]:
    """Return the verdict and, of one that is inconclusive, the reason.

    Args:
        coverage: What was judged; None: there is nothing to be left out.
        problem: Why nothing can be concluded although nothing diverged, whatever the coverage.
    """
    if wrong:
        return "diverged", ""
    problem_text = problem or (coverage.lacks() if coverage is not None else "")
    return ("inconclusive", problem_text) if problem_text else ("pass", "")
