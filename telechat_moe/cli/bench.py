"""`telechat-moe bench ops`: the operators beside torch, Inductor and MindSpore on this machine."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from telechat_moe.cli.output import show_table, write_json
from telechat_moe.errors import CheckFailedError, UsageError

GROUPS = ("vector", "dynamic", "gmm", "moe", "attention", "cross-entropy", "adamw")

EPILOG = """\
example:
  telechat-moe bench ops --quick
  telechat-moe bench ops --json ops.json --html ops.html

Peers that are not installed (torch, mindspore) are left out. All peers run in one process, in turns,
on the same inputs, and their results are compared. The whole set takes about five
minutes for each number of threads.

exit codes: 0 ran (targets may be missed), 1 peers disagree, 2 usage
"""


def register(subparsers: Any) -> None:
    """Add the verb."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench",
        help="measure the operators beside their peers on this machine",
        description="Measure the operators beside torch, TorchInductor and MindSpore.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=["ops"], help="what to measure")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="GROUP")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], metavar="N")
    parser.add_argument("--quick", action="store_true", help="one small shape each, under a minute")
    parser.add_argument("--json", metavar="FILE", help="write the numbers (- for stdout)")
    parser.add_argument("--html", metavar="FILE", help="write a page with bars")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure in a process of its own, whose memory allocator is set up for torch."""
    if args.html:
        _check_writable(args.html)
    result = _measure(args)
    if args.html:
        page: Callable[[Any], str] = import_module("benchmarks.ops.report").page
        Path(args.html).write_text(page(result), encoding="utf-8")
    if not write_json(args.json, result):
        _show(result)
    return 0


def _check_writable(path: str) -> None:
    if not Path(path).resolve().parent.is_dir():
        raise UsageError(f"--html {path}: its folder does not exist")


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    malloc: dict[str, str] = import_module("benchmarks.ops").TUNED_MALLOC
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.ops", str(out)]
        command += ["--only", *args.only, "--threads", *map(str, args.threads)]
        environment = {"GLOG_v": "3", "TORCHINDUCTOR_CACHE_DIR": folder}
        done = subprocess.run(
            [*command, *(["--quick"] if args.quick else [])],
            env={**os.environ, **malloc, **environment},
            stdout=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode or not out.exists():
            raise CheckFailedError(f"the benchmark ended with exit code {done.returncode}")
        return json.loads(out.read_text(encoding="utf-8"))


def _show(result: dict[str, Any]) -> None:
    rows: list[list[str]] = []
    for case in result["cases"]:
        ours = case["best"].get(case["ours"], 0.0)
        for peer, us in case["best"].items():
            ratio = "" if peer == case["ours"] or not ours else f"{us / ours:.2f}x"
            worst = case["extra"].get(f"{peer}: worst call")
            row = [case["op"], case["shape"], str(case["threads"]), peer, f"{us:,.0f}", ratio]
            rows.append([*row, "" if worst is None else f"{worst:,.0f}"])
    head = ["operator", "shape", "threads ", "peer", "best us ", "ours is ", "worst call "]
    show_table(head, rows)
    print()
    reached = [t for t in result["targets"] if t["reached"] is not None]
    show_table(
        ["target", "wanted ", "reached ", ""],
        [
            [t["name"], f"{t['wanted']:g}", f"{t['reached']:.3g}", "met" if t["met"] else "MISSED"]
            for t in reached
        ],
    )
    print(result["machine"])
