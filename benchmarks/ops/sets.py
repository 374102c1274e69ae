"""Our times with each instruction set: a column each in one file, all of one kind of processor."""

import json
from pathlib import Path
from typing import Any

from telechat_moe.errors import BadInputError
from telechat_moe.ops.native import ISAS

COLUMN = ("commit", "date")


def keep(file: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Return what ``file`` holds, with the column of the set that was measured in place of its last one.

    Raises:
        BadInputError: The file is of another kind of processor, or not such a file.
    """
    found: dict[str, Any] = {"processor": result["processor"], "sets": {}}
    if file.exists():
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            there = found["processor"]
            for column in found["sets"].values():
                _ = [column[k] for k in COLUMN], column["best_us"].keys()
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise BadInputError(f"--sets {file}: not a file of this option: {error!r}") from None
        if there != result["processor"]:
            raise BadInputError(
                f"--sets {file}: its times are of {there}, this is {result['processor']}: numbers of two kinds of "
                "processors are not compared; give this one a file of its own"
            )
    times = {
        f"{c['op']} {c['shape']}, {c['threads']} threads": c["best"][c["ours"]]
        for c in result["cases"]
        if c["ours"] in c["best"]
    }
    found["sets"][result["isa"]] = {k: result[k] for k in COLUMN} | {"best_us": times}
    return found


def table(kept: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows, a column a set with commit and date of its run, or none where it never ran here."""
    sets = kept["sets"]
    shown = [isa for isa in ISAS if isa in sets]
    head = ["best us"] + [f"{isa} ({', '.join(sets[isa][k] for k in COLUMN)}) " for isa in shown]
    names = dict.fromkeys(name for isa in shown for name in sets[isa]["best_us"])
    times = [[sets[isa]["best_us"].get(name) for isa in shown] for name in names]
    rows = [
        [name, *["" if us is None else f"{us:,.0f}" for us in row]]
        for name, row in zip(names, times, strict=True)
    ]
    return head, rows


def never(kept: dict[str, Any]) -> str:
    """Return the sentence about the sets without a column."""
    lacking = [isa for isa in ISAS if isa not in kept["sets"]]
    return f"never run on {kept['processor']}: {', '.join(lacking)}" if lacking else ""
