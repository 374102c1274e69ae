"""Causes that are put into small records by hand, one of each kind, and what the records cannot tell apart."""

import numpy as np
import pytest
from clusters import STEPS, alike, pulses
from hypothesis import given, settings
from hypothesis import strategies as st

from telechat_moe.tools.diagnose.bound import stage_bounds
from telechat_moe.tools.diagnose.causes import KINDS, Cause
from telechat_moe.tools.diagnose.judge import Judge
from telechat_moe.tools.diagnose.records import Records
from telechat_moe.tools.diagnose.report import diagnose

BAD = 6


LATE = {
    "slow_rank": "compute",
    "numa": "host",
    "slow_reader": "data",
    "shared_core": "host",
    "frequency_drop": "compute",
    "expert_imbalance": "compute",
    "sequence_imbalance": "compute",
}
"""What lasts, and the part in which it is late."""
PULSED = {
    "garbage_collection": "host",
    "paused": "host",
    "page_cache": "data",
    "checkpoint": "save",
}


def put(kind: str, records: Records, seconds: float = 0.08) -> Records:
    """Make rank `BAD` late by so many seconds a step (the host's ranks where a host is slow)."""
    c = records.columns
    beside = {
        "frequency_drop": ("clock", -1.8 * (1 - 1 / (1 + seconds / 0.8))),
        "expert_imbalance": ("rows", seconds / 1e-4),
        "sequence_imbalance": ("work", seconds / 2e-5),
        "numa": ("remote", 0.5),
        "shared_core": ("delay", seconds),
        "garbage_collection": ("gc", pulses(seconds * 8)),
        "paused": ("paused", pulses(seconds * 8)),
        "page_cache": ("faults", 50 * (pulses(1.0) > 0)),
    }
    if kind in beside:
        name, more = beside[kind]
        c[name][BAD] += more
    if kind in LATE:
        c[LATE[kind]][BAD] += seconds
    elif kind in PULSED:
        c[PULSED[kind]][BAD] += pulses(seconds * 8)
    elif kind == "slow_host":
        c["host"][4:8] += seconds
    else:
        for axis in ("row", "column"):
            mine = records.groups[axis] == records.groups[axis][BAD]
            c[f"comm.{axis}"][mine] += seconds / 2
    return records


def named(records: Records) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    return [(cause.kinds, cause.ranks) for cause in Judge(records).causes()]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_named_with_its_rank_and_nothing_else(kind: str):
    ranks = (4, 5, 6, 7) if kind == "slow_host" else (BAD,)
    assert named(put(kind, alike())) == [((kind,), ranks)]


@pytest.mark.parametrize("seed", range(10))
def test_ranks_that_are_alike_have_no_cause(seed: int):
    assert named(alike(seed=seed)) == []


def test_one_late_step_is_no_cause():
    records = alike()
    records.columns["compute"][BAD, 40] += 5.0
    assert named(records) == []


@pytest.mark.parametrize(
    ("kind", "lacks", "kinds"),
    [
        ("frequency_drop", ["clock"], {"slow_rank", "frequency_drop"}),
        ("expert_imbalance", ["rows"], {"slow_rank", "expert_imbalance"}),
        ("slow_rank", ["clock", "rows", "work"], {"slow_rank", "frequency_drop", "expert_imbalance", "sequence_imbalance"}),
        ("numa", ["remote"], {"slow_host", "numa"}),
        # what lasts is no collection of garbage and no pause; pulses may be
        ("numa", ["remote", "gc", "paused"], {"slow_host", "numa"}),
        ("paused", ["gc", "paused"], {"slow_host", "garbage_collection", "paused"}),
        ("shared_core", ["delay"], {"slow_host", "shared_core"}),
        ("page_cache", ["faults"], {"slow_reader", "page_cache"}),
    ],
)  # fmt: skip
def test_what_records_cannot_tell_apart_is_named_together(
    kind: str, lacks: list[str], kinds: set[str]
):
    records = put(kind, alike())
    for name in lacks:
        del records.columns[name]
    (cause,) = Judge(records).causes()
    assert (set(cause.kinds), cause.ranks) == (kinds, (BAD,))


def test_a_slow_link_of_one_axis_is_somewhere_in_its_group():
    records = alike()
    records.columns["comm.row"][4:8] += 0.08
    assert named(records) == [(("slow_link",), (4, 5, 6, 7))]


def test_waiting_for_a_late_rank_is_no_slow_link():
    records = put("slow_rank", alike())
    for axis in ("row", "column"):
        mine = records.groups[axis] == records.groups[axis][BAD]
        mine[BAD] = False
        records.columns[f"comm.{axis}"][mine] += 0.08
    assert named(records) == [(("slow_rank",), (BAD,))]


def test_a_cause_that_begins_late_is_named_with_its_steps():
    records = alike()
    records.columns["compute"][BAD, STEPS // 2 :] += 0.08
    (cause,) = Judge(records).causes()
    assert (cause.first_step, cause.last_step) == (10 + STEPS // 2, 9 + STEPS)
    assert cause.seconds == pytest.approx(0.08, rel=0.1)
    assert cause.lost == pytest.approx(0.5 * 0.08 / Judge(records).step_s, rel=0.25)


def test_two_causes_of_one_rank_are_told_apart():
    records = put("garbage_collection", put("frequency_drop", alike()))
    assert {kinds for kinds, _ in named(records)} == {("frequency_drop",), ("garbage_collection",)}


def test_a_step_of_another_stage_is_no_peer():
    records = alike(stages=2)
    records.columns["compute"][records.stage == 1] += 0.5
    assert named(records) == []


def test_what_all_ranks_wait_for_is_a_cause_of_the_run():
    records = alike()
    records.columns["save"][:] += pulses(0.5)
    (cause,) = Judge(records).causes()
    assert (cause.kinds, cause.scope, cause.ranks) == (("checkpoint",), "run", ())
    assert cause.seconds == pytest.approx(0.0625, rel=0.01)


def test_two_ranks_are_compared_with_each_other():
    records = alike(2)
    records.columns["data"][1] += 0.1
    assert named(records) == [(("slow_reader",), (1,))]


def test_of_two_ranks_the_one_that_is_stopped_now_and_then_is_named():
    """As SIGSTOP in a second out of four was recorded on two busy cores: steps of very different lengths."""
    records = alike(2)
    rng = np.random.default_rng(3)
    records.columns["paused"][1] = rng.exponential(0.4, STEPS) * (rng.random(STEPS) < 0.6)
    records.inside = False
    assert named(records) == [(("paused",), (1,))]


def test_one_rank_has_no_peers_and_that_is_no_pass():
    diagnosis = diagnose(alike(1))
    assert diagnosis.verdict == "inconclusive"
    assert "has one rank" in diagnosis.not_judged["ranks"]


@settings(deadline=None, max_examples=15)
@given(st.permutations(range(16)), st.floats(0.001, 1000))
def test_neither_numbers_of_ranks_nor_units_of_time_matter(order: list[int], scale: float):
    records = put("slow_rank", alike())
    moved = np.array(order)
    for name, x in records.columns.items():
        timed = name not in ("faults", "clock", "remote", "rows", "work")
        records.columns[name] = x[moved] * np.float32(scale if timed else 1)
    records.groups = {axis: numbers[moved] for axis, numbers in records.groups.items()}
    records.host = records.host[moved]
    assert named(records) == [(("slow_rank",), (order.index(BAD),))]


@pytest.mark.parametrize(
    ("part", "bound"),
    [("compute", "device"), ("host", "host"), ("data", "data"), ("save", "checkpoint"), ("comm.row", "communication")],
)  # fmt: skip
def test_the_largest_part_bounds_a_step(part: str, bound: str):
    records = alike(stages=2)
    records.columns[part][:, :60] += 3
    for stage in stage_bounds(records):
        assert stage.bound == bound
        assert stage.steps[bound] == (1.0 if bound == "device" else 0.75)


def test_costs_are_what_the_run_would_not_have_taken():
    """The second latest rank takes over: removing the latest saves only the difference."""
    records = alike()
    records.columns["compute"][BAD] += 0.30
    records.columns["compute"][11] += 0.20
    causes: dict[int, Cause] = {c.ranks[0]: c for c in Judge(records).causes()}
    step = Judge(records).step_s
    assert causes[BAD].lost == pytest.approx(0.10 / step, rel=0.03)
    assert causes[11].lost == pytest.approx(0.0, abs=0.001)
