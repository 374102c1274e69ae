"""Report a predicted kernel list as a table, a page, a trace and plain data."""

import math
from pathlib import Path
from typing import Any

from benchmarks.overlap.kernel_list import read_kernels
from benchmarks.overlap.overlap import Prediction, predict
from telechat_moe.errors import UsageError
from telechat_moe.tools.plan.cost.expert_overlap import OverlapSummary
from telechat_moe.tools.plan.report.timeline import PipelineTimeline, Table, TimelineBox


def read_and_predict(path: str, launch_us: float, multiprocessors: int) -> Prediction:
    """Read a kernel list and predict it.

    Raises:
        UsageError: A value makes no sense.
        BadInputError: The list cannot be read.
    """
    if not 0 <= launch_us < math.inf:
        raise UsageError(f"--launch-us {launch_us:g}: expected 0 or more microseconds")
    if multiprocessors < 1:
        raise UsageError(f"--multiprocessors {multiprocessors}: expected 1 or more")
    return predict(read_kernels(path), launch_us=launch_us, multiprocessors=multiprocessors)


def rows(prediction: Prediction) -> list[list[str]]:
    """Return figure, predicted, measured, difference."""
    here, there = prediction.device, prediction.measured
    result = [["chunk, as the host sees it", _ms(prediction.chunk_us), "", ""]]
    for name, key in (
        ("device, first start to last end", "span_us"),
        ("computing", "compute_us"),
        ("communicating", "communication_us"),
        ("communication exposed", "exposed_us"),
        ("nothing runs", "idle_us"),
    ):
        found = getattr(here, key)
        known = getattr(there, key) if there else None
        said = f"{(found / known - 1) * 100:+.2f} %" if known else ""
        result.append([name, _ms(found), _ms(known) if known is not None else "", said])
    overlap = ["communication hidden", f"{here.overlap * 100:.2f} %", "", ""]
    if there:
        overlap[2] = f"{there.overlap * 100:.2f} %"
        overlap[3] = f"{(here.overlap - there.overlap) * 100:+.2f} points"
    if math.isnan(here.overlap):
        overlap = ["communication hidden", "none to hide", "", ""]
    return [*result, overlap]


def _ms(us: float) -> str:
    return f"{us / 1e3:.3f} ms"


def notes(prediction: Prediction) -> list[str]:
    """Return what was inferred and what was assumed."""
    order = prediction.order
    kinds = {
        "attention": "attention",
        "attention_backward": "attention backward",
        "expert": "experts",
    }
    count = [f"{sum(p.kind == k for p in order.phases)} {v}" for k, v in kinds.items()]
    said = [
        f"{len(prediction.kernels)} kernels; phases of the main stream: {', '.join(count)}; "
        f"{len(order.transfers)} transfers, {order.helpers} kernels on other compute streams"
    ]
    if prediction.measured is None:
        said.append(
            "no start_us: nothing to compare with, and rows of a stream count in the order of the file"
        )
    return said + order.notes


def _plain(summary: OverlapSummary | None) -> dict[str, float | None] | None:
    if summary is None:
        return None
    overlap = summary.overlap
    return {**vars(summary), "overlap": None if math.isnan(overlap) else overlap}


def report(prediction: Prediction, path: str) -> dict[str, Any]:
    """Return the figures as plain data; times in us."""
    order = prediction.order
    return {
        "kernels": path,
        "chunk_us": prediction.chunk_us,
        "predicted": _plain(prediction.device),
        "measured": _plain(prediction.measured),
        "start_us": [round(s, 3) for s in prediction.start_us],
        "phases": [
            {"kind": p.kind, "backward": p.backward, "first_kernel": order.main[p.begin]}
            for p in order.phases
        ],
        "notes": notes(prediction),
    }


def timeline(prediction: Prediction, path: str, compare: bool = True) -> PipelineTimeline:
    """Return the predicted streams and, to compare, the measured ones under them."""
    known = prediction.measured_start_us if compare else None
    measured = [s - min(known) for s in known] if known else []
    streams = sorted({k.stream for k in prediction.kernels}, key=lambda s: (len(s), s))
    number = {s: i for i, s in enumerate(streams)}
    boxes: list[TimelineBox] = []
    for offset, starts in ((0, prediction.start_us), (len(streams), measured)):
        for kernel, start in zip(prediction.kernels, starts, strict=False):
            kind = "C" if kernel.communicates else "K"
            boxes.append(
                TimelineBox(offset + number[kernel.stream], start * 1e-6, kernel.duration_us * 1e-6, kind,
                    f"{kernel.name[:150]} {kernel.grid}", kernel.role)
            )  # fmt: skip
    names = [f"stream {s}, predicted" for s in streams]
    names += [f"stream {s}, measured" for s in streams] if measured else []
    table = Table("Figures", ("figure", "predicted ", "measured ", "difference "), rows(prediction))
    return PipelineTimeline(
        f"Kernels of {Path(path).name}", names, boxes, tables=(table,), notes=notes(prediction)
    )
