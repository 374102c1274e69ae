"""What a comparison of two runs comes to: findings, the first one first, with the coverage of what was judged."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from telechat_moe.tools.align.dump.records import Call, Phase
from telechat_moe.tools.align.judge.collectives import ExchangeContext
from telechat_moe.tools.align.judge.context import layer_of
from telechat_moe.tools.align.judge.coverage import Coverage
from telechat_moe.tools.align.judge.divergent_call import DivergentCall
from telechat_moe.tools.align.judge.verdict import Verdict
from telechat_moe.tools.align.operators.approx import Array

CallStatus = tuple[int, int, str, str, float]


@dataclass(frozen=True)
class Finding:
    """A divergent call."""

    step: int
    rank: int
    order: float  # position in the order of the run
    verdict: Verdict  # what is wrong with it
    call: Call | None  # the call; None: the target lacks it
    # Kind of fault, see `explain/`; `unknown` where no kind explains it
    family: str = "unknown"
    evidence: str = ""  # why it is that kind
    # Difference from what it should be, over the bound, where both are known
    residual: Array | None = field(default=None, repr=False, compare=False)
    # Phase of the step, see `context.py`; None: known from the key alone
    phase: Phase | None = None
    # Module, or weight, of the reference and of the target in which two programs differ first
    modules: tuple[str, str] | None = None
    # Number of its layer, from the data flow where its name does not say it
    layer: int | None = None
    # What the runs have at the worst element, by side; only of the first finding
    values: Mapping[str, float] = field(default_factory=dict[str, float], compare=False)
    # What is known around the call, for the first one of a rank; a reproducer is made from it
    about: DivergentCall | ExchangeContext | None = field(default=None, repr=False, compare=False)

    def as_json(self) -> dict[str, Any]:
        """Return the finding as plain JSON types."""
        v, call = self.verdict, self.call
        return {
            "step": self.step,
            "rank": self.rank,
            "phase": (self.phase or call.phase).value if call else None,
            "layer": layer_of(call) if call and self.layer is None else self.layer,
            "modules": self.modules
            and dict(zip(("reference", "target"), self.modules, strict=True)),
            "operator": v.key,
            "tensor": v.place,
            "family": self.family,
            "evidence": self.evidence,
            "observed_over_bound": v.ratio if v.ratio < float("inf") else None,
            "reason": v.reason,
            "basis": v.basis,
            "element": list(v.element),
            "values": dict(self.values),
            "wrong_elements": v.wrong,
            "elements": v.elements,
            "source": call.source if call else None,
        }


@dataclass(frozen=True)
class Outcome:
    """The outcome of a comparison."""

    verdict: str  # `pass`, `diverged`, or `inconclusive`, see `coverage.py`
    # Divergent calls, the first ones first
    findings: list[Finding] = field(default_factory=list[Finding])
    # How many tensors were judged, by status
    judged: Mapping[str, int] = field(default_factory=dict[str, int])
    # Why calls were not judged, with the number of calls for each reason
    unknown: Mapping[str, int] = field(default_factory=dict[str, int])
    reason: str = ""  # why nothing can be concluded
    # Every call in order, with its worst verdict (step, rank, key, status, ratio)
    calls: list[CallStatus] = field(default_factory=list[CallStatus], repr=False)
    coverage: Coverage = field(default_factory=Coverage)  # what was judged of each phase
    # Settings that differ between programs of two frameworks, by module
    settings: list[str] = field(default_factory=list[str])

    @property
    def ranks(self) -> list[int]:
        """The ranks on which the first divergent call is wrong."""
        if not self.findings:
            return []
        first = self.findings[0]
        first_call = first.step, first.verdict.key
        return sorted({f.rank for f in self.findings if (f.step, f.verdict.key) == first_call})

    def as_json(self) -> dict[str, Any]:
        """Return the outcome as plain JSON types."""
        return {
            "verdict": self.verdict,
            "reason": self.reason,
            "first": self.findings[0].as_json() if self.findings else None,
            "ranks": self.ranks,
            "findings": [f.as_json() for f in self.findings],
            "settings": self.settings,
            "judged": dict(self.judged),
            "not_judged": dict(self.unknown),
            **self.coverage.as_json(),
        }
