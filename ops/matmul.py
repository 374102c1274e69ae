"""Matrix product of a linear layer."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from telechat_moe.errors import BadInputError
from telechat_moe.ops.custom import custom_op
from telechat_moe.ops.select import backend, target


def carried(dtype: ms.Type) -> ms.Type:
    """Return the data type in which results of a ``dtype`` product travel between operators.

    On CPU that is fp32 for fp32 and bfloat16 products: the fused kernels round their operands to bfloat16
    themselves, and MindSpore has next to no bfloat16 kernels there.

    Raises:
        BadInputError: bfloat16 is asked for and the plain backend serves on CPU.
    """
    if _fused(dtype):
        return ms.float32
    if dtype == ms.bfloat16 and target() == "CPU":
        raise BadInputError(
            "compute_dtype bfloat16 on CPU needs the fused operator `matmul` (MindSpore has no "
            "bfloat16 products there), and plain was chosen; see `python -m telechat_moe.ops.select`"
        )
    return dtype


def matmul(compute_dtype: ms.Type = ms.float32) -> nn.Cell | ops.Primitive:
    """Return ``(x_TI, w_OI) -> y_TO = x w^T``; ``MatMul`` itself where it serves.

    Operands have ``compute_dtype``, the sum is fp32; the fused backend takes and gives fp32 and rounds operands itself.
    """
    return Matmul(compute_dtype) if _fused(compute_dtype) else ops.MatMul(transpose_b=True)


def _fused(dtype: ms.Type) -> bool:
    return backend("matmul") == "fused" and dtype in (ms.float32, ms.bfloat16)


class Matmul(nn.Cell):
    """The fused backend: blocks of rows and columns over the worker threads, both gradients in one call."""

    def __init__(self, compute_dtype: ms.Type = ms.float32) -> None:
        super().__init__()
        bf16 = compute_dtype == ms.bfloat16
        self.forward = custom_op("Matmul", lambda x, w: x, bf16=bf16)
        self.backward = custom_op("MatmulGrad", lambda x, w, dy: (x, w), 2, bf16=bf16)

    def construct(self, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        """Return ``[T, O]`` fp32."""
        return self.forward(x_TI, weight_OI)

    def bprop(
        self, x_TI: Tensor, weight_OI: Tensor, out: Tensor, dout: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and the weight."""
        return self.backward(x_TI, weight_OI, dout)


class MatmulIntoMainGrad(nn.Cell):
    """:class:`Matmul` whose weight gradient is added to a main gradient in place.

    The gradient that it gives for the weight is zero: differentiate by everything else.
    """

    def __init__(self, compute_dtype: ms.Type = ms.float32) -> None:
        super().__init__()
        bf16 = compute_dtype == ms.bfloat16
        self.forward = custom_op("Matmul", lambda x, w: x, bf16=bf16)
        self.backward = custom_op(
            "MatmulGradAdd", lambda x, w, dy, main: x, in_place=True, bf16=bf16
        )

    def construct(self, x_TI: Tensor, weight_OI: Tensor, main_grad_OI: Tensor) -> Tensor:
        """Return ``[T, O]`` fp32."""
        return self.forward(x_TI, weight_OI)

    def bprop(
        self, x_TI: Tensor, weight_OI: Tensor, main_grad_OI: Tensor, out: Tensor, dout: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradient of x, and zeros."""
        dx = self.backward(x_TI, weight_OI, dout, main_grad_OI)
        return dx, ops.zeros_like(weight_OI), ops.zeros_like(main_grad_OI)


def matmul_reference(x_TI: np.ndarray, weight_OI: np.ndarray) -> np.ndarray:
    """Define the product in float64."""
    return x_TI.astype(np.float64) @ weight_OI.astype(np.float64).T
