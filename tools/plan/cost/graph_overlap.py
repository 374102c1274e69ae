"""How much of each all-to-all of a compiled graph computation hides, by the cost model.

The parts of a forward and a backward pass that overlap, as `telechat_moe.graph.overlap` reads them from the graph, run
on one stream, their exchanges on another, in the order of MindSpore's backend: part j of the forward pass, its exchange,
part j of the backward pass, its exchange, and so on. Times are those of one device description: products at
the share of the peak that it reaches, other operators by their traffic. Collectives of other groups take no time here.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from telechat_moe.tools.plan.cost.collectives import all_to_all
from telechat_moe.tools.plan.cost.device import Device
from telechat_moe.tools.plan.cost.expert_overlap import union_us


def compute_s(work: dict[str, float], device: Device, compute: str = "bf16") -> float:
    """Return the seconds of the work of a part (`operators`, `flops`, `bytes`)."""
    c = device.constants
    rate = device.peak(compute) * c.matmul_share
    return work["flops"] / rate + work["bytes"] / (device.memory_bandwidth * c.memory_share)


def exchange_s(row: dict[str, Any], device: Device) -> float:
    """Return the seconds of an exchange (`bytes` of a device, `ranks` of its group)."""
    ranks = sorted(row["ranks"])
    if len(ranks) < 2:
        return 0.0
    size, members, stride = (
        np.array([float(x)]) for x in (row["bytes"], len(ranks), ranks[1] - ranks[0])
    )
    return float(all_to_all(size, members, stride, device)[0])


def hide(pairs: list[dict[str, Any]], device: Device) -> None:
    """Add to each exchange of a stage's `overlap` its `seconds` and the `hidden` share of them, to a pair its `drawn`.

    `drawn` is the steady state: lane (`compute`, `exchange`), pass, part, start and end in seconds.
    """
    for pair in pairs:
        parts = {
            letter: [compute_s(work, device) for work in pair[name]]
            for letter, name in (("F", "forward"), ("B", "backward"))
        }
        exchanges = {(row["pass"], row["index"]): row for row in pair["exchanges"]}
        for row in exchanges.values():
            row["seconds"] = exchange_s(row, device)
        seconds = {key: row["seconds"] for key, row in exchanges.items()}
        slots = _run(_order(parts, pair["free"]), parts, seconds)
        compute = [(s.start, s.end) for s in slots if s.lane == "compute"]
        counted = [s for s in slots if s.repeat == COUNTED]
        begin = min(s.start for s in counted)
        pair["drawn"] = [
            {
                **{"lane": s.lane, "pass": s.letter, "part": s.part},
                **{"start": s.start - begin, "end": s.end - begin},
            }
            for s in counted
        ]
        for s in counted:
            if s.lane == "exchange":
                beside = [(max(a, s.start), min(b, s.end)) for a, b in compute]
                covered = union_us((a, b) for a, b in beside if a < b)
                length = s.end - s.start
                exchanges[s.letter, s.part]["hidden"] = covered / length if length else 1.0


def share(pairs: list[dict[str, Any]]) -> float:
    """Return the share of the time of all exchanges of a step's pairs that is hidden; nan without exchanges."""
    rows = [(pair["times"] * row["seconds"], row) for pair in pairs for row in pair["exchanges"]]
    total = sum(seconds for seconds, _ in rows)
    return sum(s * row["hidden"] for s, row in rows) / total if total else math.nan


class _Slot(NamedTuple):
    """A part or an exchange in the simulation; seconds."""

    lane: str
    letter: str
    part: int
    repeat: int
    start: float
    end: float


REPEATS, COUNTED = 4, 2
"""How often a pair follows itself, and which repeat counts: computation before and after it is there."""


def _order(parts: dict[str, list[float]], free: bool) -> list[tuple[str, int]]:
    """Return the parts in the backend's order: in turn, or, where one pass needs the other, the backward pass first."""
    if not free:
        return [(letter, j) for letter in "BF" for j in range(len(parts[letter]))]
    both = [(j, "FB".index(letter), letter) for letter in "FB" for j in range(len(parts[letter]))]
    return [(letter, j) for j, _, letter in sorted(both)]


def _run(
    order: list[tuple[str, int]],
    parts: dict[str, list[float]],
    seconds: dict[tuple[str, int], float],
) -> list[_Slot]:
    """Return when each part and each exchange runs: each stream in order, a part after the exchange before it."""
    slots: list[_Slot] = []
    computing = exchanging = 0.0
    for repeat in range(REPEATS):
        arrived = {"F": 0.0, "B": 0.0}
        for letter, j in order:
            start = max(computing, arrived[letter])
            computing = start + parts[letter][j]
            slots.append(_Slot("compute", letter, j, repeat, start, computing))
            if (letter, j) in seconds:
                start = max(exchanging, computing)
                exchanging = start + seconds[letter, j]
                arrived[letter] = exchanging
                slots.append(_Slot("exchange", letter, j, repeat, start, exchanging))
    return slots
