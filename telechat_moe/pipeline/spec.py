"""What a pipeline trains: enough to build the same model in every process. Needs no MindSpore."""

from dataclasses import dataclass

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.pipeline.sums import Arrays
from telechat_moe.recipe import ModelConfig, Recipe

COLUMNS = ("input_ids", "labels", "loss_mask", "position_ids")
FP32 = (
    "params_dtype",
    "compute_dtype",
    "layernorm_compute_dtype",
    "softmax_compute_dtype",
    "rotary_dtype",
    "router_dense_type",
)


@dataclass(frozen=True)
class Spec:
    """What is trained.

    Attributes:
        config: Model section; fp32 throughout.
        seed: Seed of the initial weights.
        block_rows: ``telechat_moe.moe_block_rows`` of the recipe.
        capacity_tokens: ``telechat_moe.moe_capacity_tokens`` of the recipe.

    Raises:
        BadInputError: A data type is not fp32: sums in another have no order that can be kept.
    """

    config: ModelConfig
    seed: int = 0
    block_rows: int | None = None
    capacity_tokens: int | None = None

    def __post_init__(self) -> None:
        for key in FP32:
            if (found := getattr(self.config, key)) not in ("float32", None):
                raise BadInputError(
                    f"model.model_config.{key}: found {found!r}, expected 'float32': gradients are compared "
                    f"bit by bit; --set model.model_config.{key}=float32"
                )

    @staticmethod
    def of(recipe: Recipe) -> "Spec":
        """Return the specification of a recipe; its layout does not matter."""
        own = recipe.telechat_moe
        return Spec(recipe.model_config, recipe.seed, own.moe_block_rows, own.moe_capacity_tokens)


def random_batches(config: ModelConfig, micro_batches: int, rows: int, seed: int) -> Arrays:
    """Return the columns of random micro-batches, each ``[m, B, S]``; a sequence's last label does not count."""
    rng = np.random.default_rng(seed)
    shape = (micro_batches, rows, config.seq_length)
    ids = rng.integers(0, config.vocab_size, shape).astype(np.int32)
    labels = np.concatenate([ids[..., 1:], np.zeros((*shape[:2], 1), np.int32)], -1)
    keep = np.ones(shape, np.float32)
    keep[..., -1] = 0
    position = np.broadcast_to(np.arange(shape[2], dtype=np.int32), shape).copy()
    columns = {"input_ids": ids, "labels": labels, "loss_mask": keep, "position_ids": position}
    return [columns[name] for name in COLUMNS]
