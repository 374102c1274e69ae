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
from pathlib import Path
from typing import Any, cast

import yaml

from telechat_moe.narrowing import is_object
from telechat_moe.reading import parse_json
from telechat_moe.recipe import mode1, rules
from telechat_moe.recipe.check import Checker, section_keys
from telechat_moe.recipe.mode1 import kinds
from telechat_moe.recipe.problems import Missing, Problem, RecipeError
from telechat_moe.recipe.reader import RecipeReader, mark
from telechat_moe.recipe.schema import Recipe
from telechat_moe.recipe.schema.model import DEEPSEEK_V3, OTHER_TYPES, ModelConfig, OtherModelConfig
from telechat_moe.recipe.tree import YamlEntry, YamlNode, locate, read
from telechat_moe.recipe.uses import USES, Use, idle_overrides, unread

Look = Callable[[Recipe, Sequence[Problem]], Iterable[Problem]]
"""Yields what else is wrong with a recipe, such as files that are not there; values with problems are missing from it."""


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
    plain = loader.mode0(text, overrides).plain()
    if loader.problems:
        raise loader.error()
    return plain


class _Loader(RecipeReader):
    """Load one file and collect its problems."""

    def __init__(self, path: Path, use: Use | None = None, look: Look | None = None) -> None:
        super().__init__(path)
        self.use: Use | None = use
        self.look = look

    def load(self, overrides: Sequence[str], devices: int | None) -> Recipe:
        return self.parse(self.text(), overrides, devices)

    def parse(self, text: str, overrides: Sequence[str], devices: int | None) -> Recipe:
        recipe = self._resolve(self.mode0(text, overrides), devices)
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

    def mode0(self, text: str, overrides: Sequence[str]) -> YamlNode:
        """Return the tree of a recipe of mode 0, for the planner also the translation of another."""
        root = self.tree(text, overrides)
        kind = kinds.kind_of(root)
        if kind == "mode 1" and self.use == "plan":
            return self._translated(text, overrides)
        if refusal := kinds.refusal(root, kind):
            raise RecipeError([Problem(self.file, *refusal)])
        return root

    def _translated(self, text: str, overrides: Sequence[str]) -> YamlNode:
        """Return the tree of what a recipe of mode 1 says in the words of mode 0; overrides may be of both."""
        late = [o for o in overrides if kinds.is_mode0(o)]
        early = [o for o in overrides if o not in late]
        dynamic = mode1.loads(text, early, path=self.path)
        sections = yaml.safe_dump(mode1.priced(dynamic), sort_keys=False)
        self.file += ", translated to mode 0"
        root = self.tree(sections, ())
        mark(root, self.file)
        for override in late:
            self._override(root, override)
        return root

    def _resolve(self, root: YamlNode, devices: int | None) -> Recipe:
        model_class = _complete_model(root)
        top = YamlEntry("", 1, root)

        def choose(options: tuple[Any, ...]) -> type | None:
            return model_class if ModelConfig in options else None

        recipe = cast(Recipe, Checker(self.report_entry, choose).section(top, Recipe, ""))
        object.__setattr__(recipe, "source", self.path)
        object.__setattr__(recipe, "given", root.plain())
        object.__setattr__(recipe, "tree", top)
        missing = Missing(bool(self.problems))
        for key, *problem in rules.broken(recipe, devices, missing):
            self.report_entry(locate(top, key), key, *problem)
        if self.use is not None:  # what a use does not do
            for key, *problem in missing.until(unread(recipe, self.use, missing)):
                self.report_entry(locate(top, key), key, *problem)
        if self.look is not None:
            for p in self.look(recipe, list(self.problems.values())):
                self.problems.setdefault((p.file, p.line, p.key, p.found), p)
        if self.problems:
            problems = _of_old_network(root, list(self.problems.values()))
            raise RecipeError(problems, _hidden(problems, missing))
        return recipe


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
        mark(node, origin)
        section.entries += node.entries
