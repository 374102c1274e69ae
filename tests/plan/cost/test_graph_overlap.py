"""Two streams by hand: an exchange is hidden as long as the paired pass has computation for it."""

import pytest

from telechat_moe.tools.plan.cost.device import Constants, Device
from telechat_moe.tools.plan.cost.graph_overlap import compute_s, exchange_s, hide, share

UNIT = Device(
    name="unit",
    peak_flops={"bf16": 1.0},
    memory_bytes=1.0,
    memory_bandwidth=2.0,
    node_devices=8,
    intra_bandwidth=1.0,
    inter_bandwidth=1.0,
    constants=Constants(matmul_share=1.0, memory_share=0.5, intra_share=1.0, collective_host_s=0.0),
)


def pair(seconds: float, free: bool = True) -> dict[str, object]:
    """Return a pair of passes with two parts of a second each, and an exchange of `seconds` after each first part."""
    part = {"operators": 1, "flops": 1.0, "bytes": 0.0}
    exchange = {"index": 0, "bytes": 2 * seconds, "ranks": [0, 1], "same": {}, "paired": {}}
    return {
        "times": 3,
        "free": free,
        "forward": [part, part],
        "backward": [part, part],
        "exchanges": [{"pass": "F", **exchange}, {"pass": "B", **exchange}],
    }


def test_seconds_of_parts_and_exchanges() -> None:
    assert compute_s({"operators": 2, "flops": 3.0, "bytes": 4.0}, UNIT) == 3.0 + 4.0
    assert exchange_s({"bytes": 3.0, "ranks": [4, 6]}, UNIT) == pytest.approx(1.5)
    assert exchange_s({"bytes": 3.0, "ranks": [4]}, UNIT) == 0.0


@pytest.mark.parametrize(
    ("seconds", "forward", "backward"),
    [
        # F0 0-1, its exchange from 1, B0 1-2, its exchange from 2, F1 2-3, B1 3-4
        (1.0, 1.0, 1.0),
        # F0's exchange 1-3: B0 runs 1-2. B0's waits for the stream: 3-5, F1 runs 3-4
        (2.0, 0.5, 0.5),
        (4.0, 0.25, 0.25),
    ],
)
def test_share_hidden_by_the_paired_pass(seconds: float, forward: float, backward: float) -> None:
    shares = [pair(seconds)]
    hide(shares, UNIT)
    rows = shares[0]["exchanges"]
    assert isinstance(rows, list)
    assert [row["hidden"] for row in rows] == pytest.approx([forward, backward])
    assert share(shares) == pytest.approx((forward + backward) / 2)


def test_passes_one_after_the_other_hide_nothing() -> None:
    shares = [pair(1.0, free=False)]
    hide(shares, UNIT)
    assert share(shares) == 0.0


def test_without_exchanges_there_is_no_share() -> None:
    assert share([]) != share([])
