"""Every command of docs/long_runs.md and docs/weights.md runs, in its order."""

import re
import shlex
import sys
from pathlib import Path

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import mini_recipe as mini

from telechat_moe.cli import main
from telechat_moe.recipe import load

ROOT = Path(__file__).parents[2]
TINY = "telechat3_moe/pretrain_tiny.yaml"


def commands(page: str) -> list[list[str]]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return [shlex.split(line)[1:] for block in blocks for line in block.splitlines()]


def small(data: Path) -> list[str]:
    words = mini.arguments(data, Path("unused"))[3:]
    return [
        w
        for key, w in zip(words[::2], words[1::2], strict=True)
        if not w.startswith("output_dir")
        for w in (key, w)
    ]


def test_long_runs(tmp_path, data, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = commands("long_runs.md")
    assert [line[:2] for line in lines] == [["train", TINY], ["data", "audit"], ["data", "audit"]]
    for line in lines:
        plan_or_train = "--plan" in line or line[0] == "train"
        more = small(data) if plan_or_train else []
        if "--plan" in line:  # the alias in the recipe holds in that place only
            path = f"train_dataset_task.dataset_config.data_loader.config.data_path=['1', '{data}/train']"
            more = [*more, "--set", path]
        assert main([*line, *more]) == 0, line


def test_weights(tmp_path, monkeypatch):
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    monkeypatch.chdir(tmp_path)
    from weights import write_hf

    (tmp_path / "weights").mkdir()
    write_hf(tmp_path / "weights/hf", load(TINY).model_config, 1_000_000, sparse=False)
    lines = commands("weights.md")
    assert len(lines) == 3
    for line in lines:
        assert main(line) == 0, line
    assert (tmp_path / "weights/back/config.json").exists()
