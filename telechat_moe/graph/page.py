"""The dry run's report as one self-contained HTML page."""

from html import escape
from pathlib import Path
from typing import Any

from telechat_moe import html
from telechat_moe.graph.nodes import PHASES
from telechat_moe.graph.report import (
    MEMORY,
    ReportTable,
    by_group,
    check_text,
    difference_tables,
    module_rows,
    overlap_table,
    overlap_text,
    swap_text,
)
from telechat_moe.graph.schedule import PassEvent, timeline
from telechat_moe.html import Html
from telechat_moe.units import ranges_text, size_text

LANE, UNIT, WIDTH = 26, 22, 1040


def page(result: dict[str, Any], difference: dict[str, Any] | None = None) -> str:
    """Return the page.

    Args:
        result: From :func:`telechat_moe.graph.report.report`.
        difference: From :func:`telechat_moe.graph.report.difference`, shown first.
    """
    body = [_head(result)]
    if difference is not None:
        models = [
            f"{place}: {escape(d['model'])}'s model, {escape(d['layout'])} on {d['devices']} devices"
            for place, d in ((1, difference["one"]), (2, difference["two"]))
        ]
        body.append(
            f"<h2>Against {escape(difference['two']['recipe'])}</h2><p>{'; '.join(models)}.</p>"
        )
        body += [_table(table) for table in difference_tables(difference)]
    if any(stage["order"] for stage in result["stages"]):
        body += ["<h2>Order of the micro-batches</h2>", _timeline(result)]
    body += ["<h2>Memory of a device</h2>", _memory(result)]
    body += [_stage(stage) for stage in result["stages"]]
    notes = "".join(
        html.tag("dt", name) + html.tag("dd", text) for name, text in result["notes"].items()
    )
    body.append(f"<h2>How it is counted</h2><dl>{notes}</dl>")
    return html.page(f"Dry run: {Path(result['recipe']).name}, {result['layout']}", body)


def _head(result: dict[str, Any]) -> str:
    seconds = ", ".join(
        f"rank {s['rank']}: {s['compile_seconds']:.1f} s, {size_text(s['peak_memory'])}"
        for s in result["stages"]
    )
    lines = [
        f"<p>{escape(result['model'])}'s model, <b>{escape(result['layout'])}</b> on {result['devices']} devices, target "
        f"{escape(result['target'])}, MindSpore {escape(result['mindspore'])}. Compiled on this machine: {seconds}.</p>",
        html.tag("p", result["limits"], "soft"),
    ]
    check = result["check"]
    if check is not None:
        sentence = check_text(check)
        kind = "good" if check["same"] else "bad"
        detail = "".join(f"<br>{escape(text)}" for text in check["differences"])
        lines.append(f"<p class={kind}>{escape(sentence[0].upper() + sentence[1:])}.{detail}</p>")
    wrong = [*result["unmatched_transfers"], *filter(None, [overlap_text(result)])]
    lines += [html.tag("p", text, "bad") for text in wrong]
    return "".join(lines)


def _table(table: ReportTable) -> str:
    title, headers, rows = table
    return (html.tag("h3", title) if title else "") + html.table(headers, rows)


def _stage(stage: dict[str, Any]) -> str:
    others = stage["derived_ranks"]
    derived = f"; ranks {ranges_text(others)} derived by substituting groups" if others else ""
    parts = [f"<h2>Stage {stage['stage']}, rank {stage['rank']}{derived}</h2>"]
    groups = by_group(stage)
    largest = max((s["sent"] for s in groups.values()), default=0) or 1
    rows: list[list[object]] = []
    for key, s in groups.items():
        certain = "" if s["certain"] == s["bytes"] else size_text(s["certain"])
        sizes = (size_text(s["bytes"]), certain, size_text(s["sent"]))
        rows.append([*key, s["count"], *sizes, html.bar(s["sent"] / largest)])
    head = ["phase", "purpose", "collective", "group", "calls ", "bytes ", "certain "]
    head += ["sent ", "sent, of the most"]
    parts += ["<h3>Collectives a step</h3>", html.table(head, rows)]
    module_table = module_rows(stage)
    head = ["module", "collective", "group", "calls ", "bytes ", "sent "]
    if module_table:
        parts.append(_table(("Forward collectives by module", head, module_table)))
    title, (head, module_table) = "All-to-alls of passes that overlap", overlap_table(stage)
    if module_table:
        parts.append(_table((title, head, module_table)))
        parts += [_pair(number, pair) for number, pair in enumerate(stage["overlap"])]
    kinds = sorted(stage["operators"].items(), key=lambda item: -sum(item[1].values()))
    rows = [[kind, *(counts[p] or "" for p in PHASES)] for kind, counts in kinds]
    recomputation = stage["recomputation"]
    summary = (
        f"<p>{recomputation['operators']} forward operators run again in the backward pass, {recomputation['collectives']} of them "
        f"collectives that send {size_text(recomputation['sent'])}.</p>"
        if recomputation["operators"]
        else "<p>No forward operator runs again.</p>"
    )
    if swaps := swap_text(stage):
        summary += f"<p>{swaps}.</p>"
    table = html.table(["operator", *(f"{p} " for p in PHASES)], rows)
    count = sum(sum(c.values()) for c in stage["operators"].values())
    parts.append(f"<h3>Operators a step: {count}</h3>{summary}")
    parts.append(html.details("by kind", table))
    return "".join(parts)


def _pair(number: int, pair: dict[str, Any]) -> str:
    """Draw one pair in the steady state; empty without times."""
    slots = [s for s in pair.get("drawn", []) if s["end"] > s["start"]]
    if not slots:
        return ""
    left, length = 90, max(s["end"] for s in slots)
    lanes = {"compute": 3, "exchange": 3 + LANE}
    drawn = [f"<text x=0 y={y + 16} class=name>{name}</text>" for name, y in lanes.items()]
    for s in slots:
        scale = (WIDTH - left - 8) / length
        x, w = left + s["start"] * scale, (s["end"] - s["start"]) * scale
        label = f"{s['pass']}{s['part']}"
        text = f"<text x={x + w / 2:g} y={lanes[s['lane']] + 15} class=inside>{label}</text>"
        us = (s["end"] - s["start"]) * 1e6
        drawn.append(
            f"<g><title>{s['lane']} {label}: {us:,.0f} us</title><rect x={x:g} y={lanes[s['lane']]} "
            f"width={max(w - 1, 0.5):g} height={LANE - 5} rx=2 fill='var(--{s['pass']})' />"
            f"{text if w > 8 * len(label) else ''}</g>"
        )
    caption = f"pair {number}, {pair['times']} times a step, {length * 1e6:,.0f} us"
    keys = html.keys(
        [("var(--F)", "forward"), ("var(--B)", "backward of another micro-batch")],
        f"{caption}; the number of a part is how many exchanges it needs",
    )
    return keys + html.svg(WIDTH, 2 * LANE + 6, drawn, caption)


def _memory(result: dict[str, Any]) -> str:
    largest = max(s["memory"]["total"] for s in result["stages"]) or 1
    bars: list[list[object]] = []
    for stage in result["stages"]:
        memory = stage["memory"]
        shares = "".join(
            f"<i style='width:{100 * memory[name] / largest:.2f}%;background:var(--m{i})' "
            f"title='{name}: {size_text(memory[name])}'></i>"
            for i, name in enumerate(MEMORY)
        )
        bar = html.tag("div", Html(shares), "stack")
        bars.append([f"stage {stage['stage']}", bar, size_text(memory["total"])])
    keys = html.keys((f"var(--m{i})", name) for i, name in enumerate(MEMORY))
    head = ["stage", *(f"{name} " for name in MEMORY), "kept by a pass ", "in flight "]
    rows = [
        [
            str(s["stage"]),
            *(size_text(s["memory"][name]) for name in MEMORY),
            size_text(s["memory"]["kept_by_a_pass"]),
            str(s["memory"]["micro_batches_in_flight"]),
        ]
        for s in result["stages"]
    ]
    return html.table(["", "", "total "], bars) + keys + html.table(head, rows)


def _timeline(result: dict[str, Any]) -> str:
    orders = {s["rank"]: [PassEvent(**event) for event in s["order"]] for s in result["stages"]}
    lanes = timeline(orders)
    length = max((slot.end for slots in lanes.values() for slot in slots), default=1)
    names = [f"stage {s['stage']}, rank {s['rank']}" for s in result["stages"]]
    left = 12 + 7 * max(map(len, names))
    unit = max(8.0, min(UNIT, (WIDTH - left - 8) / length))  # beyond, the drawing scrolls
    width, height = left + length * unit + 8, LANE * len(lanes) + 6
    drawn = []
    for lane, slots in enumerate(lanes.values()):
        top = lane * LANE + 3
        drawn.append(f"<text x=0 y={top + 16} class=name>{names[lane]}</text>")
        for slot in slots:
            x, w = left + slot.start * unit, (slot.end - slot.start) * unit
            chunk = f".{slot.event.chunk}" if slot.event.chunk else ""
            part = f":{slot.event.part}" if slot.event.part else ""
            label = f"{slot.event.micro}{chunk}{part}"
            text = f"<text x={x + w / 2:g} y={top + 15} class=inside>{label}</text>"
            fade = " fill-opacity=.6" if slot.event.chunk else ""
            drawn.append(
                f"<g><title>{escape(str(slot.event))}</title><rect x={x:g} y={top} width={w - 1:g} height={LANE - 5} "
                f"rx=2 fill='var(--{slot.event.kind})'{fade} />"
                f"{text if w > 7 * len(label) else ''}</g>"
            )
    orders_text = "".join(
        f"<p class=mono><b>stage {s['stage']}</b> {escape(s['order_text'])}</p>"
        for s in result["stages"]
    )
    keys = html.keys(
        [("var(--F)", "forward"), ("var(--B)", "backward")],
        "the number is the micro-batch, .1 a second chunk of layers, :1 a second part of its sequences",
    )
    drawing = html.svg(width, height, drawn, "order of the micro-batches")
    words = (
        "in words: F forward, B backward, sf rf send and receive an activation, sb rb a gradient, "
        "> the other rank"
    )
    note = "The order is the graph's; drawn as if a forward took 1, a backward 2 and a transfer no time."
    return (
        f"{keys}<div class=scroll>{drawing}</div><p class=soft>{note}</p>"
        f"{html.details(words, Html(orders_text))}"
    )
