"""Brute force over layouts and placements, for small models."""

from collections.abc import Iterator
from itertools import product

import numpy as np

from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.device import Device
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.simulate_step import simulate_step
from telechat_moe.tools.plan.cost.step import evaluate
from telechat_moe.tools.plan.search.space import Space, enumerate_space, layout_of


def placements(layers: int, layout: Layout) -> Iterator[Layout]:
    """Yield every division of the layers over chunks, with every number of recomputed or swapped ones."""
    count = layout.pp * layout.vpp
    for chunks in product(range(layers + 1), repeat=count):
        if sum(chunks) != layers or any(n < 1 for n in chunks[1:-1]):
            continue
        if layout.ends != "last" and chunks[-1]:
            continue
        if layout.recompute not in ("full", "swap"):
            yield layout.with_changes(chunks=chunks)
            continue
        for recomputed in product(*(range(n + 1) for n in chunks)):
            yield layout.with_changes(chunks=chunks, recompute_layers=recomputed)


def everything(a: Architecture, space: Space, device: Device) -> tuple[np.ndarray, float]:
    """Return which of all layouts and placements fit, and the fastest simulated step of those, if any."""
    layouts = [
        placed
        for row in enumerate_space(a, space)
        for placed in placements(len(a.layers), layout_of(row, space))
    ]
    table = evaluate(a, layouts, device)
    fits = table.memory.peak.max(axis=1) <= device.memory_bytes - device.reserved_bytes
    steps = [simulate_step(a, x, device).step_s for x, ok in zip(layouts, fits, strict=True) if ok]
    return fits, min(steps, default=np.inf)
