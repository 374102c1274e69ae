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


class ExpertProducts(nn.Cell):
    """The plain or the Ascend backend of the experts, with weights that it is given.

    Args:
        chosen: ``plain`` or ``ascend``.
    """

    def __init__(self, chosen: str) -> None:
        super().__init__()
        product = AscendGroupedMatmul if chosen == "ascend" else GroupedMatmul
        self.gate_matmul, self.up_matmul, self.down_matmul = product(), product(), product()
        self.act = SwiGLU()

    def construct(
        self, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, group: Tensor | None = None
    ) -> Tensor:
        """Return the results in the shape of ``x``; see :class:`Experts`."""
        y = self.act(self.gate_matmul(x, gate, group), self.up_matmul(x, up, group))
        return self.down_matmul(y, down, group)


class Experts(nn.Cell):
    """``E`` SwiGLU MLPs, each applied to its own rows.

    The fused and the Ascend backend take rows sorted by expert with the number of each, the plain one
    blocks of rows with the expert of each block (:func:`telechat_moe.model.dispatch.expert_backend`).

    Args:
        config: Model section of the recipe.
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
        """Return gate, up and down as the products take them."""
        return (
            self.cast_gate(self.gate, self.carried),
            self.cast_up(self.up, self.carried),
            self.cast_down(self.down, self.carried),
        )

    def construct(self, rows: Tensor, group: Tensor | None = None) -> Tensor:
        """Return the results in the shape of ``rows``.

        Args:
            rows: ``[P, H]`` sorted by expert, or blocks ``[G, R, H]``.
            group: Rows of each expert ``[E]``, or the expert of each block ``[G]`` (None: ``g``).
        """
        x = self.cast(rows, self.carried)
        gate, up, down = self.weights()
        if self.into_main_grads:
            y, _, _ = self.gate_up_into(x, gate, up, group, self.gate_main, self.up_main)
            return self.down_into(y, down, group, self.down_main)
        if self.fused:
            y, _, _ = self.gate_up(x, gate, up, group)
            return self.down_matmul(y, down, group)
        return self.products(x, gate, up, down, group)
