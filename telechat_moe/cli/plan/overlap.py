"""`telechat-moe plan overlap`: how much communication a list of kernels hides."""

import argparse
from typing import Any

from telechat_moe.cli.output import show_table, write_json, write_text

EPILOG = """\
KERNELS is a CSV with the columns dur_us, stream, name, grid and, where it was measured, start_us. Which kernel waits for
which is inferred from names and from the order within each stream; starts are predicted, measured ones only compared with.
The overlap is the share of communication time under which something computes.

example:
  telechat-moe plan overlap benchmarks/plan_published/data/deepseek_v3_dualpipe_kernels.csv --html overlap.html

exit codes: 0 ok, 2 usage, 3 bad input
"""


def register(verbs: Any) -> None:
    """Add the sub-verb to the command line."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "overlap",
        help="predict the time and hidden communication of a kernel list",
        description="Predict when the kernels of a profiled step start, how long it takes and how much communication "
        "is hidden.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kernels", metavar="KERNELS", help="CSV of kernels")
    parser.add_argument(
        "--launch-us", type=float, metavar="US", default=None,
        help="host time of one launch (default 50, eager PyTorch with autograd; 0: a captured graph)",
    )  # fmt: skip
    parser.add_argument(
        "--multiprocessors", type=int, metavar="N", default=None,
        help="of the device (default 132, H100 and H800)",
    )  # fmt: skip
    parser.add_argument("--html", metavar="FILE", help="write the timeline as a page")
    parser.add_argument("--trace", metavar="FILE", help="write a Chrome trace (Perfetto)")
    parser.add_argument("--json", metavar="FILE", help="write the figures (- for stdout)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Predict, write, print; return the exit code."""
    # Any: lies in tools/, only an install maps it
    from benchmarks.overlap import report as show

    prediction: Any = show.read_and_predict(args.kernels, args.launch_us, args.multiprocessors)
    write_text("--html ", args.html, lambda: show.html(prediction, args.kernels))
    write_text("--trace ", args.trace, lambda: show.trace(prediction, args.kernels))
    if write_json(args.json, show.report(prediction, args.kernels)):
        return 0
    show_table(["figure", "predicted ", "measured ", "difference "], show.rows(prediction))
    for note in show.notes(prediction):
        print(f"note: {note}")
    return 0
