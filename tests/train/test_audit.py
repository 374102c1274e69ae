"""`telechat-moe data audit`: every sample accounted for across kills, layouts and rollbacks; damage is named."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import mini_recipe as mini
import spiky_data
from mini_recipe import DP2_EP2
from running import Hold, rank, steps_in, until
from spiky_data import BATCH, SPIKE, STEPS

from telechat_moe.cli import main

EVERY = {"callbacks__2__save_checkpoint_steps": 3, "callbacks__2__keep_checkpoint_max": 20}


def audited(output: Path, *flags: str) -> tuple[int, dict]:
    report = output.parent / "audit.json"
    code = main(["data", "audit", str(output), "--json", str(report), *flags])
    return code, json.loads(report.read_text())


@pytest.fixture(scope="module")
def done(tmp_path_factory, data) -> Path:
    """A run without incidents."""
    output = tmp_path_factory.mktemp("done") / "run"
    assert main(mini.arguments(data, output, **EVERY)) == 0
    return output


@pytest.fixture
def copy(tmp_path, done) -> Path:
    shutil.copytree(done, tmp_path / "run")
    return tmp_path / "run"


def test_a_run_without_incidents(done, capsys):
    assert main(["data", "audit", str(done)]) == 0
    out = capsys.readouterr().out
    assert "every sample is accounted for" in out
    assert f"{mini.STEPS} steps saw {4 * mini.STEPS} samples" in out


@pytest.mark.slow
def test_killed_and_resumed(tmp_path, data, start, hold: Hold):
    output = tmp_path / "run"
    dice = random.Random(2)
    changes = {**EVERY, "train_dataset__data_loader__sizes": "[160,0,0]"}
    for wanted in (4, 11, 17):
        hold.at(
            wanted + 2
        )  # so that none before has logged as many steps as the next one waits for
        process = start(output, "--resume", **changes)
        until(lambda wanted=wanted: steps_in(output / "samples.jsonl") >= wanted, process)
        time.sleep(dice.uniform(0, 0.03))
        process.kill()
        assert process.wait() == -signal.SIGKILL
    hold.release()
    assert audited(output)[0] == 0  # where it stands
    process = start(output, "--resume", **changes)
    assert process.wait() == 0
    code, found = audited(output)
    assert (code, found["problems"]) == (0, [])
    assert (found["steps"], found["samples"]) == (40, 160)
    # Without a checkpoint, where the first was killed before it was written, the log begins anew.
    assert len(found["starts"]) in (3, 4)
    assert sum(s["kept"] for s in found["starts"]) == 40
    assert sum(s["steps"] for s in found["starts"]) == 40 + found["undone"]


@pytest.mark.slow
def test_several_epochs(tmp_path, data):
    output = tmp_path / "run"
    changes = {"train_dataset__data_loader__sizes": "[20,0,0]", "runner_config__epochs": 3}
    assert main(mini.arguments(data, output, **changes)) == 0
    code, found = audited(output)
    assert (code, found["epochs"], found["samples_per_epoch"], found["steps"]) == (0, 3.0, 20, 15)


def test_a_rollback_is_accounted_for(tmp_path):
    noisy = spiky_data.write(tmp_path, [SPIKE])
    rules = "{action: rollback, window: 20, min_steps: 10, norm_factor: null}"
    output = tmp_path / "run"
    arguments = mini.arguments(noisy, output, **spiky_data.changes(telechat_moe__loss_guard=rules))
    assert main(arguments) == 0
    code, found = audited(output)
    assert (code, found["problems"]) == (0, [])
    back = (SPIKE - 1) // 10 * 10
    assert found["rollbacks"] == [{"left_out": [back * BATCH, SPIKE * BATCH]}]
    assert (found["steps"], found["undone"]) == (STEPS - (SPIKE - back), SPIKE - back)
    # Killed after the checkpoint that going back writes and before the log says so: the next start does.
    log = output / "samples.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    (at,) = [
        i for i, line in enumerate(lines) if '"rollback"' in line and '"event": "rollback"' in line
    ]
    state = json.loads((output / f"checkpoints/step-{back:08d}/checkpoint.json").read_bytes())[
        "state"
    ]
    start = json.loads(lines[0])
    start |= {"step": back, "next_sample": SPIKE * BATCH, "rollbacks": state["rollbacks"]}
    log.write_text("".join([*lines[:at], json.dumps(start) + "\n", *lines[at + 1 :]]))
    assert audited(output)[0] == 0
    # Without any word of it, samples are lost.
    log.write_text("".join([*lines[:at], *lines[at + 1 :]]))
    code, found = audited(output)
    assert code == 1
    assert any(f"step {back + 1}" in p for p in found["problems"])


# ------------------------------------------------------------------------------------------ damage


def tampered(output: Path, change) -> list[str]:
    log = output / "samples.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(change(lines)))
    code, found = audited(output)
    assert code == 1
    return found["problems"]


def edited(line: str, **values) -> str:
    return json.dumps({**json.loads(line), **values}) + "\n"


def test_a_dropped_line(copy):
    problems = tampered(copy, lambda lines: lines[:5] + lines[6:])
    assert problems[0] == "step 5: missing before line 6"
    assert "step 6 (line 6) begins at sample 20, 16 is next: 4 are lost" in problems
    assert any("4 sample(s) came never" in p for p in problems)


def test_a_doubled_step(copy):
    problems = tampered(copy, lambda lines: [*lines[:6], *lines[5:]])
    assert problems == ["step 5: a second time in line 7"]


def test_a_step_that_saw_the_samples_before_again(copy):
    def change(lines):
        before = json.loads(lines[5])
        again = edited(lines[6], first=before["first"], content=before["content"])
        return [*lines[:6], again, *lines[7:]]

    problems = tampered(copy, change)
    assert "step 6 (line 7) begins at sample 16, 20 is next: 4 come twice" in problems
    assert any("came more than once" in p for p in problems)


def test_other_tokens(copy):
    change = lambda lines: [*lines[:8], edited(lines[8], content="0" * 16), *lines[9:]]  # noqa: E731
    assert tampered(copy, change) == ["step 8: its token ids are not those of samples 28 to 31"]
    assert audited(copy, "--no-contents")[0] == 0


def test_a_log_that_ends_early(copy):
    problems = tampered(copy, lambda lines: lines[:-2])
    assert "step 12: there is a checkpoint, but the log has no such step" in problems
    assert "step 11: in metrics.jsonl, but not in samples.jsonl" in problems


def test_a_checkpoint_that_goes_on_elsewhere(copy):
    path = copy / "checkpoints/step-00000009/checkpoint.json"
    path.write_text(path.read_text().replace('"next_sample": 36', '"next_sample": 40'))
    code, found = audited(copy)
    assert code == 1
    assert found["problems"] == ["step 9: its checkpoint continues at sample 40, the log at 36"]


def test_a_broken_line(copy):
    problems = tampered(copy, lambda lines: [*lines[:4], "{\n", *lines[4:]])
    assert problems == ["line 5: cannot be read"]


def test_other_data(copy, tmp_path):
    mini.write_data(tmp_path, seed=5)
    key, value = "data_loader.config.data_path", f"['1', '{tmp_path}/train']"
    places = (f"train_dataset.{key}={value}", f"train_dataset_task.dataset_config.{key}={value}")
    code, found = audited(copy, "--set", places[0], "--set", places[1])
    assert code == 1
    assert "fingerprints differ" in found["problems"][0]


def test_no_log_is_no_pass(tmp_path, done, capsys):
    shutil.copy(done / "recipe.json", tmp_path)
    assert main(["data", "audit", str(tmp_path)]) == 3
    assert "--plan RECIPE" in capsys.readouterr().err
    assert main(["data", "audit"]) == 2


def test_a_plan(done, capsys):
    assert main(["data", "audit", "--plan", str(done / "recipe.json")]) == 0
    assert "is not judged" in capsys.readouterr().out


# --------------------------------------------------------------------------------- several processes


@pytest.mark.slow
def test_rollback_and_layouts_of_two_processes(tmp_path, start, hold: Hold):
    """Two processes go back at a spike, are killed, and one goes on: the losses of one process, and no sample lost."""
    noisy = spiky_data.write(tmp_path, [SPIKE])
    rules = "{action: rollback, window: 20, min_steps: 10, norm_factor: null}"
    same = spiky_data.changes(telechat_moe__loss_guard=rules, telechat_moe__evaluation__interval=20)
    alone, output = tmp_path / "alone", tmp_path / "run"
    assert main(mini.arguments(noisy, alone, **same)) == 0

    paths = {
        "train_dataset__data_loader__config__data_path": f"['1', '{noisy}/train']",
        "telechat_moe__evaluation__data_path": f"['1', '{noisy}/valid']",
    }
    hold.at(SPIKE + 3)  # it went back before
    process = start(output, **same, **DP2_EP2, **paths)
    log = output / "samples.jsonl"

    def has_gone_on() -> bool:
        after = (log.read_bytes() if log.exists() else b"").partition(b'"event": "rollback"')[2]
        return after.count(b'"event": "step"') >= 3

    until(has_gone_on, process)
    os.kill(rank(output, 1), signal.SIGKILL)
    hold.release()
    text = process.communicate()[0]
    assert process.returncode == 1, text
    assert main([*mini.arguments(noisy, output, **same), "--resume"]) == 0

    def curve(folder: Path) -> list[float]:
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return [
            x for r in lines if r["event"] in ("step", "evaluation") for x in (r["step"], r["loss"])
        ]

    assert curve(output) == pytest.approx(curve(alone), rel=1e-3)
    code, found = audited(output)
    assert (code, found["problems"]) == (0, [])
    assert found["starts"][0]["layout"] != found["starts"][-1]["layout"]
    assert found["rollbacks"] == [{"left_out": [50 * BATCH, SPIKE * BATCH]}]
    assert found["steps"] == STEPS - (SPIKE - 50)
