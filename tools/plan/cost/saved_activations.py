"""List, tensor by tensor, what the compiled graph of this package's training step keeps and needs.

Other frameworks keep other tensors: see `memory.layer_activations`. This table is that of the Ascend backend: bfloat16
products, float32 norms and router, the experts' rows in every form that a backward operator reads. The liveness
analysis of the dry run's graph confirms it (`telechat-moe dryrun RECIPE --confirm`).

Symbols: W rows of whole sequences, T those of a context-parallel shard, R those of the residual stream (divided over
t with sequence parallelism), D those of a device, P pairs of token and expert; H width, n heads of a device.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from telechat_moe.tools.plan.cost.columns import Array, Columns

MOVED: Final = (1.0, 0.73)
"""Bytes that MindSpore 2.9 moves to the host's memory of a dense and of a MoE layer, over those that it keeps without swapping;
from the compiled graph of the 105B recipe's first stage (docs/swap.md)."""

FREED: Final = (0.99, 0.57)
"""Bytes that are no longer kept on the device, over the same: of operators with several results some are moved and kept."""

BACKWARD_OPERATORS: Final = (130, 195)
"""Operators of the backward pass of a dense and a MoE layer, in the same graph, to about five."""


@dataclass
class Saved:
    """Bytes of one micro-batch."""

    dense: Array
    """Bytes that a dense layer keeps for its backward pass."""

    moe: Array
    entry: Array
    """Bytes of the layer's input, which is all that a recomputed layer keeps."""

    dense_working: Array
    """The most bytes that a layer's backward pass needs in addition, at its beginning or in its attention."""

    moe_working: Array
    loss: Array
    """Bytes that one cross-entropy keeps, with its head's input."""

    loss_working: Array
    """Bytes that the cross-entropy whose backward pass is first needs in addition."""

    logits: Array
    """Bytes of one cross-entropy's logits, float32."""

    head_gradient: Array
    """Bytes of the head's weights, bfloat16."""

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


def _attention(x: Columns, r: _Rows, norm: Array) -> tuple[Array, Array]:
    """Return the bytes that attention keeps, and how many of them are operands and result of its core.

    `norm` is 1 where norms alone are recomputed.
    """
    h, heads = x.hidden, x.heads / x.tp
    cut = (x.sequence_parallel > 0) & (x.tp > 1)
    apart = cut | (x.cp > 1)
    # input of the down-projections; latents as float32 (norm) and as bfloat16 (up-projection);
    # queries, keys, values, the output in two orders, maxima and sums of the scores
    latents = x.q_lora_rank + x.kv_lora_rank
    attention = 2 * r.stream * h + np.where(norm > 0, 2, 4) * r.stream * latents
    up_q = np.where(cut, r.token, r.stream * (1 - norm)) * x.q_lora_rank
    up_kv = np.where(apart, r.whole, r.stream * (1 - norm)) * x.kv_lora_rank
    attention = attention + 2 * (up_q + up_kv)
    query = 2 * r.token * heads * x.head_dim
    keys = 2 * r.whole * heads * (x.head_dim + x.value_dim)
    out = 2 * r.token * heads * x.value_dim
    attention = attention + query + keys + 2 * out + 64 * r.token * heads
    return attention, query + keys + out


def saved(x: Columns) -> Saved:
    """Return the bytes of layers and ends.

    Args:
        x: Configurations; MLA and gated feed-forwards. Of those that recompute whole layers: what the others keep.
    """
    r, h = _rows(x), x.hidden
    norm, act = x.re_norm * (1 - x.re_full), x.re_activation * (1 - x.re_full)
    residual = x.residual_bytes * r.stream * h

    attention, operands = _attention(x, r, norm)
    common = attention + 2 * residual  # the layer's input, and the sum behind attention

    dense_act = 2 * r.token * x.ffn / x.tp
    dense = 2 * r.token * h + dense_act * np.where(act > 0, 2, 3)

    shared_act = 2 * r.device * x.shared_width
    exchanged = x.ep > 1
    # sorted rows, results, results as float32; gate, up, both side by side, activation
    experts = r.pairs * np.where(exchanged, 8, 6) * h
    experts = experts + r.pairs * np.where(exchanged, 10, 6) * x.moe_ffn / x.etp
    router = 4 * r.device * h * (1 - norm) + 4 * r.device * x.experts * (x.top_k + 2)
    inputs = 2 * np.where(x.etp > 1, r.token, r.stream) * h
    moe = inputs + experts + router + shared_act * np.where(act > 0, 2, 3)

    # backward: the output's gradient; then the first operators of the feed-forward, all that was kept still alive
    dense_first = residual + 2 * r.token * h + dense_act * 3 + 2 * h * x.ffn / x.tp
    gone = shared_act * np.where(
        act > 0, 0, 1
    )  # of the shared experts, gradients in place of what was kept
    moe_first = residual + 4 * r.device * h + 4 * r.pairs * h - gone
    # or, for large experts, the gradient of one of their weights: results and their float32 copies are gone
    weights = 2 * x.experts / np.maximum(x.ep, 1) * h * x.moe_ffn / x.etp
    moe_weights = residual - gone - r.pairs * np.where(exchanged, 4, 2) * h + weights
    # or attention's, when the feed-forward's own are gone
    core = 2 * residual + operands
    entry = residual

    logits = 4 * r.token * x.vocab / x.tp
    one_graph = x.micro_batches == 1
    loss = 2 * r.token * h + np.where(one_graph, 1, 2) * logits
    # of one graph MTP's loss goes back first, to the gradient of its logits in bfloat16
    loss_working = np.where(one_graph, 3 + np.minimum(x.mtp, 1) / 2, 2) * logits
    return Saved(
        dense=common + dense,
        moe=common + moe,
        entry=entry,
        dense_working=np.maximum(dense_first, core - dense),
        moe_working=np.maximum(np.maximum(moe_first, moe_weights), core - moe),
        loss=loss,
        loss_working=loss_working,
        logits=logits,
        head_gradient=2 * x.vocab / x.tp * h,
        ends=4 * r.token * x.qk_rope,
    )
