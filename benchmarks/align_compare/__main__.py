"""Time `telechat-moe align bisect --standard` beside `msprobe compare` (mindstudio-probe 26.2.0) on the same trees.

    python -m benchmarks.align_compare [--msprobe PATH] [--rounds 5] [--sizes small wide large] [--standards NAME ...] [--json FILE]

Trees of two runs are written in msprobe's format with PyTorch's files: ``small`` has 98 tensors of 2,048 elements (the tree
that the facts about msprobe were measured on), ``wide`` 2,000 of them, ``large`` 16 tensors of 64 MiB, 2 GiB with both runs.
The target is the golden run times ``1 + 1e-4 noise``, so that no value is equal. Whole commands are timed, start of Python
included, in turns; peak memory is that of the command and its workers. Files are read from the page cache. Largest errors
of both tools are compared row by row.

``--msprobe`` names the command of an environment that has it with torch (`pip install mindstudio-probe==26.2.0 torch`);
without it, only ours is shown. For one core: `taskset -c 0 python -m benchmarks.align_compare`.

Keys of the JSON: ``rounds``, ``msprobe`` (was it there), ``results``: list of ``{tree, tensors, bytes (of values, both runs),
tool (ours or msprobe), profile, seconds: [...], min_s, median_s, cpu_s (user and system, median), bytes_per_cpu_s,
peak_rss_mib, ratio_to_msprobe (of medians), cpu_ratio_to_msprobe, rows, rows_equal (largest errors that agree with msprobe's)}``.
"""

import argparse
import csv
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from telechat_moe.tools.align.dump import msprobe_write
from telechat_moe.tools.align.dump.records import Call, Dump, Phase, RankDump, TensorRecord

TREES = {"small": (98, (64, 32)), "wide": (2000, (64, 32)), "large": (16, (4096, 4096))}
"""Tensors, and the shape of each."""
NOISE = 1e-4
LAUNCH = """
import resource, subprocess, sys, time
start = time.perf_counter()
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(code, time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)
"""
"""Program of a small process that starts each command, because a command's peak memory includes its parent's."""


class Timed(NamedTuple):
    """One run of a command."""

    seconds: float
    cpu: float
    peak_mib: float


def write(folder: Path, count: int, shape: tuple[int, ...]) -> int:
    """Write the trees of both runs; return the bytes of their values."""
    for name in ("golden", "target"):

        def values(i: int, name: str = name) -> np.ndarray:
            x = np.random.default_rng(i).standard_normal(shape, np.float32)
            if name == "target":
                x *= 1 + NOISE * np.random.default_rng(10_000 + i).standard_normal(
                    shape, np.float32
                )
            return x

        def record(i: int) -> TensorRecord:
            return TensorRecord("float32", shape, read=lambda: values(i))

        calls = {}
        for i in range(count // 2):
            key = f"Functional.linear.{i}.forward"
            pair = record(2 * i), record(2 * i + 1)
            calls[key] = Call(
                key, "api", "Functional.linear", i, Phase.FORWARD, [pair[0]], {}, [pair[1]]
            )
        rank = RankDump(0, 0, "pytorch", "tensor", "L1", calls)
        msprobe_write.write(Dump(folder, {(0, 0): rank}), folder / name)
    return 2 * count * 4 * math.prod(shape)


def timed(command: list[str], codes: tuple[int, ...] = (0,)) -> Timed:
    """Run a command to its end."""
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, *command], capture_output=True, text=True, check=True
    )
    code, *numbers = done.stdout.split()
    if int(code) not in codes:
        raise SystemExit(f"{command[0]}: exit code {code}\n{done.stderr[-2000:]}")
    return Timed(*map(float, numbers))


def ours(folder: Path, profile: str, report: Path) -> list[str]:
    """Return our command."""
    command = [sys.executable, "-m", "telechat_moe.cli", "align", "bisect"]
    command += [str(folder / "golden"), str(folder / "target"), "--standard", profile]
    return [*command, "--json", str(report)]


def theirs(msprobe: str, folder: Path, out: Path) -> list[str]:
    """Return msprobe's command."""
    dumps = [next((folder / name).rglob("dump.json")) for name in ("target", "golden")]
    return [msprobe, "compare", "-tp", str(dumps[0]), "-gp", str(dumps[1]), "-o", str(out)]


def their_errors(out: Path) -> dict[str, float]:
    """Return msprobe's largest errors by tensor, from its newest table."""
    path = max(out.glob("*.csv"), key=lambda p: p.stat().st_mtime)
    with path.open(newline="") as file:
        return {row["NPU Name"]: float(row["MaxAbsErr"]) for row in csv.DictReader(file)}


def our_errors(report: Path) -> dict[str, float]:
    """Return our largest errors by tensor, from the report of a profile that has them."""
    found = {}
    for row in json.loads(report.read_text())["standard"]["tensors"]:
        for check in row["checks"]:
            if check["metric"] == "largest error":
                found[f"{row['operator']}.{row['tensor']}"] = check["observed"]
    return found


def measure(
    tree: str, folder: Path, msprobe: str | None, profiles: list[str], rounds: int
) -> list[dict[str, Any]]:
    """Time all tools in turn on one pair of trees."""
    count, shape = TREES[tree]
    size = write(folder, count, shape)
    names: list[str] = [*profiles, *(["msprobe compare"] if msprobe else [])]
    runs: dict[str, list[Timed]] = {name: [] for name in names}
    errors: dict[str, dict[str, float]] = {}
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            if name == "msprobe compare":
                out = folder / "out"
                runs[name].append(timed(theirs(str(msprobe), folder, out)))
                errors[name] = their_errors(out)
            else:
                report = folder / "report.json"
                runs[name].append(timed(ours(folder, name, report), (0, 1)))
                errors[name] = our_errors(report)
    peer = middle(runs["msprobe compare"]) if msprobe else None
    theirs_by_tensor = errors.get("msprobe compare", {})
    about = {"tree": tree, "tensors": count, "bytes": size}
    return [
        {**about, **summary(name, size, runs[name], peer, errors[name], theirs_by_tensor)}
        for name in names
    ]


def middle(runs: list[Timed]) -> tuple[float, float]:
    """Return the medians of wall and CPU time."""
    return statistics.median(r.seconds for r in runs), statistics.median(r.cpu for r in runs)


def summary(
    name: str,
    size: int,
    runs: list[Timed],
    peer: tuple[float, float] | None,
    errors: dict[str, float],
    others: dict[str, float],
) -> dict[str, Any]:
    """Return a line of the report."""
    median, cpu = middle(runs)
    is_ours = name != "msprobe compare"
    both = errors.keys() & others.keys()
    return {
        "tool": "ours" if is_ours else "msprobe",
        "profile": name if is_ours else None,
        "seconds": [round(r.seconds, 4) for r in runs],
        "min_s": min(r.seconds for r in runs),
        "median_s": median,
        "cpu_s": cpu,
        "bytes_per_cpu_s": size / cpu,
        "peak_rss_mib": max(r.peak_mib for r in runs),
        "ratio_to_msprobe": None if peer is None else median / peer[0],
        "cpu_ratio_to_msprobe": None if peer is None else cpu / peer[1],
        "rows": len(errors),
        "rows_equal": sum(
            math.isclose(errors[k], others[k], rel_tol=1e-6, abs_tol=1e-12) for k in both
        ),
    }


def show(results: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table(title="align bisect --standard and msprobe compare")
    for title in (
        "tree",
        "values",
        "tool",
        "wall s",
        "CPU s",
        "MB/s per core",
        "peak MiB",
        "wall, CPU to msprobe",
        "equal rows",
    ):
        table.add_column(title, justify="left" if title in ("tree", "tool") else "right")
    for r in results:
        ratio = (
            "-"
            if r["ratio_to_msprobe"] is None
            else f"{r['ratio_to_msprobe']:.3f}, {r['cpu_ratio_to_msprobe']:.3f}"
        )
        table.add_row(
            f"{r['tree']}: {r['tensors']}",
            f"{r['bytes'] / 1e6:.1f} MB",
            f"ours, {r['profile']}" if r["tool"] == "ours" else "msprobe",
            f"{r['median_s']:.2f}",
            f"{r['cpu_s']:.2f}",
            f"{r['bytes_per_cpu_s'] / 1e6:.0f}",
            f"{r['peak_rss_mib']:.0f}",
            ratio,
            f"{r['rows_equal']} of {r['rows']}" if r["rows"] else "-",
        )
    Console(width=max(110, Console().width)).print(table)


def main() -> None:
    """Parse the arguments and run all measurements."""
    parser = argparse.ArgumentParser(
        description="Time align bisect --standard and msprobe compare."
    )
    parser.add_argument("--msprobe", default=shutil.which("msprobe"), metavar="PATH")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", choices=list(TREES), default=list(TREES))
    parser.add_argument("--standards", nargs="+", default=["mixed", "msprobe"], metavar="NAME")
    parser.add_argument("--folder", type=Path, help="where the trees go, 2 GiB (temporary)")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    os.environ.setdefault("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if args.msprobe is None:
        print("msprobe is not installed here (--msprobe PATH): only our own numbers")
    results: list[dict[str, Any]] = []
    for tree in args.sizes:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            results += measure(tree, Path(folder), args.msprobe, args.standards, args.rounds)
    show(results)
    if args.json:
        report = {"rounds": args.rounds, "msprobe": args.msprobe is not None, "results": results}
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
