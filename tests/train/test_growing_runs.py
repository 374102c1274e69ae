"""Runs whose batch grows, whose rate falls to zero and whose weights are averaged: what they compute, and kill -9."""

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

ms = pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import mini_recipe as mini
from mindspore import Parameter, Tensor
from running import Hold, wait_for_step
from tiny_models import random_weights, tiny_config

from telechat_moe.checkpoint import checkpoint
from telechat_moe.cli import main
from telechat_moe.model import CausalLM
from telechat_moe.train.average import WeightAverage
from telechat_moe.train.optimizer import AdamW
from telechat_moe.train.step import TrainStep

DECAY = 0.75
BATCHES = [4, 4, 4, 8, 8, 8, 8]
SETTINGS = {
    "runner_config__gradient_accumulation_steps": 2,
    "callbacks__1__gradient_accumulation_steps": 2,
    "train_dataset__data_loader__sizes": f"[{sum(BATCHES)},0,0]",
    "telechat_moe__step_batch_size_schedule": "'0:4 150:8'",  # tokens; a sample has 16
    "lr_schedule__type": "WarmUpStableDecayLR",
    "lr_schedule__decay_start_steps": 4,
    "lr_schedule__lr_end": 0.0,
    "telechat_moe__lr_wsd_decay_style": "minus_sqrt",
    "telechat_moe__ema__decay": DECAY,
    "callbacks__2__save_checkpoint_steps": 1,
    "callbacks__2__keep_checkpoint_max": 20,
}


def steps(output: Path) -> list[dict]:
    found = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [r for r in found if r["event"] == "step"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A run that nothing happens to."""
    output = tmp_path_factory.mktemp("growing") / "run"
    assert main(mini.arguments(data, output, **SETTINGS)) == 0
    return output


def saved(output: Path, step: int) -> dict[str, dict[str, np.ndarray]]:
    return checkpoint.load(output / f"checkpoints/step-{step:08d}").tensors


def test_the_batch_grows_and_the_rate_falls_to_zero(whole: Path) -> None:
    assert [r["tokens"] for r in steps(whole)] == [16 * batch for batch in BATCHES]
    log = [json.loads(line) for line in (whole / "samples.jsonl").read_text().splitlines()]
    assert [r["count"] for r in log if r["event"] == "step"] == BATCHES
    rates = [r["learning_rate"] for r in steps(whole)]
    left = [1 - np.sqrt(t / 3) for t in range(3)]
    np.testing.assert_allclose(rates[4:], np.multiply(left, 3e-3), rtol=1e-12)
    assert main(["data", "audit", str(whole)]) == 0


def test_the_average_is_that_of_the_weights_of_each_step(whole: Path) -> None:
    weights = [saved(whole, step)["model"] for step in range(1, len(BATCHES) + 1)]
    average = {name: x.astype(np.float64) for name, x in weights[0].items()}
    for number, now in enumerate(weights, 1):
        if number > 1:
            average = {n: DECAY * x + (1 - DECAY) * now[n] for n, x in average.items()}
        found = saved(whole, number)["ema"]
        assert found.keys() == {f"ema.{name}" for name in average}
        for name, expected in average.items():
            assert number > 1 or (found[f"ema.{name}"] == now[name]).all()
            np.testing.assert_allclose(found[f"ema.{name}"], expected, rtol=1e-5, atol=1e-7)
    moved = [n for n, x in weights[-1].items() if (x != found[f"ema.{n}"]).any()]
    assert len(moved) > 10


@pytest.mark.slow
def test_an_average_does_not_touch_training(whole: Path, data: Path, tmp_path: Path) -> None:
    changes = SETTINGS | {"telechat_moe__ema": "null"}
    del changes["telechat_moe__ema__decay"]
    assert main(mini.arguments(data, tmp_path / "run", **changes)) == 0
    assert [r["loss"] for r in steps(tmp_path / "run")] == [r["loss"] for r in steps(whole)]
    assert "ema" not in saved(tmp_path / "run", 7)
    # An average that begins in the middle begins with the weights that are there.
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000007")
    assert main([*mini.arguments(data, tmp_path / "run", **SETTINGS), "--resume"]) == 0
    ours = saved(tmp_path / "run", 7)
    for name, x in saved(tmp_path / "run", 6)["model"].items():
        expected = DECAY * x.astype(np.float64) + (1 - DECAY) * ours["model"][name]
        np.testing.assert_allclose(ours["ema"][f"ema.{name}"], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 4])
def test_killed_and_resumed_bit_for_bit(
    whole: Path, start, tmp_path: Path, hold: Hold, step: int
) -> None:
    output = tmp_path / "run"
    hold.at(step)
    process = start(output, **SETTINGS)
    wait_for_step(output, step, process)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    hold.release()
    process = start(output, "--resume", **SETTINGS)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    keys = ("step", "loss", "grad_norm", "learning_rate", "tokens")
    expected = [[r[key] for key in keys] for r in steps(whole)]
    assert [[r[key] for key in keys] for r in steps(output)] == expected
    ours, theirs = saved(output, len(BATCHES)), saved(whole, len(BATCHES))
    assert ours.keys() == theirs.keys() == {"model", "optimizer", "ema"}
    for group, tensors in theirs.items():
        for name, x in tensors.items():
            assert ours[group][name].tobytes() == x.tobytes(), name


@pytest.mark.slow
def test_fewer_micro_batches_than_the_step_was_built_for() -> None:
    """A step of one micro-batch is that of a step without accumulation, also after one of three."""

    def build(micro_batches: int) -> TrainStep:
        ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
        model = CausalLM(tiny_config())
        random_weights(model, 0)
        optimizer = AdamW(model.set_train().trainable_params(), (0.9, 0.95), 1e-8, 0.1)
        return TrainStep(model, optimizer, 1.0, micro_batches).set_train()

    rng = np.random.default_rng(0)
    position = np.tile(np.arange(16, dtype=np.int32), (2, 1))
    windows = [rng.integers(0, 96, (2, 17)).astype(np.int32) for _ in range(5)]
    batches = [
        [
            Tensor(x)
            for x in (ids[:, :-1].copy(), ids[:, 1:].copy(), np.ones((2, 16), "f4"), position)
        ]
        for ids in windows
    ]
    growing, found = build(3), []
    for number, rows in enumerate(([0], [1, 2, 3], [4]), 1):
        growing.set_micro_batches(len(rows))
        for row in rows[:-1]:
            growing.accumulate(*batches[row])
        out = growing(*growing.optimizer.scalars(number, 1e-3), *batches[rows[-1]])
        found.append((float(out[0].asnumpy()[0]), float(out[1].asnumpy())))
    plain, expected = build(1), []
    for number, rows in enumerate(([0], [1, 2, 3], [4]), 1):
        # The same as one batch of all rows: every micro-batch has as many tokens.
        together = [
            Tensor(np.concatenate([batches[r][i].asnumpy() for r in rows])) for i in range(4)
        ]
        out = plain(*plain.optimizer.scalars(number, 1e-3), *together)
        expected.append((float(out[0].asnumpy()[0]), float(out[1].asnumpy())))
    np.testing.assert_allclose(found, expected, rtol=2e-5)


@pytest.mark.torch
def test_average_equals_torchs() -> None:
    torch = pytest.importorskip("torch", reason="pip install torch==2.13.0")
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    rng = np.random.default_rng(0)
    given = [rng.standard_normal((7, 5)).astype(np.float32) for _ in range(6)]
    layer = torch.nn.Linear(5, 7, bias=False)
    theirs = AveragedModel(layer, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    weight = Parameter(Tensor(np.zeros((7, 5), np.float32)), name="w")
    ours = WeightAverage({"w": weight}, 0.9)
    for number, value in enumerate(given, 1):
        weight.set_data(Tensor(value))
        ours.update(number, Tensor(True))
        layer.weight.data = torch.from_numpy(value)
        theirs.update_parameters(layer)
        expected = theirs.module.weight.detach().numpy()
        np.testing.assert_allclose(ours.averages["ema.w"].asnumpy(), expected, rtol=2e-6, atol=1e-7)
