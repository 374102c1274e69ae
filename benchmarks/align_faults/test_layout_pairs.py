"""Pairs of layouts in real processes: three layouts, one pair of them clean and with a fault of each kind; minutes."""

import random

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = [pytest.mark.mindspore, pytest.mark.slow]

from benchmarks.align_faults import layout_pairs
from telechat_moe.tools.align.dump import summary
from telechat_moe.tools.align.judge.pins import chose_otherwise


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    return {n: summary.read(layout_pairs.capture(folder, n, True)) for n in ("one", "tp2", "pp2")}


@pytest.mark.parametrize("pair", [("one", "tp2"), ("tp2", "pp2"), ("pp2", "one")])
def test_layouts_whose_tokens_flip_pass(dumps, pair):
    reference, target = (dumps[name] for name in pair)
    assert chose_otherwise(reference.at(0), target.at(0))
    outcome = layout_pairs.judge(reference, target)
    assert outcome.verdict == "pass", (outcome.reason, outcome.findings[:1])


@pytest.mark.parametrize("kind", layout_pairs.KINDS)
def test_a_wrong_tensor_is_named(dumps, kind):
    wrong, (step, key) = layout_pairs.plant(dumps["tp2"], kind, random.Random(0))
    first = layout_pairs.judge(dumps["one"], wrong).findings[0]
    assert (first.step, first.verdict.key) == (step, key)
