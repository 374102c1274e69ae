"""Faults planted by NumPy in single calls are named with the word of the field, and what is known of them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from telechat_moe.tools.align.bisect import bisect
from telechat_moe.tools.align.dump.records import (
    Call,
    Dump,
    Phase,
    RankDump,
    Scalar,
    TensorRecord,
)
from telechat_moe.tools.align.judge.verdict import judge
from telechat_moe.tools.align.operators.approx import Approx

RNG = np.random.default_rng(5)
NORMAL = RNG.standard_normal
X, W, G = NORMAL((24, 32)), NORMAL((16, 32)), NORMAL((24, 16))
A, B = NORMAL((24, 16)), NORMAL((24, 16))
LARGE = np.where(np.arange(A.size).reshape(A.shape) == 7, 1e6, A)
Q, K, V, DY = (NORMAL((2, 3, 12, 8)) for _ in range(4))
TYPES = {"float32": 2.0**-24, "bfloat16": 2.0**-8}


def stored(x, dtype):
    """Round to a type by arithmetic on float32's bits."""
    x = np.ascontiguousarray(x, np.float32)
    if dtype == "float32":
        return x
    bits = x.view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + even) & np.uint32(0xFFFF0000)).view(np.float32)


def exp_rows(x):
    return np.exp(x - x.max(-1, keepdims=True))


def softmax(x):
    return exp_rows(x) / exp_rows(x).sum(-1, keepdims=True)


# operator, inputs, right result, wrong result, gradient; what it is called and what the evidence says
FORWARD = {
    "softmax without its sum": ("Functional.softmax", (A,), softmax, exp_rows, "missing row sum", "each row"),
    "another operator": ("Functional.silu", (X,), lambda x: x / (1 + np.exp(-x)), lambda x: np.maximum(x, 0), "wrong operator", "relu"),
    "half of the scale": ("Torch.matmul", (X, W.T), lambda x, w: x @ w, lambda x, w: x @ w / 2, "scale", "1/2"),
    "rows exchanged": ("Functional.linear", (X, W), lambda x, w: x @ w.T, lambda x, w: (x @ w.T)[::-1], "permutation", "dimension 0"),
    "noise beside a large number": ("Torch.add", (LARGE, B), lambda a, b: a + b, lambda a, b: a + b + 1e-3 * LARGE.max() * 2**-12 * G, "unknown", "elements"),
    "unknown": ("Torch.add", (A, B), lambda a, b: a + b, lambda a, b: a + b + 0.1 * G, "unknown", "elements"),
}  # fmt: skip
BACKWARD = {
    "softmax without row sum": ("Functional.softmax", (A,), softmax, lambda a, g: (softmax(a) * (g - (g * softmax(a)).sum(-1, keepdims=True)),),
                                lambda a, g: (softmax(a) * g,), G, "missing row sum", "each row"),
}  # fmt: skip


def dump(name, inputs, output, dtype, gradients=None, coming=None):
    def record(x):
        values = stored(x, dtype)
        return TensorRecord(dtype, values.shape, read=lambda: values)

    given = [*map(record, inputs), *([Scalar("int", -1)] if "softmax" in name else [])]
    key = f"{name}.0.forward"
    calls = {key: Call(key, "api", name, 0, Phase.FORWARD, given, {}, [record(np.asarray(output))])}
    if gradients is not None:
        key, going = f"{name}.0.backward", list(map(record, gradients))
        calls[key] = Call(key, "api", name, 0, Phase.BACKWARD, [record(coming)], {}, going)
    return Dump(Path("run"), {(0, 0): RankDump(0, 0, "pytorch", "tensor", "L1", calls)})


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", FORWARD)
def test_a_wrong_result_is_named(name, dtype):
    operator, inputs, right, wrong, family, said = FORWARD[name]
    inputs = [stored(x, dtype).astype(np.float64) for x in inputs]
    runs = [dump(operator, inputs, f(*inputs), dtype) for f in (right, wrong)]
    assert bisect(runs[0], runs[0]).verdict == "pass"
    found = bisect(*runs).findings[0]
    assert (found.family, said in found.evidence) == (family, True), found.evidence


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", BACKWARD)
def test_a_wrong_gradient_is_named(name, dtype):
    operator, inputs, forward, right, wrong, coming, family, said = BACKWARD[name]
    *inputs, coming = (stored(x, dtype).astype(np.float64) for x in (*inputs, coming))
    y = forward(*inputs)
    runs = [dump(operator, inputs, y, dtype, f(*inputs, coming), coming) for f in (right, wrong)]
    assert bisect(runs[0], runs[0]).verdict == "pass"
    found = bisect(*runs).findings
    assert {(f.family, said in f.evidence) for f in found} == {(family, True)}, found


@pytest.mark.parametrize("bias", [1e-4, 4e-4])
def test_a_bias_below_the_rounding_of_bfloat16_is_seen(bias):
    """Elements near the middle of two numbers are rounded to the wrong one, which no correct sum does."""
    a, b = (stored(NORMAL((128, 128)), "bfloat16").astype(np.float64) for _ in range(2))
    expected = Approx(a).matmul(Approx(b))
    verdicts = [
        judge("", "output.0", stored(k * (a @ b), "bfloat16"), expected, "bfloat16")
        for k in (1.0, 1 + bias)
    ]
    assert [v.status for v in verdicts] == ["pass", "diverged"]


def test_a_correct_sum_in_bfloat16_may_be_biased():
    """A small term is rounded away from almost every element, so the mean of the errors proves nothing."""
    x = stored(np.abs(NORMAL((256, 256))), "bfloat16").astype(np.float64)
    expected = Approx(x, "bfloat16") + 1e-4
    y = stored(x + 1e-4, "bfloat16").astype(np.float64)
    errors = (y - expected.value) / expected.sigma
    assert judge("", "output.0", y, expected, "bfloat16").status == "pass"
    assert errors.mean() * errors.size**0.5 < -8


def test_another_share_of_dropout_is_a_setting():
    runs = []
    for share in (0.1, 0.3):
        mask = np.random.default_rng(1).random(X.shape) >= share
        run = dump("Functional.dropout", (X,), X * mask / (1 - share), "float32")
        (call,) = run.ranks[0, 0].calls.values()
        call = replace(call, inputs=[call.inputs[0], Scalar("float", share), Scalar("bool", True)])
        rank = replace(run.ranks[0, 0], calls={call.key: call})
        runs.append(replace(run, ranks={(0, 0): rank}))
    (first,) = bisect(*runs).findings
    assert (first.family, first.evidence) == ("wrong setting", "p 0.3 (reference: 0.1)")
