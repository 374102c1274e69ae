"""A run whose steps are launched before the step before has been fetched: the same bits as one that waits."""

import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import mini_recipe as mini
import spiky_data
from mindspore import Parameter, Tensor, nn

from telechat_moe.checkpoint import checkpoint
from telechat_moe.ops import select
from telechat_moe.recipe import load
from telechat_moe.recipe.schema.own import LossGuard
from telechat_moe.train.engine import OneProcess
from telechat_moe.train.guard import Guard
from telechat_moe.train.optimizer import AdamW
from telechat_moe.train.step import RunningStep
from telechat_moe.train.trainer import Trainer

STEPS, SPIKE = 16, 11
SETTINGS = {
    "telechat_moe__ema": "{decay: 0.9}",
    "telechat_moe__evaluation__interval": 6,
    "callbacks__2__save_checkpoint_steps": 4,
    "train_dataset__data_loader__sizes": f"[{STEPS * spiky_data.BATCH},0,0]",
    "lr_schedule__learning_rate": 0.02,
}
GUARD = "{action: ACTION, window: 8, min_steps: 3, loss_factor: 1.2, sigma: 4.0}"
NUMBERS = st.floats(0.125, 8.0, width=32)


@given(
    st.lists(NUMBERS, min_size=1, max_size=9),
    NUMBERS,
    st.sampled_from([(2.0, None), (None, 3.0), (1.5, 2.0)]),
    st.integers(2, 6),
)
def test_limits_ahead_are_not_above_the_true_ones(
    values: list[float], following: float, rules: tuple[float | None, float | None], window: int
) -> None:
    factor, sigma = rules
    guard = Guard(
        LossGuard(window=window, min_steps=2, norm_factor=factor, loss_factor=factor, sigma=sigma)
    )
    for step, value in enumerate(values):
        guard.judge(step, value, 2 * value, True)
    bound = guard.limits_ahead()
    guard.judge(len(values), following, 2 * following, True)
    limits = guard.limits()
    assert bound.loss <= limits.loss
    assert bound.norm <= limits.norm


def test_limits_ahead_are_useful() -> None:
    guard = Guard(LossGuard(window=20, min_steps=3, norm_factor=2.0, loss_factor=1.5))
    for step in range(20):
        guard.judge(step, 4.0 + 0.01 * step, 1.0, True)
    assert guard.limits_ahead().norm == 2.0
    assert guard.limits_ahead().loss == pytest.approx(guard.limits().loss, rel=0.01)


def run(data: Path, output: Path, ahead: bool, **changes: object) -> tuple[Any, list[str]]:
    """Train; return the trainer, and which steps were launched and fetched, in order."""
    words = mini.arguments(data, output, **{**SETTINGS, **changes})
    trainer, calls = Trainer(load(words[1], words[4::2], use="train"), plain=True), list[str]()
    engine = trainer.engine
    assert isinstance(engine, OneProcess)
    engine.runs_ahead = ahead
    launch, fetch = engine.launch, RunningStep.fetch
    engine.launch = lambda *args: (calls.append("launch"), launch(*args))[1]
    with mock.patch.object(
        RunningStep, "fetch", lambda step: (calls.append("fetch"), fetch(step))[1]
    ):
        trainer.run()
    return trainer, calls


def records(output: Path) -> list[dict[str, Any]]:
    """Return what was recorded, without times."""
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    timed = ("seconds", "stall", "tokens_per", "time", "share")
    return [{k: v for k, v in x.items() if not any(word in k for word in timed)} for x in lines]


def assert_same(output: Path, other: Path) -> None:
    assert records(output) == records(other)
    saved, expected = (checkpoint.list_checkpoints(x / "checkpoints") for x in (output, other))
    assert [path.name for path in saved] == [path.name for path in expected]
    for path, other_path in zip(saved, expected, strict=True):
        ahead, waiting = checkpoint.load(path), checkpoint.load(other_path)
        assert ahead.state == waiting.state
        for group, tensors in waiting.tensors.items():
            for name, tensor in tensors.items():
                np.testing.assert_array_equal(ahead.tensors[group][name], tensor, err_msg=name)


@pytest.mark.parametrize("action", ["skip", pytest.param("rollback", marks=pytest.mark.slow)])
def test_the_same_bits(tmp_path: Path, action: str) -> None:
    data = spiky_data.write(tmp_path, [SPIKE])
    changes = {"telechat_moe__loss_guard": GUARD.replace("ACTION", action)}
    (_, waits), (trainer, calls) = (
        run(data, tmp_path / name, name == "ahead", **changes) for name in ("waits", "ahead")
    )
    assert_same(tmp_path / "ahead", tmp_path / "waits")
    assert waits == ["launch", "fetch"] * (len(waits) // 2)
    # Between two steps where nothing is saved or evaluated, the second is launched first.
    assert calls[:6] == ["launch", "launch", "fetch", "launch", "fetch", "launch"]
    events = [row["event"] for row in records(tmp_path / "ahead")]
    assert ("guard" in events) == (action == "skip")
    assert ("rollback" in events) == (action == "rollback")
    assert math.isfinite(trainer.state.guard.losses[-1])


@pytest.mark.slow
def test_other_batches_and_no_guard(data: Path, tmp_path: Path) -> None:
    changes = {
        "telechat_moe__step_batch_size_schedule": "'0:4 384:8'",
        "runner_config__gradient_accumulation_steps": 2,
        "callbacks__1__gradient_accumulation_steps": 2,
    }
    for name in ("waits", "ahead"):
        run(data, tmp_path / name, name == "ahead", **changes)
    assert_same(tmp_path / "ahead", tmp_path / "waits")


class Update(nn.Cell):
    """An update as a step makes it, with a branch or without."""

    def __init__(self, branches: bool, weight: np.ndarray) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(weight), name="w")
        with select.using("plain"):
            self.adamw = AdamW([self.weight], (0.9, 0.95), 1e-8, 0.1)
        self.branches = branches

    def construct(self, applied: Tensor, gradient: Tensor, rate: Tensor) -> Tensor:
        """Update."""
        if not self.branches:
            return self.adamw((gradient,), rate, rate, rate, rate, applied)
        if applied:
            self.adamw((gradient,), rate, rate, rate, rate)
        return Tensor(True)


def test_an_update_without_a_branch_is_one_with_it() -> None:
    """Also of gradients that are not finite, where it does not count."""
    rng = np.random.default_rng(0)
    weight, *gradients = (rng.standard_normal((6, 5)).astype(np.float32) for _ in range(4))
    gradients[1][2, 3], gradients[1][4, 4] = np.nan, np.inf
    cells = [Update(branches, weight) for branches in (True, False)]
    for gradient, applied in zip(gradients, (True, False, True), strict=True):
        for cell in cells:
            cell(Tensor(applied), Tensor(gradient), Tensor(np.float32(0.01)))
        for values in zip(*(cell.get_parameters() for cell in cells), strict=True):
            np.testing.assert_array_equal(*(value.asnumpy() for value in values))
    assert not np.array_equal(cells[1].weight.asnumpy(), weight)
