"""One layout against another of the same recipe, without and with a planted wrong group: the story of docs/align.md.

Real graphs of the parallel compiler on 2 and 4 processes: four minutes, ``pytest -m slow tests/align/test_workflow_layouts.py``.
"""

import json
import re
import shlex
import subprocess
import sys

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = [pytest.mark.mindspore, pytest.mark.slow]

import mini_recipe
from test_workflow_hf import ROOT, align

WEIGHT = "layers.1.attention.q_up.weight"
PIPELINE = {
    **mini_recipe.SPREAD,
    "parallel_config__pipeline_stage": 2,
    "parallel_config__micro_batch_num": 4,
    "callbacks__1__micro_batch_num": 4,
    "runner_config__batch_size": 1,
    "model__model_config__batch_size": 1,
}


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    """Run the commands of the page up to the comparisons, on a recipe that compiles in seconds."""
    folder = tmp_path_factory.mktemp("layouts")
    (folder / "data").mkdir()
    data = mini_recipe.write_data(folder / "data")
    page = (ROOT / "docs" / "align.md").read_text(encoding="utf-8")
    (block,) = [x for x in re.findall(r"```sh\n(.*?)```", page, re.S) if "plant_wrong_group" in x]
    for line in block.splitlines():
        words, _, to = line.partition(" > ")
        tool, *arguments = shlex.split(words)
        if arguments[0] == "data" or (arguments[0] == "align" and arguments[1] != "capture"):
            continue
        if to == "tp2.yaml":
            arguments += mini_recipe.arguments(data, folder / "run")[3:]
        of = ["-m", "telechat_moe.cli"] if tool == "telechat-moe" else [ROOT / arguments.pop(0)]
        done = subprocess.run(
            [sys.executable, *map(str, of), *arguments], cwd=folder, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        if to:
            (folder / to).write_text(done.stdout)
    return folder


def bisect(dumps, reference, target):
    code, said = align("bisect", reference, target, "--json", "report.json", cwd=dumps)
    assert code in (0, 1), said
    return code, json.loads((dumps / "report.json").read_text())


def test_every_operator_of_every_rank_is_judged(dumps):
    code, said = align("dp2_tp2", "--json", "replay.json", cwd=dumps)
    assert code == 0, said
    report = json.loads((dumps / "replay.json").read_text())
    assert not report["not_judged"]
    assert report["judged"]["pass"] > 3500


def test_another_layout_passes(dumps):
    code, report = bisect(dumps, "tp2", "dp2_tp2")
    assert code == 0, report["first"]
    assert not report["not_judged"]


@pytest.mark.parametrize("reference", ["tp2", "dp2_tp2"])
def test_a_wrong_group_is_named(dumps, reference):
    """The reference is another layout, or the same."""
    code, report = bisect(dumps, reference, "planted")
    first = report["first"]
    assert code == 1
    assert first["operator"] == f"Primitive.Reduction.{WEIGHT}.AllReduce.0.forward"
    assert (first["phase"], first["layer"], first["family"]) == ("reduction", 1, "wrong group")
    assert report["ranks"] == [0, 1, 2, 3]
    assert first["evidence"] == "summed over ranks [0, 1], not [0, 2]"


@pytest.mark.parametrize("fault", ["missing", "doubled"])
def test_a_reduction_left_out_or_made_twice_is_named(dumps, fault):
    """Real processes: the graph of each rank lacks the AllReduce of one gradient, or has it twice."""
    tool = ROOT / "benchmarks" / "peers" / "plant_wrong_group.py"
    given = ["dp2_tp2.yaml", "--weight", WEIGHT, "--fault", fault, "--out", fault]
    subprocess.run([sys.executable, str(tool), *given], cwd=dumps, check=True, capture_output=True)
    code, report = bisect(dumps, "dp2_tp2", fault)
    first = report["first"]
    assert code == 1
    assert first["operator"].startswith(f"Primitive.Reduction.{WEIGHT}.AllReduce.")
    assert (first["phase"], first["layer"]) == ("reduction", 1)
    if fault == "missing":
        assert first["family"] == "missing reduction"
    assert report["ranks"] == [0, 1, 2, 3]


def test_two_schedules_of_a_pipeline_pass(tmp_path):
    """The planner's order is captured as it is trained, its operators named as in any other order."""
    (tmp_path / "data").mkdir()
    given = mini_recipe.arguments(
        mini_recipe.write_data(tmp_path / "data"), tmp_path / "run", **PIPELINE
    )
    for name in ("1f1b", "zb-h1"):
        schedule = f"telechat_moe.sharding.pipeline_schedule={name}"
        code, said = align(
            "capture", given[1], "--out", name, *given[3:], "--set", schedule, cwd=tmp_path
        )
        assert code == 0, said
    code, report = bisect(tmp_path, "1f1b", "zb-h1")
    assert code == 0, report["first"]
    assert not report["not_judged"]
