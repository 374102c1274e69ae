"""The verdict on a loss curve as one self-contained HTML page, and as JUnit XML."""

from html import escape
from itertools import combinations

import numpy as np

from telechat_moe import html
from telechat_moe.html import ChartAxes, Html
from telechat_moe.numerics import Array
from telechat_moe.tools.align.report.junit import JunitCase, suite
from telechat_moe.tools.loss import statistics as stats
from telechat_moe.tools.loss.evidence import LossReport
from telechat_moe.tools.loss.verdict import DIVERGED, PASS


def page(report: LossReport) -> str:
    """Return the report as one self-contained page of HTML."""
    word = report.verdict
    return html.page(f"Loss: {word}", [body(report)], heading=f"Loss curve: {html.verdict(word)}")


def body(report: LossReport) -> str:
    """Return the content of the page below its heading."""
    word = report.verdict
    name, sentence = report.inputs[-1]["path"], report.sentence.split(": ", 1)[-1]
    sentence = sentence[:1].upper() + sentence[1:]
    bases = ", ".join(i["path"] for i in report.inputs[:-1])
    parts = [html.tag("p", f"{name} against {bases}", "soft"), html.tag("p", sentence, "sentence")]
    if len(report.steps) > 1:
        parts += [_curves(report), _differences(report), _beginning(report)]
    parts += ["<h2>What was checked</h2>", _checks(report)]
    if report.findings:
        texts = [Html(f"{html.tag('b', f.kind)}: {escape(f.text)}") for f in report.findings]
        parts.append(f"<h2>What noise does not explain</h2>{html.items(texts)}")
    if report.reasons:
        head = "Why it is not judged" if word not in (PASS, DIVERGED) else "Besides"
        parts.append(f"<h2>{head}</h2>{html.items(report.reasons)}")
    if report.spikes:
        parts += ["<h2>Spikes</h2>", _spikes(report)]
    parts += ["<h2>Curves</h2>", _inputs(report)]
    return "".join([*parts, *(html.tag("p", f"{note}.", "soft") for note in report.notes)])


def _axes(steps: Array, low: float, high: float, height: int = 300) -> ChartAxes:
    """Return the axes of a chart over the steps; an empty range is widened a little."""
    if not high > low:
        low, high = low - 1e-6, high + 1e-6
    span = float(steps[0]), max(float(steps[-1]), float(steps[0]) + 1)
    return ChartAxes(span, (low, high), height=height + 20, bottom=44)


def _line(axes: ChartAxes, steps: Array, values: Array, kind: str, width: float) -> str:
    return axes.line(*_thin(steps.astype(float), values), kind, width)


_GROUPS = 900
"""Groups of values of which a line shows the smallest and the largest."""


def _thin(steps: Array, values: Array) -> tuple[Array, Array]:
    """Return the smallest and largest value of each group, so that no spike is lost."""
    if len(steps) <= 2 * _GROUPS:
        return steps, values
    groups = np.array_split(np.arange(len(steps)), _GROUPS)
    indices: list[int] = []
    for group in groups:
        part = values[group]
        if np.isfinite(part).all():
            indices += sorted({int(group[np.argmin(part)]), int(group[np.argmax(part)])})
        else:
            indices += [int(i) for i in group]
    return steps[indices], values[indices]


def _mean(values: Array, width: int) -> Array:
    """Return the mean over a centred window; at ends and gaps, over the values that are there."""
    good, kernel = np.isfinite(values), np.ones(width)
    sums = np.convolve(np.where(good, values, 0.0), kernel, "same")
    counts = np.convolve(good.astype(float), kernel, "same")
    return np.where(good, sums / np.maximum(counts, 1), np.nan)


def _curves(report: LossReport) -> str:
    steps, target, bases = report.steps, report.target, report.bases
    mean = np.mean(bases, axis=0)
    both = np.concatenate([mean, target])
    good = both[np.isfinite(both)]
    if not len(good):
        return ""
    axes = _axes(steps, float(good.min()), float(np.quantile(good, 0.9995)))
    parts = [axes.grid(labels=("step", "loss"))]
    parts.append(_line(axes, steps, mean, "base", 3.5))
    parts.append(_line(axes, steps, target, "target", 1.1))
    for spike in report.spikes:
        index = int(np.searchsorted(steps, spike.step))
        value = max(mean[index], target[index])
        kind = "spike" if spike.where == "both" else "spike alone"
        title = f"step {spike.step}: base {spike.base:+.1%}, target {spike.target:+.1%}"
        parts.append(axes.dot(spike.step, value, kind, 5, title))
    for step in steps[~np.isfinite(target)][:1]:
        place = f"x={axes.x(step):.1f} y=22"
        parts.append(f"<text class=mark {place} text-anchor=middle>NaN</text>")
    base = "base" + (f" (mean of {len(bases)} runs)" if len(bases) > 1 else "")
    colours = [("var(--base)", base), ("var(--target)", "target")]
    keys = html.keys(colours, "○ a spike; red: in one of the two runs only")
    return keys + axes.draw(parts, "losses of base and target")


def _differences(report: LossReport) -> str:
    if report.difference is None or report.envelope is None:
        return ""
    steps, bases = report.steps, report.bases
    d: Array = np.expm1(report.difference) * 100.0
    finite = np.isfinite(d)
    good, width = d[finite], max(3, len(steps) // 25) | 1
    tamed = d.copy()
    tamed[finite] = stats.tame(good)  # otherwise a spike would lift the whole window around it
    smooth = _mean(tamed, width)
    envelope = report.envelope * 100
    logs = np.log(np.where(np.array(bases) > 0, bases, np.nan))
    others = [_mean((x - logs.mean(axis=0)) * 100, width) for x in logs] if len(logs) > 1 else []
    reach = [np.abs(smooth[np.isfinite(smooth)]).max(), 1.3 * np.nanmax(envelope)]
    reach += [1.25 * float(np.quantile(np.abs(good), 0.9)), report.settings.margin * 125]
    top = 1.1 * float(max(reach))
    axes = _axes(steps, -top, top)
    drawn = np.flatnonzero(np.isfinite(envelope))
    drawn = drawn[:: max(1, len(drawn) // 600)]
    band = envelope[drawn].tolist()
    parts = [axes.area(steps[drawn].tolist(), [-v for v in band], band, "band")]
    for finding in report.findings:
        if "difference" in finding.kind and finding.low != finding.high:
            low, wide = axes.x(finding.low), axes.x(finding.high) - axes.x(finding.low)
            size = f"width={max(1.5, wide):.1f} height=268"
            parts.append(f"<rect class=onset x={low:.1f} y=8 {size} />")
    label = f"target's loss over base's, % (line: mean over {width} values)"
    parts.append(axes.grid(labels=("step", label)))
    parts.append(axes.line(axes.across, (0, 0), "zero", 1))
    picked = np.flatnonzero(np.isfinite(d) & (np.abs(d) <= top))
    picked = picked[:: max(1, len(picked) // 2500)]
    points = zip(steps[picked].tolist(), d[picked].tolist(), strict=True)
    parts += [axes.dot(step, value, "raw", 1.3) for step, value in points]
    parts += [_line(axes, steps, other, "base", 1.2) for other in others]
    parts.append(_line(axes, steps, smooth, "target", 2.6))
    parts += _marks(report, axes)
    keys = [("var(--target)", "target against base")]
    keys.append(("var(--band)", "95 % of the values are here if the runs are alike"))
    if others:
        keys.append(("var(--base)", "base runs against their mean"))
    return html.keys(keys) + axes.draw(parts, "difference")


def _beginning(report: LossReport) -> str:
    """Draw how differences grow from rounding, on a logarithmic scale; nothing where they were never that small."""
    noise = report.noise
    if report.difference is None or not noise or not noise["wander"]:
        return ""
    d = np.abs(report.difference)
    grown = np.flatnonzero(d > 0.5 * noise["spread"])
    count = min(len(d), max(60, 2 * int(grown[min(4, len(grown) - 1)]) if len(grown) else len(d)))
    steps = report.steps[:count]
    axes = _axes(steps, -8.0, 0.0, 240)
    powers = [(power, f"{10.0 ** (power + 2):g} %") for power in range(-8, 1, 2)]
    parts = [axes.grid(up=powers, labels=("step", ""))]
    logs = np.log(np.array(report.bases)[:, :count])
    pairs = combinations(range(len(logs)), 2)
    parts += [_line(axes, steps, _log(logs[b] - logs[a]), "base", 1.4) for a, b in pairs]
    parts.append(_line(axes, steps, _log(d[:count]), "target", 2.4))
    keys = [("var(--target)", "size of the difference, target to base")]
    if len(logs) > 1:
        keys.append(("var(--base)", "base runs to each other"))
    head = html.tag("h2", "Before rounding errors have grown")
    return head + html.keys(keys) + axes.draw(parts, "first differences")


def _log(values: Array) -> Array:
    return np.log10(np.maximum(np.abs(values), 1e-8))


def _marks(report: LossReport, axes: ChartAxes) -> list[str]:
    parts: list[str] = []
    shown = [f for f in report.findings if f.kind not in ("not finite", "early departure")]
    for finding in shown[:6]:
        x = axes.x(finding.first)
        parts.append(f"<line class=cut x1={x:.1f} x2={x:.1f} y1=8 y2=276 />")
        right = x > axes.width - 190
        place = f"x={x - 6:.1f} text-anchor=end" if right else f"x={x + 6:.1f}"
        label = f"step {finding.first}: {np.expm1(finding.size):+.2%}"
        parts.append(f"<text class=mark {place} y=268>{label}</text>")
    return parts


def checks(report: LossReport) -> list[tuple[str, str, str, str]]:
    """Return the checks: name, value found, value allowed, and ``pass``, ``fail``, ``not judged`` or ``monitored``."""
    kinds = {f.kind for f in report.findings}
    finite = "fail" if "not finite" in kinds else "pass"
    rows = [*_standard(report), ("finite", "", "NaN and Inf where the base has them", finite)]
    if report.bias is None:
        return [*rows, ("lasting difference", "", "", "not judged")]
    bias = report.bias
    lasting = kinds & {"lasting difference", "passing difference", "early departure"}
    alone = kinds & {"single step", "first loss"}
    spikes = sum(s.where == "both" for s in report.spikes)
    inside = -bias["margin"] < bias["low"] <= bias["high"] < bias["margin"]
    mean = f"mean {bias['mean']:+.3%}, {abs(bias['statistic']):.1f} standard errors"
    limit, answer = f"{bias['limit']:.1f} for the whole run", "fail" if lasting else "pass"
    rows.append(("noise explains the difference", mean, limit, answer))
    answer = "fail" if alone else "pass"
    rows.append(("spikes are common", f"{spikes} in both", "none in one run only", answer))
    interval = f"{bias['low']:+.3%} to {bias['high']:+.3%} (90 %)"
    answer = "pass" if inside else "fail" if lasting else "not judged"
    return [*rows, ("equivalence", interval, f"±{bias['margin']:.2%}", answer)]


def _standard(report: LossReport) -> list[tuple[str, str, str, str]]:
    rows: list[tuple[str, str, str, str]] = []
    gate = report.gate
    if gate is None:
        return rows
    min_steps = report.settings.steps
    few = gate.steps < min_steps
    for name, check in (("first loss", gate.first), ("average error", gate.average)):
        errors = f"{check.absolute:.5f} or {check.relative:.3%}"
        relaxed = " (relaxed to the base runs' own)" if check.relaxed else ""
        allowed = f"{check.absolute_limit:.3g} or {check.relative_limit:.2%}{relaxed}"
        answer = "fail" if not check.ok else "not judged" if few else "pass"
        rows.append((f"standard: {name}", errors, allowed, answer))
    if gate.norm is not None:
        rows.append(("standard: gradient norm", f"{gate.norm:.2%}", "10.00%", "monitored"))
    answer = "not judged" if few else "pass"
    return [*rows, ("standard: steps", f"{gate.steps:,}", f"{min_steps:,} at least", answer)]


def _checks(report: LossReport) -> str:
    rows = [(n, f, a, html.verdict(answer)) for n, f, a, answer in checks(report)]
    table = html.table(["check", "found ", "allowed", "answer"], rows)
    if report.power is None or report.noise is None:
        return table
    power, noise = report.power, report.noise
    return table + (
        f"<p class=soft>Power: a lasting difference of {power['seen_95']:.3%} would have been seen with a probability of 95 %, "
        f"one of the margin's size ({(report.bias or {})['margin']:.2%}) with {power['margin']:.1%}. Noise of the difference: "
        f"{noise['spread']:.3%} a step, correlated over {noise['correlation_time']:.1f} values.</p>"
    )


def _spikes(report: LossReport) -> str:
    rows: list[list[object]] = []
    for s in report.spikes:
        curves = "both: the data" if s.where == "both" else html.tag("b", f"{s.where} only")
        rows.append([s.step, f"{s.base:+.1%}", f"{s.target:+.1%}", curves])
    return html.table(["step ", "base ", "target ", "in"], rows, limit=40)


def _inputs(report: LossReport) -> str:
    last = len(report.inputs) - 1
    rows = [
        ("target" if i == last else f"base {i + 1}", c["path"], c["kind"], c["metric"], c["steps"])
        for i, c in enumerate(report.inputs)
    ]
    return html.table(["", "file", "kind", "metric", "steps "], rows)


def junit(report: LossReport) -> str:
    """Return the checks as JUnit XML; a check that was not judged is skipped, with the reason."""
    cases: list[JunitCase] = []
    reason = "; ".join(report.reasons) or "not judged"
    verdict = {PASS: "pass", DIVERGED: "fail"}.get(report.verdict, "not judged")
    rows = [*checks(report), ("verdict", report.sentence, "", verdict)]
    for name, value, allowed, answer in rows:
        failed = f"{value}; allowed {allowed}" if allowed else value
        outcome = {"fail": {"failure": failed}, "not judged": {"skipped": reason}}.get(answer, {})
        cases.append(JunitCase("align.loss", name, **outcome))
    return suite("align loss", cases)
