"""Read from the files of a run how it ended: where its processes were, which failed first, and the lines that say why.

Of logs only exceptions and MindSpore's errors are read out, never what the run printed: that may be text of the model.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from telechat_moe.launch.faults import Fault, first_fault
from telechat_moe.processes import CONTROL, Control
from telechat_moe.reading import MALFORMED

LAUNCHER = "launcher.failed"
"""File of the control folder with the launcher's own sentence about the end of a run."""
MOST_LINES, MOST_CHARACTERS = 60, 400
_BEGIN = re.compile(
    r"\[(ERROR|CRITICAL)\]|Traceback \(most recent call last\)|error: |E[A-Z]\d{4}: "
)
_GOES_ON = re.compile(
    r"\s|- |-----|[\w.]*(Error|Exception|Interrupt)\b|mindspore/|First error scene|\(Please search"
)
_KEY = r"(?i:\w*(?:api_?key|access_?key|secret|passwd|password|authorization|(?:auth|access|api)_?token))"
_SECRET = re.compile(
    rf"(://[^\s:/@]+:)[^\s@]+(?=@)|({_KEY}[\"']?\s*[=:]\s*[\"']?(?:Bearer )?)[^\s\"',]+"
)


class RankEnd(NamedTuple):
    """How a process ended: ``done``, ``failed`` with a message, or ``no word``; ``position``: where in the run it was; ``is_ours``: the message is meant for the user."""

    rank: int
    position: str
    end: str
    message: str = ""
    is_ours: bool = False
    time: float = 0.0


class FirstError(NamedTuple):
    """What failed first: the launcher's sentence or the rank's, the fault that its log reports, and lines of its log."""

    rank: int | None
    position: str
    message: str
    fault: Fault | None
    fault_rank: int | None
    log: str
    lines: list[tuple[int, str]]


def without_secrets(text: str) -> str:
    """Return a text without what looks like a password or key in it."""
    return _SECRET.sub(lambda match: f"{match[1] or match[2]}(left out)", text)


def is_secret(key: str) -> bool:
    """Return whether a setting of this name is a password or key."""
    return re.fullmatch(_KEY, key) is not None


def error_lines(text: str) -> list[tuple[int, str]]:
    """Return the numbers and texts of the lines of a log that belong to exceptions and errors, from the first on."""
    listed: list[tuple[int, str]] = []
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        inside = bool(_BEGIN.match(line)) or (inside and (not line or bool(_GOES_ON.match(line))))
        if inside and line.strip() and len(listed) < MOST_LINES:
            listed.append((number, without_secrets(line[:MOST_CHARACTERS])))
    return listed


def rank_ends(control: Control) -> list[RankEnd]:
    """Return how the processes ended that have registered in a control folder, by rank."""
    ranks = (re.fullmatch(r"rank_(\d+)\.pid", path.name) for path in control.folder.glob("*.pid"))
    return [_rank_end(control, rank) for rank in sorted(int(match[1]) for match in ranks if match)]


def _rank_end(control: Control, rank: int) -> RankEnd:
    position = control.read(f"rank_{rank}.at") or "not begun"
    if control.read(f"rank_{rank}.done") is not None:
        return RankEnd(rank, position, "done")
    if (text := control.read(f"rank_{rank}.failed")) is None:
        return RankEnd(rank, position, "no word")
    try:
        failure: dict[str, Any] = json.loads(text)
        message, is_ours = without_secrets(str(failure["message"])), bool(failure["known"])
        return RankEnd(rank, position, "failed", message, is_ours, float(failure["time"]))
    except MALFORMED:  # torn as its host died
        return RankEnd(rank, position, "failed")


def first_error(job: Path, logs: Path, ends: list[RankEnd]) -> FirstError | None:
    """Return what failed first in a run; None if nothing did.

    Args:
        job: Folder of the run's job, ``output_dir/.job``.
        logs: Folder of the logs.
        ends: Of :func:`rank_ends`.
    """
    texts = {rank: path.read_text(errors="replace") for rank, path in _logs(logs).items()}
    fault_rank, fault = first_fault(texts) or (None, None)
    message = _launcher(Control(job / CONTROL))
    rank, word = _first_end(ends, None if fault is None or fault.is_echo else fault_rank)
    if message:
        match = re.match(r"rank (\d+)\b", message)
        rank = int(match[1]) if match else None
    message, rank = message or word, fault_rank if rank is None else rank
    if not message and fault is None:
        return None
    position = next((end.position for end in ends if end.rank == rank), "")
    log = str(_logs(logs).get(rank, "")) if rank is not None else ""
    lines = error_lines(texts.get(rank, "")) if rank is not None else []
    return FirstError(rank, position, message, fault, fault_rank, log, lines)


def _first_end(ends: list[RankEnd], cause: int | None) -> tuple[int | None, str]:
    """Return which process ended first by what they left, and its message; None: all is well, or the run goes on.

    Where others only have exceptions, one that ended without a word was killed: their collectives broke. A process
    whose log reports the cause goes before it: ``msrun`` kills the others when one fails.

    Args:
        cause: Rank whose log reports a fault of a device or link that is no echo of another's.
    """
    failed = sorted((e for e in ends if e.end == "failed"), key=lambda e: (not e.is_ours, e.time))
    silent = [end for end in ends if end.end == "no word"]
    if cause is not None and failed and not failed[0].is_ours:
        return cause, next((end.message for end in failed if end.rank == cause), "")
    if failed and silent and not failed[0].is_ours:
        return silent[0].rank, f"rank {silent[0].rank} ended without a word, was killed or hangs"
    return (failed[0].rank, failed[0].message) if failed else (None, "")


def _logs(folder: Path) -> dict[int, Path]:
    """Return the logs of the last attempt by rank."""
    matches = ((re.fullmatch(r"worker_(\d+)\.log", p.name), p) for p in folder.glob("worker_*.log"))
    return {int(match[1]): path for match, path in matches if match}


def _launcher(control: Control) -> str:
    try:
        return without_secrets(json.loads(control.read(LAUNCHER) or "{}").get("message", ""))
    except MALFORMED:
        return ""
