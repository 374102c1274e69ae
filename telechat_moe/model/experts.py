"""The routed experts."""

from mindspore import Parameter, Tensor, nn, ops

from telechat_moe.model.init import output_std
from telechat_moe.model.linear import DTYPES, weight
from telechat_moe.ops.grouped_matmul import (
    FusedGroupedMatmul,
    GroupedMatmul,
    GroupedMatmulIntoMainGrad,
    GroupedSwiGLU,
    GroupedSwiGLUIntoMainGrad,
)
from telechat_moe.ops.matmul import carried
from telechat_moe.ops.select import face
from telechat_moe.ops.swiglu import SwiGLU
from telechat_moe.recipe import ModelConfig


class Experts(nn.Cell):
    """``E`` SwiGLU MLPs, each applied to its own rows.

    ``sorted_rows`` tells which rows it takes: sorted by expert with the number of each (fused), or
    blocks of rows with the expert of each block (plain).

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
        self.sorted_rows = face("grouped_matmul") == "fused"
        self.main_grads = None
        if self.sorted_rows:
            self.gate_up = GroupedSwiGLU(self.compute_dtype)
            self.down_matmul = FusedGroupedMatmul(self.compute_dtype)
        else:
            self.gate_matmul = GroupedMatmul()
            self.up_matmul = GroupedMatmul()
            self.act = SwiGLU()
            self.down_matmul = GroupedMatmul()

    def accumulate_into(self, main_grads: dict[str, Parameter]) -> None:
        """From now on, add the weights' gradients to their main gradients in place (GMMAdd)."""
        if self.sorted_rows:
            self.main_grads = [main_grads[w.name] for w in (self.gate, self.up, self.down)]
            self.gate_up_into = GroupedSwiGLUIntoMainGrad(self.compute_dtype)
            self.down_into = GroupedMatmulIntoMainGrad(self.compute_dtype)

    def construct(self, rows: Tensor, group: Tensor | None = None) -> Tensor:
        """Return the results in the shape of ``rows``.

        Args:
            rows: ``[P, H]`` sorted by expert, or blocks ``[G, R, H]``.
            group: Rows of each expert ``[E]``, or the expert of each block ``[G]`` (None: ``g``).
        """
        x = self.cast(rows, self.carried)
        gate, up = self.cast(self.gate, self.carried), self.cast(self.up, self.carried)
        down = self.cast(self.down, self.carried)
        if self.main_grads is not None:
            gate_main, up_main, down_main = self.main_grads
            y, _, _ = self.gate_up_into(x, gate, up, group, gate_main, up_main)
            return self.down_into(y, down, group, down_main)
        if self.sorted_rows:
            y, _, _ = self.gate_up(x, gate, up, group)
            return self.down_matmul(y, down, group)
        y = self.act(self.gate_matmul(x, gate, group), self.up_matmul(x, up, group))
        return self.down_matmul(y, down, group)
