"""`telechat-moe diagnose`: where the time of a run goes, and who is to blame."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from telechat_moe.cli.arguments import arg
from telechat_moe.cli.output import VERDICT_CODES, show_left, show_table, write_json, write_text
from telechat_moe.cli.verb import Verb
from telechat_moe.errors import UsageError

if TYPE_CHECKING:
    from telechat_moe.tools.diagnose.report import Diagnosis

SHOWN = 20

NOTES = """\
RUN is the output_dir of `telechat-moe train`, or the folders of several hosts. TRACE is a trace of torch's profiler,
step_trace_time.csv or trace_view.json of an Ascend profiler, msprof_*.json, a cluster's table by msprof-analyze, or a folder
with these. LOG is a log of MindFormers, of one rank or of several: it tells when steps were slow, not on which rank.

To blame are the ranks of a pipeline stage that are later than their peers in the time that they wait for nobody, by more than
chance and by 1.5 % of the step or more. docs/diagnose.md has the table of causes.
"""


def run_diagnose(args: argparse.Namespace) -> int:
    """Read, judge, and say the answer first."""
    from telechat_moe.tools.diagnose.logs import read_logs
    from telechat_moe.tools.diagnose.page import diagnosis_page
    from telechat_moe.tools.diagnose.read import read_any
    from telechat_moe.tools.diagnose.report import diagnose

    paths = [Path(run) for run in args.runs]
    if (logged := read_logs(paths)) is not None:
        if args.html:
            raise UsageError("--html shows ranks, which a log does not tell apart; leave it out")
        if not write_json(args.json, logged.to_json()):
            print(logged.says())
        return VERDICT_CODES["inconclusive"]
    diagnosis = diagnose(read_any(paths))
    write_text("--html ", args.html, lambda: diagnosis_page(diagnosis))
    if not write_json(args.json, diagnosis.to_json()):
        _show(diagnosis)
    return {"pass": 0, "fail": 1}.get(diagnosis.verdict, VERDICT_CODES["inconclusive"])


def _show(diagnosis: Diagnosis) -> None:
    from telechat_moe.tools.diagnose.bound import BOUNDS
    from telechat_moe.tools.diagnose.report import who

    print(diagnosis.says())
    if diagnosis.causes:
        print()
        rows = [
            [
                who(c),
                " or ".join(kind.replace("_", " ") for kind in c.kinds),
                f"{c.first_step}-{c.last_step}",
                f"{c.share:+.1%}",
                f"{c.lost:.1%}",
            ]
            for c in diagnosis.causes[:SHOWN]
        ]
        show_table(["who", "what", "steps", "of a step ", "of the run "], rows)
        show_left(len(diagnosis.causes) - SHOWN, "--json")
    print()
    names, shown = list(BOUNDS.values()), diagnosis.bounds[:SHOWN]
    bounds = [[b.stage, b.bound, *(f"{b.shares[n]:.1%}" for n in names)] for b in shown]
    show_table(["stage ", "bound by", *(f"{n} " for n in names)], bounds)
    print(f"waiting for other ranks: {diagnosis.waiting:.1%} of all ranks' time")
    for line in diagnosis.left():
        print(f"not judged: {line}")
    for problem in diagnosis.records.problems:
        print(problem)


VERB = Verb(
    name="diagnose",
    help="where the time of a run goes: what bounds it, and which rank, host or link is to blame",
    description="Say what bounds the steps of a run, and which rank, host or link makes the others wait, and why.",
    notes=NOTES,
    examples="telechat-moe diagnose output\ntelechat-moe diagnose host0/output host1/output --html slow.html",
    exits={
        0: "nothing is wrong",
        1: "something is wrong, and named",
        3: "no timings, or damaged ones",
        4: "nothing was found, but times of a rank are missing, a stage has one rank, which has no peers, there are too few steps, or logs alone",
    },
    json_keys="verdict, says, source, ranks, steps, step_seconds, waiting, causes (a list of {kinds, scope, ranks, host, part, "
    "first_step, last_step, seconds, share, sigmas, lost, who, advice}), bounds (a list of {stage, bound, shares, steps}), "
    "recorded, problems, not_judged. Of logs: verdict, says, source, steps, step_seconds, slow_steps, lost (share of the time), not_judged.",
    arguments=[
        arg(
            "runs RUN|TRACE|LOG",
            "folder of a run, the folders of its hosts, traces of its ranks, or logs",
            nargs="+",
        ),
        arg("--html FILE", "a page: causes, bounds, ranks x steps, the latest rank's step"),
    ],
    run=run_diagnose,
)
