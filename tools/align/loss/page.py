"""The verdict on a loss curve as one HTML page without anything from elsewhere, and as JUnit XML."""

from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telechat_moe.html import round_step
from telechat_moe.tools.align.loss import statistics as stats
from telechat_moe.tools.align.loss.verdict import DIVERGED, PASS, Report
from telechat_moe.tools.align.report.junit import Case, suite
from telechat_moe.tools.align.report.shell import shell

Floats = NDArray[np.float64]

WIDTH, LEFT, RIGHT = 1040, 64, 26


def page(report: Report) -> str:
    """Return the page."""
    word = report.verdict
    heading = f"Loss curve: <span class={word.replace(' ', '-')}>{escape(word)}</span>"
    return shell(f"Loss: {word}", heading, body(report))


def body(report: Report) -> str:
    """Return what the page shows below its heading."""
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
        items = "".join(f"<li><b>{escape(f.kind)}</b>: {escape(f.text)}" for f in report.findings)
        parts.append(f"<h2>What noise does not explain</h2><ul>{items}</ul>")
    if report.reasons:
        head = "Why it is not judged" if word not in (PASS, DIVERGED) else "Besides"
        items = "".join(f"<li>{escape(reason)}" for reason in report.reasons)
        parts.append(f"<h2>{head}</h2><ul>{items}</ul>")
    if report.spikes:
        parts += ["<h2>Spikes</h2>", _spikes(report)]
    parts += ["<h2>Curves</h2>", _inputs(report)]
    parts.append("".join(f"<p class=soft>{escape(note)}.</p>" for note in report.notes))
    return "".join(parts)


class _Axes:
    """Maps steps and values to a drawing of a given height."""

    def __init__(self, steps: NDArray[np.int64], low: float, high: float, height: int) -> None:
        if not high > low:
            low, high = low - 1e-6, high + 1e-6
        self.low, self.high, self.height = low, high, height
        self.first, self.last = float(steps[0]), float(max(steps[-1], steps[0] + 1))

    def x(self, steps: Any) -> Any:
        return LEFT + (steps - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def y(self, values: Any) -> Any:
        values = np.clip(values, self.low, self.high)
        return 8 + (self.high - values) / (self.high - self.low) * (self.height - 32)

    def line(self, steps: Any, values: Floats, kind: str, width: float) -> str:
        """Return a path; it breaks where values are not finite, and keeps extremes where there are too many."""
        steps, values = _thin(np.asarray(steps, float), values)
        parts, pen = [], "M"
        for x, y, good in zip(self.x(steps), self.y(values), np.isfinite(values), strict=True):
            if good:
                parts.append(f"{pen}{x:.1f} {y:.1f}")
            pen = "L" if good else "M"
        return f"<path class={kind} stroke-width={width} d='{''.join(parts)}'/>"

    def area(self, steps: Any, low: Floats, high: Floats, kind: str) -> str:
        good = np.isfinite(low) & np.isfinite(high)
        picked = np.flatnonzero(good)[:: max(1, int(good.sum()) // 600)]
        up = [f"{self.x(steps[i]):.1f} {self.y(high[i]):.1f}" for i in picked]
        down = [f"{self.x(steps[i]):.1f} {self.y(low[i]):.1f}" for i in picked[::-1]]
        return f"<path class={kind} d='M{'L'.join(up + down)}Z'/>" if len(picked) > 1 else ""

    def frame(self, label: str) -> str:
        ticks, digits = _ticks(self.low, self.high)
        parts = [
            f"<line class=grid x1={LEFT} x2={WIDTH - RIGHT} y1={self.y(t):.1f} y2={self.y(t):.1f} />"
            f"<text x={LEFT - 8} y={self.y(t) + 4:.1f} text-anchor=end>{t:.{digits}f}</text>"
            for t in ticks
        ]
        parts += [
            f"<text x={self.x(t):.1f} y={self.height - 6} text-anchor=middle>{t:,.0f}</text>"
            for t in _ticks(self.first, self.last, 12)[0]
        ]
        parts.append(f"<text x={WIDTH - RIGHT} y=20 text-anchor=end>{escape(label)}</text>")
        return "".join(parts)


def _ticks(low: float, high: float, most: int = 6) -> tuple[list[float], int]:
    step = round_step(high - low, most)
    first = int(np.ceil(low / step))
    ticks = [i * step for i in range(first, int(np.floor(high / step + 1e-9)) + 1)]
    return ticks, max(0, -int(np.floor(np.log10(step) + 1e-9)))


def _thin(steps: Floats, values: Floats, most: int = 900) -> tuple[Floats, Floats]:
    """Keep the smallest and largest of each group, so that no spike is lost."""
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
    """Return the mean over a centred window, at the ends and gaps over what there is of it."""
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
    axes = _Axes(report.steps, float(good.min()), float(np.quantile(good, 0.9995)), 300)
    parts = [axes.frame("loss")]
    parts.append(axes.line(report.steps, report.base, "base", 3.5))
    parts.append(axes.line(report.steps, report.target, "target", 1.1))
    for spike in report.spikes:
        at = int(np.searchsorted(report.steps, spike.step))
        value = max(report.base[at], report.target[at])
        alone = " alone" if spike.where != "both" else ""
        title = f"step {spike.step}: base {spike.base:+.1%}, target {spike.target:+.1%}"
        parts.append(
            f"<circle class='spike{alone}' cx={axes.x(spike.step):.1f} cy={axes.y(value):.1f} r=5><title>{title}</title></circle>"
        )
    bad = report.steps[~np.isfinite(report.target)]
    parts += [
        f"<text class=mark x={axes.x(s):.1f} y=22 text-anchor=middle>NaN</text>" for s in bad[:1]
    ]
    keys = (
        "<p class=keys><span><i style='background:var(--base)'></i>base"
        f"{' (mean of ' + str(len(report.bases)) + ' runs)' if len(report.bases) > 1 else ''}</span>"
        "<span><i style='background:var(--target)'></i>target</span>"
        "<span class=soft>○ a spike; red: in one of them only</span></p>"
    )
    return f"{keys}<svg class=wide viewBox='0 0 {WIDTH} 300' role=img aria-label='losses of base and target'>{''.join(parts)}</svg>"


def _differences(report: Report) -> str:
    d = np.expm1(report.difference) * 100
    good = d[np.isfinite(d)]
    if not len(good):
        return ""
    width = _window(report)
    known = np.isfinite(d)
    tamed = d.copy()
    tamed[known] = stats.tame(d[known])  # or a spike would lift the whole window around it
    smooth = _mean(tamed, width)
    envelope = report.envelope * 100
    logs = np.log(np.where(np.array(report.bases) > 0, report.bases, np.nan))
    others = [_mean((x - logs.mean(axis=0)) * 100, width) for x in logs] if len(logs) > 1 else []
    reach = [np.abs(smooth[np.isfinite(smooth)]).max(), 1.3 * np.nanmax(envelope)]
    reach += [1.25 * float(np.quantile(np.abs(good), 0.9)), report.settings.margin * 125]
    top = 1.1 * float(max(reach))
    axes = _Axes(report.steps, -top, top, 300)
    parts = [axes.area(report.steps, -envelope, envelope, "band")]
    for finding in report.findings:
        if "difference" in finding.kind and finding.low != finding.high:
            low, high = axes.x(finding.low), axes.x(finding.high)
            parts.append(
                f"<rect class=onset x={low:.1f} y=8 width={max(1.5, high - low):.1f} height=268 />"
            )
    parts.append(axes.frame(f"target's loss over base's, % (line: mean over {width} values)"))
    parts.append(
        f"<line class=zero x1={LEFT} x2={WIDTH - RIGHT} y1={axes.y(0):.1f} y2={axes.y(0):.1f} />"
    )
    picked = np.flatnonzero(np.isfinite(d) & (np.abs(d) <= top))
    picked = picked[:: max(1, len(picked) // 2500)]
    parts += [
        f"<circle class=raw cx={axes.x(report.steps[i]):.1f} cy={axes.y(d[i]):.1f} r=1.3 />"
        for i in picked
    ]
    parts += [axes.line(report.steps, other, "base", 1.2) for other in others]
    parts.append(axes.line(report.steps, smooth, "target", 2.6))
    parts += _marks(report, axes)
    base = "<span><i style='background:var(--base);height:2px;vertical-align:middle'></i>base runs against their mean</span>"
    keys = (
        "<p class=keys><span><i style='background:var(--target)'></i>target against base</span>"
        "<span><i style='background:var(--band)'></i>where 95 % of it lie if the runs are alike</span>"
        f"{base if others else ''}</p>"
    )
    return f"{keys}<svg class=wide viewBox='0 0 {WIDTH} 300' role=img aria-label='difference'>{''.join(parts)}</svg>"


def _beginning(report: Report) -> str:
    """Draw how differences grow from rounding, on a logarithmic scale; nothing where they were never that small."""
    if not report.noise or not report.noise["wander"]:
        return ""
    d = np.abs(report.difference)
    grown = np.flatnonzero(d > 0.5 * report.noise["spread"])
    count = min(len(d), max(60, 2 * int(grown[min(4, len(grown) - 1)]) if len(grown) else len(d)))
    steps = report.steps[:count]
    axes = _Axes(steps, -8.0, 0.0, 240)
    parts = []
    for power in range(-8, 1, 2):
        y = axes.y(power)
        parts.append(
            f"<line class=grid x1={LEFT} x2={WIDTH - RIGHT} y1={y:.1f} y2={y:.1f} />"
            f"<text x={LEFT - 8} y={y + 4:.1f} text-anchor=end>{10.0 ** (power + 2):g} %</text>"
        )
    parts += [
        f"<text x={axes.x(t):.1f} y=234 text-anchor=middle>{t:,.0f}</text>"
        for t in _ticks(axes.first, axes.last, 12)[0]
    ]
    logs = np.log(np.array(report.bases)[:, :count])
    for one in range(len(logs)):
        for other in range(one):
            parts.append(axes.line(steps, _log(logs[one] - logs[other]), "base", 1.4))
    parts.append(axes.line(steps, _log(d[:count]), "target", 2.4))
    keys = (
        "<h2>Before rounding errors have grown</h2><p class=keys><span><i style='background:var(--target)'></i>size of the "
        "difference, target to base</span>"
        + (
            "<span><i style='background:var(--base);height:2px;vertical-align:middle'></i>base runs to each other</span>"
            if len(logs) > 1
            else ""
        )
        + "</p>"
    )
    return f"{keys}<svg class=wide viewBox='0 0 {WIDTH} 240' role=img aria-label='first differences'>{''.join(parts)}</svg>"


def _log(values: Floats) -> Floats:
    return np.log10(np.maximum(np.abs(values), 1e-8))


def _marks(report: Report, axes: _Axes) -> list[str]:
    parts = []
    shown = [f for f in report.findings if f.kind not in ("not finite", "early departure")]
    for finding in shown[:6]:
        at = axes.x(finding.first)
        parts.append(f"<line class=cut x1={at:.1f} x2={at:.1f} y1=8 y2=276 />")
        right = at > WIDTH - 190
        where = f"x={at - 6:.1f} text-anchor=end" if right else f"x={at + 6:.1f}"
        parts.append(
            f"<text class=mark {where} y=268>step {finding.first}: {np.expm1(finding.size):+.2%}</text>"
        )
    return parts


def checks(report: Report) -> list[tuple[str, str, str, str]]:
    """Return what was checked: name, found, allowed, and ``pass``, ``fail``, ``not judged`` or ``monitored``."""
    rows = []
    gate = report.gate
    if gate is not None:
        few = gate.steps < report.settings.steps
        for name, check in (("first loss", gate.first), ("average error", gate.average)):
            found = f"{check.absolute:.5f} or {check.relative:.3%}"
            relaxed = " (relaxed to the base runs' own)" if check.relaxed else ""
            allowed = f"{check.absolute_limit:.3g} or {check.relative_limit:.2%}{relaxed}"
            answer = "fail" if not check.ok else "not judged" if few else "pass"
            rows.append((f"standard: {name}", found, allowed, answer))
        if gate.norm is not None:
            rows.append(("standard: gradient norm", f"{gate.norm:.2%}", "10.00%", "monitored"))
        rows.append(
            (
                "standard: steps",
                f"{gate.steps:,}",
                f"{report.settings.steps:,} at least",
                "not judged" if few else "pass",
            )
        )
    kinds = {f.kind for f in report.findings}
    rows.append(
        (
            "finite",
            "",
            "NaN and Inf where the base has them",
            "fail" if "not finite" in kinds else "pass",
        )
    )
    if report.bias is None:
        return [*rows, ("lasting difference", "", "", "not judged")]
    bias = report.bias
    whole = kinds & {"lasting difference", "passing difference", "early departure"}
    found = f"mean {bias['mean']:+.3%}, {abs(bias['statistic']):.1f} standard errors"
    rows.append(
        (
            "noise explains the difference",
            found,
            f"{bias['limit']:.1f} for the whole run",
            "fail" if whole else "pass",
        )
    )
    alone = kinds & {"single step", "first loss"}
    spikes = sum(s.where == "both" for s in report.spikes)
    rows.append(
        (
            "spikes are common",
            f"{spikes} in both",
            "none in one run only",
            "fail" if alone else "pass",
        )
    )
    inside = -bias["margin"] < bias["low"] <= bias["high"] < bias["margin"]
    answer = "pass" if inside else "fail" if whole else "not judged"
    rows.append(
        (
            "equivalence",
            f"{bias['low']:+.3%} to {bias['high']:+.3%} (90 %)",
            f"±{bias['margin']:.2%}",
            answer,
        )
    )
    return rows


def _checks(report: Report) -> str:
    rows = "".join(
        f"<tr><td>{escape(name)}<td class=n>{escape(found)}<td>{escape(allowed)}"
        f"<td class={ {'pass': 'pass', 'fail': 'diverged'}.get(answer, 'not-judged') }>{escape(answer)}"
        for name, found, allowed, answer in checks(report)
    )
    table = f"<div class=scroll><table><tr><th>check<th class=n>found<th>allowed<th>answer</tr>{rows}</table></div>"
    if report.power is None or report.noise is None:
        return table
    power, noise = report.power, report.noise
    return table + (
        f"<p class=soft>Power: a lasting difference of {power['seen_95']:.3%} would have been seen with a probability of 95 %, "
        f"one of the margin's size ({(report.bias or {})['margin']:.2%}) with {power['margin']:.1%}. Noise of the difference: "
        f"{noise['spread']:.3%} a step, correlated over {noise['correlation_time']:.1f} values.</p>"
    )


def _spikes(report: Report) -> str:
    rows = "".join(
        f"<tr><td class=n>{s.step:,}<td class=n>{s.base:+.1%}<td class=n>{s.target:+.1%}<td>"
        + ("both: the data" if s.where == "both" else f"<b>{s.where} only</b>")
        for s in report.spikes[:40]
    )
    more = (
        f"<p class=soft>and {len(report.spikes) - 40} more</p>" if len(report.spikes) > 40 else ""
    )
    return f"<table><tr><th class=n>step<th class=n>base<th class=n>target<th>in</tr>{rows}</table>{more}"


def _inputs(report: Report) -> str:
    rows = "".join(
        f"<tr><td>{'target' if i == len(report.inputs) - 1 else f'base {i + 1}'}<td>{escape(c['path'])}<td>{escape(c['kind'])}"
        f"<td>{escape(c['metric'])}<td class=n>{c['steps']:,}"
        for i, c in enumerate(report.inputs)
    )
    return f"<div class=scroll><table><tr><th><th>file<th>kind<th>metric<th class=n>steps</tr>{rows}</table></div>"


def junit(report: Report) -> str:
    """Return the checks as JUnit XML: what is not judged is skipped, with the reason."""
    cases: list[Case] = []
    reason = "; ".join(report.reasons) or "not judged"
    verdict = {PASS: "pass", DIVERGED: "fail"}.get(report.verdict, "not judged")
    rows = [*checks(report), ("verdict", report.sentence, "", verdict)]
    for name, found, allowed, answer in rows:
        failed = f"{found}; allowed {allowed}" if allowed else found
        cases.append(
            Case(
                "align.loss",
                name,
                failure=failed if answer == "fail" else None,
                skipped=reason if answer == "not judged" else None,
            )
        )
    return suite("align loss", cases)
