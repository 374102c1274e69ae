"""A run whose documents are packed by best fit: killed and gone on with, bit for bit, and what the audit proves."""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

from running import Hold, wait_for_step

from telechat_moe.checkpoint import checkpoint
from telechat_moe.cli import main

CONFIG = "train_dataset__data_loader__config__"
PACKED = {
    "telechat_moe__packing": "{window: 4}",
    "train_dataset__input_columns": "null",
    "train_dataset__construct_args_key": "null",
    f"{CONFIG}create_attention_mask": True,
    f"{CONFIG}reset_attention_mask": True,
    f"{CONFIG}reset_position_ids": True,
}


def steps(output: Path) -> list[tuple[Any, ...]]:
    """Return what the steps of a run computed, and what they read."""
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    found = [(r["step"], r["loss"], r["grad_norm"]) for r in lines if r["event"] == "step"]
    said = map(json.loads, (output / "samples.jsonl").read_text().splitlines())
    read = {r["step"]: r["content"] for r in said if r["event"] == "step"}
    return [(*row, read[row[0]]) for row in found]


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path, start, hold: Hold) -> None:
    outputs = whole, output = tmp_path / "whole", tmp_path / "run"
    process = start(whole, **PACKED)
    assert process.wait() == 0, process.communicate()[0]
    hold.at(5)
    process = start(output, **PACKED)
    wait_for_step(output, 5, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    hold.release()
    process = start(output, "--resume", **PACKED)
    text, _ = process.communicate()
    assert process.returncode == 0, text
    assert steps(output) == steps(whole)
    a, b = (checkpoint.latest(o / "checkpoints") for o in outputs)
    assert a is not None
    assert b is not None
    for group, tensors in a.tensors.items():
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(b.tensors[group][name], tensor)
    for number, one in enumerate(outputs):
        report = tmp_path / f"{number}.json"
        assert main(["data", "audit", str(one), "--json", str(report)]) == 0
        found = json.loads(report.read_text())
        assert found["problems"] == []
        assert found["data"][0]["read_again"]
