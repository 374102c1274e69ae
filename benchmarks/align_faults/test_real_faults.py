"""Test that the first wrong call, its phase and the kind are named for faults in the real MindSpore step.

Three faults run by default; ``pytest -m slow benchmarks/align_faults/test_real_faults.py`` runs all, in four minutes
on two idle cores.
"""

import fnmatch

import numpy as np
import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

from benchmarks.align_faults.real import Lie, RealStep, lying
from benchmarks.align_faults.real_faults import GIVEN, LIES
from benchmarks.align_faults.score import refires
from telechat_moe.recipe import load
from telechat_moe.tools.align.bisect import bisect
from telechat_moe.tools.align.judge.comparison import ReferenceCache

FEW = ("experts exchanged", "scale of attention", "gradient's sign")


def made(folder, steps):
    import mini_recipe

    data = mini_recipe.write_data(folder)
    given = mini_recipe.arguments(data, folder / "run")[3:]
    step = RealStep(
        load("telechat3_moe/pretrain_tiny.yaml", [x for x in given if x != "--set"]), steps
    )
    return step, step.run()[0], ReferenceCache()


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Return a step, its right dump, and the data that comparisons with it share."""
    return made(tmp_path_factory.mktemp("one"), 1)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return made(tmp_path_factory.mktemp("three"), 3)


def named(right, dump, known, key, families):
    first = bisect(right, dump, known).findings[0]
    said = first.as_json()
    assert fnmatch.fnmatchcase(first.verdict.key, key), said
    assert first.family in families.split(" | "), said
    assert refires(first)
    return said


def found(made, lie):
    step, right, known = made
    dump, key = step.run(lie)
    said = named(right, dump, known, key, lie.families)
    gradient = "Grad" in key
    assert said["phase"] == (
        "backward" if gradient else "optimizer" if "Optimizer" in key else "forward"
    )


@pytest.mark.slow
@pytest.mark.parametrize("lie", [x for x in LIES if x.name in FEW], ids=lambda x: x.name)
def test_a_lie_is_named(one, lie):
    found(one, lie)


@pytest.mark.slow
@pytest.mark.parametrize("lie", [x for x in LIES if x.name not in FEW], ids=lambda x: x.name)
def test_more_lies(one, lie):
    found(one, lie)


@pytest.mark.slow
@pytest.mark.parametrize("given", GIVEN, ids=lambda x: x.name)
def test_what_the_step_is_given(three, given):
    step, right, known = three
    dump, _ = step.run(None, given.between(step.initial), given.inputs)
    said = named(right, dump, known, given.operator, given.families)
    assert (said["step"], said["phase"]) == (given.step, "forward")


@pytest.mark.slow
def test_two_right_runs_are_equal_and_pass(three):
    step, right, known = three
    again = step.run()[0]
    outcome = bisect(right, again, known)
    assert outcome.verdict == "pass"
    assert not outcome.unknown
    for place, rank in right.ranks.items():
        for key, call in rank.calls.items():
            theirs = dict(again.ranks[place].calls[key].tensors())
            for name, tensor in call.tensors():
                np.testing.assert_array_equal(tensor.load(), theirs[name].load())


@pytest.mark.slow
def test_a_pattern_that_fits_nothing(one):
    with pytest.raises(LookupError, match=r"no operator \*\.none"):
        lying(one[0].content, Lie("x", "x", "*.none"))
