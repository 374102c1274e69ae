"""The loss-spike guard: its rules, a step that is skipped, a run that goes back."""

import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import mini_recipe as mini
import spiky_data
from spiky_data import BATCH, SPIKE, STEPS

from telechat_moe.checkpoint import checkpoint
from telechat_moe.cli import main
from telechat_moe.errors import CheckFailedError
from telechat_moe.recipe import RecipeError
from telechat_moe.recipe.schema.own import LossGuard
from telechat_moe.train.guard import Guard, Limits
from telechat_moe.train.monitor import Monitor
from telechat_moe.train.trainer import Trainer

RULES = "{action: ACTION, window: 20, min_steps: 10, loss_factor: 1.5, norm_factor: null}"


def rules(action: str) -> dict[str, object]:
    return {"telechat_moe__loss_guard": RULES.replace("ACTION", action)}


def records(output: Path, *events: str) -> list[dict]:
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["event"] in events]


def curve(output: Path) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of every step."""
    return [(r["loss"], r["grad_norm"]) for r in records(output, "step")]


# ----------------------------------------------------------------------------------------- rules


def filled(guard: Guard, losses: list[float], norms: list[float]) -> Guard:
    for i, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        assert guard.judge(i + 1, loss, norm, True) is None
    return guard


def test_limits_are_multiples_of_the_median():
    guard = Guard(LossGuard(window=5, min_steps=5, norm_factor=4.0, loss_factor=1.5))
    losses, norms = [9.0, 2.0, 3.0, 4.0, 2.5, 2.25], [50.0, 1.0, 2.0, 0.5, 1.0, 3.0]
    filled(guard, losses[:4], norms[:4])
    assert guard.limits() == Limits(math.inf, math.inf)
    filled(guard, losses[4:], norms[4:])  # the first pair has left the window
    median = statistics.median(losses[1:])
    assert guard.limits() == Limits(4.0 * 1.0, float(np.float32(1.5 * median)))


def test_limits_in_standard_deviations():
    dice = np.random.default_rng(0)
    losses = list(dice.normal(3.0, 0.2, 1001))
    rules = LossGuard(window=1001, min_steps=1, norm_factor=None, loss_factor=None, sigma=6.0)
    guard = filled(Guard(rules), losses, losses)
    assert guard.limits().loss == pytest.approx(3.0 + 6 * 0.2, abs=0.15)


def test_what_is_called_a_spike():
    guard = Guard(LossGuard(window=4, min_steps=2, norm_factor=4.0, loss_factor=1.5))
    filled(guard, [2.0, 2.0], [1.0, 1.0])
    by_norm = guard.judge(3, 2.0, 4.0, False)
    assert (by_norm.reason, by_norm.limit, by_norm.median) == ("gradient norm", 4.0, 1.0)
    assert guard.judge(3, 3.0, 1.0, False).reason == "loss"
    assert guard.judge(3, float("nan"), 1.0, False).reason == "not finite"
    assert len(guard.losses) == 2  # none of them enters the window


def test_the_window_survives_a_checkpoint():
    rules = LossGuard(window=4, min_steps=2)
    guard = filled(Guard(rules), [1.1, 2.3, 1 / 3], [0.1, 0.2, 0.7])
    again = Guard(rules)
    again.load_state(json.loads(json.dumps(guard.state())))
    assert again.limits() == guard.limits()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"telechat_moe__loss_guard": "{window: 4, min_steps: 5}"}, "at most 4"),
        (
            {"telechat_moe__loss_guard": "{action: rollback}", "callbacks": "[]"},
            "CheckpointMonitor",
        ),
        ({"runner_wrapper__use_skip_data_by_global_norm": True}, "at the top level instead"),
        ({"runner_wrapper__global_norm_spike_threshold": 3.0}, "monitor_config"),
    ],
)
def test_rules_that_cannot_be(tmp_path, data, change, message):
    with pytest.raises(RecipeError, match=message):
        spiky_data.recipe(data, tmp_path, **change)


# ------------------------------------------------------------------------------------ in training


@pytest.fixture(scope="module")
def noisy(tmp_path_factory) -> Path:
    return spiky_data.write(tmp_path_factory.mktemp("noisy"), [SPIKE])


@pytest.fixture(scope="module")
def unguarded(tmp_path_factory, noisy) -> Path:
    output = tmp_path_factory.mktemp("unguarded") / "run"
    Trainer(spiky_data.recipe(noisy, output), plain=True).run()
    return output


def left_out(
    noisy: Path, output: Path, done: int, first: int, *, count_skip: bool
) -> list[tuple[float, float]]:
    """Train without a guard, and after ``done`` steps go on at sample ``first`` as if nothing else was there."""
    trainer = Trainer(spiky_data.recipe(noisy, output), plain=True)
    found = []
    with Monitor(output, STEPS, 1, quiet=True) as monitor, trainer.loader:
        loop = trainer.loop(monitor)
        while trainer.state.steps_left:
            if trainer.state.step == done and trainer.loader.next_sample < first:
                trainer.loader.seek(first)
                trainer.state.step += count_skip
            loop.train_step()
            found = curve(output)
    return found


def test_the_planted_batch_is_a_spike(unguarded):
    losses = [loss for loss, _ in curve(unguarded)]
    assert losses[SPIKE - 1] > 2 * statistics.median(losses[SPIKE - 21 : SPIKE - 1])
    assert max(losses[30 : SPIKE - 1]) < 1.5 * statistics.median(losses[30 : SPIKE - 1])


@pytest.mark.slow
def test_skip(tmp_path, noisy, unguarded):
    """The update is left out: parameters and moments keep every bit; the rest is as if the batch were not there."""
    output = tmp_path / "run"
    trainer = Trainer(spiky_data.recipe(noisy, output, **rules("skip")), plain=True)
    with Monitor(output, STEPS, 1, quiet=True) as monitor, trainer.loader:
        loop = trainer.loop(monitor)
        while trainer.state.step < STEPS:
            before = {
                n: p.asnumpy().copy()
                for g in trainer.engine.parameters().values()
                for n, p in g.items()
            }
            loop.train_step()
            spike = loop.skipped.spike
            same = all(
                np.array_equal(before[n], p.asnumpy())
                for g in trainer.engine.parameters().values()
                for n, p in g.items()
            )
            assert same == (spike is not None) == (trainer.state.step == SPIKE)
    guarded, free = curve(output), curve(unguarded)
    assert guarded[:SPIKE] == free[:SPIKE]
    assert guarded[SPIKE:] != free[SPIKE:]
    expected = left_out(noisy, tmp_path / "expected", SPIKE - 1, SPIKE * BATCH, count_skip=True)
    assert guarded[: SPIKE - 1] + guarded[SPIKE:] == expected
    (event,) = records(output, "guard")
    median = statistics.median(loss for loss, _ in guarded[SPIKE - 21 : SPIKE - 1])
    assert (event["step"], event["action"], event["reason"]) == (SPIKE, "skip", "loss")
    assert event["limit"] == pytest.approx(1.5 * median, rel=1e-6)
    assert event["median"] == pytest.approx(median)
    assert trainer.state.updates == STEPS - 1


@pytest.mark.slow
def test_roll_back(tmp_path, noisy, capsys):
    """From the newest checkpoint before it, without the batches up to the spike, as if they had never been."""
    output = tmp_path / "run"
    assert main(mini.arguments(noisy, output, **spiky_data.changes(**rules("rollback")))) == 0
    back = (SPIKE - 1) // 10 * 10
    (event,) = records(output, "rollback")
    assert (event["step"], event["to_step"], event["from_step"]) == (back, back, SPIKE)
    assert event["left_out"] == [back * BATCH, SPIKE * BATCH]
    steps = [r["step"] for r in records(output, "step")]
    # Epochs have no more samples for those that were left out.
    assert steps == list(range(1, STEPS + 1 - (SPIKE - back)))
    assert f"epochs end at step {steps[-1]} instead of {STEPS}" in capsys.readouterr().err
    expected = left_out(noisy, tmp_path / "expected", back, SPIKE * BATCH, count_skip=False)
    assert curve(output) == expected
    undone = (output / "metrics.rolled_back.jsonl").read_text().splitlines()
    assert [r["step"] for r in map(json.loads, undone) if r["event"] == "step"] == list(
        range(back + 1, SPIKE + 1)
    )


@pytest.mark.slow
def test_a_run_that_is_resumed_after_going_back(tmp_path, noisy):
    """Its checkpoint knows of the data that were left out, wherever it is killed."""
    output, changes = tmp_path / "run", spiky_data.changes(**rules("rollback"))
    assert main(mini.arguments(noisy, output, **changes)) == 0
    whole = curve(output)
    for step in (60, 50):
        for path in checkpoint.list_checkpoints(output / "checkpoints"):
            if int(path.name.split("-")[1]) > step:
                path.rename(tmp_path / f"{path.name}-{step}")
        (output / "summary.json").unlink()
        assert main([*mini.arguments(noisy, output, **changes), "--resume"]) == 0
        assert curve(output) == whole
        assert len(records(output, "rollback")) == 1


@pytest.mark.slow
def test_it_goes_back_so_often_and_no_oftener(tmp_path, capsys):
    data = spiky_data.write(tmp_path, [SPIKE - 15, SPIKE])
    limited = rules("rollback")["telechat_moe__loss_guard"].replace("{", "{max_rollbacks: 1, ")
    output = tmp_path / "run"
    arguments = mini.arguments(data, output, **spiky_data.changes(telechat_moe__loss_guard=limited))
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert "gone back 1 time(s) already (telechat_moe.loss_guard.max_rollbacks is 1)" in error
    assert "loss" in error
    assert len(records(output, "rollback")) == 1


def test_mindformers_fixed_threshold(tmp_path, data):
    """`use_skip_data_by_global_norm`: not below the threshold is skipped; so many in a row stop the run."""
    keys = {
        "use_skip_data_by_global_norm": True,
        "monitor_config": "{global_norm_spike_threshold: 1.0e-3, global_norm_spike_count_threshold: 3}",
    }
    recipe = spiky_data.recipe(data, tmp_path / "run", **keys)
    trainer = Trainer(recipe, plain=True)
    before = {n: p.asnumpy().copy() for n, p in trainer.engine.parameters()["model"].items()}
    with pytest.raises(
        CheckFailedError, match=r"3 steps in a row.*global_norm_spike_count_threshold"
    ):
        trainer.run()
    assert all(
        np.array_equal(before[n], p.asnumpy())
        for n, p in trainer.engine.parameters()["model"].items()
    )
    events = records(tmp_path / "run", "guard")
    assert [e["reason"] for e in events] == ["gradient norm"] * 3
    assert events[0]["limit"] == pytest.approx(1e-3)
