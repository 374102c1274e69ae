"""metrics.jsonl: one JSON object a line, for people with grep and for programs.

Every line has ``event`` and ``step``. Events and their other keys:

``step``
    ``loss`` (total), ``lm_loss``, ``mtp_loss``, ``aux_loss`` (the terms of the total, in nats),
    ``grad_norm``, ``learning_rate``, ``seconds``, ``tokens`` (of this step), ``tokens_per_second``,
    ``skipped`` (true: the weights were left as they are, because of a NaN, an Inf or a spike), and if given
    ``data_seconds`` (waiting for data), ``expert_load_max_over_mean`` (1.0 is perfect balance),
    ``expert_load_by_layer`` (that ratio for each MoE layer), ``drop_rate`` and what else the trainer
    passes. A run that trains on several sources adds ``loss_by_source`` (mean next-token loss of the step's tokens
    of each, by its prefix) and ``tokens_by_source``; sources without tokens in the step are left out.
``evaluation``
    ``loss``: mean next-token loss on the validation set, in nats; where that has several sources, ``loss_by_source``:
    of each, by its prefix.
``save``
    ``stall_ms``: how long training was paused for the checkpoint of this step; it may still be
    being written.
``expert_loads``
    Every ``telechat_moe.moe.load_interval`` steps: ``loads``, the tokens that each expert of each MoE layer got (those of
    multi-token prediction last), summed over the last ``steps`` steps; ``seconds`` that recording took since the record before.
``move``
    Experts of a layer moved between devices after a step: ``layer`` (as in ``expert_load_by_layer``), ``experts``, ``bytes``
    (weights and moments), ``gain_s`` and ``cost_s`` (predicted: saved until the next decision, taken by the move),
    ``load_before`` and ``load_after`` (pairs a step of the busiest device, predicted). Or why none did: ``refused``.
``guard``
    A step was skipped: ``action`` (``skip``), ``reason`` (``gradient norm``, ``loss``, ``not finite``), ``loss``,
    ``norm``, ``limit``, ``median``, ``window``.
``rollback``
    The run went back to the checkpoint of ``step`` = ``to_step`` because of a spike in ``from_step``; ``left_out``: the
    samples, counted through all epochs, from the first to the one after the last; and the keys of ``guard``. Lines of
    the steps that were undone move to ``metrics.rolled_back.jsonl``.

Floats are written so that reading gives the same bits. JSON has no NaN: such a value is null, and
``not_finite`` says what it was, for example ``{"loss": "nan", "grad_norm": "inf"}``.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from telechat_moe.errors import BadInputError, TelechatMoeError
from telechat_moe.files import write_atomic
from telechat_moe.reading import parse_json

FILE = "metrics.jsonl"
ROLLED_BACK = "metrics.rolled_back.jsonl"


def encode(event: str, step: int, values: Mapping[str, Any]) -> bytes:
    """Return one line of metrics.jsonl, with its line feed."""
    record: dict[str, Any] = {"event": event, "step": step}
    not_finite: dict[str, str] = {}
    for key, value in values.items():
        record[key] = _finite(value, key, not_finite)
    if not_finite:
        record["not_finite"] = not_finite
    return json.dumps(record, allow_nan=False, ensure_ascii=False).encode() + b"\n"


def _finite(value: Any, key: str, not_finite: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {name: _finite(x, f"{key}.{name}", not_finite) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item, f"{key}[{i}]", not_finite) for i, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        not_finite[key] = str(value)
        return None
    return value


def decode(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line; None if it is not one (torn by a kill, or damaged)."""
    try:
        record = parse_json(line, finite=False)
    except ValueError:
        return None
    if isinstance(record, dict) and isinstance(record.get("step"), int) and "event" in record:
        return record
    return None


def read(path: str | Path) -> list[dict[str, Any]]:
    """Read all records of a metrics.jsonl; a torn last line is left out.

    Raises:
        BadInputError: If the file cannot be read or another line is no record; names the line.
    """
    try:
        lines = Path(path).read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise BadInputError(f"cannot read the metrics {path}: {error.strerror}") from error
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        record = decode(line)
        if record is not None:
            records.append(record)
        elif number < len(lines) or line.endswith(b"\n"):
            raise BadInputError(f"{path}:{number}: expected a JSON object with event and step")
    return records


def last_step(path: Path) -> int:
    """Return the step of the last record in a metrics.jsonl, 0 if there is none."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    records = (decode(line) for line in reversed(lines))
    return next((record["step"] for record in records if record is not None), 0)


class MetricsFile:
    """Append to a metrics.jsonl; every line is in the file when `write` returns.

    Args:
        path: The file. On resume it is rewritten (atomically) without the lines after
            ``resume_step`` and without lines that are no records.
        resume_step: Step that the run resumes from. With 0 an existing file is another run's: it
            is kept as ``metrics.previous.jsonl``.
    """

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        self.path = path
        self.dropped = 0
        """Number of lines that were removed on resume because they come after the resumed step."""
        self.damaged = 0
        """Number of lines that were removed on resume because they were no records."""
        self.skipped = 0
        """Number of skipped steps in the lines that were kept on resume."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if resume_step == 0:
                path.with_name(ROLLED_BACK).unlink(missing_ok=True)
            if path.exists() and resume_step == 0:
                path.replace(path.with_name("metrics.previous.jsonl"))
            elif path.exists():
                self._keep(resume_step)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise self._failure(error) from error

    def rewind(self, step: int) -> None:
        """Move the lines after a step to ``metrics.rolled_back.jsonl``; writing continues after it."""
        try:
            self._file.close()
            undone = self._keep(step)
            with self.path.with_name(ROLLED_BACK).open("ab") as file:
                file.writelines(undone)
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise self._failure(error) from error

    def _keep(self, last_step: int) -> list[bytes]:
        """Rewrite the file without the lines after a step; return these."""
        lines: list[bytes] = []
        undone: list[bytes] = []
        self.skipped = 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            record = decode(line)
            if record is None:
                self.damaged += 1
            elif record["step"] > last_step:
                self.dropped += 1
                undone.append(line)
            else:
                self.skipped += bool(record.get("skipped"))
                lines.append(line if line.endswith(b"\n") else line + b"\n")
        write_atomic(self.path, b"".join(lines))
        return undone

    def write(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Append one record; it is in the file when this returns."""
        line = encode(event, step, values)
        try:
            written = self._file.write(line)
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> TelechatMoeError:
        return TelechatMoeError(f"cannot write the metrics {self.path}: {error.strerror}")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
