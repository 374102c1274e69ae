"""Pairs of layouts in real processes: three of them, a fault of each kind in a dump, one in processes; four minutes."""

import random

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = [pytest.mark.mindspore, pytest.mark.slow]

from benchmarks.align_faults import layout_pairs
from telechat_moe.tools.align.dump import summary
from telechat_moe.tools.align.judge.pins import chose_otherwise


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def dumps(folder):
    return {n: summary.read(layout_pairs.capture(folder, n, True)) for n in ("one", "tp2", "pp2")}


@pytest.mark.parametrize("pair", [("one", "tp2"), ("tp2", "pp2"), ("pp2", "one")])
def test_layouts_whose_tokens_flip_pass(dumps, pair):
    reference, target = (dumps[name] for name in pair)
    assert chose_otherwise(reference.at(0), target.at(0))
    outcome = layout_pairs.judge(reference, target)
    assert outcome.verdict == "pass", (outcome.reason, outcome.findings[:1])


@pytest.mark.parametrize("kind", layout_pairs.KINDS)
def test_a_wrong_tensor_is_named(dumps, kind):
    planted = layout_pairs.plant(dumps["tp2"], kind, random.Random(0))
    assert planted is not None
    wrong, (step, rank, key) = planted
    outcome = layout_pairs.judge(layout_pairs.until(dumps["one"], step), wrong)
    assert (outcome.findings[0].step, outcome.findings[0].verdict.key) == (step, key)
    assert rank in outcome.ranks


def test_an_expert_bias_that_processes_moved_wrongly_is_named(dumps, folder):
    fault = ("one", "tp2", "bias", "layers.1.moe.router.expert_bias")
    found = layout_pairs.of_process(folder, *fault)
    assert found["verdict"] == "diverged"
    assert found["exact"], found
