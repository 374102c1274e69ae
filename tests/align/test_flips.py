"""Tokens that take other experts because scores nearly tie: only what follows from them is set aside."""

import numpy as np
import pytest

from telechat_moe.tools.align.dump.records import Call, Dump, Phase, RankDump, Scalar, TensorRecord
from telechat_moe.tools.align.judge.across_layouts import across

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
