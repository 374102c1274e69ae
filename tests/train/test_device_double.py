"""Whole runs on the double of the device (tests/support/device_double): the same bits as the program for CPU processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = [pytest.mark.mindspore, pytest.mark.slow]

import mini_recipe as mini
import spiky_data
from running import rank, wait_for_step
from test_expert_moves import DP4

from telechat_moe.checkpoint import checkpoint

DOUBLE = Path(__file__).parents[1] / "support" / "device_double"
STEPS = 8
EVENTS = ("step", "evaluation", "rollback", "move")
SETTINGS = {
    "telechat_moe__ema": "{decay: 0.9}",
    "telechat_moe__evaluation__interval": 4,
    "telechat_moe__loss_guard": "{norm_factor: 50.0, loss_factor: 50.0, action: rollback}",
    "callbacks__2__save_checkpoint_steps": 2,
}
MEASURED = ("step", "loss", "grad_norm", "to_step", "left_out", "layer", "experts")
SPIKY = {
    **DP4,
    "telechat_moe__moe__placement": "null",
    "telechat_moe__loss_guard": "{action: rollback, window: 3, min_steps: 3, loss_factor: 1.2}",
    "runner_config__gradient_accumulation_steps": 2,
    "callbacks__1__gradient_accumulation_steps": 2,
    "train_dataset__data_loader__sizes": "[128,0,0]",
    "lr_schedule__learning_rate": 0.02,
}
MOVING = {"telechat_moe__moe__placement": "{every: 3, window: 2, seconds_per_pair: 1.0}"}
GROWING = {"telechat_moe__step_batch_size_schedule": "'0:4 450:8'"}  # tokens; a sample has 16


def start(
    data: Path, output: Path, layout: dict[str, object], *flags: str, double: bool
) -> subprocess.Popen[str]:
    """Launch a run, whose programs the double compiles natively or which runs exported graphs."""
    sizes = {"train_dataset__data_loader__sizes": f"[{4 * STEPS},0,0]"}
    arguments = mini.arguments(data, output, **{**SETTINGS, **sizes, **layout})[1:]
    arguments.remove("--plain")
    environment = {**os.environ, **({"PYTHONPATH": str(DOUBLE)} if double else {})}
    command = [sys.executable, "-m", "telechat_moe.cli", "launch", *arguments, *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=environment, text=True, **pipes)


def ended(process: subprocess.Popen[str]) -> str:
    """Return what a run printed, once it has ended well."""
    text, _ = process.communicate()
    assert process.returncode == 0, text
    return text


def records(output: Path) -> list[dict[str, object]]:
    """Return what was measured in each step and evaluation; of a step that was repeated the last."""
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    rows = {(x["event"], x["step"]): x for x in lines if x["event"] in EVENTS}
    return [{k: row[k] for k in MEASURED if k in row} for _, row in sorted(rows.items())]


def assert_same(output: Path, other: Path) -> None:
    assert records(output) == records(other)
    saved, expected = (checkpoint.latest(x / "checkpoints") for x in (output, other))
    assert saved is not None
    assert expected is not None
    assert saved.step == expected.step
    for group, tensors in expected.tensors.items():
        assert set(saved.tensors[group]) == set(tensors)
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(saved.tensors[group][name], tensor, err_msg=name)


def test_killed_restarted_and_resumed_in_another_layout(data: Path, tmp_path: Path) -> None:
    device, cpu = tmp_path / "device", tmp_path / "cpu"
    process = start(data, device, mini.TP2_PP2, "--restart", "1", double=True)
    wait_for_step(device, 4, process)
    os.kill(rank(device, 1), signal.SIGKILL)
    assert "restart 1" in ended(process)
    assert not list(device.glob(".job/*.mindir"))
    ended(start(data, cpu, mini.TP2_PP2, double=False))
    assert_same(device, cpu)
    for output in (device, cpu):  # which have done all steps: the last ones again
        shutil.rmtree(output / "checkpoints" / f"step-{STEPS:08d}")
        is_device = output == device
        ended(start(data, output, mini.DP2_EP2, "--resume", double=is_device))
    assert_same(device, cpu)


@pytest.mark.parametrize("changes", [MOVING, GROWING], ids=["moving", "growing"])
def test_going_back_before_spikes(tmp_path: Path, changes: dict[str, object]) -> None:
    """Steps are launched before the one before them is fetched, wherever nothing is due between them."""
    data, device, cpu = spiky_data.write(tmp_path, [24]), tmp_path / "device", tmp_path / "cpu"
    ended(start(data, device, {**SPIKY, **changes}, double=True))
    ended(start(data, cpu, {**SPIKY, **changes}, double=False))
    assert_same(device, cpu)
    lines = (cpu / "metrics.jsonl").read_text().splitlines()
    events = {json.loads(line)["event"] for line in lines}
    assert events >= {"rollback", "evaluation"}
    assert ("move" in events) == (changes is MOVING)
