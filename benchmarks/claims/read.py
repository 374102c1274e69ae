"""Read claims.yaml, find its quotes in the pages, and list the figures that no claim covers."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("claims.yaml")
STATUSES = ("verified", "unverified", "compiled only", "unsupported")
MEASURED = ("verified", "compiled only")
MACHINES = ("AMD", "AMD (Zen 4)", "Intel")
FIGURE = re.compile(
    r"\d(?:[\d,.]*\d)?(?:e-\d+\b| ?%| ?x\b| (?:times|s|ms|us|minutes?|hours?|[KMG]i?B|GB/s|points|tokens/s)\b)"
    r"|\b\d[\d,]* of \d|\b(?:all|All) \d+ |\b\d{1,3}(?:,\d{3})+\b|(?<![\w.\-=])\d+\.\d+(?![\w.]*\d)"
)
VERSION = re.compile(
    r"(?i)\b(?:mindspore|mindformers|numpy|python|torch|transformers)[ =<>~`]*\d[\d.]*(?:(?:,| or| and) \d[\d.]*\d)*"
)


@dataclass(frozen=True)
class Quote:
    """Words of a page with the numbers that a command must print.

    Attributes:
        page: Path from the root.
        text: Words of the page; without them the quote is a table.
        printed: Its numbers in braces, in order.
        read: A regular expression for each number, one group; the largest of all matches is measured. For a table one
            expression with a group for each number of a row, in which ``{0}`` stands for the words of the row's first cell.
        within: How far measured may be from printed: ``printed`` (its last digit), ``2 %``, or ``at most``.
        table: First words of a table's header.
        seal: Digest of that table, so that an edit of it is seen.
        source: File that holds the number, a bound or a count of a test; it is read instead of the output.
        times: Machine whose times, speeds and memory these are: they are not compared.
    """

    page: str
    text: str = ""
    printed: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    within: str = "printed"
    table: str = ""
    seal: str = ""
    source: str = ""
    times: str = ""


@dataclass(frozen=True)
class Claim:
    """One card of benchmarks/claims/verification.md; the keys are explained at the head of claims.yaml."""

    id: str
    claim: str
    status: str
    command: str = ""
    quotes: tuple[Quote, ...] = ()
    quick: float = 0
    machine: str = ""
    commit: str = ""
    date: str = ""
    note: str = ""


def _quote(page: str, entry: Any) -> Quote:
    braces = re.compile(r"\{([^{}]*)\}")
    others = {"text": entry} if isinstance(entry, str) else {**entry}
    text, read = others.pop("text", ""), others.pop("read", ())
    words = " ".join(braces.sub(r"\1", text).split())
    read = (read,) if isinstance(read, str) else tuple(read)
    others = {name: str(value) for name, value in others.items()}
    return Quote(page, words, tuple(braces.findall(text)), read, **others)


def read_claims(file: Path = FILE) -> list[Claim]:
    """Return the claims of a file."""
    claims = []
    for entry in yaml.safe_load(file.read_text(encoding="utf-8"))["claims"]:
        pages: dict[str, Any] = entry.pop("pages", {})
        quotes = [_quote(page, q) for page, listed in pages.items() for q in listed]
        entry |= {key: str(entry[key]) for key in ("commit", "date") if key in entry}
        claims.append(Claim(**entry, quotes=tuple(quotes)))
    return claims


def definitions(file: Path = FILE) -> dict[str, list[str]]:
    """Return words of each page whose figures are constants, examples or sources; ``all`` is a whole page."""
    return yaml.safe_load(file.read_text(encoding="utf-8"))["definitions"]


def page_text(page: str) -> str:
    """Return a page on one line."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def table_in(text: str, header: str) -> str:
    """Return the table of a text whose header begins with these words, or no text."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if line.startswith(header) and lines[i + 1].startswith("|-"):
            rows = lines[i:]
            end = next((j for j, row in enumerate(rows) if not row.startswith("|")), len(rows))
            return "\n".join(rows[:end])
    return ""


def table(page: str, header: str) -> str:
    """Return the table of a page whose header begins with these words, or no text."""
    return table_in((ROOT / page).read_text(encoding="utf-8"), header)


def seal(text: str) -> str:
    """Return the digest of a table."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def problems(claims: list[Claim]) -> list[str]:
    """Return what is wrong with the quotes: words or tables that a page no longer has."""
    wrong = []
    for claim in claims:
        if claim.status not in STATUSES:
            wrong.append(
                f"{claim.id}: status {claim.status!r}, expected one of {', '.join(STATUSES)}"
            )
        if claim.status in MEASURED and not (claim.machine and claim.commit and claim.date):
            wrong.append(f"{claim.id}: {claim.status}, but machine, commit or date is missing")
        for quote in claim.quotes:
            place = f"{claim.id}: {quote.page}"
            if quote.table:
                text = table(quote.page, quote.table)
                if not text:
                    wrong.append(f"{place} has no table with the header {quote.table!r}")
                elif seal(text) != quote.seal:
                    wrong.append(f"{place}: the table {quote.table!r} changed; measure it again ({claim.command}), "
                                 f"then write date, commit and seal: {seal(text)}")  # fmt: skip
            elif quote.text not in page_text(quote.page):
                wrong.append(f"{place} does not say {quote.text!r}")
            elif len(quote.read) != len(quote.printed):
                wrong.append(
                    f"{place}: {len(quote.printed)} numbers in braces, {len(quote.read)} expressions"
                )
            if quote.times and quote.times not in MACHINES:
                wrong.append(
                    f"{place}: times of {quote.times!r}, expected one of {', '.join(MACHINES)}"
                )
            if claim.status in MEASURED and bool(quote.times) == bool(quote.read):
                wrong.append(
                    f"{place}: {quote.table or quote.text!r} needs `read`, or `times` where it holds on one machine only"
                )
    return wrong


def units(page: str) -> list[str]:
    """Return the sentences and table rows of a page that hold a figure, outside code blocks."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    prose = "\n".join("" if line.startswith(("|", "#")) else line for line in text.splitlines())
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", prose):
        rows += re.split(r"(?<=[.:;])\s+(?=[A-Z*`(])", " ".join(block.split()))
    return [" ".join(row.split()) for row in rows if FIGURE.search(VERSION.sub("", row))]


def uncovered(page: str, claims: list[Claim], constants: list[str] | None) -> list[str]:
    """Return the sentences and rows of a page with a figure that neither a quote nor a definition has."""
    quotes = [q for claim in claims for q in claim.quotes if q.page == page]
    tables = "\n".join(table(page, q.table) for q in quotes if q.table)
    rows = {" ".join(line.split()) for line in tables.splitlines()}
    constants = [" ".join(words.split()) for words in constants or []]
    missing = []
    for unit in units(page):
        if unit in rows or any(words == "all" or words in unit for words in constants):
            continue
        remainder = unit
        for text in (q.text for q in quotes if q.text):
            remainder = "" if remainder in text else remainder.replace(text, " ")
        if FIGURE.search(VERSION.sub("", remainder)):
            missing.append(unit)
    return missing


def pages() -> list[str]:
    """Return README, the pages of docs and the READMEs of benchmarks, whose figures are written by hand."""
    below = [*ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*/README.md")]
    return ["README.md", *sorted(str(path.relative_to(ROOT)) for path in below)]
