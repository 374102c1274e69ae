"""Runs in processes of their own: wait for what they do, hold them so that they can't end before, see what is left."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

PATIENCE_S = 600.0  # only reached where something is broken


class Hold:
    """Lets runs that are started from now on stand still after a step, until they are let go.

    What a test does to a run then comes before its end, however slow the machine is.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = folder / "hold"
        monkeypatch.setenv("TELECHAT_MOE_HOLD", str(self.file))
        monkeypatch.setenv(
            "PYTHONPATH", str(Path(__file__).with_name("holding")), prepend=os.pathsep
        )

    def at(self, step: int) -> None:
        """Hold all that have done a step, before they do another."""
        partial = self.file.with_suffix(".partial")
        partial.write_text(str(step))
        partial.replace(self.file)

    def release(self) -> None:
        """Let them go on."""
        self.file.unlink(missing_ok=True)


class Moving:
    """Lets the experts of runs that are started from now on move at random (``moving/sitecustomize.py``)."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = folder / "moving"
        self.here = self.file.with_suffix(".here")
        self.file.write_text("")
        monkeypatch.setenv("TELECHAT_MOE_MOVING", str(self.file))
        monkeypatch.setenv(
            "PYTHONPATH", str(Path(__file__).with_name("moving")), prepend=os.pathsep
        )

    def stand(self, move: int) -> None:
        """Have rank 1 stand still in a move, where one of its tensors has its new rows and others have not."""
        self.file.write_text(str(move) if move else "")


def until(there: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    """Wait until something is there, as long as a process runs."""
    deadline = time.monotonic() + PATIENCE_S
    while not there():
        if process is not None:
            assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"nothing came in {PATIENCE_S:.0f} s"
        time.sleep(0.005)


def steps_in(log: Path) -> int:
    """Return how many lines of metrics.jsonl or samples.jsonl are steps."""
    try:
        return log.read_bytes().count(b'"event": "step"')
    except FileNotFoundError:
        return 0


def wait_for_step(output: Path, step: int, process: subprocess.Popen[str] | None = None) -> None:
    """Wait until so many steps are in metrics.jsonl."""
    until(lambda: steps_in(output / "metrics.jsonl") >= step, process)


def rank(output: Path, number: int) -> int:
    """Return the process of a rank."""
    return int((output / f".job/control/rank_{number}.pid").read_text())


def interrupt(output: Path, process: subprocess.Popen[str]) -> None:
    """Send Ctrl-C to a run in several processes, and wait until it is passed on to them."""
    process.send_signal(signal.SIGINT)
    until((output / ".job/control/stop").exists, process)


def wait_for_ends(processes: Sequence[int]) -> None:
    """Wait until processes are gone, or only wait for their parent to take note of it."""

    def ended(number: int) -> bool:
        try:
            return psutil.Process(number).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    until(lambda: all(map(ended, processes)))


def named(folder: Path) -> list[str]:
    """Return the processes whose command line names a folder; msrun starts more than the workers."""
    lines = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    return [line for line in lines if str(folder) in line]


def left_over(folder: Path) -> list[str]:
    """Return those that do not go; one that was killed takes a moment."""
    deadline = time.monotonic() + 60
    while (found := named(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found
