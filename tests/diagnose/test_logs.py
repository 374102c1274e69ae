"""Logs of MindFormers in `telechat-moe diagnose` and `telechat-moe plan score`: when steps were slow, and how long one takes."""

import json
from pathlib import Path

import pytest

from telechat_moe.cli import main
from telechat_moe.tools.plan.cost.measured_steps import read_measured_steps

LINE = (
    "2026-11-20 10:00:00,000 - mindformers[x.py:340] - INFO - {{ step:[{step:5d}/  300], consumed_samples: 8, "
    "global_batch_size: 8, loss:   9.500000, per_step_time: {ms:6d}ms, lr: 1.000000e-05, grad_norm:   1.250000 }}\n"
)


def log(folder: Path, name: str = "worker_0.log", slow: int = 0) -> Path:
    """Write 300 steps of 200 ms, the first of 30 s; every ``slow``-th takes 900 ms."""
    times = {1: 30000} | {step: 900 for step in range(2, 301) if slow and step % slow == 0}
    path = folder / name
    path.write_text("".join(LINE.format(step=s, ms=times.get(s, 200)) for s in range(1, 301)))
    return path


def test_slow_steps_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = [log(tmp_path, f"worker_{i}.log", slow) for i, slow in enumerate((0, 100))]
    assert main(["diagnose", *map(str, logs), "--json", "-"]) == 4
    report = json.loads(capsys.readouterr().out)
    assert report["slow_steps"] == [100, 200, 300]
    assert report["step_seconds"] == 0.2
    assert report["lost"] == pytest.approx(3 * 0.7 / (296 * 0.2 + 3 * 0.9))
    assert "steps 100, 200, 300, every 100 steps" in report["says"]
    assert "ranks" in report["not_judged"]


def test_a_steady_run_is_not_called_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", str(log(tmp_path))]) == 4
    assert "Ranks are not judged" in capsys.readouterr().out


def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = log(tmp_path)
    other = tmp_path / "rank1.json"
    other.write_text("{}")
    assert main(["diagnose", str(path), str(other)]) == 3
    assert "name one kind" in capsys.readouterr().err
    path.write_text(LINE.format(step=1, ms=90) * 2)
    assert main(["diagnose", str(path)]) == 3
    assert "0 steps in common after the first" in capsys.readouterr().err
    assert main(["diagnose", str(log(tmp_path)), "--html", str(tmp_path / "x.html")]) == 2


def test_a_measured_step_from_a_log(tmp_path: Path) -> None:
    recipe = "telechat3_moe/pretrain_105b_a4b_4k.yaml"
    short = tmp_path / "short.log"
    short.write_text(LINE.format(step=1, ms=90))
    table = tmp_path / "steps.csv"
    table.write_text(
        f"recipe,log,step_s\n{recipe},{log(tmp_path, slow=100)},\n{recipe},{short},\n{recipe},{log(tmp_path)},0.5\n"
    )
    rows = read_measured_steps(table)
    assert (rows[0].step_s, rows[0].reason) == (0.2, "")
    assert "1 steps, expected more than 10" in rows[1].reason
    assert "one measured step" in rows[2].reason
