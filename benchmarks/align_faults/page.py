"""The benchmark's report as one page without anything from elsewhere."""

from html import escape
from importlib.resources import files
from pathlib import Path

from benchmarks.align_faults.suite import COLUMNS, Report, scored, table, used

TEMPLATE = Path(str(files("telechat_moe.tools.align.report"))) / "page.html"


def page(report: Report) -> str:
    """Return the page."""
    failures = report.failures()
    word = "diverged" if failures else "pass"
    shares = report.shares
    body = [
        f"<p class=sentence>{len(report.faults)} planted faults, {len(report.pairs)} right pairs: "
        f"{shares['detected']:.2%} of what can be seen detected, {shares['exact']:.2%} with operator, phase and ranks, "
        f"{shares['family']:.2%} with the kind of fault; {report.false_alarms} false alarms.</p>",
        *(f"<p class=diverged>{escape(f)}</p>" for f in failures),
        "<h2>By area</h2>",
        _areas(report),
        "<h2>The same dumps, other methods</h2>",
        _methods(report),
        "<h2>Bugs of history</h2>",
        _history(report),
        "<h2>Layouts</h2>",
        _rows(("layout", "faults"), [[n, str(c)] for n, c in used(report).most_common()]),
        "<h2>What was not named right</h2>",
        _missed(report),
    ]
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, value in (
        ("title", escape(f"Fault benchmark: {word}")),
        ("heading", f"Fault benchmark: <span class={word}>{word}</span>"),
        ("body", "".join(body)),
    ):
        text = text.replace("{{" + name + "}}", value)
    return text


def _rows(head: tuple[str, ...], rows: list[list[str]]) -> str:
    top = "".join(f"<th>{escape(h)}" for h in head)
    lines = "".join("<tr>" + "".join(f"<td>{c}" for c in row) for row in rows)
    return f"<div class=scroll><table><tr>{top}</tr>{lines}</table></div>"


def _areas(report: Report) -> str:
    rows = []
    for area, *counts in table(report):
        seen = max(counts[2], 1)
        bars = [
            f"<div class=track><div class='bar {'pass' if c == counts[2] else 'diverged'}' "
            f"style='width:{100 * c / seen:.0f}%'></div></div>{c}"
            for c in counts[3:]
        ]
        rows.append([escape(area), *(str(c) for c in counts[:3]), *bars])
    return _rows(COLUMNS, rows)


def _methods(report: Report) -> str:
    rows = [
        [escape(name), *(str(v) for v in counts.values())]
        for name, counts in scored(report).items()
    ]
    return _rows(("method", "flagged", "operator named", "false alarms", "of right pairs"), rows)


def _history(report: Report) -> str:
    rows = [
        [
            escape(bug.source),
            escape(bug.said),
            escape(bug.layout),
            "found" if r.detected else "<span class=diverged>not found</span>",
            "changed" if changed else "unchanged",
            f"<code>{escape(r.said[:160])}</code>",
        ]
        for bug, r, changed in report.bugs
    ]
    return _rows(("bug", "what", "layout", "", "loss of the step", "the tool says"), rows)


def _missed(report: Report) -> str:
    wrong = [
        r
        for r in report.faults
        if r.ranks and not (r.detected and r.exact and r.family and r.refires)
    ]
    rows = [
        [
            escape(r.name),
            escape(f"{r.base.layout}, {r.base.dtype}"),
            f"<code>{escape(r.key)}</code> {r.phase} {r.ranks}",
            f"<code>{escape(r.said[:200])}</code>",
        ]
        for r in wrong[:200]
    ]
    return _rows(("class", "run", "planted", "said"), rows) if rows else "<p>Nothing.</p>"
