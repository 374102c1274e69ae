"""Trained elements of every stage on a device, exactly as the layouts of `telechat_moe.sharding` cut them.

The simulator's memory divides all of a layer's matrices by tensor parallelism. Down-projections of MLA, the router and MTP's
projection are whole on every device, with sequence parallelism the shared experts, too; here they are counted so. The dry run's graph confirms it to the byte.
"""

from telechat_moe.tools.plan.architecture import Architecture
from telechat_moe.tools.plan.columns import stage_of_chunk
from telechat_moe.tools.plan.layout import Layout


def layer_elements(a: Architecture, x: Layout, kind: str) -> int:
    """Return the elements of a decoder layer on one device (MLA, gated)."""
    h, width = a.hidden, a.heads * a.head_dim
    down = h * (a.q_lora_rank + a.kv_lora_rank + a.qk_rope)
    up = (a.q_lora_rank or h) * width + a.kv_lora_rank * a.heads * (a.qk_nope + a.value_dim)
    attention = down + (up + a.heads * a.value_dim * h) // x.tp + a.small_weights
    if kind == "dense":
        return attention + a.dense_weights // x.tp
    experts = a.experts // x.ep * a.expert_weights // x.etp
    # sequence parallelism gives every device rows of its own, and the whole of the shared experts
    shared = a.matrices * h * a.shared_width // (1 if x.sequence_parallel else x.tp)
    return attention + experts + h * a.experts + shared


def stage_elements(a: Architecture, x: Layout) -> list[int]:
    """Return the trained elements of each stage on one of its devices, without sharding of the optimizer.

    Args:
        a: The model: MLA, gated feed-forwards, no biases.
        x: Its layout.
    """
    place, h = stage_of_chunk(x), a.hidden
    found, layer = [0] * x.pp, 0
    for chunk, count in enumerate(x.chunk_layers(len(a.layers))):
        for kind in a.layers[layer : layer + count]:
            found[place[chunk]] += layer_elements(a, x, kind)
        layer += count
    found[0] += a.vocab * h // x.tp
    found[place[-1]] += (0 if a.tied else a.vocab * h // x.tp) + h
    found[0] += a.mtp * h  # its norm of the embedded tokens stands with the embedding
    block = layer_elements(a, x, a.layers[-1])
    found[place[-1]] += a.mtp * (2 * h * h + 2 * h + block)
    return found
