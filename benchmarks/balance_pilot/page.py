"""The pilot as one page: loss curves, tables, verdicts."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.balance_pilot.report import Runs, summary, verdicts
from benchmarks.balance_pilot.train import DROPS, HELD_OUT, LAST, SCOPES
from telechat_moe import html
from telechat_moe.html import Html

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#999999", "#e69f00")
SMOOTH = 16


def page(runs: Runs, machine: str) -> str:
    """Return the page."""
    seeds = len(next(iter(runs.values())))
    body: list[str] = [
        html.tag(
            "p",
            f"{seeds} seeds a variant. A variant's seeds start from the same weights and see the same text as every other "
            f"variant's, so they are compared seed by seed. {machine}",
        ),
        html.tag("h2", "Is it in the published order?"),
        _verdicts(runs),
        html.tag("h2", "Over what the balance loss counts"),
        _curves(runs, list(SCOPES)),
        _table(runs, list(SCOPES), ("specialisation", "overload")),
        html.tag("h2", "Drop and pad against dropless"),
        _curves(runs, ["DP", *DROPS]),
        _table(runs, ["EP 8", "EP 16", "DP", *DROPS], ("drop_rate", "overload")),
        html.tag("h2", "How it is measured"),
        html.facts(NOTES),
    ]
    return html.page("Balance losses and capacities, a pilot", body)


NOTES = (
    ("loss", f"next-token loss, nats: mean of the last {LAST} training batches, and of {HELD_OUT} held-out batches"),
    ("±", "standard deviation over the seeds, of the values, not of the differences"),
    ("drop rate", f"share of the (token, expert) pairs that found no room, last {LAST} steps"),
    ("overload", "load of the hottest expert over the mean load of a batch, mean over layers"),
    (
        "specialisation",
        "share of a domain's pairs that would move if all domains used the experts alike, mean over domains and layers; at most 0.67",
    ),
    ("curves", f"mean over the seeds, of {SMOOTH} steps each, less the first variant's"),
)  # fmt: skip


def _verdicts(runs: Runs) -> Html:
    rows = [
        [
            v["claim"],
            f"{v['difference']:+.4f} ± {v['deviation']:.4f}",
            v["seeds"],
            html.verdict(v["verdict"]),
        ]
        for v in verdicts(runs)
    ]
    return html.table(["claim", "difference ", "seeds in which it holds ", "verdict"], rows)


def _table(runs: Runs, names: Sequence[str], more: Sequence[str]) -> Html:
    found = summary(runs)
    titles = [
        "variant",
        "loss, training ",
        "loss, held out ",
        *(f"{m.replace('_', ' ')} " for m in more),
    ]
    rows: list[list[object]] = []
    for name in names:
        if name in found:
            values = [found[name][m] for m in ("loss", "held_out", *more)]
            rows.append([name, *(f"{mean:.4f} ± {deviation:.4f}" for mean, deviation in values)])
    return html.table(titles, rows)


def smoothed(measured: Sequence[Any]) -> list[float]:
    """Return the mean over the seeds of the losses, and over each run of steps."""
    losses = [
        statistics.mean(step) for step in zip(*(run["losses"] for run in measured), strict=True)
    ]
    starts = range(0, len(losses) - SMOOTH + 1, SMOOTH)
    return [statistics.mean(losses[i : i + SMOOTH]) for i in starts]


def _curves(runs: Runs, names: Sequence[str]) -> Html:
    """Return the curves of the variants that were run, as differences from the first one's."""
    names = [name for name in names if name in runs]
    curves = {name: smoothed(runs[name]) for name in names}
    first = curves[names[0]]
    lines = {
        name: [a - b for a, b in zip(curve, first, strict=True)] for name, curve in curves.items()
    }
    values = [v for line in lines.values() for v in line]
    up = html.ticks(min(values), max(values), 6, outward=True)
    steps = [(i + 0.5) * SMOOTH for i in range(len(first))]
    axes = html.ChartAxes(
        (0, steps[-1] + SMOOTH), (up[0], up[-1]), 1000, 340, left=72, right=150, bottom=44
    )
    said = [(v, f"{v:+.{html.decimals(up)}f}") for v in up]
    parts = [axes.grid(None, said, labels=("step", f"loss less that of {names[0]}, nats"))]
    ends = _apart([axes.y(lines[name][-1]) for name in names])
    for name, colour, end in zip(names, _colours(len(names)), ends, strict=True):
        path = axes.line(steps, lines[name], "curve", 1.8)
        parts.append(path.replace("class=curve", f"fill=none stroke='{colour}'"))
        parts.append(
            f"<text x={axes.x(axes.across[1]) + 4:.1f} y={end + 4:.1f} style='fill:{colour}'>{html.html(name)}</text>"
        )
    return axes.draw(parts, "loss curves")


def _colours(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def _apart(heights: Sequence[float], gap: float = 15) -> list[float]:
    """Return heights of labels near those given, no two closer than a gap."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    found, last = [0.0] * len(heights), float("-inf")
    for i in order:
        last = found[i] = max(heights[i], last + gap)
    return found
