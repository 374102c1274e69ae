"""The page of a diagnosis: answer, causes, what bounds each stage, a picture of ranks x steps, the latest rank step by step."""

import numpy as np

from telechat_moe.html import (
    ChartAxes,
    Html,
    bar,
    facts,
    items,
    keys,
    page,
    picture,
    png,
    table,
    tag,
)
from telechat_moe.numerics import Array
from telechat_moe.tools.diagnose.bound import BOUNDS, StageBound
from telechat_moe.tools.diagnose.causes import KINDS
from telechat_moe.tools.diagnose.excess import center
from telechat_moe.tools.diagnose.records import Records
from telechat_moe.tools.diagnose.report import Diagnosis, what_text, who
from telechat_moe.units import seconds_text

WIDTH, HEIGHT, LEFT = 960, 360, 64
PIXELS = (480, 256)
"""Columns and rows of the picture at most; several steps or ranks of one share a pixel, which shows their largest."""
FULL = 0.2
"""Share of the step at which a pixel has its full colour."""
STAGES = 8
"""Stages whose latest rank is drawn."""
COLOURS = {
    "device": "--m0",
    "communication": "--m2",
    "host": "--m1",
    "data": "--m5",
    "checkpoint": "--m4",
}


def diagnosis_page(diagnosis: Diagnosis) -> str:
    """Return a diagnosis as one self-contained page of HTML."""
    records = diagnosis.records
    ranks = f"{len(records.ranks):,} on {len(records.hosts):,} host(s)"
    rows = [
        ("from", records.source),
        ("ranks", f"{ranks}, {len(diagnosis.bounds)} stage(s)"),
        ("steps", f"{int(records.steps[0]):,} to {int(records.steps[-1]):,}"),
        ("median step", seconds_text(diagnosis.step_s)),
        ("waiting for other ranks", f"{diagnosis.waiting:.1%} of all ranks' time"),
    ]
    body: list[str] = [tag("p", diagnosis.says(), "sentence"), facts(rows)]
    if diagnosis.causes:
        body += [tag("h2", "Causes"), _causes(diagnosis)]
    body += [tag("h2", "What bounds the steps"), _bounds(diagnosis.bounds)]
    body += [tag("h2", "Who is late, step by step"), _heat(diagnosis)]
    body += [tag("h2", "The latest rank of each step"), _path(diagnosis)]
    left = diagnosis.left()
    if left or records.problems:
        body += [tag("h2", "Not judged"), items([*left, *records.problems])]
    return page("Where the time goes", body, wide=True)


def _causes(diagnosis: Diagnosis) -> Html:
    rows = [
        [
            who(c),
            what_text(c),
            f"{c.first_step:,}-{c.last_step:,}",
            seconds_text(c.seconds),
            f"{c.share:+.1%}",
            f"{c.lost:.1%}",
            KINDS[c.kinds[0]].advice,
        ]
        for c in diagnosis.causes
    ]
    titles = ["who", "what", "steps", "later by ", "of a step ", "of the run ", "what to do"]
    return table(titles, rows, limit=50, kinds={0: "lit"})


def _bounds(bounds: list[StageBound]) -> Html:
    names = list(BOUNDS.values())
    rows = [
        [b.stage, b.bound, *(bar(b.shares[n], text=f"{b.shares[n]:.1%}") for n in names)]
        for b in bounds
    ]
    return table(["stage ", "bound by", *names], rows, limit=64)


def _pooled(x: Array, columns: int, rows: int) -> Array:
    """Return an array of at most so many rows and columns; each is the largest of a block of the original."""
    across = np.linspace(0, x.shape[1], min(columns, x.shape[1]) + 1).astype(int)[:-1]
    down = np.linspace(0, x.shape[0], min(rows, x.shape[0]) + 1).astype(int)[:-1]
    return np.maximum.reduceat(np.maximum.reduceat(x, down, axis=0), across, axis=1)


def _heat(diagnosis: Diagnosis) -> Html:
    """Draw how much later than its peers each rank is."""
    records, count = diagnosis.records, len(diagnosis.records.ranks)
    late, _ = center(records.own, records.stage)
    cells = _pooled(late, *PIXELS) / diagnosis.step_s
    rgba = np.zeros((*cells.shape, 4), np.uint8)
    rgba[..., :3] = (185, 48, 34)
    rgba[..., 3] = (255 * np.clip(cells / FULL, 0, 1)).astype(np.uint8)
    data = png(cells.shape[1], cells.shape[0], rgba.tobytes())
    first, last = float(records.steps[0]), float(records.steps[-1])
    across = first, max(last, first + 1)
    axes = ChartAxes(across, (-float(count), 0.0), WIDTH, HEIGHT, LEFT, bottom=40)
    x, y, width = axes.x(first), axes.top, axes.width - axes.left - axes.right
    height = axes.height - axes.top - axes.bottom
    ticks = np.unique(np.linspace(0, count - 1, min(6, count)).astype(int))
    below = 0.5 * (height / count > 10)
    up = [(-float(t) - below, f"{int(records.ranks[t]):,}") for t in ticks]
    parts = [
        axes.grid(None, up, labels=("step", "")),
        picture(data, x, y, width, height),
        f"<rect class=frame x={x:g} y={y:g} width={width:g} height={height:g} />",
        *_names(diagnosis, axes),
    ]
    note = f"later than the median peer: white 0, red {FULL:.0%} of a step and more; rows are ranks"
    return Html(axes.draw(parts, "ranks and steps") + keys([("rgb(185,48,34)", "late")], note))


def _names(diagnosis: Diagnosis, axes: ChartAxes) -> list[str]:
    """Return marks at the ranks of the causes that cost most."""
    rows = {int(rank): row for row, rank in enumerate(diagnosis.records.ranks)}
    marks: list[str] = []
    for cause in diagnosis.causes[:4]:
        if cause.ranks and cause.scope != "link":
            y = axes.y(-rows[cause.ranks[0]] - 0.5 * len(cause.ranks))
            marks.append(
                f"<text class=mark x={axes.width - axes.right + 4} y={y + 4:.1f}>&#9664;</text>"
            )
    return marks


def _path(diagnosis: Diagnosis) -> Html:
    """Draw the parts of the latest rank of each step, stage by stage: what nobody but it can shorten."""
    records = diagnosis.records
    drawn = [_stage_path(records, bound) for bound in diagnosis.bounds[:STAGES]]
    legend = keys(
        [(f"var({COLOURS[name]})", name) for name in BOUNDS.values()],
        "the largest part of the latest rank; the line is that rank's time",
    )
    return Html("".join(drawn) + legend)


def _stage_path(records: Records, bound: StageBound) -> Html:
    columns = np.arange(len(records.steps))
    local = records.own[bound.latest, columns].astype(float)
    low, high = 0.0, float(local.max()) * 1.05 or 1.0
    first, last = float(records.steps[0]), float(records.steps[-1])
    axes = ChartAxes((first, max(last, first + 1)), (low, high), WIDTH, 150, LEFT)
    wide = max((axes.width - axes.left - axes.right) / len(columns), 0.5)
    names = list(BOUNDS.values())
    parts: list[str] = [axes.grid(labels=("", f"stage {bound.stage}, seconds"))]
    edges = np.flatnonzero(np.diff(bound.by_step, prepend=-1))
    for begin, end in zip(edges, [*edges[1:], len(columns)], strict=True):
        x = axes.x(float(records.steps[begin]))
        name = names[int(bound.by_step[begin])]
        parts.append(
            f"<rect x={x:.1f} y={axes.height - axes.bottom - 6} width={max(wide, (end - begin) * wide):.1f} height=6 "
            f"fill='var({COLOURS[name]})'/>"
        )
    parts.append(axes.line(records.steps.tolist(), local.tolist(), "target", 1.2))
    latest, counts = np.unique(bound.latest, return_counts=True)
    latest_rank = int(records.ranks[latest[counts.argmax()]])
    caption = f"stage {bound.stage}: rank {latest_rank} is the latest in {counts.max() / len(columns):.0%} of the steps"
    return Html(tag("p", caption, "soft") + axes.draw(parts, caption))
