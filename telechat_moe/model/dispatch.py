"""Take tokens to their experts and bring the results back."""

import math

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Zero, initializer

from telechat_moe.errors import BadInputError
from telechat_moe.model.linear import DTYPES
from telechat_moe.ops.permute import (
    AscendPermute,
    AscendUnpermute,
    BlockPlan,
    CapacityPlan,
    FusedPermute,
    FusedUnpermute,
    Permute,
    SortCapacityPlan,
    SortPlan,
    Unpermute,
)
from telechat_moe.ops.select import backend
from telechat_moe.recipe import ModelConfig
from telechat_moe.recipe.experts import drops


class SortedDispatch(nn.Cell):
    """Every pair reaches its expert: the fused backend, whose rows are exactly the pairs."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.plan = SortPlan(num_experts)
        self.permute = FusedPermute()
        self.unpermute = FusedUnpermute()

    def construct(
        self, x_TH: Tensor, index_TK: Tensor, weight_TK: Tensor, experts: nn.Cell
    ) -> Tensor:
        """Return the weighted sum of each token's experts, ``[T, H]``."""
        row_N, pair_P, size_E = self.plan(index_TK)
        y_PH = experts(self.permute(x_TH, pair_P, row_N), size_E)
        return self.unpermute(y_PH, pair_P, row_N, weight_TK)


class AscendDispatch(nn.Cell):
    """Every pair reaches its expert: the Ascend backend, sorted as :class:`SortedDispatch`."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.permute = AscendPermute(num_experts)
        self.unpermute = AscendUnpermute()

    def construct(
        self, x_TH: Tensor, index_TK: Tensor, weight_TK: Tensor, experts: nn.Cell
    ) -> Tensor:
        """Return the weighted sum of each token's experts, ``[T, H]``."""
        x_PH, row_N, size_E = self.permute(x_TH, index_TK)
        return self.unpermute(experts(x_PH, size_E), row_N, weight_TK)


class DroplessDispatch(nn.Cell):
    """Every pair reaches its expert: the plain backend, which pads each expert to whole blocks.

    Attributes:
        block_rows: Rows of a block; None = three eighths of the mean load, a multiple of 8 from 8 to
            256. Half a block an expert is padding on average, but each block costs a copy of its
            expert's weights: with 16 experts of 512 rows, 192 gives the fastest step, 64 takes 12 %
            longer.
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.block_rows: int | None = None
        self.plan = BlockPlan(num_experts)
        self.permute = Permute()
        self.reshape = ops.Reshape()
        self.unpermute = Unpermute()

    def rows(self, pairs: int) -> int:
        """Return the rows ``R`` of a block for ``T * K`` pairs."""
        if self.block_rows is not None:
            return self.block_rows
        return max(8, min(256, 3 * pairs // (8 * self.num_experts)) // 8 * 8)

    def construct(
        self, x_TH: Tensor, index_TK: Tensor, weight_TK: Tensor, experts: nn.Cell
    ) -> Tensor:
        """Return the weighted sum of each token's experts, ``[T, H]``."""
        T, K = index_TK.shape
        H, R = x_TH.shape[1], self.rows(T * K)
        row_N, expert_G = self.plan(index_TK, R)
        G = expert_G.shape[0]
        x_GRH = self.reshape(self.permute(x_TH, row_N, G * R), (G, R, H))
        y_PH = self.reshape(experts(x_GRH, expert_G), (G * R, H))
        return self.unpermute(y_PH, row_N, weight_TK)


class CapacityDispatch(nn.Cell):
    """Drop and pad: each expert takes at most ``C = ceil(factor * T * K / E)`` pairs.

    A dropped pair adds nothing to its token; the weights of the others stay as they are. With
    ``capacity_tokens`` each group of that many tokens has its own capacity, so that a device that holds some
    of the groups drops what one device with all of them drops.

    State:
        dropped: ``[1]`` fp32, pairs dropped since it was last cleared (training only).

    Args:
        num_experts: ``E``.
        factor: Capacity factor.
        policy: ``probs`` or ``position``, see :class:`telechat_moe.ops.permute.CapacityPlan`.
        fused: Rows sorted by native operators.

    Attributes:
        capacity_tokens: Tokens that share a capacity; None = those of the batch. Plain backend only.

    Source: Switch Transformer, section 2.2; Pangu Ultra MoE compares it with dropless.
    """

    def __init__(self, num_experts: int, factor: float, policy: str, fused: bool) -> None:
        super().__init__()
        self.num_experts, self.factor, self.fused = num_experts, factor, fused
        self.capacity_tokens: int | None = None
        if self.fused:
            self.sort_plan = SortCapacityPlan(num_experts, factor, policy)
            self.fused_permute = FusedPermute()
            self.fused_unpermute = FusedUnpermute()
        self.plan = CapacityPlan(num_experts, policy)
        zero = initializer(Zero(), (1,), ms.float32)
        self.dropped = Parameter(
            zero, name="dropped", requires_grad=False, parallel_optimizer=False
        )
        self.permute = Permute()
        self.reshape = ops.Reshape()
        self.unpermute = Unpermute()
        self.to_float = ops.Cast()
        self.count = ops.ReduceSum(keep_dims=True)
        self.accumulate = ops.AssignAdd()
        self.keep = ops.Mul()
        self.clip = ops.Minimum()
        self.spread, self.add_group = ops.Mul(), ops.Add()

    def capacity(self, pairs: int) -> int:
        """Return ``C`` for ``T * K`` pairs."""
        return math.ceil(self.factor * pairs / self.num_experts)

    def groups(self, tokens: int) -> int:
        """Return ``g``, the runs of tokens with a capacity of their own."""
        return tokens // min(tokens, self.capacity_tokens or tokens)

    def construct(
        self, x_TH: Tensor, index_TK: Tensor, weight_TK: Tensor, experts: nn.Cell
    ) -> Tensor:
        """Return the weighted sum of the experts that had room for the token, ``[T, H]``."""
        if self.fused:
            row_N, pair_P, size_E, dropped = self.sort_plan(index_TK, weight_TK)
            if self.training:
                self.accumulate(self.dropped, dropped)
            y_PH = experts(self.fused_permute(x_TH, pair_P, row_N), size_E)
            return self.fused_unpermute(y_PH, pair_P, row_N, weight_TK)
        T, K = index_TK.shape
        E, H, g = self.num_experts, x_TH.shape[1], self.groups(T)
        C = self.capacity(T // g * K)
        if g > 1:  # a buffer for each run, those of an expert next to each other
            group_T1 = Tensor((np.arange(T, dtype=np.int32) // (T // g))[:, None])
            index_TK = self.add_group(self.spread(index_TK, Tensor(g, ms.int32)), group_T1)
        row_N, kept_N = self.plan(index_TK, weight_TK, C, E * g)
        C = C * g
        x_PH = self.permute(x_TH, row_N, E * C + 1, kept_N)  # dropped pairs share the last row
        y_ECH = experts(self.reshape(x_PH[: E * C], (E, C, H)))
        kept_N = self.to_float(kept_N, ms.float32)
        if self.training:
            self.accumulate(self.dropped, T * K - self.count(kept_N, 0))
        weight_TK = self.keep(weight_TK, self.reshape(kept_N, (T, K)))
        row_N = self.clip(row_N, Tensor(E * C - 1, ms.int32))
        return self.unpermute(self.reshape(y_ECH, (E * C, H)), row_N, weight_TK)


def expert_backend(config: ModelConfig) -> str:
    """Return the backend of dispatch and experts together, whose rows are laid out alike.

    ``fused`` and ``ascend`` sort rows by expert; ``plain`` makes blocks. The fused products are fp32 and
    bfloat16, and Ascend's operators drop no pair: otherwise plain serves.

    Raises:
        BadInputError: ``permute`` and ``grouped_matmul`` are asked to have different backends.
    """
    permute, grouped = backend("permute"), backend("grouped_matmul")
    if permute != grouped:
        raise BadInputError(
            f"operators: permute is {permute} and grouped_matmul {grouped}; their rows are laid out "
            "in different ways, choose one backend for both"
        )
    if permute == "fused" and DTYPES[config.compute_dtype] not in (ms.float32, ms.bfloat16):
        return "plain"
    if permute == "ascend" and drops(config):
        return "plain"
    return permute


def build_dispatch(config: ModelConfig) -> nn.Cell:
    """Return the dispatch that the recipe asks for.

    Raises:
        BadInputError: See :func:`expert_backend`.
    """
    experts, chosen = config.n_routed_experts, expert_backend(config)
    factor, policy = config.moe_expert_capacity_factor, config.moe_token_drop_policy
    if factor is not None and policy:
        return CapacityDispatch(experts, factor, policy, chosen == "fused")
    if chosen == "fused":
        return SortedDispatch(experts)
    if chosen == "ascend":
        return AscendDispatch(experts)
    return DroplessDispatch(experts)


def set_rows(model: nn.Cell, block_rows: int | None, capacity_tokens: int | None) -> None:
    """Set what a recipe says about rows on every dispatch of a built model, before it is compiled.

    Raises:
        BadInputError: The backend gives one capacity to all tokens.
    """
    for _, cell in model.cells_and_names():
        if isinstance(cell, DroplessDispatch):
            cell.block_rows = block_rows
        elif isinstance(cell, CapacityDispatch):
            if cell.fused and capacity_tokens is not None:
                raise BadInputError(
                    f"telechat_moe.moe_capacity_tokens is {capacity_tokens}: the fused backend gives one capacity to "
                    "all tokens; set telechat_moe.operators.permute and grouped_matmul to plain"
                )
            cell.capacity_tokens = capacity_tokens
