"""Who reads a key, and which written values ask for something that a use of the recipe will not do.

Our own code reads every field of a Python class of the schema, except where the class's block in
`mindformers_keys.txt` says what our trainer takes; keys that are rows of that table are read by MindFormers alone. A
key that a use does not read may be written with a neutral value, one that asks for nothing: None, its default, or what
the table names.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, asdict, dataclass, is_dataclass
from typing import Any, Literal, cast

from telechat_moe.recipe import speed_up
from telechat_moe.recipe.check import parts_of, section_keys
from telechat_moe.recipe.fields import SPLIT, Takes, is_required
from telechat_moe.recipe.problems import Missing
from telechat_moe.recipe.reads import KeyReading, judge
from telechat_moe.recipe.rules import without_effect
from telechat_moe.recipe.rules.mindformers import (
    by_mindformers,
    context,
    decayed,
    done_by_types,
    our_loader,
    per_token,
)
from telechat_moe.recipe.rules.parallel import PARALLEL_MODES
from telechat_moe.recipe.schema import Broken, Recipe
from telechat_moe.recipe.schema.model import ModelConfig
from telechat_moe.recipe.schema.table import is_made
from telechat_moe.recipe.tree import locate
from telechat_moe.versions import mindformers_version

Use = Literal[
    "train",
    "dryrun",
    "mindformers",
    "mindformers-1.9",
    "mindformers-2.1",
    "plan",
    "written",
    "data",
    "weights",
]
"""What a recipe is for; `written`: what its trainer and its device say; `mindformers`: the installed version.

The last two read a part of a recipe that is written for another use, its data or its weights: only overrides are judged.
"""

OUR_TRAINER = "TelechatMoeTrainer"
USES: dict[Use, str] = {
    "train": "`telechat-moe train`",
    "dryrun": "`telechat-moe dryrun`",
    "plan": "`telechat-moe plan`",
    "mindformers": f"the model of `{OUR_TRAINER}`",
    "data": "`telechat-moe data build`",
    "weights": "a command that reads the weights of the model",
}
_DECIDES: dict[Use, str] = {
    "dryrun": "graph",
    "plan": "graph",
    "mindformers": "plugin",
    "data": "data",
    "weights": "weights",
}
"""What a use makes of a recipe, in the words of `fields.decides`; `train` reads all."""
_VERSIONS: dict[Use, str] = {"mindformers-1.9": "1.9.0", "mindformers-2.1": "2.1.0"}
_DROPPED = {
    "runner_config.stop_step": "0, and an item {{type: TrainCallBack, stop_step: {}}} of callbacks"
}
"""Keys that MindFormers reads and then makes nothing of, and what to write instead."""


def use_of(recipe: Recipe) -> Use:
    """Return the use for which a recipe is written: our trainer's, if it names that, else MindFormers'."""
    return "train" if recipe.trainer.type == OUR_TRAINER else "mindformers"


def resolved(recipe: Recipe, use: Use) -> tuple[Use, str]:
    """Return the use for which a recipe is judged, and the version of MindFormers by which."""
    use = use_of(recipe) if use == "written" else use
    version = _VERSIONS.get(use)
    return ("mindformers", version) if version else (use, mindformers_version())


def use_with(through: str | None) -> Use:
    """Return what a recipe is for with a trainer, ``own`` or ``mindformers``; None: with the one for which it is written."""
    uses: dict[str | None, Use] = {None: "written", "own": "train", "mindformers": "mindformers"}
    return uses[through]


def trainer_of(recipe: Recipe, through: str | None) -> str:
    """Return whose trainer trains a recipe: ``through``, else ``own`` or ``mindformers``, as the recipe is written."""
    return through or ("own" if use_of(recipe) == "train" else "mindformers")


@dataclass(frozen=True, slots=True)
class WrittenKey:
    """A key that a recipe writes.

    Attributes:
        takes: What our trainer takes of it; None: our code reads it.
    """

    key: str
    value: Any
    field: Field[Any]
    takes: Takes | None

    @property
    def readers(self) -> tuple[str, ...]:
        """Who reads the key: `own` (this package), `mindformers`."""
        is_ours = self.field.metadata.get("own") or self.key.startswith("telechat_moe.")
        return ("own",) * (self.takes is None) + ("mindformers",) * (not is_ours)

    def plain(self) -> Any:
        """Return the value as plain data."""
        return asdict(cast("Any", self.value)) if is_dataclass(self.value) else self.value

    def row(self) -> dict[str, Any]:
        """Return key, value, readers and what our trainer makes of it, as plain data."""
        readers = {"readers": list(self.readers), "train": self.says()}
        return {"key": self.key, "value": self.plain(), **readers}

    def says(self) -> str:
        """Say what our trainer makes of a key that it does not read; empty: it reads the key."""
        if self.takes is None:
            return ""
        if self.is_neutral():
            return f"neutral: {self.takes.reason or 'asks for nothing more'}"
        return "refused"

    def is_neutral(self) -> bool:
        """Return whether our trainer does all that the value asks for."""
        return self.takes is None or self.takes.allows(self.value, self.field)


def written(recipe: Recipe) -> Iterator[WrittenKey]:
    """Yield every key that is written, in the order of the file, sections before what is in them."""
    yield from written_keys("", recipe, recipe.given)


def written_keys(path: str, section: Any, mapping: dict[str, Any]) -> Iterator[WrittenKey]:
    """Yield every key that a section writes, below a dotted path that is empty or ends with a dot."""
    plan = section_keys(cast("type[Any]", type(section)))
    for key, below in mapping.items():
        name = plan.names.get(key)
        if name is None or not hasattr(section, name) or key == "dataset_config":
            continue  # has a problem of its own, or repeats train_dataset, with which a rule compares it
        field, value = plan.fields[name], getattr(section, name)
        takes = cast("Takes | None", field.metadata.get("takes"))
        entry = WrittenKey(path + key, value, field, takes)
        inner = cast("list[Any]", value if isinstance(value, list) else [value])
        if not inner or not is_dataclass(inner[0]) or (takes and not is_made(type(inner[0]))):
            yield entry
            continue
        texts = cast("list[Any]", below if isinstance(value, list) else [below])
        for index, (item, text) in enumerate(zip(inner, texts, strict=True)):
            place = f"{path}{key}.{index}." if isinstance(value, list) else f"{path}{key}."
            yield from written_keys(place, item, text)


@functools.cache
def decided(key: str) -> tuple[str, ...]:
    """Return what a dotted key decides beside the run, as its field or the nearest section above it says (`fields.decides`)."""
    parts: tuple[str, ...] = ()
    sections: list[type] = [Recipe]
    inside = True
    for name in key.replace("[]", "").split("."):
        if name.isdecimal():
            continue
        if not inside:
            return ()
        plans = [plan for plan in map(section_keys, sections) if name in plan.names]
        if not plans:  # a key of a mapping
            return parts
        field = plans[0].fields[plans[0].names[name]]
        parts, inside = field.metadata.get("decides", (parts, True))
        sections = [section for section, _ in parts_of(field.type)]
    return parts


def decides(use: Use, key: str) -> bool:
    """Return whether a key decides what our code does: the trainer, the compiled graph, our model in MindFormers."""
    if use == "plan" and key.endswith(".optimizer_level"):
        return False  # it prices every level, of which our graph has one
    return use not in _DECIDES or _DECIDES[use] in decided(key)


def graph_settings(recipe: Recipe) -> dict[str, Any]:
    """Return every setting that the compiled graphs of a recipe's ranks may depend on, by its dotted key."""
    settings = {k: v for k, _, v in _settings("", recipe) if {"graph", "plugin"} & {*decided(k)}}
    return {**settings, speed_up.KEY: speed_up.switches(recipe)}


def _settings(above: str, section: Any) -> Iterator[tuple[str, Field[Any], Any]]:
    """Yield key, field and value of every setting of a section, of a section within it True and its settings."""
    for name, field in section_keys(cast("type[Any]", type(section))).fields.items():
        value = getattr(section, name)
        is_list = isinstance(value, list)
        items = cast("list[Any]", value if is_list else [value])
        if not items or not is_dataclass(items[0]):
            yield above + name, field, value
            continue
        yield above + name, field, True
        for index, item in enumerate(items):
            yield from _settings(f"{above}{name}.{index}." if is_list else f"{above}{name}.", item)


def idle_overrides(recipe: Recipe, use: Use) -> list[str]:
    """Return the overrides, ``KEY=VALUE``, that change nothing that a use reads; none for uses that judge each key."""
    use, _ = resolved(recipe, use)
    acts: dict[str, bool] = {}
    if recipe.tree is None or use in ("train", "mindformers"):
        return []
    for entry in written(recipe):
        origin = locate(recipe.tree, entry.key).node.origin
        if origin.startswith("--set "):
            acts[origin] = acts.get(origin, False) or decides(use, entry.key)
    return [origin.removeprefix("--set ") for origin, does in acts.items() if not does]


def unread(recipe: Recipe, use: Use, missing: Missing) -> Iterator[Broken]:
    """Yield the written keys whose value asks for something that a use will not do, and why.

    Args:
        missing: A rule ends where it needs a value that is missing.
    """
    use, version = resolved(recipe, use)
    plugin = use == "mindformers" and recipe.trainer.type == OUR_TRAINER
    if use == "mindformers":
        yield from missing.until(_never_read(recipe, version))
        for problems in by_mindformers(recipe, version):
            yield from missing.until(problems)
        yield from missing.until(() if plugin else per_token(recipe))
        yield from missing.until(context(recipe, version, plugin))
        yield from missing.until(() if plugin else _dropped(recipe))
        yield from missing.until(our_loader(recipe, plugin))
    if plugin:
        yield from missing.until(_only_ours(recipe))
        yield from missing.until(decayed(recipe))
    yield from missing.until(_only_whole(recipe, use, plugin))
    if use == "train":
        yield from missing.until(_on_processes(recipe))

    def judged(key: str) -> bool:
        if use == "mindformers":
            return plugin and (decides(use, key) or key == speed_up.KEY)
        of_model = key.startswith("model.model_config.")
        if of_model and not isinstance(recipe.model.model_config, ModelConfig):
            return key.endswith(".model_type")  # says it all
        return use not in ("data", "weights") and decides(use, key)

    yield from missing.until(_of_others(recipe, use, plugin, judged))
    for problem in without_effect(recipe, missing, compiled=use in ("dryrun", "plan")):
        if judged(problem[0]):
            yield problem


def _of_others(
    recipe: Recipe, use: Use, plugin: bool, judged: Callable[[str], bool]
) -> Iterator[Broken]:
    """Yield the written keys that only another program reads, and what they ask for."""
    for entry in written(recipe):
        if entry.key == "model.model_config.model_type" and use != "mindformers":
            continue  # a rule says which models are ours
        if judged(entry.key) and entry.takes is not None and not entry.is_neutral():
            who = "MindFormers' own networks" if plugin else "MindFormers"
            problem = f"{_text(entry.value)}, a setting of {who}, which {USES[use]} does not have"
            yield entry.key, problem, entry.takes.expected(entry.field)


def _dropped(recipe: Recipe) -> Iterator[Broken]:
    """Yield the settings of this package that neither MindFormers' own trainer nor a type of ours in it does."""
    supported = tuple(f"telechat_moe.{key}" for key in (*done_by_types(recipe), "corpus"))
    for key, field, value in _settings("telechat_moe.", recipe.telechat_moe):
        make = field.default_factory
        default = field.default if make is MISSING else make()
        is_plain = value is True and is_dataclass(default)  # a section, whose settings follow
        if is_plain or value == default or key.startswith(supported):
            continue
        supported += (f"{key}.",)  # one line for a section
        text = "a section" if value is True and field.default is None else value
        problem = f"{text}, a setting of this package, which MindFormers drops"
        expected = f"trainer.type {OUR_TRAINER}, a type of ours that does it, or remove it"
        yield key, problem, expected


def _only_ours(recipe: Recipe) -> Iterator[Broken]:
    """Yield what `telechat-moe train` does besides the steps, and MindFormers' trainer does not."""
    settings = recipe.telechat_moe
    if recipe.model_config.calculate_per_token_loss:
        problem = "True, which MindFormers' steps do for MindFormers' own networks only"
        yield "model.model_config.calculate_per_token_loss", problem, "remove it"
    split = recipe.use_parallel and recipe.parallel.parallel_mode in PARALLEL_MODES
    for key, field, value in _settings("telechat_moe.", settings):
        reason = field.metadata.get("only_ours")
        if reason is None or (reason == SPLIT and not split) or Takes().allows(value, field):
            continue
        text = "a section" if value is True and field.default is None else value
        problem = f"{text}, which `telechat-moe train` does and MindFormers' trainer does not"
        if reason == SPLIT:
            problem += " where each device holds a shard of the model (semi-automatic parallelism)"
        yield key, f"{problem}: {reason}", "remove it"
    for index, callback in enumerate(recipe.callbacks):
        if callback.type == "TelechatMoeMonitor":
            problem = f"{callback.type}, which {OUR_TRAINER} has in it"
            yield f"callbacks.{index}.type", problem, "remove it; telechat_moe.max_skipped_steps"
    guard, run = settings.loss_guard, recipe.runner_config
    if guard is not None and guard.action == "rollback":
        problem = "rollback, by rollback_steps and max_rollbacks, and MindFormers' trainer cannot go back within a run"
        yield "telechat_moe.loss_guard.action", problem, "skip, or `telechat-moe train`"
    if run.sink_mode and run.sink_size != 1:
        problem = f"{run.sink_size}: the callbacks of this package see every step only with 1"
        yield "runner_config.sink_size", problem, "1"


def _only_whole(recipe: Recipe, use: Use, plugin: bool) -> Iterator[Broken]:
    """Yield what a use does not know: parts of sequences, and for the planner what its cost model cannot price."""
    swap = recipe.swap_config
    if use == "plan" and swap.swap and (swap.op_swap is not None or swap.layer_swap is None):
        key = "swap_config.op_swap" if swap.op_swap is not None else "swap_config.swap"
        problem = "operators of layers, of which the planner's cost model does not know the copies"
        yield key, problem, "swap_config.layer_swap: whole layers"
    host = recipe.telechat_moe.operators.host
    if use == "plan" and host:
        problem = f"{', '.join(host)}, of which the planner's cost model does not know the waits"
        yield "telechat_moe.operators.host", problem, "remove it"
    parts = recipe.parallel_config.seq_split_num
    if parts > 1 and (plugin or use == "plan"):
        who = "MindFormers' trainer does for its own networks only"
        who = who if plugin else "the planner's cost model does not know"
        yield "parallel_config.seq_split_num", f"{parts}, which {who}", "1"


def _on_processes(recipe: Recipe) -> Iterator[Broken]:
    if recipe.context.device_target == "CPU" and recipe.devices > 1:
        yield from in_plain_graph(recipe)


def in_plain_graph(recipe: Recipe) -> Iterator[Broken]:
    """Yield what the graphs that CPU processes run, which are made of plain operators, cannot compute."""
    dtype = recipe.model.model_config.compute_dtype
    if dtype in ("bfloat16", "bf16"):
        problem = f"{dtype} in the graphs of CPU processes, which are made of plain operators"
        expected = "float32: MindSpore has no bfloat16 products there; one process has ours"
        yield "model.model_config.compute_dtype", problem, expected


def _never_read(recipe: Recipe, version: str) -> Iterator[Broken]:
    """Yield the keys that MindFormers never reads or drops, but for defaults, which ask for nothing, and those we need written."""
    entries = {entry.key: entry for entry in written(recipe) if not is_required(entry.field)}
    for judged in judged_by_mindformers(recipe, version):
        entry, instead = entries.get(judged.key), _DROPPED.get(judged.key)
        if entry is None or _asks_nothing(entry):
            continue
        if instead:
            problem = f"{entry.value}, read by MindFormers {version} and then dropped"
            yield judged.key, problem, instead.format(entry.value)
        elif judged.verdict == "never":
            problem = f"{_text(entry.value)}, never read by MindFormers {version} in training"
            yield judged.key, problem, "remove it"


def judged_by_mindformers(recipe: Recipe, version: str) -> Iterator[KeyReading]:
    """Yield what is known of MindFormers' reading of each key of the file, the sections of our plug-in's model left out."""
    is_ours = recipe.trainer.type == OUR_TRAINER
    sections = {k: v for k, v in recipe.given.items() if not (is_ours and "plugin" in decided(k))}
    for judged in judge(sections, recipe.model.model_config.model_type, version):
        entry = locate(recipe.tree, judged.key) if recipe.tree else None
        origin = entry.node.origin if entry else ""  # a file or --set, else who filled it in
        if not judged.key.startswith("train_dataset_task.") and origin[:5] in ("", "--set"):
            yield judged


def not_judged(recipe: Recipe, use: Use) -> dict[str, str]:
    """Return the keys of which it is not known whether MindFormers reads them, and why; none for other uses."""
    use, version = resolved(recipe, use)
    if use != "mindformers":
        return {}
    entries = {entry.key: entry for entry in written(recipe)}
    return {
        judged.key: judged.place
        for judged in judged_by_mindformers(recipe, version)
        if judged.verdict == "not judged"
        if (entry := entries.get(judged.key)) is None or not _asks_nothing(entry)
    }


def _asks_nothing(entry: WrittenKey) -> bool:
    return Takes().allows(entry.value, entry.field)


def _text(value: Any) -> str:
    return "a section" if is_dataclass(value) else str(value)
