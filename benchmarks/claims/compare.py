"""Compare what a page prints with what a command printed."""

from __future__ import annotations

import re

from benchmarks.claims.read import ROOT, Quote, table

NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")


def number(text: str) -> float:
    """Return the value of a printed number."""
    return float(text.replace(",", ""))


def judge(printed: str, measured: float, within: str) -> bool:
    """Return whether a measured number is what a page prints.

    Args:
        within: ``printed``: to the last printed digit; ``at most``: not above it; else a percentage of it.
    """
    value = number(printed)
    mantissa, _, power = printed.replace(",", "").partition("e")
    digits = len(mantissa.partition(".")[2]) - (int(power) if power else 0)
    half = 0.5000001 * 10.0**-digits
    if within == "printed":
        return abs(measured - value) <= half
    if within == "at most":
        return measured <= value + half
    return abs(measured - value) <= float(within.rstrip(" %")) / 100 * abs(value) + half


def _row(quote: Quote, line: str, output: str) -> list[tuple[str, float | None]]:
    """Return each number of a table's row beside the measured one; the row itself where the output has fewer or more."""
    cells = [cell.strip(" *`") for cell in line.strip("|").split("|")]
    (template,) = quote.read
    words = {int(i) for i in re.findall(r"\{(\d)\}", template)}
    printed = [n for i, cell in enumerate(cells) if i not in words for n in NUMBER.findall(cell)]
    pattern = re.sub(r"\{(\d)\}", lambda m: re.escape(cells[int(m[1])]), template)
    match = re.search(pattern, output)
    measured = [number(value) for value in match.groups() if value] if match else []
    if not printed or len(printed) != len(measured):
        return [(line, None)]
    return list(zip(printed, measured, strict=True))


def compare(quote: Quote, output: str) -> list[tuple[str, float | None, bool]]:
    """Return printed number, measured one and verdict for each number of a quote that is compared."""
    if quote.source:
        output = (ROOT / quote.source).read_text(encoding="utf-8")
    pairs: list[tuple[str, float | None]] = []
    if quote.table and quote.read:
        for line in table(quote.page, quote.table).splitlines()[2:]:
            pairs += _row(quote, line, output)
    elif not quote.table:
        for printed, pattern in zip(quote.printed, quote.read, strict=True):
            values = [number(text) for text in re.findall(pattern, output)]
            pairs.append((printed, max(values) if values else None))
    return [
        (printed, measured, measured is not None and judge(printed, measured, quote.within))
        for printed, measured in pairs
    ]
