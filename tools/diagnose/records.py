"""What is known of the time of a run: parts of each step on each rank, and where the ranks are."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from telechat_moe.numerics import Array

LOCAL = ("data", "host", "compute", "save")
"""Parts of a step in which a rank waits for no other rank, seconds."""
LOST = ("gc", "delay", "paused")
"""Seconds that a rank lost for a known reason: collecting garbage, ready but without a core, stopped. Where a record has
no device times they lie beside the parts of `LOCAL`, else inside `host`."""
COUNTS = ("faults", "clock", "remote", "rows", "work")
"""Major page faults of a step, clock of the device (GHz), share of memory on another NUMA node, rows that the experts of a rank
got, work of its sequences (any unit, such as attention pairs)."""
COMM = "comm."
"""Before the name of an axis: seconds in collectives of that axis, waiting for others included."""


@dataclass
class PairLinks:
    """Links between two ranks.

    Attributes:
        ends: Their rows, ``[pairs, 2]``, the lower first.
        seconds: How long the messages of a step were on their way, mean of both directions, ``[pairs, steps]``.
    """

    ends: Array
    seconds: Array


@dataclass(kw_only=True)
class Records:
    """Times of the ranks of a run, every array ``[ranks, steps]``.

    Attributes:
        source: Where they are from, for the user.
        ranks: Numbers of the ranks, rising.
        steps: Numbers of the steps, rising.
        columns: Arrays by name: `LOCAL`, `LOST` and `COUNTS`, and `COMM` with an axis; those that were recorded.
        stage: Pipeline stage of each rank.
        host: Host of each rank, numbered.
        hosts: Names of the hosts.
        groups: For each axis of `COMM` the number of each rank's group.
        pairs: Links by the kind of what they carry.
        inside: Whether the seconds of `LOST` are inside the other parts (else beside them).
        absent: Ranks of the run of which there are no times.
        problems: What could not be read, for the user.
    """

    source: str
    ranks: Array
    steps: Array
    columns: dict[str, Array]
    stage: Array
    host: Array
    hosts: Sequence[str]
    groups: dict[str, Array] = field(default_factory=dict[str, Array])
    pairs: dict[str, PairLinks] = field(default_factory=dict[str, PairLinks])
    inside: bool = True
    absent: Sequence[int] = ()
    problems: list[str] = field(default_factory=list[str])

    @property
    def axes(self) -> list[str]:
        """The axes of parallelism whose collectives were recorded."""
        return [name[len(COMM) :] for name in self.columns if name.startswith(COMM)]

    @property
    def own_parts(self) -> list[str]:
        """Columns of the seconds in which a rank waits for no other; they share no time."""
        parts = (*LOCAL, *(() if self.inside else LOST))
        return [name for name in parts if name in self.columns]

    @cached_property
    def own(self) -> Array:
        """The seconds in which each rank waited for no other, ``[ranks, steps]``; added up once, so columns must not change then."""
        total = np.zeros((len(self.ranks), len(self.steps)), np.float32)
        for name in self.own_parts:
            total += self.columns[name]
        return total

    def calm_seconds(self) -> float:
        """Return what a step of the median rank takes without waiting: its own time, and its shortest collectives."""
        total = float(np.median(self.own))
        for axis in self.axes:
            total += float(np.quantile(self.columns[COMM + axis], 0.05))
        return total

    def mean_seconds(self) -> float:
        """Return the mean step: own time and collectives of all ranks."""
        parts = (*self.own_parts, *(COMM + axis for axis in self.axes))
        return float(sum(self.columns[name].mean(dtype=np.float64) for name in parts))

    def step_seconds(self) -> float:
        """Return the median step: own time and collectives of the median rank."""
        total = self.own.copy()
        for axis in self.axes:
            total += self.columns[COMM + axis]
        return float(np.median(total))
