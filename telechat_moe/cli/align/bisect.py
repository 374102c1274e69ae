"""`telechat-moe align bisect`: the first wrong call of a run, and what is wrong about it."""

import argparse
from pathlib import Path

from telechat_moe.cli.arguments import add_runs
from telechat_moe.cli.output import (
    VERDICT_CODES,
    show_counts,
    show_coverage,
    show_table,
    write_json,
    write_text,
)
from telechat_moe.cli.progress import bars
from telechat_moe.cli.verb import Verb
from telechat_moe.errors import UsageError

NOTES = """\
Each call of TARGET is recomputed in float64 from its own inputs, with REFERENCE's settings; integers must be equal,
numbers within a bound derived from types and lengths. Inputs must be what the calls before made, gradients the sum of
what all uses sent, collectives what the ranks of the group gave. Differences that a call inherits from its inputs do
not count.

A call that cannot be recomputed (no formula, weights or values not in the dump) is judged by the other run: its inputs
equal within what their noise allows, row by row, its outputs not. Statistics show faults this way, never that there is
none.

A pass needs 95 % of the calls and of the bytes of each phase (forward, backward, optimizer) judged; with less the
verdict is inconclusive, unless something is wrong. What to dump to have the rest judged is listed.

Where the runs have different layouts or come from different frameworks, their calls are not the same. Then each call
of TARGET is judged with its own settings, collectives over the ranks that the layouts name; and what both runs must
have is made whole from all ranks and compared, in the order of TARGET's data flow: gradients, weights and states by
the name of their weight, or across frameworks what `align map` finds (--map reads an edited map). Of the first tensor
that differs, the calls of both runs that made it are compared: which run's is wrong, or which settings differ.
"""
EXAMPLES = """\
telechat-moe align bisect gpu_dump npu_dump --html align.html
telechat-moe align bisect gpu_dump npu_dump --reproducer wrong && python wrong/reproduce.py
telechat-moe align bisect tp2 dp2_ep2
telechat-moe align bisect hf ours
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_runs(parser)
    parser.add_argument(
        "--map",
        metavar="FILE",
        help="tensors that both runs have, where their calls differ (default: found)",
    )
    parser.add_argument(
        "--rtol",
        type=float,
        metavar="X",
        help="largest allowed difference of these tensors, relative L2 (default: by type, 2e-5 in float32)",
    )
    parser.add_argument("--html", metavar="FILE", help="write one page with the first wrong call")
    parser.add_argument("--junit", metavar="FILE", help="write the answer as JUnit XML")
    parser.add_argument(
        "--reproducer",
        metavar="DIR",
        help="write the first wrong call as data and a script that fails while it is wrong",
    )


def run(args: argparse.Namespace) -> int:
    """Compare, print; return the exit code."""
    from telechat_moe.tools.align.dump import summary
    from telechat_moe.tools.align.judge import across_layouts, bisect, reproduce
    from telechat_moe.tools.align.judge.neighbourhood import around
    from telechat_moe.tools.align.maps.links import read_map
    from telechat_moe.tools.align.report import bisect_page as page

    reference, target = summary.read(Path(args.reference)), summary.read(Path(args.target))
    if args.map is not None or across_layouts.differ_in_layout(reference, target):
        links = [] if args.map is None else read_map(Path(args.map))
        with bars() as move:
            outcome = across_layouts.across(reference, target, links, args.rtol, move)
    elif args.rtol is not None:
        said = "--rtol is for runs whose calls differ; these are judged by derived bounds"
        raise UsageError(said)
    else:
        with bars() as move:
            outcome = bisect.bisect(reference, target, progress=move)
    first = outcome.findings[0] if outcome.findings else None
    graph = around(target, first.step, first.rank, first.verdict.key) if first else None
    report = page.plain(outcome, args.reference, args.target, graph)
    write_text("--html ", args.html, lambda: page.page(report))
    write_text("--junit ", args.junit, lambda: page.junit(outcome, args.target))
    if args.reproducer and first:
        reproduce.write(first, Path(args.reproducer))
    code = VERDICT_CODES[outcome.verdict]
    if write_json(args.json, report):
        return code
    if outcome.settings:
        show_table(["settings that differ"], [[said] for said in outcome.settings])
        print()
    if first:
        layer = report["first"]["layer"]
        rows = [
            ["call", first.verdict.key],
            ["tensor", first.verdict.place],
            ["phase", first.call.stage.value if first.call else "-"],
            ["layer", "-" if layer is None else layer],
            ["step", first.step],
            ["ranks", ", ".join(map(str, outcome.ranks))],
            ["kind of fault", f"{first.family}: {first.evidence}"],
            ["observed / bound", f"{first.verdict.ratio:.3g}"],
            ["where", first.verdict.reason],
            ["values there", page.values_text(report["first"])],
            ["source", report["first"]["source"] or "-"],
        ]
        show_table(["the first", "wrong call"], rows)
        print()
    show_counts(dict(sorted(outcome.judged.items())), dict(sorted(outcome.unknown.items())))
    show_coverage(report)
    print(f"\n{outcome.verdict}: {report['sentence']}\n")
    show_table(["next", ""], [[step["command"], step["shows"]] for step in report["next"]])
    return code


VERB = Verb(
    name="bisect",
    help="name the first wrong call of a run",
    description="Name the first call of TARGET that is wrong, and what kind of fault it looks like.",
    notes=NOTES,
    examples=EXAMPLES,
    exits={0: "pass", 1: "diverged", 4: "inconclusive: too little was judged"},
    json_keys="verdict (pass | diverged | inconclusive), reason, ranks, first and findings (step, rank, phase, "
    "layer, modules (of both runs, across frameworks), operator, tensor, family, evidence, observed_over_bound, reason, basis (replay | other run), element, values (reference, target), wrong_elements, "
    "elements, source), settings (that differ, by module), judged (tensors by answer), not_judged (reasons, with their number), coverage (by "
    "phase: calls, judged_calls, bytes, judged_bytes), by_other_run (tensors), to_dump (reason, calls, bytes, dump: what to dump), runs, "
    "sentence, next (command, shows); of the first wrong call neighbours (in the order of the run), graph (nodes, edges: the "
    "data flow around it), picture (worst error over bound of each field)",
    arguments=_arguments,
    run=run,
)
