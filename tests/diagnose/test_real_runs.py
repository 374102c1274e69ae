"""Runs in several processes, one of which is made slow from outside: `diagnose` names the rank and the kind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from mini_recipe import SPREAD

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = [pytest.mark.mindspore, pytest.mark.slow]

import psutil
from running import rank, wait_for_step

from telechat_moe.cli import main

Capture = pytest.CaptureFixture[str]
STEPS, BAD = 100, 1
BUSY = "while True: pass"


def experts_over(processes: int) -> dict[str, object]:
    """Return the changes of the mini recipe for experts spread over processes, whose rows are exchanged by messages."""
    return {
        **SPREAD,
        "train_dataset__data_loader__sizes": f"[{4 * STEPS},0,0]",
        "callbacks__2__save_checkpoint_steps": STEPS,
        "parallel_config__data_parallel": processes,
        "parallel_config__expert_parallel": processes,
        "runner_config__batch_size": 4 // processes,
        "model__model_config__batch_size": 4 // processes,
        "telechat_moe__sharding__dispatcher": "alltoallv",
    }


def slowing(monkeypatch: pytest.MonkeyPatch, reader_s: float, link_s: float) -> None:
    monkeypatch.setenv("TELECHAT_MOE_SLOW", f"{BAD} {reader_s} {link_s}")
    folder = Path(__file__).parents[1] / "support" / "slowing"
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


def finish(process: subprocess.Popen[str]) -> None:
    text, _ = process.communicate()
    assert process.returncode == 0, text


def ranks_with(kind: str, output: Path, capsys: Capture) -> list[list[int]]:
    """Return the ranks that a kind is named for; on a busy machine others are without a core, too, and are named for that."""
    capsys.readouterr()
    code = main(["diagnose", str(output), "--json", "-"])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == 1, report["says"]
    assert report["ranks"] >= 2
    return [c["ranks"] for c in report["causes"] if c["kinds"] == [kind] and c["scope"] != "run"]


def stop_now_and_then(pid: int, ends: threading.Event) -> None:
    while not ends.wait(0.6):
        try:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.3)
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return


def test_a_rank_that_is_stopped_now_and_then_is_named(tmp_path: Path, start, capsys: Capture):
    output, ends = tmp_path / "run", threading.Event()
    process = start(output, **experts_over(2))
    wait_for_step(output, 2, process)
    thread = threading.Thread(target=stop_now_and_then, args=(rank(output, BAD), ends))
    thread.start()
    try:
        finish(process)
    finally:
        ends.set()
        thread.join()
    assert ranks_with("paused", output, capsys) == [[BAD]]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_rank_on_a_shared_core_is_named(tmp_path: Path, start, capsys: Capture):
    output = tmp_path / "run"
    free, shared = sorted(os.sched_getaffinity(0))[:2]
    process = start(output, **experts_over(2))
    wait_for_step(output, 2, process)
    for number, core in ((1 - BAD, free), (BAD, shared)):
        for thread in psutil.Process(rank(output, number)).threads():
            os.sched_setaffinity(thread.id, {core})
    with subprocess.Popen([sys.executable, "-c", BUSY]) as busy:
        try:
            os.sched_setaffinity(busy.pid, {shared})
            finish(process)
        finally:
            busy.kill()
    assert ranks_with("shared_core", output, capsys) == [[BAD]]


def test_a_rank_with_a_slow_reader_is_named(
    tmp_path: Path, start, monkeypatch: pytest.MonkeyPatch, capsys: Capture
):
    slowing(monkeypatch, reader_s=0.1, link_s=0.0)
    finish(start(tmp_path / "run", **experts_over(2)))
    assert ranks_with("slow_reader", tmp_path / "run", capsys) == [[BAD]]


def test_a_rank_whose_messages_leave_late_is_named(
    tmp_path: Path, start, monkeypatch: pytest.MonkeyPatch, capsys: Capture
):
    slowing(monkeypatch, reader_s=0.0, link_s=0.03)
    finish(start(tmp_path / "run", **experts_over(4)))
    assert ranks_with("slow_link", tmp_path / "run", capsys) == [[BAD]]
