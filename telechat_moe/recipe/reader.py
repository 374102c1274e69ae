"""Read the file of a recipe into a tree, with overrides put in and every problem collected; its meaning is not looked at."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import yaml

from telechat_moe.narrowing import is_object
from telechat_moe.reading import JsonError, parse_json
from telechat_moe.recipe.problems import Problem, RecipeError, label
from telechat_moe.recipe.tree import YamlEntry, YamlNode, read

COMPUTED_WITH = "computed_with"
"""Key of a run's ``recipe.json`` that says what computed it: a record, not a setting."""


class RecipeReader:
    """Read one file and collect its problems."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: str = label(path)
        self.problems: dict[tuple[str, int, str, str], Problem] = {}

    def report(
        self, file: str, line: int, key: str, found: str, expected: str, suggestion: str = ""
    ) -> None:
        """Add a problem; one that is known counts once."""
        problem = Problem(file, line, key, found, expected, suggestion)
        self.problems.setdefault((file, line, key, found), problem)

    def report_entry(self, entry: YamlEntry, key: str, *problem: str) -> None:
        """Report what was found and expected, with a suggestion or without, where a value comes from."""
        origin = entry.node.origin
        self.report(origin or self.file, 0 if origin else entry.line, key, *problem)

    def error(self) -> RecipeError:
        """Return the error that has all problems."""
        return RecipeError(list(self.problems.values()))

    def text(self) -> str:
        """Return the file as YAML.

        Raises:
            RecipeError: It cannot be read.
        """
        data = b""
        try:
            data = self.path.read_bytes()
            return self._yaml(data.decode("utf-8-sig"))
        except OSError as error:
            self.report(self.file, 0, "", f"cannot be read: {error.strerror}", "a readable file")
        except UnicodeDecodeError as error:
            line = data[: error.start].count(b"\n") + 1
            self.report(self.file, line, "", "a byte that is not UTF-8", "save the file as UTF-8")
        raise self.error()

    def _yaml(self, text: str) -> str:
        """Return the text of a JSON file as YAML, which would read its floats without a point (1e-08) as text."""
        if self.path.suffix != ".json":
            return text
        try:
            read = parse_json(text)
            if is_object(read):
                read.pop(COMPUTED_WITH, None)
            return yaml.safe_dump(read, sort_keys=False)
        except JsonError as error:
            self.report(self.file, error.line, "", f"no JSON ({error})", "the recipe.json of a run")
            raise self.error() from error

    def tree(self, text: str, overrides: Sequence[str]) -> YamlNode:
        """Return the tree of YAML text with overrides put in; see `telechat_moe.recipe.load`."""
        root = read(text, partial(self.report, self.file))
        if root is not None and root.kind != "map":
            self.report(self.file, root.line, "", root.show(), "a recipe is a YAML map")
            root = None
        if root is None:
            raise self.error()
        for override in overrides:
            self._override(root, override)
        return root

    def _override(self, root: YamlNode, text: str) -> None:
        origin = f"--set {text}"
        key, equals, value = text.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            self.report(origin, 0, "", "not of the form a.b=c", "name a key and its value")
            return

        def in_value(line: int, below: str, found: str, expected: str) -> None:
            self.report(origin, 0, key, found, expected)

        node = read(value if value.strip() else "null", in_value)
        if node is None:
            return
        mark(node, origin)
        if refusal := _put(root, parts, node, origin):
            self.report(origin, 0, key, *refusal)


def mark(node: YamlNode, origin: str) -> None:
    """Say of all values of a tree where they come from."""
    node.origin = origin
    for entry in node.entries:
        mark(entry.node, origin)


def _put(node: YamlNode, parts: list[str], new: YamlNode, origin: str) -> tuple[str, str] | None:
    """Put a value into the tree; return (found, expected) if that is not possible."""
    shared = False  # past an alias everything must be copied before it is changed
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        entry = node.get(part)
        if entry is None and node.kind == "list":
            count = len(node.entries)
            return f"no item {part} in a list of {count}", f"an index from 0 to {count - 1}"
        if node.kind not in ("map", "list"):
            return f"{'.'.join(parts[:depth])} is {node.show()}", "a key of a section"
        if entry is None:
            fresh = new if last else YamlNode("map", 0, origin=origin)
            node.entries.append(YamlEntry(part, 0, fresh))
            node = fresh
            continue
        shared = shared or entry.alias
        if shared:
            entries = [replace(e) for e in entry.node.entries]
            entry.node, entry.alias = replace(entry.node, entries=entries), False
        if last:
            entry.node.become(new)
        node = entry.node
    return None
