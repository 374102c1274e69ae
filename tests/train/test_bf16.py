"""Training with bfloat16 operands on CPU: the same loss within their precision, fp32 everywhere else."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import mini_recipe as mini

from telechat_moe.checkpoint import checkpoint
from telechat_moe.cli import main


def train(data: Path, output: Path, dtype: str) -> np.ndarray:
    changes = {
        "train_dataset__data_loader__sizes": "[16,0,0]",
        "callbacks__2__save_checkpoint_steps": 4,
        "model__model_config__num_nextn_predict_layers": 1,
        "model__model_config__first_k_dense_replace": 1,
        "model__model_config__compute_dtype": dtype,
    }
    assert main(mini.arguments(data, output, **changes)) == 0
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return np.array([r["loss"] for r in records if r["event"] == "step"])


@pytest.mark.slow
def test_bfloat16_trains_and_keeps_fp32_weights(tmp_path: Path, data: Path) -> None:
    exact, rounded = (train(data, tmp_path / d, d) for d in ("float32", "bfloat16"))
    assert len(rounded) == 4
    np.testing.assert_allclose(rounded, exact, rtol=2e-3)
    assert (rounded != exact).all()
    saved = checkpoint.latest(tmp_path / "bfloat16" / "checkpoints")
    dtypes = {a.dtype for group in saved.tensors.values() for a in group.values()}
    assert dtypes == {np.dtype(np.float32)}


def test_without_the_fused_products_it_is_refused(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {
        "model__model_config__compute_dtype": "bfloat16",
        "telechat_moe__operators__default": "plain",
    }
    assert main(mini.arguments(data, tmp_path / "run", **changes)) == 3
    assert "bfloat16 with plain" in capsys.readouterr().err
