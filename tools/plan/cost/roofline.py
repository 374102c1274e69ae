"""Time of a layer's operators on one device: roofline with fitted efficiencies.

All functions take `Columns` and return arrays, one entry a configuration, in seconds per micro-batch. T tokens of a
micro-batch on a device (of its context slice), h width, S keys.
"""

from dataclasses import dataclass

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.cost.collectives import all_gather, all_reduce, all_to_all
from telechat_moe.tools.plan.cost.columns import Columns, Floats
from telechat_moe.tools.plan.cost.device import Constants, Device
from telechat_moe.tools.plan.cost.expert_exchange import EXCHANGES, exchange_s
from telechat_moe.tools.plan.cost.memory import whole_layers

SQUARINGS = 3
"""Squarings that make the exponent, 8, of the smooth maximum of device and host time: they overlap, but not perfectly
near the crossing."""

START = 0.3
"""Device time to start kernels, relative to the host time to launch them."""

ROUTING = 3.0
"""Time that the host waits in a MoE layer for token counts, relative to a dense layer's launch: in megatron_bridge_perf
Qwen3 30B on 8 B200 takes 8.8 ms a layer with one sequence a micro-batch, and 12.7 ms with four."""

EXPERT_LAUNCHES = 0.1
"""Launch time of one expert's forward kernels (two products, activation, slices) relative to a dense layer's, which has about
ten times as many; it counts where experts are launched one by one."""

EARLY_ATTENTION = 0.5
"""Rate of the first flash kernels (Triton, with a bias) relative to those of a fused library."""

MEMORY_BACKWARD = 1.5
"""Elementwise bytes of the backward pass over the forward's: it reads gradient and input, and writes a gradient."""

MERGE_BYTES = 40
"""Bytes per element to merge two partial results of attention in float32, operator by operator."""


@dataclass
class Pass:
    """Seconds of one section of the model for one micro-batch."""

    matmul: Floats
    attention: Floats
    memory: Floats
    tensor: Floats
    """Tensor-parallel and context-parallel communication that is not hidden."""
    expert: Floats
    """All-to-all of the experts that is not hidden."""
    host: Floats
    """Time that the host needs to launch it, a lower bound of its time."""
    wait: Floats
    """Time that the host waits for the device and launches nothing, added to the lower bound."""

    def __add__(self, other: "Pass") -> "Pass":
        return Pass(*map(np.add, vars(self).values(), vars(other).values()))

    def __mul__(self, factor: Floats | float) -> "Pass":
        return Pass(*(a * factor for a in vars(self).values()))

    @property
    def device(self) -> Floats:
        """Device time, without the lower bound of the host."""
        return self.matmul + self.attention + self.memory + self.tensor + self.expert

    @property
    def time(self) -> Floats:
        """Device time, or the host's where that is longer."""
        busy, floor = self.device + START * self.host, self.host + self.wait
        scale = np.maximum(np.maximum(busy, floor), 1e-30)  # so that powers stay in range
        powers = busy / scale, floor / scale
        # No np.power: it ends in other bits in other versions of NumPy.
        for _ in range(SQUARINGS):
            powers = powers[0] * powers[0], powers[1] * powers[1]
        both: Floats = powers[0] + powers[1]
        for _ in range(SQUARINGS):
            both = np.sqrt(both)
        return scale * both


@dataclass
class Rates:
    """Device as the operators need it."""

    device: Device
    peak: Floats
    """FLOP/s of attention and of the head."""
    linear: Floats
    """FLOP/s of the layers' matrices."""
    stream: float
    """Bytes/s of elementwise operators."""

    @property
    def constants(self) -> Constants:
        """The device's fitted constants."""
        return self.device.constants


def rates(x: Columns, device: Device) -> Rates:
    """Return the rates of a device for each configuration's type."""
    c = device.constants
    wide = device.peak_flops.get("bf16", device.peak_flops.get("fp16", 0.0))
    peak: Floats = np.where(x.fp32 > 0, device.peak_flops.get("fp32", wide), wide)
    eight = device.peak_flops.get("fp8", wide) * c.fp8_share
    four = device.peak_flops.get("fp4", wide) * c.fp8_share
    eager: Floats = np.where(x.fused > 0, 1.0, c.eager_share)
    linear: Floats = np.where(x.fp4 > 0, four, np.where(x.fp8 > 0, eight, peak))
    stream = device.memory_bandwidth * c.memory_share
    return Rates(device, peak * eager, linear * eager, stream)


def product(m: Floats, n: Floats, k: Floats, r: Rates, peak: Floats) -> Floats:
    """Return the time of a product [m, k] x [k, n]: that of its FLOPs at the size's efficiency, or of its traffic."""
    half = r.constants.matmul_half
    share = r.constants.matmul_share / ((1 + half / m) * (1 + half / n) * (1 + half / k))
    flops = 2 * m * n * k / (peak * share)
    return np.maximum(flops, 2 * (m * k + k * n + m * n) / r.stream)


def tokens(x: Columns) -> Floats:
    """Return T: tokens of a micro-batch on a device, before tensor parallelism."""
    return x.micro_batch * x.seq / x.cp


def causal_share(x: Columns) -> Floats:
    """Return the share of all query-key pairs that the kernel computes under documents, a causal mask or a window."""
    window = np.where(x.window > 0, np.minimum(x.window, x.seq), x.seq)
    causal = (window - window**2 / (2 * x.seq)) / x.seq
    return np.where(x.skips > 0, np.where(x.pair_share > 0, x.pair_share, causal), 1.0)


def attention_forward(x: Columns, r: Rates) -> tuple[Floats, Floats, Floats, Floats]:
    """Return matmul, core, the core's backward, and memory time of one attention layer; forward but for the third."""
    t, h, tp = tokens(x), x.hidden, x.tp
    q, v = x.heads * x.head_dim / tp, x.heads * x.value_dim / tp
    kv = x.kv_heads * (x.head_dim + x.value_dim) / tp
    usual = product(t, q + kv, h, r, r.linear)
    rank_q = np.maximum(x.q_lora_rank, 1)
    down = x.q_lora_rank + x.kv_lora_rank + x.qk_rope
    latent = product(t, np.maximum(down, 1), h, r, r.linear)  # not divided over tp
    latent = latent + product(t, q, np.where(x.q_lora_rank > 0, rank_q, h), r, r.linear)
    up = x.heads * (x.qk_nope + x.value_dim) / tp
    latent = latent + product(t, np.maximum(up, 1), np.maximum(x.kv_lora_rank, 1), r, r.linear)
    matmul = np.where(x.mla > 0, latent, usual) + product(t, h, v, r, r.linear)
    # scores and weighted values; causal halves only where the kernel skips the upper triangle
    pairs = t * x.seq * x.heads / tp
    flops = 2 * pairs * (x.head_dim + x.value_dim)
    kernels = np.where(x.fused_attention > 0, 1.0, EARLY_ATTENTION)
    flash = flops * causal_share(x) / (r.peak * r.constants.attention_share * kernels)
    heads = np.maximum(x.head_dim, 1)
    plain = flops / (r.peak * r.constants.matmul_share / (1 + r.constants.matmul_half / heads))
    plain = np.maximum(plain, 4 * pairs / r.stream)
    # a causal softmax reads half of the scores and writes all; dropout reads, writes, and writes a mask
    softmax = np.where(x.fused > 0, 8.0, 14.0) * pairs / r.stream
    softmax_back = np.where(x.fused > 0, 9.0, 16.0) * pairs / r.stream
    core = np.where(x.flash > 0, flash, plain + softmax)
    # flash attention recomputes the scores
    core_back = np.where(x.flash > 0, 2.5 * flash, 2 * plain + softmax_back)
    # learned positions: only the result is transposed; else queries and keys are split and rotated, too
    memory = np.where(x.positions > 0, 4 * t * v, 6 * t * (q + kv)) / r.stream
    return matmul, core, core_back, memory


CAST_BYTES = 4.0
"""Bytes moved per element cast to float8: 2 read, 1 written for the product, 1 transposed for the gradient's."""


def casts(x: Columns, r: Rates, moe: bool) -> tuple[Floats, Floats]:
    """Return the time of casting a layer's inputs (forward) and gradients (backward) to float8."""
    t = tokens(x)
    q, v = x.heads * x.head_dim / x.tp, x.heads * x.value_dim / x.tp
    kv = x.kv_heads * (x.head_dim + x.value_dim) / x.tp
    forward, backward = t * v, t * (q + kv + x.hidden)
    rows, f, entry = t, x.ffn / x.tp, np.zeros_like(x.hidden)  # norms write float8 themselves
    if moe:
        rows = t / x.tp * x.top_k * x.etp * x.imbalance
        f = np.where(x.fused_experts > 0, 0.0, np.maximum(x.moe_ffn / x.etp, 1))
        entry = x.hidden
        shared = x.shared_width / x.tp
        forward = forward + t * shared * (x.shared_width > 0)
        backward = backward + t * (x.matrices - 1) * shared * (x.shared_width > 0)
    forward = forward + rows * (entry + f)
    backward = backward + rows * ((x.matrices - 1) * f + x.hidden)
    return CAST_BYTES * forward * x.fp8 / r.stream, CAST_BYTES * backward * x.fp8 / r.stream


def norms(x: Columns, r: Rates) -> Floats:
    """Return the time of a layer's two norms and residual additions, forward."""
    rows = tokens(x) / np.where(x.sequence_parallel > 0, x.tp, 1)
    traffic = np.where(x.fused > 0, 20.0, 34.0)
    return traffic * rows * x.hidden / r.stream


def dense_forward(x: Columns, r: Rates) -> tuple[Floats, Floats]:
    """Return matmul and memory time of a dense feed-forward."""
    t, h, f = tokens(x), x.hidden, x.ffn / x.tp
    matmul = product(t, f * (x.matrices - 1), h, r, r.linear) + product(t, h, f, r, r.linear)
    return matmul, 2 * x.matrices * t * f / r.stream


def moe_forward(x: Columns, r: Rates) -> tuple[Floats, Floats]:
    """Return matmul and memory time of experts, shared experts and router."""
    t, h = tokens(x), x.hidden
    rows = t / x.tp * x.top_k * x.etp * x.imbalance  # on one device, over all its experts
    local = np.maximum(x.experts / x.ep, 1)
    expert_rows = np.maximum(rows / local, 1)
    f = np.maximum(x.moe_ffn / x.etp, 1)
    matmul = local * (
        product(expert_rows, f * (x.matrices - 1), h, r, r.linear)
        + product(expert_rows, h, f, r, r.linear)
    )
    shared = np.maximum(x.shared_width / x.tp, 1)
    matmul = matmul + np.where(
        x.shared_width > 0,
        product(t, shared * (x.matrices - 1), h, r, r.linear) + product(t, h, shared, r, r.linear),
        0.0,
    )
    matmul = matmul + product(t / x.tp, np.maximum(x.experts, 1), h, r, r.peak)
    gate = np.where(x.fused_experts > 0, 0.0, 2 * x.matrices * rows * f)
    memory = (gate + x.permute_bytes * rows * h) / r.stream  # permute and unpermute
    memory = memory + 2 * x.matrices * t * shared * (x.shared_width > 0) / r.stream
    return matmul, memory


def tensor_forward(x: Columns, r: Rates) -> Floats:
    """Return the time of a layer's tensor-parallel collectives, forward."""
    t, stride = tokens(x), np.ones_like(x.tp)
    size = 2 * t * x.hidden
    reduce = all_reduce(size, x.tp, stride, r.device)
    gather = 2 * all_gather(size, x.tp, stride, r.device)
    once: Floats = np.where(x.sequence_parallel > 0, gather, reduce)
    shown: Floats = np.where(x.tp_overlap > 0, r.constants.tensor_exposed, 1.0)
    return 2 * once * shown * (x.tp > 1)


def context_exchange(x: Columns, r: Rates) -> tuple[Floats, Floats]:
    """Return the time of context parallelism that is not hidden in a layer, forward and backward.

    Overlapped, keys and values go around the ring during attention, and in the backward pass once more with their
    gradients. Otherwise those of all query heads are gathered first, partial results are merged in float32, and
    float32 gradients follow.
    """
    t, overlapped = tokens(x), x.cp_overlap > 0
    heads = np.where((x.mla > 0) | ~overlapped, x.heads, x.kv_heads)
    elements = t * x.cp * heads * (x.head_dim + x.value_dim) / x.tp
    ring = all_gather(2 * elements, x.cp, x.tp, r.device)
    gradients = all_gather(4 * elements, x.cp, x.tp, r.device)
    merges = MERGE_BYTES * (x.cp - 1) * t * x.heads * x.value_dim / x.tp / r.stream
    forward: Floats = np.where(overlapped, ring * r.constants.exposed, ring + merges)
    backward: Floats = np.where(
        overlapped, 2 * ring * r.constants.exposed, ring + gradients + merges
    )
    return forward * (x.cp > 1), backward * (x.cp > 1)


def expert_forward(x: Columns, r: Rates) -> Floats:
    """Return the time of dispatch and combine of one MoE layer, forward."""
    rows = tokens(x) / x.tp * x.top_k * x.imbalance
    size = 2 * rows * x.hidden
    members = x.ep * x.etp
    copies = x.top_k * x.hierarchical
    once: Floats = all_to_all(size, members, np.ones_like(x.ep), r.device, copies)
    for i in range(1, len(EXCHANGES)):
        if np.any(x.exchange == i):
            by_node = exchange_s(EXCHANGES[i], x, size / x.top_k, r.device)
            once = np.where(x.exchange == i, by_node, once)
    shown: Floats = np.where(x.ep_overlap > 0, r.constants.exposed, 1.0)
    return 2 * once * shown * (members > 1)


def head_forward(x: Columns, r: Rates) -> Pass:
    """Return the forward times of the output head and its loss; the backward pass takes twice as long."""
    t, n = tokens(x), x.vocab / x.tp
    zero = np.zeros_like(t * x.tp)
    memory = np.where(x.fused_loss > 0, 14.0, 34.0) * t * n / r.stream
    host = 2 * r.constants.layer_host_s * np.where(x.graphs > 0, 0.0, 1.0)
    return Pass(product(t, n, x.hidden, r, r.peak), zero, memory, zero, zero, zero + host, zero)


def embedding_forward(x: Columns, r: Rates) -> Pass:
    """Return the forward times of the embedding."""
    t = tokens(x)
    zero = np.zeros_like(t * x.tp)
    reduce = all_reduce(2 * t * x.hidden, x.tp, np.ones_like(x.tp), r.device)
    tensor = np.where(x.tp > 1, reduce, 0.0)
    host = r.constants.layer_host_s * np.where(x.graphs > 0, 0.0, 1.0)
    return Pass(zero, zero, 8 * t * x.hidden / r.stream + zero, tensor, zero, zero + host, zero)


@dataclass
class Layer:
    """One decoder layer of a kind: forward, backward (dX and dW), and the recompute or wait before the backward."""

    forward: Pass
    backward: Pass
    recompute: Pass


def swap_wait(size: Floats, r: Rates, forward: Pass, backward: Pass) -> Floats:
    """Return by how much copying a layer's activations, bytes, to the host and back exceeds the passes that hide it.

    Raises:
        BadInputError: The device's description has no link to its host.
    """
    if not r.device.host_bandwidth:
        raise BadInputError(
            f"device {r.device.name}: host_bandwidth is missing, so nothing is swapped"
        )
    copy = size / (r.device.host_bandwidth * r.constants.intra_share)
    waits: list[Floats] = [np.maximum(copy - p.time, 0.0) for p in (forward, backward)]
    return waits[0] + waits[1]


def layer(x: Columns, r: Rates, moe: bool) -> Layer:
    """Return the times of a dense or a MoE layer."""
    a_matmul, core, core_back, a_memory = attention_forward(x, r)
    f_matmul, f_memory = moe_forward(x, r) if moe else dense_forward(x, r)
    norm = norms(x, r)
    cast, cast_back = casts(x, r, moe)
    zero = np.zeros_like(core + norm)
    tensor = zero + tensor_forward(x, r)
    around, around_back = context_exchange(x, r)
    tensor_back, tensor = tensor + around_back, tensor + around
    expert = zero + (expert_forward(x, r) if moe else 0.0)
    singly = EXPERT_LAUNCHES * x.single_experts * np.maximum(x.experts / x.ep, 1)
    kernels = 2.0 + singly if moe else 1.0
    # the slowest of tp hosts, twice a layer
    meet = 2 * r.constants.collective_host_s * x.tp * (x.tp > 1)
    host = zero + (r.constants.layer_host_s * kernels + meet) * np.where(x.graphs > 0, 0.0, 1.0)
    # with two micro-batches in flight the device has work while the host waits
    awaited = np.where((x.graphs > 0) | (x.ep_overlap > 0), 0.0, 1.0) * moe
    wait = ROUTING * r.constants.layer_host_s * awaited
    forward = Pass(
        zero + a_matmul + f_matmul,
        zero + core,
        zero + a_memory + f_memory + norm + cast,
        tensor,
        expert,
        host,
        zero + wait,
    )
    backward = Pass(
        forward.matmul * 2,
        zero + core_back,
        (forward.memory - cast) * MEMORY_BACKWARD + cast_back,
        tensor_back,
        expert,
        host * 2,
        zero + wait * 2,
    )
    # where recomputation stops once all inputs are there again, the last product is not repeated
    again_mlp = x.re_mlp - x.re_early / x.matrices
    recompute = Pass(
        zero + a_matmul * x.re_attention + f_matmul * again_mlp,
        zero + core * x.re_core,
        zero + a_memory * x.re_attention + f_memory * x.re_activation + norm * x.re_norm,
        tensor * x.re_full,
        expert * x.re_full,
        host * np.maximum(x.re_full, 0.1 * x.re_core),
        wait * x.re_full,
    )
    if np.any(x.re_swap > 0):
        wait = swap_wait(whole_layers(x)[moe], r, forward, backward)
        recompute.memory = recompute.memory + x.re_swap * wait
    return Layer(forward, backward, recompute)
