"""The report of the fault benchmark as one self-contained page."""

from collections import Counter
from html import escape

from benchmarks.align_faults.suite import COLUMNS, Report, scored, table
from telechat_moe import html
from telechat_moe.html import Html, code


def page(report: Report) -> str:
    """Return the page."""
    failures = report.failures()
    word = "diverged" if failures else "pass"
    shares, layouts = report.shares, Counter(r.base.layout for r in report.faults)
    body = [
        f"<p class=sentence>{len(report.faults)} planted faults, {len(report.pairs)} right pairs: "
        f"{shares['detected']:.2%} of what can be seen detected, {shares['exact']:.2%} with operator, phase and ranks, "
        f"{shares['family']:.2%} with the kind of fault; {report.false_alarms} false alarms, {report.inconclusive} right pairs inconclusive.</p>",
        *(f"<p class=diverged>{escape(f)}</p>" for f in failures),
        "<h2>By area</h2>",
        _areas(report),
        "<h2>The same dumps, other methods</h2>",
        _methods(report),
        "<h2>Bugs of history</h2>",
        _history(report),
        "<h2>Layouts</h2>",
        html.table(["layout", "faults "], layouts.most_common()),
        "<h2>What was not named correctly</h2>",
        _missed(report),
    ]
    title, heading = f"Fault benchmark: {word}", f"Fault benchmark: {html.verdict(word)}"
    return html.page(title, body, heading=heading)


def _areas(report: Report) -> str:
    rows: list[list[object]] = []
    for area, *counts in table(report):
        seen = counts[2]
        bars = [
            html.bar(c / max(seen, 1), "pass" if c == seen else "diverged", c) for c in counts[3:]
        ]
        rows.append([area, *counts[:3], *bars])
    return html.table([COLUMNS[0], *(f"{name} " for name in COLUMNS[1:])], rows)


def _methods(report: Report) -> str:
    titles = ["method", "flagged ", "operator named ", "false alarms ", "of right pairs "]
    return html.table(titles, [[n, *counts.values()] for n, counts in scored(report).items()])


def _history(report: Report) -> str:
    rows: list[list[object]] = []
    for bug, r, changed in report.bugs:
        word = "found" if r.detected else html.tag("span", "not found", "diverged")
        loss = "changed" if changed else "unchanged"
        rows.append([bug.source, bug.said, bug.layout, word, loss, code(r.said[:160])])
    return html.table(["bug", "what", "layout", "", "loss of the step", "the tool says"], rows)


def _missed(report: Report) -> str:
    rows: list[list[object]] = []
    for r in report.missed[:200]:
        planted = Html(f"{code(r.key)} {r.phase} {r.ranks}")
        rows.append([r.name, f"{r.base.layout}, {r.base.dtype}", planted, code(r.said[:200])])
    return html.table(["class", "run", "planted", "said"], rows) if rows else "<p>Nothing.</p>"
