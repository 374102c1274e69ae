"""Solvers that others wrote agree with ours."""

import random
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from test_placement import _random

from telechat_moe.tools.plan import cross
from telechat_moe.tools.plan.placement import Solution, solve


def _agree(solver, number: int, seed: int) -> int:
    rng, solved = random.Random(seed), 0
    for _ in range(number):
        problem = _random(rng)
        ours, theirs = solve(problem), solver(problem)
        assert theirs.proven
        assert theirs.objective == (ours.objective if isinstance(ours, Solution) else None)
        solved += isinstance(ours, Solution)
    return solved


def test_highs_agrees() -> None:
    assert _agree(cross.highs, 100, 11) > 25


def test_cp_sat_agrees() -> None:
    pytest.importorskip("ortools", reason="the extra `plan`")
    assert _agree(cross.cp_sat, 60, 12) > 15
