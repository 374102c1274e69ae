"""Times of the expert exchanges against bytes counted on drawn tokens; which one a layout gets, and in its recipe."""

from dataclasses import replace

import numpy as np
import pytest

from telechat_moe.recipe import load
from telechat_moe.recipe.load import loads
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.columns import columns
from telechat_moe.tools.plan.cost.device import load_device
from telechat_moe.tools.plan.cost.expert_exchange import choices, exchange_s
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.report import step as report
from telechat_moe.tools.plan.search.emit import write_recipe

LARGE = "pangu_ultra_moe/pretrain_718b.yaml"
DEVICE = load_device("ascend-910b")
NODE = DEVICE.node_devices
A = Architecture.from_recipe(load(LARGE))
LAYOUT = Layout.from_recipe(load(LARGE)).with_changes(tp=1, dp=64, pp=1, vpp=1, chunks=None, ep=32)


def counted(kind, a, members, tokens=4000):
    """Return bytes (in tokens) that a device sends over its node's links and through its port, from drawn tokens."""
    rng = np.random.default_rng(1)
    chosen = rng.random((tokens, a.experts)).argsort(1)[:, : a.top_k] // (a.experts // members)
    nodes, node = members // NODE, chosen // NODE
    inside, links = members // nodes, a.top_k * (1 - 1 / NODE)
    assert inside == NODE
    if kind == "alltoall":
        own_node = 0
        return np.mean((node == own_node) & (chosen != 0)) * a.top_k, np.mean(
            node != own_node
        ) * a.top_k
    if kind == "alltoall_deredundency":
        return links, nodes - 1.0
    return links, np.mean([len(set(row) - {0}) for row in node])


@pytest.mark.parametrize("members", [16, 32, 64])
@pytest.mark.parametrize("kind", ["alltoall", "alltoall_deredundency", "alltoall_zero_redundancy"])
def test_the_time_is_that_of_the_bytes_of_drawn_tokens(kind, members):
    c = replace(DEVICE.constants, collective_host_s=0.0, inter_latency_s=0.0)
    x = columns([(A, LAYOUT.with_changes(ep=members))])
    device = replace(DEVICE, constants=c)
    seconds = float(exchange_s(kind, x, np.array([1e9]), device)[0])
    links, port = counted(kind, A, members)
    link_s = links * 1e9 / (DEVICE.intra_bandwidth * c.intra_share)
    port_s = port * 1e9 / (DEVICE.inter_bandwidth * c.inter_share)
    both = max(link_s, port_s) if kind == "alltoall" else link_s + port_s
    if kind == "alltoall_deredundency":  # the ring's port is the device's own
        assert port_s == pytest.approx((members // NODE - 1) * 1e9 / (25e9 * c.inter_share))
    assert seconds == pytest.approx(both, rel=0.02)


def test_a_layout_gets_only_the_ways_that_it_allows():
    for ep, etp, ways in ((1, 1, 0), (4, 1, 1), (8, 1, 1), (12, 1, 1), (16, 1, 3), (16, 2, 1)):
        times = choices(A, LAYOUT.with_changes(dp=96, ep=ep, etp=etp), DEVICE)
        assert len(times) == ways, (ep, etp)
        assert list(times.values()) == sorted(times.values())


def test_the_choice_follows_top_k_nodes_and_bandwidths():
    """Few copies: straight; many over two nodes: once a node; a fast network: straight again."""

    def best(a=A, ep=32, device=DEVICE):
        return next(iter(choices(a, LAYOUT.with_changes(ep=ep), device)))

    assert best() == "alltoall_zero_redundancy"
    assert best(replace(A, top_k=1)) == "alltoall"
    assert best(device=replace(DEVICE, inter_bandwidth=DEVICE.intra_bandwidth)) == "alltoall"
    times = choices(A, LAYOUT.with_changes(ep=64), DEVICE)
    # Once a node never sends more between nodes than gathering everything does.
    assert times["alltoall_zero_redundancy"] < times["alltoall_deredundency"]
    limited = choices(
        replace(A, expert_groups=8, kept_groups=4), LAYOUT.with_changes(ep=64), DEVICE
    )
    key = "alltoall_zero_redundancy"
    assert limited[key] < times[key]


def test_simulate_prices_the_recipe_and_emit_writes_the_choice():
    key = "model.model_config.moe_token_dispatcher_type"
    straight = report.of_recipe(load(LARGE), "ascend-910b")
    by_node = report.of_recipe(load(LARGE, [f"{key}=alltoall_zero_redundancy"]), "ascend-910b")
    assert by_node.step_s < straight.step_s
    assert report.report(by_node)["exchange"]["chosen"] == "alltoall_zero_redundancy"
    assert any("alltoall_zero_redundancy" in note for note in report.notes(straight))
    layout = Layout.from_recipe(load(LARGE)).with_changes(exchange="alltoall_zero_redundancy")
    text = write_recipe(LARGE, [], layout, "test", NODE)
    config = loads(text).model_config
    assert config.moe_token_dispatcher_type == "alltoall_zero_redundancy"
    assert config.npu_nums_per_device == NODE
    assert Layout.from_recipe(loads(text)).exchange == "alltoall_zero_redundancy"
