"""The process of a rank: run the steps of both graphs in turn, with slow and with fast links, and keep their times.

msrun ... python -m benchmarks.exchange_overlap.rank FOLDER/waiting
"""

import pickle
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.exchange_overlap.streams import Step
from benchmarks.ranks import batch, start_values, transfers
from telechat_moe.launch import rank
from telechat_moe.launch.job import RESOLVED
from telechat_moe.ops import native
from telechat_moe.recipe import load

PROGRAMS = ("waiting", "beside")
"""Jobs: with MindSpore's order of passes, and with exchanges beside computation."""
WARM_UP = 8  # MindSpore tries two ways to run a graph in its first calls and keeps the faster


def run(job: Path, number: int, task: dict[str, Any]) -> None:
    """Run the rounds of a task; write times and a digest of what came out."""
    from telechat_moe.graph.execute import Job
    from telechat_moe.train.optimizer import from_recipe
    from telechat_moe.train.programs.cpu import CpuProgram

    recipe, library = load(job / RESOLVED), native.load()
    native.set_threads(1)
    made, programs = set[str](), {}
    for name in PROGRAMS:
        programs[name] = CpuProgram(Job.read(job.parent / name), number, made)
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
            times.setdefault(kept, []).append(
                Step(begin, end, transfers(library.telechat_link_times))
            )

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
