"""Programs with an end for every operation, which HiGHS and CP-SAT solve, agree with those whose rows are paths."""

import random
from dataclasses import replace
from functools import lru_cache

import plan_solvers
import pytest
from test_placement import is_closed, random_problem, solved

from telechat_moe.tools.plan.search.placement_problem import PlacementProblem, StepTail
from telechat_moe.tools.plan.search.planner import find

LARGE = "telechat3_moe/pretrain_105b_a4b_4k.yaml"


def plain(p: PlacementProblem) -> PlacementProblem:
    """Return a problem as the programs can say it: working sets need further integers, a hidden rest is not convex."""
    layers = tuple(replace(g, working=0) for g in p.layers)
    return replace(p, layers=layers, working=0, tail=StepTail())


def _agree(solver, number: int, seed: int, rel: float) -> int:
    rng, number_solved = random.Random(seed), 0
    for _ in range(number):
        p = plain(random_problem(rng, hidden=False))
        if p.choice and len(p.layers) == 2:
            p = replace(
                p, choice=False
            )  # recipes recompute the first layers of a chunk, the program any
        ours, theirs = solved(p), solver(p)
        assert theirs.proven
        if ours.best is None:
            assert theirs.seconds is None
            continue
        assert is_closed(ours)
        assert ours.bound * (1 - rel) <= theirs.seconds <= ours.best.seconds * (1 + rel)
        number_solved += 1
    return number_solved


def test_highs_agrees() -> None:
    assert _agree(plan_solvers.highs, 25, 11, 1e-6) > 12


def test_cp_sat_agrees() -> None:
    pytest.importorskip("ortools", reason="the extra `plan`")
    assert _agree(plan_solvers.cp_sat, 12, 12, 1e-9) > 5


@lru_cache(3)
def real(fixed: str) -> PlacementProblem:
    """Return how the layers of the 105B model are placed on 256 devices, for the best configuration with these degrees."""
    device, memory = "ascend-910b", 55 * 2**30
    plan = find(LARGE, [], 256, device, memory, None, fixed.split(), top=1)
    return plain(plan.best[0].problem)


@pytest.mark.parametrize("name", ["highs", "cp_sat"])
@pytest.mark.parametrize(
    "degrees",
    [
        "pp=2 vpp=2 cp=8",
        "pp=4 vpp=1 cp=4",
        pytest.param("pp=4 vpp=3 cp=4", marks=pytest.mark.slow),
    ],
)
def test_solvers_agree_on_real_placements(degrees: str, name: str) -> None:
    if name == "cp_sat":
        pytest.importorskip("ortools", reason="the extra `plan`")
    p = real(f"{degrees} dp=8 tp=2 sp=true zero=1 recompute=none")
    ours, theirs = solved(p), getattr(plan_solvers, name)(p)
    assert theirs.proven
    assert ours.best
    assert is_closed(ours)
    assert ours.bound * (1 - 1e-6) <= theirs.seconds <= ours.best.seconds * (1 + 1e-6)
