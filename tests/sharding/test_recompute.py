"""What MindSpore recomputes of a marked layer in the compiled graph."""

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

from telechat_moe.graph.read import Expected
from telechat_moe.graph.report import Subject, report
from telechat_moe.recipe import load
from telechat_moe.sharding.recipe import even_exchange, mesh_of
from telechat_moe.train.rank_graph import compile_recipe

MODEL = "model.model_config."
ONE_GRAPH = {
    "use_parallel": True,
    "parallel.parallel_mode": 1,
    "parallel_config.data_parallel": 2,
    "runner_config.gradient_accumulation_steps": 1,
    "callbacks": "[]",
    f"{MODEL}moe_router_enable_expert_bias": False,
    f"{MODEL}num_hidden_layers": 2,
    "recompute_config.recompute": True,
}


def test_functions_on_slices_are_recomputed_with_their_layer() -> None:
    """Gated activations, rotations and keys shared by heads have no scope; all layers, MTP's too, run them again."""
    recipe = load("telechat3_moe/pretrain_tiny.yaml", [f"{k}={v}" for k, v in ONE_GRAPH.items()])
    (graph,) = compile_recipe(recipe, [0])
    mesh = mesh_of(recipe)
    subject = Subject("a", mesh, Expected(*even_exchange(recipe, mesh)))
    (stage,) = report(subject, [graph], "Ascend")["stages"]
    for kind in ("Swiglu", "Tile", "FlashAttentionScore"):
        times = stage["operators"][kind]
        assert times["recompute"] == times["forward"] > 0, kind
