"""Where the time of each step goes on each rank: ``OUTPUT_DIR/timings/rank_N.bin``, which `telechat-moe diagnose` reads.

A file is a line of JSON (rank, stage, host, names of the columns) and then rows of little-endian float32, one a step, so a rank writes
about 50 bytes a step with one call. All but ``step``, ``first``, ``faults`` and ``rows`` are seconds:

``data``, ``host``, ``graph``, ``save``, ``evaluation``
    Wall time: waiting for data, Python between the others, the graph with its collectives, paused for a checkpoint, evaluating.
``cpu``
    CPU time of all threads during the graph.
``gc``, ``delay``, ``paused``
    Collecting garbage; ready to run on a core that another process had; stopped, as by SIGSTOP.
``pipeline.N``, ``exchange.N``
    Of a run in several processes: how long the messages of rank N that the step took were on their way, those of pipelines and those that
    carry rows to experts.
``first``, ``faults``, ``rows``
    1 in a process's first step, which compiles the graph; major page faults; rows that the rank's experts got (NaN: not known).
"""

import contextlib
import gc
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telechat_moe.errors import BadInputError, TelechatMoeError
from telechat_moe.reading import parse_json

FOLDER = "timings"
VERSION = 1
LINKS = ("pipeline", "exchange")
"""Kinds of messages, before the number of the rank that they are from."""
COLUMNS = (
    "step", "first", "data", "host", "graph", "save", "evaluation", "cpu", "gc", "delay", "paused", "faults", "rows",
)  # fmt: skip
PARTS = ("data", "host", "graph", "save", "evaluation")
TYPE = np.dtype("<f4")
BEAT_S = 0.05
"""Seconds between two beats of the thread that notices a stopped process."""
_THREADS_EVERY = 50  # steps between two looks at which threads there are


def file_of(folder: Path, rank: int) -> Path:
    """Return the file of a rank below the folder of a run."""
    return folder / FOLDER / f"rank_{rank}.bin"


class Pauses:
    """Seconds in which this process was stopped: a thread that sleeps finds out that it slept too long.

    What the process spent on a core, and what the thread waited for one, is no stop.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="timings", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        with contextlib.ExitStack() as stack:
            try:
                path = Path("/proc/thread-self/schedstat")
                schedstat = stack.enter_context(path.open("rb", buffering=0))
            except OSError:
                schedstat = None
            before, used, waited = time.monotonic(), time.process_time(), _waited(schedstat)
            while not self._ends.wait(BEAT_S):
                now, cpu, delay = time.monotonic(), time.process_time(), _waited(schedstat)
                over = now - before - BEAT_S - (cpu - used) - (delay - waited)
                if over > BEAT_S:
                    self.seconds += over
                before, used, waited = now, cpu, delay

    def close(self) -> None:
        """End the thread that measures."""
        self._ends.set()


def _waited(file: Any) -> float:
    """Return the seconds that a thread was ready to run without a core."""
    if file is None:
        return 0.0
    file.seek(0)
    return int(file.read().split()[1]) * 1e-9


class CoreWaits:
    """Seconds that a thread of this process was ready to run while other processes had the cores.

    A thread that waits because others of its own process compute delays nothing: MindSpore has more threads than cores, and idle
    ones poll. So the longest wait of a thread counts up to the CPU time that other processes had on this one's cores.
    """

    def __init__(self) -> None:
        self._measured: dict[str, tuple[int, int]] = {}
        self._looks = 0
        self._cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        self._others = self._of_others()

    def longest(self) -> float:
        """Return the seconds since the last call."""
        if self._looks % _THREADS_EVERY == 0:
            self._look()
        self._looks += 1
        longest = 0
        for name, (file, before) in list(self._measured.items()):
            try:
                waited = int(os.pread(file, 64, 0).split()[1])
            except (OSError, IndexError):  # the thread has ended
                os.close(file)
                del self._measured[name]
                continue
            self._measured[name] = (file, waited)
            longest = max(longest, waited - before)
        before, self._others = self._others, max(self._of_others(), self._others)  # ticks of 10 ms
        return min(longest * 1e-9, self._others - before)

    def _of_others(self) -> float:
        """Return the seconds of CPU time that other processes had so far on this one's cores; without /proc 0."""
        try:
            lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        except OSError:
            return 0.0
        user, nice, system, _idle, _iowait, irq, softirq, steal = range(1, 9)
        ticks = sum(
            int(line[part])
            for line in lines
            if line[0] in self._cores
            for part in (user, nice, system, irq, softirq, steal)
        )
        return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()

    def _look(self) -> None:
        with contextlib.suppress(OSError):
            threads = {path.name for path in Path("/proc/self/task").iterdir()}
            for name in threads - set(self._measured):
                with contextlib.suppress(OSError, IndexError):
                    file = os.open(f"/proc/self/task/{name}/schedstat", os.O_RDONLY)
                    self._measured[name] = (file, int(os.pread(file, 64, 0).split()[1]))

    def close(self) -> None:
        """Close the files of all threads."""
        for file, _ in self._measured.values():
            os.close(file)
        self._measured = {}


@dataclass(frozen=True)
class Links:
    """The links of a process: the ranks at their ends, and how to learn the seconds of `LINKS` of each since the last time."""

    peers: Sequence[int]
    ways: Callable[[], Iterable[tuple[float, float]]]

    def columns(self) -> list[str]:
        """Return the names of the columns of these links."""
        return [f"{kind}.{peer}" for peer in self.peers for kind in LINKS]


class StepTimer:
    """Measure the parts of a step and write them; without a file it does nothing.

    Args:
        path: The file; None: nothing is measured.
        about: ``rank``, ``ranks`` and ``stage`` for the first line.
        step: Steps done; later rows of the file are removed.
        links: Whose messages are timed, too.

    Raises:
        TelechatMoeError: The file cannot be written.
    """

    def __init__(
        self,
        path: Path | None = None,
        about: dict[str, Any] | None = None,
        step: int = 0,
        links: Links | None = None,
    ) -> None:
        self.path, self._file, self._links = path, None, links
        if path is None:
            return
        columns = [*COLUMNS, *(links.columns() if links is not None else ())]
        header = {"version": VERSION, **(about or {}), "host": socket.gethostname()}
        header["columns"] = columns
        rows = _rows_until(path, step, columns) if step else b""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("wb", buffering=0)
            self._file.write(json.dumps(header).encode() + b"\n" + rows)
        except OSError as error:
            raise TelechatMoeError(f"cannot write the timings {path}: {error.strerror}") from error
        self._pauses, self._waits = Pauses(), CoreWaits()
        self._gc_seconds, self._gc_began, self._first = 0.0, 0.0, 1.0
        gc.callbacks.append(self._collected)
        self._row: dict[str, float] = dict.fromkeys(COLUMNS, 0.0)
        self._counts_before = self._counts()
        self._clock = time.perf_counter()

    def __enter__(self) -> "StepTimer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lap(self, part: str) -> None:
        """Count the time since the last lap as a part of the step, one of :data:`PARTS`."""
        if self._file is None:
            return
        now = time.perf_counter()
        self._row[part] += now - self._clock
        self._clock = now
        cpu = time.process_time()
        if part == "graph":
            self._row["cpu"] += cpu - self._cpu
        self._cpu = cpu

    def finish(self, step: int, rows: float | None) -> None:
        """Write the row of a step; what follows belongs to the next."""
        if self._file is None:
            return
        self.lap("host")
        counts = self._counts()
        row = self._row | {
            name: counts[name] - count for name, count in self._counts_before.items()
        }
        row |= {"step": step, "first": self._first, "delay": self._waits.longest()}
        row["rows"] = float("nan") if rows is None else rows
        try:
            values = [row[name] for name in COLUMNS]
            if self._links is not None:
                values += chain.from_iterable(self._links.ways())
            self._file.write(np.array(values, TYPE).tobytes())
        except OSError as error:
            raise TelechatMoeError(
                f"cannot write the timings {self.path}: {error.strerror}"
            ) from error
        self._row.update(dict.fromkeys(COLUMNS, 0.0))
        self._counts_before, self._first = counts, 0.0

    def _counts(self) -> dict[str, float]:
        self._cpu = time.process_time()
        faults = float(resource.getrusage(resource.RUSAGE_SELF).ru_majflt)
        return {"gc": self._gc_seconds, "paused": self._pauses.seconds, "faults": faults}

    def _collected(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_began = time.perf_counter()
        else:
            self._gc_seconds += time.perf_counter() - self._gc_began

    def close(self) -> None:
        """Stop measuring and close the file."""
        if self._file is not None:
            gc.callbacks.remove(self._collected)
            self._pauses.close()
            self._waits.close()
            self._file.close()
            self._file = None


def _rows_until(path: Path, step: int, columns: list[str]) -> bytes:
    """Return the rows of a file up to a step; nothing if it is another run's or of other columns."""
    try:
        header, rows = read(path)
    except BadInputError:
        return b""
    return rows[rows[:, 0] <= step].tobytes() if header["columns"] == columns else b""


def read(path: Path) -> tuple[dict[str, Any], NDArray[np.float32]]:
    """Return the first line and the rows ``[steps, columns]`` of a rank's file; a torn last row is left out.

    Raises:
        BadInputError: The file cannot be read or is none of these.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInputError(f"cannot read the timings {path}: {error.strerror}") from error
    line, newline, body = data.partition(b"\n")
    try:
        header = parse_json(line)
        columns = [str(name) for name in header["columns"]]
        rank, stage, version = int(header["rank"]), int(header["stage"]), header["version"]
    except (ValueError, TypeError, KeyError):
        raise BadInputError(
            f"{path}: begins with no line of JSON that has version, rank, stage and columns; it is no file of timings"
        ) from None
    if not newline or version != VERSION or "step" not in columns or min(rank, stage) < 0:
        raise BadInputError(
            f"{path}: timings of version {version!r} for rank {rank}; expected version {VERSION} with a column step"
        )
    width = len(columns)
    count = len(body) // (TYPE.itemsize * width)
    return header, np.frombuffer(body, TYPE, count * width).reshape(count, width)
