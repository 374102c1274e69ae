"""`telechat-moe plan schedule`: the best pipeline schedule found, beside the published ones and a proven bound."""

import argparse
from typing import Any

from telechat_moe.cli.arguments import arg
from telechat_moe.cli.output import show_table, write_json, write_text
from telechat_moe.cli.verb import Verb
from telechat_moe.errors import UsageError

MOST = 10**6


def run(args: argparse.Namespace) -> int:
    """Search, write, print; return the exit code."""
    from telechat_moe.tools.plan.report import schedule as report

    count = args.stages * args.chunks * args.micro_batches
    if count > MOST:
        text = f"{count:,} stages x chunks x micro-batches; at most {MOST:,} are simulated"
        raise UsageError(f"schedule: {text}")
    names = ("stages", "micro_batches", "chunks", "backward", "comm", "memory", "overlap", "placement", "effort", "seed")  # fmt: skip
    request: Any = report.ScheduleRequest(
        times=_numbers(args.times),
        scale=_scales(args.scale),
        kept_for_w=args.kept_for_dw,
        split=not args.no_split,
        **{name: getattr(args, name) for name in names},
    )
    schedule: Any = report.find(request)
    write_text("--html ", args.html, lambda: report.html(schedule, args.memory))
    if write_json(args.json, report.data(schedule)):
        return 0
    show_table(report.HEADERS, report.rows(schedule))
    print()
    for line in report.summary(schedule, args.memory):
        print(line)
    return 0


def _numbers(text: str) -> list[float]:
    try:
        values = [float(v) for v in text.split(",")]
    except ValueError:
        values = []
    if len(values) != 3 or min(values) < 0 or not sum(values):
        raise UsageError(f"--times {text}: expected three numbers that are not negative: F,D,W")
    return values


def _scales(texts: list[str]) -> dict[int, float]:
    result: dict[int, float] = {}
    for text in texts:
        chunk, _, factor = text.partition("=")
        try:
            result[int(chunk)] = float(factor)
        except ValueError:
            raise UsageError(f"--scale {text}: expected CHUNK=FACTOR, such as 31=2.5") from None
    return result


VERB = Verb(
    name="schedule",
    help="find a pipeline schedule for given times and memory",
    description="Search a pipeline schedule; print its bubble, a proven lower bound and the published schedules.",
    notes="Bubble is the idle share of the makespan over all stages, start-up included; no schedule on the allowed placements under\n"
    "the same memory and rules is shorter than the bound. Memory is in units of 1F1B's, times are of a whole stage, in any unit.",
    examples="telechat-moe plan schedule --stages 16 --micro-batches 64 --chunks 2\n"
    "telechat-moe plan schedule --stages 16 --micro-batches 64 --chunks 2 --times 1,1.2,0.8 --scale 31=2.5 --html schedule.html",
    json_keys="the figures (bubble, makespan, lower_bound, gap, published, ...) and the program (start, end, activations).",
    arguments=[
        arg("--stages P", "pipeline stages", type=int, required=True),
        arg("--micro-batches M", "micro-batches of a step", type=int, required=True),
        arg("--chunks V", "chunks of a stage (default 1)", 1),
        arg(
            "--times F,D,W",
            "forward, dX and dW of a stage and micro-batch (default 1,1,1)",
            "1,1,1",
        ),
        arg("--backward B", "dX and dW together, if less than D + W", type=float),
        arg(
            "--scale CHUNK=FACTOR",
            "a chunk that takes FACTOR times as long, such as one with MTP; repeatable",
            [],
            action="append",
        ),
        arg("--comm C", "time between neighbouring stages", 0.0),
        arg("--memory X", "activations, 1F1B's = 1 (default)", 1.0),
        arg("--kept-for-dw SHARE", "share of the activations that only dW frees (default 1)", 1.0),
        arg(
            "--overlap SHARE",
            "share of F and dX that is experts' all-to-all, which a forward and a backward hide for each other "
            "(default 0: no overlap)",
            0.0,
        ),
        arg("--no-split", "keep dX and dW together"),
        arg(
            "--placement",
            "chunks on stages: zigzag or round-robin (default: both)",
            choices=("v", "loop"),
        ),
        arg("--effort N", "operations scheduled in all tries (default 2e7, seconds)", type=float),
        arg("--seed", "of the search (default 0)", 0),
        arg("--html FILE", "write a picture as a page"),
    ],
    run=run,
)
