"""Our model in MindSpore against transformers' DeepseekV3 in torch, from the command line: docs/align.md."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.mindspore, pytest.mark.torch]

ROOT = Path(__file__).parents[2]
import mini_recipe

TWIN = ROOT / "benchmarks" / "peers" / "hf_twin.py"
WITHOUT = [
    "runner_wrapper.use_clip_grad=False",
    "model.model_config.moe_router_load_balancing_type=none",
    "model.model_config.rms_norm_eps=1.0e-6",
    "runner_config.batch_size=2",
    "model.model_config.batch_size=2",
]
NO_BIAS = "model.model_config.moe_router_bias_update_rate=0.0"


def command(*arguments, cwd):
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, cwd=cwd
    )
    return done.returncode, done.stdout + done.stderr


def align(*arguments, cwd):
    return command("-m", "telechat_moe.cli", "align", *arguments, cwd=cwd)


def sets(folder, *more):
    data = folder / "data"
    if not data.exists():
        data.mkdir()
        mini_recipe.write_data(data)
    given = mini_recipe.arguments(data, folder / "run")[3:]
    return [*given, *(x for value in (*WITHOUT, *more) for x in ("--set", value))]


def prepared(folder):
    """Make our run (``ours``), and what another program needs (``twin``): norms and biases differ from 1 and 0."""
    recipe, values = (
        "telechat3_moe/pretrain_tiny.yaml",
        sets(folder, NO_BIAS, "lr_schedule.warmup_steps=0"),
    )
    weights = ["--set", "load_checkpoint=twin/ours/step-00000000"]
    for code, said in (
        command(TWIN, "prepare", recipe, "twin", "--vary", "--steps", 2, *values, cwd=folder),
        align("capture", recipe, "--out", "ours", "--steps", "0-1", *values, *weights, cwd=folder),
    ):
        assert code == 0, said
    return folder


def compared(folder, name, steps, *more):
    """Run both sides and compare; return exit code and report."""
    recipe, values, last = "telechat3_moe/pretrain_tiny.yaml", sets(folder, *more), f"0-{steps - 1}"
    twin = folder / f"twin_{name}"
    runs = [
        command(TWIN, "prepare", recipe, twin, "--steps", steps, *values, cwd=folder),
        align("capture", "--torch", TWIN, "--modules", "--out", f"hf_{name}", "--steps", last,
              "--", "train", twin, cwd=folder),
        align("capture", recipe, "--out", f"ours_{name}", "--steps", last, *values, cwd=folder),
    ]  # fmt: skip
    for code, said in runs:
        assert code == 0, said
    report = folder / f"{name}.json"
    code, said = align(
        *("bisect", f"hf_{name}", f"ours_{name}", "--map-out", "map.json", "--json", report),
        cwd=folder,
    )
    return code, json.loads(report.read_text()) if report.exists() else said


@pytest.mark.slow
def test_every_operator_and_every_named_tensor(tmp_path):
    code, report = compared(tmp_path, "same", 1, NO_BIAS)
    assert code == 0, report["first"]
    links = json.loads((tmp_path / "map.json").read_text())
    assert not report["not_judged"]
    assert report["judged"]["pass"] > 200 + len(links)
    assert len(links) > 250


@pytest.mark.slow
def test_what_the_other_does_not_do_is_named(tmp_path):
    """Our expert bias moves after a step, Hugging Face's does not: in the second step other experts are chosen."""
    code, report = compared(tmp_path, "bias", 2)
    assert code == 1
    first = report["first"]
    assert (first["step"], first["layer"], first["phase"]) == (1, 1, "forward")
    assert "moe.router" in first["operator"]
    assert first["reason"].startswith("experts chosen by the router of layer 1")
