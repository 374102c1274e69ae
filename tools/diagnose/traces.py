"""Read traces of profilers: torch's Kineto (Chrome's JSON), and step_trace_time.csv of MindSpore's and torch_npu's for Ascend.

A step's time is taken apart as the device sees it: computing, collectives that no computation hides, waiting for data, and the rest,
in which the device is idle and waits for the host. Sources: the Trace Event Format (ph, ts, dur in microseconds), Kineto's categories
(``kernel``, ``gpu_memcpy``, ``gpu_memset``; ``user_annotation`` ``ProfilerStep#N``), and MindStudio's table of step_trace_time.csv.
"""

import csv
import gzip
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.tools.diagnose.excess import Array
from telechat_moe.tools.diagnose.records import COMM, Records

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Kineto's categories of what runs on the device."""
COLLECTIVE = re.compile(r"nccl|hccl|hcom_", re.IGNORECASE)
"""In the name of a kernel that communicates."""
STEP = re.compile(r"ProfilerStep#(\d+)$")
DATA = re.compile(r"DataLoader")
TABLES = ("step_trace_time.csv", "cluster_step_trace_time.csv")
"""Names of profilers' tables of steps."""
MICRO = 1e-6

Parts = dict[str, float]
Rank = tuple[int, dict[int, Parts]]
"""Number of a rank, and the parts of each of its steps, seconds."""


def traces_of(path: Path) -> list[Path]:
    """Return the traces that a path names: itself, or what is below a folder."""
    if path.is_file():
        return [path]
    tables = sorted(p for name in TABLES for p in path.rglob(name))
    return tables or sorted(p for p in path.rglob("*") if p.name.endswith((".json", ".json.gz")))


def read_traces(paths: Sequence[Path]) -> Records:
    """Return the records of traces, one file a rank (or one table of all ranks).

    Raises:
        BadInputError: A file is no trace, has no steps, or a rank is there twice.
    """
    ranks: dict[int, dict[int, Parts]] = {}
    for path in paths:
        found = _table(path) if path.name.endswith(".csv") else [_kineto(path)]
        for rank, steps in found:
            if rank in ranks:
                raise BadInputError(
                    f"{path}: rank {rank} is in another trace, too; name one of each rank"
                )
            ranks[rank] = steps
    where = ", ".join(map(str, paths))
    common = sorted(set.intersection(*(set(steps) for steps in ranks.values()))) if ranks else []
    if not common:
        raise BadInputError(f"{where}: no step is in the traces of all {len(ranks)} ranks")
    numbers = sorted(ranks)
    names = {name for steps in ranks.values() for step in common for name in steps[step]}
    columns = {
        name: np.array([[ranks[r][s].get(name, 0.0) for s in common] for r in numbers], np.float32)
        for name in sorted(names)
    }
    alike = np.zeros(len(numbers), np.int64)
    return Records(
        source=f"traces {where}",
        ranks=np.array(numbers),
        steps=np.array(common),
        columns=columns,
        stage=alike,
        host=alike,
        hosts=[""],
        groups={"all": alike},
    )


# ---------------------------------------------------------------------------------------- Kineto


def _kineto(path: Path) -> Rank:
    """Return the rank and the steps of a trace in Chrome's format."""
    data = _json(path)
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list):
        raise BadInputError(f"{path}: no list traceEvents; expected a trace of torch's profiler")
    whole = [e for e in events if isinstance(e, dict) and e.get("ph") == "X" and "dur" in e]
    marks = [
        (m[1], e)
        for e in whole
        if e.get("cat") == "user_annotation" and (m := STEP.match(str(e.get("name"))))
    ]
    if not marks:
        raise BadInputError(
            f"{path}: no step: no user_annotation ProfilerStep#N; call prof.step() after each step when the trace is recorded"
        )
    device = [e for e in whole if e.get("cat") in DEVICE]
    if not device:
        raise BadInputError(
            f"{path}: nothing runs on a device ({', '.join(DEVICE)}); profile with ProfilerActivity.CUDA"
        )
    moves = [e for e in device if COLLECTIVE.search(str(e.get("name")))]
    works = [e for e in device if not COLLECTIVE.search(str(e.get("name")))]
    reads = [e for e in whole if e.get("cat") not in DEVICE and DATA.search(str(e.get("name")))]
    computing, moving, reading = (_union(map(_span, x)) for x in (works, moves, reads))
    busy = _union(np.concatenate([computing, moving]))
    steps: dict[int, Parts] = {}
    for number, mark in marks:
        begin, end = _span(mark)
        compute, used = _within(computing, begin, end), _within(busy, begin, end)
        data_s = _within(_union(np.concatenate([busy, reading])), begin, end) - used
        steps[int(number)] = {
            "compute": compute * MICRO,
            COMM + "all": (used - compute) * MICRO,
            "data": data_s * MICRO,
            "host": (end - begin - used - data_s) * MICRO,
        }
    return _rank_of(path, data), steps


def _json(path: Path) -> Any:
    try:
        raw = path.read_bytes()
        return json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (OSError, EOFError) as error:
        raise BadInputError(f"cannot read the trace {path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise BadInputError(
            f"{path}: is no JSON ({error}); a trace that was cut off cannot be read"
        ) from error


def _span(event: dict[str, Any]) -> tuple[float, float]:
    """Return begin and end of an event, microseconds; Ascend's traces write numbers as text."""
    try:
        begin = float(event["ts"])
        return begin, begin + max(float(event["dur"]), 0.0)
    except (KeyError, TypeError, ValueError):
        raise BadInputError(
            f"the event {str(event.get('name'))[:60]!r} has ts {event.get('ts')!r} and dur {event.get('dur')!r}; expected microseconds"
        ) from None


def _union(spans: Iterable[Sequence[float]] | Array) -> Array:
    """Return the union of intervals as disjoint rising ones, ``[intervals, 2]``."""
    x = np.array(list(spans), np.float64).reshape(-1, 2)
    if not len(x):
        return x
    x = x[np.argsort(x[:, 0], kind="stable")]
    ends = np.maximum.accumulate(x[:, 1])
    first = np.append(True, x[1:, 0] > ends[:-1])
    last = np.append(first[1:], True)
    return np.stack([x[first, 0], ends[last]], 1)


def _within(spans: Array, begin: float, end: float) -> float:
    """Return how much of disjoint intervals is between two times."""
    return float(np.maximum(np.minimum(spans[:, 1], end) - np.maximum(spans[:, 0], begin), 0).sum())


def _rank_of(path: Path, data: Any) -> int:
    """Return the rank that a trace is of: what it says, else the first number of its name, else 0."""
    about = data.get("distributedInfo") if isinstance(data, dict) else None
    if isinstance(about, dict) and isinstance(about.get("rank"), int):
        return about["rank"]
    found = re.search(r"\d+", path.name)
    return int(found[0]) if found else 0


# ---------------------------------------------------------------------------------------- Ascend


def _table(path: Path) -> list[Rank]:
    """Return ranks and steps of a table of an Ascend profiler."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInputError(f"cannot read the table {path}: {error}") from error
    wanted = {"Computing": "compute", "Communication(Not Overlapped)": COMM + "all", "Free": "host"}
    there = list(rows[0]) if rows else []
    if missing := [name for name in ("Step", *wanted) if name not in there]:
        raise BadInputError(
            f"{path}: no column {missing[0]!r}; expected step_trace_time.csv of an Ascend profiler"
        )
    of_all = "Index" in there
    found: dict[int, dict[int, Parts]] = {}
    for line, row in enumerate(rows, start=2):
        if of_all and row.get("Type") != "rank":
            continue
        rank = (
            _number(path, line, "Index", row["Index"]) if of_all else _rank_beside(path, line, row)
        )
        step = _number(path, line, "Step", re.sub(r"^\D+", "", row["Step"] or "0") or "0")
        found.setdefault(int(rank), {})[int(step)] = {
            part: _number(path, line, name, row[name]) * MICRO for name, part in wanted.items()
        }
    return sorted(found.items())


def _rank_beside(path: Path, line: int, row: dict[str, str]) -> float:
    """Return the rank of a table: profiler_info_N.json beside its folder, else its device."""
    for beside in sorted(path.parent.parent.glob("profiler_info_*.json")):
        if found := re.search(r"_(\d+)\.json$", beside.name):
            return int(found[1])
    return _number(path, line, "Device_id", row.get("Device_id") or "0")


def _number(path: Path, line: int, name: str, text: str | None) -> float:
    try:
        value = float((text or "").strip())
    except ValueError:
        value = float("nan")
    if not np.isfinite(value) or value < 0:
        raise BadInputError(f"{path}:{line}: {name} is {text!r}; expected a number of 0 or more")
    return value
