"""The orders that are laid out in C++ are those of the programs."""

import pytest

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.simulate_step import make_program
from telechat_moe.tools.plan.schedules.program import OpKind
from telechat_moe.tools.plan.search.pipeline_program import PipelineProgram, pipeline

SHAPES = [
    ("1f1b", 1, 5, 1),
    ("1f1b", 4, 4, 1),
    ("1f1b", 4, 9, 1),
    ("interleaved", 2, 2, 3),
    ("interleaved", 4, 12, 2),
    ("zb-v", 4, 9, 2),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_orders_are_the_programs(shape: tuple[str, int, int, int]) -> None:
    schedule, stages, micro_batches, chunks = shape
    made = pipeline(*shape)
    layout = Layout(pp=stages, vpp=chunks, micro_batches=micro_batches, schedule=schedule)  # type: ignore[arg-type]
    program = make_program(layout)
    number = {OpKind.F: 0, OpKind.B: 1, OpKind.D: 1, OpKind.W: 2}
    listed = [
        [(number[k] * stages * chunks + c) * micro_batches + i for k, c, i, *_ in ops]
        for ops in program.ops
    ]
    assert [o.tolist() for o in made.orders] == listed


def test_interleaved_needs_whole_rounds() -> None:
    with pytest.raises(BadInputError, match="expected a multiple of 4"):
        PipelineProgram("interleaved", 4, 6, 2)
