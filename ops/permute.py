"""Bring tokens into expert order and back.

The fused and the Ascend backend sort pairs of token and expert by expert (a stable counting sort), without padding. The
plain backend has shapes that do not depend on the routing: a plan says which row of the expert-ordered buffer each pair
takes. :class:`BlockPlan` loses no pair, :class:`CapacityPlan` drops those that do not fit. A per-expert loop over dynamic
shapes is no alternative: MindSpore 2.9 on CPU dies with SIGFPE where an expert gets no token.
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops import auto_generate

from telechat_moe.ops.custom import Tensors, custom_op
from telechat_moe.ops.select import host_computes


class _ExpertRank(nn.Cell):
    """Number the pairs of each expert in the order given (a stable counting sort)."""

    def __init__(self) -> None:
        super().__init__()
        self.one_hot = ops.OneHot()
        self.on = Tensor(1, ms.int32)
        self.off = Tensor(0, ms.int32)
        self.cumsum = ops.CumSum()
        self.own = ops.Mul()
        self.pick = ops.ReduceSum()
        self.sub_one = ops.Sub()
        self.count = ops.ReduceSum()
        host_computes("sort", self.one_hot, self.cumsum, self.own, self.pick)
        host_computes("sort", self.sub_one, self.count)

    def construct(self, expert_N: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
        """Return ``(rank_N, load_E)`` int32."""
        member_NE = self.one_hot(expert_N, num_experts, self.on, self.off)
        rank_N = self.sub_one(self.pick(self.own(member_NE, self.cumsum(member_NE, 0)), 1), self.on)
        return rank_N, self.count(member_NE, 0)


class BlockPlan(nn.Cell):
    """Give each pair a row so that a block of ``R`` rows belongs to one expert."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.reshape = ops.Reshape()
        self.rank = _ExpertRank()
        self.add = ops.Add()
        self.sub = ops.Sub()
        self.mul = ops.Mul()
        self.blocks = ops.FloorDiv()
        self.cumsum = ops.CumSum()
        self.start = ops.Gather()
        self.ends_before = ops.LessEqual()
        self.to_int = ops.Cast()
        self.count = ops.ReduceSum()
        self.clip = ops.Minimum()

    def num_blocks(self, pairs: int, rows: int) -> int:
        """Return ``G``: the blocks of ``rows`` that the worst routing of ``pairs`` pairs needs."""
        return (pairs + self.num_experts * (rows - 1)) // rows

    def construct(self, index_TK: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Return ``(row_N, expert_G)``: the row of each pair, the expert of each block; int32.

        Fewer ``rows`` of a block pad less, more multiply faster.
        """
        expert_N = self.reshape(index_TK, (-1,))
        rank_N, load_E = self.rank(expert_N, self.num_experts)
        block_rows = Tensor(rows, ms.int32)
        block_E = self.blocks(self.add(load_E, block_rows - 1), block_rows)
        end_E = self.cumsum(block_E, 0)
        start_E = self.mul(self.sub(end_E, block_E), block_rows)
        row_N = self.add(self.start(start_E, expert_N, 0), rank_N)

        blocks = np.arange(self.num_blocks(expert_N.shape[0], rows), dtype=np.int32)
        ended_GE = self.ends_before(self.reshape(end_E, (1, -1)), Tensor(blocks[:, None]))
        expert_G = self.count(self.to_int(ended_GE, ms.int32), 1)
        return row_N, self.clip(expert_G, Tensor(self.num_experts - 1, ms.int32))


class CapacityPlan(nn.Cell):
    """Give each pair a row among its expert's ``C``, or none.

    By ``policy`` ``probs`` the pairs with the highest weight are kept, by ``position`` the first.
    """

    def __init__(self, num_experts: int, policy: str) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.by_weight = policy == "probs"
        self.reshape = ops.Reshape()
        self.rank = _ExpertRank()
        self.sort = ops.Sort(descending=True)
        self.reorder = ops.Gather()
        self.restore = ops.ScatterNd()
        self.fits = ops.Less()
        self.mul = ops.Mul()
        self.add = ops.Add()
        self.select = ops.Select()
        host_computes("sort", self.reshape, self.sort, self.reorder, self.restore)

    def construct(
        self, index_TK: Tensor, weight_TK: Tensor, capacity: int, num_experts: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return ``(row_N, kept_N)``: row ``E * C`` and False for a dropped pair."""
        experts = self.num_experts if num_experts is None else num_experts
        expert_N = self.reshape(index_TK, (-1,))
        pairs = expert_N.shape[0]
        if self.by_weight:
            _, order_N = self.sort(ops.stop_gradient(self.reshape(weight_TK, (-1,))))
            sorted_rank_N, _ = self.rank(self.reorder(expert_N, order_N, 0), experts)
            rank_N = self.restore(self.reshape(order_N, (-1, 1)), sorted_rank_N, (pairs,))
        else:
            rank_N, _ = self.rank(expert_N, experts)
        kept_N = self.fits(rank_N, Tensor(capacity, ms.int32))
        row_N = self.add(self.mul(expert_N, Tensor(capacity, ms.int32)), rank_N)
        spare_N = ops.zeros_like(row_N) + Tensor(experts * capacity, ms.int32)
        return self.select(kept_N, row_N, spare_N), kept_N


class _CopyToRows(nn.Cell):
    """``x_TH[token_P]``, with the backward pass as a gather too instead of a scatter-add."""

    def __init__(self) -> None:
        super().__init__()
        self.gather = ops.Gather()
        self.gather_gradient = ops.Gather()
        self.reshape = ops.Reshape()
        self.sum_pairs = ops.BatchMatMul()

    def construct(self, x_TH: Tensor, token_P: Tensor, row_N: Tensor) -> Tensor:
        """Return ``[P, H]``."""
        return self.gather(x_TH, token_P, 0)

    def bprop(
        self, x_TH: Tensor, token_P: Tensor, row_N: Tensor, out: Tensor, dout: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add up the gradients of each token's rows; rows that no pair takes have none."""
        T, H = x_TH.shape
        d_TKH = self.reshape(self.gather_gradient(dout, row_N, 0), (T, -1, H))
        ones_T1K = Tensor(np.ones((T, 1, row_N.shape[0] // T), np.float32)).astype(dout.dtype)
        dx_TH = self.reshape(self.sum_pairs(ones_T1K, d_TKH), (T, H))
        return dx_TH, ops.zeros_like(token_P), ops.zeros_like(row_N)


class Permute(nn.Cell):
    """Copy each token to the rows of its pairs. Rows that no pair takes hold token 0.

    ``differentiable`` leaves the backward pass to MindSpore instead of writing it out (inside Morph).
    """

    def __init__(self, differentiable: bool = False) -> None:
        super().__init__()
        self.to_int = ops.Cast()
        self.keep = ops.Mul()
        self.reshape = ops.Reshape()
        self.token_of_row = ops.ScatterNd()
        self.differentiable = differentiable
        self.gather = ops.Gather()
        self.copy = _CopyToRows()

    def construct(
        self, x_TH: Tensor, row_N: Tensor, rows: int, kept_N: Tensor | None = None
    ) -> Tensor:
        """Return ``[rows, H]``; a row that only pairs with ``kept_N`` False take holds token 0."""
        tokens = x_TH.shape[0]
        pairs = row_N.shape[0]
        token_N = Tensor(np.arange(pairs, dtype=np.int32) // (pairs // tokens))
        if kept_N is not None:  # dropped pairs share a row, and ScatterNd adds up
            token_N = self.keep(token_N, self.to_int(kept_N, ms.int32))
        token_P = self.token_of_row(self.reshape(row_N, (-1, 1)), token_N, (rows,))
        if self.differentiable:
            return self.gather(x_TH, token_P, 0)
        return self.copy(x_TH, token_P, row_N)


class Unpermute(nn.Cell):
    """Add up the rows of each token, weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.gather = ops.Gather()
        self.reshape = ops.Reshape()
        self.to_rows = ops.Cast()
        self.weighted_sum = ops.BatchMatMul()

    def construct(self, y_PH: Tensor, row_N: Tensor, weight_TK: Tensor) -> Tensor:
        """Return ``[T, H]`` in y's data type."""
        T, K = weight_TK.shape
        y_TKH = self.reshape(self.gather(y_PH, row_N, 0), (T, K, -1))
        weight_T1K = self.reshape(self.to_rows(weight_TK, y_PH.dtype), (T, 1, K))
        return self.reshape(self.weighted_sum(weight_T1K, y_TKH), (T, -1))


class SortPlan(nn.Cell):
    """Order the pairs by expert; equal experts keep their order."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.sort = custom_op("PermutePlan", lambda index: (index,) * 3, 3, experts=num_experts)

    def construct(self, index_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(row_N, pair_P, size_E)`` int32: row of each pair, pair of each row, group sizes."""
        return self.sort(index_TK)


class SortCapacityPlan(nn.Cell):
    """Give each expert ``C = ceil(factor * T * K / E)`` rows; a pair without one has row -1."""

    def __init__(self, num_experts: int, factor: float, policy: str) -> None:
        super().__init__()
        numerator, denominator = float(factor).as_integer_ratio()
        self.sort = custom_op(
            "CapacityPlan",
            lambda index, weight: (index, index, index, weight),
            4,
            experts=num_experts,
            numerator=numerator,
            denominator=denominator,
            by_weight=policy == "probs",
        )

    def construct(
        self, index_TK: Tensor, weight_TK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return ``(row_N, pair_P, size_E, dropped)``; ``P = E C``, an empty row has pair -1."""
        return self.sort(index_TK, ops.stop_gradient(weight_TK))


class FusedPermute(nn.Cell):
    """Copy each token to the rows of its pairs; rows without a pair are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = custom_op("Permute", lambda x, pair, row: x)
        self.backward = custom_op("PermuteGrad", lambda dy, row, x: dy)

    def construct(self, x_TH: Tensor, pair_P: Tensor, row_N: Tensor) -> Tensor:
        """Return ``[P, H]`` fp32."""
        return self.forward(x_TH, pair_P, row_N)

    def bprop(
        self, x_TH: Tensor, pair_P: Tensor, row_N: Tensor, out: Tensor, dout: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add up the gradients of each token's rows."""
        dx = self.backward(dout, row_N, x_TH)
        return dx, ops.zeros_like(pair_P), ops.zeros_like(row_N)


class FusedUnpermute(nn.Cell):
    """Add up the rows of each token, weighted, in the order of its choices."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = custom_op("Unpermute", lambda y, row, weight: y)
        self.backward = custom_op("UnpermuteGrad", lambda y, pair, weight, dout: (y, weight), 2)

    def construct(self, y_PH: Tensor, pair_P: Tensor, row_N: Tensor, weight_TK: Tensor) -> Tensor:
        """Return ``[T, H]`` fp32."""
        return self.forward(y_PH, row_N, weight_TK)

    def bprop(
        self,
        y_PH: Tensor,
        pair_P: Tensor,
        row_N: Tensor,
        weight_TK: Tensor,
        out: Tensor,
        dout: Tensor,
    ) -> Tensors:
        """Return the gradients of the rows and the weights."""
        dy, dweight = self.backward(y_PH, pair_P, weight_TK, dout)
        return dy, ops.zeros_like(pair_P), ops.zeros_like(row_N), dweight


class AscendPermute(nn.Cell):
    """The Ascend backend: ``MoeTokenPermute``, and the rows of each expert; built, but not run here."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.permute = auto_generate.MoeTokenPermute()
        self.reshape = ops.Reshape()
        self.one_hot = ops.OneHot()
        self.on, self.off = Tensor(1, ms.int32), Tensor(0, ms.int32)
        self.count = ops.ReduceSum()
        host_computes("histogram", self.one_hot, self.count)

    def construct(self, x_TH: Tensor, index_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(x_PH, row_N, size_E)``: rows sorted by expert, the row of each pair, group sizes."""
        x_PH, row_N = self.permute(x_TH, index_TK, None, False)
        member_NE = self.one_hot(self.reshape(index_TK, (-1,)), self.num_experts, self.on, self.off)
        return x_PH, row_N, self.count(member_NE, 0)


class AscendUnpermute(nn.Cell):
    """The Ascend backend: ``MoeTokenUnpermute``; built, but not run here."""

    def __init__(self) -> None:
        super().__init__()
        self.unpermute = auto_generate.MoeTokenUnpermute()

    def construct(self, y_PH: Tensor, row_N: Tensor, weight_TK: Tensor) -> Tensor:
        """Return ``[T, H]`` in y's data type."""
        return self.unpermute(y_PH, row_N, weight_TK, False, None)


def permute_reference(
    x_TH: np.ndarray, index_TK: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Define the dropless permutation: ``(x_PH, pair_P, row_N)``, pairs in a stable order by expert."""
    pair_P = np.argsort(index_TK, None, kind="stable")
    return x_TH[pair_P // index_TK.shape[1]], pair_P, np.argsort(pair_P)


def unpermute_reference(y_PH: np.ndarray, row_N: np.ndarray, weight_TK: np.ndarray) -> np.ndarray:
    """Define the weighted sum of each token's rows in float64; a pair with row -1 adds nothing."""
    y_NH = np.where(row_N[:, None] < 0, 0.0, y_PH.astype(np.float64)[row_N])
    return np.einsum("tk,tkh->th", weight_TK, y_NH.reshape(*weight_TK.shape, -1))
