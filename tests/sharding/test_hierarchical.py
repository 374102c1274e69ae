"""Two hops to the experts: who talks to whom, and how often a token travels, counted one by one."""

from itertools import combinations, product

import numpy as np
import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

from mindspore import Tensor

from telechat_moe.recipe import Problem, RecipeError, load
from telechat_moe.sharding.cells.hierarchical import NodesOfTokens, even_share
from telechat_moe.sharding.mesh import Mesh

MESHES = [
    Mesh(dp=dp, cp=cp, tp=tp, pp=pp, ep=ep, node=node)
    for dp, cp, tp, pp, node in product((1, 2, 4, 8), (1, 2), (1, 2, 4), (1, 2), (1, 2, 4))
    for ep in (2, 4, 8)
    if dp * cp * tp % ep == 0 and ep > node and dp * cp * tp * pp <= 16
] + [Mesh(dp=4, tp=2, ep=4, expert_tp=True, node=4), Mesh(dp=4, tp=2, ep=2, expert_tp=True, node=2)]


@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: f"pp{m.pp} {m.describe()}")
def test_the_two_hops_reach_every_expert_once(mesh: Mesh) -> None:
    for rank in range(mesh.devices):
        hops = mesh.node_groups(rank)
        assert {r // mesh.node for r in hops["within"]} == {rank // mesh.node}
        assert len({r // mesh.node for r in hops["across"]}) == len(hops["across"]) > 1
        reached = [end for via in hops["across"] for end in mesh.node_groups(via)["within"]]
        assert sorted(reached) == mesh.group(rank, mesh.axes("ep"))
        # The experts of a node are numbers that follow each other.
        assert reached == sorted(reached)
        for hop, group in mesh.node_groups(0).items():
            if mesh.stage(rank) == 0 and len(group) > 1:
                assert mesh.substitute(group, 0, rank) == hops[hop]


def test_a_report_names_the_hops() -> None:
    mesh = Mesh(dp=8, ep=8, node=4)
    assert mesh.group_name([0, 1, 2, 3], 0) == "ep within nodes"
    assert mesh.group_name([1, 5], 1) == "ep across nodes"
    assert mesh.describe() == "dp8 ep8 nodes of 4"


@pytest.mark.parametrize(("nodes", "own", "top_k"), [(1, 4, 2), (2, 4, 2), (4, 2, 3), (3, 3, 5)])
def test_pairs_of_token_and_node(nodes: int, own: int, top_k: int) -> None:
    experts = nodes * own
    chosen = np.array(list(combinations(range(experts), top_k)), np.int32)
    counted = [{expert // own for expert in row} for row in chosen.tolist()]
    needs = NodesOfTokens(nodes, own)(Tensor(chosen)).asnumpy()
    assert needs.tolist() == [[float(n in some) for n in range(nodes)] for some in counted]
    pairs = sum(map(len, counted))
    np.testing.assert_allclose(even_share(experts, nodes, top_k) * chosen.size, pairs, rtol=1e-12)
    # A dropped pair has the number behind the last expert, and needs no node.
    dropped = np.where(chosen < own, experts, chosen).astype(np.int32)
    needs = NodesOfTokens(nodes, own)(Tensor(dropped)).asnumpy()
    assert needs.sum() == sum(len(some - {0}) for some in counted)


TYPE, NODE = (
    "model.model_config.moe_token_dispatcher_type",
    "model.model_config.npu_nums_per_device",
)
FORM, EP = "telechat_moe.sharding.dispatcher", "parallel_config.expert_parallel"
GROUPED = "telechat_moe.operators.grouped_matmul"
LARGE = "telechat3_moe/pretrain_105b_a4b_4k.yaml"  # dp4 tp8, 192 experts
GATHER = {TYPE: "alltoall_deredundency", EP: 16}
ONCE = {TYPE: "alltoall_zero_redundancy", EP: 16}
CAPACITY = {
    "model.model_config.moe_expert_capacity_factor": 1.5,
    "model.model_config.moe_token_drop_policy": "probs",
}
WIDTHS = {**ONCE, EP: 4, "telechat_moe.sharding.expert_tensor_parallel": True}


def refusals(settings: dict[str, object]) -> list[Problem]:
    try:
        load(LARGE, [f"{k}={v}" for k, v in settings.items()], use="dryrun")
    except RecipeError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    "settings",
    [GATHER, ONCE, {**ONCE, NODE: 1}, {**GATHER, NODE: 4}, {**WIDTHS, NODE: 16}, {NODE: 8}]
    + [{**ONCE, **CAPACITY, FORM: form} for form in ("auto", "alltoallv")],
    ids=str,
)
def test_layouts_of_whole_nodes_are_taken(settings: dict[str, object]) -> None:
    assert not refusals(settings)


@pytest.mark.parametrize(
    ("settings", "key", "said"),
    [
        ({NODE: 4}, NODE, "no effect"),
        ({TYPE: "alltoall", NODE: 16}, NODE, "no effect"),
        ({**ONCE, EP: 8}, TYPE, "no token to another node"),
        ({**GATHER, NODE: 16}, TYPE, "no token to another node"),
        ({**GATHER, NODE: 3}, NODE, "whole nodes"),
        ({**GATHER, **CAPACITY, FORM: "alltoallv"}, FORM, "drops no token"),
        ({**WIDTHS, NODE: 4}, NODE, "8 devices an expert"),
        ({**WIDTHS, NODE: 32}, TYPE, "no token to another node"),
        ({**GATHER, FORM: "allgather"}, FORM, "one hop"),
        ({**ONCE, FORM: "alltoall"}, FORM, "every node"),
        ({**ONCE, "telechat_moe.operators.default": "plain"}, GROUPED, "sorted by expert"),
    ],
    ids=str,
)
def test_a_hop_without_effect_is_refused(settings: dict[str, object], key: str, said: str) -> None:
    found = [p for p in refusals(settings) if p.key == key]
    assert found, refusals(settings)
    assert said in found[0].found
    assert found[0].expected
