"""Build the training step of one rank of a recipe, and compile it."""

from collections.abc import Callable, Sequence
from functools import partial

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore.common.initializer import initializer

from telechat_moe.data.recipe import sources_of
from telechat_moe.graph.compile import Built, RankGraph, compile_ranks
from telechat_moe.model import CausalLM
from telechat_moe.model.block import MoE
from telechat_moe.model.router import Router
from telechat_moe.ops import select
from telechat_moe.processes import in_clean_process
from telechat_moe.recipe import Recipe
from telechat_moe.recipe.experts import dispatcher, drops, hop_between_nodes
from telechat_moe.recipe.speed_up import path_of
from telechat_moe.recipe.swap import swapped
from telechat_moe.sharding.apply import Options, place
from telechat_moe.sharding.cells.dispatch import ParallelDispatch
from telechat_moe.sharding.placement import ModelPlacement
from telechat_moe.sharding.recipe import (
    mesh_of,
    parallel_context,
    recomputed_layers,
    shard_threshold,
    stages_of,
)
from telechat_moe.sharding.recompute import recompute
from telechat_moe.sharding.shards import Region, WeightShards
from telechat_moe.sharding.swap import swap
from telechat_moe.train.optimizer import AdamW, from_recipe
from telechat_moe.train.rank_step import ExpertSquares, RankStep
from telechat_moe.train.token_weights import weights_parameter


def placed_model(
    recipe: Recipe, rank: int, target: str, *, shared_graph: bool
) -> tuple[CausalLM, list[Router], ModelPlacement]:
    """Return the model of one rank, the routers of the whole model in order, and what was placed where.

    Args:
        target: See :func:`build_step`; the caller chooses the backends.

    Raises:
        BadInputError: The layout does not fit the model.
    """
    mesh, stages, own = mesh_of(recipe), stages_of(recipe), recipe.telechat_moe
    sizes = own.moe_block_rows, own.moe_capacity_tokens
    # On Ascend other loaders serve the data, which mark no sources.
    sources = len(sources_of(recipe)) if target == "CPU" else 1
    model = CausalLM(recipe.model_config, *sizes, sources=sources)
    model.set_train()
    options = Options(
        dispatcher(recipe, target),
        recipe.runner_config.batch_size * mesh.dp,
        stages,
        _has_mask(recipe),
        shared_graph,
        # Stubs change the numbers of the messages, by which processes match them.
        shared_graph and target == "Ascend",
        hop_between_nodes(recipe.model_config)[0],
        balance_group=own.moe.balance_group,
        movable=own.moe.placement is not None,
        parts=recipe.parallel_config.seq_split_num,
        flash=target == "CPU" and own.operators.attention == "fused",
    )
    routers = [cell for _, cell in model.cells_and_names() if isinstance(cell, Router)]
    placement = place(model, mesh, rank, options)
    recompute(
        model,
        recomputed_layers(recipe, stages),
        recipe.recompute_config.recompute is True,
        set(own.sharding.recompute),
        recipe.recompute_config.mp_comm_recompute,
    )
    swap(model, swapped(recipe))
    return model, routers, placement


def build_step(
    recipe: Recipe,
    rank: int,
    *,
    target: str,
    optimizer: Callable[[Sequence[ms.Parameter]], AdamW] | None = None,
    shared_graph: bool | None = None,
) -> RankStep:
    """Return the step of one rank, placed.

    Args:
        target: ``CPU``: plain backends, to be exported and run on CPU processes; ``Ascend``: the recipe's.
        optimizer: Makes the optimizer; default: the recipe's AdamW.
        shared_graph: Micro-batches share one graph; for Ascend, shape-only stubs replace other stages' cells;
            default: where there are several, but on CPU only where the graph must be (:func:`_shares_graph`).

    Raises:
        BadInputError: The layout does not fit the model.
    """
    mesh, config, stages = mesh_of(recipe), recipe.model_config, stages_of(recipe)
    micro = recipe.micro_batches
    if shared_graph is None:
        shared_graph = micro > 1 and _shares_graph(recipe, target)
    chosen = recipe.telechat_moe.operators
    backends = ("plain", {}) if target == "CPU" else (chosen.default, chosen.backends())
    with select.using(*backends, target, chosen.host):
        model, routers, placement = placed_model(recipe, rank, target, shared_graph=shared_graph)
        params = [p for p in model.trainable_params() if placement.is_here(p)]
        head = stages.head.stage if stages is not None else 0
        use_bias, wrapper = config.moe_router_enable_expert_bias, recipe.runner_wrapper
        step = RankStep(
            model,
            (optimizer or partial(from_recipe, recipe))(params),
            [placement.shards(p, shard_threshold(recipe)) / mesh.stage_devices for p in params],
            1.0 / mesh.stage_devices if mesh.stage(rank) == head else 0.0,
            [(i, r) for i, r in enumerate(routers) if placement.is_here(r.weight)],
            len(routers),
            config.n_routed_experts,
            micro_batches=micro,
            pipeline=mesh.pp > 1,
            parts=recipe.parallel_config.seq_split_num,
            optimizer_sharding=recipe.parallel.enable_parallel_optimizer,
            alone=[placement.shards(p) == mesh.stage_devices for p in params],
            max_grad_norm=wrapper.max_grad_norm if wrapper.use_clip_grad else None,
            bias_rate=config.moe_router_bias_update_rate if use_bias else 0.0,
            shared_graph=shared_graph,
            elsewhere=[p for p in model.trainable_params() if not placement.is_here(p)],
            drops=drops(config) and len(routers) > 0,
            droppers=_droppers(model, placement),
            token_shards=mesh.dp * mesh.cp,
            token_weights=weights_parameter(config),
            movable=_movable(recipe, model, placement, params),
        )
    step.set_train()
    return step


def _droppers(model: CausalLM, placement: ModelPlacement) -> list[ParallelDispatch]:
    """Return the dispatches of a rank's stage that count dropped pairs."""
    cells = (x for _, x in model.cells_and_names() if isinstance(x, ParallelDispatch))
    return [x for x in cells if x.dropped is not None and placement.is_here(x.dropped)]


def _movable(
    recipe: Recipe, model: CausalLM, placement: ModelPlacement, params: Sequence[ms.Parameter]
) -> list[tuple[list[int], ExpertSquares]]:
    """Return, for each MoE layer of a rank whose experts may move, their parameters and how their squares are added."""
    if recipe.telechat_moe.moe.placement is None:
        return []
    mesh, shards = placement.mesh, WeightShards.of(recipe)
    first = mesh.stage(placement.rank) * mesh.stage_devices
    stage = range(first, first + mesh.stage_devices)
    index = {id(p): i for i, p in enumerate(params)}
    found = []
    for _, moe in model.cells_and_names():
        if not isinstance(moe, MoE) or not placement.is_here(moe.router.weight):
            continue
        own = [moe.experts.gate, moe.experts.up, moe.experts.down]
        places = places_of_rows([shards.shard(rank, own[0].name) for rank in stage])
        group = placement.group_of("stage", stage).name
        slot_E = moe.dispatch.slots.slot_E
        squares = ExpertSquares(slot_E, group, places, 1 / mesh.stage_devices)
        found.append(([index[id(p)] for p in own], squares))
    return found


def places_of_rows(regions: Sequence[Region | None]) -> np.ndarray:
    """Return where each row of a tensor is among the rows of all devices, one after the other, ``[rows, parts]`` int32.

    Args:
        regions: What each device holds. Of equal ones the first counts; a row that is cut has as many parts.
    """
    held = [region for region in regions if region is not None]
    parts = {rest: i for i, rest in enumerate(dict.fromkeys(region[1:] for region in held))}
    places = np.full((max(region[0][1] for region in held), len(parts)), -1, np.int32)
    for device, ((begin, end), *rest) in reversed(list(enumerate(held))):
        here = np.arange(end - begin) + device * (end - begin)
        places[begin:end, parts[tuple(rest)]] = here
    return places


def _shares_graph(recipe: Recipe, target: str) -> bool:
    """Return whether micro-batches share one graph.

    On CPU they do where the graph must be, where its passes get another order or activations are swapped, and where what a
    micro-batch counts is read by the next: nothing orders the router's counts in graphs of their own.
    """
    stages = stages_of(recipe)
    if target == "Ascend" or stages is None:
        return True
    interleaved = any(at.chunk for at in (*stages.layers, stages.head))
    parts = recipe.parallel_config.seq_split_num > 1
    by_step = recipe.model_config.moe_router_load_balancing_type == "gbs_aux_loss"
    scheduled = recipe.telechat_moe.sharding.pipeline_schedule is not None
    return interleaved or parts or by_step or scheduled or recipe.swap_config.swap


def example_batch(recipe: Recipe, full_batch: bool) -> tuple[Tensor, ...]:
    """Return one batch of the recipe's shapes; a compiler does not ask for its values, so it holds none."""
    mesh, length = mesh_of(recipe), recipe.model_config.seq_length
    rows = recipe.runner_config.batch_size * recipe.micro_batches
    rows *= mesh.dp if full_batch else 1
    ids = initializer("zeros", (rows, length), ms.int32)
    batch = [ids, ids, initializer("ones", (rows, length), ms.float32), ids]
    if _has_mask(recipe):
        batch.append(initializer("zeros", (rows, 1, length, length), ms.uint8))
    return tuple(batch)


def _has_mask(recipe: Recipe) -> bool:
    data = recipe.train_dataset.data_loader.config
    return data is not None and bool(data.create_attention_mask)


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
) -> list[RankGraph]:
    """Compile the whole training step of ranks of a recipe.

    Args:
        ranks: Global ranks; None = all.
        target: Backends, see :func:`build_step`; the front end's target is Ascend always.
        full_batch: See :func:`telechat_moe.sharding.recipe.parallel_context`.
        optimizer: See :func:`build_step`.
        shared_graph: See :func:`build_step`.

    Raises:
        BadInputError: The layout does not fit the model, or MindSpore refuses it.
    """
    settings = parallel_context(recipe, full_batch)

    def build(rank: int) -> Built:
        step = build_step(
            recipe, rank, target=target, optimizer=optimizer, shared_graph=shared_graph
        )
        batch = example_batch(recipe, settings.get("full_batch", False))
        return Built(step, batch)

    devices = mesh_of(recipe).devices
    context = {"max_call_depth": recipe.context.max_call_depth}
    chosen = range(devices) if ranks is None else ranks
    return compile_ranks(build, list(chosen), devices, settings, context, done, path_of(recipe))
