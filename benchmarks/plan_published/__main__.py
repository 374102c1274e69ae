"""The simulator against published measurements: `python -m benchmarks.plan_published [TABLE...] [--held-out model]`."""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import answer, new_parser
from benchmarks.plan_published import partial_steps
from benchmarks.plan_published.fit import refit
from benchmarks.plan_published.tables import read_table
from benchmarks.plan_published.validate import checked
from telechat_moe.cli.arguments import add_json
from telechat_moe.cli.output import show_table, write_json
from telechat_moe.cli.plan.score import add_options, percent, show_report
from telechat_moe.cli.progress import bars
from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.cost.device import load_device
from telechat_moe.tools.plan.cost.score import MeasuredStep, report, score

DATA = Path(__file__).parent / "data"
WHOLE_STEPS = (
    "vtrain_a100_single.csv",
    "vtrain_a100_multi.csv",
    "llmfoundry_fsdp.csv",
    "megatron_bridge_perf.csv",
    "nvidia_dgxc_steps.csv",
    "mindformers_ascend.csv",
    "mindspeed_llm_ascend.csv",
    "megatron_functional_golden.csv",
    "published_steps.yaml",
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = new_parser(
        "plan_published",
        "Predict every row of published tables and compare with what was measured. Rows that cannot be "
        "predicted are listed with the reason.",
        "example:\n  python -m benchmarks.plan_published "
        "benchmarks/plan_published/data/vtrain_a100_multi.csv --device a100\n\n"
        "exit codes: 0 ok, 2 usage, 3 bad input or no row that could be scored",
    )
    parser.add_argument(
        "tables",
        nargs="*",
        metavar="TABLE",
        default=[str(DATA / name) for name in WHOLE_STEPS],
        help="CSV tables or published_steps.yaml (default: all in data/ that have whole steps)",
    )
    add_options(parser)
    add_json(parser)
    parser.add_argument(
        "--held-out",
        choices=("model", "scale"),
        help="predict each row with constants fitted to all rows of the given tables but its group's: a model with all "
        "its scales, or one scale of it; else with the device's frozen constants",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Score the tables and return the exit code."""
    load_device(args.device)
    partial: list[partial_steps.PartialStep] = []
    rows: list[MeasuredStep] = []
    for file in args.tables:
        found = partial_steps.read_partial_steps(file)
        partial += found
        if not found or str(file).endswith((".yaml", ".yml")):
            rows += read_table(file)
    scored = score(checked(rows, args.device), args.device)
    if args.held_out:
        with bars() as moved:
            scored = refit(scored, args.device, args.held_out, moved)
    result = report(scored, list(dict.fromkeys(row.table for row in rows)))
    result["parts"] = {
        "tables": partial_steps.summary(partial),
        "rows": partial_steps.plain(partial),
    }
    if not write_json(args.json, result):
        if rows:
            show_report(result, args.rows)
        if partial:
            _show_partial(result["parts"], args.rows or len(partial) < 30)
    errors = [s.error for s in [*scored, *partial]] + [s.memory_error for s in scored]
    if all(error is None for error in errors):
        raise BadInputError("no row could be scored; the reasons are listed above")
    return 0


def _show_partial(result: dict[str, Any], every_row: bool) -> None:
    """Print what was predicted below a whole step."""
    print("\nparts of a step\n")
    if every_row:
        heads = ["row", "part", "predicted ", "measured ", "error ", "prov", "rejected"]
        cells = [
            [
                f"{r['table'].removeprefix('published_steps/')}:{r['line']}",
                r["part"],
                "-" if r["predicted"] is None else f"{r['predicted']:.4g} {r['unit']}",
                f"{r['measured']:.4g} {r['unit']}" if r["measured"] else "-",
                percent(r["error"], signed=True),
                r["provenance"],
                r["rejected"] or "",
            ]
            for r in result["rows"]
        ]
        show_table(heads, cells)
        print()
    lines = [
        [name, str(s["of"]), str(s["rows"]), percent(s.get("mape")), percent(s.get("median"))]
        for name, s in result["tables"].items()
    ]
    show_table(["table", "rows ", "predicted ", "MAPE ", "median "], lines)
    rejected = Counter(r["rejected"] for r in result["rows"] if r["rejected"])
    for reason, count in rejected.most_common():
        print(f"{count:6d}  {reason}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return answer(build_parser(), run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
