"""Which keys of a recipe name files and folders that are written, and whether these are where they may be."""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import cast

from telechat_moe.reading import real_path
from telechat_moe.recipe.problems import Problem, RecipeError
from telechat_moe.recipe.schema import Recipe

WRITTEN_KEYS = {
    *("dataset_state_dir", "directory", "dump_local_norm_path", "dump_path", "filepath_prefix"),
    *("health_ckpts_record_dir", "output_path", "path_to_cache", "pool_folder", "remote_save_url"),
    *("s3_cache_path", "save_file", "save_graphs_path", "save_path", "strategy_ckpt_save_file"),
}
"""Names of keys, wherever they occur. Folders of MindFormers' sections of free form are among them (`save_path`)."""


def texts(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) for every text in plain data."""
    if isinstance(value, str):
        yield key, value
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, Mapping):
        items = cast("Mapping[str, object]", value).items()
    elif isinstance(value, list):
        items = enumerate(cast("list[object]", value))
    for name, item in items:
        yield from texts(item, f"{key}.{name}".lstrip("."))


def written_paths(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, path) for everything that a recipe wants written, `output_dir` excepted."""
    for key, text in texts(recipe.given):
        if text and key.rpartition(".")[2] in WRITTEN_KEYS:
            yield key, text


def outside(recipe: Recipe) -> Iterator[Problem]:
    """Yield each key whose path leads outside both `output_dir` and the folder where the recipe is started.

    Links are followed. `output_dir` itself is the user's choice.
    """
    inside = [real_path(recipe.output_dir), real_path(Path.cwd())]
    for key, text in written_paths(recipe):
        is_local = "://" not in text
        # An absolute path must say output_dir; a relative one may not climb.
        roots = inside[:1] if os.path.isabs(text) else inside  # noqa: PTH117
        path = real_path(text)
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
