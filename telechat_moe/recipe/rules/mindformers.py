"""Rules for MindFormers' trainer: settings with which it would silently train to another result, or fail in the first step.

tests/interop/test_mindformers_versions.py shows what its versions do with those that only one of them refuses.
"""

import re
from collections.abc import Iterator

from telechat_moe.recipe.rules.data import CONFIG, MEGATRON
from telechat_moe.recipe.rules.parallel import PARALLEL_MODES
from telechat_moe.recipe.schema import Broken, Recipe
from telechat_moe.recipe.schema.model import ModelConfig
from telechat_moe.recipe.schema.optimizer import OUR_DECAY
from telechat_moe.recipe.schema.train import OUR_LOADER
from telechat_moe.recipe.weights import weights

NEWER = "MindFormers 2.1.0"


def by_mindformers(r: Recipe, version: str) -> list[Iterator[Broken]]:
    """Return what each rule finds that a version of MindFormers would do to a recipe."""
    of_1_9 = [_sums_of_stages, _cached_masks] if version == "1.9.0" else []
    return [rule(r) for rule in (_gradients, _norm, *of_1_9)]


def _norm(r: Recipe) -> Iterator[Broken]:
    """The steps of MindFormers compute the norm where they clip, and compare it with the threshold all the same."""
    if r.trains and r.use_skip_data_by_global_norm and not r.runner_wrapper.use_clip_grad:
        problem = "True with runner_wrapper.use_clip_grad False, where MindFormers computes no norm to compare"
        yield "use_skip_data_by_global_norm", problem, "False, or use_clip_grad True"


def per_token(r: Recipe) -> Iterator[Broken]:
    """MindFormers puts the top-level key over those of the sections."""
    keys = {"runner_wrapper": r.runner_wrapper, "model.model_config": r.model.model_config}
    for section, settings in keys.items():
        if settings.calculate_per_token_loss and not r.calculate_per_token_loss:
            problem = "True, over which MindFormers puts the top-level key of this name, False"
            expected = "calculate_per_token_loss: True at the top level, too"
            yield f"{section}.calculate_per_token_loss", problem, expected


def _sums_of_stages(r: Recipe) -> Iterator[Broken]:
    """The steps of MindFormers 1.9.0 that add up micro-batches do not know the six sums of its networks."""
    several = (
        r.parallel_config.pipeline_stage > 1 or r.runner_config.gradient_accumulation_steps > 1
    )
    if r.trains and r.calculate_per_token_loss and several:
        problem = "True with a pipeline or accumulation, which MindFormers 1.9.0 does not compile"
        yield "calculate_per_token_loss", problem, f"False, or {NEWER}"


def context(r: Recipe, version: str, plugin: bool) -> Iterator[Broken]:
    """Networks gather keys and values; MindFormers' split heads by the degree alone, and only where queries are as wide as values."""
    p, m = r.parallel_config, r.model.model_config
    method, degree = p.context_parallel_algo, getattr(p, "ulysses_degree_in_cp", 1)
    widths = [getattr(m, f"{name}_head_dim", None) or 0 for name in ("qk_nope", "qk_rope", "v")]
    wide = widths[2] > 0 and sum(widths[:2]) == widths[2]
    splits = degree > 1 and p.context_parallel > 1 and wide and not plugin
    if method == "hybrid_cp" and version == "1.9.0":
        problem = "hybrid_cp, which the networks of MindFormers 1.9.0 refuse"
        yield "parallel_config.context_parallel_algo", problem, "colossalai_cp"
    elif method != "colossalai_cp" and not splits and r.trains:
        problem = f"{method}, without effect: the network gathers keys and values"
        yield "parallel_config.context_parallel_algo", problem, "colossalai_cp"
    if degree > 1 and not splits and r.trains:
        reason = "with which MindFormers' networks compile only if MLA's values are as wide as its queries"
        problem = f"{degree}, {'without effect: no heads are split' if plugin else reason}"
        yield "parallel_config.ulysses_degree_in_cp", problem, "1"


def _cached_masks(r: Recipe) -> Iterator[Broken]:
    """MindFormers 1.9.0 keeps the masks of the first sample if none of three options is set, and changes them."""
    loader = r.train_dataset.data_loader
    config = loader.config if r.trains and loader.type == MEGATRON else None
    if (
        config is None
        or config.reset_position_ids
        or config.reset_attention_mask
        or config.eod_mask_loss
    ):
        return
    without = "without reset_position_ids, reset_attention_mask and eod_mask_loss"
    expected = f"one of these True, or {NEWER}"
    if config.create_compressed_eod_mask:
        problem = f"True {without}, where MindFormers 1.9.0 fails at the second sample"
        yield CONFIG + "create_compressed_eod_mask", problem, expected
    elif config.pad >= 0:
        problem = (
            f"{config.pad} {without}, where a position that has this token in one sample does not count in the later ones of "
            "MindFormers 1.9.0"
        )
        yield CONFIG + "pad", problem, f"-1, {expected}"


def _gradients(r: Recipe) -> Iterator[Broken]:
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


DATA_KEYS = ("conversations", "packing", "mixture", "balance_attention", "resume_data")
"""Settings that our data loader does in MindFormers' trainers."""


def reads_data(r: Recipe) -> bool:
    """Return whether our loader reads the data in MindFormers' trainer: its type is written, or a setting needs it."""
    needs = (getattr(r.telechat_moe, key) not in (None, False, "same") for key in DATA_KEYS)
    return r.train_dataset.data_loader.type == OUR_LOADER or any(needs)


def done_by_types(r: Recipe) -> set[str]:
    """Return the settings of our section that written types of ours do in MindFormers' own trainer."""
    data = DATA_KEYS if r.train_dataset.data_loader.type == OUR_LOADER else ()
    decays = r.lr_schedule is not None and r.lr_schedule.type == OUR_DECAY
    return {*data} | ({"lr_wsd_decay_style"} if decays else set[str]())


def our_loader(r: Recipe, plugin: bool) -> Iterator[Broken]:
    """Our loader knows where the data go on, and deals samples only where it hands each rank its own."""
    if not reads_data(r):
        return
    for key in ("ignore_data_skip", "data_skip_steps"):
        if value := getattr(r, key):
            problem = f"{value} with {OUR_LOADER}, which goes on where the checkpoint stopped"
            yield key, problem, "remove it; telechat_moe.resume_data new begins with other data"
    split = r.use_parallel and r.parallel.parallel_mode in PARALLEL_MODES and not plugin
    if r.telechat_moe.balance_attention and r.parallel.full_batch and split and r.micro_batches > 1:
        problem = "True with balance_attention, and MindSpore chooses the rows of each rank"
        yield "parallel.full_batch", problem, "False and a list in parallel.dataset_strategy"
