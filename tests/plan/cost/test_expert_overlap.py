"""Hidden all-to-all: Pangu's shapes, and schedules worked out by hand."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telechat_moe.errors import BadInputError
from telechat_moe.recipe import load
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.device import load_device
from telechat_moe.tools.plan.cost.expert_overlap import (
    LayerTimes,
    _backwards,
    _forwards,
    _steady,
    hidden,
    layer_times,
    union_us,
)
from telechat_moe.tools.plan.cost.layout import Layout


@pytest.fixture(scope="module")
def pangu():
    """Pangu Ultra MoE: hidden 7680, 256 experts, top 8, TP 8; EP 4 and TP-extend-EP make 32; sequences of 8192."""
    recipe = load("pangu_ultra_moe/pretrain_718b.yaml", [])
    architecture = replace(Architecture.from_recipe(recipe), seq=8192)
    assert (architecture.hidden, architecture.experts, architecture.top_k) == (7680, 256, 8)
    layout = Layout.from_recipe(recipe).with_changes(micro_batch=1)
    assert (layout.tp, layout.ep) == (8, 32)
    return architecture, layout, load_device("ascend-910b")


def test_pangu_hides_what_it_says(pangu):
    h = hidden(*pangu)
    assert h.steady.overlap >= 0.95
    assert h.warm_up.overlap >= 0.60
    assert h.cool_down.overlap >= 0.60
    assert h.ends >= 0.60
    assert h.shared_only.overlap < h.warm_up.overlap
    assert h.dw_only.overlap < h.cool_down.overlap


def test_pieces_add_up_to_the_layer(pangu):
    from telechat_moe.tools.plan.cost.columns import columns
    from telechat_moe.tools.plan.cost.roofline import layer, rates

    architecture, layout, device = pangu
    p = layer_times(architecture, layout, device)
    x = columns([(architecture, layout)])
    moe = layer(x, rates(x, device), True)
    assert p.attention + p.shared + p.experts + 2 * p.exchange == pytest.approx(
        float(moe.forward.device[0])
    )
    backward = (
        p.attention_dx + p.shared_dx + p.experts_dx + p.attention_dw + p.shared_dw + p.experts_dw
    )
    both = (
        moe.backward.device[0]
        + moe.recompute.device[0]
        - moe.recompute.expert[0]
        - moe.recompute.tensor[0]
    )
    assert backward + 2 * p.exchange == pytest.approx(float(both))


def test_slower_network_hides_less(pangu):
    architecture, layout, device = pangu
    hiding = [
        hidden(architecture, layout, replace(device, inter_bandwidth=device.inter_bandwidth * f))
        for f in (4, 1, 0.25)
    ]
    for slow, fast in itertools.pairwise(reversed(hiding)):
        assert slow.cool_down.overlap < fast.cool_down.overlap
        assert slow.steady.span_us >= fast.steady.span_us


EVEN = LayerTimes(3, 0, 3, 3, 3, 0, 3, 3, 0, 3)


def test_even_pieces_by_hand():
    """Every piece takes 3 s: two layers, each transfer beside exactly one piece."""
    assert _forwards(EVEN, 2, 1).overlap == 0
    # A B of two halves: attention A B, experts A B, twice; transfers one phase behind, the last two show half
    halves = _forwards(EVEN, 2, 2)
    assert halves.communication_us == pytest.approx(24e6)
    assert halves.span_us == pytest.approx(27e6)
    assert halves.exposed_us == pytest.approx(3e6)
    backward = _backwards(EVEN, 2, 1)
    assert backward.exposed_us == pytest.approx(3e6)  # only the first dispatch
    assert backward.span_us == pytest.approx((2 * 4 * 3 + 3) * 1e6)
    backs = _backwards(EVEN, 2, 2)
    assert backs.exposed_us == pytest.approx(3e6)
    assert backs.span_us == pytest.approx((2 * 2 * 4 * 3 + 3) * 1e6)
    steady = _steady(EVEN, 2, 3)
    assert steady.exposed_us == pytest.approx(0)
    assert steady.span_us == pytest.approx(6 * 6 * 3 * 1e6)


def test_nothing_starts_before_its_input():
    """Long products and no dW: every transfer stands between the two pieces that it joins."""
    p = LayerTimes(2, 0, 10, 1, 2, 0, 10, 0, 0, 0)
    assert _backwards(p, 2, 1).span_us == pytest.approx(2 * (1 + 10 + 1 + 2) * 1e6)
    # halves: only the first dispatch shows; the last combine runs under attention dX of the other half
    assert _backwards(p, 1, 2).span_us == pytest.approx((1 + 10 + 10 + 2 + 2) * 1e6)
    assert _forwards(p, 2, 1).span_us == pytest.approx(2 * (2 + 1 + 10 + 1) * 1e6)
    # main stream 24; the last combine of gradients ends 1 after experts dX, under the forward's experts
    assert _steady(p, 1, 1).span_us == pytest.approx(24 * 1e6)
    slow = replace(p, experts=0.0)  # then attention dX waits for it
    assert _steady(slow, 1, 1).span_us == pytest.approx((2 + 10 + 1 + 2) * 1e6)


seconds = st.floats(1e-4, 1.0)


@settings(max_examples=50, deadline=None)
@given(st.lists(seconds, min_size=10, max_size=10), st.integers(1, 4))
def test_never_faster_than_either_stream(values, layers):
    p = LayerTimes(*values)
    compute = layers * (
        p.attention + p.shared + p.experts
        + p.attention_dx + p.shared_dx + p.experts_dx + p.attention_dw + p.shared_dw + p.experts_dw
    )  # fmt: skip
    steady = _steady(p, layers, 1)
    assert steady.communication_us == pytest.approx(4 * layers * p.exchange * 1e6)
    assert steady.compute_us == pytest.approx(compute * 1e6)
    assert steady.span_us >= max(steady.communication_us, steady.compute_us) * (1 - 1e-9)
    apart = _forwards(p, layers, 1).span_us + _backwards(p, layers, 1).span_us
    assert steady.span_us <= apart * (1 + 1e-9) + p.exchange * 1e6
    for s in (steady, _forwards(p, layers, 2), _backwards(p, layers, 2)):
        assert s.span_us == pytest.approx(s.compute_us + s.exposed_us + s.idle_us)


def test_no_all_to_all_is_refused(pangu):
    architecture, layout, device = pangu
    with pytest.raises(BadInputError, match="ep of 2 or more"):
        hidden(architecture, layout.with_changes(ep=1), device)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12))
def test_union(intervals):
    covered = {t for start, length in intervals for t in range(start, start + length)}
    assert union_us([(s, s + n) for s, n in intervals]) == len(covered)
