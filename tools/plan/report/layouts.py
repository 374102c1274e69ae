"""Report a plan: the ranked table, why every other layout was not chosen, and the page."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from telechat_moe import html
from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.expert_exchange import choices, told
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.report import choice
from telechat_moe.tools.plan.search.emit import layout_string, mindspeed_arguments
from telechat_moe.tools.plan.search.search import PlacedLayout, SearchResult
from telechat_moe.tools.plan.search.space import describe
from telechat_moe.units import GIB, gib_text, seconds_text

EXACT = 1e-6
"""Relative difference below which steps and bounds count as equal, because times are rounded to ps."""


def distinct(plan: SearchResult) -> list[PlacedLayout]:
    """Return the layouts found; those that may recompute layers but recompute none are left out if others remain."""
    candidates = [c for c in plan.best if (n := c.layout.recompute_layers) is None or any(n)]
    return candidates or plan.best


def question(data: dict[str, Any]) -> str:
    """Return what was asked, from `summary`."""
    return (
        f"{data['model']} on {data['devices']:,} x {data['device']}, {data['global_batch']:,} sequences a step, "
        f"{gib_text(data['memory_bytes'], 1)} a device"
    )


def counts(data: dict[str, Any]) -> str:
    """Return what became of the layouts, from `summary`."""
    return (
        f"{data['configurations']:,} layouts in {data['seconds']:.1f} s: {data['out_of_memory']:,} out of memory, "
        f"{data['dominated']:,} dominated; {data['solved']:,} had their layers placed with a proof"
    )


def placement(layout: dict[str, Any]) -> list[tuple[str, str]]:
    """Return where a layout of `summary` puts the layers, and how other programs are told so: names and values."""
    facts = [("layers of each chunk", str(list(layout["chunks"])))]
    if layout["recompute_layers"] is not None:
        word = "swapped" if layout["recompute"] == "swap" else "recomputed"
        facts.append((f"{word} of them", str(list(layout["recompute_layers"]))))
    string = layout["megatron_layout"]  # or why there is none
    option = f"--pipeline-model-parallel-layout '{string}'"
    words = layout["mindspeed_arguments"]
    if layout["exchange_s"]:
        facts.append(("tokens to experts, a dispatch", told(layout["exchange_s"])))
    return [
        *facts,
        ("Megatron", option if string.startswith("E") else string),
        ("MindSpeed", words if isinstance(words, str) else " ".join(words)),
    ]


def ranked(data: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return headers and rows of the fastest layouts, from `summary`."""
    headers = ["# ", "step, s ", "bound, s ", "peak, GiB ", "bubble ", "layout"]
    rows = [
        [
            str(i),
            f"{layout['step_s']:.4f}",
            f"{layout['bound_s']:.4f}",
            f"{layout['simulated_peak_bytes'] / GIB:.1f}",
            f"{layout['bubble']:.1%}",
            layout["layout"],
        ]
        for i, layout in enumerate(data["layouts"], 1)
    ]
    return headers, rows


def too_large(data: dict[str, Any]) -> list[str]:
    """Return a line if listed layouts need more memory in the simulation than the search counted."""
    room, peaks = data["memory_bytes"], [c["simulated_peak_bytes"] for c in data["layouts"]]
    over = {i: peak for i, peak in enumerate(peaks, 1) if peak > room * (1 + EXACT)}
    if not over:
        return []
    numbers, largest = ", ".join(map(str, over)), max(over.values()) / GIB
    return [
        f"note: run operation by operation, layout {numbers} of the table needs more than {room / GIB:.2f} GiB, up to {largest:.2f}: the search "
        "counts a stage's micro-batches in flight as a mean over its chunks, and these differ. Take another with --pick, or "
        "less --memory"
    ]


def why_not(plan: SearchResult) -> Iterator[str]:
    """Yield one line for every layout that was not chosen."""
    chosen = plan.best[0].row if plan.best else -1
    best = plan.best[0].step_s if plan.best else math.inf
    candidates = {c.row: c for c in plan.best}
    for row, bound in enumerate(plan.bound_s):
        if row == chosen:
            continue
        name = describe(plan.rows[row])
        if not math.isfinite(bound):
            missing, stage = plan.missing[row]
            if missing > 0:
                yield f"{name}: out of memory by at least {missing / GIB:.2f} GiB on stage {stage:.0f}"
            else:
                yield f"{name}: out of memory: whole layers do not fit, stage {stage:.0f} is the tightest"
        elif row in candidates:
            yield f"{name}: {candidates[row].step_s:.4f} s, {candidates[row].step_s / best - 1:.2%} slower"
        elif bound >= best / (1 + plan.tolerance) * (1 - EXACT):
            yield f"{name}: dominated: at least {bound:.4f} s"
        else:
            yield f"{name}: not closed: at least {bound:.4f} s"


def verdict(plan: SearchResult) -> str:
    """Return in one sentence how sure the result is."""
    if not plan.best:
        return _nothing(plan)
    if plan.optimal:
        word = (
            f"the step is within {plan.gap:.2%} of it"
            if plan.gap > EXACT
            else "as fast as the best"
        )
        return f"optimal under the event simulation to {plan.tolerance:.1%}: no layout is faster than {plan.lower_bound_s:.6f} s ({word})"
    word = "the time limit was reached; " if plan.timed_out else ""
    return f"{word}best found, within {plan.gap:.3%} of the proven bound {plan.lower_bound_s:.6f} s"


def _nothing(plan: SearchResult) -> str:
    fits = np.isfinite(plan.bound_s)
    if fits.any():
        return f"the time limit was reached before any layout was placed; none is faster than {plan.bound_s.min():.6f} s"
    lacking = np.where(plan.missing[:, 0] > 0, plan.missing[:, 0], np.inf)
    if not np.isfinite(lacking.min()):
        return "no layout fits in memory: whole layers do not"
    row = int(lacking.argmin())
    missing, stage = plan.missing[row]
    return (
        f"no layout fits in memory; the nearest lacks at least {missing / GIB:.3g} GiB on stage {stage:.0f}: "
        f"{describe(plan.rows[row])}"
    )


def summary(plan: SearchResult, top: int) -> dict[str, Any]:
    """Return the result as plain data."""
    bound = plan.bound_s
    best = plan.best[0].step_s if plan.best else math.inf
    memory = int((~np.isfinite(bound)).sum())
    return {
        "model": plan.architecture.name, "device": plan.device.name, "devices": plan.space.devices,
        "global_batch": plan.space.global_batch, "memory_bytes": plan.room_bytes, "configurations": len(plan.rows),
        "out_of_memory": memory, "dominated": int((np.isfinite(bound) & (bound >= best / (1 + plan.tolerance) * (1 - EXACT))).sum()),
        "solved": plan.solved, "seconds": plan.seconds, "optimal": plan.optimal,
        "lower_bound_s": plan.lower_bound_s if plan.best else None, "gap": plan.gap if plan.best else None,
        "verdict": verdict(plan), "layouts": [_layout(plan, c) for c in distinct(plan)[:top]],
    }  # fmt: skip


def _layout(plan: SearchResult, c: PlacedLayout) -> dict[str, Any]:
    def said(make: Callable[[Architecture, Layout], Any]) -> Any:
        try:
            return make(plan.architecture, c.layout)
        except BadInputError as error:
            return str(error)

    return {
        "layout": describe(plan.rows[c.row]), "step_s": c.step_s, "bound_s": c.bound_s, "peak_bytes": c.peak_bytes,
        "simulated_peak_bytes": c.simulated_bytes, "bubble": c.bubble, "chunks": c.layout.chunks,
        "recompute": c.layout.recompute, "recompute_layers": c.layout.recompute_layers,
        "exchange_s": choices(plan.architecture, c.layout, plan.device), "ends": c.layout.ends,
        "megatron_layout": said(layout_string), "mindspeed_arguments": said(mindspeed_arguments),
    }  # fmt: skip


@dataclass(frozen=True, order=True)
class FrontPoint:
    """A layout in memory and time."""

    peak_bytes: float
    step_s: float
    layout: str
    gap: float = math.nan
    """How much faster a layout that needs no more memory can be at most, relative to its bound."""

    @property
    def sure(self) -> str:
        """Words for how sure it is that no layout is faster."""
        return "proven" if self.gap <= EXACT else f"within {self.gap:.2%}"


def front_points(plans: list[SearchResult]) -> list[FrontPoint]:
    """Return the best layouts under falling memory limits, and others as certain, without dominated ones."""
    candidates = [(i, p, c) for p in plans for i, c in enumerate(distinct(p))]
    points: list[FrontPoint] = []
    worst = 0.0
    for number, plan, c in sorted(candidates, key=lambda entry: entry[0] > 0):
        # a bound with more memory also holds with less
        bound = max(p.lower_bound_s for p in plans if p.room_bytes >= c.peak_bytes * (1 - EXACT))
        gap = max(c.step_s / bound - 1, 0.0)
        worst = max(worst, gap) if number == 0 else worst
        if gap <= worst:
            points.append(FrontPoint(c.peak_bytes, c.step_s, describe(plan.rows[c.row]), gap))
    front: list[FrontPoint] = []
    best = math.inf
    for point in sorted(points):
        if point.step_s < best:
            best = point.step_s
            front.append(point)
    return front


FRONT = (
    "Blue, numbered as in the table: the fastest layout found within each amount of memory, and how sure it is that none is faster; grey: the other "
    "layouts that were solved. Step times are simulated, the pipeline operation by operation; memory is as searched, with a "
    "mean of micro-batches in flight."
)


def page(plan: SearchResult, plans: list[SearchResult], data: dict[str, Any]) -> str:
    """Return the report as one page: the result, those under smaller memory limits, and the result's `summary`."""
    points = front_points([plan, *plans])
    points.reverse()
    front = [
        [str(i), f"{p.peak_bytes / GIB:.1f}", f"{p.step_s:.4f}", p.sure, p.layout]
        for i, p in enumerate(points, 1)
    ]
    lines = list(why_not(plan))
    shown = lines[:2000]
    title = f"{plan.architecture.name} on {plan.space.devices:,} x {plan.device.name}"
    reasons = f"the first {len(shown):,} of {len(lines):,}" if len(shown) < len(lines) else "all"
    others = [FrontPoint(c.peak_bytes, c.step_s, describe(plan.rows[c.row])) for c in plan.best]
    labels = ("peak memory of a device, GiB", "step, s")
    drawn = html.front_chart([*map(_on_chart, points)], [*map(_on_chart, others)], labels)
    parts = [
        html.tag("p", question(data)),
        html.tag("p", verdict(plan), "sentence"),
        "<h2>Time against memory</h2>",
        html.tag("p", FRONT, "soft"),
        drawn or "<p>Nothing fits.</p>",
        html.table(["# ", "peak, GiB ", "step, s ", "fastest ", "layout"], front),
        "<h2>Fastest layouts</h2>",
        html.table(*ranked(data)),
        *map(_fastest, data["layouts"][:1]),
        html.tag("pre", "\n".join(choice.lines(data["choice"]))) if data.get("choice") else "",
        "<h2>Why not the others</h2>",
        html.tag("p", counts(data)),
        html.details(reasons, html.tag("pre", "\n".join(shown))),
    ]
    return html.page(title, parts)


def _fastest(layout: dict[str, Any]) -> str:
    peaks = [gib_text(layout[key]) for key in ("simulated_peak_bytes", "peak_bytes")]
    rows = [
        ("layout", layout["layout"]),
        ("step", f"{seconds_text(layout['step_s'])}, at least {seconds_text(layout['bound_s'])}"),
        ("peak memory of a device", f"{peaks[0]} as simulated, {peaks[1]} as searched"),
        ("bubble", f"{layout['bubble']:.1%} of the makespan"),
        *placement(layout),
    ]
    return "<h2>The fastest layout</h2>" + html.facts(rows)


def _on_chart(point: FrontPoint) -> tuple[float, float, str]:
    sure = "" if math.isnan(point.gap) else f", {point.sure}"
    gib = point.peak_bytes / GIB
    return gib, point.step_s, f"{point.layout}: {point.step_s:.4f} s, {gib:.1f} GiB{sure}"
