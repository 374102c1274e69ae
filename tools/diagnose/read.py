"""Read the timings that the ranks of a run wrote (`telechat_moe.timings`)."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe import timings
from telechat_moe.errors import BadInputError
from telechat_moe.numerics import Array
from telechat_moe.tools.diagnose.excess import FEWEST
from telechat_moe.tools.diagnose.records import COMM, LOCAL, LOST, PairLinks, Records
from telechat_moe.tools.diagnose.traces import read_traces, traces_of

Ways = dict[tuple[str, int, int], Array]
"""How long messages were on their way, seconds of each step, by kind, the row of the rank that got them and the rank that sent them."""


def files(run: Path) -> list[Path]:
    """Return the files of timings of a run's folder (or of its ``timings``), by rank; empty: there are none."""
    paths = [p for folder in (run / timings.FOLDER, run) for p in folder.glob("rank_*.bin")]
    return sorted(paths, key=lambda p: (len(p.name), p.name))


def read_any(paths: Sequence[Path]) -> Records:
    """Return the records of runs (folders with timings) or of traces.

    Raises:
        BadInputError: A path does not exist, or holds neither.
    """
    for path in paths:
        if not path.exists():
            raise BadInputError(f"{path}: no such file or folder")
    if any(files(path) for path in paths if path.is_dir()):
        return read_runs(paths)
    traces = [trace for path in paths for trace in traces_of(path)]
    return read_traces(traces) if traces else read_runs(paths)


def read_runs(runs: Sequence[Path]) -> Records:
    """Return the records of a run, from its folder or from the folders of several hosts.

    Raises:
        BadInputError: There are none, too few steps, or a rank twice.
    """
    paths = [path for run in runs for path in files(run)]
    source = ", ".join(map(str, runs))
    if not paths:
        raise BadInputError(
            f"{source}: no {timings.FOLDER}/rank_N.bin and no trace; name the output_dir of a run of `telechat-moe train`, or traces"
        )
    heads: list[dict[str, Any]] = []
    spans: list[tuple[int, int]] = []
    problems: list[str] = []
    judged_paths: list[Path] = []
    for path in paths:
        header, rows = timings.read(path)
        steps = rows[_steady(header, rows), header["columns"].index("step")]
        if not len(steps):
            problems.append(f"{path}: no finished step after the first; this rank is not judged")
            continue
        heads.append(header)
        spans.append((int(steps.min()), int(steps.max())))
        judged_paths.append(path)
    if not judged_paths:
        raise BadInputError(f"{source}: no rank has a finished step after the first")
    numbers = [int(str(head["rank"])) for head in heads]
    if twice := [rank for rank, count in Counter(numbers).items() if count > 1]:
        raise BadInputError(
            f"{source}: rank {min(twice)} is there twice; name the folders of one run"
        )
    begin, end = max(span[0] for span in spans), min(span[1] for span in spans)
    if end - begin + 1 < FEWEST:
        raise BadInputError(
            f"{source}: all ranks have {max(0, end - begin + 1)} steps in common after the first; expected {FEWEST} or more"
        )
    order = np.argsort(numbers, kind="stable")
    columns, steps, ways = _fill([judged_paths[i] for i in order], begin, end, problems)
    pairs = _pairs([numbers[i] for i in order], ways)
    return _records(source, [heads[i] for i in order], columns, steps, pairs, problems)


def _steady(header: dict[str, Any], rows: Array) -> np.ndarray:
    """Return which rows are judged: not a process's first step, which compiles the graph."""
    names = header["columns"]
    return rows[:, names.index("first")] == 0 if "first" in names else np.ones(len(rows), bool)


def _fill(
    paths: list[Path], begin: int, end: int, problems: list[str]
) -> tuple[dict[str, Array], Array, Ways]:
    """Return the columns ``[ranks, steps]``, the numbers of the steps that all ranks have, and what each knows of its links."""
    count = end - begin + 1
    columns: dict[str, Array] = {}
    ways: Ways = {}
    common = np.ones(count, bool)
    for row, path in enumerate(paths):
        header, rows = timings.read(path)
        names = header["columns"]
        rows = rows[_steady(header, rows)]
        indices = rows[:, names.index("step")].astype(np.int64) - begin
        inside = (indices >= 0) & (indices < count)
        # Of a step that was done twice the later row counts.
        rows, indices = rows[inside], indices[inside]
        present = np.zeros(count, bool)
        present[indices] = True
        common &= present
        for number, name in enumerate(names):
            kind, _, peer = name.partition(".")
            if kind in timings.LINKS:
                ways[kind, row, int(peer)] = own_ways = np.zeros(count, np.float32)
                own_ways[indices] = rows[:, number]
                continue
            if name in ("step", "first"):
                continue
            if name not in columns:
                columns[name] = np.full((len(paths), count), np.nan, np.float32)
            columns[name][row, indices] = rows[:, number]
    steps = np.arange(begin, end + 1)
    if not common.all():
        problems.append(f"{int((~common).sum())} steps are not on all ranks; they are not judged")
        columns = {name: x[:, common] for name, x in columns.items()}
        steps = steps[common]
    complete = {name: x for name, x in columns.items() if not np.isnan(x).any()}
    return complete, steps, {key: x[common] for key, x in ways.items()}


def _pairs(ranks: list[int], ways: Ways) -> dict[str, PairLinks]:
    """Return the links of which both ends were recorded, and which carried anything."""
    rows = {rank: row for row, rank in enumerate(ranks)}
    links: dict[str, list[tuple[int, int, Array]]] = {}
    for (kind, row, peer), backward in ways.items():
        other = rows.get(peer, row)
        forward = ways.get((kind, other, ranks[row]))
        if other < row and forward is not None and forward.any():
            links.setdefault(kind, []).append((other, row, (forward + backward) / 2))
    return {
        kind: PairLinks(np.array([pair[:2] for pair in pairs]), np.stack([p[2] for p in pairs]))
        for kind, pairs in links.items()
    }


def _records(
    source: str,
    heads: list[dict[str, Any]],
    columns: dict[str, Array],
    steps: Array,
    pairs: dict[str, PairLinks],
    problems: list[str],
) -> Records:
    names = [str(head.get("host", "")) for head in heads]
    hosts = list(dict.fromkeys(names))
    stage = np.array([int(head["stage"]) for head in heads])
    inside = "compute" in columns
    ranks = [int(str(head["rank"])) for head in heads]
    absent = sorted(set(range(int(heads[0].get("ranks", 0)))) - set(ranks))
    axes = [name[len(COMM) :] for name in columns if name.startswith(COMM)]
    groups = {axis: _groups(heads, axis) for axis in axes}
    if not inside and {"graph", "cpu"} <= set(columns):
        _split_graph(columns)
        groups["all"] = np.zeros(len(heads), np.int64)
    read_columns = (*LOCAL, *LOST, "faults", "clock", "remote", "rows", "work")
    return Records(
        source=f"timings of {source}",
        ranks=np.array(ranks),
        steps=steps,
        columns={n: x for n, x in columns.items() if n in read_columns or n.startswith(COMM)},
        stage=np.unique(stage, return_inverse=True)[1],
        host=np.array([hosts.index(name) for name in names]),
        hosts=hosts,
        groups=groups,
        pairs=pairs,
        inside=inside,
        absent=absent,
        problems=problems,
    )


def _groups(heads: list[dict[str, Any]], axis: str) -> Array:
    """Return the number of each rank's group of an axis, from the first lines of its file."""
    groups = [head.get("groups") for head in heads]
    numbers = [int(g[axis]) if isinstance(g, dict) and axis in g else 0 for g in groups]
    return np.unique(numbers, return_inverse=True)[1]


def _split_graph(columns: dict[str, Array]) -> None:
    """Split the time in the graph of CPU processes in computing and waiting for other ranks.

    Threads compute together, so CPU time is divided by how many of them are busy on the rank that is busiest.
    """
    graph = columns["graph"]
    recorded = (columns[name] for name in ("delay", "paused") if name in columns)
    lost = sum(recorded, np.zeros_like(graph))
    busy = float((np.median(columns["cpu"], 1) / np.maximum(np.median(graph, 1), 1e-9)).max())
    columns["compute"] = columns["cpu"] / max(busy, 1.0)
    columns[COMM + "all"] = np.maximum(graph - columns["compute"] - lost, 0)
