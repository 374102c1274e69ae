"""Load a recipe of mode 1 strictly: every problem is reported at once, nothing is guessed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from telechat_moe.recipe.check import Checker
from telechat_moe.recipe.mode1 import rules
from telechat_moe.recipe.mode1.kinds import RecipeKind, is_mode0, kind_of
from telechat_moe.recipe.mode1.schema import DynamicRecipe, section_of
from telechat_moe.recipe.mode1.table import MOVED
from telechat_moe.recipe.problems import Missing, Problem, RecipeError
from telechat_moe.recipe.reader import RecipeReader
from telechat_moe.recipe.tree import YamlEntry, YamlNode, locate

MODELS = {"deepseek_v3": "DeepseekV3", "deepseek_v4": "DeepseekV4", "qwen3": "Qwen3"}


def load(path: Path, overrides: Sequence[str] = (), *, devices: int | None = None) -> DynamicRecipe:
    """Load and check a recipe of mode 1.

    Args:
        overrides: Settings ``a.b=c`` that replace what the file says; see `telechat_moe.recipe.load`.
        devices: Devices that it is meant to run on, if known.

    Raises:
        RecipeError: With every problem.
    """
    return loads(RecipeReader(path).text(), overrides, path=path, devices=devices)


def loads(
    text: str, overrides: Sequence[str] = (), *, path: Path, devices: int | None = None
) -> DynamicRecipe:
    """Load a recipe of mode 1 from YAML text; see `load`."""
    reader = RecipeReader(path)
    root = reader.tree(text, overrides)
    written: dict[str, Any] = root.plain()
    top = YamlEntry("", 1, root)
    _take_leftovers(reader, root)
    _accept_none(locate(top, "recompute.mode").node)

    def choose(options: tuple[Any, ...]) -> type | None:
        return _chosen(root, options)

    config = Checker(reader.report_entry, choose).section(top, section_of("Mode1"), "")
    recipe = DynamicRecipe(path, config, written, top, devices)
    missing = Missing(bool(reader.problems))
    for key, *problem in rules.broken(recipe, missing):
        reader.report_entry(locate(top, key), key, *problem)
    if reader.problems:
        raise RecipeError([_moved(problem) for problem in reader.problems.values()])
    return recipe


def kind_of_file(path: Path, overrides: Sequence[str] = ()) -> RecipeKind:
    """Return the kind of a recipe; mode 0, whose loader says why, if it cannot be read."""
    reader = RecipeReader(path)
    try:
        return kind_of(reader.tree(reader.text(), overrides))
    except RecipeError:
        return "mode 0"


def _take_leftovers(reader: RecipeReader, root: YamlNode) -> None:
    """Report each section of mode 0, once, and take it out of the tree."""
    for entry in [e for e in root.entries if is_mode0(e.key)]:
        expected = f"{MOVED[entry.key]}, or remove it" if entry.key in MOVED else "remove it"
        reader.report_entry(entry, entry.key, "a section of mode 0 in a recipe of mode 1", expected)
        root.entries.remove(entry)


def _accept_none(node: YamlNode) -> None:
    """Take the plain word None, which is a mode of recomputation, for what it is."""
    if node.text == "None":
        node.trap = ""


def _chosen(root: YamlNode, options: tuple[Any, ...]) -> type | None:
    """Return the model's section by its type, the optimizer's if it has none; None: by the key `type`."""
    names = {option.__name__: option for option in options}
    if "AdamW" in names:
        section = root.get("optimizer")
        return names["AdamW"] if section and section.node.get("type") is None else None
    if "DeepseekV3" not in names:
        return None
    section = root.get("model")
    kind = section.node.get("model_type") if section else None
    return names[MODELS.get(kind.node.text if kind else "", "DeepseekV3")]


def _moved(problem: Problem) -> Problem:
    """Return a problem: that of a key of mode 0 with its place in mode 1, that of a network with all that there are."""
    place = MOVED.get(problem.key.rpartition(".")[2])
    if problem.key == "model.model_type":
        networks = ", ".join(MODELS)
        return replace(
            problem, expected=f"one of {networks}; TeleChat3-MoE is written as deepseek_v3"
        )
    if problem.found != "unknown key" or place in (None, problem.suggestion):
        return problem
    return replace(problem, expected=f"a key of mode 0; mode 1 has {place}", suggestion="")
