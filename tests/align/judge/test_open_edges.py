"""What a dump of msprobe leaves out: labels, gradients of weights and stacked experts, choices within modules, rounding alone."""

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
    Stats,
    TensorRecord,
)
from telechat_moe.tools.align.dump.value_files import stats
from telechat_moe.tools.align.judge.data_flow import DataFlow
from telechat_moe.tools.align.judge.edges import broken_edges

RANDOM = np.random.default_rng(5)
X, G = (RANDOM.standard_normal((2, 6, n)).astype(np.float32) for n in (8, 4))
W, B = RANDOM.standard_normal((4, 8)).astype(np.float32), np.ones(4, np.float32)
Y = X @ W.T + B
M = RANDOM.standard_normal((4, 8)).astype(np.float32)


def record(values):
    return TensorRecord(str(values.dtype), values.shape, read=lambda: values)


def call(name, inputs, outputs, phase=Phase.FORWARD, number=0, kind="api", **kwargs):
    key = f"{name}.{number}.{phase.value}"
    inputs = [x if isinstance(x, Scalar) else record(x) for x in inputs]
    return Call(key, kind, name, number, phase, inputs, kwargs, [record(x) for x in outputs])


def dump(*calls, level="L1"):
    rank = RankDump(0, 0, "pytorch", "tensor", level, {c.key: c for c in calls})
    return Dump(Path("run"), {(0, 0): rank})


def first_wrong(reference, target):
    findings = bisect(reference, target).findings
    return findings[0].verdict.key if findings else None


def edges(reference, target):
    flows = [DataFlow(run.ranks[0, 0]) for run in (reference, target)]
    return {v.key: v.status for v in broken_edges(*flows)}


# ------------------------------------------------------------------ integers


def labelled(labels, name="Functional.pad"):
    padded = np.pad(labels, ((0, 0), (0, 1)))
    return dump(call(name, [labels], [padded]), call("Functional.linear", [X, W, B], [Y]))


def test_other_labels_are_other_data_though_a_view_takes_them():
    labels = np.arange(60, dtype=np.int64).reshape(2, 30)
    right, wrong = labelled(labels), labelled(np.roll(labels, 1, 1))
    assert first_wrong(right, wrong) == "Functional.pad.0.forward"
    assert first_wrong(right, labelled(labels)) is None
    # What is overwritten, as memory that nothing has written yet, may be anything.
    overwritten = [labelled(x, "Tensor.fill_") for x in (labels, labels + 1)]
    assert edges(*overwritten).get("Tensor.fill_.0.forward") != "diverged"


def test_an_expert_bias_that_is_zero_in_the_reference_is_an_input_as_others():
    def biased(bias, name="Tensor.__add__"):
        scores = np.full((6, 4), 0.5, np.float32) + G[0]
        return dump(call(name, [scores, bias], [scores + bias]))

    zeros, bias = np.zeros((1, 4), np.float32), np.array([[0, 0.2, 0.4, 0.6]], np.float32)
    assert first_wrong(biased(zeros), biased(bias)) == "Tensor.__add__.0.forward"
    # A sum in place begins with zeros in one run, and perhaps with another expert's rows in the other.
    name = "Tensor.add_"
    assert edges(biased(zeros, name), biased(bias, name)).get(f"{name}.0.forward") != "diverged"


# ------------------------------------------------------------------ gradients of weights


def trained(weight=None, bias=None, noise=0.0):
    """A linear layer whose backward call has the gradient of its input alone, and updates that take the others."""
    flat = X.reshape(-1, 8), G.reshape(-1, 4)
    weight = flat[1].T @ flat[0] if weight is None else weight
    bias = flat[1].sum(0) if bias is None else bias
    weight = (weight * (1 + noise * RANDOM.standard_normal(weight.shape))).astype(np.float32)
    rate = Scalar("float", 0.1)
    return dump(
        call("Functional.linear", [X, W, B], [Y]),
        call("Functional.linear", [G], [(flat[1] @ W).astype(np.float32)], Phase.BACKWARD),
        call("Tensor.lerp_", [M, weight, rate], [M + np.float32(0.1) * (weight - M)]),
        call("Tensor.lerp_", [B, bias, rate], [B + np.float32(0.1) * (bias - B)], number=1),
    )


def test_a_tile_of_a_weights_gradient_that_is_lost_is_named():
    right = trained()
    weight, bias = (
        right.ranks[0, 0].calls[f"Tensor.lerp_.{i}.forward"].inputs[1].load() for i in (0, 1)
    )
    tile = weight.copy()
    tile[:2, :3] = 0
    assert first_wrong(right, trained(weight=tile)) == "Tensor.lerp_.0.forward"
    assert first_wrong(right, trained(bias=2 * bias)) == "Tensor.lerp_.1.forward"
    assert edges(right, trained(noise=1e-7)) == dict.fromkeys(
        ("Tensor.lerp_.0.forward", "Tensor.lerp_.1.forward"), "pass"
    )


def experts(order):
    """Products of three experts, whose gradients an update takes as one tensor; the third expert has no token."""
    calls = [call("Functional.linear", [X, W, B], [Y])]
    for i in range(2):
        random = np.random.default_rng(i)
        x, g, w = (random.standard_normal(n).astype(np.float32) for n in ((5, 4), (5, 3), (4, 3)))
        calls.append(call("Tensor.__matmul__", [x, w], [x @ w], number=i))
        calls.append(call("Tensor.__matmul__", [g], [g @ w.T, x.T @ g], Phase.BACKWARD, i))
    gradients = [c.outputs[1].load() for c in calls if c.phase is Phase.BACKWARD]
    stack = np.stack([*gradients, np.zeros_like(gradients[0])])[order]
    moment = np.ones_like(stack)
    result = moment + np.float32(0.1) * (stack - moment)
    return dump(*calls, call("Tensor.lerp_", [moment, stack, Scalar("float", 0.1)], [result]))


def test_gradients_of_experts_are_what_their_products_made():
    right = experts([0, 1, 2])
    assert first_wrong(right, experts([1, 0, 2])) == "Tensor.lerp_.0.forward"
    assert edges(right, experts([0, 1, 2])).get("Tensor.lerp_.0.forward") is None


# ------------------------------------------------------------------ modules


def modules(tokens, noise=0.0):
    """Two modules of which the second gets the tokens that an unrecorded router sends it."""
    x = RANDOM.standard_normal((tokens, 8)).astype(np.float32)
    z = (Y * (1 + noise)).astype(np.float32)
    calls = (
        call("Module.router.Linear", [X, W], [z], kind="module"),
        call("Module.experts.0.Linear", [x, W], [x @ W.T], kind="module"),
    )
    return dump(*calls, level="L0")


def test_an_expert_with_other_tokens_is_open_where_choices_are_not_recorded():
    outcome = bisect(modules(22), modules(23, noise=1e-3))
    assert outcome.verdict == "inconclusive", outcome.findings


# ------------------------------------------------------------------ updates


def updated(skipped=(), statistics=False, factor=1.0):
    """Updates of six weights of one shape by gradients that no call of the dump made, without some of them."""
    random = np.random.default_rng(2)
    calls = [call("Functional.linear", [X, W, B], [Y]), call("Functional.linear", [G], [G @ W], Phase.BACKWARD)]  # fmt: skip
    number = 0
    for i in range(6):
        weight, gradient = random.standard_normal((2, 8, 8)).astype(np.float32)
        gradient *= np.float32(factor) if i == 3 else np.float32(1)
        if i not in skipped:
            decayed = weight * np.float32(0.9)
            calls.append(call("Tensor.mul_", [weight, Scalar("float", 0.9)], [decayed], number=number))  # fmt: skip
            calls.append(call("Tensor.sub_", [decayed, gradient], [decayed - gradient], number=number))  # fmt: skip
            number += 1
    if not statistics:
        return dump(*calls)
    bare = [
        c.changed(lambda _, v: replace(v, read=None, stats=stats(v.load())) if isinstance(v, TensorRecord) else v, results=True)
        for c in calls
    ]  # fmt: skip
    rank = RankDump(0, 0, "pytorch", "statistics", "L1", {c.key: c for c in bare})
    return Dump(Path("run"), {(0, 0): rank})


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("skipped", [0, 2, 5])
def test_an_update_that_is_left_out_is_missing_where_it_belongs(skipped, statistics):
    target = updated([skipped], statistics)
    assert first_wrong(updated(statistics=statistics), target) == f"Tensor.mul_.{skipped}.forward"
    # The other way round there is one too many.
    assert first_wrong(target, updated(statistics=statistics)) == f"Tensor.mul_.{skipped}.forward"


# ------------------------------------------------------------------ statistics


@pytest.mark.parametrize(("factor", "expected"), [(2.0, "diverged"), (1 + 1e-7, "inconclusive")])
def test_the_statistics_of_a_gradient_show_a_factor(factor, expected):
    outcome = bisect(updated(statistics=True), updated(statistics=True, factor=factor))
    assert outcome.verdict == expected, outcome
    assert [f.verdict.key for f in outcome.findings[:1]] == ["Tensor.sub_.3.forward"] * (
        factor == 2
    )


def cancelled(mean):
    """A backward call of large gradients whose sum is rounding alone, by its statistics."""
    large = TensorRecord("float32", (64,), stats=Stats(1.0, -1.0, 0.1, 4.0))
    small = TensorRecord("float32", (8,), stats=Stats(mean, -mean, mean / 9, 2 * mean))
    forward = Call("Tensor.__sub__.0.forward", "api", "Tensor.__sub__", 0, Phase.FORWARD, [large], {}, [large])  # fmt: skip
    backward = Call("Tensor.__sub__.0.backward", "api", "Tensor.__sub__", 0, Phase.BACKWARD, [large], {}, [large, small])  # fmt: skip
    rank = RankDump(0, 0, "pytorch", "statistics", "L1", {c.key: c for c in (forward, backward)})
    return Dump(Path("run"), {(0, 0): rank})


@pytest.mark.parametrize(("size", "expected"), [(1e-8, "inconclusive"), (1e-2, "diverged")])
def test_what_rounding_leaves_of_larger_numbers_is_no_fault(size, expected):
    assert bisect(cancelled(size), cancelled(3 * size)).verdict == expected


# ------------------------------------------------------------------ attributes of MindSpore's primitives


def moved(parts, joined, kind="Float32"):
    """What msprobe writes of Split, Concat and Cast of MindSpore: tensors and types, no axis and no number of parts."""
    type_ = Scalar("mindspore.dtype", kind)
    concat = call("Primitive.concat.Concat", [], [joined])
    concat = concat.__class__(**{**vars(concat), "inputs": [[record(p) for p in parts[::-1]]]})
    whole = np.concatenate(parts, -1)
    return dump(
        call("Primitive.split.Split", [whole], parts),
        concat,
        call("Primitive.cast.Cast", [joined, type_], [joined]),
    )


def test_a_single_dump_needs_no_attributes_of_primitives():
    a, b = (RANDOM.standard_normal((2, 3, 4, 5)).astype(np.float32) for _ in range(2))
    joined = np.concatenate([b, a], -1)
    right, wrong = (moved([a, b], x) for x in (joined, joined[..., ::-1]))
    alone = [bisect(run, run, itself=True) for run in (right, wrong)]
    assert alone[0].verdict == "pass", alone[0].findings
    assert alone[1].verdict != "pass"
