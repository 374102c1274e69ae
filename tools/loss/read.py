"""Read loss curves from files of several writers.

=====================  ==========================================================================================
``metrics.jsonl``      ours: a JSON object a line with ``event``, ``step``, ``loss``, ``grad_norm``
logs                   what MindFormers, Megatron-LM and torchtitan print (``logs.py``)
Megatron-LM's values   JSON: ``{"lm loss": {"start_step", "end_step", "step_interval", "values": {"1": 9.3}}}``
Hugging Face's Trainer ``trainer_state.json``: ``{"log_history": [{"step": 10, "loss": 5.1, "grad_norm": 1.2}]}``
CSV                    columns step, loss and maybe grad_norm, by their titles or in this order; ``,``, ``;`` or tab
export of W&B          CSV with columns ``Step`` or ``_step``, ``RUN - train/loss``, ``RUN - train/loss__MIN``
=====================  ==========================================================================================

The kind of a file is recognised by its content. Broken content is refused with file and line, never skipped; only a
last line that was torn off when the writer was killed is left out.
"""

import csv
import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

from telechat_moe.errors import BadInputError
from telechat_moe.narrowing import is_object
from telechat_moe.reading import JsonError, parse_json, read_bytes
from telechat_moe.tools.loss import logs
from telechat_moe.tools.loss.curve import (
    LossCurve,
    LossRow,
    curve,
    last_of_each,
    mean_note,
    to_float,
)

LOSS_NAMES = ("loss", "lm_loss", "train_loss", "training_loss", "global_avg_loss")
NORM_NAMES = ("grad_norm", "global_norm", "gradient_norm")
STEP_NAMES = ("step", "steps", "iteration", "global_step", "iter", "_step")
TRAINER_STATE = "trainer_state.json"
_EXTREMES = ("__MIN", "__MAX")  # that an export of W&B has beside each column
_EVALUATION = re.compile(r"\b(eval|val|valid|validation|test)/")


def read(path: str | Path, metric: str | None = None) -> LossCurve:
    """Read a loss curve.

    Args:
        path: File, or a folder with a ``metrics.jsonl`` or ``trainer_state.json``.
        metric: Name of the loss in the file; None: the usual one.

    Raises:
        BadInputError: The file is missing, of no known kind, or broken; names the line.
    """
    path = Path(path)
    if path.is_dir():
        state = path / TRAINER_STATE
        path = state if state.is_file() else path / "metrics.jsonl"
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
        if logs.reader(text):
            return text  # between a log's lines stand messages of any encoding, and progress bars that a kill has torn
        line = data[: error.start].count(b"\n") + 1
        raise BadInputError(f"{path}:{line}: not text (UTF-8)") from None


def is_mindformers_log(path: Path) -> bool:
    """Return whether a file holds lines of MindFormers' monitor."""
    return logs.MINDFORMERS.search(read_bytes(path).decode(errors="replace")) is not None


def step_seconds(path: str | Path) -> dict[int, float]:
    """Return how long steps of a run took, seconds: of a log of MindFormers or Megatron-LM, or of our metrics.jsonl or its folder.

    A line of Megatron-LM has the mean of the steps since the line before.

    Raises:
        BadInputError: The file is missing, or of another kind.
    """
    path = Path(path)
    path = path / "metrics.jsonl" if path.is_dir() else path
    text = _text(path)
    if logs.MINDFORMERS.search(text):
        records = [record.text for record in logs.records(text)]
        matches = [
            (m, logs.TIME.search(record)) for record in records if (m := logs.STEP.search(record))
        ]
        return {logs.step_of(match): int(time[1]) / 1e3 for match, time in matches if time}
    seconds = logs.megatron_seconds(path, text)
    for line in () if seconds else text.splitlines():
        try:
            record = _object(parse_json(line, finite=False))
        except ValueError:
            continue  # torn by a kill
        if record.get("event") == "step" and _is_int(record.get("step")):
            seconds[record["step"]] = to_float(path, 1, "seconds", record.get("seconds"))
    if not seconds:
        raise BadInputError(
            f"{path}: no times of steps; expected a log of MindFormers, Megatron-LM or MindSpeed, or our metrics.jsonl"
        )
    return seconds


def _reader(text: str) -> Callable[[Path, str, str | None], LossCurve]:
    if (log := logs.reader(text)) is not None:
        return log
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
    rows: list[LossRow] = []
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
            rows.append(LossRow(number, record["step"], loss, norm))
    return curve(path, "metrics.jsonl", name, rows)


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
    return to_float(path, line, name, value)


def _golden(path: Path, text: str, metric: str | None) -> LossCurve:
    try:
        parsed: Any = parse_json(text, finite=False)
    except JsonError as error:
        raise BadInputError(f"{path}:{error.line or 1}: no JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise BadInputError(f"{path}:1: expected an object of metrics as Megatron-LM writes it")
    content = _object(parsed)
    if "log_history" in content:
        return _trainer_state(path, content, metric)
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
    rows = [
        LossRow(1, step, value, norms.get(step, math.nan)) for step, value in sorted(loss.items())
    ]
    return curve(path, "Megatron-LM values", name, rows)


def _trainer_state(path: Path, content: dict[str, Any], metric: str | None) -> LossCurve:
    """Read the history of a Trainer: entries with the loss; those of evaluations have other names."""
    history = content["log_history"]
    if not isinstance(history, list):
        raise BadInputError(f"{path}:1: log_history is no list")
    name = metric or "loss"
    entries = [_object(entry) for entry in cast("list[Any]", history)]
    rows: list[LossRow] = []
    for number, entry in enumerate(entries):
        if name not in entry:
            continue
        if not _is_int(entry.get("step")):
            problem = f"entry {number} of log_history has the step {entry.get('step')!r}"
            raise BadInputError(f"{path}:1: {problem}; expected a whole number")
        place = f"{name} in entry {number} of log_history"
        written = entry.get("grad_norm")
        norm = to_float(
            path, 1, f"grad_norm in entry {number}", "nan" if written is None else written
        )
        rows.append(LossRow(1, entry["step"], to_float(path, 1, place, entry[name]), norm))
    if not rows:
        names = ", ".join(sorted({key for entry in entries for key in entry})[:20]) or "nothing"
        raise BadInputError(f"{path}:1: no entry of log_history has {name!r}; there are {names}")
    rows, notes = last_of_each(rows)
    if name == "loss":
        notes += mean_note(row.step for row in rows)
    return curve(path, "Trainer's state", name, rows, notes)


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
        losses[int(step)] = to_float(path, line, f"{name!r} at step {step}", value)
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
    unquoted = re.sub(r'"[^"]*"', "", lines[start])
    mark = next((c for c in "\t;," if c in unquoted), ",")
    titles = _cells(lines[start], mark)
    if _is_number(titles[0]) and len(titles) > 1:
        if metric is not None:
            raise BadInputError(f"{path}:{start + 1}: no titles, so no column {metric!r}")
        columns, first = (0, 1, 2 if len(titles) > 2 else None), start
        kind, name = "CSV", "loss"
    else:
        export = titles[0] == "_step" or any(t.endswith(_EXTREMES) for t in titles)
        kind, choose = ("export of W&B", _of_export) if export else ("CSV", _columns)
        columns, name = choose(path, start + 1, titles, metric)
        first = start + 1
    rows: list[LossRow] = []
    for number, line in enumerate(lines[first:], start=first + 1):
        if not line.strip():
            continue
        cells = _cells(line, mark)
        if number == len(lines) and not text.endswith("\n") and len(cells) < len(titles):
            continue  # torn by a kill
        if len(cells) != len(titles):
            raise BadInputError(f"{path}:{number}: {len(cells)} columns; expected {len(titles)}")
        if kind != "CSV" and not (cells[columns[0]] and cells[columns[1]]):
            continue  # of another run, or of another metric
        step = to_float(path, number, "step", cells[columns[0]])
        if not step.is_integer() or abs(step) >= 2**53:
            problem = f"step is {cells[columns[0]]}; expected a whole number"
            raise BadInputError(f"{path}:{number}: {problem}")
        loss = to_float(path, number, name, cells[columns[1]])
        norm = cells[columns[2]] if columns[2] is not None else ""
        value = to_float(path, number, "grad_norm", norm) if norm else math.nan
        rows.append(LossRow(number, int(step), loss, value))
    return curve(path, kind, name, rows)


def _cells(line: str, mark: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line], delimiter=mark))]
    except csv.Error:  # a cell of more than 131,072 characters
        return [cell.strip() for cell in line.split(mark)]


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
    step = _choose(names, STEP_NAMES)
    loss = _choose(names, (metric,) if metric else LOSS_NAMES)
    if step is None or loss is None:
        titles_text = ", ".join(title[:40] for title in titles[:10])
        raise BadInputError(
            f"{path}:{line}: no loss curve: expected our metrics.jsonl, a log of MindFormers, Megatron-LM or torchtitan, values of "
            f"Megatron-LM, a trainer_state.json, or CSV with columns step and {metric or 'loss'}; found {titles_text!r}"
        )
    norm = _choose(names, NORM_NAMES)
    last = None if norm is None else titles.index(norm)
    return (titles.index(step), titles.index(loss), last), loss


def _of_export(
    path: Path, line: int, titles: list[str], metric: str | None
) -> tuple[tuple[int, int, int | None], str]:
    """Return the columns of step, loss and norm of an export of W&B, which may hold several runs, and the loss's title."""
    columns = [title for title in titles if not title.endswith(_EXTREMES)]
    steps = [t for t in columns if _metric_of(t) in STEP_NAMES]
    losses = [t for t in columns if _metric_of(t) in LOSS_NAMES and not _EVALUATION.search(t)]
    if metric is not None:
        named = [t for t in columns if metric in (t, t.rpartition(" - ")[2])]
        losses = named or [t for t in losses if metric == t.rpartition(" - ")[0]]
    if len(losses) != 1 or not steps:
        problem = "no column of a loss" if not losses else f"{len(losses)} columns of a loss"
        problem = problem if steps else "no column of a step"
        shown = ", ".join(t[:60] for t in (losses or columns)[:10])
        raise BadInputError(f"{path}:{line}: {problem}; name one with --metric: {shown}")
    run = losses[0].rpartition(" - ")[0]
    same_run = [t for t in columns if t.rpartition(" - ")[0] == run]
    norm = next((t for t in same_run if _metric_of(t) in NORM_NAMES), None)
    # Of a history, the program's own count comes before `_step`, which counts calls of the logger.
    step = min(steps, key=lambda t: (t.rpartition(" - ")[0] not in ("", run), t == "_step"))
    last = None if norm is None else titles.index(norm)
    return (titles.index(step), titles.index(losses[0]), last), losses[0]


def _metric_of(title: str) -> str:
    """Return the metric of a column, without run and group: ``RUN - train/loss`` is ``loss``."""
    return _plain(title.rpartition(" - ")[2].rpartition("/")[2])
