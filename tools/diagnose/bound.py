"""What bounds the steps of each stage: the device, communication, the host, data or checkpoints.

A step of a stage is as long as its latest rank; the largest of that rank's parts bounds it. What others wait for this rank is no
communication: that counts as the device's, host's... time of the rank that they wait for.
"""

from dataclasses import dataclass

import numpy as np

from telechat_moe.numerics import Array
from telechat_moe.tools.diagnose.links import transfers
from telechat_moe.tools.diagnose.records import COMM, LOST, Records

BOUNDS = {
    "compute": "device",
    "comm": "communication",
    "host": "host",
    "data": "data",
    "save": "checkpoint",
}
"""What a step is bound by, by its largest part."""


@dataclass(frozen=True)
class StageBound:
    """What bounds a stage.

    Attributes:
        stage: Number of the stage.
        shares: Mean share of each of `BOUNDS` in the time of the latest rank.
        steps: Share of the steps that each bounds.
        by_step: The bound of each step, as a number in `BOUNDS`.
        latest: Row of the latest rank of each step.
    """

    stage: int
    shares: dict[str, float]
    steps: dict[str, float]
    by_step: np.ndarray
    latest: np.ndarray

    @property
    def bound(self) -> str:
        """The name in `BOUNDS` that bounds most steps."""
        return max(self.steps, key=lambda name: self.steps[name])


def stage_bounds(records: Records) -> list[StageBound]:
    """Return for each pipeline stage what bounds its steps."""
    names, columns = list(BOUNDS.values()), np.arange(len(records.steps))
    measured = {**records.columns, "comm": _moved(records)}
    bounds: list[StageBound] = []
    for stage in range(int(records.stage.max()) + 1):
        rows = np.flatnonzero(records.stage == stage)
        latest = rows[records.own[rows].argmax(0)]
        parts = np.zeros((len(names), len(columns)))
        for number, part in enumerate(BOUNDS):
            if part in measured:
                parts[number] = measured[part][latest, columns]
        if not records.inside:  # beside the host: lost there
            lost = [measured[name][latest, columns] for name in LOST if name in measured]
            parts[names.index("host")] += sum(lost)
        by_step, total = parts.argmax(0), parts.sum()
        shares = {n: float(p.sum() / (total or 1)) for n, p in zip(names, parts, strict=True)}
        steps = {n: float((by_step == i).mean()) for i, n in enumerate(names)}
        bounds.append(StageBound(stage, shares, steps, by_step, latest))
    return bounds


def _moved(records: Records) -> Array:
    """Return the seconds of collectives of each rank without waiting for others, ``[ranks, steps]``."""
    total = np.zeros((len(records.ranks), len(records.steps)), np.float32)
    for axis in records.axes:
        seconds, _ = transfers(records, axis)
        total += seconds[np.unique(records.groups[axis], return_inverse=True)[1]]
    return total


def waiting(records: Records) -> float:
    """Return the share of all ranks' time that they wait for other ranks."""
    total = records.mean_seconds()
    comm = sum(records.columns[COMM + axis].mean(dtype=np.float64) for axis in records.axes)
    return float(comm - _moved(records).mean(dtype=np.float64)) / total if total else 0.0
