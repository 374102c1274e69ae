"""Runs on four processes whose experts move: no bit of them depends on where experts are, or on a kill in a move."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = [pytest.mark.mindspore, pytest.mark.slow]

import mini_recipe as mini
import running
from running import Moving
from test_expert_moves import DP4

from telechat_moe.checkpoint import checkpoint
from telechat_moe.cli import main
from telechat_moe.train import metrics

RUN = {
    **DP4,
    "train_dataset__data_loader__sizes": "[80,0,0]",
    "callbacks__2__keep_checkpoint_max": 20,
    "telechat_moe__moe__placement": "{every: 1, window: 1}",
}
UNCLIPPED = {**RUN, "runner_wrapper__use_clip_grad": False}
CLIPPED = {
    **RUN,
    "parallel_config__expert_parallel": 2,
    "model__model_config__num_experts_per_tok": 4,
    "runner_wrapper__max_grad_norm": 0.1,
}
ZERO = {
    "parallel__enable_parallel_optimizer": True,
    "parallel__parallel_optimizer_config__parallel_optimizer_threshold": 0,
}
PIPELINE = {
    "parallel_config__data_parallel": 2,
    "parallel_config__pipeline_stage": 2,
    "parallel_config__micro_batch_num": 2,
    "callbacks__1__micro_batch_num": 2,
    "model__model_config__num_hidden_layers": 4,
}
SPLIT_OTHERWISE = {"zero": ZERO, "pipeline": PIPELINE, "both": {**ZERO, **PIPELINE}}
STILL = {"telechat_moe__moe__placement": "{every: 1, window: 1, seconds_per_pair: 1.0e-30}"}
NONE = {"telechat_moe__moe__placement": "null"}


def same(one: Path, other: Path, *, norms: bool = True) -> None:
    """Hold two runs equal to the last bit: every step, and every tensor of every checkpoint."""
    keys = ("step", "loss", "lm_loss", "aux_loss", *["grad_norm"] * norms)
    curves = [[[r[k] for k in keys] for r in records(o, "step")] for o in (one, other)]
    assert curves[0] == curves[1]
    folders = [checkpoint.list_checkpoints(o / "checkpoints") for o in (one, other)]
    assert [p.name for p in folders[0]] == [p.name for p in folders[1]]
    assert len(folders[0]) == 7
    for a, b in zip(*folders, strict=True):
        found, expected = checkpoint.load(a).tensors, checkpoint.load(b).tensors
        assert {g: set(t) for g, t in found.items()} == {g: set(t) for g, t in expected.items()}
        for group, tensors in expected.items():
            for name, tensor in tensors.items():
                assert found[group][name].tobytes() == tensor.tobytes(), (a, name)


def records(output: Path, event: str) -> list[dict]:
    return [r for r in metrics.read(output / "metrics.jsonl") if r["event"] == event]


def train(output: Path, data: Path, *flags: str, **changes: object) -> None:
    assert main([*mini.arguments(data, output, **changes), *flags]) == 0


def test_moves_and_a_kill_in_one_of_them_change_no_bit(
    tmp_path: Path, data: Path, start: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, moved, killed = (tmp_path / name for name in ("plain", "moved", "killed"))
    train(plain, data, **{**UNCLIPPED, **NONE})
    moving = Moving(tmp_path, monkeypatch)
    train(moved, data, **UNCLIPPED)
    steps = {r["step"] for r in records(moved, "move")}
    assert len(steps) > 8
    same(moved, plain, norms=False)
    norms = [[r["grad_norm"] for r in records(o, "step")] for o in (moved, plain)]
    np.testing.assert_allclose(*norms, rtol=1e-6)

    shutil.copytree(moved / ".job", killed / ".job")
    moving.stand(6)
    process = start(killed, **UNCLIPPED)
    running.until(moving.here.exists, process)
    pids = [running.rank(killed, r) for r in range(4)]
    os.kill(pids[2], signal.SIGKILL)
    text, _ = process.communicate()
    assert process.returncode == 1, text
    assert f"rank 2 (process {pids[2]}) was killed by SIGKILL" in text
    assert "the last good checkpoint is" in text
    running.wait_for_ends(pids)
    moving.stand(0)
    moving.here.unlink()
    train(killed, data, "--resume", **UNCLIPPED)
    same(killed, moved)
    assert records(killed, "move") == records(moved, "move")

    # Without a map any checkpoint goes on, too.
    monkeypatch.undo()
    shutil.rmtree(killed / "checkpoints")
    shutil.copytree(moved / "checkpoints", killed / "checkpoints")
    for folder in checkpoint.list_checkpoints(killed / "checkpoints")[:3]:
        shutil.rmtree(folder)
    train(killed, data, "--resume", **{**UNCLIPPED, **NONE})
    same(killed, plain, norms=False)


@pytest.mark.parametrize("dispatcher", ["alltoall", "alltoallv"])
def test_with_clipping_moves_change_no_bit(
    dispatcher: str, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two copies of each expert. Routed rows come with a rest that counts as the last slot's: the same but for rounding."""
    still, moved = tmp_path / "still", tmp_path / "moved"
    changes = {**CLIPPED, "telechat_moe__sharding__dispatcher": dispatcher}
    train(still, data, **{**changes, **STILL})
    assert not records(still, "move")
    assert min(r["grad_norm"] for r in records(still, "step")) > 0.1
    shutil.copytree(still / ".job", moved / ".job")
    Moving(tmp_path, monkeypatch)
    train(moved, data, **changes)
    assert len({r["step"] for r in records(moved, "move")}) > 8
    if dispatcher == "alltoall":
        same(moved, still)
        return
    curves = [[(r["loss"], r["grad_norm"]) for r in records(o, "step")] for o in (moved, still)]
    np.testing.assert_allclose(*curves, rtol=1e-5)


@pytest.mark.parametrize("layout", SPLIT_OTHERWISE)
def test_moves_change_no_bit_where_states_or_layers_are_split(
    layout: str, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    still, moved = tmp_path / "still", tmp_path / "moved"
    changes = {**CLIPPED, **SPLIT_OTHERWISE[layout]}
    train(still, data, **{**changes, **STILL})
    assert not records(still, "move")
    shutil.copytree(still / ".job", moved / ".job")
    Moving(tmp_path, monkeypatch)
    train(moved, data, **changes)
    assert len({r["step"] for r in records(moved, "move")}) > 8
    same(moved, still)
