"""Ctrl-C at any moment: run a command's work in a child process that can be ended whatever it does.

MindSpore cannot be interrupted while it is imported, compiles or ends: Python's handler of signals does not run, or its
exception meets C++ that aborts. So the process that the user started only waits (:func:`run`). At Ctrl-C or SIGTERM it
kills the work and all that this started, removes what is unfinished, and says so in one line. Work that can stop in
order, as training does between two steps, declares it (:func:`can_stop`): the first signal then becomes a request to it,
and the second one kills.

Both share a folder, which is the work's TMPDIR and is removed at the end::

    .telechat-moe/can_stop      the work can stop in order
    .telechat-moe/asked         it was asked to
    .telechat-moe/advice        what the user can do after an interruption
    .telechat-moe/ended         its exit code; only Python and MindSpore have to end, which takes a while
    .telechat-moe/PID-N         links to what is removed if the work is killed

Imports nothing heavy: what comes before :func:`run` is not protected.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import FrameType

from telechat_moe.errors import UNEXPECTED

REQUEST = signal.SIGUSR1
"""Asks the work to stop in order."""

INTERRUPTED = 130
"""Exit code."""

SHARED = ".telechat-moe"
"""Folder in the work's TMPDIR."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAME_S = 0.5
"""Signals so close together are one: a process may get one by itself and another with its group."""
_DEATH_OF_PARENT, _ADOPT_ORPHANS = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER
_LIBC = ctypes.CDLL(None, use_errno=True)
_numbers = count()
_is_work = False


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies (on Linux; no other system can)."""
    if sys.platform == "linux":
        _LIBC.prctl(_DEATH_OF_PARENT, signal.SIGKILL)


# ---------------------------------------------------------------------------------------- the work


def is_work() -> bool:
    """Return whether this process is a command's work, whose parent takes the signals."""
    return _is_work


def can_stop(can: bool = True) -> None:
    """Declare whether a first signal is a request to stop in order; else it kills. Any process of the work may do so."""
    with suppress(OSError):
        (_shared() / "can_stop").touch() if can else (_shared() / "can_stop").unlink()


def advise(text: str) -> None:
    """Set what the user is told after an interruption, such as ``the same command goes on``."""
    with suppress(OSError):
        (_shared() / "advice").write_text(text, encoding="utf-8")


@contextmanager
def unfinished(path: str | os.PathLike[str]) -> Generator[None, None, None]:
    """Have a file or folder removed if the work is killed meanwhile."""
    link = _shared() / f"{os.getpid()}-{next(_numbers)}"
    with suppress(OSError):
        link.symlink_to(Path(path).absolute())
    try:
        yield
    finally:
        with suppress(OSError):
            link.unlink()


def _shared() -> Path:
    """Return the folder that is shared with the parent of the work; without such a parent it is not there."""
    return Path(os.environ.get("TMPDIR", ""), SHARED)


# ---------------------------------------------------------------------------------------- its parent


def run(work: Callable[[], int]) -> int:
    """Return a command's exit code from its work in a child process; the parent ends here, with the same code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    scratch, parent = _make_scratch(), os.getpid()
    child = os.fork()
    if child:
        os._exit(_wait(child, scratch))
    die_with_parent()
    if os.getppid() != parent:
        os._exit(INTERRUPTED)
    _begin(scratch)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    code = work()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        (scratch / SHARED / "ended").write_text(str(code), encoding="ascii")
    return code


def _make_scratch() -> Path:
    """Make the folder for the work's temporary files; where that cannot be, the work does without."""
    scratch = Path(os.environ.get("TMPDIR") or "/tmp", f"telechat-moe-{os.urandom(6).hex()}")
    with suppress(OSError):
        scratch.mkdir(mode=0o700)
        (scratch / SHARED).mkdir(mode=0o700)
    return scratch.absolute()


def _begin(scratch: Path) -> None:
    """Leave the signals to the parent; pass on those that only this process gets."""
    global _is_work
    _is_work = True
    if scratch.is_dir():
        os.environ["TMPDIR"] = str(scratch)

    def pass_on(number: int, frame: FrameType | None) -> None:
        if not (scratch / SHARED / "asked").exists():
            os.kill(os.getppid(), number)

    for number in _SIGNALS:
        signal.signal(number, pass_on)
    signal.signal(REQUEST, lambda number, frame: None)


def _wait(work: int, scratch: Path) -> int:
    shared = scratch / SHARED
    first: float | None = None

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if first is None and (shared / "can_stop").exists():
            with suppress(OSError):  # the disk is full
                (shared / "asked").touch()
            os.kill(work, REQUEST)
        elif first is None or now - first > _SAME_S:
            os.kill(work, signal.SIGKILL)
        first = first or now

    if sys.platform == "linux":
        _LIBC.prctl(_ADOPT_ORPHANS, 1)
    for number in _SIGNALS:
        signal.signal(number, interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    while (ended := _next_ended()) != work:
        os.waitpid(ended, 0)  # an orphan
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # before its number can be another process's
    code = os.waitstatus_to_exitcode(os.waitpid(work, 0)[1])
    if first is not None or code < 0:
        _kill_orphans()
        _remove_unfinished(scratch)
    if first is not None and (ended := _read(shared / "ended")):
        code = int(ended)
    advice = _read(shared / "advice")
    _remove(scratch)
    return _tell(code, first is not None, advice)


def _next_ended() -> int:
    """Return a child that has ended, which is still to be waited for."""
    ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    assert ended is not None  # only with WNOHANG
    return ended.si_pid


def _tell(code: int, interrupted: bool, advice: str) -> int:
    """Say how the work ended unless it has said so itself; return the exit code."""
    if interrupted and code <= 0:
        line = "interrupted as it ended; all of it is done" if code == 0 else "interrupted"
        code, line = INTERRUPTED, f"{line}; {advice}" if code and advice else line
    elif code < 0:
        name = {s.value: s.name for s in signal.Signals}.get(-code, f"signal {-code}")
        hint = "; often memory ran out (dmesg)" if name == "SIGKILL" else ""
        code, line = UNEXPECTED, f"error: the process was killed by {name}{hint}"
    else:
        return code
    show_cursor = "\r\033[K\033[?25h" if os.isatty(2) else ""  # progress bars hide it
    with suppress(OSError):
        os.write(2, f"{show_cursor}{line}\n".encode())
    return code


def _kill_orphans() -> None:
    """Kill all that the work has started and that this process has adopted, and wait for their ends."""
    while True:
        for stat in Path("/proc").glob("[0-9]*/stat"):  # nothing on other systems
            if _read(stat).rpartition(")")[2].split()[1:2] == [str(os.getpid())]:
                with suppress(OSError):
                    os.kill(int(stat.parent.name), signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def _remove_unfinished(scratch: Path) -> None:
    """Remove what the work, and commands that it has started, had not finished."""
    for link in scratch.rglob(f"{SHARED}/*-*"):
        with suppress(OSError):
            _remove(link.readlink())


def _remove(path: Path) -> None:
    import shutil

    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _read(path: Path) -> str:
    """Return a file's text, nothing if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
