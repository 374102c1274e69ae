"""Linear layers' product: value, gradients, main gradient in place; both precisions, any shape."""

import pytest

pytest.importorskip("mindspore", reason="needs mindspore (pip install '.[train]')")

import mindspore as ms
import numpy as np
from gradients import Gradient, close, round_bf16
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Parameter, Tensor, nn

from telechat_moe.errors import BadInputError
from telechat_moe.model.linear import Linear
from telechat_moe.ops import native
from telechat_moe.ops.custom import reason
from telechat_moe.ops.matmul import (
    MatmulIntoMainGrad,
    carried,
    matmul,
    matmul_reference,
)
from telechat_moe.ops.native import Kernel, NativeError
from telechat_moe.ops.select import using

pytestmark = pytest.mark.mindspore


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def products(x, w, dy, bf16=False):
    """Return ``(y, dx, dw)`` of the native operators."""
    y, dx, dw = np.empty((len(x), len(w)), np.float32), np.empty_like(x), np.empty_like(w)
    Kernel("Matmul", {"bf16": bf16})([x, w], [y])
    Kernel("MatmulGrad", {"bf16": bf16})([x, w, dy], [dx, dw])
    return y, dx, dw


def references(x, w, dy):
    y, dx = matmul_reference(x, w), matmul_reference(dy, w.T)
    return y, dx, matmul_reference(dy.T, x.T)


WIDTHS = st.one_of(st.integers(1, 300), st.sampled_from([1023, 1025, 2100]))  # a task has 1024


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 600), WIDTHS, WIDTHS, st.booleans(), st.integers(0, 99))
def test_products_of_any_shape(t, i, o, bf16, seed):
    x, w, dy = normal(seed, t, i), normal(seed + 1, o, i), normal(seed + 2, t, o)
    found = products(x, w, dy, bf16)
    operands = [round_bf16(a) for a in (x, w, dy)] if bf16 else (x, w, dy)
    for got, expected in zip(found, references(*operands), strict=True):
        if got.size:
            close(got, expected, 1e-5)


@pytest.mark.parametrize("width", [130, 530])
@pytest.mark.parametrize("bf16", [False, True])
def test_the_number_of_threads_changes_no_bit(bf16, width):
    x, w, dy = normal(0, 700, width), normal(1, 1100, width), normal(2, 700, 1100)
    before = native.threads()
    results = []
    try:
        for threads in (1, 2, 5):
            native.set_threads(threads)
            results.append(products(x, w, dy, bf16))
    finally:
        native.set_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert (a.view(np.uint32) == b.view(np.uint32)).all()


@pytest.mark.parametrize("backend", ["fused", "plain"])
def test_linear_and_its_gradients_in_a_graph(backend):
    with using(operators={"matmul": backend}):
        cell = Linear(24, 40, 0.02, ms.float32)
    x, w, dy = normal(0, 33, 24), normal(1, 40, 24), normal(2, 33, 40)
    cell.weight.set_data(Tensor(w))
    y, gradients = Gradient(cell, with_parameters=True).run(dy, x)
    for got, expected in zip((y, *gradients), references(x, w, dy), strict=True):
        close(got, expected)


def test_one_graph_serves_any_number_of_tokens():
    cell = Linear(24, 40, 0.02, ms.float32)
    w = normal(1, 40, 24)
    cell.weight.set_data(Tensor(w))
    gradient = Gradient(cell, with_parameters=True)
    tokens = [Tensor(shape=[None, width], dtype=ms.float32) for width in (40, 24)]
    gradient.set_inputs(*tokens)
    for count in (33, 1, 700):
        x, dy = normal(0, count, 24), normal(2, count, 40)
        y, gradients = gradient.run(dy, x)
        for got, expected in zip((y, *gradients), references(x, w, dy), strict=True):
            close(got, expected)


def test_bfloat16_is_a_matter_of_operands_only():
    cell = Linear(24, 40, 0.02, ms.bfloat16)
    x, w, dy = normal(0, 33, 24), normal(1, 40, 24), normal(2, 33, 40)
    cell.weight.set_data(Tensor(w))
    y, gradients = Gradient(cell, with_parameters=True).run(dy, x)
    assert y.dtype == np.float32
    rounded = references(*[round_bf16(a) for a in (x, w, dy)])
    for got, expected, exact in zip((y, *gradients), rounded, references(x, w, dy), strict=True):
        close(got, expected)
        with pytest.raises(AssertionError):
            close(got, exact, 1e-4)


def test_bfloat16_without_the_fused_face_is_refused_in_words():
    with using("plain"), pytest.raises(BadInputError, match=r"bfloat16 on CPU needs the fused"):
        Linear(8, 8, 0.02, ms.bfloat16)
    assert carried(ms.bfloat16) == ms.float32
    with using("plain", target="Ascend"):
        assert carried(ms.float32) == ms.float32


class TwoLayers(nn.Cell):
    """Two products whose weight gradients go to main gradients."""

    def __init__(self, weights):
        super().__init__(auto_prefix=False)
        self.weights = [Parameter(Tensor(w), name=f"w{i}") for i, w in enumerate(weights)]
        self.first, self.second = self.weights
        zeros = [
            Parameter(Tensor(np.zeros_like(w)), name=f"g{i}", requires_grad=False)
            for i, w in enumerate(weights)
        ]
        self.first_grad, self.second_grad = zeros
        self.multiply, self.multiply_too = MatmulIntoMainGrad(), MatmulIntoMainGrad()

    def construct(self, x):
        h = self.multiply(x, self.first, self.first_grad)
        return self.multiply_too(h, self.second, self.second_grad)


def test_the_main_gradient_adds_up_over_micro_batches():
    weights = [normal(0, 40, 24), normal(1, 16, 40)]
    cell = TwoLayers(weights)
    gradient = Gradient(cell)
    expected = [np.zeros(w.shape) for w in weights]
    for step in range(3):
        x, dy = normal(10 + step, 33, 24), normal(20 + step, 33, 16)
        h = matmul_reference(x, weights[0])
        dh = dy @ weights[1].astype(np.float64)
        y, (dx,) = gradient.run(dy, x)
        expected[0] += dh.T @ x
        expected[1] += dy.T.astype(np.float64) @ h
        close(y, matmul_reference(h, weights[1]))
        close(dx, dh @ weights[0])
        close(cell.first_grad.asnumpy(), expected[0])
        close(cell.second_grad.asnumpy(), expected[1])


def test_matmul_is_the_primitive_itself_where_it_serves():
    with using(target="Ascend"):
        primitive = matmul(ms.bfloat16)
    assert primitive.name == "MatMul"
    assert primitive.transpose_b is True
    assert primitive.transpose_a is False


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        ([(3, 4), (5, 6)], r"x is \[3, 4\], w \[5, 6\]: the last dimensions differ"),
        ([(3, 4, 4), (5, 4)], r"x and w have ranks 3 and 2, expected 2 and 2"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, sentence):
    x, w = (normal(i, *shape) for i, shape in enumerate(shapes))
    with pytest.raises(NativeError, match=sentence):
        Kernel("Matmul", {"bf16": False})([x, w], [np.empty((3, 5), np.float32)])


def test_the_sentence_reaches_the_user_of_a_graph():
    with pytest.raises(RuntimeError) as error:
        matmul()(Tensor(normal(0, 3, 4)), Tensor(normal(1, 5, 6))).asnumpy()
    assert "the last dimensions differ" in str(reason(error.value))


@pytest.mark.torch
def test_rounding_to_bfloat16_is_torchs():
    torch = pytest.importorskip("torch")
    x = np.concatenate([normal(0, 1000), 1e30 * normal(1, 100), 1e-39 * normal(2, 100)])
    x = np.concatenate([x, np.float32([1.00390625, 1.01171875, np.inf, -np.inf, 3.4e38, 0, -0.0])])
    assert (round_bf16(x) == torch.tensor(x).bfloat16().float().numpy()).all()
    eye = np.eye(7, dtype=np.float32)
    finite = x[np.isfinite(torch.tensor(x).bfloat16().float().numpy())][:1204]
    rows = np.ascontiguousarray(finite.reshape(-1, 7))
    rows = np.where(np.abs(rows) < 1e-30, 0, rows)  # AMX takes denormals for zero
    y = products(rows, eye, rows, True)[0]
    assert (y == round_bf16(rows)).all()
