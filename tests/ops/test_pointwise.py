"""RMSNorm, rotary embedding, SwiGLU, cross-entropy, grouped matmul, attention: value and gradient."""

import pytest

pytest.importorskip("mindspore", reason="needs mindspore (pip install '.[train]')")

import mindspore as ms
import numpy as np
from gradients import Gradient, close, finite_differences
from mindspore import Tensor, nn

from telechat_moe.ops import select
from telechat_moe.ops.attention import AttentionMask, SoftmaxAttention, attention_reference
from telechat_moe.ops.cross_entropy import CrossEntropy, cross_entropy_reference
from telechat_moe.ops.grouped_matmul import GroupedMatmul, grouped_matmul_reference
from telechat_moe.ops.norm import RMSNorm, rms_norm_reference
from telechat_moe.ops.rope import Rope, rope_reference, rope_table
from telechat_moe.ops.swiglu import SwiGLU, swiglu_reference

pytestmark = pytest.mark.mindspore


@pytest.fixture(params=["plain", "fused"], autouse=True)
def backend(request):
    """Every test on both backends."""
    with select.using(request.param):
        yield request.param


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_rms_norm(scale):
    cell, eps = RMSNorm(7, 1e-5), 1e-5
    weight = 1 + 0.3 * normal(0, 7)
    cell.weight.set_data(Tensor(weight))
    x, cotangent = scale * normal(1, 5, 7), normal(2, 5, 7)
    y, (dx, dw) = Gradient(cell, with_parameters=True).run(cotangent, x)

    def reference(x, w):
        return rms_norm_reference(x, w, eps)

    close(y, reference(x, weight))
    close(dw, finite_differences(reference, cotangent, [x, weight], 1))
    unit = finite_differences(
        lambda u, w: reference(scale * u, w), cotangent, [x / scale, weight], 0
    )
    close(scale * dx, unit, 1e-4)


def rope_inputs(positions, width, theta):
    cos, sin = rope_table(width, 64, theta)
    return cos[positions][:, :, None], sin[positions][:, :, None]


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope(interleaved):
    position = np.array([[0, 1, 2, 0, 1], [7, 63, 5, 30, 31]])
    cos, sin = rope_inputs(position, 6, 500.0)
    x, cotangent = normal(0, 2, 5, 3, 6), normal(1, 2, 5, 3, 6)
    y, (dx,) = Gradient(Rope(6, interleaved)).run(cotangent, x, cos, sin)

    def reference(x):
        return rope_reference(x, position, 500.0, interleaved)

    close(y, reference(x))
    close(dx, finite_differences(reference, cotangent, [x], 0))
    close(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1))


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_products_depend_on_distance_only(interleaved):
    q, k = normal(0, 1, 1, 1, 8), normal(1, 1, 1, 1, 8)
    cell = Rope(8, interleaved)

    def product(i, j):
        turned = [
            cell(Tensor(x), *(Tensor(t) for t in rope_inputs(np.array([[p]]), 8, 100.0))).asnumpy()
            for x, p in ((q, i), (k, j))
        ]
        return (turned[0] * turned[1]).sum()

    assert product(20, 17) == pytest.approx(product(5, 2), rel=1e-4)
    assert product(20, 17) != pytest.approx(product(5, 3), rel=1e-2)


def test_swiglu():
    gate, up, cotangent = 4 * normal(0, 6, 5), normal(1, 6, 5), normal(2, 6, 5)
    gate[0] = [0, 60, -60, 90, -90]
    y, (dgate, dup) = Gradient(SwiGLU(), inputs=(0, 1)).run(cotangent, gate, up)
    close(y, swiglu_reference(gate, up))
    close(dgate, finite_differences(swiglu_reference, cotangent, [gate, up], 0))
    close(dup, finite_differences(swiglu_reference, cotangent, [gate, up], 1))


@pytest.mark.parametrize("shift", [0.0, 1000.0])
def test_cross_entropy(shift):
    logits, label = 3 * normal(0, 6, 9) + np.float32(shift), np.array([0, 8, 3, 3, 5, 1], np.int32)
    mask = np.array([1, 0, 1, 0.5, 1, 0], np.float32)
    y, (dx,) = Gradient(CrossEntropy()).run(np.ones(1, np.float32), logits, label, mask)
    close(y, np.array([cross_entropy_reference(logits, label, mask)]), 1e-6)
    args = [logits, label, mask]
    close(dx, finite_differences(cross_entropy_reference, 1.0, args, 0), 1e-4 if shift else 1e-5)
    assert not dx[[1, 5]].any()


def test_cross_entropy_of_nothing_is_zero():
    nothing = np.zeros(3, np.float32)
    y, (dx,) = Gradient(CrossEntropy()).run(
        np.ones(1, np.float32), normal(0, 3, 4), np.zeros(3, np.int32), nothing
    )
    assert y.tolist() == [0]
    assert not np.any(dx)


def test_grouped_matmul():
    x, weight, cotangent = normal(0, 4, 3, 5), normal(1, 3, 5, 2), normal(2, 4, 3, 2)
    expert = np.array([0, 0, 2, 2], np.int32)  # expert 1 has no block
    y, (dx, dw) = Gradient(GroupedMatmul(), inputs=(0, 1)).run(cotangent, x, weight, expert)

    def reference(x, weight):
        rows = grouped_matmul_reference(x.reshape(-1, 5), weight, np.repeat(expert, 3))
        return rows.reshape(4, 3, 2)

    close(y, reference(x, weight))
    close(dx, finite_differences(reference, cotangent, [x, weight], 0))
    close(dw, finite_differences(reference, cotangent, [x, weight], 1))
    assert not dw[1].any()


def test_grouped_matmul_of_one_block_an_expert():
    x, weight = normal(0, 3, 4, 5), normal(1, 3, 5, 2)
    y = GroupedMatmul()(Tensor(x), Tensor(weight)).asnumpy()
    close(y, np.einsum("eri,eio->ero", x, weight))


class MaskedAttention(nn.Cell):
    def __init__(self, scale):
        super().__init__()
        with select.using("plain"):
            self.mask, self.core = AttentionMask(3), SoftmaxAttention(scale)

    def construct(self, q, k, v, hidden=None):
        return self.core(q, k, v, self.mask(q.shape[0], q.shape[2], hidden))


@pytest.mark.parametrize("masking", ["causal", "documents"])
def test_attention(masking):
    B, N, S, scale = 2, 3, 6, 0.4
    q, k, v = normal(0, B, N, S, 5), normal(1, B, N, S, 5), normal(2, B, N, S, 4)
    cotangent = normal(3, B, N, S, 4)
    visible, args = np.broadcast_to(np.tril(np.ones((S, S), bool)), (B, N, S, S)), [q, k, v]
    if masking == "documents":
        own = np.array([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]])
        visible = visible & (own[:, :, None] == own[:, None, :])[:, None]
        args.append((~visible[:, :1]).astype(np.uint8))
    o, grads = Gradient(MaskedAttention(scale), inputs=(0, 1, 2)).run(cotangent, *args)

    def reference(q, k, v):
        return attention_reference(q, k, v, visible, scale)

    close(o, reference(q, k, v))
    for i, gradient in enumerate(grads):
        close(gradient, finite_differences(reference, cotangent, [q, k, v], i))


def test_attention_of_a_row_that_sees_nothing_is_finite():
    x = normal(0, 1, 3, 4, 2)
    hidden = np.ones((1, 1, 4, 4), np.uint8)
    o, grads = Gradient(MaskedAttention(1.0), inputs=(0, 1, 2)).run(x, x, x, x, hidden)
    assert np.isfinite(o).all()
    assert all(np.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("dtype", [ms.float16, ms.float32])
def test_results_have_the_dtype_of_the_input(dtype):
    x = Tensor(normal(0, 2, 3, 1, 4)).astype(dtype)
    table = [Tensor(t) for t in rope_inputs(np.zeros((2, 3), np.int64), 4, 10.0)]
    assert RMSNorm(4, 1e-6)(x).dtype == dtype
    assert Rope(4, True)(x, *table).dtype == dtype
    assert SwiGLU()(x, x).dtype == dtype
    logits = Tensor(normal(0, 2, 3)).astype(dtype)
    loss = CrossEntropy()(logits, Tensor([0, 1], ms.int32), Tensor([1, 1], ms.float32))
    assert loss.dtype == ms.float32
