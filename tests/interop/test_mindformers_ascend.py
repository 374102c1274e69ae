"""Our model in MindFormers' trainer, compiled for Ascend: the collectives of our own step."""

import importlib.util
from collections import Counter

import pytest
from test_mindformers_dryrun import SMALL, TELECHAT, layout

from telechat_moe.recipe import load

pytestmark = [
    pytest.mark.mindspore,
    pytest.mark.mindformers,
    pytest.mark.skipif(
        importlib.util.find_spec("mindformers") is None, reason="mindformers is not installed"
    ),
]

SHARED = "model.model_config.moe_shared_expert_intermediate_size=32"

DECAY = [
    "lr_schedule.type=WarmUpStableDecayLR",
    "lr_schedule.decay_start_steps=2000000",
    "lr_schedule.lr_end=1.0e-5",
    "telechat_moe.lr_wsd_decay_style=cosine",
]
"""A schedule of ours, which is part of MindFormers' step."""


def readings(overrides: list[str], rank: int):
    """Compile a rank both ways; return what is in MindFormers' step and in ours."""
    from telechat_moe.graph.read import Expected, read
    from telechat_moe.interop.mindformers_dryrun import compile_mindformers
    from telechat_moe.sharding.recipe import even_exchange, mesh_of
    from telechat_moe.train.rank_graph import compile_recipe

    overrides = [*SMALL, SHARED, *overrides]
    recipe = load(TELECHAT, overrides)
    (theirs,) = compile_mindformers(TELECHAT, [rank], overrides=overrides, ours=True)
    (ours,) = compile_recipe(recipe, [rank])
    assert weights(theirs) == weights(ours)
    mesh = mesh_of(recipe)
    return [read(graph, mesh, Expected(*even_exchange(recipe, mesh))) for graph in (theirs, ours)]


def weights(graph) -> dict[str, list]:
    """Return the layout of each parameter and moment."""
    return {
        name: entry[:3]
        for name, entry in graph.layouts.items()
        if not name.startswith(("batch", "inputs", "input")) and "." in name
    }


def counted(reading, phase: str) -> Counter:
    counts: Counter = Counter()
    for c in reading.collectives:
        if c.phase == phase:
            counts[c.kind, c.group, c.purpose, c.shape] += c.times
    return counts


@pytest.mark.slow
def test_same_collectives_as_our_own_step() -> None:
    upstream, our_run = readings([*layout(2, 2, 1, 2), *DECAY], 3)
    for phase, at_least in (("forward", 50), ("backward", 70)):
        assert counted(upstream, phase) == counted(our_run, phase)
        assert sum(counted(our_run, phase).values()) > at_least
    # MindSpore finds that MindFormers' step needs two exchanges of a recomputed layer no more.
    more = counted(our_run, "recompute") - counted(upstream, "recompute")
    assert not counted(upstream, "recompute") - counted(our_run, "recompute")
    assert {kind for kind, *_ in more} <= {"AlltoAllV"}
    operators = upstream.operators["forward"]
    for kind in ("FlashAttentionScore", "GroupedMatmul", "RmsNorm"):
        assert operators[kind] == our_run.operators["forward"][kind] > 0, kind


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3])
def test_pipeline(rank: int) -> None:
    """Two stages and four micro-batches, which MindFormers' pipeline cell cuts."""
    upstream, our_run = readings(layout(1, 2, 2, 2, micro=4), rank)
    for phase in ("forward", "backward"):
        assert counted(upstream, phase) == counted(our_run, phase), phase
