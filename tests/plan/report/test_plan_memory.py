"""`plan memory`: its limits against brute force, and the settings it suggests against the recipes that have them."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from telechat_moe.cli import main
from telechat_moe.recipe import load
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.device import load_device
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.simulate_step import simulate_step
from telechat_moe.tools.plan.report.memory import PERCENTILES, answer
from telechat_moe.units import GIB

NAME = "telechat3_moe/pretrain_105b_a4b_4k.yaml"
DEVICE = load_device("ascend-910b")
ON = ["--device", "ascend-910b"]


def asked(*words: str, tmp_path: Path, name: str = NAME) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "memory.json"
    code = main(["plan", "memory", name, *ON, *words, "--json", str(out)])
    return code, json.loads(out.read_text())


@pytest.mark.parametrize("name", [NAME, "pangu_ultra_moe/pretrain_718b_overlap.yaml"])
def test_each_change_is_the_recipe_with_its_settings(name: str) -> None:
    forecast = answer(name, [], DEVICE)
    before = Layout.from_recipe(load(name, use="plan"))
    assert len(forecast.changes) >= 4
    for change in forecast.changes:
        recipe = load(name, list(change.overrides), use="plan")
        layout = Layout.from_recipe(recipe)
        assert (layout.devices, layout.global_batch) == (before.devices, before.global_batch)
        step = simulate_step(Architecture.from_recipe(recipe), layout, DEVICE)
        assert step.step_s == change.step.step_s
        assert (step.peak_bytes == change.step.peak_bytes).all()
    fit = [forecast.fits(change.step) for change in forecast.changes]
    assert fit == sorted(fit, reverse=True)
    times = [c.step.step_s for c, fits in zip(forecast.changes, fit, strict=True) if fits]
    assert times == sorted(times)


def test_as_few_layers_as_fit_is_the_least_of_all_counts() -> None:
    """Two stages of three layers: every stage's count is the smallest that fits, by trying all."""
    sets = [
        "parallel_config.pipeline_stage=2",
        "model.model_config.num_hidden_layers=6",
        "model.model_config.offset=0",
    ]
    recipe = load(NAME, sets, use="plan")
    layout, model = Layout.from_recipe(recipe), Architecture.from_recipe(recipe)
    assert layout.pp == 2
    peaks = {
        counts: simulate_step(
            model, layout.with_changes(recompute="full", recompute_layers=counts), DEVICE
        ).peak_bytes
        for counts in itertools.product(range(4), repeat=2)
    }
    fullest = [peak.max() for peak in peaks.values()]
    room = int((min(fullest) + 2 * max(fullest)) / 3)
    forecast = answer(NAME, sets, DEVICE, 0.0, room)
    legal = [counts for counts, peak in peaks.items() if (peak <= room).all()]
    fewest = tuple(min(c[s] for c in legal) for s in range(2))
    assert 0 < sum(fewest) < 6
    (change,) = [c for c in forecast.changes if c.name == "recompute as few layers as fit"]
    assert change.step.layout.recompute_layers == fewest


def test_the_load_factor_is_the_largest_that_fits() -> None:
    kept = ["recompute_config.recompute=False"]
    base = answer(NAME, kept, DEVICE, 0.0)
    most = simulate_step(
        base.step.architecture, base.step.layout.with_changes(imbalance=4.0), DEVICE
    ).peak_bytes.max()
    room = int((base.step.peak_bytes.max() + most) / 2)
    factor = answer(NAME, kept, DEVICE, 0.0, room).largest_factor
    assert factor is not None
    assert 1 < factor < 4
    for value, fits in ((factor, True), (factor + 0.01, False)):
        layout = base.step.layout.with_changes(imbalance=value)
        peak = simulate_step(base.step.architecture, layout, DEVICE).peak_bytes.max()
        assert (peak <= room) == fits
    assert answer(NAME, kept, DEVICE, 0.0, int(most) + 1).largest_factor == 4
    assert answer(NAME, kept, DEVICE, 0.0, room // 2).largest_factor is None


def test_recorded_loads_are_summed_over_layers_and_devices(tmp_path: Path) -> None:
    """The fullest of four devices has 1.6 times the mean of all layers in one record, and 1.2 times in the other."""
    layers, experts, pairs = 45, 192, 192 * 4
    rows: list[str] = []
    for share in (0.4, 0.3):
        one = np.full(experts, pairs * (1 - share) / (experts * 3 / 4))
        one[: experts // 4] = pairs * share / (experts / 4)
        record = {"expert_loads": {"steps": 1, "loads": [one.tolist()] * layers}}
        rows.append(
            json.dumps(
                {
                    "event": "expert_loads",
                    "step": len(rows) + 1,
                    "steps": 1,
                    **record["expert_loads"],
                }
            )
        )
    file = tmp_path / "metrics.jsonl"
    file.write_text("\n".join(rows) + "\n")
    code, recorded = asked("--expert-loads", str(file), tmp_path=tmp_path)
    assert code == 0
    factors = {row["percentile"]: row["factor"] for row in recorded["recorded_loads"]}
    assert set(factors) == set(PERCENTILES)
    assert factors[100] == pytest.approx(1.6)
    assert factors[50] == pytest.approx(1.4)


def test_a_recipe_that_does_not_fit_exits_with_1_and_says_what_to_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "memory", NAME, *ON, "--memory", "12GiB"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("It does not fit, ")
    assert "Change first: experts over 32 devices" in said[1]
    code, report = asked(
        "--memory", "12GiB", "--set", "parallel_config.expert_parallel=32", tmp_path=tmp_path
    )
    assert (code, report["fits"]) == (0, True)
    assert max(s["peak_bytes"] for s in report["stages"]) * 1.05 <= 12 * GIB
    assert main(["plan", "memory", NAME, *ON, "--memory", "2GiB"]) == 1
    assert "No single change below makes it fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--margin", "-0.1"], 2, "expected a share"),
        (["--memory", "12"], 2, "--memory 12"),
        (["--expert-loads", "none.jsonl"], 3, "none.jsonl"),
        (["--set", "model.model_config.moe_token_drop_policy=probs"], 3, "moe_token_drop_policy"),
    ],
)
def test_bad_input(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "memory", NAME, *ON, *words]) == code
    assert said in capsys.readouterr().err
