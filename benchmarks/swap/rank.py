"""The process of a rank: run the steps of both graphs in turn, with links of several speeds, and keep what was waited.

msrun ... python -m benchmarks.swap.rank FOLDER/JOB
"""

import gc
import hashlib
import pickle
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.ranks import Transfer, batch, start_values, transfers
from telechat_moe.launch import rank
from telechat_moe.launch.job import RESOLVED
from telechat_moe.ops import native
from telechat_moe.recipe import load

WARM_UP = 4  # MindSpore tries two ways to run a graph in its first calls and keeps the faster


def run(job: Path, number: int, task: dict[str, Any]) -> None:
    """Run the rounds of a task for its programs; write times, copies and digests of what came out."""
    from telechat_moe.graph.execute import Job
    from telechat_moe.train.optimizer import from_recipe
    from telechat_moe.train.programs.cpu import CpuProgram

    recipe, library = load(job / RESOLVED), native.load()
    native.set_threads(1)
    made, programs, names = set[str](), {}, task["programs"]
    for name in names:
        programs[name] = CpuProgram(Job.read(job.parent / name), number, made)
        programs[name].set_parameters(start_values(recipe, programs[name]))
    scalars = from_recipe(recipe, []).scalars
    done = dict.fromkeys(names, 0)
    steps: dict[str, list[tuple[float, list[Transfer]]]] = {}
    digests = {name: hashlib.sha256() for name in names}

    def step(name: str, kept: str | None, seconds_per_byte: float) -> None:
        done[name] += 1
        inputs = [*scalars(done[name], 1e-3), *batch(recipe, done[name])]
        library.telechat_swap_trial(seconds_per_byte, 1)
        begin = time.monotonic()
        answers = [x.asnumpy() for x in programs[name](*inputs)]
        seconds = time.monotonic() - begin
        for x in answers:
            digests[name].update(x.tobytes())
        if kept is not None:
            steps.setdefault(kept, []).append((seconds, transfers(library.telechat_swap_times)))

    for _ in range(WARM_UP):
        for name in names:
            step(name, None, 0.0)
    for _ in range(task["rounds"]):
        for speed, factor in (("slow", 1.0), ("half", 2.0), ("fast", 0.0)):
            for name in names:
                step(name, f"{name} {speed}", factor * task["seconds_per_byte"])
    for name in names:
        for _, x in sorted(programs[name].shards().items()):
            digests[name].update(x.tobytes())
    gc.collect()
    status = Path("/proc/self/status").read_text(encoding="ascii")
    memory = int(status.partition("RssAnon:")[2].split()[0]) / 1024
    found = {
        "memory": memory,
        "steps": steps,
        "digests": {n: d.hexdigest() for n, d in digests.items()},
    }
    (job / f"found_{number}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    sys.exit(rank.main(Path(sys.argv[1]), run))
