"""Show the answers of several `align` verbs, read from their JSON, as one self-contained page, and as JUnit XML.

Each verb's report is recognised by its keys and shown as the verb's own page (``bisect_page.py``, ``loss/page.py``).
Above the reports are the overall verdict, a card for each report, and what was not judged and why.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, cast

from telechat_moe import html
from telechat_moe.errors import BadInputError
from telechat_moe.html import Html
from telechat_moe.tools.align.report import bisect_page as bisect_page
from telechat_moe.tools.align.report.junit import JunitCase, suite

VERDICTS = ("diverged", "not comparable", "not judged", "pass")
"""The verdicts of a report, worst first; the last two mean that nothing judged is wrong."""

_KEYS = {
    "phases": ("phases", "recipe"),
    "bisect": ("first", "findings", "judged"),
    "replay": ("closest", "wrong"),
    "compare": ("profile", "rows", "basis"),
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
    content: Mapping[str, Any] = {}
    if isinstance(data, Mapping):
        content = cast("Mapping[str, Any]", data)
    for verb, keys in _KEYS.items():
        if all(key in content for key in keys) and content.get("verdict") in VERDICTS:
            return _checked(Document(name, verb, content))
    known = ", ".join(_KEYS)
    raise BadInputError(
        f"{name}: no report of `align {known}`; expected what one of these wrote with --json"
    )


def _checked(one: Document) -> Document:
    try:
        summary(one)
        judged(one)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _broken(one, error) from None
    return one


def _broken(one: Document, error: Exception) -> BadInputError:
    said = f"{type(error).__name__} {error}"
    return BadInputError(f"{one.name}: broken report of `align {one.verb}`: {said}")


def verdict(documents: Sequence[Document]) -> str:
    """Return the worst verdict; without any report, that nothing was judged."""
    found = [d.verdict for d in documents]
    return next((v for v in VERDICTS if v in found), "not judged")


def page(documents: Sequence[Document]) -> str:
    """Return the page.

    Raises:
        BadInputError: A report lacks what its verb writes.
    """
    word = verdict(documents)
    parts = [f"<p class=sentence>{escape(_said(documents))}</p>", _cards(documents)]
    for number, one in enumerate(documents):
        title = f"{one.verb}: {html.verdict(one.verdict)}"
        parts.append(
            f"<section id=r{number}><h2>{title}</h2><p class=soft>{escape(one.name)}</p>{body(one)}</section>"
        )
    return html.page(f"Alignment: {word}", parts, heading=f"Alignment: {html.verdict(word)}")


def body(one: Document) -> str:
    """Return the HTML of one report.

    Raises:
        BadInputError: It lacks content that its verb writes.
    """
    try:
        return _BODIES[one.verb](one.data)
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
    if one.verb == "replay":
        count, wrong = sum(data["tensors"].values()), len(data["wrong"])
        if wrong:
            return f"{wrong} of {count:,} tensors are not what their operators must give."
        unknown = data["tensors"].get("not judged", 0)
        said = f"{count - unknown:,} tensors are what their operators must give"
        return f"{said}; {unknown:,} were not judged." if unknown else f"{said}, all of them."
    if one.verb == "compare":
        return data["reason"] or f"By {data['profile']}: " + _tallied(data["tensors"])
    if one.verb == "merge":
        return f"{data['merged']:,} of {data['tensors']:,} tensors merged into {data['out']}."
    if one.verb == "ckpt":
        return f"{len(data['beyond'])} of {len(data['tensors']):,} tensors differ by more than allowed."
    return data.get("sentence", one.verdict)


def judged(one: Document) -> tuple[int, int]:
    """Return how many tensors (in phases and losses: checks) were judged, and how many were not."""
    data = one.data
    if one.verb in ("replay", "compare", "bisect"):
        counts = data["judged" if one.verb == "bisect" else "tensors"]
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


def _kind(word: str) -> str:
    return word.replace(" ", "-")


def _said(documents: Sequence[Document]) -> str:
    wrong = [d for d in documents if d.verdict == "diverged"]
    open_ = [d for d in documents if d.verdict in ("not judged", "not comparable")]
    if wrong:
        return summary(wrong[0])
    if open_:
        done = len(documents) - len(open_)
        first = f"{open_[0].verb}: {summary(open_[0])}" if len(documents) > 1 else summary(open_[0])
        return (
            f"Nothing is wrong, but {len(open_)} of {len(documents)} could not be judged. {first}"
            if done
            else first
        )
    if len(documents) == 1:
        return summary(documents[0])
    return f"All {len(documents)} checks pass."


def _cards(documents: Sequence[Document]) -> str:
    cards: list[str] = []
    for number, one in enumerate(documents):
        yes, no = judged(one)
        unit = {"loss": "steps", "phases": "phases"}.get(one.verb, "tensors")
        count = f"{yes:,} {unit} judged" + (f", {no:,} not" if no else "")
        cards.append(
            f"<a class='card {_kind(one.verdict)}' href='#r{number}'><b>{escape(one.verb)}: {escape(one.verdict)}</b>"
            f"<span class=what>{escape(_short(summary(one)))}</span><span>{count}</span></a>"
        )
    return f"<div class=cards>{''.join(cards)}</div>"


def _short(text: str, most: int = 150) -> str:
    return text if len(text) <= most else text[: most - 1].rsplit(" ", 1)[0] + " …"


# ---------------------------------------------------------------- bodies


def _table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table of the first rows: verdicts in colour, names of tensors and calls as code."""
    most = len(rows) if len(rows) <= 2 * _ROWS else _ROWS
    return html.table(titles, [[_cell(value) for value in row] for row in rows], most=most)


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return Html(", ".join(html.html(_cell(one)) for one in cast("list[Any]", value)))
    if value in VERDICTS:
        return html.verdict(value)
    named = isinstance(value, str) and "." in value and " " not in value
    return html.code(value) if named else value


def _replay(data: Mapping[str, Any]) -> str:
    parts = [f"<p class=sentence>{escape(summary(Document('', 'replay', data)))}</p>"]
    if data["wrong"]:
        rows = [
            [w["step"], w["rank"], w["call"], w["tensor"], w["observed_over_bound"], w["reason"]]
            for w in data["wrong"]
        ]
        titles = ["step ", "rank ", "call", "tensor", "observed / bound ", "what"]
        parts += ["<h3>Wrong</h3>", _table(titles, rows)]
    if data["closest"]:
        rows = [[c["tensor"], c["observed_over_bound"]] for c in data["closest"]]
        parts += [
            "<h3>Closest to their bound, and within it</h3>",
            _table(["tensor", "observed / bound "], rows),
        ]
    parts += ["<h3>What was judged</h3>", bisect_page.counts(data["tensors"], data["not_judged"])]
    return "".join(parts)


def _compare(data: Mapping[str, Any]) -> str:
    rows = [
        [
            r["status"],
            r["step"],
            r["rank"],
            f"{r['key']} {r['place']}",
            r["metric"],
            r["observed"],
            r["limit"],
            r["reason"],
        ]
        for r in data["rows"]
    ]
    titles = ["", "step ", "rank ", "tensor", "metric", "observed ", "limit ", "why"]
    flips = {f"choices, {name}": len(said) for name, said in data["flips"].items() if said}
    parts = [f"<p class=sentence>{escape(summary(Document('', 'compare', data)))}</p>"]
    parts += ["<h3>Tensors, worst first</h3>", _table(titles, rows)]
    said = [line for name in ("illegal", "not judged", "legal") for line in data["flips"][name]]
    if said:
        items = "".join(f"<li>{escape(line)}" for line in said[:_ROWS])
        parts.append(
            f"<details><summary>{len(said)} choices came out differently</summary><ul>{items}</ul></details>"
        )
    parts += [
        "<h3>What was judged</h3>",
        bisect_page.counts({**data["tensors"], **flips}, data["not_judged"]),
    ]
    return "".join(parts)


def _merge(data: Mapping[str, Any]) -> str:
    rows = [[p["step"], p["key"], p["place"], p["how"], p["problem"]] for p in data["problems"]]
    parts = [f"<p class=sentence>{escape(summary(Document('', 'merge', data)))}</p>"]
    if rows:
        parts += [
            "<h3>Not merged</h3>",
            _table(["step ", "call", "tensor", "layout from", "why"], rows),
        ]
    found = {f"layout from: {name}": n for name, n in data["how"].items()}
    found |= {f"copies: {name}": n for name, n in data["copies"].items()}
    return "".join([*parts, "<h3>Where layouts came from</h3>", bisect_page.counts(found, {})])


def _ckpt(data: Mapping[str, Any]) -> str:
    sides = [[s, data[s]["path"], data[s]["step"], data[s]["layout"]] for s in ("a", "b")]
    different = [(n, t) for n, t in data["tensors"].items() if not t["bitwise"]]
    rows = [
        [
            "diverged" if n in data["beyond"] else "pass",
            n,
            t["dtype"],
            t["different"],
            t["max_abs"],
            t["relative_l2"],
        ]
        for n, t in sorted(different, key=lambda item: item[0] not in data["beyond"])
    ]
    equal = len(data["tensors"]) - len(different)
    parts = [
        _table(["", "path", "step ", "layout"], sides),
        f"<p>{equal:,} tensors are equal to the last bit.</p>",
    ]
    if rows:
        titles = ["", "tensor", "type", "elements that differ ", "largest ", "relative L2 "]
        parts += ["<h3>Those that differ</h3>", _table(titles, rows)]
    if data["not_comparable"]:
        parts += [
            "<h3>Not compared</h3>",
            _table(["tensor", "why"], list(data["not_comparable"].items())),
        ]
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
    rows = [[f["kind"], f["first"], f["text"]] for f in data["findings"]]
    found = _table(["kind", "step ", "what"], rows) if rows else ""
    items = "".join(f"<li>{escape(reason)}" for reason in data["reasons"])
    return f"<p class=sentence>{escape(data['sentence'])}</p>{found}<ul>{items}</ul><p class=soft>{escape(why)}</p>"


def _phases(data: Mapping[str, Any]) -> str:
    """Show the phases one after another, each with the report of its verb."""
    rows = [[p["verdict"], p["title"], p["sentence"]] for p in data["phases"]]
    parts = [
        f"<p class=soft>{escape(str(data['recipe']))}</p>",
        _table(["", "phase", "what it came to"], rows),
    ]
    for number, part in enumerate(data["phases"], 1):
        parts.append(f"<h2>{number}. {escape(part['title'])}</h2>")
        if part.get("operators"):
            parts.append(_operators(part["operators"]))
        reports: Mapping[str, Any] = part.get("reports") or {}
        for name, found in reports.items():
            inner = document(name, found)
            parts.append(f"<h3>{escape(name)}: {html.verdict(inner.verdict)}</h3>{body(inner)}")
        if part.get("not_judged"):
            parts.append(bisect_page.counts({}, part["not_judged"]))
    return "".join(parts)


def _operators(found: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            o["verdict"],
            o["operator"],
            o["face"],
            o["shapes"],
            o["dtype"],
            o["observed_over_bound"],
            o["elements"],
            o["reason"],
        ]
        for o in sorted(found, key=lambda o: o["verdict"] != "diverged")
    ]
    titles = [
        "",
        "operator",
        "implementation",
        "shapes",
        "type",
        "observed / bound ",
        "elements ",
        "where",
    ]
    return _table(titles, rows)


_BODIES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "bisect": bisect_page.body,
    "replay": _replay,
    "compare": _compare,
    "merge": _merge,
    "loss": _loss,
    "ckpt": _ckpt,
    "phases": _phases,
}
