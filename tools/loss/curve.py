"""A loss curve as it was read, and what every reader of one needs."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.numerics import Array


@dataclass(frozen=True)
class LossCurve:
    """Losses of one run."""

    path: str  # file or folder that they were read from
    kind: str  # format of the file
    metric: str  # the file's name of the loss
    steps: Array  # steps, increasing
    loss: Array  # loss of each step; NaN and infinity are kept
    norm: Array  # norm of the gradient; NaN where there is none
    notes: tuple[str, ...] = ()  # what the reader had to correct or leave out


class LossRow(NamedTuple):
    """What a file says of a step."""

    line: int
    step: int
    loss: float
    norm: float = math.nan


def curve(
    path: Path, kind: str, metric: str, rows: list[LossRow], notes: tuple[str, ...] = ()
) -> LossCurve:
    """Return the curve of rows whose steps increase.

    Raises:
        BadInputError: There is no row, or a step is not after the one before.
    """
    if not rows:
        raise BadInputError(f"{path}: {kind} without a single step")
    for previous, other in itertools.pairwise(rows):
        if other.step <= previous.step:
            problem = f"step {other.step} after step {previous.step}; expected a later one"
            raise BadInputError(f"{path}:{other.line}: {problem}")
    _, steps, *values = zip(*rows, strict=True)
    loss, norm = (np.array(column, np.float64) for column in values)
    return LossCurve(str(path), kind, metric, np.array(steps, np.int64), loss, norm, notes)


def last_of_each(rows: list[LossRow]) -> tuple[list[LossRow], tuple[str, ...]]:
    """Return the last row of each step, in order, and a note on those left out: a log goes on after a restart."""
    last = {row.step: row for row in rows}
    if len(rows) == len(last):
        return rows, ()
    times = Counter(row.step for row in rows)
    repeated = sum(count > 1 for count in times.values())
    note = f"{repeated} steps are in the log more than once (restarts, several ranks): the last of each counts"
    others = {row.step for row in rows if str(row.loss) != str(last[row.step].loss)}
    if others:
        note += f"; {len(others)} had another loss before, first step {min(others)}"
    return [last[step] for step in sorted(last)], (note,)


def mean_note(steps: Iterable[int]) -> tuple[str, ...]:
    """Return a note that values are means over steps, of a writer that prints means since its last line.

    Args:
        steps: Those that have a line, with a loss or without.
    """
    gaps = {b - a for a, b in itertools.pairwise(sorted({*steps}))}
    if not gaps or gaps == {1}:
        return ()
    return (f"each value is the mean of the steps since the line before, up to {max(gaps)}",)


def to_float(path: Path, line: int, name: str, value: Any) -> float:
    """Return a number that a file has, perhaps as text.

    Raises:
        BadInputError: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise BadInputError(f"{path}:{line}: {name} is {value!r}; expected a number")
    try:
        return float(value)
    except (ValueError, OverflowError):
        raise BadInputError(f"{path}:{line}: {name} is {value!r}; expected a number") from None
