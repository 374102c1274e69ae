"""Loss curves in what programs print: MindFormers, Megatron-LM (and MindSpeed), torchtitan.

A line has one step. Broken ones are refused with their number; only a last line that was torn off is left out, and in a log of
MindFormers one on which the next writer went on. Of a step that is there more than once the last line counts.
"""

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from telechat_moe.errors import BadInputError
from telechat_moe.tools.loss.curve import (
    LossCurve,
    LossRow,
    curve,
    last_of_each,
    mean_note,
    to_float,
)

_MINDFORMERS = re.compile(
    r"\{ Epoch:\[\s*(?P<epoch>\d{1,7})/\s*\d+\], step:\[\s*(?P<step>\d{1,9})/\s*(?P<steps>\d{1,9})\], "
    r"loss:\s*\[?\s*(?P<loss>[^,\]/\s]+)(?:/[^\]]*\])?, .*?"
    r"global_norm: (?P<norm>\[[^\],]*\]|(?:None|-?inf|nan|[\d.]+(?:e[-+]?\d+)?)(?=[,\s\x1b]))"
)
_MODE_1 = re.compile(
    r"\{ step:\[\s*(?P<step>\d{1,9})/\s*\d{1,9}\], (?:.*? )?loss:\s*(?P<loss>[^,\s]+)[,\s]"
    r"(?:.*?\bgrad_norm:\s*(?P<norm>[^,}\s]*))?.*?\}"
)
MINDFORMERS = re.compile(r"\{ (?:Epoch:\[|step:\[\s*\d+/\s*\d+\], (?:consumed_samples|loss):)")
STEP = re.compile(
    r"\{ (?:Epoch:\[\s*(?P<epoch>\d{1,7})/\s*\d+\], )?step:\[\s*(?P<step>\d{1,9})/\s*(?P<steps>\d{1,9})\]"
)
TIME = re.compile(r"\bper_step_time:\s*(\d+)ms")


_MEGATRON = re.compile(r"\biteration\s+(?P<step>\d{1,9})/\s*\d{1,9} \|(?P<fields>.*)")
_LOSSES = ("lm loss", "lm_loss", "loss")
_SKIPPED = "number of skipped iterations"
_TITAN = re.compile(
    r"(?<!validate )\bstep:\s*(?P<step>\d{1,9})(?:/\d{1,9}(?: = [\d.]+%)?)?\s+loss:"
)
_TITAN_WHOLE = re.compile(
    r"loss:\s*(?P<loss>\S+)\s+(?:.*?\bgrad_norm:\s*(?P<norm>\S+)\s+)?(?=.*\bmemory:)"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def reader(text: str) -> Callable[[Path, str, str | None], LossCurve] | None:
    """Return what reads a log: takes its path, its text and the name of the loss; None: it is no log of a known program."""
    if MINDFORMERS.search(text):
        return _mindformers
    if _MEGATRON.search(text):
        return _megatron
    return _torchtitan if _TITAN.search(_COLOUR.sub("", text)) else None


class _Record(NamedTuple):
    line: int
    text: str  # from its brace to the next, or to the end of the line
    may_be_torn: bool  # no end of line follows


def records(text: str) -> Iterator[_Record]:
    """Yield what the monitor of MindFormers printed for each step."""
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        starts = [match.start() for match in MINDFORMERS.finditer(line)]
        for begin, end in zip(starts, [*starts[1:], len(line)], strict=False):
            yield _Record(number, line[begin:end], not line[begin:end].endswith(("\n", "\r")))


def step_of(match: re.Match[str]) -> int:
    """Return the step of a line, counted through all epochs (mode 1 counts so)."""
    epoch = match.groupdict().get("epoch")
    return int(match["step"]) + ((int(epoch) - 1) * int(match["steps"]) if epoch else 0)


def _mindformers(path: Path, text: str, metric: str | None) -> LossCurve:
    rows: list[LossRow] = []
    notes: list[str] = []
    for line, record, may_be_torn in records(text):
        match = _MINDFORMERS.search(record) or _MODE_1.search(record)
        if match is None:
            if may_be_torn:
                notes.append(f"line {line} is torn off and left out")
                continue
            problem = "a line of MindFormers' monitor without step, loss and norm of the gradient"
            raise BadInputError(f"{path}:{line}: {problem}")
        if match["loss"] == "N/A":
            raise BadInputError(
                f"{path}:{line}: the log of a pipeline stage that is not the last and has no loss; name that of a rank of "
                "the last stage"
            )
        loss = match["loss"]
        if metric not in (None, "loss"):
            loss = _part(path, line, record, str(metric))
        norm = (match["norm"] or "").strip(" []\t")
        value = math.nan if norm in ("", "None") else to_float(path, line, "gradient norm", norm)
        rows.append(LossRow(line, step_of(match), to_float(path, line, "loss", loss), value))
    rows, repeated = last_of_each(rows)
    return curve(path, "MindFormers log", metric or "loss", rows, (*notes, *repeated))


def _part(path: Path, line: int, record: str, name: str) -> str:
    match = re.search(rf"\b{re.escape(name)}:\s*([^,\s]+)", record)
    if match is None:
        raise BadInputError(f"{path}:{line}: no {name} in this line of MindFormers' monitor")
    return match[1]


def _megatron(path: Path, text: str, metric: str | None) -> LossCurve:
    """Read lines such as ``iteration  10/  500 | ... | lm loss: 1.05E+01 | ... | grad norm: 2.1 | ... |``."""
    rows: list[LossRow] = []
    skipped: list[int] = []
    torn = ()
    for line, content, ends in _lines(text):
        match = _MEGATRON.search(content)
        if match is None:
            continue
        fields = _fields(match["fields"])
        name = next((n for n in ([metric] if metric else _LOSSES) if n in fields), None)
        if not ends and _SKIPPED not in fields:
            torn = _torn(line)
            continue
        other = metric is not None and any(n in fields for n in _LOSSES)
        if name is None and (other or _SKIPPED not in fields):
            problem = (
                f"no {metric or 'lm loss'} in this line of Megatron-LM; found {', '.join(fields)}"
            )
            raise BadInputError(f"{path}:{line}: {problem}")
        if name is None and fields[_SKIPPED] != "0":
            skipped.append(int(match["step"]))
            continue
        # A loss that is not above zero is not printed; it is NaN.
        loss = math.nan if name is None else to_float(path, line, name, fields[name])
        norm = to_float(path, line, "grad norm", fields.get("grad norm", "nan"))
        rows.append(LossRow(line, int(match["step"]), loss, norm))
    left_out = f"{len(skipped)} lines of skipped iterations have no loss and are left out"
    rows, repeated = last_of_each(rows)
    means = mean_note([*(row.step for row in rows), *skipped])
    notes = (*(left_out,) * bool(skipped), *torn, *repeated, *means)
    return curve(path, "Megatron-LM log", metric or "lm loss", rows, notes)


def megatron_seconds(path: Path, text: str) -> dict[int, float]:
    """Return the mean time of the steps up to each step that Megatron-LM printed, seconds."""
    name, seconds = "elapsed time per iteration (ms)", dict[int, float]()
    for line, content, _ in _lines(text):
        match = _MEGATRON.search(content)
        if match and name in (fields := _fields(match["fields"])):
            seconds[int(match["step"])] = to_float(path, line, name, fields[name]) / 1e3
    return seconds


def _fields(text: str) -> dict[str, str]:
    """Return the fields of a line of Megatron-LM, without one that is cut off; text before a colon is its name."""
    parts = (part.partition(":") for part in text.split("|")[:-1])
    return {name.strip(): value.strip() for name, colon, value in parts if colon}


def _torchtitan(path: Path, text: str, metric: str | None) -> LossCurve:
    """Read lines such as ``[titan] ... - INFO - step: 10  loss:  4.1  grad_norm:  1.2  memory: ...``."""
    if metric not in (None, "loss"):
        raise BadInputError(f"{path}: a log of torchtitan has no {metric}; expected loss")
    rows: list[LossRow] = []
    torn = ()
    for line, content, ends in _lines(text):
        plain = _COLOUR.sub("", content)
        match = _TITAN.search(plain)
        if match is None:
            continue
        values = _TITAN_WHOLE.match(plain, match.end() - len("loss:"))
        if values is None:
            if not ends:
                torn = _torn(line)
                continue
            raise BadInputError(f"{path}:{line}: a line of torchtitan without loss and memory")
        norm = values["norm"]
        value = math.nan if norm is None else to_float(path, line, "grad_norm", norm)
        loss = to_float(path, line, "loss", values["loss"])
        rows.append(LossRow(line, int(match["step"]), loss, value))
    rows, notes = last_of_each(rows)
    return curve(path, "torchtitan log", "loss", rows, (*torn, *notes))


def _torn(line: int) -> tuple[str]:
    """Return the note on a last line that a kill tore off."""
    return (f"line {line} is torn off and left out",)


def _lines(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield number and text of each line, and whether the line ends."""
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        yield number, line.rstrip("\r\n"), line.endswith(("\n", "\r"))
