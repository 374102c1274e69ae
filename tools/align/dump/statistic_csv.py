"""Native dumps of MindSpore: ``statistic.csv`` with a row for each input and output, and ``.npy`` files beside it.

Tree: ``rank_<rank>/<net>/<graph>/<iteration>/statistic.csv``; a file alone is rank 0, step 0. Columns are found by their
titles. Values: ``<type>.<name>.<task>.<stream>.<time>.<input|output>.<slot>.<format>.<dtype>.npy``; too long names are in ``mapping.csv``.
"""

import csv
import os
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from telechat_moe.errors import BadInputError
from telechat_moe.tools.align.dump import value_files
from telechat_moe.tools.align.dump.msprobe import canonical
from telechat_moe.tools.align.dump.records import (
    Call,
    Dump,
    Phase,
    RankDump,
    Stats,
    TensorRecord,
    Value,
)

NAME = "statistic.csv"
_MUST = ("Op Type", "Op Name", "IO", "Slot", "Data Type", "Shape")
_STATS = (
    ("Max Value", "Max"),
    ("Min Value", "Min"),
    ("Avg Value", "Mean Value", "Avg"),
    ("L2Norm Value", "L2 Norm Value", "L2Norm"),
)
_FILE = re.compile(
    r"(?P<op>.+)\.(?P<task>\d+)\.(?P<stream>\d+)\.(?P<time>\d+)\.(?P<io>input|output)\.(?P<slot>\d+)"
    r"(?:\.[^.]+)?\.(?P<dtype>[^.]+)\.npy"
)
_MAX_SLOT = 1 << 16


def find(root: Path | str) -> list[Path]:
    """Return the files named ``statistic.csv`` in a folder, or the file itself."""
    root = Path(root)
    if root.is_file():
        return [root] if root.name.endswith(".csv") else []
    return sorted(Path(f, NAME) for f, _, names in os.walk(root) if NAME in names)


def read(root: Path | str) -> Dump:
    """Return a native dump: a tree, or one file.

    Raises:
        BadInputError: There is no such file, or it is broken; names file and line.
    """
    root = Path(root)
    files = find(root)
    if not files:
        raise BadInputError(f"{root}: no {NAME} there")
    ranks: dict[tuple[int, int], RankDump] = {}
    for path in files:
        rank = _last(path, root, r"rank_?(\d{1,9})")
        step = _last(path, root, r"(\d{1,9})")
        calls = _calls(path, root if root.is_dir() else root.parent)
        earlier = ranks.get((step, rank))
        if earlier is not None:  # several graphs
            graph = path.parent.parent.name
            calls = {**earlier.calls, **{f"{graph}/{key}": call for key, call in calls.items()}}
        about = "mindspore", "statistics", "L2"
        ranks[step, rank] = RankDump(step, rank, *about, calls, path.parent)
    return Dump(root, ranks)


def _last(path: Path, root: Path, pattern: str) -> int:
    parts = path.parent.relative_to(root).parts if path != root else ()
    matches = [m for part in parts if (m := re.fullmatch(pattern, part))]
    return int(matches[-1][1]) if matches else 0


def _calls(path: Path, root: Path) -> dict[str, Call]:
    files = _files(path.parent)
    calls: dict[str, tuple[str, str, dict[str, dict[int, TensorRecord]]]] = {}
    for line, row in _rows(path, root):
        kind, name, io = row["Op Type"], row["Op Name"], row["IO"]
        head = ".".join(row.get(k) or "0" for k in ("Task ID", "Stream ID", "Timestamp"))
        new: dict[str, dict[int, TensorRecord]] = {"input": {}, "output": {}}
        sides = calls.setdefault(f"{kind}.{name}.{head}", (kind, name, new))[2]
        slot = _slot(path, line, row["Slot"])
        if slot in sides.get(io, {slot}):
            raise BadInputError(
                f"{path}:{line}: IO {io!r}, slot {slot}: input or output expected, each slot once"
            )
        names = [f"{kind}.{n}" for n in (name.rpartition("/")[2], name.replace("/", "_"))]
        file = next((f for n in names if (f := files.get((n, head, io, slot)))), None)
        sides[io][slot] = _record(path, line, row, file, root)
    return {key: _call(key, *call) for key, call in calls.items()}


def _call(key: str, kind: str, name: str, sides: Mapping[str, Mapping[int, TensorRecord]]) -> Call:
    backward = name.split("/")[0].startswith("Gradients")
    phase = Phase.BACKWARD if backward else Phase.FORWARD
    if re.search(r"(?i)\boptimizer", name):
        phase = Phase.OPTIMIZER
    inputs, outputs = _slots(sides["input"]), _slots(sides["output"])
    return Call(key, "api", f"{kind}.{name}", 0, phase, inputs, {}, outputs)


def _slots(records: Mapping[int, TensorRecord]) -> list[Value]:
    return [records.get(i) for i in range(max(records, default=-1) + 1)]


def _rows(path: Path, root: Path) -> Iterator[tuple[int, dict[str, str]]]:
    rows = _lines(value_files.within(path, root), path, strict=True)
    titles = [t.strip() for t in next(rows, (0, list[str]()))[1]]
    missing = [t for t in _MUST if t not in titles]
    if missing or len(set(titles)) != len(titles):
        names = ", ".join(missing) or "that appear twice"
        raise BadInputError(f"{path}:1: columns {names} missing; found {titles}")
    for line, row in rows:
        if len(row) != len(titles):
            raise BadInputError(f"{path}:{line}: {len(row)} cells, {len(titles)} expected")
        yield line, dict(zip(titles, (c.strip() for c in row), strict=True))


def _lines(file: Path, shown: Path, strict: bool = False) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a CSV file, each with the number of its last line."""
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            reader = csv.reader(lines, strict=strict)
            for row in reader:
                yield reader.line_num, row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInputError(f"{shown}: cannot be read as CSV: {error}") from None


def _slot(path: Path, line: int, text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or int(text) > _MAX_SLOT:
        raise BadInputError(f"{path}:{line}: slot {text!r}: a number expected")
    return int(text)


def _record(
    path: Path, line: int, row: Mapping[str, str], file: Path | None, root: Path
) -> TensorRecord:
    numbers = row["Shape"].strip("()[] \"'")
    parts = [n.strip() for n in numbers.split(",") if n.strip()]
    if not all(re.fullmatch(r"\d{1,12}", n, re.ASCII) for n in parts):
        raise BadInputError(f"{path}:{line}: shape {row['Shape']!r}: a list of sizes expected")
    dtype, shape = canonical(row["Data Type"]), tuple(map(int, parts))
    stats = [_number(path, line, row, titles) for titles in _STATS]
    read = None if file is None else partial(value_files.load, file, dtype, shape, root)
    statistics = None if all(s is None for s in stats) else Stats(*stats)
    return TensorRecord(dtype, shape, statistics, row.get("MD5") or None, file, read=read)


def _number(path: Path, line: int, row: Mapping[str, str], titles: tuple[str, ...]) -> float | None:
    text = next((row[t] for t in titles if row.get(t)), None)
    if text is None or text.lower() in ("null", "none", "n/a"):
        return None
    try:
        return float({"true": "1", "false": "0"}.get(text.lower(), text))
    except ValueError:
        raise BadInputError(f"{path}:{line}: {titles[0]} {text!r}: a number expected") from None


def _files(folder: Path) -> dict[tuple[str, str, str, int], Path]:
    """Return the value files of a folder by operator, time, side and slot."""
    names = {p.name: p.name for p in folder.glob("*.npy")}
    mapping = folder / "mapping.csv"
    if mapping.exists():
        names |= {row[1]: row[0] for _, row in _lines(mapping, mapping) if len(row) == 2}
    files: dict[tuple[str, str, str, int], Path] = {}
    for full, name in names.items():
        match = _FILE.fullmatch(full if full.endswith(".npy") else f"{full}.npy")
        if match and "/" not in name:
            head = ".".join(match[k] for k in ("task", "stream", "time"))
            files[match["op"], head, match["io"], int(match["slot"][:9])] = folder / name
    return files
