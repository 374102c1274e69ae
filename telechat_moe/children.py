"""MindSpore's compiler in processes of its own.

It is forked (:func:`in_children`), which MindSpore's threads do not survive; they start with the first computation.
A process that has computed compiles in a new interpreter (:func:`in_clean_process`).
"""

import ctypes
import functools
import importlib
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from telechat_moe.errors import BadInputError, TelechatMoeError

P = ParamSpec("P")
T = TypeVar("T")
_SIGNAL_OF_PARENT = 1  # PR_SET_PDEATHSIG
_LIBC = ctypes.CDLL(None, use_errno=True)
_THREADS = {"ActorThread_0", "KernelThread_0", "backend_queue", "launch_queue"}


class CompileError(BadInputError):
    """MindSpore refused the graph; the message carries the reason that it printed on standard error."""


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        _LIBC.prctl(_SIGNAL_OF_PARENT, signal.SIGKILL)


def has_computed() -> bool:
    """Return whether MindSpore's threads run in this process (Linux; elsewhere False)."""
    names: set[str] = set()
    for task in Path("/proc/self/task").glob("*/comm"):
        try:
            names.add(task.read_text().strip())
        except OSError:  # the thread ended
            continue
    return not names.isdisjoint(_THREADS)


def in_clean_process(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function run in a new interpreter where MindSpore has computed in this one.

    The function must stand at the top of a module. Arguments, result and exceptions must be picklable, but for a
    callback ``done`` without arguments, which is called here.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return (
            _elsewhere(function, *args, **kwargs) if has_computed() else function(*args, **kwargs)
        )

    return run


def _elsewhere(
    function: Callable[..., T], *args: Any, done: Callable[[], object] | None = None, **kwargs: Any
) -> T:
    """Return what a function returns in a new interpreter."""
    task = pickle.dumps(
        (function.__module__, function.__qualname__, done is not None, args, kwargs)
    )
    read, write = os.pipe()
    start = f"import sys; sys.path[:] = {sys.path!r}; import {__name__} as it; it.serve({write})"
    with (
        os.fdopen(read, "rb") as answers,
        subprocess.Popen(
            [sys.executable, "-c", start], stdin=subprocess.PIPE, pass_fds=(write,)
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
                f"the process of {function.__qualname__} died ({_death(process.wait())})"
            ) from None
        finally:
            process.kill()


def serve(pipe: int) -> None:
    """Do in a new interpreter what stands on standard input; answer into a pipe."""
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
    """Return the results of several works in order, computed in forked children.

    Their standard error is read for MindSpore's reasons.

    Args:
        works: Each returns something that can be pickled; and its name, for errors.
        at_once: Children at a time; None = one a core.
        done: Called after each.

    Raises:
        CompileError: An exception in a child, or a child died.
        RuntimeError: MindSpore has computed in this process.
    """
    if has_computed():
        raise RuntimeError("MindSpore has computed in this process: fork its compiler from another")
    os.environ.setdefault("GLOG_v", "3")
    import mindspore  # noqa: F401  (once, in the parent)

    at_once = at_once or len(os.sched_getaffinity(0))
    waiting = list(enumerate(works))[::-1]
    running: dict[int, tuple[int, str, Path]] = {}
    results: dict[int, T] = {}
    with tempfile.TemporaryDirectory(prefix="telechat-moe-") as folder:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    index, (work, what) = waiting.pop()
                    place = Path(folder, str(index))
                    place.mkdir()
                    child = os.fork()
                    if child == 0:
                        _run_child(work, place)
                    running[child] = (index, what, place)
                child, status = os.waitpid(next(iter(running)), 0)
                index, what, place = running.pop(child)
                results[index] = _result(what, place, os.waitstatus_to_exitcode(status))
                if done is not None:
                    done()
        finally:
            for child in running:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    return [results[i] for i in range(len(works))]


def _result(what: str, place: Path, code: int) -> Any:
    """Return what a child computed."""
    said = place / "stderr"
    text = said.read_text(errors="replace") if said.exists() else ""
    if not (place / "result").exists():
        raise CompileError(
            f"{what}: MindSpore's compiler died ({_death(code)}){_because(reasons(text))}"
        )
    good, value = pickle.loads((place / "result").read_bytes())
    if good:
        return value
    raise CompileError(f"{what}: {value}{_because(reasons(text))}")


def _run_child(work: Callable[[], Any], place: Path) -> None:
    """Run in the child; never returns."""
    die_with_parent()
    os.dup2(os.open(place / "stderr", os.O_CREAT | os.O_WRONLY, 0o600), 2)
    os.chdir(place)  # MindSpore writes rank_N/ where it stands
    os.environ["MS_DEV_PRECOMPILE_ONLY"] = "1"  # here only: with it, calls of cells return None
    try:
        answer = (True, work())
    except BaseException as error:
        answer = (False, f"{type(error).__name__}: {_first_lines(str(error))}")
    partial = place / "partial"
    partial.write_bytes(pickle.dumps(answer))
    partial.replace(place / "result")
    os._exit(0)


def reasons(text: str) -> list[str]:
    """Return what MindSpore logged as errors, without its prefixes, first ones first, each once.

    The exception says "operator MatMul init failed"; why stands only here.
    """
    found: dict[str, None] = {}
    for line in text.splitlines():
        if re.match(r"\[(ERROR|CRITICAL)\]", line):
            message = re.sub(r"^\[\w+\].*?\] ", "", line)
            message = re.sub(r"^\[[\w/]+\.(cc|h|py):\d+\] ?", "", message)
            found[message.split("] ", 1)[-1].strip()] = None
    return list(found)[:4]


def _because(found: list[str]) -> str:
    return "".join(f"\n  MindSpore says: {line[:400]}" for line in found)


def _first_lines(text: str) -> str:
    """Return the message without MindSpore's sections of stack traces."""
    kept: list[str] = []
    for line in text.splitlines():
        if line.startswith("-----") and kept:
            break
        if line.strip() and not line.startswith("-----"):
            kept.append(line.strip())
    return " ".join(kept)[:1200]


def _death(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"
