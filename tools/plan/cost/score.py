"""Score predictions against measured steps; every row is predicted or refused with a reason."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.device import load_device
from telechat_moe.tools.plan.cost.flops import utilisation
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.step import evaluate


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """One row of a table: a run and the measurements of its step."""

    table: str
    line: int
    """Line of the CSV file, or number of the row within its set."""
    model: str
    device: str
    """Device as the table names it; empty: the command's default."""
    group: str = ""
    """Model and scale: rows of one group are left out of a fit together."""
    architecture: Architecture | None = None
    layout: Layout | None = None
    step_s: float | None = None
    memory_bytes: float | None = None
    memory_stage: int | None = None
    """Stage whose memory was measured; None: the largest."""
    out_of_memory: bool = False
    """The run ended because a device's memory was full; it has no time."""
    provenance: str = "A"
    reason: str = ""
    """Why the row is not predicted; empty: it is."""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class ScoredStep:
    """A row with its predictions."""

    row: MeasuredStep
    step_s: float | None = None
    memory_bytes: float | None = None
    fits: bool | None = None
    mfu: float | None = None
    """Share of the peak that the measured time means by the `model` convention."""

    @property
    def error(self) -> float | None:
        """Signed relative error of the step time."""
        if self.step_s is None or not self.row.step_s:
            return None
        return self.step_s / self.row.step_s - 1

    @property
    def memory_error(self) -> float | None:
        """Signed relative error of the peak memory."""
        if self.memory_bytes is None or not self.row.memory_bytes:
            return None
        return self.memory_bytes / self.row.memory_bytes - 1


def checked(rows: Sequence[MeasuredStep], default: str) -> list[MeasuredStep]:
    """Return the rows; those that cannot be predicted get a reason."""
    return [row if row.reason else replace(row, reason=_reason(row, default)) for row in rows]


def _reason(row: MeasuredStep, default: str) -> str:
    """Return why a row's step cannot be predicted or compared; empty: it can be."""
    if empty := _empty(row):
        return f"missing: {empty}"
    try:
        device = load_device(row.device or default)
    except BadInputError:
        return f"device without a description: {row.device}"
    if row.step_s is None and row.memory_bytes is None and not row.out_of_memory:
        return "missing: a measured time or memory"
    if row.architecture is None or row.layout is None or row.step_s is None:
        return ""
    compute = row.layout.compute
    if compute in ("fp8", "fp4") and compute not in device.peak_flops:
        return f"device without a description of {compute}: {device.name}"
    return f"impossible: a step of {row.step_s:g} s" if row.step_s <= 0 else ""


def _empty(row: MeasuredStep) -> str:
    """Return what makes the row's model or layout impossible; empty: nothing."""
    a, x = row.architecture, row.layout
    if a is None or x is None:
        return ""
    if x.pp * x.vpp > len(a.layers) + 2 + a.mtp:
        return f"a consistent layout (pp x vpp = {x.pp} x {x.vpp}, the model has {len(a.layers)} layers)"
    dense = a.ffn if "dense" in a.layers else 1
    sizes = {
        "layers": len(a.layers), "hidden": a.hidden, "heads": a.heads, "kv_heads": a.kv_heads,
        "head_dim": a.head_dim, "ffn": dense, "seq": a.seq, "vocab": a.vocab,
    }  # fmt: skip
    return next((f"{name} of the model" for name, size in sizes.items() if size < 1), "")


def score(rows: Sequence[MeasuredStep], default: str) -> list[ScoredStep]:
    """Predict rows with the devices' frozen constants; rows with a reason are passed through."""
    out: list[ScoredStep] = [ScoredStep(row=row) for row in rows]
    by_device: dict[str, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        if not row.reason:
            by_device[row.device or default].append(i)
    for name, index in by_device.items():
        device = load_device(name)
        architectures = [rows[i].architecture for i in index]
        layouts = [rows[i].layout for i in index]
        table = evaluate(architectures, layouts, device)  # type: ignore[arg-type]
        for entry, i in enumerate(index):
            row, peak, used = rows[i], table.memory.peak[entry], None
            stage = int(peak.argmax()) if row.memory_stage is None else row.memory_stage
            if (a := row.architecture) and (x := row.layout) and row.step_s:
                used = utilisation(a, x, row.step_s, device.peak("bf16"))["model"]
            out[i] = ScoredStep(
                row=row,
                step_s=float(table.step_s[entry]) if row.step_s else None,
                memory_bytes=float(peak[stage]) if row.memory_bytes else None,
                fits=bool(table.fits[entry]),
                mfu=used,
            )
    return out


def statistics(errors: Sequence[float]) -> dict[str, float]:
    """Return count, MAPE, median, 95th percentile and bias (median signed error) of relative errors."""
    if not errors:
        return {"rows": 0}
    size = np.abs(errors)
    return {
        "rows": len(errors),
        "mape": float(size.mean()),
        "median": float(np.median(size)),
        "p95": float(np.percentile(size, 95)),
        "bias": float(np.median(errors)),
    }


def report(scored: Sequence[ScoredStep], tables: Sequence[str]) -> dict[str, Any]:
    """Return the whole result as plain data."""
    summary: dict[str, Any] = {}
    for name in tables:
        of_table = [s for s in scored if s.row.table == name]
        summary[name] = {
            **statistics([s.error for s in of_table if s.error is not None]),
            "memory": statistics([s.memory_error for s in of_table if s.memory_error is not None]),
            "rejected": sum(bool(s.row.reason) for s in of_table),
            "of": len(of_table),
        }
    fits = [s.fits for s in scored if s.fits is not None]
    return {
        "tables": summary,
        "overall": statistics([s.error for s in scored if s.error is not None]),
        "memory": statistics([s.memory_error for s in scored if s.memory_error is not None]),
        "fits": sum(fits) / len(fits) if fits else None,
        "rejected": dict(Counter(s.row.reason for s in scored if s.row.reason).most_common()),
        "rows": [_plain(s) for s in scored],
    }


def _plain(s: ScoredStep) -> dict[str, Any]:
    return {
        "table": s.row.table, "line": s.row.line, "model": s.row.model, "device": s.row.device,
        "layout": s.row.layout.short() if s.row.layout else None, "predicted_s": s.step_s, "measured_s": s.row.step_s,
        "error": s.error, "predicted_bytes": s.memory_bytes, "measured_bytes": s.row.memory_bytes,
        "memory_error": s.memory_error, "fits": s.fits, "measured_mfu": s.mfu, "provenance": s.row.provenance,
        "source": s.row.source, "rejected": s.row.reason or None,
    }  # fmt: skip
