"""The operators beside torch, Inductor and MindSpore on this machine: `python -m benchmarks.ops`."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.command import answer, new_parser
from benchmarks.machine import processor
from benchmarks.ops import TUNED_MALLOC, sets
from benchmarks.ops.report import page
from telechat_moe.cli.arguments import add_json
from telechat_moe.cli.output import show_table, write_json, write_text
from telechat_moe.errors import BadInputError, CheckFailedError
from telechat_moe.ops import native

GROUPS = ("vector", "dynamic", "products", "gmm", "moe", "attention", "cross-entropy", "adamw")

EPILOG = """\
example:
  python -m benchmarks.ops --quick
  python -m benchmarks.ops --json ops.json --html ops.html
  python -m benchmarks.ops --isa scalar --sets ops_sets.json

Peers that are not installed (torch, mindspore) are named on standard error and left out. All peers run
in one process, in turns, on the same inputs, and their results are compared. The whole set takes about
five minutes for each number of threads.

exit codes: 0 ran (targets may be missed), 1 peers disagree, 2 usage, 3 no such instruction set here, or
--sets is of another processor
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = new_parser(
        "ops", "Measure the operators and those of torch, TorchInductor and MindSpore.", EPILOG
    )
    add_options(parser)
    add_json(parser)
    parser.add_argument("--html", metavar="FILE", help="write a page with bars")
    parser.add_argument(
        "--sets", metavar="FILE", help="keep our times there, a column for each instruction set"
    )
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is measured."""
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="GROUP")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], metavar="N")
    parser.add_argument("--quick", action="store_true", help="one small shape each, under a minute")
    parser.add_argument(
        "--isa",
        choices=native.ISAS,
        help="instruction set of our operators and MindSpore's products",
    )


def run(args: argparse.Namespace) -> int:
    """Measure in a child process, whose memory allocator is set up for torch."""
    write_text("--html ", args.html, str)  # fail now, not after ten minutes
    if args.isa and args.isa not in native.isas():
        best = native.isas()[-1]
        raise BadInputError(
            f"--isa {args.isa}: this processor has no {args.isa}, its best is {best}"
        )
    if args.sets:
        sets.keep(
            Path(args.sets),
            {"processor": processor(), "isa": "", "commit": "", "date": "", "cases": []},
        )
    if missing := [name for name in ("torch", "mindspore") if find_spec(name) is None]:
        sys.stderr.write(
            f"not installed, so not compared: {', '.join(missing)}; `make test-torch` installs torch, `make train` mindspore\n"
        )
    result = _measure(args)
    if args.sets:
        result["sets"] = sets.keep(Path(args.sets), result)
        write_text("--sets ", args.sets, lambda: json.dumps(result["sets"], indent=2) + "\n")
    write_text("--html ", args.html, lambda: page(result))
    if not write_json(args.json, result):
        _show(result)
    return 0


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.ops.measure", str(out)]
        command += ["--only", *args.only, "--threads", *map(str, args.threads)]
        environment = {**TUNED_MALLOC, "GLOG_v": "3", "TORCHINDUCTOR_CACHE_DIR": folder}
        environment["OPENBLAS_NUM_THREADS"] = "1"
        done = subprocess.run(
            [
                *command,
                *(["--quick"] if args.quick else []),
                *(["--isa", args.isa] if args.isa else []),
            ],
            env={**os.environ, **environment},
            stdout=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode or not out.exists():
            raise CheckFailedError(f"the benchmark ended with exit code {done.returncode}")
        return json.loads(out.read_text(encoding="utf-8"))


def _show(result: dict[str, Any]) -> None:
    """Print times and targets."""
    rows: list[list[str]] = []
    for case in result["cases"]:
        ours = case["best"].get(case["ours"], 0.0)
        for peer, us in case["best"].items():
            ratio = "" if peer == case["ours"] or not ours else f"{us / ours:.2f}x"
            worst = case["extra"].get(f"{peer}: worst call")
            differs = case["compared"].get(peer)
            row = [case["op"], case["shape"], str(case["threads"]), peer, f"{us:,.0f}", ratio]
            row += ["" if differs is None else f"{differs:.0e}"]
            rows.append([*row, "" if worst is None else f"{worst:,.0f}"])
    head = [
        "operator",
        "shape",
        "threads ",
        "peer",
        "best us ",
        "ours is ",
        "differs by ",
        "worst call ",
    ]
    show_table(head, rows)
    print()
    reached = [
        [t["name"], f"{t['wanted']:g}", f"{t['reached']:.3g}", "met" if t["met"] else "MISSED"]
        for t in result["targets"]
        if t["reached"] is not None
    ]
    if reached:
        show_table(["target", "wanted ", "reached ", ""], reached)
    else:
        print(
            "no target was judged: they compare with torch, which is not installed or measured here"
        )
    if kept := result.get("sets"):
        show_table(*sets.table(kept))
        print(sets.never(kept))
    print(result["machine"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return answer(build_parser(), run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
