"""The real graph of planned recipes: MindSpore compiles them, and every stage has what was predicted.

pytest -m slow tests/plan/cost/test_dryrun_plans.py        about half a minute a stage
"""

import copy
import json
from collections import Counter

import pytest

from benchmarks.plan_memory.small import RECIPE, SETTINGS
from telechat_moe.cli import main
from telechat_moe.errors import BadInputError
from telechat_moe.recipe import load
from telechat_moe.tools.plan.cost.expected_calls import ExpectedCall
from telechat_moe.tools.plan.cost.expected_graph import calls_of, differences, predict
from telechat_moe.tools.plan.search.planner import find, recipe_text

# What is fixed, and the memory of a device in MiB, where too little of it makes the planner recompute layers.
PLANS = [
    ("pp=1 tp=2 sp=false zero=0", None),
    ("pp=1 tp=2 sp=true zero=1 micro_batch=2 ep=1 etp=1 recompute=full", 152),
    ("pp=1 tp=4 etp=4 zero=0 micro_batch=4", None),
    ("pp=1 tp=4 etp=1 sp=true zero=0 micro_batch=2", None),
    ("pp=1 cp=2 ep=4 zero=1", None),
    ("pp=2 tp=2 vpp=1 sp=true zero=0", None),
    ("pp=2 tp=1 vpp=2 recompute=none zero=0", None),
    ("pp=2 tp=1 vpp=1 zero=1 micro_batch=2 ep=2 recompute=full", 145),
    ("pp=2 tp=2 vpp=2 recompute=norm+activation zero=0", None),
]


def planned(fixed, mib, tmp_path, settings=SETTINGS, devices=4):
    """Return the file of a planned recipe, and the layout."""
    memory = mib and mib * 2**20
    plan = find(RECIPE, settings, devices, "ascend-910b", memory, 16, fixed.split(), top=1)
    assert plan.optimal
    file = tmp_path / "plan.yaml"
    file.write_text(recipe_text(plan, RECIPE, settings))
    return file, plan.best[0].layout


def compiled(file, tmp_path):
    """Return the dry run's report of all stages; it exits with 0 only if they are as predicted."""
    report = tmp_path / "report.json"
    code = main(["dryrun", str(file), "--stage", "all", "--confirm", "--json", str(report)])
    found = json.loads(report.read_text())
    assert [stage["differences"] for stage in found["confirm"]] == [[]] * len(found["stages"])
    assert code == 0
    return found


@pytest.mark.slow
@pytest.mark.mindspore
@pytest.mark.parametrize(("fixed", "mib"), PLANS)
def test_stages_have_what_was_planned(fixed, mib, tmp_path) -> None:
    file, layout = planned(fixed, mib, tmp_path)
    assert main(["check", str(file), "--devices", "4"]) == 0
    if "recompute=full" in fixed:
        assert any(layout.recompute_layers)
    for stage in compiled(file, tmp_path)["confirm"]:
        for name in ("parameters", "calls", "bytes"):
            predicted, compiled_value = stage[name]
            assert predicted == compiled_value
        predicted, compiled_value = stage["activations"]
        assert predicted == pytest.approx(compiled_value, rel=0.05)


TWO_LAYERS = [*SETTINGS, "model.model_config.num_hidden_layers=2"]


@pytest.mark.slow
@pytest.mark.mindspore
def test_a_small_plan_is_compiled_as_predicted_and_a_fault_shows(tmp_path) -> None:
    file, _ = planned("pp=1 tp=2 sp=true micro_batch=4", None, tmp_path, TWO_LAYERS, 2)
    report = compiled(file, tmp_path)
    for change in (_without_a_gather, _larger, _more_alive):
        wrong = copy.deepcopy(report)
        change(wrong["stages"][0])
        (stage,) = differences(load(str(file)), wrong)
        assert len(stage["differences"]) == 1


def _without_a_gather(stage) -> None:
    row = next(r for r in stage["collectives"] if r["kind"] == "AllGather")
    size = row["bytes"] // row["count"]
    row["count"] -= 1
    row["bytes"] -= size


def _larger(stage) -> None:
    stage["memory"]["gradients"] += 4


def _more_alive(stage) -> None:
    stage["memory"]["activations"] = round(stage["memory"]["activations"] * 1.1)


def test_all_to_all_v_carries_every_pair_of_token_and_expert_both_ways(tmp_path) -> None:
    """Two exchanges a layer with experts, forward and backward, of tokens x top-k x hidden elements of two bytes."""
    file, layout = planned("pp=2 tp=1 vpp=1 ep=2", None, tmp_path)
    pairs = layout.micro_batch * 256 // layout.tp * 2
    exchanges: Counter[str] = Counter()
    for rank in (0, 2):  # of either stage
        for call, times in predict(load(str(file)), rank).calls.items():
            if call.kind == "AlltoAllV":
                assert call.bytes == 2 * pairs * 128
                exchanges[call.phase] += times
    layers = 5 + 1  # with experts, and MTP
    assert exchanges == dict.fromkeys(("forward", "backward"), 2 * layers * layout.micro_batches)


def test_rotary_keys_of_two_sequences_are_gathered_over_pairs(tmp_path) -> None:
    """Figures of the compiled graph: four tensor-parallel devices, two sequences of 256 tokens, keys of 64."""
    file, layout = planned(
        "pp=1 tp=4 etp=1 sp=true zero=0 micro_batch=2", None, tmp_path, TWO_LAYERS
    )
    times = 3 * layout.micro_batches  # layers and MTP's
    for rank, rows, sequences in ((0, (0, 1), (0, 2)), (3, (2, 3), (1, 3))):
        calls = predict(load(str(file)), rank).calls
        for phase, kind in (("forward", "AllGather"), ("backward", "ReduceScatter")):
            assert calls[ExpectedCall(phase, kind, rows, 2 * 128 * 2 * 64)] == times
            assert calls[ExpectedCall(phase, kind, sequences, 2 * 256 * 2 * 64)] == times


def test_a_recipe_that_no_formula_covers_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"moe_z_loss_coeff is 0\.1; .* for 0\.0 only"):
        predict(load(RECIPE, ["model.model_config.moe_z_loss_coeff=0.1"]), 0)


def test_calls_of_a_report_are_counted_one_by_one() -> None:
    row = {"phase": "forward", "kind": "Send", "ranks": [0, 2], "bytes": 12, "count": 3}
    ((call, times),) = calls_of({"collectives": [row]}).items()
    assert (call.bytes, times) == (4, 3)
