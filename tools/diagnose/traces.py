"""Read traces of profilers: one file a rank in Chrome's format (`chrome.py`), or step_trace_time.csv of MindSpore's and torch_npu's for Ascend.

A step's time is taken apart as the device sees it: computing, collectives that no computation hides, waiting for data, and the rest,
in which the device is idle and waits for the host. Source of the table: MindStudio's description of step_trace_time.csv.
"""

import csv
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.tools.diagnose.chrome import (
    COMPUTING,
    EXPOSED,
    MICRO,
    Parts,
    RankTrace,
    info_rank,
    rank_of,
    read_chrome,
)
from telechat_moe.tools.diagnose.records import COMM, Records

TABLES = ("step_trace_time.csv", "cluster_step_trace_time.csv")
"""Names of profilers' tables of steps."""
PREPARING, DEVICE_ONLY = "Preparing", "_ascend_pt"
"""Column of the time before the first operator of a step, and the end of the names of torch_npu's folders, whose `Free` does not count it."""
NAMED = ("trace_view.json", "msprof*.json")
"""Names of Ascend profilers' traces, beside which other JSON files are."""


def traces_of(path: Path) -> list[Path]:
    """Return the traces that a path names: itself, or what is below a folder."""
    if path.is_file():
        return [path]
    for names in (TABLES, *((name,) for name in NAMED), ("*.json", "*.json.gz")):
        if paths := sorted(p for name in names for p in path.rglob(name)):
            return paths
    return sorted(path.rglob("*.db"))


def read_traces(paths: Sequence[Path]) -> Records:
    """Return the records of traces, a file or several with different steps a rank, or one table of all ranks.

    Raises:
        BadInputError: A file is no trace, has no steps, or a step of a rank is there twice.
    """
    ranks: dict[int, dict[int, Parts]] = {}
    worlds: dict[int, Path] = {}
    for path in paths:
        ranks_of_file = _table(path) if path.name.endswith(".csv") else [read_chrome(path)]
        for rank, steps, world in ranks_of_file:
            if world:
                worlds.setdefault(world, path)
            steps_of_rank = ranks.setdefault(rank, {})
            if both := sorted(steps_of_rank.keys() & steps.keys()):
                raise BadInputError(
                    f"{path}: step {both[0]} of rank {rank} is in another trace, too; name one of each rank, with the rank in its name "
                    "(rank3.json) where a trace does not say it"
                )
            steps_of_rank |= steps
    if len(worlds) > 1:
        counts = " and ".join(f"{count} in {path}" for count, path in sorted(worlds.items()))
        raise BadInputError(f"distributedInfo.world_size is {counts}; name the traces of one run")
    source = ", ".join(map(str, paths[:3])) + (f" and {len(paths) - 3} more" if paths[3:] else "")
    common = sorted(set.intersection(*(set(steps) for steps in ranks.values()))) if ranks else []
    if not common:
        raise BadInputError(f"{source}: no step is in the traces of all {len(ranks)} ranks")
    numbers = sorted(ranks)
    names = {name for steps in ranks.values() for step in common for name in steps[step]}
    columns = {
        name: np.array([[ranks[r][s].get(name, 0.0) for s in common] for r in numbers], np.float32)
        for name in sorted(names)
    }
    world = next(iter(worlds), 0)  # 0: none says it; ranks may be guessed from names
    absent = sorted(set(range(world or max(ranks) + 1)) - ranks.keys())
    alike = np.zeros(len(numbers), np.int64)
    return Records(
        source=f"traces {source}",
        ranks=np.array(numbers),
        steps=np.array(common),
        columns=columns,
        stage=alike,
        host=alike,
        hosts=[""],
        groups={"all": alike},
        absent=absent if world or len(absent) < len(ranks) else [],
    )


def _table(path: Path) -> list[RankTrace]:
    """Return ranks and steps of a table of an Ascend profiler."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInputError(f"cannot read the table {path}: {error}") from error
    parts_by_title = {COMPUTING: "compute", EXPOSED: COMM + "all", "Free": "host"}
    titles = list(rows[0]) if rows else []
    if missing := [name for name in ("Step", *parts_by_title) if name not in titles]:
        raise BadInputError(
            f"{path}: no column {missing[0]!r}; expected step_trace_time.csv of an Ascend profiler"
        )
    of_all = "Index" in titles
    steps_of_ranks: dict[int, dict[int, Parts]] = {}
    for line, row in enumerate(rows, start=2):
        if of_all and row.get("Type") != "rank":
            continue
        if of_all:
            rank = _number(path, line, "Index", row["Index"])
        else:
            rank = info_rank(path)
            if rank is None:
                device = row.get("Device_id")
                rank = _number(path, line, "Device_id", device) if device else rank_of(path, {})
        step = _number(path, line, "Step", re.sub(r"^\D+", "", row["Step"] or "0") or "0")
        parts = {
            part: _number(path, line, name, row[name]) * MICRO
            for name, part in parts_by_title.items()
        }
        if row.get(PREPARING) and path.absolute().parent.parent.name.endswith(DEVICE_ONLY):
            parts["host"] += _number(path, line, PREPARING, row[PREPARING]) * MICRO
        steps_of_ranks.setdefault(int(rank), {})[int(step)] = parts
    return [RankTrace(*item) for item in sorted(steps_of_ranks.items())]


def _number(path: Path, line: int, name: str, text: str | None) -> float:
    try:
        value = float((text or "").strip())
    except ValueError:
        value = float("nan")
    if not np.isfinite(value) or value < 0:
        raise BadInputError(f"{path}:{line}: {name} is {text!r}; expected a number of 0 or more")
    return value
