"""`telechat-moe sweep` trains: in processes of their own, on after a kill, past a run that fails."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import mini_sweep as mini
from running import Hold, left_over, until, wait_for_step

from telechat_moe.cli import main
from telechat_moe.tools.sweep.file import read_sweep

COMMAND = [sys.executable, "-m", "telechat_moe.cli", "sweep"]


def losses(folder: Path) -> list[tuple[int, float, float]]:
    """Return (step, loss, gradient norm) of every step of a run."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["loss"], r["grad_norm"]) for r in records if r["event"] == "step"]


def changed(folder: Path) -> dict[str, int]:
    """Return the time of the last change of every file in a folder."""
    return {str(p): p.stat().st_mtime_ns for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def trained(data: Path) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A sweep of two learning rates, one of which ends in losses that are not finite."""
    rates = {"calm": "0.003", "wild": "1.0e+30"}
    variants = {name: [f"lr_schedule.learning_rate={rate}"] for name, rate in rates.items()}
    plain = mini.sweep(data, variants=variants, seeds=[1])
    plain["set"].append("telechat_moe.max_skipped_steps=1")
    mini.write(data, plain)
    process = subprocess.run([*COMMAND, str(data / "sweep.yaml"), "--jobs", "2"], capture_output=True, text=True, check=False)  # fmt: skip
    return data / "sweep.yaml", process


@pytest.mark.slow
def test_a_run_that_fails_does_not_stop_the_others(trained, tmp_path: Path) -> None:
    path, process = trained
    assert process.returncode == 1, process.stdout + process.stderr
    report = json.loads((path.parent / "sweep/sweep.json").read_text())
    good, bad = report["runs"]
    assert (good["state"], bad["state"]) == ("finished", "failed")
    assert good["steps"] == 12
    assert "not finite" in bad["why"]
    log = Path(bad["folder"]) / "sweep.log"
    assert str(log) in bad["why"]
    assert bad["why"] in process.stderr
    assert "Traceback" not in process.stdout + process.stderr
    assert "\x1b" not in process.stdout + process.stderr  # no terminal, no bars
    assert report["studies"]["all"]["against_first"][bad["variant"]]["verdict"] == "not judged"


@pytest.mark.slow
def test_each_run_is_a_normal_run(trained, tmp_path: Path) -> None:
    run = read_sweep(str(trained[0])).runs[0]
    sets = [word for override in run.overrides[:-1] for word in ("--set", override)]
    assert run.overrides[-1].startswith("output_dir=")
    alone = tmp_path / "alone"
    line = ["train", mini.TINY, "--plain", *sets, "--set", f"output_dir={alone}"]
    assert main(line) == 0
    assert losses(run.folder) == losses(alone)


@pytest.mark.slow
def test_what_is_finished_is_not_trained_again_and_what_failed_is(trained) -> None:
    path, _ = trained
    good, bad = (run.folder for run in read_sweep(str(path)).runs)
    before, tried = changed(good), (bad / "sweep.log").stat().st_size
    process = subprocess.run([*COMMAND, str(path)], capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert changed(good) == before
    assert (bad / "sweep.log").stat().st_size > tried


@pytest.mark.slow
def test_a_run_of_an_earlier_version_is_the_same_recipe(trained) -> None:
    """A key that was not there then has its default."""
    path, _ = trained
    written = sorted((path.parent / "sweep").glob("**/recipe.json"))[0]
    text = written.read_text()
    recipe = json.loads(text)
    assert recipe["telechat_moe"].pop("resume_data") == "same"
    written.write_text(json.dumps(recipe))
    try:
        assert main(["sweep", str(path)]) == 1  # the run that fails, fails again
        written.write_text(text[:100])
        assert main(["sweep", str(path)]) == 3
    finally:
        written.write_text(text)


@pytest.mark.slow
def test_a_folder_of_another_recipe_is_refused(trained, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = trained
    text, before = path.read_text(), changed(path.parent / "sweep")
    other = path.with_name("other.yaml")
    other.write_text(text.replace("hidden_size=32", "hidden_size=64"))  # fmt: skip
    assert main(["sweep", str(other)]) == 3
    message = capsys.readouterr().err
    line = mini.line_of(other, '"calm"')
    assert f"other.yaml:{line}: variants.calm: " in message
    assert "holds a run of another recipe: model.model_config.hidden_size was 32, is 64" in message
    assert changed(path.parent / "sweep") == before


@pytest.mark.slow
def test_kill_9_loses_nothing(trained, hold: Hold, tmp_path: Path) -> None:
    """After a kill the sweep goes on from the run's checkpoint, with the bits of the uninterrupted run."""
    path, _ = trained
    first = read_sweep(str(path)).runs[0]
    text = path.read_text().replace(str(path.parent / "sweep"), str(tmp_path / "sweep"))
    copy = tmp_path / "sweep.yaml"
    copy.write_text(re.sub(r'  "wild": .*\n', "", text))
    folder = tmp_path / "sweep" / first.folder.parent.name / "seed-1"
    hold.at(5)
    process = subprocess.Popen([*COMMAND, str(copy)])
    wait_for_step(folder, 5, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert left_over(folder) == []  # the run dies with the sweep
    hold.release()
    assert not (folder / "summary.json").exists()
    done = subprocess.run([*COMMAND, str(copy)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resum" in (folder / "sweep.log").read_text()
    assert losses(folder) == losses(first.folder)
    assert (folder / "summary.json").exists()


@pytest.mark.slow
def test_ctrl_c_saves_the_step_and_the_sweep_goes_on(
    hold: Hold, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = mini.sweep(data, variants={"few": mini.VARIANTS["few"]}, output_dir=str(tmp_path / "sweep"))  # fmt: skip
    path = mini.write(tmp_path, plain)
    folder = tmp_path / "sweep/few/seed-1"
    hold.at(5)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    process = subprocess.Popen([*COMMAND, str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
    wait_for_step(folder, 5, process)
    process.send_signal(signal.SIGINT)
    until(lambda: len([*temporary.rglob("asked")]) == 2, process)  # the sweep and its run
    hold.release()
    text, _ = process.communicate()
    assert process.returncode == 130, text
    assert "interrupted; the same command goes on" in text
    steps = len(losses(folder))
    assert 5 <= steps < 12
    assert (folder / f"checkpoints/step-{steps:08d}").is_dir()
    assert not (tmp_path / "sweep/few/seed-2/metrics.jsonl").exists()  # nothing was begun after it
