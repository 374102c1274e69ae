"""The moving average of runs on several processes: NumPy's, untouched training, kill -9, other layouts, `ckpt average`."""

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = [pytest.mark.mindspore, pytest.mark.slow]

import mini_recipe as mini
from running import Hold, rank, wait_for_ends, wait_for_step
from safetensors.numpy import load_file
from test_sharded_train import DP2_EP2, TP2_PP2, records

from telechat_moe.checkpoint import checkpoint
from telechat_moe.cli import main

DECAY, STEPS = 0.75, 6
RUN = {
    "train_dataset__data_loader__sizes": f"[{4 * STEPS},0,0]",
    "telechat_moe__ema__decay": DECAY,
    "callbacks__2__save_checkpoint_steps": 1,
    "callbacks__2__keep_checkpoint_max": 20,
}
ZERO = {
    "parallel__enable_parallel_optimizer": True,
    "parallel__parallel_optimizer_config__parallel_optimizer_threshold": 0,
}
Groups = dict[str, dict[str, np.ndarray]]


def saved(output: Path, step: int) -> Groups:
    return checkpoint.load(output / f"checkpoints/step-{step:08d}").tensors


def train(data: Path, output: Path, *flags: str, **changes: object) -> Path:
    assert main([*mini.arguments(data, output, **changes), *flags]) == 0
    return output


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A run on two processes, which shard experts and, by ZeRO-1, all other weights."""
    return train(data, tmp_path_factory.mktemp("two") / "run", **RUN, **DP2_EP2, **ZERO)


def follows(output: Path, steps: range) -> None:
    """Hold the average of every step against float64 from the weights of all steps before."""
    average: dict[str, np.ndarray] = {}
    for step in steps:
        now, found = saved(output, step)["model"], saved(output, step)["ema"]
        assert found.keys() == {f"ema.{name}" for name in now}
        for name, weight in now.items():
            before = average.get(name)
            kept = 0 if before is None else DECAY * before
            average[name] = kept + (1 if before is None else 1 - DECAY) * weight.astype(np.float64)
            np.testing.assert_allclose(found[f"ema.{name}"], average[name], rtol=1e-5, atol=1e-7)


def equal(found: Groups, expected: Groups) -> None:
    assert found.keys() == expected.keys()
    for group, tensors in expected.items():
        for name, x in tensors.items():
            assert found[group][name].tobytes() == x.tobytes(), (group, name)


def test_shards_are_averaged_as_one_process_averages(two: Path, data: Path, tmp_path: Path) -> None:
    follows(two, range(1, STEPS + 1))
    one = train(data, tmp_path / "one", **RUN)
    ours, theirs = saved(two, STEPS)["ema"], saved(one, STEPS)["ema"]
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        np.testing.assert_allclose(ours[name], x, rtol=1e-3, atol=2e-6)
    out, newest = tmp_path / "ema.safetensors", two / f"checkpoints/step-{STEPS:08d}"
    assert main(["ckpt", "average", str(newest), "--ema", "--out", str(out)]) == 0
    equal({"ema": {f"ema.{n}": x for n, x in load_file(out).items()}}, {"ema": ours})


def test_an_average_does_not_touch_training(two: Path, data: Path, tmp_path: Path) -> None:
    changes = {**RUN, **DP2_EP2, **ZERO, "telechat_moe__ema": "null"}
    del changes["telechat_moe__ema__decay"]
    shutil.copytree(two / ".job", tmp_path / "run/.job")
    plain = train(data, tmp_path / "run", **changes)
    expected = saved(two, STEPS)
    del expected["ema"]
    equal(saved(plain, STEPS), expected)
    assert [r["loss"] for r in records(plain, "step")] == [r["loss"] for r in records(two, "step")]
    # An average that begins in the middle begins with the weights that are there.
    shutil.rmtree(plain / f"checkpoints/step-{STEPS:08d}")
    train(data, plain, "--resume", **RUN, **DP2_EP2, **ZERO)
    then, now = saved(plain, STEPS - 1)["model"], saved(plain, STEPS)
    for name, x in then.items():
        expected = DECAY * x.astype(np.float64) + (1 - DECAY) * now["model"][name]
        np.testing.assert_allclose(now["ema"][f"ema.{name}"], expected, rtol=1e-5, atol=1e-7)


def test_killed_and_resumed_bit_for_bit(
    two: Path, data: Path, start, tmp_path: Path, hold: Hold
) -> None:
    output, here = tmp_path / "run", {**RUN, **DP2_EP2, **ZERO}
    shutil.copytree(two / ".job", output / ".job")
    hold.at(3)
    process = start(output, **here)
    wait_for_step(output, 3, process)
    pids = [rank(output, r) for r in (0, 1)]
    os.kill(pids[1], signal.SIGKILL)
    hold.release()
    assert process.wait() == 1
    wait_for_ends(pids)
    train(data, output, "--resume", **here)
    for step in range(1, STEPS + 1):
        equal(saved(output, step), saved(two, step))


def test_other_layouts_go_on_with_it(two: Path, data: Path, tmp_path: Path) -> None:
    """Four processes with two stages, then one."""
    output = tmp_path / "run"
    shutil.copytree(two, output, ignore=shutil.ignore_patterns(".*"))
    for layout in (TP2_PP2, {}):
        shutil.rmtree(output / f"checkpoints/step-{STEPS:08d}")
        train(data, output, "--resume", **{**RUN, **layout})
        follows(output, range(1, STEPS + 1))
