"""The verdict on a loss curve: pass, diverged, or inconclusive, with the power of the test.

``diverged`` needs a finding that noise does not explain: a NaN, a first loss or a single step beyond the noise's own
tail, a mean difference over the run or a stretch of it. ``pass`` needs proof of the opposite: the mean difference is
within the margin with 95 % confidence on either side, the published standard is met
(:mod:`telechat_moe.tools.loss.migration_standard`), and there are enough steps. Anything else is ``inconclusive``.

With two or more base runs, their differences from each other are noise by definition: errors and margin grow to them.
"""

from collections.abc import Sequence

import numpy as np

from telechat_moe.numerics import Array
from telechat_moe.tools.align.judge.coverage import answer
from telechat_moe.tools.loss import migration_standard as gates
from telechat_moe.tools.loss.curve import LossCurve
from telechat_moe.tools.loss.evidence import (
    CurveFinding,
    LossReport,
    LossSettings,
    examine,
    find_spikes,
)

PASS, DIVERGED, INCONCLUSIVE = "pass", "diverged", "inconclusive"


def judge(
    bases: Sequence[LossCurve], target: LossCurve, settings: LossSettings | None = None
) -> LossReport:
    """Judge a run's losses against those of one base run or, better, several.

    Args:
        bases: Runs of the benchmark: same weights, data and settings, without enforced determinism.
    """
    chosen = settings or LossSettings()
    curves = [*bases, target]
    inputs = [
        {"path": c.path, "kind": c.kind, "metric": c.metric, "steps": len(c.steps)} for c in curves
    ]
    steps: Array = bases[0].steps
    for curve in curves[1:]:
        steps = np.intersect1d(steps, curve.steps, assume_unique=True)
    losses = [c.loss[np.isin(c.steps, steps)] for c in curves]
    norms = [c.norm[np.isin(c.steps, steps)] for c in curves]
    every = int(np.median(np.diff(steps))) if len(steps) > 1 else 1
    report = LossReport(steps, losses[:-1], losses[-1], every, chosen, inputs)
    report.notes += [f"{c.path}: {note}" for c in curves for note in c.notes]
    _check_inputs(report, curves)
    if len(bases) == 1:
        report.notes.append(
            "one base run: how much the base differs from itself is unknown; give a second one"
        )
    judged = np.isfinite(losses).any(axis=0)  # where none is finite there is nothing to judge
    if judged.any():
        on = [x[judged] for x in (*losses, *norms)]
        report.gate = gates.gate(
            on[: len(bases)], on[len(bases)], on[len(curves) : -1], on[-1], every, chosen.steps
        )
        _not_finite(report)
        positive = (~(np.array(losses) <= 0)).all(axis=0)
        if positive.all():
            finite = np.isfinite(losses).all(axis=0)
            report.spikes = find_spikes(report, finite)
            examine(report, finite)
        else:
            problem = f"a loss of 0 or less at step {steps[np.argmin(positive)]}"
            report.reasons.append(f"{problem}: relative differences need positive losses")
    elif len(steps):
        report.reasons.append("no step has a finite loss")
    _conclude(report)
    return report


def _check_inputs(report: LossReport, curves: Sequence[LossCurve]) -> None:
    names = {c.metric.replace("-", "_").replace(" ", "_") for c in curves}
    if len(names) > 1:
        report.notes.append(f"the curves are called differently: {', '.join(sorted(names))}")
    shortest = min(len(c.steps) for c in curves)
    if len(report.steps) < shortest / 2:
        spans = "; ".join(f"{c.path}: {c.steps[0]} to {c.steps[-1]}" for c in curves)
        report.reasons.append(f"only {len(report.steps)} common steps ({spans})")


def _not_finite(report: LossReport) -> None:
    base = np.all([np.isfinite(x) for x in report.bases], axis=0)
    target = np.isfinite(report.target)
    alone = np.flatnonzero(base & ~target)
    if len(alone):
        first, last = (int(report.steps[alone[i]]) for i in (0, -1))
        value = report.target[alone[0]]
        text = f"loss {value} at step {first}, finite in the base"
        text += f"; {len(alone)} such steps up to {last}" if len(alone) > 1 else ""
        finding = CurveFinding("not finite", first, last, float("nan"), first, first, None, text)
        report.findings.append(finding)
    lost = np.flatnonzero(~base & target)
    if len(lost):
        text = f"a base run has no finite loss at step {report.steps[lost[0]]}"
        text += f" and {len(lost) - 1} others" if len(lost) > 1 else ""
        report.reasons.append(f"{text}: it is no reference there")
    both = int((~base & ~target).sum())
    if both:
        report.notes.append(f"{both} steps are left out: not finite in both base and target")


def _conclude(report: LossReport) -> None:
    bias = report.bias
    if bias is not None and not -bias["margin"] < bias["low"] <= bias["high"] < bias["margin"]:
        report.reasons.append(_too_noisy(report, bias))
    if report.gate is not None:
        report.reasons += _gate_reasons(report.gate, report.settings, report.noise)
    report.findings.sort(key=lambda f: f.first)
    verdict = answer(bool(report.findings), problem="; ".join(report.reasons))[0]
    report.verdict, report.sentence = verdict, _sentence(report, verdict)


def _gate_reasons(
    gate: gates.Gate, settings: LossSettings, noise: dict[str, float] | None
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


def _too_noisy(report: LossReport, bias: dict[str, float]) -> str:
    low, high, mean, margin = (bias[key] for key in ("low", "high", "mean", "margin"))
    room = margin - abs(mean)
    text = f"the mean difference is between {low:+.2%} and {high:+.2%}, the margin is ±{margin:.2%}"
    if room > 0.2 * margin:
        factor = (max(high - mean, mean - low) / room) ** 2
        steps = int(np.ceil(len(report.steps) * report.every * factor * 1.2 / 100) * 100)
        text += f"; about {steps:,} steps would do"
    return text


def _sentence(report: LossReport, verdict: str) -> str:
    power, bias, findings = "", report.bias, report.findings
    if report.power is not None:
        power = (
            f" A lasting difference of {report.power['seen_95'] * 100:.2g} % would have been seen with a probability of "
            f"95 % in {len(report.steps) * report.every:,} steps."
        )
    if verdict == DIVERGED:
        texts = [f.text for f in findings[:3]]
        rest_text = f" (and {len(findings) - 3} more)" if len(findings) > 3 else ""
        return "Diverged: " + "; ".join(texts) + rest_text + "."
    if verdict == INCONCLUSIVE:
        return "Inconclusive: " + "; ".join(report.reasons) + "." + power
    assert bias is not None
    return (
        f"Pass: the mean difference is {bias['mean']:+.3%}, between {bias['low']:+.3%} and {bias['high']:+.3%} (90 %), within "
        f"the margin of ±{bias['margin']:.2%}." + power
    )
