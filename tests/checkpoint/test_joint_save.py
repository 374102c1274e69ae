"""Checkpoints that several ranks write together: for all or for none, whatever dies, fills up or is mixed in."""

import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import PATIENCE_S
from saved import assert_equal, names_in
from test_checkpoint_crashes import mount  # noqa: F401

from telechat_moe.checkpoint import checkpoint, joint_save, manifest
from telechat_moe.checkpoint.checkpoint import BrokenCheckpointError, CheckpointError
from telechat_moe.checkpoint.joint_save import JointSave, TensorShard
from telechat_moe.checkpoint.stored import open_checkpoint
from telechat_moe.errors import CheckFailedError
from telechat_moe.processes import Control

RANKS = 4
SHAPE = (8, 6)
Groups = dict[str, dict[str, np.ndarray]]


def whole(step: int) -> Groups:
    """Tensors that say of which step they are."""
    values = step * 1000 + np.arange(48, dtype=np.float32).reshape(SHAPE)
    return {
        "model": {"cut": values, "both": values + 0.25, "all": values[0].copy(), "one": values[1]},
        "optimizer": {"adam_m.cut": -values, "adam_m.all": -values[0], "count": np.array(step)},
    }


def held(step: int, rank: int) -> dict[str, dict[str, TensorShard]]:
    """What a rank holds: `cut` by rows over four, `both` by columns over two (two copies), the rest by all."""
    found: dict[str, dict[str, TensorShard]] = {}
    for group, tensors in whole(step).items():
        found[group] = {}
        for number, (name, x) in enumerate(tensors.items()):
            region, owners = [(0, n) for n in x.shape], [0, 1, 2, 3]
            if name.endswith("cut"):
                region[0], owners = (2 * rank, 2 * rank + 2), [rank]
            elif name == "both":
                region[1], owners = (3 * (rank % 2), 3 * (rank % 2) + 3), [rank % 2, rank % 2 + 2]
            elif name == "one":
                owners = [3]
                if rank != 3:
                    continue
            data = np.array(x[tuple(slice(a, b) for a, b in region)])
            own = owners[number % len(owners)] == rank
            found[group][name] = TensorShard(data, x.shape, tuple(region), own, len(owners) > 1)
    return found


def together(root: Path, step: int, rank: int, save: str = "run-1", **more: object) -> JointSave:
    control = root.parent / "control"
    control.mkdir(exist_ok=True, parents=True)
    return JointSave(root, step, save, rank, RANKS, Control(control), {"layout": "dp2 tp2"}, **more)  # pyright: ignore


def on_ranks(work: Callable[[int], object]) -> list[Exception]:
    """Work in a thread a rank; return what was raised."""
    raised: list[Exception] = []

    def guarded(rank: int) -> None:
        try:
            work(rank)
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    return raised


def save(root: Path, step: int, save: str = "run-1", **more: object) -> BaseException | None:
    """Save with a thread a rank; return what rank 0 raised."""

    def work(rank: int) -> None:
        together(root, step, rank, save, **more).write(held(step, rank), {"step": step})

    raised = on_ranks(work)
    assert len(raised) < 2
    return raised[0] if raised else None


def assert_saved(found: checkpoint.Checkpoint | None) -> int:
    assert found is not None
    assert found.state == {"step": found.step}
    assert_equal(found.tensors, whole(found.step))
    return found.step


# ------------------------------------------------------------------------------------- what is written


def test_what_ranks_wrote_together_comes_back_whole(tmp_path: Path) -> None:
    assert save(tmp_path / "root", 5) is None
    path = tmp_path / "root" / "step-00000005"
    assert assert_saved(checkpoint.load(path)) == 5
    content = manifest.read(path)
    assert (content["version"], content["ranks"], content["layout"]) == (2, 4, "dp2 tp2")
    assert names_in(path) == sorted([*content["files"], "checkpoint.json"])


def test_shards_may_change_once_they_are_copied(tmp_path: Path) -> None:
    """Also of those that a rank holds, and another one writes."""
    changed = 0

    def work(rank: int) -> None:
        nonlocal changed
        shards = held(5, rank)

        def train() -> None:
            nonlocal changed
            changed += 1
            for shard in (x for by_name in shards.values() for x in by_name.values()):
                shard.data[...] = -1 - rank

        together(tmp_path / "root", 5, rank).write(shards, {"step": 5}, train)

    assert on_ranks(work) == []
    assert changed == RANKS
    path = tmp_path / "root" / "step-00000005"
    assert assert_saved(checkpoint.load(path)) == 5
    assert save(tmp_path / "other", 5) is None
    for file in path.glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "other" / path.name / file.name).read_bytes()


def test_nothing_is_written_twice(tmp_path: Path) -> None:
    assert save(tmp_path / "root", 5) is None
    content = manifest.read(tmp_path / "root" / "step-00000005")
    per_tensor = [t for found in content["tensors"].values() for t in found.values()]
    assert sum(len(t["pieces"]) for t in per_tensor) == 4 + 2 + 1 + 1 + 4 + 1 + 1
    written = sum(f["bytes"] for f in content["files"].values())
    headers = sum(
        8 + int.from_bytes((tmp_path / "root" / "step-00000005" / n).read_bytes()[:8], "little")
        for n in content["files"]
    )
    assert written - headers == sum(x.nbytes for g in whole(5).values() for x in g.values())


def test_a_single_process_writes_the_same_tensors(tmp_path: Path) -> None:
    """An older checkpoint (version 1, whole tensors) and a new one give the same arrays."""
    assert save(tmp_path / "root", 5) is None
    old = checkpoint.load(checkpoint.save(tmp_path / "old", 5, whole(5), {"step": 5}))
    assert manifest.read(old.path)["version"] == 1
    assert_equal(checkpoint.load(tmp_path / "root" / "step-00000005").tensors, old.tensors)


@pytest.mark.parametrize("copies", [1, 2])
def test_rows_that_are_apart_come_to_their_places(copies: int, tmp_path: Path) -> None:
    """Experts that moved: each rank holds some rows, in any order, and another rank may hold the same."""
    x = np.random.default_rng(0).normal(size=(8, 3, 2)).astype(np.float32)
    rows = np.random.default_rng(1).permutation(8).reshape(RANKS // copies, -1)

    def work(rank: int) -> None:
        mine = tuple(int(r) for r in rows[rank // copies])
        region = ((0, len(mine)), (0, 3), (0, 2))  # of slots
        shard = TensorShard(x[list(mine)], x.shape, region, rank % copies == 0, copies > 1, mine)
        others = held(5, rank)
        together(tmp_path / "root", 5, rank).write(
            {**others, "model": {**others["model"], "experts": shard}}, {"step": 5}
        )

    assert not on_ranks(work)
    path = tmp_path / "root" / "step-00000005"
    expected = whole(5)
    assert_equal(
        checkpoint.load(path).tensors,
        {**expected, "model": {**expected["model"], "experts": x}},
    )
    pieces = manifest.read(path)["tensors"]["model"]["experts"]["pieces"]
    assert sorted(p["region"][0] for p in pieces) == [[r, r + 1] for r in range(8)]
    (tensor,) = [t for n, t in open_checkpoint(path).tensors.items() if n == "experts"]
    assert len(tensor.shards) == 8


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_tiles_are_those_that_count_every_element_once(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    cuts = [data.draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0])) for n in shape]
    axes = [
        [(i * n // d, (i + 1) * n // d) for i in range(d)] for n, d in zip(shape, cuts, strict=True)
    ]
    regions = [tuple(r) for r in itertools.product(*axes)]
    assert manifest.tiles(shape, regions)
    change = data.draw(st.sampled_from(["drop", "repeat", "shift"]))
    k = data.draw(st.integers(0, len(regions) - 1))
    if change == "drop":
        regions.pop(k)
    elif change == "repeat":
        regions.append(regions[k])
    else:
        regions[k] = ((regions[k][0][0] + 1, regions[k][0][1] + 1), *regions[k][1:])
    count = np.zeros(np.array(shape) + 1, int)
    for region in regions:
        count[tuple(slice(a, b) for a, b in region)] += 1
    inside = count[tuple(slice(0, n) for n in shape)]
    assert not (inside == 1).all() or count.sum() != inside.sum()
    assert not manifest.tiles(shape, regions)


def test_every_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    assert save(tmp_path / "root", 5) is None
    content = json.loads((tmp_path / "root/step-00000005/checkpoint.json").read_text())
    problems: list[str] = []
    assert checkpoint._tensor("cut", content["tensors"]["model"]["cut"], {}, problems) is None
    assert len(problems) == len(set(problems)) == RANKS
    assert all("tensor 'cut' is missing" in problem for problem in problems)


def test_show_and_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from telechat_moe.cli import main

    assert save(tmp_path / "root", 5) is None
    path = tmp_path / "root" / "step-00000005"
    assert main(["ckpt", "show", str(path), "--tensors"]) == 0
    said = capsys.readouterr().out
    assert "checkpoint of step 5, sharded, written by 4 ranks (dp2 tp2)" in said
    assert "all 8 checksums agree" in said
    assert main(["ckpt", "merge", str(path), str(tmp_path / "whole")]) == 0
    merged = tmp_path / "whole" / "step-00000005"
    direct = checkpoint.save(tmp_path / "direct", 5, whole(5), {"step": 5})
    assert {p.name: p.read_bytes() for p in merged.iterdir()} == {
        p.name: p.read_bytes() for p in direct.iterdir()
    }
    assert main(["ckpt", "merge", str(path), str(tmp_path / "whole")]) == 2


def test_weights_are_read_tensor_by_tensor(tmp_path: Path) -> None:
    from telechat_moe.checkpoint.weights import read_weights

    assert save(tmp_path / "root", 5) is None
    entries = read_weights(tmp_path / "root" / "step-00000005")
    expected = whole(5)["model"]
    assert entries.keys() == expected.keys()
    for name, entry in entries.items():
        assert (entry.dtype, entry.shape) == ("F32", expected[name].shape)
        assert entry.read().tobytes() == expected[name].tobytes()
        assert b"".join(p.tobytes() for p in entry.chunks()) == expected[name].tobytes()
        assert entry.read(4, 8).tobytes() == expected[name].tobytes()[4:12]


# ------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("rank", range(RANKS))
def test_any_damage_to_the_file_of_any_rank_is_found(tmp_path: Path, rank: int) -> None:
    assert save(tmp_path / "root", 5) is None
    path = tmp_path / "root" / "step-00000005"
    file = sorted(path.glob(f"model_rank{rank:05d}-*"))[0]
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(BrokenCheckpointError, match=f"{file.name}: checksum differs"):
        checkpoint.load(path)


def test_copies_that_differ_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = held

    def drifted(step: int, rank: int) -> dict[str, dict[str, TensorShard]]:
        found = real(step, rank)
        if rank == 3:
            found["model"]["both"].data[0, 0] += 1e-3
        return found

    monkeypatch.setitem(globals(), "held", drifted)
    error = save(tmp_path / "root", 5)
    assert isinstance(error, CheckFailedError)
    assert "ranks 1 and 3 hold the same shard of both" in str(error)
    assert names_in(tmp_path / "root") == []


def tamper(root: Path, monkeypatch: pytest.MonkeyPatch, change) -> BaseException | None:
    """Save step 2 over step 1 while something changes what rank 2 has written, before rank 0 reads it."""
    assert save(root, 1, "run-1") is None
    real, changed = JointSave._write_part, threading.Event()

    def write(self: JointSave, pieces: joint_save.TensorShards, _: object) -> None:
        real(self, pieces)
        if self.rank == 2:
            change(self.hidden)
            changed.set()

    def wait(self: JointSave, rank: int) -> dict:
        assert rank != 2 or changed.wait(PATIENCE_S)
        return real_wait(self, rank)

    real_wait = JointSave._wait_for
    monkeypatch.setattr(JointSave, "_write_part", write)
    monkeypatch.setattr(JointSave, "_wait_for", wait)
    error = save(root, 2, "run-2")
    assert names_in(root) == ["step-00000001"]
    assert_saved(checkpoint.latest(root))
    return error


def test_a_truncated_part_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(hidden: Path) -> None:
        os.truncate(hidden / "part-00002.json", 100)

    error = tamper(tmp_path / "root", monkeypatch, cut)
    assert isinstance(error, CheckpointError)
    assert "the part of rank 2 is not valid JSON, truncated" in str(error)


def test_a_changed_part_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(hidden: Path) -> None:
        path = hidden / "part-00002.json"
        path.write_text(path.read_text().replace('"step": 2', '"step": 3', 1))

    error = tamper(tmp_path / "root", monkeypatch, change)
    assert isinstance(error, CheckpointError)
    assert "the part of rank 2 checksum differs" in str(error)


def test_a_truncated_file_of_a_part_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(hidden: Path) -> None:
        os.truncate(next(iter(hidden.glob("model_rank00002-*"))), 50)

    error = tamper(tmp_path / "root", monkeypatch, cut)
    assert isinstance(error, CheckpointError)
    assert "the part of rank 2 names model_rank00002-00001-of-00001.safetensors" in str(error)


def test_a_rank_that_still_writes_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 gives up while rank 3 adds files to the hidden folder."""
    real, begun = JointSave._write_part, threading.Event()

    def write(self: JointSave, pieces: joint_save.TensorShards, _: object) -> None:
        if self.rank != 3:
            assert begun.wait(PATIENCE_S)
            real(self, pieces)
            return
        for number in range(3_000):  # until the folder is gone
            (self.hidden / f"model-{number}").touch()
            begun.set()

    def refuse(self: JointSave, rank: int) -> None:
        raise CheckpointError("refused")

    monkeypatch.setattr(JointSave, "_write_part", write)
    monkeypatch.setattr(JointSave, "_wait_for", refuse)
    assert isinstance(save(tmp_path / "root", 2), CheckpointError)
    assert names_in(tmp_path / "root") == []


@pytest.mark.parametrize("save_name", ["run-1", "other-2"])
def test_a_part_of_another_save_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_name: str
) -> None:
    """Of an earlier save of this run, or of another run's save of the same step."""
    other = together(tmp_path / "other", 1 if save_name == "run-1" else 2, 2, save_name)
    other.hidden.mkdir(parents=True)
    other._write_part(held(other.step, 2))

    def mix(hidden: Path) -> None:
        for path in other.hidden.iterdir():
            shutil.copy(path, hidden)

    error = tamper(tmp_path / "root", monkeypatch, mix)
    assert isinstance(error, CheckpointError)
    assert "the part of rank 2 is of" in str(error)
    assert repr(save_name) in str(error) or "is of step 1, not 2" in str(error)


def test_parts_that_do_not_cover_a_tensor_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = held

    def lost(step: int, rank: int) -> dict[str, dict[str, TensorShard]]:
        found = real(step, rank)
        if rank == 1:
            del found["model"]["cut"]
        return found

    monkeypatch.setitem(globals(), "held", lost)
    error = save(tmp_path / "root", 5)
    assert isinstance(error, CheckpointError)
    assert "cut: the parts do not cover [8, 6]" in str(error)


# ------------------------------------------------------------------------------------- full disks, two runs


def test_a_disk_that_fills_on_any_rank_leaves_the_earlier_one(mount) -> None:  # noqa: F811
    root = mount("size=200k") / "root"
    assert save(root, 1, keep_last=1) is None
    filler = root.parent / "filler"
    for rank_with_room in (0, 60_000):  # not even rank 0 has room; rank 0 has, a later one has not
        filler.unlink(missing_ok=True)
        free = shutil.disk_usage(root).free
        filler.write_bytes(bytes(max(free - rank_with_room, 0)))
        (root.parent / "control").mkdir(exist_ok=True)
        error = save(root, 2, f"full-{rank_with_room}")
        if rank_with_room and error is None:
            continue
        assert isinstance(error, CheckpointError)
        assert "No space left on device" in str(error)
        assert f"{root}/step-00000001, is intact" in str(error)
        assert names_in(root) == ["step-00000001"]
    filler.unlink()
    assert save(root, 3, "run-9") is None
    assert assert_saved(checkpoint.latest(root)) == 3


def test_a_rank_that_cannot_write_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = checkpoint.write_files

    def write(hidden: Path, planned: list, copied: Callable[[], object] | None) -> dict[str, str]:
        if any("rank00003" in file.name for file in planned):
            raise OSError(28, os.strerror(28), str(hidden))
        return real(hidden, planned, copied)

    assert save(tmp_path / "root", 1) is None
    monkeypatch.setattr(checkpoint, "write_files", write)
    error = save(tmp_path / "root", 2, "run-2")
    assert isinstance(error, CheckpointError)
    assert "rank 3 could not write: No space left on device" in str(error)
    assert names_in(tmp_path / "root") == ["step-00000001"]


def test_two_live_saves_of_one_step_come_one_after_the_other(tmp_path: Path) -> None:
    root = tmp_path / "root"
    runs = [threading.Thread(target=save, args=(root, 4, f"run{k}-1")) for k in range(3)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert names_in(root) == ["step-00000004"]
    assert assert_saved(checkpoint.latest(root)) == 4


# ------------------------------------------------------------------------------------- kills


def _rank(root: Path, rank: int, begin: int, token: str, at: int | None, reported) -> None:
    """Save step after step; die at the ``at``-th file operation."""
    seen = 0

    def hook(event: str, given: tuple) -> None:
        nonlocal seen
        if event == "open" and given[1] == "r" and "/control/" in str(given[0]):
            return  # waiting for others: how often depends on how fast they are
        if event == "open" or event.startswith(("os.", "shutil.", "fcntl.")):
            seen += 1
            if at is not None and seen == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    for step in range(begin + 1, begin + 4):
        part = together(root, step, rank, f"{token}-{step}", keep_last=2)
        if part.write(held(step, rank), {"step": step}, (lambda: None) if step % 2 else None):
            reported.value = step


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0])
def test_ranks_killed_at_random_file_operations(tmp_path: Path, seed: int) -> None:
    """One of four processes, or all, die at a random moment of three saves; 100 times."""
    rng, root, step, unfinished = random.Random(seed), tmp_path / "root", 0, 0
    context = multiprocessing.get_context("fork")
    for kill in range(100):
        victims = rng.choice([[0], [1], [2], [3], [0, 1, 2, 3]])
        reported = context.Value("i", step)
        ranks = [
            context.Process(
                target=_rank,
                args=(
                    root,
                    r,
                    step,
                    f"{kill}",
                    rng.randint(5, 160) if r in victims else None,
                    reported,
                ),
            )
            for r in range(RANKS)
        ]
        for process in ranks:
            process.start()
        while any(p.is_alive() for p in ranks) and not any(p.exitcode for p in ranks):
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.02))
        for process in ranks:  # as the launcher does when one is gone
            process.kill()
            process.join(PATIENCE_S)
        unfinished += any(name.startswith(".") for name in names_in(root))
        for path in checkpoint.list_checkpoints(root):
            assert_saved(checkpoint.load(path))
        newest = checkpoint.list_checkpoints(root)
        now = assert_saved(checkpoint.load(newest[0])) if newest else 0
        assert now >= reported.value >= step  # a finished save is never lost
        step = now
    assert unfinished > 10, "too few kills hit a save"
    assert step > 10
    assert save(root, step + 1, "last", keep_last=1) is None
    assert names_in(root) == [f"step-{step + 1:08d}"]


def test_a_part_is_json_with_its_own_checksum(tmp_path: Path) -> None:
    part = together(tmp_path / "root", 7, 2)
    part.hidden.mkdir(parents=True)
    part._write_part(held(7, 2))
    content = json.loads((part.hidden / "part-00002.json").read_text())
    assert (content["step"], content["save"], content["rank"], content["ranks"]) == (
        7,
        "run-1",
        2,
        4,
    )
    assert set(content["copies"]["model"]) == {"both", "all"}
