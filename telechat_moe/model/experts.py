"""The routed experts."""

from mindspore import Parameter, Tensor, nn, ops

from telechat_moe.model.dispatch import expert_backend
from telechat_moe.model.init import output_std
from telechat_moe.model.linear import DTYPES, weight
from telechat_moe.ops.grouped_matmul import (
    AscendGroupedMatmul,
    FusedGroupedMatmul,
    GroupedMatmul,
    GroupedMatmulIntoMainGrad,
    GroupedSwiGLU,
    GroupedSwiGLUIntoMainGrad,
)
from telechat_moe.ops.matmul import carried
from telechat_moe.ops.swiglu import SwiGLU
from telechat_moe.recipe import ModelConfig

_PRODUCTS: dict[str, type[nn.Cell]] = {
    "ascend": AscendGroupedMatmul,
    "fused": FusedGroupedMatmul,
    "plain": GroupedMatmul,
}


class ExpertProducts(nn.Cell):
    """The products of the experts in one backend, with weights that it is given."""

    def __init__(self, chosen: str) -> None:
        super().__init__()
        product = _PRODUCTS[chosen]
        self.gate_matmul, self.up_matmul, self.down_matmul = product(), product(), product()
        self.act = SwiGLU()

    def construct(
        self,
        x_PH: Tensor,
        gate_EHF: Tensor,
        up_EHF: Tensor,
        down_EFH: Tensor,
        group: Tensor | None = None,
    ) -> Tensor:
        """Return the results in the shape of ``x_PH``, which may be blocks; see :class:`Experts`."""
        y_PF = self.act(
            self.gate_matmul(x_PH, gate_EHF, group), self.up_matmul(x_PH, up_EHF, group)
        )
        return self.down_matmul(y_PF, down_EFH, group)


class Experts(nn.Cell):
    """``E`` SwiGLU MLPs, each applied to its own rows.

    The fused and the Ascend backend take rows sorted by expert with the number of each, the plain one
    blocks of rows with the expert of each block (:func:`telechat_moe.model.dispatch.expert_backend`).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        E, H, F = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        std, params = config.initializer_range, DTYPES[config.params_dtype]
        self.gate = weight((E, H, F), std, "gate", params)
        self.up = weight((E, H, F), std, "up", params)
        self.down = weight((E, F, H), output_std(config), "down", params)
        self.compute_dtype = DTYPES[config.compute_dtype]
        self.carried = carried(self.compute_dtype)
        self.cast = ops.Cast()
        self.cast_gate, self.cast_up, self.cast_down = ops.Cast(), ops.Cast(), ops.Cast()
        chosen = expert_backend(config)
        self.fused = chosen == "fused"
        self.into_main_grads = False
        if self.fused:
            self.gate_up = GroupedSwiGLU(self.compute_dtype)
            self.down_matmul = FusedGroupedMatmul(self.compute_dtype)
        else:
            self.products = ExpertProducts(chosen)

    def accumulate_into(self, main_grads: dict[str, Parameter]) -> list[str]:
        """Like :meth:`telechat_moe.model.linear.Linear.accumulate_into` (GMMAdd)."""
        if not self.fused:
            return []
        self.gate_main = main_grads[self.gate.name]
        self.up_main = main_grads[self.up.name]
        self.down_main = main_grads[self.down.name]
        self.gate_up_into = GroupedSwiGLUIntoMainGrad(self.compute_dtype)
        self.down_into = GroupedMatmulIntoMainGrad(self.compute_dtype)
        self.into_main_grads = True
        return [w.name for w in (self.gate, self.up, self.down)]

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``gate_EHF``, ``up_EHF`` and ``down_EFH`` in the data type of the products."""
        return (
            self.cast_gate(self.gate, self.carried),
            self.cast_up(self.up, self.carried),
            self.cast_down(self.down, self.carried),
        )

    def construct(self, x_PH: Tensor, group: Tensor | None = None) -> Tensor:
        """Return the results in the shape of ``x_PH``.

        Args:
            x_PH: Rows sorted by expert, or blocks ``[G, R, H]``.
            group: Rows of each expert ``[E]``, or the expert of each block ``[G]`` (None: ``g``).
        """
        x_PH = self.cast(x_PH, self.carried)
        gate_EHF, up_EHF, down_EFH = self.weights()
        if self.into_main_grads:
            y_PF, _, _ = self.gate_up_into(
                x_PH, gate_EHF, up_EHF, group, self.gate_main, self.up_main
            )
            return self.down_into(y_PF, down_EFH, group, self.down_main)
        if self.fused:
            y_PF, _, _ = self.gate_up(x_PH, gate_EHF, up_EHF, group)
            return self.down_matmul(y_PF, down_EFH, group)
        return self.products(x_PH, gate_EHF, up_EHF, down_EFH, group)
