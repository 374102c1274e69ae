"""Predict published measurements of less than a whole step: collectives, dispatch bandwidths, lists of kernels.

They are predicted beside the steps, in separate figures: they do not count in the error of step times.
"""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from benchmarks.overlap.kernel_list import read_kernels
from benchmarks.overlap.overlap import predict
from benchmarks.plan_published import exchanges
from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.cost.collectives import all_reduce
from telechat_moe.tools.plan.cost.device import load_device
from telechat_moe.tools.plan.cost.measured_steps import read_csv
from telechat_moe.tools.plan.cost.score import statistics

Unit = Literal["s", "GB/s", "share"]
PARTS = ("deepseek_v3_dualpipe_trace", "deepep_bandwidth")
"""Sets of `published_steps.yaml` that hold parts of a step."""


@dataclass(frozen=True, kw_only=True)
class PartialStep:
    """One published figure and its prediction."""

    table: str
    line: int
    """Line of the CSV file, or number within its set."""

    part: str
    device: str = ""
    measured: float = 0.0
    predicted: float | None = None
    unit: Unit = "s"
    provenance: str = "A"
    reason: str = ""
    """Why it is not predicted; empty: it is."""

    @property
    def error(self) -> float | None:
        """Signed relative error."""
        return None if self.predicted is None else self.predicted / self.measured - 1


def read_partial_steps(file: str | Path) -> list[PartialStep]:
    """Read and predict the parts of a step that a table holds.

    Args:
        file: A CSV file of all-reduces or of kernels, or a YAML file with `sets`.

    Returns:
        Nothing for a table of steps, or for a file that cannot be read: `read_table` says why.
    """
    path = Path(file)
    try:
        if path.suffix in (".yaml", ".yml"):
            raw = yaml.safe_load(path.read_text(encoding="utf-8"))
            entries = raw.get("sets") if isinstance(raw, dict) else None
            return [p for e in entries or () if isinstance(e, dict) for p in _set(e, path.parent)]
        columns, rows = read_csv(path)
    except (OSError, UnicodeDecodeError, BadInputError, yaml.YAMLError):
        return []
    if {"gpus", "bytes", "time_us"} <= set(columns):
        return [_guarded(_all_reduce, path.stem, line, row) for line, row in enumerate(rows, 2)]
    if {"dur_us", "stream", "name"} <= set(columns):
        return list(_kernels(path, path.stem, "h800", {}))
    return []


def _guarded(
    parse: Callable[[str, int, Mapping[str, Any]], PartialStep],
    table: str,
    line: int,
    row: Mapping[str, Any],
) -> PartialStep:
    try:
        part = parse(table, line, row)
    except (ArithmeticError, TypeError, ValueError) as error:
        reason = " ".join(f"missing: readable numbers ({error})".split())[:120]
        return PartialStep(table=table, line=line, part="", reason=reason)
    if not part.reason and not (0 < part.measured < 1e18):
        return replace(
            part, predicted=None, reason=f"impossible: measured {part.measured:g} {part.unit}"
        )
    return part


def _all_reduce(table: str, line: int, row: Mapping[str, Any]) -> PartialStep:
    """Return an all-reduce of `bytes` among `gpus` neighbours."""
    gpus, size, seconds = int(row["gpus"]), float(row["bytes"]), float(row["time_us"]) * 1e-6
    name = str(row.get("device") or "")
    part = PartialStep(
        table=table,
        line=line,
        part=f"all-reduce of {size / 2**20:.4g} MiB, {gpus} devices",
        device=name,
        measured=seconds,
    )
    if gpus < 2 or size <= 0:
        return replace(part, reason="missing: two devices or more and some bytes")
    try:
        device = load_device(name or "a100")
    except BadInputError:
        return replace(part, reason=f"device without a description: {name}")
    found = all_reduce(np.array([size]), np.array([float(gpus)]), np.array([1.0]), device)
    return replace(part, predicted=float(found[0]))


def _set(entry: Mapping[str, Any], folder: Path) -> Iterator[PartialStep]:
    """Yield the figures of a set that is no table of steps."""
    name, grade = str(entry.get("id")), str(entry.get("prov", "?"))
    table = f"published_steps/{name}"
    if name == "deepseek_v3_dualpipe_trace":
        summary = entry.get("summary") or {}
        for part in _kernels(folder / str(entry.get("file")), table, "h800", summary):
            yield replace(part, provenance=grade)
    elif name == "deepep_bandwidth":
        for number, part in enumerate(_dispatch(entry, table), 1):
            yield replace(part, line=number, provenance=grade)


def _kernels(
    path: Path, table: str, device: str, summary: Mapping[str, Any]
) -> Iterator[PartialStep]:
    """Yield span, exposed and hidden communication of a kernel list, against its own starts or a summary."""
    try:
        found = predict(read_kernels(path))
    except (BadInputError, OSError, UnicodeDecodeError, csv.Error) as error:
        reason = f"missing: the kernel list ({error})"
        yield PartialStep(table=table, line=0, part="kernel list", device=device, reason=reason)
        return
    own, known = found.device, found.measured
    figures: list[tuple[str, float, float | None, Unit]] = [
        ("chunk, as the host sees it", found.chunk_us * 1e-6, _ms(summary, "chunk_1f1b_ms"), "s"),
        (
            "kernels, first start to last end",
            own.span_us * 1e-6,
            _ms(summary, "gpu_span_ms") or (known.span_us * 1e-6 if known else None),
            "s",
        ),
        (
            "communication hidden",
            own.overlap,
            summary.get("comm_overlap") or (known.overlap if known else None),
            "share",
        ),
    ]
    for number, (what, predicted, measured, unit) in enumerate(figures, 1):
        part = PartialStep(table=table, line=number, part=what, device=device, unit=unit)
        if measured:
            yield replace(part, measured=float(measured), predicted=predicted)
        elif not summary and number > 1:
            yield replace(part, reason="missing: start_us of the kernels")


def _ms(summary: Mapping[str, Any], key: str) -> float | None:
    return float(summary[key]) * 1e-3 if summary.get(key) else None


def _dispatch(entry: Mapping[str, Any], table: str) -> Iterator[PartialStep]:
    """Yield the bandwidths of dispatch and combine for large messages, and the latencies, which are not predicted."""
    rows = exchanges.read(entry)
    shares, _ = exchanges.fit(rows)
    for row in rows:
        fitted = ", fitted" if row.name in exchanges.FITTED else ""
        yield PartialStep(
            table=table,
            line=0,
            part=f"{row.way} {row.name}{fitted}",
            device=row.device,
            measured=row.measured,
            predicted=row.predicted(shares),
            unit="GB/s",
        )
    for group in entry.get("v1_lowlatency_us") or {}:
        yield PartialStep(
            table=table,
            line=0,
            part=f"v1_lowlatency_us {group}",
            device="h800",
            reason="missing: the latency kernels are another program",
        )


def summary(parts: Sequence[PartialStep]) -> dict[str, dict[str, float]]:
    """Return rows, predicted ones and statistics of relative errors, by table."""
    found: dict[str, dict[str, float]] = {}
    for table in dict.fromkeys(p.table for p in parts):
        mine = [p for p in parts if p.table == table]
        errors = [p.error for p in mine if p.error is not None]
        found[table] = {"of": len(mine), **statistics(errors)}
    return found


def plain(parts: Sequence[PartialStep]) -> list[dict[str, Any]]:
    """Return the rows as plain data."""
    return [
        {
            **{name: value for name, value in vars(p).items() if name != "reason"},
            "measured": p.measured or None,
            "error": p.error,
            "rejected": p.reason or None,
        }
        for p in parts
    ]
