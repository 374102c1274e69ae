"""Derived bounds against correct programs: counts violations and prints how tight the bounds are, operator by operator.

    python -m benchmarks.align_bounds --checks 1e8 --json bounds.json

Needs torch for its CPU kernels and their gradients; without it NumPy's programs alone are judged. One core.
"""

import argparse
import json
import sys
import time
from itertools import count
from pathlib import Path

import numpy as np

from benchmarks.align_bounds import check as bounds

try:
    import torch

    torch.set_num_threads(1)
except ImportError:
    torch = None  # type: ignore[assignment]


def main() -> int:
    """Check until enough elements were compared; return 1 if a bound was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checks", type=float, default=1e8, help="elements to compare (1e8)")
    parser.add_argument("--size", type=int, default=8192, help="elements of a result (8192)")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    begin, total = time.perf_counter(), 0
    tallies = {name: bounds.Tally() for name in bounds.bounds_specs.SPECS}
    for name, dtype, kind, number in bounds.cases(count(args.first)):
        tally = bounds.check(name, dtype, kind, number, args.size, torch)
        tallies[name].add(tally)
        total += tally.checks
        for said in tally.broken:
            print("BROKEN", said, file=sys.stderr)
        if total >= args.checks and name == list(tallies)[-1]:
            break
    seconds = time.perf_counter() - begin
    broken = sum(t.violations for t in tallies.values())
    print(report(tallies))
    tight = [t.tightness() for t in tallies.values()]
    middle = float(np.median([t for t in tight if t is not None]))
    print(f"\n{total:.3g} checks, {broken} violations, {seconds:.0f} s")
    print(f"bound / 99.9 % quantile of observed errors: median operator {middle:.2f}")
    if args.json:
        rows = {
            n: {"checks": t.checks, "violations": t.violations, "tightness": t.tightness()}
            for n, t in tallies.items()
        }
        said = {"checks": total, "violations": broken, "seconds": seconds, "operators": rows}
        Path(args.json).write_text(json.dumps(said, indent=1))
    return int(broken > 0)


def report(tallies: dict[str, bounds.Tally]) -> str:
    """Return the table: checks, violations, and bound over the 99.9 % quantile of errors, all and by type."""
    types = bounds.DTYPES[:3]
    lines = [
        f"{'operator':30}{'checks':>12}{'violations':>11}{'tightness':>10}"
        + "".join(f"{d:>10}" for d in types)
    ]
    for name, t in sorted(tallies.items()):
        numbers = [t.tightness(), *(t.tightness(d) for d in types)]
        shown = "".join("     exact" if n is None else f"{n:10.2f}" for n in numbers)
        why = "; ".join(f"not compared: {reason} ({n})" for reason, n in t.skipped.items())
        lines.append(f"{name:30}{t.checks:12,}{t.violations:11,}{shown}  {why}".rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
