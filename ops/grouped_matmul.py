"""Matrix product of row groups, each with its own expert's weight."""

import numpy as np
from mindspore import Tensor, nn, ops


class GroupedMatmul(nn.Cell):
    """Multiply each block of rows by the weight of the expert that it belongs to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_of_block = ops.Gather()
        self.matmul = ops.BatchMatMul()

    def construct(
        self, x_GRI: Tensor, weight_EIO: Tensor, expert_G: Tensor | None = None
    ) -> Tensor:
        """Return ``[G, R, O]``.

        Args:
            x_GRI: Blocks of rows.
            weight_EIO: One matrix an expert, same data type as ``x``.
            expert_G: Expert of each block, int32; None = block ``g`` is expert ``g``.
        """
        if expert_G is None:
            return self.matmul(x_GRI, weight_EIO)
        return self.matmul(x_GRI, self.weight_of_block(weight_EIO, expert_G, 0))


def grouped_matmul_reference(
    x_PI: np.ndarray, weight_EIO: np.ndarray, expert_P: np.ndarray
) -> np.ndarray:
    """Define the product row by row in float64."""
    return np.einsum("pi,pio->po", x_PI.astype(np.float64), weight_EIO[expert_P].astype(np.float64))
