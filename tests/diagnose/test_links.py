"""Links between two ranks: what both ends recorded of messages, whatever their clocks say, and which link or port is slow."""

import json
from itertools import combinations

import numpy as np
import pytest
from clusters import STEPS, alike
from hypothesis import given, settings
from hypothesis import strategies as st

from telechat_moe import timings
from telechat_moe.tools.diagnose.judge import Judge
from telechat_moe.tools.diagnose.read import read_runs
from telechat_moe.tools.diagnose.records import PairLinks, Records
from telechat_moe.tools.diagnose.report import diagnose


def linked(ranks: int, seed: int = 0) -> Records:
    """Return records of ranks that are alike, with links between all of them and nothing known of collectives."""
    records = alike(ranks, seed=seed)
    for axis in records.axes:
        del records.columns[f"comm.{axis}"]
    ends = np.array(list(combinations(range(ranks), 2)))
    rng = np.random.default_rng(seed)
    seconds = 0.03 * (1 + 0.2 * rng.random((len(ends), STEPS), np.float32))
    records.pairs = {"exchange": PairLinks(ends, seconds)}
    return records


def slow(records: Records, *ranks: int, seconds: float = 0.05) -> None:
    pairs = records.pairs["exchange"]
    pairs.seconds[np.isin(pairs.ends, ranks).sum(1) == len(ranks)] += seconds


def named(records: Records) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    return [(cause.kinds, cause.ranks) for cause in Judge(records).causes()]


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_a_slow_port_is_named_by_its_rank(ranks: int):
    records = linked(ranks)
    slow(records, 1, seconds=0.1)
    assert named(records) == [(("slow_link",), (1,))]
    (cause,) = Judge(records).causes()
    assert cause.seconds == pytest.approx((ranks - 1) * 0.1, rel=0.1)
    assert "no times of collectives" not in str(diagnose(records).not_judged)


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_a_slow_link_is_named_by_its_ends(ranks: int):
    records = linked(ranks)
    slow(records, 0, 2)
    assert named(records) == [(("slow_link",), (0, 2))]


@pytest.mark.parametrize("seed", range(8))
def test_links_that_are_alike_have_no_cause(seed: int):
    assert named(linked(4, seed)) == []


def test_the_one_link_of_two_ranks_has_no_peers():
    records = linked(2)
    slow(records, 0, 1)
    assert named(records) == []
    assert (
        diagnose(records).not_judged["links"] == "one link, which has no peers to compare it with"
    )


@pytest.mark.parametrize("part", ["delay", "paused"])
def test_messages_of_a_rank_without_a_core_say_nothing_of_its_links(part: str):
    records = linked(4)
    records.inside = False
    records.columns[part][1] += 0.2
    slow(records, 1)
    kind = {"delay": "shared_core", "paused": "paused"}[part]
    assert named(records) == [((kind,), (1,))]


@settings(deadline=None, max_examples=10)
@given(st.lists(st.floats(-2, 2), min_size=4, max_size=4))
def test_what_clocks_of_hosts_differ_by_cancels(
    tmp_path_factory: pytest.TempPathFactory, clocks: list[float]
):
    run, steps, rng = tmp_path_factory.mktemp("run"), 40, np.random.default_rng(0)
    way = rng.random((4, 4, steps)) * 0.01
    for rank in range(4):
        peers = [p for p in range(4) if p != rank]
        columns = ["step", "compute", *(f"{kind}.{p}" for p in peers for kind in timings.LINKS)]
        links = [
            x for p in peers for x in (0 * way[p, rank], way[p, rank] + clocks[rank] - clocks[p])
        ]
        about = {
            "version": 1,
            "rank": rank,
            "ranks": 4,
            "stage": 0,
            "host": str(rank),
            "columns": columns,
        }
        rows = np.stack([np.arange(steps), np.ones(steps), *links], 1).astype(timings.TYPE)
        path = timings.file_of(run, rank)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(json.dumps(about).encode() + b"\n" + rows.tobytes())
    records = read_runs([run])
    assert set(records.pairs) == {"exchange"}  # nothing of a pipeline was on its way
    pairs = records.pairs["exchange"]
    assert sorted(map(tuple, pairs.ends.tolist())) == list(combinations(range(4), 2))
    for (a, b), seconds in zip(pairs.ends.tolist(), pairs.seconds, strict=True):
        np.testing.assert_allclose(seconds, (way[a, b] + way[b, a]) / 2, atol=2e-6)
    timings.file_of(run, 2).unlink()
    assert sorted(map(tuple, read_runs([run]).pairs["exchange"].ends.tolist())) == [
        (0, 1),
        (0, 2),
        (1, 2),
    ]
