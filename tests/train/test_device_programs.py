"""The program that compiles its step natively, run for real: data parallel on CPU processes, beside exported graphs."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import mini_recipe as mini

from telechat_moe.checkpoint import checkpoint
from telechat_moe.cli import main

NATIVE, EXPORTED = 0, 1
STEPS = 5
AVERAGED = {"telechat_moe__ema": "{decay: 0.9}", "callbacks__2__save_checkpoint_steps": STEPS}
TWO = {**mini.DP2, **AVERAGED, "train_dataset__data_loader__sizes": f"[{4 * STEPS},0,0]"}
FOUR = {
    **mini.SPREAD,
    **AVERAGED,
    "parallel_config__data_parallel": 4,
    "runner_config__batch_size": 1,
    "model__model_config__batch_size": 1,
    "runner_config__gradient_accumulation_steps": 2,
    "callbacks__1__gradient_accumulation_steps": 2,
    "model__model_config__calculate_per_token_loss": True,
    "train_dataset__data_loader__sizes": f"[{8 * STEPS},0,0]",
}


def run(data: Path, output: Path, mode: int, settings: dict[str, object]) -> np.ndarray:
    """Train; return (loss, gradient norm) of every step."""
    changes = {**settings, "parallel__parallel_mode": mode}
    assert main(mini.arguments(data, output, **changes)) == 0
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return np.array([(x["loss"], x["grad_norm"]) for x in lines if x["event"] == "step"])


def newest(output: Path) -> checkpoint.Checkpoint:
    latest = checkpoint.latest(output / "checkpoints")
    assert latest is not None
    return latest


@pytest.mark.slow
@pytest.mark.parametrize("settings", [TWO, FOUR], ids=["2 processes", "4 processes"])
def test_a_native_step_computes_what_exported_graphs_do(
    data: Path, tmp_path: Path, settings: dict[str, object]
) -> None:
    native = run(data, tmp_path / "native", NATIVE, settings)
    exported = run(data, tmp_path / "exported", EXPORTED, settings)
    assert not list((tmp_path / "native").glob(".job/*.mindir"))
    assert list((tmp_path / "exported").glob(".job/*.mindir"))
    assert native.shape == (STEPS, 2)
    np.testing.assert_allclose(native, exported, rtol=1e-6)
    saved, other = newest(tmp_path / "native"), newest(tmp_path / "exported")
    assert {group: set(x) for group, x in saved.tensors.items()} == {
        group: set(x) for group, x in other.tensors.items()
    }
    for group, tensors in other.tensors.items():
        for name, tensor in tensors.items():
            if settings is TWO:  # the sum of two processes has one order
                np.testing.assert_array_equal(saved.tensors[group][name], tensor, err_msg=name)
            else:
                np.testing.assert_allclose(
                    saved.tensors[group][name], tensor, atol=1e-6, rtol=1e-5, err_msg=name
                )
