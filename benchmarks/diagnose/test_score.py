"""What counts as right: exactly the planted ranks with the one kind; and a few planted runs."""

from dataclasses import replace

import numpy as np

from benchmarks.diagnose.cluster import Cluster, Planted, draw
from benchmarks.diagnose.score import Score, run
from telechat_moe.tools.diagnose.cause import Cause

NAMED = Cause(
    kinds=("slow_rank",), scope="rank", ranks=(3,), host="", part="compute", first_step=1, last_step=9, seconds=0.1, share=0.1,
    sigmas=9.0, lost=0.1,
)  # fmt: skip
PLANTED = (Planted("slow_rank", (3,), 0.1),)


def test_only_the_exact_ranks_with_the_one_kind_are_right():
    for named, right in (
        (NAMED, 1),
        (replace(NAMED, ranks=(2, 3)), 0),
        (replace(NAMED, kinds=("slow_rank", "frequency_drop")), 0),
        (replace(NAMED, kinds=("numa",)), 0),
    ):
        score = Score()
        score.add(PLANTED, [named])
        assert (score.right.total(), score.wrong.total(), score.missed.total()) == (
            right,
            1 - right,
            1 - right,
        )


def test_a_cause_named_twice_is_wrong_once():
    score = Score()
    score.add(PLANTED, [NAMED, NAMED])
    assert (score.precision(), score.recall(), score.runs_with_wrong) == (0.5, 1.0, 1)


def test_planted_causes_have_the_stated_size():
    cluster = Cluster(4, steps=100)
    for seed in range(50):
        one, other = draw(np.random.default_rng(seed), cluster, 2)
        assert one.kind != other.kind
        assert not set(one.ranks) & set(other.ranks)
        for planted in (one, other):
            assert 0.03 <= planted.share <= 0.3
            assert planted.onset < 50


def test_a_few_runs_are_judged_right():
    score = run(Cluster(4, steps=100), 3, 2, 7)
    assert (score.precision(), score.recall()) == (1.0, 1.0), score.examples
    assert run(Cluster(4, steps=100), 2, 0, 7).wrong.total() == 0
