"""Weights by which sums over tokens become means over the tokens of a whole global batch."""

from collections.abc import Sequence

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

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
    factors = _factors(config)
    kept_S = np.sum([np.minimum(mask, 1).sum(0, dtype=np.float64) for mask in masks], 0)
    tokens = np.array([kept_S[k:].sum() for k in range(len(factors))])
    weights = micro_batches * factors / np.maximum(tokens, 1e-8)
    return np.append(weights, 1.0 / parts).astype(np.float32)


class MeanOverProcesses(nn.Cell):
    """Weigh a process's sums over tokens in the graph, so that their mean over processes is the mean over the tokens of all.

    Args:
        processes: Each has one micro-batch of a step.
    """

    def __init__(self, config: ModelConfig, processes: int) -> None:
        super().__init__()
        factors = _factors(config)
        labels_KS = np.arange(config.seq_length) >= np.arange(len(factors))[:, None]
        self.labels_KS = Tensor(labels_KS.astype(np.float32))
        self.factors_K = Tensor((processes * factors).astype(np.float32))
        self.total = ops.AllReduce()

    def construct(self, lm: Tensor, mtp: Tensor, mask_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return next-token and MTP loss, ``(1,)``, of the sums that the model gives; the mask is as in :func:`token_weights`."""
        kept_S = ops.reduce_sum(ops.minimum(mask_BS, 1.0), 0)
        tokens_K = self.total(ops.reduce_sum(self.labels_KS * kept_S, 1))
        weights_K = ops.stop_gradient(self.factors_K / (tokens_K + 1e-8))
        return lm * weights_K[:1], ops.reduce_sum(mtp * weights_K[1:]).reshape((1,))


def _factors(config: ModelConfig) -> np.ndarray:
    """Return by what the mean losses of the next token and of each MTP depth are multiplied; 0 beyond the depths."""
    depth = config.num_nextn_predict_layers
    factors = np.zeros(_terms(config) - 1)
    factors[0], factors[1 : 1 + depth] = 1.0, (config.mtp_loss_factor or 0.0) / max(1, depth)
    return factors


def _terms(config: ModelConfig) -> int:
    """Return how many losses the model gives: next token, an odd number of MTP depths, balance."""
    return 2 + (max(1, config.num_nextn_predict_layers) | 1)


def weights_parameter(config: ModelConfig) -> Parameter | None:
    """Return the parameter of a step that holds its weights, which the host sets before each; None: losses are means."""
    if not config.calculate_per_token_loss:
        return None
    ones = Tensor(np.ones(_terms(config), np.float32))
    return Parameter(ones, name=TOKEN_WEIGHTS, requires_grad=False, parallel_optimizer=False)
