"""The report of the fault benchmark as one self-contained page."""

from html import escape

from benchmarks.align_faults.suite import COLUMNS, Report, scored, table, used
from telechat_moe import html
from telechat_moe.html import Html, code


def page(report: Report) -> str:
    """Return the page."""
    failures = report.failures()
    word = "diverged" if failures else "pass"
    shares = report.shares
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
        html.table(["layout", "faults "], used(report).most_common()),
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
    rows: list[list[object]] = [
        [
            bug.source,
            bug.said,
            bug.layout,
            "found" if r.detected else html.tag("span", "not found", "diverged"),
            "changed" if changed else "unchanged",
            code(r.said[:160]),
        ]
        for bug, r, changed in report.bugs
    ]
    return html.table(["bug", "what", "layout", "", "loss of the step", "the tool says"], rows)


def _missed(report: Report) -> str:
    wrong = [
        r
        for r in report.faults
        if r.ranks and not (r.detected and r.exact and r.family and r.refires)
    ]
    rows: list[list[object]] = [
        [
            r.name,
            f"{r.base.layout}, {r.base.dtype}",
            Html(f"{code(r.key)} {r.phase} {r.ranks}"),
            code(r.said[:200]),
        ]
        for r in wrong[:200]
    ]
    return html.table(["class", "run", "planted", "said"], rows) if rows else "<p>Nothing.</p>"
