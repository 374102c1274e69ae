"""`telechat-moe data audit`: which samples each step of a run saw."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from telechat_moe.cli.arguments import arg
from telechat_moe.cli.output import show_table, write_json
from telechat_moe.cli.progress import bars
from telechat_moe.cli.verb import Verb
from telechat_moe.errors import BadInputError, UsageError

if TYPE_CHECKING:
    from telechat_moe.data.audit import Audit

NOTES = """\
OUTPUT_DIR/samples.jsonl says what each step saw. The plan is computed from the recipe (OUTPUT_DIR/recipe.json, or --recipe)
and the index files, and every step that counts must have the samples that the plan gives it, with the token ids that the data
have now. Checkpoints and metrics.jsonl must agree.

--plan takes a recipe instead of a folder, for a run of MindFormers, and proves that the plan gives every sample of an epoch once.
"""


def run_audit(args: argparse.Namespace) -> int:
    """Audit and say what was found."""
    if (args.output_dir is None) == (args.plan is None):
        raise UsageError("data audit takes either OUTPUT_DIR or --plan RECIPE")
    from telechat_moe.data.audit import audit, audit_plan
    from telechat_moe.recipe import load

    if args.plan is not None:
        report = audit_plan(load(args.plan, args.overrides))
    else:
        path = args.recipe or Path(args.output_dir) / "recipe.json"
        if args.recipe is None and not path.exists():
            text = "no recipe.json there; name the recipe with --recipe"
            raise BadInputError(f"{args.output_dir}: {text}")
        recipe = load(path, args.overrides)
        with bars() as progress:
            report = audit(args.output_dir, recipe, contents=args.contents, progress=progress)
    if not write_json(args.json, asdict(report)):
        _show(report)
    for problem in report.problems:
        print(problem, file=sys.stderr)
    return 1 if report.problems else 0


def _show(report: Audit) -> None:
    if report.starts:
        rows = [[s.line, s.step, s.layout, s.steps, s.kept] for s in report.starts]
        show_table(["line ", "after step ", "layout", "steps done ", "of these count "], rows)
    count = len(report.problems)
    verdict = f"{count} problem(s)" if count else "every sample is accounted for"
    print(
        f"{report.source}: {verdict}\n"
        f"  {report.steps} steps saw {report.samples} samples, {report.epochs:.3f} epochs of {report.samples_per_epoch}; "
        f"{report.skipped} step(s) without update, {report.undone} done and undone"
    )
    if report.unread:
        text = "at the end of an epoch are not read: they do not fill a step"
        print(f"  {report.unread} sample(s) {text}")
    if report.to_come:
        print(f"  {report.to_come} sample(s) are still to come")
    if len(report.data) > 1:
        for span in report.data:
            judged = "" if span.read_again else ", not read again"
            steps = f"steps {span.first_step} to {span.last_step}"
            print(f"  {steps}: {' '.join(span.data_path)}{judged}")
    if report.mixture:
        rows: list[list[object]] = []
        for part in report.mixture:
            for source in part["sources"]:
                row = [part["from_sample"], part["to_sample"] - 1, source["prefix"]]
                count = "" if source["seen"] is None else source["seen"]
                rows.append([*row, f"{source['weight']:.4f}", source["planned"], count])
        show_table(["from sample ", "to ", "source", "weight ", "planned ", "seen "], rows)
    for rollback in report.rollbacks:
        first, end = rollback["left_out"]
        print(f"  samples {first} to {end - 1} were left out by a rollback")
    print(f"  compared: {report.covers}")


VERB = Verb(
    name="audit",
    help="prove which samples each step of a run saw",
    description="Prove which samples each step of a run saw: none lost, none twice.",
    notes=NOTES,
    examples="telechat-moe data audit output",
    exits={
        0: "every sample is accounted for",
        1: "one is lost or came twice, or logs differ",
        3: "no log, recipe or data",
    },
    json_keys="source, covers, steps, samples, epochs, samples_per_epoch, unread (at the ends of epochs, they do not "
    "fill a step), to_come (not reached yet), undone (steps done and undone), skipped "
    "(steps whose update was left out), starts (a list of {line, step, layout, steps, kept, mixture}), data (a list of {data_path, "
    "dataset, samples_per_epoch, earlier_samples, first_step, last_step, read_again}), rollbacks "
    "(a list of {left_out}), mixture (a list of {from_sample, to_sample, sources: a list of {prefix, weight, planned, "
    "seen}}), problems.",
    overrides="override a value of the recipe",
    arguments=[
        arg("OUTPUT_DIR", "folder of the run", nargs="?"),
        arg("--recipe RECIPE", "default: OUTPUT_DIR/recipe.json"),
        arg("--plan RECIPE", "audit what a recipe plans, no run"),
        arg(
            "--no-contents",
            "compare positions only; do not read the samples",
            dest="contents",
            action="store_false",
        ),
    ],
    run=run_audit,
)
