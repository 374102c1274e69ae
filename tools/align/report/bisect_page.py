"""The outcome of a bisection, drawn: facts, the call in the data flow, the residual as a picture, counts; and JUnit XML."""

import shlex
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from telechat_moe import html
from telechat_moe.html import Html, code
from telechat_moe.tools.align.judge.outcome import Outcome
from telechat_moe.tools.align.judge.standard import Standard, finite
from telechat_moe.tools.align.operators.approx import Array
from telechat_moe.tools.align.report.junit import JunitCase, suite
from telechat_moe.tools.align.thresholds import ENOUGH
from telechat_moe.units import size_text

NEIGHBOURS = 8
_CELLS, _SIDE = 48, 12  # of the residual's picture
_NODE, _HIGH, _GAP, _ROW = 196, 46, 14, 92  # of the graph's drawing


def page(report: Mapping[str, Any]) -> str:
    """Return the page of a bisection's report, as :func:`plain` makes it."""
    word = report["verdict"]
    heading = f"Alignment: {html.verdict(word)}"
    return html.page(f"Alignment: {word}", [body(report)], heading=heading)


def plain(
    outcome: Outcome,
    reference: str | None,
    target: str,
    graph: Mapping[str, Any] | None = None,
    standard: Standard | None = None,
) -> dict[str, Any]:
    """Return everything that the page shows as plain JSON types: what ``align bisect --json`` writes.

    Args:
        reference: None: the target was judged by itself.
        graph: The neighbourhood of the first divergent call, from ``neighbourhood.py``.
    """
    report = outcome.as_json() | {
        "runs": {"reference": reference, "target": target},
        "sentence": sentence(outcome, standard),
        "next": following(outcome, reference, target, standard is not None),
    }
    if standard is not None:
        report["standard"] = standard.as_json()
    if outcome.findings:
        first = outcome.findings[0]
        report["neighbours"] = _calls_around(outcome)
        report["graph"] = graph
        if first.residual is not None and first.residual.size > 1:
            report["picture"] = _fields(first.residual)
    return report


def body(report: Mapping[str, Any]) -> str:
    """Return the HTML of a bisection's report, as :func:`plain` makes it."""
    runs: Mapping[str, str] = report.get("runs") or {}
    parts: list[str] = []
    if runs:
        by = f" against {runs['reference']}" if runs["reference"] else ", judged by itself"
        parts.append(html.tag("p", runs["target"] + by, "soft"))
    if report.get("sentence"):
        parts.append(html.tag("p", report["sentence"], "sentence"))
    first = report.get("first")
    if first:
        parts += ["<h2>The first wrong call</h2>", _facts(first, report.get("ranks") or [])]
        if report.get("graph"):
            parts += ["<h2>Around it</h2>", _graph(report["graph"], report, first["operator"])]
        if report.get("picture"):
            parts += ["<h2>Where it is wrong</h2>", _picture(report["picture"])]
        if report.get("neighbours"):
            parts += ["<h2>Before and after, in the order of the run</h2>", _neighbours(report)]
        parts += ["<h2>All wrong calls</h2>", _findings(report["findings"])]
    parts += [_standard(report["standard"])] if report.get("standard") else []
    judged = counts(report, report.get("judged") or {})
    parts += ["<h2>What was judged</h2>", judged]
    if report.get("next"):
        rows = [[code(step["command"]), step["shows"]] for step in report["next"]]
        parts += ["<h2>What to run next</h2>", html.table(["command", "shows"], rows)]
    return "".join(parts)


def sentence(outcome: Outcome, standard: Standard | None = None) -> str:
    """Return one sentence on the outcome of the comparison."""
    judged, unknown = outcome.judged.get("pass", 0), outcome.judged.get("not judged", 0)
    by_other = outcome.coverage.by_other_run
    others = f" {by_other} of them could only be judged by the other run." if by_other else ""
    if not outcome.findings:
        if outcome.verdict == "inconclusive" and outcome.reason and judged:
            text = f"{outcome.reason[0].upper()}{outcome.reason[1:]}"
            return f"Nothing that was judged is wrong, but too little was. {text}.{others}"
        meet = "are what their operators must give, within the derived bounds"
        if standard is not None:
            by = f", {standard.replayed} of them are right by replay after other choices"
            meet = f"meet {standard.profile.name}{by if standard.replayed else ''}"
        return outcome.reason or f"{judged} tensors {meet}; {unknown} were not judged.{others}"
    first = outcome.findings[0]
    place = f"step {first.step}, rank {', '.join(map(str, outcome.ranks))}"
    family = f" ({first.family}: {first.evidence})" if first.evidence else ""
    if first.family == "other input":
        return f"{first.verdict.key} is the first call that was given other data, {place}{family}."
    return f"{first.verdict.key} is the first wrong call, {place}{family}."


def following(
    outcome: Outcome, reference: str | None, target: str, by_standard: bool = False
) -> list[dict[str, str]]:
    """Return the commands that help most after an outcome, and what each shows."""
    runs = {"a": shlex.quote(reference or "REFERENCE"), "b": shlex.quote(target)}
    other = "bisect {a} {b}" if by_standard else "bisect {a} {b} --standard mixed"
    commands = (_NEXT if reference else _NEXT_ALONE)[outcome.verdict]
    return [
        {"command": f"telechat-moe align {command.format(**runs)}", "shows": _SHOWS[command]}
        for command in (c or other for c in commands)
    ]


_NEXT: Mapping[str, Sequence[str]] = {
    "diverged": ("bisect {a} {b} --reproducer wrong", "bisect {a}", ""),
    "pass": ("", "bisect {a} {b} --standard ecosystem", "loss A.jsonl B.jsonl"),
    "inconclusive": ("inspect {b} --calls", "bisect {b}", ""),
}
"""Commands that help after a verdict; empty: the other way to judge."""
_NEXT_ALONE: Mapping[str, Sequence[str]] = {
    "diverged": ("bisect {b} --reproducer wrong", "bisect {a} {b} --standard mixed"),
    "pass": ("bisect {a} {b} --standard mixed", "loss A.jsonl B.jsonl"),
    "inconclusive": ("inspect {b} --calls", "bisect {a} {b} --standard mixed"),
}
"""Those after a run was judged by itself; ``{a}`` is a trusted run that is still to be dumped."""
_SHOWS = {
    "bisect {a} {b}": "which operator is wrong by itself, by derived bounds",
    "bisect {a} {b} --standard mixed": "how far every tensor is apart, by a published standard",
    "bisect {a} {b} --standard ecosystem": "whether the kernels are as exact as a benchmark allows",
    "bisect {a} {b} --reproducer wrong": "the wrong call alone, as data and a script to mend it by",
    "bisect {b} --reproducer wrong": "the wrong call alone, as data and a script to mend it by",
    "bisect {a}": "whether the reference itself is right",
    "bisect {b}": "what of it is right by itself",
    "inspect {b} --calls": "what the dump holds; below is what to dump for a verdict",
    "loss A.jsonl B.jsonl": "whether the loss curves of both runs agree",
}


def junit(outcome: Outcome, target: str) -> str:
    """Return the outcome as JUnit XML: a case for each step and rank."""
    places = sorted({(step, rank) for step, rank, *_ in outcome.calls})
    first = {(f.step, f.rank): f.verdict for f in reversed(outcome.findings)}
    cases: list[JunitCase] = []
    for step, rank in places:
        wrong, name = first.get((step, rank)), f"step {step} rank {rank}"
        fields = {"failure": wrong.key, "text": wrong.reason} if wrong else {}
        if not wrong and outcome.verdict == "inconclusive":
            fields = {"skipped": outcome.reason}
        elif outcome.verdict == "diverged" and not first:  # checkpoints, which have no calls
            fields = {"failure": outcome.reason}
        cases.append(JunitCase(target, name, **fields))
    return suite("align", cases)


def values_text(first: Mapping[str, Any]) -> str:
    """Return the values of both runs at the worst element in words."""
    values: Mapping[str, float] = first.get("values") or {}
    return ", ".join(f"{side} {value:.9g}" for side, value in values.items()) or "-"


def _facts(first: Mapping[str, Any], ranks: Sequence[int]) -> str:
    ratio, wrong = first["observed_over_bound"], first["wrong_elements"]
    rows = [
        ("call", code(first["operator"])),
        ("tensor", code(first["tensor"]) if first["tensor"] else "-"),
        ("phase", first["phase"] or "-"),
        ("layer", first["layer"]),
        ("step", str(first["step"])),
        ("ranks", ", ".join(map(str, ranks))),
        ("kind of fault", Html(f"{html.tag('b', first['family'])}: {escape(first['evidence'])}")),
        ("observed / bound", "must be equal" if ratio is None else f"{ratio:.3g}"),
        ("where", first["reason"]),
        ("values there", values_text(first)),
        ("wrong elements", (f"{wrong:,} " if wrong else "") + f"of {first['elements']:,}"),
    ]
    if first.get("source"):
        rows.append(("source", code(first["source"])))
    return html.facts(rows)


def _graph(graph: Mapping[str, Any], report: Mapping[str, Any], first: str) -> str:
    """Draw the calls around the first divergent one, from top to bottom in the direction of data."""
    levels: dict[int, list[Mapping[str, Any]]] = {}
    for node in graph["nodes"]:
        levels.setdefault(node["distance"], []).append(node)
    neighbours: Sequence[Mapping[str, Any]] = report.get("neighbours") or []
    answers = {n["key"]: (n["status"], n["observed_over_bound"]) for n in neighbours}
    answers |= {f["operator"]: ("diverged", f["observed_over_bound"]) for f in report["findings"]}
    widest = max(map(len, levels.values()))
    width = max(2, widest) * (_NODE + _GAP) + _GAP
    places: dict[str, tuple[float, float]] = {}
    drawn: list[str] = []
    for row, distance in enumerate(sorted(levels)):
        nodes = levels[distance]
        left = (width - len(nodes) * (_NODE + _GAP) + _GAP) / 2
        for i, node in enumerate(nodes):
            x, y = left + i * (_NODE + _GAP), 8 + row * _ROW
            places[node["key"]] = x, y
            drawn.append(_node(node, x, y, answers.get(node["key"]), node["key"] == first))
    lines = [_edge(places, edge, first) for edge in graph["edges"]]
    height = 8 + (len(levels) - 1) * _ROW + _HIGH + 10
    tips = "".join(
        f"<marker id={name} viewBox='0 0 8 8' refX=7 refY=4 markerWidth=7 markerHeight=7 orient=auto>"
        f"<path class='{kind}' d='M0 0L8 4L0 8Z'/></marker>"
        for name, kind in (("tip", "tip"), ("hot", "tip hot"))
    )
    parts = [f"<defs>{tips}</defs>", *lines, *drawn]
    drawing = html.svg(width, height, parts, "calls around the first wrong one")
    return (
        f"<div class=scroll>{drawing}</div>"
        "<p class=soft>Data flows downwards: calls whose results it reads are above, calls that read its results below. Red frame: also wrong. "
        "Dashed: not judged. Point at a box for the whole name.</p>"
    )


def _node(
    node: Mapping[str, Any],
    x: float,
    y: float,
    answer: tuple[str, float | None] | None,
    first: bool,
) -> str:
    status, ratio = answer or ("", None)
    kind = "first" if first else status.split()[0] if status else ""
    parts = node["key"].split(".")
    name = ".".join(parts[1:-2]) if len(parts) > 3 else node["key"]
    number = parts[-2] if len(parts) > 2 else ""
    text = status
    if ratio is not None:
        wrong = status == "diverged"
        text = f"{ratio:.3g} x bound" if wrong else f"{status}, {ratio:.2g} of bound"
    shape = " x ".join(map(str, node["shape"])) if node["shape"] else ""
    small = " · ".join(p for p in (node["phase"], shape, node["dtype"] or "") if p)
    title = "; ".join(filter(None, (node["key"], text, node["parent"] and f"in {node['parent']}")))
    return (
        f"<g class='node {kind}'><title>{escape(title)}</title><rect x={x:.0f} y={y:.0f} width={_NODE} height={_HIGH} rx=6 />"
        f"<text x={x + 10:.0f} y={y + 19:.0f}>{escape(_tail(name, 20))} <tspan class=small>#{escape(number)}</tspan></text>"
        f"<text class=small x={x + 10:.0f} y={y + 36:.0f}>{escape(_short(small, 32))}</text></g>"
    )


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _tail(text: str, length: int) -> str:
    return text if len(text) <= length else "…" + text[1 - length :]  # its operator is at the end


def _edge(places: Mapping[str, tuple[float, float]], edge: Mapping[str, Any], first: str) -> str:
    (a, b), (c, d) = places[edge["from"]], places[edge["to"]]
    hot = edge["from"] == first
    x0, y0, x1, y1 = a + _NODE / 2, b + _HIGH, c + _NODE / 2, d - 2
    if d <= b:  # the same row, or back: around the right side
        path = f"M{a + _NODE:.0f} {b + _HIGH / 2:.0f}C{a + _NODE + 30:.0f} {b + _HIGH / 2 + 30:.0f} {x1:.0f} {d + _HIGH + 40:.0f} {x1:.0f} {d + _HIGH + 2:.0f}"
    else:
        bend = (y1 - y0) / 2
        path = f"M{x0:.0f} {y0:.0f}C{x0:.0f} {y0 + bend:.0f} {x1:.0f} {y1 - bend:.0f} {x1:.0f} {y1:.0f}"
    title = f"{edge['tensor']} {edge['shape']}"
    return (
        f"<path class='edge{' hot' if hot else ''}' marker-end='url(#{'hot' if hot else 'tip'})' d='{path}'>"
        f"<title>{escape(title)}</title></path>"
    )


def _fields(residual: Array) -> dict[str, Any]:
    """Return the residual as a grid: rows are the first dimension, columns all others."""
    rows = residual.reshape(residual.shape[0] if residual.ndim > 1 else 1, -1)
    fields = _blocks(np.nan_to_num(np.abs(rows), nan=np.inf))
    shown = [[None if not np.isfinite(v) else float(f"{v:.4g}") for v in line] for line in fields]
    count, columns = rows.shape
    return {"shape": list(residual.shape), "rows": count, "columns": columns, "fields": shown}


def _picture(picture: Mapping[str, Any]) -> str:
    fields: Sequence[Sequence[float | None]] = picture["fields"]
    legend = [(1.0, "within the bound"), (3.0, "beyond it"), (100.0, "100 times")]
    legend.append((1e4, "10,000 times and more"))
    side = max(_SIDE, min(26, 560 // max(len(fields), len(fields[0]))))
    columns, rows = (f"{picture[n]:,} {n}" for n in ("columns", "rows"))
    drawn = [f"<text x=58 y=13>{columns}</text><text x=0 y=33>{rows}</text>"]
    drawn += [
        f"<rect x={58 + j * side} y={20 + i * side} width={side - 1} height={side - 1} style='fill:{_fill(value)}'>"
        f"<title>{'not finite' if value is None else f'{value:.3g} times the bound'}</title></rect>"
        for i, line in enumerate(fields)
        for j, value in enumerate(line)
    ]
    width, height = max(150, 66 + len(fields[0]) * side), 26 + len(fields) * side
    shape = " x ".join(map(str, picture["shape"]))
    return (
        f"{html.keys((_fill(v), label) for v, label in legend)}"
        f"{html.svg(width, height, drawn, 'residual over bound')}"
        f"<p class=soft>Shape {shape}. Each field is the worst of its elements.</p>"
    )


def _fill(value: float | None) -> str:
    if value is not None and value <= 1:
        return "var(--line)"
    depth = 1.0 if value is None else min(1.0, 0.35 + 0.16 * np.log10(max(value, 1.0)))
    return f"color-mix(in srgb, var(--bad) {depth * 100:.0f}%, var(--paper))"


def _blocks(x: Array) -> Array:
    """Return the largest value of each field of a grid with at most 48 x 48 fields."""
    for axis in (0, 1):
        parts = min(_CELLS, x.shape[axis])
        starts = np.linspace(0, x.shape[axis], parts, endpoint=False).astype(int)
        x = np.maximum.reduceat(x, starts, axis)
    return x


def _calls_around(outcome: Outcome) -> list[dict[str, Any]]:
    """Return the calls before and after the first divergent one, in the order of the run."""
    first = outcome.findings[0]
    calls = [c for c in outcome.calls if c[:2] == (first.step, first.rank)]
    position = next((i for i, c in enumerate(calls) if c[2] == first.verdict.key), None)
    if position is None:
        return []
    return [
        {"key": key, "status": status, "observed_over_bound": finite(ratio), "first": i == position}
        for i, (_, _, key, status, ratio) in enumerate(calls)
        if abs(i - position) <= NEIGHBOURS
    ]


def _neighbours(report: Mapping[str, Any]) -> str:
    rows: list[list[object]] = []
    for neighbour in report["neighbours"]:
        ratio, status = neighbour["observed_over_bound"], neighbour["status"]
        share = 1.0 if ratio is None else min(1.0, np.log10(1 + 9 * min(ratio, 1e6)) / 3)
        text = "-" if status == "not judged" else "not equal" if ratio is None else f"{ratio:.3g}"
        bar = html.bar(share, status.split()[0])
        rows.append([code(neighbour["key"]), html.verdict(status), text, bar])
    first = {i: "lit" for i, neighbour in enumerate(report["neighbours"]) if neighbour["first"]}
    titles = ["call", "verdict", "observed / bound ", "on a logarithmic scale"]
    return html.table(titles, rows, kinds=first)


def _findings(findings: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [f["step"], f["rank"], code(f["operator"]), code(f["tensor"]), f["reason"]]
        for f in findings
    ]
    titles = ["step ", "rank ", "call", "tensor", "what"]
    note = "<p class=soft>Those after the first may follow from it.</p>"
    return note + html.table(titles, rows, limit=50)


def _standard(standard: Mapping[str, Any]) -> str:
    """Return the tensors that are furthest apart by a standard."""
    rows: list[list[object]] = []
    for t in standard["tensors"]:
        tensor = code(f"{t['operator']} {t['tensor']}")
        rows.append([html.verdict(t["status"]), t["step"], t["rank"], tensor, t["reason"]])
    titles = ["status", "step ", "rank ", "tensor", "why"]
    notes = html.items([*standard["notes"], *(f"chosen otherwise: {f}" for f in standard["flips"])])
    title = escape(f"Tensors by {standard['name']} ({standard['source']}), worst first")
    return f"<h2>{title}</h2>{html.table(titles, rows, limit=25)}{notes}"


def counts(report: Mapping[str, Any], judged: Mapping[str, int]) -> str:
    """Return what was judged of each phase, how many tensors with which answer, why others were not, what to dump."""
    unknown: Mapping[str, int] = report.get("not_judged") or {}
    reasons = sorted(unknown.items(), key=lambda item: -item[1])
    rows = [*judged.items(), *((f"not judged: {reason}", count) for reason, count in reasons)]
    counts_table = html.table(["tensors", "number "], rows) if rows else ""
    coverage = report.get("coverage")
    if not coverage:
        return counts_table
    shares = [[name, *_share(s, "calls"), *_share(s, "bytes")] for name, s in coverage.items()]
    titles = ["judged", "calls ", "share of calls", "bytes ", "share of bytes"]
    parts = [html.table(titles, shares), counts_table]
    lacking = [
        [o["reason"], o["calls"], size_text(o["bytes"]), o["dump"] or None]
        for o in report["to_dump"]
    ]
    if lacking:
        parts.append("<h3>What to dump to have the rest judged</h3>")
        parts.append(html.table(["not judged", "calls ", "values ", "dump"], lacking, limit=12))
    return "".join(parts)


def _share(share: Mapping[str, int], unit: str) -> list[object]:
    judged, total = share[f"judged_{unit}"], share[unit]
    part = judged / total if total else 1.0
    text = " of ".join(f"{n:,}" if unit == "calls" else size_text(n) for n in (judged, total))
    return [f"{text}, {part:.0%}", html.bar(part, "pass" if part >= ENOUGH else "not")]
