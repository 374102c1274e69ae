"""What a recipe says about splitting: mesh, options, MindSpore's settings."""

from dataclasses import replace
from typing import Any

from telechat_moe.recipe import Recipe
from telechat_moe.recipe.experts import hop_between_nodes
from telechat_moe.sharding.layouts import balance_axes
from telechat_moe.sharding.mesh import Mesh
from telechat_moe.sharding.stages import StageChunk, Stages, assign_layers


def mesh_of(recipe: Recipe) -> Mesh:
    """Return the mesh of a recipe.

    Raises:
        BadInputError: The degrees do not fit together.
    """
    if not recipe.use_parallel:
        return Mesh()
    p = recipe.parallel_config
    return Mesh(
        dp=p.data_parallel,
        cp=p.context_parallel,
        tp=p.model_parallel,
        pp=p.pipeline_stage,
        ep=p.expert_parallel,
        sp=p.use_seq_parallel and p.model_parallel > 1,
        expert_tp=recipe.telechat_moe.sharding.expert_tensor_parallel and p.model_parallel > 1,
        zero1=recipe.parallel.enable_parallel_optimizer,
        node=hop_between_nodes(recipe.model_config)[1],
    )


def whole_copies(recipe: Recipe) -> bool:
    """Return whether CPU processes train whole copies of the model, each on its rows, in MindSpore's data-parallel mode.

    The mode has no optimizer states in shards and swaps nothing; such recipes are trained as shards, as all others are.
    """
    modes, swaps = (0, "DATA_PARALLEL"), recipe.swap_config.swap or recipe.optimizer.swap
    is_chosen = recipe.use_parallel and recipe.parallel.parallel_mode in modes
    sharded = recipe.parallel.enable_parallel_optimizer
    return is_chosen and recipe.context.device_target == "CPU" and not (sharded or swaps)


def runs_natively(recipe: Recipe) -> bool:
    """Return whether each rank compiles its step for the device that runs it; else rank graphs are rewritten for CPU processes."""
    return recipe.context.device_target != "CPU" or whole_copies(recipe)


def interleaved(recipe: Recipe) -> bool:
    """Return whether a pipeline stage has several chunks."""
    stages = stages_of(recipe)
    return stages is not None and stages.chunks > 1


def head_stage(recipe: Recipe) -> int:
    """Return the pipeline stage of the output head."""
    stages = stages_of(recipe)
    return stages.head.stage if stages is not None else 0


def has_mask(recipe: Recipe) -> bool:
    """Return whether the batches of a recipe hold an attention mask."""
    data = recipe.train_dataset.data_loader.config
    return data is not None and data.create_attention_mask


def forward_of(recipe: Recipe) -> bool:
    """Return whether a run of a recipe has a forward graph, for evaluation or samples."""
    settings = recipe.telechat_moe
    evaluates = settings.evaluation.interval > 0 or settings.sample is not None
    return evaluates and not interleaved(recipe)


def smaller_steps(recipe: Recipe) -> dict[int, Recipe]:
    """Return the recipes of the steps that are smaller than the largest of a batch schedule, by their micro-batches."""
    largest, recipes = recipe.micro_batches, dict[int, Recipe]()
    settings = replace(recipe.telechat_moe, step_batch_size_schedule=None)
    for batch in sorted({batch for _, batch in recipe.batches.entries}):
        count = largest * batch // recipe.global_batch
        if recipe.parallel_config.pipeline_stage > 1:
            pipeline = replace(recipe.parallel_config, micro_batch_num=count)
            recipes[count] = replace(recipe, parallel_config=pipeline, telechat_moe=settings)
        else:
            runner = replace(recipe.runner_config, gradient_accumulation_steps=count)
            recipes[count] = replace(recipe, runner_config=runner, telechat_moe=settings)
    recipes.pop(largest, None)
    return recipes


def balance_groups(recipe: Recipe, mesh: Mesh) -> int | None:
    """Return into how many runs of rows the layout divides a micro-batch for its balance loss; None: by sequence."""
    kind = recipe.model_config.moe_router_load_balancing_type
    if kind == "seq_aux_loss":
        return None
    axes = balance_axes(mesh, kind, recipe.telechat_moe.moe.balance_group)
    return mesh.stage_devices // mesh.size(axes)


def stages_of(recipe: Recipe) -> Stages | None:
    """Return where the cells of the model are in the pipeline; None without one.

    Raises:
        BadInputError: The recipe's offsets do not fit.
    """
    stages, config = recipe.stages, recipe.model_config
    if stages == 1:
        return None
    pipeline = recipe.parallel.pipeline_config
    scheduler = pipeline.pipeline_scheduler if pipeline and pipeline.pipeline_interleave else None
    return assign_layers(
        config.num_hidden_layers,
        stages,
        config.pp_interleave_num if scheduler else 1,
        config.offset,
        scheduler == "zero_bubble_v",
    )


def recomputed_layers(recipe: Recipe, stages: Stages | None) -> set[int]:
    """Return the layers that are recomputed as a whole: all, none, or the first of each stage and chunk.

    With `swap_config.swap` the list names them, as in MindFormers.
    """
    setting, layers = recipe.recompute_config.recompute, recipe.model_config.num_hidden_layers
    if isinstance(setting, bool):
        return set(range(layers)) if setting else set()
    if recipe.swap_config.swap:
        return {layer for layer in setting if isinstance(layer, int)}
    chunks = stages.layers if stages is not None else [StageChunk(0, 0)] * layers
    rows: list[Any] = setting if setting and isinstance(setting[0], list) else [setting]
    left = {
        StageChunk(stage, chunk): layers if count is True else int(count)
        for chunk, row in enumerate(rows)
        for stage, count in enumerate(row)
    }
    chosen: set[int] = set()
    for layer, chunk in enumerate(chunks):
        if left.get(chunk, 0):
            left[chunk] -= 1
            chosen.add(layer)
    return chosen


def even_exchange(recipe: Recipe, mesh: Mesh) -> tuple[int, int]:
    """Return elements and rows that a device sends in an AlltoAllV, with tokens spread evenly over experts."""
    config = recipe.model_config
    tokens = recipe.runner_config.batch_size * mesh.dp * config.seq_length
    spread = mesh.dp * mesh.cp if mesh.expert_tp else mesh.stage_devices
    rows = tokens // spread * config.num_experts_per_tok
    return rows * config.hidden_size, rows


def shard_threshold(recipe: Recipe) -> int | None:
    """Return from which size on, bytes, MindSpore shards optimizer states; None: it does not."""
    if not recipe.parallel.enable_parallel_optimizer:
        return None
    config = recipe.parallel.parallel_optimizer_config
    return (config.parallel_optimizer_threshold if config is not None else 64) * 1024


def parallel_context(recipe: Recipe, full_batch: bool | None = None) -> dict[str, Any]:
    """Return the settings of a recipe for MindSpore's ``set_auto_parallel_context``.

    Args:
        full_batch: Every process feeds the whole batch; None = as the recipe says.
    """
    parallel, stages = recipe.parallel, recipe.stages
    every_row = parallel.full_batch if full_batch is None else full_batch
    settings: dict[str, Any] = {
        "enable_alltoall": True,
        "full_batch": every_row,
        "gradients_mean": False,
        "search_mode": "sharding_propagation",
    }
    if not every_row and isinstance(parallel.dataset_strategy, list):
        settings["dataset_strategy"] = tuple(tuple(axes) for axes in parallel.dataset_strategy)
        del settings["full_batch"]
    if stages > 1:
        settings["pipeline_stages"] = stages
        config = parallel.pipeline_config
        if config is not None and config.pipeline_interleave:
            settings["pipeline_config"] = {
                "pipeline_interleave": True,
                "pipeline_scheduler": config.pipeline_scheduler,
            }
    if parallel.enable_parallel_optimizer:
        settings["enable_parallel_optimizer"] = True
        config = parallel.parallel_optimizer_config
        threshold = config.parallel_optimizer_threshold if config is not None else 64
        accumulate = config.gradient_accumulation_shard if config is not None else False
        settings["parallel_optimizer_config"] = {
            "parallel_optimizer_threshold": threshold,
            "gradient_accumulation_shard": accumulate,
        }
        size = config.optimizer_weight_shard_size if config is not None else None
        if size:
            settings["parallel_optimizer_config"]["optimizer_weight_shard_size"] = size
    return settings


def device_context(recipe: Recipe) -> dict[str, Any]:
    """Return what a recipe says of its devices, for MindSpore's ``set_context``; nothing for CPU."""
    context = recipe.context
    if context.device_target == "CPU":
        return {}
    names = ("max_device_memory", "mempool_block_size")
    values: dict[str, Any] = {name: getattr(context, name) for name in names}
    if context.jit_config is not None and context.jit_config.jit_level is not None:
        values["jit_config"] = {"jit_level": context.jit_config.jit_level}
    return {name: value for name, value in values.items() if value is not None}
