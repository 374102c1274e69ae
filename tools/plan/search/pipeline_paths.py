"""A pipeline program laid out once, and its longest paths for any times of its chunks.

The makespan is the largest of the lengths of all paths through the program, and the length of a path is the times of
its operations added up. So it is a convex function of the times, and every path is a lower bound for all of them: that
is what the planner's proofs are made of. Times are whole picoseconds; the recurrence is that of `schedules.simulate`.
"""

import ctypes
import weakref
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.simulate_step import make_program
from telechat_moe.tools.plan.native import address, load
from telechat_moe.tools.plan.schedules.program import Kind

KINDS = ("forward", "backward", "weight")
"""F; B, or D where the schedule has dW apart; W."""


@dataclass(frozen=True)
class Path:
    """One path through a program."""

    ops: NDArray[Any]
    """Its operations in order, `(kind * chunks + chunk) * micro_batches + micro_batch`, int32."""

    counts: NDArray[Any]
    """How many are of each kind and chunk, [3, chunks]."""

    sends: int
    """How often it passes from one stage to another."""


class Pipeline:
    """The order of one schedule, stages, micro-batches and chunks a stage; see :func:`pipeline`."""

    def __init__(self, schedule: str, stages: int, micro_batches: int, chunks: int) -> None:
        self.schedule, self.stages, self.micro_batches = schedule, stages, micro_batches
        self.chunks = stages * chunks
        orders = self.orders = (
            _interleaved(stages, micro_batches, chunks)
            if schedule in ("1f1b", "interleaved") and stages > 1
            else _listed(schedule, stages, micro_batches, chunks)
        )
        self.route = np.tile(np.arange(stages, dtype=np.int32), chunks)
        if schedule == "zb-v":
            self.route[stages:] = self.route[:stages][::-1]
        self.operations = sum(map(len, orders))
        lengths = np.array([len(o) for o in orders], dtype=np.int32)
        self.at = load().telechat_pipeline_new(
            stages,
            self.chunks,
            micro_batches,
            *map(address, (self.route, lengths, np.concatenate(orders))),
        )
        if not self.at:
            raise BadInputError(f"schedule {schedule}: its operations wait for each other")
        weakref.finalize(self, load().telechat_pipeline_delete, self.at)

    def makespan(self, times: NDArray[Any], send: int) -> int:
        """Return the makespan.

        Args:
            times: Of each kind and chunk, [3, chunks] int64.
            send: Time between stages.
        """
        given = np.ascontiguousarray(times, dtype=np.int64)
        return load().telechat_pipeline_path(self.at, address(given), int(send), 0, None, None)

    def path(self, times: NDArray[Any], send: int, seed: int = 0) -> tuple[int, Path]:
        """Return the makespan and a longest path; of several `seed` takes one."""
        ops, length = np.empty(self.operations, dtype=np.int32), ctypes.c_int32()
        given = np.ascontiguousarray(times, dtype=np.int64)
        makespan = load().telechat_pipeline_path(
            self.at, address(given), int(send), seed, address(ops), ctypes.byref(length)
        )
        return makespan, self.as_path(ops[: length.value])

    def as_path(self, ops: NDArray[Any]) -> Path:
        """Return operations that follow each other as a path."""
        what = ops // self.micro_batches
        counts = np.bincount(what, minlength=3 * self.chunks).reshape(3, self.chunks)
        stage = self.route[what % self.chunks]
        return Path(ops.copy(), counts, int((stage[1:] != stage[:-1]).sum()))


@lru_cache(maxsize=256)
def pipeline(schedule: str, stages: int, micro_batches: int, chunks: int) -> Pipeline:
    """Return the program of a schedule, made once.

    Args:
        schedule: `1f1b`, `interleaved`, `zb-v`.
        stages: P.
        micro_batches: m.
        chunks: Chunks of a stage, V.

    Raises:
        BadInputError: The schedule does not exist for these.
    """
    return Pipeline(schedule, stages, micro_batches, chunks)


def _interleaved(stages: int, micro_batches: int, chunks: int) -> list[NDArray[Any]]:
    """Return 1F1B's order, interleaved with several chunks: what `schedules.interleaved` and `one_f_one_b` list."""
    p, m, total = stages, micro_batches, micro_batches * chunks
    if chunks > 1 and m % p:
        raise BadInputError(f"interleaved 1F1B: {m} micro-batches, expected a multiple of {p}")
    turn, micro = np.zeros(m, dtype=np.int64), np.arange(m)
    if chunks > 1:
        turn = np.tile(np.repeat(np.arange(chunks), p), m // p)
        micro = np.tile(np.arange(p), m // p * chunks) + np.repeat(np.arange(0, m, p), p * chunks)
    orders: list[NDArray[np.int32]] = []
    for s in range(p):
        ahead = p - 1 - s if chunks == 1 else 2 * (p - 1 - s) + (chunks - 1) * p
        ahead = min(ahead, total)
        forward = (turn * p + s) * m + micro
        backward = (p * chunks + (chunks - 1 - turn) * p + s) * m + micro
        both = np.stack([forward[ahead:], backward[: total - ahead]], axis=1).ravel()
        order = np.concatenate([forward[:ahead], both, backward[total - ahead :]])
        orders.append(order.astype(np.int32))
    return orders


def _listed(schedule: str, stages: int, micro_batches: int, chunks: int) -> list[NDArray[Any]]:
    layout = Layout(
        pp=stages, vpp=chunks, micro_batches=micro_batches, schedule=schedule  # type: ignore[arg-type]
    )  # fmt: skip
    number = {Kind.F: 0, Kind.B: 1, Kind.D: 1, Kind.W: 2}
    return [
        np.array(
            [(number[k] * stages * chunks + c) * micro_batches + i for k, c, i, *_ in own],
            dtype=np.int32,
        )
        for own in make_program(layout).ops
    ]
