"""One layout against another of the same recipe, without and with a planted wrong group: docs/align_mindspore.md.

Real graphs of the parallel compiler on 2 and 4 processes: four minutes, ``pytest -m slow tests/align/test_workflow_layouts.py``.
"""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = [pytest.mark.mindspore, pytest.mark.slow]

sys.path.append(str(Path(__file__).parents[1] / "train"))
import mini_recipe
from test_workflow_hf import ROOT, align, command

PLANT = ROOT / "tools" / "align" / "kit" / "plant_wrong_group.py"
RECIPE = "telechat3_moe/pretrain_tiny.yaml"
PARALLEL = ("use_parallel=True", "parallel.parallel_mode=1", "parallel.full_batch=True")
TP2 = ("parallel_config.model_parallel=2", "parallel_config.use_seq_parallel=True")
DP2_TP2 = (
    *TP2,
    "parallel_config.data_parallel=2",
    "parallel_config.expert_parallel=2",
    "runner_config.batch_size=2",
    "model.model_config.batch_size=2",
)
WEIGHT = "layers.1.attention.q_up.weight"


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    (folder / "data").mkdir()
    data = mini_recipe.write_data(folder / "data")

    def sets(name, *more):
        given = mini_recipe.arguments(data, folder / f"run_{name}")[3:]
        return [*given, *(x for value in (*PARALLEL, *more) for x in ("--set", value))]

    runs = [
        align("capture", RECIPE, "--out", "tp2", *sets("tp2", *TP2), cwd=folder),
        align("capture", RECIPE, "--out", "dp2_tp2", *sets("both", *DP2_TP2), cwd=folder),
        command(PLANT, RECIPE, "--out", "planted", "--weight", WEIGHT, *sets("bad", *DP2_TP2), cwd=folder),
    ]  # fmt: skip
    for code, said in runs:
        assert code == 0, said
    return folder


def bisect(dumps, reference, target):
    code, said = align("bisect", reference, target, "--json", "report.json", cwd=dumps)
    assert code in (0, 1), said
    return code, json.loads((dumps / "report.json").read_text())


def test_every_operator_of_every_rank_is_judged(dumps):
    code, said = align("replay", "dp2_tp2", "--json", "replay.json", cwd=dumps)
    assert code == 0, said
    report = json.loads((dumps / "replay.json").read_text())
    assert not report["not_judged"]
    assert report["tensors"]["pass"] > 3500


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
