"""`telechat-moe align A B` on dumps that real msprobe wrote: the verdict, where it is wrong, what to run next."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import dumps
import numpy as np
import pytest

from telechat_moe.cli import main
from telechat_moe.tools.align.dump import summary
from telechat_moe.tools.align.dump.records import Call, Phase, RankDump, TensorRecord
from telechat_moe.tools.align.judge.context import layer_of
from telechat_moe.tools.align.judge.coverage import SHARED, Coverage, CoverageShare
from telechat_moe.tools.align.judge.data_flow import DataFlow

PAIRS = ["torch_tensor_mix", "mindspore_tensor_mix"]


@pytest.fixture(scope="module", params=PAIRS)
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    return [dumps.unpack(f"{request.param}{x}", folder / f"d{x}") for x in ("", "_disturbed")]


def answer(capsys, *words):
    code = main(["align", *map(str, words), "--json", "-"])
    return code, json.loads(capsys.readouterr().out)


def test_two_folders_are_one_command(pair, tmp_path, capsys):
    code, report = answer(capsys, *pair, "--html", tmp_path / "page.html")
    assert code == 1
    first = report["first"]
    assert first["tensor"] == "input.0"
    place = [summary.read(p).ranks[0, 0].calls[first["operator"]] for p in pair]
    values = [dict(call.tensors())["input.0"].load()[tuple(first["element"])] for call in place]
    assert [first["values"]["reference"], first["values"]["target"]] == [float(v) for v in values]
    assert "\n" not in first["source"]
    page = (tmp_path / "page.html").read_text()
    assert f"reference {values[0]:.9g}, target {values[1]:.9g}" in page
    assert "What to run next" in page
    assert len(report["next"]) == 3


def test_the_first_line_is_the_verdict_and_the_next_says_what_to_run(pair, capsys):
    assert main(["align", *map(str, pair)]) == 1
    first, _, titles, command, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("diverged: ")
    assert titles.split() == ["next", "shows"]
    assert command.startswith("telechat-moe align bisect ")


def test_writing_the_map_changes_no_verdict(pair, tmp_path, capsys):
    plain = answer(capsys, *pair)
    assert answer(capsys, *pair, "--map-out", tmp_path / "map.json") == plain
    assert (tmp_path / "map.json").exists()


def test_the_next_commands_run(pair, tmp_path, capsys, monkeypatch):
    _, report = answer(capsys, *pair)
    monkeypatch.chdir(tmp_path)
    for step in report["next"]:
        assert main(step["command"].split()[1:]) in (0, 1, 4), step
    assert (tmp_path / "wrong" / "reproduce.py").exists()


def test_the_same_run_passes_and_says_what_is_next(pair, capsys):
    code, report = answer(capsys, pair[0], pair[0])
    assert code in (0, 4)  # MindSpore's dump has a call that is wrong in both
    assert not report["findings"]
    assert len(report["next"]) == 3


def test_a_verb_is_one_although_a_folder_has_its_name(tmp_path, capsys, monkeypatch):
    """`align phases RECIPE --out phases` runs again after it has made its folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inspect").mkdir()
    code, report = answer(capsys, "inspect", dumps.unpack("torch_tensor_mix", tmp_path / "a"))
    assert code == 0
    assert "verdict" not in report


def test_a_misspelt_folder_is_no_verb(capsys):
    assert main(["align", "no-such-dump", "other"]) == 2
    assert "nor is it a file or folder" in capsys.readouterr().err


def test_a_run_of_mindspore_is_right_but_for_its_own_split(tmp_path, capsys):
    """MindSpore 2.9's gradient of `mint.split` on CPU is wrong where its parts are joined in another order."""
    folder = dumps.unpack("mindspore_tensor_mix", tmp_path)
    code, report = answer(capsys, folder)
    assert code == 1
    wrong = {(row["operator"], row["tensor"]) for row in report["findings"]}
    assert wrong == {("Mint.split.0.backward", "output.0")}
    call = summary.read(folder).ranks[0, 0].calls["Mint.split.0.backward"]
    parts, made = ([t.load() for _, t in tensors] for tensors in (call.given(), call.made()))
    assert not np.array_equal(np.concatenate(parts, 1), made[0])  # the definition


def test_mindspores_split_is_wrong_without_msprobe():
    """The page says so; when a MindSpore comes that is right, it must be changed."""
    pytest.importorskip("mindspore")
    program = """
        import mindspore as ms
        from mindspore import mint
        ms.set_context(mode=ms.PYNATIVE_MODE, device_target="CPU")
        x = ms.Tensor([[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 2)
        def loss(x):
            a, b = mint.split(x, [2, 4], dim=-1)
            return (mint.cat([b, a], dim=-1) * ms.Tensor([[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 2)).sum()
        print(ms.grad(loss)(x).asnumpy().tolist())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found != [[4.0, 5.0, 0.0, 1.0, 2.0, 3.0]] * 2


def test_the_page_is_true(tmp_path, capsys, monkeypatch):
    root = Path(__file__).parents[2]
    page = (root / "docs" / "align.md").read_text(encoding="utf-8").split("\n## Two layouts")[0]
    (tmp_path / "tests" / "align").mkdir(parents=True)
    shutil.copytree(dumps.FIXTURES, tmp_path / "tests" / "align" / "fixtures")
    monkeypatch.chdir(tmp_path)
    (block,) = [b for b in re.findall(r"```sh\n(.*?)```", page, re.S) if "tar -xJf" in b]
    said, codes = "", []
    for line in block.splitlines():
        words = shlex.split(line, comments=True)
        if words[0] != "telechat-moe":
            subprocess.run(words, check=True)
            continue
        codes.append(main(words[1:]))
        said += capsys.readouterr().out
    assert codes == [1, 1]
    blocks = re.findall(r"```(\w*)\n(.*?)```", page, re.S)
    shown = "".join(text for kind, text in blocks if not kind)
    assert len(shown.splitlines()) > 6
    for line in shown.splitlines():
        assert line.rstrip() in [have.rstrip() for have in said.splitlines()], line


def test_other_weights_in_another_framework_are_named(tmp_path, capsys):
    """The two fixtures draw their weights differently; a map is found by name."""
    a, b = (dumps.unpack(name, tmp_path / name) for name in PAIRS)
    code, report = answer(capsys, a, b)
    assert code == 1
    assert "weight of block.norm.gamma before" in report["first"]["reason"]


def test_frameworks_without_a_common_tensor_are_not_judged():
    whole = CoverageShare(9, 9, 100, 100)
    assert not Coverage({"forward": whole, SHARED: CoverageShare(2, 2, 8, 8)}).lacks()
    none = Coverage({"forward": whole, SHARED: CoverageShare()})
    assert none.lacks()
    assert "shared tensors: none was compared" in none.lacks()


def record(values):
    array = np.asarray(values, np.float32)
    return TensorRecord("float32", array.shape, read=lambda: array)


def test_the_layer_follows_from_weights_where_names_do_not_say_it(tmp_path):
    rng = np.random.default_rng(0)
    x, *weights = (rng.normal(size=(4, 4)).astype(np.float32) for _ in range(4))
    calls = {}
    for i, w in enumerate(weights):
        y = np.maximum(x @ w, 0.1)
        for name, inputs, made in (("matmul", [x, w], x @ w), ("relu", [x @ w], y)):
            key = f"Torch.{name}.{i}.forward"
            given = [record(v) for v in inputs]
            calls[key] = Call(
                key, "api", f"Torch.{name}", i, Phase.FORWARD, given, {}, [record(made)]
            )
        x = y
    for i, w in enumerate(weights):
        name = f"Optimizer.AdamW.layers.{i}.up.weight"
        key = f"{name}.0.forward"
        kwargs = {"weight": record(w)}
        calls[key] = Call(key, "api", f"{name}.step", 0, Phase.OPTIMIZER, [], kwargs, [record(w)])
    flow = DataFlow(RankDump(0, 0, "pytorch", "tensor", "L1", calls))
    for i in range(3):
        for name in ("matmul", "relu"):
            assert layer_of(calls[f"Torch.{name}.{i}.forward"]) is None
            assert layer_of(calls[f"Torch.{name}.{i}.forward"], flow) == i


def test_a_run_judged_by_itself_is_compared_with_no_run(pair, tmp_path, capsys):
    """No sentence, page or command calls the run its own reference."""
    name = str(pair[0])
    for dump in pair:
        code, report = answer(capsys, dump, "--html", tmp_path / "page.html")
        assert code in (0, 1, 4)
        assert report["runs"] == {"reference": None, "target": str(dump)}
        assert all(step["command"].count(str(dump)) <= 1 for step in report["next"])
        assert all("the reference" not in step["shows"] for step in report["next"])
        assert f"{dump}, judged by itself" in (tmp_path / "page.html").read_text()
    assert f"{name} against {name}" not in (tmp_path / "page.html").read_text()
