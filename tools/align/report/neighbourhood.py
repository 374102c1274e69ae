"""The neighbourhood of a call in the data flow: the calls at most two edges before and after it."""

from dataclasses import replace
from typing import Any

from telechat_moe.tools.align.dump.records import Call, Dump, RankDump
from telechat_moe.tools.align.judge.data_flow import DataFlow

REACH = 2  # distance in calls
_WINDOW = 120  # calls before and after, in the order of the run, that are searched
_WIDE = 5  # calls shown at one distance


def around(dump: Dump, step: int, rank: int, key: str) -> dict[str, Any] | None:
    """Return the neighbourhood of a call in the data flow; None: the call is not in the dump.

    Returns:
        ``nodes`` (key, name, phase, layer's module, distance: below 0 before the call) and ``edges`` (from, to, tensor,
        shape), as plain JSON types.
    """
    found = dump.ranks.get((step, rank))
    if found is None or key not in found.calls:
        return None
    part = _window(found, key)
    flow = DataFlow(part)
    edges: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}
    for call in part.calls.values():
        for place, tensor in call.given():
            sources = flow.sources_of((call.key, place))
            if sources:  # of several with the same content the nearest one
                edges.setdefault((sources[-1][0], call.key), (place, tensor.shape))
    distance = _distances(key, list(edges))
    kept = {k: d for k, d in distance.items() if abs(d) <= REACH}
    nodes = [
        _node(part.calls[k], d) for k, d in sorted(kept.items(), key=lambda i: flow.order[i[0]])
    ]
    shown = [
        {"from": a, "to": b, "tensor": place, "shape": list(shape)}
        for (a, b), (place, shape) in edges.items()
        if a in kept and b in kept
    ]
    return {"nodes": nodes, "edges": shown}


def _window(dump: RankDump, key: str) -> RankDump:
    keys = list(dump.calls)
    at = keys.index(key)
    near = keys[max(0, at - _WINDOW) : at + _WINDOW + 1]
    calls = {k: dump.calls[k] for k in near if dump.calls[k].kind == "api"}
    calls.setdefault(key, dump.calls[key])
    return replace(dump, calls=calls)


def _distances(key: str, edges: list[tuple[str, str]]) -> dict[str, int]:
    """Return the distances of other calls: negative for those before a call, positive for those after it."""
    found = {key: 0}
    for sign, a, b in ((-1, 1, 0), (1, 0, 1)):
        border = [key]
        for step in range(1, REACH + 1):
            ends = (e[b] for k in border for e in edges if e[a] == k and e[b] not in found)
            near = [*dict.fromkeys(ends)]
            border = near[-_WIDE:] if sign < 0 else near[:_WIDE]
            found |= dict.fromkeys(border, sign * step)
    return found


def _node(call: Call, distance: int) -> dict[str, Any]:
    made = call.made()[0][1] if call.made() else None
    return {
        "key": call.key,
        "name": call.name,
        "phase": call.phase.value,
        "parent": call.parent,
        "distance": distance,
        "shape": list(made.shape) if made else None,
        "dtype": made.dtype if made else None,
    }
