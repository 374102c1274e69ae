"""A chain of matrix products as one graph, for the roofline of the benchmark."""

from mindspore import Tensor, nn, ops


class Chain(nn.Cell):
    """``x w w w ...``."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.matmul = ops.MatMul()

    def construct(self, x: Tensor, w: Tensor) -> Tensor:
        """Return the product."""
        for _ in range(self.length):
            x = self.matmul(x, w)
        return x
