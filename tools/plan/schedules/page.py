"""Draw a schedule as one self-contained page: a bar for each operation, a curve of each stage's activations."""

from html import escape

from telechat_moe import html
from telechat_moe.html import Axes
from telechat_moe.tools.plan.schedules.program import PAIRS, Kind, Op, Program
from telechat_moe.tools.plan.schedules.simulate import Result

NAMES = {
    Kind.F: "F: forward",
    Kind.B: "B: backward",
    Kind.D: "D: gradient of the input (dX)",
    Kind.W: "W: gradient of the weights (dW)",
    Kind.FB: "F and B overlapped",
    Kind.FD: "F and D overlapped",
}
"""Legend of each kind; the style sheet has a colour of that name, lighter for later chunks of a stage."""
_ROW, _BAR, _LEFT, _WIDE = 26, 20, 70, 2400
_MEMORY = 44


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
    used = {op.kind for ops in result.program.ops for op in ops}
    legend = html.keys(
        ((f"var(--{kind.value})", said) for kind, said in NAMES.items() if kind in used),
        "later chunks of a stage are lighter, white is idle; hover for chunk, micro-batch and time",
    )
    parts = [
        html.tag("p", summary),
        html.table(headers, rows, kinds={0: "ours"}),
        f"<h2>Operations</h2>{legend}<div class=scroll>{_bars(result)}</div>",
        "<h2>Activations held, in units of a stage's for one micro-batch</h2>",
        f"<div class=scroll>{_memory(result)}</div>",
    ]
    return html.page(title, parts, wide=True)


def _axes(result: Result, height: int) -> Axes:
    return Axes((0.0, result.makespan), (0.0, 1.0), _LEFT + _WIDE + 20, height, _LEFT, 20, 0, 24)


def _bars(result: Result) -> str:
    program = result.program
    height = _ROW * program.stages + 24
    axes = _axes(result, height)
    parts = [axes.grid(up=())]
    for s, ops in enumerate(program.ops):
        y = 4 + s * _ROW
        parts.append(f'<text x="4" y="{y + 14}">stage {s}</text>')
        for op, start, end in zip(ops, result.start[s], result.end[s], strict=True):
            x, width = axes.x(start), axes.x(end) - axes.x(start)
            label = escape(f"{op}: {start:.6g} to {end:.6g}")
            text = ""
            if width > 9 + 6 * len(str(op.micro)):
                text = f'<text x="{x + width / 2:.1f}" y="{y + 14}" class=inside>{op.micro}</text>'
            parts.append(
                f'<g><title>{label}</title><rect x="{x:.2f}" y="{y}" width="{max(width, 0.2):.2f}" '
                f'height="{_BAR}" fill="var(--{op.kind.value})" fill-opacity="{_tint(program, s, op):.2f}" '
                f'stroke="var(--paper)" stroke-width="{min(1.0, width / 6):.2f}"/>{text}</g>'
            )
    return html.svg(axes.width, height, parts, "operations of each stage over time")


def _tint(program: Program, stage: int, op: Op) -> float:
    if op.kind in PAIRS:
        return 1.0
    held = program.chunks_of_stage[stage]
    return 1.0 - 0.5 * held.index(op.chunk) / max(len(held) - 1, 1)


def _memory(result: Result) -> str:
    program = result.program
    top = float(result.peak.max()) or 1.0
    height = _MEMORY * program.stages + 24
    axes = _axes(result, height)
    parts = [axes.grid(up=())]
    for s, ops in enumerate(program.ops):
        base = _MEMORY * (s + 1) - 2
        steps = [f"M{_LEFT} {base}"]
        held = result.memory[s]
        for i, start in enumerate(result.start[s]):
            y = base - held[i] / top * (_MEMORY - 8)
            steps.append(f"H{axes.x(start):.1f}V{y:.1f}")
        steps.append(f"H{axes.x(result.end[s][-1]):.1f}V{base}Z" if len(ops) else "")
        parts.append(f"<path class=held d='{''.join(steps)}'/>")
        parts.append(f'<text x="4" y="{base - 8}">{s}: {result.peak[s]:.4g}</text>')
    return html.svg(axes.width, height, parts, "activations of each stage over time")
