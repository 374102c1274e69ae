"""What counts as right: exactly the planted ranks with the one kind; and a few planted runs."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.diagnose.cluster import Cluster, Planted, draw
from benchmarks.diagnose.public import read_all
from benchmarks.diagnose.score import Score, run
from telechat_moe.tools.diagnose.causes import Cause

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
        first, other = draw(np.random.default_rng(seed), cluster, 2)
        assert first.kind != other.kind
        assert not set(first.ranks) & set(other.ranks)
        for planted in (first, other):
            assert 0.03 <= planted.share <= 0.3
            assert planted.onset < 50


def test_traces_are_read_or_refused_and_compared_with_their_table(tmp_path: Path):
    rows = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "Overlap Analysis"}}]
    for name, begin, lasts in (
        ("ProfilerStep#1", 0, 100),
        ("Computing", 10, 40),
        ("Communication(Not Overlapped)", 50, 10),
    ):
        rows.append({"ph": "X", "name": name, "pid": 1, "ts": str(begin), "dur": lasts})
    (tmp_path / "trace_view.json").write_text(json.dumps(rows))
    (tmp_path / "cut.json").write_text("[{")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("no trace")
    for computing, apart in ((40, 0.0), (45, 5 / 55)):
        table = f"Step,Computing,Communication(Not Overlapped),Free\n1,{computing},10,20\n"
        (tmp_path / "step_trace_time.csv").write_text(table)
        reading = read_all(tmp_path)
        assert (reading.bound.total(), reading.refused.total(), reading.broken) == (2, 2, [])
        assert reading.compared == 1
        assert reading.apart == pytest.approx(apart, abs=1e-6)


def test_a_few_runs_are_judged_right():
    score = run(Cluster(4, steps=100), 3, 2, 7)
    assert (score.precision(), score.recall()) == (1.0, 1.0), score.examples
    assert run(Cluster(4, steps=100), 2, 0, 7).wrong.total() == 0


def test_slow_drift_of_few_peers_is_no_cause():
    """A stage of eight ranks: what wanders more slowly than a window differs between ranks for a while."""
    assert run(Cluster(1, pp=4), 8, 0, 12).wrong.total() == 0
