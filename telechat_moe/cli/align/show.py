"""`telechat-moe align inspect`: what a dump holds, and what of it nothing can judge."""

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from telechat_moe.cli.arguments import arg
from telechat_moe.cli.output import show_table, write_json
from telechat_moe.cli.verb import Verb
from telechat_moe.errors import UsageError
from telechat_moe.interruption import unfinished
from telechat_moe.units import count_text

NOTES = """\
DUMP is a folder that msprobe wrote (of a run, a step or a rank; MindSpore or PyTorch), or a native dump of MindSpore
(statistic.csv). Neither framework is needed. What has no values can be compared by statistics, checksum or
fingerprint at most; what has nothing at all cannot be judged, and is counted.

--out FILE.csv writes a table with a row for each tensor; --out FOLDER writes the dump in msprobe's form. With --fingerprints it has no values but
2 KiB for each tensor, which tell whether tensors are equal and how far apart they are, whatever the layout.
"""
_COUNTS = ("calls", "tensors", "values", "statistics", "checksums", "fingerprints")


def run(args: argparse.Namespace) -> int:
    """Read, describe; return the exit code."""
    from telechat_moe.tools.align.dump import summary

    path = Path(args.dump)
    if args.fingerprints and args.out is None:
        raise UsageError("--fingerprints needs --out FOLDER")
    dump = summary.chosen(path, args.step, args.rank)
    report = summary.inspect(path, dump, args.calls, args.verify)
    if args.out is not None:
        report["out"] = args.out
        _write(dump, Path(args.out), args.fingerprints)
    if write_json(args.json, report):
        return 0
    ranks, steps = ({r[key] for r in report["ranks"]} for key in ("rank", "step"))
    print(f"{path}: {report['source']}, {len(ranks)} rank(s), {len(steps)} step(s)")
    rows = [
        [
            r["step"],
            r["rank"],
            f"{r['framework']} {r['task']} {r['level']}",
            *(f"{r[key]:,}" for key in _COUNTS),
            count_text(r["elements"]),
            ", ".join(r["dtypes"]),
        ]
        for r in report["ranks"]
    ]
    titles = ["step ", "rank ", "made as", *(f"{key} " for key in _COUNTS), "elements ", "types"]
    show_table(titles, rows)
    if args.calls:
        print()
        show_table(
            ["call", "place", "type", "shape", "max ", "min ", "mean ", "norm ", "has"],
            [_row(c["key"], t) for c in report["calls"] for t in c["tensors"]],
        )
    for reason, count in report["not_judged"].items():
        print(f"not judged: {count:,} {reason}")
    if args.out is not None:
        print(f"written: {args.out}")
    return 0


def _write(dump: Any, out: Path, fingerprints: bool) -> None:
    """Write a dump as a table or, one tensor at a time, as msprobe does."""
    from telechat_moe.tools.align.dump import msprobe_write, summary

    with nullcontext() if out.exists() else unfinished(out):
        if out.suffix == ".csv":
            if fingerprints:
                raise UsageError(f"--out {out}: a table has no fingerprints; name a folder")
            summary.table(dump, out)
        else:
            msprobe_write.write(dump, out, values=not fingerprints, prints=fingerprints)


def _row(key: str, tensor: dict[str, Any]) -> list[object]:
    numbers = [tensor[name] for name in ("max", "min", "mean", "norm")]
    shown = ["-" if n is None else f"{n:.6g}" for n in numbers]
    has = ", ".join(tensor["has"]) or "nothing"
    return [key, tensor["place"], tensor["dtype"], tensor["shape"], *shown, has]


VERB = Verb(
    name="inspect",
    help="show what a dump holds, or write it in another form",
    description="Show what a dump holds, and what of it cannot be judged; write it in another form.",
    notes=NOTES,
    examples="telechat-moe align inspect dump --calls --step 0 --rank 0\n"
    "telechat-moe align inspect dump --out small --fingerprints",
    exits={2: "wrong usage, or --out exists", 3: "missing or broken"},
    json_keys="path, source (msprobe | statistic.csv), ranks (step, rank, framework, task, level, calls, phases, "
    "tensors, values, statistics, checksums, fingerprints, nothing, layouts, elements, dtypes, verified),"
    " not_judged (reason: tensors), calls (with --calls: step, rank, key, kind, phase, parent, tensors "
    "(place, dtype, shape, max, min, mean, norm, has)), out (with --out).",
    arguments=[
        arg("DUMP", "folder of a dump, or a statistic.csv"),
        arg("--calls", "list every tensor of every call"),
        arg("--step N", "only this step", type=int),
        arg("--rank N", "only this rank", type=int),
        arg("--verify", "open every file of values"),
        arg("--out OUT", "write what is shown: FILE.csv, or a folder to make"),
        arg("--fingerprints", "write fingerprints in place of values"),
    ],
    run=run,
)
