"""The independent checker takes true certificates and refuses changed ones."""

import copy
import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from test_placement import _random

from telechat_moe.tools.plan.certify import certificate
from telechat_moe.tools.plan.check_certificate import Wrong, check, main
from telechat_moe.tools.plan.placement import Group, Option, Problem, Solution, solve, step_weights


def _certificates(number: int, seed: int):
    rng = random.Random(seed)
    found = 0
    while found < number:
        problem = _random(rng)
        solution = solve(problem)
        if isinstance(solution, Solution):
            found += 1
            yield certificate(problem, solution)


def test_true_certificates_pass() -> None:
    for stated in _certificates(150, 3):
        check(stated)


def test_a_worse_placement_is_refused() -> None:
    """It is the best of a narrower problem, with that one's intervals: all true but for what it claims."""
    rng, refused = random.Random(4), 0
    for _ in range(400):
        problem = replace(_random(rng), most=(), fewest=())
        best = solve(problem)
        if not isinstance(best, Solution):
            continue
        for stage in range(problem.stages):
            narrow = tuple(int(s == stage) * 3 for s in range(problem.stages))
            worse = solve(replace(problem, fewest=narrow))
            if isinstance(worse, Solution) and worse.objective > best.objective:
                with pytest.raises(Wrong, match="no interval"):
                    check(certificate(problem, worse))
                refused += 1
    assert refused > 30


def test_bound_above_the_optimum_is_refused() -> None:
    """The placement and its objective are those of a problem in which one thing is dearer."""
    refused = 0
    for stated in _certificates(200, 5):
        cheaper = copy.deepcopy(stated)
        option = cheaper["problem"]["groups"][cheaper["problem"]["bulk"]]["options"][0]
        option["time"] += 5
        try:
            check(cheaper)
        except Wrong:
            refused += 1
    assert refused > 50


def test_too_much_memory_and_wrong_order_are_refused() -> None:
    for stated in _certificates(60, 6):
        small = copy.deepcopy(stated)
        small["problem"]["memory"] = [0] * len(small["problem"]["memory"])
        if any(small["problem"]["fixed_memory"]):
            with pytest.raises(Wrong, match="bytes"):
                check(small)
        lost = copy.deepcopy(stated)
        lost["items"][-1] = [[0] * len(row) for row in lost["items"][-1]]
        if lost["items"] != stated["items"]:
            with pytest.raises(Wrong):
                check(lost)


def test_command(tmp_path, capsys) -> None:
    stated = next(iter(_certificates(1, 8)))
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(stated))
    bad.write_text(json.dumps(stated | {"objective": stated["objective"] - 1}))
    assert main([str(good)]) == 0
    assert main([str(good), str(bad)]) == 1
    assert "gap 0.000%" in capsys.readouterr().out


def _large(stages: int, chunks: int, layers: int, dense: int, gigabytes: int) -> Problem:
    """Return an instance of the size that off-the-shelf solvers do not close: three ways to recompute, MTP, head."""
    number = stages * chunks

    def ways(took: float, kept: float) -> tuple[Option, ...]:
        full = int(0.07 * kept * 1e6)
        return (
            Option(name="none", time=int(took * 1e6), kept=int(kept * 1e6)),
            Option(name="selective", time=int(took * 1.08e6), kept=int(kept * 0.4e6)),
            Option(name="full", time=int(took * 1.32e6), kept=full, working=int(kept * 1e6)),
        )

    weights = step_weights(64, chunks)
    return Problem(
        groups=(
            Group(name="dense", count=dense, states=10**9, options=ways(6, 300)),
            Group(name="moe", count=layers - dense, states=4 * 10**9, options=ways(10, 400)),
            Group(name="mtp", count=1, states=5 * 10**9, options=ways(25, 900), layer=False),
            Group(
                name="head",
                count=1,
                states=2 * 10**9,
                options=ways(7, 200)[:1],
                layer=False,
                last=True,
            ),
        ),
        stage_of_chunk=tuple(c % stages for c in range(number)),
        in_flight=tuple(
            stages - c % stages + (stages if c < number - stages else 0) for c in range(number)
        ),
        memory=(gigabytes * 10**9,) * stages,
        fixed_time=(10**6,) + (0,) * (stages - 1),
        fixed_memory=(2 * 10**9,) + (0,) * (stages - 1),
        max_weight=weights[0],
        sum_weight=weights[1],
    )


@pytest.mark.parametrize(
    "size", [(8, 2, 45, 1, 60), (16, 2, 61, 3, 60), (16, 4, 91, 3, 45), (32, 4, 160, 3, 45)]
)
def test_large_instances_are_closed(size: tuple[int, int, int, int, int]) -> None:
    """The structure of the best solution is checked; the enumeration of all structures would take the checker long."""
    problem = _large(*size)
    found = solve(problem)
    assert isinstance(found, Solution)
    assert found.optimal
    places = range(len(problem.stage_of_chunk))
    pinned = tuple(
        () if g == problem.bulk else tuple(c for c in places for _ in range(sum(found.items[c][g])))
        for g in range(len(problem.groups))
    )
    one = replace(problem, pinned=pinned)
    again = solve(one)
    assert isinstance(again, Solution)
    assert again.objective == found.objective
    check(certificate(one, again))
