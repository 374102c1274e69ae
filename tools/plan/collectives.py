"""Time of collectives on a node with fast links and a network, alpha-beta model.

Rings inside a node and between nodes; a group that has g members on each node uses g network ports together.
Symbols: n members, g of them on a node, b bytes on each member (the full buffer), s seconds.
"""

import numpy as np

from telechat_moe.tools.plan.columns import Array
from telechat_moe.tools.plan.device import Constants, Device


def bus(inside: Array, nodes: Array, device: Device, c: Constants) -> Array:
    """Return the bandwidth of a ring, bytes/s: the slower of the links inside and the ports that the group has."""
    fast = device.intra_bandwidth * c.intra_share
    ports = np.minimum(inside * device.inter_bandwidth * c.inter_share, fast)
    return np.where(nodes > 1, ports, fast)


def spread(members: Array, stride: Array, device: Device) -> tuple[Array, Array]:
    """Return members on one node, and nodes, of a group whose neighbours are ``stride`` ranks apart."""
    inside = np.clip(np.floor(device.node_devices / stride), 1, members)
    return inside, np.ceil(members / inside)


def latency(members: Array, nodes: Array, c: Constants) -> Array:
    """Return the time before data flows: a start inside the node, and hops as a tree between nodes."""
    hops = np.ceil(np.log2(np.maximum(nodes, 1)))
    return np.where(members > 1, c.collective_host_s + hops * c.inter_latency_s, 0.0)


def all_gather(size: Array, members: Array, stride: Array, device: Device, c: Constants) -> Array:
    """Return the time of an all-gather (or reduce-scatter) of ``size`` bytes in all: (n-1)/n b / bus."""
    inside, nodes = spread(members, stride, device)
    moved = size * (members - 1) / members
    return moved / bus(inside, nodes, device, c) + latency(members, nodes, c)


def all_reduce(size: Array, members: Array, stride: Array, device: Device, c: Constants) -> Array:
    """Return the time of an all-reduce: a reduce-scatter and an all-gather in one call."""
    inside, nodes = spread(members, stride, device)
    moved = 2 * size * (members - 1) / members
    return moved / bus(inside, nodes, device, c) + latency(members, nodes, c)


def all_to_all(size: Array, members: Array, stride: Array, device: Device, c: Constants) -> Array:
    """Return the time of an all-to-all, ``size`` bytes leaving each member: direct, node by node.

    What stays inside the node and what leaves it go at the same time; the longer one counts.
    """
    inside, nodes = spread(members, stride, device)
    within = size * (inside - 1) / members / (device.intra_bandwidth * c.intra_share)
    outside = size * (members - inside) / members / (device.inter_bandwidth * c.inter_share)
    return np.maximum(within, outside) + latency(members, nodes, c)


def point_to_point(size: Array, outside: Array, device: Device, c: Constants) -> Array:
    """Return the time to send ``size`` bytes to a neighbour, on another node where ``outside`` is 1."""
    fast = device.intra_bandwidth * c.intra_share
    slow = device.inter_bandwidth * c.inter_share
    start = c.collective_host_s + outside * c.inter_latency_s
    return size / np.where(outside > 0, slow, fast) + start
