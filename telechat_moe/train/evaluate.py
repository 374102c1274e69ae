"""The loss on the validation data."""

from telechat_moe.data import Loader, open_recipe
from telechat_moe.recipe import Recipe
from telechat_moe.sharding.recipe import mesh_of, micro_batches
from telechat_moe.train.engine import Engine, tensors


def validation_loss(recipe: Recipe, engine: Engine) -> float:
    """Return the next-token loss of an engine's model on the validation data, nats per token."""
    data = open_recipe(recipe, "valid")
    batch = min(recipe.runner_config.batch_size * mesh_of(recipe).dp, len(data))
    total = weight = 0.0
    engine.model.set_train(False)
    engine.evaluate_cell.set_train(False)
    # Whole global batches, so that every layout evaluates the same samples.
    whole = len(data) // recipe.global_batch or 1
    count = min(recipe.telechat_moe.evaluation.batches, whole) * micro_batches(recipe)
    with Loader(data, batch, epochs=1, prefetch=1) as loader:
        for _, columns in zip(range(count), loader, strict=False):
            tokens = float(columns["loss_mask"].sum())
            loss = engine.evaluate_cell(*tensors(columns)).asnumpy()
            total, weight = total + float(loss[0]) * tokens, weight + tokens
    engine.model.set_train()
    return total / max(weight, 1.0)
