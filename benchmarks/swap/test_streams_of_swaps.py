"""Waiting worked out by hand."""

import pytest

from benchmarks.ranks import Transfer
from benchmarks.swap.streams import measured, predicted

# Out: started at 10 and 11, waited for at 13 (until 14) and 15. Back: started at 18, waited for at 20.
COPIES = [
    Transfer(0, 100, started=10.0, arrived=14.0, waits=13.0, goes_on=14.0),
    Transfer(2, 200, started=11.0, arrived=15.0, waits=15.0, goes_on=15.0),
    Transfer(1, 100, started=18.0, arrived=19.0, waits=20.0, goes_on=20.0),
]


def test_waiting_is_from_the_wait_until_it_goes_on() -> None:
    assert measured(COPIES) == pytest.approx(1.0)
    assert measured([]) == predicted([], 1.0) == 0.0


def test_copies_of_a_direction_follow_each_other() -> None:
    """Computation is 0 to 3, 1 s to the second wait, 3 s to the way back, 2 s to its wait.

    At 0.05 s a byte copies take 5, 10 and 5 s: out until 5 and 15; waits from 3 to 5 and from 6 to 15; back from 18 to 23,
    waited for at 20.
    """
    assert predicted(COPIES, 0.05) == pytest.approx(2.0 + 9.0 + 3.0)


def test_a_fast_link_is_not_waited_for() -> None:
    assert predicted(COPIES, 0.01) == 0.0


def test_both_directions_are_free_for_each_other() -> None:
    copies = [Transfer(0, 100, 0.0, 1.0, 5.0, 5.0), Transfer(3, 100, 0.0, 1.0, 6.0, 6.0)]
    assert predicted(copies, 0.06) == pytest.approx(
        1.0
    )  # until 6, waited for at 5; the other is there at 6, too
