"""Choose for each decoder layer whether its activations are kept, computed again, or wait in the host's memory.

A stage's peak and time depend on its own layers only, and layers of a kind are alike. So for each stage all numbers of
recomputed and swapped layers of each chunk and kind are tried, which proves the choice: of those within the limits of
device and host, the one that adds the least time.
"""

from dataclasses import replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from telechat_moe.tools.plan.cost.columns import Floats, columns
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.roofline import layer, rates
from telechat_moe.tools.plan.cost.saved_activations import (
    KEPT,
    RECOMPUTED,
    SWAPPED,
    ChunkActivations,
)
from telechat_moe.tools.plan.cost.simulate_step import (
    SimulatedStep,
    SwapCost,
    simulate_step,
    swap_of,
)
from telechat_moe.tools.plan.schedules.simulate import memory

MOST = 300_000
"""Choices of a stage that are tried."""


def choose(step: SimulatedStep, top: float, host: float = np.inf) -> Layout | None:
    """Return the layout of a step with each layer kept, recomputed or swapped, which adds the least time to every stage.

    A device may use `top` bytes, and `host` bytes of its host's memory. None: no choice fits, or a stage has more than `MOST`.

    Raises:
        BadInputError: The device's description has no link to its host.
    """
    a, counts = step.architecture, step.layers
    plain = step.layout.with_changes(
        recompute="full", recompute_layers=None, recomputed=(), swapped=(), prefetch=1
    )
    base, swap = simulate_step(a, plain, step.device), swap_of(a, plain, step.device)
    numbers = np.split(np.arange(len(a.layers)), np.cumsum(counts)[:-1])
    of_kind = [
        [[int(i) for i in x if (a.layers[i] == "moe") == k] for k in (0, 1)] for x in numbers
    ]
    costs = _Costs(base, swap, of_kind)
    recomputed: list[int] = []
    swapped: list[int] = []
    for stage, chunks in enumerate(base.program.chunks_of_stage):
        options = [_options(*(len(layers) for layers in of_kind[c])) for c in chunks]
        if np.prod([len(o) for o in options]) > MOST:
            return None
        n = np.array([np.concatenate(choice) for choice in product(*options)], np.float64)
        n = n.reshape(len(n), len(chunks), 2, 2)  # [choices, chunks, recomputed or swapped, kind]
        added, peak, away = costs.of(stage, chunks, n)
        fits = np.flatnonzero((peak <= top) & (away <= host))
        if not len(fits):
            return None
        best = n[fits[np.lexsort((peak[fits], away[fits], added[fits]))[0]]].astype(int)
        for chunk, of_chunk in zip(chunks, best, strict=True):
            for kind, layers in enumerate(of_kind[chunk]):
                first, moved = of_chunk[0, kind], of_chunk[1, kind]
                recomputed += layers[:first]
                swapped += layers[first : first + moved]
    return plain.with_changes(
        recomputed=tuple(sorted(recomputed)),
        swapped=tuple(sorted(swapped)),
        prefetch=swap.prefetch if swapped else 1,
    )


class _Costs:
    """What the numbers of recomputed and swapped layers of a stage cost.

    Args:
        base: The step that keeps everything.
        of_kind: Dense and MoE layers of each chunk, by their numbers.
    """

    def __init__(self, base: SimulatedStep, swap: SwapCost, of_kind: list[list[list[int]]]) -> None:
        self.base, self.swap, self.of_kind = base, swap, of_kind
        a, device, chunks = base.architecture, base.device, len(of_kind)
        x = columns([(a, base.layout)])
        r = rates(x, device)
        kinds, none = (False, True) if a.moe_layers else (False,), [0.0] * (not a.moe_layers)
        self.recompute_s = [float(layer(x, r, kind).recompute.time[0]) for kind in kinds] + none
        self.activations, self.kinds = ChunkActivations(a, base.layout), a.layers
        # of each operation of each stage: micro-batches of each chunk that it finds, and whose backward pass it is
        zero, units = np.zeros(chunks), np.eye(chunks)

        def counts(activation: Floats, working: Floats) -> tuple[Floats, ...]:
            times = replace(base.times, activation=activation, working=working)
            return memory(base.program, times)

        self.flight = [counts(unit, zero) for unit in units]
        self.back = [counts(zero, unit) for unit in units]

    def of(self, stage: int, chunks: tuple[int, ...], n: Floats) -> tuple[Floats, Floats, Floats]:
        """Return seconds added to a stage, its peak, and its bytes in the host's memory, of each choice."""
        cost = n.sum(axis=1) @ np.array([self.recompute_s, self.swap.wait_s]).T
        away_NC = n[:, :, 1] @ np.array(self.swap.moved)
        bytes_NC2 = np.stack([self._chunk(c, n[:, i]) for i, c in enumerate(chunks)], axis=1)
        held_NC = [self.flight[c][stage] for c in chunks] + [self.back[c][stage] for c in chunks]
        often = np.unique(np.stack(held_NC, axis=1), axis=0)
        peak = (often @ bytes_NC2.transpose(2, 1, 0).reshape(2 * len(chunks), -1)).max(axis=0)
        away = (often[:, : len(chunks)] @ away_NC.T).max(axis=0)
        copied = 2 * ((n.sum(axis=1)[:, 1] > 0) * self.swap.moved).max(axis=1)
        return cost[:, 0, 0] + cost[:, 1, 1], peak + copied + self.base.fixed_bytes[stage], away

    def _chunk(self, chunk: int, n: Floats) -> Floats:
        """Return what a chunk keeps of a micro-batch and what its backward pass needs besides, [choices, 2]."""
        once, which = np.unique(n.reshape(len(n), 4), axis=0, return_inverse=True)
        numbers = sorted(i for layers in self.of_kind[chunk] for i in layers)
        ways: list[NDArray[np.int64]] = []
        for number in numbers:
            kind = int(self.kinds[number] == "moe")
            position = self.of_kind[chunk][kind].index(number)
            recomputed, away = once[:, kind], once[:, 2 + kind]
            others = np.where(position < recomputed + away, SWAPPED, KEPT)
            ways.append(np.where(position < recomputed, RECOMPUTED, others))
        kept_and_working = self.activations.of(chunk, [self.kinds[i] for i in numbers], ways)
        kept_and_working = np.broadcast_arrays(*kept_and_working, once[:, 0])[:2]
        return np.stack(kept_and_working, axis=-1)[which.ravel()]


def _options(dense: int, moe: int) -> NDArray[np.int64]:
    """Return the numbers of recomputed dense and MoE and of swapped dense and MoE layers, `[choices, 4]`, of a chunk."""
    ways = [[(i, j) for i in range(n + 1) for j in range(n + 1 - i)] for n in (dense, moe)]
    return np.array([(r0, r1, s0, s1) for (r0, s0), (r1, s1) in product(*ways)])
