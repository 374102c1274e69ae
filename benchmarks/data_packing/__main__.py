"""Documents cut and tokens of padding, for documents cut in a row and for whole ones packed by best fit.

    python -m benchmarks.data_packing [--documents 1000000] [--json FILE]

Documents are those of `benchmarks.data_balance`, in shuffled order. In a row they are cut every `seq_length` tokens, as Megatron
does. Whole ones are packed with windows of 1 (one after another) to 4096 samples.

--json keys: documents, rows, a list of {documents, seq_length, window, count, cut, padding, samples, seconds}; `window` 0: in a
row; `cut`, `padding`: shares of documents and tokens.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import answer, new_parser
from benchmarks.data_balance.__main__ import OWN, Documents
from telechat_moe.cli.arguments import add_json
from telechat_moe.cli.output import show_table, write_json
from telechat_moe.data.document_packing import BestFit, cut

CASES = [("WLB-LLM", 4096), ("WLB-LLM", 32768), (OWN, 4096)]
"""Documents and tokens of a sample."""
WINDOWS = (1, 16, 64, 256, 1024, 4096)
LONGEST = 128 << 10


def measure(lengths: np.ndarray, seq_length: int) -> Iterator[dict[str, Any]]:
    """Yield what each packing makes of documents."""
    ends = np.cumsum(lengths, dtype=np.int64)
    crossing = (ends - lengths) // seq_length != (ends - 1) // seq_length
    samples = -(-int(ends[-1]) // seq_length)
    yield {"window": 0, "cut": float(crossing.mean()), "padding": 0.0, "samples": samples, "seconds": 0.0}  # fmt: skip
    pieces = np.random.default_rng(0).permutation(cut(lengths, seq_length)[1])
    for window in WINDOWS:
        began, packer = time.process_time(), BestFit(seq_length, window)
        packer.place(pieces)
        yield {
            "window": window,
            "cut": float((lengths > seq_length).mean()),
            "padding": 1 - int(ends[-1]) / (packer.samples * seq_length),
            "samples": packer.samples,
            "seconds": time.process_time() - began,
        }


def run(args: argparse.Namespace) -> int:
    """Measure, print, and return 0."""
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        documents = Documents(Path(name))
        for kind, seq_length in CASES:
            lengths = documents.lengths(kind, LONGEST, 1, 0)
            while len(lengths) < args.documents:
                lengths = np.concatenate(
                    [lengths, documents.lengths(kind, LONGEST, 1, len(lengths))]
                )
            lengths = lengths[: args.documents]
            given = {"documents": kind, "seq_length": seq_length, "count": len(lengths)}
            rows += [given | row for row in measure(lengths, seq_length)]
    if write_json(args.json, {"documents": args.documents, "rows": rows}):
        return 0
    headers = ["documents", "tokens", "window", "cut ", "padding ", "samples ", "seconds "]
    show_table(
        headers,
        [
            [
                *(row["documents"], row["seq_length"], row["window"] or "in a row"),
                *(f"{row['cut']:.2%}", f"{row['padding']:.2%}", f"{row['samples']:,}"),
                f"{row['seconds']:.1f}",
            ]
            for row in rows
        ],
    )
    print(f"{args.documents:,} documents of each kind; seconds are processor time of packing")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = new_parser("data_packing", __doc__)
    parser.add_argument("--documents", type=int, default=1_000_000, metavar="N")
    add_json(parser)
    return answer(parser, run, argv)


if __name__ == "__main__":
    sys.exit(main())
