"""How sure the choice of a layout is: probabilities, regret, and what measuring it is worth."""

import numpy as np
import pytest

from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.device import load_device
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.posterior import load_posterior
from telechat_moe.tools.plan.report.choice import (
    Measurement,
    SimulatedLayout,
    choice,
    collective_s,
    decided,
    first_to_try,
    lines,
    measurements,
    named,
    regret,
)

MIXTURE = Architecture(
    name="mixture", hidden=2048, layers=("moe",) * 8, heads=16, vocab=32000, seq=4096, experts=64, top_k=4, moe_ffn=1024
)  # fmt: skip
ONE, TWO = Layout(dp=8, ep=8, micro_batches=4), Layout(dp=4, tp=2, ep=8, micro_batches=8)


def test_regret_is_the_mean_excess_over_the_fastest_of_each_draw():
    times = np.log([[1.0, 2.0], [3.0, 2.0]])
    assert regret(times, 0) == pytest.approx(0.25)
    assert regret(times, 1) == pytest.approx(0.5)
    assert regret(times, np.array([0, 1])) == 0


def test_what_tells_layouts_apart_is_worth_measuring_and_noise_is_not():
    random = np.random.default_rng(5)
    cause = random.normal(0, 0.2, 4000)
    times = np.column_stack([cause, -cause])
    assert regret(times, 0) == pytest.approx(
        np.mean(np.maximum(np.exp(2 * cause) - 1, 0)), rel=1e-6
    )
    assert decided(times, cause[:, None]) == pytest.approx(0, abs=1e-9)
    assert decided(times, random.normal(size=(4000, 1))) > 0.1
    advised = measurements(
        times, [Measurement("noise", random.normal(size=4000)), Measurement("cause", cause)]
    )
    assert advised[0][0] == "cause"
    assert advised[0][1] < 1e-9


def test_of_two_that_are_as_fast_the_simpler_is_tried_first():
    layouts = [Layout(dp=4, tp=2), Layout(dp=8), Layout(dp=8, recompute="full")]
    assert first_to_try(layouts, [1.0, 1.02, 1.01]) == [1, 0, 2]
    assert first_to_try(layouts, [1.0, 1.05, 1.04]) == [0, 2, 1]
    none = Layout(dp=8, recompute="full", recompute_layers=(0,))
    assert named(none) == named(layouts[1]) != named(layouts[2])


def test_choice_of_alike_and_of_different_layouts():
    device, posterior = load_device("ascend-910b"), load_posterior("ascend-910b")
    assert posterior
    data = choice(
        MIXTURE, {ONE: SimulatedLayout(1.0), TWO: SimulatedLayout(1.0, 2**40)}, device, posterior
    )
    both = [x["probability"] for x in data["layouts"]]
    assert sum(both) == pytest.approx(1)
    assert min(both) > 0.1
    assert 2 <= len(data["measure"]) <= 6
    assert data["measure"][-1]["regret_left"] < data["layouts"][0]["regret"] / 2
    assert {x["layout"]: x["fits"] for x in data["layouts"]} == {named(ONE): 1, named(TWO): 0}
    for x in data["layouts"]:
        assert x["low_s"] < x["expected_s"] < x["high_s"]
    assert data["no_row_has"] == ["experts", "expert parallelism"]
    text = "\n".join(lines(data))
    assert (
        "none of the 42 measured steps behind these constants has: experts, expert parallelism"
        in text
    )
    sure = choice(
        MIXTURE, {ONE: SimulatedLayout(1.0), TWO: SimulatedLayout(9.0)}, device, posterior
    )
    assert [(x["layout"], x["probability"]) for x in sure["layouts"]] == [(named(ONE), 1.0)]
    assert sure["layouts"][0]["regret"] == 0


def test_a_slower_network_lengthens_collectives_between_nodes_only():
    device, posterior = load_device("ascend-910b"), load_posterior("ascend-910b")
    assert posterior
    slow, fast = sorted(posterior.draws(device, 50), key=lambda d: d.constants.inter_share)[::49]
    inside = [
        collective_s("all-to-all", 8, 1, 2**26, d) * d.constants.intra_share for d in (slow, fast)
    ]
    assert inside[0] == pytest.approx(inside[1], rel=0.2)
    assert collective_s("all-to-all", 64, 1, 2**26, slow) > collective_s(
        "all-to-all", 64, 1, 2**26, fast
    )
