"""A graph that is kept gives the steps of a compiled one, and is found by what it was made from only."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mindspore", reason="needs mindspore (pip install '.[train]')")

import mini_recipe as mini

from telechat_moe.graph import cache as graph_cache
from telechat_moe.recipe import load

pytestmark = pytest.mark.mindspore

TWICE: dict[str, object] = {
    "runner_config__gradient_accumulation_steps": 2,
    "callbacks__1__gradient_accumulation_steps": 2,
}
CHANGES: list[dict[str, object]] = [
    {},
    TWICE,
    {"optimizer__weight_decay": 0.3},
    {"optimizer__betas": "[0.8, 0.95]"},
    {"model__model_config__compute_dtype": "bfloat16"},
    {"telechat_moe__operators__default": "plain"},
]


def steps_of(data: Path, cache: Path, output: Path, **changes: object) -> list[tuple[float, float]]:
    """Train in a process of its own; return losses and gradient norms."""
    arguments = mini.arguments(data, output, **changes)
    script = Path(sys.executable).with_name("telechat-moe")
    command = [sys.executable, str(script), *arguments, "--overwrite"]
    subprocess.run(command, check=True, env={**os.environ, "XDG_CACHE_HOME": str(cache)})
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [(x["loss"], x["grad_norm"]) for x in lines if "grad_norm" in x]


def test_keys_tell_graphs_apart(data, tmp_path):
    keys = set[str]()
    for changes in CHANGES:
        arguments = mini.arguments(data, tmp_path, **changes)
        keys.add(graph_cache.key(load(arguments[1], arguments[4::2]).to_dict(), 1))
    assert len(keys) == len(CHANGES)
    elsewhere = mini.arguments(data, tmp_path / "other")
    recipe = load(elsewhere[1], elsewhere[4::2]).to_dict()
    assert graph_cache.key(recipe, 1) in keys
    assert graph_cache.key(recipe, 2) not in keys


@pytest.mark.parametrize("changes", [{}, TWICE], ids=["one micro-batch", "two"])
def test_a_kept_graph_takes_the_same_steps(data, tmp_path, changes):
    cache, output = tmp_path / "cache", tmp_path / "run"
    compiled = steps_of(data, cache, output, **changes)
    (graph,) = (cache / "telechat-moe" / "graphs").iterdir()
    assert steps_of(data, cache, output, **changes) == compiled
    assert steps_of(data, cache, tmp_path / "other", **changes) == compiled
    other = steps_of(data, cache, output, **changes, optimizer__betas="[0.5, 0.95]")
    assert other != compiled
    # It is the graph in the folder that runs: put the other's there, whose decay rates are not the host's.
    (left,) = {*graph.parent.iterdir()} - {graph}
    shutil.rmtree(graph)
    left.rename(graph)
    assert steps_of(data, cache, output, **changes) not in (compiled, other)
