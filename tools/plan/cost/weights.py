"""Weights of every stage on a device, exactly as the layouts of `telechat_moe.sharding` cut them.

The simulator's memory divides all of a layer's matrices by tensor parallelism. Down-projections of MLA, the router and MTP's
projection are whole on every device, with sequence parallelism the shared experts, too; here they are counted so.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.columns import stage_of_chunk
from telechat_moe.tools.plan.cost.layout import Layout

Cut = Literal["whole", "tp", "experts"]


class Weight(NamedTuple):
    """A trained weight on one device."""

    shape: tuple[int, ...]
    """Its part."""

    cut: Cut = "whole"
    """Which devices of a stage hold the same part: all, those along dp and cp, those with the same experts."""

    read_bytes: int = 2
    """Per element, in the type that its operator reads."""

    @property
    def elements(self) -> int:
        """Numbers in its part."""
        return math.prod(self.shape)


def layer_weights(a: Architecture, x: Layout, kind: str) -> Iterator[Weight]:
    """Yield the weights of a decoder layer (MLA, gated)."""
    h, heads = a.hidden, a.heads // x.tp
    width = heads * a.head_dim
    yield from (_norm(h), _norm(h), _norm(a.kv_lora_rank))
    if a.q_lora_rank:
        yield _norm(a.q_lora_rank)
        yield Weight((a.q_lora_rank, h))
    yield Weight((width, a.q_lora_rank or h), "tp")
    yield Weight((a.kv_lora_rank + a.qk_rope, h))
    yield Weight((heads * (a.qk_nope + a.value_dim), a.kv_lora_rank), "tp")
    yield Weight((h, heads * a.value_dim), "tp")
    if kind == "dense":
        yield from _feed_forward(h, a.ffn // x.tp, "tp")
        return
    yield Weight((a.experts, h), read_bytes=4)
    if a.shared_width and x.sequence_parallel and x.tp > 1:
        yield from _feed_forward(h, a.shared_width, "whole")  # each device has rows of its own
    elif a.shared_width:
        yield from _feed_forward(h, a.shared_width // x.tp, "tp")
    held, inner = a.experts // x.ep, a.moe_ffn // x.etp
    yield from (Weight((held, *shape), "experts") for shape in ((h, inner), (h, inner), (inner, h)))


def _norm(width: int) -> Weight:
    return Weight((width,), read_bytes=4)


def _feed_forward(h: int, width: int, cut: Cut) -> Iterator[Weight]:
    yield from (Weight(shape, cut) for shape in ((width, h), (width, h), (h, width)))


def stage_weights(a: Architecture, x: Layout) -> list[list[Weight]]:
    """Return the trained weights of each stage on one of its devices.

    Args:
        a: The model: MLA, gated feed-forwards, no biases.
        x: Its layout.
    """
    place, h = stage_of_chunk(x), a.hidden
    found: list[list[Weight]] = [[] for _ in range(x.pp)]
    layer, last = 0, place[-1]
    table = (a.vocab // x.tp, h)
    for chunk, count in enumerate(x.chunk_layers(len(a.layers))):
        for kind in a.layers[layer : layer + count]:
            found[place[chunk]] += layer_weights(a, x, kind)
        layer += count
    found[0].append(Weight(table, "tp", read_bytes=4))
    found[last] += [_norm(h), *([] if a.tied else [Weight(table, "tp")])]
    for _ in range(a.mtp):
        found[0].append(_norm(h))  # of the embedded tokens, stands with the embedding
        found[last] += [Weight((h, 2 * h)), _norm(h), _norm(h)]
        found[last] += layer_weights(a, x, a.layers[-1])
    return found


def stage_elements(a: Architecture, x: Layout) -> list[int]:
    """Return the trained elements of each stage on one of its devices, without sharding of the optimizer."""
    return [sum(w.elements for w in weights) for weights in stage_weights(a, x)]
