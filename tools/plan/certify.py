"""Writes what :mod:`.check_certificate` reads: the problem, the placement, and the proof that none is better."""

from dataclasses import asdict
from typing import Any

from telechat_moe.tools.plan.placement import Problem, Solution


def certificate(problem: Problem, solution: Solution) -> dict[str, Any]:
    """Return a certificate as plain data."""
    stated = asdict(problem)
    stated["least"] = problem.lowest
    stated["fixed_working"] = problem.working
    stated["bulk"] = problem.bulk
    return {
        "problem": _plain(stated),
        "items": _plain(solution.items),
        "objective": solution.objective,
        "bound": solution.bound,
        "proof": _plain(solution.proof),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
