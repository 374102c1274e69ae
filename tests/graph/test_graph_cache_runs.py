"""Training from kept graphs takes the very steps that training from compiled ones takes, whatever happens to their files."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mindspore", reason="needs mindspore (pip install '.[train]')")

import mini_recipe as mini
from running import until

from telechat_moe.checkpoint import checkpoint
from telechat_moe.graph.cache import COMPILING

pytestmark = [pytest.mark.mindspore, pytest.mark.slow]

TAKEN = "the graph of a step is kept from an earlier start"
ACCUMULATES = {
    "runner_config__gradient_accumulation_steps": 2,
    "callbacks__1__gradient_accumulation_steps": 2,
}
CASES: dict[str, dict[str, object]] = {
    "grows": {
        **ACCUMULATES,
        "train_dataset__data_loader__sizes": "[84,0,0]",
        "telechat_moe__step_batch_size_schedule": "'0:4 200:8'",
        "telechat_moe__ema__decay": 0.75,
    },
    "accumulates": {
        **ACCUMULATES,
        "train_dataset__data_loader__sizes": "[96,0,0]",
        "model__model_config__calculate_per_token_loss": True,
    },
    "drops": {
        "model__model_config__moe_token_drop_policy": "probs",
        "model__model_config__moe_expert_capacity_factor": 0.5,
        "model__model_config__num_nextn_predict_layers": 1,
        "telechat_moe__operators__default": "plain",
        "telechat_moe__evaluation__interval": 4,
    },
    "bf16": {"model__model_config__compute_dtype": "bfloat16"},
}


def begin(data: Path, home: Path, output: Path, flags: Sequence[str] = (), **changes: object):
    """Start `telechat-moe train`, the cache below ``home``."""
    arguments = mini.arguments(data, output, **changes)
    return subprocess.Popen(
        [sys.executable, "-m", "telechat_moe.cli", *arguments, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(home), "TMPDIR": str(home)},
    )


def train(*arguments: Any, said: str, **changes: object) -> dict[int, tuple[float, ...]]:
    """Train to the end; return loss and gradient norm of each step, and a hash of the last weights and moments."""
    process = begin(*arguments, **changes)
    return finish(process, arguments[2], said)


def finish(
    process: "subprocess.Popen[str]", output: Path, *said: str
) -> dict[int, tuple[float, ...]]:
    text = process.communicate()[0]
    assert process.returncode == 0, text
    assert {*said} & {*text.replace("; ", "\n").splitlines()}, text
    assert "not kept" not in text
    found = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    steps = {x["step"]: (x["loss"], x["grad_norm"]) for x in found if x["event"] == "step"}
    last = checkpoint.load(output / f"checkpoints/step-{max(steps):08d}").tensors
    for group in sorted(last):
        for name, array in sorted(last[group].items()):
            value = np.ascontiguousarray(array)
            steps[-1] = (*steps.get(-1, ()), hash((group, name, value.tobytes())))
    return steps


def graphs(home: Path) -> list[Path]:
    return sorted((home / "telechat-moe" / "graphs").glob("*.graphs"))


@pytest.mark.parametrize("case", CASES)
def test_a_kept_graph_takes_the_same_steps(data, tmp_path, case):
    changes = CASES[case]
    alone = tmp_path / "alone"
    compiled = train(data, tmp_path, alone, ["--no-graph-cache"], said=COMPILING, **changes)
    assert len(compiled) == mini.STEPS + 1
    assert graphs(tmp_path) == []
    keeping = train(data, tmp_path, tmp_path / "keeping", said=COMPILING, **changes)
    assert keeping == compiled
    kept = tmp_path / "kept"
    assert train(data, tmp_path, kept, said=TAKEN, **changes) == compiled
    assert len(graphs(tmp_path)) == 1


def test_a_run_goes_on_with_a_kept_graph(data, tmp_path):
    output = tmp_path / "run"
    whole = train(data, tmp_path, output, said=COMPILING)
    for step in (9, 12):
        shutil.rmtree(output / f"checkpoints/step-{step:08d}")
    assert train(data, tmp_path, output, ["--resume"], said=TAKEN) == whole


def test_a_graph_carries_no_values_of_the_run_that_made_it(data, tmp_path):
    """Another seed, rate and beginning, computed by the graph of the first run."""
    begun, given = tmp_path / "begun", tmp_path / "given"
    train(data, tmp_path, begun, said=COMPILING)
    (first,) = graphs(tmp_path)
    changes = {
        "seed": 7,
        "lr_schedule__learning_rate": 0.01,
        "load_checkpoint": str(begun / "checkpoints/step-00000012"),
    }
    own = train(data, tmp_path, given, said=COMPILING, **changes)
    (other,) = {*graphs(tmp_path)} - {first}
    first.replace(other)
    assert train(data, tmp_path, tmp_path / "by first", said=TAKEN, **changes) == own
    fresh = train(data, tmp_path, tmp_path / "fresh", said=COMPILING, seed=7)
    assert fresh[1] != own[1]


def test_what_changes_a_graph_is_not_taken_for_it(data, tmp_path):
    """Constants of the graph: with the other one's file the steps are wrong, so the file's name must tell them apart."""
    betas = {"optimizer__betas": "[0.5, 0.95]"}
    one = train(data, tmp_path, tmp_path / "one", said=COMPILING)
    (first,) = graphs(tmp_path)
    two = train(data, tmp_path, tmp_path / "two", said=COMPILING, **betas)
    (second,) = {*graphs(tmp_path)} - {first}
    second.replace(first)
    assert train(data, tmp_path, tmp_path / "wrong", said=TAKEN) not in (one, two)


def test_two_runs_at_once_and_one_that_is_killed(data, tmp_path):
    whole = train(data, tmp_path, tmp_path / "alone", ["--no-graph-cache"], said=COMPILING)
    killed = begin(data, tmp_path, tmp_path / "killed")
    scratch = lambda: [*tmp_path.glob("telechat-moe-*/**/graph_cache/*")]  # noqa: E731
    until(scratch, killed)  # MindSpore writes
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    both = [tmp_path / "a", tmp_path / "b"]
    running = [begin(data, tmp_path, output) for output in both]
    for process, output in zip(running, both, strict=True):
        assert finish(process, output, COMPILING, TAKEN) == whole
    assert train(data, tmp_path, tmp_path / "c", said=TAKEN) == whole
