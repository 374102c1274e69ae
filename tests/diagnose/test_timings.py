"""What a rank writes of its steps: the parts add up, pauses and collections are measured, damage loses nothing else."""

import gc
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from telechat_moe import timings
from telechat_moe.errors import BadInputError, TelechatMoeError
from telechat_moe.timings import StepTimer

ABOUT = {"rank": 0, "ranks": 1, "stage": 0}
CHILD = """
import sys, time
from pathlib import Path
from telechat_moe.timings import StepTimer
with StepTimer(Path(sys.argv[1]), {"rank": 0, "ranks": 1, "stage": 0}) as timer:
    print("ready", flush=True)
    sys.stdin.readline()
    timer.lap("graph")
    timer.finish(1, None)
"""


def column(path: Path, name: str) -> np.ndarray:
    header, rows = timings.read(path)
    return rows[:, header["columns"].index(name)]


def test_the_parts_of_a_step_add_up_to_its_time(tmp_path: Path):
    path = tmp_path / "rank_0.bin"
    outer = time.perf_counter()
    with StepTimer(path, ABOUT) as timer:
        inner = time.perf_counter()
        for step in (1, 2, 3):
            for part in timings.PARTS:
                time.sleep(0.002)
                timer.lap(part)
            least = time.perf_counter() - inner
            timer.finish(step, 7.0)
        most = time.perf_counter() - outer
    parts = np.sum([column(path, name) for name in timings.PARTS], 0)
    assert least * (1 - 1e-6) <= parts.sum() <= most
    assert all(column(path, name).min() >= 0.002 for name in timings.PARTS)
    assert column(path, "step").tolist() == [1, 2, 3]
    assert column(path, "first").tolist() == [1, 0, 0]
    assert column(path, "rows").tolist() == [7, 7, 7]


def test_only_a_step_that_collects_garbage_has_time_for_it(tmp_path: Path):
    path = tmp_path / "rank_0.bin"
    gc.disable()
    try:
        with StepTimer(path, ABOUT) as timer:
            timer.finish(1, None)
            gc.collect()
            timer.finish(2, None)
            timer.finish(3, None)
        callbacks = list(gc.callbacks)
    finally:
        gc.enable()
    seconds = column(path, "gc")
    assert seconds[1] > 0
    assert seconds[[0, 2]].tolist() == [0, 0]
    assert not [c for c in callbacks if getattr(c, "__self__", None) is timer]


def test_cpu_time_is_that_of_the_graph(tmp_path: Path):
    path = tmp_path / "rank_0.bin"
    with StepTimer(path, ABOUT) as timer:
        for step, part in ((1, "graph"), (2, "host")):
            began = time.process_time()
            while time.process_time() - began < 0.05:
                pass
            timer.lap(part)
            timer.finish(step, None)
    busy = column(path, "cpu")
    assert busy[0] >= 0.05
    assert busy[1] < 0.02


def test_a_stopped_process_is_noticed(tmp_path: Path):
    path = tmp_path / "rank_0.bin"
    command = [sys.executable, "-c", CHILD, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.3)  # the thread has begun to sleep
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(child.pid, signal.SIGCONT)
        time.sleep(0.3)
        child.stdin.write("\n")
        child.stdin.close()
        assert child.wait() == 0
    (paused,), (graph,) = column(path, "paused"), column(path, "graph")
    assert 0.8 < paused <= graph
    assert column(path, "delay")[0] < 0.5 * paused


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel counts no waits")
@pytest.mark.parametrize(("others", "most"), [(0.0, 0.0), (0.05, 0.05), (100.0, 2.0)])
def test_threads_of_one_process_delay_each_other_only_with_others_on_the_core(
    monkeypatch: pytest.MonkeyPatch, others: float, most: float
):
    """Four threads of this process on one core: each waits for three quarters of the time."""
    seconds = iter([0.0, 0.0, others])
    monkeypatch.setattr(timings.CoreWaits, "_of_others", lambda _: next(seconds))
    ends, data = threading.Event(), bytes(1 << 20)

    def work() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        while not ends.is_set():
            hashlib.sha256(data).digest()  # without the interpreter's lock

    threads = [threading.Thread(target=work) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        waits = timings.CoreWaits()
        waits.longest()
        time.sleep(1.0)
        delay = waits.longest()
    finally:
        ends.set()
        for thread in threads:
            thread.join()
    waits.close()
    assert min(most, 0.3) <= delay <= most


def test_links_have_columns_of_their_own(tmp_path: Path):
    path, told = tmp_path / "rank_0.bin", iter([[(1.0, 2.0), (3.0, 4.0)], [(5.0, 6.0), (7.0, 8.0)]])
    with StepTimer(path, ABOUT, 0, timings.Links([2, 7], lambda: next(told))) as timer:
        timer.finish(1, None)
        timer.finish(2, None)
    columns = {
        f"{kind}.{peer}": column(path, f"{kind}.{peer}").tolist()
        for kind in timings.LINKS
        for peer in (2, 7)
    }
    assert columns == {
        "pipeline.2": [1, 5],
        "exchange.2": [2, 6],
        "pipeline.7": [3, 7],
        "exchange.7": [4, 8],
    }
    with StepTimer(path, ABOUT, 1, timings.Links([2], lambda: [(0.0, 0.0)])):
        pass  # other links: what was there had other columns
    assert column(path, "step").tolist() == []


def test_a_resumed_run_goes_on_after_its_checkpoint(tmp_path: Path):
    path = tmp_path / "rank_0.bin"
    for step, done in ((0, (1, 2, 3, 4)), (2, (3, 4))):
        with StepTimer(path, ABOUT, step) as timer:
            for number in done:
                timer.finish(number, None)
    assert column(path, "step").tolist() == [1, 2, 3, 4]
    assert column(path, "first").tolist() == [1, 0, 1, 0]


def test_a_torn_last_row_is_left_out_and_cut_on_resume(tmp_path: Path):
    path = tmp_path / "rank_0.bin"
    with StepTimer(path, ABOUT) as timer:
        for step in (1, 2):
            timer.finish(step, None)
    path.write_bytes(path.read_bytes()[:-5])
    assert column(path, "step").tolist() == [1]
    with StepTimer(path, ABOUT, 1) as timer:
        timer.finish(2, None)
    assert column(path, "step").tolist() == [1, 2]


def test_no_file_measures_nothing():
    timer = StepTimer()
    timer.lap("data")
    timer.finish(1, None)
    timer.close()


def test_a_full_disk_is_said(tmp_path: Path):
    path = tmp_path / "rank_0.bin"
    path.symlink_to("/dev/full")
    with pytest.raises(
        TelechatMoeError, match=r"cannot write the timings .*rank_0.bin: No space left"
    ):
        StepTimer(path, ABOUT)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "begins with no line of JSON"),
        (b"not json\n", "begins with no line of JSON"),
        (b"[1]\n", "begins with no line of JSON"),
        (b"\xff\xfe\n", "begins with no line of JSON"),
        (json.dumps({**ABOUT, "version": 9, "columns": ["step"]}).encode() + b"\n", "timings of version 9"),
        (json.dumps({**ABOUT, "version": 1, "columns": ["data"]}).encode() + b"\n", "expected version 1 with a column step"),
        (json.dumps({**ABOUT, "version": 1, "columns": ["step"]}).encode(), "timings of version 1"),
        (json.dumps({**ABOUT, "version": 1, "columns": 3}).encode() + b"\n", "begins with no line of JSON"),
    ],
)  # fmt: skip
def test_what_is_no_file_of_timings_is_said(tmp_path: Path, content: bytes, said: str):
    path = tmp_path / "rank_0.bin"
    path.write_bytes(content)
    with pytest.raises(BadInputError, match=said):
        timings.read(path)
