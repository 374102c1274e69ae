"""Load a recipe strictly: every problem of the file is reported at once, nothing is guessed.

Example:
    >>> from telechat_moe.recipe import load
    >>> recipe = load("telechat3_moe/pretrain_tiny.yaml", ["runner_config.epochs=2"])
    >>> recipe.model_config.hidden_size
    128
"""

import difflib
import importlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import yaml

from telechat_moe.narrowing import is_object
from telechat_moe.reading import JsonError, parse_json
from telechat_moe.recipe import rules
from telechat_moe.recipe.check import Checker, section_keys
from telechat_moe.recipe.problems import Missing, Problem, RecipeError, label
from telechat_moe.recipe.schema import Recipe
from telechat_moe.recipe.schema.model import DEEPSEEK_V3, OTHER_TYPES, ModelConfig, OtherModelConfig
from telechat_moe.recipe.tree import YamlEntry, YamlNode, locate, read
from telechat_moe.recipe.uses import USES, Use, idle_overrides, unread

Look = Callable[[Recipe, Sequence[Problem]], Iterable[Problem]]
"""Yields what else is wrong with a recipe, such as files that are not there; values with problems are missing from it."""
COMPUTED_WITH = "computed_with"
"""Key of a run's ``recipe.json`` that says what computed it: a record, not a setting."""


def shipped_dir() -> Path:
    """Return the folder of the recipes that come with the package."""
    shipped = importlib.import_module("telechat_moe.recipes")
    return Path(cast(str, shipped.__file__)).parent


def schema_file() -> Path:
    """Return the published JSON schema of recipes."""
    return shipped_dir() / "schema.json"


def shipped_names() -> list[str]:
    """Return the names of the recipes that come with the package, ``<family>/<file>.yaml``."""
    root = shipped_dir()
    return sorted(p.relative_to(root).as_posix() for p in root.glob("*/*.yaml"))


def find(name: str | os.PathLike[str]) -> Path:
    """Return the file of a recipe.

    Args:
        name: Name of a shipped recipe, with or without ``.yaml``, or a path.

    Raises:
        RecipeError: If there is no such recipe.
    """
    text = os.fspath(name)
    for shipped in shipped_names():
        if text in (shipped, shipped.removesuffix(".yaml")):
            return shipped_dir() / shipped
    path = Path(text)
    try:
        problem_text = "a folder" if path.is_dir() else "not found"
        if path.is_file():
            return path
    except OSError as error:  # a name that is too long, a folder that may not be read
        problem_text = error.strerror or str(error)
    ends = {form: shipped for shipped in shipped_names() for form in (shipped, Path(shipped).name)}
    matches = difflib.get_close_matches(text.removesuffix(".yaml") + ".yaml", ends, 1, 0.8)
    expected = "expected a file, or a recipe that `telechat-moe ls` lists"
    suggestion = "".join(ends[form] for form in matches)
    raise RecipeError([Problem(text, 0, "", problem_text, expected, suggestion)])


def load(
    name: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    devices: int | None = None,
    use: Use | None = None,
    look: Look | None = None,
) -> Recipe:
    """Load, check and resolve a recipe.

    Args:
        name: Name of a shipped recipe (``telechat3_moe/pretrain_tiny.yaml``) or a path, also of a run's ``recipe.json``.
        overrides: Settings ``a.b=c`` that replace what the file says; ``c`` is YAML, list items
            are named by index. An override of an anchored value also holds where the anchor is
            used; an override of an alias holds only there.
        devices: Number of devices that the recipe is meant to run on, checked if given.
        use: What the recipe is for: a key that asks for something which that use will not do is a problem.
            ``written``: what its trainer and device say (:func:`~telechat_moe.recipe.uses.use_of`). None: not judged.
        look: Looks at what is beside the recipe; its problems are reported with all others.

    Raises:
        RecipeError: With every problem found.
    """
    return _Loader(find(name), use, look).load(overrides, devices)


def loads(
    text: str, overrides: Sequence[str] = (), *, name: str = "<text>", use: Use | None = None
) -> Recipe:
    """Load a recipe from text; see `load`."""
    return _Loader(Path(name), use).parse(text, overrides, None)


def sections(text: str, overrides: Sequence[str] = (), *, name: str = "<text>") -> dict[str, Any]:
    """Return what YAML text says with overrides put in, its meaning unchecked; see `load`.

    For programs with rules of their own, such as MindFormers.
    """
    loader = _Loader(Path(name))
    plain = loader.tree(text, overrides).plain()
    if loader.problems:
        raise loader.error()
    return plain


class _Loader:
    """Load one file and collect its problems."""

    def __init__(self, path: Path, use: Use | None = None, look: Look | None = None) -> None:
        self.path, self.file, self.look = path, label(path), look
        self.use: Use | None = use
        self.problems: dict[tuple[str, int, str, str], Problem] = {}

    def report(
        self, file: str, line: int, key: str, found: str, expected: str, suggestion: str = ""
    ) -> None:
        problem = Problem(file, line, key, found, expected, suggestion)
        self.problems.setdefault((file, line, key, found), problem)

    def error(self) -> RecipeError:
        return RecipeError(list(self.problems.values()))

    def load(self, overrides: Sequence[str], devices: int | None) -> Recipe:
        data = b""
        try:
            data = self.path.read_bytes()
            text = data.decode("utf-8-sig")
        except OSError as error:
            self.report(self.file, 0, "", f"cannot be read: {error.strerror}", "a readable file")
        except UnicodeDecodeError as error:
            line = data[: error.start].count(b"\n") + 1
            self.report(self.file, line, "", "a byte that is not UTF-8", "save the file as UTF-8")
        else:
            return self.parse(self._yaml(text), overrides, devices)
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

    def parse(self, text: str, overrides: Sequence[str], devices: int | None) -> Recipe:
        recipe = self._resolve(self.tree(text, overrides), devices)
        if self.use is None:
            return recipe
        for idle in idle_overrides(recipe, self.use):
            others = [override for override in overrides if override != idle]
            try:
                _Loader(self.path).parse(text, others, devices)
            except RecipeError:
                continue  # it makes the recipe consistent
            text_found = f"an override that {USES[self.use]} does not read"
            self.report(f"--set {idle}", 0, idle.partition("=")[0], text_found, "remove it")
        if self.problems:
            raise self.error()
        return recipe

    def tree(self, text: str, overrides: Sequence[str]) -> YamlNode:
        root = read(text, partial(self.report, self.file))
        if root is not None and root.kind != "map":
            self.report(self.file, root.line, "", root.show(), "a recipe is a YAML map")
            root = None
        if root is None:
            raise self.error()
        for override in overrides:
            self._override(root, override)
        return root

    def _resolve(self, root: YamlNode, devices: int | None) -> Recipe:
        model_class = _complete_model(root)
        top = YamlEntry("", 1, root)

        def at(entry: YamlEntry, key: str, found: str, expected: str, suggestion: str) -> None:
            origin = entry.node.origin
            line = 0 if origin else entry.line
            self.report(origin or self.file, line, key, found, expected, suggestion)

        def choose(options: tuple[Any, ...]) -> type | None:
            return model_class if ModelConfig in options else None

        recipe = cast(Recipe, Checker(at, choose).section(top, Recipe, ""))
        object.__setattr__(recipe, "source", self.path)
        object.__setattr__(recipe, "given", root.plain())
        object.__setattr__(recipe, "tree", top)
        missing = Missing(bool(self.problems))
        for key, found, expected in rules.broken(recipe, devices, missing):
            at(locate(top, key), key, found, expected, "")
        if self.use is not None:  # what a use does not do
            for key, found, expected in missing.until(unread(recipe, self.use, missing)):
                at(locate(top, key), key, found, expected, "")
        if self.look is not None:
            for p in self.look(recipe, list(self.problems.values())):
                self.problems.setdefault((p.file, p.line, p.key, p.found), p)
        if self.problems:
            problems = _of_old_network(root, list(self.problems.values()))
            raise RecipeError(problems, _hidden(problems, missing))
        return recipe

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
        _mark(node, origin)
        if refusal := _put(root, parts, node, origin):
            self.report(origin, 0, key, *refusal)


def _hidden(problems: Sequence[Problem], missing: Missing) -> dict[str, str]:
    """Return the keys whose problems hide what else may be wrong, and that they do."""
    reason = "what follows from it"
    keys = {p.key: p.suggestion or p.key for p in problems}
    return {key: reason for key, meant in keys.items() if meant.rpartition(".")[2] in missing.names}


def _of_old_network(root: YamlNode, problems: list[Problem]) -> list[Problem]:
    """Return the problem that matters in a recipe of MindFormers' old networks, else all."""
    first = [problem for problem in problems if problem.key == "use_legacy"]
    model = root.get("model")
    config = model.node.get("model_config") if model else None
    old = [config.node.get("type") if config else None, model.node.get("arch") if model else None]
    if not first or not any(old):
        return problems
    reason = "a recipe of MindFormers' old networks (model.arch, model.model_config.type)"
    expected = "only recipes of the new ones can be checked: use_legacy: False and model.model_config.model_type"
    return [replace(first[0], found=f"{first[0].found}; {reason}", expected=expected)]


def _mark(node: YamlNode, origin: str) -> None:
    node.origin = origin
    for entry in node.entries:
        _mark(entry.node, origin)


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


def _text(root: YamlNode, key: str) -> str:
    """Return the text that is written for a dotted key; empty: none."""
    entry = locate(YamlEntry("", 1, root), key)
    return entry.node.value if entry.node.kind == "str" and key.endswith(entry.key) else ""


def _complete_model(root: YamlNode) -> type:
    """Fill in model keys from Hugging Face's configuration or MindFormers' defaults; return the section's class."""
    section = locate(YamlEntry("", 1, root), "model.model_config")
    kind, folder = _text(root, "model.model_config.model_type"), _text(root, "pretrained_model_dir")
    if section.key != "model_config" or section.node.kind != "map":
        return ModelConfig
    if folder:
        _fill(section.node, *_hugging_face(folder))
        have = {e.key for e in section.node.entries}
        if not section_keys(ModelConfig).required <= have:
            return OtherModelConfig
    elif kind == "deepseek_v3":
        _fill(section.node, DEEPSEEK_V3, "MindFormers' default for deepseek_v3")
    return OtherModelConfig if kind in OTHER_TYPES else ModelConfig


def _hugging_face(folder: str) -> tuple[dict[str, object], str]:
    """Return what the Hugging Face configuration in ``folder`` says about known keys."""
    path = Path(folder) / "config.json"
    try:
        fields = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}, ""
    keys = {*section_keys(ModelConfig).names, *section_keys(OtherModelConfig).names}
    if not is_object(fields):
        return {}, ""
    rope = fields.get("rope_parameters")  # transformers 5
    if is_object(rope) and "rope_theta" in rope:
        fields.setdefault("rope_theta", rope["rope_theta"])
    return {k: v for k, v in fields.items() if k in keys}, str(path)


def _fill(section: YamlNode, values: dict[str, object], origin: str) -> None:
    """Add keys that are not written, as if YAML said them."""
    have = {e.key for e in section.entries}
    missing = {key: value for key, value in values.items() if key not in have}
    text = yaml.safe_dump(missing, sort_keys=False, allow_unicode=True)
    node = read(text, lambda line, key, found, expected: None)
    if node is not None:
        _mark(node, origin)
        section.entries += node.entries
