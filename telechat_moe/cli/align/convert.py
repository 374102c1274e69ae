"""`telechat-moe align convert`: a dump as a tree of msprobe, as fingerprints, or as a table."""

import argparse
from contextlib import nullcontext
from pathlib import Path

from telechat_moe.cli.arguments import arg
from telechat_moe.cli.output import write_json
from telechat_moe.cli.verb import Verb
from telechat_moe.interruption import unfinished

NOTES = """\
OUT ending in .csv is a table with a row for each tensor; anything else is a folder that msprobe reads. With
--fingerprints the folder has no values but 2 KiB for each tensor, which tell whether tensors are equal and how far
apart they are, whatever the layout.
"""


def run(args: argparse.Namespace) -> int:
    """Convert; return the exit code."""
    from telechat_moe.tools.align.dump import msprobe_write, summary

    out = Path(args.out)
    dump = summary.read(Path(args.dump))
    with nullcontext() if out.exists() else unfinished(out):
        if out.suffix == ".csv":
            report = {"out": args.out, "tensors": summary.table(dump, out)}
            text = f"{out}: {report['tensors']:,} tensors"
        else:
            msprobe_write.write(dump, out, values=not args.fingerprints, prints=args.fingerprints)
            steps, ranks = (len({place[i] for place in dump.ranks}) for i in (0, 1))
            report = {"out": args.out, "steps": steps, "ranks": ranks}
            text = f"{out}: {steps} step(s), {ranks} rank(s)"
    if not write_json(args.json, report):
        print(text)
    return 0


VERB = Verb(
    name="convert",
    help="write a dump as a tree of msprobe, as fingerprints, or as a table",
    description="Write a dump in another form, reading one tensor at a time.",
    notes=NOTES,
    examples="telechat-moe align convert dump tensors.csv\n"
    "telechat-moe align convert dump small --fingerprints",
    exits={2: "wrong usage, or OUT exists", 3: "missing or broken"},
    json_keys="out, and tensors (of a table) or steps and ranks (of a tree).",
    arguments=[
        arg("DUMP", "folder of a dump, or a statistic.csv"),
        arg("OUT", "folder to make, or FILE.csv"),
        arg("--fingerprints", "fingerprints instead of values"),
    ],
    run=run,
)
