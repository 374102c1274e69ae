"""Start, watch and end the processes of a job on one host, under ``msrun``.

Every process asks the kernel to be killed when its parent dies, so none outlives the command. Jobs on several
hosts: :mod:`telechat_moe.launch.multi_host`.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from telechat_moe import processes
from telechat_moe.files import keep_others_out
from telechat_moe.launch.binding import BindingWatch
from telechat_moe.launch.commands import NO_SHELL, LaunchNode, environment
from telechat_moe.launch.faults import Fault, first_fault
from telechat_moe.processes import CONTROL, SCHEDULER, Control, RankDiedError, RankFailedError

PATIENCE_S = 2.0  # for the other processes to say why, once one is dead
POLL_S = 0.1
LAST_LINES = 12
_DEATH = re.compile(r"Worker process (\d+) exit with exception\. Error code: (-?\d+)")
_CHATTER = re.compile(r"\[(INFO|WARNING)\] ?[A-Z_]+\(\d+,")  # MindSpore's own log lines


@dataclass
class LogTail:
    """A log file that is shown as it grows.

    Args:
        out: Where to show it; None: nowhere.
    """

    path: Path
    out: IO[str] | None
    shown: int = 0

    def show(self) -> None:
        """Show what was added, whole lines only, without MindSpore's own."""
        if self.out is None or not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.shown)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self.shown += len(complete)
        lines = complete.decode(errors="replace").splitlines(keepends=True)
        if shown := [line for line in lines if not _CHATTER.match(line)]:
            with suppress(BrokenPipeError):  # nobody reads it any more; the run goes on
                self.out.write("".join(shown))
                self.out.flush()


@dataclass
class HostProcesses:
    """The processes of one job on one host, under ``msrun``.

    Args:
        logs: Folder for their logs; made if it is not there.
        program: What they run: ``python`` and its arguments, or a script; the job folder must be one of the words.
        out: Where to show what rank 0 prints; None: nowhere.
        describe: Returns how far the run is, for the message when a process dies.
        silence_s: A process that neither gives signs of life nor computes for this long hangs.
        can_stop: The processes know how to stop between two steps, so Ctrl-C asks them to; else it ends them.
        abandoned: Returns whether the launcher is gone, so that the processes must end.
    """

    job: Path
    node: LaunchNode
    logs: Path
    program: Sequence[str]
    out: IO[str] | None = field(default_factory=lambda: sys.stderr)
    say: Callable[[str], object] = lambda text: sys.stderr.write(f"{text}\n")
    describe: Callable[[], str] = lambda: ""
    silence_s: float = field(default_factory=lambda: processes.SILENCE_S)
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
        self.logs.mkdir(parents=True, exist_ok=True)
        self.tail = LogTail(self.logs / "worker_0.log", self.out)
        self.detector = processes.HangDetector(self.silence_s)
        self.bindings = BindingWatch(self.control, self.node.ranks, self.say)
        number = self.node.number
        self.log = self.logs / (f"msrun_{number}.log" if number else "msrun.log")
        msrun = self.node.msrun(self.logs.absolute(), self.program, watched=True)
        with self.log.open("wb") as log:
            self.process = processes.start(
                [sys.executable, *NO_SHELL, *msrun],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment(),
            )
        try:
            with processes.stop_on_signal(self.control.ask_to_stop if self.can_stop else None):
                self._watch()
        finally:
            self._end()
            self.tail.show()

    def _watch(self) -> None:
        found_at, dead, code = 0.0, None, 0
        while True:
            self.tail.show()
            if self._finished():
                self.bindings.end()
                return
            self.bindings.look()
            if self.abandoned():
                raise RankDiedError("nobody waits for these processes any more", is_echo=True)
            self._raise_failed()
            self._raise_hanging()
            self._raise_for_scheduler()
            if dead is None:  # the first one: msrun kills the others when it sees it
                dead, found_at = self._dead(), time.monotonic()
                pid = self._reports("pid").get(dead, 0) if dead is not None else None
                code = processes.exit_code(int(pid)) if pid is not None else 0
            # Give the dead one's last words a moment to reach the disk.
            elif time.monotonic() - found_at > POLL_S * 3:
                self._raise_failed()
                raise RankDiedError(self._obituary(dead, code))
            time.sleep(POLL_S)

    def _reports(self, kind: str) -> dict[int, str]:
        """Return what the ranks of this host wrote into their files of a kind, those that did."""
        texts = {rank: self.control.read(f"rank_{rank}.{kind}") for rank in self.node.ranks}
        return {rank: text for rank, text in texts.items() if text is not None}

    def _finished(self) -> bool:
        return len(self._reports("done")) == self.node.local

    def _failures(self) -> dict[int, dict[str, Any]]:
        return {rank: json.loads(text) for rank, text in self._reports("failed").items()}

    def _raise_failed(self) -> None:
        failures = self._failures()
        if not failures:
            return
        # A message of our own says more than the echo of it in another process.
        deadline = time.monotonic() + PATIENCE_S
        while not any(s["known"] for s in failures.values()) and len(failures) < self.node.local:
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
            failures = self._failures()
        order = {rank: (not s["known"], s["time"]) for rank, s in failures.items()}
        first = min(order, key=order.__getitem__)
        failure = failures[first]
        message = failure["message"]
        if failure["known"]:
            raise RankFailedError(message, failure["exit_code"])
        cause = self._first_fault()
        raise RankDiedError(
            f"rank {first} failed{self._location()}: {message}{self._positions()}\n{self._last_lines(first)}",
            # Of the death of another, often: its collectives break.
            is_echo=cause is None or cause[1].is_echo,
        )

    def _raise_hanging(self) -> None:
        begun, finished = self._reports("at"), self._reports("done")
        for rank, pid in self._reports("pid").items():
            if rank not in begun or rank in finished:
                continue
            hangs = self.detector.hangs(int(pid), self.control.sign_of_life(f"rank_{rank}"))
            if hangs and (process_state := processes.state(int(pid))):
                raise RankDiedError(
                    f"rank {rank} (process {pid}) hangs{self._location()}: its state is {process_state}, it has not moved for "
                    f"{self.silence_s:.0f} s; all processes were ended{self._positions()}; {self._last_lines(rank)}"
                )

    def _raise_for_scheduler(self) -> None:
        """Name MindSpore's scheduler before the ranks miss it, who would only say "AllReduce launch failed"."""
        pid = int(self.control.read(f"{SCHEDULER}.pid") or 0)
        if self.node.number or not pid or self._finished() or self._dead() is not None:
            return
        process_state = processes.state(pid)
        if process_state is None:
            code = processes.exit_code(pid)
            how = "ended before the ranks did"
            if code < 0:
                how = f"was killed by {processes.death(code)}"
        else:
            # One that waits in MindSpore gives no sign of life either, and wakes for moments only.
            hangs = self.detector.hangs(pid, self.control.sign_of_life(SCHEDULER))
            if not hangs or "stop" not in process_state:
                return
            how = f"hangs: its state is {process_state}, "
            how += f"it has not moved for {self.silence_s:.0f} s"
        raise RankDiedError(
            f"MindSpore's scheduler (process {pid}) {how}{self._location()}; without it the ranks cannot go on; all "
            f"processes were ended; its log is {self.logs / 'scheduler.log'}"
        )

    def _positions(self) -> str:
        """Say where in the run each process was, if they differ."""
        positions = {rank: self.control.read(f"rank_{rank}.at") for rank in range(self.node.total)}
        if len(set(positions.values())) < 2:
            return ""
        return "; " + ", ".join(f"rank {r}: {w or 'not begun'}" for r, w in positions.items())

    def _dead(self) -> int | None:
        """Return a process that ended without a message, -1 for one that is not known, or None."""
        pids, finished = self._reports("pid"), self._reports("done")
        not_started = next((rank for rank in self.node.ranks if rank not in pids), -1)
        if match := _DEATH.search(self._msrun_log()):
            return next((rank for rank, pid in pids.items() if pid == match[1]), not_started)
        for rank, pid in pids.items():
            if rank not in finished and processes.state(int(pid)) is None:
                return rank
        return not_started if self.process.poll() is not None else None

    def _msrun_log(self) -> str:
        return self.log.read_text(errors="replace")

    def _obituary(self, rank: int, code: int) -> str:
        """Say how a rank ended; ``code``: what was left of it when it was found, 0 if msrun had waited for it."""
        text = self._msrun_log()
        last = "\n".join(text.splitlines()[-LAST_LINES:])
        if rank < 0:
            how = f"before the processes did{self._location()}"
            return f"msrun ended {how}; its last lines:\n{last}"
        pid, lines = self._reports("pid").get(rank), self._last_lines(rank)
        if pid is None:
            if not (self.logs / f"worker_{rank}.log").exists():
                lines += f"\nmsrun says:\n{last}"
            return f"rank {rank} did not start{self._location()}; {lines}"
        match = _DEATH.search(text)
        code = code or (int(match[2]) if match else 0)
        how = f"was killed by {processes.death(code)}" if code < 0 else "died"
        how += f" with exit code {code}" if code > 0 else ""
        return f"rank {rank} (process {pid}) {how}{self._location()}; all other processes were ended; {lines}"

    def _location(self) -> str:
        host = self.node.host and f"on {self.node.host}"
        return "".join(f" {text}" for text in (self.describe(), host) if text)

    def _last_lines(self, rank: int) -> str:
        path = self.logs / f"worker_{rank}.log"
        text = path.read_text(errors="replace") if path.exists() else ""
        lines = [line for line in text.splitlines() if not _CHATTER.match(line)]
        if not lines:
            return f"it wrote nothing into {path}"
        reasons = processes.reasons(text)  # what its exceptions leave out
        exceptions = [f"MindSpore says: {line}" for line in reasons]
        shown = [f"the last lines of {path}:", *exceptions, *lines[-LAST_LINES:]]
        return "\n  ".join([*self._cause(), *(line[:300] for line in shown)])

    def _first_fault(self) -> tuple[int, Fault] | None:
        """Return the fault of a device or link that the logs of this host report, and its rank."""
        paths = {rank: self.logs / f"worker_{rank}.log" for rank in self.node.ranks}
        texts = {r: p.read_text(errors="replace") for r, p in paths.items() if p.exists()}
        return first_fault(texts)

    def _cause(self) -> list[str]:
        """Say it in one sentence, if there is one."""
        if (first := self._first_fault()) is None:
            return []
        rank, fault = first
        return [f"rank {rank}: {fault.sentence} (worker_{rank}.log, line {fault.line})"]

    def _end(self) -> None:
        """End msrun and every process; the kernel ends what hangs on msrun."""
        if self.process.poll() is None and self._finished():
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=PATIENCE_S)
        processes.end(self.process)
        deadline = time.monotonic() + PATIENCE_S
        for pid in map(int, self._reports("pid").values()):
            while not has_ended(pid) and _is_of_job(pid, self.job) and time.monotonic() < deadline:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.01)  # one that was killed takes a moment to go


def has_ended(pid: int) -> bool:
    """Return whether all threads of a process have ended; its files are open, and locked, until then."""
    import psutil

    try:
        process = psutil.Process(pid)
        return process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1
    except psutil.NoSuchProcess:
        return True


def _is_of_job(pid: int, job: Path) -> bool:
    """Return whether a process is one of a job's (ids are reused), or is dying and has no command line."""
    import psutil

    try:
        words = psutil.Process(pid).cmdline()
        return not words or any(str(job.absolute()) in word for word in words)
    except psutil.ZombieProcess:
        return True
    except psutil.NoSuchProcess:
        return False
