"""The verdict on a loss curve as one self-contained HTML page, and as JUnit XML."""

from html import escape

import numpy as np
from numpy.typing import NDArray

from telechat_moe import html
from telechat_moe.html import Axes, Html
from telechat_moe.tools.align.loss import statistics as stats
from telechat_moe.tools.align.loss.verdict import DIVERGED, PASS, Report
from telechat_moe.tools.align.report.junit import JunitCase, suite

Floats = NDArray[np.float64]


def page(report: Report) -> str:
    """Return the page."""
    word = report.verdict
    return html.page(f"Loss: {word}", [body(report)], heading=f"Loss curve: {html.verdict(word)}")


def body(report: Report) -> str:
    """Return the content of the page below its heading."""
    word = report.verdict
    name = escape(str(report.inputs[-1]["path"]))
    sentence = escape(report.sentence.split(": ", 1)[-1])
    sentence = sentence[:1].upper() + sentence[1:]
    parts = [
        f"<p class=soft>{name} against {escape(', '.join(i['path'] for i in report.inputs[:-1]))}</p>",
        f"<p class=sentence>{sentence}</p>",
    ]
    if len(report.steps) > 1:
        parts += [_curves(report), _differences(report), _beginning(report)]
    parts += ["<h2>What was checked</h2>", _checks(report)]
    if report.findings:
        said = [Html(f"{html.tag('b', f.kind)}: {escape(f.text)}") for f in report.findings]
        parts.append(f"<h2>What noise does not explain</h2>{html.items(said)}")
    if report.reasons:
        head = "Why it is not judged" if word not in (PASS, DIVERGED) else "Besides"
        parts.append(f"<h2>{head}</h2>{html.items(report.reasons)}")
    if report.spikes:
        parts += ["<h2>Spikes</h2>", _spikes(report)]
    parts += ["<h2>Curves</h2>", _inputs(report)]
    parts.append("".join(f"<p class=soft>{escape(note)}.</p>" for note in report.notes))
    return "".join(parts)


def _axes(steps: NDArray[np.int64], low: float, high: float, height: int = 300) -> Axes:
    """Return the axes of a chart over the steps; an empty range is widened a little."""
    if not high > low:
        low, high = low - 1e-6, high + 1e-6
    first = float(steps[0])
    return Axes((first, max(float(steps[-1]), first + 1)), (low, high), height=height)


def _line(axes: Axes, steps: NDArray[np.int64], values: Floats, kind: str, width: float) -> str:
    return axes.line(*_thin(steps.astype(float), values), kind, width)


def _thin(steps: Floats, values: Floats, most: int = 900) -> tuple[Floats, Floats]:
    """Return the smallest and largest value of each group, so that no spike is lost."""
    if len(steps) <= 2 * most:
        return steps, values
    groups = np.array_split(np.arange(len(steps)), most)
    kept: list[int] = []
    for group in groups:
        part = values[group]
        if np.isfinite(part).all():
            kept += sorted({int(group[np.argmin(part)]), int(group[np.argmax(part)])})
        else:
            kept += [int(i) for i in group]
    return steps[kept], values[kept]


def _mean(values: Floats, width: int) -> Floats:
    """Return the mean over a centred window; at ends and gaps, over the values that are there."""
    good = np.isfinite(values)
    kernel = np.ones(width)
    sums = np.convolve(np.where(good, values, 0.0), kernel, "same")
    return np.where(
        good, sums / np.maximum(np.convolve(good.astype(float), kernel, "same"), 1), np.nan
    )


def _window(report: Report) -> int:
    return max(3, len(report.steps) // 25) | 1


def _curves(report: Report) -> str:
    both = np.concatenate([report.base, report.target])
    good = both[np.isfinite(both)]
    if not len(good):
        return ""
    axes = _axes(report.steps, float(good.min()), float(np.quantile(good, 0.9995)))
    parts = [axes.grid(labels=("", "loss"))]
    parts.append(_line(axes, report.steps, report.base, "base", 3.5))
    parts.append(_line(axes, report.steps, report.target, "target", 1.1))
    for spike in report.spikes:
        at = int(np.searchsorted(report.steps, spike.step))
        value = max(report.base[at], report.target[at])
        kind = "spike" if spike.where == "both" else "spike alone"
        title = f"step {spike.step}: base {spike.base:+.1%}, target {spike.target:+.1%}"
        parts.append(axes.dot(spike.step, value, kind, 5, title))
    bad = report.steps[~np.isfinite(report.target)]
    parts += [
        f"<text class=mark x={axes.x(s):.1f} y=22 text-anchor=middle>NaN</text>" for s in bad[:1]
    ]
    base = "base" + (f" (mean of {len(report.bases)} runs)" if len(report.bases) > 1 else "")
    keys = html.keys(
        [("var(--base)", base), ("var(--target)", "target")],
        "○ a spike; red: in one of the two runs only",
    )
    return keys + axes.draw(parts, "losses of base and target")


def _differences(report: Report) -> str:
    d: Floats = np.expm1(report.difference) * 100.0
    good = d[np.isfinite(d)]
    if not len(good):
        return ""
    width = _window(report)
    known = np.isfinite(d)
    tamed = d.copy()
    tamed[known] = stats.tame(d[known])  # otherwise a spike would lift the whole window around it
    smooth = _mean(tamed, width)
    envelope = report.envelope * 100
    logs = np.log(np.where(np.array(report.bases) > 0, report.bases, np.nan))
    others = [_mean((x - logs.mean(axis=0)) * 100, width) for x in logs] if len(logs) > 1 else []
    reach = [np.abs(smooth[np.isfinite(smooth)]).max(), 1.3 * np.nanmax(envelope)]
    reach += [1.25 * float(np.quantile(np.abs(good), 0.9)), report.settings.margin * 125]
    top = 1.1 * float(max(reach))
    axes = _axes(report.steps, -top, top)
    drawn = np.flatnonzero(np.isfinite(envelope))
    drawn = drawn[:: max(1, len(drawn) // 600)]
    band = envelope[drawn].tolist()
    parts = [axes.area(report.steps[drawn].tolist(), [-v for v in band], band, "band")]
    for finding in report.findings:
        if "difference" in finding.kind and finding.low != finding.high:
            low, high = axes.x(finding.low), axes.x(finding.high)
            parts.append(
                f"<rect class=onset x={low:.1f} y=8 width={max(1.5, high - low):.1f} height=268 />"
            )
    label = f"target's loss over base's, % (line: mean over {width} values)"
    parts.append(axes.grid(labels=("", label)))
    parts.append(axes.line(axes.across, (0, 0), "zero", 1))
    picked = np.flatnonzero(np.isfinite(d) & (np.abs(d) <= top))
    picked = picked[:: max(1, len(picked) // 2500)]
    points = zip(report.steps[picked].tolist(), d[picked].tolist(), strict=True)
    parts += [axes.dot(step, value, "raw", 1.3) for step, value in points]
    parts += [_line(axes, report.steps, other, "base", 1.2) for other in others]
    parts.append(_line(axes, report.steps, smooth, "target", 2.6))
    parts += _marks(report, axes)
    keys = [
        ("var(--target)", "target against base"),
        ("var(--band)", "95 % of the values are here if the runs are alike"),
    ]
    if others:
        keys.append(("var(--base)", "base runs against their mean"))
    return html.keys(keys) + axes.draw(parts, "difference")


def _beginning(report: Report) -> str:
    """Draw how differences grow from rounding, on a logarithmic scale; nothing where they were never that small."""
    if not report.noise or not report.noise["wander"]:
        return ""
    d = np.abs(report.difference)
    grown = np.flatnonzero(d > 0.5 * report.noise["spread"])
    count = min(len(d), max(60, 2 * int(grown[min(4, len(grown) - 1)]) if len(grown) else len(d)))
    steps = report.steps[:count]
    axes = _axes(steps, -8.0, 0.0, 240)
    powers = [(power, f"{10.0 ** (power + 2):g} %") for power in range(-8, 1, 2)]
    parts = [axes.grid(up=powers)]
    logs = np.log(np.array(report.bases)[:, :count])
    for one in range(len(logs)):
        for other in range(one):
            parts.append(_line(axes, steps, _log(logs[one] - logs[other]), "base", 1.4))
    parts.append(_line(axes, steps, _log(d[:count]), "target", 2.4))
    keys = [("var(--target)", "size of the difference, target to base")]
    if len(logs) > 1:
        keys.append(("var(--base)", "base runs to each other"))
    head = html.tag("h2", "Before rounding errors have grown")
    return head + html.keys(keys) + axes.draw(parts, "first differences")


def _log(values: Floats) -> Floats:
    return np.log10(np.maximum(np.abs(values), 1e-8))


def _marks(report: Report, axes: Axes) -> list[str]:
    parts: list[str] = []
    shown = [f for f in report.findings if f.kind not in ("not finite", "early departure")]
    for finding in shown[:6]:
        at = axes.x(finding.first)
        parts.append(f"<line class=cut x1={at:.1f} x2={at:.1f} y1=8 y2=276 />")
        right = at > axes.width - 190
        where = f"x={at - 6:.1f} text-anchor=end" if right else f"x={at + 6:.1f}"
        parts.append(
            f"<text class=mark {where} y=268>step {finding.first}: {np.expm1(finding.size):+.2%}</text>"
        )
    return parts


def checks(report: Report) -> list[tuple[str, str, str, str]]:
    """Return the checks: name, value found, value allowed, and ``pass``, ``fail``, ``not judged`` or ``monitored``."""
    kinds = {f.kind for f in report.findings}
    finite = "fail" if "not finite" in kinds else "pass"
    rows = [*_standard(report), ("finite", "", "NaN and Inf where the base has them", finite)]
    if report.bias is None:
        return [*rows, ("lasting difference", "", "", "not judged")]
    bias = report.bias
    whole = kinds & {"lasting difference", "passing difference", "early departure"}
    alone = kinds & {"single step", "first loss"}
    spikes = sum(s.where == "both" for s in report.spikes)
    inside = -bias["margin"] < bias["low"] <= bias["high"] < bias["margin"]
    return [
        *rows,
        (
            "noise explains the difference",
            f"mean {bias['mean']:+.3%}, {abs(bias['statistic']):.1f} standard errors",
            f"{bias['limit']:.1f} for the whole run",
            "fail" if whole else "pass",
        ),
        (
            "spikes are common",
            f"{spikes} in both",
            "none in one run only",
            "fail" if alone else "pass",
        ),
        (
            "equivalence",
            f"{bias['low']:+.3%} to {bias['high']:+.3%} (90 %)",
            f"±{bias['margin']:.2%}",
            "pass" if inside else "fail" if whole else "not judged",
        ),
    ]


def _standard(report: Report) -> list[tuple[str, str, str, str]]:
    """Return the rows of the standard's own limits."""
    rows: list[tuple[str, str, str, str]] = []
    gate = report.gate
    if gate is None:
        return rows
    few = gate.steps < report.settings.steps
    for name, check in (("first loss", gate.first), ("average error", gate.average)):
        found = f"{check.absolute:.5f} or {check.relative:.3%}"
        relaxed = " (relaxed to the base runs' own)" if check.relaxed else ""
        allowed = f"{check.absolute_limit:.3g} or {check.relative_limit:.2%}{relaxed}"
        answer = "fail" if not check.ok else "not judged" if few else "pass"
        rows.append((f"standard: {name}", found, allowed, answer))
    if gate.norm is not None:
        rows.append(("standard: gradient norm", f"{gate.norm:.2%}", "10.00%", "monitored"))
    least = f"{report.settings.steps:,} at least"
    rows.append(("standard: steps", f"{gate.steps:,}", least, "not judged" if few else "pass"))
    return rows


def _checks(report: Report) -> str:
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


def _spikes(report: Report) -> str:
    rows = [
        (
            s.step,
            f"{s.base:+.1%}",
            f"{s.target:+.1%}",
            "both: the data" if s.where == "both" else html.tag("b", f"{s.where} only"),
        )
        for s in report.spikes
    ]
    return html.table(["step ", "base ", "target ", "in"], rows, most=40)


def _inputs(report: Report) -> str:
    last = len(report.inputs) - 1
    rows = [
        ("target" if i == last else f"base {i + 1}", c["path"], c["kind"], c["metric"], c["steps"])
        for i, c in enumerate(report.inputs)
    ]
    return html.table(["", "file", "kind", "metric", "steps "], rows)


def junit(report: Report) -> str:
    """Return the checks as JUnit XML; a check that was not judged is skipped, with the reason."""
    cases: list[JunitCase] = []
    reason = "; ".join(report.reasons) or "not judged"
    verdict = {PASS: "pass", DIVERGED: "fail"}.get(report.verdict, "not judged")
    rows = [*checks(report), ("verdict", report.sentence, "", verdict)]
    for name, found, allowed, answer in rows:
        failed = f"{found}; allowed {allowed}" if allowed else found
        cases.append(
            JunitCase(
                "align.loss",
                name,
                failure=failed if answer == "fail" else None,
                skipped=reason if answer == "not judged" else None,
            )
        )
    return suite("align loss", cases)
