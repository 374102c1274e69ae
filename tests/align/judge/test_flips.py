"""Tokens that take other experts because scores nearly tie: only what follows from them is set aside."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telechat_moe.tools.align.across_layouts import across
from telechat_moe.tools.align.dump.records import Call, Dump, Phase, RankDump, Scalar, TensorRecord
from telechat_moe.tools.align.judge.propagate import ExchangeSizes, Propagation, agreed
from telechat_moe.tools.align.operators.approx import Approx

RNG = np.random.default_rng(0)
TOKENS, EXPERTS, HIDDEN = 96, 4, 16
X = RNG.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
ROUTER = RNG.standard_normal((EXPERTS, HIDDEN)).astype(np.float32)
ROUTER[1] = ROUTER[0] * np.float32(1 + 2.0**-23)  # experts 0 and 1 nearly tie for every token
TABLE = RNG.standard_normal((EXPERTS, HIDDEN)).astype(np.float32)


def tensor(values):
    values = np.ascontiguousarray(values)
    kind = "float32" if values.dtype.kind == "f" else "int32"
    values = values.astype(kind)
    return TensorRecord(kind, values.shape, read=lambda: values)


def call(name, inputs, outputs, phase=Phase.FORWARD, **kwargs):
    kwargs = {k: v if isinstance(v, TensorRecord) else tensor(v) for k, v in kwargs.items()}
    given = [
        Scalar(type(v).__name__, v) if isinstance(v, (bool, int)) else tensor(v) for v in inputs
    ]
    return Call(
        f"{name}.0.forward", "api", name, 0, phase, given, kwargs, [tensor(v) for v in outputs]
    )


def run(x=X, table=TABLE, noise=0.0, slots=1, between=lambda scores: scores, gradient=1.0):
    """Route each token to an expert, sum tokens times rows of a table, and update a weight with that."""
    scores = np.float32(x.astype(np.float64) @ ROUTER.T.astype(np.float64))
    scores = (scores * (1 + np.float32(noise) * RNG.standard_normal(scores.shape))).astype(
        np.float32
    )
    given = between(scores)
    index = np.argsort(-given, 1, kind="stable")[:, :slots]
    rows = table[index]
    weighted = rows.reshape(-1, HIDDEN) * x
    total = weighted.astype(np.float64).sum(0).astype(np.float32) * np.float32(gradient)
    weight = np.ones(HIDDEN, np.float32)
    calls = [
        call("Primitive.MatMul", [x, ROUTER, False, True], [scores]),
        call("Primitive.TopK", [given, slots], [np.take_along_axis(given, index, 1), index]),
        call("Primitive.Gather", [table, index, 0, 0], [rows]),
        call("Primitive.Mul", [rows.reshape(-1, HIDDEN), x], [weighted]),
        call("Primitive.ReduceSum", [weighted, 0, False], [total]),
        call(
            "Optimizer.w.ApplyMomentum", [], [weight - np.float32(0.1) * total, total], Phase.OPTIMIZER,
            weight=weight, momentum_buffer=np.zeros(HIDDEN, np.float32), lr=np.float32(0.1), grad=total, momentum=np.float32(0.9),
        ),
    ]  # fmt: skip
    return Dump(
        "run", {(0, 0): RankDump(0, 0, "mindspore", "tensor", "mix", {c.key: c for c in calls})}
    )


def gradient_of(dump):
    return dump.ranks[0, 0].calls["Optimizer.w.ApplyMomentum.0.forward"].kwargs["grad"].load()


@pytest.fixture(scope="module")
def pair():
    one, two = run(noise=1e-7), run(noise=1e-7)
    off = np.linalg.norm(gradient_of(one) - gradient_of(two)) / np.linalg.norm(gradient_of(one))
    assert off > 0.01  # the whole gradient differs by what flipped tokens add
    return one, two


def test_tokens_may_flip_where_scores_tie(pair):
    outcome = across(*pair)
    assert outcome.verdict == "pass", outcome.findings[0].verdict
    assert not outcome.unknown


@pytest.mark.parametrize("factor", [1.001, 0.999])
def test_a_gradient_is_still_judged(pair, factor):
    outcome = across(pair[0], run(noise=1e-7, gradient=factor))
    assert outcome.findings[0].verdict.key == "Primitive.ReduceSum.0.forward"


def test_what_no_call_made_is_still_judged(pair):
    """A row of the table is zero, as of weights that were not loaded."""
    table = TABLE.copy()
    table[3] = 0
    outcome = across(pair[0], run(noise=1e-7, table=table))
    first = outcome.findings[0].verdict
    assert outcome.verdict == "diverged"
    assert first.reason.startswith("gradient of w")


@pytest.mark.parametrize("by", [1e-4, 0.1])
def test_a_choice_by_other_scores_is_named(pair, by):
    """The bias of one expert was lost or added between two calls: no call is wrong, but the choice is not legal."""

    def shifted(scores):
        return scores + np.float32(by) * (np.arange(EXPERTS) == 2).astype(np.float32)

    first = across(pair[0], run(noise=1e-7, between=shifted)).findings[0].verdict
    assert first.key == "Primitive.TopK.0.forward"
    assert "scores that are not the reference's" in first.reason


@given(st.integers(2, 4), st.integers(0, 2**32 - 1), st.data())
def test_exchanged_rows_are_told_from_others(ranks, seed, data):
    """Sizes of a dropless exchange: by what ranks send and receive, the true ones are found, or none."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 4, (ranks, ranks))
    decoys = data.draw(st.integers(0, 3))

    def options(true):
        others = {tuple(rng.permutation(true).tolist()) for _ in range(decoys)}
        return {tuple(true.tolist())} | others

    sent, received = [options(row) for row in rows], [options(column) for column in rows.T]
    able = [
        each
        for each in product(*sent)
        if all(tuple(s[j] for s in each) in received[j] for j in range(ranks))
    ]
    assert tuple(map(tuple, rows.tolist())) in able
    try:
        found = agreed(sent, received)
    except ValueError:
        assert decoys
    else:
        assert able == [tuple(found)]
        assert np.array_equal(found, rows)


def test_sizes_follow_from_counts_of_other_choices():
    sizes = ExchangeSizes()
    sizes.keep(np.array([3, 2, 4, 6]), np.array([3, 3, 4, 5]))
    assert sizes.options([3, 2, 4, 6]) == {(3, 3, 4, 5)}
    assert sizes.options([5, 10], rows=15) == {(6, 9)}  # two experts on each rank
    assert sizes.options([1, 1]) == {(1, 1)}
    split = Call("split", "api", "split", 0, Phase.FORWARD, [Scalar("list", [3, 2, 4, 6])], {}, [])
    assert sizes.resized(split).inputs == [Scalar("list", [3, 3, 4, 5])]
    sizes.keep(np.array([3, 2, 4, 6]), np.array([4, 2, 4, 5]))
    with pytest.raises(ValueError, match="other choices"):
        sizes.resized(split)


def test_an_error_that_overflows_is_unknown_not_zero():
    error = np.array([np.inf, 0.0])
    vague = Approx(np.array([1.0, 2.0]), "float32", sigma=error, limit=error)
    assert np.isinf((vague * Approx(np.zeros(2), "float32")).sigma[0])
    assert np.all(np.isfinite((vague * 3.0).sigma[1:]))
    exact = Approx(np.zeros(2), "float32") ** 0.5  # an infinite derivative, and no error to carry
    assert np.all(exact.sigma == 0)
    masked = (Approx(np.array([-np.inf, 0.0]), "float32") + 0.0).exp()
    assert np.all(np.isfinite(masked.sigma))


def test_deviations_of_masked_scores_do_not_overflow():
    """A mask of -1e30 has a deviation of 1e22, whose square is beyond float32."""
    scores = RNG.standard_normal((4, 4)).astype(np.float32)
    masked = scores + np.triu(np.full((4, 4), -1e30, np.float32), 1)
    weights = np.exp(masked - masked.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    doubled = call("Torch.mul", [scores, np.full((4, 4), 1, np.float32)], [scores])
    added = call("Torch.add", [scores, np.triu(np.full((4, 4), -1e30, np.float32), 1)], [masked])
    chosen = call("Functional.softmax", [masked], [weights], dim=-1)
    chosen = replace(chosen, kwargs={"dim": Scalar("int", -1)})
    calls = doubled, added, chosen
    dump = RankDump(0, 0, "mindspore", "tensor", "mix", {c.key: c for c in calls})
    held = Propagation([dump]).made[0, (chosen.key, "output.0")]
    assert np.all(np.isfinite(held.sigma))
    assert held.sigma.max() < 1e-6
