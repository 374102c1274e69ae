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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.columns import Columns, Floats, columns
from telechat_moe.tools.plan.cost.layout import Layout

MOVED: Final = (1.0, 0.73)
"""Bytes that MindSpore 2.9 moves to the host's memory of a dense and of a MoE layer, over those that it keeps without swapping;
from the compiled graph of the 105B recipe's first stage (docs/plan_memory.md)."""

FREED: Final = (0.99, 0.57)
"""Bytes that are no longer kept on the device, over the same: of operators with several results some are moved and kept."""

BACKWARD_OPERATORS: Final = (130, 195)
"""Operators of the backward pass of a dense and a MoE layer, in the same graph, to about five."""


class LateBytes(NamedTuple):
    """Bytes of a layer that stay until the gradients of weights are computed; see the module."""

    plain: Floats
    recomputed: Floats
    """The same of a recomputed layer."""


@dataclass
class SavedActivations:
    """Bytes of one micro-batch."""

    dense: Floats
    """Bytes that a dense layer keeps for its backward pass."""
    moe: Floats
    entry: Floats
    """Bytes of a layer's input, which is all that a recomputed dense layer keeps."""
    moe_entry: Floats
    """Bytes that a recomputed MoE layer keeps."""
    dense_working: Floats
    """The most bytes that a layer's backward pass needs in addition, at its beginning or in its attention."""
    moe_working: Floats
    dense_late: LateBytes
    """Bytes that a layer leaves behind for the gradients of its weights."""
    moe_late: LateBytes
    loss: Floats
    """Bytes that one cross-entropy keeps, with its head's input."""
    loss_working: Floats
    """Bytes that the cross-entropy whose backward pass is first needs in addition."""
    logits: Floats
    """Bytes of one cross-entropy's logits, float32."""
    head_gradient: Floats
    """Bytes of the head's weights, bfloat16."""
    table_gradient: Floats
    """Bytes of the gradients of the embeddings' table that are alive at once."""
    ends: Floats
    """Bytes that every chunk keeps in addition: the tables of positions."""


@dataclass
class _Rows:
    """Rows of a device; the module explains the symbols."""

    sequence: Floats
    token: Floats
    stream: Floats
    device: Floats
    pairs: Floats


def _rows(x: Columns) -> _Rows:
    sequence = x.micro_batch * x.seq
    token = sequence / x.cp
    device = token / x.tp
    spread = np.where(x.sequence_parallel > 0, x.tp, 1)
    pairs = np.where(x.etp > 1, token, device) * x.top_k * x.imbalance
    return _Rows(sequence, token, token / spread, device, pairs)


@dataclass
class _Attention:
    activations: Floats
    operands: Floats
    """Queries, keys and values of its core."""
    out: Floats
    """The core's result."""
    late: Floats


def _attention(x: Columns, r: _Rows, norm: Floats) -> _Attention:
    """Return the bytes of attention; `norm` is 1 where norms alone are recomputed."""
    h, heads = x.hidden, x.heads / x.tp
    cut = (x.sequence_parallel > 0) & (x.tp > 1)
    apart = cut | (x.cp > 1)
    # input of the down-projections; latents as float32 (norm) and as bfloat16 (up-projection);
    # queries, keys, values, the output in two orders, maxima and sums of the scores
    latents = x.q_lora_rank + x.kv_lora_rank
    attention = 2 * r.stream * h + np.where(norm > 0, 2, 4) * r.stream * latents
    up_q = np.where(cut, r.token, r.stream) * x.q_lora_rank
    up_kv = np.where(apart, r.sequence, r.stream) * x.kv_lora_rank
    attention = attention + 2 * up_q * np.where(cut, 1, 1 - norm)
    attention = attention + 2 * up_kv * np.where(apart, 1, 1 - norm)
    query = 2 * r.token * heads * x.head_dim
    keys = 2 * r.sequence * heads * (x.head_dim + x.value_dim)
    out = 2 * r.token * heads * x.value_dim
    attention = attention + query + keys + 2 * out + 64 * r.token * heads
    # what products read: both down-projections, both up-projections, the last one; and their results' gradients
    late = 2 * r.stream * h + 2 * (up_q + up_kv) + out
    late = late + 2 * r.stream * (latents + x.qk_rope) + query + 2 * r.token * h
    late = late + 2 * r.sequence * heads * (x.head_dim - x.qk_rope + x.value_dim)
    return _Attention(attention, query + keys, out, late)


def saved(x: Columns) -> SavedActivations:
    """Return the bytes of layers and ends, of MLA and gated feed-forwards; where whole layers are recomputed, of the others."""
    r, h, single = _rows(x), x.hidden, x.one_graph > 0
    norm, act = x.re_norm * (1 - x.re_full), x.re_activation * (1 - x.re_full)
    residual = x.residual_bytes * r.stream * h
    attention = _attention(x, r, norm)
    common = attention.activations + 2 * residual  # the layer's input, and the sum behind attention

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
    dense_first = residual + np.where(single, 2 * r.token * h + 3 * dense_act, at_once)
    gone = np.where(single, -2 * r.stream * h, inputs + shared_act * np.where(act > 0, 0, 1))
    moe_first = residual + 4 * r.device * h + 4 * r.pairs * h - gone
    # or, for large experts, the gradient of one of their weights: results and their float32 copies are gone
    weights = 2 * x.experts / np.maximum(x.ep, 1) * h * moe_ffn
    moe_weights = residual - gone - r.pairs * np.where(exchanged, 4, 2) * h + weights
    moe_first = np.maximum(moe_first, np.where(single, 0, moe_weights))
    # or attention's, when what the feed-forward kept is gone
    late = attention.late
    core = attention.operands + np.where(single, attention.out + 2 * r.token * h, 0)
    return SavedActivations(
        dense=common + dense,
        moe=common + moe,
        entry=residual,
        moe_entry=residual + single * shapes,
        dense_working=np.maximum(dense_first, core - dense + single * dense_late),
        moe_working=np.maximum(moe_first, core - moe + single * moe_late),
        dense_late=LateBytes(*(single * (late + dense_late + n * dense_act) for n in (0, 1))),
        moe_late=LateBytes(*(single * (late + moe_late + n * shared_act) for n in (0, 1))),
        **_ends(x, r),
    )


def _ends(x: Columns, r: _Rows) -> dict[str, Floats]:
    """Return the bytes of losses, embeddings and tables."""
    logits, single = 4 * r.token * x.vocab / x.tp, x.one_graph > 0
    loss = 2 * r.token * x.hidden + np.where(single, 1, 2) * logits
    table = 4 * x.vocab / x.tp * x.hidden
    # one graph adds up the gradients of all uses before copies are summed
    summed = x.dp * x.cp > 1
    tables = np.where(x.mtp > 0, 1 + x.mtp + summed, summed)
    return {
        "loss": loss,
        "loss_working": np.where(single, 3, 2) * logits,
        "logits": logits,
        "head_gradient": 2 * x.vocab / x.tp * x.hidden,
        "table_gradient": np.where(single, tables, 1) * table,
        "ends": 4 * r.token * x.qk_rope,
    }


WHOLE: Final = ("gpipe", "1f1b", "interleaved")
"""Schedules whose backward passes compute dX and dW together; in the others dW reads what the chunk kept."""

KEPT, RECOMPUTED, SWAPPED, AWAY = range(4)
"""What becomes of a layer's activations: kept; computed again; moved to the host's memory as far as MindSpore moves them;
all of them moved, with two layers' on the device while the stage's backward pass runs."""


class _Item(NamedTuple):
    """A section of a chunk, and the bytes of a micro-batch in it."""

    activations: Floats | float
    working: Floats | float = 0.0
    """Bytes that only its backward pass needs."""
    late: Floats | float = 0.0
    """Bytes that it leaves behind for the gradients of its weights."""


class ChunkActivations:
    """Bytes that one micro-batch keeps in each chunk of this package's step, and needs in its backward pass.

    Items of a chunk are in the order of its forward pass. The backward pass goes through them from the last one: what
    an item's operators make comes on top of what it and those before it kept, while those behind it are gone.
    """

    def __init__(self, a: Architecture, x: Layout) -> None:
        self.architecture, self.layout = a, x
        s = saved(columns([(a, x)]))
        self.saved, self.one = s, x.micro_batches == 1
        self.entry, self.last = float(s.entry[0]), x.pp * x.vpp - 1
        self.frees = x.schedule in WHOLE or x.pp == 1
        self.kinds = {
            "dense": tuple(float(v[0]) for v in (s.dense, s.dense_working, s.entry)),
            "moe": tuple(float(v[0]) for v in (s.moe, s.moe_working, s.moe_entry)),
        }

    def all(self) -> tuple[Floats, Floats]:
        """Return kept bytes and those that the backward pass needs besides, [chunks] each."""
        layout, kinds = self.layout, self.architecture.layers
        numbers = iter(range(len(kinds)))
        policies = {"full": RECOMPUTED, "swap": AWAY}
        marked = next((way for word, way in policies.items() if word in layout.recompute), KEPT)
        chunks: list[tuple[Floats, Floats]] = []
        for chunk, layers in enumerate(layout.chunk_kinds(kinds)):
            ways = [marked if recomputed else KEPT for _, recomputed in layers]
            swapped = [next(numbers) in layout.swapped for _ in layers]
            ways = [SWAPPED if away else way for way, away in zip(ways, swapped, strict=True)]
            chunks.append(self.of(chunk, [kind for kind, _ in layers], ways))
        activations, working = zip(*chunks, strict=True)
        return np.array(activations, np.float64), np.array(working, np.float64)

    def of(
        self, chunk: int, kinds: Sequence[str], ways: Sequence[ArrayLike]
    ) -> tuple[Floats, Floats]:
        """Return the same of one chunk.

        `ways` says of each of its decoder layers `KEPT`, `RECOMPUTED`, `SWAPPED` or `AWAY`: a number, or an array of any
        shape that all share; the results have this shape.
        """
        items = self._begin(chunk)
        items += [
            self._layer(kind, np.asarray(way, np.int64))
            for kind, way in zip(kinds, ways, strict=True)
        ]
        items += self._end(chunk)
        left: Floats = np.zeros(())
        peak = left
        for item in reversed(items):
            peak = np.maximum(peak, left + item.working)
            left = left + (item.late - item.activations) * self.frees
        return np.asarray(sum(item.activations for item in items)), peak

    def _layer(self, kind: str, way: NDArray[np.int64]) -> _Item:
        activations, working, inputs = self.kinds[kind]
        late = self.saved.moe_late if kind == "moe" else self.saved.dense_late
        plain, recomputed = float(late.plain[0]), float(late.recomputed[0])
        # the gradient of MTP's embeddings comes first: of one graph it stays
        working += self.architecture.mtp * self.entry * self.one
        moved = activations * (1 - FREED[kind == "moe"])
        return _Item(
            np.choose(way, (activations, inputs, moved, 0.0)),
            working + np.choose(way, (0.0, activations - inputs, 0.0, 2 * activations)),
            np.choose(way, (plain, recomputed, plain, plain)),
        )

    def _begin(self, chunk: int) -> list[_Item]:
        items = [_Item(float(self.saved.ends[0]))]
        if chunk == 0:  # what MTP's norm of the embeddings reads; the table's gradient
            # the gradient of MTP's embeddings is, of stages, in the place of what it was computed from
            embedded = self.architecture.mtp * self.entry
            gradient = float(self.saved.table_gradient[0]) - embedded * self.one
            items.append(_Item(embedded, gradient))
        return items

    def _end(self, chunk: int) -> list[_Item]:
        """Return final norm, losses and MTP, as they go forward, if they are in this chunk."""
        a, x = self.architecture, self.layout
        apart = x.ends != "last"
        if chunk == self.last:
            return (self._one_end if self.one else self._losses)(not apart)
        if chunk == self.last - 1 and apart:
            return [item for _ in range(a.mtp) for item in (_Item(3 * self.entry), self._block())]
        return []

    def _block(self) -> _Item:
        """Return MTP's layer: recipes that count or name recomputed layers leave it out."""
        x = self.layout
        recomputed = "full" in x.recompute and x.recompute_layers is x.recomputed is None
        way = np.asarray(RECOMPUTED if recomputed else KEPT, np.int64)
        return self._layer(self.architecture.layers[-1], way)

    def _losses(self, mtp: bool) -> list[_Item]:
        """Return the last chunk's end. MTP's loss goes back before its block, the other loss last.

        Logits' gradients in bfloat16 stay until the head's gradient, which is one product for all of them.
        """
        a, s, entry = self.architecture, self.saved, self.entry
        loss, first, logits = (float(v[0]) for v in (s.loss, s.loss_working, s.logits))
        head = float(s.head_gradient[0])
        if not a.mtp:
            return [_Item(entry), _Item(loss, max(first, head - 1.5 * logits))]
        late = a.mtp * logits / 2
        items = [_Item(entry), _Item(loss, max(2 * logits + late, head + (a.mtp - 1.5) * logits))]
        # the norm's output, both inputs of the projection, the block, its output
        for _ in range(a.mtp):
            if mtp:
                block = self._block()
                items += [_Item(3 * entry, late), block._replace(working=block.working + late)]
            else:
                items.append(_Item(entry, late))
        return [*items, _Item(a.mtp * loss, first)]

    def _one_end(self, mtp: bool) -> list[_Item]:
        """Return the same of one graph: the other loss has its gradient before MTP's layers run.

        The head's inputs and logits' gradients in bfloat16 stay for the head's gradient, the logits for the loss's value.
        """
        a, s, entry = self.architecture, self.saved, self.entry
        loss, first, logits = (float(v[0]) for v in (s.loss, s.loss_working, s.logits))
        late = loss + logits / 2
        if not a.mtp:
            return [_Item(entry), _Item(loss, first, late)]
        items = [_Item(entry), _Item(late, 0.0, late)]
        for _ in range(a.mtp):  # of the projection: both inputs, the result's gradient
            items += [_Item(3 * entry, 0.0, 1.5 * entry), self._block()] if mtp else [_Item(entry)]
        return [*items, _Item(a.mtp * loss, first, a.mtp * late)]
