"""The step model: closed forms where there are, and what more of something may do."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.plan_published.models import published
from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.collectives import all_to_all
from telechat_moe.tools.plan.cost.columns import columns
from telechat_moe.tools.plan.cost.device import LIMIT, Constants, load_device, names
from telechat_moe.tools.plan.cost.flops import model_flops
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.roofline import context_exchange, layer, rates
from telechat_moe.tools.plan.cost.step import evaluate, evaluate_columns, reduction

A100 = load_device("a100")
GPT = Architecture(
    name="gpt", hidden=4096, layers=("dense",) * 32, heads=32, seq=2048, vocab=51200, gated=False
)


def one(layout, device=A100, model=GPT, constants=None):
    return evaluate(model, [layout], replace(device, constants=constants or device.constants))


def test_an_ideal_device_takes_flops_over_peak():
    ideal = Constants(
        matmul_share=1, matmul_half=1e-9, attention_share=1, memory_share=1, layer_host_s=1e-12,
        collective_host_s=1e-12, step_host_s=0,
    )  # fmt: skip
    fast = replace(A100, memory_bandwidth=1e20)
    layout = Layout(micro_batch=2)
    x = columns([(GPT, layout)])
    forward = layer(x, rates(x, replace(fast, constants=ideal)), False).forward
    causal = GPT.seq / 2 * 2 * 2 * GPT.heads * GPT.head_dim
    layer_flops = 2 * (GPT.attention_weights + GPT.dense_weights) + causal
    assert forward.time[0] == pytest.approx(layer_flops * 2 * 2048 / 312e12, rel=1e-7)
    step = evaluate(GPT, [layout], replace(fast, constants=ideal)).step_s[0]
    lowest = model_flops(GPT).training * 2 * 2048 / 312e12
    assert lowest < step < 1.08 * lowest  # flash computes the scores once more


def test_pipeline_bubble_of_equal_stages_is_the_closed_form():
    flat = Constants(layer_host_s=1e-9, collective_host_s=1e-12, inter_latency_s=1e-12)
    wide = replace(A100, inter_bandwidth=1e20, intra_bandwidth=1e20, constants=flat)
    small = replace(GPT, vocab=1)
    for p, m, v in ((4, 8, 1), (8, 64, 1), (8, 64, 2), (4, 16, 4)):
        schedule = "interleaved" if v > 1 else "1f1b"
        table = evaluate(small, [Layout(pp=p, vpp=v, micro_batches=m, schedule=schedule)], wide)
        assert table.bubble[0] == pytest.approx((p - 1) / (v * m + p - 1), rel=3e-2)


def test_parts_add_up_to_the_slowest_stage():
    layout = Layout(pp=4, tp=2, micro_batches=8, recompute="full")
    table = one(layout)
    step_s = (table.stages.forward + table.stages.backward).max(axis=1) * 8
    inside = sum(float(v[0]) for k, v in table.parts.items() if k != "neighbours")
    assert inside == pytest.approx(step_s[0], rel=1e-9)


degrees = st.sampled_from([1, 2, 4, 8])


@settings(max_examples=20, deadline=None)
@given(
    tp=degrees, pp=degrees, dp=degrees, micro=degrees, count=degrees,
    recompute=st.sampled_from(["none", "selective", "full"]), zero=st.sampled_from([0, 1, 3]),
    moe=st.booleans(),
)  # fmt: skip
def test_more_of_something_never_hurts(tp, pp, dp, micro, count, recompute, zero, moe):
    model = published("deepseekv3" if moe else "llama3 8b")
    assert model is not None
    layout = Layout(
        tp=tp, pp=pp, dp=dp, micro_batch=micro, micro_batches=count, recompute=recompute, zero=zero,
        ep=min(tp * dp, 8) if moe else 1,
    )  # fmt: skip
    base = one(layout, model=model)
    assert base.step_s[0] > 0
    assert 0 <= base.bubble[0] < 1
    for field in ("memory_bandwidth", "intra_bandwidth", "inter_bandwidth"):
        better = replace(A100, **{field: getattr(A100, field) * 2})
        assert one(layout, better, model).step_s[0] <= base.step_s[0] * (1 + 1e-12)
    faster = replace(A100, peak_flops={k: 2 * v for k, v in A100.peak_flops.items()})
    assert one(layout, faster, model).step_s[0] < base.step_s[0]
    lean = one(layout.with_changes(recompute="full"), model=model)
    assert lean.memory.activations.sum() <= base.memory.activations.sum() * (1 + 1e-12)
    assert lean.step_s[0] >= one(layout.with_changes(recompute="none"), model=model).step_s[0] * (
        1 - 1e-12
    )


def test_many_configurations_at_once_equal_one_by_one():
    layouts = [
        Layout(tp=t, pp=p, dp=2, micro_batches=4, recompute=r, zero=1, cp=c)
        for t in (1, 4) for p in (1, 2, 4) for r in ("none", "full") for c in (1, 2)
    ]  # fmt: skip
    table = evaluate(GPT, layouts, A100)
    for i, layout in enumerate(layouts):
        alone = one(layout)
        assert table.step_s[i] == pytest.approx(alone.step_s[0], rel=1e-12)
        width = layout.pp
        np.testing.assert_allclose(
            table.memory.peak[i, :width], alone.memory.peak[0, :width], rtol=1e-12
        )
        assert not table.memory.peak[i, width:].any()


def test_steps_only_leaves_times_as_they_are():
    x = columns([(GPT, Layout(pp=2, micro_batches=4))])
    assert evaluate_columns(x, A100, steps_only=True).step_s == evaluate_columns(x, A100).step_s


def test_a_hierarchical_dispatch_sends_each_token_once_to_a_node():
    """Bytes between nodes, counted token by token over uniform destinations."""
    members, copies, tokens, bytes_each = 32, 8, 4000, 1e4
    random = np.random.default_rng(0)
    target = random.integers(0, members, (tokens, copies)) // A100.node_devices
    hit = sum(len(set(row) - {0}) for row in target)
    c = Constants(collective_host_s=0.0, inter_latency_s=0.0, inter_share=1.0)
    slow = replace(A100, intra_bandwidth=1e30, inter_bandwidth=1.0, constants=c)
    args = (np.array([tokens * copies * bytes_each]), np.array([members]), np.ones(1), slow)
    assert all_to_all(*args, float(copies))[0] == pytest.approx(hit * bytes_each, rel=0.02)
    direct = (target != 0).sum() * bytes_each
    assert all_to_all(*args)[0] == pytest.approx(direct, rel=0.02)


def test_an_early_stop_saves_the_last_product():
    """Of a feed-forward of two equal products, half is repeated."""
    full, early = (
        layer(x, rates(x, A100), False)
        for x in (columns([(GPT, Layout(recompute=r))]) for r in ("full", "full+early_stop"))
    )
    last = GPT.ffn * GPT.hidden / (GPT.attention_weights + GPT.dense_weights)
    assert early.recompute.matmul[0] / full.recompute.matmul[0] == pytest.approx(1 - last, rel=2e-3)
    assert early.backward.time == full.backward.time


def test_float8_products_need_casts_written_for_both_passes():
    """Counted by hand: attention's result and the activation forward, all four results' gradients backward, 4 bytes each."""
    h100 = load_device("h100")
    model = Architecture(
        hidden=512, layers=("dense",) * 2, heads=4, ffn=1024, seq=256, vocab=1000, gated=False
    )
    wide, narrow = (
        layer(x, rates(x, h100), False)
        for x in (columns([(model, Layout(compute=c))]) for c in ("bf16", "fp8"))
    )
    stream = h100.memory_bandwidth * h100.constants.memory_share
    gated = 2 if model.gated else 1
    ahead = 256 * (512 + 1024) * 4 / stream
    backward = 256 * (3 * 512 + 512 + gated * 1024 + 512) * 4 / stream
    assert narrow.forward.memory - wide.forward.memory == pytest.approx(ahead, rel=1e-6)
    assert narrow.backward.memory - wide.backward.memory == pytest.approx(backward, rel=1e-6)


def test_sharding_inside_a_node_reduces_the_shards_between_nodes():
    """Four nodes: 7/8 of the gradients inside, twice 3/4 of an eighth between."""
    c = replace(A100.constants, collective_host_s=0.0, inter_latency_s=0.0)
    x = columns([(GPT, Layout(dp=32, zero=3, opt_shards=8, gradient_bytes=2))])
    count, none = np.array([1e9]), np.zeros(1)
    once, _ = reduction(x, replace(A100, constants=c), count, none)
    inside = 2e9 * 7 / 8 / (A100.intra_bandwidth * c.intra_share)
    between = 2 * 2e9 / 8 * 3 / 4 / (A100.inter_bandwidth * c.inter_share)
    assert once[0] == pytest.approx(2 * inside + between, rel=1e-6)  # gradients, parameters


def test_counts_of_tokens_make_the_host_wait_in_small_moe_layers():
    model = published("qwen3 30b")
    assert model is not None
    layouts = [Layout(ep=8, dp=8).with_changes(graphs=g) for g in (False, True)]
    x = columns([(model, y) for y in layouts])
    eager, captured = layer(x, rates(x, A100), True).forward.time
    assert eager >= 5 * A100.constants.layer_host_s > 0
    assert captured < eager


def test_experts_launched_one_by_one_cost_launches_and_overlap_hides_the_wait_for_counts():
    model = published("qwen3 30b", seq=4096)
    assert model
    layouts = [
        Layout(dp=8, ep=ep).with_changes(single_experts=single)
        for single in (True, False)
        for ep in (8, 4)
    ]
    layouts.append(Layout(dp=8, ep=8).with_changes(ep_overlap=True))
    x = columns([(model, layout) for layout in layouts])
    passes, host = layer(x, rates(x, A100), True), A100.constants.layer_host_s
    # 128 experts over 8 or 4 devices, a tenth of a dense layer's launches for each
    assert passes.forward.host[:2] - passes.forward.host[2:4] == pytest.approx(
        [1.6 * host, 3.2 * host]
    )
    assert passes.backward.host[:2] - passes.backward.host[2:4] == pytest.approx(
        [3.2 * host, 6.4 * host]
    )
    assert passes.forward.wait[2] > 0
    assert passes.forward.wait[4] == passes.backward.wait[4] == 0
    assert passes.forward.host[4] == passes.forward.host[2]


def test_context_parallelism_without_overlap_moves_all_heads():
    model = published("llama3 8b")
    assert model is not None
    c = Constants(collective_host_s=0.0, inter_latency_s=0.0, intra_share=1.0)
    wide = replace(A100, peak_flops={"bf16": 1e30}, memory_bandwidth=1e30, constants=c)
    x = columns([(model, Layout(cp=8).with_changes(cp_overlap=False))])
    forward, backward = context_exchange(x, rates(x, wide))
    key_and_value = model.seq * model.heads * 2 * model.head_dim * 7 / 8
    assert forward[0] == pytest.approx(2 * key_and_value / 300e9, rel=1e-6)
    assert backward[0] == pytest.approx(6 * key_and_value / 300e9, rel=1e-6)


@pytest.mark.parametrize("name", names())
def test_every_description_loads_names_its_source_and_has_few_constants(name):
    device = load_device(name)
    assert len(device.fitted) <= LIMIT
    assert device.sources, "no source"
    assert device.memory_bytes > 1e9


def test_unknown_devices_and_keys_are_refused(tmp_path):
    with pytest.raises(BadInputError, match="no such description"):
        load_device("b9000")
    file = tmp_path / "x.yaml"
    file.write_text("name: x\nconstants: {matmul_speed: 3}\n")
    with pytest.raises(BadInputError, match=r"matmul_speed.*unknown"):
        load_device(file)


def test_float4_and_fused_experts_take_away_what_they_say():
    device = load_device("gb300")
    a = published("qwen3 30b", seq=4096)
    assert a is not None
    x = Layout(dp=8, ep=8, micro_batch=4, compute="fp8").with_changes(graphs=True)
    table = evaluate(
        a, [x, x.with_changes(compute="fp4"), x.with_changes(fused_experts=True)], device
    )
    eight, four, fused = ({k: float(v[i]) for k, v in table.parts.items()} for i in range(3))
    # layers' products are compute-bound here; the head stays in bfloat16
    gain = device.peak("fp4") / device.peak("fp8")
    assert eight["matmul"] / gain < four["matmul"] < eight["matmul"]
    assert fused["matmul"] == eight["matmul"]
    # forward: the activation's 2 x 3 bytes and a cast of 4 bytes an element of the inner width; the backward pass 1.5
    # times the former, and the casts of two gradients
    inner = x.micro_batch * a.seq * a.top_k * a.moe_ffn * len(a.layers)
    saved = (
        inner * (6 * 2.5 + 4 + 2 * 4) / (device.memory_bandwidth * device.constants.memory_share)
    )
    assert eight["memory"] - fused["memory"] == pytest.approx(saved)
