"""Merge dumps of many ranks into one rank of whole tensors, so that runs of other layouts can be compared."""

from collections.abc import Sequence
from pathlib import Path

from telechat_moe.tools.align.compare.rows import Row
from telechat_moe.tools.align.dump.merge import Outcome, Said, into, merge_ranks
from telechat_moe.tools.align.dump.records import Dump, RankDump

_SURE = (
    "dump",
    "said",
    "inferred",
)  # layouts that are not guesses: copies that differ are a fault


def merged(dump: Dump, said: Said, folder: Path, steps: Sequence[int]) -> tuple[Dump, list[Row]]:
    """Return a dump with one rank in each step, and a row for each tensor that could not be merged or whose copies differ.

    Whole tensors are written into a folder; they need as much space as the merged dump.
    """
    ranks: dict[tuple[int, int], RankDump] = {}
    rows: list[Row] = []
    for step in steps:
        one, outcomes = merge_ranks(dump.at(step), said, into(folder / str(step)))
        ranks[step, 0] = one
        rows += [_row(step, o) for o in outcomes if o.problem is not None]
    return Dump(folder, ranks), rows


def needs_merge(reference: Dump, target: Dump) -> bool:
    """Return whether the dumps are of different ranks."""
    return any(
        {d.rank for d in reference.at(step)} != {d.rank for d in target.at(step)}
        for step in reference.steps
        if step in target.steps
    )


def _row(step: int, outcome: Outcome) -> Row:
    wrong = outcome.copies == "differ" and outcome.how in _SURE
    status = "diverged" if wrong else "not comparable"
    said = f"not merged from ranks {', '.join(map(str, outcome.ranks))}: {outcome.problem}"
    return Row(step, 0, outcome.key, outcome.place, "", "", (), status, "merge", reason=said)
