"""Find slow links: groups of ranks whose collectives take longer than those of other groups of the same axis.

The member of a group that comes last waits for nobody, so the shortest member's time is that of the link. A slow port is in
one group of each axis that it serves, and the rank where these groups meet has it.
"""

import numpy as np

from telechat_moe.tools.diagnose.cause import Cause
from telechat_moe.tools.diagnose.excess import FLOOR, LEAST, Late, center, late_rows
from telechat_moe.tools.diagnose.records import COMM, Floats, Ints, Records


def late_links(records: Records, step_s: float, calm_s: float) -> list[Cause]:
    """Return the slow links of a run; each names the smallest set of ranks that its records leave.

    Args:
        step_s: Median step in seconds.
        calm_s: A step without waiting, of which an excess is a share.
    """
    late: dict[tuple[str, int], Late] = {}
    for axis in records.axes:
        x, peers = transfers(records, axis)
        if len(x) > 1:
            for one in late_rows(center(x, peers)[0], peers, LEAST * calm_s, FLOOR * calm_s):
                late[axis, one.row] = one
    causes: list[Cause] = []
    done: set[tuple[str, int]] = set()
    # The largest excess first: where groups meet, it decides.
    for key, one in sorted(late.items(), key=lambda item: -item[1].seconds):
        if key in done:
            continue
        rows, also = _meeting(records, key, [other for other in late if other[0] != key[0]])
        done |= {key, *also}
        causes.append(_cause(records, rows, [one, *(late[k] for k in also)], step_s))
    return causes


def transfers(records: Records, axis: str) -> tuple[Floats, Ints]:
    """Return the seconds of each group's collectives without waiting, ``[groups, steps]``, and its peers: those of its stage."""
    numbers = records.groups[axis]
    order = np.argsort(numbers, kind="stable")
    starts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
    shortest = np.minimum.reduceat(records.columns[COMM + axis][order], starts, axis=0)
    stages = records.stage[order]
    low, high = np.minimum.reduceat(stages, starts), np.maximum.reduceat(stages, starts)
    return shortest, np.where((low == high).all(), low, 0)


def _meeting(
    records: Records, key: tuple[str, int], others: list[tuple[str, int]]
) -> tuple[Ints, list[tuple[str, int]]]:
    """Return the rows of a group that are in slow groups of other axes, too, and these groups; else all its rows."""
    rows = np.flatnonzero(records.groups[key[0]] == key[1])
    also: list[tuple[str, int]] = []
    for axis, number in others:
        common = rows[records.groups[axis][rows] == number]
        if len(common):
            rows, also = common, [*also, (axis, number)]
    return rows, also


def _cause(records: Records, rows: Ints, lates: list[Late], step_s: float) -> Cause:
    begin, end = min(one.begin for one in lates), max(one.end for one in lates)
    seconds = sum(one.seconds for one in lates)
    hosts: list[int] = np.unique(records.host[rows]).tolist()
    passed = (end - begin) / len(records.steps)
    return Cause(
        kinds=("slow_link",),
        scope="link",
        ranks=tuple(int(rank) for rank in records.ranks[rows]),
        host=records.hosts[hosts[0]] if len(hosts) == 1 else "",
        part="comm",
        first_step=int(records.steps[begin]),
        last_step=int(records.steps[end - 1]),
        seconds=seconds,
        share=seconds / step_s,
        sigmas=max(one.sigmas for one in lates),
        lost=seconds * passed / step_s,
    )
