"""Dispatch in two hops: between the nodes of an expert-parallel group, then within each node.

A node is ``npu_nums_per_device`` devices with consecutive ranks. Between nodes, devices with the same place on their
nodes talk to each other, so a token travels there once a node and not once an expert:

* ``alltoall_deredundency`` gathers the tokens of all nodes (:class:`telechat_moe.sharding.cells.dispatch.GatherTokens`);
* ``alltoall_zero_redundancy`` sends a token only to nodes that have one of its experts (:class:`SendTokens`,
  :class:`RoutedTokens`).

Within a node rows reach their experts like between the devices of a flat group. Each node's results are added up before
they leave it. Nothing but data orders the two hops: sizes travel beside tokens, the shared expert runs beside both.

Legend: T tokens, t tokens of this device, M tokens that reached this device's node through it, K choices of a token,
N nodes, n experts of a node, H hidden width, P pairs, Q pairs that another device sent.
"""

import math

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import IndexAddExt, IndexSelect, NonZero, SortExt, SplitWithSize

from telechat_moe.ops.permute import FusedPermute, FusedUnpermute, SortPlan
from telechat_moe.ops.select import host_computes
from telechat_moe.sharding.cells.dispatch import (
    Capacity,
    DispatchSpec,
    GatherTokens,
    OwnExperts,
    ParallelDispatch,
    RoutedRows,
    RowsFromExperts,
    RowsToExperts,
    SortedRows,
)


def even_share(experts: int, nodes: int, top_k: int) -> float:
    """Return (token, node) pairs for each (token, expert) pair, if every choice of experts is as likely.

    A node has none of a token's experts with probability ``C(E - n, K) / C(E, K)``.
    """
    away = math.comb(experts - experts // nodes, top_k) / math.comb(experts, top_k)
    return nodes * (1 - away) / top_k


class NodesOfTokens(nn.Cell):
    """Say which nodes have an expert of each token."""

    def __init__(self, nodes: int, experts: int) -> None:
        super().__init__(auto_prefix=False)
        self.nodes, self.experts = nodes, Tensor(experts, ms.int32)
        self.node, self.one_hot, self.any = ops.FloorDiv(), ops.OneHot(), ops.ReduceMax()
        self.on, self.off = Tensor(1, ms.float32), Tensor(0, ms.float32)

    def construct(self, index_tK: Tensor) -> Tensor:
        """Return ``[t, N]`` fp32, 1 or 0; experts behind the last are nobody's."""
        node_tK = self.node(index_tK, self.experts)
        return self.any(self.one_hot(node_tK, self.nodes, self.on, self.off), 1)


class SendTokens(nn.Cell):
    """Send each token once to each node that has an expert of it, and add up what these return (Ascend)."""

    def __init__(self, spec: DispatchSpec) -> None:
        super().__init__(auto_prefix=False)
        group = spec.across
        self.experts = spec.config.n_routed_experts // group.size
        self.needs = NodesOfTokens(group.size, self.experts)
        self.own = OwnExperts(group, self.experts)
        self.transpose, self.reshape, self.sum = ops.Transpose(), ops.Reshape(), ops.ReduceSum()
        self.places, self.token, self.less = NonZero(), ops.FloorMod(), ops.Less()
        self.to_int, self.to_int64, self.to_float = ops.Cast(), ops.Cast(), ops.Cast()
        self.to_host, self.pick, self.pick_routing = ops.MoveTo(), IndexSelect(), IndexSelect()
        self.join, self.split, self.zeros = ops.Concat(1), SplitWithSize(), ops.Zeros()
        self.add = IndexAddExt()
        self.exchange_sizes = ops.AlltoAll(group.size, 0, 0, group.name)
        width, top_k = spec.config.hidden_size, spec.config.num_experts_per_tok
        self.send, self.bring_back = (ops.AlltoAllV(group.name, width) for _ in range(2))
        self.send_routing = ops.AlltoAllV(group.name, 2 * top_k)
        share = even_share(spec.config.n_routed_experts, group.size, top_k)
        for exchange in (self.send, self.bring_back, self.send_routing):
            exchange.add_prim_attr("even_share", share)  # for the report on the graph

    def construct(
        self, x_tH: Tensor, index_tK: Tensor, weight_tK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """Return the tokens that reached this device, their experts on this node and weights, and what `back` needs."""
        t, H = x_tH.shape
        K = index_tK.shape[1]
        need_Nt = self.transpose(self.needs(index_tK), (1, 0))
        place_P1 = self.places(self.less(Tensor(0, ms.float32), self.reshape(need_Nt, (-1,))))
        token_P = self.token(self.reshape(place_P1, (-1,)), Tensor(t, ms.int64))
        size_N = self.sum(need_Nt, 1)
        got_N = self.exchange_sizes(size_N)
        sent_N = self.to_host(self.to_int64(size_N, ms.int64), "CPU", True)
        got_N = self.to_host(self.to_int64(got_N, ms.int64), "CPU", True)
        routing_tk = self.join((self.to_float(index_tK, ms.float32), weight_tK))
        routing_Pk = self.pick_routing(routing_tk, 0, token_P)
        x_MH = self.send(self.reshape(self.pick(x_tH, 0, token_P), (-1,)), sent_N, got_N)
        routing_M = self.send_routing(self.reshape(routing_Pk, (-1,)), sent_N, got_N)
        index_MK, weight_MK = self.split(self.reshape(routing_M, (-1, 2 * K)), (K, K), 1)
        index_MK = self.own(self.to_int(ops.stop_gradient(index_MK), ms.int32))
        return self.reshape(x_MH, (-1, H)), index_MK, weight_MK, (token_P, sent_N, got_N, x_tH)

    def back(self, y_MH: Tensor, places: tuple[Tensor, ...]) -> Tensor:
        """Return the sum of the nodes' results for each token of this device, ``[t, H]``."""
        token_P, sent_N, got_N, x_tH = places
        t, H = x_tH.shape
        y_PH = self.reshape(self.bring_back(self.reshape(y_MH, (-1,)), got_N, sent_N), (-1, H))
        return self.add(self.zeros((t, H), y_PH.dtype), 0, token_P, y_PH, 1)


class RoutedTokens(nn.Cell):
    """What :class:`SendTokens` does, on CPU processes."""

    def __init__(self, spec: DispatchSpec) -> None:
        super().__init__(auto_prefix=False)
        group, self.nodes = spec.across, spec.across.size
        experts = spec.config.n_routed_experts // group.size
        self.needs, self.own = NodesOfTokens(group.size, experts), OwnExperts(group, experts)
        self.plan = SortPlan(group.size + 1)
        self.permute, self.unpermute = FusedPermute(), FusedUnpermute()
        self.less, self.select, self.slice = ops.Less(), ops.Select(), ops.Slice()
        self.to_int, self.to_float, self.join = ops.Cast(), ops.Cast(), ops.Concat(1)
        self.split, self.add, self.sub = SplitWithSize(), ops.Add(), ops.Sub()
        # A node has no more tokens than there are, so as many rows arrive at most as all of a device's tokens for all nodes.
        self.send, self.bring_back = RowsToExperts(group, 1), RowsFromExperts(group, 1)

    def construct(
        self, x_tH: Tensor, index_tK: Tensor, weight_tK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """See :class:`SendTokens`; there are ``M = N * t`` rows, zeros behind those that arrived."""
        t, H = x_tH.shape
        K, N = index_tK.shape[1], self.nodes
        need_tN = ops.stop_gradient(self.needs(index_tK))
        node_tN = Tensor(np.tile(np.arange(N, dtype=np.int32), (t, 1)))
        nowhere_tN = Tensor(np.full((t, N), N, np.int32))
        node_tN = self.select(self.less(Tensor(0, ms.float32), need_tN), node_tN, nowhere_tN)
        row_P, pair_P, size_N = self.plan(node_tN)
        size_N = self.slice(size_N, (0,), (N,))
        # From 1, so that a row of zeros is for no expert.
        index_tK = self.add(self.to_float(index_tK, ms.float32), Tensor(1, ms.float32))
        rows_PH = self.permute(self.join((x_tH, index_tK, weight_tK)), pair_P, row_P)
        rows_MH, _, got_N = self.send(rows_PH, size_N)
        x_MH, index_MK, weight_MK = self.split(rows_MH, (H, K, K), 1)
        index_MK = self.to_int(ops.stop_gradient(index_MK), ms.int32)
        index_MK = self.own(self.sub(index_MK, Tensor(1, ms.int32)))
        return x_MH, index_MK, weight_MK, (size_N, got_N, pair_P, row_P, need_tN)

    def back(self, y_MH: Tensor, places: tuple[Tensor, ...]) -> Tensor:
        """Return the sum of the nodes' results for each token of this device, ``[t, H]``."""
        size_N, got_N, pair_P, row_P, need_tN = places
        return self.unpermute(self.bring_back(y_MH, size_N, got_N), pair_P, row_P, need_tN)


class NodeDispatch(ParallelDispatch):
    """Two hops, of which the second moves exactly the rows that were routed.

    Args:
        once: A token goes to nodes that have one of its experts, else to all.
    """

    def __init__(self, spec: DispatchSpec, once: bool) -> None:
        super().__init__(spec)
        self.experts = spec.config.n_routed_experts // spec.across.size
        self.all_experts = spec.config.n_routed_experts
        self.drop = Capacity(spec)
        self.across = self.first_hop(spec) if once else GatherTokens(spec.across, self.experts)
        self.nowhere, self.select = Tensor(self.all_experts, ms.int32), ops.Select()
        self.reshape, self.fill, self.zeros_like = ops.Reshape(), ops.Add(), ops.ZerosLike()

    def first_hop(self, spec: DispatchSpec) -> nn.Cell:
        """Return what sends a token once a node."""
        raise NotImplementedError

    def within(
        self, x_MH: Tensor, index_MK: Tensor, weight_MK: Tensor, experts: tuple[Tensor, ...]
    ) -> Tensor:
        """Return the weighted sum of the node's experts for tokens that reached it through this device, ``[M, H]``."""
        raise NotImplementedError

    def exchange(
        self, x_tH: Tensor, index_tK: Tensor, weight_tK: Tensor, experts: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """See :meth:`ParallelDispatch.exchange`."""
        dropped = None
        if self.drops:
            _, kept_N, weight_tK, dropped = self.drop(index_tK, weight_tK, self.all_experts)
            kept_tK = self.reshape(kept_N, index_tK.shape)
            nowhere_tK = self.fill(self.zeros_like(index_tK), self.nowhere)
            index_tK = self.select(kept_tK, index_tK, nowhere_tK)
        x_MH, index_MK, weight_MK, places = self.across(x_tH, index_tK, weight_tK)
        return self.across.back(self.within(x_MH, index_MK, weight_MK, experts), places), dropped


class SortedNodeDispatch(NodeDispatch):
    """The second hop by AlltoAllV (Ascend)."""

    def __init__(self, spec: DispatchSpec, once: bool) -> None:
        super().__init__(spec, once)
        self.sort, self.own_pairs, self.less = SortExt(), NonZero(), ops.Less()
        self.to_float, self.to_int, self.pick = ops.Cast(), ops.Cast(), IndexSelect()
        self.token, self.permute, self.pick_weight = ops.FloorDiv(), IndexSelect(), IndexSelect()
        self.one_hot, self.count = ops.OneHot(), ops.ReduceSum()
        self.on, self.off = Tensor(1, ms.float32), Tensor(0, ms.float32)
        self.weigh, self.to_rows, self.add = ops.Mul(), ops.Cast(), IndexAddExt()
        self.rows = SortedRows(spec, self.experts)
        host_computes("histogram", self.one_hot, self.count)

    def first_hop(self, spec: DispatchSpec) -> nn.Cell:
        """See :class:`NodeDispatch`."""
        return SendTokens(spec)

    def within(
        self, x_MH: Tensor, index_MK: Tensor, weight_MK: Tensor, experts: tuple[Tensor, ...]
    ) -> Tensor:
        """See :class:`NodeDispatch`."""
        K = weight_MK.shape[1]
        index = self.reshape(index_MK, (-1,))
        size_n = self.count(self.one_hot(index, self.experts, self.on, self.off), 0)
        sorted_, order = self.sort(self.to_float(index, ms.float32), 0, False, True)
        local = self.own_pairs(self.less(sorted_, Tensor(self.experts, ms.float32)))
        pair_P = self.pick(order, 0, self.reshape(local, (-1,)))
        token_P = self.token(pair_P, Tensor(K, ms.int64))
        x_PH = self.permute(x_MH, 0, token_P)
        y_PH = self.rows(x_PH, self.to_int(size_n, ms.int32), experts)
        weight_P = self.pick_weight(self.reshape(weight_MK, (-1,)), 0, pair_P)
        y_PH = self.weigh(y_PH, self.to_rows(self.reshape(weight_P, (-1, 1)), y_PH.dtype))
        return self.add(self.zeros_like(x_MH), 0, token_P, y_PH, 1)


class RoutedNodeDispatch(NodeDispatch):
    """What :class:`SortedNodeDispatch` does, on CPU processes."""

    def __init__(self, spec: DispatchSpec, once: bool) -> None:
        super().__init__(spec, once)
        self.plan = SortPlan(self.experts + 1)
        self.permute, self.unpermute = FusedPermute(), FusedUnpermute()
        self.cut, self.less, self.to_float, self.keep = (
            ops.Slice(),
            ops.Less(),
            ops.Cast(),
            ops.Mul(),
        )
        self.rows = RoutedRows(spec)

    def first_hop(self, spec: DispatchSpec) -> nn.Cell:
        """See :class:`NodeDispatch`."""
        return RoutedTokens(spec)

    def within(
        self, x_MH: Tensor, index_MK: Tensor, weight_MK: Tensor, experts: tuple[Tensor, ...]
    ) -> Tensor:
        """See :class:`NodeDispatch`."""
        row_P, pair_P, size_n = self.plan(index_MK)
        size_n = self.cut(size_n, (0,), (self.experts,))
        y_PH = self.rows(self.permute(x_MH, pair_P, row_P), size_n, experts)
        own_MK = self.less(index_MK, Tensor(self.experts, ms.int32))
        weight_MK = self.keep(weight_MK, self.to_float(own_MK, ms.float32))
        return self.unpermute(y_PH, pair_P, row_P, weight_MK)
