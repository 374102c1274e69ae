"""Measure this machine: matrix products, memory, short training steps, AllReduce between processes.

`this_machine` runs it as a program of its own, because it needs mindspore and the planner does not. Times are processor
seconds of the process: with one thread on an idle machine these are the seconds that pass. On a busy machine they are
up to half as long again, because caches and memory are shared.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

WARM_UP = 2
"""Steps before the first that is timed; MindSpore compiles in the first."""

ROUNDS = 7


SHORTEST_S = 0.02
"""Least time of one reading of the clock: the processor's time of a process comes in jumps."""


def least(call: Callable[[], object], seconds: float) -> float:
    """Return the least processor time of a call, repeated for a while; short calls are timed together."""
    call()
    began = time.process_time()
    call()
    together = 1 + int(SHORTEST_S / max(time.process_time() - began, 1e-6))
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.process_time()
        for _ in range(together):
            call()
        best = min(best, (time.process_time() - began) / together)
    return best


def product_flops(shapes: Sequence[tuple[int, int, int]], seconds: float = 0.3) -> list[float]:
    """Return FLOP/s of our products x [m, k] with w [n, k], float32, for shapes (m, n, k)."""
    from telechat_moe.ops.native import Kernel

    kernel, generator = Kernel("Matmul", {"bf16": False}), np.random.default_rng(0)
    rates: list[float] = []
    for m, n, k in shapes:
        x, w = (generator.standard_normal((rows, k), np.float32) for rows in (m, n))
        y = np.empty((m, n), np.float32)
        took = least(lambda x=x, w=w, y=y: kernel([x, w], [y]), seconds)
        rates.append(2.0 * m * n * k / took)
    return rates


def memory_bandwidth(size: int = 2**27, seconds: float = 0.5) -> float:
    """Return bytes/s read and written by a copy that does not fit into caches of a core."""
    source, target = np.ones(size // 4, np.float32), np.zeros(size // 4, np.float32)
    return 2.0 * size / least(lambda: np.copyto(target, source), seconds)


class TrainingStep:
    """Our training step on one process, as `telechat-moe train` runs it."""

    def __init__(self, recipe: Any) -> None:
        import mindspore as ms

        from telechat_moe.model import CausalLM, initialize
        from telechat_moe.ops import select
        from telechat_moe.train.optimizer import AdamW
        from telechat_moe.train.step import TrainStep

        ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
        self.recipe = recipe
        backends = recipe.telechat_moe.operators
        with select.using(backends.default, backends.backends()):
            self.model = CausalLM(recipe.model_config)
            if backends.fuse_plain:
                from telechat_moe.ops.rewrite import fuse_cells

                fuse_cells(self.model)
            initialize(self.model, recipe.seed)
            self.model.set_train()
            self.optimizer = AdamW(self.model.trainable_params(), (0.9, 0.95), 1e-8, 0.1)
            self.cell = TrainStep(self.model, self.optimizer, 1.0)
        self.cell.set_train()

    def train(self, ids_BS1: NDArray[np.int32], number: int) -> float:
        """Train on token windows `[B, S + 1]` and return the loss; `number` counts updates from 1."""
        from mindspore import Tensor

        ids, labels = ids_BS1[:, :-1], ids_BS1[:, 1:]
        position = np.tile(np.arange(ids.shape[1], dtype=np.int32), (len(ids), 1))
        arrays = (ids.copy(), labels.copy(), np.ones(ids.shape, np.float32), position)
        scalars = self.optimizer.scalars(number, 3e-4)
        losses, norm, *_ = self.cell(*scalars, *[Tensor(a) for a in arrays])
        norm.asnumpy()
        return float(losses.asnumpy()[0])

    def train_random(self, number: int) -> None:
        """Train on random tokens."""
        c, batch = self.recipe.model_config, self.recipe.runner_config.batch_size
        shape = (batch, c.seq_length + 1)
        generator: Any = np.random.default_rng(number)
        ids: NDArray[np.int64] = generator.integers(0, c.vocab_size, shape)
        self.train(ids.astype(np.int32), number + 1)


def step_seconds(
    cases: Sequence[dict[str, Any]], rounds: int, ready: Callable[[str], None]
) -> dict[str, list[float]]:
    """Return the processor times of each case's training step, one a round.

    All cases (`name`, `recipe`, `overrides`) take a step in every round after the warm-up: what else the machine does
    disturbs them alike. `ready` is called with the name of a case that is compiled.
    """
    from telechat_moe.recipe import load

    steps: dict[str, TrainingStep] = {}
    for case in cases:
        steps[case["name"]] = step = TrainingStep(load(case["recipe"], list(case["overrides"])))
        for number in range(WARM_UP):
            step.train_random(number)
        ready(case["name"])
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(WARM_UP, WARM_UP + rounds):
        for name, step in steps.items():
            began = time.process_time()
            step.train_random(number)
            times[name].append(time.process_time() - began)
    return times


def all_reduce_seconds(sizes: Sequence[int], repeats: int = 12) -> list[float]:
    """Return the least processor time of an AllReduce of float32 buffers (bytes) in one of its processes."""
    import mindspore as ms
    from mindspore import Tensor
    from mindspore.communication import init

    from telechat_moe.sharding.cells.collective import SumOverProcesses

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    init()

    cell = SumOverProcesses()
    result: list[float] = []
    for size in sizes:
        x = Tensor(np.ones(size // 4, np.float32))
        cell(x).asnumpy()
        times: list[float] = []
        for _ in range(repeats):
            began = time.process_time()
            cell(x).asnumpy()
            times.append(time.process_time() - began)
        result.append(min(times))
    return result


def main(arguments: Sequence[str]) -> None:
    """Do what the first argument says; print each result as a line of JSON."""
    job: dict[str, Any] = json.loads(arguments[0])
    if "shapes" in job:
        print_json({"flops": product_flops([tuple(s) for s in job["shapes"]])})
        print_json({"bandwidth": memory_bandwidth()})
    if "cases" in job:
        times = step_seconds(
            job["cases"], job.get("rounds", ROUNDS), lambda name: print_json({"ready": name})
        )
        print_json({"steps": times})
    if "all_reduce" in job:
        print_json({"all_reduce": all_reduce_seconds(job["all_reduce"])})


def print_json(result: dict[str, Any]) -> None:
    """Print one result."""
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
