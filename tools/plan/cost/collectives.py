"""Predict the time of collectives inside a node and between nodes with an alpha-beta model.

Rings inside a node and between nodes; a group that has g members on each node uses g network ports together.
Symbols: n members, g of them on a node, b bytes on each member (the full buffer), s seconds.
"""

import numpy as np

from telechat_moe.tools.plan.cost.columns import Floats
from telechat_moe.tools.plan.cost.device import Device


def bus(inside: Floats, nodes: Floats, device: Device) -> Floats:
    """Return the bandwidth of a ring, bytes/s: the slower of the links inside and the ports that the group has."""
    c = device.constants
    fast = device.intra_bandwidth * c.intra_share
    ports = np.minimum(inside * device.inter_bandwidth * c.inter_share, fast)
    return np.where(nodes > 1, ports, fast)


def spread(members: Floats, stride: Floats, device: Device) -> tuple[Floats, Floats]:
    """Return how many members share a node, and how many nodes a group with this ``stride`` between ranks covers."""
    inside = np.clip(np.floor(device.node_devices / stride), 1, members)
    return inside, np.ceil(members / inside)


def latency(members: Floats, nodes: Floats, device: Device) -> Floats:
    """Return the time before data flows: half a start per step of the ring in a node, hops as a tree between nodes."""
    c = device.constants
    hops = np.ceil(np.log2(np.maximum(nodes, 1)))
    inside = np.ceil(members / nodes)
    start = c.collective_host_s * (1 + inside) / 2
    return np.where(members > 1, start + hops * c.inter_latency_s, 0.0)


def all_gather(
    size: Floats, members: Floats, stride: Floats, device: Device, calls: Floats | float = 1.0
) -> Floats:
    """Return the time of all-gathers or reduce-scatters of ``size`` bytes in total.

    It is (n-1)/n b / bus, and one latency for each call.
    """
    inside, nodes = spread(members, stride, device)
    moved = size * (members - 1) / members
    return moved / bus(inside, nodes, device) + calls * latency(members, nodes, device)


def all_reduce(size: Floats, members: Floats, stride: Floats, device: Device) -> Floats:
    """Return the time of an all-reduce: a reduce-scatter and an all-gather in one call."""
    return all_gather(2 * size, members, stride, device, 2.0)


def all_to_all(
    size: Floats, members: Floats, stride: Floats, device: Device, copies: Floats | float = 0.0
) -> Floats:
    """Return the time of an all-to-all, ``size`` bytes leaving each member.

    What stays inside the node and what leaves it go at the same time; the longer one counts. Above 0, ``copies`` of each
    token are in ``size``: hierarchical, one goes to each node that has a destination and is handed on there; uniform
    destinations hit (n - 1) (1 - (1 - 1/n)^copies) of the other nodes.
    """
    c = device.constants
    inside, nodes = spread(members, stride, device)
    once = copies > 0
    hit = (nodes - 1) * (1 - (1 - 1 / nodes) ** copies) / np.maximum(copies, 1)
    leaving = np.where(once, hit, (members - inside) / members)
    staying = (inside - 1) / np.where(once, inside, members)
    within = size * staying / (device.intra_bandwidth * c.intra_share)
    outside = size * leaving / (device.inter_bandwidth * c.inter_share)
    return np.maximum(within, outside) + latency(members, nodes, device)


def point_to_point(size: Floats, outside: Floats, device: Device) -> Floats:
    """Return the time to send ``size`` bytes to a neighbour, on another node where ``outside`` is 1."""
    c = device.constants
    fast = device.intra_bandwidth * c.intra_share
    slow = device.inter_bandwidth * c.inter_share
    start = c.collective_host_s + outside * c.inter_latency_s
    return size / np.where(outside > 0, slow, fast) + start
