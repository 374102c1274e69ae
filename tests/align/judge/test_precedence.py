"""Which evidence decides for a call: each rule of the table of ``judge/precedence.py``, and what it may not do."""

import pytest

from telechat_moe.tools.align.judge.precedence import Evidence, decide
from telechat_moe.tools.align.judge.verdict import Verdict, not_judged, worst

PASS = Verdict("call", "output.0", "pass")
WRONG = Verdict("call", "output.0", "diverged", 8.0, "wrong")
OPEN = not_judged("call", "no formula", "output.0")


def _asked(*_):
    raise AssertionError("evidence is asked that cannot decide")


def evidence(replay, other_run=None, group=None, excess=0.0, settings="", itself=False):
    """Evidence on one call with one tensor; the other run answers what is open."""

    def answer(verdicts):
        return [other_run or v if v.status == "not judged" else v for v in verdicts]

    recompute = _asked if replay is None else lambda: [replay]
    return Evidence("call", group, recompute, answer, lambda: excess, lambda: settings, itself)


def status(e):
    return worst(decide(e)).status


@pytest.mark.parametrize("other_run", [PASS, WRONG, OPEN])
@pytest.mark.parametrize("replay", [PASS, WRONG])
def test_the_other_run_does_not_overrule_recomputation(replay, other_run):
    assert status(evidence(replay, other_run)) == replay.status


@pytest.mark.parametrize("other_run", [PASS, WRONG, OPEN])
def test_the_other_run_judges_what_is_left_open(other_run):
    assert status(evidence(OPEN, other_run)) == other_run.status
    assert status(evidence(None, other_run, group=[OPEN])) == other_run.status


def test_a_cut_reference_shows_faults_and_no_pass():
    assert status(evidence(OPEN, PASS, itself=True)) == "not judged"
    assert status(evidence(OPEN, WRONG, itself=True)) == "diverged"


@pytest.mark.parametrize(
    ("excess", "expected"), [(0.0, "diverged"), (1.9, "diverged"), (2.1, "not judged")]
)
def test_what_is_as_wrong_in_the_reference_is_no_difference(excess, expected):
    assert status(evidence(WRONG, excess=excess)) == expected
    assert status(evidence(WRONG, excess=excess, itself=True)) == "diverged"


@pytest.mark.parametrize("replay", [PASS, OPEN])
def test_a_number_that_differs_alarms_whatever_its_effect(replay):
    (*_, last) = decide(evidence(replay, settings="eps is 1e-5, expected 1e-6"))
    assert last.status == "diverged"
    assert "eps" in last.reason


def test_a_wrong_tensor_is_reported_before_a_number():
    assert decide(evidence(WRONG, settings="eps")) == [WRONG]
