"""What `telechat_moe.operators.host` gives to the host: which nodes of the compiled graph, the same results, and what is refused."""

import re
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import numpy as np
from host_syncs_of import host_syncs_of
from mindspore import Tensor, nn

from telechat_moe.model.dispatch import AscendDispatch
from telechat_moe.ops import select
from telechat_moe.ops.permute import BlockPlan, CapacityPlan
from telechat_moe.ops.routing import Routing, RoutingRule, routing_reference
from telechat_moe.recipe import RecipeError, load
from telechat_moe.recipe.uses import Use
from telechat_moe.sharding.placement import primitives
from telechat_moe.train.rank_graph import compile_recipe

HOST, MODEL = "telechat_moe.operators.host", "model.model_config."
PARTS = ("top_k", "sort", "histogram")
TWO = {
    f"{MODEL}num_hidden_layers": 2,
    "use_parallel": True,
    "parallel.parallel_mode": 1,
    "parallel.full_batch": True,
    "parallel_config.data_parallel": 2,
    "parallel_config.expert_parallel": 2,
}
GROUPS = {f"{MODEL}n_group": 4, f"{MODEL}topk_group": 1}
DROPS = {f"{MODEL}moe_expert_capacity_factor": 1.5, f"{MODEL}moe_token_drop_policy": "probs"}
HOPS = {f"{MODEL}moe_token_dispatcher_type": "alltoall_zero_redundancy"}
HOPS[f"{MODEL}npu_nums_per_device"] = "1"
COUNTING_SORT = dict.fromkeys(("OneHot", "CumSum", "Mul", "ReduceSum", "Sub"), 1)
ASCEND = {"context.device_target": "Ascend", "telechat_moe.evaluation.interval": 0}
ASCEND |= {"telechat_moe.sample": "null"}


def recipe_with(changes: dict[str, Any], use: Use = "dryrun") -> Any:
    sets = [f"{key}={value}" for key, value in changes.items()]
    return load("telechat3_moe/pretrain_tiny.yaml", sets, use=use)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "parts", "each"),
    [
        (TWO, "[histogram]", {"OneHot": 1, "ReduceSum": 2}),
        ({**TWO, **HOPS}, "[histogram]", {"OneHot": 1, "ReduceSum": 2}),
        (
            {**TWO, **DROPS},
            "[sort, histogram]",
            {**COUNTING_SORT, "ReduceSum": 2, "Sort": 1, "Gather": 1, "ScatterNd": 1},
        ),
        (
            {**TWO, **GROUPS},
            "[top_k]",
            {"TopK": 3, "ReduceSum": 2, "OneHot": 1, "Tile": 1, "Greater": 1, "Select": 1},
        ),
    ],
)  # fmt: skip
def test_the_compiled_graph_has_exactly_these_on_the_host(
    changes: dict[str, Any], parts: str, each: dict[str, int]
) -> None:
    """For each router, beside Reshape, which computes nothing."""
    recipe = recipe_with({**changes, HOST: parts})
    (graph,) = compile_recipe(recipe, [0])
    found, routers = Counter[str](), len(recipe.model_config.moe_layer_names)
    for one in host_syncs_of(graph.mindir):
        if one.why.startswith("the host computes it"):
            assert one.waits
            assert one.phase == "forward"
            found[one.kind] += one.times
    found.pop("Reshape", None)
    assert found == {kind: count * routers for kind, count in each.items()}


def both(make: Any) -> list[nn.Cell]:
    """Return a cell as it is, and one of which the host computes all that it can."""
    cells = []
    for host in ((), PARTS):
        with select.using("plain", {}, "CPU", host):
            cells.append(make())
    marks = [[p.attrs.get("primitive_target") for *_, p in primitives(c)] for c in cells]
    assert set(marks[0]) == {None}
    assert "CPU" in marks[1]
    return cells


def outputs(cell: nn.Cell, *given: Any) -> list[np.ndarray]:
    return [x.asnumpy() for x in cell(*given)]


@pytest.mark.parametrize("rule", [RoutingRule(8, 2), RoutingRule(16, 4, 4, 2)])
def test_the_same_experts_are_chosen_and_counted(rule: RoutingRule) -> None:
    logits = np.random.default_rng(1).standard_normal((97, rule.experts)).astype(np.float32)
    bias = np.zeros(rule.experts, np.float32)
    plain, host = (
        outputs(cell, Tensor(logits), Tensor(bias)) for cell in both(lambda: Routing(rule))
    )
    for found, expected in zip(host, plain, strict=True):
        np.testing.assert_array_equal(found, expected)
    _, index, _ = routing_reference(rule, logits, bias)
    np.testing.assert_array_equal(host[1], index)
    np.testing.assert_array_equal(host[4], np.bincount(index.ravel(), minlength=rule.experts))


def test_pairs_get_the_same_places() -> None:
    rng, experts, capacity = np.random.default_rng(2), 8, 20
    index = np.argsort(rng.random((61, experts)), 1)[:, :3].astype(np.int32)
    weight = rng.permutation(index.size).reshape(index.shape).astype(np.float32) + 1
    pairs = index.ravel()
    order = np.argsort(pairs, kind="stable")
    first = np.searchsorted(pairs[order], np.arange(experts))
    plain, host = (outputs(c, Tensor(index), 1) for c in both(lambda: BlockPlan(experts)))
    np.testing.assert_array_equal(host[0], np.argsort(order))  # blocks of one row: no padding
    for policy in ("position", "probs"):
        some = both(lambda policy=policy: CapacityPlan(experts, policy))
        one, other = (outputs(c, Tensor(index), Tensor(weight), capacity) for c in some)
        plain, host = plain + one, host + other
        kept = np.zeros(pairs.size, bool)
        for expert, begin in enumerate(first):
            own = order[begin : begin + (pairs == expert).sum()]
            if policy == "probs":
                own = own[np.argsort(-weight.ravel()[own])]
            kept[own[:capacity]] = True
        np.testing.assert_array_equal(other[1], kept)
    for found, expected in zip(host, plain, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_rows_sorted_by_ascend_are_counted() -> None:
    """MoeTokenPermute, beside them, is Ascend's alone."""
    index = np.random.default_rng(3).integers(0, 8, (50, 2)).astype(np.int32)
    for cell in both(lambda: AscendDispatch(8)):
        permute = cell.permute
        assert permute.permute.attrs.get("primitive_target") is None
        member = permute.one_hot(Tensor(index.ravel()), 8, permute.on, permute.off)
        counted = permute.count(member, 0).asnumpy()
        np.testing.assert_array_equal(counted, np.bincount(index.ravel(), minlength=8))


@pytest.mark.parametrize(
    ("use", "changes", "said"),
    [
        ("train", {HOST: "[top_k]"}, "top_k on CPU.*device_target Ascend"),
        ("dryrun", {HOST: "[sort]"}, "MoeTokenPermute.*permute and grouped_matmul plain"),
        ("dryrun", {**TWO, HOST: "[sort]"}, "MoeTokenPermute.*dispatcher alltoall"),
        ("mindformers", {**ASCEND, HOST: "[sort]"}, "MoeTokenPermute"),
        ("dryrun", {HOST: "[top_k, top_k]"}, "a part twice; each part once"),
        (
            "dryrun",
            {HOST: "[top_k]", "context.jit_config": "{jit_level: O2}"},
            "jit_level O2.*O0 or O1",
        ),
        ("plan", {**TWO, HOST: "[top_k]"}, "the planner's cost model does not know"),
        ("dryrun", {HOST: "[masks]"}, "masks"),
    ],
)
def test_what_has_no_effect_is_refused(use: Use, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_with(changes, use)
    assert {problem.key.removesuffix(".0") for problem in caught.value.problems} == {HOST}
    assert re.search(said, str(caught.value))


def test_a_recipe_for_ascend_takes_it() -> None:
    recipe = recipe_with({**ASCEND, HOST: "[top_k, histogram]"}, "mindformers")
    assert recipe.telechat_moe.operators.host == ["top_k", "histogram"]
