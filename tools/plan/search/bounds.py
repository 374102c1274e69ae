"""Probe what layers, embedding and head cost in every configuration, and prove lower bounds from these costs.

A step is the makespan of the schedule, operation by operation, and a rest that depends on the largest stage: gradient
reduction, update and host (`simulate_step`). Except for maxima, both are linear in the layers of the stages; `Costs`
holds the coefficients of all configurations of one depth, found by probing the cost model with single layers.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telechat_moe.tools.plan.cost.columns import STAGE_COLUMNS, Array, Columns
from telechat_moe.tools.plan.cost.device import Device
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.memory import WORKSPACE, late_peak, local_parameters, memory
from telechat_moe.tools.plan.cost.roofline import Rates, head_forward, layer, rates
from telechat_moe.tools.plan.cost.simulate_step import weight_gradient
from telechat_moe.tools.plan.cost.step import hides_forward, reduction, send, stage_times, update
from telechat_moe.tools.plan.search.placement import PS, Multipliers
from telechat_moe.tools.plan.search.placement_problem import (
    Layers,
    Problem,
    Rest,
    Times,
    least_largest,
)

PLAIN, DENSE, MOE, DENSE_RECOMPUTED, MOE_RECOMPUTED, BEFORE, END = range(7)
"""Stages of the probe: the first has only the embedding, then one layer each, the last two have only head and MTP."""


@dataclass
class Costs:
    """Costs of each configuration [n]: seconds a micro-batch, bytes and parameters a device; kinds: dense, MoE."""

    times: Array
    """F, B (D where dW is separate) and W of a layer of each kind, [n, 2, 3]."""

    recompute_time: Array
    """Further backward time of a recomputed layer, [n, 2]."""

    first: Array
    """F, B, W of the embedding, [n, 3]."""

    before: Array
    """The same for MTP without its head where it is in the chunk before the last one; else zero."""

    last: Array
    """The same for head and MTP."""

    send: Array
    states: Array
    """Bytes of parameters, gradients and optimizer of a layer, [n, 2]."""

    kept: Array
    """Bytes that a layer keeps at the peak of each stage, not recomputed, [n, 2, P]."""

    entry: Array
    """The same, recomputed."""

    working: Array
    """Working set of a stage that recomputes a layer, [n, 2]."""

    held: Array
    """Working set of a stage that has layers."""

    fixed: Array
    """Bytes of each stage without layers and without `logits`, [n, P]."""

    logits: Array
    """Bytes of the last stage that its layers' working set may use as well."""

    last_stage: NDArray[Any]
    weights: Array
    """Parameters of a layer that all data-parallel copies hold, and its experts' parameters, [n, 2 kinds, 2]."""

    fixed_weights: Array
    """The same for each stage without layers, [n, 2, P]."""

    count: tuple[int, int]
    """Dense and MoE layers of the model."""

    base: Array
    start: Array
    reduce: Array
    """Seconds of gradient reduction for each parameter, [n, 2]; `start` holds the seconds without any."""

    update: Array
    exposed: Array
    late: Array
    """`Rest.late`, [n, 2]."""

    hides: Array
    """`Rest.hides`, [n, 2]."""

    micro_batches: Array
    choice: NDArray[Any]
    """Whether the number of recomputed layers of each chunk is free."""

    @property
    def bulk(self) -> int:
        """The kind with the most layers."""
        return int(self.count[1] >= self.count[0])

    def rest(self, row: int) -> Rest:
        """Return the rest of a configuration's step after the pipeline."""
        return Rest(
            base=float(self.base[row]),
            start=float(self.start[row]),
            reduce=(float(self.reduce[row, 0]), float(self.reduce[row, 1])),
            update=(float(self.update[row, 0]), float(self.update[row, 1])),
            exposed=float(self.exposed[row]),
            late=(float(self.late[row, 0]), float(self.late[row, 1])),
            hides=(float(self.hides[row, 0]), float(self.hides[row, 1])),
        )

    @cached_property
    def least_weights(self) -> Array:
        """The least parameters that the largest stage can have, [n, 2]."""
        return least_largest(self.fixed_weights, self.weights[:, self.bulk], max(self.count))

    def least_rest(self, makespan: Array) -> Array:
        """Return a lower bound on the rest of the step after a pipeline of at most `makespan` seconds, [n].

        Some stage has at least the average number of layers.
        """
        largest = self.least_weights
        whole = self.start + (self.reduce * largest).sum(axis=1)
        hidden = self.late[:, 0] * makespan / self.micro_batches + self.late[:, 1]
        shown = np.maximum(whole - hidden, self.exposed * whole)
        return shown + (self.update * largest).sum(axis=1) + self.base


def with_stages(x: Columns, **arrays: Array) -> Columns:
    """Return the columns with other layers on the stages, `[n, any number]`."""
    width = next(iter(arrays.values())).shape[1]
    zero = np.zeros((len(x), width))
    stages = {name: arrays.get(name, zero) for name in STAGE_COLUMNS}
    whole = np.full(len(x), float(width))
    last: Array = whole - 1.0
    mtp: Array = last - x.mtp_apart
    values: dict[str, Array] = {**vars(x), **stages}
    return Columns(values | {"pp": whole, "last_stage": last, "mtp_stage": mtp})


def costs(x: Columns, device: Device, choice: NDArray[Any], room: float) -> Costs:
    """Return the costs of all configurations of one depth (`space_columns`) on a device with `room` bytes.

    Where there is a `choice`, the number of recomputed layers is free; else all layers are, by the policy.
    """
    n = len(x)
    probe = np.zeros((4, n, END + 1))
    probe[0, :, [DENSE, DENSE_RECOMPUTED]] = probe[1, :, [MOE, MOE_RECOMPUTED]] = 1
    probe[2, :, DENSE_RECOMPUTED] = probe[3, :, MOE_RECOMPUTED] = 1
    seen = with_stages(x, **dict(zip(STAGE_COLUMNS, probe, strict=True)))
    r = rates(seen, device)
    s = stage_times(seen, r)
    held = memory(seen, with_late=False)
    states = held.parameters + held.gradients + held.optimizer
    weights = np.stack(local_parameters(seen), axis=-1)  # [n, 7, 2]
    always = choice[:, None]  # else every layer is recomputed by its policy
    forward = s.forward[:, [DENSE, MOE]]
    backward = np.where(
        always, s.backward[:, [DENSE, MOE]], s.backward[:, [DENSE_RECOMPUTED, MOE_RECOMPUTED]]
    )
    recompute_time = s.backward[:, [DENSE_RECOMPUTED, MOE_RECOMPUTED]] - s.backward[:, [DENSE, MOE]]
    own, head = _weight_gradients(x, seen, r, s.backward)
    zero = np.zeros(n)
    kept, entry, idle = _kept(x, choice)
    least = _least(x)[:, None]
    often = (x.zero >= 2) & (x.dp * x.cp > 1)  # reduced in every micro-batch, see `data_parallel`
    start, reduce, updates = _after(x, device, often)
    each = np.where(often, x.micro_batches * (1 - device.constants.exposed), 1.0)
    hides = np.column_stack([each * hides_forward(x) * often, each])
    return Costs(
        times=np.stack([forward, backward - own, own], axis=-1),
        recompute_time=np.where(always, recompute_time, 0.0),
        first=np.column_stack([s.forward[:, PLAIN], s.backward[:, PLAIN], zero]),
        before=np.column_stack([s.forward[:, BEFORE], s.backward[:, BEFORE], zero]),
        last=np.column_stack([s.forward[:, END], s.backward[:, END] - head, head]),
        send=np.broadcast_to(send(x, device), (n,)) * (x.pp > 1),
        states=states[:, [DENSE, MOE]],
        kept=kept,
        entry=entry,
        working=held.buffers[:, [DENSE_RECOMPUTED, MOE_RECOMPUTED]] - held.buffers[:, :1],
        held=held.buffers[:, DENSE] - held.buffers[:, PLAIN],
        fixed=np.where(least > room, least, idle),
        logits=held.buffers[:, END] - held.buffers[:, PLAIN],
        last_stage=x.last_stage.astype(int),
        weights=weights[:, [DENSE, MOE]],
        fixed_weights=np.stack(local_parameters(x), axis=1),
        count=(int(x.dense_layers[0]), int(x.moe_layers[0])),
        base=np.full(n, device.constants.step_host_s),
        start=start,
        reduce=reduce,
        update=updates,
        exposed=np.where(often | (x.overlap > 0), device.constants.exposed, 1.0),
        late=_late(x, hides, s.forward, s.backward),
        hides=hides,
        micro_batches=x.micro_batches,
        choice=choice,
    )


def _weight_gradients(x: Columns, seen: Columns, r: Rates, backward: Array) -> tuple[Array, Array]:
    """Return W of a layer of each kind, [n, 2], and of the head, [n]; 0 where the schedule does not separate dW."""
    n, split = len(x), x.order >= 2
    own = [weight_gradient(layer(seen, r, moe)) for moe in (False, True)]
    own = np.column_stack([np.broadcast_to(o, (n,)) for o in own]) * split[:, None]
    head = np.broadcast_to(head_forward(seen, r).matmul * (1 + x.mtp), (n,))
    layers = np.minimum(own, backward[:, [DENSE, MOE]])
    return layers, np.minimum(head * split, backward[:, END])


def _after(x: Columns, device: Device, often: NDArray[Any]) -> tuple[Array, Array, Array]:
    """Return the seconds to reduce no parameter, [n], and to reduce and to update one of each kind, [n, 2] each."""
    few, many = np.zeros(len(x)), np.full(len(x), 1e9)
    pairs = ((few, few), (many, few), (few, many))
    each = [reduction(x, device, *pair) for pair in pairs]
    start, *more = (np.where(often, f[1] * x.micro_batches, f[0]) for f in each)
    updates = [update(x, device, *pair) for pair in pairs[1:]]
    return start, np.column_stack([(m - start) / 1e9 for m in more]), np.column_stack(updates) / 1e9


def _kept(x: Columns, choice: NDArray[Any]) -> tuple[Array, Array, Array]:
    """Return the bytes at the peak of a layer of each kind, plain and recomputed, [n, 2, P] each, and of no layer."""
    ones = np.ones_like(x.stage_moe)
    zero = {name: np.zeros_like(ones) for name in STAGE_COLUMNS}

    def activations(*names: str) -> Array:
        some = Columns(vars(x) | zero | dict.fromkeys(names, ones))
        return memory(some, with_late=False).activations

    empty = memory(Columns(vars(x) | zero), with_late=False)
    idle = empty.peak.copy()
    last = x.last_stage.astype(int)
    rows = np.arange(len(x))
    if x.stage_moe.shape[1] > 1:  # logits are counted separately
        other = np.where(last == 0, 1, 0)
        idle[rows, last] -= empty.buffers[rows, last] - empty.buffers[rows, other]
    else:
        seen = with_stages(x, stage_dense=np.zeros((len(x), 2)))
        buffers = memory(seen, with_late=False).buffers
        idle[rows, last] -= buffers[:, 1] - buffers[:, 0]
    plain = [activations(name) - empty.activations for name in STAGE_COLUMNS[:2]]
    more = [
        activations(a, b) - empty.activations
        for a, b in zip(STAGE_COLUMNS[:2], STAGE_COLUMNS[2:], strict=True)
    ]
    entry = np.stack(more, axis=1)
    kept = np.where(choice[:, None, None], np.stack(plain, axis=1), entry)
    return kept, entry, idle


def _least(x: Columns) -> Array:
    """Return the bytes that a step of one graph needs, however many layers are recomputed, [n]; 0 for other steps."""
    there = {
        name: np.broadcast_to(count[:, None], x.stage_moe.shape)
        for name, count in zip(STAGE_COLUMNS[:2], (x.dense_layers, x.moe_layers), strict=True)
    }
    whole = Columns(vars(x) | there)
    late, held = late_peak(whole), memory(whole)
    states = (held.parameters + held.gradients + held.optimizer)[:, 0]
    return np.where(late > 0, late + states + WORKSPACE, 0.0)


def _late(x: Columns, hides: Array, forward: Array, backward: Array) -> Array:
    """Return the most that a layer hides in a second of its time, and what embedding and head hide more, [n, 2]."""
    layers = [DENSE, MOE, DENSE_RECOMPUTED, MOE_RECOMPUTED]
    there = np.column_stack([np.broadcast_to(v, (len(x),)) for v in (x.dense_layers, x.moe_layers)])
    whole, hidden = forward + backward, hides[:, :1] * forward + hides[:, 1:] * backward
    share = hidden[:, layers] / np.maximum(whole[:, layers], 1e-30) * (np.tile(there, 2) > 0)
    most = share.max(axis=1)
    beyond = np.maximum(hidden - most[:, None] * whole, 0.0)
    return np.column_stack([most, beyond[:, [PLAIN, BEFORE, END]].sum(axis=1)])


def problem_of(c: Costs, row: int, layout: Layout, room: float) -> Problem:
    """Return the inner problem of a configuration."""

    def ps(seconds: Array) -> Times:
        f, b, w = (round(float(v) / PS) for v in seconds)
        return f, b, w

    def whole(values: Array) -> tuple[int, ...]:
        return tuple(math.ceil(v) for v in values)

    kinds = [
        Layers(
            count=count,
            times=ps(c.times[row, g]),
            states=math.ceil(c.states[row, g]),
            kept=whole(c.kept[row, g]),
            entry=whole(c.entry[row, g]),
            recompute_time=round(float(c.recompute_time[row, g]) / PS),
            working=math.ceil(c.working[row, g]) if c.choice[row] else math.ceil(c.held[row]),
            weights=(math.ceil(c.weights[row, g, 0]), math.ceil(c.weights[row, g, 1])),
        )
        for g, count in enumerate(c.count)
        if count
    ]
    total = sum(c.count)
    last = total if layout.ends == "last" else 0
    most = (total,) * (layout.pp * layout.vpp - 1) + (last,)
    buffer = [0] * layout.pp
    buffer[c.last_stage[row]] = math.ceil(c.logits[row])
    dense, experts = (whole(w) for w in c.fixed_weights[row])
    return Problem(
        schedule=layout.schedule,
        stages=layout.pp,
        micro_batches=layout.micro_batches,
        chunks=layout.vpp,
        layers=tuple(kinds),
        most=most,
        first=ps(c.first[row]),
        before=ps(c.before[row]),
        last=ps(c.last[row]),
        send=round(float(c.send[row]) / PS),
        memory=tuple(math.floor(room - f) for f in c.fixed[row]),
        buffer=tuple(buffer),
        choice=bool(c.choice[row]),
        held=math.ceil(c.held[row]),
        weights=(dense, experts),
        rest=c.rest(row),
    )


class StageCapacity:
    """How many layers of the larger kind a stage can hold within its memory and time, with recomputation."""

    def __init__(self, c: Costs, room: float, some: NDArray[Any]) -> None:
        g, n, stages = c.bulk, len(some), c.fixed.shape[1]
        self.space = room - c.fixed[some]
        self.space[np.arange(n), c.last_stage[some]] -= c.logits[some]
        self.each = c.states[some, g, None] + c.entry[some, g]
        most = np.floor((self.space + 0.1) / np.maximum(self.each, 1e-9))
        self.fit = np.where(self.space < 0, -1, most)
        self.spent = np.zeros((n, stages))
        self.spent[:, 0] += c.first[some].sum(axis=1)
        self.spent[np.arange(n), c.last_stage[some]] += c.last[some].sum(axis=1)
        self.spent[np.arange(n), c.last_stage[some] - 1] += c.before[some].sum(axis=1)
        self.one = c.times[some, g].sum(axis=1)[:, None]
        self.m = c.micro_batches[some, None]
        saved = c.kept[some, g] - c.entry[some, g]
        self.whole = c.states[some, g, None] + c.kept[some, g]
        recompute_time = np.where(c.choice[some], c.recompute_time[some, g], 0.0)[:, None]
        self.seconds_per_byte = np.where(saved > 0, recompute_time / np.maximum(saved, 1.0), 0.0)
        """Recomputation time for each byte that layers need beyond `space`."""

    def most(self, makespan: Array) -> Array:
        """Return the most layers of each stage in pipelines of at most `makespan` seconds, [n, P]."""
        left = makespan[:, None] / self.m - self.spent
        within = np.minimum(
            left / self.one,
            (left + self.seconds_per_byte * self.space)
            / (self.one + self.seconds_per_byte * self.whole),
        )
        return np.minimum(self.fit, np.floor(within + 1e-9))

    def shortest(self, number: int, steps: int = 45) -> tuple[Array, Array]:
        """Return a makespan that is too short for `number` layers, [n], and whether any makespan is long enough."""

        def holds(makespan: Array) -> NDArray[Any]:
            here = self.most(makespan)
            return (here >= 0).all(axis=1) & (here.sum(axis=1) >= number)

        low = (self.m * self.spent).max(axis=1)
        all_recomputed = self.one + self.seconds_per_byte * (self.whole - self.each)
        high = low + (self.m * all_recomputed).max(axis=1) * (number + 1)
        possible = (self.fit >= 0).all(axis=1) & (self.fit.sum(axis=1) >= number)
        for _ in range(steps):
            middle = (low + high) / 2
            yes = holds(middle)
            high, low = np.where(yes, middle, high), np.where(yes, low, middle)
        return low, possible


def lower_bound(c: Costs, room: float) -> tuple[Array, Array, Array]:
    """Return a lower bound on the step time, and by how many bytes, on which stage, a configuration does not fit.

    A stage with n layers of the larger kind takes m times their time, and holds no more layers than fit with all of
    them recomputed; together the stages must hold all layers. Infinity: they do not fit.
    """
    number = max(c.count)
    s = StageCapacity(c, room, np.arange(len(c.fixed)))
    low, possible = s.shortest(number)
    lacking = (s.each * (number / s.fit.shape[1]) - s.space).mean(axis=1)
    return (
        np.where(possible, low + c.least_rest(low), np.inf),
        np.maximum(lacking, (-s.space).max(axis=1)),
        s.space.argmin(axis=1),
    )


def estimate(c: Costs, chunks: NDArray[Any], bound: Array) -> Array:
    """Return an estimate of the step, [n]: its bound and the start-up of equal chunks.

    It orders the search and proves nothing.
    """
    stages = c.fixed.shape[1]
    total = (c.times.sum(axis=2) * np.array(c.count)).sum(axis=1) + (
        c.first + c.before + c.last
    ).sum(axis=1)
    return bound + (stages - 1) * (total / stages / chunks + 2 * c.send * chunks)


def prove(
    c: Costs,
    some: NDArray[Any],
    proofs: list[Multipliers],
    stages_of: NDArray[Any],
    room: float,
    target: float,
) -> Array:
    """Return the bounds that multipliers prove for any placement of configurations with the same schedule.

    The proofs may be of any of these: one for each stage that may be among the longest, or one for all. `some` are rows
    of the costs, `stages_of` the stage of each chunk, `room` the bytes of a device; only placements below `target`
    seconds are of interest.
    """
    number, stages = max(c.count), c.fixed.shape[1]
    held = StageCapacity(c, room, some)
    exposed, least = c.exposed[some], c.least_weights[some]
    rest = (exposed[:, None] * c.reduce[some] + c.update[some]) * least
    after = c.base[some] + exposed * c.start[some] + rest.sum(axis=1)
    most = np.minimum(held.most(target - after), number)
    fewest = np.zeros((len(some), stages))
    if len(proofs) == stages > 1:
        few = np.maximum(held.most(held.shortest(number)[0]), 0)
        fewest = np.where(few.sum(axis=1, keepdims=True) < number, few + 1, 0)
    found = np.full(len(some), np.inf)
    for stage, proof in enumerate(proofs):  # the first stage with more than `few`
        value = _proved(c, some, proof, stages_of, held.space)
        value += fewest[:, stage % stages] * proof.fewest[stage % stages] - most @ proof.most
        found = np.minimum(found, np.where(most.sum(axis=1) < number, np.inf, value))
        asked = fewest[:, stage % stages] > 0
        most[asked, stage % stages] = np.minimum(most, fewest - 1)[asked, stage % stages]
    return found


def _proved(
    c: Costs,
    some: NDArray[Any],
    proof: Multipliers,
    stages_of: NDArray[Any],
    space: Array,
) -> Array:
    chunks, g = len(stages_of), c.bulk
    number, few = max(c.count), min(c.count)
    m, share = c.micro_batches[some], proof.share
    shown = share * c.exposed[some] + (1 - share)
    k = share + (1 - share) * (1 - c.late[some, 0] / m)
    constant = c.base[some] + shown * c.start[some] - (1 - share) * c.late[some, 1]
    u = shown[:, None] * c.reduce[some] + c.update[some]
    weigh = u[:, :, None] * proof.parameters  # [n, 2, P + 1]
    least, weigh = weigh[:, :, -1], weigh[:, :, :-1]
    total = constant + k * proof.sends * c.send[some] + (least * c.least_weights[some]).sum(axis=1)
    fixed = c.first[some] @ proof.counts[:, 0] + c.last[some] @ proof.counts[:, -1]
    if chunks > 1:
        fixed = fixed + c.before[some] @ proof.counts[:, -2]
    total = total + k * fixed
    total = total + (weigh * c.fixed_weights[some]).sum(axis=(1, 2)) - space @ proof.memory

    def each(kind: int) -> Array:
        found = k[:, None] * (c.times[some, kind] @ proof.counts)
        stage = (c.weights[some, kind, :, None] * weigh).sum(axis=1)
        stage = stage + proof.memory * (c.states[some, kind, None] + c.kept[some, kind])
        saved = proof.memory * (c.kept[some, kind] - c.entry[some, kind])
        more = (
            k[:, None] * c.recompute_time[some, kind, None] * proof.counts[1] - saved[:, stages_of]
        )
        more = np.where(c.choice[some, None], np.minimum(more, 0.0), 0.0)
        return found + stage[:, stages_of] + more

    lowest = np.ones(chunks)
    lowest[[0, -1]] = 0
    if chunks == 1:
        lowest[0] = 1
    if few:
        near = slice(0, few + 1) if g else slice(max(chunks - few - 1, 0), None)
        lowest[near] = 0
        total = total + few * each(1 - g)[:, near].min(axis=1)
    one = each(g) + (proof.most - proof.fewest)[stages_of]
    return total + one @ lowest + (number - lowest.sum()) * one.min(axis=1)
