"""Causes of lost time: as the judge names them, and their kinds: what is late, what tells a kind from the others, what to do about it."""

from collections.abc import Sequence
from dataclasses import dataclass

from telechat_moe.tools.diagnose.records import Records


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A cause of lost time.

    Attributes:
        kinds: What it is; several: the records cannot tell these apart.
        scope: ``rank``, ``host`` (all ranks of it), ``link`` or ``run`` (all ranks alike).
        ranks: Ranks to blame; of a link that joins a group all that it may be.
        host: Name of their host, empty for several.
        part: Column in which they are late.
        first_step: First step in which it shows.
        last_step: Last step.
        seconds: Mean excess of a step there.
        share: That, over the median step.
        sigmas: Standard deviations of the peers; 0 where all ranks are alike.
        lost: Share of the run's time that would not have passed without it.
    """

    kinds: tuple[str, ...]
    scope: str
    ranks: tuple[int, ...]
    host: str
    part: str
    first_step: int
    last_step: int
    seconds: float
    share: float
    sigmas: float
    lost: float

    @classmethod
    def at(
        cls,
        records: Records,
        rows: Sequence[int],
        span: slice,
        step_s: float,
        *,
        kinds: tuple[str, ...],
        scope: str,
        part: str,
        seconds: float,
        sigmas: float,
        lost: float,
    ) -> "Cause":
        """Return a cause on rows of records in a span of their steps."""
        hosts = {int(records.host[row]) for row in rows}
        steps = records.steps[span]
        return cls(
            kinds=kinds,
            scope=scope,
            ranks=tuple(int(records.ranks[row]) for row in rows),
            host=records.hosts[hosts.pop()] if len(hosts) == 1 else "",
            part=part,
            first_step=int(steps[0]),
            last_step=int(steps[-1]),
            seconds=seconds,
            share=seconds / step_s,
            sigmas=sigmas,
            lost=lost,
        )


@dataclass(frozen=True)
class CauseKind:
    """A kind of cause.

    Attributes:
        part: Column that is late on the ranks to blame.
        needs: Column that tells it from other kinds of the same part; empty: what is left when the others are excluded.
        says: What it is, as the end of "rank 3 ...".
        advice: The next thing to do.
        pulsed: It comes in pulses; otherwise it lasts.
    """

    part: str
    needs: str
    says: str
    advice: str
    pulsed: bool = False


KINDS: dict[str, CauseKind] = {
    "slow_rank": CauseKind(
        "compute",
        "",
        "computes more slowly than its peers at the same clock with the same work",
        "run the device's own check on it, and replace it if it stays slow alone",
    ),
    "frequency_drop": CauseKind(
        "compute",
        "clock",
        "computes at a lower clock than its peers",
        "look at temperature and power of the device, and at its frequency limit",
    ),
    "expert_imbalance": CauseKind(
        "compute",
        "rows",
        "has more rows for its experts than its peers",
        "turn on telechat_moe.moe.placement, or raise moe_router_bias_update_rate",
    ),
    "sequence_imbalance": CauseKind(
        "compute",
        "work",
        "has longer sequences than its peers",
        "set telechat_moe.balance_attention: True",
    ),
    "slow_host": CauseKind(
        "host",
        "",
        "spends longer on the host",
        "look for other processes on the host and compare its core clock and governor with a fast host's",
    ),
    "numa": CauseKind(
        "host",
        "remote",
        "has its memory on another NUMA node",
        "bind the process to the cores and memory beside its device (numactl --cpunodebind --membind)",
    ),
    "garbage_collection": CauseKind(
        "gc",
        "gc",
        "stops to collect garbage",
        "freeze what was loaded (gc.freeze) and collect between checkpoints, on all ranks in the same step",
        pulsed=True,
    ),
    "page_cache": CauseKind(
        "data",
        "faults",
        "waits for pages from the disk",
        "copy the data set to a local disk or into memory, and look at what else fills the page cache",
        pulsed=True,
    ),
    "shared_core": CauseKind(
        "delay",
        "delay",
        "is ready but has no core",
        "give each rank cores of its own (taskset, cgroup), and move other processes away",
    ),
    "paused": CauseKind(
        "paused",
        "paused",
        "is stopped and started again",
        "look for what stops processes on the host: a debugger, a cgroup freezer, suspended virtual machines",
        pulsed=True,
    ),
    "slow_reader": CauseKind(
        "data",
        "",
        "waits for its data",
        "add reader workers or prefetch, and measure the disk that the rank reads from",
    ),
    "checkpoint": CauseKind(
        "save",
        "save",
        "waits for a checkpoint",
        "save less often, in the background, or to a faster disk",
        pulsed=True,
    ),
    "slow_link": CauseKind(
        "comm",
        "comm",
        "has a slow link",
        "test the link of these ranks alone (bandwidth and errors of the port), and swap cable or port",
    ),
}

INSTEAD: dict[str, tuple[str, ...]] = {
    "slow_rank": ("frequency_drop", "expert_imbalance", "sequence_imbalance"),
    "slow_host": ("numa", "garbage_collection", "page_cache", "shared_core", "paused"),
    "slow_reader": ("page_cache", "paused"),
}
"""What a kind that is left over may be instead, where the column that would tell was not recorded."""


def possible(kind: str, recorded: frozenset[str], lasting: bool) -> tuple[str, ...]:
    """Return a kind that is left over and those that the records, which have some columns, cannot exclude.

    ``lasting``: the excess does not come in pulses.
    """
    others = (name for name in INSTEAD.get(kind, ()) if KINDS[name].needs not in recorded)
    return (kind, *(name for name in others if not (lasting and KINDS[name].pulsed)))
