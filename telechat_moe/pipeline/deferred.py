"""Compute the gradient of a product's weight later, in a graph of its own.

The backward of such a product gives the gradient of its operand, and returns what the weight's gradient needs as
the "gradients" of parameters that nothing reads (taps). So a chunk that is differentiated by its taps instead of its
weights gives dX and the operands of dW in one graph, and dW is one product a weight, by MindSpore's own derivative.
"""

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from telechat_moe.ops.grouped_matmul import GroupedMatmul

Outputs = tuple[Tensor, ...]


class _Product(nn.Cell):
    """``op(x, w)``."""

    def __init__(self, op: Any) -> None:
        super().__init__(auto_prefix=False)
        self.op = op

    def construct(self, x: Tensor, w: Tensor) -> Tensor:
        """Return the result."""
        return self.op(x, w)


class _Tapped(nn.Cell):
    """A product; integers travel through taps as fp32, exact below 2^24."""

    def __init__(self, op: Any) -> None:
        super().__init__(auto_prefix=False)
        self.product = _Grouped(op) if isinstance(op, GroupedMatmul) else _Product(op)
        self.gradient = ops.GradOperation(get_all=True, sens_param=True)
        self.to_float, self.to_int = ops.Cast(), ops.Cast()


class _TappedProduct(_Tapped):
    """``op(x, w)``; its backward gives the gradient of x, and x and the result's gradient to the taps."""

    def construct(self, x: Tensor, w: Tensor, tap_x: Tensor, tap_dy: Tensor) -> Tensor:
        """Return the result."""
        return self.product(x, w)

    def bprop(
        self, x: Tensor, w: Tensor, tap_x: Tensor, tap_dy: Tensor, out: Tensor, dout: Tensor
    ) -> Outputs:
        """Return the gradients; the weight's is zero."""
        return self.gradient(self.product)(x, w, dout)[0], ops.zeros_like(w), x, dout

    def weight_gradient(self, w: Tensor, x: Tensor, dy: Tensor) -> Tensor:
        """Return dW from what the taps gave."""
        return self.gradient(self.product)(x, w, dy)[1]


class _Grouped(nn.Cell):
    """:class:`telechat_moe.ops.grouped_matmul.GroupedMatmul` with a group, made of its primitives."""

    def __init__(self, op: GroupedMatmul) -> None:
        super().__init__(auto_prefix=False)
        self.weight_of_block, self.matmul = op.weight_of_block, op.matmul

    def construct(self, x: Tensor, w: Tensor, group: Tensor) -> Tensor:
        """Return the result."""
        return self.matmul(x, self.weight_of_block(w, group, 0))


class _TappedGrouped(_Tapped):
    """``op(x, w, group)``, as :class:`_TappedProduct`."""

    def construct(
        self, x: Tensor, w: Tensor, group: Tensor, tap_x: Tensor, tap_dy: Tensor, tap_group: Tensor
    ) -> Tensor:
        """Return the result."""
        return self.product(x, w, group)

    def bprop(
        self,
        x: Tensor,
        w: Tensor,
        group: Tensor,
        tap_x: Tensor,
        tap_dy: Tensor,
        tap_group: Tensor,
        out: Tensor,
        dout: Tensor,
    ) -> Outputs:
        """Return the gradients; the weight's is zero."""
        dx = self.gradient(self.product)(x, w, group, dout)[0]
        nothing = (ops.zeros_like(w), ops.zeros_like(group))
        return dx, *nothing, x, dout, self.to_float(group, ms.float32)

    def weight_gradient(self, w: Tensor, x: Tensor, dy: Tensor, group: Tensor) -> Tensor:
        """Return dW from what the taps gave."""
        return self.gradient(self.product)(x, w, self.to_int(group, ms.int32), dy)[1]


class _TappedRows(_Tapped):
    """``op(table, id)``: rows of a table; only the ids and the rows' gradient are handed out."""

    def construct(self, table: Tensor, id_T: Tensor, tap_id: Tensor, tap_dy: Tensor) -> Tensor:
        """Return the rows."""
        return self.product(table, id_T)

    def bprop(
        self, table: Tensor, id_T: Tensor, tap_id: Tensor, tap_dy: Tensor, out: Tensor, dout: Tensor
    ) -> Outputs:
        """Return the gradients; the table's is zero."""
        nothing = (ops.zeros_like(table), ops.zeros_like(id_T))
        return *nothing, self.to_float(id_T, ms.float32), dout

    def weight_gradient(self, w: Tensor, x: Tensor, dy: Tensor) -> Tensor:
        """Return dW from what the taps gave."""
        return self.gradient(self.product)(w, self.to_int(x, ms.int32), dy)[0]


KINDS = {"product": (_TappedProduct, 2), "grouped": (_TappedGrouped, 3), "rows": (_TappedRows, 2)}
"""Cell of each kind, and its inputs, of which there are as many taps."""


class Deferred(nn.Cell):
    """Replace an operator that reads a weight; called like it.

    Args:
        kind: One of :data:`KINDS`.
        use: Which of the weight's uses in the model this is.
    """

    def __init__(self, op: Any, kind: str, weight: str, use: int = 0) -> None:
        super().__init__(auto_prefix=False)
        make, self.inputs = KINDS[kind]
        self.run = make(op)
        self.weight, self.use = weight, use
        zero = np.zeros((), np.float32)
        names = [f"{weight}.use_{use}.tap_{i}" for i in range(self.inputs)]
        self.taps = ms.ParameterTuple([Parameter(Tensor(zero), name=name) for name in names])

    def construct(self, *args: Tensor) -> Tensor:
        """Return the result."""
        return self.run(*args[: self.inputs], *self.taps)
