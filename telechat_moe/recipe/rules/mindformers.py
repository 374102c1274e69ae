"""Rules for MindFormers' trainer: settings with which it would silently train to another result, or fail in the first step."""

from collections.abc import Iterator

from telechat_moe.recipe.rules.parallel import PARALLEL_MODES
from telechat_moe.recipe.schema import Broken, Recipe


def by_mindformers(r: Recipe) -> Iterator[Broken]:
    """Outside semi-automatic parallelism MindFormers neither accumulates nor averages gradients; on CPU it has nothing else."""
    mode, steps = r.parallel.parallel_mode, r.runner_config.gradient_accumulation_steps
    semi_auto = r.use_parallel and mode in PARALLEL_MODES
    if not r.trains:
        return
    if steps > 1 and not semi_auto:
        found = f"{steps}; outside semi-automatic parallelism MindFormers trains with 1 instead"
        batch = steps * r.runner_config.batch_size
        expected = f"1, and batch_size {batch}; or `telechat-moe train`, which accumulates"
        yield "runner_config.gradient_accumulation_steps", found, expected
    if r.use_parallel and not semi_auto and not r.parallel.gradients_mean:
        found = f"False with {r.devices} data-parallel processes, whose gradients MindFormers would add up, not average"
        yield "parallel.gradients_mean", found, "True"
    if r.context.device_target != "CPU":
        return
    if semi_auto:
        found = f"{mode} on CPU, where MindSpore has no semi-automatic parallelism"
        expected = (
            "0 or DATA_PARALLEL, with data_parallel the only degree above 1; `telechat-moe train` runs other layouts "
            "on CPU processes, and `telechat-moe dryrun` compiles them for Ascend"
        )
        yield "parallel.parallel_mode", found, expected
    elif r.use_parallel and r.parallel.enable_parallel_optimizer:
        found = (
            "True on CPU: MindSpore shards the optimizer of data-parallel processes on Ascend only"
        )
        yield "parallel.enable_parallel_optimizer", found, "False"
