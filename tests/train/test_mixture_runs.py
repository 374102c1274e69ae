"""Runs on a schedule of weights: killed within a segment and gone on, with another future, and what the audit proves."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import key_effects
import mini_recipe as mini
import numpy as np
from mini_recipe import TP2_PP2
from running import Hold, steps_in, until
from test_sharded_train import DP2_EP2

from telechat_moe.cli import main
from telechat_moe.data.audit import Audit, audit
from telechat_moe.errors import BadInputError
from telechat_moe.recipe import Recipe, load
from telechat_moe.train import guard, preflight, run_state, schedule
from telechat_moe.train.loop import Loop
from telechat_moe.train.monitor import Monitor
from telechat_moe.train.ranks import RankCoordinator

FIRST = "{from_sample: 0, weights: [3, 1]}"
SECOND = "{from_sample: 10, weights: [0, 1]}"  # within a step
SCHEDULE = f"[{FIRST}, {SECOND}, {{from_sample: 30, weights: [1, 1]}}]"
OTHER_FUTURE = f"[{FIRST}, {SECOND}, {{from_sample: 24, weights: [5, 1]}}]"
OTHER_PAST = (
    f"[{FIRST}, {{from_sample: 11, weights: [0, 1]}}, {{from_sample: 30, weights: [1, 1]}}]"
)
TWO_MICRO_BATCHES = {
    "runner_config__batch_size": 1,
    "model__model_config__batch_size": 1,
    "runner_config__gradient_accumulation_steps": 2,
    "callbacks__1__gradient_accumulation_steps": 2,
}

CP2 = {
    **mini.SPREAD,
    "parallel_config__context_parallel": 2,
    "model__model_config__use_flash_attention": True,
    **TWO_MICRO_BATCHES,
    "runner_config__gradient_accumulation_steps": 4,
    "callbacks__1__gradient_accumulation_steps": 4,
}
SEQUENCE_PARTS = TP2_PP2 | {
    "parallel_config__seq_split_num": 2,
    "parallel__pipeline_config__pipeline_scheduler": "seqpipe",
    "parallel__pipeline_config__pipeline_interleave": True,
    "model__model_config__calculate_per_token_loss": True,
}
# The balance loss of a sequence is not known of its parts.
NO_BALANCE_LOSS = {"model__model_config__moe_router_load_balancing_type": "none"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """Two sources, each with validation data."""
    root = tmp_path_factory.mktemp("sources")
    for seed, name in enumerate(("web", "code")):
        (root / name).mkdir()
        mini.write_data(root / name, seed=seed)
    return root


def arguments(root: Path, output: Path, schedule: str, **changes: object) -> list[str]:
    given = {
        "train_dataset__data_loader__config__data_path": f"['{root}/web/train', '{root}/code/train']",
        "telechat_moe__mixture": schedule,
        "telechat_moe__evaluation__data_path": "null",
        "telechat_moe__evaluation__interval": 6,
        "callbacks__2__keep_checkpoint_max": 20,
    }
    return mini.arguments(root, output, **given | changes)


def recipe(root: Path, output: Path, schedule: str, **changes: object) -> Recipe:
    given = arguments(root, output, schedule, **changes)
    return load(given[1], given[4::2])


def records(output: Path, event: str, log: str = "metrics.jsonl") -> list[dict[str, Any]]:
    lines = map(json.loads, (output / log).read_text().splitlines())
    return [record for record in lines if record["event"] == event]


# ------------------------------------------------------ the loop of a run, with an engine that computes no model


class Ids:
    """A column of a batch, as the engine holds it."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def asnumpy(self) -> np.ndarray:
        """Return the values."""
        return self.values


class Engine(key_effects.Recorder):
    """An engine whose loss on validation data is the mean of their token ids."""

    def read(self, columns: Any, micro_batches: int) -> list[Any]:
        """Read a step of one micro-batch."""
        assert micro_batches == 1
        return [tuple(map(Ids, next(columns).values()))]

    def evaluate_cell(self, *batch: Any) -> Any:
        """Return the loss of a batch."""
        return key_effects._value([batch[0].asnumpy().mean()])

    evaluate_cell.set_train = lambda mode: None


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    """Run the steps of a recipe from a state of the data on, as far as ``steps``; return the state at the end."""
    key_effects.patch(monkeypatch)
    monkeypatch.setattr(key_effects, "SPIKES", {})

    def run(recipe: Recipe, state: dict[str, Any] | None = None, steps: int | None = None) -> Any:
        key_effects.FakeSaver.said = said = list[Any]()
        with preflight.open_loader(recipe) as loader:
            engine: Any = Engine(recipe, said)
            run = run_state.RunState(
                recipe, engine, loader, guard.of_recipe(recipe), RankCoordinator()
            )
            if state is not None:
                loader.load_state(state)
                run.step = run.updates = state["next_sample"] // 4
            begun, output = run.step, Path(recipe.output_dir)
            monitor = Monitor(output, recipe.train_steps, 64, begun, quiet=True, tensorboard=False)
            loop = Loop(run, schedule.from_recipe(recipe), monitor)
            loop.steps = steps or loop.steps
            loop.run()
            monitor.close()
            return json.loads(json.dumps(loader.state()))

    return run


def counts(found: Audit) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Return the segments, and planned and seen samples of each source."""
    return [
        (s["from_sample"], s["to_sample"], [(x["planned"], x["seen"]) for x in s["sources"]])
        for s in found.mixture
    ]


def test_every_source_is_evaluated(tmp_path, sources, run):
    """Each by itself, and all by the weights that are given, else by their samples."""
    names = [f"{sources}/{name}/valid" for name in ("web", "code")]
    shares = [(len(Path(f"{name}.bin").read_bytes()) // 2 - 1) // 16 for name in names]
    alone = []
    for name in names:
        one = recipe(
            sources, tmp_path / "one", SCHEDULE, telechat_moe__evaluation__data_path=f"['{name}']"
        )
        run(one)
        alone.append([record["loss"] for record in records(tmp_path / "one", "evaluation")])
        assert "loss_by_source" not in records(tmp_path / "one", "evaluation")[0]
    for given, weights in (("null", shares), (f"['3', '{names[0]}', '1', '{names[1]}']", [3, 1])):
        output = tmp_path / f"{weights[0]}"
        run(recipe(sources, output, SCHEDULE, telechat_moe__evaluation__data_path=given))
        found = records(output, "evaluation")
        assert [record["step"] for record in found] == [0, 6, 12]
        for number, record in enumerate(found):
            each = record["loss_by_source"]
            assert each == {name: alone[i][number] for i, name in enumerate(names)}
            assert len(set(each.values())) == 2
            assert record["loss"] == pytest.approx(np.average([*each.values()], weights=weights))


def test_another_future(tmp_path, sources, run, capsys):
    """From a checkpoint at sample 24 with other weights from there on and more samples; another past is refused."""
    before = recipe(sources, tmp_path / "run", SCHEDULE)
    run(before)
    found = audit(before.output_dir, before)
    assert found.problems == []
    assert "samples of each source" in found.covers
    assert counts(found) == [
        (0, 10, [(7, 7), (3, 3)]),
        (10, 30, [(0, 0), (20, 20)]),
        (30, 48, [(9, 9), (9, 9)]),
    ]
    shutil.rmtree(tmp_path / "run")
    state = run(before, steps=6)
    longer = {"train_dataset__data_loader__sizes": "[56,0,0]", "lr_schedule__total_steps": 14}
    with pytest.raises(BadInputError, match="saw 24 samples of another mixture"):
        run(recipe(sources, tmp_path / "run", OTHER_PAST, **longer), state)
    after = recipe(sources, tmp_path / "run", OTHER_FUTURE, **longer)
    run(after, state)
    found = audit(after.output_dir, after)
    assert found.problems == []
    assert (found.samples, len(found.starts)) == (56, 2)
    assert counts(found) == [
        (0, 10, [(7, 7), (3, 3)]),
        (10, 24, [(0, 0), (14, 14)]),
        (24, 56, [(26, 26), (6, 6)]),
    ]
    capsys.readouterr()
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(after.to_dict()))
    assert main(["data", "audit", str(tmp_path / "run"), "--recipe", str(file)]) == 0
    assert f"{sources}/code/train" in capsys.readouterr().out

    log = tmp_path / "run" / "samples.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    start, step = json.loads(lines[0]), json.loads(lines[2])
    start["mixture"][1][0] = 11
    step["sources"] = [4, 0]
    for number, line, problem in (
        (
            0,
            start,
            "line 1: the mixture of its steps is not the recipe's up to sample 24, where they end",
        ),
        (2, step, "step 2: the log says [4, 0] samples of the sources, the plan gives [3, 1]"),
    ):
        log.write_text("".join([*lines[:number], json.dumps(line) + "\n", *lines[number + 1 :]]))
        assert audit(after.output_dir, after).problems == [problem]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "model"),
    [
        (DP2_EP2, {}),
        (DP2_EP2 | TWO_MICRO_BATCHES, {}),
        (TP2_PP2, {}),
        (CP2, {}),
        (SEQUENCE_PARTS, NO_BALANCE_LOSS),
    ],
    ids=["dp2-ep2", "two", "tp2-pp2", "cp2", "sequence-parts"],
)
def test_processes_tell_the_sources_apart_as_one_does(tmp_path, sources, layout, model) -> None:
    """In every layout, where every process takes its share of the tokens, and other stages have no loss."""
    one, several = tmp_path / "one", tmp_path / "several"
    changes = model | {"train_dataset__data_loader__sizes": "[32,0,0]"}
    assert main(arguments(sources, one, SCHEDULE, **changes)) == 0
    assert main(arguments(sources, several, SCHEDULE, **changes, **layout)) == 0
    steps = zip(records(one, "step"), records(several, "step"), strict=True)
    for expected, found in steps:
        assert found["tokens_by_source"] == expected["tokens_by_source"]
        assert found["loss_by_source"] == pytest.approx(expected["loss_by_source"], rel=1e-5)
        mean = np.average(
            [*found["loss_by_source"].values()], weights=[*found["tokens_by_source"].values()]
        )
        assert found["lm_loss"] == pytest.approx(mean, rel=1e-6)


@pytest.mark.slow
def test_killed_within_a_segment(tmp_path, sources, start, hold: Hold):
    """Killed with SIGKILL at sample 20 of the segment from 10 to 29: the losses of a run that was left alone."""
    output, whole = tmp_path / "run", tmp_path / "whole"
    assert main(arguments(sources, whole, SCHEDULE)) == 0
    given = [item for item in arguments(sources, output, SCHEDULE) if "=" in item]
    changes = {key.replace(".", "__"): value for key, _, value in (x.partition("=") for x in given)}
    hold.at(7)
    process = start(output, **changes)
    until(lambda: steps_in(output / "samples.jsonl") >= 5, process)
    until(lambda: list((output / "checkpoints").glob("step-*")), process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    hold.release()
    assert main([*arguments(sources, output, SCHEDULE), "--resume"]) == 0
    keys = ("loss", "loss_by_source", "tokens_by_source")
    curves = [[[r[k] for k in keys] for r in records(folder, "step")] for folder in (output, whole)]
    assert curves[0] == curves[1]
    names = [f"{sources}/{name}/train" for name in ("web", "code")]
    samples = [r["sources"] for r in records(whole, "step", "samples.jsonl")]
    for step, given in zip(records(whole, "step"), samples, strict=True):
        seen = {name: 16 * n for name, n in zip(names, given, strict=True) if n}
        assert step["tokens_by_source"] == seen
        assert step["loss_by_source"].keys() == seen.keys()
        mean = np.average([*step["loss_by_source"].values()], weights=[*seen.values()])
        assert step["lm_loss"] == pytest.approx(mean, rel=1e-6)
    assert any(len(x) > 1 and len(set(x.values())) > 1 for _, x, _ in curves[0])
    found = audit(output, load(output / "recipe.json"))
    assert (found.problems, found.samples, len(found.starts)) == ([], 48, 2)
    assert counts(found)[1] == (10, 30, [(0, 0), (20, 20)])
