"""What the benchmarks came to: targets reached or not, a table, a page with bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.ops.timing import Case
from telechat_moe import html
from telechat_moe.html import Html


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
    """Return the geometric mean; None of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def _least(values: Sequence[float]) -> float | None:
    return min(values) if values else None


def _ratios(
    cases: Sequence[Case], group: str, *peers: str, keep: Callable[[Case], bool] | None = None
) -> list[float]:
    """Return for each case how many times faster we are than the fastest of the peers."""
    found = []
    for case in cases:
        if case.group == group and (keep is None or keep(case)):
            ratios = [r for r in map(case.ratio, peers) if r is not None]
            found += [min(ratios)] if ratios else []
    return found


def _elements(case: Case) -> int:
    return math.prod(int(n) for n in case.shape.split("x"))


def targets(cases: Sequence[Case]) -> list[Target]:
    """Return the targets for the cases that were run."""
    inductor = _ratios(cases, "vector", "inductor")
    rows = [
        Target("vector: TorchInductor's speed, geometric mean", 1.0, geometric_mean(inductor)),
        Target("vector: TorchInductor's speed, worst case", 0.7, _least(inductor)),
        Target(
            "vector: torch eager's speed, geometric mean",
            2.0,
            geometric_mean(_ratios(cases, "vector", "torch eager")),
        ),
        Target(
            "vector: MindSpore O0's speed above 100k elements, both in a graph, geometric mean",
            3.0,
            geometric_mean(_in_graph(cases)),
        ),
    ]
    compile_us = [c.compile for c in cases if "encode" in c.compile]
    if compile_us:
        rows.append(
            Target(
                "compile: encodings a microsecond, worst median",
                1.0,
                1 / max(c["encode"] for c in compile_us),
            )
        )
        rows.append(
            Target(
                "compile: trace + build + encode, 100 us over the worst median but '200 adds'",
                1.0,
                100
                / max(
                    c.compile["trace, build, encode"]
                    for c in cases
                    if "encode" in c.compile and c.op != "200 adds"
                ),
            )
        )
        cold = [c["inductor"] for c in compile_us if "inductor" in c]
        if cold:
            rows.append(
                Target(
                    "compile: Inductor's slowest over our slowest encoding",
                    1e5,
                    max(cold) / max(c["encode"] for c in compile_us),
                )
            )
    for what, block in (("operators", False), ("decoder block", True)):
        for peer in ("mindspore O0", "inductor, cold"):
            ratios = [
                c.best[peer] / c.best["ours in a graph"]
                for c in cases
                if c.group == "dynamic"
                and (c.op == "decoder block") == block
                and {peer, "ours in a graph"} <= c.best.keys()
            ]
            name = f"dynamic lengths, {what} in a MindSpore graph: total time of {peer}"
            rows.append(Target(name, 5.0, _least(ratios)))
    rows += [
        Target(
            "MoE block: HF's loop, 16 experts",
            1.8,
            _least(
                _ratios(cases, "moe", "torch loop (HF)", keep=lambda c: c.shape.startswith("16x"))
            ),
        ),
        Target(
            "MoE block: HF's loop, 32 experts",
            1.4,
            _least(
                _ratios(cases, "moe", "torch loop (HF)", keep=lambda c: c.shape.startswith("32x"))
            ),
        ),
        Target(
            "MoE block: torch's grouped_mm", 1.3, _least(_ratios(cases, "moe", "torch grouped_mm"))
        ),
        Target(
            "grouped matmul: share of the GEMM rate from 128 rows, forward",
            0.9,
            _least(
                [
                    c.extra["share of the GEMM rate, forward"]
                    for c in cases
                    if c.op == "GMM" and " 64 rows" not in c.shape
                ]
            ),
        ),
        Target(
            "grouped matmul: share of the GEMM rate from 64 rows, all",
            0.8,
            _least([v for c in cases if c.op == "GMM" for v in c.extra.values()]),
        ),
        Target(
            "GMMAdd: dW, then add", 1.5, _least(_ratios(cases, "grouped matmul", "dW, then add"))
        ),
    ]
    best_torch = _ratios(cases, "attention", "torch eager", "torch sdpa", "torch sdpa, v padded")
    rows += [
        Target("attention: torch's best path, each shape", 1.5, _least(best_torch)),
        Target("attention: torch's best path, geometric mean", 1.8, geometric_mean(best_torch)),
        Target("cross-entropy: torch", 2.0, _least(_ratios(cases, "cross-entropy", "torch"))),
        Target("AdamW: torch fused", 1.2, _least(_ratios(cases, "adamw", "torch fused"))),
        Target(
            "AdamW: MindSpore's", 5.0, _least(_ratios(cases, "adamw", "mindspore AdamWeightDecay"))
        ),
    ]
    return rows


def _in_graph(cases: Sequence[Case]) -> list[float]:
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
