"""Megatron-Core's GPTModel in torch against our model and transformers': docs/align_mindspore.md has the numbers."""

import json
import re

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.mindspore, pytest.mark.torch]

from test_workflow_hf import NO_BIAS, TWIN, align, command, sets

from benchmarks.peers import megatron_twin

RECIPE = "telechat3_moe/pretrain_tiny.yaml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Our run, and what the others need: the same weights, whose norms and biases differ from 1 and 0."""
    folder = tmp_path_factory.mktemp("megatron")
    values = sets(folder, NO_BIAS, "lr_schedule.warmup_steps=0")
    weights = ["--set", "load_checkpoint=twin/ours/step-00000000"]
    hf = ["--torch", TWIN, "--modules", "--out", "hf", "--steps", "0-1", "--", "train", "twin"]
    for code, said in (
        command(TWIN, "prepare", RECIPE, "twin", "--vary", "--steps", 2, *values, cwd=folder),
        align("capture", RECIPE, "--out", "ours", "--steps", "0-1", *values, *weights, cwd=folder),
        align("capture", *hf, cwd=folder),
        capture("megatron", folder),
    ):
        assert code == 0, said
    return folder


def capture(name, folder, *planted):
    script = ["--torch", megatron_twin.__file__, "--modules", "--out", name, "--steps", "0-1"]
    return align("capture", *script, "--", "twin", *planted, cwd=folder)


def answer(folder, reference, target):
    code, said = align(reference, target, "--json", f"{reference}.json", cwd=folder)
    assert (folder / f"{reference}.json").exists(), said
    return code, json.loads((folder / f"{reference}.json").read_text())


@pytest.mark.parametrize("other", ["ours", "hf"])
@pytest.mark.parametrize("reverse", [False, True])
def test_programs_that_compute_the_same_agree(other, reverse, folder):
    """Tokens are sequence-first there, gate and up one weight, experts apart, choices a mask, weights applied earlier."""
    pair = ("megatron", other)[:: -1 if reverse else 1]
    code, report = answer(folder, *pair)
    assert code == 0, report["first"]
    assert report["coverage"]["shared tensors"]["judged_calls"] > 500
    assert {k.partition(":")[2] for k in report["not_judged"]} <= {" no formula for this gradient"}


@pytest.mark.slow
def test_bugs_are_found_in_their_module(folder, record_property):
    reports = {}
    for name in megatron_twin.BUGS:
        own = re.sub(r"\W", "_", name)
        code, said = capture(own, folder, "--plant", name)
        assert code == 0, said
        reports[name] = answer(folder, own, "ours")[1]
    found = [name for name, report in reports.items() if report["verdict"] == "diverged"]
    right = [
        name
        for name in found
        if re.fullmatch(megatron_twin.BUGS[name][1], reports[name]["first"]["modules"]["reference"])
    ]
    record_property("planted", len(reports))
    record_property("found", len(found))
    record_property("right", len(right))
    assert found == list(reports)
    wrong = {name: reports[name]["first"] for name in reports if name not in right}
    assert len(right) >= 0.9 * len(reports), wrong
