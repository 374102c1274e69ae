"""How verbs print: tables for people, JSON for programs."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from telechat_moe.errors import UsageError

VERDICT_CODES = {"pass": 0, "diverged": 1, "inconclusive": 4}
"""Exit codes of `align`'s verdicts."""


def write_json(target: str | None, report: Any) -> bool:
    """Write a report where ``--json`` says.

    Args:
        target: The option's value: a file, ``-`` for stdout, or None.

    Returns:
        Whether stdout is taken, so that nothing else may be printed there.
    """
    if target is None:
        return False
    text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return True
    write_text("--json ", target, lambda: text)
    return False


def write_text(option: str, target: str | None, make: Callable[[], str]) -> None:
    """Write what an option asks for.

    Args:
        option: Before the file's name in a message: ``--html ``, or nothing.
        target: The file, or None: nothing is made.

    Raises:
        UsageError: The file cannot be written.
    """
    if target is None:
        return
    from telechat_moe.files import write_atomic

    text, path = make(), Path(target).absolute()
    try:
        if path.exists() and (not path.is_file() or path.parts[1] in ("dev", "proc")):
            path.write_text(text, encoding="utf-8")  # a pipe, a terminal, this process's stdout
        else:
            write_atomic(path.resolve(), text)  # what a link leads to
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead in a circle
        reason = error.strerror if isinstance(error, OSError) else "links in a circle"
        raise UsageError(f"{option}{target}: cannot be written: {reason}") from None


def show_table(headers: Sequence[str], rows: Sequence[Sequence[object]], prefix: str = "") -> None:
    """Print a table: with rich on a terminal, else in plain columns.

    Args:
        headers: Column titles; a title that ends in a space aligns its column to the right.
        rows: Cells, as many in each row as there are titles.
        prefix: Put before each plain line, such as ``# `` inside YAML.
    """
    texts = [[str(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _rich_table(headers, texts)
        return
    titles = [h.strip() for h in headers]
    widths = [max(len(r[i]) for r in [titles, *texts]) for i in range(len(titles))]
    for row in [titles, *texts]:
        cells = [
            cell.rjust(width) if title.endswith(" ") else cell.ljust(width)
            for cell, width, title in zip(row, widths, headers, strict=True)
        ]
        print((prefix + "  ".join(cells)).rstrip())


def show_counts(judged: Mapping[str, int], unknown: Mapping[str, int]) -> None:
    """Print how many tensors were judged, by status, and why others were not."""
    reasons = [(f"not judged: {reason}", count) for reason, count in unknown.items()]
    show_table(["tensors", "number "], [*judged.items(), *reasons])


def show_coverage(report: Mapping[str, Any]) -> None:
    """Print what a report says was judged of each phase."""
    rows = [
        [
            name,
            f"{s['judged_calls']:,} of {s['calls']:,}",
            f"{s['judged_bytes']:,} of {s['bytes']:,}",
        ]
        for name, s in report["coverage"].items()
    ]
    print()
    show_table(["judged", "calls ", "bytes "], rows)


def show_advice(report: Mapping[str, Any]) -> None:
    """Print what to dump to have more judged, what raises the share most first."""
    advice = {entry["dump"]: None for entry in report["to_dump"] if entry["dump"]}
    for tensor in advice:
        print(f"to have more judged, dump {tensor}")


def show_left(count: int, option: str = "") -> None:
    """Print how many lines of a table are left out, if any, and the option that shows them."""
    if count > 0:
        print(f"and {count} more ({option} lists all)" if option else f"and {count} more")


def _rich_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for header in headers:
        table.add_column(header.strip(), justify="right" if header.endswith(" ") else "left")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def to_yaml(data: dict[str, Any]) -> str:
    """Write plain data as YAML without aliases, in the order of the data."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    return str(yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100))
