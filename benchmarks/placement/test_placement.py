"""The benchmark's peer and solver against what is known, and its tables on few loads."""

import json
from itertools import pairwise, permutations, product
from pathlib import Path

import numpy as np
import pytest

from benchmarks.placement import eplb, optimum
from benchmarks.placement.__main__ import main
from benchmarks.placement.loads import FAMILIES, PAIRS, batches, sequences
from benchmarks.placement.optimum import solve


def test_eplb_packs_the_example_of_its_description():
    """12 experts and 16 slots: each copy of the hottest experts, then two on each of eight devices."""
    loads = [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]
    held = eplb.replicate(loads, 16)
    assert sorted(held[12:]) == [1, 4, 5, 10]
    each = eplb.spread(loads, held)
    assert sum(each) == sum(loads)
    place = eplb.pack(each, 8)
    assert sorted(place) == sorted([*range(8), *range(8)])
    assert eplb.busiest([3.0, 1.0, 2.0], [0, 0, 1], 2) == 4.0


@pytest.mark.parametrize(
    ("loads", "pairs"),
    [
        (
            [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
            [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        ),
        (
            [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
            [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
        ),
    ],
)
def test_eplb_s_hierarchical_example(loads: list[int], pairs: list[int]):
    """4 groups on 2 nodes of 4 devices, 16 slots; each device holds the two experts of its description."""
    held, place = eplb.hierarchical(loads, 16, 4, 2, 8)
    devices = [sorted(h for h, d in zip(held, place, strict=True) if d == n) for n in range(8)]
    published = [sorted(pairs[2 * n : 2 * n + 2]) for n in range(8)]
    assert [sorted(devices[:4]), sorted(devices[4:])] in (
        [sorted(published[:4]), sorted(published[4:])],
        [sorted(published[4:]), sorted(published[:4])],
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sets", [optimum.SETS, 0], ids=["sets", "assignment"])
def test_the_solver_finds_the_least_of_all_thirds(
    seed: int, sets: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(optimum, "SETS", sets)
    load_E = np.random.default_rng(seed).integers(1, 100, 9).astype(float)
    best = load_E.sum()
    for order in permutations(range(1, 9)):
        best = min(best, load_E[[0, *order]].reshape(3, 3).sum(axis=1).max())
    assert optimum._bound(load_E, 3) <= best
    assert solve(load_E, 3, load_E.sum(), 30.0) == (best, True)


@pytest.mark.parametrize("seed", range(3))
def test_the_fewest_moves_of_all_plans(seed: int):
    """Three decisions over four experts on two devices, all 6 x 6 x 6 plans."""
    random, start_E = np.random.default_rng(seed), np.array([0, 0, 1, 1])
    load_TE = random.integers(1, 100, (3, 4)).astype(float)
    maps = [np.array(m) for m in sorted(set(permutations([0, 0, 1, 1])))]
    busiest_TM = np.array([[max(x[m == 0].sum(), x[m == 1].sum()) for m in maps] for x in load_TE])
    goal_T = np.sort(busiest_TM)[:, 2]  # a map and its mirror image are alike
    best = 99
    for plan in product(range(len(maps)), repeat=3):
        if all(row[m] <= goal for row, m, goal in zip(busiest_TM, plan, goal_T, strict=True)):
            then = [start_E, *(maps[m] for m in plan)]
            best = min(best, sum(int((a != b).sum()) for a, b in pairwise(then)))
    assert optimum.fewest_moves(load_TE, start_E, goal_T.tolist(), 2) == best


def test_loads_are_of_every_family_and_whole_pairs():
    found = list(batches(500))
    assert {one.family for one in found} == set(FAMILIES)
    assert sum(len(one.pairs) for one in found) == 500
    for one in found:
        assert (one.pairs == np.rint(one.pairs)).all()
        assert (one.pairs >= 0).all()
        if one.family not in ("recorded", "adversarial"):
            assert (one.pairs.sum(axis=1) == PAIRS).all()
    assert all(loads.ndim == 3 for _, _, loads in sequences(3))


@pytest.mark.slow
def test_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out.json"
    assert (
        main(
            [
                "--decisions",
                "3",
                "--loads",
                "50",
                "--sample",
                "2",
                "--budget",
                "5",
                "--json",
                str(out),
            ]
        )
        == 0
    )
    found = json.loads(out.read_text())
    everything = found["balance"]["all"]
    assert everything["loads"] == 50
    assert everything["worse than EPLB"] == 0
    assert everything["worse than EPLB by groups"] == 0
    assert everything["with groups"] > 0
    assert everything["over bound"] <= everything["EPLB over bound"]
    assert all(row["worse_than_eplb"] == 0 for row in found["replicas"].values())
    assert 0 < found["moved"]["all"]["share"] < 1
    assert "over optimum, max" in capsys.readouterr().out
