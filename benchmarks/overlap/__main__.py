"""How much communication a list of kernels hides: `python -m benchmarks.overlap KERNELS`."""

import argparse
from collections.abc import Sequence

from benchmarks.command import answer, new_parser
from benchmarks.overlap import report
from benchmarks.overlap.overlap import LAUNCH_US, MULTIPROCESSORS
from telechat_moe.cli.arguments import add_json
from telechat_moe.cli.output import show_table, write_json, write_text
from telechat_moe.tools.plan.report.timeline import chrome_trace, page

EPILOG = """\
KERNELS is a CSV with the columns dur_us, stream, name, grid and, where it was measured, start_us. Which kernel waits for
which is inferred from names and from the order within each stream; starts are predicted, measured ones only compared with.
The overlap is the share of communication time under which something computes.

example:
  python -m benchmarks.overlap benchmarks/plan_published/data/deepseek_v3_dualpipe_kernels.csv --html overlap.html

exit codes: 0 ok, 2 usage, 3 bad input
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = new_parser(
        "overlap",
        "Predict when the kernels of a profiled step start, how long it takes and how much communication "
        "is hidden.",
        EPILOG,
    )
    parser.add_argument("kernels", metavar="KERNELS", help="CSV of kernels")
    parser.add_argument(
        "--launch-us", type=float, metavar="US", default=LAUNCH_US,
        help="host time of one launch (default 50, eager PyTorch with autograd; 0: a captured graph)",
    )  # fmt: skip
    parser.add_argument(
        "--multiprocessors", type=int, metavar="N", default=MULTIPROCESSORS,
        help="of the device (default 132, H100 and H800)",
    )  # fmt: skip
    parser.add_argument("--html", metavar="FILE", help="write the timeline as a page")
    parser.add_argument("--trace", metavar="FILE", help="write a Chrome trace (Perfetto)")
    add_json(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Predict, write, print; return the exit code."""
    prediction = report.read_and_predict(args.kernels, args.launch_us, args.multiprocessors)
    write_text("--html ", args.html, lambda: page(report.timeline(prediction, args.kernels)))
    write_text(
        "--trace ",
        args.trace,
        lambda: chrome_trace(report.timeline(prediction, args.kernels, False)),
    )
    if write_json(args.json, report.report(prediction, args.kernels)):
        return 0
    show_table(["figure", "predicted ", "measured ", "difference "], report.rows(prediction))
    for note in report.notes(prediction):
        print(f"note: {note}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return answer(build_parser(), run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
