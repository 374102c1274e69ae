"""Solvers that others wrote agree with ours."""

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from test_placement import random_problem

from telechat_moe.tools.plan import cross
from telechat_moe.tools.plan.placement import Inner, Pool
from telechat_moe.tools.plan.placement_problem import Rest


def _agree(solver, number: int, seed: int, rel: float) -> int:
    rng, solved = random.Random(seed), 0
    for _ in range(number):
        p = random_problem(rng, hidden=False)
        layers = tuple(replace(g, working=0) for g in p.layers)
        p = replace(p, layers=layers, held=0, rest=Rest())  # working sets need further integers
        if p.choice and len(layers) == 2:
            p = replace(
                p, choice=False
            )  # recipes recompute the first layers of a chunk, the program any
        ours, theirs = Inner(p, Pool()).solve(float("inf"), nodes=4000), solver(p)
        assert theirs.proven
        if ours.best is None:
            assert theirs.seconds is None
            continue
        assert ours.bound == pytest.approx(ours.best.seconds, rel=1e-6)
        assert theirs.seconds == pytest.approx(ours.best.seconds, rel=rel)
        solved += 1
    return solved


def test_highs_agrees() -> None:
    assert _agree(cross.highs, 25, 11, 1e-6) > 12


def test_cp_sat_agrees() -> None:
    pytest.importorskip("ortools", reason="the extra `plan`")
    assert _agree(cross.cp_sat, 12, 12, 1e-9) > 5
