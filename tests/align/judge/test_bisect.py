"""The first wrong call is named, with what is wrong about it; right runs of another type or seed pass."""

import dataclasses

import pytest

torch = pytest.importorskip("torch")

from planted import first, result, run, second, setting, train

from telechat_moe.tools.align.bisect import bisect
from telechat_moe.tools.align.dump.records import Dump

pytestmark = pytest.mark.torch


def summed_in_bfloat16(function, args, kwargs):
    x, w = args
    parts = [
        (x[:, i : i + 4] @ w[:, i : i + 4].T).bfloat16().float() for i in range(0, x.shape[1], 4)
    ]
    return sum(parts)


def one_off(y):
    y = y.clone()
    y.view(-1)[5] += 0.5
    return y


# function, number of its call, how it is done wrong; the call that must be named, and the kind of fault
FAULTS = {
    "one percent": (("linear", 3, result(lambda y: y * 1.01)), "Functional.linear.3.forward", "scale"),
    "doubled": (("index_add", 2, result(lambda y: 2 * y)), "Torch.index_add.2.forward", "scale"),
    "sign": (("mul", 1, result(lambda y: -y)), "Torch.mul.1.forward", "sign"),
    "eps": (("rms_norm", 1, setting(eps=1e-3)), "Functional.rms_norm.1.forward", "wrong setting"),
    "mask forgotten": (
        ("scaled_dot_product_attention", 1, setting(is_causal=False)),
        "Functional.scaled_dot_product_attention.1.forward",
        "wrong setting",
    ),
    "rolled by a token": (("add", 1, result(lambda y: torch.roll(y, 1, 0))), "Torch.add.1.forward", "permutation"),
    "tokens dropped": (
        ("index_add", 5, result(lambda y: torch.cat([torch.zeros_like(y[:2]), y[2:]]))),
        "Torch.index_add.5.forward",
        "dropped",
    ),
    "token twice": (
        ("embedding", 0, result(lambda y: torch.cat([y[:1], y[:1], y[2:]]))),
        "Functional.embedding.0.forward",
        "duplicated",
    ),
    "one element": (("linear", 8, result(one_off)), "Functional.linear.8.forward", "single element"),
    "rounded to bfloat16": (
        ("linear", 0, result(lambda y: y.bfloat16().float())),
        "Functional.linear.0.forward",
        "wrong dtype",
    ),
    "added up in bfloat16": (("linear", 2, summed_in_bfloat16), "Functional.linear.2.forward", "accumulator"),
    "another expert chosen": (
        ("topk", 1, first(lambda x: torch.roll(x, 1, 1))),
        "Torch.topk.1.forward",
        "wrong index",
    ),
    "activation skipped": (("silu", 0, lambda f, a, k: a[0] * 1.0), "Functional.silu.0.forward", "skipped"),
    "weight misread": (
        ("linear", 9, second(lambda w: w.reshape(w.shape[1], w.shape[0]).T)),
        "Functional.linear.9.forward",
        "transpose",
    ),
    "not finite": (("sigmoid", 1, result(lambda y: y * float("nan"))), "Torch.sigmoid.1.forward", "not finite"),
    "bias added": (("linear", 4, result(lambda y: y + 0.25)), "Functional.linear.4.forward", "offset"),
}  # fmt: skip


@pytest.fixture(scope="module")
def reference():
    return run()


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(reference, name):
    fault, key, family = FAULTS[name]
    outcome = bisect(reference, run(fault))
    found = outcome.findings[0]
    assert (outcome.verdict, found.verdict.key, found.verdict.place[:6]) == (
        "diverged",
        key,
        "output",
    )
    assert (found.family, bool(found.evidence)) == (family, True)
    assert {f.verdict.key.rsplit(".", 1)[0] for f in outcome.findings} == {key.rsplit(".", 1)[0]}


@pytest.mark.parametrize("name", ["one percent", "rolled by a token", "another expert chosen"])
def test_a_fault_in_bfloat16_against_float32(reference, name):
    fault, key, family = FAULTS[name]
    if name == "one percent":
        fault = ("linear", 3, result(lambda y: y * 1.1))  # 1 % is within the rounding of bfloat16
    outcome = bisect(reference, run(fault, torch.bfloat16))
    assert (outcome.findings[0].verdict.key, outcome.findings[0].family) == (key, family)


@pytest.mark.parametrize("seed", range(4))
def test_right_runs_pass(seed):
    """Tokens that take another expert in the narrow type change nothing: nothing is compared across runs."""
    target = run(dtype=torch.bfloat16, seed=seed)
    outcome = bisect(run(seed=seed), target)
    assert (outcome.verdict, outcome.findings, dict(outcome.unknown)) == ("pass", [], {})
    assert outcome.judged["pass"] > 500


def test_other_weights_are_found_where_they_come_in(reference):
    outcome = bisect(reference, run(seed=1))
    found = outcome.findings[0]
    assert found.verdict.key == "Functional.embedding.0.forward"
    assert "comes from outside" in found.verdict.reason


def test_a_gradient_that_is_not_the_sum_of_its_parts(reference):
    """The residual stream's gradient is doubled on its way: no operator computes wrong."""
    target = run()
    ((place, dump),) = target.ranks.items()
    name = "Torch.add.1.backward"
    call = dump.calls[name]

    def twice(tensors):
        values = [2 * tensor.load() for tensor in tensors]
        return [
            dataclasses.replace(t, read=lambda x=x: x) for t, x in zip(tensors, values, strict=True)
        ]

    wrong = dataclasses.replace(call, inputs=twice(call.inputs), outputs=twice(call.outputs))
    dump = dataclasses.replace(dump, calls={**dump.calls, name: wrong})
    found = bisect(reference, Dump(target.root, {place: dump})).findings[0]
    assert (found.verdict.key, found.verdict.place) == (name, "input.0")
    assert (found.family, "2 times" in found.evidence) == ("scale", True)


@pytest.fixture(scope="module")
def trained():
    return train()


def test_steps_with_updates_pass(trained):
    outcome = bisect(trained, train())
    assert (outcome.verdict, outcome.findings, dict(outcome.unknown)) == ("pass", [], {})


def spoil(change):
    """Change the gradient of the output projection before the second update."""

    def at(step, weights):
        if step == 1:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                change(weights)

    return at


def test_a_doubled_gradient_is_found_though_the_loss_is_right(trained):
    """As EP = 2 once doubled them (pytorch issue 160285): the optimizer is handed twice the sum."""
    outcome = bisect(trained, train(change=spoil(lambda weights: weights[1].grad.mul_(2))))
    found = outcome.findings[0]
    assert (found.step, found.verdict.place, found.call.phase.value) == (
        1,
        "input.grad",
        "optimizer",
    )
    assert (found.family, "2 times" in found.evidence) == ("scale", True)


def test_a_weight_that_was_not_updated_is_found(trained):
    """The second step uses another weight than the first update made."""
    target = train()
    dump = target.ranks[1, 0]
    name = next(
        k
        for k, c in dump.calls.items()
        if c.name == "Functional.linear" and c.inputs[1].shape == (64, 32)
    )
    old = target.ranks[0, 0].calls
    first = next(
        c for c in old.values() if c.name == "Functional.linear" and c.inputs[1].shape == (64, 32)
    )
    call = dump.calls[name]
    wrong = dataclasses.replace(call, inputs=[call.inputs[0], first.inputs[1], *call.inputs[2:]])
    spoiled = dataclasses.replace(dump, calls={**dump.calls, name: wrong})
    outcome = bisect(trained, Dump(target.root, {**target.ranks, (1, 0): spoiled}))
    found = outcome.findings[0]
    assert (found.step, found.verdict.key, found.verdict.place) == (1, name, "input.1")
    assert "is not what Optimizer.AdamW.1.forward of step 0 made" in found.verdict.reason
