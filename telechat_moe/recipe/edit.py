"""Put other values into the text of a recipe; its comments, anchors and order stay."""

import re
from collections.abc import Sequence

from telechat_moe.recipe.load import loads
from telechat_moe.recipe.problems import RecipeError
from telechat_moe.recipe.schema import Recipe

MODEL = "model.model_config"


def edited(text: str, before: Recipe, after: Recipe, overrides: Sequence[str]) -> str | None:
    """Return the text of a recipe with overrides written into it.

    A value that is an alias follows its anchor; a key of the model section that is not there is added at its beginning.

    Args:
        overrides: ``key=value``, all values on one line.

    Returns:
        None where the text cannot be edited in this way: it would not be the recipe ``after``.
    """
    lines, added = text.splitlines(), list[str]()
    for override in overrides:
        key, _, value = override.partition("=")
        section, _, name = key.rpartition(".")
        line = before.problem(key, "", "").line
        pattern = rf"(\s*{re.escape(name)}:\s*(?:&\S+\s+)?)([^#]*?)(\s+#.*|\s*)"
        match = re.fullmatch(pattern, lines[line - 1]) if 0 < line <= len(lines) else None
        if match is None and section == MODEL:
            added.append(f"{name}: {value}")
        elif match is not None and not match[2].startswith("*"):
            lines[line - 1] = f"{match[1]}{value}{match[3]}"
    if added:
        top = before.problem(MODEL, "", "").line
        below = lines[top] if top < len(lines) else ""
        indent = below[: len(below) - len(below.lstrip())]
        lines[top:top] = [indent + line for line in added]
    result = "\n".join(lines) + "\n"
    try:
        is_same = loads(result).to_dict() == after.to_dict()
    except RecipeError:
        return None
    return result if is_same else None
