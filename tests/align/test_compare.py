"""Two dumps compared: what is said of each tensor, exit codes, files without values, other layouts, memory."""

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

from telechat_moe.cli import main
from telechat_moe.tools.align.compare.compare import CHUNK, compare
from telechat_moe.tools.align.compare.profiles import NAMES, Options, profile
from telechat_moe.tools.align.dump import msprobe_write, value_files
from telechat_moe.tools.align.dump.records import (
    Call,
    Dump,
    Phase,
    RankDump,
    Scalar,
    Stats,
    TensorLayout,
    TensorRecord,
)

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


def only(out, status):
    return [(r.key, r.place) for r in out.rows if r.status == status]


@pytest.mark.parametrize("name", NAMES)
def test_equal_dumps_meet_every_standard(name):
    out = compare(run(), run(), profile(name), run() if name.startswith("ascend") else None)
    assert (out.verdict, dict(out.counts)) == ("pass", {"pass": 7})
    assert out.nbytes > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_tensor_is_named_in_every_standard(name):
    x = X.copy()
    x[3, 4] += 3.0
    wrong = dump(call("Mint.tanh", [tensor(x)], [tensor(np.tanh(X))]))
    right = dump(call("Mint.tanh", [tensor(X)], [tensor(np.tanh(X))]))
    third = dump(call("Mint.tanh", [tensor(X * np.float32(1 + 1e-6))], [tensor(np.tanh(X))]))
    out = compare(right, wrong, profile(name), third if name.startswith("ascend") else None)
    assert out.verdict == "diverged"
    assert only(out, "diverged") == [("Mint.tanh.0.forward", "input.0")]
    row = out.sorted()[0]
    assert row.ratio > 1
    if row.worst.at is not None:
        assert row.element == (3, 4)


def test_worst_come_first():
    sizes = [1e-3, 1e-1, 1e-2, 0.0]
    calls = [
        [call("Mint.mul", [], [tensor(X * np.float32(1 + s))], i) for i, s in enumerate(by)]
        for by in ([0.0] * 4, sizes)
    ]
    rows = compare(dump(*calls[0]), dump(*calls[1]), profile("close")).sorted()
    assert [r.key[9] for r in rows] == ["1", "2", "0", "3"]
    assert [r.status for r in rows] == ["diverged"] * 3 + ["pass"]


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
            out = compare(
                dump(call("Mint.x", [], [tensor(golden)])),
                dump(call("Mint.x", [], [tensor(target)])),
                profile(name),
            )
            (row,) = out.rows
            assert (row.status, row.elements) == ("diverged", target.size)
            assert row.element == last or (name == "mixed" and row.worst.at is None)


def test_shapes_types_and_what_one_dump_lacks():
    golden = dump(
        call("Mint.a", [], [tensor(X)]),
        call("Mint.b", [], [tensor(X)]),
        call("Mint.c", [], [tensor(X), tensor(X)]),
        call("Mint.d", [], [tensor(X)]),
        call("Mint.e", [], [tensor(np.zeros((0, 4), np.float32))]),
        call("Mint.f", [], [tensor(IDS)]),
    )
    target = dump(
        call("Mint.a", [], [tensor(X[:6])]),
        call("Mint.b", [], [tensor(X.astype(np.float16))]),
        call("Mint.c", [], [tensor(X)]),
        call("Mint.e", [], [tensor(np.zeros((0, 4), np.float32))]),
        call("Mint.f", [], [tensor(IDS.astype(np.float32))]),
        call("Mint.g", [], [tensor(X)]),
    )
    out = compare(golden, target, profile("mixed"))
    said = {(r.key[5], r.place): (r.status, r.reason) for r in out.rows}
    assert said["a", "output.0"] == ("diverged", "shape [6, 20], reference [12, 20]")
    assert said["b", "output.0"][0] == "pass"  # float16 against float32, by float16's line
    assert said["c", "output.0"][0] == "pass"
    assert said["c", "output.1"] == ("not comparable", "the target has no tensor there")
    assert said["d", ""] == ("not comparable", "the target does not run this call")
    assert said["g", ""] == ("not comparable", "the reference does not run this call")
    assert said["e", "output.0"][0] == "pass"
    assert said["f", "output.0"] == ("not comparable", "type float32, reference int64")
    strict = compare(golden, target, profile("bitwise"))
    row = next(r for r in strict.rows if r.key.startswith("Mint.b"))
    assert (row.status, row.reason) == ("diverged", "type float16, reference float32")


def test_missing_calls_are_no_pass_unless_passed_over():
    golden = dump(call("Mint.a", [], [tensor(X)]), call("Mint.d", [], [tensor(X)]))
    target = dump(call("Mint.a", [], [tensor(X)]))
    assert compare(golden, target, profile("mixed")).verdict == "inconclusive"
    out = compare(golden, target, profile("mixed"), common=True)
    assert (out.verdict, dict(out.counts)) == ("pass", {"pass": 1, "left out": 1})


def test_nothing_judged_is_no_pass():
    empty = dump(call("Mint.a", [], [TensorRecord("float32", (3,))]))
    out = compare(empty, empty, profile("mixed"))
    assert (out.verdict, out.reason) == ("inconclusive", "not a single tensor could be judged")
    out = compare(run(), Dump(Path("x"), {}), profile("mixed"))
    assert out.verdict == "inconclusive"


def test_a_call_more_shifts_no_other():
    more = dump(
        call("Mint.mul", [], [tensor(X * 0)], 0),
        call("Mint.add", [], [tensor(X)], 0),
        call("Mint.mul", [], [tensor(X)], 1),
    )
    less = dump(call("Mint.add", [], [tensor(X)], 0), call("Mint.mul", [], [tensor(X)], 0))
    out = compare(less, more, profile("bitwise"), common=True)
    assert (out.verdict, out.counts["pass"]) == ("pass", 2)


def test_settings_are_compared():
    out = compare(run(), run(dim=0), profile("mixed"))
    (row,) = [r for r in out.rows if r.status == "diverged"]
    assert (row.basis, row.reason) == ("setting", "setting 0, reference -1")


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (-3.4028234663852886e38, -65504.0, True),  # what masks of two types are filled with
        (1e-6, float(np.float32(1e-6)), True),
        (1e-6, 1e-5, False),
        (True, False, False),
        (1, True, True),  # how frameworks spell a flag
        ("torch.bfloat16", "torch.float32", True),  # texts name types and devices
        (2, 2.0, True),
        (float("nan"), float("nan"), True),
    ],
)
def test_which_settings_differ(a, b, same):
    made = [dump(call("Mint.x", [Scalar("", v)], [tensor(X)])) for v in (a, b)]
    out = compare(*made, profile("mixed"))
    assert (out.verdict == "pass") == same


def test_types_without_a_line_are_not_judged():
    x = X.astype(np.float64)
    out = compare(run(x), run(x), profile("mixed"))
    assert out.counts["not judged"] == 6
    assert "mixed has no line for float64 against float64" in out.unknown


def test_a_third_run_may_lack_a_tensor():
    third = dump(call("Mint.tanh", [tensor(X)], [tensor(np.tanh(X))]))
    out = compare(run(), run(), profile("ascend-l0"), third)
    assert out.unknown["the third run has no values of this tensor"] == 4
    assert out.counts["pass"] == 3
    assert "requires 5,000 cases" in out.notes[0]


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


def test_statistics_show_divergence_but_no_pass():
    same = compare(
        stripped(run(), stats=as_stats), stripped(run(), stats=as_stats), profile("mixed")
    )
    assert (same.verdict, dict(same.counts)) == ("inconclusive", {"not judged": 7})
    assert "statistics" in next(iter(same.unknown))
    for name in ("torch", "close", "ulp", "ecosystem", "mixed", "bitwise"):
        wrong = compare(
            stripped(run(), stats=as_stats), stripped(run(X * 2), stats=as_stats), profile(name)
        )
        assert wrong.verdict == "diverged", name
        assert ("Mint.tanh.0.forward", "input.0") in only(wrong, "diverged")
    # as far off as the standard allows: not shown to be wrong
    near = compare(
        stripped(run(), stats=as_stats),
        stripped(run(X * np.float32(1 + 1e-4)), stats=as_stats),
        profile("close", Options(rtol=1.1e-4, atol=0.0)),
    )
    assert not only(near, "diverged")


def test_values_against_statistics():
    wrong = compare(run(), stripped(run(X * 2), stats=as_stats), profile("torch"))
    assert wrong.verdict == "diverged"
    assert {r.basis for r in wrong.rows if r.status == "diverged"} == {"statistics"}


def prints(record):
    from telechat_moe.tools.align.dump import fingerprint

    return fingerprint.of(record.load()).to_bytes()


def test_fingerprints_show_equal_bits_and_large_differences():
    same = compare(
        stripped(run(), fingerprint=prints), stripped(run(), fingerprint=prints), profile("mixed")
    )
    assert (same.verdict, dict(same.counts)) == ("pass", {"pass": 7})
    assert {r.basis for r in same.rows} == {"fingerprint"}
    x = X.copy()
    x[0, 0] = np.nextafter(x[0, 0], np.float32(9))
    moved = stripped(run(x), fingerprint=prints)
    out = compare(stripped(run(), fingerprint=prints), moved, profile("bitwise"))
    assert ("Mint.tanh.0.forward", "input.0") in only(out, "diverged")
    out = compare(stripped(run(), fingerprint=prints), moved, profile("torch"))
    assert ("Mint.tanh.0.forward", "input.0") in only(out, "not judged")
    far = compare(run(), stripped(run(X * np.float32(1.1)), fingerprint=prints), profile("torch"))
    assert ("Mint.tanh.0.forward", "input.0") in only(far, "diverged")
    x[0, 0] = np.nan
    out = compare(
        stripped(run(x), fingerprint=prints), stripped(run(x), fingerprint=prints), profile("torch")
    )
    assert out.counts["not judged"]  # torch: NaN is not equal to itself


def test_real_dumps_of_statistics_and_checksums(tmp_path):
    for name in ("torch_statistics_L1", "mindspore_statistics_mix"):
        root = recorded_dumps.unpack(name, tmp_path)
        assert main(["align", "compare", str(root), str(root)]) == 4
    for name in ("torch_md5_mix", "mindspore_md5_L1"):
        root = recorded_dumps.unpack(name, tmp_path)
        report = tmp_path / "report.json"
        assert (
            main(
                [
                    "align",
                    "compare",
                    str(root),
                    str(root),
                    "--json",
                    str(report),
                    "--profile",
                    "bitwise",
                ]
            )
            == 0
        )
        assert json.loads(report.read_text())["basis"]["checksum"] > 20
        changed = tmp_path / f"{name}_changed"
        shutil.copytree(root, changed)
        path = next(changed.rglob("dump.json"))
        content = json.loads(path.read_text())
        entry = next(t for t in recorded_dumps.tensors(content["data"]) if t.get("md5"))
        entry["md5"] = "00000000" if entry["md5"] != "00000000" else "11111111"
        path.write_text(json.dumps(content))
        assert main(["align", "compare", str(root), str(changed), "--profile", "bitwise"]) == 1


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
    base = ["align", "compare", str(golden)]
    assert main([*base, str(golden), "--profile", name, *third]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("pass: ")
    equal = ["--equal-nan"] if name in ("torch", "close") else []
    code = main([*base, str(other), "--profile", name, *third, *equal, "--json", "-"])
    report = json.loads(capsys.readouterr().out)
    # MindFormers' limits are so wide that a disturbance of 0.1 % passes
    assert (code, report["verdict"]) == ((0, "pass") if name == "mindformers" else (1, "diverged"))
    rows = report["rows"]
    assert len(rows) == sum(report["tensors"].values())
    wrong = [r for r in rows if r["status"] == "diverged"]
    assert rows[: len(wrong)] == wrong
    for row in wrong:
        ratio = row["observed_over_limit"]
        assert (
            ratio is None
            or ratio >= 1
            or row["basis"] == "decision"
            or row["metric"].startswith("1 -")
        )


def test_two_runs_of_msprobe_with_several_steps_and_ranks(tmp_path):
    for name in ("torch_tensor_L0_steps", "torch_tensor_L1_bf16", "mindspore_tensor_L1_bf16"):
        root = recorded_dumps.unpack(name, tmp_path)
        assert (
            main(["align", "compare", str(root), str(root), "--profile", "ulp", "--max", "0"]) == 0
        )
    steps = tmp_path / "torch_tensor_L0_steps"
    assert main(["align", "compare", str(steps), str(steps), "--step", "1"]) == 0
    assert main(["align", "compare", str(steps), str(steps), "--step", "7"]) == 4


def test_junit_and_table(trees, tmp_path, capsys):
    golden, other = (trees[f"torch_tensor_mix{n}"] for n in ("", "_disturbed"))
    cases = tmp_path / "cases.xml"
    assert (
        main(["align", "compare", str(golden), str(other), "--junit", str(cases), "--rows", "3"])
        == 1
    )
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.splitlines()[0].split() == [
        "status",
        "step",
        "rank",
        "tensor",
        "metric",
        "observed",
        "limit",
        "ratio",
        "why",
    ]
    assert "and 76 more" in out
    suite = ET.parse(cases).getroot()
    assert suite.get("tests") == "79"
    assert int(suite.get("failures")) == len(suite.findall("testcase/failure")) > 20


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (["--profile", "nothing"], 2, "unknown"),
        (["--profile", "ascend-l1"], 2, "third run"),
        (["--benchmark", "GOLDEN", "--profile", "mixed"], 2, "no --benchmark"),
        (["--rtol", "1", "--profile", "mixed"], 2, "--rtol is for"),
        (["--benchmark", "missing"], 3, "missing"),
    ],
)
def test_bad_usage(more, code, said, trees, capsys):
    golden = str(trees["torch_tensor_mix"])
    assert (
        main(["align", "compare", golden, golden, *(golden if m == "GOLDEN" else m for m in more)])
        == code
    )
    assert said in capsys.readouterr().err


def test_broken_files_are_bad_input(trees, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(trees["mindspore_tensor_mix"], broken)
    path = sorted(broken.rglob("*.npy"))[0]
    path.write_bytes(path.read_bytes()[:-3])
    assert main(["align", "compare", str(trees["mindspore_tensor_mix"]), str(broken)]) == 3


# ----------------------------------------------------------------------------- other layouts


def test_runs_of_other_layouts_are_merged_first(tmp_path, capsys):
    """Rows over two ranks and copies, against one device."""
    cut = TensorLayout((2,), ("dp",), (0, 1), (("dp",), ()))
    whole = TensorLayout((2,), ("dp",), (0, 1), ((), ()))
    w = RNG.standard_normal((20, 5)).astype(np.float32)
    y = (X @ w).astype(np.float32)
    one = dump(call("Mint.matmul", [tensor(X), tensor(w)], [tensor(y)]))

    def ranks(y):
        found = {}
        for r in range(2):
            rows = slice(6 * r, 6 * r + 6)
            c = call(
                "Mint.matmul",
                [tensor(X[rows], layout=cut), tensor(w, layout=whole)],
                [tensor(y[rows], layout=cut)],
            )
            found[0, r] = RankDump(0, r, "mindspore", "tensor", "L1", {c.key: c})
        return Dump(Path("two"), found)

    wrong = y.copy()
    wrong[7, 3] += 1
    for name, made in (("one", one), ("two", ranks(y)), ("wrong", ranks(wrong))):
        msprobe_write.write(made, tmp_path / name)
    base = ["align", "compare", str(tmp_path / "one")]
    assert main([*base, str(tmp_path / "two"), "--profile", "bitwise"]) == 0
    capsys.readouterr()
    assert main([*base, str(tmp_path / "wrong"), "--profile", "bitwise", "--json", "-"]) == 1
    first = json.loads(capsys.readouterr().out)["rows"][0]
    assert (first["place"], first["element"], first["shape"]) == ("output.0", [7, 3], [12, 5])


@pytest.mark.parametrize(
    ("said", "code", "status"), [(True, 1, "diverged"), (False, 4, "not comparable")]
)
def test_what_cannot_be_merged_is_no_pass(said, code, status, tmp_path, capsys):
    """Copies that differ where the layout says copies: the run is wrong. Where nobody says: not comparable."""
    whole = TensorLayout((2,), ("dp",), (0, 1), ((), ())) if said else None
    msprobe_write.write(dump(call("Mint.x", [], [tensor(X)])), tmp_path / "one")
    found = {}
    for r in range(2):
        c = call("Mint.x", [], [tensor(X + np.float32(r), layout=whole)])
        found[0, r] = RankDump(0, r, "mindspore", "tensor", "L1", {c.key: c})
    msprobe_write.write(Dump(Path("two"), found), tmp_path / "two")
    base = ["align", "compare", str(tmp_path / "one"), str(tmp_path / "two"), "--json", "-"]
    assert main(base) == code
    first = json.loads(capsys.readouterr().out)["rows"][0]
    assert (first["status"], first["basis"]) == (status, "merge")
    assert "not merged from ranks 0, 1" in first["reason"]


# ----------------------------------------------------------------------------- memory

SCRIPT = """
import re, sys
from pathlib import Path
from telechat_moe.cli import main
code = main(["align", "compare", sys.argv[1], sys.argv[2], "--profile", sys.argv[3], "--rows", "0"])
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
    """Resident are a few chunks of it; 3 GiB: `pytest -m slow tests/align/test_compare.py`."""
    large(tmp_path / "a", mib, 1.0, kind)
    large(tmp_path / "b", mib, 4.0, kind)
    command = [sys.executable, "-c", SCRIPT, tmp_path / "a", tmp_path / "b", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    _, rss, code = done.stdout.splitlines()[-1].split()
    assert code == "1"
    assert int(rss) < most
