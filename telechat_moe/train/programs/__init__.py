"""Programs run the compiled step of one rank for :mod:`telechat_moe.train.rank_engine`.

``program.py`` is what the engine asks of one; ``cpu.py`` runs a graph that was exported and rewritten for CPU processes,
``device.py`` compiles the step natively for the device of its process. Begin with :func:`programs_of`, which chooses; nothing
above this room asks for the device.
"""

from collections.abc import Callable
from pathlib import Path

from telechat_moe.recipe import Recipe
from telechat_moe.sharding.recipe import runs_natively, smaller_steps
from telechat_moe.train.programs.program import RankProgram
from telechat_moe.train.ranks import RankCoordinator

Programs = Callable[[int], RankProgram]
"""Return the program of steps of so many micro-batches; all ranks call it together."""


def programs_of(recipe: Recipe, job: Path, ranks: RankCoordinator) -> Programs:
    """Return what loads the programs of a rank of a recipe.

    Args:
        job: Folder of the graphs for CPU processes; those of smaller steps are in ``micro_batches_N``.
    """
    rank = ranks.rank
    if runs_natively(recipe):
        from telechat_moe.train.programs.device import DeviceProgram

        recipes = {recipe.micro_batches: recipe, **smaller_steps(recipe)}
        return lambda micro_batches: DeviceProgram(recipes[micro_batches], ranks)
    from telechat_moe.graph.execute import FORWARD, Job
    from telechat_moe.train.programs.cpu import CpuProgram

    pool, groups = recipe.telechat_moe.swap, set[str]()
    swap_folder = pool.pool_folder if pool is not None else None

    def load(micro_batches: int) -> RankProgram:
        largest = micro_batches == recipe.micro_batches
        folder = job if largest else job / f"micro_batches_{micro_batches}"
        return CpuProgram(Job.read(folder), rank, groups, swap_folder, job / FORWARD)

    return load
