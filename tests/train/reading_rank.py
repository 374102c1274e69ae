"""One rank that only reads: ``python reading_rank.py JOB RANK RANKS RECIPE OPERATIONS [NAME=VALUE ...]``.

Operations are JSON: ``["take", 3]``, ``["seek", 2]`` (steps), ``["rss"]``, ``["die"]`` and ``["limit", BYTES]``. Every
batch is a line: its columns as digests, how samples were dealt, and the state of the data after it.
"""

import hashlib
import json
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path

from telechat_moe.errors import TelechatMoeError, UsageError
from telechat_moe.processes import CONTROL, Control
from telechat_moe.recipe import load
from telechat_moe.train import preflight
from telechat_moe.train.ranks import RankCoordinator


def say(**content: object) -> None:
    """Print a line of JSON."""
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


def describe(loader, batch) -> dict[str, object]:
    """Return what a batch holds, and where the data go on after it."""
    columns = {
        name: [array.dtype.str, array.shape, hashlib.sha256(array.tobytes()).hexdigest()]
        for name, array in batch.items()
    }
    order = None if loader.order is None else loader.order.tolist()
    state = None
    with suppress(UsageError):  # within a step of samples that are dealt together
        state = loader.state()
    return {"columns": columns, "order": order, "state": state}


def mapped_files(folder: str) -> list[str]:
    """Return the token files and indices below a folder that this process maps."""
    maps = Path("/proc/self/maps").read_text().split("\n")
    found = {line.split()[-1] for line in maps if folder in line}
    return sorted(Path(path).name for path in found if path.endswith((".bin", ".idx", ".npy")))


def main(job: str, rank: str, count: str, name: str, operations: str, *sets: str) -> None:
    """Do what the operations say."""
    recipe = load(name, sets)
    script = json.loads(operations)
    if script[0][0] == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (script[0][1], -1))
        del script[0]
    control = Control(Path(job) / CONTROL) if int(count) > 1 else None
    ranks = RankCoordinator(control, int(rank), int(count))
    shared = ranks.share_batches()
    with preflight.require(recipe, overwrite=True, shared=shared).loader as loader:
        for what, *given in script:
            if what == "take":
                for _ in range(given[0]):
                    say(**describe(loader, next(loader)))
            elif what == "seek":
                loader.seek(given[0] * recipe.global_batch)
            elif what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
        say(maps=mapped_files(str(Path(recipe.output_dir).parent)))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except TelechatMoeError as error:
        sys.exit(f"error: {error}")
