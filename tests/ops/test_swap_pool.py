"""The pool of swapped activations: what comes back, how long it takes, no room, and what a killed process leaves."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from telechat_moe.errors import BadInputError
from telechat_moe.graph.swapping import open_pool
from telechat_moe.ops import native
from telechat_moe.ops.native import Kernel, NativeError

TOKEN = np.zeros(1, np.float32)
KILLED = """
import sys, time
import numpy as np
from telechat_moe.graph.swapping import open_pool
from telechat_moe.ops.native import Kernel
open_pool(1 << 20, sys.argv[1])
given, token = {"number": 0, "at": 0}, np.zeros(1, np.float32)
Kernel("SwapOut", given)([np.ones(1 << 18, np.float32)], [token])
print("out", flush=True)
time.sleep(60)
"""


def out(x: np.ndarray, number: int, at: int) -> None:
    Kernel("SwapOut", {"number": number, "at": at})([x], [TOKEN.copy()])


def gone(x: np.ndarray, number: int) -> None:
    Kernel("SwapOutWait", {"number": number, "at": 0})([x, TOKEN], [TOKEN.copy()])


def back(like: np.ndarray, number: int, at: int) -> np.ndarray:
    tensor = np.full_like(like, 7)
    given = {"number": number, "at": at, "extents": list(like.shape)}
    Kernel("SwapBack", given)([TOKEN], [tensor])
    return tensor


def there(tensor: np.ndarray, number: int) -> None:
    Kernel("SwapBackWait", {"number": number, "at": 0})([tensor], [TOKEN.copy()])


@pytest.mark.parametrize("in_folder", [False, True])
def test_what_goes_out_comes_back(tmp_path: Path, in_folder: bool) -> None:
    """Several at once, of every type, and a place that is taken again; a file in a folder has no name."""
    open_pool(1 << 16, str(tmp_path) if in_folder else None)
    rng = np.random.default_rng(0)
    types = (np.float32, np.float16, np.int32, np.int64, np.bool_, np.uint8)
    for turn in range(2):
        sent = [rng.integers(0, 2, (5, 3 + turn)).astype(dtype) for dtype in types]
        for i, x in enumerate(sent):
            out(x, i, 256 * i)
        for i, x in enumerate(sent):
            gone(x, i)
        got = [back(x, i, 256 * i) for i, x in enumerate(sent)]
        for i, x in reversed([*enumerate(got)]):
            there(x, i)
        for x, y in zip(sent, got, strict=True):
            np.testing.assert_array_equal(x, y)
    assert not list(tmp_path.iterdir())


def test_a_slow_link_is_waited_for() -> None:
    """Copies of a direction follow each other; the times are told once."""
    open_pool(1 << 16, None)
    library, x, numbers = native.load(), np.ones(1000, np.float32), np.zeros(100)
    library.telechat_swap_trial(1e-5, 1)
    try:
        out(x, 0, 0)
        out(x, 1, 4096)
        gone(x, 1)
        gone(x, 0)
        there(back(x, 1, 4096), 1)
        count = library.telechat_swap_times(numbers.ctypes.data, len(numbers))
        again = library.telechat_swap_times(numbers.ctypes.data, len(numbers))
    finally:
        library.telechat_swap_trial(0.0, 0)
    rows = numbers[:count].reshape(-1, 6)
    assert again == 0
    assert [(int(tag), int(size)) for tag, size, *_ in rows] == [(2, 4000), (0, 4000), (3, 4000)]
    (_, _, asked, second, begun, on), (_, _, start, first, late, _), back_row = rows
    assert start <= asked
    assert first - start >= 0.04
    assert second - start >= 0.08
    assert begun <= second <= on <= late
    assert back_row[3] - back_row[2] >= 0.04


def test_what_was_not_written_is_not_read() -> None:
    open_pool(64, None)
    tensor = back(np.zeros(10, np.float32), 3, 1 << 20)
    with pytest.raises(NativeError, match=r"40 bytes that are swapped cannot be read .*: it ends"):
        there(tensor, 3)


def test_a_disk_that_fills_up_is_named(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        with pytest.raises(BadInputError, match=r"no room for 128.00 KiB .*No space left"):
            open_pool(1 << 17, str(tmp_path))
        open_pool(1 << 15, str(tmp_path))
        x = np.zeros(1 << 16, np.float32)
        out(x, 0, 0)  # more than was asked for
        with pytest.raises(NativeError, match=r"cannot be written .*: No space left on device"):
            gone(x, 0)
        open_pool(64, None)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"pool_folder .*missing: No such file"):
        open_pool(64, str(tmp_path / "missing"))


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    before = os.statvfs(tmp_path).f_bfree
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "out\n"
        assert not list(tmp_path.iterdir())
        files = [os.readlink(f) for f in Path(f"/proc/{process.pid}/fd").iterdir()]  # noqa: PTH115
        assert any(str(tmp_path) in name and "deleted" in name for name in files)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())
    assert before - os.statvfs(tmp_path).f_bfree < 1 << 20
