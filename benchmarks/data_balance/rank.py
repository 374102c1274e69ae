"""The process of a rank: run the same steps with samples in order and dealt, and keep their times.

msrun ... python -m benchmarks.data_balance.rank JOB
"""

import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ranks import start_values
from telechat_moe.data.sample import Batch, with_masks
from telechat_moe.launch import rank
from telechat_moe.launch.binding import use_cores
from telechat_moe.launch.job import RESOLVED
from telechat_moe.ops import native
from telechat_moe.recipe import Recipe, load

CALIBRATIONS = {"light": (64, 64), "full": (1, 1), "one full core": (1, 64)}
"""Documents of each sample of the ranks on the first core, and of the others', in steps that the time is taken from."""
KINDS = ("in order", "dealt")
WARM_UP = 8  # MindSpore tries two ways to run a graph in its first calls and keeps the faster


def worst(pairs_GR: np.ndarray, cores: int, count: int) -> list[int]:
    """Return the batches whose busiest core has most above the mean; ranks are bound to cores in turn."""
    pairs_GC = np.stack([pairs_GR[:, core::cores].sum(1) for core in range(cores)], 1)
    return np.argsort(pairs_GC.mean(1) - pairs_GC.max(1), kind="stable")[:count].tolist()


def read(
    recipe: Recipe, steps: int, batches: int, cores: int
) -> dict[tuple[str, int], tuple[Batch, np.ndarray]]:
    """Return by kind and step the whole batch, and the visible pairs of each data-parallel rank."""
    from telechat_moe.data.recipe import options_of
    from telechat_moe.train import preflight

    found: dict[tuple[str, int], tuple[Batch, np.ndarray]] = {}
    count, S = recipe.micro_batches, recipe.model_config.seq_length
    with preflight.open_loader(recipe) as loader:
        assert loader.deal_to is not None
        ranks, _ = deal_to = loader.deal_to
        size = loader.batch_size * count
        pairs = loader.dataset.visible_pairs(np.arange(batches * size))
        chosen = worst(pairs.reshape(batches, count, ranks, -1).sum((1, 3)), cores, steps)
        for kind in KINDS:
            loader.deal_to = deal_to if kind == "dealt" else None
            for step, number in enumerate(chosen):
                loader.seek(number * size)
                parts = [next(loader) for _ in range(count)]
                order = np.arange(size) if loader.order is None else loader.order.ravel()
                pairs = loader.dataset.visible_pairs(number * size + order)
                batch = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
                found[kind, step] = batch, pairs.reshape(count, ranks, -1).sum((0, 2))
    ids = found["in order", 0][0]
    rank_of_row = np.arange(size) // loader.batch_size % ranks
    for kind, documents in CALIBRATIONS.items():
        documents_R = np.where(np.arange(ranks) % cores == 0, *documents)
        length_R = S // documents_R
        ends = np.arange(1, S) % length_R[rank_of_row, None] == 0
        is_end = np.concatenate([ends, np.zeros((size, 1), bool)], 1)
        batch = with_masks(dict(ids), is_end, options_of(recipe))
        pairs_R = documents_R * (length_R * (length_R + 1) // 2) * size // ranks
        found[kind, 0] = batch, pairs_R
    return found


def run(job: Path, number: int, task: dict[str, Any]) -> None:
    """Run the rounds of a task; write when each step began and ended, and what it computed."""
    from telechat_moe.graph.execute import Job
    from telechat_moe.train.optimizer import from_recipe
    from telechat_moe.train.programs.cpu import CpuProgram
    from telechat_moe.train.step import tensors

    recipe = load(job / RESOLVED)
    native.set_threads(1)
    program = CpuProgram(Job.read(job), number)
    program.set_parameters(start_values(recipe, program))
    scalars = from_recipe(recipe, []).scalars(1, 0.0)  # a rate of 0: the weights stay
    data = read(recipe, task["steps"], task["batches"], task["cores"])
    batches = {key: tensors(batch) for key, (batch, _) in data.items()}
    times: dict[tuple[str, int], list[tuple[float, float]]] = {key: [] for key in batches}
    values: dict[tuple[str, int], list[float]] = {}

    def step(key: tuple[str, int]) -> tuple[float, float]:
        begin = time.monotonic()
        losses, norm, *_ = program(*scalars, *batches[key])
        values[key] = [*losses.asnumpy().ravel().tolist(), float(norm.asnumpy())]
        return begin, time.monotonic()

    for call in range(WARM_UP):
        step(list(batches)[call % len(batches)])
    for _ in range(task["rounds"]):
        for key in batches:
            times[key].append(step(key))
    result = {
        "times": times,
        "values": values,
        "pairs": {key: pairs for key, (_, pairs) in data.items()},
        "cores": sorted(os.sched_getaffinity(0)),
    }
    (job / f"times_{number}.pickle").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    if not rank.is_scheduler():
        use_cores(int(os.environ["MS_WORKER_NUM"]), int(os.environ["RANK_ID"]), bind=True)
    sys.exit(rank.main(Path(sys.argv[1]), run))
