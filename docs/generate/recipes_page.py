"""Write `docs/recipes.md` from the docstrings of the schema.

python -m docs.generate.recipes_page > docs/recipes.md
"""

import ast
import dataclasses
import inspect
import itertools
import re
import sys
from collections import defaultdict
from typing import Any, cast

from telechat_moe.recipe.check import describe, parts_of, section_keys
from telechat_moe.recipe.fields import SPLIT, Takes
from telechat_moe.recipe.rules import documented
from telechat_moe.recipe.schema import Recipe
from telechat_moe.recipe.schema.own import Saving
from telechat_moe.recipe.schema.table import is_made
from telechat_moe.recipe.uses import decided

INTRO = """\
# Recipes

<!-- Written by `python -m docs.generate.recipes_page > docs/recipes.md`; do not edit. -->

A recipe is one YAML file in the format of MindFormers' `run_mindformer.py --config`, and one more
section, `telechat_moe`, with settings that MindFormers lacks (it drops that section with a
warning). `telechat-moe ls` lists the recipes that come with the package, `telechat-moe cp` copies
one, `telechat-moe check` reports every problem of a file at once, `telechat-moe show` prints it
resolved, with what follows from it.

The loader refuses what MindFormers takes silently: unknown keys at any depth, keys written twice,
values of another type (`1e-5` is text in YAML, write `1.e-5`; `no` is a boolean, `010` is eight),
and settings that are right alone and wrong together. It never guesses.

`--set a.b=c` replaces a setting; `c` is YAML, list items are named by index from 0
(`--set callbacks.0.per_print_times=10`). Replacing a value that has an anchor (`&dp 4`) also
changes every alias of it (`*dp`); replacing an alias changes that place only.

The column `train` says what `telechat-moe train` makes of a key: it *reads* it, or it does not and takes *any* value,
*only* those named, or *no* value but null, since a setting without effect is an error. MindFormers reads every section
but `telechat_moe`, all of which `telechat-moe train` reads; there the column `MindFormers` says whether a key acts in
MindFormers' trainer with our model (`trainer.type: TelechatMoeTrainer`); *whole*: yes, except with semi-automatic parallelism, where no process
has the whole model or the losses of a step. `check --for train|dryrun|mindformers` judges a recipe for a use; `show --keys` lists who reads what.

In the tables below *written* means that a recipe must write the key: MindFormers' own default
belongs to another model.
"""

RULES_INTRO = """\
## Rules across sections

Checked after each value is right alone. The text says what goes wrong otherwise, or why.

| rule | |
|---|---|
"""


OWN_RULES_INTRO = """
These hold where this package trains (`check --for train`) or compiles (`--for dryrun`) a recipe:

| rule | |
|---|---|
"""


def field_docs(cls: type) -> dict[str, str]:
    """Return what each field of a section means, base classes included."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        if not is_made(base):
            found |= _attribute_docs(base)
    return found | {
        f.name: f.metadata["doc"] for f in dataclasses.fields(cls) if "doc" in f.metadata
    }


def _attribute_docs(cls: type) -> dict[str, str]:
    """Return the docstrings under the attributes of a class, by attribute."""
    found: dict[str, str] = {}
    body = cast(ast.ClassDef, ast.parse(inspect.getsource(cls)).body[0]).body
    for statement, following in itertools.pairwise(body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(following, ast.Expr):
            continue
        if isinstance(statement.target, ast.Name) and isinstance(following.value, ast.Constant):
            found[statement.target.id] = " ".join(str(following.value.value).split())
    return found


def sections() -> list[tuple[str, type]]:
    """Return every section of a recipe with its dotted path, a section before those inside it."""
    found: list[tuple[str, type]] = []
    seen: set[type] = set()

    def visit(path: str, cls: type) -> None:
        if cls in seen:
            return
        seen.add(cls)
        found.append((path, cls))
        for field in section_keys(cls).fields.values():
            for inner, is_list in parts_of(field.type):
                below = f"{path}.{field.name}".lstrip(".") + ("[]" if is_list else "")
                visit(below, inner)

    visit("", Recipe)
    return found


def default_text(field: dataclasses.Field[Any]) -> str:
    """Return a field's default for the table."""
    if field.metadata.get("written"):
        return "*written*"
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`" if isinstance(field.default, str) else f"`{field.default}`"
    if field.default_factory is dataclasses.MISSING:
        return "*written*"
    value = field.default_factory()
    return "as below" if dataclasses.is_dataclass(value) else f"`{value}`"


def taken_text(field: dataclasses.Field[Any]) -> str:
    """Return what our trainer makes of a key, for the table."""
    takes = cast("Takes | None", field.metadata.get("takes"))
    if takes is None:
        return "reads"
    values = [f"`{value!r}`" for value in takes.neutral(field) if value is not None]
    return "any" if takes.reason else "only " + ", ".join(values) if values else "no"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def in_mindformers(path: str) -> dict[str, str]:
    """Return what MindFormers' trainer with our model makes of each key of a section of ours."""
    cls: type = Recipe
    for name in path.split("."):
        field = section_keys(cls).fields[name.removesuffix("[]")]
        if "only_ours" in field.metadata:
            return defaultdict(lambda: "as its section")
        cls = next(section for section, _ in parts_of(field.type))
    words: dict[str, str] = {}
    for name, field in section_keys(cls).fields.items():
        reason = field.metadata.get("only_ours")
        words[name] = "yes" if reason is None else f"no: {reason}"
        if reason == SPLIT:
            words[name] = "*whole*"
        if decided(f"{path}.{name}") == ("data",) and reason is None:
            words[name] = "`data build`"
    return words | ({"background": "no: `async_save` decides"} if cls is Saving else {})


def section_table(cls: type, path: str = "") -> str:
    """Return the Markdown table of one section; of a section of ours, what MindFormers' trainer makes of a key too."""
    docs = field_docs(cls)
    is_own = path.partition(".")[0] == "telechat_moe"
    train = "MindFormers" if is_own else "`train`"
    readers = in_mindformers(path) if is_own else {}
    lines = [f"| key | value | default | {train} | meaning |", "|---|---|---|---|---|"]
    own = inspect.get_annotations(cls)  # a class's own fields before those that it inherits
    for field in sorted(section_keys(cls).fields.values(), key=lambda f: f.name not in own):
        others = cast("tuple[str, ...]", field.metadata.get("names", ()))
        also = f" Also `{'`, `'.join(others)}`." if others else ""
        reader = readers[field.name] if is_own else taken_text(field)
        cells = [f"`{field.name}`", describe(field.type), default_text(field), reader]
        cells.append(docs[field.name] + also)
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    return "\n".join(lines) + "\n"


def rules_table() -> str:
    """Return the Markdown table of the cross-field rules."""

    def rows(effects: bool) -> str:
        return "".join(
            f"| `{rule.__name__}` | {_cell(' '.join((rule.__doc__ or '').split()))} |\n"
            for rule in documented(effects=effects)
        )

    return RULES_INTRO + rows(False) + OWN_RULES_INTRO + rows(True)


def markdown() -> str:
    """Return the whole page."""
    parts = [INTRO]
    for path, cls in sections():
        says = re.sub(r"\n +", "\n", inspect.getdoc(cls) or "")
        title = f"`{path}`" if path else "The file"
        if path.startswith("callbacks[]") or path == "model.model_config":
            title += f": {cls.__name__}"
        parts.append(f"## {title}\n\n{says}\n\n{section_table(cls, path)}")
    parts.append(rules_table())
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(markdown())
