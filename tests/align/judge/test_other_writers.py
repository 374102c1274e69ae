"""Trees as other programs write them: read if they can be, else refused with a reason; never a crash or a false alarm."""

import json
import math
import shutil

import numpy as np
import pytest

from telechat_moe.cli import main
from telechat_moe.errors import BadInputError
from telechat_moe.tools.align.bisect import bisect
from telechat_moe.tools.align.dump import msprobe

KEY = "Torch.matmul.0.forward"


def run():
    """Return the calls of a small program: key, inputs, settings, outputs."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((4, 8), (8, 8)))
    a = (x @ w).astype(np.float32)
    e = np.exp(a - a.max(-1, keepdims=True))
    b = (e / e.sum(-1, keepdims=True)).astype(np.float32)
    i = np.argsort(-b, -1, kind="stable")[:, :2]
    v = np.take_along_axis(b, i, -1)
    return [
        (KEY, [x, w], {}, [a]),
        ("Functional.softmax.0.forward", [a], {"dim": -1}, [b]),
        ("Torch.topk.0.forward", [b, 2], {"dim": -1}, [v, i]),
        ("Tensor.sum.0.forward", [v, -1], {}, [v.sum(-1)]),
    ]


def npy(folder, name, values):
    np.save(folder / f"{name}.npy", values)
    return f"{name}.npy"


def write(root, *, sub="step0/rank0", save=npy, key=lambda k: k, change=lambda d: d, calls=None):
    """Write a tree by hand."""
    folder = root / sub / "dump_tensor_data"
    folder.mkdir(parents=True)

    def entry(value, name):
        if not isinstance(value, np.ndarray):
            return {"type": type(value).__name__, "value": value}
        kind = {"type": "torch.Tensor", "dtype": f"torch.{value.dtype}", "shape": [*value.shape]}
        return kind | ({"data_name": save(folder, name, value)} if save else {})

    data = {
        key(k): {
            "input_args": [entry(v, f"{k}.input.{i}") for i, v in enumerate(inputs)],
            "input_kwargs": {n: entry(v, f"{k}.input.{n}") for n, v in settings.items()},
            "output": [entry(v, f"{k}.output.{i}") for i, v in enumerate(outputs)],
        }
        for k, inputs, settings, outputs in (run() if calls is None else calls)
    }
    text = json.dumps(change({"data": data}), ensure_ascii=False)
    (root / sub / "dump.json").write_text(text, encoding="utf-8")
    return root


@pytest.fixture
def golden(tmp_path):
    return msprobe.read(write(tmp_path / "golden"))


def renamed(before, after):
    return lambda k: k.replace(before, after)


def bare(content):
    content["data"]["Functional.softmax.0.forward"]["input_kwargs"] = {"dim": -1}
    return content


def lone(content):
    content["data"][KEY]["output"] = content["data"][KEY]["output"][0]
    return content


def older(folder, name, values):
    with (folder / f"{name}.npy").open("wb") as file:
        np.lib.format.write_array(file, values, version=(3, 0))
    return f"{name}.npy"


RIGHT = {
    "indices from 17": {"key": renamed(".0.", ".17.")},
    "another scope": {"key": lambda k: f"model.layers.3.{k}"},
    "another front end": {"key": lambda k: f"Mint.{k.split('.', 1)[1]}"},
    "big-endian": {"save": lambda f, n, v: npy(f, n, v.astype(v.dtype.newbyteorder(">")))},
    "Fortran order": {"save": lambda f, n, v: npy(f, n, np.asfortranarray(v))},
    "npy 3.0": {"save": older},
    "values widened": {"save": lambda f, n, v: npy(f, n, v.astype(np.float64 if v.dtype.kind == "f" else v.dtype))},
    "bare settings": {"change": bare},
    "one output, no list": {"change": lone},
    "step_0/rank_0": {"sub": "step_0/rank_0"},
    "Rank-0": {"sub": "Rank-0"},
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_the_same_run_by_another_writer_passes(golden, tmp_path, name):
    other = msprobe.read(write(tmp_path / "other", **RIGHT[name]))
    for pair in ((golden, other), (other, golden)):
        outcome = bisect(*pair)
        assert (outcome.verdict, dict(outcome.judged)) == ("pass", {"pass": 5})


@pytest.mark.parametrize("name", ["indices from 17", "another scope", "another front end"])
def test_a_fault_is_named_by_the_targets_own_key(golden, tmp_path, name):
    calls = run()
    calls[1][3][0][2] *= 1.001
    other = msprobe.read(write(tmp_path / "other", calls=calls, **RIGHT[name]))
    first = bisect(golden, other).findings[0]
    assert first.verdict.key == RIGHT[name]["key"]("Functional.softmax.0.forward")


def test_narrow_values_in_wide_files_must_be_of_their_type(tmp_path):
    def half(content):
        return json.loads(json.dumps(content).replace("float32", "float16"))

    record = msprobe.read(write(tmp_path / "wrong", change=half)).ranks[0, 0].calls[KEY].outputs[0]
    with pytest.raises(BadInputError, match="holds float32, the dump says float16"):
        record.load()
    save = lambda f, n, v: npy(f, n, v.astype(np.float16).astype(np.float32))  # noqa: E731
    record = msprobe.read(write(tmp_path / "right", change=half, save=save)).ranks[0, 0]
    assert record.calls[KEY].outputs[0].load().dtype == np.float16


def test_nothing_in_common_is_not_comparable(golden, tmp_path):
    none = msprobe.read(write(tmp_path / "none", calls=[]))
    for pair in ((golden, none), (none, golden)):
        outcome = bisect(*pair)
        assert outcome.verdict == "inconclusive"
        assert "no call in common" in outcome.reason


def test_ranks_of_one_run_alone_are_counted(golden, tmp_path):
    write(tmp_path / "two", sub="step0/rank1")
    two = msprobe.read(write(tmp_path / "two"))
    outcome = bisect(golden, two)
    assert (outcome.verdict, outcome.findings) == ("inconclusive", [])
    assert dict(outcome.unknown) == {"step 0, rank 1 is only in the target": 1}
    assert bisect(two, golden).verdict == "pass"


def unknown_key(root):
    def change(content):
        content["data"][KEY]["outputs"] = content["data"][KEY].pop("output")
        return content

    write(root, change=change)


def other_folder(root):
    write(root)
    shutil.copytree(root / "step0" / "rank0", root / "step0" / "device1")


REFUSED = {
    "a key nobody knows": (unknown_key, "outputs found"),
    "a folder of no rank": (other_folder, "of which step and rank"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("verb", ["inspect", "bisect"])
def test_what_would_be_passed_over_is_refused(tmp_path, capsys, name, verb):
    spoil, said = REFUSED[name]
    spoil(tmp_path / "other")
    golden = [str(write(tmp_path / "golden"))] if verb == "bisect" else []
    assert main(["align", verb, *golden, str(tmp_path / "other")]) == 3
    assert said in capsys.readouterr().err


def test_a_native_dump_is_read_by_every_verb(tmp_path, capsys):
    path = tmp_path / "statistic.csv"
    titles = "Op Type,Op Name,Task ID,Stream ID,Timestamp,IO,Slot,Data Size,Data Type,Shape,Max Value\r\n"
    path.write_text(
        titles + 'MatMul,Default/MatMul-op0,0,0,1,output,0,128,float32,"(4, 8)",1.5\r\n'
    )
    for verb in (["bisect", path], ["bisect", path, path]):
        assert main(["align", *map(str, verb)]) == 4
    assert "inconclusive" in capsys.readouterr().out


def test_stacks_of_older_files_are_read(golden, tmp_path):
    """Older files have the stack of each call, newer ones the calls of each stack."""
    root = write(tmp_path / "old")
    (root / "step0/rank0/stack.json").write_text(
        json.dumps({KEY: ["File a.py, line 3", "File b.py"]})
    )
    assert msprobe.read(root).ranks[0, 0].calls[KEY].stack == ("File a.py, line 3", "File b.py")
    (root / "step0/rank0/stack.json").write_text(json.dumps({KEY: {"File a.py": 3}}))
    with pytest.raises(BadInputError, match=r"\[\[keys\], \[lines\]\] or \[lines\] expected"):
        _ = msprobe.read(root).ranks[0, 0]


def test_one_script_in_two_frameworks_needs_no_map(tmp_path, capsys):
    """MSAdapter's dumps say mindtorch and have torch's names."""
    says = {
        name: lambda d, name=name: {**d, "framework": name} for name in ("pytorch", "mindtorch")
    }
    pair = [str(write(tmp_path / name, change=change)) for name, change in says.items()]
    assert main(["align", "bisect", *pair]) == 0
    assert "pass: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("framework", "error", "code"),
    [("pytorch", 3e-6, 1), ("mindtorch", 3e-6, 0), ("mindtorch", 1e-4, 1)],
)
@pytest.mark.parametrize("name", ["softmax", "gelu", "exp"])
def test_exponentials_of_mindspore_are_less_exact_than_those_of_torch(
    tmp_path, name, framework, error, code
):
    x = np.random.default_rng(0).uniform(0.5, 2, (64, 8)).astype(np.float32)
    wide = torch_functions(x.astype(np.float64))[name]
    call = f"Functional.{name}.0.forward", [x], {}, [(wide * (1 + error)).astype(np.float32)]
    change = lambda content: {**content, "framework": framework}  # noqa: E731
    assert main(["align", str(write(tmp_path / "run", change=change, calls=[call]))]) == code


def torch_functions(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    gelu = x * np.vectorize(lambda v: 0.5 * (1 + math.erf(v / 2**0.5)))(x)
    return {"softmax": e / e.sum(-1, keepdims=True), "gelu": gelu, "exp": np.exp(x)}


@pytest.mark.parametrize("name", ["zero_", "fill_"])
@pytest.mark.parametrize(("result", "verdict"), [(0.0, "pass"), (1.0, "diverged")])
def test_what_is_overwritten_does_not_matter(tmp_path, name, result, verdict):
    def memory(garbage, value):
        x, y = np.full((2, 3), garbage, np.float32), np.full((2, 3), value, np.float32)
        begin = f"Tensor.{name}.0.forward", [x, *[0.0] * (name == "fill_")], {}, [y]
        return [begin, ("Tensor.exp.0.forward", [y], {}, [np.exp(y)])]

    pair = [(1.5, 0.0), (7.5, result)]
    roots = [write(tmp_path / str(i), calls=memory(*x)) for i, x in enumerate(pair)]
    assert bisect(*map(msprobe.read, roots)).verdict == verdict


def test_integers_in_place_of_numbers_are_an_answer(tmp_path, capsys):
    """MindSpore's product of int32 and float32 is int32."""
    x, y = np.arange(4, dtype=np.int32), np.full(4, 0.5, np.float32)
    call = "Tensor.mul.0.forward", [x, y], {}, [(x * y).astype(np.int32)]
    assert main(["align", str(write(tmp_path / "run", calls=[call]))]) == 1
    assert "Tensor.mul.0.forward" in capsys.readouterr().out


def test_statistics_of_real_dumps_name_a_fault(tmp_path):
    """Real statistics with noise: the outputs of one call, and all that have the same values, are 10 % larger."""
    import dumps

    root = dumps.unpack("torch_statistics_L1", tmp_path)
    path = next(root.rglob("dump.json"))
    content, rng = json.loads(path.read_text()), np.random.default_rng(0)
    names = ("Max", "Min", "Mean", "Norm")

    def tensors(value):
        if isinstance(value, dict) and "Norm" in value:
            yield value
        for item in (
            value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        ):
            yield from tensors(item)

    def changed(fault):
        copy, begun, old, noise = json.loads(json.dumps(content)), False, None, {}
        for key, entry in copy["data"].items():
            if key == fault:
                old = [next(tensors(entry["output"]))[n] for n in names]
            for tensor in tensors(entry if begun or key != fault else entry["output"]):
                values = [tensor[n] for n in names]
                if None in values or "int" in tensor["dtype"] or isinstance(values[0], bool):
                    continue
                factor = 1.1 if old == values else 1.0
                factor *= noise.setdefault(tuple(values), 1 + 1e-6 * rng.standard_normal())
                tensor |= {n: x * factor for n, x in zip(names, values, strict=True)}
            begun = begun or key == fault
        shutil.copytree(path.parent, tmp_path / "changed", dirs_exist_ok=True)
        (tmp_path / "changed" / "dump.json").write_text(json.dumps(copy))
        return bisect(msprobe.read(root), msprobe.read(tmp_path / "changed"))

    assert (changed(None).verdict, changed(None).findings) == ("inconclusive", [])
    able = [k for k, e in content["data"].items() if k.endswith("forward") and any(
        "float" in t["dtype"] and t["Norm"] for t in tensors(e["output"])
    )]  # fmt: skip
    found = [(key, [f.verdict.key for f in changed(key).findings][:1]) for key in able]
    assert len(able) >= 10
    assert sum([key] == named for key, named in found) >= 0.9 * len(able), found
