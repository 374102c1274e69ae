"""Routing corner cases of one MoE layer, and the bias update, against `float64.py`."""

import inspect
import math

import pytest

pytest.importorskip("mindspore", reason="needs mindspore (pip install '.[train]')")

import float64
import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from tiny_models import random_batch, random_weights, tiny_config

from telechat_moe.errors import BadInputError
from telechat_moe.model import CausalLM, Logits
from telechat_moe.model.balance import BiasUpdate
from telechat_moe.model.block import MoE
from telechat_moe.model.dispatch import set_rows
from telechat_moe.ops.select import using

pytestmark = pytest.mark.mindspore

B, S = 2, 24


class Layer:
    """A compiled MoE layer whose selection bias changes from call to call."""

    def __init__(self, block_rows=None, **changes):
        self.config = tiny_config(**changes)
        self.cell = MoE(self.config).set_train()
        set_rows(self.cell, block_rows, None)
        self.weights = {f"moe.{n}": w for n, w in random_weights(self.cell, seed=1).items()}
        self.x = np.random.default_rng(2).standard_normal((B, S, 48)).astype(np.float32)

    def run(self, bias):
        """Return output and load of ours, and output and counts of the formulas."""
        bias = np.asarray(bias, np.float32)
        router = self.cell.router
        router.expert_bias.set_data(Tensor(bias))
        router.expert_load.set_data(Tensor(np.zeros_like(bias)))
        y, _ = self.cell(Tensor(self.x.reshape(B * S, -1)), B)
        counts = float64.Counts()
        weights = {n: w.astype(np.float64) for n, w in self.weights.items()}
        weights["moe.router.expert_bias"] = bias.astype(np.float64)
        expected, _ = float64.moe(self.config, weights, "moe", self.x.astype(np.float64), counts)
        load = router.expert_load.asnumpy().copy()
        return y.asnumpy(), load, expected.reshape(B * S, -1), counts.load["moe"]

    def check(self, bias):
        """Compare output and load; return the load."""
        y, load, expected, expected_load = self.run(bias)
        np.testing.assert_array_equal(load, expected_load)
        np.testing.assert_allclose(y, expected, atol=2e-5 * np.abs(expected).max())
        return load


@pytest.mark.parametrize("block_rows", [None, 5, 128])
def test_dropless_with_empty_and_with_full_experts(block_rows):
    layer = Layer(block_rows, num_experts_per_tok=2)
    pairs = 2 * B * S
    rng = np.random.default_rng(3)
    for _ in range(5):
        layer.check(0.3 * rng.standard_normal(8))
    two = layer.check([9, 0, 0, 9, 0, 0, 0, 0])
    assert two.tolist() == [pairs / 2, 0, 0, pairs / 2, 0, 0, 0, 0]
    one_full = layer.check([0, 0, 0, 0, 0, 0, 0, 9])
    assert one_full[7] == pairs / 2
    one_empty = layer.check([0, -9, 0, 0, 0, 0, 0, 0])
    assert one_empty[1] == 0


def test_dropless_with_all_tokens_on_one_expert():
    layer = Layer(num_experts_per_tok=1)
    for expert in (0, 3, 7):
        assert layer.check(9.0 * np.eye(8)[expert])[expert] == B * S


@pytest.mark.parametrize(
    ("groups", "kept", "k"), [(4, 2, 4), (4, 1, 2), (2, 1, 3), (8, 3, 3), (4, 3, 2)]
)
def test_experts_of_dropped_groups_never_win(groups, kept, k):
    """Also where all biased scores are negative, where a mask of 0 instead of -inf would win."""
    layer = Layer(
        n_group=groups, topk_group=kept, num_experts_per_tok=k, n_shared_experts=0,
        moe_intermediate_size=4,
    )  # fmt: skip
    rng = np.random.default_rng(4)
    for mean in (0.0, -0.6, -3.0):
        for _ in range(4):
            layer.check(mean + 0.3 * rng.standard_normal(8))


def test_bias_is_for_selection_only():
    """A bias that chooses the same experts changes nothing."""
    layer = Layer(num_experts_per_tok=8)
    y, _, _, _ = layer.run(np.zeros(8))
    moved, _, _, _ = layer.run(np.full(8, 5.0))
    np.testing.assert_allclose(moved, y, atol=1e-6)


def test_bias_update():
    """Sign rule: up by the rate below the mean load, down above it, unchanged at it."""
    update = BiasUpdate(0.001)
    for load in ([3, 1, 2, 2], [0, 0, 0, 8], [5, 5, 5, 5], [1, 2, 3, 10]):
        mean = sum(load) / 4
        expected = [0.001 if n < mean else -0.001 if n > mean else 0.0 for n in load]
        found = update(Tensor(np.array(load, np.float32))).asnumpy()
        np.testing.assert_array_equal(found, np.array(expected, np.float32))


def bfloat16(x):
    """Round to bfloat16, to nearest even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + ((bits >> 16) & 1) + 0x7FFF) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def test_loads_of_many_ranks_are_exact_where_bfloat16_turns_the_bias_around():
    """64 ranks with 608 to 676 tokens, 40,840 in all, against a mean of 40,960: the bias must go up.

    In bfloat16 one order of the sum gives 41,216 and another 40,704 (Megatron-LM pull request 7081).
    """
    rng = np.random.default_rng(17)
    while True:
        ranks = rng.integers(608, 677, 64)
        spare = np.flatnonzero((ranks > 608) & (ranks < 676))
        some = rng.choice(spare, abs(40840 - ranks.sum()) % len(spare), replace=False)
        ranks[some] += np.sign(40840 - ranks.sum())
        one_by_one, pairs = np.float32(0), bfloat16(ranks)
        for tokens in pairs:
            one_by_one = bfloat16(one_by_one + tokens)
        while len(pairs) > 1:
            pairs = bfloat16(pairs[0::2] + pairs[1::2])
        if (ranks.sum(), one_by_one, pairs[0]) == (40840, 41216, 40704):
            break
    config = tiny_config(
        params_dtype="bfloat16", compute_dtype="bfloat16", fp32_residual_connection=False
    )
    router = CausalLM(config).layers[1].moe.router
    assert router.expert_load.dtype == router.expert_bias.dtype == ms.float32
    for tokens in ranks:
        router.accumulate_load(router.expert_load, Tensor(np.float32([tokens] + [0] * 7)))
    load = router.expert_load.asnumpy()
    assert load[0] == 40840
    rest = np.full(7, (8 * 40960 - 40840) / 7, np.float32)
    update = BiasUpdate(0.001)
    for first, sign in ((load[0], 1), (41216, -1), (40704, 1)):
        moved = update(Tensor(np.append(np.float32(first), rest))).asnumpy()
        assert moved[0] == np.float32(0.001) * sign
    assert bfloat16(0.001) == np.float32(0.00099945068359375)


def test_loads_are_counted_in_training_only():
    layer = Layer()
    layer.cell.set_train(False)
    _, load, _, _ = layer.run(np.zeros(8))
    assert not load.any()
    layer.cell.set_train(True)
    _, load, _, _ = layer.run(np.zeros(8))
    assert load.sum() == 2 * B * S


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("factor", [0.3, 1.0, 8.0])
def test_drop_and_pad(policy, factor):
    """Loads from even to all on one expert; with room for all, nothing is dropped."""
    layer = Layer(moe_token_drop_policy=policy, moe_expert_capacity_factor=factor)
    for scale in (0.0, 0.3, 9.0):
        dropped = layer.cell.dispatch.dropped
        dropped.set_data(Tensor(np.zeros(1, np.float32)))
        load = layer.check(scale * np.arange(8) / 8)
        capacity = math.ceil(factor * 2 * B * S / 8)
        assert dropped.asnumpy()[0] == np.maximum(load - capacity, 0).sum()
        assert (dropped.asnumpy()[0] == 0) == (factor == 8.0 or load.max() <= capacity)


@pytest.mark.parametrize("fp32_residual", [True, False])
def test_residual_stream_dtype(fp32_residual):
    """The stream between blocks is float32, or what the layers compute in."""
    config = tiny_config(compute_dtype="float16", fp32_residual_connection=fp32_residual)
    model = CausalLM(config)
    weights = random_weights(model, seed=5)
    batch = random_batch(config, seed=6)
    ids, position = Tensor(batch.input_ids), Tensor(batch.position_ids)
    x = model.embedding(ids)
    assert x.dtype == (ms.float32 if fp32_residual else ms.float16)
    cos, sin = model.rope(position)
    y, _ = model.layers[0](x, model.zero, cos, sin, model.mask(2, 16, None))
    assert y.dtype == x.dtype
    expected = float64.forward(config, weights, batch).logits
    error = Logits(model)(ids, position).asnumpy() - expected
    assert 1e-5 < np.abs(error).max() / np.abs(expected).max() < 1e-2


# Loads from one expert with all tokens to none with any, Zipf between; added to the scores.
BIASES = {
    "even": np.zeros(8),
    "zipf": -np.log(np.arange(1, 9)),
    "empty": np.array([0, -9, 0, -9, -9, 0, -9, 0]),
    "two": np.array([9, 0, 0, 9, 0, 0, 0, 0]),
}
CAPACITY = {"moe_token_drop_policy": "probs", "moe_expert_capacity_factor": 1.0}


def test_plain_face_is_right_too():
    with using("plain"):
        layers = [Layer(), Layer(5), Layer(n_group=4, topk_group=2), Layer(**CAPACITY)]
    for layer in layers:
        for bias in BIASES.values():
            layer.check(bias)


class Trained(nn.Cell):
    """An MoE layer that learns a fixed map by plain gradient descent."""

    def __init__(self, backend, bias, **changes):
        super().__init__(auto_prefix=False)
        with using(backend):
            self.moe = MoE(tiny_config(**changes)).set_train()
        random_weights(self.moe, seed=1)
        self.moe.router.expert_bias.set_data(Tensor(np.asarray(bias, np.float32)))
        self.weights = self.moe.trainable_params()
        self.assign = ops.AssignSub()

        def loss(x, target):
            y, aux = self.moe(x, B)
            return ((y - target) ** 2).mean() + aux.sum()

        self.grad = ms.value_and_grad(loss, 0, self.weights)

    def construct(self, x, target):
        loss, (dx, gradients) = self.grad(x, target)
        for i in range(len(self.weights)):
            loss = ops.depend(loss, self.assign(self.weights[i], 0.5 * gradients[i]))
        return loss, dx


@pytest.mark.parametrize("changes", [{}, CAPACITY], ids=["dropless", "capacity"])
@pytest.mark.parametrize("load", BIASES)
def test_both_faces_train_alike_whatever_the_load(load, changes):
    """Ten steps: losses and gradients agree, the loss falls, experts without tokens stay as they were."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((B * S, 48)).astype(np.float32)
    target = 0.1 * rng.standard_normal((B * S, 48)).astype(np.float32)
    losses, cells = {}, {}
    for backend in ("fused", "plain"):
        cell = cells[backend] = Trained(backend, BIASES[load], **changes)
        start = cell.moe.experts.down.asnumpy().copy()
        found = [cell(Tensor(x), Tensor(target)) for _ in range(10)]
        losses[backend] = np.array([[float(loss), float((dx**2).sum())] for loss, dx in found])
        moved = np.abs(cell.moe.experts.down.asnumpy() - start).max((1, 2)) > 0
        np.testing.assert_array_equal(moved, cell.moe.router.expert_load.asnumpy() > 0)
    np.testing.assert_allclose(losses["fused"], losses["plain"], rtol=2e-5)
    assert losses["fused"][-1, 0] < losses["fused"][0, 0]
    fused, plain = (cell.moe.router.expert_load.asnumpy() for cell in cells.values())
    np.testing.assert_array_equal(fused, plain)


def _arguments(primitive):
    return list(inspect.signature(primitive.__call__).parameters)


def test_ascend_primitives_are_built_where_no_pair_is_dropped():
    """Their argument order is MindSpore's; they do not run here."""
    with using(target="Ascend"):
        dropless, capacity = MoE(tiny_config()), MoE(tiny_config(**CAPACITY))
    experts, dispatch = dropless.experts, dropless.dispatch
    matmul = experts.products.gate_matmul.matmul
    assert (matmul.split_item, matmul.group_type) == (3, 0)
    assert _arguments(matmul)[:3] == ["x", "weight", "bias"]
    assert _arguments(matmul)[7:] == ["group_list"]
    permute, unpermute = dispatch.permute.permute, dispatch.unpermute.unpermute
    assert _arguments(permute) == ["tokens", "indices", "num_out_tokens", "padded_mode"]
    names = ["permuted_tokens", "sorted_indices", "probs", "padded_mode", "restore_shape"]
    assert _arguments(unpermute) == names
    assert not capacity.dispatch.fused
    assert not hasattr(capacity.experts.products.gate_matmul.matmul, "split_item")


def test_dispatch_and_experts_have_one_backend():
    with (
        using(operators={"permute": "plain"}),
        pytest.raises(BadInputError, match="one backend for both"),
    ):
        MoE(tiny_config())


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_fused_products_are_for_float32_and_bfloat16(dtype):
    assert MoE(tiny_config(compute_dtype=dtype)).experts.fused == (dtype == "float32")
