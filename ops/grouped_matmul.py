"""Matrix product of row groups, each with its own expert's weight.

The plain backend works on blocks of rows and the expert of each block; the fused backend on rows sorted by
expert and the number of rows of each expert (what ``group_list_type`` 1 of CANN's grouped product means).
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops import auto_generate

from telechat_moe.ops.custom import Tensors, custom_op


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


class FusedGroupedMatmul(nn.Cell):
    """The fused backend: tasks over experts and row blocks, both gradients in one call.

    Operands are rounded to ``compute_dtype`` in the kernel; the sum is fp32.
    """

    def __init__(self, compute_dtype: ms.Type = ms.float32) -> None:
        super().__init__()
        bf16 = compute_dtype == ms.bfloat16
        self.forward = custom_op("GroupedMatmul", lambda x, w, sizes: x, bf16=bf16)
        self.backward = custom_op("GroupedMatmulGrad", lambda x, w, sizes, dy: (x, w), 2, bf16=bf16)

    def construct(self, x_PI: Tensor, weight_EIO: Tensor, size_E: Tensor) -> Tensor:
        """Return ``[P, O]`` fp32.

        Args:
            x_PI: Rows sorted by expert, fp32.
            weight_EIO: One matrix an expert, fp32.
            size_E: Rows of each expert, int32 or int64; they must add up to ``P``.
        """
        return self.forward(x_PI, weight_EIO, size_E)

    def bprop(
        self, x_PI: Tensor, weight_EIO: Tensor, size_E: Tensor, out: Tensor, dout: Tensor
    ) -> Tensors:
        """Return the gradients of x and the weights."""
        return *self.backward(x_PI, weight_EIO, size_E, dout), ops.zeros_like(size_E)


class AscendGroupedMatmul(nn.Cell):
    """The Ascend backend: ``GroupedMatmul`` over the rows of one tensor; built, but not run here."""

    def __init__(self) -> None:
        super().__init__()
        self.cumsum = ops.CumSum()
        self.to_int64 = ops.Cast()
        self.matmul = auto_generate.GroupedMatmul(split_item=3, group_type=0)

    def construct(self, x_PI: Tensor, weight_EIO: Tensor, size_E: Tensor) -> Tensor:
        """Return ``[P, O]`` in the data type of x, which is the weight's.

        Args:
            size_E: Rows of each expert, int32. The primitive wants the last row of each, int64.
        """
        end_E = self.to_int64(self.cumsum(size_E, 0), ms.int64)
        return self.matmul([x_PI], [weight_EIO], None, None, None, None, None, end_E)[0]


class GroupedMatmulIntoMainGrad(nn.Cell):
    """GMMAdd: :class:`FusedGroupedMatmul` that adds the weights' gradient to a main gradient in place.

    The gradient that it gives for the weights is zero: differentiate by everything else.
    """

    def __init__(self, compute_dtype: ms.Type = ms.float32) -> None:
        super().__init__()
        bf16 = compute_dtype == ms.bfloat16
        self.forward = custom_op("GroupedMatmul", lambda x, w, sizes: x, bf16=bf16)
        self.backward = custom_op(
            "GroupedMatmulGradAdd", lambda x, w, sizes, dy, main: x, in_place=True, bf16=bf16
        )

    def construct(
        self, x_PI: Tensor, weight_EIO: Tensor, size_E: Tensor, main_EIO: Tensor
    ) -> Tensor:
        """Return ``[P, O]`` fp32."""
        return self.forward(x_PI, weight_EIO, size_E)

    def bprop(
        self,
        x_PI: Tensor,
        weight_EIO: Tensor,
        size_E: Tensor,
        main_EIO: Tensor,
        out: Tensor,
        dout: Tensor,
    ) -> Tensors:
        """Return the gradient of x, and zeros."""
        dx = self.backward(x_PI, weight_EIO, size_E, dout, main_EIO)
        zeros = (ops.zeros_like(weight_EIO), ops.zeros_like(size_E), ops.zeros_like(main_EIO))
        return dx, *zeros


class GroupedSwiGLU(nn.Cell):
    """``silu(x gate) * (x up)`` of each expert; the activation is applied while its rows are in cache.

    The operands of the products have ``compute_dtype``.
    """

    def __init__(self, compute_dtype: ms.Type = ms.float32) -> None:
        super().__init__()
        bf16 = compute_dtype == ms.bfloat16
        self.forward = custom_op(
            "GroupedSwiGLU", lambda x, gate, up, sizes: (x, x, x), 3, bf16=bf16
        )
        self.backward = custom_op(
            "GroupedSwiGLUGrad", lambda x, gw, uw, sizes, g, u, dy: (x, gw, uw), 3, bf16=bf16
        )

    def construct(
        self, x_PI: Tensor, gate_EIO: Tensor, up_EIO: Tensor, size_E: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the activation, and gate and up of each row for the backward pass, ``[P, O]``."""
        return self.forward(x_PI, gate_EIO, up_EIO, size_E)

    def bprop(
        self,
        x_PI: Tensor,
        gate_EIO: Tensor,
        up_EIO: Tensor,
        size_E: Tensor,
        out: Tensors,
        dout: Tensors,
    ) -> Tensors:
        """Return the gradients of x and both weights; only the activation's gradient counts."""
        grads = self.backward(x_PI, gate_EIO, up_EIO, size_E, out[1], out[2], dout[0])
        return *grads, ops.zeros_like(size_E)


class GroupedSwiGLUIntoMainGrad(nn.Cell):
    """:class:`GroupedSwiGLU` that adds both weights' gradients to main gradients in place."""

    def __init__(self, compute_dtype: ms.Type = ms.float32) -> None:
        super().__init__()
        bf16 = compute_dtype == ms.bfloat16
        self.forward = custom_op(
            "GroupedSwiGLU", lambda x, gate, up, sizes: (x, x, x), 3, bf16=bf16
        )
        self.backward = custom_op(
            "GroupedSwiGLUGradAdd",
            lambda x, gw, uw, sizes, g, u, dy, gm, um: x,
            in_place=True,
            bf16=bf16,
        )

    def construct(
        self,
        x_PI: Tensor,
        gate_EIO: Tensor,
        up_EIO: Tensor,
        size_E: Tensor,
        gate_main_EIO: Tensor,
        up_main_EIO: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the activation, and gate and up of each row, ``[P, O]``."""
        return self.forward(x_PI, gate_EIO, up_EIO, size_E)

    def bprop(
        self,
        x_PI: Tensor,
        gate_EIO: Tensor,
        up_EIO: Tensor,
        size_E: Tensor,
        gate_main_EIO: Tensor,
        up_main_EIO: Tensor,
        out: Tensors,
        dout: Tensors,
    ) -> Tensors:
        """Return the gradient of x, and zeros."""
        saved = (out[1], out[2], dout[0])
        mains = (gate_main_EIO, up_main_EIO)
        dx = self.backward(x_PI, gate_EIO, up_EIO, size_E, *saved, *mains)
        zeros = (ops.zeros_like(gate_EIO), ops.zeros_like(up_EIO), ops.zeros_like(size_E))
        return dx, *zeros, ops.zeros_like(gate_main_EIO), ops.zeros_like(up_main_EIO)


def grouped_matmul_reference(
    x_PI: np.ndarray, weight_EIO: np.ndarray, expert_P: np.ndarray
) -> np.ndarray:
    """Define the product in float64: row ``p`` by the weight of its expert."""
    y_PO = np.zeros((len(x_PI), weight_EIO.shape[2]))
    for e in np.unique(expert_P):
        rows = expert_P == e
        y_PO[rows] = x_PI[rows].astype(np.float64) @ weight_EIO[e].astype(np.float64)
    return y_PO
