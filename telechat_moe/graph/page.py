"""The dry run's report as one HTML page, without anything from elsewhere."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from telechat_moe.graph.nodes import PHASES
from telechat_moe.graph.report import (
    Table,
    by_group,
    by_module,
    difference_tables,
    size_text,
)
from telechat_moe.graph.schedule import Event, timeline

TEMPLATE = Path(__file__).with_name("page.html")
MEMORY = ("parameters", "optimizer", "gradients", "other", "copies", "activations")
LANE, UNIT = 26, 22


def page(result: dict[str, Any], difference: dict[str, Any] | None = None) -> str:
    """Return the page.

    Args:
        result: From :func:`telechat_moe.graph.report.report`.
        difference: From :func:`telechat_moe.graph.report.difference`, shown first.
    """
    body = [_head(result)]
    if difference is not None:
        said = [
            f"{place}: {escape(d['model'])}'s model, {escape(d['layout'])} on {d['devices']} devices"
            for place, d in ((1, difference["one"]), (2, difference["two"]))
        ]
        body.append(
            f"<h2>Against {escape(difference['two']['recipe'])}</h2><p>{'; '.join(said)}.</p>"
        )
        body += [_table(table) for table in difference_tables(difference)]
    if any(stage["order"] for stage in result["stages"]):
        body += ["<h2>Order of the micro-batches</h2>", _timeline(result)]
    body += ["<h2>Memory of a device</h2>", _memory(result)]
    body += [_stage(stage) for stage in result["stages"]]
    notes = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in result["notes"].items()
    )
    body.append(f"<h2>How it is counted</h2><dl>{notes}</dl>")
    text = TEMPLATE.read_text(encoding="utf-8")
    title = f"Dry run: {Path(result['recipe']).name}, {result['layout']}"
    return text.replace("{{title}}", escape(title)).replace("{{body}}", "".join(body))


def _head(result: dict[str, Any]) -> str:
    seconds = ", ".join(
        f"rank {s['rank']}: {s['compile_seconds']:.1f} s, {size_text(s['peak_memory'])}"
        for s in result["stages"]
    )
    lines = [
        f"<p>{escape(result['model'])}'s model, <b>{escape(result['layout'])}</b> on {result['devices']} devices, target "
        f"{escape(result['target'])}, MindSpore {escape(result['mindspore'])}. Compiled on this machine: {seconds}.</p>",
        f"<p class=limits>{escape(result['limits'])}</p>",
    ]
    check = result["check"]
    if check is not None:
        said = "equal" if check["same"] else "NOT equal"
        kind = "good" if check["same"] else "bad"
        detail = "".join(f"<br>{escape(text)}" for text in check["differences"])
        lines.append(
            f"<p class={kind}>Rank {check['rank']} compiled too: {said} to what was derived from rank "
            f"{check['derived_from']} ({escape(check['compared'])}).{detail}</p>"
        )
    lines += [f"<p class=bad>{escape(text)}</p>" for text in result["unmatched_transfers"]]
    return "".join(lines)


def _table(table: Table) -> str:
    title, headers, rows = table
    head = "".join(_cell("th", h.strip(), h.endswith(" ")) for h in headers)
    body = "".join(
        "<tr>"
        + "".join(_cell("td", c, h.endswith(" ")) for c, h in zip(row, headers, strict=True))
        + "</tr>"
        for row in rows
    )
    caption = f"<h3>{escape(title)}</h3>" if title else ""
    return f"{caption}<div class=scroll><table><thead><tr>{head}</tr></thead>{body}</table></div>"


def _cell(tag: str, text: str, number: bool) -> str:
    return f"<{tag}{' class=n' if number else ''}>{escape(text)}</{tag}>"


def _stage(stage: dict[str, Any]) -> str:
    others = stage["derived_ranks"]
    derived = f"; ranks {_spans(others)} derived by substituting groups" if others else ""
    parts = [f"<h2>Stage {stage['stage']}, rank {stage['rank']}{derived}</h2>"]
    rows = []
    most = max((s["sent"] for s in by_group(stage).values()), default=0)
    for key, s in by_group(stage).items():
        calls, size = str(s["count"]), size_text(s["bytes"])
        certain = "" if s["certain"] == s["bytes"] else f"{size_text(s['certain'])} certain"
        bar = f"<div class=bar style='width:{100 * s['sent'] / most if most else 0:.1f}%'></div>"
        cells = "".join(f"<td>{escape(text)}</td>" for text in key)
        numbers = "".join(f"<td class=n>{escape(v)}</td>" for v in (calls, size))
        rows.append(
            f"<tr>{cells}{numbers}<td class=n>{size_text(s['sent'])}</td>"
            f"<td class=track>{bar}<span class=soft>{escape(certain)}</span></td></tr>"
        )
    head = "<th>phase<th>purpose<th>collective<th>group<th class=n>calls<th class=n>bytes<th class=n>sent<th>"
    parts.append("<h3>Collectives a step</h3>")
    parts.append(
        f"<div class=scroll><table><thead><tr>{head}</tr></thead>{''.join(rows)}</table></div>"
    )
    found = [
        [*key, str(s["count"]), size_text(s["bytes"]), size_text(s["sent"])]
        for key, s in by_module(stage).items()
    ]
    head = ["module", "collective", "group", "calls ", "bytes ", "sent "]
    if found:
        parts.append(_table(("Forward collectives by module", head, found)))
    kinds = sorted(stage["operators"].items(), key=lambda item: -sum(item[1].values()))
    rows = [[kind, *(str(counts[p] or "") for p in PHASES)] for kind, counts in kinds]
    again = stage["recomputation"]
    said = (
        f"<p>{again['operators']} forward operators run again in the backward pass, {again['collectives']} of them "
        f"collectives that send {size_text(again['sent'])}.</p>"
        if again["operators"]
        else "<p>No forward operator runs again.</p>"
    )
    table = _table(("", ["operator", *(f"{p} " for p in PHASES)], rows))
    count = sum(sum(c.values()) for c in stage["operators"].values())
    parts.append(f"<h3>Operators a step: {count}</h3>{said}")
    parts.append(f"<details><summary>by kind</summary>{table}</details>")
    return "".join(parts)


def _spans(ranks: Sequence[int]) -> str:
    """Return ranks in short: ``1-31``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _memory(result: dict[str, Any]) -> str:
    most = max(s["memory"]["total"] for s in result["stages"]) or 1
    lines = []
    for stage in result["stages"]:
        memory = stage["memory"]
        bars = "".join(
            f"<i class='m{place}' style='width:{100 * memory[name] / most:.2f}%' "
            f"title='{name}: {size_text(memory[name])}'></i>"
            for place, name in enumerate(MEMORY)
        )
        lines.append(
            f"<div class=row><span>stage {stage['stage']}</span><span class=stack>{bars}</span>"
            f"<span class=n>{size_text(memory['total'])}</span></div>"
        )
    keys = "".join(f"<span><i class='key m{i}'></i>{name}</span>" for i, name in enumerate(MEMORY))
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
    return f"{''.join(lines)}<p class=keys>{keys}</p>{_table(('', head, rows))}"


def _timeline(result: dict[str, Any]) -> str:
    orders = {s["rank"]: [Event(**event) for event in s["order"]] for s in result["stages"]}
    lanes = timeline(orders)
    length = max((slot.end for slots in lanes.values() for slot in slots), default=1)
    names = [f"stage {s['stage']}, rank {s['rank']}" for s in result["stages"]]
    left = 12 + 7 * max(map(len, names))
    width, height = left + length * UNIT + 8, LANE * len(lanes) + 6
    drawn = []
    for lane, slots in enumerate(lanes.values()):
        top = lane * LANE + 3
        drawn.append(f"<text x=0 y={top + 16} class=name>{names[lane]}</text>")
        for slot in slots:
            x, w = left + slot.start * UNIT, (slot.end - slot.start) * UNIT
            chunk = f".{slot.event.chunk}" if slot.event.chunk else ""
            kind = "f" if slot.event.kind == "F" else "b"
            drawn.append(
                f"<g><title>{escape(str(slot.event))}</title><rect x={x:g} y={top} width={w - 1:g} height={LANE - 5} "
                f"rx=2 class='{kind}{' alt' if slot.event.chunk else ''}' />"
                f"<text x={x + w / 2:g} y={top + 15} class=mid>{slot.event.micro}{chunk}</text></g>"
            )
    text = "".join(
        f"<p class=order><b>stage {s['stage']}</b> {escape(s['order_text'])}</p>"
        for s in result["stages"]
    )
    return (
        "<p class=keys><span><i class='key f'></i>forward</span><span><i class='key b'></i>backward</span>"
        "<span class=soft>the number is the micro-batch, .1 a second chunk of layers</span></p>"
        f"<div class=scroll><svg width={width:g} height={height} role=img>{''.join(drawn)}</svg></div>"
        "<p class=soft>The order is the graph's; drawn as if a forward took 1, a backward 2 and a transfer no time.</p>"
        f"<details><summary>in words: F forward, B backward, sf rf send and receive an activation, sb rb a gradient, "
        f"&gt; the other rank</summary>{text}</details>"
    )
