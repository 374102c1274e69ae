"""Writes fitted constants into a device's description: `python -m benchmarks.plan_published.freeze TABLE... --device D`."""

import argparse
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from benchmarks.plan_published.fit import Problem, fit, free_constants
from benchmarks.plan_published.tables import read_table
from benchmarks.plan_published.validate import checked
from telechat_moe.tools.plan.cost.device import FOLDER, base_name, load_device
from telechat_moe.tools.plan.cost.score import MeasuredStep


def rows_of(files: list[str], device: str) -> list[MeasuredStep]:
    """Return the rows with a time that a device (or a variant of it) ran."""
    rows: list[MeasuredStep] = []
    for file in files:
        rows += read_table(file)
    chosen = [r for r in checked(rows, device) if not r.reason and r.step_s]
    return [r for r in chosen if base_name(r.device or device) == device]


def write(device: str, rows: list[MeasuredStep], out: Path | None = None) -> Path:
    """Fit, and write the device's file with new `constants`: to ``out``, or in place if None."""
    problem = Problem(rows, load_device(device), device)
    constants, free = fit(problem), free_constants(rows, problem.device)
    counts = ", ".join(
        f"{table} {n}" for table, n in sorted(Counter(r.table for r in rows).items())
    )
    lines = [
        f"# Fitted to {len(rows)} published steps ({counts}); see benchmarks/plan_published/README.md.",
        "constants:",
    ]
    for name, value in asdict(constants).items():
        number = f"{value:#.4g}"  # with a point: YAML reads 1e-05 as text
        if name in free:
            lines.append(f"  {name}: {number}")
        elif name in problem.device.measured:
            source = problem.device.sources[f"constants.{name}"]
            lines.append(f'  {name}: {{value: {number}, fitted: false, source: "{source}"}}')
    file = FOLDER / f"{device}.yaml"
    text = re.sub(
        r"(# Fitted to [^\n]*\n)?constants:.*",
        "",
        file.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    out = out or file
    out.write_text(text.rstrip() + "\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return out


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="+")
    parser.add_argument("--device", required=True)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write here, not into the device's own file"
    )
    args = parser.parse_args()
    write(args.device, rows_of(args.tables, args.device), args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
