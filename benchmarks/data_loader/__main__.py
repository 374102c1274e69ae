"""Speed of the data loader beside MindFormers' GPTDataset, on the same files.

    python -m benchmarks.data_loader [--json FILE]

For three kinds of documents (like source files, like paragraphs, like chat turns) and two sample
lengths it measures, interleaved, the time to serve the same samples: MindFormers' ``__getitem__``
and a stack of the batch, our ``GptDataset.batch``, and what a training step sees of our ``Loader``,
which prepares batches while the step computes. Outputs are compared for equality first. Without the
``mindformers`` extra only our own numbers are shown.

--json keys: rows, a list of {documents, seq_length, batch_size, masks, samples, equal,
index_seconds, mindformers_index_seconds, batch_ms, mindformers_batch_ms, speedup, tokens_per_s,
wait_ms, step_ms, share_of_step_percent}; step_ms is the length of the pretended step; versions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe.data import GptDataset, Loader, SampleOptions, write_indexed

KINDS = {"sources": (700, 5300), "paragraphs": (30_000, 120), "chat turns": (100_000, 25)}
"""Documents and their mean length: about 3 million tokens each."""
BATCH = 8
STEP_SECONDS = 0.1
SEED = 1234
MASKS = {
    "none": {},
    "reset": {"eod_mask_loss": True, "reset_position_ids": True},
    "block-causal": {
        "reset_position_ids": True,
        "reset_attention_mask": True,
        "create_attention_mask": True,
    },
}
CASES = [
    (kind, length, masks)
    for kind in KINDS
    for length, masks in ((256, "none"), (256, "reset"), (256, "block-causal"), (4096, "none"))
]


def write_documents(folder: Path, kind: str) -> str:
    """Write documents of about the mean length and return their prefix."""
    count, mean = KINDS[kind]
    generator = np.random.default_rng(0)
    lengths = generator.geometric(1 / mean, count)
    prefix = folder / kind.replace(" ", "_")
    write_indexed(
        prefix, (np.append(generator.integers(1, 2048, n), 0) for n in lengths), np.uint16
    )
    return str(prefix)


def open_mindformers(prefix: str, cache: Path, length: int, samples: int, options: dict[str, Any]):
    """Open the same data with MindFormers."""
    from mindformers.dataset.blended_datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from mindformers.dataset.blended_datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    settings = {
        "eod_mask_loss": False,
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "create_attention_mask": False,
    } | options
    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=length,
        blend=([prefix], None),
        blend_per_split=[None] * 3,
        split="1, 0, 0",
        path_to_cache=str(cache),
        mmap_bin_files=True,
        eod=0,
        pad=-1,
        **settings,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config).build()[
        0
    ]


def stacked(dataset: Any, indices: np.ndarray) -> list[np.ndarray]:
    """Return a batch of MindFormers' samples."""
    return [np.stack(column) for column in zip(*(dataset[i] for i in indices), strict=True)]


def timed(function: Any, *arguments: Any) -> float:
    """Return how long a call takes, in seconds."""
    begin = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - begin


def wait_per_step(dataset: GptDataset, steps: int) -> float:
    """Return the median time that a step waits for its batch, in seconds."""
    waits: list[float] = []
    with Loader(dataset, BATCH) as loader:
        next(loader)
        for _ in range(steps):
            busy(STEP_SECONDS)
            waits.append(timed(next, loader))
    return statistics.median(waits)


def busy(seconds: float) -> None:
    """Compute in numpy, as a training step does, with the interpreter's lock free."""
    end = time.perf_counter() + seconds
    matrix = np.ones((256, 256), dtype=np.float32)
    while time.perf_counter() < end:
        matrix = matrix @ matrix * 1e-3


def measure(prefix: str, kind: str, length: int, masks: str, cache: Path | None) -> dict[str, Any]:
    """Measure one case."""
    options = MASKS[masks]
    samples = 4000 if length < 1000 else 600
    begin = time.perf_counter()
    ours = GptDataset(prefix, length, samples, SEED, options=SampleOptions(eod=0, **options))
    index_seconds = time.perf_counter() - begin
    theirs, their_index_seconds = None, None
    if cache is not None:
        begin = time.perf_counter()
        theirs = open_mindformers(prefix, cache, length, samples, options)
        their_index_seconds = time.perf_counter() - begin
    batches = np.random.default_rng(1).integers(0, samples, (60, BATCH))
    equal = None
    if theirs is not None:
        assert len(ours) == len(theirs)
        for indices in batches[:20]:
            for mine, expected in zip(
                ours.batch(indices).values(), stacked(theirs, indices), strict=True
            ):
                np.testing.assert_array_equal(mine, expected)
        equal = True
    mine_seconds, their_seconds = [], []
    for indices in batches:
        mine_seconds.append(timed(ours.batch, indices))
        if theirs is not None:
            their_seconds.append(timed(stacked, theirs, indices))
    batch_seconds = statistics.median(mine_seconds)
    their_batch = statistics.median(their_seconds) if their_seconds else None
    wait = wait_per_step(ours, steps=10)
    return {
        "documents": kind,
        "seq_length": length,
        "batch_size": BATCH,
        "masks": masks,
        "samples": len(ours),
        "equal": equal,
        "index_seconds": index_seconds,
        "mindformers_index_seconds": their_index_seconds,
        "batch_ms": 1e3 * batch_seconds,
        "mindformers_batch_ms": 1e3 * their_batch if their_batch else None,
        "speedup": their_batch / batch_seconds if their_batch else None,
        "tokens_per_s": BATCH * length / batch_seconds,
        "wait_ms": 1e3 * wait,
        "step_ms": 1e3 * STEP_SECONDS,
        "share_of_step_percent": 100 * wait / STEP_SECONDS,
    }


def has_mindformers() -> bool:
    """Whether MindFormers is installed; compiles its index builder."""
    os.environ.setdefault("GLOG_v", "3")
    try:
        from mindformers.dataset.blended_datasets.utils import compile_helpers
    except ImportError:
        print("mindformers is not installed: only our own numbers", file=sys.stderr)
        return False
    # its Makefile asks the python3 on the PATH for pybind11
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    compile_helpers()
    return True


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print(
        f"{'documents':<11} {'S':>5} {'masks':<13} {'equal':<6} {'batch ms':>9} {'MindF. ms':>10} "
        f"{'ratio':>6} {'Mtokens/s':>10} {'wait ms':>8} {'of step %':>10}"
    )
    for row in rows:
        theirs, ratio = row["mindformers_batch_ms"], row["speedup"]
        equal = {True: "yes", None: "-"}[row["equal"]]
        print(
            f"{row['documents']:<11} {row['seq_length']:>5} {row['masks']:<13} {equal:<6} "
            f"{row['batch_ms']:>9.3f} {f'{theirs:.3f}' if theirs else '-':>10} "
            f"{f'{ratio:.2f}' if ratio else '-':>6} {row['tokens_per_s'] / 1e6:>10.1f} "
            f"{row['wait_ms']:>8.3f} {row['share_of_step_percent']:>10.3f}"
        )
    print(
        f"\nbatches of {BATCH} samples; 'wait' is what a step of {1e3 * STEP_SECONDS:.0f} ms "
        "waits for its batch; medians; ratio = MindFormers / ours"
    )


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON")
    arguments = parser.parse_args()
    compare = has_mindformers()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prefixes = {kind: write_documents(folder, kind) for kind in KINDS}
        rows = [
            measure(
                prefixes[kind], kind, length, masks, folder / f"cache{number}" if compare else None
            )
            for number, (kind, length, masks) in enumerate(CASES)
        ]
    show(rows)
    if arguments.json:
        versions = {"python": platform.python_version(), "numpy": np.__version__}
        Path(arguments.json).write_text(
            json.dumps({"rows": rows, "versions": versions}, indent=2) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
