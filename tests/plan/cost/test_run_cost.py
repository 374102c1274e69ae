"""Days of a run with failures against Young's and Daly's formulas and failures drawn one by one."""

import json
import math
import random
from pathlib import Path

import pytest

from telechat_moe.cli import main
from telechat_moe.errors import UsageError
from telechat_moe.tools.plan.cost.run_cost import daly, run_cost, young

TINY = "telechat3_moe/pretrain_tiny.yaml"


def simulated(
    training: float, interval: float, checkpoint: float, restart: float, mean: float, seed: int
) -> float:
    """Return the seconds of one run whose failures are drawn."""
    rng, clock, done = random.Random(seed), 0.0, 0.0
    fails = rng.expovariate(1 / mean)
    while done < training - 1e-9:
        if fails >= interval + checkpoint:
            fails -= interval + checkpoint
            clock, done = clock + interval + checkpoint, done + interval
            continue
        clock, fails = clock + fails, rng.expovariate(1 / mean)
        while fails < restart:  # a restart that fails begins anew
            clock, fails = clock + fails, rng.expovariate(1 / mean)
        clock, fails = clock + restart, fails - restart
    return clock


@pytest.mark.parametrize("mean", [2000.0, 8000.0])
def test_expected_time_is_the_mean_of_drawn_runs(mean: float) -> None:
    training, checkpoint, restart, devices = 4e5, 60.0, 400.0, 16
    cost = run_cost(
        1000,
        400.0,
        devices,
        mtbf_s=mean * devices,
        checkpoint_s=checkpoint,
        restart_s=restart,
        interval_s=800.0,
    )
    runs = [simulated(training, 800.0, checkpoint, restart, mean, seed) for seed in range(150)]
    assert cost.expected_s == pytest.approx(sum(runs) / len(runs), rel=0.02)
    assert cost.device_hours == pytest.approx(cost.expected_s * devices / 3600)
    assert cost.checkpoints == pytest.approx(500)


def test_dalys_interval_is_the_best_and_youngs_is_near() -> None:
    for checkpoint in (1.0, 30.0, 300.0):
        expected = {
            f: run_cost(
                10**5,
                1.0,
                1,
                mtbf_s=5000.0,
                checkpoint_s=checkpoint,
                interval_s=f * daly(checkpoint, 5000.0),
            ).expected_s
            for f in (0.8, 1.0, 1.25)
        }
        assert min(expected, key=expected.__getitem__) == 1.0
        assert daly(checkpoint, 5000.0) < young(checkpoint, 5000.0) == math.sqrt(1e4 * checkpoint)
    assert daly(20.0, 9.0) == 9.0


def test_without_failures_a_run_is_its_steps() -> None:
    cost = run_cost(100, 36.0, 10)
    assert (cost.expected_s, cost.failures, cost.device_hours) == (3600.0, 0.0, 10.0)


def test_a_run_that_never_ends_is_refused() -> None:
    with pytest.raises(UsageError, match="no segment"):
        run_cost(100, 36.0, 1000, mtbf_s=1000.0, checkpoint_s=100.0)
    with pytest.raises(UsageError, match="above 0"):
        run_cost(100, 36.0, 10, mtbf_s=1000.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--set-device colour=3", "no such figure"),
        ("--set-device inter_bandwidth=9e9", "changes neither"),
        ("--set-device inter_bandwidth=fast", "expected KEY=NUMBER"),
        ("--devices 3", "expected a multiple"),
        ("--tokens many", "15T"),
        ("--mtbf 100", "needs --tokens"),
    ],
)
def test_what_has_no_effect_is_refused(
    options: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "what-if", TINY, "--device", "ascend-910b", *options.split()]) == 2
    assert said in capsys.readouterr().err


def test_a_faster_network_and_more_devices_are_compared(tmp_path: Path) -> None:
    words = [
        "plan",
        "what-if",
        "telechat3_moe/pretrain_105b_a4b_4k.yaml",
        "--device",
        "ascend-910b",
    ]
    words += ["--set-device", "inter_bandwidth=1e12", "--tokens", "1B", "--mtbf", "50000"]
    words += ["--checkpoint-s", "30", "--restart-s", "600", "--html", str(tmp_path / "page.html")]
    main([*words, "--json", str(tmp_path / "figures.json")])
    data = json.loads((tmp_path / "figures.json").read_text())
    before, after = data["as_is"], data["changed"]
    assert after["step_s"] < before["step_s"]
    steps = math.ceil(1e9 / (before["tokens_per_s"] * before["step_s"]))
    assert before["run"]["steps"] == after["run"]["steps"] == steps
    assert before["run"]["training_s"] == pytest.approx(steps * before["step_s"])
    assert before["run"]["expected_s"] > before["run"]["training_s"]
    assert "minutes between them" in (tmp_path / "page.html").read_text()
    assert "http" not in (tmp_path / "page.html").read_text().split("<body")[1]
