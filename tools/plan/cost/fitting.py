"""How probable it is that a step fits in memory: what is not counted has a range.

A run needs what is predicted times a factor of its software stack, for fragmentation, buffers of libraries and of collectives and what the stack's
kernels keep, times one of its own. `python -m benchmarks.plan_published.fits` judges published runs by it.
"""

import math

import numpy as np

from telechat_moe.tools.plan.cost.columns import Floats

STACK_MEAN, STACK_SPREAD = 0.08, 0.15
"""Logarithm of need over prediction, and its standard deviation, of a published stack of which no run is known."""

GRAPH_MEAN, GRAPH_SPREAD = 0.05, 0.04
"""That of this package's step, whose compiled peaks are predicted within 1 %: fragmentation, and buffers beyond those reserved. Assumed: no NPU has
measured it."""

RUN = 0.07
"""Spread of a run's own factor, by the runs that ran out of memory in layout_sweeps."""

GRAPH_RUN = 0.02  # the same for this package's step


def room(peak_bytes: Floats | float, memory_bytes: float) -> Floats:
    """Return the logarithm of a device's memory over a predicted peak."""
    return np.log(memory_bytes / np.maximum(peak_bytes, 1.0))


def probability_to_fit(
    log_room: Floats | float, mean: Floats | float, spread: float, run: float = RUN
) -> Floats:
    """Return the probability that a run with this `room` fits, if its stack's factor has this mean and spread."""
    deviations = np.asarray((mean - log_room) / np.hypot(spread, run) / math.sqrt(2))
    return (
        np.vectorize(math.erfc, otypes=[float])(deviations) / 2
    )  # no scipy: the planner loads none


def probability_of_graph(peak_bytes: float, memory_bytes: float) -> float:
    """Return the probability that a step of this package fits in what it may use of a device."""
    log_room = room(peak_bytes, memory_bytes)
    return float(probability_to_fit(log_room, GRAPH_MEAN, GRAPH_SPREAD, GRAPH_RUN))
