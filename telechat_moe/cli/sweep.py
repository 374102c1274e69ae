"""`telechat-moe sweep`: train a grid of recipes and compare their losses at equal cost."""

import argparse
import json
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from telechat_moe.cli.arguments import arg
from telechat_moe.cli.output import show_table, write_json
from telechat_moe.cli.progress import bars
from telechat_moe.cli.verb import Verb
from telechat_moe.errors import UsageError

NOTES = """\
FILE is YAML: a recipe, variants of it (lists of overrides), seeds, studies, which compare variants at equal cost, and larger recipes whose cost is
predicted. docs/sweep.md describes each key.

Each run is a `telechat-moe train` of its own in output_dir/VARIANT/seed-N. The same command goes on after an interruption.
output_dir/sweep.html and sweep.json hold the results.
"""


@contextmanager
def _progress() -> Generator[Callable[[int, int, int, int], None], None, None]:
    """Yield a function that moves two bars, of runs and of their steps."""
    with bars() as move:

        def show(over: int, runs: int, steps: int, all_steps: int) -> None:
            move("runs", over, runs)
            move("steps", steps, all_steps)

        yield show


def run(args: argparse.Namespace) -> int:
    """Check, train, compare, write and print; return the exit code."""
    if args.jobs < 1:
        raise UsageError(f"--jobs {args.jobs}: expected at least 1")
    from telechat_moe.checkpoint.folder import only_run
    from telechat_moe.files import keep_others_out, write_atomic
    from telechat_moe.interop import hf
    from telechat_moe.tools.sweep import cost, file, page, results, runs

    keep_others_out()
    sweep = file.read_sweep(args.file)
    runs.check(sweep, None if args.report else hf.weights)
    outcome = runs.TrainingOutcome()
    if not args.report:
        with only_run(sweep.output), _progress() as show:
            outcome = runs.train(sweep, args.jobs, show)
    trained = [results.read_result(r, sweep.sizes[r.variant], outcome.failed) for r in sweep.runs]
    larger = {name: cost.predict_costs(sweep, name) for name in sweep.larger if not outcome.stopped}
    report = results.report(sweep, trained, larger)
    sweep.output.mkdir(parents=True, exist_ok=True)
    write_atomic(sweep.output / "sweep.json", json.dumps(report, indent=1) + "\n")
    write_atomic(sweep.output / "sweep.html", page.page(report, trained))
    if not write_json(args.json, report):
        _show(report)
        print(f"\n{sweep.output}/sweep.html, sweep.json")
    for result in trained:
        if result.why:
            print(f"error: {result.run.name}: {result.why}", file=sys.stderr)
    if outcome.stopped:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    left = sum(result.state != "finished" for result in trained)
    if left:
        print(f"error: {left} of {len(trained)} runs are not finished", file=sys.stderr)
    return 1 if left else 0


def _show(report: dict[str, Any]) -> None:
    from telechat_moe.tools.sweep.page import COST_TITLES, STUDY_TITLES, cost_row, study_rows

    for name, study in report["studies"].items():
        print(f"\n{name}")
        show_table(STUDY_TITLES, study_rows(study, report))
    for name, model in report["larger"].items():
        print(f"\npredicted at {name} ({model['recipe']} on {model['device']})")
        rows = [[name, *cost_row(c)] for name, c in model["variants"].items()]
        show_table(["variant", *COST_TITLES], rows)


VERB = Verb(
    name="sweep",
    help="train a grid of recipes and compare their losses at equal cost",
    notes=NOTES,
    examples="telechat-moe data build --recipe telechat3_moe/pretrain_tiny.yaml\n"
    "telechat-moe sweep sweeps/telechat3_moe/pilot.yaml",
    exits={
        1: "a run failed, or is not finished (--report)",
        3: "the sweep file, a recipe or the data has problems, or a folder holds another run",
        130: "interrupted (Ctrl-C or SIGTERM; the steps are saved, the same command goes on)",
    },
    after_interruption="the same command goes on",
    json_keys="file, recipe, output_dir, seeds, loss (which one), runs, a list of {variant, seed, folder, state (finished, "
    "failed, unfinished, not begun), why, steps, tokens, flops, train_loss, validation_loss, loss, tokens_per_second}; "
    "variants {NAME: settings, parameters, active, flops_per_token, training_tokens, training_flops, loss {mean, low, high, "
    "each}, tokens_per_second}; studies {NAME: about, equal, against_first {VARIANT: mean, low, high, each, verdict}}; "
    "larger {NAME: recipe, device, variants {NAME: settings, parameters, active, flops_per_token, devices, layout, gap, why, fits, step_s, "
    "tokens_per_s, mfu, device_hours}}.",
    arguments=[
        arg("FILE", "sweep file, or a shipped one such as sweeps/telechat3_moe/pilot.yaml"),
        arg("--jobs N", "runs at a time, which share the cores (default 1)", 1),
        arg("--report", "train nothing: report what is finished"),
    ],
    run=run,
)
