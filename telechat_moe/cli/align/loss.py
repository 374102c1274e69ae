"""`telechat-moe align loss`: is a run's loss curve that of the base runs?"""

import argparse

from telechat_moe.cli.arguments import arg
from telechat_moe.cli.output import VERDICT_CODES, show_table, write_json, write_text
from telechat_moe.cli.verb import Verb
from telechat_moe.errors import UsageError


def _percent(text: str) -> float:
    value = float(text.rstrip("%")) / 100
    if not 0 <= value < 1:
        raise ValueError
    return value


def _steps(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def run(args: argparse.Namespace) -> int:
    """Judge, print; return the exit code."""
    from telechat_moe.tools.loss import page as loss_page
    from telechat_moe.tools.loss import read as loss_read
    from telechat_moe.tools.loss import verdict as loss

    *bases, target = args.curves
    bases += args.base
    if not bases:
        raise UsageError("one curve given; expected base runs and then the run to judge")
    curves = [loss_read.read(path, args.metric) for path in [*bases, target]]
    limits = {"margin": args.margin, "negligible": args.negligible}
    settings = loss.LossSettings(**limits, steps=args.min_steps)
    report = loss.judge(curves[:-1], curves[-1], settings)
    write_text("--html ", args.html, lambda: loss_page.page(report))
    write_text("--junit ", args.junit, lambda: loss_page.junit(report))
    code = VERDICT_CODES[report.verdict]
    if write_json(args.json, report.plain()):
        return code
    show_table(["check", "found ", "allowed", "answer"], loss_page.checks(report))
    print(f"\n{report.sentence}")
    for note in report.notes:
        print(f"note: {note}")
    return code


VERB = Verb(
    name="loss",
    help="judge a loss curve against those of base runs",
    description="Judge a loss curve against those of base runs: the published standard, an equivalence test, lasting "
    "differences with their onset, spikes; with the power that the verdict has.",
    notes="A curve is our metrics.jsonl (or its folder), a log of MindFormers, Megatron-LM or torchtitan, golden values of Megatron-LM (JSON),\n"
    "the trainer_state.json of Hugging Face's Trainer, an export of W&B, or CSV with columns step, loss and maybe grad_norm. Give two base\n"
    "runs or more: what they differ from each other is noise by definition.",
    examples="telechat-moe align loss base1/metrics.jsonl base2/metrics.jsonl run/metrics.jsonl --html loss.html\n"
    "telechat-moe align loss gpu.csv msrun_log/worker_7.log",
    exits={
        0: "pass",
        1: "diverged",
        4: "inconclusive (not enough steps, too much noise, no common steps)",
    },
    json_keys="verdict (pass | diverged | inconclusive), sentence, reasons, findings (kind, first, last, size, low, "
    "high, p, text), gate (verdict, steps, first, average, norm, norm_ok, positive), bias (mean, error, "
    "low, high, margin, statistic, limit, p, effective_steps), power (seen_95, margin), noise (spread, "
    "correlation_time, inflation, wander), spikes (step, base, target, where), steps (compared, first, "
    "last), notes, inputs, settings. Differences are fractions.",
    arguments=[
        arg("curves CURVE", "base runs, then the run to judge", nargs="+"),
        arg("--base --base2 CURVE", "one more base run", [], action="append"),
        arg(
            "--metric NAME",
            "name of the loss in the files; of an export of W&B with several runs, the run",
        ),
        arg(
            "--margin PERCENT",
            "a lasting difference below this is as good as none (0.3)",
            0.003,
            type=_percent,
        ),
        arg(
            "--negligible PERCENT",
            "a difference below this is no divergence, however certain (0.05)",
            0.0005,
            type=_percent,
        ),
        arg("--min-steps N", "fewest steps of a pass (1000)", 1000, type=_steps),
        arg("--html FILE", "write one page with the curves"),
        arg("--junit FILE", "write the checks as JUnit XML"),
    ],
    run=run,
)
