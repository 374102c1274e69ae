"""Define the inner problem: the layers of each chunk, and how many of them are recomputed, for one configuration.

Decoder layers come in one or two kinds that follow each other (dense, then MoE); a chunk holds consecutive layers. The
aim is the shortest step

    makespan(times of the chunks)  +  tail(largest stage)

so that no stage needs more memory than it has. The makespan is that of the schedule, operation by operation
(:mod:`.pipeline_program`); the tail is gradient reduction, update and host. Times are whole picoseconds, memory whole bytes.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.search.pipeline_program import PipelineProgram, pipeline

BISECTIONS = 45
"""Halvings of an interval after which a bound is close enough."""

ScheduleKey = tuple[str, int, int, int]
"""Schedule, stages, micro-batches and chunks of a stage: problems with the same key share paths."""

PassTimes = tuple[int, int, int]
"""F, B (D where the schedule separates dW) and W of one micro-batch, ps."""


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Equal layers that follow each other in the model."""

    count: int
    times: PassTimes
    states: int
    """Bytes of one layer's parameters, gradients and optimizer."""
    activations: tuple[int, ...]
    """Bytes that one layer keeps at the peak of each stage, for all micro-batches in flight."""
    recompute_time: int = 0
    """Additional backward time of a recomputed layer, ps."""
    inputs: tuple[int, ...] = ()
    """Bytes that a recomputed layer keeps."""
    working: int = 0
    """Bytes that a stage needs while it recomputes one of these layers; the larger of both kinds counts."""
    weights: tuple[int, int] = (0, 0)
    """Parameters of one layer on a device: those that all data-parallel copies hold, and experts'."""


@dataclass(frozen=True, kw_only=True)
class StepTail:
    """The end of the step after the pipeline, s: ``max(all - hidden, exposed * all) + update + base``.

    ``all = sum_i reduce_i U_i + start``, ``update = sum_i update_i U_i``, with U_0 and U_1 the parameters of the largest
    stage that all copies hold and experts; hidden behind the longest backward pass of a stage, or more of it (`overlap_weights`).
    """

    base: float = 0.0
    start: float = 0.0
    reduce: tuple[float, float] = (0.0, 0.0)
    update: tuple[float, float] = (0.0, 0.0)
    exposed: float = 1.0
    overlap_limit: tuple[float, float] = (0.0, 0.0)
    """A stage whose micro-batch takes t hides at most ``overlap_limit[0] t + overlap_limit[1]``."""
    overlap_weights: tuple[float, float] = (0.0, 1.0)
    """Seconds hidden for a second of forward and of backward of the stage that hides most; ZeRO 2 and 3 reduce in every
    micro-batch."""

    def lines(self, micro_batches: int) -> list[tuple[float, float, NDArray[Any]]]:
        """Return (k, c, [u_0, u_1]) so that every step is at least k makespan + c + u U, for each.

        The longest stage t takes no more than makespan / m, so what it hides is bounded by the makespan.
        """
        update = np.array(self.update)
        shown = (1.0, self.exposed * self.start, self.exposed * np.array(self.reduce) + update)
        share = self.overlap_limit[0] / micro_batches
        hidden = (1.0 - share, self.start - self.overlap_limit[1], np.array(self.reduce) + update)
        return [(k, c + self.base, u) for k, c, u in (shown, hidden)]


@dataclass(frozen=True, kw_only=True)
class PlacementProblem:
    """The layers to place, and the stages that they are placed on."""

    schedule: str
    stages: int
    micro_batches: int
    chunks: int = 1
    """Chunks of a stage."""
    layers: tuple[LayerGroup, ...]
    first: PassTimes = (0, 0, 0)
    """Times of the first chunk without its layers: the embedding."""
    before: PassTimes = (0, 0, 0)
    """The same of the chunk before the last one: MTP without its head."""
    last: PassTimes = (0, 0, 0)
    """The same of the last chunk: MTP and head, or only heads."""
    send: int = 0
    """Time of a send from one stage to another, ps."""
    memory: tuple[int, ...]
    """Bytes of each stage for layers and what they keep."""
    buffer: tuple[int, ...]
    """Bytes of each stage that a layer's working set may use as well, such as logits; the larger one counts."""
    choice: bool = False
    """Whether the number of recomputed layers of each chunk is free (its first ones); else none is recomputed."""
    working: int = 0
    """Working set of every stage that has layers."""
    weights: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Parameters of each stage without its layers, as in `LayerGroup.weights`."""
    tail: StepTail = StepTail()
    limits: tuple[int, ...] = ()
    """Most layers of each chunk; none: any number."""

    def __post_init__(self) -> None:
        for name in ("memory", "buffer"):
            if len(getattr(self, name)) != self.stages:
                raise BadInputError(
                    f"placement: {name} has {len(getattr(self, name))} numbers, expected {self.stages}"
                )
        if not 1 <= len(self.layers) <= 2 or any(g.count < 1 for g in self.layers):
            raise BadInputError(
                "placement: expected one or two kinds of layers, at least one of each"
            )

    @property
    def number(self) -> int:
        """Chunks of all stages."""
        return self.stages * self.chunks

    @property
    def key(self) -> ScheduleKey:
        """Key of the problem's pipeline program."""
        return self.schedule, self.stages, self.micro_batches, self.chunks

    @property
    def pipeline(self) -> PipelineProgram:
        """The order of operations."""
        return pipeline(*self.key)

    @cached_property
    def lowest(self) -> NDArray[Any]:
        """Fewest layers of each chunk: recipes leave only the first and the last one empty."""
        counts = np.ones(self.number, dtype=np.int64)
        counts[[0, -1]] = 0
        if self.number == 1:
            counts[0] = 1
        return counts

    @cached_property
    def highest(self) -> NDArray[Any]:
        """Most layers of each chunk."""
        total = sum(g.count for g in self.layers)
        return np.minimum(np.array(self.limits or (total,) * self.number, dtype=np.int64), total)

    @cached_property
    def bulk(self) -> int:
        """The kind with the most layers."""
        return max(range(len(self.layers)), key=lambda g: self.layers[g].count)

    @cached_property
    def fixed(self) -> NDArray[Any]:
        """Times of every chunk without its layers, [3, chunks]."""
        times = np.zeros((3, self.number), dtype=np.int64)
        times[:, 0] += self.first
        times[:, -1] += self.last
        if self.number > 1:
            times[:, -2] += self.before
        return times

    @cached_property
    def stage_weights(self) -> NDArray[Any]:
        """Parameters of every stage without its layers, [2, stages]."""
        return np.array([w or (0,) * self.stages for w in self.weights], dtype=np.float64)

    @cached_property
    def least_weight(self) -> NDArray[Any]:
        """Parameters that the largest stage has at least, [2]."""
        bulk = self.layers[self.bulk]
        stages = tuple(w or (0,) * self.stages for w in self.weights)
        return _least_largest(stages, bulk.weights, bulk.count)

    def kinds(self, counts: NDArray[Any]) -> NDArray[Any]:
        """Return the layers of every kind, [kinds, chunks], of chunks with `counts` layers in all, [chunks]."""
        if len(self.layers) == 1:
            return counts[None, :]
        before = np.cumsum(counts) - counts
        first = np.clip(self.layers[0].count - before, 0, counts)
        return np.stack([first, counts - first])


def least_largest(stages: NDArray[Any], layer: NDArray[Any], number: int) -> NDArray[Any]:
    """Return a lower bound on the parameters of the largest stage when equal layers are divided among the stages.

    `stages` are the parameters without them, [n, any, stages], `layer` those of a layer, [n, any]. The bound, [n, any],
    is reduced slightly for rounding.
    """
    low = stages.max(axis=2)
    high = low + layer * number
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        fit = np.floor((middle[..., None] - stages) / np.maximum(layer, 1e-9)[..., None])
        enough = (fit.sum(axis=2) >= number) | (layer <= 0)
        high, low = np.where(enough, middle, high), np.where(enough, low, middle)
    return low


@lru_cache(4096)
def _least_largest(
    stages: tuple[tuple[int, ...], ...], layer: tuple[int, int], number: int
) -> NDArray[Any]:
    """Return the bound for one problem; it is cached, because many problems have the same parameters."""
    fixed, weights = np.array(stages, dtype=np.float64), np.array(layer, dtype=np.float64)
    return least_largest(fixed[None], weights[None], number)[0]


@dataclass(frozen=True, kw_only=True)
class LayerPlacement:
    """The layers of each chunk, and the step that they take."""

    layers: tuple[int, ...]
    """Decoder layers of each chunk."""
    recomputed: tuple[int, ...]
    """Recomputed decoder layers of each chunk."""
    seconds: float
