"""The neighbourhood of a call in the data flow: the calls at most two edges before and after it."""

from dataclasses import replace
from typing import Any

from telechat_moe.tools.align.dump.records import Call, Dump
from telechat_moe.tools.align.judge.data_flow import DataFlow

REACH = 2  # distance in calls
_WINDOW = 120  # calls before and after, in the order of the run, that are searched
_WIDE = 5  # calls shown at one distance


def around(dump: Dump, step: int, rank: int, key: str) -> dict[str, Any] | None:
    """Return the neighbourhood of a call in the data flow; None: the call is not in the dump.

    Plain JSON types: ``nodes`` (key, name, phase, module, distance: below 0 before) and ``edges`` (from, to, tensor, shape).
    """
    rank_dump = dump.ranks.get((step, rank))
    if rank_dump is None or key not in rank_dump.calls:
        return None
    ran = rank_dump.calls
    keys = list(ran)
    position = keys.index(key)
    near_keys = keys[max(0, position - _WINDOW) : position + _WINDOW + 1]
    calls = {k: ran[k] for k in near_keys if k == key or ran[k].kind == "api"}
    flow = DataFlow(replace(rank_dump, calls=calls))
    edges: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}
    for call in calls.values():
        for place, tensor in call.given():
            sources = flow.sources_of((call.key, place))
            if sources:  # of several with the same content the nearest one
                edges.setdefault((sources[-1][0], call.key), (place, tensor.shape))
    distance = {key: 0}
    for sign, a, b in ((-1, 1, 0), (1, 0, 1)):
        border = [key]
        for step in range(1, REACH + 1):
            ends = (e[b] for k in border for e in edges if e[a] == k and e[b] not in distance)
            ends_at = [*dict.fromkeys(ends)]
            border = ends_at[-_WIDE:] if sign < 0 else ends_at[:_WIDE]
            distance |= dict.fromkeys(border, sign * step)
    nodes = [_node(calls[k], distance[k]) for k in sorted(distance, key=flow.order.__getitem__)]
    shown = [
        {"from": a, "to": b, "tensor": place, "shape": list(shape)}
        for (a, b), (place, shape) in edges.items()
        if a in distance and b in distance
    ]
    return {"nodes": nodes, "edges": shown}


def _node(call: Call, distance: int) -> dict[str, Any]:
    output = call.made()[0][1] if call.made() else None
    return {
        "key": call.key,
        "name": call.name,
        "phase": call.phase.value,
        "parent": call.parent,
        "distance": distance,
        "shape": list(output.shape) if output else None,
        "dtype": output.dtype if output else None,
    }
