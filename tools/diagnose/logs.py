"""What the log of a trainer shows: when steps were slow. Not who made them so, since in a whole step ranks wait for each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.numerics import Array
from telechat_moe.tools.diagnose.excess import FEWEST
from telechat_moe.tools.loss.read import is_mindformers_log, step_seconds
from telechat_moe.units import ranges_text, seconds_text

NOT_JUDGED = "a log holds whole steps, in which every rank waits for the slowest; name timings of `telechat-moe train` or traces"
_SLOW = 1.5
"""Times the median from which a step is slow."""


@dataclass(frozen=True)
class LoggedSteps:
    """Steps of a run by its logs.

    Attributes:
        steps: Their numbers, rising, without the first, which compiles graphs.
        seconds: How long each took, of several logs the longest.
    """

    source: str
    steps: Array
    seconds: Array

    @property
    def median(self) -> float:
        """The median step, seconds."""
        return float(np.median(self.seconds))

    @property
    def slow(self) -> Array:
        """The numbers of the steps that took longer than one and a half times the median."""
        return self.steps[self.seconds > _SLOW * self.median]

    def lost(self) -> float:
        """Return the share of the run's time that slow steps took above the median."""
        excess = np.clip(self.seconds - self.median, 0, None)[self.seconds > _SLOW * self.median]
        return float(excess.sum() / self.seconds.sum())

    def says(self) -> str:
        """Return the answer in one sentence, and what is not judged."""
        text = f"a step takes {seconds_text(self.median)} (median of {len(self.steps):,})"
        if len(self.slow):
            gaps = np.unique(np.diff(self.slow))
            every = f", every {gaps[0]} steps" if len(self.slow) > 2 and len(gaps) == 1 else ""
            text += (
                f"; {len(self.slow)} took more than {_SLOW:g} times as long ({_named(self.slow)}{every}), which costs the run "
                f"{self.lost():.1%} of its time"
            )
        return f"{text}. Ranks are not judged: {NOT_JUDGED}"

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {
            "verdict": "inconclusive",
            "says": self.says(),
            "source": self.source,
            "steps": [int(self.steps[0]), int(self.steps[-1])],
            "step_seconds": self.median,
            "slow_steps": self.slow.tolist(),
            "lost": self.lost(),
            "not_judged": {"ranks": NOT_JUDGED},
        }


def _named(steps: Array) -> str:
    remainder = f" and {len(steps) - 8} more" if len(steps) > 8 else ""
    return f"steps {ranges_text(steps[:8].tolist())}{remainder}"


def read_logs(paths: Sequence[Path]) -> LoggedSteps | None:
    """Return the steps of logs of MindFormers; None: none of the paths is one.

    Raises:
        BadInputError: Some are logs and some are not, or they have too few steps in common.
    """
    texts = [path for path in paths if path.is_file() and path.suffix in ("", ".log", ".txt")]
    logs = [path for path in texts if is_mindformers_log(path)]
    if not logs:
        return None
    if other := [path for path in paths if path not in logs]:
        raise BadInputError(f"{other[0]}: no log, beside {logs[0]}, which is one; name one kind")
    seconds = [step_seconds(path) for path in logs]
    common = sorted(set.intersection(*map(set, seconds)))[1:]
    source = ", ".join(map(str, logs))
    if len(common) < FEWEST:
        raise BadInputError(
            f"{source}: {len(common)} steps in common after the first; expected {FEWEST} or more"
        )
    rows = np.array([[by_step[step] for step in common] for by_step in seconds])
    return LoggedSteps(f"logs {source}", np.array(common), rows.max(0))
