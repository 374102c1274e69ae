"""Sequences divided over processes: attention by our kernel on each, equal to one process."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import mini_recipe as mini

from telechat_moe.cli import main
from telechat_moe.recipe import RecipeError, load

CP2 = {
    **mini.SPREAD,
    "parallel_config__context_parallel": 2,
    "runner_config__batch_size": 1,
    "model__model_config__batch_size": 1,
    "model__model_config__use_flash_attention": True,
    "telechat_moe__operators__attention": "fused",
}
DOCUMENTS = "train_dataset__data_loader__config__"
COLUMNS = "['input_ids', 'labels', 'loss_mask', 'position_ids', 'attention_mask']"
DOCUMENTS_MASK = {
    f"{DOCUMENTS}create_attention_mask": True,
    f"{DOCUMENTS}reset_attention_mask": True,
    "train_dataset__input_columns": COLUMNS,
    "train_dataset__construct_args_key": COLUMNS,
}


def compared(
    data: Path, folder: Path, processes: int, steps: int, **changes: Any
) -> dict[str, Any]:
    """Run a layout and one process; return the report."""
    _, name, _, *sets = mini.arguments(data, folder / "run", **{**CP2, **changes})
    given = ["run-sharded", name, *sets, "--processes", str(processes), "--compare"]
    report = folder / "report.json"
    assert main([*given, "--steps", str(steps), "--json", str(report)]) == 0
    return json.loads(report.read_text())


def of_length(tokens: int) -> dict[str, Any]:
    model = {"seq_length": tokens, "max_position_embeddings": tokens}
    found: dict[str, Any] = {f"model__model_config__{key}": n for key, n in model.items()}
    return found | {f"{DOCUMENTS}seq_length": tokens}


def test_attention_is_the_one_fused_operator_of_several_processes(
    data: Path, tmp_path: Path
) -> None:
    _, name, _, *sets = mini.arguments(data, tmp_path, **CP2)
    load(name, sets[1::2], use="train")
    with pytest.raises(RecipeError, match="on 2 processes, which run plain operators"):
        load(name, [*sets[1::2], "telechat_moe.operators.matmul=fused"], use="train")
    low = "model.model_config.softmax_compute_dtype=float16"
    with pytest.raises(RecipeError, match="with fused attention, whose softmax is in float32"):
        load(name, [*sets[1::2], low], use="train")


@pytest.mark.slow
def test_documents_over_two_processes(data: Path, tmp_path: Path) -> None:
    """Each process has half of the queries, whose first keys it reads from its rows of the mask."""
    report = compared(data, tmp_path, 2, 3, **of_length(64), **DOCUMENTS_MASK)
    kinds = {row["ascend"]: row["cpu"] for row in report["differences"]["operators"]}
    assert "native library" in kinds["FlashAttentionScore"]


@pytest.mark.slow
def test_32k_over_two_processes(data: Path, tmp_path: Path) -> None:
    """Each process has 16,384 queries of one sequence."""
    compared(data, tmp_path, 2, 2, **of_length(1 << 15))
