"""Dumps judged by a published standard: what is said of each tensor, legal choices, files without values, memory."""

import json
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import dumps as recorded_dumps
import numpy as np
import pytest
from test_across import GRADIENT, four, one

from telechat_moe.cli import main
from telechat_moe.ops import fingerprint
from telechat_moe.tools.align.across_layouts import across
from telechat_moe.tools.align.bisect import bisect
from telechat_moe.tools.align.compare.profiles import NAMES, read
from telechat_moe.tools.align.compare.tensors import CHUNK
from telechat_moe.tools.align.dump import msprobe_write, value_files
from telechat_moe.tools.align.dump.records import (
    Call,
    Dump,
    Phase,
    RankDump,
    Scalar,
    Stats,
    TensorRecord,
)
from telechat_moe.tools.align.judge.standard import Standard
from telechat_moe.tools.align.maps.links import Link

RNG = np.random.default_rng(0)
X = RNG.standard_normal((12, 20)).astype(np.float32)
IDS = np.arange(12, dtype=np.int64)


def tensor(x, dtype=None, **more):
    x = np.asarray(x)
    return TensorRecord(dtype or x.dtype.name, x.shape, read=lambda: x, **more)


def call(name, inputs=(), outputs=(), index=0, **kwargs):
    key = f"{name}.{index}.forward"
    return Call(key, "api", name, index, Phase.FORWARD, list(inputs), kwargs, list(outputs))


def dump(*calls, rank=0, step=0):
    found = RankDump(step, rank, "mindspore", "tensor", "L1", {c.key: c for c in calls})
    return Dump(Path("run"), {(step, rank): found})


def run(x=X, ids=IDS, **more):
    """Return a dump of three calls."""
    y = np.tanh(x.astype(np.float64)).astype(x.dtype)
    return dump(
        call("Mint.tanh", [tensor(x)], [tensor(y)]),
        call("Mint.sum", [tensor(y)], [tensor(y.sum())], dim=Scalar("int", more.get("dim", -1))),
        call("Mint.select", [tensor(y), tensor(ids)], [tensor(y[ids % 12])]),
    )


def compare(reference, target, p, third=None):
    """Return the outcome, and what the standard says of each tensor, by call and place."""
    standard = Standard(p, reference, target, third)
    out = bisect(reference, target, standard=standard)
    return out, {(t.verdict.key, t.verdict.place): t.verdict for t in standard.tensors}, standard


def statuses(verdicts):
    return {place: v.status for place, v in verdicts.items()}


def only(verdicts, status):
    return [place for place, v in verdicts.items() if v.status == status]


@pytest.mark.parametrize("name", NAMES)
def test_equal_dumps_meet_every_standard(name):
    third = run() if name.startswith("ascend") else None
    out, said, standard = compare(run(), run(), read(name), third)
    assert (out.verdict, {*statuses(said).values()}, len(said)) == ("pass", {"pass"}, 7)
    assert standard.as_json()["flips"] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_tensor_is_named_in_every_standard(name):
    x = X.copy()
    x[3, 4] += 3.0
    wrong = dump(call("Mint.tanh", [tensor(x)], [tensor(np.tanh(X))]))
    right = dump(call("Mint.tanh", [tensor(X)], [tensor(np.tanh(X))]))
    third = dump(call("Mint.tanh", [tensor(X * np.float32(1 + 1e-6))], [tensor(np.tanh(X))]))
    third = third if name.startswith("ascend") else None
    out, said, standard = compare(right, wrong, read(name), third)
    assert out.verdict == "diverged"
    assert only(said, "diverged") == [("Mint.tanh.0.forward", "input.0")]
    first = standard.as_json()["tensors"][0]
    assert (first["operator"], first["tensor"]) == ("Mint.tanh.0.forward", "input.0")
    assert first["observed_over_limit"] is None or first["observed_over_limit"] > 1
    assert said["Mint.tanh.0.forward", "input.0"].element in ((3, 4), ())
    assert out.findings[0].verdict.key == "Mint.tanh.0.forward"
    assert (out.findings[0].family, out.findings[0].evidence) == ("beyond the standard", name)


def test_worst_come_first():
    sizes = [1e-3, 1e-1, 1e-2, 0.0]
    calls = [
        [call("Mint.mul", [], [tensor(X * np.float32(1 + s))], i) for i, s in enumerate(by)]
        for by in ([0.0] * 4, sizes)
    ]
    *_, standard = compare(dump(*calls[0]), dump(*calls[1]), read("close"))
    rows = standard.as_json()["tensors"]
    assert [r["operator"][9] for r in rows] == ["1", "2", "0", "3"]
    assert [r["status"] for r in rows] == ["diverged"] * 3 + ["pass"]


def test_chunks_end_anywhere_and_any_order_of_memory():
    """The wrong element is the last of a long tensor, in C order, Fortran order, strided, complex."""
    n = 3 * CHUNK + 5
    flat = RNG.standard_normal(n).astype(np.float32)
    wide = RNG.standard_normal((67, 401)).astype(np.float32)
    fortran = np.asfortranarray(wide)
    strided = np.lib.stride_tricks.as_strided(wide, (67, 200), (401 * 4, 8))
    z = (wide[:, :8] + 1j * wide[:, 8:16]).astype(np.complex64)
    for golden in (flat, fortran, strided, z, np.float32(2.0), wide[:, ::-1]):
        target = np.array(golden)
        last = tuple(k - 1 for k in target.shape)
        target[last] += 1 if golden.dtype.kind != "c" else 1j
        for name in ("mixed", "bitwise", "ulp"):
            if golden.dtype.kind == "c" and name != "bitwise":
                continue
            made = [dump(call("Mint.x", [], [tensor(x)])) for x in (golden, target)]
            _, said, _ = compare(*made, read(name))
            (v,) = said.values()
            assert (v.status, v.elements) == ("diverged", target.size)
            assert v.element == last or (name == "mixed" and v.element == ())


def test_shapes_types_and_what_one_dump_lacks():
    empty = np.zeros((0, 4), np.float32)
    golden = dump(
        call("Mint.a", [], [tensor(X)]),
        call("Mint.b", [], [tensor(X)]),
        call("Mint.c", [], [tensor(X), tensor(X)]),
        call("Mint.d", [], [tensor(X)]),
        call("Mint.e", [], [tensor(empty)]),
        call("Mint.f", [], [tensor(IDS)]),
    )
    target = dump(
        call("Mint.a", [], [tensor(X[:6])]),
        call("Mint.b", [], [tensor(X.astype(np.float16))]),
        call("Mint.c", [], [tensor(X)]),
        call("Mint.e", [], [tensor(empty)]),
        call("Mint.f", [], [tensor(IDS.astype(np.float32))]),
        call("Mint.g", [], [tensor(X)]),
    )
    out, verdicts, _ = compare(golden, target, read("mixed"))
    said = {(key[5], place): (v.status, v.reason) for (key, place), v in verdicts.items()}
    assert said["a", "output.0"] == ("diverged", "shape [6, 20], reference [12, 20]")
    assert said["b", "output.0"][0] == "pass"  # float16 against float32, by float16's line
    assert said["c", "output.0"][0] == "pass"
    assert said["c", "output.1"] == ("not judged", "the target has no tensor there")
    assert said["e", "output.0"][0] == "pass"
    assert said["f", "output.0"] == ("not judged", "type float32, reference int64")
    for lacking in ("target", "reference"):
        assert out.unknown[f"the {lacking} does not run this call"] == 1
    _, strict, _ = compare(golden, target, read("bitwise"))
    v = strict["Mint.b.0.forward", "output.0"]
    assert (v.status, v.reason) == ("diverged", "type float16, reference float32")


def test_missing_calls_are_no_pass():
    golden = dump(call("Mint.a", [], [tensor(X)]), call("Mint.d", [], [tensor(X)]))
    target = dump(call("Mint.a", [], [tensor(X)]))
    assert compare(golden, target, read("mixed"))[0].verdict == "inconclusive"


def test_nothing_judged_is_no_pass():
    empty = dump(call("Mint.a", [], [TensorRecord("float32", (3,))]))
    out, *_ = compare(empty, empty, read("mixed"))
    assert (out.verdict, out.reason) == ("inconclusive", "not a single tensor could be judged")
    assert compare(run(), Dump(Path("x"), {}), read("mixed"))[0].verdict == "inconclusive"


def test_a_call_more_shifts_no_other():
    more = dump(
        call("Mint.mul", [], [tensor(X * 0)], 0),
        call("Mint.add", [], [tensor(X)], 0),
        call("Mint.mul", [], [tensor(X)], 1),
    )
    less = dump(call("Mint.add", [], [tensor(X)], 0), call("Mint.mul", [], [tensor(X)], 0))
    _, said, _ = compare(less, more, read("bitwise"))
    assert only(said, "pass") == [
        ("Mint.add.0.forward", "output.0"),
        ("Mint.mul.0.forward", "output.0"),
    ]
    assert not only(said, "diverged")


def test_types_without_a_line_are_not_judged():
    x = X.astype(np.float64)
    out, said, _ = compare(run(x), run(x), read("mixed"))
    assert len(only(said, "not judged")) == 6
    assert "mixed has no line for type float64, reference float64" in out.unknown


def test_a_third_run_may_lack_a_tensor():
    third = dump(call("Mint.tanh", [tensor(X)], [tensor(np.tanh(X))]))
    _, said, standard = compare(run(), run(), read("ascend-l0"), third)
    assert len(only(said, "pass")) == 3
    lacking = [v.reason for v in said.values() if v.status == "not judged"]
    assert lacking == ["the third run has no values of this tensor"] * 4
    assert "requires 5,000 cases" in standard.as_json()["notes"][0]


def test_a_standard_and_its_options_are_one_word():
    said = "numpy.isclose, rtol 0.001, atol 0"
    assert read("close:rtol=1e-3,atol=0").source == said
    assert read("ecosystem:as=hf32").kind == "tfloat32"
    assert not read("torch:equal_nan").nan_differs
    assert read("ulp:max=2").source == "at most 2 ULP of the target's type"


# ----------------------------------------------------------------------------- choices


def routed(x, wrong=None, after=None):
    """Return a dump of a router whose choice its experts follow: top-k, a product with what was chosen, a sum."""
    w = np.random.default_rng(7).standard_normal((20, 8)).astype(np.float32)
    scores = (x.astype(np.float64) @ w).astype(np.float32)
    index = np.argsort(-scores, 1, kind="stable")[:, :2]
    index = index if wrong is None else wrong(index)
    top = np.take_along_axis(scores, index, 1)
    weights = (1.0 + index.sum(1, keepdims=True)).astype(np.float32)
    y = (x * weights).astype(np.float32)
    y = y if after is None else after(y)
    z = (y + y).astype(np.float32)
    return dump(
        call("Torch.matmul", [tensor(x), tensor(w)], [tensor(scores)]),
        call("Torch.topk", [tensor(scores), Scalar("int", 2)], [tensor(top), tensor(index)], dim=Scalar("int", -1)),
        call("Torch.mul", [tensor(x), tensor(weights)], [tensor(y)]),
        call("Torch.add", [tensor(y), tensor(y)], [tensor(z)]),
        call("Functional.my_attention", [tensor(z)], [tensor(z)]),
    )  # fmt: skip


def near_tie():
    """Return inputs of two runs that differ by 1e-3, and the one row that is routed otherwise."""
    for seed in range(1000):
        rng = np.random.default_rng(seed)
        a = rng.standard_normal((64, 20)).astype(np.float32)
        b = (a * (1 + 1e-3 * rng.standard_normal(a.shape))).astype(np.float32)
        one, other = (dict(routed(x).ranks[0, 0].calls["Torch.topk.0.forward"].made())["output.1"].load() for x in (a, b))  # fmt: skip
        rows = np.flatnonzero((one != other).any(1))
        if len(rows) == 1 and {*one[rows[0]]} != {*other[rows[0]]}:
            return a, b, int(rows[0])
    raise AssertionError


CLOSE = read("close:rtol=0.02,atol=0.1")


def test_after_a_legal_choice_replay_judges_what_fails():
    a, b, _ = near_tie()
    out, said, standard = compare(routed(a), routed(b), CLOSE)
    assert out.verdict == "inconclusive"  # nobody knows this function
    assert not only(said, "diverged")
    assert only(said, "not judged") == [("Functional.my_attention.0.forward", "output.0")]
    assert [key for *_, key in standard.flips] == ["Torch.topk.0.forward"]
    assert said["Torch.add.0.forward", "output.0"].status == "pass"


def test_faults_after_a_legal_choice_are_found():
    a, b, row = near_tie()

    def wrong(y):
        y = y.copy()
        y[(row + 1) % len(y)] *= 1.1
        return y

    out, said, _ = compare(routed(a), routed(b, after=wrong), CLOSE)
    assert out.verdict == "diverged"
    assert only(said, "diverged") == [("Torch.mul.0.forward", "output.0")]
    assert said["Torch.mul.0.forward", "output.0"].element[0] == (row + 1) % 64


def test_a_choice_that_its_own_scores_do_not_give_diverges():
    a, b, _ = near_tie()
    for x in (a, b):
        out, said, standard = compare(routed(a), routed(x, wrong=lambda i: np.roll(i, 1, 0)), CLOSE)
        assert out.verdict == "diverged"
        assert out.findings[0].verdict.key == "Torch.topk.0.forward"
        assert said["Torch.topk.0.forward", "output.1"].status == "diverged"
        assert not standard.flips


def test_without_other_choices_nothing_is_excused():
    out, said, _ = compare(routed(X), routed(X, after=lambda y: y * np.float32(1.1)), CLOSE)
    assert out.verdict == "diverged"
    assert ("Torch.add.0.forward", "output.0") in only(said, "diverged")
    assert out.findings[0].verdict.key == "Torch.mul.0.forward"


@pytest.mark.parametrize("kind", ["argmax", "argmin", "sort", "expert takes tokens", "fused"])
def test_other_choices(kind):
    """No formula is known for them; the reference shows what they choose by."""
    golden = np.random.default_rng(1).standard_normal((16, 6)).astype(np.float32)
    golden[3, :2] = golden[3].max() + np.float32([1.0, 0.9999])
    golden[4, :2] = golden[4].min() - np.float32([0.9999, 1.0])
    golden[7:9, 2] = golden[:, 2].max() + np.float32([1.0, 0.9999])
    target = golden.copy()
    target[3, [0, 1]] = golden[3, [1, 0]]
    target[4, [0, 1]] = golden[4, [1, 0]]
    target[7:9, 2] = golden[[8, 7], 2]
    pick = {
        "argmax": lambda x: x.argmax(1),
        "argmin": lambda x: x.argmin(1),
        "sort": lambda x: np.argsort(x, 1, kind="stable"),
        "expert takes tokens": lambda x: np.argsort(-x, 0, kind="stable")[:4],
        "fused": lambda x: np.argsort(-x, 1, kind="stable")[:, :2],
    }[kind]
    name = {"fused": "Primitive.router.MyGating"}.get(kind, "Torch.my_choice")
    loose = read("close:rtol=1e-3,atol=0.0")

    def chosen(x, by):
        return dump(call(name, [tensor(x)], [tensor(pick(by))]))

    out, said, standard = compare(chosen(golden, golden), chosen(target, target), loose)
    assert (out.verdict, only(said, "diverged"), len(standard.flips)) == ("pass", [], 1)
    out, said, standard = compare(chosen(golden, golden), chosen(golden, target), loose)
    assert (out.verdict, len(standard.flips)) == ("inconclusive", 0)


@pytest.mark.torch
def test_right_runs_in_bfloat16_choose_legally_and_wrong_ones_do_not():
    torch = pytest.importorskip("torch")
    from planted import result
    from planted import run as trained

    # rtol and atol wide enough for what bfloat16 makes of the whole model
    p, legal = read("close:rtol=0.05,atol=0.2"), 0
    for seed in (1, 2, 3):
        golden, target = trained(seed=seed), trained(seed=seed, dtype=torch.bfloat16)
        out, said, standard = compare(golden, target, p)
        assert only(said, "diverged") == []
        assert out.verdict == ("inconclusive" if out.coverage.lacks() else "pass")
        legal += len(standard.flips)
    assert legal >= 2

    def second_best(found):
        values, index = found
        index = index.clone()
        index[4, 1] = (index[4].max() + 1) % 8 if (index[4].max() + 1) % 8 not in index[4] else 7
        return values, index

    out, said, _ = compare(trained(seed=3), trained(("topk", 0, result(second_best)), seed=3), p)
    assert out.verdict == "diverged"
    assert "topk" in out.findings[0].verdict.key


# ----------------------------------------------------------------------------- other calls


GRAD = Link("gradient", ("weight w input.grad",), ("Optimizer.w.* input.grad",))


@pytest.mark.parametrize("factor", [1 + 1e-6, 1 + 5e-5])
def test_whole_tensors_of_another_layout_are_judged_as_numpy_does(tmp_path, factor):
    reference, target = one(tmp_path), four(tmp_path, factor=factor)
    p = read("close:rtol=1e-5,atol=1e-7")
    standard = Standard(p, reference, target)
    outcome = across(reference, target, [GRAD], standard=standard)
    right = np.allclose(GRADIENT * np.float32(factor), GRADIENT, rtol=1e-5, atol=1e-7)
    v = standard.tensors[0].verdict
    assert len(standard.tensors) == 1
    assert (v.status == "pass", v.elements) == (right, 48)  # the whole tensor, of four halves
    assert right or outcome.verdict == "diverged"


# ----------------------------------------------------------------------------- without values


def stripped(source, **keep):
    """Return a dump without values."""

    def strip(record):
        return replace(record, read=None, path=None, **{k: f(record) for k, f in keep.items()})

    ranks = {}
    for key, rank in source.ranks.items():
        calls = {
            k: replace(
                c,
                inputs=[strip(v) if isinstance(v, TensorRecord) else v for v in c.inputs],
                outputs=[strip(v) for v in c.outputs],
            )
            for k, c in rank.calls.items()
        }
        ranks[key] = replace(rank, calls=calls)
    return Dump(source.root, ranks)


def as_stats(record):
    x = record.load().astype(np.float64)
    return Stats(x.max(), x.min(), x.mean(), float(np.linalg.norm(x)))


def test_without_values_only_equal_bits_are_known():
    """A standard needs values; equal checksums or fingerprints show that all of them agree, statistics never."""
    stats = [stripped(run(), stats=as_stats) for _ in range(2)]
    out, said, _ = compare(*stats, read("mixed"))
    assert (out.verdict, {*statuses(said).values()}) == ("inconclusive", {"not judged"})

    def prints(record):
        return fingerprint.of(record.load()).to_bytes()

    marked = stripped(run(), fingerprint=prints)
    out, said, _ = compare(marked, run(), read("mixed"))
    assert (out.verdict, {*statuses(said).values()}) == ("pass", {"pass"})
    x = X.copy()
    x[0, 0] = np.nextafter(x[0, 0], np.float32(9))
    moved = stripped(run(x), fingerprint=prints)
    assert ("Mint.tanh.0.forward", "input.0") in only(
        compare(marked, moved, read("torch"))[1], "not judged"
    )
    assert (
        compare(marked, marked, read("torch"))[0].verdict == "inconclusive"
    )  # NaN are not equal to themselves


def test_fingerprints_show_faults_to_bisect_without_a_standard():
    def prints(record):
        return fingerprint.of(record.load()).to_bytes()

    def known(y):
        return stripped(dump(call("Mint.my_own", [tensor(X)], [tensor(y)])), fingerprint=prints)

    assert bisect(known(X), known(X)).verdict == "pass"
    assert bisect(known(X), known(X * np.float32(1.1))).verdict == "diverged"


def test_real_dumps_of_statistics_and_checksums(tmp_path):
    for name in ("torch_statistics_L1", "mindspore_statistics_mix"):
        root = str(recorded_dumps.unpack(name, tmp_path))
        assert main(["align", root, root, "--standard", "mixed"]) == 4
    for name in ("torch_md5_mix", "mindspore_md5_L1"):
        root = recorded_dumps.unpack(name, tmp_path)
        assert main(["align", str(root), str(root), "--standard", "bitwise"]) == 0
        changed = tmp_path / f"{name}_changed"
        shutil.copytree(root, changed)
        path = next(changed.rglob("dump.json"))
        content = json.loads(path.read_text())
        entry = next(t for t in recorded_dumps.tensors(content["data"]) if t.get("md5"))
        entry["md5"] = "00000000" if entry["md5"] != "00000000" else "11111111"
        path.write_text(json.dumps(content))
        assert main(["align", str(root), str(changed), "--standard", "bitwise"]) == 1


# ----------------------------------------------------------------------------- the verb


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trees")
    return {n: recorded_dumps.unpack(n, folder) for n in recorded_dumps.NAMES if "tensor_mix" in n}


@pytest.mark.parametrize("framework", ["torch", "mindspore"])
@pytest.mark.parametrize("name", NAMES)
def test_real_dumps(framework, name, trees, capsys):
    golden, other = trees[f"{framework}_tensor_mix"], trees[f"{framework}_tensor_mix_disturbed"]
    third = ["--benchmark", str(golden)] if name.startswith("ascend") else []
    base = ["align", str(golden)]
    zeros = (name, framework) == ("mindformers", "torch")  # two tensors are all zero: no cosine
    assert main([*base, str(golden), "--standard", name, *third]) == (4 if zeros else 0)
    assert zeros or f"meet {name}; 0 were not judged" in capsys.readouterr().out
    loose = f"{name}:equal_nan" if name in ("torch", "close") else name
    capsys.readouterr()
    code = main([*base, str(other), "--standard", loose, *third, "--json", "-"])
    report = json.loads(capsys.readouterr().out)
    # MindFormers' limits are so wide that a disturbance of 0.1 % passes
    assert (code, report["verdict"]) == (
        (4, "inconclusive") if zeros else (0, "pass") if name == "mindformers" else (1, "diverged")
    )
    rows = report["standard"]["tensors"]
    wrong = [r for r in rows if r["status"] == "diverged"]
    assert rows[: len(wrong)] == wrong
    assert all(
        r["observed_over_limit"] is None or r["observed_over_limit"] >= 1 or "1 - " in r["reason"]
        for r in wrong
    )


def test_junit_page_and_table(trees, tmp_path, capsys):
    golden, other = (str(trees[f"torch_tensor_mix{n}"]) for n in ("", "_disturbed"))
    cases, page = tmp_path / "cases.xml", tmp_path / "page.html"
    given = ["--junit", str(cases), "--html", str(page), "--standard", "mixed"]
    assert main(["align", golden, other, *given]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "beyond the standard: mixed" in out
    assert "Tensors by mixed" in page.read_text()
    suite = ET.parse(cases).getroot()
    assert int(suite.get("failures")) == len(suite.findall("testcase/failure")) > 0


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (["--standard", "nothing"], 2, "unknown"),
        (["--standard", "ascend-l1"], 2, "third run"),
        (["--benchmark", "GOLDEN", "--standard", "mixed"], 2, "no --benchmark"),
        (["--benchmark", "GOLDEN"], 2, "--benchmark is for --standard ascend-l0"),
        (["--standard", "mixed:rtol=1"], 2, "no option rtol"),
        (["--standard", "close:rtol=x"], 2, "needs a number"),
        (["--standard", "close:rtol=-1"], 2, "needs a number"),
        (["--standard", "close:tol=1"], 2, "unknown option 'tol=1'"),
        (["--standard", "mixed:as=int8"], 2, "expected hf32"),
        (["--standard", "close", "--rtol", "1"], 2, "close:rtol=X"),
        (["--benchmark", "missing", "--standard", "ascend-l0"], 3, "missing"),
    ],
)
def test_bad_usage(more, code, said, trees, capsys):
    golden = str(trees["torch_tensor_mix"])
    assert main(["align", golden, golden, *(golden if m == "GOLDEN" else m for m in more)]) == code
    assert said in capsys.readouterr().err


def test_broken_files_are_bad_input(trees, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(trees["mindspore_tensor_mix"], broken)
    path = sorted(broken.rglob("*.npy"))[0]
    path.write_bytes(path.read_bytes()[:-3])
    golden = str(trees["mindspore_tensor_mix"])
    assert main(["align", golden, str(broken), "--standard", "mixed"]) == 3


# ----------------------------------------------------------------------------- memory

SCRIPT = """
import re, sys
from pathlib import Path
from telechat_moe.cli import main
code = main(["align", sys.argv[1], sys.argv[2], "--standard", sys.argv[3]])
peak = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())  # rusage begins with the parent's
print("RSS", int(peak[1]) // 1024, code)
"""


def large(folder, mib, value, kind):
    """Write a dump of one tensor whose file is a hole but for its last element."""
    made = dump(call("Mint.big", [], [tensor(np.zeros(4, np.float32))]))
    msprobe_write.write(made, folder)
    shape = (mib << 8, 1024)
    path = next(folder.rglob("dump.json"))
    content = json.loads(path.read_text())
    (entry,) = recorded_dumps.tensors(content["data"])
    file = path.parent / "dump_tensor_data" / entry["data_name"]
    entry["shape"] = list(shape)
    if kind == "bfloat16":
        file.unlink()
        entry.update(data_name="big.pt", dtype="torch.bfloat16")
        flat = np.memmap(folder / "values", np.float32, "w+", shape=shape)
        flat[-1, -1] = value
        value_files.save_pt(file.with_name("big.pt"), flat, kind)
    else:
        np.lib.format.open_memmap(file, "w+", np.float32, shape)[-1, -1] = value
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("mib", "most", "kind", "name"),
    [
        (256, 200, "float32", "mixed"),
        (256, 250, "bfloat16", "bitwise"),
        pytest.param(3072, 300, "float32", "mixed", marks=pytest.mark.slow),
        pytest.param(3072, 300, "float32", "ulp", marks=pytest.mark.slow),
        pytest.param(3072, 300, "bfloat16", "mixed", marks=pytest.mark.slow),
    ],
)
def test_a_tensor_larger_than_the_memory(mib, most, kind, name, tmp_path):
    """Resident are a few chunks of it; 3 GiB: `pytest -m slow tests/align/judge/test_standards.py`."""
    large(tmp_path / "a", mib, 1.0, kind)
    large(tmp_path / "b", mib, 4.0, kind)
    command = [sys.executable, "-c", SCRIPT, tmp_path / "a", tmp_path / "b", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    _, rss, code = done.stdout.splitlines()[-1].split()
    assert code == "1"
    assert int(rss) < most
