"""How good is `align bisect` at naming faults? Plant them and count: `python -m benchmarks.align_faults`."""

import argparse
import sys
from collections.abc import Sequence

from benchmarks.align_faults import page, suite
from benchmarks.command import answer, new_parser
from telechat_moe.cli.arguments import add_json
from telechat_moe.cli.output import show_table, write_json, write_text
from telechat_moe.cli.progress import bars
from telechat_moe.errors import UsageError

EPILOG = """\
Small mixture-of-experts models are trained on up to 16 logical ranks, in NumPy alone. One call on one rank is made
wrong, and `align bisect` is asked for the first wrong call, its phase, its ranks and the kind of fault; its reproducer
must fail again. An oracle that knows the fault says, with a bound of its own, whether it can be seen at all. Right
pairs differ in type, order of sums and fusion; in many of them tokens take other experts. msprobe 26.2.0's rules and
allclose are asked about the same dumps. Classes and layouts: benchmarks/align_faults/README.md.

example:
  python -m benchmarks.align_faults
  python -m benchmarks.align_faults --faults 3000 --clean 2000 --jobs 2 --json faults.json --html faults.html
  python -m benchmarks.align_faults --classes "optimizer" --layouts "zero*"
  python -m benchmarks.align_faults --faults 500 --clean 0 --first 1500 --json part4.json  # in parts

exit codes: 0 the bars hold, 1 they do not, 2 usage

--json keys: verdict, failures, seconds, faults, classes, shares (detected, exact, family, reproducer, observable), areas,
clean (pairs, of_two_layouts, false_alarms, inconclusive, with_flips, not_judged), baselines, history, missed, not_observable, alarms, no_place, stopped
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    return answer(_parser(), run, argv)


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "align_faults",
        "Plant faults in small sharded models and see whether bisect names them.",
        EPILOG,
    )
    parser.add_argument("--faults", type=int, default=150, metavar="N", help="faults (150)")
    parser.add_argument("--clean", type=int, default=30, metavar="N", help="right pairs (30)")
    parser.add_argument("--classes", default="*", metavar="GLOB", help="classes or areas")
    parser.add_argument("--layouts", default="*", metavar="GLOB", help="layouts")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="others (0)")
    parser.add_argument(
        "--first", type=int, default=0, metavar="N", help="number of the first fault and pair (0)"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="J", help="processes (1)")
    parser.add_argument("--no-history", action="store_true", help="without the bugs of history")
    add_json(parser)
    parser.add_argument("--html", metavar="FILE", help="write one page")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run, print; return the exit code."""
    for name in ("faults", "clean"):
        if getattr(args, name) < 0:
            raise UsageError(f"--{name} {getattr(args, name)}: at least 0 expected")
    if args.jobs < 1 or args.faults + args.clean == 0:
        raise UsageError("nothing to do: --jobs at least 1, --faults or --clean more than 0")
    with bars() as progress:
        report = suite.run_suite(
            args.faults,
            args.clean,
            args.classes,
            args.layouts,
            args.seed,
            args.jobs,
            not args.no_history,
            args.first,
            progress or (lambda *_: None),
        )
    failures = report.failures()
    write_text("--html ", args.html, lambda: page.page(report))
    code = 1 if failures else 0
    if write_json(args.json, report.as_json()):
        return code
    _show(report)
    for failure in failures:
        print(f"fails: {failure}")
    if report.stopped:
        print(f"{len(report.stopped)} more stopped their programs and are not counted")
    took = f"{report.seconds:.0f} s"
    print(f"{'diverged' if failures else 'pass'}: {len(report.faults)} faults, {took}")
    return code


def _show(report: suite.Report) -> None:
    headers = [suite.COLUMNS[0], *(f"{name} " for name in suite.COLUMNS[1:])]
    if report.faults:
        show_table(headers, [[str(v) for v in row] for row in suite.table(report)])
        print()
    rows = [
        [name, *(str(v) for v in counts.values())] for name, counts in suite.scored(report).items()
    ]
    flagged = f"flagged of {len(report.observable)} "
    show_table(["method", flagged, "operator named ", "false alarms ", "of right pairs "], rows)
    if report.pairs:
        layouts = sum(p.reference.ranks != p.target.ranks for p in report.pairs)
        print(
            f"\nright pairs with a flip of routing: {report.flips:.0%}; of two layouts: {layouts}\n"
        )
    rows = []
    for bug, r, changed in report.bugs:
        words = ["yes" if right else "no" for right in r.marks[:2]]
        loss = "changed" if changed else "unchanged"
        rows.append([bug.source, bug.layout, *words, loss, r.said[:90]])
    if rows:
        show_table(["bug of history", "layout", "found", "exact", "loss", "said"], rows)
        print()


if __name__ == "__main__":
    sys.exit(main())
