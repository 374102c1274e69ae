"""SwiGLU activation."""

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import SiLU


class SwiGLU(nn.Cell):
    """``silu(gate) * up`` element by element.

    Source: Shazeer 2020, "GLU Variants Improve Transformer", equation 6.
    """

    def __init__(self) -> None:
        super().__init__()
        self.silu = SiLU()
        self.mul = ops.Mul()

    def construct(self, gate_TF: Tensor, up_TF: Tensor) -> Tensor:
        """Return the activation; both inputs have the same shape and data type."""
        return self.mul(self.silu(gate_TF), up_TF)


def swiglu_reference(gate_TF: np.ndarray, up_TF: np.ndarray) -> np.ndarray:
    """Define :class:`SwiGLU` in float64."""
    gate = gate_TF.astype(np.float64)
    return gate / (1 + np.exp(-gate)) * up_TF
