"""Eight processes that train on the same batches: one reader for all of them beside a reader in each.

    python -m benchmarks.data_loader.processes [--processes N] [--rounds N] [--json FILE]

Interleaved in every round: one process alone, N processes that each read the files, and N that share one reader. Every process
copies each batch into an array of its own, as an engine does. Digests of all batches must agree.

--json keys: rows, a list of {how, processes, seconds_min, seconds_median, cpu_seconds, longest_cpu_seconds, files_read};
seconds from the first process's begin to the last one's end, with longest_cpu_seconds also as NAME_ratio to one process alone;
cpu_seconds of all processes together, longest_cpu_seconds of the one that computes most (the time that a core for each would
take); files_read: bytes that all of them map and read of the two files, over the size of the files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe.data import GptDataset, Loader, SampleOptions, write_indexed
from telechat_moe.data.shared import FollowingLoader, SharedLoader
from telechat_moe.processes import CONTROL, Control
from telechat_moe.train.ranks import RankCoordinator

S, BATCH, BATCHES = 4096, 64, 40
DOCUMENTS, MEAN = 12_000, 1000
HOW = ("alone", "each reads", "one reads")
MEASURED = ("seconds", "cpu", "longest", "files")


def write_documents(folder: Path) -> str:
    """Write about 12 million tokens and return their prefix."""
    generator = np.random.default_rng(0)
    lengths = generator.geometric(1 / MEAN, DOCUMENTS)
    documents = (np.append(generator.integers(1, 2048, n), 0) for n in lengths)
    write_indexed(folder / "tokens", documents, np.uint16)
    return str(folder / "tokens")


def work(job: str, how: str, rank: int, count: int, prefix: str) -> None:
    """Be one of the processes: open the data, meet the others, take all batches."""
    ranks = RankCoordinator(Control(Path(job) / CONTROL), rank, count)
    shared = ranks.share_batches() if how == "one reads" else None

    def loader() -> Any:
        if shared is not None and rank:
            return FollowingLoader(shared, BATCH, epochs=None)  # pyright: ignore[reportArgumentType]
        options = SampleOptions(eod=0, eod_mask_loss=True, reset_position_ids=True)
        data = GptDataset(prefix, S, BATCH * BATCHES, options=options)
        if shared is None:
            return Loader(data, BATCH, epochs=None)
        return SharedLoader(shared, data, BATCH, epochs=None)  # pyright: ignore[reportArgumentType]

    begun = _read_bytes()
    with loader() as batches:
        first = {name: array.copy() for name, array in next(batches).items()}
        batches.seek(0)
        ranks.barrier("opened")
        begin, cpu = time.monotonic(), time.process_time()
        for _ in range(BATCHES):
            for name, array in next(batches).items():
                first[name][...] = array
        end, cpu = time.monotonic(), time.process_time() - cpu
    taken = _read_bytes() - begun + _mapped(prefix)
    digest = hashlib.sha256(b"".join(array.tobytes() for array in first.values())).hexdigest()
    said = {"begin": begin, "end": end, "cpu": cpu, "digest": digest, "taken": taken}
    sys.stdout.write(json.dumps(said))


def _read_bytes() -> int:
    """Return the bytes that this process has read through calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


def _mapped(prefix: str) -> int:
    """Return the bytes of the token files that this process has in its memory."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = line.endswith((f"{prefix}.bin", f"{prefix}.idx"))
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def _bytes_of(prefix: str) -> int:
    return sum(Path(prefix + suffix).stat().st_size for suffix in (".bin", ".idx"))


def run(folder: Path, how: str, count: int, prefix: str) -> dict[str, Any]:
    """Run the processes once; return what they took together."""
    Control.fresh(folder)
    words = [sys.executable, "-m", "benchmarks.data_loader.processes", "--rank"]
    started = [
        subprocess.Popen(
            [*words, str(rank), str(folder), how, str(count), prefix],
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(count)
    ]
    said = [json.loads(process.communicate()[0]) for process in started]
    (digest,) = {one["digest"] for one in said}
    return {
        "seconds": max(one["end"] for one in said) - min(one["begin"] for one in said),
        "cpu": sum(one["cpu"] for one in said),
        "longest": max(one["cpu"] for one in said),
        "files": sum(one["taken"] for one in said) / _bytes_of(prefix),
        "digest": digest,
    }


def measure(count: int, rounds: int) -> list[dict[str, Any]]:
    """Measure all ways."""
    found: dict[str, list[dict[str, Any]]] = {how: [] for how in HOW}
    with tempfile.TemporaryDirectory() as name:
        prefix = write_documents(Path(name))
        for _ in range(rounds):
            for how in HOW:
                found[how].append(run(Path(name), how, 1 if how == "alone" else count, prefix))
    assert len({one["digest"] for some in found.values() for one in some}) == 1
    rows = list[dict[str, Any]]()
    for how, some in found.items():
        middle = {key: statistics.median(one[key] for one in some) for key in MEASURED}
        lowest = {key: min(one[key] for one in some) for key in MEASURED}
        rows.append(
            {
                "how": how,
                "processes": 1 if how == "alone" else count,
                "seconds_min": lowest["seconds"],
                "seconds_median": middle["seconds"],
                "cpu_seconds": middle["cpu"],
                "longest_cpu_seconds": middle["longest"],
                "files_read": middle["files"],
            }
        )
    for row in rows:
        for key in ("seconds_min", "seconds_median", "longest_cpu_seconds"):
            row[f"{key}_ratio"] = row[key] / rows[0][key]
    return rows


def main() -> None:
    """Run all ways, or be one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON")
    parser.add_argument("--rank", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank, job, how, count, prefix = arguments.rank
        work(job, how, int(rank), int(count), prefix)
        return
    rows = measure(arguments.processes, arguments.rounds)
    print(
        f"{'':<11} {'processes':>9} {'s, min':>8} {'ratio':>6} {'s, median':>10} {'ratio':>6} {'CPU s':>7} "
        f"{'of the longest':>15} {'ratio':>6} {'files read':>11}"
    )
    for row in rows:
        print(
            f"{row['how']:<11} {row['processes']:>9} {row['seconds_min']:>8.3f} {row['seconds_min_ratio']:>6.2f} "
            f"{row['seconds_median']:>10.3f} {row['seconds_median_ratio']:>6.2f} {row['cpu_seconds']:>7.2f} "
            f"{row['longest_cpu_seconds']:>15.3f} {row['longest_cpu_seconds_ratio']:>6.2f} {row['files_read']:>10.2f}x"
        )
    if arguments.json:
        text = json.dumps({"rows": rows, "cores": os.cpu_count()}, indent=2)
        Path(arguments.json).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
