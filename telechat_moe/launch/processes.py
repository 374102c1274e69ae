"""The processes of a job on one machine under ``msrun``: start them, watch them, end them together.

Every process asks the kernel to be killed when its parent dies, so none outlives the command. Jobs on several
machines: :mod:`telechat_moe.launch.agents`.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from telechat_moe.children import die_with_parent, reasons
from telechat_moe.control import (
    CONTROL,
    Control,
    RankDiedError,
    RankFailedError,
)
from telechat_moe.launch.commands import Node, environment, free_port
from telechat_moe.private import keep_others_out

SILENCE_S = 20.0  # MindSpore's own scheduler gives up after half a minute without saying which
PATIENCE_S = 2.0  # for the other processes to say why, once one is dead
POLL_S = 0.1
LAST_LINES = 12
_DEATH = re.compile(r"Worker process (\d+) exit with exception\. Error code: (-?\d+)")
_CHATTER = re.compile(r"\[(INFO|WARNING)\] ?[A-Z_]+\(\d+,")  # MindSpore's own log lines


@dataclass
class Tail:
    """A log file that is shown as it grows."""

    path: Path
    shown: int = 0

    def new(self) -> str:
        """Return what was added, whole lines only, without MindSpore's own."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.shown)
                text = file.read()
        except FileNotFoundError:
            return ""
        whole = text[: text.rfind(b"\n") + 1]
        self.shown += len(whole)
        lines = whole.decode(errors="replace").splitlines(keepends=True)
        return "".join(line for line in lines if not _CHATTER.match(line))


@dataclass
class Cluster:
    """The processes of one job on one machine, under ``msrun``.

    Args:
        job: Job folder.
        ranks: Number of processes, those on other machines included.
        logs: Folder for their logs; made if it is not there.
        script: What they run; takes the job folder.
        program: What they run instead of the script: ``python`` and its arguments.
        node: Which of the processes are here; None: all.
        out: Where to show what rank 0 prints; None: nowhere.
        describe: Says where the run stands, for the message when a process dies.
        silence_s: A process that neither beats nor computes for this long hangs.
        can_stop: The processes know how to stop between two steps, so Ctrl-C asks them to; else it ends them.
        abandoned: Says whether nobody wants the processes any more.
    """

    job: Path
    ranks: int
    logs: Path
    script: Path = field(default_factory=lambda: Path(__file__).with_name("worker.py"))
    program: Sequence[str] = ()
    node: Node | None = None
    out: IO[str] | None = field(default_factory=lambda: sys.stderr)
    describe: Callable[[], str] = lambda: ""
    silence_s: float = field(default_factory=lambda: SILENCE_S)
    can_stop: bool = True
    abandoned: Callable[[], bool] = lambda: False

    def run(self) -> None:
        """Run to the end.

        Raises:
            RankFailedError: A process gave up with a message.
            RankDiedError: A process was killed, crashed or hangs; all others are ended.
        """
        keep_others_out()
        self.control = Control(self.job / CONTROL)
        self.here = self.node or Node(local=self.ranks, total=self.ranks, port=free_port())
        if self.node is None:
            shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir(parents=True, exist_ok=True)
        self.tail = Tail(self.logs / "worker_0.log")
        self.pulse: dict[int, tuple[object, float]] = {}
        program = self.program or (str(self.script), str(self.job.absolute()))
        with self._log().open("wb") as log:
            self.process = subprocess.Popen(
                self.here.msrun(self.logs.absolute(), program, watched=True),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment(),
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        try:
            with stop_on_signal(self.control if self.can_stop else None):
                self._watch()
        finally:
            self._end()
            self._show()

    def _watch(self) -> None:
        found_at, dead = 0.0, None
        while True:
            self._show()
            if self._finished():
                return
            if self.abandoned():
                raise RankDiedError("nobody waits for these processes any more", is_echo=True)
            self._raise_failed()
            self._raise_silent()
            if dead is None:  # the first one: msrun kills the others when it sees it
                dead, found_at = self._dead(), time.monotonic()
            # Give the dead one's last words a moment to reach the disk.
            elif time.monotonic() - found_at > POLL_S * 3:
                self._raise_failed()
                raise RankDiedError(self._obituary(dead))
            time.sleep(POLL_S)

    def _failures(self) -> dict[int, dict[str, Any]]:
        texts = {rank: self.control.read(f"rank_{rank}.failed") for rank in self.here.ranks}
        return {rank: json.loads(text) for rank, text in texts.items() if text is not None}

    def _raise_failed(self) -> None:
        said = self._failures()
        if not said:
            return
        # A message of our own says more than the echo of it in another process.
        deadline = time.monotonic() + PATIENCE_S
        while not any(s["known"] for s in said.values()) and len(said) < self.here.local:
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
            said = self._failures()
        first = min(said, key=lambda rank: (not said[rank]["known"], said[rank]["time"]))
        message = said[first]["message"]
        if said[first]["known"]:
            raise RankFailedError(message, said[first]["exit_code"])
        raise RankDiedError(
            f"rank {first} failed{self._where()}: {message}{self._standing()}\n{self._last_lines(first)}",
            is_echo=True,  # of the death of another, often: its collectives break
        )

    def _raise_silent(self) -> None:
        now = time.monotonic()
        for rank in self.here.ranks:
            pid = self.control.read(f"rank_{rank}.pid")
            begun = self.control.read(f"rank_{rank}.at") is not None
            if pid is None or not begun or self.control.read(f"rank_{rank}.done") is not None:
                continue
            pulse = (self.control.beat(rank), _processor_time(int(pid)))
            if rank not in self.pulse or self.pulse[rank][0] != pulse:
                self.pulse[rank] = (pulse, now)
            elif now - self.pulse[rank][1] > self.silence_s and _alive(int(pid)):
                raise RankDiedError(
                    f"rank {rank} (process {pid}) hangs{self._where()}: {_state(int(pid))}, it has not moved for "
                    f"{self.silence_s:.0f} s; all processes were ended{self._standing()}; {self._last_lines(rank)}"
                )

    def _standing(self) -> str:
        """Say where each process stood, if they differ."""
        at = {rank: self.control.read(f"rank_{rank}.at") for rank in range(self.ranks)}
        if len(set(at.values())) < 2:
            return ""
        return "; " + ", ".join(f"rank {r}: {w or 'not begun'}" for r, w in at.items())

    def _dead(self) -> int | None:
        """Return a process that ended without a word, -1 for one that is not known, or None."""
        pids = {rank: self.control.read(f"rank_{rank}.pid") for rank in self.here.ranks}
        seen = _DEATH.search(self._msrun_log())
        if seen:
            found = (rank for rank, pid in pids.items() if pid == seen[1])
            return next(found, self._not_started())
        for rank, pid in pids.items():
            if pid is None or self.control.read(f"rank_{rank}.done") is not None:
                continue
            if not _alive(int(pid)):
                return rank
        return self._not_started() if self.process.poll() is not None else None

    def _not_started(self) -> int:
        ranks = (r for r in self.here.ranks if self.control.read(f"rank_{r}.pid") is None)
        return next(ranks, -1)

    def _log(self) -> Path:
        return self.logs / (f"msrun_{self.here.number}.log" if self.here.number else "msrun.log")

    def _msrun_log(self) -> str:
        return self._log().read_text(errors="replace")

    def _obituary(self, rank: int | None) -> str:
        if rank is None or rank < 0:
            last = "\n".join(self._msrun_log().splitlines()[-LAST_LINES:])
            return f"msrun ended before the processes did{self._where()}; its last lines:\n{last}"
        started = self.control.read(f"rank_{rank}.pid") is not None
        if not started:
            last = self._last_lines(rank)
            if not (self.logs / f"worker_{rank}.log").exists():
                last += "\nmsrun says:\n" + "\n".join(self._msrun_log().splitlines()[-LAST_LINES:])
            return f"rank {rank} did not start{self._where()}; {last}"
        seen = _DEATH.search(self._msrun_log())
        code = int(seen[2]) if seen else 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else "died"
        how += f" with exit code {code}" if code > 0 else ""
        return (
            f"rank {rank} (process {self.control.read(f'rank_{rank}.pid')}) {how}{self._where()}; "
            f"all other processes were ended; {self._last_lines(rank)}"
        )

    def _where(self) -> str:
        where = self.describe()
        return (f" {where}" if where else "") + (f" on {self.here.host}" if self.here.host else "")

    def _last_lines(self, rank: int) -> str:
        path = self.logs / f"worker_{rank}.log"
        text = path.read_text(errors="replace") if path.exists() else ""
        lines = [line for line in text.splitlines() if not _CHATTER.match(line)]
        if not lines:
            return f"it wrote nothing into {path}"
        said = [f"MindSpore says: {line}" for line in reasons(text)]  # its exceptions do not
        shown = [f"the last lines of {path}:", *said, *lines[-LAST_LINES:]]
        return "\n  ".join(line[:300] for line in shown)

    def _show(self) -> None:
        text = self.tail.new() if self.out is not None else ""
        if text and self.out is not None:
            self.out.write(text)
            self.out.flush()

    def _end(self) -> None:
        """End msrun and every process; the kernel ends what hangs on msrun."""
        if self.process.poll() is None and self._finished():
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=PATIENCE_S)
        with suppress(ProcessLookupError):  # a session of its own: msrun and all that it started
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        pids = [self.control.read(f"rank_{rank}.pid") for rank in self.here.ranks]
        deadline = time.monotonic() + PATIENCE_S
        for pid in (int(p) for p in pids if p is not None):
            while _alive(pid) and _ours(pid, self.job) and time.monotonic() < deadline:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.01)  # one that was killed takes a moment to go

    def _finished(self) -> bool:
        return all(self.control.read(f"rank_{r}.done") is not None for r in self.here.ranks)


def last_step(metrics: Path) -> int:
    """Return the last step in a run's metrics.jsonl, 0 if there is none."""
    try:
        lines = metrics.read_bytes().splitlines()
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError):
            continue
    return 0


def _alive(pid: int) -> bool:
    """Return whether a process runs; one that ended but was not waited for does not."""
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _processor_time(pid: int) -> float:
    """Return the seconds that a process has computed, 0 if it is gone."""
    import psutil

    try:
        return sum(psutil.Process(pid).cpu_times()[:2])
    except psutil.NoSuchProcess:
        return 0.0


def _state(pid: int) -> str:
    import psutil

    try:
        return f"its state is {psutil.Process(pid).status()}"
    except psutil.NoSuchProcess:
        return "it is gone"


def _ours(pid: int, job: Path) -> bool:
    """Return whether a process is one of a job's, or dies: it has no command line then. Numbers are used again."""
    import psutil

    try:
        words = psutil.Process(pid).cmdline()
        return not words or any(str(job.absolute()) in word for word in words)
    except psutil.NoSuchProcess:
        return False


@contextmanager
def stop_on_signal(control: Control | None) -> Iterator[None]:
    """Turn the first Ctrl-C or SIGTERM into a stop after the next step, the second into an end.

    Args:
        control: How to ask for it; None: the first one ends at once. In a thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        if control is None:
            raise KeyboardInterrupt
        try:
            control.ask_to_stop()
        except OSError:  # nowhere to ask: the folder is gone, or the disk is full
            raise KeyboardInterrupt from None
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.default_int_handler)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
