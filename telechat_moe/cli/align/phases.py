"""`telechat-moe align phases`: operators alone, one step, loss curve: the three checks before a production run."""

import argparse
from pathlib import Path

from telechat_moe.cli.arguments import arg
from telechat_moe.cli.output import VERDICT_CODES, write_json, write_text
from telechat_moe.cli.verb import Verb
from telechat_moe.errors import UsageError

NOTES = """\
1. operators alone: those of the recipe at its own widths, each implementation, forward and backward, against float64
   formulas with derived bounds
2. one step with fixed inputs: captured from the recipe, or --target; every operator replayed, and, with --reference,
   bisected against that dump
3. loss curve: --curve, or the recipe trained here, against --base

A phase is not run again while nothing changed that it depends on. One that diverged ends the run. OUT has
phases.json, phases.html, and the report of each verb. docs/align_loss.md tells it with an example.
"""


def run(args: argparse.Namespace) -> int:
    """Run the phases, print; return the exit code."""
    from telechat_moe.tools.phases import workflow
    from telechat_moe.tools.phases.page import page

    out = Path(args.out)
    if any(path.is_file() for path in (out, *out.parents)):
        raise UsageError(f"--out {out}: expected a folder, found a file")
    plan = workflow.PhasesPlan(
        recipe=args.recipe,
        out=out,
        overrides=tuple(args.overrides),
        reference=_path(args.reference),
        target=_path(args.target),
        map=_path(args.map),
        bases=tuple(args.base),
        curve=args.curve,
        steps=args.min_steps,
        repeat=args.again,
        go_on=args.go_on,
        show=(lambda text: None) if args.json == "-" else print,
    )
    report = workflow.run(plan)
    write_text("", str(out / "phases.html"), lambda: page(report))
    code = VERDICT_CODES[report["verdict"]]
    if not write_json(args.json, report):
        print(f"\n{report['verdict']}: {report['sentence']}\n{out / 'phases.html'}")
    return code


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


VERB = Verb(
    name="phases",
    help="check operators, one step and the loss curve of a recipe",
    description="Check a recipe in three phases before a production run; one verdict.",
    notes=NOTES,
    examples="telechat-moe align phases mine.yaml --out phases --reference golden --base gpu1.jsonl --base "
    "gpu2.jsonl",
    exits={
        0: "pass",
        1: "diverged",
        4: "inconclusive: a phase was not judged, or too little of it",
    },
    after_interruption="the same command goes on",
    json_keys="verdict, recipe, sentence, phases (title, verdict, sentence, wall_s, operators, reports by verb, "
    "not_judged)",
    recipe=True,
    overrides="override a value of the recipe",
    arguments=[
        arg("--out OUT", "folder of the reports", required=True),
        arg("--reference DUMP", "dump of a step that is trusted"),
        arg("--target DUMP", "dump of the recipe's step that was captured separately"),
        arg("--map FILE", "tensors that both have, as for `bisect`"),
        arg("--base CURVE", "a curve that is trusted", [], action="append"),
        arg("--curve CURVE", "the recipe's curve (default: train it here)"),
        arg("--min-steps N", "fewest steps of a pass (1000)", 1000),
        arg("--again", "run all phases again"),
        arg("--go-on", "continue after a phase that diverged"),
    ],
    run=run,
)
