"""The results of a comparison: a row for each tensor, and the outcome of all of them."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from telechat_moe.tools.align.compare.measures import Check
from telechat_moe.tools.align.judge.coverage import Coverage


@dataclass(frozen=True)
class Row:
    """The result for one tensor.

    Attributes:
        step: Step.
        rank: Rank.
        key: Key of the call in the target.
        place: Position of the tensor in the call.
        phase: Phase of the call.
        dtype: Type of the target.
        shape: Shape of the target.
        status: ``pass``, ``diverged``, ``not comparable``, ``not judged`` or ``left out`` (by ``--common``).
        basis: What it was judged by: ``values``, ``tokens`` (of those routed alike), ``replay``, ``fingerprint``,
            ``checksum``, ``statistics``, ``setting``, ``decision``.
        checks: Lines of the standard.
        reason: Reason of the status, where no line gives it.
        note: What a reader must know about a line.
        element: Index of the worst element.
        elements: Number of elements compared.
    """

    step: int
    rank: int
    key: str
    place: str
    phase: str
    dtype: str
    shape: tuple[int, ...]
    status: str
    basis: str = ""
    checks: list[Check] = field(default_factory=list[Check])
    reason: str = ""
    note: str = ""
    element: tuple[int, ...] | None = None
    elements: int = 0

    @property
    def worst(self) -> Check | None:
        """The line that decides the status."""
        return max(self.checks, key=lambda c: (not c.ok, c.ratio), default=None)

    @property
    def ratio(self) -> float:
        """Observed over limit of that line."""
        if self.worst is None:
            return math.inf if self.status == "diverged" else 0.0
        return self.worst.ratio

    def as_json(self) -> dict[str, Any]:
        """Return the row as plain JSON types."""
        worst = self.worst
        return {
            **vars(self),
            "shape": list(self.shape),
            "metric": worst.metric if worst else None,
            "observed": _finite(worst.observed) if worst else None,
            "limit": worst.limit if worst else None,
            "observed_over_limit": _finite(self.ratio) if worst else None,
            "element": None if self.element is None else list(self.element),
            "checks": [
                {"metric": c.metric, "observed": _finite(c.observed), "limit": c.limit, "ok": c.ok}
                for c in self.checks
            ],
        }


ORDER = {"diverged": 0, "not comparable": 1, "not judged": 2, "left out": 3, "pass": 4}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a comparison.

    Attributes:
        verdict: ``pass``, ``diverged`` or ``inconclusive``, see ``judge/coverage.py``.
        reason: Why nothing can be concluded.
        profile: Name of the standard.
        rows: One for each tensor, in the order of the run.
        flips: Legal and illegal flips, as sentences, and those that cannot be judged.
        notes: What the standard requires besides.
        nbytes: Bytes of values that were read.
        coverage: What was judged of each phase.
    """

    verdict: str
    reason: str
    profile: str
    rows: list[Row]
    flips: Mapping[str, list[str]]
    notes: list[str]
    nbytes: int
    coverage: Coverage

    @property
    def counts(self) -> Counter[str]:
        """The number of tensors by status."""
        return Counter(row.status for row in self.rows)

    @property
    def unknown(self) -> Counter[str]:
        """Why tensors were not judged or are not comparable, with the number of tensors for each reason."""
        return Counter(r.reason for r in self.rows if r.status in ("not judged", "not comparable"))

    def sorted(self) -> list[Row]:
        """Return the rows, worst first."""
        return sorted(self.rows, key=lambda r: (ORDER[r.status], -r.ratio))

    def as_json(self) -> dict[str, Any]:
        """Return the outcome as plain JSON types."""
        counts = self.counts
        return {
            **{name: getattr(self, name) for name in ("verdict", "reason", "profile", "notes")},
            "tensors": {status: counts[status] for status in ORDER},
            "basis": dict(Counter(r.basis for r in self.rows if r.status in ("pass", "diverged"))),
            "not_judged": dict(self.unknown),
            "flips": {name: list(found) for name, found in self.flips.items()},
            **self.coverage.as_json(),
            "bytes": self.nbytes,
            "rows": [row.as_json() for row in self.sorted()],
        }


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
