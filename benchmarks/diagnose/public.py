"""Traces that others made: which are read, which are refused and why, and how near a trace comes to its profiler's own table."""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from telechat_moe.errors import BadInputError
from telechat_moe.tools.diagnose.records import COMM
from telechat_moe.tools.diagnose.report import diagnose
from telechat_moe.tools.diagnose.traces import TABLES, read_traces

ENDS = (".json", ".json.gz", ".raw.gz", ".db", ".pb", *TABLES)
"""Names of files that someone may take for a trace."""


@dataclass
class Reading:
    """What became of the files below a folder.

    Attributes:
        bound: Files that were read, by what bounds their steps.
        refused: Files that were refused, by the reason without names and numbers.
        broken: Files on which anything else happened.
        apart: Largest difference of a trace_view.json from the table beside it, share of the step's device time.
        compared: Such pairs.
    """

    bound: Counter[str] = field(default_factory=Counter[str])
    refused: Counter[str] = field(default_factory=Counter[str])
    broken: list[str] = field(default_factory=list[str])
    apart: float = 0.0
    compared: int = 0


def read_all(folder: Path) -> Reading:
    """Read every file below a folder by itself."""
    reading = Reading()
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name.endswith(ENDS)):
        try:
            records = read_traces([path])
            reading.bound[diagnose(records).bounds[0].bound] += 1
            table = path.with_name(TABLES[0])
            if path.name == "trace_view.json" and table.exists():
                columns, table_columns = records.columns, read_traces([table]).columns
                busy = float((table_columns["compute"] + table_columns[COMM + "all"]).mean())
                reading.compared += 1
                for name in ("compute", COMM + "all"):
                    off = float(abs(columns[name] - table_columns[name]).max())
                    reading.apart = max(reading.apart, off / busy)
        except BadInputError as error:
            said = str(error).replace(str(path), "").strip(" :")
            reading.refused[re.split(r"[;(]", said)[0].strip()[:80]] += 1
        except Exception as error:
            reading.broken.append(f"{path}: {error!r}")
    return reading
