"""The training loop on the mini recipe: what it writes, how it resumes, how it fails."""

import json
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import mini_recipe as mini
from running import Hold, steps_in, until, wait_for_step

from telechat_moe.checkpoint import checkpoint
from telechat_moe.cli import main
from telechat_moe.ops import native
from telechat_moe.recipe import load


def losses(output: Path) -> list[tuple[int, float, float]]:
    """Return (step, loss, gradient norm) of every step, as written."""
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["loss"], r["grad_norm"]) for r in records if r["event"] == "step"]


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    text, _ = process.communicate()
    return process.returncode, text


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """An uninterrupted run of the mini recipe."""
    output = tmp_path_factory.mktemp("reference") / "run"
    assert main([*mini.arguments(data, output), "--json", str(output.parent / "s.json")]) == 0
    return output


def test_a_run_writes_what_it_promises(reference: Path) -> None:
    names = {path.name for path in reference.iterdir()}
    assert {"metrics.jsonl", "loss.png", "summary.json", "recipe.json", "checkpoints"} <= names
    assert [step for step, _, _ in losses(reference)] == list(range(1, mini.STEPS + 1))
    resolved = json.loads((reference / "recipe.json").read_text())
    said = resolved.pop("computed_with")["operators"]
    assert f"({native.isa()}, {native.gemm_backend()})" in said
    assert load(reference / "recipe.json").to_dict() == resolved
    summary = json.loads((reference / "summary.json").read_text())
    assert summary == json.loads((reference.parent / "s.json").read_text())
    assert summary["finished"] is True
    assert summary["steps"] == mini.STEPS
    assert summary["checkpoint"] == "checkpoints/step-00000012"
    kept = [path.name for path in checkpoint.list_checkpoints(reference / "checkpoints")]
    assert kept == ["step-00000012", "step-00000009", "step-00000006"]


def test_the_loss_falls_to_what_the_data_allow(tmp_path: Path, data: Path) -> None:
    # The documents count upwards: after two tokens of one the next is certain.
    output = tmp_path / "run"
    changes = {
        "train_dataset__data_loader__sizes": "[1200,0,0]",
        "callbacks__2__save_checkpoint_steps": 300,
    }
    assert main(mini.arguments(data, output, **changes)) == 0
    lm = [loss for _, loss, _ in losses(output)]
    assert lm[0] == pytest.approx(np.log(64), rel=0.03)
    assert np.mean(lm[-10:]) < 1.0


def test_evaluation_leaves_the_training_as_it_is(
    tmp_path: Path, data: Path, reference: Path
) -> None:
    output = tmp_path / "run"
    assert main(mini.arguments(data, output, telechat_moe__evaluation__interval=4)) == 0
    assert losses(output) == losses(reference)
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    evaluated = [r["step"] for r in records if r["event"] == "evaluation"]
    assert evaluated == [0, 4, 8, 12]


@pytest.mark.slow
def test_micro_batches_add_up_to_the_batch(tmp_path: Path, data: Path, reference: Path) -> None:
    # Without the balance loss a step is linear in the tokens, so only rounding may differ.
    plain = {"model__model_config__moe_aux_loss_coeff": 0.0}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(mini.arguments(data, whole, **plain)) == 0
    halves = {"runner_config__batch_size": 2, "runner_config__gradient_accumulation_steps": 2}
    halves |= {
        "model__model_config__batch_size": 2,
        "callbacks__1__gradient_accumulation_steps": 2,
    }
    assert main(mini.arguments(data, parts, **plain, **halves)) == 0
    assert len(losses(parts)) == mini.STEPS
    np.testing.assert_allclose(losses(parts), losses(whole), rtol=2e-5)


@pytest.mark.slow
def test_ctrl_c_saves_and_resume_goes_on_bitwise(
    tmp_path: Path, start, hold: Hold, reference: Path
) -> None:
    output = tmp_path / "run"
    hold.at(2)
    process = start(output)
    wait_for_step(output, 2, process)
    process.send_signal(signal.SIGINT)
    hold.release()
    code, text = finish(process)
    assert code == 130, text
    assert "Traceback" not in text
    done = len(losses(output))
    assert 2 <= done < mini.STEPS
    newest = checkpoint.list_checkpoints(output / "checkpoints")[0]
    assert newest.name == f"step-{done:08d}"
    code, text = finish(start(output, "--resume"))
    assert code == 0, text
    assert losses(output) == losses(reference)


def changed(path: Path) -> int:
    """Return the time of a file's last change, 0 if it is not there."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


@pytest.mark.slow
def test_killed_at_random_moments_a_run_resumes_to_the_same_losses(
    tmp_path: Path, start, hold: Hold
) -> None:
    kills = 20
    # Saving after every step: about half of the time after the first step is spent in saves.
    changes = {
        "callbacks__2__save_checkpoint_steps": 1,
        "train_dataset__data_loader__sizes": f"[{4 * 20 * (kills + 1)},0,0]",
    }
    whole, output = tmp_path / "whole", tmp_path / "run"
    code, text = finish(start(whole, **changes))
    assert code == 0, text
    dice, log = random.Random(kills), output / "metrics.jsonl"
    for _ in range(kills):
        seen = steps_in(log)
        hold.at(seen + 20)  # so that it is not at the end before it is killed
        process = start(output, "--resume", **changes)
        if dice.random() < 0.9:
            before = changed(log)
            until(lambda before=before: changed(log) != before and steps_in(log), process)
            time.sleep(dice.uniform(0, 0.4))
        else:
            time.sleep(dice.uniform(0, 3))
        process.kill()
        assert process.wait() == -signal.SIGKILL
    hold.release()
    code, text = finish(start(output, "--resume", **changes))
    assert code == 0, text
    assert losses(output) == losses(whole)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, data: Path, reference: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    assert main(mini.arguments(data, output)) == 0
    newest = output / "checkpoints" / "step-00000012"
    shard = next(newest.glob("model-*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)
    capfd.readouterr()
    assert main([*mini.arguments(data, output), "--resume"]) == 0
    message = capfd.readouterr().err
    assert shard.name in message
    assert "step-00000009" in message
    assert losses(output) == losses(reference)


def test_a_changed_model_section_is_refused_with_the_difference(
    data: Path, reference: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path for path in reference.rglob("*"))
    changed = mini.arguments(data, reference, model__model_config__routed_scaling_factor=2.0)
    assert main([*changed, "--resume"]) == 3
    message = capfd.readouterr().err
    assert re.search(r"routed_scaling_factor: 1\.5 -> 2\.0", message), message
    assert sorted(path for path in reference.rglob("*")) == before


def test_a_finished_run_is_left_as_it_is(
    data: Path, reference: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in reference.rglob("*") if path.is_file()}
    assert main([*mini.arguments(data, reference), "--resume"]) == 0
    assert "all 12 steps are done" in capfd.readouterr().err
    after = {path: path.read_bytes() for path in reference.rglob("*") if path.is_file()}
    assert after == before


def test_an_output_folder_that_cannot_be_made_is_named(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(mini.arguments(data, tmp_path / "file" / "run")) == 3
    message = capfd.readouterr().err
    assert f"{tmp_path}/file" in message
    assert "Traceback" not in message


def test_other_data_are_refused(
    data: Path, reference: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    changed = mini.arguments(data, reference, train_dataset__data_loader__config__seed=7)
    assert main([*changed, "--resume"]) == 3
    assert "other training data" in capfd.readouterr().err


def test_an_earlier_run_is_not_overwritten_unasked(
    data: Path, reference: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(mini.arguments(data, reference)) == 2
    assert "--resume" in capfd.readouterr().err
    assert len(checkpoint.list_checkpoints(reference / "checkpoints")) == 3


def test_a_recipe_for_many_devices_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "telechat3_moe/pretrain_105b_a4b_4k.yaml"]) == 3
    said = capfd.readouterr().err
    assert "context.device_target: Ascend, but this machine has none" in said
    assert "nothing was started" in said


def test_steps_that_are_not_finite_are_skipped_and_then_stop_the_run(
    tmp_path: Path, data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # A learning rate of 1e38 throws the weights to infinity in the first update.
    output = tmp_path / "run"
    changes = {
        "lr_schedule__learning_rate": "1.e+38",
        "lr_schedule__warmup_steps": 0,
        "telechat_moe__max_skipped_steps": 3,
        "callbacks__2__save_checkpoint_steps": 1,
    }
    assert main(mini.arguments(data, output, **changes)) == 1
    message = capfd.readouterr().err
    assert "4 steps in a row" in message
    assert re.search(r"(weight|gradient) (of )?\S*(embedding|layers|norm|head)\S* ", message), (
        message
    )
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    records = [line for line in lines if line["event"] == "step"]
    assert [r["skipped"] for r in records] == [False, True, True, True, True]
    saved = [checkpoint.load(path) for path in checkpoint.list_checkpoints(output / "checkpoints")]
    assert [c.state["updates"] for c in saved] == [1, 1, 1]


def test_a_full_disk_stops_the_run_and_keeps_the_last_checkpoint(
    tmp_path: Path, data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1400k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        output = disk / "run"
        code = main(mini.arguments(data, output, callbacks__2__save_checkpoint_steps=1))
        message = capfd.readouterr().err
        newest = checkpoint.latest(output / "checkpoints")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert code == 1, message
    assert "space" in message
    assert newest is not None
    assert 0 < newest.step < mini.STEPS


def test_a_run_can_start_from_the_weights_of_another(
    tmp_path: Path, data: Path, reference: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    newest = reference / "checkpoints" / "step-00000012"
    changes = {
        "load_checkpoint": str(newest),
        "train_dataset__data_loader__sizes": "[8,0,0]",
        "callbacks__2__save_checkpoint_steps": 1,
    }
    output = tmp_path / "run"
    assert main(mini.arguments(data, output, **changes)) == 0
    # The rate of step 0 is 0, so the first step leaves the weights as they were loaded.
    saved = checkpoint.load(output / "checkpoints" / "step-00000001")
    given = checkpoint.load(newest)
    for name, value in given.tensors["model"].items():
        if not name.endswith("expert_bias"):
            np.testing.assert_array_equal(saved.tensors["model"][name], value, err_msg=name)
    capfd.readouterr()
    wider = {**changes, "model__model_config__moe_intermediate_size": 24}
    wider["model__model_config__moe_shared_expert_intermediate_size"] = 24
    assert main(mini.arguments(data, tmp_path / "other", **wider)) == 3
    message = capfd.readouterr().err
    assert "experts.down is [8, 16, 32] instead of [8, 24, 32]" in message
