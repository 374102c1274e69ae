"""Read a sweep file: a recipe, the variants of it that are trained, and which of them are compared.

A variant is a list of overrides ``KEY=VALUE``. Every problem is reported at once with the line and key of the sweep file,
those of the variants' recipes included.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, cast

from telechat_moe.errors import BadInputError
from telechat_moe.recipe import Problem, Recipe, RecipeError, load
from telechat_moe.recipe.arithmetic import flops_per_token, parameters
from telechat_moe.recipe.check import Checker
from telechat_moe.recipe.fields import Count, Form, Fraction, Length, NonNegative, Text
from telechat_moe.recipe.load import shipped_dir
from telechat_moe.recipe.problems import label
from telechat_moe.recipe.tree import YamlEntry, YamlNode, read
from telechat_moe.recipe.uses import Use
from telechat_moe.tools.plan.cost.device import load_device

NAME = Form(r"[A-Za-z0-9][\w.=,+-]{0,99}", "a folder's name of letters, digits and . _ = , + -")
SEEDS = ("seed", "train_dataset.data_loader.config.seed")
"""Keys that a run's seed sets: initial weights, order of the samples."""
RUN_KEYS = {**dict.fromkeys(SEEDS, "seeds"), "output_dir": "output_dir"}
"""Keys that a sweep sets for each run, and the key of the sweep file that says how."""
OLD_KEYS = ("keys", "axes")
"""Keys of earlier sweep files, in which variants were the rows of a table or combinations of axes."""

Overrides = Sequence[str]
"""Overrides ``KEY=VALUE`` of a recipe, of which the last of a key counts."""


@dataclass(frozen=True, kw_only=True)
class EqualityLimits:
    """How far apart compared variants may be: largest over smallest, minus one."""

    parameters: Fraction | None = None
    active: Fraction | None = None
    flops: Fraction | None = None


@dataclass(frozen=True, kw_only=True)
class Study:
    """Variants that are compared with the first of them."""

    variants: Annotated[list[Text], Length(2)]
    equal: EqualityLimits = field(default_factory=EqualityLimits)
    about: str = ""


@dataclass(frozen=True, kw_only=True)
class LargerModel:
    """A recipe in which the variants' structures have their counterparts.

    Attributes:
        search_s: Seconds in which a layout is searched for each; 0: they have the recipe's own.
    """

    recipe: Text
    device: Text
    variants: dict[str, list[Text]]
    set: list[Text] = field(default_factory=list[str])
    search_s: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True)
class SweepKeys:
    """What a sweep file may say; docs/sweep.md describes each key."""

    recipe: Text
    output_dir: Text
    seeds: Annotated[list[Count], Length(1)]
    variants: dict[str, list[Text]]
    set: list[Text] = field(default_factory=list[str])
    studies: dict[str, Study] | None = None
    larger: dict[str, LargerModel] = field(default_factory=dict[str, LargerModel])


@dataclass(frozen=True)
class ModelSize:
    """What follows from a recipe alone.

    Attributes:
        parameters: Without multi-token prediction.
        active: Of these, those that a token uses.
        flops: Of training a token, multi-token prediction included.
    """

    parameters: int
    active: int
    flops: float

    @staticmethod
    def of(recipe: Recipe) -> "ModelSize":
        """Return the size of a recipe's model."""
        config = recipe.model_config
        totals = parameters(config).totals()
        flops = flops_per_token(config).training
        return ModelSize(totals["total_without_mtp"], totals["active_without_mtp"], flops)


@dataclass(frozen=True)
class SweepRun:
    """A variant with a seed."""

    variant: str
    seed: int
    folder: Path
    overrides: Overrides
    recipe: Recipe

    @property
    def name(self) -> str:
        """The variant and the seed, as messages name the run."""
        return f"{self.variant}, seed {self.seed}"


@dataclass(frozen=True)
class Sweep:
    """A sweep file that was read and found right.

    Attributes:
        lines: Line of each variant.
        larger: For each larger model the recipes of the variants' counterparts.
    """

    file: Path
    keys: SweepKeys
    lines: Mapping[str, int]
    sizes: Mapping[str, ModelSize]
    studies: Mapping[str, Study]
    runs: Sequence[SweepRun]
    larger: Mapping[str, Mapping[str, Recipe]]

    @property
    def output(self) -> Path:
        """The folder of the runs and of the report."""
        return Path(self.keys.output_dir)

    def problem(self, variant: str, problem: str, expected: str) -> Problem:
        """Return what is wrong with a variant."""
        line, key = self.lines[variant], f"variants.{variant}"
        return Problem(label(self.file), line, key, problem, expected)


def read_sweep(name: str) -> Sweep:
    """Read a sweep file, a path or one that comes with the package, and all recipes that it asks for.

    Raises:
        RecipeError: With every problem of the file and of its recipes.
    """
    return _SweepReader(_shipped().get(name, Path(name))).read()


def _shipped() -> dict[str, Path]:
    """Return the sweep files that come with the package, by name."""
    root = shipped_dir()
    return {p.relative_to(root).as_posix(): p for p in sorted(root.glob("sweeps/*/*.yaml"))}


class _SweepReader:
    def __init__(self, path: Path) -> None:
        self.path, self.file = path, label(path)
        self.problems: dict[Problem, None] = {}
        self.recipe_problems: set[Problem] = set()  # which the variants do not cause
        self.root = YamlNode("map", 1)

    def report(
        self, line: int, key: str, problem: str, expected: str, suggestion: str = ""
    ) -> None:
        self.problems[Problem(self.file, line, key, problem, expected, suggestion)] = None

    def stop_if_broken(self) -> None:
        if self.problems:
            raise RecipeError(list(self.problems))

    def entries(self, *path: str) -> list[YamlEntry]:
        """Return the entries of a section that has been checked; none if it is not written."""
        node = self.root
        for key in path:
            entry = node.get(key)
            if entry is None:
                return []
            node = entry.node
        return node.entries

    def read(self) -> Sweep:
        keys = self.keys()
        self.stop_if_broken()
        lines = {entry.key: entry.line for entry in self.entries("variants")}
        self.check_lists(keys, lines)
        self.stop_if_broken()
        runs = self.runs(keys, lines)
        self.stop_if_broken()
        recipes = {run.variant: run.recipe for run in runs}
        sizes = {variant: ModelSize.of(recipe) for variant, recipe in recipes.items()}
        larger = {name: self.counterparts(name, model) for name, model in keys.larger.items()}
        studies = keys.studies or {"all": Study(variants=list(lines))}
        for name, study in studies.items():
            self.check_study(name, study, sizes, larger)
        self.stop_if_broken()
        runs.sort(key=lambda run: keys.seeds.index(run.seed))
        return Sweep(self.path, keys, lines, sizes, studies, runs, larger)

    # ------------------------------------------------------------------------------------ text

    def keys(self) -> SweepKeys:
        """Return the file's keys, each of the right form."""
        root = None
        try:
            root = read(self.path.read_text(encoding="utf-8-sig"), self.report)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            expected = f"expected a file in UTF-8, or a shipped one: {', '.join(_shipped())}"
            self.report(0, "", f"cannot be read: {reason}", expected)
        if root is not None and root.kind != "map":
            self.report(root.line, "", root.show(), "a sweep file is a YAML map")
        self.stop_if_broken()
        assert root is not None
        self.root = root
        for entry in root.entries:
            if entry.key in OLD_KEYS:
                problem = "a table or axes, which earlier sweep files had"
                expected = "without it, each variant as a list of overrides, NAME: [KEY=VALUE, ...]"
                self.report(entry.line, entry.key, problem, expected)
        self.stop_if_broken()

        def report(
            entry: YamlEntry, key: str, problem: str, expected: str, suggestion: str
        ) -> None:
            expected = expected.replace("a recipe has", "a sweep file has")
            self.report(entry.line, key, problem, expected, suggestion)

        return cast(SweepKeys, Checker(report).section(YamlEntry("", 1, root), SweepKeys, ""))

    def check_lists(self, keys: SweepKeys, variants: Mapping[str, int]) -> None:
        """Report values that are there twice, names and devices that are none, and what no override may set."""
        self.check_once([(e.line, e.node.text) for e in self.entries("seeds")], "seeds")
        models = [("larger", name) for name in keys.larger]
        for path in ((), *models):
            rows = self.entries(*path, "variants")
            if not rows:
                self.report(1, ".".join([*path, "variants"]), "no variants", "one or more")
            overrides = [((*path, "set"), e) for e in self.entries(*path, "set")]
            overrides += [
                ((*path, "variants", row.key), e) for row in rows for e in row.node.entries
            ]
            for place, entry in overrides:
                key = str(entry.node.value).partition("=")[0]
                if key in RUN_KEYS:
                    expected = f"{RUN_KEYS[key]}, from which every run gets it"
                    self.report(entry.line, ".".join(place), f"sets {key}", expected)
            for row in rows:
                place = ".".join([*path, "variants", row.key])
                if not NAME.allows(row.key):
                    self.report(row.line, place, f"the name {row.key!r}", str(NAME))
                elif row.key not in variants:
                    expected = f"one of {', '.join(variants)}"
                    self.report(row.line, place, "no such variant", expected)
        for name, model in keys.larger.items():
            try:
                load_device(model.device)
            except BadInputError as error:
                line = next(e.line for e in self.entries("larger", name) if e.key == "device")
                self.report(line, f"larger.{name}.device", model.device, str(error))

    def check_once(self, values: Sequence[tuple[int, str]], key: str) -> None:
        """Report values, with their lines, that are there twice."""
        unique: set[str] = set()
        for line, value in values:
            if value in unique:
                self.report(line, key, f"{value} twice", "each once")
            unique.add(value)

    # --------------------------------------------------------------------------------- recipes

    def runs(self, keys: SweepKeys, lines: Mapping[str, int]) -> list[SweepRun]:
        """Return the runs of all variants, one for each seed."""
        runs: list[SweepRun] = []
        recipes: dict[str, str] = {}
        for name, overrides in keys.variants.items():
            for seed in keys.seeds:
                folder = Path(keys.output_dir, name, f"seed-{seed}")
                texts = [*keys.set, *overrides, *(f"{key}={seed}" for key in SEEDS)]
                texts.append(f"output_dir={json.dumps(str(folder))}")
                recipe = self.load(keys.recipe, texts, "train", (), name)
                if recipe is None:
                    break  # another seed has the same problems
                runs.append(SweepRun(name, seed, folder, texts, recipe))
                if seed == keys.seeds[0]:
                    content = json.dumps({**recipe.to_dict(), "output_dir": ""})
                    if (other := recipes.setdefault(content, name)) != name:
                        problem = f"the same recipe as {other}"
                        expected = "an override that differs, or one variant less"
                        self.report(lines[name], f"variants.{name}", problem, expected)
        return runs

    def load(
        self, base: str, overrides: Overrides, use: Use, path: tuple[str, ...], variant: str
    ) -> Recipe | None:
        """Return a variant's recipe, or report what is wrong at the line of the sweep file that says it."""
        try:
            return load(base, list(overrides), use=use)
        except RecipeError as error:
            sources = {
                f"--set {entry.node.value}": (".".join(place), entry.line)
                for place in ((*path, "set"), (*path, "variants", variant))
                for entry in self.entries(*place)
            }
            for p in error.problems:
                if p.file in sources:
                    place, line = sources[p.file]
                    key = f"{place}: {p.key or p.file}"
                    self.problems[replace(p, file=self.file, line=line, key=key)] = None
                elif p not in self.recipe_problems:  # other variants have it, too
                    self.recipe_problems.add(p)
                    problem = f"{p.found} (with {self.file}: {variant})"
                    self.problems[replace(p, found=problem)] = None
            return None

    def counterparts(self, name: str, model: LargerModel) -> dict[str, Recipe]:
        """Return the recipes of a larger model."""
        path = ("larger", name)
        recipes = {
            variant: self.load(model.recipe, [*model.set, *overrides], "plan", path, variant)
            for variant, overrides in model.variants.items()
        }
        return {variant: recipe for variant, recipe in recipes.items() if recipe is not None}

    def check_study(
        self,
        name: str,
        study: Study,
        sizes: Mapping[str, ModelSize],
        larger: Mapping[str, Mapping[str, Recipe]],
    ) -> None:
        """Report variants that are not there, and those that are not equal in what has to be."""
        line = next((e.line for e in self.entries("studies") if e.key == name), 1)
        key = f"studies.{name}"
        self.check_once([(line, variant) for variant in study.variants], f"{key}.variants")
        for variant in study.variants:
            if variant not in sizes:
                expected = f"one of {', '.join(sizes)}"
                self.report(line, f"{key}.variants", f"{variant}, no such variant", expected)
        groups = {"": sizes} | {
            f"larger.{model}: ": {v: ModelSize.of(recipe) for v, recipe in recipes.items()}
            for model, recipes in larger.items()
        }
        for measure, limit in vars(study.equal).items():
            for group, members in groups.items():
                values = {v: getattr(members[v], measure) for v in study.variants if v in members}
                if limit is None or len(values) < 2:
                    continue
                low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
                apart = values[high] / values[low] - 1
                if apart > limit:
                    problem = f"{group}{low} has {values[low]:,.0f}, {high} {values[high]:,.0f}, {apart:.2%} more"
                    expected = f"at most {limit:.2%} more"
                    self.report(line, f"{key}.equal.{measure}", problem, expected)
