"""The routed experts."""

from mindspore import Tensor, nn, ops

from telechat_moe.model.init import output_std
from telechat_moe.model.linear import DTYPES, weight
from telechat_moe.ops.grouped_matmul import GroupedMatmul
from telechat_moe.ops.swiglu import SwiGLU
from telechat_moe.recipe import ModelConfig


class Experts(nn.Cell):
    """``E`` SwiGLU MLPs, each applied to its own blocks of rows.

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
        self.cast = ops.Cast()
        self.gate_matmul = GroupedMatmul()
        self.up_matmul = GroupedMatmul()
        self.act = SwiGLU()
        self.down_matmul = GroupedMatmul()

    def construct(self, x_GRH: Tensor, expert_G: Tensor | None = None) -> Tensor:
        """Return ``[G, R, H]``; block ``g`` goes through expert ``expert_G[g]`` (None: ``g``)."""
        dtype = self.compute_dtype
        x = self.cast(x_GRH, dtype)
        gate = self.gate_matmul(x, self.cast(self.gate, dtype), expert_G)
        up = self.up_matmul(x, self.cast(self.up, dtype), expert_G)
        return self.down_matmul(self.act(gate, up), self.cast(self.down, dtype), expert_G)
