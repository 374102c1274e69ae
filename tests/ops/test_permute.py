"""Plans and permutations against brute force, over random and over extreme routings."""

from functools import cache

import pytest

pytest.importorskip("mindspore", reason="needs mindspore (pip install '.[train]')")
pytest.importorskip("hypothesis", reason="needs hypothesis (pip install '.[test]')")

import numpy as np
from gradients import Gradient, close
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Tensor

from telechat_moe.ops import native
from telechat_moe.ops.native import Kernel, NativeError
from telechat_moe.ops.permute import (
    BlockPlan,
    CapacityPlan,
    FusedPermute,
    FusedUnpermute,
    Permute,
    SortCapacityPlan,
    SortPlan,
    Unpermute,
    permute_reference,
    unpermute_reference,
)

pytestmark = pytest.mark.mindspore

# (tokens, experts per token, experts, rows of a block); a new shape costs a compilation.
SHAPES = [(6, 2, 3, 4), (5, 3, 8, 1), (1, 1, 1, 3), (16, 1, 4, 16), (7, 4, 5, 3)]
CAPACITIES = [1, 3]


@cache
def block_plan(experts):
    return BlockPlan(experts)


@cache
def capacity_plan(experts, policy):
    return CapacityPlan(experts, policy)


@st.composite
def routings(draw):
    """A shape and K different experts for each token, often all the same ones."""
    tokens, k, experts, rows = draw(st.sampled_from(SHAPES))
    favourites = draw(st.permutations(range(experts)))
    seed, spread = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from([0.0, 1.0, 100.0]))
    rng = np.random.default_rng(seed)
    score = spread * rng.standard_normal((tokens, experts)) + np.array(favourites)
    index = np.argsort(-score, 1)[:, :k].astype(np.int32)
    ties = draw(st.booleans())
    weight = rng.integers(1, 4, (tokens, k)) / 4 if ties else rng.random((tokens, k)) + 1e-3
    return index, weight.astype(np.float32), experts, rows


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(routings())
def test_block_plan(routing):
    index, _, experts, rows = routing
    plan = block_plan(experts)
    row, block_expert = (x.asnumpy() for x in plan(Tensor(index), rows))
    pairs = index.reshape(-1)
    assert len(block_expert) == plan.num_blocks(len(pairs), rows)
    assert len(set(row.tolist())) == len(pairs)
    assert row.min() >= 0
    assert row.max() < len(block_expert) * rows
    np.testing.assert_array_equal(block_expert[row // rows], pairs)
    expected, start = np.zeros_like(row), 0
    for expert in range(experts):
        own = np.flatnonzero(pairs == expert)
        expected[own] = start + np.arange(len(own))
        start += -(-len(own) // rows) * rows
    np.testing.assert_array_equal(row, expected)
    assert ((block_expert >= 0) & (block_expert < experts)).all()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["probs", "position"])
@settings(max_examples=100, deadline=None)
@given(routing=routings(), capacity=st.sampled_from(CAPACITIES))
def test_capacity_plan(policy, routing, capacity):
    index, weight, experts, _ = routing
    out = capacity_plan(experts, policy)(Tensor(index), Tensor(weight), capacity)
    row, kept = (x.asnumpy() for x in out)
    pairs, weights = index.reshape(-1), weight.reshape(-1)
    assert (row[~kept] == experts * capacity).all()
    assert len(set(row[kept].tolist())) == kept.sum()
    np.testing.assert_array_equal(row[kept] // capacity, pairs[kept])
    for expert in range(experts):
        own = np.flatnonzero(pairs == expert)
        stay = own[kept[own]]
        assert len(stay) == min(len(own), capacity)
        assert sorted(row[stay]) == list(range(expert * capacity, expert * capacity + len(stay)))
        if policy == "position":
            np.testing.assert_array_equal(stay, own[:capacity])
        else:
            best = np.sort(weights[own])[::-1][:capacity]
            np.testing.assert_array_equal(np.sort(weights[stay])[::-1], best)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(routings())
def test_there_and_back(routing):
    """Permute and unpermute give every token the sum of its weights times itself."""
    index, weight, experts, rows = routing
    tokens = len(index)
    row, block_expert = block_plan(experts)(Tensor(index), rows)
    x = np.random.default_rng(0).standard_normal((tokens, 3)).astype(np.float32)
    permuted = PERMUTE(Tensor(x), row, len(block_expert) * rows)
    held = permuted.asnumpy()
    token = np.repeat(np.arange(tokens), index.shape[1])
    np.testing.assert_array_equal(held[row.asnumpy()], x[token])
    free = np.setdiff1d(np.arange(len(held)), row.asnumpy())
    np.testing.assert_array_equal(held[free], np.broadcast_to(x[0], (len(free), 3)))
    back = UNPERMUTE(permuted, row, Tensor(weight)).asnumpy()
    close(back, x * weight.sum(1, keepdims=True))


PERMUTE, UNPERMUTE = Permute(), Unpermute()


def test_dropped_pairs_may_share_a_row():
    """ScatterNd adds up; the token of a shared row must stay within the tokens all the same."""
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    row = np.array([0, 4, 4, 4, 1, 4], np.int32)
    kept = row != 4
    held = PERMUTE(Tensor(x), Tensor(row), 5, Tensor(kept)).asnumpy()
    np.testing.assert_array_equal(held, x[[0, 4, 0, 0, 0]])


def test_gradients():
    """Those of a gather and a weighted sum, written out with one matrix of zeros and ones."""
    rng = np.random.default_rng(0)
    T, K, rows = 4, 2, 11
    x, y = rng.standard_normal((T, 3)), rng.standard_normal((rows, 3))
    weight = rng.standard_normal((T, K))
    row = rng.permutation(rows)[: T * K].astype(np.int32)
    x, y, weight = (a.astype(np.float32) for a in (x, y, weight))
    taken = np.zeros((rows, T))  # [row, token]; free rows hold token 0
    taken[:, 0] = 1
    for n, r in enumerate(row):
        taken[r] = np.eye(T)[n // K]
    d = rng.standard_normal((rows, 3)).astype(np.float32)
    taking = np.isin(np.arange(rows), row)
    d[~taking] = 0  # what a free row holds is read by nobody, so no gradient comes back
    held, (dx,) = Gradient(Permute()).run(d, x, row, rows)
    close(held, taken @ x)
    close(dx, taken.T @ d)

    d = rng.standard_normal((T, 3)).astype(np.float32)
    out, (dy, dw) = Gradient(Unpermute(), inputs=(0, 2)).run(d, y, row, weight)
    mix = np.zeros((T, rows))
    for n, r in enumerate(row):
        mix[n // K, r] = weight.reshape(-1)[n]
    close(out, mix @ y)
    close(dy, mix.T @ d)
    close(dw, np.einsum("th,tkh->tk", d, y[row].reshape(T, K, 3)))


def sort_plan(index, experts):
    """Return ``(row, pair, size)`` of the native operator."""
    row, pair = np.empty(index.size, np.int32), np.empty(index.size, np.int32)
    size = np.empty(experts, np.int32)
    Kernel("PermutePlan", {"experts": experts})([index], [row, pair, size])
    return row, pair, size


def sort_capacity_plan(index, weight, experts, factor, policy):
    """Return ``(row, pair, size, dropped)`` of the native operator."""
    numerator, denominator = float(factor).as_integer_ratio()
    by_weight = policy == "probs"
    attributes = {"experts": experts, "numerator": numerator, "denominator": denominator}
    kernel = Kernel("CapacityPlan", {**attributes, "by_weight": by_weight})
    shapes = kernel.shapes([index, weight], 4)
    out = [np.empty(s, t) for s, t in zip(shapes, [np.int32] * 3 + [np.float32], strict=True)]
    kernel([index, weight], out)
    return out


def native_permutation(x, pair, row, weight, y, dout, dy):
    """Return ``(rows, dx, out, drows, dweight)``: both operators and both gradients."""
    rows, dx, out = np.empty_like(y), np.empty_like(x), np.empty_like(x)
    drows, dweight = np.empty_like(y), np.empty_like(weight)
    Kernel("Permute")([x, pair, row], [rows])
    Kernel("PermuteGrad")([dy, row, x], [dx])
    Kernel("Unpermute")([y, row, weight], [out])
    Kernel("UnpermuteGrad")([y, pair, weight, dout], [drows, dweight])
    return rows, dx, out, drows, dweight


def numbers(seed, tokens, rows, width):
    rng = np.random.default_rng(seed)
    shapes = [(tokens, width), (rows, width), (tokens, width), (rows, width)]
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


@settings(max_examples=150, deadline=None)
@given(routings())
def test_sort_plan(routing):
    index, _, experts, _ = routing
    row, pair, size = sort_plan(index, experts)
    _, expected, inverse = permute_reference(np.zeros((len(index), 1)), index)
    np.testing.assert_array_equal(pair, expected)
    np.testing.assert_array_equal(row, inverse)
    np.testing.assert_array_equal(size, np.bincount(index.reshape(-1), minlength=experts))


@pytest.mark.parametrize("policy", ["probs", "position"])
@settings(max_examples=150, deadline=None)
@given(routing=routings(), factor=st.sampled_from([0.3, 0.5, 1.0, 1.25, 4.0]))
def test_sort_capacity_plan(policy, routing, factor):
    index, weight, experts, _ = routing
    row, pair, size, dropped = sort_capacity_plan(index, weight, experts, factor, policy)
    capacity = -(-factor * index.size // experts)
    assert (size == capacity).all()
    assert len(pair) == capacity * experts
    expert, weights = index.reshape(-1), weight.reshape(-1)
    kept = row >= 0
    assert dropped[0] == (~kept).sum()
    np.testing.assert_array_equal(pair[row[kept]], np.flatnonzero(kept))
    assert (pair >= 0).sum() == kept.sum()
    np.testing.assert_array_equal(row[kept] // capacity, expert[kept])
    for e in range(experts):
        own = np.flatnonzero(expert == e)
        order = own if policy == "position" else own[np.argsort(-weights[own], kind="stable")]
        np.testing.assert_array_equal(
            np.flatnonzero(kept & (expert == e)), np.sort(order[: int(capacity)])
        )


@settings(max_examples=100, deadline=None)
@given(routings(), st.integers(1, 70), st.integers(0, 999), st.booleans())
def test_permutation_and_gradients(routing, width, seed, drop):
    """As products with a matrix of zeros and ones, in float64."""
    index, weight, experts, _ = routing
    if drop:
        row, pair, _, _ = sort_capacity_plan(index, weight, experts, 0.5, "probs")
    else:
        row, pair, _ = sort_plan(index, experts)
    T, K = index.shape
    x, y, dout, dy = numbers(seed, T, len(pair), width)
    rows, dx, out, drows, dweight = native_permutation(x, pair, row, weight, y, dout, dy)
    taken, mix = np.zeros((len(pair), T)), np.zeros((T, len(pair)))
    for n, r in enumerate(row):
        if r >= 0:
            taken[r, n // K] = 1
            mix[n // K, r] = weight.reshape(-1)[n]
    np.testing.assert_array_equal(rows, taken @ x)
    close(dx, taken.T @ dy)
    close(out, unpermute_reference(y, row, weight))
    close(out, mix @ y)
    close(drows, mix.T @ dout)
    dots = np.einsum("nh,nh->n", np.repeat(dout, K, 0).astype(np.float64), y[row])
    close(dweight.reshape(-1), np.where(row >= 0, dots, 0))


def test_sorted_rows_in_a_graph():
    rng = np.random.default_rng(0)
    index = np.argsort(rng.random((9, 5)), 1)[:, :2].astype(np.int32)
    weight = rng.random((9, 2)).astype(np.float32)
    row, pair, size = (t.asnumpy() for t in SortPlan(5)(Tensor(index)))
    np.testing.assert_array_equal(size, np.bincount(index.reshape(-1), minlength=5))
    x, y, dout, dy = numbers(1, 9, 18, 6)
    expected = native_permutation(x, pair, row, weight, y, dout, dy)
    rows, (dx,) = Gradient(FusedPermute()).run(dy, x, pair, row)
    out, (drows, dweight) = Gradient(FusedUnpermute(), (0, 3)).run(dout, y, pair, row, weight)
    for got, exact in zip((rows, dx, out, drows, dweight), expected, strict=True):
        np.testing.assert_array_equal(got, exact)
    plan = [t.asnumpy() for t in SortCapacityPlan(5, 0.7, "probs")(Tensor(index), Tensor(weight))]
    for got, exact in zip(plan, sort_capacity_plan(index, weight, 5, 0.7, "probs"), strict=True):
        np.testing.assert_array_equal(got, exact)


def test_the_number_of_threads_changes_no_bit():
    rng = np.random.default_rng(0)
    index = np.argsort(rng.random((700, 8)), 1)[:, :3].astype(np.int32)
    weight = rng.random((700, 3)).astype(np.float32)
    row, pair, _ = sort_plan(index, 8)
    arrays = numbers(1, 700, 2100, 50)
    before = native.threads()
    try:
        results = []
        for threads in (1, 2, 5):
            native.set_threads(threads)
            x, y, dout, dy = arrays
            results.append(native_permutation(x, pair, row, weight, y, dout, dy))
    finally:
        native.set_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert (a.view(np.uint32) == b.view(np.uint32)).all()


def test_no_tokens():
    index, weight = np.empty((0, 2), np.int32), np.empty((0, 2), np.float32)
    row, pair, size = sort_plan(index, 3)
    assert not size.any()
    x, y, dout, dy = numbers(0, 0, 0, 4)
    native_permutation(x, pair, row, weight, y, dout, dy)


@pytest.mark.parametrize("bad", [-1, 3, 2**31 - 1])
def test_experts_that_do_not_exist_are_refused(bad):
    index = np.array([[0, 1], [2, bad], [1, 0]], np.int32)
    with pytest.raises(NativeError, match=f"token 1 chose expert {bad} of 3"):
        sort_plan(index, 3)
    with pytest.raises(NativeError, match=f"token 1 chose expert {bad} of 3"):
        sort_capacity_plan(index, np.ones((3, 2), np.float32), 3, 1.0, "probs")


def test_rows_and_pairs_that_do_not_exist_are_refused():
    x, y, dout, _ = numbers(0, 3, 6, 4)
    weight = np.ones((3, 2), np.float32)
    row = np.array([0, 1, 2, 3, 4, 6], np.int32)
    with pytest.raises(NativeError, match="pair 5 has row 6 of 6"):
        Kernel("Unpermute")([y, row, weight], [x])
    with pytest.raises(NativeError, match="row 5 holds pair 6 of 6"):
        Kernel("Permute")([x, row, row], [y])
    with pytest.raises(NativeError, match="row 5 holds pair 6 of 6"):
        Kernel("UnpermuteGrad")([y, row, weight, dout], [y.copy(), weight.copy()])
    with pytest.raises(NativeError, match="expected 1 to 64 each"):
        Kernel("Permute")([x, row[:4], row[:4]], [y[:4]])
