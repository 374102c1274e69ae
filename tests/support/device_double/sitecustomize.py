"""A double of the device, which Python imports at its start where a test puts this folder on the path of modules.

It replaces three calls of ``telechat_moe.train.programs.device``, ``compile_step``, ``compile_forward`` and ``row_exchanges``: the step is compiled
natively for the simulated device, as one for Ascend, whose layouts and groups count from there on; its graph for CPU processes is
what runs, and CPU processes exchange rows of experts. Recipes for CPU
are taken for those of the device (``runs_natively``), because MindSpore for CPU has no other target, and its programs for
ones that run ahead, so that a step is launched before the one before it is fetched.
"""

import os
import pickle
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

PATIENCE_S = 600.0
GROUPS = set[str]()
PROGRAMS: dict[int, Any] = {}
"""What runs in place of the device, by micro-batches of a step."""


def compile_step(recipe: Any, rank: int) -> Any:
    """Return the natively compiled step of a rank, which the graph for CPU runs."""
    from telechat_moe.graph.execute import FORWARD, Job
    from telechat_moe.train.programs.cpu import CpuProgram
    from telechat_moe.train.programs.device import CompiledStep

    folder = Path(recipe.output_dir).absolute() / f".double_{recipe.micro_batches}"
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / f"recipe_{rank}.pickle"
    written.write_bytes(pickle.dumps(recipe))
    env = {k: v for k, v in os.environ.items() if not k.startswith("MS_") and k != "PYTHONPATH"}
    command = [sys.executable, __file__, str(written), str(rank), str(folder)]
    subprocess.run(command, env=env, check=True)
    graph = pickle.loads((folder / f"native_{rank}.pickle").read_bytes())
    deadline = time.monotonic() + PATIENCE_S
    while not (folder / "job" / "key").exists():
        assert time.monotonic() < deadline, "rank 0 has not compiled the graphs for CPU"
        time.sleep(0.05)
    job = folder / "job"
    program = CpuProgram(Job.read(job), rank, GROUPS, forward=job / FORWARD)
    PROGRAMS[recipe.micro_batches] = program
    expected = set(program.graph.layouts)
    assert set(graph.layouts) == expected, set(graph.layouts) ^ expected
    return CompiledStep(graph, program.parameters, program.run)


def compile_forward(recipe: Any, rank: int, parameters: Any) -> Any:
    """Return the forward graph for CPU."""
    return PROGRAMS[recipe.micro_batches].evaluate


def row_exchanges(program: Any, groups: Any) -> Any:
    """Return the exchanges of rows between CPU processes."""
    return PROGRAMS[program.micro_batches].row_exchanges(groups)


def runs_natively(recipe: Any) -> bool:
    """Say of every recipe of several ranks that the device of each runs it."""
    if os.environ.get("MS_ROLE") == "MS_WORKER":
        from telechat_moe.train.programs import device

        device.compile_step, device.compile_forward = compile_step, compile_forward
        device.DeviceProgram.row_exchanges = row_exchanges
        device.DeviceProgram.runs_ahead = True
    return recipe.devices > 1


def compile_in_child(recipe: Any, rank: int, folder: Path) -> None:
    """Compile a rank's step for the simulated device; rank 0 those of all for CPU, too."""
    from telechat_moe.launch.job import write_job
    from telechat_moe.train.rank_graph import compile_recipe

    (graph,) = compile_recipe(recipe, [rank])
    native = folder / f"native_{rank}.pickle"
    native.write_bytes(pickle.dumps(replace(graph, mindir=b"")))
    if rank == 0:
        write_job(recipe, folder / "job")


if __name__ == "__main__":
    compile_in_child(
        pickle.loads(Path(sys.argv[1]).read_bytes()), int(sys.argv[2]), Path(sys.argv[3])
    )
elif __name__ == "sitecustomize":
    from telechat_moe.sharding import recipe as sharded

    sharded.runs_natively = runs_natively
