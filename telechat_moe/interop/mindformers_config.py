"""Turn MindFormers' configuration object into a recipe of ours; refuse what MindFormers would do silently.

MindFormers fills its defaults into what it read and turns some sections into objects. :func:`recipe_of` undoes both
and gives the rest to the strict loader, so that settings given to ``run_mindformer.py`` on the command line
(``--optimizer.weight_decay 0.2``) are judged like those in the file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from telechat_moe.errors import BadInputError
from telechat_moe.recipe import Recipe, RecipeError, loads

PLUGIN = Path(__file__).parent / "mindformers_plugin"
TRAINER = "TelechatMoeTrainer"
REFERENCE = f"telechat_moe_plugin.{TRAINER}"
NAME = "MindFormers' configuration"
SKIPS = "use_skip_data_by_global_norm"

# Keys that MindFormers 1.9.0 adds while it reads a file or sets itself up.
_FILLED_IN: dict[str, tuple[str, ...]] = {
    "": ("checkpoint", "device_num", "local_rank", "metric", "moe_config", "rank_id"),
    "context": ("device_id",),
    "model.model_config": ("checkpoint_name_or_path",),
    "parallel": ("device_num", "pipeline_stages", "search_mode", "strategy_ckpt_save_file"),
    "runner_config": ("num_classes",),
    "train_dataset": ("do_eval",),
    "train_dataset_task.dataset_config": ("do_eval",),
}
_MADE_UP = r".*\.flash_attention"
"""The pattern of operators that it puts where neither layers nor operators are named."""
DEGREES = (
    "data_parallel",
    "model_parallel",
    "context_parallel",
    "expert_parallel",
    "pipeline_stage",
)


def recipe_of(config: Any) -> Recipe:
    """Return the recipe that MindFormers was given, from its configuration object.

    Args:
        config: ``MindFormerConfig`` before training begins: MindFormers changes batch sizes and degrees in it later.

    Raises:
        RecipeError: A key is unknown, a value wrong or without effect, or values do not fit together; all are listed.
    """
    sections = _plain(config)
    parallel = sections.get("parallel") or {}
    if isinstance(mode := parallel.get("parallel_mode"), str):  # its context has MindSpore's words
        parallel["parallel_mode"] = mode.upper()
    sections.update(_swap(sections.pop("swap_config", None) or {}))
    monitor = sections.get("monitor_config") or {}
    if not monitor.get("monitor_on"):  # what its steps take all the same
        limits = {k: v for k, v in monitor.items() if k.startswith("global_norm_spike_")}
        sections["monitor_config"] = limits if sections.get(SKIPS) else None
    for path, keys in _FILLED_IN.items():
        section: Any = sections
        for part in path.split(".") if path else ():
            section = section.get(part) or {}
        for key in keys:
            section.pop(key, None)
    return loads(yaml.safe_dump(sections, allow_unicode=True), name=NAME, use="mindformers")


def _swap(config: dict[str, Any]) -> dict[str, Any]:
    """Return `swap_config` as it was written, from the object that MindFormers makes of it; nothing where it is off."""
    if not config.get("swap"):
        return {}
    written = {key: value for key, value in config.items() if value}
    operators = written.pop("op_swap", None)
    if isinstance(operators, dict):
        made_up = list(operators) == [_MADE_UP] and "layer_swap" not in written
        operators = () if made_up else operators.items()
        operators = [{"op_name": name, **item} for name, items in operators for item in items]
    return {"swap_config": written | ({"op_swap": operators} if operators else {})}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "micro_batch_num"):  # TransformerOpParallelConfig
        keys = (*DEGREES, "micro_batch_num", "use_seq_parallel")
        return {key: _plain(getattr(value, key)) for key in keys}
    return _plain(value.to_dict() if hasattr(value, "to_dict") else vars(value))


def check_launch(recipe: Recipe, processes: int) -> None:
    """Refuse a job of another size than the recipe's, or of MindFormers' own model.

    Raises:
        BadInputError: Names the key, what it is and what it must be.
    """
    if recipe.trainer.type != TRAINER:
        problem = f"{recipe.trainer.type}, which builds MindFormers' own model"
        expected = f"{TRAINER}, with auto_register: {REFERENCE}"
        raise RecipeError([recipe.problem("trainer.type", problem, expected)])
    if recipe.devices != processes:
        raise BadInputError(
            f"the recipe is laid out for {recipe.devices} device(s) ({recipe.degrees_text}), and {processes} process(es) run. MindFormers would feed zeros to the "
            f"processes that its data loader does not know; start {recipe.devices} (msrun --worker_num), or set "
            f"use_parallel and parallel_config.data_parallel for {processes}"
        )
