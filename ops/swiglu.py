"""SwiGLU activation."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import SiLU, Swiglu

from telechat_moe.ops import dvm
from telechat_moe.ops.select import backend


class SwiGLU(nn.Cell):
    """``silu(gate) * up`` element by element.

    Backends: fused (a DVM program), plain, ascend (``Swiglu`` over both inputs side by side; not run here).

    Source: Shazeer 2020, "GLU Variants Improve Transformer", equation 6.
    """

    def __init__(self) -> None:
        super().__init__()
        self.backend = backend("swiglu")
        if self.backend == "fused":
            self.fused = FusedSwiGLU()
        elif self.backend == "ascend":
            self.concat = ops.Concat(-1)
            self.swiglu = Swiglu()
        self.silu = SiLU()
        self.mul = ops.Mul()

    def construct(self, gate_TF: Tensor, up_TF: Tensor) -> Tensor:
        """Return the activation; both inputs have the same shape and data type."""
        if self.backend == "fused" and gate_TF.dtype == ms.float32:
            return self.fused(gate_TF, up_TF)
        if self.backend == "ascend":
            return self.swiglu(self.concat((gate_TF, up_TF)), -1)
        return self.mul(self.silu(gate_TF), up_TF)


def swiglu_program() -> dvm.DvmProgram:
    """Return ``(gate [T, F], up [T, F]) -> [T, F]`` for the virtual machine."""

    def swiglu(k: dvm.Builder, gate: dvm.ProgramValue, up: dvm.ProgramValue) -> None:
        k.store(gate * k.sigmoid(gate) * up)

    return dvm.build(swiglu, ("T", "F"), ("T", "F"))


class FusedSwiGLU(nn.Cell):
    """The fused backend, fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = dvm.custom_op(swiglu_program())
        self.backward = dvm.custom_op(dvm.grad(swiglu_program()))
        self.reshape = ops.Reshape()

    def rows(self, x_F: Tensor) -> Tensor:
        """Return ``[T, F]`` of any leading dimensions."""
        return self.reshape(x_F, (-1, x_F.shape[-1]))

    def construct(self, gate_F: Tensor, up_F: Tensor) -> Tensor:
        """Return the activation, in the shape of the inputs."""
        return self.reshape(self.forward(self.rows(gate_F), self.rows(up_F)), gate_F.shape)

    def bprop(
        self, gate_F: Tensor, up_F: Tensor, out: Tensor, dout: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return both gradients."""
        dgate, dup = self.backward(self.rows(gate_F), self.rows(up_F), self.rows(dout))
        return self.reshape(dgate, gate_F.shape), self.reshape(dup, gate_F.shape)


def swiglu_reference(gate_TF: np.ndarray, up_TF: np.ndarray) -> np.ndarray:
    """Define :class:`SwiGLU` in float64."""
    gate = gate_TF.astype(np.float64)
    return gate / (1 + np.exp(-gate)) * up_TF
