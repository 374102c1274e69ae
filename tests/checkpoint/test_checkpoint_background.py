"""Saving while training goes on: what is saved is of one step, failures are told, the last save is complete."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import mini_recipe as mini
import numpy as np
import pytest
from running import PATIENCE_S, steps_in, until
from saved import Groups, assert_equal
from test_checkpoint_crashes import mount  # noqa: F401

from telechat_moe.checkpoint import checkpoint, folder
from telechat_moe.checkpoint.background import Saver
from telechat_moe.checkpoint.checkpoint import Copied
from telechat_moe.checkpoint.folder import CheckpointError
from telechat_moe.checkpoint.snapshot import Snapshot, Views
from telechat_moe.cli import main
from telechat_moe.train import metrics


class Source:
    """A parameter that is trained in place."""

    def __init__(self, value: np.ndarray, *, on_device: bool = False) -> None:
        self.value, self.on_device = value, on_device

    def asnumpy(self) -> np.ndarray:
        return self.value.copy() if self.on_device else self.value

    def data_ptr(self) -> int:
        return 1 if self.on_device else self.value.ctypes.data


def sources(step: float) -> dict[str, dict[str, Source]]:
    return {
        "model": {
            "a": Source(np.full((3, 5), step, np.float32)),
            "device": Source(np.full(7, step, np.float16), on_device=True),
            "scalar": Source(np.array(step)),
        },
        "optimizer": {"a": Source(np.full((4, 1), -step, np.float32))},
    }


def train(found: dict[str, dict[str, Source]], step: float) -> None:
    for group, parameters in found.items():
        for parameter in parameters.values():
            parameter.value[...] = -step if group == "optimizer" else step


def values(found: dict[str, dict[str, Source]]) -> Groups:
    return {g: {n: p.value.copy() for n, p in names.items()} for g, names in found.items()}


@pytest.mark.parametrize("several_threads", [False, True])
def test_a_snapshot_is_of_one_step_and_its_memory_is_used_again(
    several_threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if several_threads:
        monkeypatch.setattr("telechat_moe.checkpoint.snapshot._SEVERAL_THREADS", 0)
    parameters = sources(1)
    snapshot = Snapshot(Views(parameters))
    places = set()
    for step in (2, 3):
        train(parameters, step)
        expected = values(parameters)
        taken = snapshot.take()
        train(parameters, 99)
        assert_equal(taken, expected)
        places.add(tuple(x.ctypes.data for g in taken.values() for x in g.values()))
    assert len(places) == 1


@pytest.mark.parametrize("several_threads", [False, True])
def test_a_parameter_that_was_given_other_memory_is_found(
    several_threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if several_threads:
        monkeypatch.setattr("telechat_moe.checkpoint.snapshot._SEVERAL_THREADS", 0)
    parameters = sources(1)
    snapshot = Snapshot(Views(parameters))
    parameters["model"]["a"].value = np.full((3, 5), 8, np.float32)
    assert_equal(snapshot.take(), values(parameters))
    others = sources(7)
    snapshot.views.follow(others)
    assert_equal(snapshot.take(), values(others))


def test_a_save_returns_while_it_is_written_and_the_next_one_waits() -> None:
    parameters, said, written = sources(1), [], []
    go, here = threading.Event(), threading.Event()

    def say(text: str) -> None:
        said.append(text)
        go.set()

    saver = Saver(parameters, say=say)

    def write(groups: Groups, _: Copied) -> None:
        here.set()
        assert go.wait(PATIENCE_S)
        written.append({g: {n: x.copy() for n, x in names.items()} for g, names in groups.items()})

    first = values(parameters)
    saver.save("the first", write)
    assert here.wait(PATIENCE_S)
    assert saver.busy
    saver.poll()  # does not wait
    train(parameters, 2)
    second = values(parameters)
    saver.save("the second", write)
    assert said == ["the second waits: the one before is still being written"]
    saver.wait(last=True)
    assert_equal(written[0], first)
    assert_equal(written[1], second)


def test_what_would_take_too_much_memory_is_copied_into_files(tmp_path: Path) -> None:
    parameters = sources(1)
    del parameters["model"]["device"]
    saver, go = Saver(parameters, memory_share=0), threading.Event()
    expected, copies = values(parameters), list[bool]()

    def write(groups: Groups, copied: Copied) -> None:
        assert copied is not None
        for group, arrays in groups.items():
            for name, array in arrays.items():
                copies.append(array is not parameters[group][name].value)

        def trained() -> None:
            copied()
            assert go.wait(PATIENCE_S)

        checkpoint.save(tmp_path, 1, groups, {}, copied=trained)

    saver.save("it", write)
    assert saver.busy
    assert not any(copies)
    train(parameters, 2)
    assert list(tmp_path.glob("step-*")) == []
    go.set()
    saver.wait(last=True)
    assert_equal(checkpoint.load(tmp_path / "step-00000001").tensors, expected)


def test_a_failure_before_all_is_copied_lets_training_go_on_until_it_is_told() -> None:
    parameters = sources(1)
    del parameters["model"]["device"]
    saver = Saver(parameters, memory_share=0)
    saver.save("it", fail)
    with pytest.raises(CheckpointError, match="disk full"):
        saver.poll()


@pytest.mark.parametrize("background", [False, True])
def test_what_is_on_a_device_is_copied_to_memory(background: bool) -> None:
    parameters, saved = sources(1), []
    saver = Saver(parameters, memory_share=0, background=background)
    saver.save("it", lambda groups, copied: saved.append((groups, copied)))
    saver.wait(last=True)
    (groups, copied), expected = saved[0], values(parameters)
    train(parameters, 2)
    assert copied is None
    assert_equal(groups, expected)


def fail(*_: object) -> None:
    raise CheckpointError("disk full")


def test_the_first_failure_stops_at_the_next_step() -> None:
    saver = Saver(sources(1))
    saver.save("it", fail)
    with pytest.raises(CheckpointError, match="disk full"):
        until(saver.poll)


def test_failures_up_to_the_limit_are_warnings_but_not_of_the_last() -> None:
    said: list[str] = []
    saver = Saver(sources(1), max_failed=2, say=said.append)
    for count in (1, 2):
        saver.save("it", fail)
        saver.wait()
        assert f"warning: disk full Training goes on; {count} save(s) in a row failed" in said[-1]
    saver.save("it", lambda *_: None)
    saver.wait()
    for _ in range(2):  # counted anew
        saver.save("it", fail)
        saver.wait()
    saver.save("it", fail)
    with pytest.raises(CheckpointError):
        saver.wait()
    saver.save("it", lambda *_: None)
    saver.wait()
    saver.save("it", fail)
    with pytest.raises(CheckpointError):
        saver.wait(last=True)


def test_what_is_wrong_is_never_a_warning() -> None:
    saver = Saver(sources(1), max_failed=9)
    saver.save("it", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        saver.wait()


@pytest.mark.skipif(not hasattr(os, "getpriority"), reason="no priorities")
def test_writing_has_the_lowest_priority_and_training_keeps_its_own() -> None:
    found: list[int] = []
    saver = Saver(sources(1))
    before = os.getpriority(os.PRIO_PROCESS, 0)
    saver.save("it", lambda *_: found.append(os.getpriority(os.PRIO_PROCESS, 0)))
    saver.wait(last=True)
    assert found == [19]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_a_second_run_in_one_folder_is_refused(tmp_path: Path) -> None:
    from telechat_moe.errors import UsageError

    refused = pytest.raises(UsageError, match=rf"another run \(process {os.getpid()}\)")
    with folder.only_run(tmp_path / "out"), refused, folder.only_run(tmp_path / "out"):
        pass
    with folder.only_run(tmp_path / "out"):
        pass


# ------------------------------------------------------------------------------------- a trained model

mindspore = pytest.mark.mindspore


def run(data: Path, output: Path, *flags: str, **changes: object) -> int:
    pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
    return main([*mini.arguments(data, output, **changes), *flags])


@pytest.mark.slow
@mindspore
@pytest.mark.parametrize("memory_share", [0, 1])
def test_what_is_saved_meanwhile_is_what_is_saved_at_once(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, memory_share: int
) -> None:
    """The writer waits until a later step is done before it reads the copy."""
    assert run(data, tmp_path / "once", telechat_moe__saving__background=False) == 0
    real, behind = checkpoint.save, []

    def late(root: Path, step: int, *args: object, copied: Copied, **more: object) -> Path:
        def later() -> None:
            if copied is not None:
                copied()
            last = min(step + 1, mini.STEPS)
            until(lambda: steps_in(tmp_path / "meanwhile" / "metrics.jsonl") >= last)
            behind.append(last - step)

        assert (copied is None) == (memory_share == 1)
        if copied is None:
            later()
            return real(root, step, *args, **more)  # pyright: ignore
        return real(root, step, *args, copied=later, **more)  # pyright: ignore

    monkeypatch.setattr(checkpoint, "save", late)
    assert run(data, tmp_path / "meanwhile", telechat_moe__saving__memory_share=memory_share) == 0
    assert behind == [1, 1, 1, 0]
    paths = checkpoint.list_checkpoints(tmp_path / "once" / "checkpoints")
    assert [p.name for p in paths] == [f"step-{s:08d}" for s in (12, 9, 6)]
    for path in paths:
        other = tmp_path / "meanwhile" / "checkpoints" / path.name
        assert {p.name: p.read_bytes() for p in path.iterdir()} == {
            p.name: p.read_bytes() for p in other.iterdir()
        }


def two_saves(small: Path) -> None:
    """Leave room in a small file system for two checkpoints of the mini recipe only."""
    size = 400_000
    free = os.statvfs(small).f_bavail * os.statvfs(small).f_frsize
    (small / "filler").write_bytes(bytes(free - 2 * size))


@pytest.mark.slow
@mindspore
@pytest.mark.parametrize("allowed", [0, 9])
def test_a_disk_that_fills_up_during_training(
    tmp_path: Path,
    data: Path,
    mount: Callable[[str], Path],  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    allowed: int,
) -> None:
    small = mount("size=8m")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(small)
    two_saves(small)
    assert (
        run(data, tmp_path / "run", telechat_moe__saving__max_failed=allowed) == 1
    )  # the last must succeed
    said = capsys.readouterr()
    error, text = said.err, said.out + said.err
    assert "cannot save the checkpoint of step" in error
    assert "No space left on device" in error
    assert "step-00000006, is intact (checksums verified)" in error
    assert "Traceback" not in error
    assert ("Training goes on; 1 save(s) in a row failed" in text) == (allowed > 0)
    steps = [r for r in metrics.read(tmp_path / "run" / "metrics.jsonl") if r["event"] == "step"]
    assert len(steps) == mini.STEPS or not allowed
    found = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert found is not None
    assert found.step == 6
