"""What kind of recipe a file is, by the sections that it has."""

import re
from collections.abc import Iterator
from typing import Literal

from telechat_moe.recipe.check import section_keys
from telechat_moe.recipe.mode1.schema import top_names
from telechat_moe.recipe.schema import Recipe
from telechat_moe.recipe.tree import YamlEntry, YamlNode

RecipeKind = Literal["mode 0", "mode 1", "HyperParallel"]

_MODE1 = top_names() - {*section_keys(Recipe).names}
_MODE0 = {*section_keys(Recipe).names} - top_names()
_SHARED = {
    "data_loader": _MODE0,
    "model_config": _MODE0,
    "dataloader": _MODE1,
    "model_type": _MODE1,
}
"""Keys below sections that both have, and the sections that they count as."""


def is_mode0(key: str) -> bool:
    """Return whether a dotted key, perhaps with a value, begins with what mode 1 does not have."""
    first, second, *_ = [*re.split(r"[.=]", key), ""]
    return first in _MODE0 or _SHARED.get(second) is _MODE0


def kind_of(root: YamlNode) -> RecipeKind:
    """Return the kind of a recipe; mode 0 if nothing speaks for another."""
    if next(_targets(root, 0), None):
        return "HyperParallel"
    return "mode 1" if _weight(root, _MODE1) > _weight(root, _MODE0) else "mode 0"


def _weight(root: YamlNode, sections: set[str]) -> tuple[int, int]:
    """Return how much speaks for a kind: its network and data, if one of its sections is there, too; then all of it."""
    entries = _told(root, sections)
    section_count = sum(entry.key in sections for entry in entries)
    return (len(entries) - section_count) * bool(section_count), len(entries)


def _told(root: YamlNode, sections: set[str]) -> list[YamlEntry]:
    """Return the entries that speak for a kind."""
    told = [entry for entry in root.entries if entry.key in sections]
    for name in ("model", "train_dataset"):
        section = root.get(name)
        entries = section.node.entries if section else []
        told += [entry for entry in entries if _SHARED.get(entry.key) is sections]
    return told


def _targets(node: YamlNode, depth: int) -> Iterator[YamlEntry]:
    """Yield what only recipes of HyperParallel have: `_target_`, and in older ones without it `accelerator`."""
    for entry in node.entries:
        if entry.key in ("_target_", "accelerator"):
            yield entry
        elif depth < 4:
            yield from _targets(entry.node, depth + 1)


def refusal(root: YamlNode, kind: RecipeKind) -> tuple[int, str, str, str] | None:
    """Return line, key, what it is and what to do for a recipe that is not of mode 0; None for one that is."""
    if kind == "HyperParallel":
        entry = next(_targets(root, 0))
        expected = "a recipe of MindFormers; write its settings into a copy of one that `telechat-moe ls` lists"
        return entry.line, "", f"a recipe of HyperParallel's own trainer (`{entry.key}`)", expected
    if kind == "mode 0":
        return None
    expected = (
        "`telechat-moe cp RECIPE DEST --to mindformers-1` translates it to mode 0; check, show, plan memory and "
        "plan simulate take it as it is"
    )
    entry = _told(root, _MODE1)[0]
    return entry.line, "", "a recipe of mode 1, MindFormers 2's dynamic graphs", expected
