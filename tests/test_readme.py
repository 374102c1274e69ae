"""Every command of the README runs: here, or in .ci/run; those of `align` with ``-m slow``."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

from telechat_moe.cli import main

ROOT = Path(__file__).parents[1]
STEPS = 2
SHORT = [  # appended to `train`: the README's run in seconds instead of minutes
    "--set",
    f"train_dataset.data_loader.sizes=[{4 * STEPS},0,0]",
    "--set",
    "lr_schedule.warmup_steps=0",
    "--set",
    "telechat_moe.evaluation.interval=0",
]


def commands(page: str) -> list[str]:
    """Return the lines of all ``sh`` blocks of a page, comments cut off."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def test_the_verbs_run_in_the_order_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = commands("README.md") + commands("docs/sharded_runs.md")
    verbs = [line for line in lines if line.startswith("telechat-moe")]
    verbs = [line for line in verbs if not line.startswith("telechat-moe align")]  # below
    assert len(verbs) >= 15
    for line in verbs:
        arguments = shlex.split(line.replace("step-00001000", f"step-{STEPS:08d}"))[1:]
        if arguments[0] in ("train", "launch"):
            arguments += SHORT
        if (
            arguments[0] == "dryrun"
        ):  # in a process of its own, as its reader runs it: half a minute
            command = [sys.executable, "-m", "telechat_moe.cli", *arguments]
            assert subprocess.run(command, check=False).returncode == 0, line
            continue
        assert main(arguments) == 0, line
    assert (tmp_path / "weights-hf" / "config.json").exists()
    assert (tmp_path / "graphs" / "rank_1.mindir").exists()
    again = tmp_path / "merged" / f"step-{STEPS:08d}" / "checkpoint.json"
    there = tmp_path / "output" / "checkpoints" / again.parent.name / again.name
    assert again.read_bytes() == there.read_bytes()


@pytest.mark.slow
def test_a_step_is_recorded_and_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    verbs = [line for line in commands("README.md") if line.startswith("telechat-moe align")]
    first = "telechat-moe cp telechat3_moe/pretrain_tiny.yaml mine.yaml"
    for line in [first, "telechat-moe data build --recipe mine.yaml", *verbs]:
        command = [sys.executable, "-m", "telechat_moe.cli", *shlex.split(line)[1:]]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
    assert len(verbs) == 2
    assert "pass: 0 of " in done.stdout


def test_the_other_commands_run_in_ci() -> None:
    others = [line for line in commands("README.md") if not line.startswith("telechat-moe")]
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert others == ["make train", "make test", "make cluster"]
    for line in others:
        assert f"\n{line}\n" in script


def test_the_commands_of_the_page_on_operators(capsys: pytest.CaptureFixture[str]) -> None:
    for line in commands("docs/ops.md"):
        if line.startswith("telechat-moe bench"):
            assert main([*shlex.split(line)[1:], "--only", "cross-entropy", "--threads", "1"]) == 0
        else:
            command = [sys.executable, *shlex.split(line)[1:]]
            assert subprocess.run(command, check=False).returncode == 0, line


def test_the_program_of_the_page_on_operators(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page, re.S)[0]
    exec(compile(code, "page", "exec"), {})
    printed = capsys.readouterr().out
    shown = re.findall(r"It prints\n\n```\n(.*?)```", page, re.S)[0]
    words = [line.split()[2:] for line in shown.splitlines() if line.startswith("    ")]
    found = [line.split()[2:] for line in printed.splitlines() if line.startswith("    ")]
    assert found == words  # the instructions; the header depends on the cache
    assert shown.splitlines()[0] in printed


def test_the_error_of_the_readme_is_what_a_user_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["cp", "telechat3_moe/pretrain_tiny.yaml", "mine.yaml"]) == 0
    path = tmp_path / "mine.yaml"
    path.write_text(path.read_text().replace("pipeline_stage:", "pipline_stage:"))
    assert main(["train", "mine.yaml"]) == 3
    message = capsys.readouterr().err.strip()
    assert message in (ROOT / "README.md").read_text(encoding="utf-8")
