"""Weights by which sums over tokens become means over the tokens of a whole global batch."""

from collections.abc import Sequence

import numpy as np
from mindspore import Parameter, Tensor

from telechat_moe.graph.execute import TOKEN_WEIGHTS
from telechat_moe.recipe import ModelConfig

LOSS_MASK = 2
"""Place of the loss mask among the inputs of the model."""


def token_weights(
    config: ModelConfig, masks: Sequence[np.ndarray], micro_batches: int, parts: int = 1
) -> np.ndarray:
    """Return the factors of the summed losses of each micro-batch of a step.

    ``M / n_0`` for the next token and ``M factor / (depth n_k)`` for MTP depth ``k``, whose labels are ``k`` tokens
    further on, so that ``n_k`` leaves the first ``k`` tokens of each sequence out. The mean over the ``M`` micro-batches
    is then the mean over the tokens of the step, however unevenly the masks keep them.

    Args:
        masks: Loss masks of the whole global batch, ``[B, S]`` each, in any parts, marked or not (``model.by_source``).
        micro_batches: ``M``.
        parts: Parts of a sequence, each of which gives balance losses.

    Returns:
        fp32: the next token's, those of the depths (0 beyond them), and one over the parts for the balance losses; as many
        as the model gives terms.
    """
    depth = config.num_nextn_predict_layers
    kept_S = np.sum([np.minimum(mask, 1).sum(0, dtype=np.float64) for mask in masks], 0)
    tokens = np.array([kept_S[k:].sum() for k in range(1 + depth)])
    factors = np.array([1.0] + [(config.mtp_loss_factor or 0.0) / depth for _ in range(depth)])
    weights = np.zeros(_terms(config), np.float32)
    weights[: 1 + depth] = micro_batches * factors / np.maximum(tokens, 1e-8)
    weights[-1] = 1.0 / parts
    return weights


def _terms(config: ModelConfig) -> int:
    """Return how many losses the model gives: next token, an odd number of MTP depths, balance."""
    return 2 + (max(1, config.num_nextn_predict_layers) | 1)


def weights_parameter(config: ModelConfig) -> Parameter | None:
    """Return the parameter of a step that holds its weights, which the host sets before each; None: losses are means."""
    if not config.calculate_per_token_loss:
        return None
    ones = Tensor(np.ones(_terms(config), np.float32))
    return Parameter(ones, name=TOKEN_WEIGHTS, requires_grad=False, parallel_optimizer=False)
