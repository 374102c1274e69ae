"""Dispatch to experts that are spread over devices, by the mechanism of :mod:`telechat_moe.sharding.cells.collective`.

Legend: T tokens, t tokens of this device, K choices of a token, E experts, e experts of this device, H hidden width,
F an expert's width, C rows of an expert's buffer, g groups of tokens that share a capacity, P pairs.
"""

import math
import zlib
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops.auto_generate import (
    MoeTokenPermute,
    MoeTokenUnpermute,
    RepeatInterleaveTensor,
    SplitWithSize,
)

from telechat_moe.model.experts import ExpertProducts, Experts
from telechat_moe.ops.custom import custom_op
from telechat_moe.ops.permute import (
    AscendPermute,
    AscendUnpermute,
    CapacityPlan,
    FusedPermute,
    FusedUnpermute,
    Permute,
    SortPlan,
    Unpermute,
)
from telechat_moe.recipe import ModelConfig
from telechat_moe.recipe.experts import drops
from telechat_moe.sharding.cells.collective import ALONE, Group, Morphed, sum_over

SLOTS = "dispatch.expert_slot"
"""Name of :class:`ExpertSlots`' state in its layer."""


class DispatchSpec(NamedTuple):
    """What a dispatch is built from.

    Attributes:
        products: Products of the experts on this device.
        within: Devices between which rows are exchanged: the expert-parallel group, or its part on one node.
        across: Devices over which tokens are gathered or sent once: those with the same place on all nodes of the
            expert-parallel group.
        tensor: Tensor-parallel group if each expert's width is sharded over it, else None.
        scatter: The result is sharded over ``tensor`` by rows (sequence parallel) instead of repeated.
        capacity_tokens: Tokens that share a capacity; None: those of the device. ``alltoallv`` in one hop drops none.
        dropped: ``[1]`` fp32, the state that counts pairs without a place; None: none is dropped.
        slots: Where the experts are, if they move; None: expert ``i`` has the weights ``i``.
    """

    config: ModelConfig
    products: ExpertProducts
    within: Group
    across: Group = ALONE
    tensor: Group | None = None
    scatter: bool = False
    capacity_tokens: int | None = None
    dropped: Parameter | None = None
    slots: "ExpertSlots | None" = None


def slots_name(router: str) -> str:
    """Return the name of the map from experts to slots in a layer, from that of a parameter of its router."""
    return f"{router.rpartition('.router.')[0]}.{SLOTS}"


class ExpertSlots(nn.Cell):
    """Turn the experts that the router chose into the slots whose weights they have: row ``slot_E[i]`` for expert ``i``.

    State:
        slot_E: ``[E]`` int32, a permutation. The host sets it between steps when experts move; the graph stays.
    """

    def __init__(self, experts: int) -> None:
        super().__init__(auto_prefix=False)
        identity = Tensor(np.arange(experts, dtype=np.int32))
        self.slot_E = Parameter(identity, name=SLOTS, requires_grad=False, parallel_optimizer=False)
        self.look_up = ops.Gather()
        self.run = Morphed(self.body, _second, _second)

    def body(self, slot_E: Tensor, index_tK: Tensor) -> Tensor:
        """Return ``[t, K]`` int32."""
        return self.look_up(ops.stop_gradient(slot_E), index_tK, 0)

    def construct(self, index_TK: Tensor) -> Tensor:
        """Return ``[T, K]`` int32."""
        return self.run(self.slot_E, index_TK)


def _second(*shapes: Any) -> Any:
    return shapes[1]


def _with_count(x: Any, *others: Any) -> Any:
    return x, [1]


def _with_count_type(x: Any, *others: Any) -> Any:
    return x, ms.float32


class ParallelDispatch(nn.Cell):
    """Bring rows to their experts and back; subclasses say how, in :meth:`exchange`."""

    def __init__(self, spec: DispatchSpec) -> None:
        super().__init__(auto_prefix=False)
        self.products = spec.products
        self.dropped, self.drops = spec.dropped, spec.dropped is not None
        self.slots = spec.slots
        self.run = Morphed(self.body, *((_with_count, _with_count_type) if self.drops else ()))
        self.sum_widths = sum_over(spec.tensor, spec.scatter)
        self.accumulate = ops.AssignAdd()

    def exchange(
        self, x_tH: Tensor, index_tK: Tensor, weight_tK: Tensor, experts: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Return ``[t, H]``, and of dropped pairs this device's share ``[1]``, if they are counted.

        ``experts`` are the weights ``gate_eHF``, ``up_eHF`` and ``down_eFH``.
        """
        raise NotImplementedError

    def body(
        self,
        x_tH: Tensor,
        index_tK: Tensor,
        weight_tK: Tensor,
        gate_eHF: Tensor,
        up_eHF: Tensor,
        down_eFH: Tensor,
    ) -> Any:
        """Return the exchange's result, summed over the shards of an expert's width."""
        y_tH, dropped = self.exchange(x_tH, index_tK, weight_tK, (gate_eHF, up_eHF, down_eFH))
        y_tH = y_tH if self.sum_widths is None else self.sum_widths(y_tH)
        return (y_tH, dropped) if self.drops else y_tH

    def construct(
        self, x_TH: Tensor, index_TK: Tensor, weight_TK: Tensor, experts: Experts
    ) -> Tensor:
        """Return the weighted sum of each token's experts, ``[T, H]``."""
        x_TH = experts.cast(x_TH, experts.carried)
        if self.slots is not None:
            index_TK = self.slots(index_TK)
        if not self.drops:
            return self.run(x_TH, index_TK, weight_TK, *experts.weights())
        y_TH, dropped = self.run(x_TH, index_TK, weight_TK, *experts.weights())
        if self.training:
            self.accumulate(self.dropped, dropped)
        return y_TH


class Capacity(nn.Cell):
    """Give pairs their rows in the experts' buffers, as many as the capacity allows.

    Without a capacity a buffer has ``C`` rows, one for each token, which no routing can exceed: nothing is dropped, and
    the shapes do not depend on the routing.

    Args:
        gathered: Devices whose tokens this device sees; they share no capacity.
    """

    def __init__(self, spec: DispatchSpec, gathered: int = 1) -> None:
        super().__init__(auto_prefix=False)
        config = spec.config
        self.num_experts, self.gathered = config.n_routed_experts, gathered
        self.factor = config.moe_expert_capacity_factor if drops(config) else None
        self.capacity_tokens = spec.capacity_tokens
        policy = config.moe_token_drop_policy if drops(config) else None
        self.plan = CapacityPlan(1, policy or "position")
        self.reshape, self.to_float = ops.Reshape(), ops.Cast()
        self.keep, self.add = ops.Mul(), ops.Add()
        self.at_most, self.less, self.sub = ops.Minimum(), ops.Less(), ops.Sub()
        self.select, self.zeros_like = ops.Select(), ops.ZerosLike()
        self.count = ops.ReduceSum(keep_dims=True)
        # Devices that share an expert's width have the same tokens.
        self.share = Tensor(1.0 / (spec.tensor.size if spec.tensor is not None else 1), ms.float32)

    def groups_and_rows(self, tokens: int, top_k: int) -> tuple[int, int]:
        """Return ``(g, C)`` for ``tokens`` tokens."""
        if self.factor is None:
            return 1, tokens
        device_tokens = tokens // self.gathered
        size = min(device_tokens, self.capacity_tokens or device_tokens)
        return tokens // size, math.ceil(self.factor * size * top_k / self.num_experts)

    def construct(
        self, index_tK: Tensor, weight_tK: Tensor, experts: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return each pair's row among ``[g, experts, C]`` or the one behind them, whether it has one, its weight, and the dropped.

        Pairs whose index is ``experts`` belong to another device and get no row.
        """
        t, K = index_tK.shape
        g, C = self.groups_and_rows(t, K)
        slot_tK, own_tK = index_tK, self.less(index_tK, Tensor(experts, ms.int32))
        if g > 1:
            group_t1 = (np.arange(t, dtype=np.int32) // (t // g))[:, None] * experts
            slot_tK = self.add(index_tK, Tensor(group_t1.astype(np.int32)))
            nowhere_tK = self.add(self.zeros_like(index_tK), Tensor(g * experts, ms.int32))
            slot_tK = self.select(own_tK, slot_tK, nowhere_tK)
        rows = g * experts * C
        row_N, _ = self.plan(slot_tK, weight_tK, C, g * experts + 1)
        row_N = self.at_most(row_N, Tensor(rows, ms.int32))
        kept_N = self.less(row_N, Tensor(rows, ms.int32))
        kept_tK = self.reshape(self.to_float(kept_N, ms.float32), (t, K))
        lost_tK = self.sub(self.to_float(own_tK, ms.float32), kept_tK)
        dropped = self.keep(self.count(self.reshape(lost_tK, (-1,)), 0), self.share)
        return row_N, kept_N, self.keep(weight_tK, kept_tK), dropped


class OwnExperts(nn.Cell):
    """Number the experts of one of several nodes, or devices, from 0; all others are ``experts``."""

    def __init__(self, group: Group, experts: int) -> None:
        super().__init__(auto_prefix=False)
        self.first = Tensor(group.member * experts, ms.int32)
        self.zero, self.elsewhere = Tensor(0, ms.int32), Tensor(experts, ms.int32)
        self.sub, self.less, self.at_most = ops.Sub(), ops.Less(), ops.Minimum()
        self.select, self.add, self.zeros_like = ops.Select(), ops.Add(), ops.ZerosLike()

    def construct(self, index_tK: Tensor) -> Tensor:
        """Return ``[t, K]`` int32."""
        own_tK = self.sub(index_tK, self.first)
        below_tK = self.less(own_tK, self.zero)
        own_tK = self.at_most(own_tK, self.elsewhere)
        elsewhere_tK = self.add(self.zeros_like(own_tK), self.elsewhere)
        return self.select(below_tK, elsewhere_tK, own_tK)


class GatherTokens(nn.Cell):
    """Gather the tokens of a group of devices; the results of the group are summed, each device's tokens scattered to it."""

    def __init__(self, group: Group, experts: int) -> None:
        super().__init__(auto_prefix=False)
        self.gather, self.gather_index = ops.AllGather(group.name), ops.AllGather(group.name)
        self.gather_weight = ops.AllGather(group.name)
        self.scatter_sum = ops.ReduceScatter(ops.ReduceOp.SUM, group.name)
        self.own = OwnExperts(group, experts)

    def construct(
        self, x_tH: Tensor, index_tK: Tensor, weight_tK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """Return tokens, own experts and weights of the group's tokens, in the order of its devices, and nothing more."""
        x_MH, index_MK = self.gather(x_tH), self.gather_index(index_tK)
        return x_MH, self.own(index_MK), self.gather_weight(weight_tK), ()

    def back(self, y_MH: Tensor, places: tuple[Tensor, ...]) -> Tensor:
        """Return the sum of all devices' results for the tokens of this one, ``[t, H]``."""
        return self.scatter_sum(y_MH)


class PaddedDispatch(ParallelDispatch):
    """Take rows to their experts through buffers of ``C`` rows an expert, and back.

    Over ``across`` tokens are gathered and results summed, over ``within`` rows are exchanged. Without ``across`` that is
    the plain all-to-all, without ``within`` the all-gather: every device sees all tokens. With both, rows of several
    nodes pass between them once. It is the static form of the exchange of routed rows: the same rows travel between
    the same devices, padded.
    """

    def __init__(self, spec: DispatchSpec) -> None:
        super().__init__(spec)
        within, across = spec.within, spec.across
        self.many, self.gathers = within.size > 1, across.size > 1
        self.experts = spec.config.n_routed_experts // across.size
        self.places = Capacity(spec, across.size)
        # MindSpore's own gradient adds up a token's rows in the order of slots; the one written out, in that of choices.
        self.permute, self.unpermute = Permute(differentiable=spec.slots is None), Unpermute()
        self.reshape, self.transpose, self.split = ops.Reshape(), ops.Transpose(), SplitWithSize()
        self.at_most = ops.Minimum()
        if self.gathers:
            self.gather = GatherTokens(across, self.experts)
        if self.many:
            self.send = ops.AlltoAll(within.size, 0, 1, within.name)
            self.bring_back = ops.AlltoAll(within.size, 1, 0, within.name)

    def exchange(
        self, x_tH: Tensor, index_tK: Tensor, weight_tK: Tensor, experts: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """See :meth:`ParallelDispatch.exchange`."""
        if self.gathers:
            x_tH, index_tK, weight_tK, _ = self.gather(x_tH, index_tK, weight_tK)
        t, K = index_tK.shape
        E, H = self.experts, x_tH.shape[1]
        g, C = self.places.groups_and_rows(t, K)
        rows = g * E * C
        row_N, kept_N, weight_tK, dropped = self.places(index_tK, weight_tK, E)
        x_PH, _ = self.split(self.permute(x_tH, row_N, rows + 1, kept_N), (rows, 1), 0)
        x_EgCH = self.transpose(self.reshape(x_PH, (g, E, C, H)), (1, 0, 2, 3))
        buffer = self.reshape(x_EgCH, (E, g * C, H))
        if self.many:
            buffer = self.send(buffer)
        buffer = self.products(buffer, *experts)
        if self.many:
            buffer = self.bring_back(buffer)
        y_gECH = self.transpose(self.reshape(buffer, (E, g, C, H)), (1, 0, 2, 3))
        row_N = self.at_most(row_N, Tensor(rows - 1, ms.int32))
        y_tH = self.unpermute(self.reshape(y_gECH, (rows, H)), row_N, weight_tK)
        return (self.gather.back(y_tH, ()) if self.gathers else y_tH), dropped


class SortedRows(nn.Cell):
    """Run experts on rows that are sorted by expert: exactly these rows travel to the devices of a group and back (Ascend).

    Rows for one device are adjacent; how many there are is exchanged first. They arrive by sender and are sorted by
    expert a second time. Expert numbers do not travel: they follow from the counts.
    """

    def __init__(self, spec: DispatchSpec, experts: int) -> None:
        super().__init__(auto_prefix=False)
        group, width = spec.within, spec.config.hidden_size
        self.products, self.many, self.devices = spec.products, group.size > 1, group.size
        self.local = experts // group.size
        self.sort_rows, self.restore_rows = MoeTokenPermute(), MoeTokenUnpermute()
        self.reshape, self.sum = ops.Reshape(), ops.ReduceSum()
        self.to_int32, self.to_int64, self.to_host = ops.Cast(), ops.Cast(), ops.MoveTo()
        self.to_float = ops.Cast()
        self.repeat = RepeatInterleaveTensor()
        if self.many:
            self.exchange_sizes = ops.AlltoAll(group.size, 0, 0, group.name)
            self.send = ops.AlltoAllV(group.name, width)
            self.bring_back = ops.AlltoAllV(group.name, width)
        self.expert_of_block = Tensor(np.tile(np.arange(self.local, dtype=np.int32), group.size))

    def construct(self, x_PH: Tensor, size_E: Tensor, experts: tuple[Tensor, ...]) -> Tensor:
        """Return the experts' results ``[P, H]``; ``size_E`` says how many rows each expert has."""
        if not self.many:
            return self.products(x_PH, *experts, size_E)
        P, H = x_PH.shape
        size_Re = self.to_float(self.reshape(size_E, (self.devices, self.local)), ms.float32)
        got_Re = self.exchange_sizes(size_Re)
        sent_R = self.to_host(self.to_int64(self.sum(size_Re, 1), ms.int64), "CPU", True)
        got_R = self.to_host(self.to_int64(self.sum(got_Re, 1), ms.int64), "CPU", True)
        x_QH = self.reshape(self.send(self.reshape(x_PH, (-1,)), sent_R, got_R), (-1, H))
        blocks = self.to_int64(self.reshape(got_Re, (-1,)), ms.int64)
        expert_Q = self.repeat(self.expert_of_block, blocks, 0, None)
        x_QH, row_Q = self.sort_rows(x_QH, expert_Q, None, False)
        size_e = self.to_int32(self.sum(got_Re, 0), ms.int32)
        y_QH = self.products(x_QH, *experts, size_e)
        y_QH = self.restore_rows(y_QH, row_Q, None, False, None)
        return self.reshape(self.bring_back(self.reshape(y_QH, (-1,)), got_R, sent_R), (P, H))


class AllToAllVDispatch(ParallelDispatch):
    """Experts spread over ``within``: exactly the rows that were routed travel (Ascend; dropless)."""

    def __init__(self, spec: DispatchSpec) -> None:
        super().__init__(spec)
        experts = spec.config.n_routed_experts
        self.permute, self.unpermute = AscendPermute(experts), AscendUnpermute()
        self.rows = SortedRows(spec, experts)

    def exchange(
        self, x_tH: Tensor, index_tK: Tensor, weight_tK: Tensor, experts: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """See :meth:`ParallelDispatch.exchange`."""
        x_PH, row_N, size_E = self.permute(x_tH, index_tK)
        return self.unpermute(self.rows(x_PH, size_E, experts), row_N, weight_tK), None


class RowsToExperts(nn.Cell):
    """Bring rows that are sorted by expert to the devices of their experts, sorted there by expert and then by sender.

    CPU processes only: the native library exchanges exactly these rows and their numbers (``ops/csrc/link.cc``).

    Args:
        times: Room for rows that arrive: as many as a device has, times this.
    """

    def __init__(self, group: Group, times: int) -> None:
        super().__init__(auto_prefix=False)
        self.there, self.back = _exchanges(group, times)

    def construct(self, x_PH: Tensor, size_E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows ``[P times, H]``, how many each expert has ``[e]``, and by sender ``[R e]``.

        There is room for the worst routing; rows of zeros at the end count as the last expert's.
        """
        return self.there(x_PH, size_E)

    def bprop(
        self, x_PH: Tensor, size_E: Tensor, out: tuple[Tensor, ...], dout: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of the rows, ``[P, H]``, brought back from the experts."""
        return self.back(dout[0], size_E, out[2]), ops.zeros_like(size_E)


class RowsFromExperts(nn.Cell):
    """The inverse of :class:`RowsToExperts`."""

    def __init__(self, group: Group, times: int) -> None:
        super().__init__(auto_prefix=False)
        self.there, self.back = _exchanges(group, times)

    def construct(self, y_QH: Tensor, size_E: Tensor, got_E: Tensor) -> Tensor:
        """Return ``[P, H]``; the numbers are what :class:`RowsToExperts` took and gave."""
        return self.back(y_QH, size_E, got_E)

    def bprop(
        self, y_QH: Tensor, size_E: Tensor, got_E: Tensor, out: Tensor, dout: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the experts' rows ``[Q, H]``, sent to them as the rows were."""
        return self.there(dout, size_E)[0], ops.zeros_like(size_E), ops.zeros_like(got_E)


def _rows_and_sizes(x: Any, sizes: Any) -> Any:
    return x, sizes, sizes


def _rows(y: Any, *sizes: Any) -> Any:
    return y


def _exchanges(group: Group, times: int) -> tuple[ops.Custom, ops.Custom]:
    """Return the way to the experts and the way back."""
    tag = -1 - zlib.crc32(group.name.encode())  # messages of a pipeline have positive ones
    attributes: dict[str, Any] = {
        "ranks": group.ranks,
        "member": group.member,
        "tag": tag,
        "times": times,
    }
    dispatch = custom_op("MoeDispatch", _rows_and_sizes, 3, **attributes)
    return dispatch, custom_op("MoeCombine", _rows, **attributes)


class RoutedRows(nn.Cell):
    """What :class:`SortedRows` does, on CPU processes: exactly the rows that were routed travel."""

    def __init__(self, spec: DispatchSpec) -> None:
        super().__init__(auto_prefix=False)
        self.products, group = spec.products, spec.within
        kinds = (RowsToExperts, RowsFromExperts)
        self.send, self.bring_back = (kind(group, group.size) for kind in kinds)

    def construct(self, x_PH: Tensor, size_E: Tensor, experts: tuple[Tensor, ...]) -> Tensor:
        """Return the experts' results ``[P, H]``, zeros for rows behind those that ``size_E`` counts."""
        x_QH, size_e, got_E = self.send(x_PH, size_E)
        return self.bring_back(self.products(x_QH, *experts, size_e), size_E, got_E)


class RoutedRowsDispatch(ParallelDispatch):
    """What :class:`AllToAllVDispatch` does, on CPU processes."""

    def __init__(self, spec: DispatchSpec) -> None:
        super().__init__(spec)
        self.plan = SortPlan(spec.config.n_routed_experts)
        self.permute, self.unpermute = FusedPermute(), FusedUnpermute()
        self.rows = RoutedRows(spec)

    def exchange(
        self, x_tH: Tensor, index_tK: Tensor, weight_tK: Tensor, experts: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """See :meth:`ParallelDispatch.exchange`."""
        row_N, pair_P, size_E = self.plan(index_tK)
        y_PH = self.rows(self.permute(x_tH, pair_P, row_N), size_E, experts)
        return self.unpermute(y_PH, pair_P, row_N, weight_tK), None
