"""Activations that leave the memory of CPU processes and come back: the bits, the peak, the pool."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import schedule_run as run
import sharded_compare as compare
from test_pipeline_schedules import differences

from telechat_moe.graph.execute import Job
from telechat_moe.graph.swapping import ALIGNMENT, in_pool

TENSORS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40), st.integers(1, 20)))


@given(TENSORS)
def test_no_two_tensors_are_at_one_place_at_a_time(drawn: list[tuple[int, int, int]]) -> None:
    """Brute force over pairs; the pool is as large as the last byte, and no larger than all of them."""
    tensors = [
        (size, first, first + more) for size, first, more in sorted(drawn, key=lambda x: x[1])
    ]
    places, pool = in_pool(tensors)
    rows = [(at, at + size, *when) for at, (size, *when) in zip(places, tensors, strict=True)]
    for (begin, end, first, last), (start, stop, early, late) in itertools.combinations(rows, 2):
        assert end <= start or stop <= begin or last < early or late < first
    assert max((end for _, end, *_ in rows), default=0) <= pool
    assert pool <= sum(size + ALIGNMENT for size, *_ in tensors)


@pytest.mark.slow
@pytest.mark.parametrize("case", run.SWAPS)
def test_swapping_has_the_bits_of_not_swapping(tmp_path: Path, case: str) -> None:
    """Losses, norm, loads and all parameters; tensors at one place are seen."""
    compare.call(tmp_path, "compile", [case], script=run.__file__)
    devices = run.CASES[case].devices
    compare.call(tmp_path, "work", [case], devices, script=run.__file__)
    assert differences(tmp_path, run.SWAPPED, devices) == []
    assert all(s and s.tensors > 10 for s in Job.read(tmp_path / run.SWAPPED).swapped)
    assert Job.read(tmp_path / run.OWN).swapped == [None] * devices
    assert differences(tmp_path, run.OVERWRITTEN, devices)
