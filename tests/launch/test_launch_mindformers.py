"""Launching through MindFormers' Trainer: followed, restarted, resumed as ours is."""

import importlib.util
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = [
    pytest.mark.mindspore,
    pytest.mark.mindformers,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("mindformers") is None, reason="mindformers is not installed"
    ),
]

import mindformers_runs as runs

from telechat_moe.cli import main
from telechat_moe.interop.mindformers_checkpoint import FOLDER, newest

STEPS = 200


def losses(log: Path) -> dict[int, float]:
    """Return the loss of each step that a worker printed."""
    found = map(runs.LINE.search, log.read_text(errors="replace").splitlines())
    return {int(m[1]): float(m[2]) for m in found if m is not None}


def test_a_killed_process_is_named_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # MindFormers leaves files where it stands
    sizes = {"train_dataset__data_loader__sizes": f"[{STEPS * 8}, 0, 0]"}
    recipe = runs.write_recipe(tmp_path, processes=2, **sizes)
    whole = tmp_path / "whole"
    arguments = ["launch", str(recipe), "--through", "mindformers"]
    assert main([*arguments, "--set", f"output_dir={whole}"]) == 0
    expected = losses(whole / "log" / "worker_0.log")
    assert len(expected) == STEPS
    output = tmp_path / "trained"
    capsys.readouterr()

    def strike() -> None:
        for _ in range(20000):
            if newest(output / FOLDER, 2) is not None:
                os.kill(int((output / ".job/control/rank_1.pid").read_text()), signal.SIGKILL)
                return
            time.sleep(0.005)

    thread = threading.Thread(target=strike)
    thread.start()
    code = main([*arguments, "--restart", "1"])
    thread.join()
    printed = capsys.readouterr().err
    assert code == 0, printed
    assert "rank 1 (process" in printed
    assert "restart 1 (0 more without a new checkpoint)" in printed
    first = losses(output / "log" / "attempt_1" / "worker_0.log")
    after = losses(output / "log" / "worker_0.log")
    assert first.keys() | after.keys() == expected.keys()
    assert min(after) > 1
    for step, loss in after.items():
        np.testing.assert_allclose(loss, expected[step], rtol=1e-5, err_msg=f"step {step}")
