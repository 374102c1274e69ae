"""How much of the experts' all-to-all a schedule hides, on any model and device.

The cost model gives the time of each piece of a MoE layer; the pieces are ordered as an overlapped schedule launches
them and run through the same simulation of streams as a profiled kernel list (`overlap`).

    steady     a forward and a backward of two micro-batches in turn, dW after each dX (1F1B with overlap, DualPipe)
    warm_up    forwards alone: the micro-batch runs as two halves in turn, each under the other's all-to-all
    cool_down  backwards alone: two halves in turn as well, and dW of what is done under the all-to-all of what follows
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.overlap.kernel_list import Kernel
from benchmarks.overlap.kernel_order import Order
from benchmarks.overlap.overlap import Summary, run_streams, summarise
from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.columns import columns
from telechat_moe.tools.plan.cost.device import Device
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.roofline import layer, rates

MAIN, LINK = "compute", "all-to-all"


@dataclass(frozen=True)
class Pieces:
    """Seconds of the pieces of one MoE layer for one micro-batch."""

    attention: float
    """Attention, norms, router and tensor-parallel collectives, forward."""
    shared: float
    """Shared experts, forward: need no all-to-all."""
    experts: float
    """Routed experts, forward."""
    exchange: float
    """One dispatch or one combine."""
    attention_dx: float
    shared_dx: float
    experts_dx: float
    attention_dw: float
    shared_dw: float
    experts_dw: float


@dataclass(frozen=True)
class Hidden:
    """Share of the all-to-all that computation hides."""

    pieces: Pieces
    steady: Summary
    warm_up: Summary
    cool_down: Summary
    shared_only: Summary
    """Warm-up of whole micro-batches, where only shared experts run under the all-to-all."""
    dw_only: Summary
    """Cool-down of whole micro-batches, where only dW and shared experts run under the all-to-all."""

    @property
    def ends(self) -> float:
        """Of warm-up and cool-down together."""
        both = (self.warm_up, self.cool_down)
        return 1 - sum(s.exposed_us for s in both) / sum(s.communication_us for s in both)


def pieces(architecture: Architecture, layout: Layout, device: Device) -> Pieces:
    """Return the pieces of a MoE layer.

    Raises:
        BadInputError: The model has no MoE layers, or its experts are on one device.
    """
    a = architecture
    if not a.moe_layers or layout.ep * layout.etp == 1:
        raise BadInputError(
            f"{a.name or 'model'}: {a.moe_layers} MoE layers, experts over {layout.ep} devices; an all-to-all needs "
            "MoE layers and ep of 2 or more"
        )
    alone = replace(a, shared_experts=0, shared_ffn=0)
    bare = replace(
        alone, top_k=1, moe_ffn=1
    )  # next to no routed experts: what is left is attention
    x = columns([(m, layout.but(ep_overlap=False)) for m in (a, alone, bare)])
    one = layer(x, rates(x, device, device.constants), True)

    def split(of: str) -> np.ndarray:
        f, b, again = one.forward, one.backward, one.again
        if of == "dw":
            return b.matmul / 2
        if of == "dx":
            return (
                b.matmul / 2
                + b.attention
                + b.memory
                + b.tensor
                + again.matmul
                + again.attention
                + again.memory
            )
        return f.matmul + f.attention + f.memory + f.tensor

    parts: list[tuple[float, float, float]] = []
    for of in ("forward", "dx", "dw"):
        whole, routed, attention = split(of)
        parts.append((float(attention), float(whole - routed), float(routed - attention)))
    ahead, dx, dw = parts
    once = float(one.forward.expert[0]) / 2
    return Pieces(*ahead, once, *dx, *dw)


class _Streams:
    """Two streams that are filled in order of launch."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self.order = Order([], [], [], [], [], {})
        self._last: dict[str, int] = {}

    def add(self, stream: str, name: str, seconds: float, after: Sequence[int | None] = ()) -> int:
        number = len(self.kernels)
        role = "exchange" if stream == LINK else ""
        self.kernels.append(Kernel(stream, name, seconds * 1e6, "", 0, role))
        before = [self._last[stream]] if stream in self._last else []
        self.order.after.append(before + [i for i in after if i is not None])
        self.order.issue.append(number)
        if stream == MAIN:
            self.order.main.append(number)
        self._last[stream] = number
        return number

    def run(self) -> Summary:
        start, _ = run_streams(self.kernels, self.order, 0.0, 0.0, 1)
        return summarise(self.kernels, start)


def _steady(p: Pieces, layers: int, pairs: int) -> Summary:
    """Run pairs of a forward and a backward chunk; phases in turn as in DualPipe."""
    s = _Streams()
    forward: int | None = None  # what the next forward phase waits for
    back = s.add(LINK, "dispatch of gradients", p.exchange)
    total = layers * pairs
    for i in range(total):
        here = s.add(MAIN, "attention", p.attention, [forward])
        sent = s.add(LINK, "dispatch", p.exchange, [here])
        here = s.add(MAIN, "experts dX", p.experts_dx + p.shared_dx, [back])
        returned = s.add(LINK, "combine of gradients", p.exchange, [here])
        s.add(MAIN, "experts dW", p.experts_dw + p.shared_dw)
        here = s.add(MAIN, "experts", p.experts + p.shared, [sent])
        forward = s.add(LINK, "combine", p.exchange, [here])
        here = s.add(MAIN, "attention dX", p.attention_dx, [returned])
        if i + 1 < total:
            back = s.add(LINK, "dispatch of gradients", p.exchange, [here])
        s.add(MAIN, "attention dW", p.attention_dw)
    return s.run()


def _forwards(p: Pieces, layers: int, halves: int) -> Summary:
    """Run one chunk forward, as one micro-batch or as two halves in turn; `p` is of one of them."""
    s = _Streams()
    ready: list[int | None] = [None] * halves
    for _ in range(layers):
        sent = [
            s.add(LINK, "dispatch", p.exchange, [s.add(MAIN, "attention", p.attention, [r])])
            for r in ready
        ]
        for which, arrived in enumerate(sent):
            s.add(MAIN, "shared experts", p.shared)
            here = s.add(MAIN, "experts", p.experts, [arrived])
            ready[which] = s.add(LINK, "combine", p.exchange, [here])
    return s.run()


def _backwards(p: Pieces, layers: int, halves: int) -> Summary:
    """Run one chunk backward, as one micro-batch or as two halves in turn; dW runs under the all-to-all after its dX."""
    s = _Streams()

    def dispatch(after: int | None) -> int:
        sent = s.add(LINK, "dispatch of gradients", p.exchange, [after])
        s.add(MAIN, "shared experts dX", p.shared_dx)
        return sent

    arrived = [dispatch(None) for _ in range(halves)]
    for i in range(layers):
        returned: list[int] = []
        for sent in arrived:
            here = s.add(MAIN, "experts dX", p.experts_dx, [sent])
            returned.append(s.add(LINK, "combine of gradients", p.exchange, [here]))
        for _ in range(halves):
            s.add(MAIN, "experts dW", p.experts_dw + p.shared_dw)
        arrived = []
        for sent in returned:
            here = s.add(MAIN, "attention dX", p.attention_dx, [sent])
            if i + 1 < layers:
                arrived.append(dispatch(here))
        for _ in range(halves):
            s.add(MAIN, "attention dW", p.attention_dw)
    return s.run()


def hidden(
    architecture: Architecture, layout: Layout, device: Device, *, layers: int = 2, pairs: int = 16
) -> Hidden:
    """Return how much all-to-all each part of the schedule hides.

    Args:
        architecture: A model with MoE layers.
        layout: Degrees and micro-batch.
        device: Device and network.
        layers: MoE layers of a chunk.
        pairs: Overlapped pairs that follow each other in the steady state.

    Raises:
        BadInputError: There is no all-to-all.
    """
    whole = pieces(architecture, layout, device)
    if layout.micro_batch > 1:
        half = pieces(architecture, layout.but(micro_batch=layout.micro_batch // 2), device)
    else:  # half the tokens; attention's core still sees all keys, so the first half costs a little less than this
        half = pieces(replace(architecture, seq=architecture.seq // 2), layout, device)
        half = replace(
            half,
            attention=max(half.attention, whole.attention / 2),
            attention_dx=max(half.attention_dx, whole.attention_dx / 2),
        )
    return Hidden(
        whole,
        _steady(whole, layers, pairs),
        _forwards(half, layers, 2),
        _backwards(half, layers, 2),
        _forwards(whole, layers, 1),
        _backwards(whole, layers, 1),
    )
