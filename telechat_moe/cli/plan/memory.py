"""`telechat-moe plan memory`: will a recipe fit into memory, and what to change first."""

import argparse
from typing import Any

from telechat_moe.cli.arguments import add_device, arg
from telechat_moe.cli.output import show_table, write_json
from telechat_moe.cli.verb import Verb
from telechat_moe.errors import UsageError
from telechat_moe.units import parse_size


def run(args: argparse.Namespace) -> int:
    """Predict, print; return the exit code."""
    from telechat_moe.tools.plan.cost.device import load_device
    from telechat_moe.tools.plan.cost.posterior import unmeasured
    from telechat_moe.tools.plan.report import memory

    margin = memory.MARGIN if args.margin is None else args.margin
    if not 0 <= margin < 1:
        expected = "expected a share of the peak, from 0 to less than 1"
        raise UsageError(f"--margin {margin:g}: {expected}")
    room = args.memory and parse_size("--memory", args.memory)
    host = parse_size("--host-memory", args.host_memory) if args.host_memory else float("inf")
    device = load_device(args.device)
    limits = (device, margin, room, args.expert_loads, host)
    forecast: Any = memory.answer(args.recipe, args.overrides, *limits)
    code = 0 if forecast.fits(forecast.step) else 1
    if write_json(args.json, memory.report(forecast)):
        return code
    for line in (memory.sentence(forecast), *memory.routing(forecast), memory.next_thing(forecast)):
        if line:
            print(line)
    print(
        f"Probability to fit: {forecast.probability:.0%} (assumed ranges of fragmentation and buffers: docs/plan_memory.md)."
    )
    step = forecast.step
    if sentence := unmeasured(args.device, step.architecture, [step.layout]):
        print(f"Times: {sentence}.")
    for table in memory.tables(forecast):
        print(f"\n{table.title}\n")
        show_table(table.headers, table.rows)
    return code


VERB = Verb(
    name="memory",
    help="will a recipe fit, and what to change first",
    description="Predict the memory of each stage of a recipe, the imbalance of the experts that still fits, and what "
    "single changes would give.",
    notes="The limit is --memory, else context.max_device_memory, else the device's memory without what its runtime takes\n"
    "(docs/plan_memory.md).",
    examples="telechat-moe plan memory pangu_ultra_moe/pretrain_718b.yaml --device ascend-910b",
    exits={1: "a stage does not fit, with the margin"},
    json_keys="fits, probability, limit_bytes, margin, stages, largest_load_factor, recorded_loads, first, changes",
    recipe=True,
    overrides="override a value of the recipe",
    arguments=[
        add_device,
        arg("--memory SIZE", "what the step may use of a device, as 55GiB"),
        arg(
            "--margin SHARE",
            "added to the peak for fragmentation and the model's error (default 0.05)",
            type=float,
        ),
        arg(
            "--host-memory SIZE",
            "what a device may use of its host's memory for swapped activations, as 64GiB (default: any)",
        ),
        arg("--expert-loads FILE", "a run's metrics.jsonl, with loads of experts"),
    ],
    run=run,
)
