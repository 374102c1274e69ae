"""What `swap_config` marks in a model, and what MindSpore makes of the marks in the compiled graph."""

from typing import Any

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

from mindspore import nn

from telechat_moe.graph.read import Expected
from telechat_moe.graph.report import Subject, report, swap_text
from telechat_moe.model.causal_lm import CausalLM
from telechat_moe.ops import select
from telechat_moe.recipe import Recipe, load
from telechat_moe.recipe.swap import parts, swapped
from telechat_moe.sharding.placement import primitives
from telechat_moe.sharding.recipe import even_exchange, mesh_of
from telechat_moe.sharding.recompute import swap
from telechat_moe.train.rank_graph import compile_recipe

MODEL = "model.model_config."
SMALL = {
    "use_parallel": True,
    "parallel.parallel_mode": 1,
    "parallel_config.data_parallel": 2,
    "runner_config.gradient_accumulation_steps": 2,
    "callbacks": "[]",
    f"{MODEL}moe_router_enable_expert_bias": False,
    f"{MODEL}num_hidden_layers": 3,
    f"{MODEL}fp32_residual_connection": True,
}
LAYERS, OPERATORS = "swap_config.layer_swap", "swap_config.op_swap"
SWAP = {"swap_config.swap": True}


def recipe_with(changes: dict[str, object]) -> Recipe:
    values = {**SMALL, **changes}
    return load("telechat3_moe/pretrain_tiny.yaml", [f"{k}={v}" for k, v in values.items()])


def model_of(changes: dict[str, object]) -> CausalLM:
    with select.using("auto", {}, "Ascend"):
        return CausalLM(recipe_with(changes).model_config)


def marked(cell: nn.Cell) -> set[int]:
    """Return the prefetches of the marked primitives below a cell."""
    found = [p.attrs for _, _, p in primitives(cell)]
    return {attrs["backward_prefetch"] for attrs in found if attrs.get("offload")}


def test_the_named_layers_and_parts_are_marked() -> None:
    """The first item that names a part counts; other layers and MTP are left alone."""
    layers = "[{layers: [1], backward_prefetch: 5}]"
    operators = (
        "[{op_name: attention, layers: [2], backward_prefetch: 7},"
        "{op_name: ['attention\\.core', 'moe\\.shared\\.act'], layers: [2], backward_prefetch: 9}]"
    )
    changes = {**SWAP, LAYERS: layers, OPERATORS: operators}
    model = model_of(changes)
    swap(model, swapped(recipe_with(changes)))
    dense, whole, some = model.layers
    assert marked(dense) == marked(model.mtp[0]) == set()
    assert marked(whole) == {5}
    assert marked(some.attention) == {7}
    assert some.add_ffn.attrs.get("offload") is None
    assert marked(some.moe.shared.act) == {9}
    assert marked(some.moe.dispatch) == set()


def test_what_is_recomputed_is_not_marked() -> None:
    changes = {**SWAP, LAYERS: "[{layers: True, backward_prefetch: 5}]"}
    model = model_of(changes)
    for _, _, primitive in primitives(model.layers[1].input_norm):
        primitive.add_prim_attr("recompute", True)
    swap(model, swapped(recipe_with(changes)))
    assert marked(model.layers[1].input_norm) == set()
    assert marked(model.layers[1].attention) == marked(model.layers[0].input_norm) == {5}


@pytest.mark.parametrize("compressed", [True, False])
def test_every_part_is_a_part_of_the_model(compressed: bool) -> None:
    changes: dict[str, object] = {} if compressed else {f"{MODEL}q_lora_rank": "null"}
    recipe, model = recipe_with(changes), model_of(changes)
    for number, layer in enumerate(model.layers):
        for name in parts(recipe.model_config, number):
            cell = layer
            for step in name.split("."):
                cell = getattr(cell, step)
        assert ("attention.q_down" in parts(recipe.model_config, number)) is compressed


def graph_of(changes: dict[str, object]) -> dict[str, Any]:
    recipe = recipe_with(changes)
    (graph,) = compile_recipe(recipe, [0])
    mesh = mesh_of(recipe)
    subject = Subject("a", mesh, Expected(*even_exchange(recipe, mesh)))
    return report(subject, [graph], "Ascend")["stages"][0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "attention.core", "attention.q_down", "add_attention", "add_ffn", "ffn", "ffn.act", "moe", "moe.router", "moe.dispatch", "moe.experts", "moe.shared", "moe.shared.act"])  # fmt: skip
def test_mindspore_moves_each_part(name: str) -> None:
    """Every part that can be named has a result that the backward pass reads, and it goes there and back."""
    pattern = name.replace(".", r"\.")
    item = f"[{{op_name: '{pattern}', layers: True, backward_prefetch: 4}}]"
    stage = graph_of({**SWAP, OPERATORS: item})
    found, micro_batches = stage["swapping"], 2
    assert {row["prefetch"] for row in found["by_module"]} == {4}
    moves = stage["operators"]["MoveTo"]
    assert moves["forward"] == moves["backward"] == found["tensors"]
    if (
        name == "add_ffn"
    ):  # float32 of one sequence of each device and of its width, in three layers
        config = recipe_with({}).model_config
        rows = recipe_with({}).runner_config.batch_size * config.seq_length
        assert found["bytes"] == micro_batches * 3 * rows * config.hidden_size * 4
        assert found["host"] == found["bytes"] // micro_batches
        assert "3 x" not in swap_text(stage)


@pytest.mark.slow
def test_it_takes_memory_off_the_device() -> None:
    """What a pass leaves behind shrinks, by less than is moved: results of operators that have several are moved and kept."""
    whole = {**SWAP, LAYERS: "[{layers: True, backward_prefetch: 4}]"}
    plain, swapped = graph_of({})["memory"], graph_of(whole)
    moved = swapped["swapping"]["host"]
    freed = plain["kept_by_a_pass"] - swapped["memory"]["kept_by_a_pass"]
    assert 0.4 * moved < freed < 1.1 * moved
    assert swapped["memory"]["activations"] < plain["activations"]


@pytest.mark.slow
def test_one_micro_batch_moves_nothing() -> None:
    """Why `check` refuses it: MindSpore ignores the marks outside the graph that micro-batches share."""
    alone = {"runner_config.gradient_accumulation_steps": 1}
    assert graph_of({**SWAP, **alone})["swapping"]["tensors"] == 0
