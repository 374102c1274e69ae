"""Show a simulated step as a page to zoom into, and as a trace for Perfetto or chrome://tracing."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from telechat_moe import html
from telechat_moe.tools.plan.schedules.program import Op
from telechat_moe.tools.plan.schedules.simulate import Simulation

SCRIPT = Path(__file__).with_name("timeline.js")
CANVAS = """
<div class="keys" id="keys"></div>
<p class="soft"><button id="all">whole</button> <button id="in">zoom in</button> <button id="out">zoom out</button>
 wheel zooms at the pointer, drag moves, keys + − 0 ← → too</p>
<canvas id="time" tabindex="0" aria-label="timeline"></canvas>
<canvas id="memory" aria-label="memory over time"></canvas>
<p class="keys" id="stages"></p>
<div id="tip"></div>
"""

KINDS = {
    "F": "forward", "B": "backward", "D": "backward, dX", "W": "backward, dW",
    "FB": "forward and backward overlapped", "FD": "forward and dX overlapped", "C": "communication",
    "S": "send to a neighbouring stage", "K": "computation", "O": "optimizer and the rest of the step",
}  # fmt: skip
"""Kind of a box and what it means; the page has a colour for each."""


@dataclass(frozen=True)
class TimelineBox:
    """One activity of a row, from its start to its end."""

    row: int
    start_s: float
    duration_s: float
    kind: str
    """Key of `KINDS`."""
    text: str
    """Text shown when the pointer is over the box."""
    label: str = ""
    """Written into the box where it fits."""


@dataclass(frozen=True)
class MemoryCurve:
    """Memory of a row over time: steps that hold until the next."""

    row: int
    start_s: Sequence[float]
    bytes: Sequence[float]


@dataclass(frozen=True)
class Table:
    """Figures shown under the timeline; a header that ends in a space aligns right."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class PipelineTimeline:
    """Everything that a page or trace shows."""

    title: str
    rows: Sequence[str]
    boxes: Sequence[TimelineBox]
    sends: Sequence[TimelineBox] = ()
    """Drawn as thin strips below the boxes of their row, because they run beside them."""
    memory: Sequence[MemoryCurve] = ()
    limit_bytes: float | None = None
    """Memory of a device: a line in the memory panel."""
    tables: Sequence[Table] = ()
    notes: Sequence[str] = field(default_factory=tuple)
    units: bool = True
    """Whether times are seconds and memory bytes; else the page shows bare numbers."""


def operations(result: Simulation) -> list[TimelineBox]:
    """Return a box for each operation of a simulated schedule; a stage is a row."""
    return [
        TimelineBox(s, float(begin), float(end - begin), op.kind.value, str(op), _label(op))
        for s, ops in enumerate(result.program.ops)
        for op, begin, end in zip(ops, result.start[s], result.end[s], strict=True)
    ]


def _label(op: Op) -> str:
    return "/".join(f"{k.value}{m}" for k, _, m in op.parts())


def activations(result: Simulation, fixed: Sequence[float], end: float) -> list[MemoryCurve]:
    """Return the memory of each stage: what is fixed and the activations that are held, until `end`."""
    curves: list[MemoryCurve] = []
    for s, (start, fixed_bytes) in enumerate(zip(result.start, fixed, strict=True)):
        t = [0.0, *map(float, start), float(result.end[s][-1]), end]
        sums = [fixed_bytes + float(v) for v in result.memory[s]]
        curves.append(MemoryCurve(s, t, [fixed_bytes, *sums, fixed_bytes, fixed_bytes]))
    return curves


def page(timeline: PipelineTimeline) -> str:
    """Return a self-contained page."""
    used = {box.kind for box in (*timeline.boxes, *timeline.sends)}
    amount = round if timeline.units else _short
    data = {
        "rows": list(timeline.rows),
        "kinds": {k: v for k, v in KINDS.items() if k in used},
        "boxes": _columns(timeline.boxes, len(timeline.rows)),
        "sends": _columns(timeline.sends, len(timeline.rows)),
        "memory": [
            {"row": c.row, "t": [_short(t) for t in c.start_s], "v": [amount(v) for v in c.bytes]}
            for c in timeline.memory
        ],
        "units": timeline.units,
        "limit": timeline.limit_bytes,
    }
    tables = [html.tag("h2", t.title) + html.table(t.headers, t.rows) for t in timeline.tables]
    notes = [html.tag("p", note) for note in timeline.notes]
    script = html.script(data, SCRIPT.read_text(encoding="utf-8"))
    return html.page(timeline.title, [*notes, CANVAS, *tables, script], wide=True)


def _short(seconds: float) -> float:
    return float(f"{seconds:.7g}")


def _columns(boxes: Sequence[TimelineBox], rows: int) -> list[list[object]]:
    """Return the boxes of each row in order of time, as short lists."""
    per_row: list[list[object]] = [[] for _ in range(rows)]
    for box in sorted(boxes, key=lambda b: b.start_s):
        per_row[box.row].append(
            [_short(box.start_s), _short(box.duration_s), box.kind, box.text, box.label]
        )
    return per_row


def chrome_trace(timeline: PipelineTimeline) -> str:
    """Return the timeline as Chrome's trace events (JSON): opens in Perfetto and chrome://tracing.

    Each row is a thread; memory is a counter. Times are microseconds.
    """
    events: list[dict[str, object]] = []

    def put(ph: str, name: str, args: dict[str, object], **fields: object) -> None:
        events.append({"ph": ph, "pid": 0, "name": name, **fields, "args": args})

    put("M", "process_name", {"name": timeline.title})
    for number, name in enumerate(timeline.rows):
        put("M", "thread_name", {"name": name}, tid=number)
        put("M", "thread_sort_index", {"sort_index": number}, tid=number)
    for box in (*timeline.boxes, *timeline.sends):
        kind, times = KINDS[box.kind], {"ts": box.start_s * 1e6, "dur": box.duration_s * 1e6}
        put("X", box.label or kind, {"what": box.text}, tid=box.row, cat=kind, **times)
    for curve in timeline.memory:
        name = f"memory, {timeline.rows[curve.row]} (bytes)"
        for t, value in zip(curve.start_s, curve.bytes, strict=True):
            put("C", name, {"bytes": float(value)}, ts=t * 1e6)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
