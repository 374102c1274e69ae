"""Time of the exchange that brings tokens to their experts and back, by the ways that a recipe can choose.

    alltoall                  a row for each (token, expert) pair goes straight to the expert's device
    alltoall_deredundency     all tokens are gathered across nodes among equal local ranks, then pairs go within the node
    alltoall_zero_redundancy  a token goes once to each node that has one of its experts, then pairs go within the node

The second and third come back the other way: within the node, then reduced across nodes.

Symbols: T tokens of a device, b bytes of one, K experts a token, n nodes of g devices, E experts. Destinations are
uniform; with n_group and topk_group they are uniform within groups of experts that are uniform.
"""

from collections.abc import Mapping
from functools import lru_cache
from math import comb
from typing import NamedTuple, get_args

import numpy as np

from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.collectives import all_gather, all_to_all, latency
from telechat_moe.tools.plan.cost.columns import Columns, Floats, columns
from telechat_moe.tools.plan.cost.device import Device
from telechat_moe.tools.plan.cost.layout import Layout, TokenExchange

EXCHANGES: tuple[TokenExchange, ...] = get_args(TokenExchange)


class ExpertRouting(NamedTuple):
    """How tokens choose experts: K of E, and with `groups` only from `kept_groups` of them (contiguous, equal)."""

    experts: int
    top_k: int
    groups: int = 1
    kept_groups: int = 1


def hit(routing: ExpertRouting, parts: int) -> float:
    """Return how many of equal contiguous parts of the experts (nodes, devices) a token goes to, expected.

    It is ``parts`` times the probability that one part has one of its K experts.
    """
    e, k, groups, kept_groups = routing
    groups, kept_groups = (groups, kept_groups) if groups > 1 else (1, 1)
    allowed, group, part = e * kept_groups // groups, e // groups, e // parts

    def missed(size: int) -> float:
        """Return the probability that none of K of the allowed experts is among `size` of them."""
        return comb(allowed - size, k) / comb(allowed, k)

    if part <= group:  # within one group, which may be kept or not
        return parts * kept_groups / groups * (1 - missed(part))
    inside = part // group
    ways = comb(groups, kept_groups)
    chance = sum(
        comb(inside, j) * comb(groups - inside, kept_groups - j) / ways * (1 - missed(j * group))
        for j in range(1, min(inside, kept_groups) + 1)
    )
    return parts * chance


def reached(x: Columns, nodes: Floats) -> Floats:
    """Return :func:`hit` of nodes for configurations."""
    counts = np.vectorize(lambda *n: _hit(*(int(i) for i in n)), otypes=[float])
    return counts(x.experts, x.top_k, x.expert_groups, x.kept_groups, nodes)


@lru_cache(4096)
def _hit(experts: int, top_k: int, groups: int, kept_groups: int, nodes: int) -> float:
    return hit(ExpertRouting(experts, top_k, groups, kept_groups), nodes) if experts else 0.0


def spans(members: Floats, device: Device) -> Floats:
    """Return the nodes of exchanges that may go by node, 1 for those within a node or beside its edges."""
    node = device.node_devices
    return np.where((members > node) & (members % node == 0), members // node, 1.0)


def exchange_s(kind: TokenExchange, x: Columns, size: Floats, device: Device) -> Floats:
    """Return the seconds of one dispatch or one combine among ``ep x etp`` neighbouring devices.

    Where these are not several whole nodes, rows go straight whatever the kind. ``size`` counts the tokens of a device once.
    """
    members, stride = x.ep * x.etp, np.ones_like(x.ep)
    nodes, pairs = spans(members, device), size * x.top_k
    direct = all_to_all(pairs, members, stride, device)
    if kind == "alltoall":
        return direct
    node = stride * device.node_devices
    within = all_to_all(pairs, node, stride, device)
    if kind == "alltoall_deredundency":
        across = all_gather(size * nodes, nodes, node, device)
    else:
        leaving = size * reached(x, nodes) * (1 - 1 / nodes)
        bandwidth = device.inter_bandwidth * device.constants.inter_share
        across = leaving / bandwidth + latency(nodes, nodes, device)
    return np.where(nodes > 1, within + across, direct)


def choices(
    architecture: Architecture, layout: Layout, device: Device
) -> dict[TokenExchange, float]:
    """Return the seconds of one dispatch by each way that the layout allows, the fastest first.

    Empty without experts on several devices; within a node, or where the group is not several whole nodes, or where devices
    share an expert's width, there is only the direct way.
    """
    if not architecture.moe_layers or layout.ep * layout.etp == 1:
        return {}
    times = _times(columns([(architecture, layout)]), device)[:, 0]
    ways: list[tuple[TokenExchange, float]] = list(zip(EXCHANGES, map(float, times), strict=True))
    return dict(sorted((way for way in ways if np.isfinite(way[1])), key=lambda way: way[1]))


def fastest(x: Columns, device: Device) -> Floats:
    """Return the number in `EXCHANGES` of the fastest way that each configuration allows."""
    return _times(x, device).argmin(axis=0).astype(float)


def _times(x: Columns, device: Device) -> Floats:
    """Return the seconds of one dispatch by each way, [ways, n]; infinity: the layout does not allow it."""
    size = 2 * x.micro_batch * x.seq / x.cp / x.tp * x.hidden * x.imbalance
    times = np.array([exchange_s(kind, x, size, device) for kind in EXCHANGES])
    by_node = (x.etp == 1) & (spans(x.ep, device) > 1)
    times[1:] = np.where(by_node, times[1:], np.inf)
    return times


def told(times: Mapping[TokenExchange, float]) -> str:
    """Return the times of the ways of `choices` in words, the fastest first; empty without an exchange."""
    return ", ".join(f"{kind} {seconds * 1e3:.3g} ms" for kind, seconds in times.items())
