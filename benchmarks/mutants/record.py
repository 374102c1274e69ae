"""A plugin of pytest that writes which functions each test calls, and how long it takes: ``-p benchmarks.mutants.record``.

Threads that a test starts count; processes that it starts do not. ``MUTANTS_RECORD`` names the file: a JSON object a
line, ``test``, ``seconds`` and ``functions``, each a path below the folder of pytest and the function's first line.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

ROOT = str(Path.cwd().resolve()) + os.sep


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Record a test with the fixtures that it is the first to need."""
    codes: set[CodeType] = set()

    def called(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    began = time.perf_counter()
    threading.setprofile(called)
    sys.setprofile(called)
    try:
        return (yield)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]
        seconds = time.perf_counter() - began
        paths = {
            code: os.path.realpath(code.co_filename)
            for code in list(codes)
            if code.co_filename.startswith("/")
        }  # threads go on
        functions = sorted(
            {
                (path[len(ROOT) :], code.co_firstlineno)
                for code, path in paths.items()
                if path.startswith(ROOT)
            }
        )
        row = {"test": item.nodeid, "seconds": seconds, "functions": functions}
        with Path(os.environ["MUTANTS_RECORD"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
