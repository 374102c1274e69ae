"""Interrupt a command at a moment and see how it ends and what it leaves."""

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from running import until

COMMAND = [sys.executable, "-m", "telechat_moe.cli"]
MARK = "TELECHAT_MOE_TEST"
PATIENCE_S = 600.0
OF_EVERY_RUN = (".run.lock", ".lock", ".job", ".pieces")
"""Hidden names that a run which was not interrupted leaves, too."""
WAYS = ("group", "command", "terminate", "twice")
"""Ctrl-C as a terminal sends it, SIGINT or SIGTERM to the command alone, and Ctrl-C twice."""


@dataclass
class Ending:
    """How an interrupted command ended: ``ended_before`` it was interrupted, what is ``left`` of it, what it took."""

    way: str
    ended_before: bool
    code: int
    out: str
    err: str
    left: list[str]
    wait_s: float

    def problems(self, kept: Sequence[str] = ()) -> list[str]:
        """Return what is wrong with it; ``kept`` are parts of the names of files that may stay."""
        said = [line for line in self.err.splitlines() if "interrupted" in line]
        noise = [
            line
            for line in (self.err + self.out).splitlines()
            if "Traceback" in line or "KeyboardInterrupt" in line or line.startswith(("[ERROR]", "terminate called", "Fatal", "Exception ignored", "error:"))
        ]  # fmt: skip
        left = [name for name in self.left if not any(part in name for part in kept)]
        found = [f"left: {left}"] * bool(left) + [f"noise: {noise[:3]}"] * bool(noise)
        if self.ended_before:
            return found
        found += [f"exit code {self.code}"] * (self.code != 130)
        return found + [f"{len(said)} lines: {said}"] * (len(said) != 1)


def environment(folder: Path, mark: str) -> dict[str, str]:
    """Return the environment of a command that has temporary files in a folder of its own."""
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    return {**os.environ, MARK: mark, "TMPDIR": str(temporary), "GLOG_v": "3"}


def interrupt(folder: Path, command: Sequence[str], way: str, moment: float | Path) -> Ending:
    """Start a command in a folder, interrupt it after some seconds or when a file is there, and wait for its end."""
    mark = uuid.uuid4().hex
    with (folder / "stderr").open("w+") as err, (folder / "stdout").open("w+") as out:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(folder, mark),
            stdout=out,
            stderr=err,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        if isinstance(moment, Path):
            until(moment.exists)
        else:
            time.sleep(moment)
        ended_before = process.poll() is not None
        began = time.monotonic()
        if not ended_before:
            send(process, way)
        code = process.wait(timeout=PATIENCE_S)
        wait_s = time.monotonic() - began
        alive = [f"process {text}" for text in marked(mark)]
        err.seek(0)
        out.seek(0)
        said = out.read(), err.read()
    return Ending(way, ended_before, code, *said, [*alive, *leftovers(folder)], wait_s)


def send(process: subprocess.Popen[bytes], way: str) -> None:
    """Interrupt a process in one of the `WAYS`."""
    if way == "command":
        process.send_signal(signal.SIGINT)
    elif way == "terminate":
        process.send_signal(signal.SIGTERM)
    else:
        os.killpg(process.pid, signal.SIGINT)
    if way == "twice":
        time.sleep(random.uniform(0, 1))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)


def marked(mark: str) -> list[str]:
    """Return the command lines of all processes that a command has started, however indirectly."""
    found: list[str] = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(" ".join(process.cmdline())[:200])
        except psutil.Error:
            continue
    return found


def leftovers(folder: Path) -> list[str]:
    """Return hidden and temporary files, and what MindSpore or the kernel drop into the working folder."""
    found = [*(folder / "tmp").rglob("*")]
    found += [p for p in folder.rglob(".*") if p.name not in OF_EVERY_RUN]
    found += [p for pattern in ("core*", "rank_*", "kernel_meta*") for p in folder.glob(pattern)]
    return sorted({str(p.relative_to(folder)) for p in found})
