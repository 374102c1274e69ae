"""Probe what layers, embedding and head cost in every configuration, and prove lower bounds from these costs.

A step is the makespan of the schedule, operation by operation, and a tail that depends on the largest stage: gradient
reduction, update and host (`simulate_step`). Except for maxima, both are linear in the layers of the stages; `Costs`
holds the coefficients of all configurations of one depth, found by probing the cost model with single layers.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telechat_moe.tools.plan.cost.columns import STAGE_COLUMNS, Columns, Floats
from telechat_moe.tools.plan.cost.device import Device
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.memory import WORKSPACE, late_peak, local_parameters, memory
from telechat_moe.tools.plan.cost.roofline import Rates, head_forward, layer, rates
from telechat_moe.tools.plan.cost.simulate_step import weight_gradient
from telechat_moe.tools.plan.cost.step import (
    StageTimes,
    hides_forward,
    reduction,
    send,
    stage_times,
    update,
)
from telechat_moe.tools.plan.search.placement import PS
from telechat_moe.tools.plan.search.placement_problem import (
    BISECTIONS,
    LayerGroup,
    PassTimes,
    PlacementProblem,
    StepTail,
    least_largest,
)

PLAIN, DENSE, MOE, DENSE_RECOMPUTED, MOE_RECOMPUTED, BEFORE, END = range(7)
"""Stages of the probe: the first has only the embedding, then one layer each, the last two have only head and MTP."""


@dataclass
class LayerCosts:
    """Costs of one layer of each kind, dense and MoE: seconds a micro-batch, bytes and parameters a device."""

    times: Floats
    """F, B (D where dW is separate) and W, [n, 2, 3]."""
    recompute_time: Floats
    """Further backward time of a recomputed layer, [n, 2]."""
    states: Floats
    """Bytes of parameters, gradients and optimizer, [n, 2]."""
    activations: Floats
    """Bytes kept at the peak of each stage, not recomputed, [n, 2, P]."""
    inputs: Floats
    """The same, recomputed."""
    working: Floats
    """Working set of a stage that recomputes a layer, [n, 2]."""
    weights: Floats
    """Parameters that all data-parallel copies hold, and experts' parameters, [n, 2 kinds, 2]."""


@dataclass
class StageCosts:
    """Costs of each stage without its layers."""

    memory: Floats
    """Bytes without `logits`, [n, P]."""
    logits: Floats
    """Bytes of the last stage that its layers' working set may use as well, [n]."""
    working: Floats
    """Working set that a stage needs as soon as it has layers, [n]."""
    last: NDArray[Any]
    """Number of the stage with the head, [n]."""
    weights: Floats
    """Parameters as in `LayerCosts.weights`, [n, 2, P]."""


@dataclass
class Costs:
    """Costs of each configuration [n]."""

    layers: LayerCosts
    stages: StageCosts
    first: Floats
    """F, B, W of the embedding, [n, 3]."""
    before: Floats
    """The same for MTP without its head where it is in the chunk before the last one; else zero."""
    last: Floats
    """The same for head and MTP."""
    send: Floats
    """Seconds of a send from one stage to another, [n]."""
    tail: Columns
    """The fields of `StepTail`, [n] or [n, 2]."""
    count: tuple[int, int]
    """Dense and MoE layers of the model."""
    micro_batches: Floats
    choice: NDArray[Any]
    """Whether the number of recomputed layers of each chunk is free."""

    @property
    def bulk(self) -> int:
        """The kind with the most layers."""
        return int(self.count[1] >= self.count[0])

    def tail_of(self, row: int) -> StepTail:
        """Return the end of a configuration's step, after the pipeline."""
        values: dict[str, Any] = {name: v[row].tolist() for name, v in vars(self.tail).items()}
        return StepTail(**values)

    @cached_property
    def least_weights(self) -> Floats:
        """The least parameters that the largest stage can have, [n, 2]."""
        layer = self.layers.weights[:, self.bulk]
        return least_largest(self.stages.weights, layer, max(self.count))

    def shortest_tail(self, makespan: Floats) -> Floats:
        """Return a lower bound on the step's tail after a pipeline of at most `makespan` seconds, [n].

        Some stage has at least the average number of layers.
        """
        weights, tail = self.least_weights, self.tail
        reduction = tail.start + (tail.reduce * weights).sum(axis=1)
        limit = tail.overlap_limit
        hidden = limit[:, 0] * makespan / self.micro_batches + limit[:, 1]
        exposed = np.maximum(reduction - hidden, tail.exposed * reduction)
        return exposed + (tail.update * weights).sum(axis=1) + tail.base


def with_stages(x: Columns, **arrays: Floats) -> Columns:
    """Return the columns with other layers on the stages, `[n, any number]`."""
    width = next(iter(arrays.values())).shape[1]
    zero = np.zeros((len(x), width))
    layers = {name: arrays.get(name, zero) for name in STAGE_COLUMNS}
    stages = np.full(len(x), float(width))
    last: Floats = stages - 1.0
    mtp: Floats = last - x.mtp_apart
    values: dict[str, Floats] = {**vars(x), **layers}
    return Columns(values | {"pp": stages, "last_stage": last, "mtp_stage": mtp})


def costs(x: Columns, device: Device, choice: NDArray[Any], room: float) -> Costs:
    """Return the costs of all configurations of one depth (`space_columns`) on a device with `room` bytes.

    Where there is a `choice`, the number of recomputed layers is free; else all layers are, by the policy.
    """
    counts = np.zeros((4, len(x), END + 1))
    counts[0, :, [DENSE, DENSE_RECOMPUTED]] = counts[1, :, [MOE, MOE_RECOMPUTED]] = 1
    counts[2, :, DENSE_RECOMPUTED] = counts[3, :, MOE_RECOMPUTED] = 1
    probe = with_stages(x, **dict(zip(STAGE_COLUMNS, counts, strict=True)))
    r = rates(probe, device)
    s = stage_times(probe, r)
    footprint = memory(probe, with_late=False)
    states = footprint.parameters + footprint.gradients + footprint.optimizer
    buffers = footprint.buffers
    weights = np.stack(local_parameters(probe), axis=-1)  # [n, 7, 2]
    free = choice[:, None]  # else every layer is recomputed by its policy
    forward, plain = s.forward[:, [DENSE, MOE]], s.backward[:, [DENSE, MOE]]
    recomputed = s.backward[:, [DENSE_RECOMPUTED, MOE_RECOMPUTED]]
    layer_dw, head_dw = _weight_gradients(x, probe, r, s.backward)
    activations, inputs, idle = _activations(x, choice)
    least_bytes, zero = _least_memory(x)[:, None], np.zeros(len(x))
    return Costs(
        layers=LayerCosts(
            times=np.stack(
                [forward, np.where(free, plain, recomputed) - layer_dw, layer_dw], axis=-1
            ),
            recompute_time=np.where(free, recomputed - plain, 0.0),
            states=states[:, [DENSE, MOE]],
            activations=activations,
            inputs=inputs,
            working=buffers[:, [DENSE_RECOMPUTED, MOE_RECOMPUTED]] - buffers[:, :1],
            weights=weights[:, [DENSE, MOE]],
        ),
        stages=StageCosts(
            memory=np.where(least_bytes > room, least_bytes, idle),
            logits=buffers[:, END] - buffers[:, PLAIN],
            working=buffers[:, DENSE] - buffers[:, PLAIN],
            last=x.last_stage.astype(int),
            weights=np.stack(local_parameters(x), axis=1),
        ),
        first=np.column_stack([s.forward[:, PLAIN], s.backward[:, PLAIN], zero]),
        before=np.column_stack([s.forward[:, BEFORE], s.backward[:, BEFORE], zero]),
        last=np.column_stack([s.forward[:, END], s.backward[:, END] - head_dw, head_dw]),
        send=np.broadcast_to(send(x, device), (len(x),)) * (x.pp > 1),
        tail=_tail(x, device, s),
        count=(int(x.dense_layers[0]), int(x.moe_layers[0])),
        micro_batches=x.micro_batches,
        choice=choice,
    )


def _weight_gradients(
    x: Columns, probe: Columns, r: Rates, backward: Floats
) -> tuple[Floats, Floats]:
    """Return W of a layer of each kind, [n, 2], and of the head, [n]; 0 where the schedule does not separate dW."""
    n, split = len(x), x.order >= 2
    kinds = [weight_gradient(layer(probe, r, moe)) for moe in (False, True)]
    layers = np.column_stack([np.broadcast_to(dw, (n,)) for dw in kinds]) * split[:, None]
    head = np.broadcast_to(head_forward(probe, r).matmul * (1 + x.mtp), (n,))
    layers = np.minimum(layers, backward[:, [DENSE, MOE]])
    return layers, np.minimum(head * split, backward[:, END])


def _tail(x: Columns, device: Device, s: StageTimes) -> Columns:
    """Return the fields of `StepTail`: times in s of a reduction without parameters, and for each parameter of either kind."""
    c, n = device.constants, len(x)
    often = (x.zero >= 2) & (x.dp * x.cp > 1)  # reduced in every micro-batch, see `data_parallel`
    none, many = np.zeros(n), np.full(n, 1e9)
    pairs = ((none, none), (many, none), (none, many))
    reductions = [reduction(x, device, *pair) for pair in pairs]
    start, *times = (np.where(often, r[1] * x.micro_batches, r[0]) for r in reductions)
    updates = [update(x, device, *pair) for pair in pairs[1:]]
    backward = np.where(often, x.micro_batches * (1 - c.exposed), 1.0)
    weights = np.column_stack([backward * hides_forward(x) * often, backward])
    fields: dict[str, Floats] = {
        "base": np.full(n, c.step_host_s),
        "start": start,
        "reduce": np.column_stack([(t - start) / 1e9 for t in times]),
        "update": np.column_stack(updates) / 1e9,
        "exposed": np.where(often | (x.overlap > 0), c.exposed, 1.0),
        "overlap_limit": _overlap_limit(x, weights, s.forward, s.backward),
        "overlap_weights": weights,
    }
    return Columns(fields)


def _activations(x: Columns, choice: NDArray[Any]) -> tuple[Floats, Floats, Floats]:
    """Return the bytes at the peak of a layer of each kind, plain and recomputed, [n, 2, P] each, and of no layer."""
    ones = np.ones_like(x.stage_moe)
    zero = {name: np.zeros_like(ones) for name in STAGE_COLUMNS}

    def activations(*names: str) -> Floats:
        layers = Columns(vars(x) | zero | dict.fromkeys(names, ones))
        return memory(layers, with_late=False).activations

    empty = memory(Columns(vars(x) | zero), with_late=False)
    idle = empty.peak.copy()
    last = x.last_stage.astype(int)
    rows = np.arange(len(x))
    if x.stage_moe.shape[1] > 1:  # logits are counted separately
        other = np.where(last == 0, 1, 0)
        idle[rows, last] -= empty.buffers[rows, last] - empty.buffers[rows, other]
    else:
        apart = with_stages(x, stage_dense=np.zeros((len(x), 2)))
        buffers = memory(apart, with_late=False).buffers
        idle[rows, last] -= buffers[:, 1] - buffers[:, 0]
    plain = [activations(name) - empty.activations for name in STAGE_COLUMNS[:2]]
    recomputed = [
        activations(*names) - empty.activations
        for names in zip(STAGE_COLUMNS[:2], STAGE_COLUMNS[2:], strict=True)
    ]
    inputs = np.stack(recomputed, axis=1)
    return np.where(choice[:, None, None], np.stack(plain, axis=1), inputs), inputs, idle


def _least_memory(x: Columns) -> Floats:
    """Return the bytes that a step of one graph needs, however many layers are recomputed, [n]; 0 for other steps."""
    layers = {
        name: np.broadcast_to(count[:, None], x.stage_moe.shape)
        for name, count in zip(STAGE_COLUMNS[:2], (x.dense_layers, x.moe_layers), strict=True)
    }
    model = Columns(vars(x) | layers)
    late, footprint = late_peak(model), memory(model)
    states = (footprint.parameters + footprint.gradients + footprint.optimizer)[:, 0]
    return np.where(late > 0, late + states + WORKSPACE, 0.0)


def _overlap_limit(x: Columns, weights: Floats, forward: Floats, backward: Floats) -> Floats:
    """Return the most that a layer hides in a second of its time, and what embedding and head hide more, [n, 2]."""
    layers = [DENSE, MOE, DENSE_RECOMPUTED, MOE_RECOMPUTED]
    counts = np.column_stack(
        [np.broadcast_to(v, (len(x),)) for v in (x.dense_layers, x.moe_layers)]
    )
    both, hidden = forward + backward, weights[:, :1] * forward + weights[:, 1:] * backward
    share = hidden[:, layers] / np.maximum(both[:, layers], 1e-30) * (np.tile(counts, 2) > 0)
    limit = share.max(axis=1)
    beyond = np.maximum(hidden - limit[:, None] * both, 0.0)
    return np.column_stack([limit, beyond[:, [PLAIN, BEFORE, END]].sum(axis=1)])


def problem_of(c: Costs, row: int, layout: Layout, room: float) -> PlacementProblem:
    """Return the inner problem of a configuration."""

    def picoseconds(seconds: Floats) -> PassTimes:
        f, b, w = (round(float(v) / PS) for v in seconds)
        return f, b, w

    def upper(values: Floats) -> tuple[int, ...]:
        return tuple(math.ceil(v) for v in values)

    layer, stages, choice = c.layers, c.stages, bool(c.choice[row])
    working = math.ceil(stages.working[row])
    kinds = [
        LayerGroup(
            count=count,
            times=picoseconds(layer.times[row, g]),
            states=math.ceil(layer.states[row, g]),
            activations=upper(layer.activations[row, g]),
            inputs=upper(layer.inputs[row, g]),
            recompute_time=round(float(layer.recompute_time[row, g]) / PS),
            working=math.ceil(layer.working[row, g]) if choice else working,
            weights=(math.ceil(layer.weights[row, g, 0]), math.ceil(layer.weights[row, g, 1])),
        )
        for g, count in enumerate(c.count)
        if count
    ]
    total = sum(c.count)
    last = total if layout.ends == "last" else 0
    buffer = [0] * layout.pp
    buffer[stages.last[row]] = math.ceil(stages.logits[row])
    dense, experts = (upper(w) for w in stages.weights[row])
    return PlacementProblem(
        schedule=layout.schedule,
        stages=layout.pp,
        micro_batches=layout.micro_batches,
        chunks=layout.vpp,
        layers=tuple(kinds),
        limits=(total,) * (layout.pp * layout.vpp - 1) + (last,),
        first=picoseconds(c.first[row]),
        before=picoseconds(c.before[row]),
        last=picoseconds(c.last[row]),
        send=round(float(c.send[row]) / PS),
        memory=tuple(math.floor(room - f) for f in stages.memory[row]),
        buffer=tuple(buffer),
        choice=choice,
        working=working,
        weights=(dense, experts),
        tail=c.tail_of(row),
    )


class StageCapacity:
    """How many layers of the larger kind a stage can hold within its memory and time, with recomputation."""

    def __init__(self, c: Costs, room: float, rows: NDArray[Any]) -> None:
        g, n, stages = c.bulk, np.arange(len(rows)), c.stages
        layer, last = c.layers, c.stages.last[rows]
        self.space = room - stages.memory[rows]
        self.space[n, last] -= stages.logits[rows]
        self.recomputed = layer.states[rows, g, None] + layer.inputs[rows, g]
        fit = np.floor((self.space + 0.1) / np.maximum(self.recomputed, 1e-9))
        self.fit = np.where(self.space < 0, -1, fit)
        self.spent = np.zeros(self.space.shape)
        self.spent[:, 0] += c.first[rows].sum(axis=1)
        self.spent[n, last] += c.last[rows].sum(axis=1)
        self.spent[n, last - 1] += c.before[rows].sum(axis=1)
        self.layer_s = layer.times[rows, g].sum(axis=1)[:, None]
        self.m = c.micro_batches[rows, None]
        saved = layer.activations[rows, g] - layer.inputs[rows, g]
        self.plain = layer.states[rows, g, None] + layer.activations[rows, g]
        recompute_time = np.where(c.choice[rows], layer.recompute_time[rows, g], 0.0)[:, None]
        self.seconds_per_byte = np.where(saved > 0, recompute_time / np.maximum(saved, 1.0), 0.0)
        """Recomputation time for each byte that layers need beyond `space`."""

    def limit(self, makespan: Floats) -> Floats:
        """Return the most layers of each stage in pipelines of at most `makespan` seconds, [n, P]."""
        left = makespan[:, None] / self.m - self.spent
        within = np.minimum(
            left / self.layer_s,
            (left + self.seconds_per_byte * self.space)
            / (self.layer_s + self.seconds_per_byte * self.plain),
        )
        return np.minimum(self.fit, np.floor(within + 1e-9))

    def shortest(self, number: int) -> tuple[Floats, Floats]:
        """Return a makespan that is too short for `number` layers, [n], and whether any makespan is long enough."""

        def holds(makespan: Floats) -> NDArray[Any]:
            limit = self.limit(makespan)
            return (limit >= 0).all(axis=1) & (limit.sum(axis=1) >= number)

        low = (self.m * self.spent).max(axis=1)
        all_recomputed = self.layer_s + self.seconds_per_byte * (self.plain - self.recomputed)
        high = low + (self.m * all_recomputed).max(axis=1) * (number + 1)
        possible = (self.fit >= 0).all(axis=1) & (self.fit.sum(axis=1) >= number)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            yes = holds(middle)
            high, low = np.where(yes, middle, high), np.where(yes, low, middle)
        return low, possible


def lower_bound(c: Costs, room: float) -> tuple[Floats, Floats, Floats]:
    """Return a lower bound on the step time, and by how many bytes, on which stage, a configuration does not fit.

    A stage with n layers of the larger kind takes m times their time, and holds no more layers than fit with all of
    them recomputed; together the stages must hold all layers. Infinity: they do not fit.
    """
    number = max(c.count)
    s = StageCapacity(c, room, np.arange(len(c.choice)))
    low, possible = s.shortest(number)
    lacking = (s.recomputed * (number / s.fit.shape[1]) - s.space).mean(axis=1)
    return (
        np.where(possible, low + c.shortest_tail(low), np.inf),
        np.maximum(lacking, (-s.space).max(axis=1)),
        s.space.argmin(axis=1),
    )


def estimate(c: Costs, chunks: NDArray[Any], bound: Floats) -> Floats:
    """Return an estimate of the step, [n]: its bound and the start-up of equal chunks.

    It orders the search and proves nothing.
    """
    stages = c.stages.memory.shape[1]
    ends = (c.first + c.before + c.last).sum(axis=1)
    total = (c.layers.times.sum(axis=2) * np.array(c.count)).sum(axis=1) + ends
    return bound + (stages - 1) * (total / stages / chunks + 2 * c.send * chunks)
