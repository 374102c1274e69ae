"""Bugs planted in transformers' DeepseekV3, one a run, against our model: benchmarks/peers has the numbers."""

import json
import re

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.mindspore, pytest.mark.torch]

from test_workflow_hf import TWIN, align, prepared

from benchmarks.peers.hf_bugs import BUGS, UNSEEN


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("bugs"))


def answer(folder, plant=None):
    """Return exit code and report for transformers' run with a bug, or without."""
    name = re.sub(r"\W", "_", plant or "right")
    planted = ["--plant", plant] if plant else []
    script = ["--torch", TWIN, "--modules", "--out", name, "--steps", "0-1", "--"]
    code, said = align("capture", *script, "train", "twin", *planted, cwd=folder)
    assert code == 0, said
    code, said = align("bisect", name, "ours", "--json", f"{name}.json", cwd=folder)
    assert (folder / f"{name}.json").exists(), said
    return code, json.loads((folder / f"{name}.json").read_text())


def is_right(bug, report):
    first = report["first"]
    return (
        first is not None
        and first["step"] == bug.step
        and re.fullmatch(bug.where, first["modules"]["reference"]) is not None
        and bug.says in first["evidence"]
    )


@pytest.mark.slow
def test_without_a_bug_the_runs_agree(ours):
    code, report = answer(ours)
    assert code == 0, report["first"]
    assert not report["not_judged"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bugs", "title", "share"), [(BUGS, "known", 0.9), (UNSEEN, "unseen", 0.8)]
)
def test_bugs_are_found_in_their_module(bugs, title, share, ours, record_property):
    reports = {name: answer(ours, name)[1] for name in bugs}
    found = [name for name, report in reports.items() if report["verdict"] == "diverged"]
    right = [name for name, report in reports.items() if is_right(bugs[name], report)]
    record_property(f"{title}_found", len(found))
    record_property(f"{title}_right", len(right))
    record_property(f"{title}_planted", len(bugs))
    assert found == list(bugs)
    assert len(right) >= share * len(bugs), {
        name: reports[name]["first"] for name in bugs if name not in right
    }
