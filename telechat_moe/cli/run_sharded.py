"""`telechat-moe run-sharded`: run every rank's graph on CPU processes for a few steps."""

import argparse
import sys
from pathlib import Path
from typing import Any

from telechat_moe.cli.arguments import arg
from telechat_moe.cli.output import show_table, write_json
from telechat_moe.cli.verb import Verb
from telechat_moe.errors import UsageError

BOUND = 1e-5
NOTES = f"""\
Each rank's training step is compiled by MindSpore's parallel front end as for Ascend, with plain operators, exported
as MindIR, its collectives rewritten into the one that CPU has, and run under msrun on the recipe's data. The report
says what differs from the graph for Ascend. --compare runs the same steps in one process and fails where a loss
differs by more than {BOUND:g} (relative; float32).
"""


def run(args: argparse.Namespace) -> int:
    """Run, compare, report; return the exit code."""
    from telechat_moe.cli.judge import require

    recipe = require(args.recipe, args.overrides, use="train", overwrite=True, allow_outside=True)
    if args.processes != recipe.devices or recipe.devices == 1:
        raise UsageError(
            f"--processes {args.processes}: {recipe.source} is laid out for {recipe.devices} device(s) "
            f"({recipe.degrees_text}); "
            + ("set a layout" if recipe.devices == 1 else f"use --processes {recipe.devices}")
        )
    from telechat_moe.launch import sharded_run
    from telechat_moe.tools.plan.schedules.ranks import rank_orders

    keep = Path(args.keep) if args.keep else None
    orders = rank_orders(recipe)
    report = sharded_run.run(recipe, args.steps, compare=args.compare, keep=keep, orders=orders)
    if not write_json(args.json, report):
        _show(report)
    if not report["finished"]:
        return 130
    worst = _worst(report)
    if worst > BOUND:
        text = f"differs from one process by {worst:.1e}, more than {BOUND:g}"
        print(f"error: a loss or gradient norm {text}", file=sys.stderr)
        return 1
    return 0


def _worst(report: dict[str, Any]) -> float:
    """Return the largest relative error; one that is not a number counts as infinite."""
    errors = [e for row in report.get("relative_errors", []) for e in row.values()]
    return max((e if e == e else float("inf") for e in errors), default=0.0)


def _show(report: dict[str, Any]) -> None:
    print(f"{report['recipe']}: {report['layout']}, {report['processes']} processes\n")
    rows: list[list[str]] = []
    single = report.get("single")
    for i, step in enumerate(report["steps"]):
        row = [str(step["step"]), f"{step['loss']:.7f}", f"{step['grad_norm']:.6f}"]
        if single:
            errors = report["relative_errors"][i]
            row += [f"{single[i]['loss']:.7f}", f"{errors['loss']:.1e}"]
            row.append(f"{max(errors.values()):.1e}")
        rows.append(row)
    columns = ["one process ", "relative error ", "worst of all "] if single else []
    show_table(["step ", "loss ", "gradient norm ", *columns], rows)
    differences = report["differences"]
    print(f"\nwhat ran instead of Ascend's graph ({differences['counted']}):\n")
    forms = (*differences["operators"], *differences["collectives"])
    rows = [[row["ascend"], str(row["count"]), row["cpu"]] for row in forms]
    show_table(["Ascend", "count ", "CPU"], rows)
    for name, count in differences["unchanged_collectives"].items():
        print(f"{name}: {count} as they are")
    print(f"order: {differences['order']}")
    print(f"dispatch: {differences['dispatch']}")
    for path in report.get("kept", []):
        print(f"kept {path}")


VERB = Verb(
    name="run-sharded",
    help="run the ranks' graphs on CPU processes and compare them with one process",
    description="Run the training step of every rank on CPU processes for a few steps.",
    notes=NOTES,
    examples="telechat-moe run-sharded my_recipe.yaml --processes 4 --steps 10 --compare",
    exits={
        1: "losses differ, or a process died",
        2: "usage (--processes is not the recipe's number of devices)",
        3: "bad recipe or data",
    },
    json_keys="recipe, layout, processes, finished, steps (list of step, loss, lm_loss, mtp_loss, aux_loss, "
    "grad_norm), differences (operators, only_cpu, collectives, unchanged_collectives, order, dispatch), "
    "kept, single (as steps), relative_errors.",
    recipe=True,
    overrides="override a value of the recipe",
    arguments=[
        arg("--processes N", "the recipe's devices", type=int, required=True),
        arg("--steps K", "steps (default 5)", 5),
        arg("--compare", "run the same steps in one process, too"),
        arg("--keep FOLDER", "keep the MindIR files in a new folder"),
    ],
    run=run,
)
