"""The page of `telechat-moe experts`.

Matrices are drawn as pictures in one scale: a cell's colour is a ratio, from a quarter (blue) over 1 (the paper) to four times (orange).
"""

from collections.abc import Mapping, Sequence

import numpy as np

from telechat_moe.analysis.report import PAIRS, ExpertReport, RouterState
from telechat_moe.analysis.statistics import ALPHA, Specialisation
from telechat_moe.html import (
    ChartAxes,
    Html,
    details,
    facts,
    figures,
    html,
    items,
    keys,
    page,
    picture,
    png,
    svg,
    table,
    tag,
    ticks,
    verdict,
)
from telechat_moe.moe.loads import DEAD, HOT, dead_experts, entropy, hot_experts
from telechat_moe.numerics import Array

_BELOW, _ABOVE = (63, 127, 196), (217, 130, 59)
_MOST_LABELS = 16
_DARKEST = 4.0  # the ratio with the full colour


def experts_page(report: ExpertReport) -> str:
    """Return the page of a run as HTML that needs no other file."""
    sections = (_summary, _load, _routers, _specialisation, _pairs, _favourites)
    return page(f"What the experts of {report.run} learn", [draw(report) for draw in sections])


def _summary(report: ExpertReport) -> Html:
    load = report.load
    rows: list[tuple[str, object]] = [
        ("verdict", Html(f"{verdict(report.verdict)}: {html(report.says())}")),
        ("MoE layers", f"{len(report.layers)}: {report.layers[0]} to {report.layers[-1]}"),
        ("experts", f"{report.experts}, of which a token takes {report.top_k}"),
    ]
    if load is not None:
        rows.append(("recorded loads", f"{len(load.step_N)}, to step {load.step_N[-1]:,}"))
        rows.append(("time that recording took", f"{load.recording_share:.2%} of the steps"))
    if report.checkpoints:
        rows.append(("checkpoints", [state.step for state in report.checkpoints]))
        rows.append(("text", f"{report.tokens:,} tokens: {report.text}"))
    parts = [facts(rows)]
    if report.problems:
        parts.append(Html(f"<p class=fail>{html('; '.join(report.problems))}</p>"))
    if report.not_judged:
        parts.append(tag("h2", "Not judged"))
        parts.append(items(f"{name}: {reason}" for name, reason in report.not_judged.items()))
    return Html("".join(parts))


def _colours(ratio: Array) -> bytes:
    """Return the pixels of ratios: blue below 1, orange above, the stronger the farther; nothing for NaN."""
    with np.errstate(divide="ignore"):
        t = np.clip(np.log2(ratio) / np.log2(_DARKEST), -1.0, 1.0)
    t = np.nan_to_num(t, nan=0.0)
    rgba = np.empty((*ratio.shape, 4), np.uint8)
    rgba[..., :3] = np.where(t[..., None] < 0, _BELOW, _ABOVE)
    rgba[..., 3] = np.abs(t) * 255
    return rgba.tobytes()


_KEY = keys(
    [(f"rgb{_BELOW}", "a quarter or less"), (f"rgb{_ABOVE}", "four times or more")],
    "the paper: as often as expected",
)


def _matrix(ratio: Array, rows: Sequence[str], columns: Sequence[str], label: str) -> Html:
    """Return the picture of a matrix of ratios; rows and columns are named where there is room."""
    height, width = ratio.shape
    across = max(1.0, min(22.0, 190 / width))
    down = max(1.0, min(22.0, 190 / height))
    left = 8 * max(map(len, rows)) + 8 if height <= _MOST_LABELS else 8
    wide, high = across * width, down * height
    data = png(width, height, _colours(ratio))
    parts = [picture(data, left, 2, wide, high)]
    parts.append(f"<rect class=frame x={left} y=2 width={wide:g} height={high:g} />")
    if height <= _MOST_LABELS:
        parts += [
            f"<text x={left - 6} y={2 + down * (i + 0.5) + 4:.1f} text-anchor=end>{html(name)}</text>"
            for i, name in enumerate(rows)
        ]
    every = -(-width // max(1, int(wide // (8 * max(map(len, columns)) + 6))))
    parts += [
        f"<text x={left + across * (i + 0.5):.1f} y={high + 18:.1f} text-anchor=middle>{html(name)}</text>"
        for i, name in enumerate(columns)
        if i % every == 0
    ]
    return svg(left + wide + 16, high + 24, parts, label)


def _by_depth(
    report: ExpertReport, states: Sequence[RouterState], name: str, title: str
) -> tuple[Html, str] | None:
    """Return a chart over the layers with a line for each checkpoint, older ones fainter; None without numbers."""
    lines = [
        (state, [np.nan if v is None else v for v in line])
        for state in states
        if (line := getattr(state, name)) is not None
    ]
    numbers = [v for _, line in lines for v in line if np.isfinite(v)]
    if not numbers:
        return None
    up = ticks(min(numbers), max(numbers), 4, outward=True)
    last = max(1, len(report.layers) - 1)
    axes = ChartAxes((0, last), (up[0], up[-1]), 480, 200, left=52, right=34)
    every = -(-len(report.layers) // 8)
    parts = [axes.grid([])]
    parts += [
        f"<text x={axes.x(i):.1f} y={axes.height - 6} text-anchor=middle>{html(layer)}</text>"
        for i, layer in enumerate(report.layers)
        if i % every == 0
    ]
    for number, (state, line) in enumerate(lines, 1):
        drawn = axes.line(range(len(line)), line, "target", 2)
        dots = (
            axes.dot(i, v, "chosen", 3, f"step {state.step}: {v:.3g}")
            for i, v in enumerate(line)
            if np.isfinite(v)
        )
        parts.append(f"<g opacity={number / len(lines):.2f}>{drawn}{''.join(dots)}</g>")
    return svg(axes.width, axes.height, parts, title), title


def _by_layer(report: ExpertReport, columns: Mapping[str, Sequence[object]]) -> Html:
    """Return a table with a row for each layer, from columns by their titles."""
    rows = zip(report.layers, *columns.values(), strict=True)
    return table(["layer", *columns], [list(row) for row in rows])


def _load(report: ExpertReport) -> Html:
    load = report.load
    if load is None:
        return Html("")
    ratio_NLE = load.load_NLE / load.load_NLE.mean(2, keepdims=True)
    names, steps = [str(e) for e in range(report.experts)], [str(s) for s in load.step_N]
    drawings = [
        (_matrix(ratio_NLE[:, i].T, names, steps, f"load of {layer}"), layer)
        for i, layer in enumerate(report.layers)
    ]
    overload_NL, last_LE = load.overloads(), load.load_NLE[-1]
    columns: dict[str, Sequence[object]] = {
        "overload, first ": overload_NL[0].tolist(),
        "highest ": overload_NL.max(0).tolist(),
        "last ": overload_NL[-1].tolist(),
        "entropy of loads ": entropy(last_LE).tolist(),
        "dead at the end": [dead_experts(load_E) or "none" for load_E in last_LE],
        "hot at the end": [hot_experts(load_E) or "none" for load_E in last_LE],
    }
    caption = (
        f"Overload is the load of the busiest expert over the mean. An expert is dead below {DEAD:.0%} of the mean and hot "
        f"above {HOT:g} times the mean, in the last record. The pictures show the load of each expert (row) by step (column), over the mean."
    )
    return Html(
        tag("h2", "Load over time")
        + _by_layer(report, columns)
        + tag("p", caption, "soft")
        + figures(drawings)
        + _KEY
    )


_CHARTS = {
    "entropy": "entropy of a token's scores over the experts (1: undecided)",
    "margin": "median margin: score of the last chosen expert minus that of the next",
    "flipped": "flips: share of tokens with other experts than at the checkpoint before",
    "routed_share": "routed experts' share of what routed and shared experts add (norms)",
    "routed": "norm of what routed experts add over that of the residual stream",
    "shared": "norm of what the shared expert adds over that of the residual stream",
}
"""What is drawn of a :class:`RouterState` by depth, with its title."""


def _routers(report: ExpertReport) -> Html:
    states = report.checkpoints
    if not states:
        return Html("")
    drawn = [_by_depth(report, states, name, title) for name, title in _CHARTS.items()]
    last, missing = states[-1], [None] * len(report.layers)
    columns: dict[str, Sequence[object]] = {
        "overload ": last.overload,
        "entropy ": last.entropy,
        "margin ": last.margin,
        "10 % below ": last.margin_low,
        "flipped tokens ": last.flipped or missing,
        "replaced choices ": last.replaced or missing,
        "routed / residual ": last.routed,
        "shared / residual ": last.shared,
        "routed share ": last.routed_share,
    }
    caption = f"By layer; a line for each checkpoint ({', '.join(f'{s.step:,}' for s in states)}), older ones fainter."
    return Html(
        tag("h2", "Routers by depth")
        + tag("p", caption, "soft")
        + figures(chart for chart in drawn if chart is not None)
        + tag("h3", f"On the text, at step {last.step:,}")
        + _by_layer(report, columns)
    )


def _specialisation(report: ExpertReport) -> Html:
    result = report.specialisation
    if result is None:
        return Html("")
    letters = [_letter(i) for i in range(len(report.domains))]
    columns: dict[str, Sequence[object]] = {
        "bits a choice ": result.information_L.tolist(),
        "by chance ": result.by_chance_L.tolist(),
        "p ": result.p_L.tolist(),
        "adjusted p ": result.adjusted_p_L.tolist(),
        "strongest preference": [
            _strongest(result, layer, letters) for layer in range(len(report.layers))
        ],
        "significant": ["yes" if p < ALPHA else "no" for p in result.adjusted_p_L],
    }
    caption = (
        "How much the domain of a text says about the expert that one of its tokens chooses, and how much it would by chance: "
        "domains are permuted among whole sequences. The adjusted p holds for all layers together. The pictures show how often tokens of a domain (row) choose an expert "
        "(column), over how often all tokens do."
    )
    names = [str(e) for e in range(report.experts)]
    drawings = [
        (_matrix(ratio_DE, letters, names, f"specialisation of {layer}"), layer)
        for layer, ratio_DE in zip(report.layers, result.ratio_LDE, strict=True)
    ]
    domains = facts(
        (letter, f"{name} ({count} sequences)")
        for letter, (name, count) in zip(letters, report.domains.items(), strict=True)
    )
    return Html(
        tag("h2", "Specialisation by domain and depth")
        + tag("p", caption, "soft")
        + _by_layer(report, columns)
        + domains
        + figures(drawings)
        + _KEY
    )


def _strongest(result: Specialisation, layer: int, letters: Sequence[str]) -> str:
    domain, expert, ratio = result.strongest(layer)
    return f"domain {letters[domain]}, expert {expert}: {ratio:.1f} times as often"


def _letter(number: int) -> str:
    return chr(65 + number) if number < 26 else str(number)


def _pairs(report: ExpertReport) -> Html:
    names = [str(e) for e in range(report.experts)]
    parts: list[str] = []
    within = "Tokens that chose both experts"
    across = "Tokens that chose an expert (row) and one of the next layer (column)"
    for title, caption, matrices, symmetric in (
        ("Co-activation within a layer", within, report.together, True),
        ("Co-activation across neighbouring layers", across, report.following, False),
    ):
        if not matrices:
            continue
        layers = report.layers if symmetric else report.neighbours
        drawings = [
            (
                _matrix(_ratio(pairs.share_EE, pairs.chance_EE), names, names, f"{title}: {layer}"),
                f"{layer}: {pairs.strength:.0%} off chance",
            )
            for layer, pairs in zip(layers, matrices, strict=True)
        ]
        rows = [
            [layer, f"{i} and {j}", share, over]
            for layer, pairs in zip(layers, matrices, strict=True)
            for i, j, share, over in pairs.strongest(PAIRS, symmetric)
        ]
        listed = table(["layer", "experts", "share of the tokens ", "over chance "], rows)
        sentence = f"{caption}, over what these loads give by chance."
        parts += [
            tag("h2", title),
            tag("p", sentence, "soft"),
            figures(drawings),
            _KEY,
            details("the strongest pairs", listed),
        ]
    return Html("".join(parts))


def _ratio(share_EE: Array, chance_EE: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(chance_EE > 0, share_EE / chance_EE, np.nan)


def _favourites(report: ExpertReport) -> Html:
    if not report.favourites:
        return Html("")
    caption = (
        "Those that an expert takes most above what its load explains, with the ratio to that."
    )
    parts = [tag("h2", "Tokens that experts prefer"), tag("p", caption, "soft")]
    for layer, experts in zip(report.layers, report.favourites, strict=True):
        spelt = [[f"{tag('code', _visible(t.token))} {t.ratio:.1f}" for t in x] for x in experts]
        rows = [[expert, Html(" &nbsp; ".join(tokens))] for expert, tokens in enumerate(spelt)]
        parts.append(details(layer, table(["expert ", "tokens"], rows)))
    return Html("".join(parts))


def _visible(token: str) -> str:
    """Return a token with its white space to be seen."""
    return token.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥") or "(part of a character)"
