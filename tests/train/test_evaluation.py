"""Periodic evaluation: the same samples in every layout, the same losses after a resume."""

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import mini_recipe as mini

from telechat_moe.checkpoint import checkpoint
from telechat_moe.cli import main

EVERY = {"telechat_moe__evaluation__interval": 4}


def evaluations(output: Path) -> dict[int, float]:
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    found = [(r["step"], r["loss"]) for r in lines if r["event"] == "evaluation"]
    assert len(found) == len(dict(found)), "a step was evaluated twice"
    return dict(found)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data) -> Path:
    output = tmp_path_factory.mktemp("whole") / "run"
    assert main(mini.arguments(data, output, **EVERY)) == 0
    assert list(evaluations(output)) == [0, 4, 8, 12]
    return output


@pytest.mark.slow
def test_micro_batches_evaluate_the_same_samples(tmp_path, data, whole):
    halves = {
        "runner_config__batch_size": 2,
        "runner_config__gradient_accumulation_steps": 2,
        "model__model_config__batch_size": 2,
        "callbacks__1__gradient_accumulation_steps": 2,
    }
    assert main(mini.arguments(data, tmp_path / "run", **EVERY, **halves)) == 0
    first = evaluations(tmp_path / "run")[0]  # of the same weights: those of the seed
    assert first == pytest.approx(evaluations(whole)[0], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("step", [6, 9])
def test_a_resumed_run_evaluates_what_it_would_have(tmp_path, data, whole, step):
    """Killed after the checkpoint of a step: evaluations after it are made again, those before are kept."""
    output = tmp_path / "run"
    shutil.copytree(whole, output)
    for path in checkpoint.list_checkpoints(output / "checkpoints"):
        if int(path.name.split("-")[1]) > step:
            path.rename(tmp_path / path.name)
    assert main([*mini.arguments(data, output, **EVERY), "--resume"]) == 0
    assert evaluations(output) == evaluations(whole)


@pytest.mark.slow
def test_a_pipeline_with_experts_in_its_first_stage_evaluates_the_same(tmp_path, data):
    """The stage with the head needs no balance loss to evaluate, and receives it nevertheless: the one before sends it."""
    experts = {"model__model_config__first_k_dense_replace": 0}
    for layout in ({}, mini.PP2):
        output = tmp_path / f"run{len(layout)}"
        assert main(mini.arguments(data, output, **EVERY, **experts, **layout)) == 0
    runs = [evaluations(tmp_path / f"run{len(layout)}") for layout in ({}, mini.PP2)]
    assert runs[1] == pytest.approx(runs[0], rel=1e-5)
