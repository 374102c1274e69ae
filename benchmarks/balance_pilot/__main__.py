"""Train the pilot's variants and say whether they are in the published order: `python -m benchmarks.balance_pilot FOLDER`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.balance_pilot.report import Runs, summary, verdicts
from benchmarks.command import answer
from benchmarks.machine import processor
from telechat_moe.cli.arguments import add_json
from telechat_moe.cli.output import show_table, write_json
from telechat_moe.files import write_atomic

SEEDS = (0, 1, 2)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.balance_pilot",
        description="Train small models that differ in over what their balance loss counts, or in their capacity; print "
        "and draw losses, drop rates and specialisation.",
    )
    parser.add_argument(
        "folder",
        type=Path,
        help="takes a file a run, and index.html; runs that are there are not repeated",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), metavar="N")
    parser.add_argument("--variant", nargs="+", default=[], metavar="NAME", help="these only")
    parser.add_argument("--steps", type=int, metavar="N", help="fewer or more than a run has")
    add_json(parser)
    return parser


def all_runs(folder: Path, names: Sequence[str], seeds: Sequence[int], steps: int) -> Runs:
    """Return the runs of the variants, training those whose file is not in the folder."""
    from benchmarks.balance_pilot.text import Text
    from benchmarks.balance_pilot.train import LENGTH, VARIANTS, VOCABULARY, train

    folder.mkdir(parents=True, exist_ok=True)
    text: Text | None = None
    runs: dict[str, list[Any]] = {name: [] for name in names}
    for name in names:
        for seed in seeds:
            path = folder / f"{name.replace(' ', '_').replace(',', '')}_{seed}_{steps}.json"
            if not path.exists():
                text = text or Text(VOCABULARY, LENGTH)
                found = train(VARIANTS[name], seed, text, steps)
                write_atomic(path, json.dumps(found))
                print(f"{name}, seed {seed}: loss {found['loss']:.4f}", file=sys.stderr, flush=True)
            runs[name].append(json.loads(path.read_text(encoding="utf-8")))
    return runs


def run(arguments: argparse.Namespace) -> int:
    """Train, print the tables, write the page."""
    from benchmarks.balance_pilot.page import page
    from benchmarks.balance_pilot.train import STEPS, VARIANTS
    from telechat_moe.errors import UsageError

    unknown = [name for name in arguments.variant if name not in VARIANTS]
    if unknown:
        raise UsageError(f"--variant {unknown[0]}: not one of {', '.join(VARIANTS)}")
    names = arguments.variant or list(VARIANTS)
    runs = all_runs(arguments.folder, names, arguments.seeds, arguments.steps or STEPS)
    found, said = summary(runs), verdicts(runs)
    write_atomic(arguments.folder / "index.html", page(runs, f"On {processor()}."))
    result = {"machine": processor(), "seeds": arguments.seeds, "summary": found, "verdicts": said}
    if write_json(arguments.json, result):
        return 0
    rows = [
        [name, *(f"{mean:.4f} ± {deviation:.4f}" for mean, deviation in values.values())]
        for name, values in found.items()
    ]
    show_table(["variant", "loss", "held out", "overload", "dropped", "specialisation"], rows)
    rows = [
        [v["claim"], f"{v['difference']:+.4f} ± {v['deviation']:.4f}", v["seeds"], v["verdict"]]
        for v in said
    ]
    show_table(["claim", "difference", "seeds", "verdict"], rows)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return answer(build_parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
