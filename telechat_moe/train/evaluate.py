"""The loss on the validation data."""

from collections.abc import Callable, Mapping

import numpy as np
from mindspore import nn

from telechat_moe.data import Loader, open_valid
from telechat_moe.data.dataset import Dataset
from telechat_moe.recipe import Recipe
from telechat_moe.train.callbacks import Losses
from telechat_moe.train.step import Evaluate, tensors

LossOf = Callable[[Mapping[str, np.ndarray]], float]
"""Return the next-token loss of a batch, nats per token, from its columns."""


def validation_loss(recipe: Recipe, model: nn.Cell, cell: Evaluate) -> Losses:
    """Return the loss of a model, of which ``cell`` is made, on the validation data; see :func:`loss_by_source`."""
    model.set_train(False)
    cell.set_train(False)
    losses = loss_by_source(recipe, lambda columns: float(cell(*tensors(columns)).asnumpy()[0]))
    model.set_train()
    return losses


def loss_by_source(recipe: Recipe, loss_of: LossOf) -> Losses:
    """Return the next-token loss on the validation data, nats per token.

    Returns:
        The mean over the sources, by their shares, and the loss of each by its prefix; none where there is one only.
    """
    sources = open_valid(recipe)
    losses = [_loss(recipe, loss_of, source.dataset) for source in sources]
    if len(sources) == 1:
        return losses[0], {}
    mean = sum(source.share * loss for source, loss in zip(sources, losses, strict=True))
    return mean, dict(zip((source.prefix for source in sources), losses, strict=True))


def _loss(recipe: Recipe, loss_of: LossOf, data: Dataset) -> float:
    """Return the loss on one source."""
    batch = min(recipe.micro_batch_samples, len(data))
    total = weight = 0.0
    # Whole global batches, so that every layout evaluates the same samples.
    full = len(data) // recipe.global_batch or 1
    count = min(recipe.telechat_moe.evaluation.batches, full) * recipe.micro_batches
    with Loader(data, batch, epochs=1, prefetch=1) as loader:
        for _, columns in zip(range(count), loader, strict=False):
            tokens = float(columns["loss_mask"].sum())
            total, weight = total + loss_of(columns) * tokens, weight + tokens
    return total / max(weight, 1.0)
