"""Steps under varying times: against order statistics, and against devices that are sampled one by one."""

import json
from functools import lru_cache

import numpy as np
import pytest

from telechat_moe.cli import main
from telechat_moe.recipe import load
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.device import load_device
from telechat_moe.tools.plan.cost.jitter import factors, slowest, vary
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.simulate_step import Step, simulate_step

RECIPE = "telechat3_moe/pretrain_105b_a4b_4k.yaml"


def step(**layout: object) -> Step:
    a = Architecture.from_recipe(load(RECIPE))
    return simulate_step(a, Layout().but(**layout), load_device("ascend-910b"))


@pytest.mark.parametrize(("count", "mean"), [(1, 0.0), (2, 0.56419), (5, 1.16296), (10, 1.53875)])
def test_the_slowest_of_several_is_tippetts(count: int, mean: float) -> None:
    found = slowest(np.random.default_rng(1), count, (400_000,))
    assert found.mean() == pytest.approx(mean, abs=0.006)


@pytest.mark.parametrize(
    ("jitter", "spread", "deviation"), [(0.3, 0.0, 0.3), (0.0, 0.3, 0.3), (0.3, 0.4, 0.51420)]
)
def test_one_device_has_the_mean_and_the_deviation_that_were_asked_for(
    jitter: float, spread: float, deviation: float
) -> None:
    found = factors(np.random.default_rng(1), jitter, spread, 1, (1, 60_000))
    assert found.mean() == pytest.approx(1, abs=0.006)
    assert found.std() == pytest.approx(deviation, abs=0.012)
    assert found.min() > 0


def by_device(s: Step, jitter: float, spread: float, rng: np.random.Generator) -> float:
    """One step of 1F1B on two stages, every device with its own times, by the recurrence written out."""
    x, m = s.layout, s.layout.micro_batches
    group, copies = x.tp, x.dp

    def factor(sigma: float, shape: tuple[int, ...]) -> np.ndarray:
        deep = np.sqrt(np.log(1 + sigma**2))
        return np.exp(rng.normal(0, deep, shape) - deep**2 / 2)

    ends: list[float] = []
    for _ in range(copies):
        speed = factor(spread, (2, group))
        lasting = {
            (kind, stage, i): float((time * factor(jitter, (group,)) * speed[stage]).max())
            for kind, times in (("F", s.times.forward), ("B", s.times.dx + s.times.dw))
            for stage, time in enumerate(times)
            for i in range(m)
        }
        order = [["F0"], []]
        for i in range(m):
            order[0] += [f"F{i + 1}"] * (i + 1 < m) + [f"B{i}"]
            order[1] += [f"F{i}", f"B{i}"]

        @lru_cache(None)
        def end(stage: int, at: int, lasting=lasting, order=order) -> float:
            if at < 0:
                return 0.0
            kind, i = order[stage][at][0], int(order[stage][at][1:])
            begin = end(stage, at - 1)
            other = {("F", 1): 0, ("B", 0): 1}.get((kind, stage))
            if other is not None:
                begin = max(begin, end(other, order[other].index(f"{kind}{i}")) + s.times.comm)
            return begin + lasting[kind, stage, i]

        ends.append(max(end(0, 2 * m - 1), end(1, 2 * m - 1)))
    return max(ends)


@pytest.mark.parametrize(("jitter", "spread"), [(0.2, 0.0), (0.0, 0.1), (0.1, 0.05)])
def test_a_step_is_that_of_its_devices(jitter: float, spread: float) -> None:
    s = step(dp=3, tp=4, pp=2, micro_batches=4)
    rng = np.random.default_rng(5)
    ends = np.array([by_device(s, jitter, spread, rng) for _ in range(1500)]) + s.after_s
    v = vary(s, jitter, spread)
    assert (v.group, v.copies) == (4, 3)
    assert v.calm_s == s.step_s
    added = ends.mean() - s.step_s
    assert v.step_s - s.step_s == pytest.approx(added, rel=0.05)
    assert v.low_s == pytest.approx(np.quantile(ends, 0.05), rel=0.01)
    assert v.high_s == pytest.approx(np.quantile(ends, 0.95), rel=0.01)


def test_calm_times_cost_nothing() -> None:
    v = vary(step(dp=2, tp=2, pp=2, micro_batches=4), 0.0, 0.0)
    assert v.step_s == pytest.approx(v.calm_s)
    assert (v.group_s, v.copies_s) == pytest.approx((0, 0))


def test_the_command_tells_and_writes(capsys) -> None:
    words = ["plan", "simulate", RECIPE, "--device", "ascend-910b", "--jitter", "0.02"]
    assert main(words) in (0, 1)
    assert "waiting inside operations, 8 devices: +" in capsys.readouterr().out
    assert main([*words, "--json", "-"]) in (0, 1)
    varied = json.loads(capsys.readouterr().out)["varied"]
    assert varied["step_s"] > varied["calm_s"]
    assert main([*words[:-1], "2"]) == 2
    assert "--jitter 2: expected a share" in capsys.readouterr().err
    assert main([*words[:-1], "nan"]) == 2
