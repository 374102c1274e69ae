"""Megatron-Core's GPTModel in torch against our model and transformers': benchmarks/peers has the numbers."""

import json
import re

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("megatron")
pytestmark = [pytest.mark.mindspore, pytest.mark.torch]

from test_workflow_hf import TWIN, align, prepared

from benchmarks.peers.megatron_bugs import BUGS

TWIN_OF_MEGATRON = TWIN.with_name("megatron_twin.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = prepared(tmp_path_factory.mktemp("megatron"))
    hf = ["--torch", TWIN, "--modules", "--out", "hf", "--steps", "0-1", "--", "train", "twin"]
    for code, said in (align("capture", *hf, cwd=folder), capture("megatron", folder)):
        assert code == 0, said
    return folder


def capture(name, folder, *planted):
    script = ["--torch", TWIN_OF_MEGATRON, "--modules", "--out", name, "--steps", "0-1"]
    return align("capture", *script, "--", "twin", *planted, cwd=folder)


def answer(folder, reference, target):
    code, said = align(reference, target, "--json", f"{reference}.json", cwd=folder)
    assert (folder / f"{reference}.json").exists(), said
    return code, json.loads((folder / f"{reference}.json").read_text())


@pytest.mark.slow
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
    for name in BUGS:
        own = re.sub(r"\W", "_", name)
        code, said = capture(own, folder, "--plant", name)
        assert code == 0, said
        reports[name] = answer(folder, own, "ours")[1]
    found = [name for name, report in reports.items() if report["verdict"] == "diverged"]
    right = [
        name
        for name in found
        if re.fullmatch(BUGS[name][1], reports[name]["first"]["modules"]["reference"])
    ]
    record_property("planted", len(reports))
    record_property("found", len(found))
    record_property("right", len(right))
    assert found == list(reports)
    wrong = {name: reports[name]["first"] for name in reports if name not in right}
    assert len(right) >= 0.9 * len(reports), wrong
