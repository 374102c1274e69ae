"""What layers, embedding and head cost in every configuration of the space, and proven lower bounds from it.

The step of the cost model (`tools.plan.step`) is `(m - q) max_s t_s + q sum_s t_s + rest`, with t_s the time of stage s for
one micro-batch and q what a schedule leaves of the start-up (1 for 1F1B, 1/V interleaved, 1/6 for V shapes). The rest,
sends, gradient reduction, update and host, depends on the placement only through the fullest stage.
"""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from telechat_moe.tools.plan.columns import Array, Columns
from telechat_moe.tools.plan.cost import rates
from telechat_moe.tools.plan.device import Device
from telechat_moe.tools.plan.memory import _whole, in_flight, layer_activations, memory
from telechat_moe.tools.plan.step import Stages, data_parallel, neighbours, optimizer, stage_times

PLAIN, DENSE, MOE, DENSE_AGAIN, MOE_AGAIN, END = range(6)
"""Stages of the probe: the first with the embedding only, one layer each, the last with head and MTP only."""


@dataclass
class Costs:
    """Per configuration [n], seconds for one micro-batch and bytes on a device."""

    first_s: Array
    last_s: Array
    dense_s: Array
    moe_s: Array
    dense_again_s: Array
    """Further time of a recomputed layer."""

    moe_again_s: Array
    first_bytes: Array
    last_bytes: Array
    dense_bytes: Array
    moe_bytes: Array
    """Parameters, gradients, optimizer of a layer."""

    dense_kept: Array
    moe_kept: Array
    """Activations that a layer keeps for a micro-batch, not recomputed."""

    dense_entry: Array
    moe_entry: Array
    """The same of a recomputed layer."""

    dense_working: Array
    moe_working: Array
    """Working set of a stage that has layers, and of one that recomputes MoE layers."""

    always: Array
    """Bytes of buffers on every stage."""

    logits: Array
    last_stage: np.ndarray
    flight: Array
    """Micro-batches in flight, [n, P]."""

    share: Array
    """q: what is left of the start-up."""

    micro_batches: Array
    counted: np.ndarray
    """Whether the recomputed layers of each chunk may be chosen."""

    late: Array
    """Share that the backward pass has of a bulk layer's time, without recomputation if that may be chosen."""

    late_s: Array
    """Backward pass of embedding, of head and MTP, of a layer that is not bulk and of one that is, [n, 4]."""

    late_most: Array
    """Largest such share of any layer, and by how much the ends can exceed it, seconds, [n, 2]."""

    rest_s: Array
    """Sends and host; a part of the rest that no placement changes."""


def shares(schedule: str, chunks: int, stages: int) -> Fraction:
    """Return q: what a schedule leaves of the start-up; nothing without a pipeline."""
    if stages == 1:
        return Fraction(0)
    return {"1f1b": Fraction(1), "interleaved": Fraction(1, chunks), "zb-v": Fraction(1, 6)}[
        schedule
    ]


def with_stages(x: Columns, **arrays: np.ndarray) -> Columns:
    """Return the columns with other layers on the stages, `[n, any number]`."""
    width = next(iter(arrays.values())).shape[1]
    zero = np.zeros((len(x), width))
    names = ("stage_dense", "stage_moe", "stage_dense_again", "stage_moe_again")
    stages = {name: arrays.get(name, zero) for name in names}
    whole = np.full(len(x), float(width))
    return Columns(dict(vars(x)) | stages | {"pp": whole, "last_stage": whole - 1})


def costs(x: Columns, device: Device, counted: np.ndarray) -> Costs:
    """Return what everything costs.

    Args:
        x: Configurations of one depth; see `space_columns`.
        device: Device and network.
        counted: Whether each may choose how many layers are recomputed; else all are.
    """
    n = len(x)
    probe = np.zeros((4, n, 6))
    probe[0, :, [DENSE, DENSE_AGAIN]] = probe[1, :, [MOE, MOE_AGAIN]] = 1
    probe[2, :, DENSE_AGAIN] = probe[3, :, MOE_AGAIN] = 1
    names = ("stage_dense", "stage_moe", "stage_dense_again", "stage_moe_again")
    seen = with_stages(x, **dict(zip(names, probe, strict=True)))
    s = stage_times(seen, rates(seen, device, device.constants))
    t = s.forward + s.backward
    held = memory(seen, device)
    states = held.parameters + held.gradients + held.optimizer
    kept_dense, kept_moe, entry = (np.broadcast_to(v, (n,)) for v in layer_activations(x))
    whole_dense, whole_moe = (np.broadcast_to(v[:, 0], (n,)) for v in _whole(x))
    full = x.re_full > 0
    bulk = MOE if np.any(x.moe_layers > 0) else DENSE
    other = DENSE if bulk == MOE else MOE
    share = s.backward / np.maximum(t, 1e-30)
    kept = np.where(counted, 0, 2)  # of the layers that are computed once, or all again
    rows = np.arange(n)
    late = share[rows, bulk + kept]
    late_s = [s.backward[:, PLAIN], s.backward[:, END]]
    late_s += [s.backward[rows, other + kept], s.backward[rows, bulk + kept]]
    most = share[:, [bulk, bulk + 2]].max(axis=1)
    beyond = np.maximum(s.backward - most[:, None] * t, 0.0)
    more = (
        beyond[:, PLAIN]
        + beyond[:, END]
        + beyond[:, [other, other + 2]].max(axis=1) * np.minimum(x.dense_layers, x.moe_layers)
    )
    return Costs(
        first_s=t[:, PLAIN],
        last_s=t[:, END],
        dense_s=t[:, DENSE],
        moe_s=t[:, MOE],
        dense_again_s=t[:, DENSE_AGAIN] - t[:, DENSE],
        moe_again_s=t[:, MOE_AGAIN] - t[:, MOE],
        first_bytes=states[:, PLAIN],
        last_bytes=states[:, END],
        dense_bytes=states[:, DENSE],
        moe_bytes=states[:, MOE],
        dense_kept=whole_dense,
        moe_kept=whole_moe,
        dense_entry=np.where(full, entry, kept_dense),
        moe_entry=np.where(full, entry, kept_moe),
        dense_working=np.where(full, whole_dense, 0.0),
        moe_working=np.where(full, whole_moe, 0.0),
        always=held.buffers[:, PLAIN],
        logits=held.buffers[:, END] - held.buffers[:, PLAIN],
        last_stage=x.last_stage.astype(int),
        flight=in_flight(x),
        share=np.select([x.pp == 1, x.order == 0, x.order == 1], [0.0, 1.0, 1 / x.vpp], 1 / 6),
        micro_batches=x.micro_batches,
        counted=counted,
        late=late,
        late_s=np.column_stack(late_s),
        late_most=np.column_stack([most, more]),
        rest_s=neighbours(x, device, device.constants) + device.constants.step_host_s,
    )


def rest_seconds(
    x: Columns,
    device: Device,
    layers: Array,
    moe: bool,
    busy: Array | float,
    others: tuple[int, ...] = (0, 0, 0, 0),
) -> Array:
    """Return the least time of gradient reduction and update with so many layers on some stages.

    Args:
        x: One configuration, or as many as `layers` has rows.
        device: Device and network.
        layers: [n, 4]: of the first stage, of the fullest one between, of one between with layers of the other kind, and of
            the last one. In a V shape the first stage is the last one, too, and the fourth number is 0.
        others: Layers of the other kind on these stages.
        moe: The kind of `layers`.
        busy: The longest backward pass that the reduction can hide behind, seconds.
    """
    n = len(layers)
    seen = Columns({k: np.repeat(v, n, axis=0) if len(v) == 1 else v for k, v in vars(x).items()})
    last = np.where(seen.last_stage == 0, 0.0, 3.0)
    rest = np.broadcast_to(np.array(others, dtype=float), (n, 4))
    arrays = {"stage_moe": layers if moe else rest, "stage_dense": rest if moe else layers}
    seen = Columns(vars(with_stages(seen, **arrays)) | {"last_stage": last})
    idle = np.zeros((n, 1))
    stages = Stages(idle, idle + np.reshape(busy, (-1, 1)), idle, {})
    return data_parallel(seen, device, device.constants, stages) + optimizer(
        seen, device, device.constants
    )


def bottleneck(
    c: Costs, layers_dense: int, layers_moe: int, room: float, steps: int = 45
) -> tuple[Array, Array]:
    """Return lower bounds of the largest stage time and of the summed ones; infinity where nothing fits.

    Relaxed: layers of the larger kind come in whole numbers by stage and may be recomputed in part; those of the smaller kind
    cost their time somewhere and no memory.
    """
    moe = layers_moe >= layers_dense
    number = layers_moe if moe else layers_dense
    one, again, state, kept, entry = (
        (c.moe_s, c.moe_again_s, c.moe_bytes, c.moe_kept, c.moe_entry)
        if moe
        else (c.dense_s, c.dense_again_s, c.dense_bytes, c.dense_kept, c.dense_entry)
    )
    n, stages = c.flight.shape
    one, again, state, kept, entry = (v[:, None] for v in (one, again, state, kept, entry))
    fixed_s, fixed = np.zeros((n, stages)), np.zeros((n, stages))
    last = c.last_stage
    fixed_s[:, 0] += c.first_s
    fixed[:, 0] += c.first_bytes
    rows = np.arange(n)
    fixed_s[rows, last] += c.last_s
    fixed[rows, last] += c.last_bytes
    counted = c.counted[:, None]
    one = np.where(counted, one, one + again)
    again = np.where(counted, again, 0.0)
    kept = np.where(counted, kept, entry)
    saved = c.flight * (kept - entry)
    space = room - fixed - c.always[:, None]
    at_most = np.floor(np.maximum(space, 0) / (state + c.flight * entry) + 1e-9)  # all recomputed
    total = fixed_s.sum(axis=1) + layers_dense * c.dense_s + layers_moe * c.moe_s
    total = np.where(
        c.counted, total, total + layers_dense * c.dense_again_s + layers_moe * c.moe_again_s
    )
    per_byte = np.where(saved > 0, again / np.maximum(saved, 1.0), 0.0)
    slope = one + per_byte * (state + c.flight * kept)

    def holds(limit: Array) -> np.ndarray:
        left = limit[:, None] - fixed_s
        here = np.minimum(left / one, (left + per_byte * space) / slope)
        here = np.where(left < 0, -np.inf, np.minimum(np.floor(here * (1 + 1e-9) + 1e-9), at_most))
        return here.sum(axis=1) >= number

    low = np.maximum(total / stages, fixed_s.max(axis=1))
    high = low + number * (one + again)[:, 0] + total
    possible = holds(high) & (space >= 0).all(axis=1)
    for _ in range(steps):
        middle = (low + high) / 2
        yes = holds(middle)
        high, low = np.where(yes, middle, high), np.where(yes, low, middle)
    return np.where(possible, low, np.inf), total


def shortfall(c: Costs, layers_dense: int, layers_moe: int, room: float) -> tuple[Array, Array]:
    """Return by how many bytes the fullest stage exceeds its memory at least, and which stage is the tightest.

    With every layer recomputed, and layers divided at will; not positive where only whole layers do not fit.
    """
    n, stages = c.flight.shape
    rows = np.arange(n)
    fixed = np.zeros((n, stages)) + c.always[:, None]
    fixed[:, 0] += c.first_bytes
    fixed[rows, c.last_stage] += c.last_bytes + c.logits
    flight = c.flight.min(axis=1)
    held = layers_dense * (c.dense_bytes + flight * c.dense_entry)
    held = held + layers_moe * (c.moe_bytes + flight * c.moe_entry)
    even = (fixed.sum(axis=1) + held) / stages - room
    return np.maximum(even, fixed.max(axis=1) - room), fixed.argmax(axis=1)
