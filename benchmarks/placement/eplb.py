"""EPLB's algorithm, written from its description (github.com/deepseek-ai/EPLB), as the peer: one layer at a time, no NumPy.

The global policy: spare slots go one by one to the expert with the most load for each copy; copies are then packed, the largest
first, on the least loaded device that has room. The hierarchical policy packs groups of experts on nodes first, and does the
same within each node. Neither knows where experts are.
"""

from collections.abc import Sequence


def replicate(loads: Sequence[float], slots: int) -> list[int]:
    """Return the expert in each of `slots` slots, the first ones in order."""
    held, count = list(range(len(loads))), [1] * len(loads)
    while len(held) < slots:
        hottest = max(range(len(loads)), key=lambda e: loads[e] / count[e])
        held.append(hottest)
        count[hottest] += 1
    return held


def pack(loads: Sequence[float], devices: int) -> list[int]:
    """Return the device of each item; all devices get equally many."""
    room, total, place = [len(loads) // devices] * devices, [0.0] * devices, [0] * len(loads)
    for item in sorted(range(len(loads)), key=lambda i: -loads[i]):
        device = min((d for d in range(devices) if room[d]), key=total.__getitem__)
        place[item], room[device] = device, room[device] - 1
        total[device] += loads[item]
    return place


def busiest(loads: Sequence[float], place: Sequence[int], devices: int) -> float:
    """Return the load of the busiest device."""
    total = [0.0] * devices
    for load, device in zip(loads, place, strict=True):
        total[device] += load
    return max(total)


def spread(loads: Sequence[float], held: Sequence[int]) -> list[float]:
    """Return the load of each copy: those of an expert share its load."""
    count = [held.count(e) for e in range(len(loads))]
    return [loads[e] / count[e] for e in held]


def hierarchical(
    loads: Sequence[float], slots: int, groups: int, nodes: int, devices: int
) -> tuple[list[int], list[int]]:
    """Return the expert in each slot and the slot's device; a group of experts stays on one node."""
    size = len(loads) // groups
    node_of = pack([sum(loads[g * size : (g + 1) * size]) for g in range(groups)], nodes)
    held: list[int] = []
    place: list[int] = []
    for node in range(nodes):
        experts = [e for e in range(len(loads)) if node_of[e // size] == node]
        own = replicate([loads[e] for e in experts], slots // nodes)
        each = spread([loads[e] for e in experts], own)
        held += [experts[i] for i in own]
        place += [node * devices // nodes + d for d in pack(each, devices // nodes)]
    return held, place
