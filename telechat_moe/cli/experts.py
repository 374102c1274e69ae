"""`telechat-moe experts`: what the experts of a run learn."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from telechat_moe.cli.arguments import arg
from telechat_moe.cli.output import VERDICT_CODES, show_table, write_json, write_text
from telechat_moe.cli.verb import Verb
from telechat_moe.errors import UsageError

if TYPE_CHECKING:
    from telechat_moe.analysis.report import ExpertReport

NOTES = """\
Loads over time come from OUTPUT_DIR/metrics.jsonl, where a run records them every telechat_moe.moe.load_interval steps; all
else is computed from checkpoints on a fixed text. Domains are those of --text, else the sources of the run's validation data,
else the longest documents of its one source. What cannot be judged is named with the reason; it is no pass.

Writes OUTPUT_DIR/experts.html, and its numbers as experts.json beside it. docs/experts.md explains them.
"""


COUNTS = {
    "sequences": ("sequences of the text, all domains together", 96),
    "checkpoints": ("checkpoints to compute, the first and the last among them", 5),
    "permutations": ("permutations of the test", 999),
}
"""Options of numbers: what each is, and its default."""


def _texts(arguments: list[str]) -> dict[str, list[str]]:
    texts: dict[str, list[str]] = {}
    for argument in arguments:
        name, equals, path = argument.partition("=")
        if not (name and equals and path):
            expected = "expected NAME=PATH, such as code=/usr/lib/python3.11"
            raise UsageError(f"--text {argument}: {expected}")
        texts.setdefault(name, []).append(path)
    if len(texts) == 1:
        raise UsageError("--text names one domain; give another NAME=PATH to compare it with")
    return texts


def run_experts(args: argparse.Namespace) -> int:
    """Analyse, write page and JSON, and say the most important."""
    for name in COUNTS:
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} {getattr(args, name)}: expected 1 or more")
    texts = _texts(args.text)
    from telechat_moe.analysis.experts import analyse
    from telechat_moe.analysis.page import experts_page

    run = Path(args.output_dir)
    report = analyse(
        run,
        texts,
        **{name: getattr(args, name) for name in COUNTS},
        overrides=args.overrides,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )
    data = report.to_json()
    html = args.html or str(run / "experts.html")
    write_text("--html ", html, lambda: experts_page(report))
    if not write_json(args.json or str(run / "experts.json"), data):
        _show(report)
        print(f"{report.says()}; the page is {html}")
    for problem in report.problems:
        print(problem, file=sys.stderr)
    return {"pass": 0, "fail": 1}.get(report.verdict, VERDICT_CODES["inconclusive"])


def _show(report: ExpertReport) -> None:
    load, last = report.load, report.checkpoints[-1] if report.checkpoints else None
    specialisation = report.specialisation
    columns: dict[str, list[str]] = {"layer": report.layers}
    if load is not None:
        columns["overload "] = [f"{x:.2f}" for x in load.overloads()[-1]]
    if last is not None:
        columns["entropy "] = [f"{x:.3f}" for x in last.entropy]
        columns["margin "] = [_text(x) for x in last.margin]
        columns["routed share "] = [_text(x) for x in last.routed_share]
    if last is not None and last.flipped is not None:
        columns["flipped "] = [f"{x:.1%}" for x in last.flipped]
    if specialisation is not None:
        columns["bits of domain "] = [f"{x:.3f}" for x in specialisation.information_L]
        columns["adjusted p "] = [f"{x:.3g}" for x in specialisation.adjusted_p_L]
    show_table(list(columns), list(zip(*columns.values(), strict=True)))
    for name, reason in report.not_judged.items():
        print(f"not judged: {name}: {reason}")


def _text(number: float | None) -> str:
    return "-" if number is None else f"{number:.3f}"


VERB = Verb(
    name="experts",
    help="what the experts of a run learn: load, specialisation, co-activation, margins, flips",
    description="Analyse the experts of a run on one page: load over time, and what routers do at checkpoints.",
    notes=NOTES,
    examples="telechat-moe experts output\n"
    "telechat-moe experts output --text code=src --text prose=articles.jsonl",
    exits={
        0: "no expert is dead at the end",
        1: "an expert is dead: below 1 % of the mean load in the last record",
        3: "no run, or a damaged file, or one of another run",
        4: "the run recorded no loads, so dead experts are not judged",
    },
    json_keys="verdict, run, layers, experts, top_k, tokens, text, domains, load (steps, tokens_per_step, overload, "
    "recording_share, last), checkpoints (a list of {step, overload, entropy, margin, margin_low, routed, shared, "
    "routed_share, flipped, replaced}), specialisation (information_bits, by_chance_bits, p, adjusted_p, significant, ratio), "
    "coactivation, succession (lists of {layer, strength, pairs}), favourites, problems, not_judged.",
    overrides="override a value of the run's recipe, such as where its data are now",
    arguments=[
        arg("OUTPUT_DIR", "folder of the run"),
        arg(
            "--text NAME=PATH",
            "a domain and a file or folder of its text; any number of times (default: the validation data)",
            [],
            action="append",
        ),
        *(
            arg(f"--{name} N", f"{says} (default: {default})", default)
            for name, (says, default) in COUNTS.items()
        ),
        arg("--html FILE", "the page (default: OUTPUT_DIR/experts.html)"),
    ],
    run=run_experts,
)
