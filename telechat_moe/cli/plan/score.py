"""`telechat-moe plan score`: the simulator against published measurements."""

import argparse
import sys
from collections import Counter
from typing import Any

from telechat_moe.cli.output import show_table, write_json
from telechat_moe.cli.progress import bars


def register(verbs: Any) -> None:
    """Add the sub-verb to the command line."""
    parser = verbs.add_parser(
        "score",
        help="predict published measurements and print the errors",
        description="Predict every row of published tables and compare with what was measured. Rows that cannot be "
        "predicted are listed with the reason.",
        epilog="example:\n  telechat-moe plan score benchmarks/plan_published/data/vtrain_a100_multi.csv --device a100\n\n"
        "exit codes: 0 ok, 2 usage, 3 bad input or no row that could be scored",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "tables", nargs="+", metavar="TABLE", help="CSV tables or published_steps.yaml"
    )
    parser.add_argument(
        "--device", default="a100", metavar="D", help="device of rows that name none (default a100)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the report (- for stdout)")
    parser.add_argument("--rows", action="store_true", help="print every row, not only the summary")
    parser.add_argument(
        "--held-out",
        choices=("model", "scale"),
        help="predict each row with constants fitted to all rows of the given tables but its group's: a model with all "
        "its scales, or one scale of it; else with the device's frozen constants",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the sub-verb."""
    from benchmarks.plan_published import tables
    from telechat_moe.errors import BadInputError
    from telechat_moe.tools.plan.cost import device, score

    device.load_device(args.device)
    from benchmarks.plan_published import parts as of_steps

    parts: list[Any] = []
    rows: list[Any] = []
    for file in args.tables:
        found: list[Any] = of_steps.read_parts(file)
        parts += found
        if not found or str(file).endswith((".yaml", ".yml")):
            rows += tables.read_table(file)
    scored: list[Any] = score.score(score.checked(rows, args.device), args.device)
    if args.held_out:
        with bars() as moved:
            scored = score.refit(scored, args.device, args.held_out, moved)
    result: dict[str, Any] = score.report(scored, list(dict.fromkeys(row.table for row in rows)))
    result["parts"] = {"tables": of_steps.summary(parts), "rows": of_steps.plain(parts)}
    if not write_json(args.json, result):
        if rows:
            _show(result, args.rows)
        if parts:
            _show_parts(result["parts"], args.rows or len(parts) < 30)
    errors = [s.error for s in [*scored, *parts]] + [s.memory_error for s in scored]
    if all(error is None for error in errors):
        raise BadInputError("no row could be scored; the reasons are listed above")
    return 0


def _percent(value: float | None, signed: bool = False) -> str:
    if value is None:
        return "-"
    return f"{value * 100:+.1f} %" if signed else f"{value * 100:.1f} %"


def _show_parts(result: dict[str, Any], every_row: bool) -> None:
    """Print what was predicted of parts of a step."""
    sys.stdout.write("\nparts of a step\n\n")
    if every_row:
        heads = ["row", "part", "predicted ", "measured ", "error ", "prov", "rejected"]
        cells = [
            [
                f"{r['table'].removeprefix('published_steps/')}:{r['line']}",
                r["part"],
                "-" if r["predicted"] is None else f"{r['predicted']:.4g} {r['unit']}",
                f"{r['measured']:.4g} {r['unit']}" if r["measured"] else "-",
                _percent(r["error"], signed=True),
                r["provenance"],
                r["rejected"] or "",
            ]
            for r in result["rows"]
        ]
        show_table(heads, cells)
        sys.stdout.write("\n")
    lines = [
        [name, str(s["of"]), str(s["rows"]), _percent(s.get("mape")), _percent(s.get("median"))]
        for name, s in result["tables"].items()
    ]
    show_table(["table", "rows ", "predicted ", "MAPE ", "median "], lines)
    rejected = Counter(r["rejected"] for r in result["rows"] if r["rejected"])
    for reason, count in rejected.most_common():
        sys.stdout.write(f"{count:6d}  {reason}\n")


def _show(result: dict[str, Any], every_row: bool) -> None:
    """Print the result: rows, rejections, one line a table, and all together."""
    write = sys.stdout.write
    if every_row:
        cells = [
            [
                f"{r['table']}:{r['line']}",
                r["model"][:34],
                r["layout"] or "-",
                "-" if r["predicted_s"] is None else f"{r['predicted_s']:.4g} s",
                "-" if r["measured_s"] is None else f"{r['measured_s']:.4g} s",
                _percent(r["error"], signed=True),
                _percent(r["memory_error"], signed=True),
                r["provenance"],
                r["rejected"] or "",
            ]
            for r in result["rows"]
        ]
        heads = [
            "row",
            "model",
            "layout",
            "predicted ",
            "measured ",
            "error ",
            "memory ",
            "prov",
            "rejected",
        ]
        show_table(heads, cells)
        write("\n")
    lines: list[list[str]] = []
    for name, s in [
        *result["tables"].items(),
        ("all", {**result["overall"], "memory": result["memory"]}),
    ]:
        memory = s["memory"]
        lines.append(
            [
                name,
                str(s.get("of", sum(t["of"] for t in result["tables"].values()))),
                str(s["rows"]),
                str(s.get("rejected", sum(t["rejected"] for t in result["tables"].values()))),
                *(_percent(s.get(key)) for key in ("mape", "median", "p95")),
                _percent(s.get("bias"), signed=True),
                str(memory["rows"]),
                _percent(memory.get("mape")),
            ]
        )
    heads = [
        "table",
        "rows ",
        "timed ",
        "rejected ",
        "MAPE ",
        "median ",
        "p95 ",
        "bias ",
        "memory rows ",
        "memory MAPE ",
    ]
    show_table(heads, lines)
    if result["fits"] is not None:
        write(f"\npublished runs judged to fit: {_percent(result['fits'])}\n")
    if result["rejected"]:
        write("\nrejected rows\n")
        for reason, count in result["rejected"].items():
            write(f"{count:6d}  {reason}\n")
