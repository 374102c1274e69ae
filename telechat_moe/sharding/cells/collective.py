"""Cells that hold collectives: they replace cells of the model on more than one device.

``telechat_moe.sharding`` chooses them and puts them in. Their bodies see the shapes of one device, because each is the
function of a ``Morph`` primitive, which MindSpore expands after it has sliced the tensors and before it differentiates.

Gradients follow MindSpore's convention: where a tensor has copies, their gradients add up to the true one. So the
backward of an ``AllReduce`` is an ``AllReduce``, and copies of a result are never differentiated twice.

Legend: T tokens, t tokens of this device, K choices of a token, E experts, e experts of this device, H hidden width,
F an expert's width, C rows of an expert's buffer, g groups of tokens that share a capacity, P pairs, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from telechat_moe.model.balance import BalanceLoss, ZLoss


class Group(NamedTuple):
    """A communication group as one of its members sees it.

    Attributes:
        name: Name under which it was created.
        size: Members.
        member: Index of this rank among them.
        ranks: Their global ranks.
    """

    name: str
    size: int
    member: int
    ranks: tuple[int, ...] = ()


ALONE = Group("", 1, 0)
"""The group of a device without others."""


class SumOverProcesses(nn.Cell):
    """Add a tensor over all processes; outside of a graph that MindSpore splits."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = ops.AllReduce()

    def construct(self, x: Tensor) -> Tensor:
        """Return the sum of every process's ``x``."""
        return self.sum(x)


def _first(*shapes: Any) -> Any:
    return shapes[0]


def _second(*shapes: Any) -> Any:
    return shapes[1]


def _rows_of_table(table: Any, ids: Any) -> Any:
    return [ids[0], table[1]]


def one_number(*shapes: Any) -> Any:
    """Return the shape of a single number, for :class:`Morphed`."""
    return [1]


class Morphed(nn.Cell):
    """Run a function on the slices of this device.

    Args:
        body: Takes and returns tensors; sees local shapes.
        infer_shape: Global shapes of the inputs to those of the outputs.
        infer_dtype: Data types of the inputs to those of the outputs.
    """

    def __init__(
        self,
        body: Callable[..., Any],
        infer_shape: Callable[..., Any] = _first,
        infer_dtype: Callable[..., Any] = _first,
    ) -> None:
        super().__init__()
        self.body = body
        self.morph = ops.Morph(body, infer_shape, infer_dtype)
        self.morph.add_prim_attr("self_define_shard", True)
        # Pure functions: without this the pipeline passes lose the monad's type ("pointer[abs] is null").
        for effect in ("side_effect_mem", "side_effect_io", "side_effect_backprop"):
            self.morph.add_prim_attr(effect, False)

    def construct(self, *inputs: Tensor) -> Any:
        """Return what the body returns."""
        return self.morph(*inputs)


def sum_over(group: Group | None, scatter: bool = False) -> Any:
    """Return the collective that adds up partial results over a group, None without one."""
    if group is None or group.size == 1:
        return None
    kind = ops.ReduceScatter if scatter else ops.AllReduce
    return kind(ops.ReduceOp.SUM, group.name)


class RouterLosses(nn.Cell):
    """Balance loss and z-loss of tokens that are spread over devices.

    The load ``f`` of a group of devices is one sum over them, through which no gradient flows. The mean score ``P`` stays
    local: the loss is linear in it, so the mean over devices of ``sum_i f_i P_i`` is that of the group's ``P``. What the devices
    give is summed once.

    Args:
        balance: The balance loss that it replaces.
        z_loss: The z-loss that it replaces.
        sequences: Sequences that the group holds, where each has a loss of its own; else 1.
        group: Devices whose tokens are counted together.
        everyone: All devices of the stage.

    Source: DeepSeek-V3, equations 17 to 20; ST-MoE, equation 5.
    """

    def __init__(
        self, balance: BalanceLoss, z_loss: ZLoss, sequences: int, group: Group, everyone: Group
    ) -> None:
        super().__init__(auto_prefix=False)
        self.balance, self.z_loss = balance, z_loss
        self.sequences, self.group, self.devices = sequences, group, everyone.size
        self.sum_counts, self.sum_losses = sum_over(group), sum_over(everyone)
        self.rows = ops.MatMul()
        self.reshape = ops.Reshape()
        self.first, self.nothing = ops.StridedSlice(), ops.Mul()
        self.run = Morphed(self.body, one_number)

    def kept(self) -> tuple[ops.Primitive, ...]:
        """Return the primitives that make ``f``: recomputed, they would see what was counted since."""
        primitives = (self.sum_counts, self.balance.sum_counts, self.balance.to_share)
        return tuple(primitive for primitive in primitives if primitive is not None)

    def membership(self, tokens: int) -> Tensor:
        """Return ``[b, t]``: 1 where a token of this device belongs to sequence ``b`` of its group."""
        length = tokens * self.group.size // self.sequences
        row = (np.arange(tokens) + tokens * self.group.member) // length
        return Tensor((row[None] == np.arange(self.sequences)[:, None]).astype(np.float32))

    def body(self, logits_tE: Tensor, score_tE: Tensor, counted: Tensor) -> Tensor:
        """Return the loss, ``(1,)`` fp32, the same on all devices; see :meth:`construct` for ``counted``."""
        b, t, loss = self.balance, score_tE.shape[0], self.balance.zero
        if not b.active and not self.z_loss.coefficient:
            # No constant: MindSpore would drop its message in the graph of one stage and keep it in the other's.
            first = self.reshape(self.first(logits_tE, (0, 0), (1, 1), (1, 1)), (1,))
            return self.nothing(first, loss)
        if b.active:
            member_bt = self.membership(t)
            counted = ops.stop_gradient(counted)
            count_bE = counted if b.by_step else self.rows(member_bt, counted)
            if self.sum_counts is not None:
                count_bE = self.sum_counts(count_bE)
            pairs = b.top_k * t * self.group.size // self.sequences
            if b.by_step:
                count_bE, pairs = b.share(count_bE), 1
            score_tE = b.divide(score_tE, b.add_eps(b.sum_experts(score_tE, -1), b.eps))
            score_bE = self.rows(member_bt, score_tE)
            loss = self.reshape(b.total(b.product(ops.stop_gradient(count_bE), score_bE)), (1,))
            factor = b.coefficient * b.num_experts / (pairs * t * self.devices)
            loss = loss * Tensor(factor, ms.float32)
        if self.z_loss.coefficient:
            loss = loss + self.z_loss(logits_tE) * Tensor(1.0 / self.devices, ms.float32)
        return loss if self.sum_losses is None else self.sum_losses(loss)

    def construct(
        self, logits_TE: Tensor, score_TE: Tensor, chosen_TE: Tensor, count_E: Tensor
    ) -> Tensor:
        """Return the loss, ``(1,)`` fp32; see :class:`BalanceLoss`. ``count_E`` are those of this device's tokens."""
        return self.run(logits_TE, score_TE, count_E if self.balance.by_step else chosen_TE)


class VocabularyShard(nn.Cell):
    """Find the rows of tokens in this device's shard of the vocabulary."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.sub_first, self.at_most, self.at_least = ops.Sub(), ops.Minimum(), ops.Maximum()
        self.equal, self.cast = ops.Equal(), ops.Cast()

    def construct(self, id_t: Tensor, v: int, dtype: Any) -> tuple[Tensor, Tensor]:
        """Return each token's row among ``v``, any row for those of other shards, and 1 if it is here, else 0."""
        own_t = self.sub_first(id_t, Tensor(self.index * v, ms.int32))
        row_t = self.at_least(self.at_most(own_t, Tensor(v - 1, ms.int32)), Tensor(0, ms.int32))
        return row_t, self.cast(self.equal(own_t, row_t), dtype)


class VocabularyRows(nn.Cell):
    """Rows of an embedding table that is sharded along the vocabulary.

    Every device looks up the tokens of its shard and has zeros for the others; the sum over the group is
    the embedding. With sequence parallel it is scattered: each device needs its own rows only.

    Args:
        group: Devices that hold the shards.
        scatter: Rows of the result are spread over the group, instead of repeated.
    """

    def __init__(self, group: Group, scatter: bool) -> None:
        super().__init__()
        self.many = group.size > 1
        self.vocabulary = VocabularyShard(group.member)
        self.gather, self.reshape, self.keep = ops.Gather(), ops.Reshape(), ops.Mul()
        self.sum = sum_over(group, scatter)
        self.run = Morphed(self.body, _rows_of_table, _first)

    def body(self, table_vH: Tensor, id_t: Tensor) -> Tensor:
        """Return ``[t, H]``, or with ``scatter`` this device's shard of its rows."""
        if not self.many:
            return self.gather(table_vH, id_t, 0)
        row_t, here_t = self.vocabulary(id_t, table_vH.shape[0], table_vH.dtype)
        rows_tH = self.keep(self.gather(table_vH, row_t, 0), self.reshape(here_t, (-1, 1)))
        return self.sum(rows_tH)

    def construct(self, table_VH: Tensor, id_T: Tensor) -> Tensor:
        """Return ``[T, H]``."""
        return self.run(table_VH, id_T)


class TokenCrossEntropy(nn.Cell):
    """Negative log-likelihood of each token, logits sharded along the vocabulary over a group."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.many = group.size > 1
        self.vocabulary = VocabularyShard(group.member)
        self.max = ops.ReduceMax(keep_dims=True)
        self.sub = ops.Sub()
        self.exp = ops.Exp()
        self.sum = ops.ReduceSum(keep_dims=True)
        self.log = ops.Log()
        self.pick = ops.GatherD()
        self.reshape = ops.Reshape()
        self.keep = ops.Mul()
        if self.many:
            self.max_all = ops.AllReduce(ops.ReduceOp.MAX, group.name)
            self.sum_all = ops.AllReduce(ops.ReduceOp.SUM, group.name)
            self.pick_all = ops.AllReduce(ops.ReduceOp.SUM, group.name)
        self.run = Morphed(self.body, _second)

    def body(self, logits_tv: Tensor, label_t: Tensor) -> Tensor:
        """Return ``[t]`` fp32."""
        t, v = logits_tv.shape
        top_t1 = self.max(ops.stop_gradient(logits_tv), 1)
        if self.many:
            top_t1 = ops.stop_gradient(self.max_all(top_t1))
        shifted_tv = self.sub(logits_tv, top_t1)
        total_t1 = self.sum(self.exp(shifted_tv), 1)
        row_t1, here_t1 = self.vocabulary(self.reshape(label_t, (t, 1)), v, ms.float32)
        picked_t1 = self.keep(self.pick(shifted_tv, 1, row_t1), here_t1)
        if self.many:
            total_t1, picked_t1 = self.sum_all(total_t1), self.pick_all(picked_t1)
        return self.reshape(self.sub(self.log(total_t1), picked_t1), (t,))

    def construct(self, logits_TV: Tensor, label_T: Tensor) -> Tensor:
        """Return ``[T]`` fp32."""
        return self.run(logits_TV, label_T)


class ParallelCrossEntropy(nn.Cell):
    """:class:`telechat_moe.ops.cross_entropy.CrossEntropy` of logits sharded along the vocabulary."""

    def __init__(self, group: Group, sums: bool = False) -> None:
        super().__init__(auto_prefix=False)
        self.sums = sums
        self.by_token = self.marked = False
        self.unmark, self.one = ops.Minimum(), Tensor(1.0, ms.float32)
        self.to_float = ops.Cast()
        self.token_loss = TokenCrossEntropy(group)
        self.weigh = ops.Mul()
        self.sum_loss, self.sum_mask = ops.ReduceSum(), ops.ReduceSum()
        self.add_tiny, self.mean = ops.Add(), ops.RealDiv()
        self.reshape = ops.Reshape()
        self.tiny = Tensor(1e-8, ms.float32)

    def construct(
        self, logits_TV: Tensor, label_T: Tensor, mask_T: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the loss, shape ``(1,)`` fp32; with ``by_token`` also ``[T]`` fp32."""
        if self.marked:
            mask_T = self.unmark(mask_T, self.one)
        loss_T = self.token_loss(self.to_float(logits_TV, ms.float32), label_T)
        kept_T = self.weigh(loss_T, mask_T)
        loss = self.sum_loss(kept_T, 0)
        if not self.sums or not self.training:
            loss = self.mean(loss, self.add_tiny(self.sum_mask(mask_T, 0), self.tiny))
        loss = self.reshape(loss, (1,))
        return (loss, kept_T) if self.by_token else loss
