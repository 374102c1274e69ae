"""Test the fault benchmark: programs, oracle and baselines are right, and the bars are reached."""

import ast
import csv
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.align_faults import baselines, incomplete, suite
from benchmarks.align_faults.engine import Engine, Planted
from benchmarks.align_faults.faults import AREAS, CLASSES
from benchmarks.align_faults.history import BUGS
from benchmarks.align_faults.kernels import KERNELS, Numerics, rounded
from benchmarks.align_faults.layouts import LAYOUTS
from benchmarks.align_faults.model import Model
from benchmarks.align_faults.oracle import seen_on
from benchmarks.align_faults.score import Base, Result, plant, run, sites_of, try_fault
from benchmarks.align_faults.weights import Shape
from telechat_moe.tools.align.across_layouts import across
from telechat_moe.tools.align.bisect import bisect
from telechat_moe.tools.align.dump import msprobe, msprobe_write
from telechat_moe.tools.align.judge.shards import in_shards, is_own

FOLDER = Path(baselines.__file__).parent
ROOT = FOLDER.parents[1]


def test_there_is_enough_of_everything():
    assert len(CLASSES) >= 60
    assert {f.area for f in CLASSES.values()} == set(AREAS)
    assert len(LAYOUTS) >= 24
    assert max(layout.world for layout in LAYOUTS.values()) == 16
    assert len(BUGS) >= 9
    for kind in ("tp", "cp", "pp", "chunks", "ep", "dp"):
        assert any(getattr(layout, kind) > 1 for layout in LAYOUTS.values()), kind
    assert all(any(getattr(x, k) for x in LAYOUTS.values()) for k in ("sp", "extend", "zero"))


MORE = ("tensors", "exchanges", "communication", "weights", "placement")
PROGRAMS = [
    FOLDER / f"{name}.py" for name in ("kernels", "engine", "layouts", "model", "faults", *MORE)
]


@pytest.mark.parametrize(
    "path", [*PROGRAMS, *(FOLDER / "classes").glob("*.py")], ids=lambda p: p.stem
)
def test_the_programs_share_nothing_with_what_judges_them(path):
    tree = ast.parse(path.read_text())
    modules = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    ours = {m for m in modules if m.startswith("telechat_moe")}
    assert ours <= {"telechat_moe.tools.align.dump.records"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_emulated_types_round_as_torch(dtype):
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
    x = np.concatenate([x, x * 1e-6, x * 1e4, np.float32([0, np.inf, -np.inf, 1 + 2**-8])])
    expected = torch.from_numpy(x).to(getattr(torch, dtype)).float().numpy()
    assert np.array_equal(rounded(x, dtype), expected)


# operator: shapes of its operands ("b": mask, "i:n": indices below n), settings
OPERANDS = {
    "Functional.linear": (((5, 4), (3, 4)), {}),
    "Torch.matmul": (((2, 3, 4), (2, 4, 5)), {}),
    "Torch.mul": (((3, 4), (4,)), {}),
    "Torch.add": (((3, 4), (3, 4)), {}),
    "Torch.div": (((3, 4), (3, 1)), {}),
    "Torch.sigmoid": (((3, 4),), {}),
    "Functional.silu": (((3, 4),), {}),
    "NPU.npu_swiglu": (((3, 4),), {}),
    "Functional.rms_norm": (((3, 4), (4,)), {"eps": 1e-6}),
    "Functional.softmax": (((3, 4),), {}),
    "Functional.scaled_dot_product_attention": (((2, 3, 4), (2, 3, 4), (2, 3, 4), "tril"), {"scale": 0.5}),
    "NPU.npu_rotary_mul": (((2, 3, 4), (3, 4), (3, 4)), {}),
    "Functional.embedding": (("i:5", (5, 4)), {}),
    "Torch.sum": (((3, 4),), {"dim": -1, "keepdim": True}),
    "Torch.cat": (((3, 2), (3, 4)), {"dim": -1}),
    "Torch.chunk": (((3, 4),), {"chunks": 2, "dim": -1}),
    "Functional.cross_entropy": (((3, 5), "i:5"), {}),
    "Tensor.transpose": (((3, 4),), {"dim0": 0, "dim1": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERANDS)
def test_backward_is_the_derivative(name):
    """Compare gradients with central differences in float64."""
    rng, (shapes, settings) = np.random.default_rng(1), OPERANDS[name]
    ins = []
    for shape in shapes:
        if shape == "tril":
            ins.append(np.tril(np.ones((3, 3), bool)))
        elif isinstance(shape, str):
            ins.append(rng.integers(0, int(shape[2:]), 3))
        else:
            ins.append(rng.normal(size=shape) + 2 * (name == "Torch.div"))
    exact, kernel = Numerics("float64"), KERNELS[name]
    outs = kernel.forward(ins, settings, exact)
    grads = [rng.normal(size=np.shape(o)) for o in outs]
    found = kernel.backward(ins, settings, outs, grads, exact)
    for i, x in enumerate(ins):
        if x.dtype.kind != "f" or found[i] is None:
            continue
        numeric = np.zeros_like(x)
        for at in np.ndindex(x.shape):
            side = []
            for step in (1e-5, -1e-5):
                moved = [y.copy() for y in ins]
                moved[i][at] += step
                made = kernel.forward(moved, settings, exact)
                side.append(sum(float(np.sum(o * g)) for o, g in zip(made, grads, strict=True)))
            numeric[at] = (side[0] - side[1]) / 2e-5
        assert np.allclose(found[i], numeric, atol=1e-7), i


def norm_of_gradients(layout: str) -> float:
    engine = Engine(Numerics())
    Model(LAYOUTS[layout], Shape(), Numerics(), 3, engine).train()
    calls = engine.dump().ranks[0, 0].calls.values()
    return next(float(c.outputs[0].load()[0]) for c in calls if c.name == "Torch.sqrt")


@pytest.mark.parametrize(
    ("layouts"),
    [
        ("one", "tp2", "tp4", "tp2 sp", "cp2", "cp2 tp2", "ep2 cp2", "tp2 extends ep"),
        ("dp2", "ep2", "ep2 tp2", "ep2 tp2 sp", "tp2 extends ep2", "zero dp2", "zero dp2 tp2"),
        ("dp4", "ep4", "ep2 dp2", "zero dp4 ep2", "dp4 tp2 ep2", "dp4 tp4 sp extends ep"),
    ],
)
def test_layouts_train_the_same_model(layouts):
    norms = [norm_of_gradients(name) for name in layouts]
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-5)


@pytest.mark.parametrize("name", ["torch_tensor_mix", "mindspore_tensor_mix"])
def test_the_rules_of_msprobe_against_its_own_table(name, tmp_path):
    from dumps import FIXTURES, unpack

    golden = msprobe.read(unpack(name, tmp_path)).ranks[0, 0]
    target = msprobe.read(unpack(f"{name}_disturbed", tmp_path)).ranks[0, 0]
    with (FIXTURES / f"{name}.compare.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    known = {row["NPU Name"]: row for row in rows}
    checked = 0
    for key, call in target.calls.items():
        mine = [r for n, r in known.items() if n.startswith(f"{key}.")]
        inputs, outputs = baselines.pairs(call, golden.calls[key])
        said = {r["Result"] for r in mine}
        if mine and call.kind == "api":
            worst = "error" if "error" in said else "warning" if "warning" in said else "pass"
            assert baselines.tensor_rule(call.name, inputs, outputs) == worst, key
        for place, tensor in call.tensors():
            row = known.get(f"{key}.{place}")
            if row is None or "N/A" in row["Cosine"] or "unsupported" in row["Cosine"]:
                continue
            a, b = tensor.load(), dict(golden.calls[key].tensors())[place].load()
            if a.ndim == 0:
                continue
            assert baselines.cosine(a, b) == pytest.approx(float(row["Cosine"]), abs=1e-6)
            share = float(row["One Thousandth Err Ratio"])
            assert baselines.thousandth(a, b) == pytest.approx(share, abs=1e-6)
            checked += 1
    assert checked > 20


def test_msprobe_rules_by_hand():
    x = np.linspace(1, 2, 20)
    right, off = [(x, x, "float32")], [(x * 1.01, x, "float32")]
    assert baselines.tensor_rule("Torch.mul", right, right) == "pass"
    assert baselines.tensor_rule("Torch.mul", right, off) == "error"
    assert baselines.tensor_rule("Torch.mul", off, off) == "pass"  # inputs differ already
    turned = [(np.roll(np.eye(20)[0], 1), np.eye(20)[0], "float32")]
    assert baselines.tensor_rule("Torch.mul", right, turned) == "warning"
    assert baselines.tensor_rule("Torch.mul", right, [(x * np.inf, x, "float32")]) == "error"
    assert not baselines.statistics_differ([(np.roll(x, 3), x, "float32")])
    assert baselines.statistics_differ([(1.6 * x, x, "float32")])
    assert baselines.not_close(off)
    assert not baselines.not_close(right)


@pytest.mark.parametrize(("size", "seen"), [(1e-9, []), (2e-7, []), (1e-3, [0])])
def test_the_oracle_sees_what_is_beyond_noise(size, seen):
    site = next(s for s in sites_of(Base("one")) if s.op == "linear")
    planted = Planted(site, "result", lambda outs, *_: [(outs[0] * (1 + size)).astype(np.float32)])
    assert run(Base("one"), planted).applied
    assert seen_on(planted) == seen


def test_a_fault_touches_one_call():
    site = next(s for s in sites_of(Base("tp2")) if s.op == "silu" or s.op == "npu_swiglu")
    planted = Planted(site, "result", lambda outs, *_: [2 * outs[0]])
    one, two = run(Base("tp2")).dump(), run(Base("tp2"), planted).dump()
    wrong = []
    for place, rank in one.ranks.items():
        for key, call in rank.calls.items():
            other = dict(two.ranks[place].calls[key].tensors())
            same = {p: np.array_equal(t.load(), other[p].load()) for p, t in call.tensors()}
            ins = all(v for p, v in same.items() if p.startswith("input"))
            moved = ins and not all(same.values()) and key.endswith("forward")
            if moved and "Distributed" not in key:
                wrong.append((place[1], key))
    assert wrong == [(site.ranks[0], site.key)]


@pytest.mark.slow
@pytest.mark.parametrize("number", [3, 7, 95, 371, 607, 1563, 2023, 2055])
def test_right_runs_of_two_layouts_pass_though_tokens_go_elsewhere(number):
    """Test all kinds of parallelism, sizes of dropless exchanges, and gradients below the rounding of their sum."""
    names = ["dp2", "tp2 sp"] if number < 10 else list(LAYOUTS)
    pair = suite.judge_pair(*suite.pair_of(names, 0, number))
    assert pair.reference.ranks != pair.target.ranks
    assert (pair.flips > 0, pair.verdict, pair.unknown) == (True, "pass", 0)
    assert pair.judged > 100


@pytest.mark.slow
@pytest.mark.parametrize("number", [163, 763, 775, 1447])
def test_right_runs_of_two_layouts_pass(number):
    """Test rows of experts after other choices, an expert of a rank with other data, zeros, rows of half a sequence."""
    pair = suite.judge_pair(*suite.pair_of(list(LAYOUTS), 0, number))
    assert (pair.verdict, pair.unknown) == ("pass", 0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [2139, 2163])
def test_no_limit_follows_from_deviations_that_overflow(number):
    """Test second steps in narrow types, whose weights follow from Adam's division by almost nothing."""
    pair = suite.judge_pair(*suite.pair_of(list(LAYOUTS), 0, number))
    assert (pair.target.steps, pair.flips > 0, pair.verdict) == (2, True, "pass")


@pytest.mark.slow
def test_a_shard_is_put_together_from_the_parts_that_are_most_like_it():
    """Test token ids of context parallelism, whose two halves are among four shards of the sequence."""
    pair = suite.judge_pair(*suite.pair_of(list(LAYOUTS), 0, 2107))
    assert (pair.reference.layout, pair.target.layout, pair.verdict) == ("tp4 sp", "cp2", "pass")


@pytest.mark.slow
@pytest.mark.parametrize("number", [7, 2023])
def test_another_setting_shows_though_tokens_go_elsewhere(number):
    """Test an eps of 3e-3 in place of 1e-6, with which every operator computes correctly."""
    names = ["dp2", "tp2 sp"] if number < 10 else list(LAYOUTS)
    reference, target = suite.pair_of(names, 0, number)
    engine = Engine(Numerics(target.dtype, target.order))
    shape = replace(target.shape, eps=3e-3)
    Model(target.ranks, shape, engine.numerics, target.seed, engine).train()
    outcome = across(run(reference).dump(), engine.dump())
    assert outcome.verdict == "diverged"


def test_a_fault_shows_in_another_layout_too():
    """Test ranks that keep their own gradients; the reference has one device and twice the micro-batches."""
    base, planted = plant(CLASSES["gradient not reduced"], ["dp2"], 0)
    unsharded = replace(base, layout="one", micro=2, layers=base.shape.layers)
    outcome = across(run(unsharded).dump(), run(base, planted).dump())
    assert outcome.verdict == "diverged"
    assert (outcome.findings[0].verdict.key, outcome.ranks) == (planted.site.key, [0, 1])
    assert outcome.findings[0].family == "missing reduction"


@pytest.mark.slow
def test_a_long_run_in_parts():
    few = {"layouts": "one", "classes": "eps of Adam", "history": False}
    whole, *parts = (suite.run_suite(n, 0, first=k, **few) for n, k in ((2, 0), (1, 0), (1, 1)))
    assert sorted(r.key for p in parts for r in p.faults) == sorted(r.key for r in whole.faults)


def family(change):
    site = next(s for s in sites_of(Base("one")) if s.op == "linear")
    planted = Planted(site, "result", lambda outs, *_: [change(outs[0].copy())])
    return bisect(run(Base("one")).dump(), run(Base("one"), planted).dump()).findings[0].family


def test_residuals_that_no_class_makes():
    rng = np.random.default_rng(0)
    assert family(np.negative) == "sign"
    assert family(lambda y: y + rng.normal(size=y.shape[-1]).astype(np.float32)) == "offset"
    assert family(lambda y: y + 0.1 * rng.normal(size=y.shape).astype(np.float32)) == "unknown"
    assert family(lambda y: np.roll(y, 1)) == "permutation"


@pytest.mark.slow
def test_dumps_on_disk_are_judged_as_those_in_memory(tmp_path):
    base, planted = plant(CLASSES["gradient reduced twice"], ["ep2 dp2"], 1)
    target = run(base, planted).dump()
    for name, dump in (("golden", run(base).dump()), ("wrong", target)):
        msprobe_write.write(dump, tmp_path / name)
    here = bisect(run(base).dump(), target)
    there = bisect(msprobe.read(tmp_path / "golden"), msprobe.read(tmp_path / "wrong"))
    assert here.as_json()["first"] == there.as_json()["first"]
    assert (there.ranks, there.findings[0].family) == (here.ranks, "doubled reduction")
    assert there.as_json()["first"]["phase"] == "reduction"


@pytest.mark.slow
def test_the_bars_hold_on_a_part():
    """Test some of the long suite on small layouts; `test_the_whole_benchmark` runs all of it."""
    report = suite.run_suite(30, 6, layouts="[dt]p2", seed=7, history=False)
    assert report.failures() == []
    assert report.flips >= suite.FLIPS
    counts = suite.scored(report)
    assert all(counts["align bisect"]["exact"] >= c["exact"] for c in counts.values())


@pytest.mark.parametrize("bug", BUGS[:3], ids=lambda b: b.source)
def test_bugs_of_history(bug):
    bug, found, changed = suite._bug(bug, 0)
    assert (found.detected, found.exact, found.refires) == (True, True, True), found.said
    assert not (bug.quiet and changed)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS[3:], ids=lambda b: b.source)
def test_more_bugs_of_history(bug):
    test_bugs_of_history(bug)


@pytest.mark.slow
def test_the_whole_benchmark():
    """``python -m benchmarks.align_faults --faults 3000 --clean 2000 --jobs 2``; an hour on two cores."""
    report = suite.run_suite(3000, 2000, jobs=2)
    assert report.failures() == []
    assert min(Counter(r.name for r in report.faults).values()) >= 15


def test_the_command(tmp_path):
    out, page = tmp_path / "report.json", tmp_path / "report.html"
    command = [sys.executable, "-m", "benchmarks.align_faults"]
    options = ["--faults", "3", "--clean", "0", "--classes", "optimizer", "--layouts", "one"]
    found = subprocess.run(
        [*command, *options, "--no-history", "--json", str(out), "--html", str(page)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert found.returncode == 0, found.stderr
    report = json.loads(out.read_text())
    assert (report["verdict"], report["faults"], report["shares"]["detected"]) == ("pass", 3, 1.0)
    text = page.read_text()
    assert "Fault benchmark" in text
    assert "://" not in text.replace("http://www.w3.org", "")
    wrong = subprocess.run(
        [*command, "--classes", "no such"], capture_output=True, text=True, cwd=ROOT
    )
    assert (wrong.returncode, "no classes" in wrong.stderr) == (2, True)


def test_a_miss_is_counted():
    """Test that a fault that is not detected fails the bars."""
    fault = CLASSES["doubled"]
    base, planted = plant(fault, ["one"], 0)
    result = try_fault(fault, base, planted)
    assert isinstance(result, Result)
    assert suite.Report([result]).failures() == []
    result.detected = False
    assert any("detected" in f for f in suite.Report([result]).failures())


@pytest.mark.parametrize("noise", ["sums", "fusion", "layout"])
def test_dumps_that_cannot_be_recomputed(noise):
    """Test right pairs, none of which may be called wrong, and faults that only the other run shows."""
    for dumps in ("vendor", "statistics"):
        right = [incomplete.right(dumps, number, 0, noise)[0] for number in range(2)]
        assert "diverged" not in right, dumps
    found = [one for number in range(3) if (one := incomplete.wrong("vendor", number, 0, noise))]
    assert len(found) >= 2
    assert all(others.keys() == {*baselines.METHODS} for *_, others in found)
    if noise == "sums":
        assert [exact for _, exact, _ in found].count(True) >= 2


@pytest.mark.parametrize(
    ("dumps", "number"),
    [
        ("complete", 0),  # tokens shifted
        ("complete", 24),  # weights of another seed
        ("weights", 38),  # a doubled gradient is sent
        ("vendor", 33),  # of the sum of two ranks' terms, which one rank makes at once
        ("vendor", 37),  # a bit of what an operator was given
    ],
)
def test_a_call_is_named_by_a_reference_of_another_layout(dumps, number):
    found = incomplete.wrong(dumps, number, 0, "layout")
    assert found is not None
    assert found[:2] == ("diverged", True)


@pytest.mark.parametrize("number", [26, 29])
def test_the_norm_of_a_shard_is_no_term_of_the_norm(number):
    """Test right pairs in which it is near one by chance."""
    assert incomplete.right("vendor", number, 0, "layout")[0] == "inconclusive"


@pytest.mark.parametrize("layout", ["dp2", "tp2", "cp2 tp2", "zero dp2"])
def test_a_reference_in_the_shards_of_another_layout(layout):
    """Test in right runs that what takes the reference's shards makes them, too."""
    pair = suite.in_layout(Base(layout, seed=4), "one")
    for reference, target in (pair, pair[::-1]):
        one, two = run(reference).dump(), run(target).dump()
        shards, known, far = in_shards(one, two), 0, list[str]()
        for at, dump in two.ranks.items():
            for key, call in dump.calls.items():
                golden = dict(shards.ranks[at].calls[key].tensors())
                known += not is_own(shards.ranks[at].calls[key], call)
                given = all(_near(t, golden[place]) for place, t in call.given())
                made = all(_near(t, golden[place], 1e-3) for place, t in call.made())
                far += [] if made or not given else [key]
        assert not far
        assert known > 0.5 * sum(len(dump.calls) for dump in two.ranks.values())


def _near(one, other, limit=1e-5):
    x, y = (t.load().astype(np.float64) for t in (one, other))
    size = float(np.abs(x[np.isfinite(x)]).max(initial=0.0))
    return np.allclose(x, y, rtol=limit, atol=limit * size)


def test_a_lost_operator_is_no_fused_one():
    """Test a call that the target lacks, among operators that nobody knows: nothing in the target replaces it."""
    base = Base("one")
    one, two = (incomplete.less(run(base).dump(), "vendor") for _ in range(2))
    calls = two.ranks[0, 0].calls
    key = next(k for k in calls if "swiglu" in k and k.endswith("forward"))
    del calls[key]
    outcome = bisect(one, two)
    assert (outcome.verdict, outcome.findings[0].verdict.key) == ("diverged", key)
