"""Predict whole steps of many configurations at once: stages, pipeline, data parallelism, optimizer.

Symbols: P stages, V chunks a stage, m micro-batches, F_s and B_s a stage's forward and backward of one micro-batch
(B includes recomputation). "Bubble" is the idle share of the pipeline's makespan, start-up included, over all stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.collectives import all_gather, all_reduce, point_to_point
from telechat_moe.tools.plan.cost.columns import Columns, Floats, columns
from telechat_moe.tools.plan.cost.device import Device
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.memory import Memory, local_parameters, memory
from telechat_moe.tools.plan.cost.roofline import (
    Layer,
    Pass,
    Rates,
    embedding_forward,
    head_forward,
    layer,
    product,
    rates,
    tokens,
)

Index = NDArray[np.int64]


@dataclass
class StageTimes:
    """Seconds of each stage for one micro-batch, [n, P]; zero where a configuration has fewer stages."""

    forward: Floats
    backward: Floats
    recompute: Floats
    """Recomputation, included in `backward`."""
    parts: dict[str, Floats]
    """The same seconds by kind of operator, of the slowest stage, [n]."""


@dataclass
class StepTable:
    """What `evaluate` returns: one entry a configuration."""

    step_s: Floats
    pipeline_s: Floats
    data_s: Floats
    """Gradient reduction and parameter gathering that is not hidden."""
    optimizer_s: Floats
    host_s: Floats
    bubble: Floats
    """Idle share of the pipeline's makespan over all stages."""
    parts: dict[str, Floats]
    """Seconds of the slowest stage over the step, by kind of operator."""
    stages: StageTimes
    memory: Memory
    fits: Floats
    """1 where every stage's peak is below the device's memory."""


def _mtp(x: Columns, r: Rates, block: Layer, head: Pass) -> tuple[Pass, Pass, Pass]:
    """Return forward, backward and recomputation of one MTP layer: projection, a layer, and its head if it has one.

    On another stage than its head, it sends a tensor of its own, which nothing hides, and receives a gradient.
    """
    t = tokens(x)
    extra = head * (1 - x.mtp_apart)
    extra.matmul = extra.matmul + product(t, x.hidden / x.tp, 2 * x.hidden, r, r.linear)
    forward, backward = block.forward + extra, block.backward + extra * 2.0
    if np.any(x.mtp_apart > 0):
        once = send(x, r.device) * x.mtp_apart
        forward.tensor, backward.tensor = forward.tensor + once, backward.tensor + once
    return forward, backward, block.recompute


def send(x: Columns, device: Device) -> Floats:
    """Return the seconds from the end of a chunk until the next chunk, on another stage, has its output."""
    outside = (x.dp * x.cp * x.tp >= device.node_devices).astype(float)
    rows = tokens(x) / np.where(x.sequence_parallel > 0, x.tp, 1)
    return point_to_point(2 * rows * x.hidden, outside, device)


def stage_times(x: Columns, r: Rates) -> StageTimes:
    """Return the time of each stage for one micro-batch."""
    kinds = [(layer(x, r, False), x.stage_dense, x.stage_dense_recomputed)]
    if np.any(x.experts > 0):
        kinds.append((layer(x, r, True), x.stage_moe, x.stage_moe_recomputed))
    head, embedding = head_forward(x, r), embedding_forward(x, r)
    rows = len(x)
    forward, backward, recompute = (np.zeros_like(x.stage_dense) for _ in range(3))
    for block, layers, recomputed in kinds:
        forward += layers * block.forward.time[:, None]
        backward += layers * block.backward.time[:, None]
        recompute += recomputed * block.recompute.time[:, None]
    ends: list[tuple[Index, Pass, Pass, Pass | None]] = [
        (np.zeros(rows, dtype=int), embedding, embedding * 1.0, None),
        (x.last_stage.astype(int), head, head * 2.0, None),
    ]
    if np.any(x.mtp > 0):
        forward_pass, backward_pass, once_more = _mtp(x, r, kinds[-1][0], head)
        ends.append(
            (
                x.mtp_stage.astype(int),
                forward_pass * x.mtp,
                backward_pass * x.mtp,
                once_more * x.mtp * x.mtp_recomputed,
            )
        )
        if np.any(x.mtp_apart > 0):
            apart = head * (x.mtp * x.mtp_apart)
            ends.append((x.last_stage.astype(int), apart, apart * 2.0, None))
    index = np.arange(rows)
    for stage, forward_pass, backward_pass, recomputed in ends:
        forward[index, stage] += forward_pass.time
        backward[index, stage] += backward_pass.time
        if recomputed is not None:
            recompute[index, stage] += recomputed.time
    backward = backward + recompute
    slowest: Index = (forward + backward).argmax(axis=1)
    return StageTimes(forward, backward, recompute, _parts(slowest, kinds, ends))


def _parts(
    slowest: Index,
    kinds: Sequence[tuple[Layer, Floats, Floats]],
    ends: Sequence[tuple[Index, Pass, Pass, Pass | None]],
) -> dict[str, Floats]:
    """Return seconds of the slowest stage by kind of operator for one micro-batch."""
    index = np.arange(len(slowest))
    parts: dict[str, Floats] = {}

    def add(p: Pass, count: Floats, word: str = "") -> None:
        named = vars(p) | {"host": p.time - p.device}
        del named["wait"]
        for name, seconds in named.items():
            key = word or name
            parts[key] = parts.get(key, 0.0) + count * seconds

    for block, layers, recomputed in kinds:
        add(block.forward, layers[index, slowest])
        add(block.backward, layers[index, slowest])
        add(block.recompute, recomputed[index, slowest], "recompute")
    for stage, forward, backward, recomputed in ends:
        layers = (stage == slowest).astype(float)
        add(forward, layers)
        add(backward, layers)
        if recomputed is not None:
            add(recomputed, layers, "recompute")
    return parts


def pipeline(x: Columns, s: StageTimes) -> Floats:
    """Return the makespan in seconds.

    Closed forms: m times the slowest stage, and a start-up that the schedule shortens: the sum of the other
    stages' times for one micro-batch, divided by V when interleaved. `schedules.simulate` is exact; this is its
    approximation for many configurations.
    """
    passes = s.forward + s.backward
    slow = passes.max(axis=1)
    others = passes.sum(axis=1) - slow
    mean = passes.sum(axis=1) / x.pp
    # the share of the start-up that remains: all; 1/V; with B = 2W and F = W a third (ZB-H1) or almost nothing (ZB-H2)
    share = np.select(
        [x.order == 0, x.order == 1, x.order == 2, x.order == 3],
        [1.0, 1 / x.vpp, 1 / 3, 0.0],
        1 / 6,
    )
    ideal = (x.pp - 1) * mean * share
    imbalance = x.micro_batches * (slow - mean) + (others - (x.pp - 1) * mean) * share
    return x.micro_batches * mean + ideal + imbalance


def neighbours(x: Columns, device: Device) -> Floats:
    """Return the time of sending activations between stages that is not hidden in a step."""
    stage = x.dp * x.cp * x.tp
    outside = (stage >= device.node_devices).astype(float)
    size = 2 * tokens(x) * x.hidden  # each tensor-parallel rank sends its share
    once = point_to_point(size / x.tp, outside, device)
    gather = all_gather(size, x.tp, np.ones_like(x.tp), device)
    once = once + np.where((x.tp > 1) & (x.sequence_parallel == 0), gather, 0.0)
    shown = np.where(x.vpp > 1, device.constants.exposed, 1.0)  # interleaved schedules send ahead
    steady = 2 * x.micro_batches * x.vpp * once * shown
    start = 2 * (x.pp - 1) * once
    return np.where(x.pp > 1, steady + start, 0.0)


def data_parallel(
    x: Columns, device: Device, s: StageTimes, dense: Floats, experts: Floats
) -> Floats:
    """Return the time of gradient reduction and parameter gathering that is not hidden in a step; see `reduction`."""
    exposed = device.constants.exposed
    total, repeated = reduction(x, device, dense, experts)
    last = s.backward.max(axis=1)
    hidden = np.maximum(total - last, exposed * total)
    step = np.where(x.overlap > 0, hidden, total)
    compute = (s.forward * hides_forward(x)[:, None] + s.backward).max(axis=1)
    exposed_s = np.maximum(repeated, compute) + exposed * np.minimum(repeated, compute) - compute
    return np.where((x.zero >= 2) & (x.dp * x.cp > 1), exposed_s * x.micro_batches, step)


def hides_forward(x: Columns) -> Floats:
    """Return 1 where ZeRO 2 and 3 also hide communication under forward passes; our ZeRO-2 only reduces there."""
    return 1.0 - x.own_graph * (x.zero == 2)


def reduction(x: Columns, device: Device, dense: Floats, experts: Floats) -> tuple[Floats, Floats]:
    """Return the time to reduce gradients and gather parameters, hidden or not: once a step, or sharded in every micro-batch.

    `dense` are the parameters of the largest stage that all data-parallel copies hold, `experts` those of its experts.
    """
    total, repeated = np.zeros_like(dense), np.zeros_like(dense)
    for count, members, stride in (
        (dense, x.dp * x.cp, x.tp),
        (experts, x.expert_copies, x.ep * x.etp),
    ):
        size = count * x.gradient_bytes
        parameters = count * np.minimum(x.parameter_bytes, np.where(x.fp32 > 0, 4, 2))
        shards = np.where(x.opt_shards > 0, np.minimum(x.opt_shards, members), members)
        # ZeRO-3 goes layer by layer
        calls = np.where(x.zero == 3, np.ceil((x.dense_layers + x.moe_layers) / x.pp), 1.0)
        scatter = all_gather(size, shards, stride, device, calls)
        gather = all_gather(parameters, shards, stride, device, calls)
        # what is sharded over some of the copies is reduced over the others
        between = all_reduce(
            size / np.where(x.zero > 0, shards, 1.0),
            np.where(x.zero > 0, members / shards, members),
            np.where(x.zero > 0, stride * shards, stride),
            device,
        )
        scattered = np.where((x.zero > 0) & (members > 1), scatter + gather, 0.0)
        total = total + between * (members > 1) + scattered
        gathers = gather * (1 + x.fsdp) * (x.zero == 3)
        gathers = gathers + gather * x.own_graph * (x.zero == 2) / x.micro_batches  # once a step
        repeated = repeated + np.where(members > 1, between + scatter + gathers, 0.0)
    return total, repeated


def update(x: Columns, device: Device, dense: Floats, experts: Floats) -> Floats:
    """Return the time of the update: gradients, master copies and moments read, the latter written.

    Moments of the host come beside it in sixteenths, and leave: the slower of both, with the first that comes and the last
    that leaves. `dense` parameters are held by all data-parallel copies, `experts` are not.

    Raises:
        BadInputError: They are, and the device's link to its host is not known.
    """
    copies = np.where(x.opt_shards > 0, np.minimum(x.opt_shards, x.dp * x.cp), x.dp * x.cp)
    cut = x.zero > 0
    count = dense / np.where(cut, copies, 1) + experts / np.where(cut, x.expert_copies, 1)
    # gradients are read for the norm and for the update, 2-byte ones first copied to 4 bytes
    gradients = np.where(x.gradient_bytes < 4, 14.0, 8.0)
    traffic = gradients + 2 * (x.optimizer_bytes + x.host_bytes) + x.parameter_bytes
    seconds = count * traffic / (device.memory_bandwidth * device.constants.memory_share)
    if not np.any(x.host_bytes):
        return seconds
    if not device.host_bandwidth:
        raise BadInputError(
            f"device {device.name}: host_bandwidth is missing, so optimizer.swap has no cost; add it, or optimizer.swap False"
        )
    copy = count * x.host_bytes / (device.host_bandwidth * device.constants.intra_share)
    return np.where(x.host_bytes > 0, np.maximum(seconds, copy) + copy / 8, seconds)


def evaluate_columns(x: Columns, device: Device, *, steps_only: bool = False) -> StepTable:
    """Predict steps from arrays; see `evaluate`. With `steps_only` the memory is all zeros."""
    s = stage_times(x, rates(x, device))
    makespan = pipeline(x, s)
    sends = neighbours(x, device)
    dense, experts = (count.max(axis=1) for count in local_parameters(x))
    data = data_parallel(x, device, s, dense, experts)
    optimizer = update(x, device, dense, experts)
    host = np.full_like(makespan, device.constants.step_host_s)
    used = (s.forward + s.backward).sum(axis=1) * x.micro_batches
    pipeline_s = makespan + sends
    parts = {name: seconds * x.micro_batches for name, seconds in s.parts.items()}
    parts["neighbours"] = sends
    footprint = Memory(*[np.zeros_like(s.forward)] * 7) if steps_only else memory(x)
    room = device.memory_bytes - device.reserved_bytes
    return StepTable(
        step_s=pipeline_s + data + optimizer + host,
        pipeline_s=pipeline_s,
        data_s=data,
        optimizer_s=optimizer,
        host_s=host,
        bubble=1 - used / (pipeline_s * x.pp),
        parts=parts,
        stages=s,
        memory=footprint,
        fits=(footprint.peak.max(axis=1) <= room).astype(float),
    )


def evaluate(
    architecture: Architecture | Sequence[Architecture], layouts: Sequence[Layout], device: Device
) -> StepTable:
    """Predict time and memory of steps, one entry a layout.

    The architecture is that of all, or one for each layout.
    """
    if isinstance(architecture, Architecture):
        architecture = [architecture] * len(layouts)
    pairs = list(zip(architecture, layouts, strict=True))
    return evaluate_columns(columns(pairs), device)
