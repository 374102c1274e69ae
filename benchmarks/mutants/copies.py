"""A copy of the working tree in which sources may be changed, and its tests."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from benchmarks.mutants.operators import Mutant

ROOT = Path(__file__).parents[2]
MAPPED = ("ops", "tools", "recipes")
"""Folders at the root that an install puts into the package."""


class Outcome(NamedTuple):
    """What the tests said of a mutant: ``killed``, ``survived``, ``hung`` or ``no tests``, and which test failed."""

    verdict: str
    seconds: float = 0.0
    by: str = ""


class Copy:
    """A folder with the tracked files of the working tree and its native libraries, which Python imports first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        native = [str(p.relative_to(ROOT)) for f in MAPPED for p in (ROOT / f).rglob("*.so")]
        for name in [*listed.stdout.split("\0")[:-1], *native]:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).exists():
                shutil.copy2(ROOT / name, target, follow_symlinks=False)
        for name in MAPPED:
            (folder / "telechat_moe" / name).symlink_to(Path("..") / name)

    def pytest(
        self, words: Sequence[str], timeout: float, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run tests of the copy, as processes of their own group, so that none is left behind.

        Raises:
            subprocess.TimeoutExpired: After ``timeout`` seconds.
        """
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
        env = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**env, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(timeout=timeout)
        finally:
            _end(process)
        return subprocess.CompletedProcess(command, process.returncode, out)

    def judge(self, mutant: Mutant, tests: Sequence[str], timeout: float) -> Outcome:
        """Run tests, the first failure ends them, with a mistake that is gone afterwards."""
        if not tests:
            return Outcome("no tests")
        path, began = self.folder / mutant.file, time.perf_counter()
        source = path.read_text(encoding="utf-8")
        chosen = self.folder / "chosen_tests"
        chosen.write_text("\n".join(tests), encoding="utf-8")
        path.write_text(mutant.apply(source), encoding="utf-8")
        try:
            done = self.pytest(["-x", f"@{chosen}"], timeout)
        except subprocess.TimeoutExpired:
            return Outcome("hung", time.perf_counter() - began)
        finally:
            path.write_text(source, encoding="utf-8")
        seconds = time.perf_counter() - began
        if done.returncode == 0:
            return Outcome("survived", seconds)
        lines = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
        return Outcome("killed", seconds, lines[0].split(" - ")[0] if lines else "at the start")


def _end(process: "subprocess.Popen[str]") -> None:
    """End the processes that a run of tests leaves behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
