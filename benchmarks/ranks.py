"""What benchmarks on CPU processes share: start the ranks of a job, their inputs and weights, and the times of transfers."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from telechat_moe.launch.commands import LaunchNode, free_port
from telechat_moe.launch.host_processes import HostProcesses
from telechat_moe.launch.job import write_resolved
from telechat_moe.processes import Control
from telechat_moe.recipe import Recipe


class Transfer(NamedTuple):
    """When a transfer was started and waited for on a rank; seconds of a clock.

    Attributes:
        tag: What tells it apart: of an exchange its own; of a swapped activation twice its number, one more on the way back.
        bytes: Its size; of an exchange, of the largest part that arrived.
        started: When it was asked for.
        arrived: When it, or its last part, was there.
        waits: When the graph began to wait.
        goes_on: When it went on.
    """

    tag: int
    bytes: int
    started: float
    arrived: float
    waits: float
    goes_on: float


def transfers(take: Callable[[int, int], int]) -> list[Transfer]:
    """Return what the native library wrote down since it was asked to, by their starts.

    Args:
        take: ``telechat_link_times`` or ``telechat_swap_times``.
    """
    numbers = np.zeros(1 << 16)
    count = take(numbers.ctypes.data, len(numbers))
    rows = numbers[:count].reshape(-1, len(Transfer._fields)).tolist()
    found = [Transfer(int(tag), int(size), *times) for tag, size, *times in rows]
    return sorted(found, key=lambda transfer: transfer.started)


def batch(recipe: Recipe, step: int) -> list[Any]:
    """Return the inputs of a step: any tokens, all of which count."""
    from mindspore import Tensor

    rows = recipe.runner_config.batch_size * recipe.parallel_config.data_parallel
    shape = (
        rows * recipe.runner_config.gradient_accumulation_steps,
        recipe.model_config.seq_length,
    )
    rng = np.random.default_rng(step)
    ids, labels = (rng.integers(1, 64, shape).astype(np.int32) for _ in range(2))
    places = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
    return [Tensor(x) for x in (ids, labels, np.ones(shape, np.float32), places)]


def start_values(recipe: Recipe, program: Any) -> dict[str, np.ndarray]:
    """Return the whole tensors that the parameters of a program start from."""
    from telechat_moe.model import initialize
    from telechat_moe.train.engine import build_model

    model, _ = build_model(recipe)
    initialize(model, recipe.seed)
    values = {p.name: p.asnumpy().copy() for p in model.get_parameters()}
    for name, p in program.parameters.items():
        entry = program.graph.layouts.get(name)
        values.setdefault(name, np.zeros(p.shape if entry is None else entry.shape, np.float32))
    return values


def run_ranks(module: str, job: Path, recipe: Recipe, processes: int, task: Any) -> list[Any]:
    """Run ``python -m MODULE JOB`` as every rank of a job; return what each has pickled into ``times_RANK.pickle``."""
    write_resolved(recipe, job)
    Control.fresh(job, task=task)
    program = ["python", "-u", "-m", module, str(job)]
    node = LaunchNode(local=processes, total=processes, port=free_port())
    HostProcesses(job, node, job.parent / "log", program, out=None).run()
    paths = [job / f"times_{number}.pickle" for number in range(processes)]
    return [pickle.loads(path.read_bytes()) for path in paths]
