"""Measure the operators in this process and write JSON to a file; `python -m benchmarks.ops` starts it."""

import argparse
import json
import os
import sys
from datetime import date
from pathlib import Path

from benchmarks.machine import commit, processor
from benchmarks.ops import blocks, decoder, products, vector
from benchmarks.ops.__main__ import add_options
from benchmarks.ops.report import targets
from benchmarks.ops.timing import Measurement
from telechat_moe.ops import native

MEASURES = {
    "vector": vector.cases,
    "dynamic": lambda *how: [*vector.dynamic_cases(*how), *decoder.cases(*how)],
    "products": products.cases,
    "gmm": blocks.grouped_matmul,
    "moe": blocks.moe,
    "attention": blocks.attention,
    "cross-entropy": blocks.cross_entropy,
    "adamw": blocks.adamw,
}


def tell(text: str) -> None:
    """Report which case runs."""
    sys.stderr.write(f"  {text}\n")


def main() -> None:
    """Run the groups that are named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    add_options(parser)
    args = parser.parse_args()
    if args.isa:
        native.use_isa(args.isa)
    cases: list[Measurement] = []
    for threads in args.threads:
        native.set_threads(threads)
        for name in args.only:
            cases += MEASURES[name](threads, args.quick, tell)
    result = {
        "machine": f"{processor()}, {os.cpu_count()} CPUs, {native.isa()}, {native.gemm_backend()}",
        "processor": processor(),
        "isa": native.isa(),
        "commit": commit(),
        "date": date.today().isoformat(),
        "threads": args.threads,
        "targets": [{**t._asdict(), "met": t.met} for t in targets(cases)],
        "cases": [case.as_dict() for case in cases],
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
