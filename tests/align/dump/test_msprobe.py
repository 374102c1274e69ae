"""Dumps of real msprobe are read in full, written again unchanged, and broken ones refused with file and key."""

import csv
import json
import math
import os
import pickle
import random
import shutil
import stat
from pathlib import Path

import dumps
import numpy as np
import pytest

from telechat_moe.cli import main
from telechat_moe.errors import BadInputError, UsageError
from telechat_moe.ops import fingerprint
from telechat_moe.tools.align.bisect import bisect
from telechat_moe.tools.align.dump import msprobe, msprobe_write, summary
from telechat_moe.tools.align.dump.records import Phase, Scalar, TensorRecord


@pytest.fixture(scope="module", params=dumps.NAMES)
def real(request, tmp_path_factory):
    return dumps.unpack(request.param, tmp_path_factory.mktemp("dump"))


def every(dump):
    for rank in dump.ranks.values():
        for call in rank.calls.values():
            for place, tensor in call.tensors():
                yield rank, call, place, tensor


def documents(root):
    return {p: json.loads(p.read_text()) for p in sorted(root.rglob("dump.json"))}


def test_fixtures_cover_what_msprobe_writes():
    heads = set()
    for name in dumps.NAMES:
        framework, task, level, *_ = name.split("_")
        heads.add((framework, task, level))
        assert (dumps.FIXTURES / f"{name}.tar.xz").stat().st_size < 60_000
    assert len(dumps.NAMES) >= 12
    assert {f for f, _, _ in heads} == {"torch", "mindspore"}
    assert {t for _, t, _ in heads} == {"tensor", "statistics", "md5"}
    assert {lv for _, _, lv in heads} == {"L0", "L1", "mix"}


def test_every_call_and_tensor_is_read_in_order(real):
    dump = msprobe.read(real)
    found = documents(real)
    assert len(dump.ranks) == len(found)
    for rank in dump.ranks.values():
        content = found[rank.folder / "dump.json"]
        assert list(rank.calls) == list(content["data"])
        assert (rank.framework, rank.task, rank.level) == tuple(
            content[k] for k in ("framework", "task", "level")
        )
        expected = sorted(json.dumps(t["shape"]) for t in dumps.tensors(content["data"]))
        tensors = [t for r, _, _, t in every(dump) if r is rank]
        assert sorted(json.dumps(list(t.shape)) for t in tensors) == expected


def test_values_agree_with_the_statistics_that_msprobe_took(real):
    """Statistics were computed by torch and MindSpore from what the program held."""
    checked = 0
    for _, call, place, t in every(msprobe.read(real)):
        assert (t.read is None) == (t.path is None and 0 not in t.shape)
        if t.read is None or t.stats is None or t.stats.max is None:
            continue
        values = t.load()
        assert values.shape == t.shape
        assert (float(values.max()), float(values.min())) == (t.stats.max, t.stats.min)
        if t.stats.norm is not None and t.dtype not in ("bool", "bfloat16"):
            norm = np.linalg.norm(values.astype(np.float64))
            assert norm == pytest.approx(t.stats.norm, rel=1e-5, abs=1e-6), (call.key, place)
        checked += 1
    assert (checked > 0) == ("tensor" in real.name)


def test_names_phases_and_containers(tmp_path):
    rank = msprobe.read(dumps.unpack("torch_tensor_mix", tmp_path)).ranks[0, 0]
    block = rank.calls["Module.block.Block.forward.0"]
    assert (block.kind, block.name, block.index) == ("module", "Module.block.Block", 0)
    assert isinstance(block.inputs[0], dict)
    assert isinstance(block.inputs[0]["x"], TensorRecord)
    assert block.kwargs["scale"] == Scalar("float", 1.5)
    out = block.outputs[0]
    assert isinstance(out, dict)
    assert [place for place, _ in block.tensors()] == [
        *("input.0.x", "output.0.y", "output.0.best.0", "output.0.best.1")
    ]
    assert out["none"] is None
    linear = rank.calls["Functional.linear.0.forward"]
    assert (linear.kind, linear.name, linear.phase) == ("api", "Functional.linear", Phase.FORWARD)
    assert linear.parent == "Module.block.up.Linear.forward.0"
    assert any("make.py" in line for line in linear.stack)
    grads = rank.calls["Module.block.up.Linear.parameters_grad.0"]
    assert grads.kind == "parameters_grad"
    assert grads.phase is Phase.BACKWARD
    assert sorted(grads.parameters) == ["bias", "weight"]
    assert rank.calls["Functional.linear.1.backward"].index == 1


def test_bfloat16_is_named_though_files_are_wide(tmp_path):
    for name in ("torch_tensor_L1_bf16", "mindspore_tensor_L1_bf16"):
        narrow = [
            t
            for *_, t in every(msprobe.read(dumps.unpack(name, tmp_path)))
            if t.dtype == "bfloat16"
        ]
        assert len(narrow) >= 5
        for t in narrow:
            values = np.ascontiguousarray(t.load())
            assert values.dtype == np.float32
            assert not (values.view(np.uint32) & 0xFFFF).any()


def test_the_layout_is_read(tmp_path):
    rank = msprobe.read(dumps.unpack("mindspore_tensor_L0", tmp_path)).ranks[0, 0]
    x = rank.calls["Cell.block.Block.forward.0"].inputs[0]
    assert isinstance(x, TensorRecord)
    assert x.layout is not None
    assert (x.layout.mesh, x.layout.axes, x.layout.dims) == ((2, 2), ("dp", "tp"), (("dp",), ()))


def test_ranks_and_steps(tmp_path):
    assert list(msprobe.read(dumps.unpack("torch_statistics_mix_ranks", tmp_path)).ranks) == [
        (0, 0),
        (0, 1),
    ]
    steps = dumps.unpack("torch_tensor_L0_steps", tmp_path)
    assert msprobe.read(steps).steps == [0, 1]
    assert list(msprobe.read(steps / "step1").ranks) == [(1, 0)]
    folder = next((steps / "step1").iterdir())
    assert list(msprobe.read(folder).ranks) == [(1, 0)]
    for name in ("pynative", "graph"):
        shutil.copytree(steps, tmp_path / "both" / name)
    both = msprobe.read(tmp_path / "both").ranks[0, 0]
    alone = msprobe.read(steps).ranks[0, 0]
    assert len(both.calls) == 2 * len(alone.calls)
    assert list(both.calls)[: len(alone.calls)] == list(alone.calls)


@pytest.mark.torch
def test_values_of_torch_files_are_those_that_torch_loads(tmp_path):
    torch = pytest.importorskip("torch")
    count = 0
    for name in (n for n in dumps.NAMES if n.startswith("torch_tensor")):
        for *_, t in every(msprobe.read(dumps.unpack(name, tmp_path))):
            expected = torch.load(t.path)
            expected = expected.float() if expected.dtype == torch.bfloat16 else expected
            assert np.array_equal(t.load(), expected.numpy())
            count += 1
    assert count > 200


@pytest.mark.torch
def test_torch_loads_what_we_write(tmp_path):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    for dtype in ("float32", "bfloat16", "float64", "int64", "bool", "float16", "complex64"):
        for shape in ((), (0, 3), (5,), (2, 3, 4)):
            values = rng.standard_normal(shape).astype("float32" if dtype == "bfloat16" else dtype)
            if dtype == "bfloat16":
                values = torch.from_numpy(values).bfloat16().float().numpy()
            path = tmp_path / "x.pt"
            msprobe_write.value_files.save_pt(path, values, dtype)
            loaded = torch.load(path, weights_only=True)
            assert loaded.dtype == getattr(torch, dtype)
            wide = loaded.float() if dtype == "bfloat16" else loaded
            assert np.array_equal(wide.numpy(), values)
            assert np.array_equal(msprobe.value_files.load(path, dtype, shape, tmp_path), values)


@pytest.mark.torch
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "uint16"])
def test_values_of_types_without_a_storage_are_those_of_torch(name, tmp_path):
    torch = pytest.importorskip("torch")
    codes = torch.arange(-32768, 32768, 257, dtype=torch.int32).to(torch.int16)
    kind = getattr(torch, name)
    bits = codes if name == "uint16" else codes.view(torch.uint8)
    values = bits.view(kind).reshape(-1, 2).t()  # not contiguous
    torch.save(values, tmp_path / "x.pt")
    dtype = msprobe.canonical(name)
    loaded = msprobe.value_files.load(tmp_path / "x.pt", dtype, tuple(values.shape), tmp_path)
    expected = values.to(torch.int32 if name == "uint16" else torch.float32).numpy()
    assert np.array_equal(loaded, expected, equal_nan=name != "uint16")


@pytest.mark.torch
def test_only_a_tensor_of_an_unknown_type_is_not_read(tmp_path):
    torch = pytest.importorskip("torch")
    root = dumps.unpack("torch_tensor_mix", tmp_path)
    path = next(root.rglob("dump.json"))
    content = json.loads(path.read_text())
    entry = next(e for k, e in content["data"].items() if "linear" in k)
    tensor = entry["input_args"][1]
    tensor["dtype"] = "torch.float8_e8m0fnu"
    scales = torch.zeros(tensor["shape"], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    torch.save(scales, path.parent / "dump_tensor_data" / tensor["data_name"])
    path.write_text(json.dumps(content))
    assert main(["align", "inspect", str(root), "--verify"]) == 0
    dump = msprobe.read(root)
    refused = [t for _, _, _, t in every(dump) if t.path is not None and t.read is None]
    assert [t.dtype for t in refused] == ["float8_e8m0fnu"]
    with pytest.raises(LookupError, match="float8_e8m0fnu are not read"):
        refused[0].load()
    assert bisect(dump, dump).verdict == "pass"


def test_written_again_it_is_the_same(real, tmp_path):
    dump = msprobe.read(real)
    for name in ("a", "b"):
        msprobe_write.write(dump, tmp_path / name)
    again = msprobe.read(tmp_path / "a")
    msprobe_write.write(again, tmp_path / "c")
    files = [
        p.relative_to(tmp_path / "a") for p in sorted((tmp_path / "a").rglob("*")) if p.is_file()
    ]
    for other in ("b", "c"):
        for path in files:
            assert (tmp_path / other / path).read_bytes() == (tmp_path / "a" / path).read_bytes()
    for (_, old, place, t), (_, new, where, u) in zip(every(dump), every(again), strict=True):
        assert (old.key, old.parent, old.stack, place) == (new.key, new.parent, new.stack, where)
        assert (t.dtype, t.shape, t.crc, t.layout, t.requires_grad) == (
            *(u.dtype, u.shape, u.crc, u.layout, u.requires_grad),
        )
        assert t.stats == u.stats
        assert t.path is None or t.path.name == u.path.name
        if t.read is not None:
            assert t.load().tobytes() == u.load().tobytes()
    paths = [tmp_path / "a", *(tmp_path / "a").rglob("*")]
    assert any(path.is_file() for path in paths)
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o750 if path.is_dir() else 0o640)


@pytest.mark.parametrize("framework", ["torch", "mindspore"])
def test_msprobe_compares_our_trees_as_its_own(framework):
    """Both tables were made by `msprobe compare`, the second one of trees that our writer wrote; see README.md."""
    tables = [
        list(csv.reader((dumps.FIXTURES / f"{framework}_tensor_mix.{n}.csv").open(newline="")))
        for n in ("compare", "rewritten.compare")
    ]
    assert len(tables[0]) > 60
    assert tables[0] == tables[1]


def damaged(tmp_path, change):
    root = dumps.unpack("mindspore_tensor_mix", tmp_path)
    folder = next((root / "step0").iterdir())
    path = folder / "dump.json"
    content = json.loads(path.read_text())
    call = content["data"]["Mint.split.0.forward"]
    changed = change(content, call["input_args"][0], folder)
    path.write_text(changed if isinstance(changed, str) else json.dumps(content))
    return root


def _set(**values):
    return lambda content, tensor, folder: tensor.update(values)


def _file(write):
    def change(content, tensor, folder):
        path = folder / "dump_tensor_data" / tensor["data_name"]
        write(path)

    return change


def _pickled(path):
    np.save(path, np.array([Trap()], dtype=object), allow_pickle=True)


def _fifo(path):
    path.unlink()
    os.mkfifo(path)


def _outside(path):
    shutil.copy(path, path.parents[4] / "outside.npy")
    path.unlink()
    path.symlink_to(path.parents[4] / "outside.npy")


class Trap:
    def __reduce__(self):
        return (os.mkdir, ("unpickled",))


BREAKAGES = {
    "truncated": (lambda c, t, f: json.dumps(c)[:-50], "expected JSON"),
    "no data": (lambda c, t, f: c.pop("data") and None, "key data"),
    "twice": (
        lambda c, t, f: json.dumps(c).replace('"task"', '"level": 1, "task"'),
        "appears twice",
    ),
    "deep": (lambda c, t, f: "[" * 10**6, "nested too deeply"),
    "half deep": (lambda c, t, f: t.update(shape=[[[1]]]), "Mint.split.0.forward"),
    "huge": (_set(shape=[1 << 40, 1 << 40]), "Mint.split.0.forward"),
    "negative": (_set(shape=[-3, 4]), "Mint.split.0.forward"),
    "digits": (
        lambda c, t, f: json.dumps(c).replace('"shape"', f'"x": {"9" * 9999}, "shape"'),
        "dump.json",
    ),
    "absolute": (_set(data_name="/etc/passwd.npy"), "Mint.split.0.forward"),
    "upwards": (_set(data_name="../../../x.npy"), "Mint.split.0.forward"),
    "foreign": (_set(data_name="x.pkl"), "Mint.split.0.forward"),
    "text max": (_set(Max="big"), "Mint.split.0.forward"),
    "layout": (_set(layout={"Device Matrix": [2], "Tensor Map": [7]}), "Mint.split.0.forward"),
    "missing": (_set(data_name="gone.npy"), "missing"),
    "shape": (_set(shape=[4, 3]), "the dump says [4, 3]"),
    "type": (_set(dtype="Float16"), "the dump says float16"),
    "cut": (_file(lambda p: p.write_bytes(p.read_bytes()[:-4])), "expected"),
    "pickled": (_file(_pickled), "pickled"),
    "empty": (_file(lambda p: p.write_bytes(b"")), "Mint.split.0.forward"),
    "pipe": (_file(_fifo), "no regular file"),
    "link": (_file(_outside), "leads out of"),
}


@pytest.mark.parametrize("kind", BREAKAGES)
def test_what_is_broken_is_named(kind, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    change, said = BREAKAGES[kind]
    root = damaged(tmp_path, change)
    assert main(["align", "inspect", str(root), "--verify"]) == 3
    message = capsys.readouterr().err
    assert said in message
    assert "mindspore_tensor_mix" in message
    assert not Path("unpickled").exists()


def test_no_utf8_and_links_to_elsewhere_are_refused(tmp_path, capsys):
    root = dumps.unpack("torch_md5_mix", tmp_path)
    path = next(root.rglob("dump.json"))
    good = path.read_bytes()
    path.write_bytes(good.replace(b'"task"', b'"\xff\xfe"'))
    assert main(["align", "inspect", str(root)]) == 3
    assert "no UTF-8" in capsys.readouterr().err
    path.write_bytes(good)
    shutil.move(root / "step0", tmp_path / "step0")
    (root / "step0").symlink_to(tmp_path / "step0")
    assert main(["align", "inspect", str(root)]) == 3
    assert "leads out of" in capsys.readouterr().err


def test_a_pickle_in_a_torch_file_is_not_run(tmp_path, monkeypatch):
    import zipfile

    monkeypatch.chdir(tmp_path)
    for content in (
        pickle.dumps(Trap(), 2),
        pickle.dumps(Trap(), 0),
        b"cos\nmkdir\n(X\x01\0\0\0atR.",
    ):
        with zipfile.ZipFile("x.pt", "w") as archive:
            archive.writestr("x/data.pkl", content)
            archive.writestr("x/data/0", b"\0" * 16)
        with pytest.raises(BadInputError, match=r"never read|broken"):
            msprobe.value_files.load(Path("x.pt"), "float32", (4,), tmp_path)
    assert not Path("unpickled").exists()
    assert not Path("a").exists()


def test_the_type_of_a_torch_file_is_not_any_text(tmp_path):
    """Bytes of a file that are taken for NumPy's objects would be followed as pointers."""
    import zipfile

    msprobe_write.value_files.save_pt(tmp_path / "good.pt", np.zeros(2, np.int64), "int64")
    with zipfile.ZipFile(tmp_path / "good.pt") as good:
        members = {name: good.read(name) for name in good.namelist()}
    storage, text = b"ctorch\nLongStorage\n", b"X\x06\0\0\0object"
    assert storage in members["good/data.pkl"]
    members["good/data.pkl"] = members["good/data.pkl"].replace(storage, text)
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(BadInputError, match="no storage"):
        msprobe.value_files.load(tmp_path / "x.pt", "object", (2,), tmp_path)


def fuzz(count, seed, tmp_path, capsys):
    rng = random.Random(seed)
    roots = [dumps.unpack(name, tmp_path) for name in dumps.NAMES]
    refused = 0
    for _ in range(count):
        root = rng.choice(roots)
        path, content = dumps.break_one(root, rng)
        code = main(["align", "inspect", str(root), "--verify", "--calls"])
        assert code in (0, 3)
        refused += code == 3
        message = capsys.readouterr().err
        assert code == 0 or str(root) in message
        dumps.restore(path, content)
    return refused


@pytest.mark.slow
def test_500_mutated_dumps_never_crash(tmp_path, capsys):
    assert fuzz(500, 1, tmp_path, capsys) > 200


@pytest.mark.slow
def test_10000_mutated_dumps_never_crash(tmp_path, capsys):
    assert fuzz(10_000, 2, tmp_path, capsys) > 4000


def test_inspect_counts_what_cannot_be_judged(tmp_path):
    root = dumps.unpack("torch_statistics_L1", tmp_path)
    statistics = summary.inspect(root, summary.chosen(root))
    (rank,) = statistics["ranks"]
    assert rank["values"] == 0
    assert statistics["not_judged"] == {summary.NO_VALUES: rank["tensors"]}
    root = dumps.unpack("torch_tensor_mix", tmp_path)
    full = summary.inspect(root, summary.chosen(root, 0, 0), calls=True, verify=True)
    assert full["not_judged"] == {}
    assert sum(len(c["tensors"]) for c in full["calls"]) == full["ranks"][0]["tensors"]
    with pytest.raises(UsageError, match="no step 5"):
        summary.chosen(root, step=5)


@pytest.mark.parametrize("name", ["torch_tensor_L0_steps", "torch_statistics_mix_ranks"])
def test_inspect_counts_steps_and_ranks(name, tmp_path, capsys):
    """Against the folders that msprobe made: stepN/rankN (a run of one process: rank)."""
    root = dumps.unpack(name, tmp_path)
    folders = [path.parent for path in root.rglob("dump.json")]
    steps, ranks = ({part.name for part in parts} for parts in zip(*((f.parent, f) for f in folders), strict=True))  # fmt: skip
    assert max(len(steps), len(ranks)) > 1
    assert main(["align", "inspect", str(root)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.endswith(f", {len(ranks)} rank(s), {len(steps)} step(s)")


def test_inspect_writes_fingerprints_and_a_table(tmp_path, capsys):
    root, small = dumps.unpack("mindspore_tensor_mix", tmp_path), tmp_path / "small"
    assert main(["align", "inspect", str(root), "--out", str(small), "--fingerprints"]) == 0
    assert f"written: {small}" in capsys.readouterr().out
    written = {(c.key, place): t for _, c, place, t in every(msprobe.read(small))}
    for _, call, place, t in every(msprobe.read(root)):
        kept = written[call.key, place]
        assert kept.read is None
        mark = fingerprint.Fingerprint.from_bytes(kept.fingerprint)
        assert mark.norm == pytest.approx(math.sqrt((t.load().astype(float) ** 2).sum()))
    table = str(tmp_path / "t.csv")
    assert main(["align", "inspect", str(root), "--out", table]) == 0
    rows = list(csv.DictReader(Path(table).read_text().splitlines()))
    assert len(rows) == len(written)
    for wrong in (["--out", table], ["--fingerprints"], ["--out", "x.csv", "--fingerprints"]):
        assert main(["align", "inspect", str(root), *wrong]) == 2


def test_inspect_writes_the_step_that_it_shows(tmp_path):
    root, out = dumps.unpack("torch_tensor_L0_steps", tmp_path), tmp_path / "out"
    whole = msprobe.read(root)
    assert len(whole.steps) > 1
    last = whole.steps[-1]
    assert main(["align", "inspect", str(root), "--step", str(last), "--out", str(out)]) == 0
    part = msprobe.read(out)
    assert part.steps == [last]
    (ours,), (other,) = part.at(last), whole.at(last)
    for call in ours.calls.values():
        for (_, x), (_, y) in zip(call.tensors(), other.calls[call.key].tensors(), strict=True):
            assert x.load().tobytes() == y.load().tobytes()


@pytest.mark.parametrize("dtype", ["(2,", "f4,,", "1f4", "", "object", "float8_e8m0fnu"])
def test_a_type_that_is_none_is_not_known(dtype):
    assert not msprobe.value_files.is_known(dtype)
    assert all(map(msprobe.value_files.is_known, ("float32", "float8_e4m3", "bfloat16")))
