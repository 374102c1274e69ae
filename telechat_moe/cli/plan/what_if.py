"""`telechat-moe plan what-if`: another device, other links, more devices, and the days of a run with failures."""

import argparse
import math
import re
from collections.abc import Callable
from typing import Any

from telechat_moe.cli.arguments import add_device, arg
from telechat_moe.cli.output import show_table, write_json, write_text
from telechat_moe.cli.verb import Verb
from telechat_moe.errors import UsageError

HEADERS = ["", "as it is ", "changed "]

POWERS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def run(args: argparse.Namespace) -> int:
    """Simulate both, print; return the exit code."""
    from telechat_moe.recipe import load
    from telechat_moe.tools.plan.cost.device import load_device
    from telechat_moe.tools.plan.cost.posterior import unmeasured
    from telechat_moe.tools.plan.report import what_if

    settings = _settings(args.set_device)
    tokens = _tokens(args.tokens) if args.tokens else None
    failing = [name for name in ("mtbf", "checkpoint_s", "restart_s") if getattr(args, name)]
    if failing and (tokens is None or not args.mtbf):
        raise UsageError(f"--{failing[0].replace('_', '-')}: needs --tokens and --mtbf")
    if min(args.mtbf, args.checkpoint_s, args.restart_s) < 0:
        raise UsageError(
            "--mtbf, --checkpoint-s, --restart-s: expected numbers that are not negative"
        )
    recipe = load(args.recipe, args.overrides, use="plan")
    steps: Any = what_if.steps_of(recipe, load_device(args.device), settings, args.devices)
    failures = {
        "mtbf_s": args.mtbf * 3600 or math.inf,
        "checkpoint_s": args.checkpoint_s,
        "restart_s": args.restart_s,
    }
    data = {
        name: what_if.report(step, tokens, **failures)
        for name, step in zip(("as_is", "changed"), steps, strict=True)
    }
    rows = _rows(*data.values())
    layouts = [step.layout for step in steps]
    sentence = unmeasured(args.device, steps[0].architecture, layouts)
    write_text("--html ", args.html, lambda: _page(args, rows, sentence))
    code = 0 if data["changed"]["fits"] else 1
    if not write_json(args.json, data):
        show_table(HEADERS, rows)
        if sentence:
            print(f"\n{sentence}")
    return code


def _page(args: argparse.Namespace, rows: list[list[str]], sentence: str) -> str:
    from telechat_moe import html

    words = [f"{args.recipe} on {args.device}", *args.set_device]
    words += [f"{args.devices:,} devices"] if args.devices else []
    words += [f"a failure of one device every {args.mtbf:,.0f} hours"] if args.mtbf else []
    note = f"Predicted, not measured: the cost model's error is in docs/plan.md. {sentence}"
    parts = [html.tag("p", "; ".join(words), "sentence"), html.table(HEADERS, rows)]
    return html.page("What if", [*parts, html.tag("p", note, "soft")])


def _settings(texts: list[str]) -> dict[str, float]:
    settings: dict[str, float] = {}
    for text in texts:
        key, _, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not 0 <= number < math.inf or key in settings:
            raise UsageError(f"--set-device {text}: expected KEY=NUMBER, each key once")
        settings[key] = number
    return settings


def _tokens(text: str) -> float:
    match = re.fullmatch(r"([\d.]+)([KMBT]?)", text)
    try:
        tokens = float(match[1]) * POWERS[match[2]] if match else 0.0
    except ValueError:
        tokens = 0.0
    if not tokens > 0:
        raise UsageError(f"--tokens {text}: expected a number such as 15T or 300B")
    return tokens


def _rows(*sides: dict[str, Any]) -> list[list[str]]:
    from telechat_moe.units import gib_text, seconds_text

    def row(name: str, write: Callable[[dict[str, Any]], str]) -> list[str]:
        return [name, *(write(side) for side in sides)]

    rows = [
        row("layout", lambda d: d["layout"]),
        row("devices", lambda d: f"{d['devices']:,}"),
        row("step", lambda d: seconds_text(d["step_s"])),
        row("tokens/s", lambda d: f"{d['tokens_per_s']:,.0f}"),
        row("peak memory of a device", lambda d: gib_text(d["peak_bytes"])),
        row("fits", lambda d: "yes" if d["fits"] else "no"),
    ]
    if "run" not in sides[0]:
        return rows
    return [
        *rows,
        row("steps", lambda d: f"{d['run']['steps']:,}"),
        row("days of training alone", lambda d: f"{d['run']['training_s'] / 86400:,.1f}"),
        row("days expected", lambda d: f"{d['run']['expected_s'] / 86400:,.1f}"),
        row("device-hours", lambda d: f"{d['run']['device_hours']:,.0f}"),
        row("failures", lambda d: f"{d['run']['failures']:,.0f}"),
        row("checkpoints", lambda d: f"{d['run']['checkpoints']:,.0f}"),
        row("minutes between them", lambda d: f"{d['run']['interval_s'] / 60:,.1f}"),
    ]


VERB = Verb(
    name="what-if",
    help="another device or number of devices, and the days of a run with failures",
    description="Predict a recipe's step as it is and with another device, other links or more devices; with --tokens the "
    "days, device-hours and checkpoints of a run.",
    notes="KEY is a figure of the device's description, such as inter_bandwidth, peak_flops.bf16 or constants.inter_share (half of "
    "it: links oversubscribed by two). Checkpoints are written at Daly's interval (2006).",
    examples="telechat-moe plan what-if telechat3_moe/pretrain_105b_a4b_4k.yaml --set-device inter_bandwidth=50e9 --tokens 15T "
    "--mtbf 50000 --checkpoint-s 30 --restart-s 600",
    exits={1: "what is changed does not fit into the device's memory"},
    json_keys="as_is and changed: layout, devices, step_s, tokens_per_s, peak_bytes, fits, run (steps, training_s, expected_s, ...).",
    recipe=True,
    overrides="override a value of the recipe",
    arguments=[
        add_device,
        arg(
            "--set-device KEY=VALUE",
            "another figure of the device; repeatable",
            [],
            action="append",
        ),
        arg("--devices N", "other data parallelism, the same global batch", type=int),
        arg("--tokens N", "tokens of a run, as 15T or 300B"),
        arg("--mtbf H", "mean hours between failures of one device (default: none fails)", 0.0),
        arg("--checkpoint-s S", "seconds that training waits for a checkpoint", 0.0),
        arg("--restart-s S", "seconds from a failure until training goes on", 0.0),
        arg("--html FILE", "write the comparison as a page"),
    ],
    run=run,
)
