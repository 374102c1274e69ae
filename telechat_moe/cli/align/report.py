"""`telechat-moe align report`: the answers of several verbs as one page."""

import argparse
from pathlib import Path

from telechat_moe.cli.output import VERDICT_CODES, show_table, write_json, write_text
from telechat_moe.cli.verb import Verb

NOTES = """\
FILE is what bisect, replay, compare, merge, loss, ckpt or phases wrote with --json. The page needs nothing from
elsewhere and no network. Curves of `align loss` are read again from where the report says they are. The exit code is
that of the worst report.
"""
EXAMPLES = """\
telechat-moe align bisect golden npu --json bisect.json
telechat-moe align loss base.jsonl npu.jsonl --json loss.json
telechat-moe align report bisect.json loss.json --html alignment.html --junit alignment.xml
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="JSON that a verb wrote")
    parser.add_argument("--html", metavar="OUT", help="write the page")
    parser.add_argument("--junit", metavar="OUT", help="write the answers as JUnit XML")


def run(args: argparse.Namespace) -> int:
    """Read, write the page, print; return the exit code."""
    from telechat_moe.tools.align.report import combined as report

    documents = [report.read(Path(name)) for name in args.files]
    write_text("--html ", args.html, lambda: report.page(documents))
    write_text("--junit ", args.junit, lambda: report.junit(documents))
    rows = [
        (one.name, one.verb, one.verdict, *report.judged(one), report.summary(one))
        for one in documents
    ]
    word = report.verdict(documents)
    keys = ("file", "verb", "verdict", "judged", "not_judged", "summary")
    found = {"verdict": word, "reports": [dict(zip(keys, row, strict=True)) for row in rows]}
    if not write_json(args.json, found):
        texts = [[f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in rows]
        show_table(["file", "verb", "verdict", "judged ", "not judged ", "what"], texts)
        print(f"\n{word}")
    return VERDICT_CODES[word]


VERB = Verb(
    name="report",
    help="one page from the reports of other verbs",
    description="Make one page, or JUnit XML, from the JSON reports of other verbs.",
    notes=NOTES,
    examples=EXAMPLES,
    exits={0: "pass", 1: "diverged", 4: "inconclusive"},
    json_keys="verdict, reports (file, verb, verdict, judged, not_judged, summary).",
    arguments=_arguments,
    run=run,
)
