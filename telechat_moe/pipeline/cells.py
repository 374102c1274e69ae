"""The graphs of a chunk: forward, gradient of its input (dX), gradients of its weights (dW).

dX is one graph that recomputes the chunk's forward from the input that was kept (full recomputation), then runs its
backward pass. What dW needs leaves it through taps (:mod:`telechat_moe.pipeline.deferred`); dW recomputes nothing. dX
itself gives the gradients of norm gains, which are sums over what it holds anyway, as with Megatron's delayed weight
gradients.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from telechat_moe.model import CausalLM
from telechat_moe.model.block import MoE
from telechat_moe.model.causal_lm import TableRows
from telechat_moe.model.dispatch import CapacityDispatch
from telechat_moe.model.linear import Linear
from telechat_moe.model.router import Router
from telechat_moe.pipeline.chunks import Chunk
from telechat_moe.pipeline.deferred import Deferred
from telechat_moe.pipeline.spec import COLUMNS

BATCH = len(COLUMNS)
Outputs = tuple[Tensor, ...]


class _OneTerm(nn.Cell):
    """Make the gradient of a cell's input one term before other gradients are added to it.

    Its input is multiplied by one. The one is a parameter, because MindSpore removes a product with a constant one, or
    an identity with its own backward, from the graph and adds all terms in one sum.
    """

    def __init__(self, name: str, cell: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.one = Parameter(Tensor(np.ones((), np.float32)), name=name, requires_grad=False)
        self.times, self.cell = ops.Mul(), cell

    def construct(self, x: Tensor) -> Tensor:
        """Return what the cell computes of x."""
        return self.cell(self.times(x, self.one))


def order_sums(model: CausalLM) -> CausalLM:
    """Fix the order in which gradients of a depth's hidden state are added: MTP's own first, then the head's.

    MTP's norm reads it twice and the head once. MindSpore adds three terms in an order that depends on the graph around
    them, and the last bits with it; where the head is another chunk, its term comes as one from outside.
    """
    names = [(p, p.name) for p in model.get_parameters()]
    for i in range(model.mtp_depth):
        layer = model.mtp[i]
        layer.hidden_norm = _OneTerm(f"one_{i}", layer.hidden_norm)
    for p, name in names:  # a cell that is assigned prefixes its parameters' names a second time
        p.name = name
    return model


class Rows(nn.Cell):
    """One use of the embedding: ``[B, S]`` ids to ``[T, H]``."""

    def __init__(self, table: Parameter, use: int) -> None:
        super().__init__(auto_prefix=False)
        self.table, self.reshape = table, ops.Reshape()
        self.rows = Deferred(TableRows(), "rows", table.name, use)

    def construct(self, id_BS: Tensor) -> Tensor:
        """Return ``[T, H]``."""
        return self.rows(self.table, self.reshape(id_BS, (-1,)))


class Logits(nn.Cell):
    """One use of the head, or of the embedding as the head."""

    def __init__(self, table: Parameter, use: int) -> None:
        super().__init__(auto_prefix=False)
        self.table = table
        self.product = Deferred(ops.MatMul(transpose_b=True), "product", table.name, use)

    def construct(self, hidden_TH: Tensor) -> Tensor:
        """Return ``[T, V]``."""
        return self.product(hidden_TH, self.table)


class ChunkModel(nn.Cell):
    """The forward of a chunk, not empty, of the cells of a whole plain model, which must not be used afterwards.

    Between chunks go the balance loss so far and hidden states: one within the decoder; after the final norm that of
    each depth, since the head wants them all.
    """

    def __init__(self, model: CausalLM, chunk: Chunk) -> None:
        super().__init__(auto_prefix=False)
        self.rope, self.mask, self.zero = model.rope, model.mask, model.zero
        self.starts, self.ends = chunk.embedding, chunk.head
        depth = model.mtp_depth
        table = model.embedding.weight
        if chunk.embedding:
            self.embedding = Rows(table, 0)
        self.layers = nn.CellList([model.layers[i] for i in chunk.layers], auto_prefix=False)
        self.final = bool(chunk.layers) and chunk.layers[-1] == len(model.layers) - 1
        if self.final:
            self.norm = model.norm
        self.depths = chunk.mtp
        if depth:
            self.shift = model.shift
        mtp = [model.mtp[i] for i in chunk.mtp]
        self.mtp = nn.CellList(mtp, auto_prefix=False)
        # Uses are numbered in the model's order: MindSpore adds their gradients in it.
        self.mtp_rows = nn.CellList([Rows(table, 2 + 2 * i) for i in chunk.mtp], auto_prefix=False)
        if chunk.head:
            weight = table if model.tied else model.head.weight
            self.heads = nn.CellList(
                [Logits(weight, 1 + 2 * i) for i in range(1 + depth)], auto_prefix=False
            )
            self.loss, self.reshape = model.loss, model.reshape
            if depth:
                self.mtp_loss, self.mtp_scale = model.mtp_loss, model.mtp_scale
                self.add_mtp, self.scale_mtp = model.add_mtp, model.scale_mtp
        self.depth = depth
        self.deferred = _defer(self)

    def shifted(self, x_BS: Tensor, times: int) -> Tensor:
        """Return sequences moved to the left."""
        for _ in range(times):
            x_BS = self.shift(x_BS)
        return x_BS

    def losses(self, labels: Tensor, keep: Tensor, aux: Tensor, hidden: Outputs) -> Outputs:
        """Return ``(lm, mtp, aux)``."""
        flat = (-1,)
        lm = self.loss(
            self.heads[0](hidden[0]), self.reshape(labels, flat), self.reshape(keep, flat)
        )
        mtp = self.zero
        if self.depth:
            for i in range(self.depth):
                labels, keep = self.shift(labels), self.shift(keep)
                logits = self.heads[1 + i](hidden[1 + i])
                loss = self.mtp_loss(logits, self.reshape(labels, flat), self.reshape(keep, flat))
                mtp = self.add_mtp(mtp, loss)
            mtp = self.scale_mtp(mtp, self.mtp_scale)
        return lm, mtp, aux

    def construct(
        self,
        input_ids: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        position_ids: Tensor,
        *state: Tensor,
    ) -> Outputs:
        """Return ``(*hidden, aux)``, or ``(lm, mtp, aux)`` of the last chunk.

        Args:
            input_ids: As :class:`telechat_moe.model.CausalLM` takes them.
            state: Hidden states ``[T, H]``, none for the first chunk, and the balance losses of the chunks before,
                ``(1,)``. In this order, as in the whole model: it is the order in which MindSpore adds up the
                gradients of what feeds both.
        """
        hidden, aux = state[:-1], state[-1]
        cos, sin = self.rope(position_ids)
        mask = self.mask(input_ids.shape[0], input_ids.shape[1], None)
        if self.starts:
            hidden = (self.embedding(input_ids),)
        for layer in self.layers:
            x, aux = layer(hidden[0], aux, cos, sin, mask)
            hidden = (x,)
        if self.final:
            hidden = (self.norm(hidden[0]),)
        for i in range(len(self.depths)):
            layer = self.mtp[i]
            next_id = self.shifted(labels, self.depths[i])
            embedding = layer.embed_norm(self.mtp_rows[i](next_id))
            x, aux = layer(embedding, hidden[-1], aux, cos, sin, mask)
            hidden = (*hidden, x)
        if self.ends:
            return self.losses(labels, loss_mask, aux, hidden)
        return (*hidden, aux)


def _defer(model: nn.Cell) -> list[Deferred]:
    """Replace every product with a weight by :class:`Deferred`; return all of them."""
    for _, cell in model.cells_and_names():
        if isinstance(cell, Linear):
            cell.matmul = Deferred(cell.matmul, "product", cell.weight.name)
        elif isinstance(cell, Router):
            cell.gate = Deferred(cell.gate, "product", cell.weight.name)
        elif isinstance(cell, MoE):
            _defer_experts(cell)
    return [cell for _, cell in model.cells_and_names() if isinstance(cell, Deferred)]


def _defer_experts(moe: MoE) -> None:
    experts, run = moe.experts, moe.experts.products
    # With a capacity, block g is expert g.
    blocks = isinstance(moe.dispatch, CapacityDispatch)
    for name, weight in (("gate", experts.gate), ("up", experts.up), ("down", experts.down)):
        attribute = f"{name}_matmul"
        op = getattr(run, attribute)
        deferred = (
            Deferred(op.matmul, "product", weight.name)
            if blocks
            else Deferred(op, "grouped", weight.name)
        )
        setattr(run, attribute, deferred)


class InputGradient(nn.Cell):
    """dX of a chunk, with its forward recomputed, and the gradients of ``params``, taps and others, in their order."""

    def __init__(self, model: ChunkModel, params: Sequence[Parameter], states: int) -> None:
        super().__init__(auto_prefix=False)
        self.model, self.params = model, ParameterTuple(params)
        self.states = states
        self.gradient = ops.GradOperation(get_all=True, get_by_list=True, sens_param=True)

    def construct(self, *args: Tensor) -> tuple[Outputs, Outputs]:
        """Return the gradients of the chunk's inputs and of the parameters.

        Args:
            args: Batch, ``(*hidden, aux)``, gradient of each output. Not nested: MindSpore treats tuples as constants.
        """
        end = BATCH + self.states
        inputs, params = self.gradient(self.model, self.params)(*args[:end], args[end:])
        return inputs[BATCH:], params


class WeightGradients(nn.Cell):
    """dW of a chunk from what the taps gave."""

    def __init__(self, deferred: Sequence[Deferred]) -> None:
        super().__init__(auto_prefix=False)
        self.products = nn.CellList([d.run for d in deferred], auto_prefix=False)
        ends = [0, *np.cumsum([1 + len(d.taps) for d in deferred]).tolist()]
        self.places = tuple(pairwise(ends))

    def construct(self, *args: Tensor) -> Outputs:
        """Return the gradient of each weight.

        Args:
            args: For each product a tensor of its weight's shape and what the taps gave. No derivative by a weight
                reads its value, but MindSpore differentiates by inputs, not by constants.
        """
        gradients = ()
        for i in range(len(self.products)):
            start, end = self.places[i]
            gradients += (self.products[i].weight_gradient(*args[start:end]),)
        return gradients
