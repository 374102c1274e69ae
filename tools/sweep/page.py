"""The page of a sweep: for each study losses with their spread and loss against FLOPs, and the predicted cost at full size."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from telechat_moe import html
from telechat_moe.tools.sweep.results import RunResult
from telechat_moe.units import count_text

_COLOURS = 6
"""Number of series colours of the style sheet; more variants take them again."""
_FROM = 0.2
"""Share of the training after which loss curves are drawn: before it all fall alike, and steeply."""


def page(report: Mapping[str, Any], runs: Sequence[RunResult]) -> str:
    """Return the page of a sweep from what `results.report` returns."""
    states = [r.state for r in runs]
    counts = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states))
    seeds = report["seeds"]
    lead = f"{len(report['variants'])} variants of {report['recipe']} with {len(seeds)} seeds: {counts}. "
    lead += f"Losses are {report['loss']} losses in nats per token"
    lead += ": mean, and lowest to highest over the seeds." if len(seeds) > 1 else "."
    parts = [html.tag("p", lead, "sentence"), *_failures(runs)]
    sections = [_study(name, study, report, runs) for name, study in report["studies"].items()]
    rows = {name: (v["training_flops"], v["loss"]) for name, v in report["variants"].items()}
    title = html.tag("h2", "Loss against training FLOPs, all variants")
    sections.append([title, _scatter(rows, "training FLOPs of a run")])
    sections += [_larger(name, model, report) for name, model in report["larger"].items()]
    parts += [html.tag("section", html.Html("".join(section))) for section in sections]
    return html.page(f"Sweep of {report['recipe']}", parts, wide=True)


def _failures(runs: Sequence[RunResult]) -> list[html.Html]:
    failed = [f"{r.run.name}: {r.why}" for r in runs if r.why]
    return [html.tag("p", "Failed runs:", "bad"), html.items(failed)] if failed else []


def loss_text(loss: Mapping[str, Any]) -> str:
    """Return a loss and its spread: ``3.9012 (3.8990 to 3.9034)``; a dash without any."""
    if loss["mean"] is None:
        return "-"
    spread = f" ({loss['low']:.4f} to {loss['high']:.4f})"
    return f"{loss['mean']:.4f}{spread if len(loss['each']) > 1 else ''}"


def difference_text(difference: Mapping[str, Any]) -> str:
    """Return a difference with its sign, spread and verdict."""
    if difference["mean"] is None:
        return "not judged"
    mean, low, high = (f"{difference[key]:+.4f}" for key in ("mean", "low", "high"))
    return f"{mean} ({low} to {high}): {difference['verdict']}"


STUDY_TITLES = ("variant", "loss ", "against the first ", "parameters ", "active ", "FLOPs/token ", "tokens/s ")  # fmt: skip


def study_rows(study: Mapping[str, Any], report: Mapping[str, Any]) -> list[list[str]]:
    """Return the cells of a study's variants, for `STUDY_TITLES`."""
    rows: list[list[str]] = []
    for name, difference in study["against_first"].items():
        variant = report["variants"][name]
        sizes = [count_text(variant[key]) for key in ("parameters", "active", "flops_per_token")]
        speed = variant["tokens_per_second"]
        rows.append([
            name, loss_text(variant["loss"]), difference_text(difference) if rows else "-", *sizes,
            f"{speed:,.0f}" if speed else "-",
        ])  # fmt: skip
    return rows


def _study(
    name: str, study: Mapping[str, Any], report: Mapping[str, Any], runs: Sequence[RunResult]
) -> list[html.Html]:
    members = list(study["against_first"])
    variants = {name: report["variants"][name] for name in members}
    equal = [f"{k} within {v:.1%}" for k, v in study["equal"].items() if v is not None]
    about = study["about"] + (f" Equal by arithmetic: {', '.join(equal)}." if equal else "")
    return [
        html.tag("h2", name),
        html.tag("p", about),
        _losses(variants),
        html.table(
            (*STUDY_TITLES, "training FLOPs "),
            [
                [*row, count_text(variants[row[0]]["training_flops"])]
                for row in study_rows(study, report)
            ],
        ),
        _curves(members, runs),
    ]


def _losses(variants: Mapping[str, Any]) -> html.Html:
    """Draw a row for each variant: mean loss, and the range over the seeds."""
    losses = {name: v["loss"] for name, v in variants.items() if v["loss"]["mean"] is not None}
    if not losses:
        return html.tag("p", "No run of this study has finished.", "soft")
    low, high = min(x["low"] for x in losses.values()), max(x["high"] for x in losses.values())
    across = html.ticks(low, high, 8, outward=True)
    height = 40 + 26 * len(losses)
    axes = html.ChartAxes((across[0], across[-1]), (-0.5, len(losses) - 0.5), 1040, height, left=200, bottom=40)  # fmt: skip
    parts = [axes.grid(across, [], labels=("loss, nats per token", ""))]
    for row, (name, loss) in enumerate(losses.items()):
        up, colour = len(losses) - 1 - row, f"s{row % _COLOURS}"
        parts.append(f"<text class=name x=190 y={axes.y(up) + 4:.1f} text-anchor=end>{html.html(name)}</text>")  # fmt: skip
        parts.append(axes.line((loss["low"], loss["high"]), (up, up), colour, 3))
        parts += [axes.dot(value, up, f"d{row % _COLOURS}", 3) for value in loss["each"]]
        parts.append(axes.dot(loss["mean"], up, f"d{row % _COLOURS}", 6, f"{name}: {loss_text(loss)}"))  # fmt: skip
    return axes.draw(parts, "loss of each variant: mean, and each seed")


def _curves(members: Sequence[str], runs: Sequence[RunResult]) -> html.Html:
    """Draw the loss of each variant against the FLOPs that were spent: mean over the seeds, and their range."""
    curves = {name: _curve([r for r in runs if r.run.variant == name]) for name in members}
    points = [p for curve in curves.values() for p in curve]
    if len(points) < 2:
        return html.Html("")
    scale = 10 ** (3 * ((len(f"{max(p[0] for p in points):.0f}") - 1) // 3))
    top = max(p[3] for p in points)
    across = html.ticks(0.0, max(p[0] for p in points) / scale, 10, outward=True)
    up = html.ticks(min(p[2] for p in points), top, 6, outward=True)
    axes = html.ChartAxes((across[0], across[-1]), (up[0], up[-1]), 1040, 360, bottom=44)
    labels = (f"training FLOPs, 10^{len(str(scale)) - 1}", "loss, nats per token")
    parts = [axes.grid(across, labels=labels)]
    for row, curve in enumerate(curves.values()):
        xs = [p[0] / scale for p in curve]
        colour = row % _COLOURS
        parts.append(axes.area(xs, [p[2] for p in curve], [p[3] for p in curve], f"a{colour}"))
        parts.append(axes.line(xs, [p[1] for p in curve], f"s{colour}", 2))
    legend = [(f"var(--m{row % _COLOURS})", name) for row, name in enumerate(curves)]
    note = "line: mean over the seeds; band: lowest to highest; from a fifth of the training on"
    return html.Html(axes.draw(parts, "loss against training FLOPs") + html.keys(legend, note))


def _curve(runs: Sequence[RunResult]) -> list[tuple[float, float, float, float]]:
    """Return FLOPs, mean, lowest and highest loss, where all runs that have begun have one."""
    begun = [dict(r.curve) for r in runs if r.curve]
    if not begun:
        return []
    shared = [x for x in begun[0] if all(x in other for other in begun)]
    first = _FROM * max(x for curve in begun for x in curve)
    rows = [(x, [curve[x] for curve in begun]) for x in shared if x >= first]
    return [(x, fmean(ys), min(ys), max(ys)) for x, ys in rows]


def _scatter(rows: Mapping[str, tuple[float | None, Mapping[str, Any]]], title: str) -> html.Html:
    """Draw numbered variants, their loss with its range over a number, and say which number is which."""
    points = {name: (x, loss) for name, (x, loss) in rows.items() if x and loss["mean"] is not None}
    if not points:
        return html.tag("p", "Nothing to draw yet.", "soft")
    largest = max(x for x, _ in points.values())
    power = 3 * ((len(f"{largest:.0f}") - 1) // 3)
    xs = [x / 10**power for x, _ in points.values()]
    margin = 0.05 * (max(xs) - min(xs)) + 1e-3 * max(xs)
    across = html.ticks(min(xs) - margin, max(xs) + margin, 8, outward=True)
    low = min(v["low"] for _, v in points.values())
    high = max(v["high"] for _, v in points.values())
    up = html.ticks(low, high, 6, outward=True)
    axes = html.ChartAxes((across[0], across[-1]), (up[0], up[-1]), 1040, 360, bottom=44)
    label = f"{title}, 10^{power}" if power else title
    parts = [axes.grid(across, labels=(label, "loss at the sweep's size, nats per token"))]
    for number, (x, (name, (_, loss))) in enumerate(zip(xs, points.items(), strict=True), 1):
        parts.append(axes.line((x, x), (loss["low"], loss["high"]), "target"))
        parts.append(axes.dot(x, loss["mean"], "chosen", 5, f"{name}: {loss_text(loss)}"))
        parts.append(f"<text class=name x={axes.x(x) + 9:.1f} y={axes.y(loss['mean']) + 4:.1f}>{number}</text>")  # fmt: skip
    legend = "; ".join(f"{number} {name}" for number, name in enumerate(points, 1))
    return html.Html(axes.draw(parts, f"loss over {title}") + html.tag("p", legend, "soft"))


def _larger(name: str, model: Mapping[str, Any], report: Mapping[str, Any]) -> list[html.Html]:
    losses = {name: report["variants"][name]["loss"] for name in model["variants"]}
    hours = {name: (c["device_hours"], losses[name]) for name, c in model["variants"].items()}
    note = (
        f"Predicted for {model['recipe']} on {model['device']} by the planner's cost model, not measured; "
        "gap: how far the step may be from that of the fastest layout (none: the recipe's own layout). "
        "Losses are those of the sweep's small models: that their order holds at this size is not shown."
    )
    rows = [
        [
            variant,
            ", ".join(f"{k.rpartition('.')[2]}={v}" for k, v in c["settings"].items()),
            loss_text(losses[variant]),
            *cost_row(c),
        ]
        for variant, c in model["variants"].items()
    ]
    return [
        html.tag("h2", f"Cost at {name}"),
        html.tag("p", note),
        html.table(["variant", "structure there", "loss here ", *COST_TITLES], rows),
        _scatter(hours, f"predicted device hours at {name} for 10^12 tokens"),
    ]


COST_TITLES = ("parameters ", "active ", "step, s ", "tokens/s ", "MFU ", "device h / 10^12 tokens ", "gap ", "layout")  # fmt: skip


def cost_row(c: Mapping[str, Any]) -> list[str]:
    """Return the cells of a predicted cost, for `COST_TITLES`."""
    sizes = [count_text(c["parameters"]), count_text(c["active"])]
    if c["step_s"] is None:
        return [*sizes, *["-"] * 5, c["why"]]
    layout = c["layout"] if c["fits"] else f"{c['layout']} (does not fit into memory)"
    return [
        *sizes,
        f"{c['step_s']:.3f}",
        f"{c['tokens_per_s']:,.0f}",
        f"{c['mfu']:.1%}",
        f"{c['device_hours']:,.0f}",
        "-" if c["gap"] is None else f"{c['gap']:.2%}",
        layout,
    ]
