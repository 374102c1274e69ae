"""How much of the experts' all-to-all a schedule hides, on any model and device.

The cost model gives the seconds of each component of a MoE layer. They are put on two streams, computation and
all-to-all, in the order in which an overlapped schedule launches them, and each starts as soon as it can.

    steady     a forward and a backward of two micro-batches in turn, dW after each dX (1F1B with overlap, DualPipe)
    warm_up    forwards alone: the micro-batch runs as two halves in turn, each under the other's all-to-all
    cool_down  backwards alone: two halves in turn as well, and dW of what is done under the all-to-all of what follows
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.columns import Floats, columns
from telechat_moe.tools.plan.cost.device import Device
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.roofline import layer, rates


@dataclass(frozen=True)
class OverlapSummary:
    """How long a device's streams are busy; overlapping intervals count once, as in a profiler."""

    span_us: float
    """From the first start to the last end."""
    compute_us: float
    communication_us: float
    exposed_us: float
    """Communication during which nothing computes."""
    idle_us: float
    """Time in which nothing runs."""

    @property
    def overlap(self) -> float:
        """Share of the communication that computation hides; nan where there is no communication."""
        return 1.0 - self.exposed_us / self.communication_us if self.communication_us else math.nan


Interval = tuple[float, float]
"""Start and end in microseconds."""


def union_us(intervals: Iterable[Interval]) -> float:
    """Return the length that intervals cover, overlaps counted once."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def summarise(compute: Sequence[Interval], communication: Sequence[Interval]) -> OverlapSummary:
    """Return how busy a device is with computation and communication at the given times."""
    both = [*compute, *communication]
    span = max(end for _, end in both) - min(start for start, _ in both)
    busy, computing = union_us(both), union_us(compute)
    return OverlapSummary(span, computing, union_us(communication), busy - computing, span - busy)


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of the components of one MoE layer for one micro-batch."""

    attention: float
    """Attention, norms, router and tensor-parallel collectives, forward."""
    shared: float
    """Shared experts, forward: need no all-to-all."""
    experts: float
    """Routed experts, forward."""
    exchange: float
    """One dispatch or one combine of tokens."""
    attention_dx: float
    shared_dx: float
    experts_dx: float
    attention_dw: float
    shared_dw: float
    experts_dw: float


@dataclass(frozen=True)
class Hidden:
    """Share of the all-to-all that computation hides, by phase of the schedule."""

    steady: OverlapSummary
    warm_up: OverlapSummary
    cool_down: OverlapSummary
    shared_only: OverlapSummary
    """Warm-up of whole micro-batches, where only shared experts run during the all-to-all."""
    dw_only: OverlapSummary
    """Cool-down of whole micro-batches, where only dW and shared experts run during the all-to-all."""

    @property
    def ends(self) -> float:
        """Share hidden in warm-up and cool-down together."""
        both = (self.warm_up, self.cool_down)
        return 1 - sum(s.exposed_us for s in both) / sum(s.communication_us for s in both)


def layer_times(architecture: Architecture, layout: Layout, device: Device) -> LayerTimes:
    """Return the seconds of the components of a MoE layer.

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
    bare = replace(alone, top_k=1, moe_ffn=1)  # next to no routed experts: attention is left
    x = columns([(m, layout.with_changes(ep_overlap=False)) for m in (a, alone, bare)])
    block = layer(x, rates(x, device), True)

    f, b, repeated = block.forward, block.backward, block.recompute
    dw_s = b.matmul / 2
    dx_s = (
        dw_s + b.attention + b.memory + b.tensor
        + repeated.matmul + repeated.attention + repeated.memory
    )  # fmt: skip

    def split(seconds: Floats) -> tuple[float, float, float]:
        """Return the seconds of attention, of shared and of routed experts."""
        everything, routed, attention = seconds
        return float(attention), float(everything - routed), float(routed - attention)

    once = float(f.expert[0]) / 2
    forward = split(f.matmul + f.attention + f.memory + f.tensor)
    return LayerTimes(*forward, once, *split(dx_s), *split(dw_s))


class Streams:
    """Two in-order streams; an item starts when its stream is free and what it waits for has ended.

    ``compute`` and ``exchange`` append an item of some seconds that waits until `after` (us), and return when it ends (us).
    """

    def __init__(self) -> None:
        self._busy: tuple[list[Interval], list[Interval]] = ([], [])
        self.compute, self.exchange = (partial(_append, stream) for stream in self._busy)

    def summary(self) -> OverlapSummary:
        """Return how busy both streams were."""
        return summarise(*self._busy)


def _append(stream: list[Interval], seconds: float, after: float = 0.0) -> float:
    """Append an item that waits until `after` (us), and return when it ends (us)."""
    start = max(after, stream[-1][1] if stream else 0.0)
    stream.append((start, start + seconds * 1e6))
    return stream[-1][1]


def _steady(p: LayerTimes, layers: int, pairs: int) -> OverlapSummary:
    """Run pairs of a forward and a backward chunk whose phases alternate as in DualPipe."""
    s = Streams()
    combined = 0.0  # what the next forward phase waits for
    gradients = s.exchange(p.exchange)
    total = layers * pairs
    for i in range(total):
        dispatched = s.exchange(p.exchange, s.compute(p.attention, combined))
        returned = s.exchange(p.exchange, s.compute(p.experts_dx + p.shared_dx, gradients))
        s.compute(p.experts_dw + p.shared_dw)
        combined = s.exchange(p.exchange, s.compute(p.experts + p.shared, dispatched))
        end = s.compute(p.attention_dx, returned)
        if i + 1 < total:
            gradients = s.exchange(p.exchange, end)
        s.compute(p.attention_dw)
    return s.summary()


def _forwards(p: LayerTimes, layers: int, halves: int) -> OverlapSummary:
    """Run one chunk forward, as one micro-batch or as two halves in turn; `p` is of one of them."""
    s = Streams()
    combined = [0.0] * halves
    for _ in range(layers):
        dispatched = [s.exchange(p.exchange, s.compute(p.attention, end)) for end in combined]
        combined: list[float] = []
        for end in dispatched:
            s.compute(p.shared)
            combined.append(s.exchange(p.exchange, s.compute(p.experts, end)))
    return s.summary()


def _backwards(p: LayerTimes, layers: int, halves: int) -> OverlapSummary:
    """Run one chunk backward, as a micro-batch or as two halves in turn; dW runs during the all-to-all after its dX."""
    s = Streams()

    def dispatch(after: float) -> float:
        end = s.exchange(p.exchange, after)
        s.compute(p.shared_dx)
        return end

    gradients = [dispatch(0.0) for _ in range(halves)]
    for i in range(layers):
        returned = [s.exchange(p.exchange, s.compute(p.experts_dx, end)) for end in gradients]
        for _ in range(halves):
            s.compute(p.experts_dw + p.shared_dw)
        gradients: list[float] = []
        for end in returned:
            end_dx = s.compute(p.attention_dx, end)
            if i + 1 < layers:
                gradients.append(dispatch(end_dx))
        for _ in range(halves):
            s.compute(p.attention_dw)
    return s.summary()


def hidden(
    architecture: Architecture, layout: Layout, device: Device, *, layers: int = 2, pairs: int = 16
) -> Hidden:
    """Return how much of the all-to-all each phase of the schedule hides.

    A chunk has `layers` MoE layers; `pairs` overlapped pairs follow each other in the steady state.

    Raises:
        BadInputError: There is no all-to-all.
    """
    full = layer_times(architecture, layout, device)
    if layout.micro_batch > 1:
        halved = layout.with_changes(micro_batch=layout.micro_batch // 2)
        half = layer_times(architecture, halved, device)
    else:  # half the tokens; attention's core still sees all keys, so the first half costs a little less than this
        half = layer_times(replace(architecture, seq=architecture.seq // 2), layout, device)
        half = replace(
            half,
            attention=max(half.attention, full.attention / 2),
            attention_dx=max(half.attention_dx, full.attention_dx / 2),
        )
    return Hidden(
        _steady(full, layers, pairs),
        _forwards(half, layers, 2),
        _backwards(half, layers, 2),
        _forwards(full, layers, 1),
        _backwards(full, layers, 1),
    )
