"""Read a sweep file: a recipe, the variants of it that are trained, and which of them are compared.

Every problem is reported at once with the line and key of the sweep file, those of the variants' recipes included.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
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
OWN = {**dict.fromkeys(SEEDS, "seeds"), "output_dir": "output_dir"}
"""Keys that a sweep sets for each run, and the key of the sweep file that says how."""


@dataclass(frozen=True, kw_only=True)
class Equal:
    """How far apart compared variants may be: largest over smallest, minus one."""

    parameters: Fraction | None = None
    active: Fraction | None = None
    flops: Fraction | None = None


@dataclass(frozen=True, kw_only=True)
class Study:
    """Variants that are compared with the first of them."""

    variants: Annotated[list[Text], Length(2)]
    equal: Equal = field(default_factory=Equal)
    about: str = ""


@dataclass(frozen=True, kw_only=True)
class LargerKeys:
    """A recipe in which the variants' structures have their counterparts, each a row of values of ``keys``."""

    recipe: Text
    device: Text
    variants: dict[str, list[object]]
    set: dict[str, object] = field(default_factory=dict[str, object])
    search_s: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True)
class SweepKeys:
    """What a sweep file may say; docs/sweep.md describes each key."""

    recipe: Text
    output_dir: Text
    seeds: Annotated[list[Count], Length(1)]
    set: dict[str, object] = field(default_factory=dict[str, object])
    keys: list[Text] | None = None
    variants: dict[str, list[object]] | None = None
    axes: dict[str, Annotated[list[object], Length(1)]] | None = None
    studies: dict[str, Study] | None = None
    larger: dict[str, LargerKeys] = field(default_factory=dict[str, LargerKeys])


@dataclass(frozen=True)
class Setting:
    """A setting ``KEY=VALUE`` of a recipe, and the key and line of the sweep file that say it."""

    text: str
    at: str
    line: int


@dataclass(frozen=True)
class Size:
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
    def of(recipe: Recipe) -> "Size":
        """Return the size of a recipe's model."""
        config = recipe.model_config
        totals = parameters(config).totals()
        flops = flops_per_token(config).training
        return Size(totals["total_without_mtp"], totals["active_without_mtp"], flops)


@dataclass(frozen=True)
class Variant:
    """A row of settings: a structure that is trained or predicted."""

    name: str
    settings: tuple[Setting, ...]
    at: str
    line: int

    def plain(self) -> dict[str, str]:
        """Return its settings as plain data."""
        return dict(setting.text.split("=", 1) for setting in self.settings)


@dataclass(frozen=True)
class Run:
    """A variant with a seed."""

    variant: str
    seed: int
    folder: Path
    overrides: tuple[str, ...]
    recipe: Recipe

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"{self.variant}, seed {self.seed}"


@dataclass(frozen=True)
class Larger:
    """A larger recipe with the counterpart of each variant that has one.

    Attributes:
        search_s: Seconds in which a layout is searched for each; 0: they have the recipe's own.
        settings, overrides, recipes: Of each variant; overrides are its settings after those of all.
    """

    name: str
    recipe: str
    device: str
    search_s: float
    settings: dict[str, dict[str, str]]
    overrides: dict[str, tuple[str, ...]]
    recipes: dict[str, Recipe]


@dataclass(frozen=True)
class Sweep:
    """A sweep file that was read and found right."""

    file: Path
    base: str
    output: Path
    variants: dict[str, Variant]
    sizes: dict[str, Size]
    studies: dict[str, Study]
    runs: list[Run]
    larger: list[Larger]

    def problem(self, variant: str, found: str, expected: str) -> Problem:
        """Return what is wrong with a variant."""
        v = self.variants[variant]
        return Problem(file=label(self.file), line=v.line, key=v.at, found=found, expected=expected)


def find_sweep(name: str) -> Path:
    """Return a sweep file: a path, or one that comes with the package.

    Raises:
        RecipeError: There is no such file.
    """
    root = shipped_dir()
    shipped = {p.relative_to(root).as_posix(): p for p in sorted(root.glob("sweeps/*/*.yaml"))}
    if name in shipped:
        return shipped[name]
    try:
        if Path(name).is_file():
            return Path(name)
        found = "a folder" if Path(name).is_dir() else "not found"
    except OSError as error:  # a name that is too long, a folder that may not be read
        found = error.strerror or str(error)
    expected = f"expected a sweep file, or a shipped one: {', '.join(shipped)}"
    raise RecipeError([Problem(file=name, line=0, key="", found=found, expected=expected)])


def read_sweep(name: str) -> Sweep:
    """Read a sweep file and all recipes that it asks for.

    Raises:
        RecipeError: With every problem of the file and of its recipes.
    """
    return _Reader(find_sweep(name)).read()


class _Reader:
    """Reads one sweep file and collects its problems."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, label(path)
        self.problems: dict[Problem, None] = {}
        self.elsewhere: set[Problem] = set()
        self.top = YamlEntry("", 1, YamlNode("map", 1))

    def say(self, line: int, key: str, found: str, expected: str, near: str = "") -> None:
        self.problems[
            Problem(
                file=self.file, line=line, key=key, found=found, expected=expected, suggestion=near
            )
        ] = None

    def stop_if_broken(self) -> None:
        if self.problems:
            raise RecipeError(list(self.problems))

    def below(self, *path: str) -> list[YamlEntry]:
        """Return the entries of a section that has been checked; none if it is not written."""
        node = self.top.node
        for part in path:
            entry = node.get(part)
            if entry is None:
                return []
            node = entry.node
        return node.entries

    def read(self) -> Sweep:
        keys = self.keys()
        self.stop_if_broken()
        variants = {v.name: v for v in (self.crossed() if keys.axes else self.table("variants"))}
        self.lines(keys)
        common = self.settings("set")
        self.stop_if_broken()
        recipes = self.train(keys, common, variants)
        self.stop_if_broken()
        sizes = {name: Size.of(runs[0].recipe) for name, runs in recipes.items()}
        larger = [self.larger(name, one, variants) for name, one in keys.larger.items()]
        studies = keys.studies or {"all": Study(variants=list(variants))}
        for name, study in studies.items():
            self.study(name, study, sizes, larger)
        self.stop_if_broken()
        runs = [run for same in recipes.values() for run in same]
        return Sweep(
            *(self.path, keys.recipe, Path(keys.output_dir), variants, sizes, studies),
            sorted(runs, key=lambda run: keys.seeds.index(run.seed)),
            larger,
        )

    # ------------------------------------------------------------------------------------ text

    def keys(self) -> SweepKeys:
        """Return the file's keys, each of the right form."""
        text = ""
        try:
            text = self.path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            self.say(0, "", f"cannot be read: {error}", "a readable file in UTF-8")
        self.stop_if_broken()
        root = read(text, self.say)
        if root is not None and root.kind != "map":
            self.say(root.line, "", root.show(), "a sweep file is a YAML map")
        self.stop_if_broken()
        assert root is not None
        self.top = YamlEntry("", 1, root)

        def report(entry: YamlEntry, key: str, found: str, expected: str, near: str) -> None:
            said = expected.replace("a recipe has", "a sweep file has")
            self.say(entry.line, key, found, said, near)

        return cast(SweepKeys, Checker(report).section(self.top, SweepKeys, ""))

    def lines(self, keys: SweepKeys) -> None:
        """Report keys that do not go together, and values that are written twice."""
        line = {entry.key: entry.line for entry in self.top.node.entries}
        both = {"keys", "variants"} & line.keys() if "axes" in line else ()
        for key in both:
            self.say(line[key], key, "together with axes", "the one or the other")
        if not both and not keys.axes and not (keys.keys and keys.variants):
            self.say(1, "variants", "is missing", "keys and variants, or axes")
        columns = {*(keys.keys or ()), *(keys.axes or ())}
        for path in (("set",), *(("larger", name, "set") for name in keys.larger)):
            for entry in self.below(*path):
                if entry.key in columns:
                    expected = "one of the two: each variant has its own value"
                    at = ".".join([*path, entry.key])
                    self.say(entry.line, at, "also in keys or axes", expected)
        for name in ("keys", "seeds"):
            seen: set[str] = set()
            for entry in self.below(name):
                if entry.node.text in seen:
                    self.say(entry.line, name, f"{entry.node.text} twice", "each once")
                seen.add(entry.node.text)

    def setting(self, key: str, value: YamlEntry, at: str) -> Setting:
        """Return the setting of a recipe's key to a value of the file."""
        if key in OWN:
            self.say(value.line, at, f"sets {key}", f"{OWN[key]}, from which every run gets it")
        return Setting(f"{key}={_yaml(value.node)}", at, value.line)

    def settings(self, *path: str) -> tuple[Setting, ...]:
        """Return what a section ``set`` says."""
        at = ".".join(path)
        return tuple(self.setting(e.key, e, f"{at}.{e.key}") for e in self.below(*path))

    def named(self, name: str, line: int, at: str) -> bool:
        """Return whether a variant's name can be a folder's; report it if not."""
        if not NAME.allows(name):
            self.say(line, at, f"the name {name!r}", f"{NAME}; give names with keys and variants")
        return NAME.allows(name)

    def table(self, *path: str) -> Iterator[Variant]:
        """Yield the rows of a table whose columns ``keys`` names."""
        titles = [str(entry.node.value) for entry in self.below("keys")]
        for row in self.below(*path):
            at = ".".join([*path, row.key])
            cells = row.node.entries
            if not self.named(row.key, row.line, at):
                continue
            if len(cells) != len(titles):
                found = f"a row of {len(cells)} values"
                self.say(row.line, at, found, f"{len(titles)} values, one for each of keys")
                continue
            found = (self.setting(key, cell, at) for key, cell in zip(titles, cells, strict=True))
            yield Variant(row.key, tuple(found), at, row.line)

    def crossed(self) -> Iterator[Variant]:
        """Yield every combination of the axes, named after its values."""
        axes = self.below("axes")
        ends = [axis.key.rpartition(".")[2] for axis in axes]
        columns: list[list[tuple[str, Setting]]] = []
        for axis, end in zip(axes, ends, strict=True):
            at, name = f"axes.{axis.key}", end if ends.count(end) == 1 else axis.key
            column = [self.setting(axis.key, value, at) for value in axis.node.entries]
            columns.append([(f"{name}={s.text.partition('=')[2]}", s) for s in column])
        names: set[str] = set()
        for chosen in product(*columns):
            name = ",".join(said for said, _ in chosen)
            first = chosen[0][1]
            if name in names:
                self.say(first.line, first.at, f"{name} twice", "each value of an axis once")
            elif self.named(name, first.line, first.at):
                yield Variant(name, tuple(s for _, s in chosen), first.at, first.line)
            names.add(name)

    # --------------------------------------------------------------------------------- recipes

    def train(
        self, keys: SweepKeys, common: tuple[Setting, ...], variants: dict[str, Variant]
    ) -> dict[str, list[Run]]:
        """Return the runs of each variant, one for each seed."""
        runs: dict[str, list[Run]] = {}
        same: dict[str, str] = {}
        for v in variants.values():
            for seed in keys.seeds:
                folder = Path(keys.output_dir, v.name, f"seed-{seed}")
                own = [*(f"{key}={seed}" for key in SEEDS), f"output_dir={json.dumps(str(folder))}"]
                settings = (*common, *v.settings)
                recipe = self.load(keys.recipe, settings, own, "train", v.at)
                if recipe is None:
                    break  # another seed has the same problems
                overrides = (*(s.text for s in settings), *own)
                runs.setdefault(v.name, []).append(Run(v.name, seed, folder, overrides, recipe))
            else:
                text = json.dumps({**runs[v.name][0].recipe.to_dict(), "output_dir": ""})
                if (other := same.setdefault(text, v.name)) != v.name:
                    found = f"the same recipe as {other}"
                    self.say(v.line, v.at, found, "a setting that differs, or one variant less")
        return runs

    def load(
        self, base: str, settings: Sequence[Setting], own: Sequence[str], use: Use, at: str
    ) -> Recipe | None:
        """Return a recipe, or report what is wrong at the line of the sweep file that says it."""
        try:
            return load(base, [*(s.text for s in settings), *own], use=use)
        except RecipeError as error:
            said = {f"--set {s.text}": s for s in settings}
            for p in error.problems:
                if s := said.get(p.file):
                    key = f"{s.at}: {p.key}"
                    self.problems[replace(p, file=self.file, line=s.line, key=key)] = None
                elif p not in self.elsewhere:  # other variants have it, too
                    self.elsewhere.add(p)
                    self.problems[replace(p, found=f"{p.found} (with {self.file}: {at})")] = None
            return None

    def larger(self, name: str, keys: LargerKeys, variants: dict[str, Variant]) -> Larger:
        """Return the recipes of a larger model."""
        found = Larger(name, keys.recipe, keys.device, keys.search_s, {}, {}, {})
        common = self.settings("larger", name, "set")
        for e in self.below("larger", name):
            if e.key == "variants" and not keys.variants:
                self.say(e.line, f"larger.{name}.variants", "no variants", "a row or more")
            if e.key == "device":
                try:
                    load_device(keys.device)
                except BadInputError as error:
                    self.say(e.line, f"larger.{name}.device", keys.device, str(error))
        for v in self.table("larger", name, "variants"):
            if v.name not in variants:
                self.say(v.line, v.at, "no such variant", f"one of {', '.join(variants)}")
                continue
            settings = (*common, *v.settings)
            recipe = self.load(keys.recipe, settings, (), "plan", v.at)
            if recipe is not None:
                found.recipes[v.name] = recipe
                found.settings[v.name] = v.plain()
                found.overrides[v.name] = tuple(s.text for s in settings)
        return found

    def study(self, name: str, study: Study, sizes: dict[str, Size], larger: list[Larger]) -> None:
        """Report variants that are not there, and those that are not equal in what has to be."""
        entry = {e.key: e for e in self.below("studies")}.get(name)
        line, at = (entry.line if entry else 1), f"studies.{name}"
        for one in {one for one in study.variants if study.variants.count(one) > 1}:
            self.say(line, f"{at}.variants", f"{one} twice", "each once")
        for missing in [one for one in study.variants if one not in sizes]:
            self.say(line, f"{at}.variants", f"{missing}, no such variant", f"one of {', '.join(sizes)}")  # fmt: skip
        groups = {"": {one: sizes[one] for one in study.variants if one in sizes}}
        for model in larger:
            found = {v: Size.of(r) for v, r in model.recipes.items() if v in study.variants}
            groups[f"larger.{model.name}: "] = found
        for measure, limit in vars(study.equal).items():
            for where, members in groups.items():
                values = {one: getattr(size, measure) for one, size in members.items()}
                if limit is None or len(values) < 2:
                    continue
                low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
                apart = values[high] / values[low] - 1
                if apart > limit:
                    found = f"{where}{low} has {values[low]:,.0f}, {high} {values[high]:,.0f}, {apart:.2%} more"
                    self.say(line, f"{at}.equal.{measure}", found, f"at most {limit:.2%} more")


def _yaml(node: YamlNode) -> str:
    """Return a value as YAML in one line."""
    if node.kind == "map":
        inner = ", ".join(f"{json.dumps(e.key)}: {_yaml(e.node)}" for e in node.entries)
        return f"{{{inner}}}"
    if node.kind == "list":
        return f"[{', '.join(_yaml(e.node) for e in node.entries)}]"
    quoted = node.kind == "str" and not node.trap
    return json.dumps(node.value, ensure_ascii=False) if quoted else node.text or "null"
