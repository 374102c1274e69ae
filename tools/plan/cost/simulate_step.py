"""Simulate one step in full: chunk times from the cost model, the schedule event by event, memory over time.

`step.evaluate` scores many layouts with closed forms; this module simulates the program of one layout exactly and says
where time and memory go. "Bubble" is the idle share of the makespan over all stages, start-up included.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.columns import Columns, Floats, columns
from telechat_moe.tools.plan.cost.device import Device
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.memory import layer_activations
from telechat_moe.tools.plan.cost.memory import memory as step_memory
from telechat_moe.tools.plan.cost.roofline import (
    Layer,
    Rates,
    head_forward,
    layer,
    rates,
    swap_wait,
    whole_layers,
)
from telechat_moe.tools.plan.cost.saved_activations import (
    BACKWARD_OPERATORS,
    FREED,
    MOVED,
    ChunkActivations,
)
from telechat_moe.tools.plan.cost.step import StepTable, evaluate, send, stage_times
from telechat_moe.tools.plan.schedules.interleaved import interleaved, one_f_one_b
from telechat_moe.tools.plan.schedules.program import Program, Times
from telechat_moe.tools.plan.schedules.published import GENERATORS
from telechat_moe.tools.plan.schedules.simulate import Simulation, memory, simulate

PAIRED = ("overlap", "dualpipe", "dualpipev")
"""Schedules that hide experts' all-to-all in pairs of a forward and a backward."""


@dataclass(frozen=True)
class Bubble:
    """The idle share of the makespan by cause; the four causes add up to `total`."""

    total: float
    ideal: float
    """The schedule's own bubble, with equal chunks and free sends."""
    imbalance: float
    """Added by unequal chunks."""
    recompute: float
    """Added by chunks that recompute more than others; negative where recomputation evens chunks out."""
    neighbours: float
    """Added by sends between stages."""


@dataclass(frozen=True)
class SimulatedStep:
    """One simulated step."""

    architecture: Architecture
    layout: Layout
    device: Device
    program: Program
    times: Times
    """Seconds and bytes of each chunk."""
    recompute_s: Floats
    """Seconds of each chunk's recomputation, included in its backward."""
    layers: tuple[int, ...]
    """Decoder layers of each chunk."""
    result: Simulation
    table: StepTable
    """The closed forms of the same layout, as one entry: data parallelism, optimizer, host, breakdown."""
    fixed_bytes: Floats
    """Bytes of parameters, gradients, optimizer and constant buffers of each stage; of other frameworks all buffers."""
    moved: Floats
    """Bytes of a micro-batch's activations that wait in the host's memory, of each chunk."""

    @cached_property
    def bubble(self) -> Bubble:
        """The idle share by cause, which takes three more simulations."""
        return _bubble(self.program, self.times, self.recompute_s, self.result.bubble)

    @property
    def step_s(self) -> float:
        """Time of the whole step."""
        return self.result.makespan + self.after_s

    @property
    def after_s(self) -> float:
        """Seconds after the pipeline: gradients between copies, the update, the host."""
        t = self.table
        return float(t.data_s[0] + t.optimizer_s[0] + t.host_s[0])

    @cached_property
    def host_bytes(self) -> Floats:
        """Most bytes of activations in the host's memory, for a device of each stage."""
        return self._peak_activation(self.moved)

    @cached_property
    def kept_bytes(self) -> Floats:
        """Most bytes that micro-batches in flight keep on each stage, without what backward passes need besides."""
        return self._peak_activation(self.times.activation)

    def _peak_activation(self, activation: Floats) -> Floats:
        """Return the most that micro-batches in flight keep on each stage, of what one keeps of each chunk."""
        alone = replace(self.times, activation=activation, working=np.zeros(self.program.chunks))
        return np.array([used.max(initial=0.0) for used in memory(self.program, alone)])

    @property
    def peak_bytes(self) -> Floats:
        """Most memory of each stage, at any time."""
        return self.fixed_bytes + self.result.peak


def make_program(layout: Layout) -> Program:
    """Return the program of a layout's schedule.

    Raises:
        BadInputError: The schedule does not exist for these stages, chunks or micro-batches.
    """
    p, m, v = layout.pp, layout.micro_batches, layout.vpp
    if p == 1:
        return replace(one_f_one_b(1, m), name="one stage") if v == 1 else interleaved(1, m, v)
    need, make = GENERATORS["1f1b-overlap" if layout.schedule == "overlap" else layout.schedule]
    if need not in (0, v):
        raise BadInputError(
            f"schedule {layout.schedule} has {need} chunk(s) a stage, the layout vpp {v}; "
            "set vpp accordingly or take `interleaved`"
        )
    return make(p, m, v)


@dataclass(frozen=True)
class SwapCost:
    """What swapping a layer does, of a dense and of a MoE layer."""

    moved: tuple[float, ...]
    """Bytes of a micro-batch that wait in the host's memory."""
    freed: tuple[float, ...]
    """Bytes of a micro-batch that the device no longer keeps."""
    wait_s: tuple[float, ...]
    """Seconds by which the copies exceed the passes beside them."""
    prefetch: int
    """How many operators ahead of their readers the way back begins: the copy's time over that of an operator of the layer before,
    at most a whole layer."""


def swap_of(architecture: Architecture, layout: Layout, device: Device) -> SwapCost:
    """Return what swapping does to a layer of each kind; our graph keeps some of its activations on the device.

    Raises:
        BadInputError: The device's description has no link to its host.
    """
    x = columns([(architecture, layout)])
    r = rates(x, device)
    full = "full" in layout.recompute.split("+")
    layer_bytes = whole_layers(x) if full else layer_activations(x)[:2]
    shares = (MOVED, FREED) if layout.own_graph else ((1.0, 1.0), (1.0, 1.0))
    costs, ahead = [(0.0, 0.0, 0.0)] * 2, 1
    for moe in (False, True) if architecture.moe_layers else (False,):
        block, size = layer(x, r, moe), layer_bytes[moe] * shares[0][moe]
        freed = float(layer_bytes[moe][0]) * shares[1][moe]
        wait = float(swap_wait(size, r, block.forward, block.backward)[0])
        costs[moe] = float(size[0]), freed, wait
        copy = float(size[0]) / (device.host_bandwidth * device.constants.intra_share)
        operator = float(block.backward.time[0]) / BACKWARD_OPERATORS[moe]
        ahead = max(ahead, min(int(np.ceil(copy / operator)), BACKWARD_OPERATORS[moe]))
    moved, freed, wait_s = zip(*costs, strict=True)
    return SwapCost(moved, freed, wait_s, ahead)


def _swapped(architecture: Architecture, layout: Layout) -> Floats:
    """Return the swapped dense and MoE layers of each chunk, [2, chunks]."""
    counts = layout.chunk_layers(len(architecture.layers))
    counts_2C, end = np.zeros((2, len(counts))), np.cumsum(counts)
    for number in layout.swapped:
        chunk = int(np.searchsorted(end, number, side="right"))
        counts_2C[int(architecture.layers[number] == "moe"), chunk] += 1
    return counts_2C


def chunk_times(architecture: Architecture, layout: Layout, device: Device) -> tuple[Times, Floats]:
    """Return seconds and activation bytes of each global chunk, and the recomputation and waits in its backward.

    The weight gradient (dW) is half of the backward products; all else of the backward is dX.
    """
    count = layout.pp * layout.vpp
    flat = layout.with_changes(
        pp=count,
        vpp=1,
        schedule="1f1b",
        micro_batches=1,
        chunks=layout.chunk_layers(len(architecture.layers)),
        ep_overlap=layout.stack.ep_overlap and layout.schedule not in PAIRED,
    )
    x = columns([(architecture, flat)])
    r = rates(x, device)
    stages = stage_times(x, r)
    dense = layer(x, r, False)
    moe = layer(x, r, True) if architecture.moe_layers else None
    weights = _weight_gradients(x, r, dense, moe)
    backward = stages.backward[0]
    weights = np.minimum(weights, backward - stages.recompute[0])
    exposed = x.stage_moe[0] * (moe.forward.expert[0] if moe else 0.0)
    activation, working = _activations(architecture, layout, x)
    paired = layout.schedule in PAIRED
    once = float(np.max(send(x, device)))
    recompute = stages.recompute[0]
    if layout.swapped:
        swap, count_2C = swap_of(architecture, layout, device), _swapped(architecture, layout)
        wait = np.array(swap.wait_s) @ count_2C
        if not layout.own_graph:
            activation = activation - np.array(swap.freed) @ count_2C
        backward, recompute = backward + wait, recompute + wait
    times = Times(
        stages.forward[0],
        backward - weights,
        weights,
        comm=once if layout.pp > 1 else 0.0,
        forward_exposed=exposed if paired else np.zeros(count),
        backward_exposed=exposed if paired else np.zeros(count),
        activation=activation,
        working=working,
    )
    return times, recompute


def _activations(
    architecture: Architecture, layout: Layout, flat: Columns
) -> tuple[Floats, Floats]:
    """Return the bytes that a micro-batch keeps in each chunk, and what its backward pass needs besides.

    Of other frameworks' steps the latter is in the buffers. Chunks are the stages of `flat`.
    """
    if layout.own_graph:
        return ChunkActivations(architecture, layout).all()
    return step_memory(flat).activations[0], np.zeros(layout.pp * layout.vpp)


def weight_gradient(block: Layer) -> Floats:
    """Return the seconds of a layer's dW: half of its backward products, with their share of the host's time."""
    device = np.maximum(block.backward.device, 1e-30)
    return 0.5 * block.backward.matmul / device * block.backward.time


def _weight_gradients(x: Columns, r: Rates, dense: Layer, moe: Layer | None) -> Floats:
    """Return the seconds of each chunk's dW."""
    weights = x.stage_dense[0] * weight_gradient(dense)[0]
    if moe is not None:
        weights = weights + x.stage_moe[0] * weight_gradient(moe)[0]
    head = float(head_forward(x, r).matmul[0])
    weights[-1] += head * (1 + float(np.atleast_1d(x.mtp)[0]))
    return weights


def simulate_step(architecture: Architecture, layout: Layout, device: Device) -> SimulatedStep:
    """Simulate one step.

    Raises:
        BadInputError: The schedule does not exist for this layout.
    """
    program = make_program(layout)
    times, recompute = chunk_times(architecture, layout, device)
    result = simulate(program, times)
    table = evaluate(architecture, [layout], device)
    footprint = table.memory
    states = footprint.parameters + footprint.gradients + footprint.optimizer
    buffers = footprint.constant if layout.own_graph else footprint.buffers
    fixed = (states + buffers)[0, : layout.pp]
    moved = np.zeros(program.chunks)
    if layout.swapped:  # two layers' are on the device: one in use and one being copied
        swap, count_2C = swap_of(architecture, layout, device), _swapped(architecture, layout)
        moved = np.array(swap.moved) @ count_2C
        for stage, chunks in enumerate(program.chunks_of_stage):
            swapped_kinds = count_2C[:, list(chunks)].sum(axis=1) > 0
            fixed[stage] += 2 * np.max(np.array(swap.moved) * swapped_kinds)
    return SimulatedStep(
        architecture,
        layout,
        device,
        program,
        times,
        recompute,
        layout.chunk_layers(len(architecture.layers)),
        result,
        table,
        fixed,
        moved,
    )


def _bubble(program: Program, times: Times, recompute: Floats, total: float) -> Bubble:
    """Divide the bubble by cause: simulate equal chunks, then unequal ones, then unequal recomputation, then sends."""

    def mean(values: Floats) -> Floats:
        return np.full_like(values, values.mean())

    parts = ("forward", "dx", "dw", "forward_exposed", "backward_exposed")
    equal: dict[str, Any] = {name: mean(getattr(times, name)) for name in parts}
    ideal = simulate(program, Times(**equal)).bubble
    alone = times.dx - recompute + recompute.mean()
    uneven = simulate(program, replace(times, dx=alone, comm=0.0)).bubble
    recomputed = simulate(program, replace(times, comm=0.0)).bubble
    return Bubble(total, ideal, uneven - ideal, recomputed - uneven, total - recomputed)
