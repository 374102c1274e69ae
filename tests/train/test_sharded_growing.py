"""A batch that grows on several processes: the numbers of one process, and what samples are seen."""

import json
from pathlib import Path

import mini_recipe
import numpy as np
import pytest
from mini_recipe import DP2_EP2

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = [pytest.mark.mindspore, pytest.mark.slow]

from saved import assert_near
from test_growing_runs import BATCHES, SETTINGS
from test_sharded_average import saved, train
from test_sharded_train import BOUND, curve, records

from telechat_moe.cli import main

DP2 = {**SETTINGS, **DP2_EP2}
PP2 = {
    **SETTINGS,
    **mini_recipe.PP2,
    "parallel_config__micro_batch_num": 4,
    "callbacks__1__micro_batch_num": 4,
    "runner_config__gradient_accumulation_steps": 1,
    "callbacks__1__gradient_accumulation_steps": 1,
}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """The run in a single process."""
    return train(data, tmp_path_factory.mktemp("one") / "run", **SETTINGS)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """The run on two data-parallel processes, with one micro-batch a step, then two."""
    return train(data, tmp_path_factory.mktemp("two") / "run", **DP2)


def same_course(output: Path, one: Path) -> None:
    np.testing.assert_allclose(curve(output), curve(one), rtol=BOUND)
    assert [r["tokens"] for r in records(output, "step")] == [16 * batch for batch in BATCHES]
    logs = [
        [json.loads(line) for line in (o / "samples.jsonl").read_text().splitlines()]
        for o in (output, one)
    ]
    keys = ("step", "first", "count", "content")
    seen = [[[r[k] for k in keys] for r in log if r["event"] == "step"] for log in logs]
    assert seen[0] == seen[1]
    assert main(["data", "audit", str(output)]) == 0
    assert_near(saved(output, len(BATCHES)), saved(one, len(BATCHES)), 1e-3)


def test_data_parallel_steps_grow(two: Path, one: Path) -> None:
    same_course(two, one)


def test_steps_of_a_pipeline_grow(one: Path, data: Path, tmp_path: Path) -> None:
    """From as many micro-batches as stages to twice as many."""
    same_course(train(data, tmp_path / "run", **PP2), one)
