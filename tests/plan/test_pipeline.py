"""Pipelines laid out in C++ against the simulator."""

import numpy as np
import pytest

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.simulate_step import make_program
from telechat_moe.tools.plan.schedules.program import Kind, Times
from telechat_moe.tools.plan.schedules.simulate import simulate
from telechat_moe.tools.plan.search.pipeline_paths import Pipeline, pipeline

SHAPES = [
    ("1f1b", 1, 5, 1),
    ("1f1b", 4, 4, 1),
    ("1f1b", 4, 9, 1),
    ("interleaved", 2, 2, 3),
    ("interleaved", 4, 12, 2),
    ("zb-v", 4, 9, 2),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_makespan_and_path_are_the_simulators(shape: tuple[str, int, int, int]) -> None:
    schedule, stages, micro_batches, chunks = shape
    made = pipeline(*shape)
    layout = Layout(pp=stages, vpp=chunks, micro_batches=micro_batches, schedule=schedule)  # type: ignore[arg-type]
    program = make_program(layout)
    number = {Kind.F: 0, Kind.B: 1, Kind.D: 1, Kind.W: 2}
    listed = [
        [(number[k] * stages * chunks + c) * micro_batches + i for k, c, i, *_ in own]
        for own in program.ops
    ]
    assert [o.tolist() for o in made.orders] == listed
    rng = np.random.default_rng(3)
    for seed in range(5):
        times = rng.integers(0, 50, (3, stages * chunks))
        times[2] *= schedule == "zb-v"
        expected = simulate(program, Times(*times.astype(float), comm=7)).makespan
        makespan, path = made.path(times, 7, seed)
        assert makespan == made.makespan(times, 7) == expected
        assert (path.counts * times).sum() + 7 * path.sends == expected
        assert path.counts.sum() == len(path.ops)


def test_a_path_is_a_bound_for_all_times() -> None:
    made, rng = pipeline("interleaved", 4, 8, 2), np.random.default_rng(4)
    _, path = made.path(rng.integers(1, 50, (3, 8)), 3)
    for _ in range(50):
        times = rng.integers(1, 50, (3, 8))
        assert (path.counts * times).sum() + 3 * path.sends <= made.makespan(times, 3)


def test_interleaved_needs_whole_rounds() -> None:
    with pytest.raises(BadInputError, match="expected a multiple of 4"):
        Pipeline("interleaved", 4, 6, 2)
