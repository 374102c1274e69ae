"""`telechat-moe plan layout`: the fastest layout of a recipe's model on so many devices, proven."""

import argparse
import os
from pathlib import Path
from typing import Any

from telechat_moe.cli.arguments import add_documents, arg
from telechat_moe.cli.output import show_table, write_json, write_text
from telechat_moe.cli.progress import bars
from telechat_moe.cli.verb import Verb
from telechat_moe.errors import BadInputError, UsageError
from telechat_moe.units import parse_size

NOTES = """\
--fix takes dp, tp, cp, pp, vpp, ep, etp, micro_batch, micro_batches, sp (false, true), zero, schedule (1f1b, interleaved,
zb-v), recompute (none, full, norm+activation, swap) and ends (last, mtp-before); zb-v, swap, mtp-before, and zero=2 and 3
need --beyond-recipes, and --out refuses them. Proven: no layout is faster than the bound, which the step exceeds by 0.5 % at
most. docs/plan_layout.md says what that means.
"""
EXAMPLES = """\
telechat-moe plan layout telechat3_moe/pretrain_105b_a4b_4k.yaml --devices 256 --device ascend-910b --memory 55GiB \\
  --out my_recipe.yaml
telechat-moe check my_recipe.yaml --devices 256
"""


def run(args: argparse.Namespace) -> int:
    """Search, write, print; return the exit code."""
    from telechat_moe.recipe import find, mode1

    if min(args.devices, args.top, args.pick) < 1 or args.draws < 0 or not args.limit > 0:
        raise UsageError(
            f"--devices {args.devices} --top {args.top} --pick {args.pick} --draws {args.draws} --limit {args.limit:g}: "
            "expected at least 1 (draws 0), and a limit above 0 seconds"
        )
    if args.out and mode1.kind_of_file(find(args.recipe), args.overrides) == "mode 1":
        text = f"--out writes recipes of mode 0: `telechat-moe cp {args.recipe} DEST --to mindformers-1`, and plan DEST"
        raise BadInputError(f"{args.recipe}: a recipe of mode 1; {text}")
    for file in (args.out, args.why, args.html, args.json):
        _writable(file if file != "-" else None)
    room = args.memory and parse_size("--memory", args.memory)
    from telechat_moe.tools.plan.report import layouts as report
    from telechat_moe.tools.plan.search import planner

    with bars() as move:

        def progress(solved: int) -> None:
            move("layouts solved", solved, None)

        plan: Any = planner.find(
            args.recipe,
            args.overrides,
            args.devices,
            args.device,
            room,
            args.global_batch,
            args.fix,
            args.beyond_recipes,
            args.documents,
            top=args.top,
            limit_s=args.limit,
            progress=progress,
        )
    data: Any = report.summary(plan, args.top)
    data["choice"] = _choice(plan, args) if plan.best and args.draws else None
    if not write_json(args.json, data):
        _show(data, report.ranked(data), report.too_large(data))
    if args.out and plan.best:
        text = planner.recipe_text
        write_text("", args.out, lambda: text(plan, args.recipe, args.overrides, args.pick))
    if args.why:
        write_text("", args.why, lambda: "\n".join(report.why_not(plan)) + "\n")
    if args.html:
        write_text("", args.html, lambda: report.page(plan, planner.front(plan), data))
    return 0 if plan.optimal else 4 if plan.timed_out or plan.best else 1


def _choice(plan: Any, args: argparse.Namespace) -> dict[str, Any] | None:
    """Return how sure the choice is, or None where nothing is known of the device's constants."""
    from telechat_moe.tools.plan.cost.posterior import load_posterior
    from telechat_moe.tools.plan.report import choice

    posterior = load_posterior(args.device)
    if posterior is None:
        return None
    with bars() as move:

        def progress(searched: int, total: int) -> None:
            move("searching with drawn constants", searched, total)

        steps: Any = choice.candidates(plan, posterior, args.draws, args.limit, progress)
    return choice.choice(plan.architecture, steps, plan.device, posterior)


def _show(data: dict[str, Any], table: Any, notes: list[str]) -> None:
    from telechat_moe.tools.plan.report import layouts as report

    print(report.question(data))
    print(report.counts(data))
    print(data["verdict"])
    if data["layouts"]:
        print()
        show_table(*table)
        for note in notes:
            print(note)
        print()
        for name, value in report.placement(data["layouts"][0]):
            print(f"{name}: {value}")
    if data["choice"]:
        from telechat_moe.tools.plan.report import choice

        print()
        for line in choice.lines(data["choice"]):
            print(line)


def _writable(file: str | None) -> None:
    """Refuse a file that cannot be written, before a search that takes minutes."""
    if file is None:
        return
    folder = Path(file).parent
    if not folder.is_dir():
        raise UsageError(f"{file}: its folder does not exist")
    if Path(file).is_dir() or not os.access(file if Path(file).exists() else folder, os.W_OK):
        raise UsageError(f"{file}: cannot be written")


VERB = Verb(
    name="layout",
    help="find the fastest layout for a number of devices, with a proof",
    description="Find the fastest layout of a recipe's model for a number of devices, with a proof that none is faster.",
    notes=NOTES,
    examples=EXAMPLES,
    exits={
        0: "proven to 0.5 %",
        1: "no layout fits in memory",
        4: "not proven within --limit: best found",
    },
    recipe=True,
    overrides="override a value of the recipe",
    arguments=[
        arg("--devices N", "number of devices", type=int, required=True),
        arg("--device D", "description (default ascend-910b)", "ascend-910b"),
        arg("--memory SIZE", "memory of a device to use, as 55GiB (2^30 bytes) or 59GB (10^9)"),
        arg("--global-batch B", "sequences of a step (default: the recipe's)", type=int),
        arg(
            "--fix NAME=VALUE",
            "allow only these values of a variable, such as tp=8 or zero=0,1",
            [],
            action="append",
        ),
        arg("--top K", "layouts to print (default 10)", 10),
        arg("--limit S", "seconds (default 300)", 300.0),
        arg(
            "--draws N",
            "searches with constants drawn from the device's posterior, to say how sure the choice is (default 6; 0: not)",
            6,
        ),
        arg(
            "--beyond-recipes",
            "also search what recipes cannot express: swapping, ZeRO 2 and 3, MTP before its head, zb-v",
        ),
        arg("--out FILE", "write the recipe with the layout"),
        arg("--pick K", "layout of the ranked table that --out writes (default 1)", 1),
        arg("--why FILE", "write a line for every layout not chosen"),
        arg("--html FILE", "write the report with the front of time against memory"),
        add_documents,
    ],
    run=run,
)
