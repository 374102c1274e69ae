"""Build the training step of one rank of a recipe, or its forward graph for evaluation and samples, and compile it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import mindspore as ms
from mindspore import Tensor
from mindspore.common.initializer import initializer

from telechat_moe.data.recipe import sources_of
from telechat_moe.graph.compile import Built, RankGraph, compile_ranks
from telechat_moe.model import CausalLM
from telechat_moe.model.router import Router
from telechat_moe.ops import select
from telechat_moe.processes import in_clean_process
from telechat_moe.recipe import Recipe
from telechat_moe.recipe.experts import dispatcher, hop_between_nodes
from telechat_moe.recipe.speed_up import path_of
from telechat_moe.recipe.swap import swapped
from telechat_moe.sharding.apply import Options, place
from telechat_moe.sharding.cells.collective import ALONE
from telechat_moe.sharding.cells.logits import PickedLogits
from telechat_moe.sharding.recipe import (
    has_mask,
    head_stage,
    mesh_of,
    parallel_context,
    recomputed_layers,
    stages_of,
)
from telechat_moe.sharding.recompute import recompute, swap
from telechat_moe.sharding.stages import Stages
from telechat_moe.train.optimizer import AdamW, from_recipe
from telechat_moe.train.rank_forward import RankForward
from telechat_moe.train.rank_step import PlacedModel, RankStep

GraphKind = Literal["step", "forward"]


def placed_model(
    recipe: Recipe,
    rank: int,
    target: str,
    *,
    shared_graph: bool | None,
    sources: int | None = None,
    training: bool = True,
) -> PlacedModel:
    """Return the model of one rank, placed on the mesh of a recipe.

    Args:
        sources: How many sources of tokens it tells apart; None: as many as the recipe's data have.
        target: See :func:`build_step`; the caller chooses the backends.
        shared_graph: See :func:`build_step`.
        training: False: for a forward graph, of whole sequences; nothing is recomputed or swapped, sources are not told
            apart, and no cell was ever set to train: MindSpore 2.9.0 would look for a backward pass in each stage.

    Raises:
        BadInputError: The layout does not fit the model.
    """
    mesh, stages, settings = mesh_of(recipe), stages_of(recipe), recipe.telechat_moe
    if shared_graph is None:
        shared_graph = recipe.micro_batches > 1 and _shares_graph(recipe, target, stages)
    sizes = settings.moe_block_rows, settings.moe_capacity_tokens
    sources = (sources or len(sources_of(recipe))) if training else 1
    model = CausalLM(recipe.model_config, *sizes, sources=sources)
    if training:
        model.set_train()
    options = Options(
        dispatcher(recipe, target),
        recipe.runner_config.batch_size * mesh.dp,
        stages,
        has_mask(recipe),
        shared_graph,
        # Stubs change the numbers of the messages, by which processes match them.
        shared_graph and target == "Ascend",
        hop_between_nodes(recipe.model_config)[0],
        balance_group=settings.moe.balance_group,
        movable=settings.moe.placement is not None,
        parts=recipe.parallel_config.seq_split_num if training else 1,
        flash=target == "CPU" and settings.operators.attention == "fused",
    )
    routers = [cell for _, cell in model.cells_and_names() if isinstance(cell, Router)]
    placement = place(model, mesh, rank, options)
    if training:
        recompute(
            model,
            recomputed_layers(recipe, stages),
            recipe.recompute_config.recompute is True,
            set(settings.sharding.recompute),
            recipe.recompute_config.mp_comm_recompute,
        )
        swap(model, swapped(recipe))
    has_loss = mesh.stage(rank) == head_stage(recipe)
    return PlacedModel(model, routers, placement, has_loss, shared_graph)


def build_step(
    recipe: Recipe,
    rank: int,
    *,
    target: str,
    optimizer: Callable[[Sequence[ms.Parameter]], AdamW] | None = None,
    shared_graph: bool | None = None,
    copies: bool = False,
) -> RankStep:
    """Return the step of one rank, placed.

    Args:
        target: ``CPU``: plain backends, to be exported and run on CPU processes; ``Ascend``: the recipe's.
        optimizer: Makes the optimizer; default: the recipe's AdamW.
        shared_graph: Micro-batches share one graph; for Ascend, shape-only stubs replace other stages' cells;
            default: where there are several, but on CPU only where the graph must be (:func:`_shares_graph`).
        copies: See :class:`telechat_moe.train.rank_step.PlacedModel`.

    Raises:
        BadInputError: The layout does not fit the model.
    """
    with _operators(recipe, target):
        placed = placed_model(recipe, rank, target, shared_graph=shared_graph)
        placed = placed._replace(copies=copies)
        params = [p for p in placed.model.trainable_params() if placed.placement.is_here(p)]
        rule = (optimizer or partial(from_recipe, recipe))(params)
        step = RankStep(recipe, placed, rule, branches=target == "CPU")
    step.set_train()
    return step


def build_forward(recipe: Recipe, rank: int, *, target: str, copies: bool = False) -> RankForward:
    """Return the forward graph of one rank, placed; of recipes with samples it returns logits, too.

    Args:
        target: See :func:`build_step`.
        copies: Every process has a whole copy of the model, and takes whole batches.

    Raises:
        BadInputError: The layout does not fit the model.
    """
    with _operators(recipe, target):
        placed = placed_model(recipe, rank, target, shared_graph=False, training=False)
    if recipe.telechat_moe.sample is None:
        return RankForward(placed, None)
    p, stages = placed.placement, stages_of(recipe)
    degrees = (("tp",), ("dp", "cp"), ("dp", "cp", "tp"))
    groups = [ALONE if copies else p.group(p.mesh.axes(*names)) for names in degrees]
    logits = PickedLogits(recipe.micro_batch_samples, recipe.model_config.seq_length, *groups)
    p.morphed(logits.run, "PickedLogits")
    if stages is not None:
        p.assign_stage(logits, stages.head)
    return RankForward(placed, logits)


def _operators(recipe: Recipe, target: str) -> AbstractContextManager[None]:
    """Return a context in which the cells of a rank's graph are built."""
    operators = recipe.telechat_moe.operators
    backends = ("plain", {}) if target == "CPU" else (operators.default, operators.backends())
    return select.using(*backends, target, operators.host)


def _shares_graph(recipe: Recipe, target: str, stages: Stages | None) -> bool:
    """Return whether micro-batches share one graph.

    On CPU they do where the graph must be, where its passes get another order or activations are swapped, and where what a
    micro-batch counts is read by the next: nothing orders the router's counts in graphs of their own.
    """
    if target == "Ascend" or stages is None:
        return True
    parts = recipe.parallel_config.seq_split_num > 1
    by_step = recipe.model_config.moe_router_load_balancing_type == "gbs_aux_loss"
    scheduled = recipe.telechat_moe.sharding.pipeline_schedule is not None
    return stages.chunks > 1 or parts or by_step or scheduled or recipe.swap_config.swap


def example_batch(
    recipe: Recipe, full_batch: bool, micro_batches: int | None = None
) -> tuple[Tensor, ...]:
    """Return one batch of the recipe's shapes; a compiler does not ask for its values, so it holds none.

    Args:
        micro_batches: How many it has; None: as many as a step.
    """
    mesh, length = mesh_of(recipe), recipe.model_config.seq_length
    rows = recipe.runner_config.batch_size * (micro_batches or recipe.micro_batches)
    rows *= mesh.dp if full_batch else 1
    ids = initializer("zeros", (rows, length), ms.int32)
    batch = [ids, ids, initializer("ones", (rows, length), ms.float32), ids]
    if has_mask(recipe):
        batch.append(initializer("zeros", (rows, 1, length, length), ms.uint8))
    return tuple(batch)


class StepSource(NamedTuple):
    """What the step of a rank is compiled from, whoever compiles it.

    Attributes:
        build: Takes a rank; returns its step and a batch for it. MindSpore's parallel mode is set.
        settings: For ``set_auto_parallel_context``, but for mode, rank and number of devices.
        context: For ``set_context``.
        switches: JSON file of MindSpore's switches for overlap.
    """

    build: Callable[[int], Built]
    settings: dict[str, Any]
    context: dict[str, Any]
    switches: Path | None


def step_source(
    recipe: Recipe,
    *,
    target: str,
    full_batch: bool | None = None,
    optimizer: Callable[[Sequence[ms.Parameter]], AdamW] | None = None,
    shared_graph: bool | None = None,
    copies: bool = False,
    graph: GraphKind = "step",
) -> StepSource:
    """Return what the steps of a recipe's ranks are compiled from; see :func:`compile_recipe` and :func:`build_step`."""
    settings = parallel_context(recipe, full_batch)
    if graph == "forward":
        settings.pop("pipeline_config", None)  # MindSpore interleaves only what is differentiated

    def build(rank: int) -> Built:
        if graph == "forward":
            forward = build_forward(recipe, rank, target=target, copies=copies)
            return Built(forward, example_batch(recipe, settings.get("full_batch", False), 1))
        chosen = {"optimizer": optimizer, "shared_graph": shared_graph, "copies": copies}
        step = build_step(recipe, rank, target=target, **chosen)
        return Built(step, example_batch(recipe, settings.get("full_batch", False)))

    context = {"max_call_depth": recipe.context.max_call_depth}
    return StepSource(build, settings, context, path_of(recipe))


@in_clean_process
def compile_recipe(
    recipe: Recipe,
    ranks: Sequence[int] | None = None,
    *,
    target: str = "Ascend",
    full_batch: bool | None = None,
    optimizer: Callable[[Sequence[ms.Parameter]], AdamW] | None = None,
    shared_graph: bool | None = None,
    done: Callable[[], object] | None = None,
    graph: GraphKind = "step",
) -> list[RankGraph]:
    """Compile the whole training step of ranks of a recipe, or their forward graph.

    Args:
        ranks: Global ranks; None = all.
        target: Backends, see :func:`build_step`; the front end's target is Ascend always.
        full_batch: See :func:`telechat_moe.sharding.recipe.parallel_context`.
        optimizer, shared_graph: See :func:`build_step`.
        done: Called after each rank; :func:`telechat_moe.processes.in_clean_process` knows it by this name.

    Raises:
        BadInputError: The layout does not fit the model, or MindSpore refuses it.
    """
    source = step_source(
        recipe,
        target=target,
        full_batch=full_batch,
        optimizer=optimizer,
        shared_graph=shared_graph,
        graph=graph,
    )
    devices = recipe.devices
    chosen = range(devices) if ranks is None else ranks
    compiled = (source.settings, source.context, done, source.switches)
    return compile_ranks(source.build, list(chosen), devices, *compiled)
