"""The process of a rank: run the steps of both graphs in turn, with slow and with fast links, and keep their times.

msrun ... python -m benchmarks.exchange_overlap.rank FOLDER/waiting
"""

import pickle
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.exchange_overlap.streams import Exchange, Step
from telechat_moe.launch import rank
from telechat_moe.launch.job import RESOLVED
from telechat_moe.ops import native
from telechat_moe.recipe import Recipe, load

PROGRAMS = ("waiting", "beside")
"""Jobs: with MindSpore's order of passes, and with exchanges beside computation."""
WARM_UP = 8  # MindSpore tries two ways to run a graph in its first calls and keeps the faster
FIELDS = len(Exchange._fields)


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
        values.setdefault(name, np.zeros(p.shape if entry is None else entry[6], np.float32))
    return values


def exchanges() -> list[Exchange]:
    """Return what the native library wrote down since it was asked to."""
    numbers = np.zeros(1 << 16)
    count = native.load().telechat_link_times(numbers.ctypes.data, len(numbers))
    rows = numbers[:count].reshape(-1, FIELDS).tolist()
    return [Exchange(int(tag), int(size), *times) for tag, size, *times in sorted(rows, key=_start)]


def _start(row: list[float]) -> float:
    return row[Exchange._fields.index("started")]


def run(job: Path, number: int, task: dict[str, Any]) -> None:
    """Run the rounds of a task; write times and a digest of what came out."""
    from telechat_moe.graph.execute import Job, RankProgram
    from telechat_moe.train.optimizer import from_recipe

    recipe, library = load(job / RESOLVED), native.load()
    native.set_threads(1)
    made, programs = set[str](), {}
    for name in PROGRAMS:
        programs[name] = RankProgram(Job.read(job.parent / name), number, made)
        programs[name].set_parameters(start_values(recipe, programs[name]))
    scalars = from_recipe(recipe, []).scalars
    done = dict.fromkeys(PROGRAMS, 0)
    times: dict[str, list[Step]] = {}
    results: dict[str, list[bytes]] = {name: [] for name in PROGRAMS}

    def step(name: str, kept: str | None, link: tuple[float, float]) -> None:
        done[name] += 1
        inputs = [*scalars(done[name], 1e-3), *batch(recipe, done[name])]
        library.telechat_link_trial(*link, 1)
        begin = time.monotonic()
        answers = [x.asnumpy() for x in programs[name](*inputs)]
        end = time.monotonic()
        results[name] += [x.tobytes() for x in answers]
        if kept is not None:
            times.setdefault(kept, []).append(Step(begin, end, exchanges()))

    for _ in range(WARM_UP):
        for name in PROGRAMS:
            step(name, None, (0.0, 0.0))
    for _ in range(task["rounds"]):
        for speed, link in (("slow", tuple(task["link"])), ("fast", (0.0, 0.0))):
            for name in PROGRAMS:
                step(name, f"{name} {speed}", link)
    for name in PROGRAMS:
        results[name] += [x.tobytes() for _, x in sorted(programs[name].shards().items())]
    same = results[PROGRAMS[0]] == results[PROGRAMS[1]]
    (job / f"times_{number}.pickle").write_bytes(pickle.dumps({"times": times, "same": same}))


if __name__ == "__main__":
    sys.exit(rank.main(Path(sys.argv[1]), run))
