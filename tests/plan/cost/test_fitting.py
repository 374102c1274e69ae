"""Probability to fit in memory: ranges by hand, what published runs say, and copies that unfused norms keep."""

import numpy as np
import pytest

from benchmarks.plan_published.fits import GRID, learned
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.columns import columns
from telechat_moe.tools.plan.cost.fitting import (
    GRAPH_MEAN,
    GRAPH_RUN,
    GRAPH_SPREAD,
    STACK_MEAN,
    probability_of_graph,
    probability_to_fit,
    room,
)
from telechat_moe.tools.plan.cost.layout import Layout, Stack
from telechat_moe.tools.plan.cost.memory import layer_activations
from telechat_moe.units import GIB


def test_half_at_the_mean_need_and_less_with_less_memory():
    mean = np.exp(GRAPH_MEAN)
    assert probability_of_graph(40 * GIB, 40 * GIB * mean) == pytest.approx(0.5)
    spread = np.hypot(GRAPH_SPREAD, GRAPH_RUN)
    assert probability_of_graph(40 * GIB, 40 * GIB * mean * np.exp(spread)) == pytest.approx(
        0.8413, abs=1e-3
    )
    chances = [probability_of_graph(peak * GIB, 55 * GIB) for peak in (30, 50, 52, 54, 60)]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] > 0.999
    assert chances[-1] < 0.01
    assert float(room(10.0, 10.0)) == 0


def test_runs_of_a_stack_narrow_its_factor():
    nothing = learned(np.array([]), np.array([]))
    assert GRID @ nothing == pytest.approx(STACK_MEAN, abs=0.01)
    # runs finish with a quarter of the memory to spare and end with a fifth
    ended = learned(np.log([1.2] * 9 + [1.33] * 9), np.array([0.0] * 9 + [1.0] * 9))
    assert np.log(1.2) < GRID @ ended < np.log(1.33)
    spread = np.sqrt(ended @ (GRID - GRID @ ended) ** 2)
    assert spread < 0.05
    assert float(ended @ probability_to_fit(np.log(1.1), GRID, 0.0)) < 0.1


@pytest.mark.parametrize(("gated", "unfused_bytes"), [(True, 2 + 2 * 4), (False, 2)])
def test_unfused_rms_norms_keep_float32_copies_and_layer_norms_do_not(
    gated: bool, unfused_bytes: int
):
    a = Architecture(hidden=512, layers=("dense",) * 2, heads=8, vocab=1000, seq=256, gated=gated)
    fused, unfused = (Layout(dp=1, stack=Stack(fused=f)) for f in (True, False))
    dense, _, _ = layer_activations(columns([(a, fused), (a, unfused)]))
    assert dense[1] - dense[0] == unfused_bytes * 256 * 512
    recomputed = [Layout(dp=1, recompute="norm", stack=Stack(fused=f)) for f in (True, False)]
    dense, _, _ = layer_activations(columns([(a, x) for x in recomputed]))
    assert dense[1] - dense[0] == 2 * 256 * 512  # the norms' copies are computed again
