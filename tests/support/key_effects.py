"""What a run makes of a recipe, without a graph: the product's own code on a tiny recipe, up to the compiler.

The loop runs with an engine that records what it is given and answers from a script (a spike, then values that are not
finite). Model, optimizer and step are built and described; nothing is compiled.
"""

import argparse
import functools
import hashlib
import json
import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import numpy as np
import yaml
from mindspore import Parameter, Tensor, communication, ops
from mindspore.train.mind_ir_pb2 import ModelProto

from telechat_moe.cli.data import _settings
from telechat_moe.data.rank_samples import RankSamples
from telechat_moe.errors import TelechatMoeError
from telechat_moe.graph.compile import RankGraph
from telechat_moe.interop.mindformers_checkpoint import open_data
from telechat_moe.model import initialize
from telechat_moe.recipe import Recipe, loads
from telechat_moe.recipe.rules.mindformers import reads_data
from telechat_moe.recipe.speed_up import switches
from telechat_moe.sharding import recipe as sharded
from telechat_moe.tools.plan.schedules.ranks import rank_orders
from telechat_moe.train import (
    expert_moves,
    guard,
    preflight,
    rank_graph,
    run_state,
    sample,
    schedule,
)
from telechat_moe.train.engine import Engine, OneProcess
from telechat_moe.train.loop import Loop
from telechat_moe.train.monitor import SilentMonitor
from telechat_moe.train.ranks import RankCoordinator
from telechat_moe.train.start import start_of
from telechat_moe.train.step import RunningStep, tensors

SPIKES = {6: (9.0, 40.0), 7: (9.0, 40.0), 9: (float("nan"), 1.0), 10: (float("nan"), 1.0)}
"""Steps with another loss and gradient norm than (4, 1)."""


def _value(x: Any) -> Any:
    return SimpleNamespace(asnumpy=lambda: np.asarray(x, np.float32))


class Recorder:
    """Stands for engine, model and saver; keeps what it is asked for."""

    operators = ""

    def __init__(self, recipe: Recipe, said: list[Any]) -> None:
        self.recipe, self.said, self.model = recipe, said, self

    def set_train(self, mode: bool = True) -> None:
        """Accept the mode of a model."""

    def evaluate_cell(self, *batch: Any) -> Any:
        """Take a batch of validation data."""
        self.said.append(("evaluate", _hash(batch)))
        return _value([1.0])

    evaluate_cell.set_train = lambda mode: None

    def read(self, columns: Any, micro_batches: int) -> list[Any]:
        """Read the micro-batches of a step."""
        batches = [next(columns) for _ in range(micro_batches)]
        self.said.append(("read", [_hash(b.values()) for b in batches]))
        return [tensors(b) for b in batches]

    def launch(
        self, batches: Any, number: int, rate: float, limits: Any, before: None
    ) -> RunningStep:
        """Take a step."""
        self.said.append(("update", number, rate, tuple(limits)))
        step = sum(one[0] == "update" for one in self.said)
        loss, norm = SPIKES.get(step, (4.0 + 0.01 * step, 1.0 + 0.01 * step))
        applied = loss < limits[1] and norm < limits[0]
        output = (_value([loss, 0, 0]), _value(norm), None, _value(applied), _value([[1.0]]), None)
        return RunningStep(*output)

    def culprit(self, output: Any) -> str:
        """Name nothing."""
        return ""

    def rows(self, load_LE: Any) -> None:
        """Know nothing of experts."""

    parameter_count = 0
    runs_ahead = False
    acts_after_step, after_step = Engine.acts_after_step, Engine.after_step
    evaluate = OneProcess.evaluate
    open_checkpoint = OneProcess.open_checkpoint

    def continue_prompts(self, tokenizer: Any, prompts: Any, drawing: Any) -> list[str]:
        """Continue nothing."""
        return _continued(self, tokenizer, prompts, drawing)

    def get_parameters(self) -> list[Parameter]:
        """Have none."""
        return []

    def parameters(self) -> dict[str, Any]:
        """Have none."""
        return {}

    def writer(self, root: Path, step: int, given: Any, keep_last: Any) -> Any:
        """Take a checkpoint."""
        self.said.append(("save", str(root), step, keep_last))
        return lambda groups, copied: None


def _continued(model: Any, tokenizer: Any, prompts: Any, drawing: Any) -> list[str]:
    """Stand for what continues prompts."""
    FakeSaver.said.append(("sample", prompts, drawing))
    return list(prompts)


class FakeSaver:
    """A saver that says how it was made."""

    said: list[Any]

    def __init__(self, sources: Any, **options: Any) -> None:
        self.said.append(("saver", options))

    def save(self, what: str, write: Any) -> None:
        """Accept a checkpoint."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class Watching(SilentMonitor):
    """A monitor that keeps which loads were recorded."""

    def __init__(self, said: list[Any]) -> None:
        object.__setattr__(self, "said", said)

    def __getattribute__(self, name: str) -> Any:
        if name != "expert_loads":
            return super().__getattribute__(name)
        said = object.__getattribute__(self, "said")
        return lambda step, record: said.append(("loads", step, record["steps"]))


def _hash(arrays: Any) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        data = array.asnumpy() if isinstance(array, Tensor) else np.asarray(array)
        digest.update(f"{data.shape}{data.dtype}".encode() + data.tobytes())
    return digest.hexdigest()


def run(recipe: Recipe) -> list[Any]:
    """Return everything that the loop over the steps of a recipe asks of its engine."""
    said: list[Any] = []
    FakeSaver.said = said
    engine: Any = Recorder(recipe, said)
    try:
        with preflight.open_loader(recipe) as loader:
            state = run_state.RunState(
                recipe, engine, loader, guard.of_recipe(recipe), RankCoordinator()
            )
            said.append(repr(start_of(recipe)))
            said.append(("data", build_settings(recipe)))
            Loop(state, schedule.from_recipe(recipe), Watching(said)).run()
            sample.write_sample(recipe, engine.continue_prompts, str)
    except TelechatMoeError as error:
        said.append(("error", str(error)))
    return said


def build_settings(recipe: Recipe) -> Any:
    """Return what `data build` takes from a recipe, or why it cannot."""
    try:
        return _settings(argparse.Namespace(**dict.fromkeys(DATA)), recipe)
    except TelechatMoeError as error:
        return str(error)


DATA = ("out", "corpus", "vocab_size", "tokenizer", "valid_fraction", "seed")


def describe(cell: Any) -> list[Any]:
    """Return names, settings and parameters of a built cell and of all below it."""
    entries: list[Any] = []
    for name, child in cell.cells_and_names():
        values = {k: _plain(v) for k, v in list(vars(child).items()) if k != "_create_time"}
        flags = child.get_flags() if hasattr(child, "get_flags") else {}
        entries.append((name, type(child).__name__, {k: v for k, v in values.items() if v}, flags))
    for p in cell.get_parameters():
        entries.append(
            (p.name, p.shape, str(p.dtype), p.requires_grad, p.asnumpy().tobytes()[:512])
        )
    return entries


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | float | str | ms.Type) or value is None:
        return str(value)
    if isinstance(value, Tensor) and not isinstance(value, Parameter):
        return _hash([value])
    if isinstance(value, ops.Primitive):
        inside = getattr(
            value.attrs.get("fn"), "__self__", None
        )  # the cell whose method a Morph is
        if inside is not None and id(inside) not in _OPEN:
            _OPEN.add(id(inside))
            described = describe(inside)
            _OPEN.remove(id(inside))
            return f"{value.name} {described}"
        return f"{value.name} {sorted((k, str(v)) for k, v in value.attrs.items())}"
    if isinstance(value, tuple | list):
        return str([_plain(v) for v in value])
    return ""


_OPEN: set[int] = set()
"""Cells that are being described."""


@functools.cache
def _built(key: str) -> str:
    recipe = _BUILDING[key]
    target = recipe.context.device_target
    if recipe.devices > 1 or target != "CPU":
        return _placed(recipe, target)
    engine = OneProcess(recipe)
    initialize(engine.model, recipe.seed)
    parts = describe(engine.train_step)
    scalars = [float(x) for step in (1, 5) for x in engine.optimizer.scalars(step, 1e-3)]
    decayed, depth = engine.optimizer.decayed, ms.get_context("max_call_depth")
    average = engine.average and (engine.average.decay, list(engine.average.averages))
    text = repr((parts, scalars, decayed, engine.operators, depth, average))
    return hashlib.sha256(text.encode()).hexdigest()


_BUILDING: dict[str, Recipe] = {}


def built(recipe: Recipe) -> str:
    """Return a hash of model, optimizer and step, with the initial weights; nothing is compiled."""
    settings, parts = recipe.telechat_moe, [recipe.model, recipe.optimizer, recipe.runner_wrapper]
    parts += [recipe.context, recipe.parallel_config, recipe.recompute_config, settings.operators]
    parts += [
        settings.moe_block_rows,
        settings.moe_capacity_tokens,
        settings.weight_decay_exclude,
        settings.sharding,
    ]
    parts += [settings.moe, settings.ema]
    steps = recipe.runner_config.gradient_accumulation_steps
    key = repr((parts, recipe.seed, steps, recipe.use_parallel))
    _BUILDING[key] = recipe
    try:
        return _built(key)
    except TelechatMoeError as error:
        return str(error)


def trained(recipe: Recipe) -> str:
    """Return what training makes of a recipe, as text."""
    split = [sharded.stages_of(recipe), sharded.parallel_context(recipe), recipe.micro_batches]
    split.append(sharded.device_context(recipe))
    said = [run(recipe), built(recipe), repr(split)]
    said.append(rank_orders(recipe))
    if (rules := recipe.telechat_moe.moe.placement) is not None:
        said.append([rules.window, repr(expert_moves.rule_of(recipe))])
    states = recipe.optimizer.swap
    if recipe.swap_config.swap or states:  # where processes keep what is swapped, and how much
        said += [states, repr(recipe.telechat_moe.swap)]
    return json.dumps(said, default=str)


def compiled(recipe: Recipe) -> str:
    """Return what is handed to the compiler for the first and the last rank, as text; see `compile_recipe`."""
    settings, depth = sharded.parallel_context(recipe), recipe.context.max_call_depth
    batch = rank_graph.example_batch(recipe, settings.get("full_batch", False))
    return repr(
        [
            settings,
            depth,
            switches(recipe),
            [(x.shape, str(x.dtype)) for x in batch],
            recipe.optimizer.swap,  # the report says where the moments are
            _placed(recipe, "Ascend"),
        ]
    )


def _placed(recipe: Recipe, target: str) -> str:
    """Return the steps of the first and the last rank."""
    settings, data = recipe.telechat_moe, recipe.train_dataset.data_loader.config
    parts = [recipe.model, recipe.optimizer, recipe.runner_wrapper, recipe.recompute_config]
    parts += [recipe.swap_config]
    parts += [
        settings.operators,
        settings.moe,
        settings.moe_block_rows,
        settings.moe_capacity_tokens,
    ]
    parts += [settings.weight_decay_exclude]
    parts += [
        settings.sharding,
        recipe.runner_config.batch_size,
        data and data.create_attention_mask,
    ]
    parts += [recipe.parallel_config.seq_split_num, recipe.micro_batches]
    functions = (sharded.mesh_of, sharded.stages_of)
    functions += (sharded.shard_threshold,)
    layers = sharded.recomputed_layers(recipe, sharded.stages_of(recipe))
    key = repr((target, parts, layers, [function(recipe) for function in functions]))
    if key not in _PLACED:
        try:
            ranks = {0, recipe.devices - 1}
            steps = [describe(rank_graph.build_step(recipe, r, target=target)) for r in ranks]
            _PLACED[key] = re.sub(r" at 0x\w+", "", repr(steps))
        except TelechatMoeError as error:
            _PLACED[key] = str(error)
    return _PLACED[key]


_PLACED: dict[str, str] = {}


def graph(recipe: Recipe, rank: int) -> str:
    """Return a hash of the compiled graph of a rank."""
    key = f"{rank} {recipe!r}"
    if key not in _GRAPHS:
        (graph,) = _compiler().submit(_compile, Path.cwd(), recipe, rank).result()
        model = ModelProto.FromString(_ONCE.sub(lambda m: b"0" * len(m[0]), graph.mindir))
        parts = sorted(p.SerializeToString() for p in model.primitives)  # written in any order
        del model.primitives[:]
        _GRAPHS[key] = hashlib.sha256(b"".join([*parts, model.SerializeToString()])).hexdigest()
    return _GRAPHS[key]


def _compile(folder: Path, recipe: Recipe, rank: int) -> list[RankGraph]:
    os.chdir(folder)  # where the recipe's relative paths begin
    return rank_graph.compile_recipe(recipe, [rank])


@functools.cache
def _compiler() -> ProcessPoolExecutor:
    """Return a process to compile in: describing cells starts MindSpore's threads here, which a fork does not survive."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


_GRAPHS: dict[str, str] = {}
_ONCE = re.compile(rb"0x[0-9a-f]{6,16}|export\.mindir\.[0-9.]+")
"""Names in a graph that hold for one process."""


def patch(patch: Any) -> None:
    """Replace what a run needs beside a recipe by what records it."""
    patch.setattr(run_state, "Saver", FakeSaver)
    patch.setattr(sample, "load_tokenizer", str)
    patch.setattr(sample, "write_atomic", lambda *args: None)
    choose = lambda self, step: FakeSaver.said.append(("back to", step)) or ""  # noqa: E731
    patch.setattr(run_state.RunState, "_choose_before", choose)
    patch.setattr(communication, "create_group", lambda *_: None)


def received(sections: dict[str, Any], folder: Path) -> str:
    """Return the configuration that MindFormers makes of a recipe, the settings of our model left out."""
    from mindformers import MindFormerConfig

    path = folder / "given.yaml"
    upstream = {k: v for k, v in sections.items() if k != "telechat_moe"}  # MindFormers drops it
    path.write_text(yaml.dump(upstream, Dumper=yaml.CSafeDumper))
    try:
        return repr(MindFormerConfig(str(path))) + _hooked(yaml.safe_dump(sections))
    except (KeyError, TypeError, ValueError) as error:  # it reads the key, and refuses the value
        return str(error)


@functools.lru_cache(8)
def _hooked(text: str) -> str:
    """Return what our data loader and our schedule in MindFormers' trainer make of a recipe, as text."""
    recipe = loads(text)
    effects: list[Any] = [build_settings(recipe)]
    if recipe.telechat_moe.lr_wsd_decay_style is not None:
        effects += map(schedule.from_recipe(recipe), range(recipe.train_steps))
    if reads_data(recipe):
        try:
            loader, step = open_data(recipe, rank=1)
            share = (0, sharded.mesh_of(recipe).dp)
            samples = RankSamples(loader, recipe.micro_batches, step, share)
            effects.append(_hash(column for i in range(len(samples)) for column in samples[i]))
        except TelechatMoeError as error:
            effects.append(str(error))
    return json.dumps(effects, default=str)


def in_mindformers(recipe: Recipe) -> str:
    """Return our model in MindFormers' trainer, as text."""
    from telechat_moe.interop import mindformers_model as plugin

    split = plugin.is_split(recipe)
    try:
        model = plugin.TelechatMoeForCausalLM(plugin.TelechatMoeConfig(recipe=recipe))
        if not split:
            model.initialize(recipe.seed)
    except TelechatMoeError as error:
        return str(error)
    return re.sub(r" at 0x\w+", "", repr([model.transformer_config, describe(model)]))


def beside_mindformers(recipe: Recipe, patch: Any) -> str:
    """Return what our callbacks do in MindFormers' trainer beside the steps of a recipe, as text."""
    from telechat_moe.interop import mindformers_callbacks as plugin

    actions: list[Any] = []
    patch.setattr(FakeSaver, "said", actions, raising=False)
    engine = Recorder(recipe, actions)
    counted = (np.ones((1, 1), np.float32), np.zeros(1, np.float32))
    calls = {"take_loads": lambda: counted, "by_source": lambda: None}
    model: Any = SimpleNamespace(model=engine, applied=True, **calls)
    for name in ("lm_loss", "mtp_loss", "aux_loss"):
        patch.setitem(plugin.parameter_register._params, name, _value([1.0]))
    patch.setattr(plugin, "Monitor", lambda *args, **options: Watching(actions))
    patch.setattr(plugin, "Saver", FakeSaver)
    patch.setattr(plugin, "Evaluate", lambda model: engine.evaluate_cell)
    patch.setattr(plugin, "continue_prompts", _continued)
    patch.setattr(plugin, "write_atomic", lambda *args: None)
    hooks = plugin.TrainingHooks(recipe, model, 0, split=False)
    actions.append(("failed saves", hooks.failures.max_failed))
    cell = SimpleNamespace(
        set_limits=lambda *limits: actions.append(("limits", limits)), aux_loss_scale=0.0
    )
    try:
        hooks._begin(None)
        actions.append(("average", hooks.average and hooks.average.decay))
        for step in range(1, recipe.train_steps + 1):
            loss, norm = SPIKES.get(step, (4.0 + 0.01 * step, 1.0 + 0.01 * step))
            applied = loss < hooks.guard.limits().loss and norm < hooks.guard.limits().norm
            outputs = (_value([loss]), _value(not applied), None, 1e-3, _value(norm))
            params = SimpleNamespace(net_outputs=outputs, cur_step_num=step, train_network=cell)
            now = SimpleNamespace(original_args=lambda params=params: params)
            for call in (hooks._step_begin, hooks._fetch, hooks._beside, hooks._step_done):
                call(now)
        hooks._end(None)
    except TelechatMoeError as error:
        actions.append(("error", str(error)))
    finally:
        hooks._close()
    return json.dumps(actions, default=str)
