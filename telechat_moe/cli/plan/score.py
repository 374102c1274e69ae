"""`telechat-moe plan score`: the simulator against your own measurements."""

import argparse
from collections.abc import Sequence
from typing import Any

from telechat_moe.cli.arguments import arg
from telechat_moe.cli.output import show_table, write_json
from telechat_moe.cli.verb import Verb


def _notes() -> str:
    """Return what the columns of a table mean; parsing needs no numpy, this does."""
    from telechat_moe.tools.plan.cost.measured_steps import describe_columns

    head = "columns of TABLE (a CSV file with a header; any of them, in any order; an empty cell is a cell not given):"
    return f"{head}\n{describe_columns()}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command that scores tables."""
    arg("--device D", "device of rows that name none (default a100)", "a100")(parser)
    arg("--rows", "print every row, not only the summary")(parser)


def run(args: argparse.Namespace) -> int:
    """Run the sub-verb."""
    from telechat_moe.errors import BadInputError
    from telechat_moe.tools.plan.cost.device import load_device
    from telechat_moe.tools.plan.cost.measured_steps import read_measured_steps
    from telechat_moe.tools.plan.cost.score import checked, report, score

    load_device(args.device)
    rows = [row for file in args.tables for row in read_measured_steps(file)]
    scored = score(checked(rows, args.device), args.device)
    result = report(scored, list(dict.fromkeys(row.table for row in rows)))
    if not write_json(args.json, result):
        show_report(result, args.rows)
    if all(step.error is None and step.memory_error is None for step in scored):
        raise BadInputError("no row could be scored; the reasons are listed above")
    return 0


def percent(value: float | None, signed: bool = False) -> str:
    """Write a share; `-` for None."""
    if value is None:
        return "-"
    return f"{value * 100:+.1f} %" if signed else f"{value * 100:.1f} %"


def show_report(result: dict[str, Any], every_row: bool) -> None:
    """Print what `score.report` returned: rows, one line a table, all together, and rejections."""
    if every_row:
        _show_rows(result["rows"])
        print()
    _show_tables(result)
    if result["fits"] is not None:
        print(f"\npublished runs judged to fit: {percent(result['fits'])}")
    if result["rejected"]:
        print("\nrejected rows")
        for reason, count in result["rejected"].items():
            print(f"{count:6d}  {reason}")


def _show_rows(rows: Sequence[dict[str, Any]]) -> None:
    heads = (
        "row", "model", "layout", "predicted ", "measured ", "error ", "memory ", "prov", "rejected",
    )  # fmt: skip
    cells = [
        [
            f"{r['table']}:{r['line']}",
            r["model"][:34],
            r["layout"] or "-",
            "-" if r["predicted_s"] is None else f"{r['predicted_s']:.4g} s",
            "-" if r["measured_s"] is None else f"{r['measured_s']:.4g} s",
            percent(r["error"], signed=True),
            percent(r["memory_error"], signed=True),
            r["provenance"],
            r["rejected"] or "",
        ]
        for r in rows
    ]
    show_table(heads, cells)


def _show_tables(result: dict[str, Any]) -> None:
    heads = (
        "table", "rows ", "timed ", "rejected ", "MAPE ", "median ", "p95 ", "bias ", "memory rows ", "memory MAPE ",
    )  # fmt: skip
    tables: dict[str, dict[str, Any]] = result["tables"]
    totals = {key: sum(t[key] for t in tables.values()) for key in ("of", "rejected")}
    everything: dict[str, Any] = {**totals, **result["overall"], "memory": result["memory"]}
    lines = [
        [
            name,
            str(s["of"]),
            str(s["rows"]),
            str(s["rejected"]),
            *(percent(s.get(key)) for key in ("mape", "median", "p95")),
            percent(s.get("bias"), signed=True),
            str(s["memory"]["rows"]),
            percent(s["memory"].get("mape")),
        ]
        for name, s in [*tables.items(), ("all", everything)]
    ]
    show_table(heads, lines)


VERB = Verb(
    name="score",
    help="predict steps that you measured and print the errors",
    description="Predict every row of tables of measured steps and compare with what was measured. Rows that cannot "
    "be predicted are listed with the reason.",
    notes=_notes,
    examples="telechat-moe plan score steps.csv --device ascend-910b --rows",
    exits={3: "bad input or no row that could be scored"},
    arguments=[arg("tables TABLE", "CSV tables of measured steps", nargs="+"), add_options],
    run=run,
)
