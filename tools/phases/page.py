"""The report of the three phases as one self-contained HTML page: each phase, and below it the page of its verb."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from telechat_moe import html
from telechat_moe.tools.align.report import bisect_page
from telechat_moe.tools.loss import page as loss_page
from telechat_moe.tools.loss.read import read
from telechat_moe.tools.loss.verdict import LossSettings, judge


def page(report: Mapping[str, Any]) -> str:
    """Return the page of a report, as :func:`telechat_moe.tools.phases.workflow.run` makes it.

    Raises:
        BadInputError: A loss curve is no longer where the report says.
    """
    word = report["verdict"]
    rows = [[html.verdict(p["verdict"]), p["title"], p["sentence"]] for p in report["phases"]]
    parts: list[str] = [html.tag("p", report["sentence"], "sentence")]
    parts.append(html.tag("p", report["recipe"], "soft"))
    parts.append(html.table(["", "phase", "what it came to"], rows))
    for number, phase in enumerate(report["phases"], 1):
        parts.append(f"<h2>{number}. {escape(phase['title'])}</h2>")
        parts += [_operators(phase["operators"])] if "operators" in phase else []
        for name, verb_report in phase.get("reports", {}).items():
            parts.append(f"<h3>{escape(name)}: {html.verdict(verb_report['verdict'])}</h3>")
            parts.append(_loss(verb_report) if name == "loss" else bisect_page.body(verb_report))
        parts.append(bisect_page.counts(phase, {}))
    return html.page(f"Alignment: {word}", parts, heading=f"Alignment: {html.verdict(word)}")


def _loss(report: Mapping[str, Any]) -> str:
    """Draw the curves again from the files that the report names."""
    curves = [read(curve["path"], curve["metric"]) for curve in report["inputs"]]
    return loss_page.body(judge(curves[:-1], curves[-1], LossSettings(**report["settings"])))


def _operators(operators: Sequence[Mapping[str, Any]]) -> str:
    keys = ("operator", "face", "shapes", "dtype", "observed_over_bound", "elements", "reason")
    titles = ["operator", "implementation", "shapes", "type", "observed / bound ", "elements "]
    ordered = sorted(operators, key=lambda o: o["verdict"] != "diverged")
    rows = [[html.verdict(o["verdict"]), *(o[key] for key in keys)] for o in ordered]
    return html.table(["", *titles, "where"], rows)
