"""Runs that were cut differently: groups from layouts, whole tensors of both, what only looks right on its own rank."""

import json
from dataclasses import replace

import numpy as np
import pytest

from telechat_moe.cli import main
from telechat_moe.errors import BadInputError
from telechat_moe.tools.align.across_layouts import across
from telechat_moe.tools.align.dump import msprobe_write
from telechat_moe.tools.align.dump.layout_dict import to_dict
from telechat_moe.tools.align.dump.records import (
    Call,
    Dump,
    Phase,
    RankDump,
    Scalar,
    TensorLayout,
    TensorRecord,
)
from telechat_moe.tools.align.judge.collectives import terms_of
from telechat_moe.tools.align.judge.pairing import differ_in_layout
from telechat_moe.tools.align.maps.links import Link, read_map

RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((8, 6)).astype(np.float32)
TERMS = RNG.standard_normal((4, 8, 6)).astype(np.float32)  # what each data-parallel rank adds
GRADIENT = TERMS.sum(0, dtype=np.float64).astype(np.float32)
RATE = np.float32(0.1)
MESH = {"mesh": (2, 2), "axes": ("dp", "tp"), "ranks": (0, 1, 2, 3)}
CUT = TensorLayout(**MESH, dims=(("tp",), ()))
PARTIAL = TensorLayout(**MESH, dims=(("tp",), ()), partial={"dp": "sum"})


def tensor(values, layout=None):
    values = np.ascontiguousarray(values, np.float32)
    return TensorRecord("float32", values.shape, layout=layout, read=lambda: values)


def scalar(value):
    return tensor(np.float32(value))


def update(weight, grad, layout=None, named="w"):
    grad, w, v = grad.astype(np.float64), weight.astype(np.float64), np.zeros(weight.shape)
    kwargs = {
        "weight": tensor(weight, layout), "momentum_buffer": tensor(v, layout), "lr": scalar(RATE),
        "grad": tensor(grad, layout), "momentum": scalar(0.9),
    }  # fmt: skip
    made = [tensor(w - float(RATE) * grad, layout), tensor(grad, layout)]
    name = f"Optimizer.{named}.ApplyMomentum"
    return Call(f"{name}.0.forward", "api", name, 0, Phase.OPTIMIZER, [], kwargs, made)


def reduction(own, total, group):
    name = "Primitive.Reduction.w.AllReduce"
    kwargs = {
        "op": Scalar("str", "sum"),
        "group": Scalar("ProcessGroup", {"group_ranks": group, "group_id": "g"}),
    }
    taken, made = [tensor(own, PARTIAL)], [tensor(total, CUT)]
    return Call(f"{name}.0.forward", "api", name, 0, Phase.REDUCTION, taken, kwargs, made)


def dump(root, ranks):
    return Dump(
        root,
        {
            (0, r): RankDump(0, r, "mindspore", "tensor", "mix", {c.key: c for c in calls})
            for r, calls in ranks.items()
        },
    )


def one(tmp_path, gradient=GRADIENT):
    return dump(tmp_path, {0: [update(WEIGHT, gradient)]})


def four(tmp_path, over="dp", factor=1.0, stale=()):
    """dp 2 x tp 2: each data-parallel rank has half of the terms, each tensor-parallel one half of the rows."""
    own = {
        r: TERMS[2 * (r // 2) : 2 * (r // 2) + 2].sum(0)[4 * (r % 2) : 4 * (r % 2) + 4]
        for r in range(4)
    }
    ranks = {}
    for r in range(4):
        group = sorted({r, (r + 2) % 4}) if over == "dp" else sorted({r, r ^ 1})
        total = np.sum([own[g] for g in group], 0) * np.float32(factor)
        weight = WEIGHT[4 * (r % 2) : 4 * (r % 2) + 4]
        if r in stale:
            weight = weight * np.float32(1.001)
        ranks[r] = [reduction(own[r], total, group), update(weight, total, CUT)]
    return dump(tmp_path, ranks)


def test_a_right_run_in_another_layout_passes(tmp_path):
    reference, target = one(tmp_path), four(tmp_path)
    assert differ_in_layout(reference, target)
    outcome = across(reference, target)
    assert outcome.verdict == "pass", outcome.findings
    assert not outcome.unknown


def test_a_sum_over_the_wrong_ranks_is_named(tmp_path):
    outcome = across(one(tmp_path), four(tmp_path, over="tp"))
    first = outcome.findings[0]
    assert outcome.verdict == "diverged"
    assert first.verdict.key == "Primitive.Reduction.w.AllReduce.0.forward"
    assert (first.family, outcome.ranks) == ("wrong group", [0, 1, 2, 3])
    assert first.as_json()["phase"] == "reduction"


def test_a_difference_that_no_operator_makes_shows_at_a_point(tmp_path):
    outcome = across(one(tmp_path, GRADIENT * np.float32(1.01)), four(tmp_path))
    first = outcome.findings[0]
    assert outcome.verdict == "diverged"
    assert first.verdict.reason.startswith("gradient of w: relative L2 distance")
    assert first.family == "scale"


@pytest.mark.parametrize(("clip", "verdict"), [(0.25, "pass"), (0.2501, "diverged")])
def test_a_gradient_is_compared_as_it_is_applied(tmp_path, clip, verdict):
    """One run records the gradient before it is clipped, the other after."""
    reference = one(tmp_path, GRADIENT)
    given = reference.ranks[0, 0].calls["Optimizer.w.ApplyMomentum.0.forward"].kwargs
    given |= {"grad": tensor(GRADIENT / np.float32(0.25)), "clip": scalar(clip)}
    assert across(reference, four(tmp_path)).verdict == verdict


@pytest.mark.parametrize(("step", "verdict"), [(0, "diverged"), (3, "inconclusive")])
def test_weights_may_have_parted_in_steps_that_are_not_in_the_dumps(tmp_path, step, verdict):
    apart = dump(tmp_path, {0: [update(WEIGHT * np.float32(1 + 1e-5), GRADIENT)]})
    dumps = [
        Dump(d.root, {(step, r): replace(x, step=step) for (_, r), x in d.ranks.items()})
        for d in (apart, four(tmp_path))
    ]
    assert across(*dumps).verdict == verdict


def test_how_far_apart_is_derived_not_guessed(tmp_path):
    """One sum of two terms: some roundings of float32 are allowed, not what a deep network would need."""
    for roundings, verdict in ((4, "pass"), (100, "diverged")):
        reference = one(tmp_path, GRADIENT * np.float32(1 + roundings * 2.0**-24))
        outcome = across(reference, four(tmp_path))
        assert outcome.verdict == verdict, (roundings, outcome.findings[:1])


def test_copies_that_differ_are_a_fault(tmp_path):
    outcome = across(one(tmp_path), four(tmp_path, stale=[2]))
    assert outcome.verdict == "diverged"
    said = next(
        f.verdict.reason for f in outcome.findings if "weight of w before" in f.verdict.reason
    )
    assert "copies differ" in said
    assert "rank 2" in said


def test_tolerance_and_maps(tmp_path):
    reference = one(tmp_path, GRADIENT * np.float32(1 + 1e-3))
    links = [Link("g", ("weight w input.grad",), ("Optimizer.w.* input.grad",))]
    assert across(reference, four(tmp_path), links).verdict == "diverged"
    assert across(reference, four(tmp_path), links, 1e-2).verdict == "pass"
    turned = [Link("g", ("weight w input.grad",), ("weight w input.grad",), transposed=True)]
    assert across(one(tmp_path, GRADIENT), four(tmp_path), turned, 1e-2).verdict == "diverged"
    missing = Link("g", ("nothing output.0",), ("none output.0",))
    found = across(reference, four(tmp_path), [*links, missing], 1e-2)
    assert (found.verdict, found.judged["not judged"]) == ("inconclusive", 1)
    assert "shared tensors: 1 of 2 tensors" in found.reason
    assert any("no tensor none output.0" in why for why in found.unknown)
    with pytest.raises(BadInputError, match=r"no entry names a tensor of .* or of"):
        across(reference, four(tmp_path), [missing], 1e-2)
    (tmp_path / "map.json").write_text('[{"name": "g", "reference": "a b"}]')
    with pytest.raises(BadInputError, match="no map of tensors"):
        read_map(tmp_path / "map.json")


def test_a_wrong_gradient_comes_before_those_that_clipping_scaled_with_it(tmp_path):
    names = [f"w{i}" for i in range(8)]
    right = dump(tmp_path, {0: [update(WEIGHT, GRADIENT, named=n) for n in names]})
    wrong = [update(WEIGHT, GRADIENT * (1.8 if n == "w5" else 0.9), named=n) for n in names]
    found = across(right, dump(tmp_path, {0: wrong})).findings
    assert found[0].verdict.key == "Optimizer.w5.ApplyMomentum.0.forward"
    assert found[0].evidence.startswith("1.8 times")
    assert {f.verdict.key.split(".")[1] for f in found} == set(names)


def test_an_operator_that_is_wrong_comes_before_tensors_that_follow_on_other_ranks(tmp_path):
    def added(number, total):
        key = f"Primitive.Add.{number}.forward"
        x = tensor(WEIGHT * (number + 1))
        return Call(key, "api", "Primitive.Add", number, Phase.FORWARD, [x, x], {}, [tensor(total)])

    calls = [added(i, WEIGHT * 2 * (i + 1)) for i in range(3)]
    wrong = dump(tmp_path, {0: [update(WEIGHT, 2 * GRADIENT)], 1: [*calls, added(3, WEIGHT)]})
    found = across(one(tmp_path), wrong).findings
    assert [f.verdict.key.split(".")[0] for f in found[:2]] == ["Primitive", "Optimizer"]


def test_the_ranks_that_hold_the_other_terms():
    assert terms_of(PARTIAL, 0) == [0, 2]
    assert terms_of(PARTIAL, 3) == [1, 3]
    assert terms_of(PARTIAL, 7) is None


def without_layouts(run):
    def bare(place, value):
        return replace(value, layout=None) if isinstance(value, TensorRecord) else value

    return Dump(
        run.root,
        {
            at: replace(r, calls={k: c.changed(bare, results=True) for k, c in r.calls.items()})
            for at, r in run.ranks.items()
        },
    )


def test_layouts_that_a_dump_lacks_are_read_from_a_file(tmp_path, capsys):
    file = tmp_path / "layouts.json"
    terms = "Primitive.Reduction.*.AllReduce.* input.0"
    file.write_text(json.dumps({terms: to_dict(PARTIAL), "*": to_dict(CUT)}))
    runs = {"one": one(tmp_path), "right": four(tmp_path), "wrong": four(tmp_path, over="tp")}
    for name, written in runs.items():
        msprobe_write.write(without_layouts(written), tmp_path / name)

    def verdict(target, *more):
        code = main(["align", str(tmp_path / "one"), str(tmp_path / target), "--json", "-", *more])
        report = json.loads(capsys.readouterr().out)
        return code, report["first"] and report["first"]["family"]

    assert verdict("right")[0] != 0
    assert verdict("right", "--layouts", str(file)) == (0, None)
    assert verdict("wrong", "--layouts", str(file)) == (1, "wrong group")
    for text in (
        *("{}", "[]", '[["a", "b"]]', '{"a": 3}', '{"a": {"Device Matrix": [2]}}'),
        json.dumps({"*": to_dict(CUT), "Modul.typo*": to_dict(CUT)}),
        json.dumps({"*": {**to_dict(CUT), "Ranklist": [0]}}),
    ):
        file.write_text(text)
        arguments = [str(tmp_path / name) for name in ("one", "right")]
        assert main(["align", *arguments, "--layouts", str(file)]) == 3
        assert "layouts.json" in capsys.readouterr().err
