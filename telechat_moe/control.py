"""How the processes of a run talk: a folder of small files.

::

    task.pickle    what the processes do, where their command does not say it
    rank_N.pid     written when a process starts
    rank_N.beat    written every second while its interpreter runs
    rank_N.at      where it stands
    rank_N.done    it ended well
    rank_N.failed  it gave up: JSON with the message and the exit code
    node_N.up      a machine sees this folder
    run            a word that only this run's processes know
    stop           the user wants to stop
"""

import os
import pickle
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from telechat_moe.errors import TelechatMoeError
from telechat_moe.private import check_private, keep_others_out
from telechat_moe.recipe import Recipe

CONTROL = "control"
BEAT_S = 1.0


class RankDiedError(TelechatMoeError):
    """A process died without a word (exit code 1), or hangs.

    Args:
        message: Which, where, how.
        is_echo: It may be no more than the consequence of another death.
    """

    def __init__(self, message: str, *, is_echo: bool = False) -> None:
        super().__init__(message)
        self.is_echo = is_echo


class RankFailedError(TelechatMoeError):
    """A process gave up; message and exit code are its own."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Control:
    """The folder through which parent and processes talk."""

    folder: Path

    @staticmethod
    def fresh(job: Path, task: Any) -> "Control":
        """Make the folder anew for a task."""
        keep_others_out()
        folder = job / CONTROL
        shutil.rmtree(folder, ignore_errors=True)
        job.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
        if task is not None:
            (folder / "task.pickle").write_bytes(pickle.dumps(task))
        return Control(folder)

    def task(self) -> Any:
        """Return what the processes do.

        Raises:
            BadInputError: Somebody else may have written it: a pickle is a program.
        """
        return pickle.loads(check_private(self.folder / "task.pickle").read_bytes())

    def write(self, name: str, text: str = "") -> None:
        """Write a file at once."""
        partial = self.folder / f".{name}.{os.getpid()}"
        partial.write_text(text, encoding="utf-8")
        partial.replace(self.folder / name)

    def read(self, name: str) -> str | None:
        """Return a file's text; None if it is not there."""
        try:
            return (self.folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def ask_to_stop(self) -> None:
        """Let the processes stop after the next step."""
        self.write("stop")

    def stop_asked(self) -> bool:
        """Return whether the user wants to stop."""
        return (self.folder / "stop").exists()

    def begin(self, rank: int) -> None:
        """Register this process and let it beat as long as its interpreter runs."""
        self.write(f"rank_{rank}.pid", str(os.getpid()))
        path = self.folder / f"rank_{rank}.beat"

        def beat() -> None:
            while True:
                path.touch()
                time.sleep(BEAT_S)

        threading.Thread(target=beat, daemon=True, name="beat").start()

    def stands(self, rank: int, where: str) -> None:
        """Note where a process stands, for the message should it stay there."""
        (self.folder / f"rank_{rank}.at").write_text(where, encoding="utf-8")

    def beat(self, rank: int) -> int:
        """Return a number that changes as long as a process lives; 0 before it has begun."""
        try:
            return (self.folder / f"rank_{rank}.beat").stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def barrier(self, name: str, rank: int, ranks: int, patience_s: float = 3600.0) -> None:
        """Wait until all processes are here.

        Through files, because a collective of MindSpore on CPU gives up after a while, and one process may
        be evaluating for long. A process that died is the parent's business.
        """
        self.write(f"{name}-{rank}")
        deadline = time.monotonic() + patience_s
        waiting = {other for other in range(ranks) if other != rank}
        while waiting:
            waiting = {r for r in waiting if not (self.folder / f"{name}-{r}").exists()}
            if waiting and time.monotonic() > deadline:
                raise RankDiedError(
                    f"rank {rank} waited {patience_s:.0f} s for rank {min(waiting)}"
                )
            if waiting:
                time.sleep(0.003)


@dataclass(frozen=True)
class Task:
    """What the processes do.

    Attributes:
        kind: ``train``, or ``steps`` for ``run-sharded``.
        recipe: Loaded recipe.
        resume: For ``train``.
        overwrite: For ``train``.
        options: For ``steps``.
    """

    kind: str
    recipe: Recipe
    resume: bool = False
    overwrite: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
