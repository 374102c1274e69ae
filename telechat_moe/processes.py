"""Start child processes, watch them, end them together, and give them a folder through which they report.

Every process that this package starts is killed by the kernel when its parent dies. MindSpore's compiler runs in forked
children (:func:`in_children`), which MindSpore's threads do not survive; they start with the first computation, so a
process that has computed compiles in a new interpreter (:func:`in_clean_process`). These two pickle functions, recipes
and graphs, through a pipe or a folder that only this process knows; all other processes exchange JSON.
"""

import functools
import importlib
import json
import os
import pickle
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from telechat_moe.errors import BadInputError, TelechatMoeError
from telechat_moe.files import check_private, keep_others_out
from telechat_moe.interruption import REQUEST, can_stop, die_with_parent, is_work

P = ParamSpec("P")
T = TypeVar("T")
CONTROL = "control"
SCHEDULER = "scheduler"
BEAT_S = 1.0
SILENCE_S = 20.0  # MindSpore's own scheduler gives up after half a minute without saying which
_THREADS = {"ActorThread_0", "KernelThread_0", "frontend_queue", "backend_queue", "launch_queue"}


class CompileError(BadInputError):
    """MindSpore refused the graph; the message carries the reason that it printed on standard error."""


class RankDiedError(TelechatMoeError):
    """A process died without a message (exit code 1), or hangs; ``is_echo``: perhaps only because another died."""

    def __init__(self, message: str, *, is_echo: bool = False) -> None:
        super().__init__(message)
        self.is_echo = is_echo


class RankFailedError(TelechatMoeError):
    """A process gave up; message and exit code are its own."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a program that dies with this process; ``options`` are those of :class:`subprocess.Popen`.

    It leads its own session, so that Ctrl-C reaches this process only and :func:`end` ends all that it started.
    """
    options = {"start_new_session": True, "preexec_fn": die_with_parent, **options}
    return subprocess.Popen(command, **options)


def end(process: subprocess.Popen[Any]) -> None:
    """Kill a process that :func:`start` started, with its session, and wait for its end."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def death(code: int) -> str:
    """Name the signal that killed a process, or its exit status."""
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def describe_failure(error: BaseException) -> dict[str, Any]:
    """Return what a process reports as it gives up: ``message``, ``exit_code``, ``known`` and ``time``.

    ``known`` tells an error of this package, whose message is meant for the user, from any other.
    """
    is_ours = isinstance(error, TelechatMoeError)
    return {
        "message": str(error) if is_ours else f"{type(error).__name__}: {error}"[:2000],
        "exit_code": error.exit_code if isinstance(error, TelechatMoeError) else 1,
        "known": is_ours,
        "time": time.time(),
    }


def beat(action: Callable[[], object]) -> None:
    """Call ``action`` every `BEAT_S` seconds from a thread, for as long as this interpreter runs."""

    def repeat() -> None:
        while True:
            action()
            time.sleep(BEAT_S)

    threading.Thread(target=repeat, daemon=True, name="beat").start()


def state(pid: int) -> str | None:
    """Return the state of a process, such as ``sleeping``; None if it ended, whether waited for or not."""
    import psutil

    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return None
    return None if status == psutil.STATUS_ZOMBIE else status


def exit_code(pid: int) -> int:
    """Return how a process ended that nobody has waited for yet, minus the signal that killed it; 0 if not known."""
    try:
        status = int(Path(f"/proc/{pid}/stat").read_text().rsplit(maxsplit=1)[1])
    except (OSError, ValueError):  # waited for, or no Linux
        return 0
    return os.waitstatus_to_exitcode(status)


def processor_seconds(pid: int) -> float:
    """Return the seconds that a process has computed, 0 if it is gone."""
    import psutil

    try:
        return sum(psutil.Process(pid).cpu_times()[:2])
    except psutil.NoSuchProcess:
        return 0.0


@dataclass
class HangDetector:
    """Find processes that give no sign of life and do not compute for ``silence_s`` seconds."""

    silence_s: float
    _last: dict[int, tuple[object, float]] = field(default_factory=dict)

    def hangs(self, pid: int, sign: object) -> bool:
        """Return whether a process hangs; ``sign`` changes whenever it gives a sign of life."""
        sign_now, now = (sign, processor_seconds(pid)), time.monotonic()
        if pid not in self._last or self._last[pid][0] != sign_now:
            self._last[pid] = (sign_now, now)
        return now - self._last[pid][1] > self.silence_s


@contextmanager
def stop_on_signal(
    ask: Callable[[], object] | None, second_term: Any = signal.default_int_handler
) -> Iterator[None]:
    """Turn the first Ctrl-C or SIGTERM into a request to stop, the second into an end.

    In a command's work, the first one ends, too, until :func:`telechat_moe.interruption.can_stop`.

    Args:
        ask: Asks for a stop after the next step; None: the first signal ends at once. In a thread nothing changes.
        second_term: What handles a second SIGTERM; a command's parent takes it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        if ask is None:
            raise KeyboardInterrupt
        try:
            ask()
        except OSError:  # nowhere to ask: the folder is gone, or the disk is full
            raise KeyboardInterrupt from None
        if not is_work():
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, second_term)

    numbers = (REQUEST,) if is_work() else (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        if is_work():
            can_stop(False)
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Control:
    """The folder of small files through which the processes of a run talk.

    ::

        nonce          random text that only this run's processes know
        task.json      what the processes do, where their command does not say it
        rank_N.pid     written when a process starts (scheduler.pid: MindSpore's scheduler)
        rank_N.beat    touched every second while its interpreter runs
        rank_N.at      its position in the run
        rank_N.done    it ended well
        rank_N.failed  it gave up: :func:`describe_failure`; rank_N.bound*: :mod:`telechat_moe.launch.binding`
        node_N.up      a host sees this folder
        stop           the user wants to stop
    """

    folder: Path

    @staticmethod
    def fresh(job: Path, nonce: str | None = None, task: Any = None) -> "Control":
        """Make an empty control folder in a job's folder, replacing an old one, with a new nonce unless one is given.

        ``task`` is what the processes do, JSON values; None: their command says it.
        """
        keep_others_out()
        control = Control(job / CONTROL)
        shutil.rmtree(control.folder, ignore_errors=True)
        job.mkdir(parents=True, exist_ok=True)
        control.folder.mkdir(mode=0o700)
        if task is not None:
            control.write("task.json", json.dumps(task))
        control.write("nonce", nonce or secrets.token_hex(8))
        return control

    def task(self) -> Any:
        """Return what the processes do.

        Raises:
            BadInputError: Somebody else may have written it.
        """
        return json.loads(check_private(self.folder / "task.json").read_text(encoding="utf-8"))

    def check_nonce(self, nonce: str) -> None:
        """Refuse a control folder that is not this run's.

        Raises:
            BadInputError: It is another's, or this machine does not see it.
        """
        actual = self.read("nonce")
        if actual != nonce:
            problem = "is not there" if actual is None else "belongs to another run"
            raise BadInputError(
                f"{self.folder} {problem} on {os.uname().nodename}: output_dir must be one folder that all hosts see"
            )

    def write(self, name: str, text: str = "") -> None:
        """Write a file of the folder so that readers see all of it or nothing."""
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

    def begin(self, name: str) -> None:
        """Register this process, ``rank_N`` or ``scheduler``; it gives signs of life while its interpreter runs."""
        self.write(f"{name}.pid", str(os.getpid()))
        beat((self.folder / f"{name}.beat").touch)

    def set_position(self, rank: int, position: str) -> None:
        """Note where in the run a process is, for the message should it hang there."""
        (self.folder / f"rank_{rank}.at").write_text(position, encoding="utf-8")

    def sign_of_life(self, name: str) -> int:
        """Return a number that changes as long as a process lives; 0 before it has begun."""
        try:
            return (self.folder / f"{name}.beat").stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def barrier(self, name: str, rank: int, ranks: int, patience_s: float = 3600.0) -> None:
        """Wait until all processes are here.

        Through files, because a collective of MindSpore on CPU gives up after a while, and one process may
        be evaluating for long. The parent notices a process that died.

        Raises:
            RankDiedError: A process did not come for ``patience_s`` seconds.
        """
        self.write(f"{name}-{rank}")
        deadline = time.monotonic() + patience_s
        waiting = set(range(ranks)) - {rank}
        while waiting := {r for r in waiting if not (self.folder / f"{name}-{r}").exists()}:
            if time.monotonic() > deadline:
                raise RankDiedError(
                    f"rank {rank} waited {patience_s:.0f} s for rank {min(waiting)}"
                )
            time.sleep(0.003)


def has_computed() -> bool:
    """Return whether MindSpore's threads run in this process (on Linux; otherwise False)."""
    names: set[str] = set()
    for task in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # the thread ended
            names.add(task.read_text().strip())
    return not names.isdisjoint(_THREADS)


def in_clean_process(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function run in a new interpreter where MindSpore has computed in this one.

    The function must be at the top level of a module. Arguments, result and exceptions must be picklable, but for a
    callback ``done`` without arguments, which is called here.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if has_computed():
            return _run_in_subprocess(function, *args, **kwargs)
        return function(*args, **kwargs)

    return run


def _run_in_subprocess(
    function: Callable[..., T], *args: Any, done: Callable[[], object] | None = None, **kwargs: Any
) -> T:
    task = pickle.dumps(
        (function.__module__, function.__qualname__, done is not None, args, kwargs)
    )
    read, write = os.pipe()
    code = f"import sys; sys.path[:] = {sys.path!r}; import {__name__} as it; it.serve({write})"
    command = [sys.executable, "-c", code]
    with (
        os.fdopen(read, "rb") as answers,
        # Not by start(): between fork and exec of a process with MindSpore's threads no Python may run.
        subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=(write,), start_new_session=True
        ) as process,
    ):
        os.close(write)
        try:
            with process.stdin or answers as question:
                question.write(task)
            while True:
                kind, value = pickle.load(answers)
                if kind == "result":
                    return value
                if kind == "error":
                    raise value
                if done is not None:
                    done()
        except (EOFError, BrokenPipeError):
            raise CompileError(
                f"the process of {function.__qualname__} died ({death(process.wait())})"
            ) from None
        finally:
            process.kill()


def serve(pipe: int) -> None:
    """Run in a new interpreter the function that standard input names; answer into a pipe."""
    die_with_parent()
    with os.fdopen(pipe, "wb") as answers:

        def say(kind: str, value: Any = None) -> None:
            pickle.dump((kind, value), answers)
            answers.flush()

        module, name, reports, args, kwargs = pickle.load(sys.stdin.buffer)
        if reports:
            kwargs["done"] = lambda: say("done")
        try:
            say("result", getattr(importlib.import_module(module), name)(*args, **kwargs))
        except KeyboardInterrupt:
            sys.exit(130)
        except TelechatMoeError as error:
            say("error", error)


def in_children(
    works: Sequence[tuple[Callable[[], T], str]],
    at_once: int | None = None,
    done: Callable[[], object] | None = None,
) -> list[T]:
    """Return the results of several functions in order, computed in forked children.

    Their standard error is read for MindSpore's reasons.

    Args:
        works: Each a function whose result can be pickled, and its name, for errors.
        at_once: Children at a time; None = one a core.

    Raises:
        CompileError: An exception in a child, or a child died.
        RuntimeError: MindSpore has computed in this process.
    """
    if has_computed():
        raise RuntimeError("MindSpore has computed in this process: fork its compiler from another")
    os.environ.setdefault("GLOG_v", "3")
    if len(works) > 1:  # once, in the parent; else not here, where it would stay beside the child's
        import mindspore  # noqa: F401

    at_once = at_once or len(os.sched_getaffinity(0))
    waiting = list(enumerate(works))[::-1]
    running: dict[int, tuple[int, str, Path]] = {}
    results: dict[int, T] = {}
    with tempfile.TemporaryDirectory(prefix="telechat-moe-") as root:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    index, (work, name) = waiting.pop()
                    folder = Path(root, str(index))
                    folder.mkdir()
                    child = os.fork()
                    if child == 0:
                        _run_child(work, folder)
                    running[child] = (index, name, folder)
                child, status = os.waitpid(next(iter(running)), 0)
                index, name, folder = running.pop(child)
                results[index] = _result(name, folder, os.waitstatus_to_exitcode(status))
                if done is not None:
                    done()
        finally:
            for child in running:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    return [results[i] for i in range(len(works))]


def _result(name: str, folder: Path, code: int) -> Any:
    errors, result = folder / "stderr", folder / "result"
    text = errors.read_text(errors="replace") if errors.exists() else ""
    because = "".join(f"\n  MindSpore says: {line[:400]}" for line in reasons(text))
    if not result.exists():
        raise CompileError(f"{name}: MindSpore's compiler died ({death(code)}){because}")
    good, value = pickle.loads(result.read_bytes())
    if good:
        return value
    raise CompileError(f"{name}: {value}{because}")


def _run_child(work: Callable[[], Any], folder: Path) -> None:
    """Run in the child; never returns."""
    die_with_parent()
    os.dup2(os.open(folder / "stderr", os.O_CREAT | os.O_WRONLY, 0o600), 2)
    os.chdir(folder)  # MindSpore writes rank_N/ into the working folder
    os.environ["MS_DEV_PRECOMPILE_ONLY"] = "1"  # here only: with it, calls of cells return None
    try:
        answer = (True, work())
    except BaseException as error:
        answer = (False, f"{type(error).__name__}: {_first_lines(str(error))}{_place(error)}")
    partial = folder / "partial"
    partial.write_bytes(pickle.dumps(answer))
    partial.replace(folder / "result")
    os._exit(0)


def _place(error: BaseException) -> str:
    """Say where an error was raised whose text, such as `list index out of range`, was not written for a reader."""
    if not isinstance(error, AttributeError | LookupError | TypeError):
        return ""
    file, number, _, line = traceback.extract_tb(error.__traceback__)[-1]
    if file == "<string>":  # a cell's code, which MindSpore evaluates: it logs the calls to it
        log = Path("stderr").read_text(errors="replace")
        calls = re.findall(r"# \d+ In file (\S+?):(\d+).*\n *(.*)", log)
        file, number, line = calls[-1] if calls else (file, number, line)
    return f" ({file.rpartition('/site-packages/')[2]}:{number}: {line})"


def reasons(text: str) -> list[str]:
    """Return what MindSpore logged as errors, without its prefixes, first ones first, each once.

    The exception says "operator MatMul init failed"; the reason is only in the log.
    """
    messages: dict[str, None] = {}
    for line in text.splitlines():
        if re.match(r"\[(ERROR|CRITICAL)\]", line):
            message = re.sub(r"^\[\w+\].*?\] ", "", line)
            message = re.sub(r"^\[[\w/]+\.(cc|h|py):\d+\] ?", "", message)
            messages[message.split("] ", 1)[-1].strip()] = None
    return list(messages)[:4]


def _first_lines(text: str) -> str:
    """Return the message without MindSpore's sections of stack traces."""
    parts = re.split(r"^-----.*$", text, flags=re.MULTILINE)
    return " ".join(next((part for part in parts if part.strip()), "").split())[:1200]
