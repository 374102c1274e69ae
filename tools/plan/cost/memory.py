"""Predict the bytes on a device of each stage: permanent state, activations and buffers.

Activation bytes per layer follow Korthikanti et al. 2022 (eq. 1-4) for the parts that a layer keeps, written out per
tensor so that MLA, GQA, gated and MoE layers follow the same rule. T tokens of a micro-batch, h width, 2-byte elements.
What this package's own step keeps is another table (`saved`), for layouts with `own_graph`.
"""

from dataclasses import dataclass

import numpy as np

from telechat_moe.tools.plan.cost.columns import Columns, Floats
from telechat_moe.tools.plan.cost.saved_activations import saved
from telechat_moe.units import MIB

WORKSPACE = 96 * MIB
"""Bytes that libraries of matrix products reserve."""

RMS_COPY = 4.0
"""Bytes per element that an RMSNorm in several operators keeps besides its input: it is computed in float32."""


@dataclass
class Memory:
    """Bytes of each stage, [n, P]; zero where a configuration has fewer stages."""

    parameters: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats
    """Activations of all micro-batches in flight at the peak."""
    buffers: Floats
    """Logits and their gradients, gathered layers, what a recomputed layer needs while it runs."""
    constant: Floats
    """Those of the buffers that are there all the time."""
    peak: Floats


def local_parameters(x: Columns) -> tuple[Floats, Floats]:
    """Return parameters of a device by stage [n, P]: those that all data-parallel copies hold, and experts."""
    layers = x.stage_dense + x.stage_moe
    tp = x.tp[:, None]
    layer = x.attention_weights / x.tp + x.small_weights
    shared = x.shared_weights / x.tp
    dense = layers * _column(layer, x) + x.stage_dense * _column(x.dense_weights / x.tp, x)
    dense = dense + x.stage_moe * _column(shared, x)
    rows = np.arange(len(x))
    dense[:, 0] += (x.vocab / x.tp + x.positions) * x.hidden
    last = x.last_stage.astype(int)
    spare = x.vocab * x.hidden / x.tp * np.where((x.tied > 0) & (last == 0), 0.0, 1.0)
    dense[rows, last] += spare + x.hidden
    layer_experts = x.experts * x.expert_weights / (x.ep * x.etp)
    experts = x.stage_moe * _column(layer_experts, x)
    moe_mtp, mtp_stage = x.mtp * x.mtp_moe, x.mtp_stage.astype(int)
    dense[rows, mtp_stage] += x.mtp * (2 * x.hidden**2 / x.tp + layer) + moe_mtp * shared
    dense[rows, mtp_stage] += (x.mtp - moe_mtp) * x.dense_weights / x.tp
    experts[rows, mtp_stage] += moe_mtp * layer_experts
    if np.any(x.own_graph):
        dense = dense + _uncut(x, layers) * (x.own_graph * (1 - 1 / x.tp))[:, None]
    inside = np.arange(layers.shape[1])[None, :] < x.pp[:, None]
    return dense * inside * np.ones_like(tp), experts * inside


def _largest_layer(x: Columns) -> Floats:
    """Return a device's parameters of the larger kind of layer, which ZeRO-3 gathers."""
    experts = x.experts * x.expert_weights / (x.ep * x.etp)
    moe = (x.shared_weights / x.tp + experts) * (x.moe_layers > 0)
    dense = x.dense_weights / x.tp * (x.dense_layers > 0)
    return x.attention_weights / x.tp + x.small_weights + np.maximum(dense, moe)


def _uncut(x: Columns, layers: Floats) -> Floats:
    """Return the elements that this package does not shard over tensor parallelism, [n, P]; see `exact`."""
    down = x.hidden * (x.q_lora_rank + x.kv_lora_rank + x.qk_rope) * x.mla
    shared = x.matrices * x.hidden * x.shared_width * x.sequence_parallel
    router = x.hidden * x.experts
    elements = layers * _column(down, x) + x.stage_moe * _column(router + shared, x)
    block = down + x.mtp_moe * (router + shared)
    elements[np.arange(len(x)), x.mtp_stage.astype(int)] += x.mtp * (2 * x.hidden**2 + block)
    return elements


def _column(values: Floats, x: Columns) -> Floats:
    return np.broadcast_to(values, (len(x),))[:, None]


def layer_activations(x: Columns) -> tuple[Floats, Floats, Floats]:
    """Return the bytes that a dense and a MoE layer keep for one micro-batch, and those of a layer's input alone."""
    if not np.any(x.own_graph):
        return _common(x)
    s, own_graph = saved(x), x.own_graph > 0
    pairs = zip((s.dense, s.moe, s.entry), _common(x), strict=True)
    dense, moe, entry = (np.where(own_graph, package, other) for package, other in pairs)
    return dense, moe, entry


def _common(x: Columns) -> tuple[Floats, Floats, Floats]:
    """Return what all frameworks keep of a layer, apart from this package's."""
    t, h, tp = x.micro_batch * x.seq / x.cp, x.hidden, x.tp
    rows = t / np.where(x.sequence_parallel > 0, tp, 1)
    width = np.where(x.fp32 > 0, 4, 2)
    q, v = x.heads * x.head_dim / tp, x.heads * x.value_dim / tp
    kv = x.kv_heads * (x.head_dim + x.value_dim) / tp
    latents = np.where(x.mla > 0, x.q_lora_rank + x.kv_lora_rank + x.qk_rope, 0)
    scores = np.where(x.flash > 0, 4 * t * x.heads / tp, 5 * t * x.seq * x.heads / tp)
    core = width * t * (q + kv + v) + scores * (1 - x.re_core)
    attention = (width * t * latents + core) * (1 - x.re_attention)
    # policies that choose operator by operator keep attention's result, and those of the last products like the others
    singly = width * ((x.re_mlp > 0) & (x.re_mlp < 1))
    attention = attention + singly * t * v * x.re_attention * (1 - x.re_core)
    attention = attention + singly * rows * h * (2 - x.re_attention - x.re_mlp)
    entered = np.where(x.fp32 > 0, 4, x.input_bytes)
    # outputs of both norms, input of the second
    norm = (2 * entered + width) * rows * h * (1 - x.re_norm)
    residual = np.where(x.fused > 0, 0.0, 2.0) * rows * h * (1 - x.re_full)
    # torch has LayerNorm as one kernel; RMSNorm (of gated models), operator by operator, keeps its input in float32 twice
    copies = np.where((x.fused > 0) | (x.matrices < 3), 0.0, 2 * RMS_COPY)
    norm = norm + copies * rows * h * (1 - x.re_norm)
    f = x.ffn / tp
    # of an element of the inner width: the first products' results, and the last one's input
    inner = width * (x.matrices - 1) + entered * (1 - x.re_activation)
    dense = t * f * inner * (1 - x.re_mlp)
    pairs = t / tp * x.top_k * x.etp * x.imbalance
    g = x.moe_ffn / np.maximum(x.etp, 1)
    moe = pairs * ((width + entered) * h + g * inner) + t * x.shared_width / tp * inner
    moe = (moe + 4 * t / tp * x.experts) * (1 - x.re_mlp)
    entry = width * rows * h
    common = attention + (norm + residual) * (1 - x.re_full) + entry
    return common + dense, common + moe, entry


def in_flight(x: Columns) -> Floats:
    """Return how many micro-batches' activations a stage holds at its peak, in units of the whole stage, [n, P]."""
    stage = np.arange(x.stage_dense.shape[1])[None, :]
    m, p, v = x.micro_batches[:, None], x.pp[:, None], x.vpp[:, None]
    plain = np.minimum(p - stage, m)
    # interleaved: (p - stage - 1) 2 + (v - 1) p + 1 chunks of 1/v of the stage each
    mixed = np.minimum(((p - stage - 1) * 2 + (v - 1) * p + 1) / v, m)
    even = np.minimum(p + 0.0, m)  # in V shapes every stage holds the same
    order = x.order[:, None]
    chosen = np.where(order == 1, mixed, np.where(order >= 3, even, plain))
    chosen = np.where(x.gpipe[:, None] > 0, m, chosen)
    return np.where(stage < p, chosen, 0.0)


def memory(x: Columns, with_late: bool = True) -> Memory:
    """Return the bytes of each stage at the step's peak; `with_late`: the end of the backward pass counts (`late_peak`)."""
    dense, experts = local_parameters(x)
    copies = np.where(x.opt_shards > 0, np.minimum(x.opt_shards, x.dp * x.cp), x.dp * x.cp)
    cut_dense, cut_experts = copies[:, None], x.expert_copies[:, None]

    def held(level: Floats | int) -> Floats:
        on = (x.zero >= level)[:, None]
        return dense / np.where(on, cut_dense, 1) + experts / np.where(on, cut_experts, 1)

    parameters = held(3) * x.parameter_bytes[:, None]
    # without accumulators a gradient is summed as soon as it is there, and only its shard stays
    early = (x.one_graph > 0) & (x.own_graph > 0)
    gradients = held(np.where(early, 1, 2)) * x.gradient_bytes[:, None]
    full_parameters, shard = dense + experts, held(1) * x.parameter_bytes[:, None]
    gathered = x.gathered[:, None] > 0
    parameters = np.where(gathered, shard + 2 * full_parameters, parameters)
    gradients = np.where(gathered, full_parameters * x.gradient_bytes[:, None], gradients)
    optimizer = held(1) * x.optimizer_bytes[:, None]
    one_dense, one_moe, entry = (_column(a, x) for a in layer_activations(x))
    moe_entry = entry
    if np.any(x.own_graph):
        moe_entry = np.where(x.own_graph[:, None] > 0, _column(saved(x).moe_entry, x), entry)
    full, swapped = x.re_full[:, None], x.re_swap[:, None]
    kept_dense = np.where(full > 0, entry, one_dense) * (1 - swapped)
    kept_moe = np.where(full > 0, moe_entry, one_moe) * (1 - swapped)
    whole_dense, whole_moe = (_column(a, x) for a in whole_layers(x))
    per_micro = (
        x.stage_dense_recomputed * kept_dense
        + x.stage_moe_recomputed * kept_moe
        + (x.stage_dense - x.stage_dense_recomputed) * whole_dense
        + (x.stage_moe - x.stage_moe_recomputed) * whole_moe
    )
    activations = per_micro * in_flight(x)
    if np.any(x.own_graph):
        activations = activations + _besides(x, whole_dense, whole_moe)
    working = _working(x, (whole_dense, entry), (whole_moe, moe_entry))
    rows = np.arange(len(x))
    buffers = working * (x.stage_dense.astype(bool) | x.stage_moe.astype(bool))
    logits = _end(x, whole_moe, whole_dense)
    last = x.last_stage.astype(int)
    # logits live while the last stage holds one micro-batch less than a whole set of layers needs
    buffers[rows, last] = np.maximum(buffers[rows, last], np.broadcast_to(logits, (len(x),)))
    if with_late:
        buffers[:, 0] = np.maximum(buffers[:, 0], late_peak(x) - activations[:, 0])
    constant = np.broadcast_to(_constant(x, dense + experts)[:, None], buffers.shape)
    buffers = buffers + constant
    peak = parameters + gradients + optimizer + activations + buffers
    inside = np.arange(peak.shape[1])[None, :] < x.pp[:, None]
    buffers, constant, peak = (a * inside for a in (buffers, constant, peak))
    return Memory(parameters, gradients, optimizer, activations, buffers, constant, peak)


def _constant(x: Columns, parameters: Floats) -> Floats:
    """Return the bytes that are there all the time, [n]: the workspace, and a layer that ZeRO-3 has gathered."""
    layers = np.maximum((x.stage_dense + x.stage_moe).max(axis=1), 1)
    gathered = np.where(x.own_graph > 0, _largest_layer(x), parameters.max(axis=1) / layers)
    gathered_bytes: Floats = np.where(x.zero == 3, 4.0 * gathered, 0.0)
    return gathered_bytes + WORKSPACE


def late_peak(x: Columns) -> Floats:
    """Return the bytes of activations and buffers at the end of the backward pass of one graph, [n]; 0 for other steps.

    By then all layers have left what the gradients of their weights need. The same however many layers are recomputed:
    counted are all, where a layout chooses, and in the MoE layer before the dense ones, none of these.
    """
    if not np.any(x.own_graph):
        return np.zeros(len(x))
    s = saved(x)
    dense_late, moe_late = (
        np.where(x.re_full > 0, late.recomputed, late.plain) for late in (s.dense_late, s.moe_late)
    )
    dense, moe = x.stage_dense.sum(axis=1), x.stage_moe.sum(axis=1)
    block = np.where(x.mtp_moe > 0, moe_late, dense_late)
    ends = s.ends + (1 + x.mtp) * (s.loss + s.logits / 2) + x.mtp * (1.5 * s.entry + block)
    layers = dense * dense_late + moe * moe_late
    embedded = 2 * x.mtp * s.entry
    first_dense = embedded + layers - dense_late + s.dense + s.dense_working
    first_moe = embedded + (moe - 1) * moe_late + dense * s.dense + s.moe + s.moe_working
    peak = np.maximum(layers + s.table_gradient, np.where(dense > 0, first_dense, 0))
    peak = ends + np.maximum(peak, np.where(moe > 0, first_moe, 0))
    return np.where((x.own_graph > 0) & (x.one_graph > 0) & (x.pp == 1), peak, 0.0)


def _working(x: Columns, dense: tuple[Floats, Floats], moe: tuple[Floats, Floats]) -> Floats:
    """Return what the backward pass of a layer needs besides what layers keep, the largest of each stage.

    Dense and MoE layers keep the given bytes, [n, 1], without and with recomputation.
    """
    # two swapped layers are in memory: one in use and one being copied
    full, swapped = x.re_full[:, None] > 0, x.re_swap[:, None] > 0
    recompute: Floats = np.where(x.stage_moe_recomputed > 0, moe[0], dense[0])
    layers = x.stage_dense_recomputed + x.stage_moe_recomputed
    recompute = recompute * np.where(swapped, 2.0 * (layers > 0), full)
    if not np.any(x.own_graph):
        return recompute
    s = saved(x)
    one_dense, one_moe = _column(s.dense_working, x), _column(s.moe_working, x)
    has_moe = _column(x.moe_layers, x) > 0
    largest = np.where(has_moe, np.maximum(one_dense, one_moe), one_dense)
    for layers, working, (plain, entry) in (
        (x.stage_dense_recomputed, one_dense, dense),
        (x.stage_moe_recomputed, one_moe, moe),
    ):
        besides = np.where(swapped, 2 * plain, plain - entry)
        needed = np.where((layers > 0) & (full | swapped), working + besides, 0.0)
        largest = np.maximum(largest, needed)
    return np.where(x.own_graph[:, None] > 0, largest, recompute)


def _end(x: Columns, moe: Floats, dense: Floats) -> Floats:
    """Return what losses need on the last stage, for one micro-batch: MTP's layers, too, where the loss comes back first."""
    t = x.micro_batch * x.seq / x.cp
    # fused: float32 logits that turn into their gradient in place, and a 2-byte copy; else each step's result: result and
    # gradients of log-softmax and of the choice, in float32; cut over tp the gradient is three operators more
    steps = np.where(x.tp > 1, 22.0, 14.0)
    logits = np.where(x.fused_loss > 0, 6.0, steps) * t * x.vocab / x.tp
    # outputs of all micro-batches; and what FSDP has gathered outside of layers
    logits = logits + 2 * x.gathered * (x.micro_batches - 1) * t * x.vocab / x.tp
    logits = logits + 2 * x.fsdp * (2 - x.tied) * x.vocab * x.hidden / x.tp
    if not np.any(x.own_graph):
        return logits
    s = saved(x)
    layer = np.where(x.mtp_moe > 0, moe[:, 0], dense[:, 0])
    marked = (x.re_full > 0) & (x.mtp_recomputed > 0)
    needs = np.where(x.mtp_moe > 0, s.moe_working, s.dense_working)
    needs = needs + np.where(marked, layer - s.entry, 0.0)
    mtp = x.mtp * np.where(x.mtp_apart > 0, s.entry, 3 * s.entry + np.where(marked, s.entry, layer))
    # MTP's loss goes back first, then its layer, then the other loss, last the head's gradient; of one graph the other loss
    # before MTP's layer runs, and what both leave for the head's gradient stays
    one_graph = x.one_graph > 0
    needed = s.entry + mtp + (1 + x.mtp) * s.loss + s.loss_working
    needed = needed + np.where(one_graph & (x.mtp > 0), s.logits / 2, 0)
    left = np.where(one_graph, x.mtp * (s.loss + s.logits / 2), 0)
    block = s.entry + mtp + s.loss + s.logits / 2 + needs + left
    head = s.entry + s.loss + s.head_gradient + (x.mtp - 1.5) * s.logits
    head = np.where(one_graph, 0, head)
    together = (x.mtp > 0) & (x.mtp_apart == 0)
    needed = np.maximum(needed, np.maximum(np.where(together, block, 0.0), head))
    return np.where(x.own_graph > 0, needed, logits)


def _besides(x: Columns, dense: Floats, moe: Floats) -> Floats:
    """Return what this package's micro-batches in flight keep besides layers: tables of positions, MTP's embeddings.

    MTP's layer is included where it comes before the last chunk; its working set is that of its chunk's layers.
    """
    s, flight = saved(x), in_flight(x)
    extra = flight * _column(s.ends * x.vpp * x.own_graph, x)
    extra[:, 0] += (flight[:, 0] + x.one_graph) * x.mtp * s.entry * x.own_graph
    if np.any(x.mtp_apart > 0):
        layer = 3 * s.entry + np.where(x.mtp_moe > 0, moe[:, 0], dense[:, 0])
        # forward passes of that chunk
        ahead = np.minimum(np.where(x.vpp > 1, 3, 2), x.micro_batches)
        mtp_bytes = ahead * x.mtp * layer * x.own_graph * x.mtp_apart
        extra[np.arange(len(x)), x.mtp_stage.astype(int)] += mtp_bytes
    return extra


def whole_layers(x: Columns) -> tuple[Floats, Floats]:
    """Return the bytes that a dense and a MoE layer keep for one micro-batch without any recomputation."""
    names = ("re_full", "re_attention", "re_core", "re_mlp", "re_norm", "re_activation")
    plain = Columns(dict(vars(x)) | {name: np.zeros_like(x.re_full) for name in names})
    dense, moe, _ = layer_activations(plain)
    return dense, moe
