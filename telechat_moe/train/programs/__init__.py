"""Programs run the compiled step of one rank for :mod:`telechat_moe.train.rank_engine`.

``program.py`` is what the engine asks of one, ``cpu.py`` runs a graph that was exported and rewritten for CPU processes. Import from here what
chooses between them, :func:`programs_of`; nothing above this room asks for the device.
"""

from collections.abc import Callable
from pathlib import Path

from telechat_moe.graph.execute import Job
from telechat_moe.recipe import Recipe
from telechat_moe.train.programs.cpu import CpuProgram
from telechat_moe.train.programs.program import RankProgram

Programs = Callable[[int], RankProgram]
"""Return the program of steps of so many micro-batches; all ranks call it together."""


def programs_of(recipe: Recipe, job: Path, rank: int) -> Programs:
    """Return what loads the programs of a rank of a recipe.

    Args:
        job: Folder of the graphs; those of smaller steps are in ``micro_batches_N``.
    """
    pool, groups = recipe.telechat_moe.swap, set[str]()
    swap_folder = pool.pool_folder if pool is not None else None

    def load(micro_batches: int) -> RankProgram:
        largest = micro_batches == recipe.micro_batches
        folder = job if largest else job / f"micro_batches_{micro_batches}"
        return CpuProgram(Job.read(folder), rank, groups, swap_folder)

    return load
