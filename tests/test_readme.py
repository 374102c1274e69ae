"""Every command of the README and of the tour runs: here, or in .ci/run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import mini_recipe as mini
from tokenizers import Tokenizer, models

from telechat_moe.cli import main

ROOT = Path(__file__).parents[1]
STEPS = 2
SHORT = [  # appended to `train`: the README's run in seconds instead of minutes
    "--set",
    f"train_dataset.data_loader.sizes=[{4 * STEPS},0,0]",
    "--set",
    "lr_schedule.warmup_steps=0",
    "--set",
    "telechat_moe.evaluation={interval: 0}",
]


def commands(page: str) -> list[str]:
    """Return the lines of all ``sh`` blocks of a page, comments cut off."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def run(lines: list[str]) -> None:
    """Run command lines of ours in order, training cut short."""
    for line in lines:
        arguments = shlex.split(line.replace("step-00001000", f"step-{STEPS:08d}"))[1:]
        if arguments[0] in ("train", "launch") or "--resume" in arguments:
            arguments += SHORT
        if arguments[0] in ("align", "dryrun"):  # what compiles wants a process of its own
            command = [sys.executable, "-m", "telechat_moe.cli", *arguments]
            assert subprocess.run(command, check=False).returncode == 0, line
            continue
        assert main(arguments) == 0, line


@pytest.mark.slow
def test_five_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = commands("README.md")
    verbs = [line for line in lines if line.startswith("telechat-moe")]
    assert len(verbs) >= 6
    run(verbs)
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    others = [line for line in lines if line not in verbs]
    assert others == ["make train", "make test"]
    assert "\n".join(["", "make clean", *others, ""]) in script, "before anything else is installed"


def test_make_train_ends_with_how_to_use_the_command() -> None:
    dry = ["make", "-n", "--no-print-directory", "train"]  # a make around this one would add lines
    made = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "/bin/activate" in made.stdout.splitlines()[-1]


@pytest.mark.slow
def test_the_tour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = commands("docs/tour.md") + commands("docs/sharded_runs.md")
    assert len(lines) >= 25
    assert all(line.startswith("telechat-moe") for line in lines)
    run([line for line in lines if "dryrun" not in line])  # test_five_minutes has the same line
    assert (tmp_path / "weights-hf" / "config.json").exists()
    assert (tmp_path / "graphs" / "rank_1.mindir").exists()
    merged = tmp_path / "merged" / f"step-{STEPS:08d}" / "checkpoint.json"
    original = tmp_path / "output" / "mine" / "checkpoints" / merged.parent.name / merged.name
    assert merged.read_bytes() == original.read_bytes()


def test_the_commands_of_the_page_on_operators() -> None:
    for line in commands("docs/ops.md"):
        command = [sys.executable, *shlex.split(line)[1:]]
        if "benchmarks.ops" in line:
            command += ["--only", "cross-entropy", "--threads", "1"]
        assert subprocess.run(command, check=False, cwd=ROOT).returncode == 0, line


def test_the_program_of_the_page_on_operators(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page, re.S)[0]
    exec(compile(code, "page", "exec"), {})
    printed = capsys.readouterr().out
    shown = re.findall(r"prints\n\n```\n(.*?)```", page, re.S)[0]
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
    data = tmp_path / "output/data"  # as the README has built them before
    data.mkdir(parents=True)
    mini.write_data(data)
    Tokenizer(models.WordLevel({"<|endoftext|>": 0})).save(str(data / "tokenizer.json"))
    capsys.readouterr()
    assert main(["check", "mine.yaml"]) == 1
    message = capsys.readouterr().out.strip()
    assert message in (ROOT / "README.md").read_text(encoding="utf-8")
