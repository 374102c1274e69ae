"""`telechat-moe plan search`: which architecture of a space trains fastest on a device, within a budget."""

import argparse
from typing import Any

from telechat_moe.cli.arguments import arg
from telechat_moe.cli.output import show_table, write_json, write_text
from telechat_moe.cli.verb import Verb
from telechat_moe.units import GIB, count_text

NOTES = """\
SPACE is YAML:
  recipe: telechat3_moe/pretrain_105b_a4b_4k.yaml    what is not chosen
  device: ascend-910b
  devices: 256
  memory_gib: 55
  global_batch: 512
  choices: {hidden: [2560, 3072], layers: [40, 45, 50], experts: [128, 192, 256], top_k: [4, 8], moe_ffn: [1024, 1536]}
  budget: {parameters: [90.e+9, 120.e+9], active_parameters: [4.e+9, 6.e+9]}
  align: {width: 256, block: 16}                     widths, and each device's part of them
choices: hidden, layers, dense_layers, heads, ffn, experts, top_k, shared_experts, moe_ffn, q_lora_rank, kv_lora_rank.
The front are the models that no other beats both in parameters and in tokens a second. All are scored with layers
spread evenly, in closed form; then the models of the front that are printed are planned as plan layout does, every
layer placed and the step simulated, in --place seconds together (gap: how far the step may be from the best one).
"""


def run(args: argparse.Namespace) -> int:
    """Score, write, print; return the exit code."""
    from telechat_moe.tools.plan.search import model_search as models

    space: Any = models.read_space(args.space)
    result: Any = models.search_models(space)
    shown = result.front[: args.top]
    placed: Any = [None] * len(shown)
    if args.place > 0:
        placed = models.plan_models(space, shown, args.place)

    def row(c: Any) -> list[str]:
        a = c.architecture
        return [
            count_text(a.parameters), count_text(a.active_parameters), f"{c.tokens_per_s:.1f}", f"{c.step_s:.3f}",
            f"{c.peak_bytes / GIB:.1f}", models.describe_model(a), c.layout.short(),
        ]  # fmt: skip

    headers = ["parameters ", "active ", "tokens/s a device ", "step, s ", "peak, GiB "]
    headers += ["model", "layout"]

    def planned(p: Any) -> list[str]:
        if p is None:
            return ["-"] * len(extra)
        return [f"{p.tokens_per_s:.1f}", f"{p.step_s:.3f}", f"{p.gap:.2%}", p.layout.short()]

    extra = ["placed: tokens/s ", "step, s ", "gap ", "layout"]
    front = [row(c) + planned(p) for c, p in zip(shown, placed, strict=True)]
    refused = ", ".join(f"{n:,} {reason}" for reason, n in result.refused.most_common() if n)
    summary = f"{result.number:,} architectures: {len(result.scored):,} scored; refused: {refused or 'none'}"
    write_text("--html ", args.html, lambda: _page(summary, headers, result, row))
    data: dict[str, Any] = {
        "architectures": result.number,
        "scored": len(result.scored),
        "refused": dict(result.refused),
        "columns": [h.strip() for h in headers],
        "front": [row(c) for c in result.front],
        "placed_columns": [h.strip() for h in extra],
        "placed": [planned(p) for p in placed],
        "fastest": [row(c) for c in result.scored[: args.top]],
    }
    if not write_json(args.json, data):
        print(summary + "\n\nfront")
        show_table([*headers, *extra], front)
        print("\nfastest")
        show_table(headers, data["fastest"])
    return 0 if result.scored else 1


def _page(summary: str, headers: list[str], result: Any, row: Any) -> str:
    from telechat_moe import html

    def points(scored: Any) -> list[tuple[float, float, str]]:
        rows = [(c.architecture.parameters / 1e9, c.tokens_per_s, row(c)[5]) for c in scored]
        return [(x, y, f"{text}: {x:.1f}B, {y:.1f} tokens/s") for x, y, text in rows]

    labels = ("parameters, 10^9", "tokens/s a device")
    parts = [
        html.tag("p", summary, "sentence"),
        html.front_chart(points(result.front), points(result.scored[:4000]), labels),
        "<h2>Front</h2>",
        html.table(["# ", *headers], [[i, *row(c)] for i, c in enumerate(result.front, 1)]),
    ]
    return html.page("Model search", parts)


VERB = Verb(
    name="search",
    help="score architectures for a device and a budget",
    description="Score every architecture of a space on a device and print those that train fastest.",
    notes=NOTES,
    examples="telechat-moe plan search space.yaml --html models.html",
    exits={1: "no architecture is allowed and fits"},
    arguments=[
        arg("SPACE", "YAML file with the choices"),
        arg("--top K", "models to print (default 20)", 20),
        arg(
            "--place S",
            "seconds in which models of the front are planned (default 60; 0: not)",
            60.0,
        ),
        arg("--html FILE", "write a page with the front"),
    ],
    run=run,
)
