"""Choice of experts against its definition: both backends, groups, bias, ties, gradients."""

import pytest

pytest.importorskip("mindspore", reason="needs mindspore (pip install '.[train]')")

import mindspore as ms
import numpy as np
from gradients import close
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Tensor, nn

from telechat_moe.ops import native
from telechat_moe.ops.native import Kernel, NativeError
from telechat_moe.ops.routing import (
    FusedRouting,
    Routing,
    RoutingRule,
    balance_reference,
    routing,
    routing_reference,
)
from telechat_moe.ops.select import using

pytestmark = pytest.mark.mindspore

RULES = [
    RoutingRule(8, 2),
    RoutingRule(8, 2, normalize=False, scale=2.5),
    RoutingRule(16, 4, 4, 2),
    RoutingRule(64, 8, 8, 4, scale=2.5),
    RoutingRule(256, 8, 8, 4),
    RoutingRule(8, 3, 2, 1),
    RoutingRule(6, 3, 3, 3, softmax=True),
    RoutingRule(37, 5, softmax=True),
    RoutingRule(1, 1),
    RoutingRule(8, 8, normalize=False, softmax=True),
]


def attributes(rule):
    left = rule._asdict()
    left.pop("experts")
    return left


def choose(rule, logits, bias):
    """Return ``(score, index, weight, chosen, load)`` of the native operator."""
    tokens, experts = logits.shape
    score, chosen = np.empty_like(logits), np.empty_like(logits)
    index = np.empty((tokens, rule.top_k), np.int32)
    weight, load = np.empty(index.shape, np.float32), np.empty(experts, np.float32)
    out = [score, index, weight, chosen, load]
    Kernel("Routing", attributes(rule))([logits, bias], out)
    return out


def inputs(rule, tokens, seed, ties=False):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((tokens, rule.experts))
    if ties:
        logits = np.round(logits)
    bias = rng.choice([0.0, 0.5, -2.0]) * rng.standard_normal(rule.experts)
    return logits.astype(np.float32), np.where(ties, 0, bias).astype(np.float32)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(RULES), st.integers(0, 150), st.integers(0, 9999), st.booleans())
def test_native_operator_is_its_definition(rule, tokens, seed, ties):
    logits, bias = inputs(rule, tokens, seed, ties)
    score, index, weight, chosen, load = choose(rule, logits, bias)
    if not tokens:
        assert not load.any()
        return
    exact_score, exact_index, exact_weight = routing_reference(rule, logits, bias)
    close(score, exact_score, 1e-6)
    rounded = score.astype(np.float64)  # what is compared is fp32: two sums may be equal there
    choice = (rounded + bias.astype(np.float64)).astype(np.float32)
    same = (index == exact_index).all(1)
    if rule.groups == 1:
        picked = np.take_along_axis(choice, index, 1)
        np.testing.assert_array_equal(picked, -np.sort(-choice, 1)[:, : rule.top_k])
        stable = np.argsort(-choice, 1, kind="stable")[:, : rule.top_k]
        np.testing.assert_array_equal(index, stable)
    assert same.mean() > 0.97
    close(weight[same], exact_weight[same], 2e-6)
    expected = np.zeros(logits.shape)
    np.put_along_axis(expected, index.astype(np.int64), 1, 1)
    np.testing.assert_array_equal(chosen, expected)
    np.testing.assert_array_equal(load, expected.sum(0))


class Both(nn.Cell):
    """Scores and weights against cotangents, by the logits."""

    def __init__(self, cell):
        super().__init__(auto_prefix=False)
        self.cell = cell

        def product(logits, bias, dscore, dweight):
            score, index, weight, chosen, load = cell(logits, bias)
            return (score * dscore).sum() + (weight * dweight).sum(), index, weight, chosen, load

        self.grad = ms.value_and_grad(product, 0, None, has_aux=True)

    def construct(self, *args):
        (_, *out), grad = self.grad(*args)
        return out, grad


@pytest.mark.parametrize("rule", [r for r in RULES if not r.softmax and r.experts > 1])
def test_faces_agree_in_a_graph(rule):
    logits, bias = inputs(rule, 97, 3)
    rng = np.random.default_rng(4)
    dscore = rng.standard_normal(logits.shape).astype(np.float32)
    dweight = rng.standard_normal((97, rule.top_k)).astype(np.float32)
    args = [Tensor(a) for a in (logits, bias, dscore, dweight)]
    (fused, dfused), (plain, dplain) = (Both(cell(rule))(*args) for cell in (FusedRouting, Routing))
    for i, (found, expected) in enumerate(zip(fused, plain, strict=True)):
        assert found.dtype == expected.dtype
        if i == 1:
            close(found.asnumpy(), expected.asnumpy(), 1e-6)
        else:
            np.testing.assert_array_equal(found.asnumpy(), expected.asnumpy())
    close(dfused.asnumpy(), dplain.asnumpy(), 5e-6)


@pytest.mark.parametrize("rule", RULES)
def test_gradient_against_finite_differences(rule):
    """Of the scores and weights in float64, the choice held fast."""
    logits, bias = inputs(rule, 5, 7)
    rng = np.random.default_rng(8)
    dscore = rng.standard_normal(logits.shape).astype(np.float32)
    dweight = rng.standard_normal((5, rule.top_k)).astype(np.float32)
    score, index, *_ = choose(rule, logits, bias)
    found = np.empty_like(logits)
    Kernel("RoutingGrad", attributes(rule))([score, index, dscore, dweight], [found])

    def value(x):
        exact, _, _ = routing_reference(rule, x, bias)
        weight = np.take_along_axis(exact, index.astype(np.int64), 1)
        if rule.normalize:
            weight = weight / weight.sum(1, keepdims=True)
        return (exact * dscore).sum(1) + (weight * rule.scale * dweight).sum(1)

    expected = np.empty(logits.shape)
    for e in range(rule.experts):
        step = 1e-6 * (np.arange(rule.experts) == e)
        expected[:, e] = (value(logits + step) - value(logits - step)) / 2e-6
    close(found, expected, 2e-5)


@pytest.mark.torch
def test_it_is_deepseek_v3s_router():
    """As HF computes it, where no biased score of a kept group is negative."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.models.deepseek_v3 import configuration_deepseek_v3, modeling_deepseek_v3

    rule = RoutingRule(16, 4, 4, 2, scale=2.5)
    config = configuration_deepseek_v3.DeepseekV3Config(
        hidden_size=16, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2,
        routed_scaling_factor=2.5, norm_topk_prob=True,
    )  # fmt: skip
    router = modeling_deepseek_v3.DeepseekV3TopkRouter(config)
    logits, _ = inputs(rule, 200, 1)
    bias = np.random.default_rng(2).random(16).astype(np.float32)
    router.weight.data = torch.eye(16)
    router.e_score_correction_bias.copy_(torch.tensor(bias))
    index, weight = router(torch.tensor(logits))
    order = np.argsort(index.numpy(), 1)
    _, found, found_weight, _, _ = choose(rule, logits, bias)
    own = np.argsort(found, 1)
    np.testing.assert_array_equal(
        np.take_along_axis(found, own, 1), np.take_along_axis(index.numpy(), order, 1)
    )
    expected = np.take_along_axis(weight.detach().numpy(), order, 1)
    close(np.take_along_axis(found_weight, own, 1), expected, 1e-6)


def test_a_nan_chooses_experts_that_exist():
    logits, bias = inputs(RULES[2], 50, 0)
    logits[3], logits[7, 2] = np.nan, np.nan
    _, index, *_ = choose(RULES[2], logits, bias)
    assert ((index >= 0) & (index < 16)).all()
    assert all(len(set(row)) == 4 for row in index.tolist())


def test_the_number_of_threads_changes_no_bit():
    rule = RULES[3]
    logits, bias = inputs(rule, 500, 0)
    before = native.threads()
    try:
        results = []
        for threads in (1, 2, 5):
            native.set_threads(threads)
            results.append(choose(rule, logits, bias))
    finally:
        native.set_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert (a.view(np.uint32) == b.view(np.uint32)).all()


def balance(score, chosen, scale):
    """Return the loss and the gradient of the scores by the native operators."""
    loss, fraction = np.empty(1, np.float32), np.empty((len(score), score.shape[2]), np.float32)
    slope, one = np.empty_like(score), np.ones(1, np.float32)
    Kernel("BalanceLoss", {"scale": scale})([score, chosen], [loss, fraction])
    Kernel("BalanceLossGrad", {"scale": scale})([score, fraction, one], [slope])
    return loss[0], slope


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 700, 5), (2, 256, 64)])
def test_balance_loss_is_its_definition_with_any_threads(shape):
    """The gradient along a random direction is the difference quotient of the definition."""
    rng = np.random.default_rng(0)
    score = rng.uniform(0.05, 1, shape).astype(np.float32)
    chosen = (rng.random(shape) < 0.3).astype(np.float32)
    before, found = native.threads(), []
    try:
        for threads in (1, 3):
            native.set_threads(threads)
            found.append(balance(score, chosen, 0.7))
    finally:
        native.set_threads(before)
    loss, slope = found[0]
    assert loss == found[1][0]
    np.testing.assert_array_equal(slope, found[1][1])
    np.testing.assert_allclose(loss, balance_reference(score, chosen, 0.7), rtol=1e-6)
    way, h = rng.standard_normal(shape), 1e-6
    ahead, back = (balance_reference(score + x * way, chosen, 0.7) for x in (h, -h))
    bound = 1e-6 * np.abs(slope * way).sum() + 1e-9
    assert abs((ahead - back) / (2 * h) - (slope * way).sum(dtype=np.float64)) < bound


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        (RoutingRule(8, 9), "9 experts for each token of 8"),
        (RoutingRule(8, 2, 3, 1), "8 experts do not fall into 3 equal groups"),
        (RoutingRule(8, 2, 2, 3), "3 of 2 groups of experts kept"),
        (RoutingRule(8, 0), "0 experts for each token, expected 1 to 64"),
    ],
)
def test_rules_that_cannot_be_are_refused(rule, sentence):
    logits, bias = inputs(rule, 4, 0)
    with pytest.raises(NativeError, match=sentence):
        choose(rule, logits, bias)


def test_an_expert_that_is_not_there_is_refused():
    rule = RULES[0]
    logits, bias = inputs(rule, 4, 0)
    score, index, weight, _, _ = choose(rule, logits, bias)
    index[2, 1] = 8
    with pytest.raises(NativeError, match="token 2 chose expert 8 of 8"):
        Kernel("RoutingGrad", attributes(rule))([score, index, score, weight], [score.copy()])


def test_the_face_is_chosen_while_building():
    assert isinstance(routing(RULES[0]), FusedRouting)
    with using("plain"):
        assert isinstance(routing(RULES[0]), Routing)
