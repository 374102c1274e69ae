"""Runs that begin with another run's checkpoint or with Hugging Face's weights, against runs that nothing interrupted."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = [pytest.mark.mindspore, pytest.mark.slow]

import mini_recipe as mini

from telechat_moe.checkpoint import checkpoint
from telechat_moe.cli import main

EVERY = {"callbacks__2__save_checkpoint_steps": 3, "callbacks__2__keep_checkpoint_max": 20}


def lines(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def steps(output: Path) -> list[tuple[int, float, float, float]]:
    found = [line for line in lines(output) if line["event"] == "step"]
    return [(r["step"], r["loss"], r["grad_norm"], r["learning_rate"]) for r in found]


def audited(output: Path, *flags: str) -> tuple[int, dict]:
    report = output.parent / f"{output.name}-audit.json"
    code = main(["data", "audit", str(output), "--json", str(report), *flags])
    return code, json.loads(report.read_text())


def assert_same_tensors(one: Path, other: Path, *groups: str) -> None:
    here, there = checkpoint.load(one).tensors, checkpoint.load(other).tensors
    for group in groups:
        assert here[group].keys() == there[group].keys()
        for name, array in here[group].items():
            np.testing.assert_array_equal(array, there[group][name], err_msg=name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Twelve steps without interruption; checkpoints of the steps 3, 6, 9 and 12."""
    output = tmp_path_factory.mktemp("whole") / "run"
    assert main(mini.arguments(data, output, **EVERY)) == 0
    return output


@pytest.mark.parametrize("how", ["load_checkpoint", "name", "path"])
def test_another_folder_goes_on_to_the_last_digit(
    tmp_path: Path, data: Path, whole: Path, how: str
) -> None:
    root, step = whole / "checkpoints", "step-00000006"
    given: dict[str, object] = {
        "load_checkpoint": {"load_checkpoint": root / step, "resume_training": True},
        "name": {"load_checkpoint": root, "resume_training": step},
        "path": {"resume_training": root / step},
    }[how]
    output = tmp_path / "run"
    assert main(mini.arguments(data, output, **EVERY, **given)) == 0
    assert steps(output) == steps(whole)[6:]
    assert_same_tensors(
        output / "checkpoints/step-00000012", root / "step-00000012", "model", "optimizer"
    )
    code, found = audited(output)
    assert (code, found["problems"]) == (0, [])
    # The same command once more: now output_dir holds the run.
    assert main(mini.arguments(data, output, **EVERY, **given)) == 2
    assert main([*mini.arguments(data, output, **EVERY, **given), "--resume"]) == 0


def test_weights_alone_begin_at_step_0_with_no_moments(
    tmp_path: Path, data: Path, whole: Path
) -> None:
    output = tmp_path / "run"
    given = {"load_checkpoint": whole / "checkpoints"}
    assert main(mini.arguments(data, output, **EVERY, **given)) == 0
    assert [s[0] for s in steps(output)] == list(range(1, 13))
    # Step 1 of the data with the trained weights: neither the old run's step 1 nor its next.
    assert steps(output)[0][1] != steps(whole)[0][1]
    assert steps(output)[0][3] == steps(whole)[0][3]


def test_new_data_with_the_old_optimizer(tmp_path: Path, data: Path, whole: Path) -> None:
    root = whole / "checkpoints"
    fresh = mini.write_data(tmp_path, seed=9)
    given: dict[str, object] = {"load_checkpoint": root / "step-00000006", "resume_training": True}
    assert main(mini.arguments(fresh, tmp_path / "no", **EVERY, **given)) == 3
    given["telechat_moe__resume_data"] = "new"
    output = tmp_path / "run"
    arguments = mini.arguments(fresh, output, **EVERY, **given)
    assert main(arguments) == 0
    # Step number and learning rate go on; the samples are the first of the new data.
    assert [(s[0], s[3]) for s in steps(output)] == [(s[0], s[3]) for s in steps(whole)[6:]]
    begun = json.loads((output / "samples.jsonl").read_text().splitlines()[0])
    assert (begun["step"], begun["next_sample"], begun["new_data"]) == (6, 0, True)
    # With betas of nearly 1 the moments after a step are those of the checkpoint.
    slow = {
        "optimizer__betas": "[0.999999, 0.999999]",
        "train_dataset__data_loader__sizes": "[28,0,0]",
        "callbacks__2__save_checkpoint_steps": 1,
    }
    other = tmp_path / "slow"
    assert main(mini.arguments(fresh, other, **EVERY | slow, **given)) == 0
    for group in ("adam_m", "adam_v"):
        before, after = (
            np.concatenate([x.ravel() for n, x in moments.items() if n.startswith(group)])
            for moments in (
                checkpoint.load(root / "step-00000006").tensors["optimizer"],
                checkpoint.load(other / "checkpoints/step-00000007").tensors["optimizer"],
            )
        )
        assert np.linalg.norm(after - before) < 0.01 * np.linalg.norm(before)
    code, found = audited(output)
    assert (code, found["problems"]) == (0, [])


def test_new_data_in_the_same_folder_and_a_kill_after_it(
    tmp_path: Path, data: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    shutil.copytree(whole, output)
    for step in (9, 12):
        shutil.rmtree(output / f"checkpoints/step-{step:08d}")
    fresh = mini.write_data(tmp_path, seed=9)
    new = {**EVERY, "telechat_moe__resume_data": "new"}
    assert main([*mini.arguments(fresh, output, **new), "--resume"]) == 0
    run = steps(output)
    assert run[:6] == steps(whole)[:6]
    # Killed after the checkpoint of step 9, it goes on in the new data, not at their beginning.
    shutil.rmtree(output / "checkpoints/step-00000012")
    assert main([*mini.arguments(fresh, output, **new), "--resume"]) == 0
    assert steps(output) == run
    capsys.readouterr()
    code, found = audited(output)
    assert (code, found["problems"]) == (0, [])
    spans = [(s["first_step"], s["last_step"], s["read_again"]) for s in found["data"]]
    assert spans == [(1, 6, False), (7, 12, True)]
    assert [s["data_path"][1] for s in found["data"]] == [f"{data}/train", f"{fresh}/train"]
    assert "not judged" in found["covers"]
    code, found = audited(output, "--recipe", str(whole / "recipe.json"))
    assert [s["read_again"] for s in found["data"]] == [True, False]
    assert (code, found["problems"]) == (0, [])
    # The same without the word in the log: samples come twice.
    log = output / "samples.jsonl"
    log.write_text(log.read_text().replace('"new_data": true', '"new_data": false'))
    assert audited(output)[0] == 1


def test_hugging_face_s_folder_as_a_conversion_of_it(
    tmp_path: Path, data: Path, whole: Path
) -> None:
    name = mini.arguments(data, tmp_path)
    recipe, model = name[1], [x for x in name[4::2] if x.startswith("model.") or "seq_length" in x]
    sets = [word for x in model for word in ("--set", x)]
    step, folder, ours = whole / "checkpoints/step-00000012", tmp_path / "hf", tmp_path / "ours"
    assert main(["convert", str(step), str(folder), "--recipe", recipe, "--to", "hf", *sets]) == 0
    assert (
        main(["convert", str(folder), str(ours), "--recipe", recipe, "--to", "telechat", *sets])
        == 0
    )
    for given, output in ((folder, "a"), (ours, "b")):
        assert main(mini.arguments(data, tmp_path / output, **EVERY, load_checkpoint=given)) == 0
    assert steps(tmp_path / "a") == steps(tmp_path / "b")
    last = "checkpoints/step-00000012"
    assert_same_tensors(tmp_path / "a" / last, tmp_path / "b" / last, "model", "optimizer")


def test_two_processes_go_on_from_another_folder(tmp_path: Path, data: Path, whole: Path) -> None:
    given = {"load_checkpoint": whole / "checkpoints/step-00000006", "resume_training": True}
    two = {**mini.SPREAD, "parallel_config__model_parallel": 2}
    output = tmp_path / "run"
    assert main(mini.arguments(data, output, **EVERY, **given, **two)) == 0
    np.testing.assert_allclose(steps(output), steps(whole)[6:], rtol=1e-5)
    assert main([*mini.arguments(data, output, **EVERY, **given), "--resume"]) == 0
    code, found = audited(output)
    assert (code, found["problems"]) == (0, [])
