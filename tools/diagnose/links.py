"""Find slow links: groups of ranks whose collectives take longer than those of other groups of the same axis.

The member of a group that comes last waits for nobody, so the shortest member's time is that of the link. A slow port is in
one group of each axis that it serves, and the rank where these groups meet has it.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from telechat_moe.numerics import Array
from telechat_moe.tools.diagnose.causes import Cause
from telechat_moe.tools.diagnose.excess import MANY, LateRow, center, late_rows
from telechat_moe.tools.diagnose.records import COMM, Records

KEPT = 1.5
"""Times the seconds that a rank was stopped or without a core from which on late messages are the link's."""


def late_links(records: Records, step_s: float, calm_s: float) -> list[Cause]:
    """Return the slow links of a run; each names the smallest set of ranks that its records leave.

    ``calm_s`` is a step without waiting, of which an excess is a share.
    """
    late: dict[tuple[str, int], LateRow] = {}
    for axis in records.axes:
        x, peers = transfers(records, axis)
        if len(x) > 1:
            for late_row in late_rows(center(x, peers)[0], peers, calm_s):
                late[axis, late_row.row] = late_row
    causes: list[Cause] = []
    named: set[tuple[str, int]] = set()
    # The largest excess first: where groups meet, it decides.
    for key, late_row in sorted(late.items(), key=lambda item: -item[1].seconds):
        if key in named:
            continue
        rows, also = _meeting(records, key, [other for other in late if other[0] != key[0]])
        named |= {key, *also}
        causes.append(_cause(records, rows, [late_row, *(late[k] for k in also)], step_s))
    return causes


def late_pairs(
    records: Records, step_s: float, calm_s: float, lost: Mapping[int, float]
) -> list[Cause]:
    """Return the slow links between two ranks; a rank most of whose links are slow has a slow port.

    Args:
        lost: Seconds a step by which the threads of ranks were kept from running, by row: messages that are late by no more than
            `KEPT` times that say nothing of their link.
    """
    causes: list[Cause] = []
    for pairs in records.pairs.values():
        ends, seconds = pairs.ends, pairs.seconds
        if len(ends) < 2:
            continue
        alike = np.zeros(len(ends), np.int64)
        x = center(seconds, alike)[0]
        slow = late_rows(x, alike, calm_s, few=MANY)
        if not slow or len(slow) == len(ends):
            continue
        calm = np.median(np.delete(seconds, [link.row for link in slow], axis=0), axis=0)
        late: dict[int, LateRow] = {}
        for link in slow:  # with what its messages took above those of links that are not late
            above = (seconds[link.row] - calm)[link.begin : link.end]
            link = replace(link, seconds=float(np.mean(above)))
            if link.seconds > KEPT * max(lost.get(row, 0.0) for row in ends[link.row].tolist()):
                late[link.row] = link
        rows: list[int] = np.unique(ends[list(late)]).tolist()
        for row in sorted(rows, key=lambda r: -sum(r in ends[i] for i in late)):
            of_row = [i for i in late if row in ends[i]]
            if len(of_row) > 1 and len(of_row) > 0.6 * (ends == row).any(1).sum():
                ones = [late.pop(i) for i in of_row]
                causes.append(_cause(records, np.array([row]), ones, step_s))
        causes += [_cause(records, ends[i], [link], step_s) for i, link in late.items()]
    return causes


def transfers(records: Records, axis: str) -> tuple[Array, Array]:
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
) -> tuple[Array, list[tuple[str, int]]]:
    """Return the rows of a group that are in slow groups of other axes, too, and these groups; else all its rows."""
    rows = np.flatnonzero(records.groups[key[0]] == key[1])
    also: list[tuple[str, int]] = []
    for axis, number in others:
        common = rows[records.groups[axis][rows] == number]
        if len(common):
            rows, also = common, [*also, (axis, number)]
    return rows, also


def _cause(records: Records, rows: Array, lates: list[LateRow], step_s: float) -> Cause:
    span = slice(min(late.begin for late in lates), max(late.end for late in lates))
    seconds = sum(late.seconds for late in lates)
    return Cause.at(
        records,
        rows.tolist(),
        span,
        step_s,
        kinds=("slow_link",),
        scope="link",
        part="comm",
        seconds=seconds,
        sigmas=max(late.sigmas for late in lates),
        lost=seconds * (span.stop - span.start) / len(records.steps) / step_s,
    )
