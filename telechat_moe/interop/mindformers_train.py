"""Train a recipe through MindFormers' trainer, without ``run_mindformer.py``.

:func:`train` does what that script does: it names the plug-in's folder, lets MindFormers read the file, sets its
context and starts its trainer. Under ``msrun`` every process calls it. Called by
``python -m telechat_moe.run RECIPE --through mindformers``.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from telechat_moe.interop.mindformers_checkpoint import FOLDER, newest, resume_settings, step_of
from telechat_moe.interop.mindformers_config import PLUGIN, check_launch
from telechat_moe.recipe import Recipe, RecipeError, load
from telechat_moe.train import preflight
from telechat_moe.versions import require_mindformers


def train(
    recipe_path: str | os.PathLike[str], overrides: Sequence[str] = (), resume: bool = False
) -> None:
    """Train a recipe through MindFormers in this process, one of as many as the recipe has devices.

    Args:
        resume: Continue from the newest checkpoint that MindFormers finished in ``output_dir``, if there is one.

    Raises:
        RecipeError: The recipe has problems.
        BadInputError: MindFormers cannot run with what is installed, or would train something else.
    """
    recipe = load(recipe_path, overrides, use="mindformers")
    check_launch(recipe, int(os.environ.get("MS_WORKER_NUM", "1")))
    require_mindformers()
    if problems := preflight.machine(recipe):
        raise RecipeError(problems)
    os.environ["LOCAL_DEFAULT_PATH"] = str(Path(recipe.output_dir).absolute())  # import logs there
    os.environ["REGISTER_PATH"] = str(PLUGIN)
    from mindformers import MindFormerConfig, Trainer
    from mindformers.core.context import build_context

    settings: dict[str, Any] = {}
    if recipe.devices == 1 and "use_legacy_format" not in recipe.given:
        settings["use_legacy_format"] = False  # the old one cannot be resumed in one process
    saved = Path(recipe.output_dir).absolute() / FOLDER
    checkpoint = newest(saved, recipe.devices) if resume else None
    if checkpoint is not None:
        if step_of(checkpoint, recipe) >= recipe.train_steps:  # MindSpore would stop with an error
            sys.stderr.write(f"all {recipe.train_steps} steps are done: {checkpoint}\n")
            return
        settings |= resume_settings(saved, recipe)
    config = MindFormerConfig(str(write_resolved(recipe, settings)))
    build_context(config)
    Trainer(config).train()


def write_resolved(recipe: Recipe, settings: Mapping[str, Any]) -> Path:
    """Write what a recipe says, overrides and further settings put in, where MindFormers can read it."""
    folder = Path(recipe.output_dir) / ".mindformers"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"recipe_{os.environ.get('RANK_ID', '0')}.yaml"
    text = yaml.safe_dump({**recipe.given, **settings}, allow_unicode=True)
    path.write_text(text, encoding="utf-8")
    return path
