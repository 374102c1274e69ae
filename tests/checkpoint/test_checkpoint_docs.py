"""Every command of docs/checkpoints.md runs, in its order."""

import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import mini_recipe as mini
import yaml

from telechat_moe.cli import main
from telechat_moe.recipe import load

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


def commands() -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]


def test_the_commands_run(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"train_dataset__data_loader__sizes": "[16,0,0]"}
    _, name, _, *sets = mini.arguments(data, tmp_path / "output", **changes)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(load(name, sets[1::2]).to_dict()))
    monkeypatch.chdir(tmp_path)
    lines = commands()
    assert len(lines) == 7
    for program, *words in lines:
        assert program == "telechat-moe"
        assert main(words) == 0, words
    assert "all 4 steps are done" in capsys.readouterr().err
    saved = tmp_path / "output" / "checkpoints" / "step-00000004"
    assert any(saved.iterdir())
    for place in ("merged", "whole"):
        for path in saved.iterdir():
            assert (tmp_path / place / saved.name / path.name).read_bytes() == path.read_bytes()
