"""``python -m benchmarks.diagnose``: precision and recall on simulated clusters, speed, what recording costs."""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np

from benchmarks.diagnose.cluster import Cluster
from benchmarks.diagnose.files import write
from benchmarks.diagnose.public import read_all
from benchmarks.diagnose.score import Score, run
from telechat_moe import timings
from telechat_moe.tools.diagnose.causes import KINDS

DEGREES = {
    8: (1, 1),
    32: (1, 4),
    64: (2, 4),
    128: (4, 4),
    256: (8, 4),
    1024: (32, 4),
    8192: (256, 4),
}
"""Data-parallel degree and stages by ranks, with 8 tensor-parallel ranks."""

THREADS = 40
"""Threads of a rank's process, each of which is asked how long it waited for a core."""


def cluster_of(ranks: int, steps: int) -> Cluster:
    """Return the cluster of so many ranks."""
    dp, pp = DEGREES[ranks]
    return Cluster(dp, pp=pp, steps=steps)


def accuracy(ranks: int, runs: int, steps: int, seed: int) -> tuple[Score, Score]:
    """Return the scores of clean runs and of runs with one or two causes."""
    cluster = cluster_of(ranks, steps)
    both = run(cluster, runs - runs // 2, 1, seed)
    both.join(run(cluster, runs // 2, 2, seed + 1))
    return run(cluster, runs, 0, seed + 2), both


def speed(ranks: int, steps: int) -> dict[str, float]:
    """Return seconds and peak memory of the verb on the files of a cluster of so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        cluster, block = cluster_of(ranks, 100), 100
        records = cluster.simulate(np.random.default_rng(0))
        # One block of steps is repeated: reading and judging take as long for it as for steps that differ.
        records.columns = {n: np.tile(x, (1, steps // block)) for n, x in records.columns.items()}
        records.steps = np.arange(1, steps // block * block + 1)
        write(records, Path(folder))
        del records
        began = time.perf_counter()
        command = [sys.executable, "-m", "telechat_moe.cli", "diagnose", folder, "--json", "-"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        seconds = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds, gib = used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "gib": gib}


def recording(steps: int = 2000) -> dict[str, float]:
    """Return the microseconds that a step's timings take beside `THREADS` threads: minimum and median of blocks of a hundred."""
    blocks: list[float] = []
    ends = threading.Event()
    threads = [threading.Thread(target=ends.wait) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    with tempfile.TemporaryDirectory() as folder:
        path = timings.file_of(Path(folder), 0)
        with timings.StepTimer(path, {"rank": 0, "ranks": 1, "stage": 0}) as timer:
            for block in range(steps // 100):
                began = time.process_time()
                for step in range(100):
                    for part in timings.PARTS:
                        timer.lap(part)
                    timer.finish(100 * block + step, 1.0)
                blocks.append((time.process_time() - began) / 100 * 1e6)
    ends.set()
    return {"minimum_us": min(blocks), "median_us": float(np.median(blocks))}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diagnose", description=__doc__)
    parser.add_argument(
        "--ranks", type=int, default=256, choices=DEGREES, help="ranks of a cluster"
    )
    parser.add_argument("--runs", type=int, default=100, help="clean runs, and as many with causes")
    parser.add_argument("--steps", type=int, default=200, help="steps of a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--speed", type=int, default=0, metavar="STEPS", help="measure speed instead"
    )
    parser.add_argument("--traces", metavar="FOLDER", help="read the traces below a folder instead")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if args.traces:
        return _public(Path(args.traces))
    timing = recording()
    report: dict[str, object] = {"recording": timing}
    print(
        f"recording a step: {timing['minimum_us']:.0f} us minimum, {timing['median_us']:.0f} us median"
    )
    if args.speed:
        report["speed"] = speeds = speed(args.ranks, args.speed)
        print(
            f"{args.ranks} ranks x {args.speed} steps: "
            + ", ".join(f"{k} {v:.2f}" for k, v in speeds.items())
        )
    else:
        clean, planted = accuracy(args.ranks, args.runs, args.steps, args.seed)
        report |= _table(args, clean, planted)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _public(folder: Path) -> int:
    reading = read_all(folder)
    for title, counts in (("read, bound by", reading.bound), ("refused", reading.refused)):
        print(f"{title}: {counts.total()}")
        for text, count in counts.most_common():
            print(f"{count:6d}  {text}")
    print(
        f"trace_view.json and its table: {reading.compared} pairs, at most {reading.apart:.2e} of the device's time apart"
    )
    print(f"neither read nor refused: {len(reading.broken)}")
    print("\n".join(reading.broken))
    return 1 if reading.broken else 0


def _table(args: argparse.Namespace, clean: Score, planted: Score) -> dict[str, object]:
    print(f"{args.ranks} ranks x {args.steps} steps")
    print(f"{'kind':20s} planted  named  wrong")
    kinds: dict[str, dict[str, int]] = {}
    for kind in KINDS:
        right, wrong, missed = (c[kind] for c in (planted.right, planted.wrong, planted.missed))
        kinds[kind] = {"planted": right + missed, "right": right, "wrong": wrong}
        print(f"{kind:20s} {right + missed:7d} {right:6d} {wrong:6d}")
    print(f"precision {planted.precision():.4f}, recall {planted.recall():.4f}")
    print(f"clean runs with a cause: {clean.runs_with_wrong} of {args.runs}")
    for text in [*planted.examples[:10], *clean.examples[:5]]:
        print("  ", text)
    return {
        "ranks": args.ranks,
        "steps": args.steps,
        "seed": args.seed,
        "runs": args.runs,
        "kinds": kinds,
        "precision": planted.precision(),
        "recall": planted.recall(),
        "clean_runs": args.runs,
        "clean_with_cause": clean.runs_with_wrong,
        "clean_causes": dict(Counter(clean.wrong)),
    }


if __name__ == "__main__":
    sys.exit(main())
