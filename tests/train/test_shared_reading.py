"""Processes of one host share one reader: equal batches in every layout, and what is left when one of them is killed."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import mini_recipe as mini
import pytest
from mini_recipe import DP2, TP2_PP2

from telechat_moe.processes import Control

PROGRAM = str(Path(__file__).with_name("reading_rank.py"))
PATIENCE_S = 120.0  # only reached where something is broken
CONFIG = "train_dataset__data_loader__config__"
DOCUMENTS = {
    "train_dataset__input_columns": "null",
    "train_dataset__construct_args_key": "null",
    f"{CONFIG}create_attention_mask": True,
    f"{CONFIG}reset_attention_mask": True,
    f"{CONFIG}reset_position_ids": True,
}
DEALT = {
    **DP2,
    **DOCUMENTS,
    "runner_config__gradient_accumulation_steps": 2,
    "callbacks__1__gradient_accumulation_steps": 2,
    "telechat_moe__balance_attention": True,
}
PACKED = {**DP2, **DOCUMENTS, "telechat_moe__packing": "{window: 4}"}
MIXED = {
    **DP2,
    f"{CONFIG}data_path": "['DATA/train', 'DATA/valid']",
    "telechat_moe__mixture": "[{from_sample: 0, weights: [1, 1]}, {from_sample: 9, weights: [0, 1]}]",
}
LAYOUTS = {
    "tp2 pp2": (TP2_PP2, 4),
    "dp2, dealt": (DEALT, 2),
    "dp2, packed": (PACKED, 2),
    "dp2, mixed": (MIXED, 2),
}
SCRIPT = [["take", 6], ["seek", 1], ["take", 4]]


class Ended(NamedTuple):
    """How a process ended, and what it said."""

    code: int
    said: list[dict[str, Any]]
    error: str


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder of a job, with data beside it."""
    mini.write_data(tmp_path)
    Control.fresh(tmp_path / "job")
    return tmp_path / "job"


def processes(
    job: Path, changes: dict[str, Any], *scripts: Any, prefix: list[str] | None = None
) -> list[Ended]:
    """Run one process for each script of operations."""
    data, count = job.parent, str(len(scripts))
    given = {k: v.replace("DATA", str(data)) if isinstance(v, str) else v for k, v in changes.items()}  # fmt: skip
    arguments = mini.arguments(data, data / "run", **given)
    words = [sys.executable, PROGRAM, str(job)]
    started = [
        subprocess.Popen(
            [*(prefix or ()), *words, str(rank), count, arguments[1], json.dumps(script), *arguments[4::2]],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, script in enumerate(scripts)
    ]  # fmt: skip
    ended = list[Ended]()
    try:
        for process in started:
            out, error = process.communicate(timeout=PATIENCE_S)
            ended.append(Ended(process.returncode, [*map(json.loads, out.splitlines())], error))
    finally:
        for process in started:
            process.kill()
    return ended


def batches(ended: Ended) -> list[dict[str, Any]]:
    return [line for line in ended.said if "columns" in line]


def left() -> set[str]:
    """Return what processes may leave: names in shared memory, and sockets of this package."""
    sockets = Path("/proc/net/unix").read_text().splitlines()
    named = {path.name for path in Path("/dev/shm").iterdir()}
    return named | {line.split()[-1] for line in sockets if "@telechat-moe" in line}


@pytest.mark.parametrize(
    "layout",
    [
        "tp2 pp2",
        "dp2, dealt",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("dp2, packed", "dp2, mixed")),
    ],
)
def test_equal_batches(job: Path, layout: str) -> None:
    """Each rank sees what it would read itself, also where all go back; only the first one opens the data."""
    changes, count = LAYOUTS[layout]
    before = left()
    (alone,) = processes(job, changes, SCRIPT)
    assert alone.code == 0, alone.error
    assert len(batches(alone)) == 10
    found = processes(job, changes, *[SCRIPT] * count)
    for rank, ended in enumerate(found):
        assert ended.code == 0, ended.error
        assert batches(ended) == batches(alone)
        files = ended.said[-1]["maps"]
        assert bool(files) == (rank == 0), files
    assert left() <= before


def test_a_reader_that_is_killed(job: Path) -> None:
    """The others say so when they have taken what there was, and a new start finds nothing in its way."""
    before = left()
    killed, *others = processes(job, TP2_PP2, [["take", 3], ["die"]], *[[["take", 40]]] * 3)
    assert killed.code == -signal.SIGKILL
    for other in others:
        assert other.code == 1
        assert "error: the process that reads the training data for this one ended" in other.error
        assert "Traceback" not in other.error
        assert len(batches(other)) >= 3
        assert batches(other)[:3] == batches(killed)
    assert left() <= before
    shutil.rmtree(job)
    Control.fresh(job)
    again = processes(job, TP2_PP2, *[[["take", 3]]] * 4)
    assert [batches(ended) for ended in again] == [batches(killed)] * 4


def test_a_follower_that_is_killed(job: Path) -> None:
    """The others get all batches; whoever started the processes ends them."""
    reader, killed, *others = processes(
        job, TP2_PP2, [["take", 20]], [["take", 2], ["die"]], *[[["take", 20]]] * 2
    )
    assert killed.code == -signal.SIGKILL
    for ended in (reader, *others):
        assert ended.code == 0, ended.error
        assert batches(ended) == batches(reader)
        assert len(batches(ended)) == 20
    assert batches(killed) == batches(reader)[:2]


def test_no_memory_for_the_ring(job: Path) -> None:
    reader, other = processes(job, PACKED, [["limit", 4096], ["take", 1]], [["take", 1]])
    assert (reader.code, other.code) == (1, 1)
    assert "error: no memory for 3 batches of 2.00 KiB that the processes of a host share" in reader.error  # fmt: skip
    assert "the process that reads the training data for this one ended" in other.error


def test_a_small_dev_shm_does_not_matter(job: Path) -> None:
    """As in a container: the memory has no name there."""
    mount = (
        "mount -t tmpfs -o size=4k none /dev/shm && head -c 4096 /dev/zero > /dev/shm/full && exec"
    )
    prefix = ["unshare", "--map-root-user", "--mount", "sh", "-c", f'{mount} "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], capture_output=True).returncode:  # fmt: skip
        pytest.skip("this machine does not let us mount")
    found = processes(job, DP2, [["take", 3]], [["take", 3]], prefix=prefix)
    for ended in found:
        assert ended.code == 0, ended.error
        assert batches(ended) == batches(found[0])
