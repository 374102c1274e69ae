"""Predict DeepEP's published bandwidths: fit three rows of V1, predict the rest of V1 and all of V2.

    python -m benchmarks.plan_published.exchanges

What DeepEP counts (its tests `tests/legacy/test_internode.py` and `tests/elastic/test_ep.py`, README and docs/legacy.md at
dd758ca): a token's bytes once for each node that has one of its experts, its own included ("logical bandwidth"), over the
time of the whole kernel; within one node, once for each device, its own included. V1 is limited to the experts of
min(nodes, 4) nodes, V2 is not. So 90 GB/s over a port of 50 GB/s is no wonder: with two nodes half of them never leave.

The V1 rows are of an H800. V2's SM90 is taken for an H100: at 90 GB/s each device takes 257 GB/s over its links, and those of
an H800 have 200.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from telechat_moe.tools.plan.cost.device import Constants, Device, load_device
from telechat_moe.tools.plan.cost.expert_exchange import ExpertRouting, hit

DATA = Path(__file__).parent / "data" / "published_steps.yaml"
EXPERTS, TOP_K, NODE, KEPT_NODES = 256, 8, 8, 4
FITTED = ("v1 ep8", "v1 ep16", "v1 ep64")
HANDED_ON = 0.905
"""Rate of a node's links for what also comes from or goes to other nodes, over their rate within one node: fitted to
EP16 against EP8."""


def kernel_s(routing: ExpertRouting, members: int, device: Device) -> float:
    """Return the seconds of DeepEP's kernel for each byte of a device's tokens.

    A token goes once to each node and there once to each device; links and ports are busy at once.

    The planner's own `alltoall_zero_redundancy` takes its two hops one after the other, as a graph of MindSpore does.
    """
    c = device.constants
    inside = min(members, device.node_devices)
    nodes = members // inside
    # All that a device receives over its links, from its node or handed on; one of `inside` comes from itself.
    within = hit(routing, members) * (1 - 1 / inside)
    across = hit(routing, nodes) * (1 - 1 / nodes)
    links = device.intra_bandwidth * c.intra_share * (HANDED_ON if nodes > 1 else 1.0)
    return max(within / links, across / (device.inter_bandwidth * c.inter_share))


@dataclass(frozen=True)
class Row:
    """A published bandwidth.

    Attributes:
        name: Version and group.
        way: ``dispatch`` or ``combine``.
        measured: Logical GB/s, between nodes if there are several.
    """

    name: str
    way: str
    device: str
    nodes: int
    measured: float

    @property
    def routing(self) -> ExpertRouting:
        """How tokens choose experts: V1 of some nodes only."""
        limited = self.name.startswith("v1") and self.nodes > KEPT_NODES
        return (
            ExpertRouting(EXPERTS, TOP_K, self.nodes, KEPT_NODES)
            if limited
            else ExpertRouting(EXPERTS, TOP_K)
        )

    @property
    def counted(self) -> float:
        """Times that the bytes of a token are counted."""
        return hit(self.routing, self.nodes if self.nodes > 1 else NODE)

    def predicted(self, c: Constants) -> float:
        """Return the logical GB/s by the cost model."""
        device = replace(load_device(self.device), constants=c)
        seconds = kernel_s(self.routing, self.nodes * NODE, device)
        return self.counted / seconds / 1e9


def published() -> list[Row]:
    """Return the rows of the published set."""
    sets = yaml.safe_load(DATA.read_text(encoding="utf-8"))["sets"]
    return read(next(x for x in sets if x["id"] == "deepep_bandwidth"))


def read(entry: Mapping[str, Any]) -> list[Row]:
    """Return the rows of the set `deepep_bandwidth`, those of the latency kernels left out."""
    found = []
    for groups in entry["v1_normal_GBps"].values():
        for group, rates in groups.items():
            nodes = int(group.removeprefix("ep")) // NODE
            found += [Row(f"v1 {group}", way, "h800", nodes, rate) for way, rate in rates.items()]
    for group, rates in entry["v2_GBps"].items():
        device = "h100" if group.startswith("sm90") else "b200"
        _, _, by = group.split("_")[1].partition("x")
        name = f"v2 {group}"
        found += [
            Row(name, way, device, int(by or 1), rates[way]) for way in ("dispatch", "combine")
        ]
    return found


def fit(rows: list[Row]) -> tuple[Constants, float]:
    """Return shares of links and ports, and the rate of handing on, that the rows of :data:`FITTED` give.

    EP8 gives the links' share; EP16, which its links limit, how much slower they hand on what crosses nodes; EP64 the ports'
    share. Each is the mean of dispatch and combine.
    """
    device = load_device("h800")

    def rate(name: str, parts: int, away: float) -> float:
        """Return the bytes/s that leave a device by link or port, mean of both ways."""
        mine = [row for row in rows if row.name == name]
        return sum(x.measured / x.counted * hit(x.routing, parts) * away for x in mine) / len(mine)

    links = rate("v1 ep8", NODE, 1 - 1 / NODE)
    handed = rate("v1 ep16", 2 * NODE, 1 - 1 / NODE)
    ports = rate("v1 ep64", 8, 1 - 1 / 8)
    shares = replace(
        device.constants,
        intra_share=links * 1e9 / device.intra_bandwidth,
        inter_share=ports * 1e9 / device.inter_bandwidth,
    )
    return shares, handed / links


def main() -> None:
    """Print the table and the largest errors of seen and unseen rows."""
    rows = published()
    shares, handed = fit(rows)
    print(
        f"links {shares.intra_share:.3f}, ports {shares.inter_share:.3f} of their bandwidth; handed on at {handed:.3f} "
        f"of the links' rate (used: {HANDED_ON})\n"
    )
    print(f"{'':24}{'':10}{'published':>10}{'predicted':>10}{'error':>9}")
    worst = {True: 0.0, False: 0.0}
    for row in rows:
        found, seen = row.predicted(shares), row.name in FITTED
        error = found / row.measured - 1
        worst[seen] = max(worst[seen], abs(error))
        print(
            f"{row.name:24}{row.way:10}{row.measured:10.0f}{found:10.1f}{error:9.1%}  {'fitted' * seen}"
        )
    print(f"\nlargest error: {worst[False]:.1%} of unseen rows, {worst[True]:.1%} of fitted ones")


if __name__ == "__main__":
    main()
