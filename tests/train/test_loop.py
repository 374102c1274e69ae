"""The steps of a run with an engine that only adds up what it reads: what is trained on, evaluated, saved, gone back to."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

ms = pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import mini_recipe as mini
from mindspore import Parameter, Tensor, nn
from test_guard import records

from telechat_moe import timings
from telechat_moe.checkpoint import checkpoint
from telechat_moe.cli import main
from telechat_moe.data import Loader, open_recipe
from telechat_moe.errors import CheckFailedError
from telechat_moe.recipe import Recipe, load
from telechat_moe.train import trainer as training
from telechat_moe.train.callbacks import _balance
from telechat_moe.train.engine import OneProcess
from telechat_moe.train.step import StepOutput, tensors
from telechat_moe.train.trainer import Trainer

STEPS, BATCH = mini.STEPS, 4
EVERY = {"telechat_moe__evaluation__interval": 5}
GUARD = "{action: ACTION, window: 20, min_steps: 3, loss_factor: 1.5, norm_factor: null}"


class Sums(OneProcess):
    """An engine whose only weight is the sum of the tokens that were trained on; a model and its cell at once."""

    average = None
    operators = "sums"

    def __init__(self, recipe: Recipe, losses: dict[int, float]) -> None:
        self.recipe, self.losses, self.model = recipe, losses, nn.Cell()
        self.weight = Parameter(Tensor(np.zeros(1, np.float32)), name="sum")
        self.model.insert_param_to_cell("sum", self.weight)
        self.numbers: list[int] = []
        self.evaluate_cell: Any = Evaluation(self.weight)

    def initialize(self, seed: int) -> None:
        pass

    def parameters(self) -> dict[str, dict[str, Parameter]]:
        return {"model": {"sum": self.weight}}

    def read(self, columns: Any, micro_batches: int | None = None) -> list[Any]:
        return [tensors(next(columns)) for _ in range(micro_batches or 1)]

    def launch(
        self, batches: Any, number: int, rate: float, limits: Any, before: None = None
    ) -> Any:
        self.numbers.append(number)
        loss = self.losses.get(len(self.numbers), 4.0)
        applied = np.isfinite(loss) and loss < limits[1]
        if applied:
            total = sum(float(ids.asnumpy().sum()) for ids, *_ in batches)
            self.weight.set_data(Tensor(self.weight.asnumpy() + np.float32(total)))
        losses, load = np.array([loss, 0, 0]), np.array([[1.0]])
        output = StepOutput(losses, np.float32(1.0), None, np.bool_(applied), load, None)
        return SimpleNamespace(fetch=lambda: output)

    def culprit(self, output: StepOutput) -> str:
        return "the sum is to blame"


class Evaluation:
    """An evaluation whose loss is the weight."""

    def __init__(self, weight: Parameter) -> None:
        self.weight = weight

    def set_train(self, mode: bool = True) -> None:
        pass

    def __call__(self, *batch: Tensor) -> Tensor:
        return Tensor(self.weight.asnumpy())


@pytest.fixture
def trainer(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch):
    """Return what makes a trainer with the losses of its updates, by their number from 1; others lose 4."""

    def make(losses: dict[int, float] | None = None, resume: bool = False, **changes: Any) -> Any:
        monkeypatch.setattr(Trainer, "_engine", lambda self, job: Sums(self.recipe, losses or {}))
        words = mini.arguments(data, tmp_path / "run", **changes)
        return Trainer(load(words[1], words[4::2], use="train"), plain=True, resume=resume)

    return make


def batch_sums(recipe: Recipe) -> list[float]:
    """The tokens of each batch, in the order of the data."""
    with Loader(open_recipe(recipe), BATCH, epochs=2) as loader:
        return [float(next(loader)["input_ids"].sum()) for _ in range(2 * STEPS)]


def evaluations(output: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in records(output, "evaluation")}


def newest(output: Path) -> checkpoint.Checkpoint:
    saved = checkpoint.latest(output / "checkpoints")
    assert saved is not None
    return saved


def test_a_run_trains_evaluates_and_saves(trainer, tmp_path: Path):
    made = trainer(**EVERY)
    sums = batch_sums(made.recipe)
    summary = made.run()
    assert made.engine.numbers == list(range(1, STEPS + 1))
    assert evaluations(tmp_path / "run") == {s: sum(sums[:s]) for s in (0, 5, 10, STEPS)}
    saved = newest(tmp_path / "run")
    assert (saved.step, saved.state["data"]["next_sample"]) == (STEPS, STEPS * BATCH)
    assert saved.tensors["model"]["sum"] == sum(sums[:STEPS])
    assert (summary.steps, summary.skipped_steps, summary.finished) == (STEPS, 0, True)
    assert summary.validation_loss == sum(sums[:STEPS])
    seconds = [r["seconds"] for r in records(tmp_path / "run", "step")][1:]
    tokens = BATCH * made.recipe.model_config.seq_length
    assert summary.tokens_per_second == pytest.approx(tokens / np.median(seconds), rel=0.05)
    assert main(["data", "audit", str(tmp_path / "run")]) == 0
    assert summary.checkpoint == f"checkpoints/step-{STEPS:08d}"


def test_the_time_of_saving_and_of_evaluating_is_told_apart(
    trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = trainer(**EVERY)
    save, evaluate = made.state.save, training.Loop.evaluate
    monkeypatch.setattr(made.state, "save", lambda *args: (time.sleep(0.2), save(*args)))
    monkeypatch.setattr(
        training.Loop, "evaluate", lambda self: (time.sleep(0.3), evaluate(self))[1]
    )
    made.run()
    about, rows = timings.read(timings.file_of(tmp_path / "run", 0))
    columns = dict(zip(about["columns"], rows.T, strict=True))
    saves = [step % 3 == 0 for step in range(1, STEPS + 1)]
    evaluates = [step in (5, 10, STEPS) for step in range(1, STEPS + 1)]
    assert (columns["save"][saves] >= 0.2).all()
    assert (columns["evaluation"][evaluates] >= 0.3).all()


def test_a_spike_is_skipped(trainer, tmp_path: Path):
    made = trainer({7: 9.0}, telechat_moe__loss_guard=GUARD.replace("ACTION", "skip"))
    sums = batch_sums(made.recipe)
    summary = made.run()
    assert made.engine.weight.asnumpy() == sum(sums[:STEPS]) - sums[6]
    assert (summary.steps, summary.skipped_steps) == (STEPS, 1)
    assert (made.state.skipped, made.state.skipped_in_a_row) == (1, 0)
    assert made.engine.numbers == [1, 2, 3, 4, 5, 6, 7, 7, 8, 9, 10, 11]
    assert newest(tmp_path / "run").state["skipped"] == 1


def test_a_run_goes_back_before_a_spike(trainer, tmp_path: Path):
    """To the checkpoint of step 6; what it read since is left out, and the run ends two steps earlier, with its epoch."""
    made = trainer({8: 9.0}, **EVERY, telechat_moe__loss_guard=GUARD.replace("ACTION", "rollback"))
    sums = batch_sums(made.recipe)
    trained = sums[:6] + sums[8:STEPS]
    summary = made.run()
    output = tmp_path / "run"
    assert (summary.steps, summary.skipped_steps) == (STEPS - 2, 0)
    assert evaluations(output) == {s: sum(trained[:s]) for s in (0, 5, STEPS - 2)}
    (record,) = records(output, "rollback")
    assert record["left_out"] == [6 * BATCH, 8 * BATCH]
    assert [r["step"] for r in records(output, "step")] == list(range(1, STEPS - 1))
    saved = newest(output)
    assert saved.tensors["model"]["sum"] == sum(trained)
    assert saved.state["data"]["next_sample"] == STEPS * BATCH


def test_a_run_that_died_after_going_back_leaves_the_same_out(trainer, tmp_path: Path):
    rules = {"telechat_moe__loss_guard": GUARD.replace("ACTION", "rollback")}
    made = trainer({8: 9.0, 11: 9.0}, **rules)
    sums = batch_sums(made.recipe)
    made.engine.launch = dying(made.engine.launch, at=10)
    with pytest.raises(KeyboardInterrupt):
        made.run()
    again = trainer(resume=True, **rules)
    again.run()
    assert again.engine.weight.asnumpy() == sum(sums[:6]) + sum(sums[8:STEPS])
    assert len(again.state.rollbacks) == 1


def dying(launch: Any, at: int) -> Any:
    calls: list[int] = []

    def last(*args: Any) -> StepOutput:
        calls.append(len(calls) + 1)
        if len(calls) == at:
            raise KeyboardInterrupt
        return launch(*args)

    return last


def test_a_run_goes_back_so_often_and_no_oftener(trainer):
    rules = GUARD.replace("ACTION", "rollback, max_rollbacks: 1")
    with pytest.raises(
        CheckFailedError,
        match=r"loss 9 is not below 6, median of \d+ steps 4, .*gone back 1 time\(s\) already",
    ):
        trainer({8: 9.0, 10: 9.0}, telechat_moe__loss_guard=rules).run()


def test_steps_in_a_row_that_are_not_finite_end_the_run(trainer, tmp_path: Path):
    bad = dict.fromkeys(range(4, STEPS + 1), float("nan"))
    made = trainer({2: float("nan"), **bad}, telechat_moe__max_skipped_steps=3)
    with pytest.raises(CheckFailedError, match=r"stopped at step 7: 4 steps in a row.*to blame"):
        made.run()
    assert (made.state.skipped, made.state.skipped_in_a_row) == (5, 4)
    assert made.state.updates == 2
    reasons = [json.dumps(r) for r in records(tmp_path / "run", "guard")]
    assert len(reasons) == 5


@pytest.mark.parametrize(
    ("loads", "dropped", "expected"),
    [
        (np.zeros((0,)), np.zeros(1), ([], 0.0)),
        (np.zeros((2, 4)), None, ([], 0.0)),
        ([[3, 1], [2, 2]], None, ([1.5, 1.0], None)),
        ([[3, 1], [2, 2]], [2.0], ([1.5, 1.0], 0.25)),
    ],
    ids=["dense", "no tokens", "not counted", "dropped"],
)
def test_the_balance_of_a_step(loads: Any, dropped: Any, expected: Any):
    one = np.float32(1.0)
    assert _balance(StepOutput(one, one, None, one, np.array(loads), dropped)) == expected
