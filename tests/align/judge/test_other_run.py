"""Calls without a formula are judged by the other run; truth is planted in NumPy programs of vendor operators."""

import zlib
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
from telechat_moe.tools.align.judge.distance import distance

TOKENS, WIDTH, LAYERS = 64, 32, 4


def round_bf16(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32).reshape(x.shape)


NUMERICS = {
    "float32": lambda x: np.asarray(x, np.float32),
    "other sums": lambda x: np.asarray(x * (1 + 2e-7 * np.sin(1e4 * x)), np.float32),
    "bfloat16": round_bf16,
}


def record(x, dtype):
    x = np.asarray(x)
    return TensorRecord(dtype if x.dtype.kind == "f" else x.dtype.name, x.shape, read=lambda: x)


def program(numerics="float32", fault=None, kind="api", flip=None, tanh=None):
    """Return a run: per layer a mixer of tokens and a projection with hidden weights, then a choice and a loss.

    Args:
        fault: Key of a call and what is done to its result.
        flip: Which of the two best experts of a token, which nearly tie, comes out as the best.
        tanh: Name of an operator of its own for the projections' tanh; None: they are fused with it.
    """
    rng, keep = np.random.default_rng(5), NUMERICS[numerics]
    dtype = "bfloat16" if numerics == "bfloat16" else "float32"
    calls = {}

    def run(name, number, inputs, made):
        key = f"{name}.{number}.forward"
        values = [keep(y) if np.asarray(y).dtype.kind == "f" else y for y in made]
        if fault is not None and fault[0] == key:
            values = [fault[1](values[0]), *values[1:]]
        given = [record(x, dtype) for x in inputs]
        outputs = [record(y, dtype) for y in values]
        calls[key] = Call(
            key, kind, name, number, Phase.FORWARD, given, {"p": Scalar("int", 3)}, outputs
        )
        return values

    def route(x):
        w, experts = rng.standard_normal((WIDTH, 8)), rng.standard_normal((8, WIDTH, WIDTH)) / 6
        score = np.asarray(x, np.float64) @ w
        if flip is not None:
            score[9, flip], score[9, 1 - flip] = 40 + 2e-5, 40 + 1e-5
        (score,) = run("NPU.my_scores", 0, [x], [score])
        best = np.argmax(score, 1, keepdims=True)
        run("NPU.my_choice", 0, [score], [np.take_along_axis(score, best, 1), best])
        return run(
            "NPU.my_experts", 0, [x, best], [np.einsum("ti,tij->tj", x, experts[best[:, 0]])]
        )[0]

    x = round_bf16(rng.standard_normal((TOKENS, WIDTH)))
    for layer in range(LAYERS):
        a, w = rng.standard_normal((WIDTH, WIDTH)) / 6, rng.standard_normal((WIDTH, WIDTH)) / 6
        score = np.asarray(x, np.float64) @ a @ np.asarray(x, np.float64).T / 6
        p = np.exp(score - score.max(1, keepdims=True))
        (y,) = run("NPU.my_mixer", layer, [x], [p / p.sum(1, keepdims=True) @ x])
        product = np.asarray(y, np.float64) @ w
        if tanh is None:
            (z,) = run("NPU.my_projection", layer, [y], [np.tanh(product)])
        else:
            (product,) = run("NPU.my_product", layer, [y], [product])
            (z,) = run(tanh, layer, [product], [np.tanh(np.asarray(product, np.float64))])
        (x,) = run("NPU.my_residual", layer, [x, z], [np.asarray(x, np.float64) + z])
        if layer == 0:
            x = route(x)
    w = rng.standard_normal((WIDTH, 8))
    (score,) = run("NPU.my_router", 0, [x], [np.asarray(x, np.float64) @ w])
    chosen = np.argsort(-score, 1)[:, :2].astype(np.int64)
    run("NPU.my_gate", 0, [score], [np.take_along_axis(score, chosen, 1), chosen])
    return Dump(Path("run"), {(0, 0): RankDump(0, 0, "pytorch", "tensor", "L1", calls)})


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("kind", ["api", "module"])
def test_legal_noise_passes(numerics, kind):
    outcome = bisect(program(kind=kind), program(numerics, kind=kind))
    assert (outcome.verdict, outcome.findings) == ("pass", [])
    assert outcome.coverage.by_other_run == 3 * LAYERS + 7


def one_row(y):
    y = y.copy()
    y[17] = y[18]
    return y


def one_element(y):
    y = y.copy()
    y[40, 3] += 3 * np.abs(y).max()
    return y


FAULTS = {
    "one row": one_row,
    "one element": one_element,
    "rolled": lambda y: np.roll(y, 1, 0),
    "ten percent larger": lambda y: y * np.float32(1.1),
    "two percent larger": lambda y: y * np.float32(1.02),
    "transposed": lambda y: y.reshape(WIDTH, TOKENS).T.copy(),
    "zeros": lambda y: y * 0,
    "not a number": lambda y: np.where(np.arange(WIDTH) == 5, np.float32("nan"), y),
}


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("key", ["NPU.my_mixer.2.forward", "NPU.my_projection.1.forward"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name, key, numerics):
    outcome = bisect(program(), program(numerics, (key, FAULTS[name])))
    assert outcome.verdict == "diverged"
    first = outcome.findings[0]
    assert (first.verdict.key, first.verdict.basis) == (key, "other run")
    if name in ("one row", "one element") and numerics == "float32":
        assert first.verdict.element == ({"one row": 17, "one element": 40}[name],)


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("tanh", ["NPU.my_tanh", "Torch.tanh"])
def test_operators_that_replace_a_fused_one_are_judged_together(tanh, numerics):
    """Either run may be the fused one; what they make of what both have before them decides."""
    for one, other in ((None, tanh), (tanh, None)):
        outcome = bisect(program(tanh=one), program(numerics, tanh=other))
        assert (outcome.verdict, outcome.findings) == ("pass", []), outcome.reason
    fault = f"{tanh}.2.forward", one_row
    outcome = bisect(program(), program(numerics, fault, tanh=tanh))
    assert outcome.verdict == "diverged"
    assert outcome.findings[0].verdict.key == fault[0]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fused_operator_that_is_wrong_is_named(name):
    key = "NPU.my_projection.1.forward"
    outcome = bisect(program(tanh="NPU.my_tanh"), program("other sums", (key, FAULTS[name])))
    assert outcome.verdict == "diverged"
    assert outcome.findings[0].verdict.key == key


@pytest.mark.parametrize("numerics", NUMERICS)
def test_what_follows_from_a_flipped_token_is_no_fault(numerics):
    """The mixer spreads the token's difference to others; nothing computes wrong."""
    outcome = bisect(program(flip=0), program(numerics, flip=1))
    assert outcome.findings == []
    assert outcome.verdict == "inconclusive" or not outcome.coverage.lacks()


def test_other_choices_from_equal_inputs_are_a_fault_and_from_own_scores_none():
    calls = {}
    for word, turn in (("right", 0), ("wrong", 1)):
        run = program().ranks[0, 0]
        gate = run.calls["NPU.my_gate.0.forward"]
        chosen = np.roll(gate.outputs[1].load(), turn, 0)
        gate = replace(gate, outputs=[gate.outputs[0], record(chosen, "float32")])
        calls[word] = Dump(Path("run"), {(0, 0): replace(run, calls={**run.calls, gate.key: gate})})
    outcome = bisect(calls["right"], calls["wrong"])
    assert [f.verdict.place for f in outcome.findings] == ["output.1"]
    close = bisect(
        program(), program("bfloat16")
    )  # some tokens choose otherwise, by their own scores
    assert close.verdict == "pass"


def without_values(dump, crc=False, stats=True):
    def less(v):
        if not isinstance(v, TensorRecord):
            return v
        x = v.load().astype(np.float64)
        known = Stats(x.max(), x.min(), x.mean(), float(np.linalg.norm(x))) if stats else None
        mark = f"{zlib.crc32(np.ascontiguousarray(v.load())):08x}" if crc else None
        return replace(v, read=None, stats=known, crc=mark)

    ranks = {}
    for place, rank in dump.ranks.items():
        calls = {
            k: replace(c, inputs=[*map(less, c.inputs)], outputs=[*map(less, c.outputs)])
            for k, c in rank.calls.items()
        }
        ranks[place] = replace(rank, calls=calls)
    return Dump(dump.root, ranks)


@pytest.mark.parametrize("numerics", NUMERICS)
def test_statistics_show_a_fault_but_no_pass(numerics):
    key = "NPU.my_projection.1.forward"
    right, noisy = without_values(program()), without_values(program(numerics))
    wrong = without_values(program(numerics, (key, lambda y: y * np.float32(1.5))))
    assert (bisect(right, noisy).verdict, bisect(right, noisy).findings) == ("inconclusive", [])
    outcome = bisect(right, wrong)
    assert (outcome.verdict, outcome.findings[0].verdict.key) == ("diverged", key)
    assert "by its statistics" in outcome.findings[0].verdict.reason


def test_equal_checksums_pass_and_others_are_inconclusive():
    """Other bits after other inputs say nothing; after equal inputs they do where the runs repeat all other bits."""
    key = "NPU.my_projection.3.forward"
    known = {"crc": True, "stats": False}
    right = without_values(program(), **known)
    assert bisect(right, without_values(program(), **known)).verdict == "pass"
    noisy = bisect(right, without_values(program("other sums"), **known))
    assert (noisy.verdict, noisy.findings) == ("inconclusive", [])
    wrong = bisect(right, without_values(program(fault=(key, one_row)), **known))
    assert [f.verdict.key for f in wrong.findings] == [key]


def test_uninitialised_memory_is_no_fault():
    runs = []
    for seed in (0, 1):
        x = np.random.default_rng(seed).standard_normal((4, 4)).astype(np.float32)
        call = Call("Torch.empty_like.0.forward", "api", "Torch.empty_like", 0, Phase.FORWARD, [], {}, [record(x, "float32")])  # fmt: skip
        runs.append(Dump(Path("run"), {(0, 0): RankDump(0, 0, "pytorch", "tensor", "L1", {call.key: call})}))  # fmt: skip
    outcome = bisect(*runs)
    assert (outcome.verdict, outcome.findings) == ("inconclusive", [])
    assert "uninitialised memory" in next(iter(outcome.unknown))


@pytest.mark.parametrize(("place", "beta"), [("input.0", 0), ("input.0", 1), ("out", 0)])
def test_what_a_product_does_not_read_may_differ(place, beta):
    def run(seed):
        start, left, right = (
            np.random.default_rng(s).standard_normal((8, 8)).astype(np.float32)
            for s in (seed, 2, 3)
        )
        made = record(left @ right + beta * start, "float32")
        inputs = [record(v, "float32") for v in (start, left, right)]
        kwargs = {"beta": Scalar("int", beta)}
        if place == "out":
            inputs, kwargs = inputs[1:], {"out": record(start, "float32")}
        name = "Torch.matmul" if place == "out" else "Torch.addmm"
        call = Call(f"{name}.0.forward", "api", name, 0, Phase.FORWARD, inputs, kwargs, [made])
        return Dump(Path("run"), {(0, 0): RankDump(0, 0, "pytorch", "tensor", "L1", {call.key: call})})  # fmt: skip

    outcome = bisect(run(0), run(1))
    places = [f.verdict.place for f in outcome.findings]
    assert (outcome.verdict, places) == (("diverged", ["input.0"]) if beta else ("pass", []))


@pytest.mark.parametrize(
    ("cast", "rounded"), [("float32", round_bf16), ("bfloat16", round_bf16), ("float32", None)]
)
def test_a_cast_that_one_run_makes_is_no_extra_call(cast, rounded):
    """To a wider type, or to one that only this run computes in; one that gives other values is extra."""
    x = round_bf16(np.random.default_rng(4).standard_normal((8, 8)))
    y = round_bf16(np.tanh(x)) if cast == "float32" else np.tanh(x).astype(np.float32)
    kind = "bfloat16" if cast == "float32" else "float32"
    tanh = ("Torch.tanh", record(x, kind), record(y, kind))
    changed = rounded(y) if rounded else y * np.float32(1.25)
    runs = []
    for steps in ([tanh], [tanh, ("Tensor.astype", record(y, kind), record(changed, cast))]):
        calls = {
            f"{n}.0.forward": Call(f"{n}.0.forward", "api", n, 0, Phase.FORWARD, [a], {}, [b])
            for n, a, b in steps
        }
        runs.append(Dump(Path("run"), {(0, 0): RankDump(0, 0, "pytorch", "tensor", "L1", calls)}))
    assert [f.family for f in bisect(*runs).findings] == ([] if rounded else ["scale"])


def masked(turn=0, noise=0.0):
    """Return a run that fills rows by a mask made of scores; the mask of another run may be another by its noise."""
    x = (
        np.random.default_rng(3).standard_normal((TOKENS, WIDTH))
        * np.arange(1, TOKENS + 1)[:, None]
    )
    x = x * (1 + noise * np.sin(1e4 * x))
    scores = 2 * x
    mask = np.roll(np.arange(TOKENS) % 4 == 0, turn)
    steps = [
        ("NPU.my_scores", [x], [scores]),
        ("NPU.my_mask", [scores], [mask]),
        ("NPU.my_fill", [x, mask], [np.where(mask[:, None], x, 0.0)]),
    ]
    calls = {}
    for name, inputs, outputs in steps:
        records = [[record(v, "float32") for v in side] for side in (inputs, outputs)]
        key = f"{name}.0.forward"
        calls[key] = Call(key, "api", name, 0, Phase.FORWARD, records[0], {}, records[1])
    dump = Dump(Path("run"), {(0, 0): RankDump(0, 0, "pytorch", "statistics", "L1", calls)})
    return without_values(dump)


def test_equal_statistics_of_masks_are_not_equality():
    noisy = bisect(masked(), masked(turn=1, noise=1e-3))
    assert noisy.findings == []
    assert any("need not be equal" in reason for reason in noisy.coverage.reasons)
    wrong = bisect(masked(), masked(turn=1))  # no noise that flips a choice: the fill is wrong
    assert [f.verdict.key for f in wrong.findings] == ["NPU.my_fill.0.forward"]


def test_what_masks_are_filled_with_does_not_hide_a_row():
    y = np.random.default_rng(2).standard_normal((TOKENS, WIDTH))
    y = np.where(np.arange(WIDTH) > np.arange(TOKENS)[:, None], -1e9, y)
    x = y.copy()
    x[17] = np.where(y[17] < -1e8, y[17], 2 * y[17])
    far = distance(record(y, "float32"), record(x, "float32"))
    assert far.rows[17] > 0.5
    assert not far.rows[np.arange(TOKENS) != 17].any()
