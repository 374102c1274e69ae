"""A recipe of mode 1 in the terms of the planner's cost model."""

from collections.abc import Iterator
from typing import Any

from telechat_moe.recipe.mode1.schema import DynamicRecipe
from telechat_moe.recipe.mode1.to_mode0 import to_mode0
from telechat_moe.recipe.problems import RecipeError
from telechat_moe.recipe.schema import Broken


def priced(r: DynamicRecipe) -> dict[str, Any]:
    """Return the sections of mode 0 that cost as much: how FSDP shards becomes a level of the parallel optimizer.

    Raises:
        RecipeError: It cannot be translated, or the cost model has no term for a setting.
    """
    if problems := [r.problem(*broken) for broken in _unpriced(r)]:
        raise RecipeError(problems)
    sections = to_mode0(r).sections
    sharding = sections["parallel"].get("parallel_optimizer_config")
    if (
        sharding is not None
    ):  # parameters stay gathered between the passes; gradients and states are sharded
        sharding.setdefault("optimizer_level", "level2")
    return sections


def _unpriced(r: DynamicRecipe) -> Iterator[Broken]:
    """Yield the settings of which the cost model has no term."""
    c, lacks = r.config, "of which the planner's cost model has no term"
    if c.model.params_dtype in ("bfloat16", "bf16", "float16", "fp16"):
        problem = f"{c.model.params_dtype}, beside which mode 1 keeps weights and gradients in float32, {lacks}"
        yield "model.params_dtype", problem, "float32"
    if c.optimizer.type == "Muon":
        yield "optimizer.type", f"Muon, {lacks}: its state and products", "AdamW"
    if c.lora_config is not None:
        yield (
            "lora_config",
            f"adapters, {lacks}: few weights have gradients and states",
            "remove it",
        )
    if c.parallelism.cpu_offload:
        yield "parallelism.cpu_offload", f"True, {lacks}: shards in the host's memory", "False"
    if c.parallelism.dense_fsdp_shard_size not in (
        None,
        (r.sharded or 1) * c.parallelism.context_parallel,
    ):
        problem = f"{c.parallelism.dense_fsdp_shard_size}, {lacks}: another width for dense weights"
        yield "parallelism.dense_fsdp_shard_size", problem, "remove it"
    if c.recompute.mode == "select" or c.recompute.exclude_op:
        yield (
            "recompute.mode",
            f"parts of layers, {lacks}",
            "None, or full with full_recompute_layer",
        )
    if c.parallelism.pipeline_parallel_overlap_b_f:
        yield (
            "parallelism.pipeline_parallel_overlap_b_f",
            f"True, {lacks} in a recipe: --schedule overlap",
            "False",
        )
