"""`telechat-moe plan simulate`: one step of a recipe on a device, in full."""

import argparse
from typing import Any

from telechat_moe.cli.arguments import add_device, add_documents, arg
from telechat_moe.cli.output import show_table, write_json, write_text
from telechat_moe.cli.verb import Verb
from telechat_moe.errors import UsageError


def run(args: argparse.Namespace) -> int:
    """Simulate, write, print; return the exit code."""
    from telechat_moe.recipe import load
    from telechat_moe.tools.plan.cost.posterior import unmeasured
    from telechat_moe.tools.plan.report import step as report
    from telechat_moe.tools.plan.report import timeline

    recipe = load(args.recipe, args.overrides, use="plan")
    packed: Any = None
    if args.documents:
        from telechat_moe.tools.plan.cost import documents

        lengths = documents.read_lengths(args.documents)
        packed = documents.pack(lengths, recipe.model_config.seq_length)
    share: float = packed.share if packed else 0.0
    step: Any = report.of_recipe(recipe, args.device, args.schedule, share)
    write_text("--html ", args.html, lambda: timeline.page(report.timeline(step)))
    write_text("--trace ", args.trace, lambda: timeline.chrome_trace(report.timeline(step)))
    figures = report.report(step)
    loads: Any = _loads(args, step, figures)
    code = 0 if figures["fits"] else 1
    if write_json(args.json, figures):
        return code
    sentence = unmeasured(args.device, step.architecture, [step.layout])
    for note in [*report.notes(step), *([sentence] if sentence else [])]:
        print(note)
    if packed:
        print(packed.told(args.documents))
    for table in report.tables(step) + loads:
        print(f"\n{table.title}\n")
        show_table(table.headers, table.rows)
    if code:
        print("\na stage does not fit: recompute more, or spread it over more devices")
    return code


def _loads(args: argparse.Namespace, step: Any, figures: dict[str, Any]) -> list[Any]:
    """Return the table of --expert-loads, if it is given, and add it to the figures."""
    if args.expert_copies < 0 or (args.expert_copies and not args.expert_loads):
        expected = "expected 1 or more, with --expert-loads"
        raise UsageError(f"--expert-copies {args.expert_copies}: {expected}")
    if not args.expert_loads:
        return []
    from telechat_moe.tools.plan.report import expert_loads

    placements = expert_loads.judge(step, args.expert_loads, args.expert_copies)
    figures["expert_loads"] = expert_loads.data(placements)
    return [expert_loads.table(placements)]


VERB = Verb(
    name="simulate",
    help="predict one step: time, memory, bubble, timeline",
    description="Predict time and memory of one training step of a recipe, stage by stage.",
    notes="Times are predictions; benchmarks/plan_published compares them with published measurements.",
    examples="telechat-moe plan simulate pangu_ultra_moe/pretrain_718b.yaml --device ascend-910b --html step.html "
    "--trace step.json",
    exits={1: "a stage does not fit into the device's memory"},
    recipe=True,
    overrides="override a value of the recipe",
    arguments=[
        add_device,
        arg("--schedule S", "instead of the recipe's: zb-h1, zb-v, dualpipev, overlap ..."),
        add_documents,
        arg(
            "--expert-loads FILE",
            "a run's metrics.jsonl: the step with its loads, as they are and with experts moved where it pays",
        ),
        arg(
            "--expert-copies N",
            "with --expert-loads: also with N slots of each device for copies of hot experts",
            0,
        ),
        arg("--html FILE", "write the timeline as a page"),
        arg("--trace FILE", "write a Chrome trace (Perfetto)"),
    ],
    run=run,
)
