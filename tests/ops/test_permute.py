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

from telechat_moe.ops.permute import BlockPlan, CapacityPlan, Permute, Unpermute

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
