"""Lay out a pipeline program once, and find its longest paths for any times of its chunks.

The makespan is the length of the longest path through the program, and the length of a path is the sum of the times of
its operations. So the makespan is a convex function of the times, and every path is a lower bound for all of them: the
planner's proofs are made of paths. Times are whole picoseconds; the recurrence is that of `schedules.simulate`.
"""

import weakref
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.simulate_step import make_program
from telechat_moe.tools.plan.native import address, load
from telechat_moe.tools.plan.schedules.interleaved import interleaved_warm_up, orders, plain_warm_up
from telechat_moe.tools.plan.schedules.program import OpKind


class PipelineProgram:
    """The order of operations for a schedule, stages, micro-batches and chunks a stage; see :func:`pipeline`."""

    def __init__(self, schedule: str, stages: int, micro_batches: int, chunks: int) -> None:
        self.schedule, self.stages, self.micro_batches = schedule, stages, micro_batches
        self.chunks = stages * chunks
        if schedule in ("1f1b", "interleaved") and stages > 1:
            ahead = interleaved_warm_up(stages, chunks) if chunks > 1 else plain_warm_up(stages)
            self.orders = orders(stages, micro_batches, chunks, ahead)
        else:
            self.orders = _listed(schedule, stages, micro_batches, chunks)
        self.route = np.tile(np.arange(stages, dtype=np.int32), chunks)
        if schedule == "zb-v":
            self.route[stages:] = self.route[:stages][::-1]
        self.operations = sum(map(len, self.orders))
        lengths = np.array([len(o) for o in self.orders], dtype=np.int32)
        self.handle = load().telechat_pipeline_new(
            stages,
            self.chunks,
            micro_batches,
            *map(address, (self.route, lengths, np.concatenate(self.orders))),
        )
        if not self.handle:
            raise BadInputError(f"schedule {schedule}: its operations wait for each other")
        weakref.finalize(self, load().telechat_pipeline_delete, self.handle)


@lru_cache(maxsize=256)
def pipeline(schedule: str, stages: int, micro_batches: int, chunks: int) -> PipelineProgram:
    """Return the program of `1f1b`, `interleaved` or `zb-v`, made once.

    Raises:
        BadInputError: The schedule does not exist for these.
    """
    return PipelineProgram(schedule, stages, micro_batches, chunks)


def _listed(schedule: str, stages: int, micro_batches: int, chunks: int) -> list[NDArray[Any]]:
    layout = Layout(
        pp=stages, vpp=chunks, micro_batches=micro_batches, schedule=schedule  # type: ignore[arg-type]
    )  # fmt: skip
    number = {OpKind.F: 0, OpKind.B: 1, OpKind.D: 1, OpKind.W: 2}
    return [
        np.array(
            [(number[k] * stages * chunks + c) * micro_batches + i for k, c, i, *_ in ops],
            dtype=np.int32,
        )
        for ops in make_program(layout).ops
    ]
