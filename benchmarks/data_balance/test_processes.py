"""What the benchmark on CPU processes makes of times that follow from visible pairs."""

import argparse
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")

from benchmarks.data_balance import processes

PAIRS = {
    ("in order", 0): [9, 1, 5, 1],
    ("dealt", 0): [4, 4, 4, 4],
    ("light", 0): [1] * 4,
    ("full", 0): [10] * 4,
}


def rank(number: int, cores: list[int], slower: float = 0.0) -> dict[str, Any]:
    """Return what a rank keeps if a step takes 2 s, 3 s for each pair on all cores, and 2 s for each on one alone."""
    lone = [10 if core == 0 else 1 for core in cores]

    def seconds(pairs: list[int], late: float) -> float:
        on = [sum(p for p, c in zip(pairs, cores, strict=True) if c == core) for core in cores]
        return 2 + (3 * min(on) + 2 * (max(on) - min(on))) * (1 + late)

    # The ranks begin apart; a step lasts from when the last has begun.
    pairs = PAIRS | {("one full core", 0): lone}
    lasts = {key: seconds(row, slower * (key[0] == "dealt")) for key, row in pairs.items()}
    return {
        "times": {key: [(number / 9, 3 / 9 + last)] * 3 for key, last in lasts.items()},
        "values": {key: [1.0, 2.0] for key in pairs},
        "pairs": {key: np.array(row) for key, row in pairs.items()},
        "cores": [cores[number]],
    }


@pytest.mark.parametrize(
    ("cores", "in_order"), [([0, 1, 2, 3], 2 + 3 * 1 + 2 * 8), ([0, 1, 0, 1], 2 + 3 * 2 + 2 * 12)]
)
def test_the_busiest_core_is_predicted(
    monkeypatch: pytest.MonkeyPatch, cores: list[int], in_order: float
) -> None:
    args = argparse.Namespace(steps=1)
    monkeypatch.setattr(processes, "ranks_of", lambda _: [rank(n, cores) for n in range(4)])
    found = processes.report(args)
    dealt = 2 + 3 * 4 * 4 / len(set(cores))
    assert found["predicted"] == pytest.approx({"in order": in_order, "dealt": dealt})
    assert found["seconds"]["in order"]["median"] == pytest.approx(in_order)
    assert found["apart"] == pytest.approx(0, abs=1e-9)
    assert found["losses_apart"] == 0
    monkeypatch.setattr(processes, "ranks_of", lambda _: [rank(n, cores, 0.5) for n in range(4)])
    assert processes.report(args)["apart"] > processes.BAR
