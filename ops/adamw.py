"""AdamW over all tensors of a model, and the norm of their gradients."""

from collections.abc import Sequence

import numpy as np
from mindspore import Tensor, nn, ops

from telechat_moe.ops.custom import custom_op


class FusedAdamW(nn.Cell):
    """``w -= rate (m / (sqrt(v) + epsilon) + decay w)`` for all tensors at once, in place.

    Gradients are multiplied by the clip factor on the way. See
    :class:`telechat_moe.train.optimizer.AdamW` for how bias correction enters the three scalars.

    Args:
        betas: Decay rates of the moments.
        decayed: For each tensor, whether weight decay applies.
    """

    def __init__(self, betas: tuple[float, float], decayed: Sequence[bool]) -> None:
        super().__init__()
        self.update = custom_op(
            "AdamW",
            lambda *inputs: inputs[0],
            in_place=True,
            beta1=betas[0],
            beta2=betas[1],
            new1=1 - betas[0],
            new2=1 - betas[1],
            decayed=[int(x) for x in decayed],
        )

    def construct(
        self,
        weights: tuple[Tensor, ...],
        first: tuple[Tensor, ...],
        second: tuple[Tensor, ...],
        gradients: tuple[Tensor, ...],
        rate: Tensor,
        epsilon: Tensor,
        decay: Tensor,
        clip: Tensor,
    ) -> Tensor:
        """Update weights and moments; return a token ``(1,)``."""
        scalars = (rate, epsilon, decay, clip)
        return self.update(*weights, *first, *second, *gradients, *scalars)


class FusedNorm(nn.Cell):
    """Norm of all tensors together ``()`` and their square sums ``[tensors]``.

    fp32 over 1024 values, float64 over those sums, in an order that does not depend on threads.
    """

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.sums = custom_op(
            "SquareSums", lambda *inputs: (inputs[0], inputs[0]), 2, tensors=tensors
        )
        self.reshape = ops.Reshape()

    def construct(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return ``(norm, square_sums)`` fp32."""
        norm, sums = self.sums(*tensors)
        return self.reshape(norm, ()), sums


def adamw_reference(
    w: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    betas: tuple[float, float],
    rate: float,
    epsilon: float,
    decay: float,
    clip: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Define the update in float64; returns ``(w, m, v)``."""
    g = g.astype(np.float64) * clip
    m = betas[0] * m.astype(np.float64) + (1 - betas[0]) * g
    v = betas[1] * v.astype(np.float64) + (1 - betas[1]) * g * g
    w = w.astype(np.float64)
    return w - rate * (m / (np.sqrt(v) + epsilon) + decay * w), m, v
