"""Alignment judges our fused operators by formulas; they compute what the reference of each operator defines."""

import numpy as np
import pytest

from telechat_moe.ops.attention import attention_reference
from telechat_moe.ops.cross_entropy import cross_entropy_reference
from telechat_moe.ops.grouped_matmul import grouped_matmul_reference
from telechat_moe.ops.matmul import matmul_reference
from telechat_moe.ops.permute import permute_reference, unpermute_reference
from telechat_moe.ops.rope import rope_reference
from telechat_moe.ops.routing import RoutingRule, balance_reference, routing_reference
from telechat_moe.ops.swiglu import swiglu_reference
from telechat_moe.tools.align.operators import find
from telechat_moe.tools.align.operators.approx import Approx

pytestmark = pytest.mark.mindspore

RANDOM = np.random.default_rng(5)
TOKENS, WIDTH, EXPERTS = 12, 8, 4


def normal(*shape):
    """Return values that float32 has, so that no input is rounded."""
    return RANDOM.standard_normal(shape).astype(np.float32).astype(np.float64)


def formula(name, *given, **named):
    """Return the results of a formula as float64 or integer arrays."""
    found = find(f"Primitive.x.{name}")
    assert found is not None, name
    given = [Approx(x) if x.dtype.kind == "f" else x for x in given]
    results = found.compute(found.bind(given, named))
    return [r.value if isinstance(r, Approx) else np.asarray(r) for r in results]


def same(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)


def test_matmul():
    x, w = normal(TOKENS, WIDTH), normal(5, WIDTH)
    same(formula("TelechatMatmul", x, w)[0], matmul_reference(x, w))


def test_grouped_matmul():
    x, w, up = normal(TOKENS, WIDTH), normal(EXPERTS, WIDTH, 5), normal(EXPERTS, WIDTH, 5)
    sizes = np.array([5, 0, 4, 3])
    expert = np.repeat(np.arange(EXPERTS), sizes)
    gate, wide = (grouped_matmul_reference(x, each, expert) for each in (w, up))
    same(formula("TelechatGroupedMatmul", x, w, sizes)[0], gate)
    got = formula("TelechatGroupedSwiGLU", x, w, up, sizes)
    for one, wanted in zip(got, (swiglu_reference(gate, wide), gate, wide), strict=True):
        same(one, wanted)


def test_attention():
    B, S, N = 2, 6, 3
    q, k, v = normal(B, S, N, 4), normal(B, S, N, 4), normal(B, S, N, 5)
    start = np.array([[0, 0, 2, 2, 2, 5], [0, 0, 0, 0, 4, 4]])
    key, query = np.arange(S), np.arange(S)[:, None]
    seen = (key <= query) & (key >= start[:, None, :, None])
    heads_first = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
    wanted = attention_reference(*heads_first, seen, 0.5).transpose(0, 2, 1, 3)
    same(formula("TelechatFlashAttention", q, k, v, start, scale=0.5)[0], wanted)
    late = formula("TelechatFlashAttention", q[:, 4:], k, v, start[:, 4:], scale=0.5, first=4)[0]
    same(late, wanted[:, 4:])


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope(interleaved):
    x, position = normal(2, 5, 3, 8), np.tile(np.arange(5), (2, 1))
    angle = position[..., None, None] * 10000.0 ** (-np.arange(0, 8, 2) / 8)
    got = formula("TelechatRope", x, np.cos(angle), np.sin(angle), interleaved=interleaved)[0]
    same(got, rope_reference(x, position, 10000.0, interleaved))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("softmax", [False, True])
def test_routing(groups, softmax):
    settings = {"top_k": 2, "groups": groups, "kept_groups": 1, "scale": 2.5, "normalize": True}
    rule = RoutingRule(experts=EXPERTS, softmax=softmax, **settings)
    logits, bias = normal(TOKENS, EXPERTS), normal(EXPERTS)
    got = formula("TelechatRouting", logits, bias, softmax=softmax, **settings)
    for one, wanted in zip(got, routing_reference(rule, logits, bias), strict=False):
        same(one, wanted)
    assert got[4].sum() == TOKENS * rule.top_k


def test_balance_loss():
    score, scale = RANDOM.uniform(0.1, 1, (2, TOKENS, EXPERTS)), 0.7
    chosen = RANDOM.integers(0, 2, score.shape).astype(np.float64)
    loss, fraction = formula("TelechatBalanceLoss", score, chosen, scale=scale)
    same(loss[0], balance_reference(score, chosen, scale))
    (grad,) = formula("TelechatBalanceLossGrad", score, fraction, np.array([3.0]), scale=scale)
    step = np.zeros_like(score)
    step[1, 2, 3] = 1e-6
    up, down = (balance_reference(score + s, chosen, scale) for s in (step, -step))
    np.testing.assert_allclose(grad[1, 2, 3], 3 * (up - down) / 2e-6, rtol=1e-6)


def test_permutation():
    x, index = normal(TOKENS, WIDTH), RANDOM.integers(0, EXPERTS, (TOKENS, 2))
    rows, pair, row = permute_reference(x, index)
    got_row, got_pair, sizes = formula("TelechatPermutePlan", index, experts=EXPERTS)
    assert np.array_equal(got_pair, pair)
    assert np.array_equal(got_row, row)
    assert np.array_equal(sizes, np.bincount(index.ravel(), minlength=EXPERTS))
    same(formula("TelechatPermute", x, pair, row)[0], rows)
    weight = normal(TOKENS, 2)
    same(formula("TelechatUnpermute", rows, row, weight)[0], unpermute_reference(rows, row, weight))


def test_cross_entropy():
    logits, label = normal(TOKENS, 20), RANDOM.integers(0, 20, TOKENS)
    mask = (np.arange(TOKENS) % 3 > 0).astype(np.float64)
    got = formula("TelechatCrossEntropy", logits, label, mask, z_loss=0.01)[0]
    same(got[0], cross_entropy_reference(logits, label, mask, 0.01))
