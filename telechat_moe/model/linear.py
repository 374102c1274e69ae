"""Linear layer, gated MLP and weight creation."""

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Zero, initializer

from telechat_moe.ops.matmul import MatmulIntoMainGrad, carried, matmul
from telechat_moe.ops.select import backend
from telechat_moe.ops.swiglu import SwiGLU

DTYPES = {"float32": ms.float32, "bfloat16": ms.bfloat16, "float16": ms.float16}
DTYPES |= {"fp32": ms.float32, "bf16": ms.bfloat16, "fp16": ms.float16}


def weight(shape: tuple[int, ...], std: float, name: str, dtype: ms.Type = ms.float32) -> Parameter:
    """Return a parameter that :func:`telechat_moe.model.init.initialize` fills from N(0, std^2)."""
    parameter = Parameter(initializer(Zero(), shape, dtype), name=name)
    parameter.init_std = std
    return parameter


class Linear(nn.Cell):
    """``y = x W^T``, no bias.

    Args:
        inputs: Width of x.
        outputs: Width of y.
        std: Standard deviation of the initial weight ``[outputs, inputs]``.
        compute_dtype: Data type of the product's operands; y travels in
            :func:`telechat_moe.ops.matmul.carried` of it.
        params_dtype: Data type of the weight.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        std: float,
        compute_dtype: ms.Type,
        params_dtype: ms.Type = ms.float32,
    ) -> None:
        super().__init__()
        self.weight = weight((outputs, inputs), std, "weight", params_dtype)
        self.compute_dtype = compute_dtype
        self.carried = carried(compute_dtype)
        self.cast = ops.Cast()
        self.cast_weight = ops.Cast()
        self.matmul = matmul(compute_dtype)
        self.main_grad = None

    def accumulate_into(self, main_grads: dict[str, Parameter]) -> list[str]:
        """From now on, add the weight's gradient to its main gradient in place, if this backend can.

        Returns the names of these weights, which get no other gradient.
        """
        if backend("matmul") != "fused":
            return []
        self.main_grad = main_grads[self.weight.name]
        self.matmul_into = MatmulIntoMainGrad(self.compute_dtype)
        return [self.weight.name]

    def construct(self, x_TI: Tensor) -> Tensor:
        """Return ``[T, outputs]``."""
        x = self.cast(x_TI, self.carried)
        weight_OI = self.cast_weight(self.weight, self.carried)
        if self.main_grad is not None:
            return self.matmul_into(x, weight_OI, self.main_grad)
        return self.matmul(x, weight_OI)


class MLP(nn.Cell):
    """SwiGLU MLP: ``down(silu(gate(x)) * up(x))``; dense layers and shared experts."""

    def __init__(
        self,
        hidden: int,
        width: int,
        std: float,
        down_std: float,
        compute_dtype: ms.Type,
        params_dtype: ms.Type = ms.float32,
    ) -> None:
        super().__init__()
        self.gate = Linear(hidden, width, std, compute_dtype, params_dtype)
        self.up = Linear(hidden, width, std, compute_dtype, params_dtype)
        self.act: nn.Cell = SwiGLU()
        self.down = Linear(width, hidden, down_std, compute_dtype, params_dtype)

    def construct(self, x_TH: Tensor) -> Tensor:
        """Return ``[T, H]``."""
        return self.down(self.act(self.gate(x_TH), self.up(x_TH)))
