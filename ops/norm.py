"""Root-mean-square normalisation."""

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import One, initializer


class RMSNorm(nn.Cell):
    """Scale each row to unit root mean square, then by a learned weight.

    ``y = x / sqrt(mean(x^2) + eps) * weight``, computed in ``compute_dtype``.

    Args:
        width: Size of the last dimension.
        eps: Added to the mean square.
        compute_dtype: Data type of the arithmetic; the result has the input's.

    Source: Zhang and Sennrich 2019, equation 4.
    """

    def __init__(self, width: int, eps: float, compute_dtype: ms.Type = ms.float32) -> None:
        super().__init__()
        self.weight = Parameter(initializer(One(), (width,), ms.float32), name="weight")
        self.eps = Tensor(eps, compute_dtype)
        self.compute_dtype = compute_dtype
        self.to_compute = ops.Cast()
        self.square = ops.Square()
        self.mean = ops.ReduceMean(keep_dims=True)
        self.add_eps = ops.Add()
        self.rsqrt = ops.Rsqrt()
        self.normalize = ops.Mul()
        self.scale = ops.Mul()
        self.to_input = ops.Cast()

    def construct(self, x_TH: Tensor) -> Tensor:
        """Normalise the last dimension of ``x_TH`` (any leading dimensions)."""
        x = self.to_compute(x_TH, self.compute_dtype)
        inverse = self.rsqrt(self.add_eps(self.mean(self.square(x), -1), self.eps))
        y = self.scale(self.normalize(x, inverse), self.to_compute(self.weight, self.compute_dtype))
        return self.to_input(y, x_TH.dtype)


def rms_norm_reference(x_TH: np.ndarray, weight_H: np.ndarray, eps: float) -> np.ndarray:
    """Define :class:`RMSNorm` in float64."""
    x = x_TH.astype(np.float64)
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight_H
