"""Saving that is killed, stopped, interrupted or out of disk: what was saved before stays good."""

import errno
import inspect
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saved import Groups, assert_made, make, names_in

from telechat_moe import files
from telechat_moe.checkpoint import checkpoint, folder
from telechat_moe.checkpoint.checkpoint import CheckpointError
from telechat_moe.errors import TelechatMoeError
from telechat_moe.tensor_files import TensorFile


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A root with the checkpoints of steps 1 and 2."""
    for step in (1, 2):
        checkpoint.save(tmp_path, step, make(step), {"step": step})
    return tmp_path


# --------------------------------------------------------------------------------------- kills

CHILD = """
import sys
from telechat_moe.checkpoint import checkpoint
root, step, stride = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
print(step, flush=True)
while True:
    step += stride
    tensors = make(step, 30)
    checkpoint.save(root, step, tensors, {"step": step}, keep_last=2, shard_bytes=1)
    print(step, flush=True)
"""


def start_child(root: Path, step: int, stride: int) -> "subprocess.Popen[bytes]":
    code = (
        "from typing import Any\nimport numpy as np\n" + inspect.getsource(make) + CHILD
    )  # imports little, starts fast
    arguments = [sys.executable, "-c", code, str(root), str(step), str(stride)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE)


@pytest.mark.parametrize(("stride", "kills"), [(1, 20), (0, 8)], ids=["new steps", "same step"])
def test_kill_at_random_moments(tmp_path: Path, stride: int, kills: int) -> None:
    """kill -9 of a process that saves 30 files all the time; ``stride`` 0 replaces one step."""
    rng = random.Random(stride)
    step, leftovers = 7, 0
    checkpoint.save(tmp_path, step, make(step, 30), {"step": step})
    for _ in range(kills):
        child = start_child(tmp_path, step, stride)
        assert child.stdout is not None
        reported = [int(child.stdout.readline())]
        time.sleep(rng.uniform(0, 0.2))
        os.kill(child.pid, signal.SIGKILL)
        reported += [int(line) for line in child.stdout.read().split()]
        child.wait()
        child.stdout.close()
        leftovers += any(name.startswith(".") for name in names_in(tmp_path))
        warnings: list[str] = []
        step = assert_made(checkpoint.latest(tmp_path, warn=warnings.append), 30)
        assert not warnings
        assert step in (reported[-1], reported[-1] + stride)  # a finished save is never lost
    assert leftovers, "no kill hit a save"
    checkpoint.save(tmp_path, step + 1, make(step + 1), {"step": step + 1}, keep_last=1)
    assert names_in(tmp_path) == [f"step-{step + 1:08d}"]


def fork_and_kill(save: Callable[[], object], at: int) -> bool:
    """Run ``save`` in a forked process that kills itself at its ``at``-th file operation.

    Returns whether it came to its end before.
    """
    pid = os.fork()
    if pid == 0:
        seen = 0

        def hook(event: str, _: object) -> None:
            nonlocal seen
            if event in ("open", "fcntl.flock") or event.startswith(("os.", "shutil.")):
                seen += 1
                if seen == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        save()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFEXITED(status) or os.WTERMSIG(status) == signal.SIGKILL
    return os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0


@pytest.mark.parametrize("copied", [None, lambda: None], ids=["at once", "copied first"])
@pytest.mark.parametrize("step", [2, 3], ids=["replacing a step", "new step"])
def test_kill_at_every_file_operation(
    tmp_path: Path, step: int, copied: Callable[[], None] | None
) -> None:
    template = tmp_path / "template"
    for old in (1, 2):
        checkpoint.save(template, old, make(old, 3), {"step": old})
    (template / ".saving-step-00000002-99999-0").mkdir()
    (template / ".removing-step-00000000").mkdir()
    for at in range(1, 1000):
        root = tmp_path / "root"
        shutil.copytree(template, root)
        finished = fork_and_kill(
            lambda root=root: checkpoint.save(
                root, step, make(step, 3), {"step": step}, keep_last=2, copied=copied
            ),
            at,
        )
        warnings: list[str] = []
        assert assert_made(checkpoint.latest(root, warn=warnings.append), 3) in (2, step)
        assert not warnings
        checkpoint.save(root, 4, make(4, 3), {"step": 4}, keep_last=10)
        assert not [name for name in names_in(root) if name.startswith(".")]
        left = {assert_made(checkpoint.load(p), 3) for p in checkpoint.list_checkpoints(root)}
        assert left >= ({1, 2, 4} if step == 2 else {2, 4})
        shutil.rmtree(root)
        if finished:
            break
    assert finished
    assert at > 15


def test_the_save_of_a_live_process_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = start_child(tmp_path, 0, 1)
    assert child.stdout is not None
    try:
        child.stdout.readline()
        child.stdout.readline()
        while True:  # stop it in the middle of a save
            os.kill(child.pid, signal.SIGSTOP)
            os.waitpid(child.pid, os.WUNTRACED)
            hidden = list(tmp_path.glob(".saving-*"))
            if hidden and list(hidden[0].iterdir()):
                break
            os.kill(child.pid, signal.SIGCONT)
        before = names_in(hidden[0])
        monkeypatch.setattr(folder, "_LOCK_PATIENCE_S", 0.2)
        with pytest.raises(CheckpointError, match="another process"):
            checkpoint.save(tmp_path, 10**6, make(1), {"step": 1}, keep_last=1)
        assert names_in(hidden[0]) == before
        stopped = int(hidden[0].name.split("-")[2])
        os.kill(child.pid, signal.SIGCONT)
        while int(child.stdout.readline()) != stopped:  # it comes to its end
            pass
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert_made(checkpoint.latest(tmp_path), 30)


# ------------------------------------------------------------------------------- full disk and others

Mount = Callable[[str], Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mount a small file system; skipped where that is not allowed."""
    mounted: list[Path] = []

    def mount_one(options: str) -> Path:
        folder = tmp_path / "small"
        folder.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if shutil.which("mount") is None or os.geteuid() != 0:
            pytest.skip("mounting a small file system needs root")
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            pytest.skip(f"cannot mount a small file system: {result.stderr.strip()}")
        if "remount" not in options:
            mounted.append(folder)
        return folder

    yield mount_one
    for place in mounted:
        subprocess.run(["umount", "-l", str(place)], check=True)


def big(step: int, nbytes: int) -> Groups:
    return {"model": {f"w{i}": np.full(nbytes // 8 // 4, step, np.float32) for i in range(8)}}


def assert_refused(root: Path, save: Callable[[], object]) -> str:
    """Check that a save fails cleanly and that the checkpoint of step 1 is intact; returns why."""
    before = names_in(root)
    with pytest.raises(CheckpointError) as caught:
        save()
    assert isinstance(caught.value, TelechatMoeError)
    assert names_in(root) == before
    message = str(caught.value)
    assert f"into {root}" in message
    assert f"The last good checkpoint, {root}/step-00000001, is intact" in message
    found = checkpoint.latest(root)
    assert found is not None
    assert found.step == 1
    return message


def test_full_disk_is_seen_before_writing(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    root = mount("size=2m") / "root"
    checkpoint.save(root, 1, big(1, 1_000_000), {})
    monkeypatch.setattr(TensorFile, "write", None)  # must not be called
    message = assert_refused(root, lambda: checkpoint.save(root, 2, big(2, 1_500_000), {}))
    assert "No space left on device" in message
    free = shutil.disk_usage(root).free
    assert f"({free:,} bytes) free" in message
    needed = int(message.split(" bytes) needed")[0].split("(")[-1].replace(",", ""))
    assert 1_500_000 < needed < 1_520_000


@pytest.mark.parametrize("shard_bytes", [1, 1 << 30], ids=["many files", "one file"])
def test_disk_that_fills_while_writing(
    mount: Mount, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    """The check beforehand is made to see a free disk, as if others filled it after; writes fail."""
    root = mount("size=2m") / "root"
    checkpoint.save(root, 1, big(1, 1_000_000), {})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9**12, 0, 9**12))
    message = assert_refused(
        root, lambda: checkpoint.save(root, 2, big(2, 1_500_000), {}, shard_bytes=shard_bytes)
    )
    assert "No space left on device" in message


def test_disk_without_room_for_more_files(mount: Mount) -> None:
    root = mount("size=8m,nr_inodes=12") / "root"
    checkpoint.save(root, 1, big(1, 1000), {})
    message = assert_refused(
        root, lambda: checkpoint.save(root, 2, big(2, 8000), {}, shard_bytes=1)
    )
    assert "a limit on files" in message


def test_read_only_disk(mount: Mount) -> None:
    root = mount("size=2m") / "root"
    checkpoint.save(root, 1, big(1, 1000), {})
    mount("remount,ro")
    message = assert_refused(root, lambda: checkpoint.save(root, 2, big(2, 1000), {}))
    assert "Read-only file system" in message


def test_file_size_limit(tmp_path: Path) -> None:
    """A failing write that needs no privileges."""
    checkpoint.save(tmp_path, 1, big(1, 1000), {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        message = assert_refused(
            tmp_path, lambda: checkpoint.save(tmp_path, 2, big(2, 1_000_000), {})
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.strerror(errno.EFBIG) in message


def test_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "root"):
        with pytest.raises(CheckpointError, match="set output_dir to a folder"):
            checkpoint.save(root, 1, make(1), {})


def test_interrupt_removes_the_unfinished_folder(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(content: dict[str, Any]) -> bytes:
        if content["files"]["model-00001-of-00001.safetensors"]["sha256"] != "0" * 64:
            raise KeyboardInterrupt
        return b""

    monkeypatch.setattr(files, "seal", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(two, 3, make(3), {"step": 3})
    assert names_in(two) == ["step-00000001", "step-00000002"]
