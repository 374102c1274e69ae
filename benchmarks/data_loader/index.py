"""Build the index of many samples on the disk, beside what the disk takes for as many bytes, and open it.

    python -m benchmarks.data_loader.index [--samples 100000000] [--folder FOLDER] [--json FILE]

Documents are five samples long on average; the token file is a hole, of which the index needs the size only. The index takes
12 bytes a sample. A new process opens it each time: once as it was built, then as often as rounds, with the peak of its memory.

--json keys: samples, index_bytes, build_seconds, phases (seconds of each), build_rss_mib (peak), write_seconds (the bytes written in
one row and brought to the disk), open_seconds, batch_seconds, open_rss_mib, batch_rss_mib (lists, one number a round; of the
latter most are pages of files), start_rss_mib (of the process before it opens).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe.data import GptDataset, index, indexed
from telechat_moe.data.indexed import write_index
from telechat_moe.files import sync_file
from telechat_moe.units import MIB

S = 64
DOCUMENT = 5 * S
ROUNDS = 3
BATCH = 64


def write_documents(prefix: Path, samples: int) -> None:
    """Write an index of documents that fill so many samples, and a token file that is a hole."""
    lengths = np.random.default_rng(0).integers(1, 2 * DOCUMENT, samples * S // DOCUMENT)
    lengths[-1] += max(0, samples * S + 1 - int(lengths.sum()))
    write_index(prefix.with_suffix(".idx"), lengths, np.uint16)
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(int(lengths.sum()) * 2)


def work(prefix: str) -> None:
    """Open the dataset in this process; say how long that took, and where the time went."""
    index.ON_DISK = indexed.LARGE = 0  # also few samples
    phases, last = dict[str, float](), ["opening", time.perf_counter()]

    def say(what: str, done: int, total: int | None) -> None:
        now = time.perf_counter()
        phases[last[0]] = phases.get(last[0], 0.0) + now - last[1]
        last[:] = [what, now]

    start, begin = peak_mib(), time.perf_counter()
    dataset = GptDataset(prefix, S, progress=say)
    fingerprint, opened, peak = dataset.fingerprint(), time.perf_counter(), peak_mib()
    dataset.batch(np.linspace(0, len(dataset) - 1, BATCH).astype(np.int64))
    batch = time.perf_counter() - opened
    say("", 0, None)
    found = {"samples": len(dataset), "fingerprint": fingerprint, "start_rss_mib": start, "rss_mib": peak, "after_batch": peak_mib()}  # fmt: skip
    sys.stdout.write(json.dumps({**found, "seconds": opened - begin, "batch": batch, "phases": phases}))  # fmt: skip


def peak_mib() -> float:
    """Return the most memory of this process so far, files that it maps included."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x)
    return int(line.split()[1]) / 1024


def in_a_process(prefix: Path) -> dict[str, Any]:
    """Return what :func:`work` says in a new process."""
    words = [sys.executable, "-m", "benchmarks.data_loader.index", "--open", str(prefix)]
    return json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)


def write_seconds(folder: Path, size: int) -> float:
    """Return how long the disk takes for a file of this size."""
    block, path = bytes(8 * MIB), folder / "plain"
    begin = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(-(-size // len(block))):
            file.write(block)
        sync_file(file)
    path.unlink()
    return time.perf_counter() - begin


def measure(folder: Path, samples: int) -> dict[str, Any]:
    """Build, write as many bytes, and open."""
    prefix = folder / "many"
    write_documents(prefix, samples)
    built = in_a_process(prefix)
    cache = Path(f"{prefix}.cache")
    size = sum(path.stat().st_size for path in cache.rglob("*.npy"))
    opened = [in_a_process(prefix) for _ in range(ROUNDS)]
    assert {one["fingerprint"] for one in opened} == {built["fingerprint"]}
    shutil.rmtree(cache)
    return {
        "samples": built["samples"],
        "index_bytes": size,
        "build_seconds": built["seconds"],
        "phases": built["phases"],
        "build_rss_mib": built["rss_mib"],
        "write_seconds": write_seconds(folder, size),
        "open_seconds": [one["seconds"] for one in opened],
        "batch_seconds": [one["batch"] for one in opened],
        "open_rss_mib": [one["rss_mib"] for one in opened],
        "batch_rss_mib": [one["after_batch"] for one in opened],
        "start_rss_mib": built["start_rss_mib"],
    }


def main() -> None:
    """Measure, or open a dataset."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=100_000_000)
    parser.add_argument("--folder", metavar="FOLDER", help="folder on the disk to measure")
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON")
    parser.add_argument("--open", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.open:
        work(arguments.open)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        found = measure(Path(name), arguments.samples)
    phases = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in found["phases"].items())
    print(
        f"{found['samples']:,} samples, {found['index_bytes'] / MIB:,.0f} MiB: built in {found['build_seconds']:.1f} s "
        f"(peak {found['build_rss_mib']:,.0f} MiB with mapped files; {phases}); the disk alone {found['write_seconds']:.1f} s\n"
        f"opened in {min(found['open_seconds']):.3f} s, median {sorted(found['open_seconds'])[ROUNDS // 2]:.3f} s, with "
        f"{max(found['open_rss_mib']):,.0f} MiB ({found['start_rss_mib']:,.0f} MiB before); a batch of {BATCH} from all over it then in "
        f"{max(found['batch_seconds']):.3f} s, with {max(found['batch_rss_mib']):,.0f} MiB, pages of the files included"
    )
    if arguments.json:
        found["cores"] = os.cpu_count()
        Path(arguments.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
