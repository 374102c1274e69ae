"""`telechat_moe.balance_attention` in training: the same loss and gradient, a record that the audit proves, refusals."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import key_effects
import mini_recipe as mini
from mini_recipe import DP2

from telechat_moe.cli import main
from telechat_moe.launch.sharded_run import one_process
from telechat_moe.recipe import Recipe, RecipeError, load
from telechat_moe.train import guard, preflight, run_state, schedule
from telechat_moe.train.loop import Loop
from telechat_moe.train.monitor import Monitor
from telechat_moe.train.ranks import RankCoordinator
from telechat_moe.train.step import tensors
from telechat_moe.train.trainer import Trainer

EPOCHS = 2
DOCUMENTS = {
    "train_dataset__input_columns": "null",
    "train_dataset__construct_args_key": "null",
    "train_dataset__data_loader__config__create_attention_mask": True,
    "train_dataset__data_loader__config__reset_attention_mask": True,
    "train_dataset__data_loader__sizes": f"[{mini.STEPS * 8 // EPOCHS},0,0]",
    "runner_config__epochs": EPOCHS,
    "callbacks__2__keep_checkpoint_max": 20,
}
ONE = {"runner_config__gradient_accumulation_steps": 2}
ONE |= {"callbacks__1__gradient_accumulation_steps": 2}
TWO = {**DP2, **ONE}
DEALT = {**TWO, "telechat_moe__balance_attention": True}


def recipe_of(data: Path, output: Path, **changes: object) -> Recipe:
    arguments = mini.arguments(data, output, **{**DOCUMENTS, **changes})
    return load(arguments[1], arguments[4::2], use="train")


class Reader(key_effects.Recorder):
    """An engine that reads its micro-batches and computes nothing."""

    def read(self, columns, count=None):
        return [tensors(next(columns)) for _ in range(self.recipe.micro_batches)]


def logged(recipe: Recipe) -> list[dict]:
    """Run the loop of rank 0 and return the steps in samples.jsonl."""
    output = Path(recipe.output_dir)
    output.mkdir(parents=True)
    (output / "recipe.json").write_text(json.dumps(recipe.given))
    with pytest.MonkeyPatch.context() as patch, preflight.open_loader(recipe) as loader:
        key_effects.patch(patch)
        key_effects.FakeSaver.said = []
        engine = Reader(recipe, [])
        state = run_state.RunState(
            recipe, engine, loader, guard.of_recipe(recipe), RankCoordinator()
        )
        with Monitor(output, recipe.train_steps, 1, stream=io.StringIO(), tensorboard=False) as m:
            Loop(state, schedule.from_recipe(recipe), m).run()
    said = map(json.loads, (output / "samples.jsonl").read_text().splitlines())
    return [line for line in said if line["event"] == "step"]


def audited(output: Path) -> tuple[int, dict]:
    report = output.parent / "audit.json"
    code = main(["data", "audit", str(output), "--json", str(report)])
    return code, json.loads(report.read_text())


@pytest.fixture(scope="module")
def dealt(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """The log of a run to whose ranks samples are dealt."""
    output = tmp_path_factory.mktemp("dealt") / "run"
    logged(recipe_of(data, output, **DEALT))
    return output


@pytest.mark.slow
def test_loss_and_gradient_are_those_of_samples_in_order(tmp_path: Path, data: Path) -> None:
    small = {"model__model_config__num_hidden_layers": 1}
    small |= {"model__model_config__first_k_dense_replace": 0}
    recipe = recipe_of(data, tmp_path / "run", **DEALT, **small)
    trainer = Trainer(one_process(recipe), overwrite=True)
    engine, loader, found = trainer.engine, trainer.loader, {}
    for deal_to in (None, preflight.dealt_to(recipe)):
        loader.deal_to = deal_to
        loader.seek(0)
        read, results = [], []
        for _ in range(3):
            batches = engine.read(loader)
            running = engine.launch(batches, 1, 1e-3, (0.0, 0.0))  # no update is below these limits
            output = running.fetch()
            assert not output.applied
            results.append([*output.losses, output.norm])
            read.append([batch[0].asnumpy().tolist() for batch in batches])
        found[deal_to] = read, np.array(results)
    loader.close()
    (in_order, a), (moved, b) = found.values()
    for one, other in zip(in_order, moved, strict=True):
        assert sorted([*one[0], *one[1]]) == sorted([*other[0], *other[1]])
        assert sorted(one[0]) != sorted(other[0])
    np.testing.assert_allclose(b, a, rtol=1e-6)


def curve(output: Path) -> np.ndarray:
    """Return loss and gradient norm of every step of a run."""
    said = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return np.array([(r["loss"], r["grad_norm"]) for r in said if r["event"] == "step"])


@pytest.mark.slow
def test_two_processes_to_which_samples_are_dealt_compute_what_one_does(
    tmp_path: Path, data: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for output, changes in ((one, ONE), (two, DEALT)):
        assert main(mini.arguments(data, output, **DOCUMENTS, **changes)) == 0
    assert len(curve(two)) == mini.STEPS
    np.testing.assert_allclose(curve(two), curve(one), rtol=1e-5)
    said = map(json.loads, (two / "samples.jsonl").read_text().splitlines())
    orders = [line["order"] for line in said if line["event"] == "step"]
    assert any(np.ravel(order).tolist() != list(range(8)) for order in orders)
    code, found = audited(two)
    assert (code, found["problems"]) == (0, [])


def test_each_rank_gets_what_the_log_says(tmp_path: Path, data: Path, dealt: Path) -> None:
    """Every step has the samples that it has without dealing, in another order, and the audit finds each once."""
    said = map(json.loads, (dealt / "samples.jsonl").read_text().splitlines())
    steps = [line for line in said if line["event"] == "step"]
    before = logged(recipe_of(data, tmp_path / "run", **TWO))
    moved = 0
    for step, other in zip(steps, before, strict=True):
        order = np.array(step["order"])
        assert order.shape == (2, 2, 2)
        assert sorted(order.ravel().tolist()) == list(range(8))
        assert (step["first"], step["count"]) == (other["first"], other["count"])
        assert "order" not in other
        moved += step["content"] != other["content"]
    assert moved > mini.STEPS // 2
    code, found = audited(dealt)
    assert (code, found["problems"], found["epochs"]) == (0, [], EPOCHS)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda order: [[[1, 1], *order[0][1:]], *order[1:]], "does not name each of its 8"),
        (lambda order: [[[0], [1, 2]]], "does not name each of its 8"),
        (lambda order: order[::-1], "its token ids are not those of samples"),
    ],
)
def test_an_order_that_is_not_the_one_read_is_named(
    tmp_path: Path, dealt: Path, change, says: str
) -> None:
    shutil.copytree(dealt, tmp_path / "run")
    log = tmp_path / "run" / "samples.jsonl"
    said = [json.loads(line) for line in log.read_text().splitlines()]
    said[4]["order"] = change(said[4]["order"])
    log.write_text("".join(json.dumps(line) + "\n" for line in said))
    code, found = audited(tmp_path / "run")
    assert code == 1
    assert any(p.startswith(f"step {said[4]['step']}: ") and says in p for p in found["problems"])


@pytest.mark.parametrize(
    ("changes", "found", "expected"),
    [
        (
            {
                **DEALT,
                "train_dataset__data_loader__config__reset_attention_mask": False,
            },
            "attention across documents",
            "reset_attention_mask True",
        ),
        (
            {**ONE, "telechat_moe__balance_attention": True},
            "one data-parallel rank and no pipeline",
            "data_parallel > 1",
        ),
        (
            {
                **DEALT,
                "runner_config__batch_size": 1,
                "model__model_config__batch_size": 1,
                "runner_config__gradient_accumulation_steps": 1,
                "callbacks__1__gradient_accumulation_steps": 1,
            },
            "one sample a step for each rank",
            "more micro-batches",
        ),
    ],
)
def test_dealing_without_effect_is_refused(
    tmp_path: Path, data: Path, changes: dict, found: str, expected: str
) -> None:
    with pytest.raises(RecipeError) as error:
        recipe_of(data, tmp_path / "run", **changes)
    (problem,) = error.value.problems
    assert problem.key == "telechat_moe.balance_attention"
    assert found in problem.found
    assert expected in problem.expected
