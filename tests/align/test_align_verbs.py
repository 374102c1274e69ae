"""A script is captured, and the first wrong call of another run of it named, from the command line."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch
HERE = Path(__file__).parent

ROOT = HERE.parents[1]
KIT = ROOT / "benchmarks" / "peers" / "hf_deepseek.py"
SCRIPT = """
import sys
sys.path.insert(0, {here!r})
import tiny_moe, torch
weights = tiny_moe.weights(layers=1)
optimizer = torch.optim.AdamW([weights["table"], weights["head"]], 1e-2)
wrong = sys.argv[1:] == ["--wrong"]
attention = tiny_moe.attention
for step in range(2):
    if wrong and step == 1:
        tiny_moe.attention = lambda x, p: attention(x, p) * 1.01
    optimizer.zero_grad()
    tiny_moe.model(weights, *tiny_moe.batch(step)).backward()
    if wrong and step == 1:
        weights["head"].grad *= 3
    optimizer.step()
"""


def verb(*arguments, cwd=None):
    command = [sys.executable, "-m", "telechat_moe.cli", "align", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dumps")
    script = folder / "train.py"
    script.write_text(SCRIPT.format(here=str(HERE.parent / "support")))
    for name, more in (("golden", []), ("again", []), ("wrong", ["--", "--wrong"])):
        done = verb("capture", "--torch", script, "--out", folder / name, "--steps", "0-1", *more)
        assert done.returncode == 0, done.stderr
        assert "in 2 steps" in done.stderr
    return folder


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """Run the commands of docs/align.md; return the folder and exit code and output of each."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("story")
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    page = (ROOT / "docs" / "align.md").read_text(encoding="utf-8")
    (block,) = [x for x in re.findall(r"```sh\n(.*?)```", page, re.S) if "hf_deepseek" in x]
    return folder, [
        verb(*shlex.split(line, comments=True)[2:], cwd=folder) for line in block.splitlines()
    ]


@pytest.mark.slow
def test_the_story_of_the_page(story):
    """Every operator of another's model is judged, forward, backward and updates, in both types."""
    folder, (golden, bf16, same, faulty, found) = story
    assert [golden.returncode, bf16.returncode, faulty.returncode] == [0, 0, 0], golden.stderr
    assert same.returncode == 0, same.stdout
    said = "pass: 3164 tensors are what their operators must give, within the derived bounds; 0 were not judged."
    assert said in same.stdout
    assert found.returncode == 1, found.stdout
    for line in ("Tensor.mul_.0.forward", "step              1", "extra call"):
        assert line in found.stdout
    assert "Optimizer.AdamW" in (folder / "align.html").read_text()


@pytest.mark.slow
def test_the_same_run_passes(dumps, tmp_path):
    done = verb("bisect", dumps / "golden", dumps / "again", "--json", "-")
    report = json.loads(done.stdout)
    assert (done.returncode, report["verdict"], report["not_judged"]) == (0, "pass", {})
    assert report["judged"]["pass"] > 500
    assert verb("bisect", dumps / "again").returncode == 0


@pytest.mark.slow
def test_the_first_wrong_call_is_named(dumps, tmp_path):
    page, cases = tmp_path / "page.html", tmp_path / "cases.xml"
    done = verb(
        *("bisect", dumps / "golden", dumps / "wrong", "--html", page, "--junit", cases),
        *("--json", tmp_path / "report.json"),
    )
    report = json.loads((tmp_path / "report.json").read_text())
    first = report["first"]
    assert (done.returncode, report["verdict"]) == (1, "diverged")
    assert (first["step"], first["phase"]) == (1, "forward")
    assert first["operator"].startswith("Tensor.mul.")
    assert "the reference does not run" in first["reason"]
    assert report["findings"][1]["operator"] == "Torch.add.2.forward"  # what it went into
    updates = [f for f in report["findings"] if f["phase"] == "optimizer"]
    assert [(f["step"], f["tensor"]) for f in updates] == [(1, "input.grad")]
    assert first["operator"] in page.read_text()
    assert 'failures="1"' in cases.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "first"), [("scale", "Tensor.mul."), ("expert", "Tensor.roll.")])
def test_other_faults_in_transformers_deepseek_v3(plant, first, story, tmp_path):
    golden = story[0] / "fp32"
    done = verb(
        "capture",
        "--torch",
        KIT,
        "--out",
        tmp_path / "run",
        "--steps",
        "0-1",
        "--",
        "--plant",
        plant,
    )
    assert done.returncode == 0, done.stderr
    done = verb("bisect", golden, tmp_path / "run", "--json", "-")
    report = json.loads(done.stdout)
    assert (done.returncode, report["not_judged"]) == (1, {})
    assert (report["first"]["step"], report["first"]["family"]) == (1, "extra call")
    assert report["first"]["operator"].startswith(first)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["bisect", "nothing", "nothing"], 3, "nothing"),
        (["capture", "--torch", "nothing.py", "--out", "x"], 3, "no such file"),
        (
            ["capture", "--torch", "nothing.py", "--out", "x", "--steps", "3-1"],
            2,
            "expected a number",
        ),
    ],
)
def test_bad_input(arguments, code, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = verb(*arguments)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
