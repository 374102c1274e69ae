"""A schedule as one page: a bar for each operation, a curve of the activations of each stage. No network, no script."""

from html import escape

import numpy as np

from telechat_moe.tools.plan.schedules.program import PAIRS, Kind, Op, Program
from telechat_moe.tools.plan.schedules.simulate import Result

COLOURS = {
    Kind.F: ("#3b6fb6", "F: forward"),
    Kind.B: ("#3f9b6b", "B: backward"),
    Kind.D: ("#52b788", "D: gradient of the input (dX)"),
    Kind.W: ("#e0a030", "W: gradient of the weights (dW)"),
    Kind.FB: ("#7b5ea7", "F and B overlapped"),
    Kind.FD: ("#7b5ea7", "F and D overlapped"),
}
"""Fill and legend of each kind; later chunks of a stage are lighter."""
_ROW, _BAR, _LEFT, _WIDE = 26, 20, 70, 2400
_MEMORY = 44

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; color: #222; margin: 24px; }
table { border-collapse: collapse; margin: 12px 0 20px; }
td, th { padding: 3px 12px; text-align: right; border-bottom: 1px solid #ddd; }
td:first-child, th:first-child { text-align: left; }
tr.ours { font-weight: 600; background: #f1f5fb; }
.wide { overflow-x: auto; border: 1px solid #ddd; }
.key span { display: inline-block; width: 12px; height: 12px; margin: 0 5px 0 16px; vertical-align: -1px; }
svg text { font: 11px system-ui, sans-serif; fill: #444; }
h2 { font-size: 16px; margin: 24px 0 6px; }
"""


def page(
    result: Result, title: str, summary: str, headers: list[str], rows: list[list[str]]
) -> str:
    """Return the page.

    Args:
        result: The schedule in time.
        title: Heading.
        summary: One sentence under it.
        headers: Of the table of schedules; a trailing blank aligns as on the terminal.
        rows: Its rows; the first is this schedule.
    """
    head = "".join(f"<th>{escape(h.strip())}</th>" for h in headers)
    body = "".join(
        f"<tr{' class=ours' if i == 0 else ''}>"
        + "".join(f"<td>{escape(c)}</td>" for c in row)
        + "</tr>"
        for i, row in enumerate(rows)
    )
    used = {op.kind for ops in result.program.ops for op in ops}
    shown = {COLOURS[k] for k in used}
    key = "".join(
        f'<span style="background:{colour}"></span>{escape(text)}'
        for colour, text in dict.fromkeys(COLOURS.values())
        if (colour, text) in shown
    )
    return (
        f"<!doctype html><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{escape(title)}</h1><p>{escape(summary)}</p>"
        f"<table><tr>{head}</tr>{body}</table>"
        f"<h2>Operations</h2><p class=key>{key}; later chunks of a stage are lighter, white is idle; "
        f"hover for chunk, micro-batch and time</p><div class=wide>{_bars(result)}</div>"
        f"<h2>Activations held, in units of a stage's for one micro-batch</h2>"
        f"<div class=wide>{_memory(result)}</div>\n"
    )


def _svg(height: int, parts: list[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDE + 20}" height="{height}">'
        + "".join(parts)
        + "</svg>"
    )


def _axis(result: Result, height: int) -> list[str]:
    scale = _WIDE / result.makespan
    parts: list[str] = []
    for t in np.linspace(0, result.makespan, 13):
        x = _LEFT + t * scale
        parts.append(f'<path d="M{x:.1f} 0V{height - 16}" stroke="#eee"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 4}" text-anchor="middle">{t:.4g}</text>')
    return parts


def _bars(result: Result) -> str:
    program = result.program
    scale = _WIDE / result.makespan
    height = _ROW * program.stages + 24
    parts = _axis(result, height)
    for s, ops in enumerate(program.ops):
        y = 4 + s * _ROW
        parts.append(f'<text x="4" y="{y + 14}">stage {s}</text>')
        for op, start, end in zip(ops, result.start[s], result.end[s], strict=True):
            x, width = _LEFT + start * scale, (end - start) * scale
            label = escape(f"{op}: {start:.6g} to {end:.6g}")
            text = ""
            if width > 9 + 6 * len(str(op.micro)):
                text = f'<text x="{x + width / 2:.1f}" y="{y + 14}" text-anchor="middle" style="fill:#fff">{op.micro}</text>'
            parts.append(
                f'<g><title>{label}</title><rect x="{x:.2f}" y="{y}" width="{max(width, 0.2):.2f}" '
                f'height="{_BAR}" fill="{COLOURS[op.kind][0]}" fill-opacity="{_tint(program, s, op):.2f}" '
                f'stroke="#fff" stroke-width="{min(1.0, width / 6):.2f}"/>{text}</g>'
            )
    return _svg(height, parts)


def _tint(program: Program, stage: int, op: Op) -> float:
    if op.kind in PAIRS:
        return 1.0
    held = program.chunks_of_stage[stage]
    return 1.0 - 0.5 * held.index(op.chunk) / max(len(held) - 1, 1)


def _memory(result: Result) -> str:
    program = result.program
    scale, top = _WIDE / result.makespan, float(result.peak.max()) or 1.0
    height = _MEMORY * program.stages + 24
    parts = _axis(result, height)
    for s, ops in enumerate(program.ops):
        base = _MEMORY * (s + 1) - 2
        steps = [f"M{_LEFT} {base}"]
        held = result.memory[s]
        for i, start in enumerate(result.start[s]):
            y = base - held[i] / top * (_MEMORY - 8)
            steps.append(f"H{_LEFT + start * scale:.1f}V{y:.1f}")
        steps.append(f"H{_LEFT + result.end[s][-1] * scale:.1f}V{base}Z" if len(ops) else "")
        parts.append(
            f'<path d="{"".join(steps)}" fill="#3b6fb6" fill-opacity="0.25" stroke="#3b6fb6"/>'
        )
        parts.append(f'<text x="4" y="{base - 8}">{s}: {result.peak[s]:.4g}</text>')
    return _svg(height, parts)
