"""Say what the runs of the pilot show, and whether they are in the published order."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""Variant -> what was measured with each seed, in the order of the seeds."""

MEASURES = ("loss", "held_out", "overload", "drop_rate", "specialisation")


def summary(runs: Runs) -> dict[str, dict[str, tuple[float, float]]]:
    """Return mean and standard deviation over the seeds (0 for one seed) of every measure of every variant."""
    return {
        variant: {name: _spread([float(run[name]) for run in measured]) for name in MEASURES}
        for variant, measured in runs.items()
    }


def _spread(values: Sequence[float]) -> tuple[float, float]:
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def against(runs: Runs, variant: str, other: str, measure: str) -> tuple[float, float, int]:
    """Return how much more a variant has of a measure than another, seed by seed.

    Returns:
        Mean and standard deviation of the differences, and the seeds in which it has more.
    """
    pairs = zip(runs[variant], runs[other], strict=True)
    differences = [float(one[measure]) - float(two[measure]) for one, two in pairs]
    mean, deviation = _spread(differences)
    return mean, deviation, sum(x > 0 for x in differences)


CLAIMS: tuple[tuple[str, str, str, str], ...] = (
    ("sequence", "EP 8", "held_out", "the loss over sequences costs more than that over EP groups"),
    ("EP 8", "DP", "held_out", "the loss over EP groups costs more than that over the DP group"),
    ("sequence", "DP", "held_out", "the loss over sequences costs more than that over the DP group"),
    ("EP 8", "sequence", "specialisation", "EP groups let experts specialise more than sequences"),
    ("DP", "EP 8", "specialisation", "the DP group lets experts specialise more than EP groups"),
    *(
        (f"EP {members}, capacity {capacity}", "DP" if members == 32 else f"EP {members}", "held_out",
         f"dropping at EP {members} with capacity {capacity} costs more than dropless")
        for members in (8, 16, 32)
        for capacity in (1.0, 1.5)
    ),
)  # fmt: skip
"""Variant, variant that has less, of what, and what that says. Pangu Ultra MoE published the order of the losses."""


def verdicts(runs: Runs) -> list[dict[str, Any]]:
    """Return for each claim the differences and a verdict.

    ``reproduced``: so with every seed. ``contradicted``: the other way with every seed. ``not shown``: seeds disagree. ``not
    judged``: fewer than three seeds.
    """
    found: list[dict[str, Any]] = []
    for variant, other, measure, says in CLAIMS:
        if variant not in runs or other not in runs:
            continue
        mean, deviation, more = against(runs, variant, other, measure)
        seeds = len(runs[variant])
        word = {seeds: "reproduced", 0: "contradicted"}.get(more, "not shown")
        found.append(
            {
                "claim": says,
                "measure": measure,
                "difference": mean,
                "deviation": deviation,
                "seeds": f"{more} of {seeds}",
                "verdict": word if seeds >= 3 else "not judged",
            }
        )
    return found
