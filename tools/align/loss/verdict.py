"""The verdict on a loss curve: pass, diverged, or inconclusive, with the power of the test.

    report = judge([read("base1/metrics.jsonl"), read("base2/metrics.jsonl")], read("run/metrics.jsonl"))
    print(report.verdict, report.sentence)

``diverged`` needs a finding that noise does not explain: a NaN, a first loss or a single step beyond the noise's own
tail, a mean difference over the run or a stretch of it. ``pass`` needs proof of the opposite: the mean difference is
within the margin with 95 % confidence on either side, the published standard is met
(:mod:`telechat_moe.tools.align.loss.migration_standard`), and there are enough steps. Anything else is ``inconclusive``.

With two or more base runs, their differences from each other are noise by definition: errors and margin grow to them.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telechat_moe.tools.align.judge.coverage import answer
from telechat_moe.tools.align.loss import migration_standard as gates
from telechat_moe.tools.align.loss import statistics as stats
from telechat_moe.tools.align.loss.evidence import (
    Evidence,
    Finding,
    LossComparison,
    Settings,
    Spike,
    examine,
    find_spikes,
)
from telechat_moe.tools.align.loss.read import Curve
from telechat_moe.tools.align.narrowing import is_object, is_sequence

PASS, DIVERGED, INCONCLUSIVE = "pass", "diverged", "inconclusive"


@dataclass(frozen=True)
class Report:
    """The verdict and its evidence; :meth:`plain` is what ``--json`` writes.

    Attributes:
        verdict: pass, diverged or inconclusive.
        sentence: The verdict for a person.
        reasons: Why it is inconclusive; empty if it is not.
        findings: What noise does not explain, the earliest first.
        gate: The published standard's answer; None if no step can be compared.
        bias: Mean difference, its error, interval and test; None where noise could not be estimated.
        power: What difference the test would have found.
        noise: Noise of the differences: ``spread`` of single steps, ``correlation_time`` in values, ``inflation`` of
            standard errors, ``wander`` (lasting differences of equivalent runs, as a standard deviation).
        spikes: Jumps of either curve.
        notes: What a reader should know.
        inputs: Path, kind, metric and steps of each curve.
        compared: The curves on their common steps, and the settings of the tests.
        evidence: What was measured; None where noise could not be estimated.
    """

    verdict: str
    sentence: str
    reasons: list[str]
    findings: list[Finding]
    gate: gates.Gate | None
    bias: dict[str, float] | None
    power: dict[str, float] | None
    noise: dict[str, float] | None
    spikes: list[Spike]
    notes: list[str]
    inputs: list[dict[str, Any]]
    compared: LossComparison = field(repr=False)
    evidence: Evidence | None = field(repr=False)

    def plain(self) -> dict[str, Any]:
        """Return the report as plain data without the curves."""
        g, steps = self.gate, self.compared.steps
        gate = g and {**g._asdict(), "first": g.first._asdict(), "average": g.average._asdict()}
        found = {
            "verdict": self.verdict,
            "sentence": self.sentence,
            "reasons": self.reasons,
            "findings": [asdict(f) for f in self.findings],
            "gate": gate,
            "bias": self.bias,
            "power": self.power,
            "noise": self.noise,
            "spikes": [asdict(s) for s in self.spikes],
            "steps": {
                "compared": len(steps),
                "first": int(steps[0]) if len(steps) else None,
                "last": int(steps[-1]) if len(steps) else None,
            },
            "notes": self.notes,
            "inputs": self.inputs,
            "settings": asdict(self.compared.settings),
        }
        return _json_safe(found)


def _json_safe(value: Any) -> Any:
    if is_object(value):
        return {key: _json_safe(item) for key, item in value.items()}
    if is_sequence(value):
        return [_json_safe(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def judge(bases: Sequence[Curve], target: Curve, settings: Settings | None = None) -> Report:
    """Judge a run's losses against those of one base run or, better, several.

    Args:
        bases: Runs of the benchmark: same weights, data and settings, without enforced determinism.
        settings: Margins and risks of the tests.
    """
    chosen = settings or Settings()
    curves = [*bases, target]
    inputs = [
        {"path": c.path, "kind": c.kind, "metric": c.metric, "steps": len(c.steps)} for c in curves
    ]
    steps: NDArray[np.int64] = bases[0].steps
    for curve in curves[1:]:
        steps = np.intersect1d(steps, curve.steps, assume_unique=True)
    losses = [c.loss[np.isin(c.steps, steps)] for c in curves]
    norms = [c.norm[np.isin(c.steps, steps)] for c in curves]
    every = int(np.median(np.diff(steps))) if len(steps) > 1 else 1
    compared = LossComparison(steps, losses[:-1], losses[-1], every, chosen)
    compared.notes += [f"{c.path}: {note}" for c in curves for note in c.notes]
    _check_inputs(compared, curves)
    if len(bases) == 1:
        compared.notes.append(
            "one base run: how much the base differs from itself is unknown; give a second one"
        )
    finite = np.isfinite(losses).all(axis=0)
    judged = np.isfinite(losses).any(axis=0)  # where none is finite there is nothing to judge
    if not judged.any():
        compared.reasons += ["no step has a finite loss"] if len(steps) else []
        return _report(compared, inputs, None, None, [])
    on = [x[judged] for x in (*losses, *norms)]
    gate = gates.gate(
        on[: len(bases)], on[len(bases)], on[len(curves) : -1], on[-1], every, chosen.steps
    )
    _not_finite(compared)
    positive = (~(np.array(losses) <= 0)).all(axis=0)
    if not positive.all():
        said = f"a loss of 0 or less at step {steps[np.argmin(positive)]}"
        compared.reasons.append(f"{said}: relative differences need positive losses")
        return _report(compared, inputs, gate, None, [])
    spikes = find_spikes(compared, finite)
    return _report(compared, inputs, gate, examine(compared, finite, gate), spikes)


def _check_inputs(compared: LossComparison, curves: Sequence[Curve]) -> None:
    names = {c.metric.replace("-", "_").replace(" ", "_") for c in curves}
    if len(names) > 1:
        compared.notes.append(f"the curves are called differently: {', '.join(sorted(names))}")
    shortest = min(len(c.steps) for c in curves)
    if len(compared.steps) < shortest / 2:
        spans = "; ".join(f"{c.path}: {c.steps[0]} to {c.steps[-1]}" for c in curves)
        compared.reasons.append(f"only {len(compared.steps)} common steps ({spans})")


def _not_finite(compared: LossComparison) -> None:
    base = np.all([np.isfinite(x) for x in compared.bases], axis=0)
    target = np.isfinite(compared.target)
    alone = np.flatnonzero(base & ~target)
    if len(alone):
        first, last = (int(compared.steps[alone[i]]) for i in (0, -1))
        value = compared.target[alone[0]]
        text = f"loss {value} at step {first}, finite in the base"
        text += f"; {len(alone)} such steps up to {last}" if len(alone) > 1 else ""
        found = Finding("not finite", first, last, float("nan"), first, first, None, text)
        compared.findings.append(found)
    lost = np.flatnonzero(~base & target)
    if len(lost):
        text = f"a base run has no finite loss at step {compared.steps[lost[0]]}"
        text += f" and {len(lost) - 1} others" if len(lost) > 1 else ""
        compared.reasons.append(f"{text}: it is no reference there")
    both = int((~base & ~target).sum())
    if both:
        compared.notes.append(f"{both} steps are left out: not finite in both base and target")


def _report(
    compared: LossComparison,
    inputs: list[dict[str, Any]],
    gate: gates.Gate | None,
    found: Evidence | None,
    spikes: list[Spike],
) -> Report:
    findings = sorted(compared.findings, key=lambda f: f.first)
    bias = power = noise = None
    if found is not None:
        limit = found.mean.limit
        noise = {
            "spread": found.spread,
            "correlation_time": found.time,
            "inflation": found.blocks.inflation,
            "wander": found.wander,
        }
        bias = {
            "mean": found.blocks.mean,
            "error": found.error,
            "low": found.interval.low,
            "high": found.interval.high,
            "margin": found.margin,
            "statistic": found.mean.statistic,
            "limit": limit,
            "p": found.mean.p,
            "effective_steps": len(compared.steps) / found.time,
        }
        power = {
            "seen_95": stats.detectable(found.error, 0.95, limit),
            "margin": stats.power(found.error, found.margin, limit),
        }
        if not -found.margin < found.interval.low <= found.interval.high < found.margin:
            compared.reasons.append(_too_noisy(compared, found))
    if gate is not None:
        compared.reasons += _gate_reasons(gate, compared.settings, noise)
    verdict = answer(bool(findings), problem="; ".join(compared.reasons))[0]
    return Report(
        verdict,
        _sentence(verdict, compared, findings, bias, power),
        [] if verdict == PASS else compared.reasons,
        findings,
        gate,
        bias,
        power,
        noise,
        spikes,
        compared.notes,
        inputs,
        compared,
        found,
    )


def _gate_reasons(
    gate: gates.Gate, settings: Settings, noise: dict[str, float] | None
) -> list[str]:
    reasons: list[str] = []
    # Where all differences are of this size, the first one is no sign of a wrong forward pass.
    common = noise is not None and gate.first.relative < 3 * noise["spread"]
    if gate.steps < settings.steps:
        reasons.append(f"{gate.steps:,} steps; a verdict needs {settings.steps:,}")
    for name, check in (("first loss", gate.first), ("average error", gate.average)):
        if not check.ok and not (check is gate.first and common):
            reasons.append(
                f"the published standard is not met: {name} {check.absolute:.4f} or {check.relative:.2%}, allowed "
                f"{check.absolute_limit:.4f} or {check.relative_limit:.2%}; a second base run would show whether the base "
                "itself differs as much"
            )
    return reasons


def _too_noisy(compared: LossComparison, found: Evidence) -> str:
    low, high, mean = found.interval.low, found.interval.high, found.blocks.mean
    room = found.margin - abs(mean)
    text = f"the mean difference is between {low:+.2%} and {high:+.2%}, the margin is ±{found.margin:.2%}"
    if room > 0.2 * found.margin:
        factor = (max(high - mean, mean - low) / room) ** 2
        steps = int(np.ceil(len(compared.steps) * compared.every * factor * 1.2 / 100) * 100)
        text += f"; about {steps:,} steps would do"
    return text


def _sentence(
    verdict: str,
    compared: LossComparison,
    findings: list[Finding],
    bias: dict[str, float] | None,
    power: dict[str, float] | None,
) -> str:
    said = ""
    if power is not None:
        said = (
            f" A lasting difference of {power['seen_95'] * 100:.2g} % would have been seen with a probability of 95 % in "
            f"{len(compared.steps) * compared.every:,} steps."
        )
    if verdict == DIVERGED:
        texts = [f.text for f in findings[:3]]
        more = f" (and {len(findings) - 3} more)" if len(findings) > 3 else ""
        return "Diverged: " + "; ".join(texts) + more + "."
    if verdict == INCONCLUSIVE:
        return "Inconclusive: " + "; ".join(compared.reasons) + "." + said
    assert bias is not None
    return (
        f"Pass: the mean difference is {bias['mean']:+.3%}, between {bias['low']:+.3%} and {bias['high']:+.3%} (90 %), within "
        f"the margin of ±{bias['margin']:.2%}." + said
    )
