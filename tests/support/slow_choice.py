"""Run the long tests that a commit calls for, as many as fit into CI's hour: ``slow_choice.py SECONDS_SPENT``.

First eight layouts, the group that the changes of the last day call for most, one by the commit's hash and eight more
layouts; then the other groups of what changed, and layouts again. A copy without history has no changes and no turns.

CI does not know which commits it saw before. But nobody goes on before it has passed, so a landing is followed by a pause of
at least the time that it takes, and the pauses are counted: every pause is the next turn of the layouts. A pause may also be
none of CI's, which skips a turn; therefore each run has the turn before, too.
"""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from slow_groups import IN_CI, LAYOUTS, TURNS, groups_for

ROOT = Path(__file__).parents[2]
HOUR = 3600.0
LIMIT, END = 54 * 60.0, 58 * 60.0
"""When the last group should have ended, and when it is ended, seconds after CI began."""
BEFORE = 22 * 60.0
"""What comes before the long tests takes so long on two quiet cores, seconds."""
PAUSE = 1800.0
"""No commit for so many seconds: CI may have run."""
HALF_LIFE = 6 * HOUR
"""A line that changed so long before the commit counts half."""


class Change(NamedTuple):
    """Lines of a file that a commit added and removed, and when, seconds since the epoch."""

    time: float
    file: str
    lines: int


@dataclass(frozen=True)
class History:
    """What is known of a commit and those before it."""

    commit: str
    times: Sequence[float]
    changes: Sequence[Change]
    shallow: bool

    @staticmethod
    def read(root: Path = ROOT) -> "History":
        """Read the history of what is checked out."""

        def git(*words: str) -> str:
            return subprocess.run(
                ["git", *words], cwd=root, check=True, capture_output=True, text=True
            ).stdout

        shallow = git("rev-parse", "--is-shallow-repository").strip() == "true"
        times = [float(line) for line in git("log", "--format=%ct").split()]
        now, changes = times[0], []
        log = git("log", "--no-merges", "--no-renames", "--numstat", "--format=%ct")
        for line in [] if shallow else log.splitlines():
            added, *rest = line.split("\t")
            if rest:
                lines = sum(int(n) for n in (added, rest[0]) if n.isdigit())
                changes.append(Change(now, rest[1], max(lines, 1)))
            elif added:
                now = float(added)
        return History(git("rev-parse", "HEAD").strip(), times, changes, shallow)

    @property
    def turn(self) -> int:
        """How many pauses there were."""
        return sum(b - a > PAUSE for a, b in pairwise(sorted(self.times)))


def changed_groups(changes: Iterable[Change], now: float) -> list[str]:
    """Return the groups that changes of the day before ``now`` call for, the most important first."""
    scores: Counter[str] = Counter()
    for change in changes:
        age = now - change.time
        if age <= 24 * HOUR:
            for place, group in enumerate(groups_for(change.file)):
                scores[group] += change.lines * 0.5 ** (age / HALF_LIFE) / (place + 1)
    return [name for name, _ in scores.most_common()]


def choose(history: History) -> list[str]:
    """Return the groups that a commit calls for, in order."""
    digest = int(history.commit, 16)
    turn = digest if history.shallow else history.turn
    layouts = [f"layouts-{(turn - back) % TURNS}" for back in range(3)]
    rotating = list(IN_CI)[digest % len(IN_CI)]
    first, *others = changed_groups(history.changes, max(history.times)) or [rotating]
    return list(dict.fromkeys([layouts[0], first, rotating, layouts[1], *others, layouts[2]]))


def run_groups(
    groups: Sequence[str],
    spent: float,
    run: Callable[[str, float], bool],
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Run groups in order while they fit, and return those that did not, or did not end in time.

    A machine that took longer than expected so far is expected to go on so.

    Args:
        spent: Seconds since CI began.
        run: Takes a group and how many seconds it may take; whether it ended in them.
    """
    began, expected, left = clock() - spent, BEFORE, []
    for group in groups:
        spent = clock() - began
        minutes = (IN_CI | LAYOUTS)[group].minutes
        if spent + 60 * minutes * max(1.0, spent / expected) > LIMIT:
            left.append(group)
            continue
        if not run(group, END - spent):
            left.append(group)
        expected += 60 * minutes
        report(f"group {group}: {(clock() - began - spent) / 60:.1f} minutes, {minutes} expected")
    return left


def run_in_time(command: Sequence[str], seconds: float) -> bool:
    """Run a command and return whether it ended in time; if not, it is ended with all that it started.

    Raises:
        CalledProcessError: It failed.
    """
    # The first failure ends a group, so that none is unseen when its time is over.
    environment = {**os.environ, "PYTEST_ADDOPTS": "-x"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if code:
        raise subprocess.CalledProcessError(code, command)
    return True


def report(line: str) -> None:
    """Print a line before what runs next prints its own."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run what the checked-out commit calls for."""
    history = History.read()
    if history.shallow:
        report("no history: no group by what changed, and layouts by the commit's hash")
    chosen = choose(history)
    report(f"long tests: {', '.join(chosen)}")

    def run(group: str, seconds: float) -> bool:
        return run_in_time(["make", "test-slow", f"GROUP={group}"], seconds)

    left = run_groups(chosen, float(sys.argv[1]), run)
    others = [name for name in IN_CI if name not in chosen]
    report(f"chosen, and not run or not ended for want of time: {', '.join(left) or 'none'}")
    report(f"not chosen: {', '.join(others) or 'none'}")


if __name__ == "__main__":
    main()
