"""Rules for MindFormers' trainer: settings with which it would silently train to another result, or fail in the first step."""

import re
from collections.abc import Iterator

from telechat_moe.recipe.rules.parallel import PARALLEL_MODES
from telechat_moe.recipe.schema import Broken, Recipe
from telechat_moe.recipe.schema.model import ModelConfig
from telechat_moe.recipe.weights import weights


def by_mindformers(r: Recipe) -> Iterator[Broken]:
    """Outside semi-automatic parallelism MindFormers neither accumulates nor averages gradients; on CPU it has nothing else."""
    mode, steps = r.parallel.parallel_mode, r.runner_config.gradient_accumulation_steps
    semi_auto = r.use_parallel and mode in PARALLEL_MODES
    if not r.trains:
        return
    if steps > 1 and not semi_auto:
        problem = f"{steps}; outside semi-automatic parallelism MindFormers trains with 1 instead"
        batch = steps * r.runner_config.batch_size
        expected = f"1, and batch_size {batch}; or `telechat-moe train`, which accumulates"
        yield "runner_config.gradient_accumulation_steps", problem, expected
    if r.use_parallel and not semi_auto and not r.parallel.gradients_mean:
        problem = (
            f"False with use_parallel and {r.devices} data-parallel processes, whose gradients MindFormers would add "
            "up, not average"
        )
        yield "parallel.gradients_mean", problem, "True"
    if r.context.device_target != "CPU":
        return
    if semi_auto:
        problem = f"{mode} on CPU, where MindSpore has no semi-automatic parallelism"
        expected = (
            "0 or DATA_PARALLEL, with data_parallel the only degree above 1; `telechat-moe train` runs other layouts "
            "on CPU processes, and `telechat-moe dryrun` compiles them for Ascend"
        )
        yield "parallel.parallel_mode", problem, expected
    elif r.use_parallel and r.parallel.enable_parallel_optimizer:
        problem = (
            "True on CPU: MindSpore shards the optimizer of data-parallel processes on Ascend only"
        )
        yield "parallel.enable_parallel_optimizer", problem, "False"


def decayed(r: Recipe) -> Iterator[Broken]:
    """MindFormers' optimizer decays all parameters of our model but those with one dimension."""
    m, decay = r.model.model_config, r.optimizer.weight_decay
    if not isinstance(m, ModelConfig) or not decay or not r.trains:
        return
    try:
        patterns = [re.compile(text) for text in r.telechat_moe.weight_decay_exclude]
    except (re.error, OverflowError, RecursionError):
        return  # as a rule says
    for weight in weights(m):
        excluded = any(pattern.search(weight.name) for pattern in patterns)
        if weight.trained and excluded != (len(weight.shape) == 1):
            verb = "leaves out" if excluded else "decays"
            problem = f"{r.telechat_moe.weight_decay_exclude}, which {verb} {weight.name}; MindFormers decays all but norms and biases"
            expected = "['.*norm.*', '.*bias'], or `telechat-moe train`"
            yield "telechat_moe.weight_decay_exclude", problem, expected
            return
