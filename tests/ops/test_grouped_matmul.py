"""Grouped products: values, gradients, main gradient in place; any group sizes, both precisions."""

import pytest

pytest.importorskip("mindspore", reason="needs mindspore (pip install '.[train]')")

import mindspore as ms
import numpy as np
from gradients import Gradient, close, round_bf16
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mindspore import Parameter, Tensor, nn

from telechat_moe.ops import native
from telechat_moe.ops.custom import reason
from telechat_moe.ops.grouped_matmul import (
    FusedGroupedMatmul,
    GroupedMatmulIntoMainGrad,
    GroupedSwiGLU,
    GroupedSwiGLUIntoMainGrad,
    grouped_matmul_reference,
)
from telechat_moe.ops.native import Kernel, NativeError

pytestmark = pytest.mark.mindspore


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def experts_of(sizes):
    return np.repeat(np.arange(len(sizes)), sizes)


def weight_gradient(x, dy, sizes):
    """Return ``x_e^T dy_e`` of every group in float64."""
    parts = np.split(np.arange(len(x)), np.cumsum(sizes)[:-1])
    return np.stack([x[p].astype(np.float64).T @ dy[p].astype(np.float64) for p in parts])


def products(x, w, sizes, dy, bf16=False):
    """Return ``(y, dx, dw)`` of the native operators, dw also on its own."""
    bf16 = {"bf16": bf16}
    y, dx, dw = np.empty_like(dy), np.empty_like(x), np.empty_like(w)
    alone = np.empty_like(w)
    Kernel("GroupedMatmul", bf16)([x, w, sizes], [y])
    Kernel("GroupedMatmulGrad", bf16)([x, w, sizes, dy], [dx, dw])
    Kernel("GroupedMatmulDw", bf16)([x, sizes, dy], [alone])
    return y, dx, dw, alone


def references(x, w, sizes, dy):
    expert = experts_of(sizes)
    dx = grouped_matmul_reference(dy, w.transpose(0, 2, 1), expert)
    dw = weight_gradient(x, dy, sizes)
    return grouped_matmul_reference(x, w, expert), dx, dw, dw


def silu_gradient(gate, up, dy):
    s = 1 / (1 + np.exp(-gate))
    return dy * up * s * (1 + gate * (1 - s)), dy * gate * s


def swiglu_references(x, gate_w, up_w, sizes, dy):
    """Return ``(y, dx, dgate_w, dup_w)`` in float64."""
    expert = experts_of(sizes)
    gate, up = (grouped_matmul_reference(x, w, expert) for w in (gate_w, up_w))
    dgate, dup = silu_gradient(gate, up, dy.astype(np.float64))
    dx = grouped_matmul_reference(dgate, gate_w.transpose(0, 2, 1), expert)
    dx += grouped_matmul_reference(dup, up_w.transpose(0, 2, 1), expert)
    y = gate / (1 + np.exp(-gate)) * up
    return y, dx, weight_gradient(x, dgate, sizes), weight_gradient(x, dup, sizes)


GROUPS = st.lists(st.sampled_from([0, 0, 1, 2, 7, 63, 130, 300, 700]), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(GROUPS, st.integers(1, 200), st.integers(1, 200), st.booleans(), st.integers(0, 99))
def test_any_group_sizes(sizes, i, o, bf16, seed):
    assume(i * o >= 16)  # a gradient of a few numbers may cancel, and has no scale then
    sizes = np.array(sizes, np.int32 if seed % 2 else np.int64)
    rows, experts = sizes.sum(), len(sizes)
    x, w, dy = normal(seed, rows, i), normal(seed + 1, experts, i, o), normal(seed + 2, rows, o)
    found = products(x, w, sizes, dy, bf16)
    operands = [round_bf16(a) for a in (x, w, dy)] if bf16 else [x, w, dy]
    expected = references(*operands[:2], sizes, operands[2])
    for got, exact in zip(found, expected, strict=True):
        if got.size:
            close(got, exact)


@pytest.mark.parametrize("shape", [(1024, 40), (40, 1024), (2100, 1024), (1, 1), (17, 2048)])
def test_wide_weights_are_cut_and_summed_right(shape):
    sizes = np.array([0, 600, 3], np.int32)
    x, w = normal(0, 603, shape[0]), normal(1, 3, *shape)
    dy = normal(2, 603, shape[1])
    for got, exact in zip(products(x, w, sizes, dy), references(x, w, sizes, dy), strict=True):
        close(got, exact)


def test_experts_of_few_rows():
    """Their weight gradients are cut into larger blocks, and added to main gradients as they are computed."""
    sizes = np.array([0, 1, 8, 33, 95, 7, 48], np.int32)
    x, w = normal(0, sizes.sum(), 1100), normal(1, 7, 1100, 300)
    dy, main = normal(2, sizes.sum(), 300), normal(3, 7, 1100, 300)
    expected = references(x, w, sizes, dy)
    for got, exact in zip(products(x, w, sizes, dy), expected, strict=True):
        close(got, exact)
    before = main.copy()
    Kernel("GMMAdd", {"bf16": False})([x, sizes, dy, main], [np.empty(1, np.float32)])
    close(main, before + expected[2])


def test_empty_experts_get_a_gradient_of_zero_and_leave_main_gradients_alone():
    sizes = np.array([0, 5, 0], np.int32)
    x, w, dy = normal(0, 5, 8), normal(1, 3, 8, 4), normal(2, 5, 4)
    dw = products(x, w, sizes, dy)[2]
    assert not dw[[0, 2]].any()
    main = normal(3, 3, 8, 4)
    before = main.copy()
    Kernel("GMMAdd", {"bf16": False})([x, sizes, dy, main], [np.empty(1, np.float32)])
    np.testing.assert_array_equal(main[[0, 2]], before[[0, 2]])
    close(main, before + weight_gradient(x, dy, sizes))


@settings(max_examples=30, deadline=None)
@given(GROUPS, st.integers(1, 100), st.integers(16, 100), st.integers(0, 99))
def test_swiglu_epilogue(sizes, i, o, seed):
    """A gradient of one number may cancel, and has no scale to compare with then."""
    sizes = np.array(sizes, np.int32)
    rows, experts = sizes.sum(), len(sizes)
    x, dy = normal(seed, rows, i), normal(seed + 3, rows, o)
    gate_w, up_w = (normal(seed + n, experts, i, o) / np.float32(i**0.5) for n in (1, 2))
    y, gate, up = (np.empty_like(dy) for _ in range(3))
    none = {"bf16": False}
    Kernel("GroupedSwiGLU", none)([x, gate_w, up_w, sizes], [y, gate, up])
    grads = np.empty_like(x), np.empty_like(gate_w), np.empty_like(up_w)
    Kernel("GroupedSwiGLUGrad", none)([x, gate_w, up_w, sizes, gate, up, dy], list(grads))
    expected = swiglu_references(x, gate_w, up_w, sizes, dy)
    for got, exact in zip((y, *grads), expected, strict=True):
        if got.size:
            close(got, exact)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    ("sizes", "i", "o"), [([700, 0, 3, 290], 130, 90), ([30, 0, 8, 70], 1100, 300)]
)
def test_the_number_of_threads_changes_no_bit(sizes, i, o, bf16):
    sizes = np.array(sizes, np.int32)
    rows = sizes.sum()
    x, w, dy = normal(0, rows, i), normal(1, 4, i, o), normal(2, rows, o)
    before = native.threads()
    results = []
    try:
        for threads in (1, 2, 5):
            native.set_threads(threads)
            found = list(products(x, w, sizes, dy, bf16))
            y, gate, up = (np.empty_like(dy) for _ in range(3))
            grads = [np.empty_like(x), np.empty_like(w), np.empty_like(w)]
            attributes = {"bf16": bf16}
            Kernel("GroupedSwiGLU", attributes)([x, w, -w, sizes], [y, gate, up])
            inputs = [x, w, -w, sizes, gate, up, dy]
            Kernel("GroupedSwiGLUGrad", attributes)(inputs, grads)
            results.append([*found, y, *grads])
    finally:
        native.set_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert (a.view(np.uint32) == b.view(np.uint32)).all()


@pytest.mark.parametrize("dtype", [ms.float32, ms.bfloat16])
def test_cells_and_their_gradients_in_a_graph(dtype):
    sizes = np.array([4, 0, 9], np.int32)
    x, w, dy = normal(0, 13, 24), normal(1, 3, 24, 16), normal(2, 13, 16)
    operands = [round_bf16(a) for a in (x, w, dy)] if dtype == ms.bfloat16 else [x, w, dy]
    y, grads = Gradient(FusedGroupedMatmul(dtype), (0, 1)).run(dy, x, w, sizes)
    expected = references(*operands[:2], sizes, operands[2])
    for got, exact in zip((y, *grads), expected[:3], strict=True):
        close(got, exact)

    up_w = normal(3, 3, 24, 16)
    y, grads = Gradient(GroupedSwiGLU(dtype), (0, 1, 2)).run(dy, x, w, up_w, sizes)
    tolerance = 1e-5 if dtype == ms.float32 else 3e-2
    for got, exact in zip((y, *grads), swiglu_references(x, w, up_w, sizes, dy), strict=True):
        close(got, exact, tolerance)


class TwoLayers(nn.Cell):
    """An expert MLP whose weight gradients go to main gradients."""

    def __init__(self, weights):
        super().__init__(auto_prefix=False)
        names = ("gate", "up", "down")
        made = [Parameter(Tensor(w), name=n) for n, w in zip(names, weights, strict=True)]
        self.gate, self.up, self.down = made
        mains = [
            Parameter(Tensor(np.zeros_like(w)), name=f"{n}_main", requires_grad=False)
            for n, w in zip(names, weights, strict=True)
        ]
        self.gate_main, self.up_main, self.down_main = mains
        self.gate_up, self.multiply = GroupedSwiGLUIntoMainGrad(), GroupedMatmulIntoMainGrad()

    def construct(self, x, sizes):
        y, _, _ = self.gate_up(x, self.gate, self.up, sizes, self.gate_main, self.up_main)
        return self.multiply(y, self.down, sizes, self.down_main)


def test_main_gradients_add_up_over_micro_batches():
    weights = [normal(0, 4, 24, 16), normal(1, 4, 24, 16), normal(2, 4, 16, 24)]
    cell = TwoLayers(weights)
    gradient = Gradient(cell)
    expected = [np.zeros(w.shape) for w in weights]
    for step, sizes in enumerate(([3, 0, 7, 2], [0, 0, 12, 0], [1, 9, 1, 1])):
        sizes = np.array(sizes, np.int32)
        x, dy = normal(10 + step, 12, 24), normal(20 + step, 12, 24)
        dh = grouped_matmul_reference(dy, weights[2].transpose(0, 2, 1), experts_of(sizes))
        h, dx, *dws = swiglu_references(x, *weights[:2], sizes, dh)
        y, (found,) = gradient.run(dy, x, sizes)
        close(y, grouped_matmul_reference(h, weights[2], experts_of(sizes)))
        close(found, dx)
        for total, more in zip(expected, (*dws, weight_gradient(h, dy, sizes)), strict=True):
            total += more
        for main, total in zip(
            (cell.gate_main, cell.up_main, cell.down_main), expected, strict=True
        ):
            close(main.asnumpy(), total)


def test_a_graph_takes_any_number_of_rows():
    cell = FusedGroupedMatmul()
    w = normal(1, 2, 6, 5)
    cell.set_inputs(
        Tensor(shape=[None, 6], dtype=ms.float32), Tensor(w), Tensor(shape=[2], dtype=ms.int32)
    )
    for sizes in ([1, 2], [0, 0], [0, 11], [40, 3]):
        x = normal(0, sum(sizes), 6)
        y = cell(Tensor(x), Tensor(w), Tensor(np.array(sizes, np.int32))).asnumpy()
        assert y.shape == (sum(sizes), 5)
        if len(x):
            close(y, grouped_matmul_reference(x, w, experts_of(sizes)))


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ([3, -1, 3], "the size of group 1 is -1"),
        ([3, 1, 0], "add up to 4, x has 5 rows"),
        ([3, 3, 0], "groups 0 to 1 have more rows than the 5 of x"),
        ([2**62, 2**62, 2**62], "groups 0 to 0 have more rows"),
        ([5, 0], "2 group sizes for 3 experts"),
        ([[5, 0, 0]], "ranks of x and sizes are 2 and 2"),
        ([5.0, 0.0, 0.0], "sizes is float64, expected int32"),
    ],
)
def test_bad_group_lists_are_refused(sizes, sentence):
    sizes = np.array(sizes)
    x, w, y = normal(0, 5, 4), normal(1, 3, 4, 6), np.empty((5, 6), np.float32)
    with pytest.raises(NativeError, match=sentence):
        Kernel("GroupedMatmul", {"bf16": False})([x, w, sizes], [y])


def test_a_wrong_main_gradient_is_refused():
    x, sizes, dy = normal(0, 5, 4), np.array([5, 0, 0], np.int32), normal(1, 5, 6)
    with pytest.raises(NativeError, match=r"does not have the shape \[3, 4, 6\]"):
        Kernel("GMMAdd", {"bf16": False})([x, sizes, dy, normal(2, 3, 6, 4)], [np.empty(1)])


def test_the_sentence_reaches_the_user_of_a_graph():
    cell, sizes = FusedGroupedMatmul(), Tensor(np.array([1, 2], np.int32))
    with pytest.raises(RuntimeError) as error:
        cell(Tensor(normal(0, 4, 3)), Tensor(normal(1, 2, 3, 3)), sizes).asnumpy()
    assert "the group sizes add up to 3, x has 4 rows" in str(reason(error.value))
