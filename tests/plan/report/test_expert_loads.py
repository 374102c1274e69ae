"""What recorded expert loads cost a step, before and after placement."""

import json
from pathlib import Path

import numpy as np
import pytest

from telechat_moe.cli import main
from telechat_moe.recipe import load
from telechat_moe.tools.plan.cost.simulate_step import simulate_step
from telechat_moe.tools.plan.report import expert_loads
from telechat_moe.tools.plan.report import step as step_report

RECIPE = "telechat3_moe/pretrain_105b_a4b_4k.yaml"
EXPERTS, LAYERS, DEVICES, PAIRS = 192, 45, 4, 2_000_000


@pytest.fixture(scope="module")
def step():
    return step_report.of_recipe(load(RECIPE, [], use="plan"), "ascend-910b")


def metrics(path: Path, load_NLE: np.ndarray, steps: int = 50) -> str:
    """Write loads as `telechat-moe train` does, between lines of other events."""
    records = [
        {"event": "expert_loads", "step": n, "steps": steps, "loads": load_LE.tolist()}
        for n, load_LE in enumerate(load_NLE)
    ]
    lines = [json.dumps({"event": "step", "step": 0, "loss": 1.0}), *map(json.dumps, records)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def uneven(records: int, lasting: bool = True) -> np.ndarray:
    random = np.random.default_rng(0)
    share = random.gamma(1.5, size=(1 if lasting else records, LAYERS, EXPERTS))
    share = share / share.sum(axis=2, keepdims=True)
    return np.array(
        [[random.multinomial(PAIRS, p) for p in share[n % len(share)]] for n in range(records)]
    )


def by_hand(load_NLE: np.ndarray) -> float:
    """Return busiest over mean with experts in order, mean over layers and all records but the first."""
    device_NLD = load_NLE[1:].reshape(-1, LAYERS, DEVICES, EXPERTS // DEVICES).sum(axis=3)
    return float((device_NLD.max(axis=2) / device_NLD.mean(axis=2)).mean())


def test_lasting_loads_cost_time_that_moves_win_back(step, tmp_path: Path):
    load_NLE = uneven(5)
    equal, before, after, copies = expert_loads.judge(step, metrics(tmp_path / "m", load_NLE), 1)
    assert equal.imbalance == 1
    assert equal.step_s == pytest.approx(step.step_s)
    assert before.imbalance == pytest.approx(by_hand(load_NLE))
    slower = simulate_step(
        step.architecture, step.layout.with_changes(imbalance=before.imbalance), step.device
    )
    assert before.step_s == slower.step_s > equal.step_s
    assert 1 < after.imbalance < 1 + 0.2 * (before.imbalance - 1)
    assert 0 < after.step_s - equal.step_s < 0.2 * (before.step_s - equal.step_s)
    assert after.moved
    assert after.move_s
    # The moves of all records cost less than the steps between two records win.
    assert after.move_s < 50 * (before.step_s - after.step_s)
    assert copies.imbalance < before.imbalance


def test_loads_without_memory_win_nothing(step, tmp_path: Path):
    """Where each record is drawn anew, a placement that knew the record it is judged by would win almost everything."""
    load_NLE = uneven(2, lasting=False)
    _, before, after = expert_loads.judge(step, metrics(tmp_path / "m", load_NLE))
    assert after.imbalance > 1 + 0.8 * (before.imbalance - 1)


def test_moves_that_cost_more_than_they_win_do_not_happen(step, tmp_path: Path):
    load_NLE = uneven(3)
    _, before, after = expert_loads.judge(step, metrics(tmp_path / "m", load_NLE, steps=1))
    assert after.moved == 0
    assert after.imbalance == before.imbalance


def test_the_command_prints_and_writes_them(tmp_path: Path, capsys):
    file, out = metrics(tmp_path / "m", uneven(3)), tmp_path / "out.json"
    words = ["plan", "simulate", RECIPE, "--device", "ascend-910b", "--expert-loads", file]
    assert main([*words, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["expert_loads"]
    assert [row["name"].split(", ")[-1] for row in rows] == [
        "equal loads", "the recipe's order", "moved where it pays",
    ]  # fmt: skip
    assert main([*words, "--expert-copies", "1"]) == 0
    said = capsys.readouterr().out
    for row in rows:
        assert f"{row['imbalance']:.3f}" in said
    assert "recorded loads, 1 copies a device" in said
    assert "\nStep\n" in said  # the title of docs/plan_step.md


def damaged(path: Path, line: str) -> str:
    path.write_text(line + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"event": "step", "step": 1}', "0 lines of expert loads, expected two at least"),
        ('{"event": "expert_loads", "loads": [[1', "line 1: no record of expert loads"),
        ('{"event": "expert_loads", "step": 1}', "line 1: no record of expert loads ('loads')"),
        ('{"event": "expert_loads", "steps": 5, "loads": [[1, 2], [2, 1]]}',
         "line 1: loads of shape [2, 2] over 5 steps, the recipe has 45 MoE layers of 192 experts"),
        (json.dumps({"event": "expert_loads", "steps": 1, "loads": [[1] * 192] * 44 + [[2] * 192]}),
         "line 1: expert loads: step 0, MoE layer 44: the loads add up to 384, those of layer 0 are 192"),
    ],
)  # fmt: skip
def test_damaged_and_foreign_loads_are_refused(tmp_path: Path, capsys, line: str, said: str):
    file = damaged(tmp_path / "metrics.jsonl", line)
    assert (
        main(["plan", "simulate", RECIPE, "--device", "ascend-910b", "--expert-loads", file]) == 3
    )
    assert said in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("recipe", "words", "said"),
    [
        ("telechat3_moe/pretrain_tiny.yaml", ["--expert-loads", "m"], "keeps all experts on each device (expert_parallel 1)"),
        (RECIPE, ["--expert-copies", "2"], "--expert-copies 2: expected 1 or more, with --expert-loads"),
        (RECIPE, ["--expert-copies", "-1", "--expert-loads", "m"], "--expert-copies -1: expected 1 or more"),
        (RECIPE, ["--expert-loads", "no/such/file"], "cannot be read as a run's metrics"),
    ],
)  # fmt: skip
def test_settings_without_effect_are_refused(capsys, recipe: str, words: list[str], said: str):
    assert main(["plan", "simulate", recipe, "--device", "ascend-910b", *words]) in (2, 3)
    assert said in capsys.readouterr().err.replace("\n", " ")
