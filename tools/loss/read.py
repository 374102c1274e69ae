"""Read loss curves from files of several writers.

=====================  ==========================================================================================
``metrics.jsonl``      ours: a JSON object a line with ``event``, ``step``, ``loss``, ``grad_norm``
MindFormers' log       lines of MFLossMonitor: ``{ Epoch:[  1/  1], step:[   10/ 1000], loss: 5.123456, ...``, or of its
                       mode 1 (dynamic graph): ``{ step:[   10/ 1000], ..., loss: 5.123456, ...``
Megatron-LM's values   JSON: ``{"lm loss": {"start_step", "end_step", "step_interval", "values": {"1": 9.3}}}``
CSV                    columns step, loss and maybe grad_norm, by their titles or in this order; ``,``, ``;`` or tab
=====================  ==========================================================================================

The kind of a file is recognised by its content. Broken content is refused with file and line, never skipped; only a
last line that was torn off when the writer was killed is left out, and in a log one on which the next writer went on.
"""

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.narrowing import is_object
from telechat_moe.numerics import Array
from telechat_moe.reading import JsonError, parse_json, read_bytes

LOSS_NAMES = ("loss", "lm_loss", "train_loss", "training_loss")
NORM_NAMES = ("grad_norm", "global_norm", "gradient_norm")
_MINDFORMERS = re.compile(
    r"\{ Epoch:\[\s*(?P<epoch>\d{1,7})/\s*\d+\], step:\[\s*(?P<step>\d{1,9})/\s*(?P<steps>\d{1,9})\], "
    r"loss:\s*\[?\s*(?P<loss>[^,\]/\s]+)(?:/[^\]]*\])?, .*?"
    r"global_norm: (?P<norm>\[[^\],]*\]|(?:None|-?inf|nan|[\d.]+(?:e[-+]?\d+)?)(?=[,\s\x1b]))"
)
_MODE_1 = re.compile(
    r"\{ step:\[\s*(?P<step>\d{1,9})/\s*\d{1,9}\], (?:.*? )?loss:\s*(?P<loss>[^,\s]+)[,\s]"
    r"(?:.*?\bgrad_norm:\s*(?P<norm>[^,}\s]*))?.*?\}"
)
_START = re.compile(r"\{ (?:Epoch:\[|step:\[\s*\d+/\s*\d+\], (?:consumed_samples|loss):)")
_STEP = re.compile(
    r"\{ (?:Epoch:\[\s*(?P<epoch>\d{1,7})/\s*\d+\], )?step:\[\s*(?P<step>\d{1,9})/\s*(?P<steps>\d{1,9})\]"
)
_TIME = re.compile(r"\bper_step_time:\s*(\d+)ms")


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


class _Row(NamedTuple):
    line: int
    step: int
    loss: float
    norm: float


def read(path: str | Path, metric: str | None = None) -> LossCurve:
    """Read a loss curve.

    Args:
        path: File, or a folder with a ``metrics.jsonl``.
        metric: Name of the loss in the file; None: the usual one.

    Raises:
        BadInputError: The file is missing, of no known kind, or broken; names the line.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "metrics.jsonl"
    try:
        text = _text(path)
    except BadInputError as error:
        raise BadInputError(f"cannot read the losses {error}") from None
    if not text.strip():
        raise BadInputError(f"{path}: empty; expected a loss curve")
    return _reader(text)(path, text, metric)


def _text(path: Path) -> str:
    data = read_bytes(path)
    if data.startswith(b"\x1f\x8b"):
        raise BadInputError(f"{path}: compressed by gzip; unpack it first")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        text = data.decode(errors="replace")
        if _START.search(text):
            return text  # between a log's lines stand messages of any encoding, and progress bars that a kill has torn
        line = data[: error.start].count(b"\n") + 1
        raise BadInputError(f"{path}:{line}: not text (UTF-8)") from None


def is_mindformers_log(path: Path) -> bool:
    """Return whether a file holds lines of MindFormers' monitor."""
    return _START.search(read_bytes(path).decode(errors="replace")) is not None


def step_seconds(path: str | Path) -> dict[int, float]:
    """Return how long each step of a run took, seconds: of a log of MindFormers, or of our metrics.jsonl or its folder.

    Raises:
        BadInputError: The file is missing, or of another kind.
    """
    path = Path(path)
    path = path / "metrics.jsonl" if path.is_dir() else path
    text = _text(path)
    if _START.search(text):
        records = [record.text for record in _records(text)]
        matches = [(m, _TIME.search(record)) for record in records if (m := _STEP.search(record))]
        return {_step(match): int(time[1]) / 1e3 for match, time in matches if time}
    seconds: dict[int, float] = {}
    for line in text.splitlines():
        try:
            record = _object(parse_json(line, finite=False))
        except ValueError:
            continue  # torn by a kill
        if record.get("event") == "step" and _is_int(record.get("step")):
            seconds[record["step"]] = _number(path, 1, "seconds", record.get("seconds"))
    if not seconds:
        raise BadInputError(
            f"{path}: no times of steps; expected a log of MindFormers or our metrics.jsonl"
        )
    return seconds


def _step(match: re.Match[str]) -> int:
    """Return the step of a line, counted through all epochs (mode 1 counts so)."""
    epoch = match.groupdict().get("epoch")
    return int(match["step"]) + ((int(epoch) - 1) * int(match["steps"]) if epoch else 0)


def _reader(text: str) -> Callable[[Path, str, str | None], LossCurve]:
    if _START.search(text):
        return _mindformers
    head = text.lstrip()
    if not head.startswith("{"):
        return _csv
    first = head.splitlines()[0]
    try:
        record = parse_json(first, finite=False)
    except ValueError:
        # Lines that begin with a broken one, or an object over several lines.
        return _jsonl if first.rstrip().endswith("}") or '"event"' in first else _golden
    return _jsonl if isinstance(record, dict) and "step" in record else _golden


def _jsonl(path: Path, text: str, metric: str | None) -> LossCurve:
    lines = text.splitlines()
    name = metric or "loss"
    rows: list[_Row] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = _object(parse_json(line, finite=False))
        except ValueError:
            record = {}
        if not _is_int(record.get("step")) or "event" not in record:
            if number == len(lines) and not text.endswith("\n"):
                continue  # torn by a kill
            raise BadInputError(f"{path}:{number}: expected a JSON object with event and step")
        if record["event"] == "step":
            has_norm = "grad_norm" in record
            loss = _from_json(path, number, record, name)
            norm = _from_json(path, number, record, "grad_norm") if has_norm else math.nan
            rows.append(_Row(number, record["step"], loss, norm))
    return _curve(path, "metrics.jsonl", name, rows)


def _object(value: Any) -> dict[str, Any]:
    """Return a JSON object; an empty one instead of anything else."""
    return value if is_object(value) else {}


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


def _from_json(path: Path, line: int, record: dict[str, Any], name: str) -> float:
    value = record.get(name)
    if value is None:
        value = _object(record.get("not_finite")).get(name)
        if value is None:
            raise BadInputError(f"{path}:{line}: no {name} in this step; expected a number")
    return _number(path, line, name, value)


def _number(path: Path, line: int, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise BadInputError(f"{path}:{line}: {name} is {value!r}; expected a number")
    try:
        return float(value)
    except (ValueError, OverflowError):
        raise BadInputError(f"{path}:{line}: {name} is {value!r}; expected a number") from None


class _Record(NamedTuple):
    line: int
    text: str  # from its brace to the next, or to the end of the line
    may_be_torn: bool  # no end of line follows


def _records(text: str) -> Iterator[_Record]:
    """Yield what the monitor of MindFormers printed for each step."""
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        starts = [match.start() for match in _START.finditer(line)]
        for begin, end in zip(starts, [*starts[1:], len(line)], strict=False):
            yield _Record(number, line[begin:end], not line[begin:end].endswith(("\n", "\r")))


def _mindformers(path: Path, text: str, metric: str | None) -> LossCurve:
    rows: list[_Row] = []
    notes: list[str] = []
    for number, record, may_be_torn in _records(text):
        match = _MINDFORMERS.search(record) or _MODE_1.search(record)
        if match is None:
            if may_be_torn:
                notes.append(f"line {number} is torn off and left out")
                continue
            problem = "a line of MindFormers' monitor without step, loss and norm of the gradient"
            raise BadInputError(f"{path}:{number}: {problem}")
        if match["loss"] == "N/A":
            raise BadInputError(
                f"{path}:{number}: the log of a pipeline stage that is not the last and has no loss; name that of a rank of "
                "the last stage"
            )
        loss = match["loss"]
        if metric not in (None, "loss"):
            loss = _part(path, number, record, str(metric))
        norm = (match["norm"] or "").strip(" []\t")
        value = math.nan if norm in ("", "None") else _number(path, number, "gradient norm", norm)
        rows.append(_Row(number, _step(match), _number(path, number, "loss", loss), value))
    last = {row.step: row for row in rows}
    if repeated := len(rows) - len(last):
        # A log goes on after a restart.
        problem = (
            "steps are in the log more than once (restarts, several ranks): the last of each counts"
        )
        others = {row.step for row in rows if str(row.loss) != str(last[row.step].loss)}
        if others:
            problem += f"; {len(others)} had another loss before, first step {min(others)}"
        notes.append(f"{repeated} {problem}")
        rows = [last[step] for step in sorted(last)]
    return _curve(path, "MindFormers log", metric or "loss", rows, tuple(notes))


def _part(path: Path, number: int, line: str, name: str) -> str:
    match = re.search(rf"\b{re.escape(name)}:\s*([^,\s]+)", line)
    if match is None:
        raise BadInputError(f"{path}:{number}: no {name} in this line of MindFormers' monitor")
    return match[1]


def _golden(path: Path, text: str, metric: str | None) -> LossCurve:
    try:
        parsed: Any = parse_json(text, finite=False)
    except JsonError as error:
        raise BadInputError(f"{path}:{error.line or 1}: no JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise BadInputError(f"{path}:1: expected an object of metrics as Megatron-LM writes it")
    content = _object(parsed)
    names = {_plain(name): name for name in content}
    name = metric
    if name not in content:
        name = _choose(names, (metric,) if metric else ("lm_loss", *LOSS_NAMES))
    if name is None:
        metrics = ", ".join(sorted(content)) or "none"
        raise BadInputError(f"{path}:1: no metric {metric or 'lm loss'!r}; there are {metrics}")
    loss = _golden_values(path, text, name, content[name])
    norm_name = _choose(names, NORM_NAMES)
    norms = {} if norm_name is None else _golden_values(path, text, norm_name, content[norm_name])
    rows = [_Row(1, step, value, norms.get(step, math.nan)) for step, value in sorted(loss.items())]
    return _curve(path, "Megatron-LM values", name, rows)


def _golden_values(path: Path, text: str, name: str, content: Any) -> dict[int, float]:
    line = text[: max(0, text.find(json.dumps(name)))].count("\n") + 1
    described = _object(content)
    values = described.get("values")
    if not isinstance(values, dict):
        raise BadInputError(f"{path}:{line}: {name!r} has no object `values`")
    losses: dict[int, float] = {}
    for step, value in _object(values).items():
        if not re.fullmatch(r"-?\d{1,15}", step):
            problem = f"{name!r} has the step {step!r}; expected a whole number"
            raise BadInputError(f"{path}:{line}: {problem}")
        losses[int(step)] = _number(path, line, f"{name!r} at step {step}", value)
    start, end, every = (described.get(key) for key in ("start_step", "end_step", "step_interval"))
    if isinstance(start, int) and isinstance(end, int) and isinstance(every, int) and every > 0:
        lost = next((step for step in range(start, end + 1, every) if step not in losses), None)
        if lost is not None:
            problem = f"{name!r} promises steps {start} to {end} by {every}; {lost} is missing"
            raise BadInputError(f"{path}:{line}: {problem}")
    return losses


def _plain(name: str) -> str:
    return re.sub(r"[\s-]+", "_", name.strip().strip('"').lower())


def _choose(names: dict[str, str], candidates: Iterable[str]) -> str | None:
    return next((names[_plain(name)] for name in candidates if _plain(name) in names), None)


def _csv(path: Path, text: str, metric: str | None) -> LossCurve:
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip())
    mark = next((c for c in "\t;," if c in lines[start]), ",")
    titles = lines[start].split(mark)
    if _is_number(titles[0]) and len(titles) > 1:
        if metric is not None:
            raise BadInputError(f"{path}:{start + 1}: no titles, so no column {metric!r}")
        columns, first = (0, 1, 2 if len(titles) > 2 else None), start
        name = "loss"
    else:
        columns, name = _columns(path, start + 1, titles, metric)
        first = start + 1
    rows: list[_Row] = []
    for number, line in enumerate(lines[first:], start=first + 1):
        if not line.strip():
            continue
        cells = line.split(mark)
        if number == len(lines) and not text.endswith("\n") and len(cells) < len(titles):
            continue  # torn by a kill
        if len(cells) != len(titles):
            raise BadInputError(f"{path}:{number}: {len(cells)} columns; expected {len(titles)}")
        step = _number(path, number, "step", cells[columns[0]].strip())
        if not step.is_integer() or abs(step) >= 2**53:
            problem = f"step is {cells[columns[0]].strip()}; expected a whole number"
            raise BadInputError(f"{path}:{number}: {problem}")
        loss = _number(path, number, name, cells[columns[1]].strip())
        norm = cells[columns[2]].strip() if columns[2] is not None else ""
        value = _number(path, number, "grad_norm", norm) if norm else math.nan
        rows.append(_Row(number, int(step), loss, value))
    return _curve(path, "CSV", name, rows)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _columns(
    path: Path, line: int, titles: list[str], metric: str | None
) -> tuple[tuple[int, int, int | None], str]:
    names = {_plain(title): title for title in titles}
    step = _choose(names, ("step", "steps", "iteration", "global_step", "iter"))
    loss = _choose(names, (metric,) if metric else LOSS_NAMES)
    if step is None or loss is None:
        titles_text = ", ".join(title.strip()[:40] for title in titles[:10])
        raise BadInputError(
            f"{path}:{line}: no loss curve: expected our metrics.jsonl, a log of MindFormers, values of Megatron-LM, "
            f"or CSV with columns step and {metric or 'loss'}; found {titles_text!r}"
        )
    norm = _choose(names, NORM_NAMES)
    last = None if norm is None else titles.index(norm)
    return (titles.index(step), titles.index(loss), last), loss.strip()


def _curve(
    path: Path, kind: str, metric: str, rows: list[_Row], notes: tuple[str, ...] = ()
) -> LossCurve:
    if not rows:
        raise BadInputError(f"{path}: {kind} without a single step")
    for previous, other in itertools.pairwise(rows):
        if other.step <= previous.step:
            problem = f"step {other.step} after step {previous.step}; expected a later one"
            raise BadInputError(f"{path}:{other.line}: {problem}")
    _, steps, *values = zip(*rows, strict=True)
    loss, norm = (np.array(column, np.float64) for column in values)
    return LossCurve(str(path), kind, metric, np.array(steps, np.int64), loss, norm, notes)
