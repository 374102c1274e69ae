"""Softmax over the last dimension."""

import mindspore as ms
from mindspore import Tensor, nn, ops

from telechat_moe.ops import dvm
from telechat_moe.ops.select import backend


class Softmax(nn.Cell):
    """``exp(x - max) / sum``; backends: fused (a DVM program, fp32), plain (also on Ascend)."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = FusedSoftmax() if backend("softmax") == "fused" else None
        self.softmax = ops.Softmax(-1)

    def construct(self, x_TH: Tensor) -> Tensor:
        """Return probabilities ``[T, H]``."""
        if self.fused is not None and x_TH.dtype == ms.float32:
            return self.fused(x_TH)
        return self.softmax(x_TH)


def softmax_program() -> dvm.DvmProgram:
    """Return ``x [T, H] -> [T, H]`` for the virtual machine."""

    def softmax(k: dvm.Builder, x: dvm.ProgramValue) -> None:
        e = k.exp(x - k.max(x, -1))
        k.store(e * k.reciprocal(k.sum(e, -1)))

    return dvm.build(softmax, ("T", "H"))


def softmax_backward() -> dvm.DvmProgram:
    """Return ``(y, dy) -> dx``: softmax's own result is all that it needs."""

    def backward(k: dvm.Builder, y: dvm.ProgramValue, dy: dvm.ProgramValue) -> None:
        k.store(y * (dy - k.sum(y * dy, -1)))

    return dvm.build(backward, ("T", "H"), ("T", "H"))


class FusedSoftmax(nn.Cell):
    """The fused backend."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = dvm.custom_op(softmax_program())
        self.backward = dvm.custom_op(softmax_backward())

    def construct(self, x_TH: Tensor) -> Tensor:
        """Return probabilities ``[T, H]``."""
        return self.forward(x_TH)

    def bprop(self, x_TH: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        """Return the gradient of x."""
        return (self.backward(out, dout),)
