"""Edits YAML text in place by dotted path, through PyYAML's own node marks.

Independent of telechat_moe.recipe: the tests use it to make mutants and to say on which line a
problem must be reported.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def recipe_text(name: str) -> str:
    return (RECIPES / name).read_text(encoding="utf-8")


def compose(text: str) -> Any:
    return yaml.compose(text, Loader=yaml.CSafeLoader)


def step(node: Any, part: str) -> tuple[Any, Any] | None:
    """Return (key node, value node) of one step down, or None."""
    if isinstance(node, yaml.MappingNode):
        return next(((k, v) for k, v in node.value if k.value == part), None)
    if isinstance(node, yaml.SequenceNode) and int(part) < len(node.value):
        return node.value[int(part)], node.value[int(part)]
    return None


def lookup(text: str, path: str) -> tuple[Any, Any] | None:
    node, found = compose(text), None
    for part in path.split("."):
        found = step(node, part)
        if found is None:
            return None
        node = found[1]
    return found


def line_of(text: str, path: str) -> int:
    """Line of the key (or list item); of the nearest section above that exists otherwise."""
    parts = path.split(".")
    while parts:
        found = lookup(text, ".".join(parts))
        if found is not None:
            return found[0].start_mark.line + 1
        parts.pop()
    return 1


def put(text: str, path: str, value: str) -> str:
    """Write ``value`` (YAML, one line) at ``path``; a missing key is added to its section."""
    found = lookup(text, path)
    if found is not None:
        key, node = found
        alias = re.compile(r": *(\*\w+)").match(text, key.end_mark.index)
        if alias:
            return text[: alias.start(1)] + value + text[alias.end(1) :]
        start, end = node.start_mark.index, node.end_mark.index
        tail = ""
        if not isinstance(node, yaml.ScalarNode) and not node.flow_style:
            end, tail = text.rfind("\n", 0, end) + 1, "\n"  # a block ends where the next begins
            start = len(text[:start].rstrip(" \n"))
        word = text[start:end].strip().split(" ")[0]
        keep = word + " " if word.startswith("&") else ""
        space = "" if text[start - 1] in " [{" else " "
        return text[:start] + space + keep + value + tail + text[end:]
    above, _, key = path.rpartition(".")
    if not above:
        return f"{text.rstrip()}\n{key}: {value}\n"
    found = lookup(text, above)
    if found is None or not isinstance(found[1], yaml.MappingNode):
        return put(text, above, "{" + f"{key}: {value}" + "}")
    first = found[1].value[0][0].start_mark
    pad = " " * first.column
    return f"{text[: first.index]}{key}: {value}\n{pad}{text[first.index :]}"


def remove(text: str, path: str) -> str:
    """Remove a key with its value."""
    found = lookup(text, path)
    assert found is not None, path
    key, value = found
    lines = text.splitlines(keepends=True)
    first = key.start_mark.line
    last = value.end_mark.line + 1
    if not isinstance(value, yaml.ScalarNode) and not value.flow_style:
        last -= 1  # a block ends where the next begins
    if text[key.end_mark.index :].startswith(": *"):
        last = first + 1
    line = lines[first]
    if line.lstrip().startswith("- "):  # the key stands on the line of a list item
        lines[first] = line[: len(line) - len(line.lstrip())] + "- \n"
        first += 1
    return "".join(lines[:first] + lines[max(last, first) :])
