"""Real runs that go on with another batch, accumulation and layout: every sample once, and the numbers of one process."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = [pytest.mark.mindspore, pytest.mark.slow]

import mini_recipe as mini
from test_sharded_train import BOUND, DP2_EP2

from telechat_moe.cli import main

EVERY = {"callbacks__2__save_checkpoint_steps": 1, "callbacks__2__keep_checkpoint_max": 100}


def batch(rows: int, micro_batches: int = 1, **layout: Any) -> dict[str, Any]:
    return {
        **layout,
        "runner_config__batch_size": rows,
        "model__model_config__batch_size": rows,
        "runner_config__gradient_accumulation_steps": micro_batches,
        "callbacks__1__gradient_accumulation_steps": micro_batches,
    }


def train(data: Path, output: Path, size: int, *flags: str, **changes: Any) -> int:
    sizes = {"train_dataset__data_loader__sizes": f"[{size},0,0]"}
    return main([*mini.arguments(data, output, **{**EVERY, **sizes, **changes}), *flags])


def cut(output: Path, step: int) -> None:
    """Leave a run as one that was killed after the checkpoint of a step."""
    (output / "summary.json").unlink(missing_ok=True)
    for path in output.glob("checkpoints/step-*"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)


def lines(output: Path, event: str, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    found = map(json.loads, (output / file).read_text().splitlines())
    return [line for line in found if line["event"] == event]


def audited(output: Path) -> dict[str, Any]:
    report = output.parent / "audit.json"
    assert main(["data", "audit", str(output), "--json", str(report)]) == 0
    return json.loads(report.read_text())


def test_a_finished_run_has_no_more_samples(data: Path, tmp_path: Path, capsys) -> None:
    output = tmp_path / "run"
    assert train(data, output, 40, **batch(2)) == 0
    assert train(data, output, 40, "--resume", **batch(1)) == 0
    assert "all 20 steps are done" in capsys.readouterr().err
    assert len(lines(output, "step")) == 20
    # One epoch more is another 40 samples, and the rate that this brings is said.
    assert train(data, output, 40, "--resume", **batch(4), runner_config__epochs=2) == 0
    err = capsys.readouterr().err
    assert "lr_schedule goes on at the samples where it was: it counts steps of 2 samples" in err
    assert "it would be 0.0003" in err
    assert len(lines(output, "step")) == 30
    found = audited(output)
    assert (found["samples"], found["epochs"]) == (80, 2.0)


def test_other_batches_on_one_process_and_two(data: Path, tmp_path: Path, capsys) -> None:
    """Stopped after 15 steps of 2; then on with 8 samples a step, of two processes or one, and at last with 3."""
    output, alone = tmp_path / "run", tmp_path / "alone"
    assert train(data, output, 83, **batch(2)) == 0
    rates = {r["step"]: r["learning_rate"] for r in lines(output, "step")}
    cut(output, 15)
    shutil.copytree(output, alone)
    capsys.readouterr()
    assert train(data, output, 83, "--resume", **batch(2, 2, **DP2_EP2)) == 0
    assert train(data, alone, 83, "--resume", **batch(4, 2)) == 0
    assert "5 of 53 samples are not read" in capsys.readouterr().err
    curves = [[(r["loss"], r["grad_norm"]) for r in lines(o, "step")] for o in (output, alone)]
    assert len(curves[0]) == 15 + 6
    np.testing.assert_allclose(curves[0], curves[1], rtol=BOUND)
    # Step 16 + n begins at sample 30 + 8 n, as did step 16 + 4 n of the run with 2.
    for step in range(6):
        rate = lines(output, "step")[15 + step]["learning_rate"]
        assert rate == pytest.approx(rates[16 + 4 * step], rel=1e-12)
    assert audited(output)["unread"] == 5
    cut(output, 18)
    # Of 29 samples 27 fill a step of three; without an epoch's end nothing is left out between.
    assert train(data, output, 83, "--resume", **batch(3)) == 0
    found = audited(output)
    assert (found["steps"], found["samples"], found["unread"]) == (18 + 9, 81, 2)
    steps = lines(output, "step", "samples.jsonl")[-9:]
    assert [(s["first"], s["count"]) for s in steps] == [(54 + 3 * n, 3) for n in range(9)]
