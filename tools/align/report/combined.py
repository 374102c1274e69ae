"""Show the answers of several `align` verbs, read from their JSON, as one self-contained page, and as JUnit XML.

Each verb's report is recognised by its keys and shown as the verb's own page (``bisect_page.py``, ``loss/page.py``).
Above the reports are the overall verdict, a card for each report, and what was not judged and why.
"""

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, cast

from telechat_moe import html
from telechat_moe.errors import BadInputError
from telechat_moe.html import Html
from telechat_moe.tools.align.judge.coverage import VERDICTS, worst_of
from telechat_moe.tools.align.narrowing import is_object
from telechat_moe.tools.align.report import bisect_page
from telechat_moe.tools.align.report.junit import JunitCase, suite

_KEYS = {
    "phases": ("phases", "recipe"),
    "bisect": ("first", "findings", "judged"),
    "merge": ("merged", "how"),
    "loss": ("gate", "power", "inputs"),
    "ckpt": ("beyond", "a", "b"),
}
_ROWS = 25


@dataclass(frozen=True)
class Document:
    """The report of one verb.

    Attributes:
        name: Name of its file, or its position in a report of phases.
        verb: Sub-verb that wrote it.
        data: Its content.
    """

    name: str
    verb: str
    data: Mapping[str, Any]

    @property
    def verdict(self) -> str:
        """One of :data:`VERDICTS`."""
        return self.data["verdict"]


def read(path: Path) -> Document:
    """Read a file that a verb wrote with ``--json``.

    Raises:
        BadInputError: There is no such file, or it is no JSON, or no report of a verb that gives a verdict.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BadInputError(
            f"{path}: not JSON: {str(error)[:80]}; give what a verb wrote with --json"
        ) from None
    return document(str(path), data)


def document(name: str, data: Any) -> Document:
    """Return a report together with the verb that wrote it.

    Raises:
        BadInputError: Its keys match no verb.
    """
    content = data if is_object(data) else {}
    for verb, keys in _KEYS.items():
        if content.keys() >= {*keys} and content.get("verdict") in VERDICTS:
            one = Document(name, verb, content)
            try:
                summary(one)
                judged(one)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise _broken(one, error) from None
            return one
    known = ", ".join(_KEYS)
    raise BadInputError(
        f"{name}: no report of `align {known}`; expected what one of these wrote with --json"
    )


def _broken(one: Document, error: Exception) -> BadInputError:
    said = f"{type(error).__name__} {error}"
    return BadInputError(f"{one.name}: broken report of `align {one.verb}`: {said}")


def verdict(documents: Sequence[Document]) -> str:
    """Return the worst verdict; without any report, that nothing was judged."""
    return worst_of(d.verdict for d in documents)


def page(documents: Sequence[Document]) -> str:
    """Return the page.

    Raises:
        BadInputError: A report lacks what its verb writes.
    """
    word = verdict(documents)
    parts = [html.tag("p", _said(documents), "sentence"), _cards(documents)]
    for number, one in enumerate(documents):
        title = f"<h2>{one.verb}: {html.verdict(one.verdict)}</h2>{html.tag('p', one.name, 'soft')}"
        parts.append(f"<section id=r{number}>{title}{body(one)}</section>")
    return html.page(f"Alignment: {word}", parts, heading=f"Alignment: {html.verdict(word)}")


def body(one: Document) -> str:
    """Return the HTML of one report.

    Raises:
        BadInputError: It lacks content that its verb writes.
    """
    told = one.verb == "merge"  # others say it themselves
    try:
        said = html.tag("p", summary(one), "sentence") if told else ""
        return said + _BODIES[one.verb](one.data)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise _broken(one, error) from None


def junit(documents: Sequence[Document]) -> str:
    """Return JUnit XML with a case for each report: failed if it diverged, skipped if nothing could be judged."""
    cases: list[JunitCase] = []
    for one in documents:
        how = {"pass": None, "diverged": "failure"}.get(one.verdict, "skipped")
        cases.append(
            JunitCase(f"align.{one.verb}", one.name, **({how: summary(one)} if how else {}))
        )
    return suite("align", cases)


def summary(one: Document) -> str:
    """Return one sentence on the outcome of a report."""
    data = one.data
    if one.verb == "bisect":
        return data.get("sentence") or _of_bisect(data)
    if one.verb == "loss":
        return data["sentence"]
    if one.verb == "merge":
        return f"{data['merged']:,} of {data['tensors']:,} tensors merged into {data['out']}."
    if one.verb == "ckpt":
        return f"{len(data['beyond'])} of {len(data['tensors']):,} tensors differ by more than allowed."
    return data.get("sentence", one.verdict)


def judged(one: Document) -> tuple[int, int]:
    """Return how many tensors (in phases and losses: checks) were judged, and how many were not."""
    data = one.data
    if one.verb == "bisect":
        counts = data["judged"]
        unknown = counts.get("not judged", 0)
        return sum(counts.values()) - unknown, unknown
    if one.verb == "merge":
        return data["merged"], data["tensors"] - data["merged"]
    if one.verb == "ckpt":
        return len(data["tensors"]), len(data["not_comparable"])
    if one.verb == "phases":
        parts = [p["verdict"] in ("pass", "diverged") for p in data["phases"]]
        return sum(parts), len(parts) - sum(parts)
    return data["steps"]["compared"], 0


def _of_bisect(data: Mapping[str, Any]) -> str:
    first = data["first"]
    if first is None:
        return data["reason"] or f"{_tallied(data['judged'])}."
    return f"{first['operator']} is the first wrong call, step {first['step']}, rank {first['rank']}: {first['family']}."


def _tallied(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n:,} {name}" for name, n in counts.items()) or "nothing"


def _said(documents: Sequence[Document]) -> str:
    wrong = next((d for d in documents if d.verdict == "diverged"), None)
    if wrong is not None or len(documents) == 1:
        return summary(wrong or documents[0])
    unknown = [d for d in documents if d.verdict != "pass"]
    if not unknown:
        return f"All {len(documents)} checks pass."
    first = f"{unknown[0].verb}: {summary(unknown[0])}"
    if len(unknown) == len(documents):
        return first
    count = f"{len(unknown)} of {len(documents)}"
    return f"Nothing is wrong, but {count} could not be judged. {first}"


def _cards(documents: Sequence[Document]) -> str:
    cards: list[str] = []
    for number, one in enumerate(documents):
        yes, no = judged(one)
        unit = {"loss": "steps", "phases": "phases"}.get(one.verb, "tensors")
        count = f"{yes:,} {unit} judged" + (f", {no:,} not" if no else "")
        inner = html.tag("b", f"{one.verb}: {one.verdict}")
        inner += html.tag("span", textwrap.shorten(summary(one), 150, placeholder=" …"), "what")
        kind = one.verdict.replace(" ", "-")
        card = f"<a class='card {kind}' href='#r{number}'>{inner}<span>{count}</span></a>"
        cards.append(card)
    return f"<div class=cards>{''.join(cards)}</div>"


# ---------------------------------------------------------------- bodies


def _table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table of the first rows: verdicts in colour, names of tensors and calls as code."""
    most = len(rows) if len(rows) <= 2 * _ROWS else _ROWS
    return html.table(titles, [[_cell(value) for value in row] for row in rows], most=most)


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return Html(", ".join(html.html(_cell(one)) for one in cast("list[Any]", value)))
    if value in (*VERDICTS, "not comparable", "not judged"):
        return html.verdict(value)
    named = isinstance(value, str) and "." in value and " " not in value
    return html.code(value) if named else value


def _listed(found: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Return a table of objects: ``columns`` has the title of each of their keys that is shown."""
    return _table([*columns.values()], [[one[key] for key in columns] for one in found])


def _merge(data: Mapping[str, Any]) -> str:
    parts: list[str] = []
    if data["problems"]:
        columns = {"step": "step ", "key": "call", "place": "tensor", "how": "layout from"}
        parts = ["<h3>Not merged</h3>", _listed(data["problems"], columns | {"problem": "why"})]
    found = {f"layout from: {name}": n for name, n in data["how"].items()}
    found |= {f"copies: {name}": n for name, n in data["copies"].items()}
    return "".join([*parts, "<h3>Where layouts came from</h3>", bisect_page.counts({}, found)])


def _ckpt(data: Mapping[str, Any]) -> str:
    sides = [{"side": s, **data[s]} for s in ("a", "b")]
    columns = {"side": "", "path": "path", "step": "step ", "layout": "layout"}
    different = {n: t for n, t in data["tensors"].items() if not t["bitwise"]}
    equal = len(data["tensors"]) - len(different)
    parts = [_listed(sides, columns), f"<p>{equal:,} tensors are equal to the last bit.</p>"]
    if different:
        rows = [
            {"verdict": "diverged" if n in data["beyond"] else "pass", "name": n, **t}
            for n, t in sorted(different.items(), key=lambda item: item[0] not in data["beyond"])
        ]
        columns = {"verdict": "", "name": "tensor", "dtype": "type"}
        columns |= {"different": "elements that differ ", "max_abs": "largest "}
        columns["relative_l2"] = "relative L2 "
        parts += ["<h3>Those that differ</h3>", _listed(rows, columns)]
    if data["not_comparable"]:
        unknown = _table(["tensor", "why"], [*data["not_comparable"].items()])
        parts += ["<h3>Not compared</h3>", unknown]
    return "".join(parts)


def _loss(data: Mapping[str, Any]) -> str:
    """Draw the curves if they are still in the reported files and give the same verdict."""
    from telechat_moe.tools.align.loss import page as loss_page
    from telechat_moe.tools.align.loss import read as loss_read
    from telechat_moe.tools.align.loss import verdict as loss

    try:
        curves = [loss_read.read(i["path"], i["metric"]) for i in data["inputs"]]
        report = loss.judge(curves[:-1], curves[-1], loss.Settings(**data["settings"]))
    except (BadInputError, OSError) as error:
        why = f"The curves cannot be drawn: {error}"
    else:
        if (report.verdict, report.sentence) == (data["verdict"], data["sentence"]):
            return loss_page.body(report)
        why = "The curves are not drawn: they have changed since this report was written."
    columns = {"kind": "kind", "first": "step ", "text": "what"}
    found = _listed(data["findings"], columns) if data["findings"] else ""
    said = html.tag("p", data["sentence"], "sentence")
    return said + found + html.items(data["reasons"]) + html.tag("p", why, "soft")


def _phases(data: Mapping[str, Any]) -> str:
    """Show the phases one after another, each with the report of its verb."""
    columns = {"verdict": "", "title": "phase", "sentence": "what it came to"}
    parts = [html.tag("p", str(data["recipe"]), "soft"), _listed(data["phases"], columns)]
    for number, part in enumerate(data["phases"], 1):
        parts.append(f"<h2>{number}. {escape(part['title'])}</h2>")
        if part.get("operators"):
            parts.append(_operators(part["operators"]))
        reports: Mapping[str, Any] = part.get("reports") or {}
        for name, found in reports.items():
            inner = document(name, found)
            parts.append(f"<h3>{escape(name)}: {html.verdict(inner.verdict)}</h3>{body(inner)}")
        if part.get("not_judged"):
            parts.append(bisect_page.counts(part, {}))
    return "".join(parts)


def _operators(found: Sequence[Mapping[str, Any]]) -> str:
    columns = {"verdict": "", "operator": "operator", "face": "implementation", "shapes": "shapes"}
    columns |= {"dtype": "type", "observed_over_bound": "observed / bound "}
    columns |= {"elements": "elements ", "reason": "where"}
    return _listed(sorted(found, key=lambda o: o["verdict"] != "diverged"), columns)


_BODIES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "bisect": bisect_page.body,
    "merge": _merge,
    "loss": _loss,
    "ckpt": _ckpt,
    "phases": _phases,
}
