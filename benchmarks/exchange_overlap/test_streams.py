"""The hidden share of a step worked out by hand: measured, and simulated with the same computation."""

import pytest

from benchmarks.exchange_overlap.streams import Link, Step, events, measured, simulated
from benchmarks.ranks import Transfer

# 2 s of computation, a start, 3 s, another start, 1 s, a wait of 4 s for the first, 1 s, a wait of 2 s, 2 s to the end.
FIRST = Transfer(-1, 1000, started=2.0, arrived=10.0, waits=6.0, goes_on=10.0)
SECOND = Transfer(-2, 500, started=5.0, arrived=13.0, waits=11.0, goes_on=13.0)
STEP = Step(0.0, 15.0, [FIRST, SECOND])


def test_computation_is_what_the_graph_does_not_wait() -> None:
    assert [(e.kind, e.exchange, e.computed) for e in events(STEP)] == [
        ("start", 0, 2.0),
        ("start", 1, 3.0),
        ("wait", 0, 1.0),
        ("wait", 1, 1.0),
        ("end", -1, 2.0),
    ]
    found = measured(STEP)
    assert found.compute_us == pytest.approx(9e6)
    assert found.communication_us == pytest.approx(11e6)  # from 2 to 13, both at once in between
    assert found.exposed_us == pytest.approx(6e6)
    assert found.overlap == pytest.approx(5 / 11)


def test_waiting_at_once_hides_nothing() -> None:
    assert measured(Step(0.0, 9.0, [Transfer(-1, 8, 2.0, 5.0, 2.0, 5.0)])).overlap == 0.0


def test_the_simulation_does_not_see_how_long_the_graph_waited() -> None:
    """Exchanges of 3 s and 2 s, both ranks alike: 2 to 5 and 5 to 7; computation 0 to 6, 6 to 7 and 7 to 9."""
    for found in simulated([STEP, STEP], Link(1.0, 0.002)):
        assert found.span_us == pytest.approx(9e6)
        assert found.communication_us == pytest.approx(5e6)
        assert found.exposed_us == 0.0
    # Latencies run at once, bytes one after the other: 2 to 9 and 5 to 11.5; idle 6 to 9 and 10 to 11.5.
    for slower in simulated([STEP, STEP], Link(6.0, 0.001)):
        assert slower.communication_us == pytest.approx(9.5e6)
        assert slower.exposed_us == pytest.approx(3e6 + 1.5e6)
        assert slower.span_us == pytest.approx(13.5e6)


def test_a_late_rank_delays_the_others() -> None:
    """One starts after 1 s, the other after 3 s; a message takes 1 s. The first waits from 2 to 4, the second not at all."""
    early = Step(0.0, 5.0, [Transfer(-1, 8, started=1.0, arrived=4.0, waits=2.0, goes_on=4.0)])
    late = Step(0.0, 5.0, [Transfer(-1, 8, started=3.0, arrived=2.0, waits=4.0, goes_on=4.0)])
    first, second = simulated([early, late], Link(1.0, 0.0))
    assert (first.communication_us, first.exposed_us) == pytest.approx((3e6, 2e6))
    assert (second.communication_us, second.exposed_us) == (0.0, 0.0)
    assert [measured(s).exposed_us for s in (early, late)] == [2e6, 0.0]


def test_ranks_that_wait_for_each_other_are_an_error() -> None:
    one, other = Transfer(-1, 8, 1.0, 5.0, 2.0, 5.0), Transfer(-2, 8, 6.0, 8.0, 7.0, 8.0)
    swapped = [one._replace(tag=-2), other._replace(tag=-1)]
    with pytest.raises(ValueError, match="2 ranks wait for exchanges"):
        simulated([Step(0.0, 9.0, [one, other]), Step(0.0, 9.0, swapped)], Link(1.0, 0.0))
