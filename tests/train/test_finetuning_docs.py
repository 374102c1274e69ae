"""Every command of docs/finetuning.md runs, in its order, from a checkpoint to a model that was fine-tuned on conversations."""

import json
import re
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = [pytest.mark.mindspore, pytest.mark.slow]

import numpy as np

from telechat_moe.checkpoint import checkpoint
from telechat_moe.cli import main
from telechat_moe.data import build
from telechat_moe.data.corpus import open_corpus
from telechat_moe.recipe import load
from telechat_moe.recipe.weights import weights

PAGE = Path(__file__).parents[2] / "docs" / "finetuning.md"
SHORT = {
    "train_dataset.data_loader.sizes": "[48,0,0]",
    "lr_schedule.warmup_steps": 2,
    "telechat_moe.evaluation.interval": 12,
    "telechat_moe.evaluation.batches": 2,
    "callbacks.2.save_checkpoint_steps": 6,
    "telechat_moe.sample.max_new_tokens": 2,
}


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.py").write_text("def close(self):\n    return the next item\n" * 50)
    build("output/data", open_corpus(["text.py"]), vocab_size=400, valid_fraction=0)
    config, rng = load("telechat3_moe/pretrain_tiny.yaml").model_config, np.random.default_rng(0)
    model = {
        w.name: (rng.standard_normal(w.shape) * 0.02 + w.name.endswith("norm.weight")).astype("f4")
        for w in weights(config)
    }
    state = {"version": 1, "model_config": asdict(config)}
    checkpoint.save(Path("output/checkpoints"), 1000, {"model": model}, state)
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    lines = [shlex.split(line, comments=True)[1:] for b in blocks for line in b.splitlines()]
    lines = lines[2:]  # the run of `make train`, whose checkpoint is there already
    assert [line[0] for line in lines] == ["convert", "data", "data", "train"]
    for line in lines:
        more = [x for k, v in SHORT.items() for x in ("--set", f"{k}={v}")]
        assert main([*line, *(more if line[0] == "train" else [])]) == 0, line
    assert "left out" in capsys.readouterr().out
    summary = json.loads(Path("output/finetuned/summary.json").read_text())
    assert summary["finished"]
    assert summary["validation_loss"] < summary["first_loss"] - 0.1
    assert main(["data", "audit", "output/finetuned"]) == 0
