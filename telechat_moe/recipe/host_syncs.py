"""What makes the host wait for the device in the steps of a recipe, and how to move it.

A *wait*: the host asks for the result of work that it has just queued, and queues nothing until the device has done it. A
*fetch*: a tensor is copied to the host; the first after a step is the wait for its end, the others find theirs ready
and only synchronise the stream. Numbers are those of the code that is named, MindFormers' as of 1.9.0; costs
are those of `benchmarks/host_syncs` on a CPU.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from telechat_moe.recipe.experts import HOPS, dispatcher, drops
from telechat_moe.recipe.schema import ModelConfig, Recipe
from telechat_moe.recipe.uses import OUR_TRAINER, use_of
from telechat_moe.recipe.weights import weights

COSTS = Path(__file__).parent / "schema" / "host_syncs.json"
"""Written by ``python -m benchmarks.host_syncs --json``."""

_CALLBACK = "mindformers/core/callback/callback.py"
_SINK = "runner_config.sink_mode: True with sink_size N: callbacks run once in N steps"


@dataclass(frozen=True, kw_only=True)
class HostSync:
    """A part of the steps that the host waits in or fetches from.

    Attributes:
        what: What is waited for.
        key: Key of the recipe that asks for it, or that it belongs to.
        source: Code that does it.
        waits: Waits each time; None: one for each of something that the recipe does not tell.
        fetches: Fetches each time; None: likewise.
        every: Steps from one time to the next.
        move: How to have it less often, or why that cannot be.
    """

    what: str
    key: str
    source: str
    waits: int | None
    fetches: int | None
    every: int = 1
    move: str

    @property
    def cost_us(self) -> float | None:
        """Microseconds a step on the CPU where costs were measured, at least; None: the numbers are not known."""
        if self.waits is None or self.fetches is None:
            return None
        cost = costs()["min_us"]
        return (self.waits * cost["wait"] + self.fetches * cost["fetch"]) / self.every


@cache
def costs() -> dict[str, Any]:
    """Return the measured costs: ``min_us`` and ``median_us`` of a ``wait`` and a ``fetch``, ``machine`` and ``command``."""
    return json.loads(COSTS.read_text(encoding="utf-8"))


def of_recipe(recipe: Recipe) -> list[HostSync]:
    """Return what the host waits for in the steps of a recipe, with the trainer that it is written for."""
    return list(_own(recipe) if use_of(recipe) == "train" else _mindformers(recipe))


def waits_in_every_step(found: list[HostSync]) -> int:
    """Return how many waits there are in every step, at least: those of an unknown number count as one."""
    return sum(1 if one.waits is None else one.waits for one in found if one.every == 1)


# ------------------------------------------------------------------------------ our trainer


def _own(recipe: Recipe) -> Iterator[HostSync]:
    """Yield what our trainer does."""
    own = recipe.telechat_moe
    samples = recipe.runner_config.gradient_accumulation_steps if _has_sources(recipe) else 0
    yield HostSync(
        what="losses, gradient norm, whether the update was applied, expert loads, dropped pairs"
        + (", loss of each sample" if samples else ""),
        key="trainer.type",
        source="telechat_moe/train/step.py, StepOutput.fetch",
        waits=1,
        fetches=5 + samples,
        move="stays: the guard, the rate of the next update and the metrics need it; all is fetched at once",
    )
    found = weights(recipe.model_config)
    if own.ema is not None:
        yield HostSync(
            what="every weight and its average, which the host computes",
            key="telechat_moe.ema",
            source="telechat_moe/train/optimizer.py, WeightAverage.update",
            waits=0,
            fetches=2 * len(found),
            move="remove telechat_moe.ema and average checkpoints (`ckpt average`)",
        )
    if own.evaluation.interval:
        batches = own.evaluation.batches * (recipe.global_batch // recipe.micro_batch_samples)
        yield HostSync(
            what="the loss of each micro-batch of a source of validation data",
            key="telechat_moe.evaluation.interval",
            source="telechat_moe/train/evaluate.py, validation_loss",
            waits=batches,
            fetches=batches,
            every=own.evaluation.interval,
            move="a longer interval, or fewer telechat_moe.evaluation.batches",
        )
    if own.moe.placement is not None:
        placement = own.moe.placement
        yield HostSync(
            what="rows of the experts that move",
            key="telechat_moe.moe.placement.every",
            source="telechat_moe/train/expert_moves.py, MovingExperts.move",
            waits=None,
            fetches=None,
            every=placement.every,
            move="a larger telechat_moe.moe.placement.every",
        )
    saved = sum(3 if weight.trained else 1 for weight in found)  # with two moments
    yield from _checkpoints(recipe, saved, "telechat_moe/checkpoint/snapshot.py, Snapshot")


def _has_sources(recipe: Recipe) -> bool:
    """Return whether one process trains on several sources, whose losses it tells apart."""
    section = recipe.train_dataset.data_loader.config
    given = (section.data_path or section.train_data_path or []) if section is not None else []
    several = len(given) > 2 or bool(recipe.telechat_moe.mixture)
    return several and recipe.devices == 1


def _checkpoints(recipe: Recipe, tensors: int | None, source: str) -> Iterator[HostSync]:
    """Yield what checkpoints do."""
    for i, callback in enumerate(recipe.callbacks):
        if callback.type == "CheckpointMonitor":
            yield HostSync(
                what="weights and optimizer states",
                key=f"callbacks.{i}.save_checkpoint_steps",
                source=source,
                waits=1,
                fetches=tensors,
                every=_setting(callback, "save_checkpoint_steps", 1),
                move="a longer interval",
            )


# ------------------------------------------------------------------------------ MindFormers' trainer


def _mindformers(recipe: Recipe) -> Iterator[HostSync]:
    """Yield what MindFormers' trainer and its callbacks do, in the order of the recipe."""
    runner = recipe.runner_config
    calls = (
        max(runner.sink_size, 1) if runner.sink_mode else 1
    )  # steps from one call of callbacks to the next
    monitor = recipe.monitor_config
    watches: int | None = None
    for i, callback in enumerate(recipe.callbacks):
        at = f"callbacks.{i}"
        match callback.type:
            case "MFLossMonitor":
                yield _loss_monitor(recipe, at, calls)
            case "TopkBiasBalanceCallback":
                yield from _bias(recipe, at, calls)
            case "MoEDropRateCallback":
                layers = _layers(recipe)
                yield HostSync(
                    what="whether each layer's experts got tokens, for the share of those dropped",
                    key=at,
                    source=f"{_CALLBACK}, MoEDropRateCallback._callback_droprate",
                    waits=layers,
                    fetches=layers,
                    every=calls,
                    move=f"remove the callback; or {_SINK}",
                )
            case "ExpertMigrateCallback" if _setting(callback, "print_expert_load", False):
                yield HostSync(
                    what="the expert loads of each layer",
                    key=f"{at}.print_expert_load",
                    source=f"{_CALLBACK}, ExpertMigrateCallback._print_expert_load",
                    waits=1,
                    fetches=_layers(recipe),
                    every=calls,
                    move="print_expert_load: False",
                )
            case "TrainingStateMonitor":
                watches = i
            case _:
                yield from _at_intervals(callback, at)
    if watches is not None or (monitor is not None and _setting(monitor, "monitor_on", False)):
        yield from _state_monitor(recipe, watches, calls)
    yield from _exchange(recipe)
    yield from _host_operators(recipe)
    save = f"{_CALLBACK}, CheckpointMonitor._save_ckpt"
    yield from _checkpoints(recipe, None, save)


def _loss_monitor(recipe: Recipe, at: str, calls: int) -> HostSync:
    """Return what MFLossMonitor does in every call, whatever ``per_print_times`` is."""
    apart = _setting(recipe, "print_separate_loss", True) is not False
    return HostSync(
        what="loss (twice), gradient norm, overflow flag, loss scale, learning rate"
        + (", and four losses apart" if apart else ""),
        key=at,
        source=f"{_CALLBACK}, MFLossMonitor.on_train_step_end, _get_loss_output"
        + (", _get_separate_loss" if apart else ""),
        waits=1,
        fetches=10 if apart else 6,
        every=calls,
        move=f"{_SINK}; per_print_times prints less often and fetches as often",
    )


def _bias(recipe: Recipe, at: str, calls: int) -> Iterator[HostSync]:
    """Yield what TopkBiasBalanceCallback does with MindFormers' model, or with ours."""
    config, layers = recipe.model.model_config, _layers(recipe)
    if not getattr(config, "moe_router_enable_expert_bias", None):
        return
    sinks = "; with sink_size N the bias would move only once in N steps"
    if recipe.trainer.type == OUR_TRAINER:
        yield HostSync(
            what="expert loads and biases of all layers, and their sum over processes",
            key=at,
            source="telechat_moe/interop/mindformers_model.py, move",
            waits=1,
            fetches=None if layers is None else 2 * layers + 1,
            every=calls,
            move=f"stays{sinks}",
        )
        return
    yield HostSync(
        what="whether a layer's experts got tokens (`expert_load.sum() > 0`), layer by layer",
        key=at,
        source="mindformers/parallel_core/training_graph/base_models/gpt/gpt_model.py, update_topk_bias",
        waits=layers,
        fetches=layers,
        every=calls,
        move=f"`trainer.type: {OUR_TRAINER}` waits once{sinks}",
    )


def _exchange(recipe: Recipe) -> Iterator[HostSync]:
    """Yield what the exchange of tokens with the experts of other devices does inside the graph, on Ascend."""
    config, degrees = recipe.model.model_config, recipe.parallel_config
    form, ours = recipe.telechat_moe.sharding.dispatcher, recipe.trainer.type == OUR_TRAINER
    static = drops(config) or (ours and form in ("alltoall", "allgather"))
    if recipe.context.device_target != "Ascend" or not recipe.use_parallel:
        return
    if degrees.expert_parallel < 2 or static:
        return
    times = _passes(recipe)
    if times is not None and (getattr(config, "moe_token_dispatcher_type", None) or "") in HOPS:
        times *= 2
    cells = "telechat_moe/sharding/cells/dispatch.py, hierarchical.py"
    theirs = "mindformers/parallel_core/training_graph/transformer/moe/token_dispatcher.py"
    yield HostSync(
        what="how many rows each device sends and gets (MoveTo), in each expert layer of a stage, micro-batch by micro-batch",
        key="model.model_config.moe_token_dispatcher_type",
        source=cells if ours else theirs,
        waits=times,
        fetches=None if times is None else 2 * times,
        move="telechat_moe.sharding.dispatcher: alltoall pads to fixed sizes and sends more"
        if ours
        else f"with `trainer.type: {OUR_TRAINER}`, telechat_moe.sharding.dispatcher: alltoall",
    )


_HOST = {
    "top_k": ("the scores of which the host chooses experts", "ops/routing.py, Routing"),
    "sort": ("the experts of all tokens, by which the host sorts", "ops/permute.py, CapacityPlan"),
    "histogram": ("the experts of all tokens, which the host counts", "ops/routing.py, Routing"),
}


def _host_operators(recipe: Recipe) -> Iterator[HostSync]:
    """Yield what operators wait for that the host computes within the graph, in forward passes."""
    times, config = _passes(recipe), recipe.model.model_config
    if times is None or recipe.trainer.type != OUR_TRAINER:
        return
    sorts_rows = dispatcher(recipe, "Ascend") == "alltoallv"
    for i, part in enumerate(recipe.telechat_moe.operators.host):
        what, source = _HOST[part]
        waits = 2 if part == "histogram" and sorts_rows else 1  # GroupedMatmul's sizes, too
        by_weight = part == "sort" and drops(config) and config.moe_token_drop_policy == "probs"
        took = f"{costs()['min_us'][part]:,.0f} us for 4,096 tokens and 64 experts on that CPU"
        again = "; layers that are recomputed sort again" if part == "sort" else ""
        yield HostSync(
            what=what,
            key=f"telechat_moe.operators.host.{i}",
            source=source,
            waits=waits * times,
            fetches=(2 if by_weight else waits) * times,
            move=f"remove it; beside the wait it takes {took}{again}",
        )


def _at_intervals(callback: Any, at: str) -> Iterator[HostSync]:
    """Yield what callbacks do that wait now and then."""
    kinds = {
        "SDCMonitor": ("step_interval", 10, 1, "an AllReduce of whether a checksum starts"),
        "StressDetectCallBack": ("detection_interval", 1, 1, "the hardware test"),
        "EvalCallBack": ("step_interval", 100, None, "the evaluation"),
    }
    if callback.type not in kinds:
        return
    key, default, waits, what = kinds[callback.type]
    yield HostSync(
        what=what,
        key=f"{at}.{key}",
        source=f"{_CALLBACK}, {callback.type}.on_train_step_end",
        waits=waits,
        fetches=waits,
        every=_setting(callback, key, default),
        move=f"a longer {key}",
    )


def _state_monitor(recipe: Recipe, place: int | None, calls: int) -> Iterator[HostSync]:
    """Yield what TrainingStateMonitor does: some in every call, some every ``monitor_config.step_interval``.

    Args:
        place: Where it stands among the callbacks; None: MindFormers adds it.
    """
    key, checks = "monitor_config", False
    if place is not None:
        key, callback = f"callbacks.{place}", recipe.callbacks[place]
        checks = bool(_setting(callback, "check_for_nan_in_loss_and_grad", False))
    yield HostSync(
        what="loss (twice) and gradient norm" + (", and both again for NaN" if checks else ""),
        key=key,
        source=f"{_CALLBACK}, TrainingStateMonitor.abnormal_global_norm_check"
        + (", _boundary_check" if checks else ""),
        waits=0,
        fetches=6 if checks else 3,
        every=calls,
        move=f"{_SINK}; monitor_config.step_interval does not change it",
    )
    monitor = recipe.monitor_config
    if monitor is None:
        return
    config = recipe.model.model_config
    tensors = len(weights(config)) if isinstance(config, ModelConfig) else None
    parts: dict[str, tuple[str, int | None, int | None, str]] = {
        "weight_state_format": ("the norm of all weights", 1, 1, "_get_weight_norm"),
        "optimizer_state_format": (
            "the norms of two moments of each parameter that `target` names, one by one",
            None if tensors is None else 2 * tensors,
            None if tensors is None else 2 * tensors,
            "_get_optimizer_state",
        ),
        "max_attention_logit_format": (
            "the largest attention score of each layer",
            0,
            getattr(config, "num_hidden_layers", None),
            "_dump_max_attention_logit",
        ),
        "device_local_loss_format": ("the losses of this device", 0, 3, "_calc_device_local_loss"),
        "local_norm_format": (
            "the gradient norm of each parameter, by TensorDump in the graph, then read from files",
            None,
            tensors,
            "_dump_data_in_step",
        ),
    }
    for key, (what, waits, fetches, function) in parts.items():
        if _setting(monitor, key, None):
            yield HostSync(
                what=what,
                key=f"monitor_config.{key}",
                source=f"{_CALLBACK}, {function}",
                waits=waits,
                fetches=fetches,
                every=_setting(monitor, "step_interval", 1) * calls,
                move="a longer monitor_config.step_interval, fewer parameters in target",
            )


def _layers(recipe: Recipe) -> int | None:
    """Return how many routers the model has; None: the recipe does not tell."""
    config = recipe.model.model_config
    return len(config.moe_layer_names) if isinstance(config, ModelConfig) else None


def _passes(recipe: Recipe) -> int | None:
    """Return how often a step goes forward through an expert layer of a stage; None: the recipe does not tell."""
    layers, stages = _layers(recipe), recipe.parallel_config.pipeline_stage
    pieces = recipe.global_batch // recipe.micro_batch_samples
    return None if layers is None else math.ceil(layers / stages) * pieces


def _setting(section: Any, key: str, default: Any) -> Any:
    """Return a setting, or what holds where it is not written."""
    value = getattr(section, key, None)
    return default if value is None else value
