"""Which keys of a recipe name files and folders that are written, and whether these are where they may be."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from telechat_moe.recipe.problems import Problem, RecipeError
from telechat_moe.recipe.schema import Recipe

WRITTEN_KEYS = frozenset(
    {
        *("dataset_state_dir", "directory", "dump_local_norm_path", "dump_path", "filepath_prefix"),
        *("health_ckpts_record_dir", "output_path", "path_to_cache", "pool_folder"),
        "remote_save_url",
        *("s3_cache_path", "save_file", "save_graphs_path", "save_path", "strategy_ckpt_save_file"),
    }
)
"""Names of keys, wherever they occur. Folders of MindFormers' sections of free form are among them (`save_path`)."""


def written_paths(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, path) for everything that a recipe wants written, `output_dir` excepted."""
    yield from _walk(recipe.given, "")


def _walk(value: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in cast("Mapping[str, Any]", value).items():
            key_path = f"{path}.{key}" if path else key
            if key in WRITTEN_KEYS and isinstance(item, str) and item:
                yield key_path, item
            else:
                yield from _walk(item, key_path)
    elif isinstance(value, list):
        for i, item in enumerate(cast("list[Any]", value)):
            yield from _walk(item, f"{path}.{i}")


def outside(recipe: Recipe) -> Iterator[Problem]:
    """Yield each key whose path leads outside both `output_dir` and the folder where the recipe is started.

    Links are followed. `output_dir` itself is the user's choice.
    """
    inside = [Path(recipe.output_dir).resolve(), Path.cwd().resolve()]
    for key, text in written_paths(recipe):
        is_local = "://" not in text
        # An absolute path must say output_dir; a relative one may not climb.
        roots = inside[:1] if os.path.isabs(text) else inside  # noqa: PTH117
        path = Path(text).resolve()
        if is_local and any(path.is_relative_to(root) for root in roots):
            continue
        problem = f"{text}, which is outside of output_dir ({recipe.output_dir})"
        expected = "a path below output_dir, a relative one without `..`, or --allow-outside"
        yield recipe.problem(key, problem, expected)


def check_written_paths(recipe: Recipe) -> None:
    """Refuse a recipe that writes outside.

    Raises:
        RecipeError: See :func:`outside`.
    """
    if problems := list(outside(recipe)):
        raise RecipeError(problems)
