"""List, tensor by tensor, what the compiled graph of this package's training step keeps and needs.

Other frameworks keep other tensors: see `memory.layer_activations`. This table is that of the Ascend backend: bfloat16
products, float32 norms and router, the experts' rows in every form that a backward operator reads. The liveness
analysis of the dry run's graph confirms it (`telechat-moe dryrun RECIPE --confirm`).

Where micro-batches accumulate, the gradient of a weight is added in place, an effect that keeps its turn: what it reads is free
from then on. In a step of one micro-batch ("one graph") the update alone reads gradients of weights, and MindSpore's
topological order has them after the whole chain of the activations' gradients: what they read is `late`. An operator that
is recomputed for them alone comes as late, so its input stays in place of its result.

Symbols: W rows of whole sequences, T those of a context-parallel shard, R those of the residual stream (divided over
t with sequence parallelism), D those of a device, P pairs of token and expert; H width, n heads of a device.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from telechat_moe.tools.plan.cost.columns import Array, Columns

MOVED: Final = (1.0, 0.73)
"""Bytes that MindSpore 2.9 moves to the host's memory of a dense and of a MoE layer, over those that it keeps without swapping;
from the compiled graph of the 105B recipe's first stage (docs/swap.md)."""

FREED: Final = (0.99, 0.57)
"""Bytes that are no longer kept on the device, over the same: of operators with several results some are moved and kept."""

BACKWARD_OPERATORS: Final = (130, 195)
"""Operators of the backward pass of a dense and a MoE layer, in the same graph, to about five."""


class Late(NamedTuple):
    """Bytes of a layer that stay until the gradients of weights are computed; see the module."""

    kept: Array
    again: Array
    """The same of a recomputed layer."""


@dataclass
class Saved:
    """Bytes of one micro-batch."""

    dense: Array
    """Bytes that a dense layer keeps for its backward pass."""

    moe: Array
    entry: Array
    """Bytes of a layer's input, which is all that a recomputed dense layer keeps."""

    moe_entry: Array
    """Bytes that a recomputed MoE layer keeps."""

    dense_working: Array
    """The most bytes that a layer's backward pass needs in addition, at its beginning or in its attention."""

    moe_working: Array
    dense_late: Late
    """Bytes that a layer leaves behind for the gradients of its weights."""

    moe_late: Late
    loss: Array
    """Bytes that one cross-entropy keeps, with its head's input."""

    loss_working: Array
    """Bytes that the cross-entropy whose backward pass is first needs in addition."""

    logits: Array
    """Bytes of one cross-entropy's logits, float32."""

    head_gradient: Array
    """Bytes of the head's weights, bfloat16."""

    table_gradient: Array
    """Bytes of the gradients of the embeddings' table that are alive at once."""

    ends: Array
    """Bytes that every chunk keeps in addition: the tables of positions."""


@dataclass
class _Rows:
    """Rows of a device; the module explains the symbols."""

    whole: Array
    token: Array
    stream: Array
    device: Array
    pairs: Array


def _rows(x: Columns) -> _Rows:
    whole = x.micro_batch * x.seq
    token = whole / x.cp
    device = token / x.tp
    spread = np.where(x.sequence_parallel > 0, x.tp, 1)
    pairs = np.where(x.etp > 1, token, device) * x.top_k * x.imbalance
    return _Rows(whole, token, token / spread, device, pairs)


@dataclass
class _Attention:
    """Bytes of attention."""

    kept: Array
    operands: Array
    """Queries, keys and values of its core."""

    out: Array
    """The core's result."""

    late: Array


def _attention(x: Columns, r: _Rows, norm: Array) -> _Attention:
    """Return the bytes of attention; `norm` is 1 where norms alone are recomputed."""
    h, heads = x.hidden, x.heads / x.tp
    cut = (x.sequence_parallel > 0) & (x.tp > 1)
    apart = cut | (x.cp > 1)
    # input of the down-projections; latents as float32 (norm) and as bfloat16 (up-projection);
    # queries, keys, values, the output in two orders, maxima and sums of the scores
    latents = x.q_lora_rank + x.kv_lora_rank
    attention = 2 * r.stream * h + np.where(norm > 0, 2, 4) * r.stream * latents
    up_q = np.where(cut, r.token, r.stream) * x.q_lora_rank
    up_kv = np.where(apart, r.whole, r.stream) * x.kv_lora_rank
    attention = attention + 2 * up_q * np.where(cut, 1, 1 - norm)
    attention = attention + 2 * up_kv * np.where(apart, 1, 1 - norm)
    query = 2 * r.token * heads * x.head_dim
    keys = 2 * r.whole * heads * (x.head_dim + x.value_dim)
    out = 2 * r.token * heads * x.value_dim
    attention = attention + query + keys + 2 * out + 64 * r.token * heads
    # what products read: both down-projections, both up-projections, the last one; and their results' gradients
    late = 2 * r.stream * h + 2 * (up_q + up_kv) + out
    late = late + 2 * r.stream * (latents + x.qk_rope) + query + 2 * r.token * h
    late = late + 2 * r.whole * heads * (x.head_dim - x.qk_rope + x.value_dim)
    return _Attention(attention, query + keys, out, late)


def saved(x: Columns) -> Saved:
    """Return the bytes of layers and ends.

    Args:
        x: Configurations; MLA and gated feed-forwards. Of those that recompute whole layers: what the others keep.
    """
    r, h, one = _rows(x), x.hidden, one_graph(x)
    norm, act = x.re_norm * (1 - x.re_full), x.re_activation * (1 - x.re_full)
    residual = x.residual_bytes * r.stream * h
    attention = _attention(x, r, norm)
    common = attention.kept + 2 * residual  # the layer's input, and the sum behind attention

    dense_act = 2 * r.token * x.ffn / x.tp
    dense = 2 * r.token * h + dense_act * np.where(act > 0, 2, 3)

    shared_act = 2 * r.device * x.shared_width
    exchanged, moe_ffn = x.ep > 1, x.moe_ffn / x.etp
    # sorted rows, results, results as float32; gate, up, both side by side, activation
    experts = r.pairs * np.where(exchanged, 8, 6) * h
    experts = experts + r.pairs * np.where(exchanged, 10, 6) * moe_ffn
    router = 4 * r.device * h * (1 - norm) + 4 * r.device * x.experts * (x.top_k + 2)
    inputs = 2 * np.where(x.etp > 1, r.token, r.stream) * h
    moe = inputs + experts + router + shared_act * np.where(act > 0, 2, 3)
    # the gradients of the exchanged rows ask for the shapes of gate and up: one graph keeps both;
    # and what its balance losses and counters read
    shapes = r.pairs * np.where(exchanged, 4 * moe_ffn + 4, 0) + 8 * r.device * x.experts

    # inputs and gradients of the products' results; of an activation that is recomputed, its input
    dense_late = 4 * r.token * h + dense_act * np.where(act > 0, 4, 3)
    moe_late = 4 * r.device * h + 12 * r.device * x.experts + r.pairs * (4 * h + 6 * moe_ffn)
    moe_late = moe_late + inputs + 2 * r.stream * h * (x.shared_width > 0)
    moe_late = moe_late + shared_act * np.where(act > 0, 4, 3)

    # the backward pass, with the output's gradient: first the feed-forward's first operators; where gradients of weights
    # come at once, what these read is gone, and the shared experts' gradients are in place of what was kept
    weights = 2 * h * x.ffn / x.tp
    at_once = np.maximum(2 * dense_act, 2 * r.token * h + weights)
    dense_first = residual + np.where(one, 2 * r.token * h + 3 * dense_act, at_once)
    gone = np.where(one, -2 * r.stream * h, inputs + shared_act * np.where(act > 0, 0, 1))
    moe_first = residual + 4 * r.device * h + 4 * r.pairs * h - gone
    # or, for large experts, the gradient of one of their weights: results and their float32 copies are gone
    weights = 2 * x.experts / np.maximum(x.ep, 1) * h * moe_ffn
    moe_weights = residual - gone - r.pairs * np.where(exchanged, 4, 2) * h + weights
    # or attention's, when what the feed-forward kept is gone
    core = attention.operands + np.where(one, attention.out + 2 * r.token * h, 0)
    return Saved(
        dense=common + dense,
        moe=common + moe,
        entry=residual,
        moe_entry=residual + one * shapes,
        dense_working=np.maximum(dense_first, core - dense + one * dense_late),
        moe_working=np.maximum(
            np.maximum(moe_first, np.where(one, 0, moe_weights)), core - moe + one * moe_late
        ),
        dense_late=Late(*(one * (attention.late + dense_late + n * dense_act) for n in (0, 1))),
        moe_late=Late(*(one * (attention.late + moe_late + n * shared_act) for n in (0, 1))),
        **_ends(x, r),
    )


def _ends(x: Columns, r: _Rows) -> dict[str, Array]:
    """Return the bytes of losses, embeddings and tables."""
    logits, one = 4 * r.token * x.vocab / x.tp, one_graph(x)
    loss = 2 * r.token * x.hidden + np.where(one, 1, 2) * logits
    table = 4 * x.vocab / x.tp * x.hidden
    # one graph adds up the gradients of all uses before copies are summed
    summed = x.dp * x.cp > 1
    tables = np.where(x.mtp > 0, 1 + x.mtp + summed, summed)
    return {
        "loss": loss,
        "loss_working": np.where(one, 3, 2) * logits,
        "logits": logits,
        "head_gradient": 2 * x.vocab / x.tp * x.hidden,
        "table_gradient": np.where(one, tables, 1) * table,
        "ends": 4 * r.token * x.qk_rope,
    }


def one_graph(x: Columns) -> NDArray[np.bool_]:
    """Return where a step has one micro-batch, and so no accumulators; not where `x` is one of several."""
    accumulates: Array | float = vars(x).get("accumulates", 0.0)
    return (x.micro_batches == 1) & (np.asarray(accumulates) == 0)
