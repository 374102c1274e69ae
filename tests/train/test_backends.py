"""The training job with fused operators, with plain ones, and with the fuser at work on plain ones."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import mini_recipe as mini

from telechat_moe.cli import main

STEPS = 200


def losses(data: Path, output: Path, **operators: str) -> np.ndarray:
    changes = {f"telechat_moe__operators__{key}": value for key, value in operators.items()}
    changes |= {
        "train_dataset__data_loader__sizes": f"[{4 * STEPS},0,0]",
        "callbacks__2__save_checkpoint_steps": STEPS,
        "model__model_config__num_nextn_predict_layers": 1,
    }
    assert main(mini.arguments(data, output, **changes)) == 0
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return np.array([r["loss"] for r in records if r["event"] == "step"])


@pytest.mark.slow
def test_200_steps_agree(tmp_path: Path, data: Path) -> None:
    fused = losses(data, tmp_path / "fused")
    plain = losses(data, tmp_path / "plain", default="plain")
    assert len(fused) == STEPS
    assert fused[-20:].mean() < fused[:20].mean() - 0.5  # it learns
    np.testing.assert_allclose(fused, plain, rtol=1e-4)


@pytest.mark.slow
def test_200_steps_agree_by_the_fuser(tmp_path: Path, data: Path) -> None:
    fused = losses(data, tmp_path / "fused")
    by_fuser = losses(data, tmp_path / "fuser", default="plain", fuse_plain="true")
    np.testing.assert_allclose(by_fuser, fused, rtol=1e-4)


def test_the_log_says_which_operators_serve(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {
        "train_dataset__data_loader__sizes": "[4,0,0]",
        "lr_schedule__warmup_steps": 0,
        "telechat_moe__operators__rope": "plain",
    }
    assert main(mini.arguments(data, tmp_path / "run", **changes)) == 0
    printed = capsys.readouterr()
    assert "operators: fused (" in printed.out + printed.err
    assert "rope plain (asked for)" in printed.out + printed.err
