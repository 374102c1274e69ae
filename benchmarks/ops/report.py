"""Report the benchmarks' results: targets reached or not, a table, a page with bars."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from benchmarks.ops import sets
from benchmarks.ops.blocks import COPY, SHARE
from benchmarks.ops.timing import Measurement
from telechat_moe import html
from telechat_moe.html import Html

Summary = Callable[[Sequence[float]], float | None]


class Target(NamedTuple):
    """A number that we set out to reach."""

    name: str
    wanted: float
    reached: float | None

    @property
    def met(self) -> bool | None:
        """None where the peer is missing."""
        return None if self.reached is None else self.reached >= self.wanted


def geometric_mean(values: Sequence[float]) -> float | None:
    """Return the geometric mean; None if there are no values."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def _least(values: Sequence[float]) -> float | None:
    return min(values) if values else None


def _ratios(cases: Sequence[Measurement], group: str, *peers: str) -> list[float]:
    """Return for each case how many times faster we are than the fastest of the peers."""
    found = []
    for case in cases:
        if case.group == group:
            ratios = [r for r in map(case.ratio, peers) if r is not None]
            found += [min(ratios)] if ratios else []
    return found


def _elements(case: Measurement) -> int:
    return math.prod(int(n) for n in case.shape.split("x"))


def _share(cases: Sequence[Measurement], op: str) -> list[float]:
    """Return an operator's shares of the rate of multiply-adds in registers."""
    return [
        share
        for c in cases
        if c.group == "grouped matmul" and c.op == op
        for share in c.extra.values()
    ]


def _dynamic(cases: Sequence[Measurement], peer: str, block: bool) -> list[float]:
    """Return how many times longer a peer takes than our graph over random lengths."""
    return [
        c.best[peer] / c.best["ours in a graph"]
        for c in cases
        if c.group == "dynamic"
        and (c.op == "decoder block") == block
        and {peer, "ours in a graph"} <= c.best.keys()
    ]


def _compilation(cases: Sequence[Measurement]) -> list[Target]:
    """Return the targets of compile times."""
    times = [(c.op, c.compile) for c in cases if "encode" in c.compile]
    if not times:
        return []
    slowest = max(c["encode"] for _, c in times)
    usual = max(c["trace, build, encode"] for op, c in times if op != "200 adds")
    cold = [c["inductor"] for _, c in times if "inductor" in c]
    found = [
        Target("compile: encodings a microsecond, worst median", 1.0, 1 / slowest),
        Target(
            "compile: trace + build + encode, 100 us over the worst median but '200 adds'",
            1.0,
            100 / usual,
        ),
    ]
    if cold:
        name = "compile: Inductor's slowest over our slowest encoding"
        found.append(Target(name, 1e5, max(cold) / slowest))
    return found


def targets(cases: Sequence[Measurement]) -> list[Target]:
    """Return the targets for the cases that were run."""
    ratios, mean = partial(_ratios, cases), geometric_mean
    attention = ratios("attention", "torch eager", "torch sdpa", "torch sdpa, v padded")
    inductor, eager = ratios("vector", "inductor"), ratios("vector", "torch eager")
    rows: list[tuple[str, float, Summary, list[float]]] = [
        ("vector: TorchInductor's speed, geometric mean", 1.0, mean, inductor),
        ("vector: TorchInductor's speed, worst case", 0.7, _least, inductor),
        ("vector: torch eager's speed, geometric mean", 2.0, mean, eager),
        ("vector: MindSpore O0's speed above 100k elements, both in a graph, geometric mean", 3.0, mean, _in_graph(cases)),
    ]  # fmt: skip
    for what, block in (("operators", False), ("decoder block", True)):
        for peer in ("mindspore O0", "inductor, cold"):
            name = f"dynamic lengths, {what} in a MindSpore graph: total time of {peer}"
            rows.append((name, 5.0, _least, _dynamic(cases, peer, block)))
    for experts, wanted in (("16", 1.8), ("32", 1.4)):
        mine = [c for c in cases if c.shape.startswith(f"{experts}x")]
        name = f"MoE block: HF's loop, {experts} experts"
        rows.append((name, wanted, _least, _ratios(mine, "moe", "torch loop (HF)")))
    rows += [
        ("MoE block: torch's grouped_mm", 1.3, _least, ratios("moe", "torch grouped_mm")),
        (f"matmul: {SHARE}, 1024 cubed", 0.9, _least, _share(cases, "matmul")),
        (f"grouped matmul: {SHARE}, from 32 rows", 0.85, _least, _share(cases, "GMM")),
        ("GMMAdd: dW, then add", 1.5, _least, ratios("grouped matmul", "dW, then add")),
        ("attention: torch's best path, each shape", 1.5, _least, attention),
        ("attention: torch's best path, geometric mean", 1.8, mean, attention),
        ("cross-entropy: torch", 2.0, _least, ratios("cross-entropy", "torch")),
        ("AdamW: torch fused", 1.0, _least, ratios("adamw", "torch fused")),
        ("AdamW: share of the copy bandwidth", 0.95, _least, ratios("adamw", COPY)),
        ("AdamW: MindSpore's", 5.0, _least, ratios("adamw", "mindspore AdamWeightDecay")),
    ]  # fmt: skip
    found = [Target(name, wanted, summary(values)) for name, wanted, summary, values in rows]
    return [*found[:4], *_compilation(cases), *found[4:]]


def _in_graph(cases: Sequence[Measurement]) -> list[float]:
    pair = {"mindspore O0", "ours in a graph"}
    return [
        c.best["mindspore O0"] / c.best["ours in a graph"]
        for c in cases
        if c.group == "vector" and pair <= c.best.keys() and _elements(c) > 100_000
    ]


def page(result: dict[str, Any]) -> str:
    """Return a self-contained HTML page."""
    rows = [
        [t["name"], t["wanted"], html.tag("span", t["reached"], "good" if t["met"] else "bad")]
        for t in result["targets"]
        if t["reached"] is not None
    ]
    parts = [
        html.tag(
            "p",
            f"{result['machine']}. Best of many calls in turns, microseconds; shorter is better; with dynamic lengths "
            "the sum over all calls, compilation included. torch with malloc tuned.",
            "soft",
        ),
        html.table(["target (times faster, or share)", "wanted ", "reached "], rows),
    ]
    if kept := result.get("sets"):
        parts += [
            html.tag("h2", f"instruction sets of {kept['processor']}"),
            html.table(*sets.table(kept)),
        ]
        parts.append(html.tag("p", sets.never(kept), "soft"))
    for group in dict.fromkeys(c["group"] for c in result["cases"]):
        parts.append(html.tag("h2", group))
        parts += [_bars(c) for c in result["cases"] if c["group"] == group]
    return html.page("telechat-moe operators", parts)


def _bars(case: dict[str, Any]) -> Html:
    longest = max(case["best"].values())
    error = "" if case["error"] is None else f", error {case['error']:.0e}"
    said = html.tag("span", f"{case['shape']}, {case['threads']} threads{error}", "soft")
    rows: list[list[object]] = []
    for peer, us in sorted(case["best"].items(), key=lambda x: x[1]):
        worst = case["extra"].get(f"{peer}: worst call")
        note = "" if worst is None else f", worst call {worst:,.0f}"
        ours = "ours" if peer.startswith(case["ours"]) else ""
        rows.append([peer, html.bar(us / longest, ours, f"{us:,.0f}{note}")])
    return Html(f"<h3>{html.html(case['op'])} {said}</h3>{html.table((), rows)}")
