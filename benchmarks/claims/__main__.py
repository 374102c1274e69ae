"""Run the commands behind the pages' numbers and compare: `make claims`.

    python -m benchmarks.claims                 the quick ones: a quarter of an hour
    python -m benchmarks.claims ID...           these, also slow ones
    python -m benchmarks.claims --page          write docs/verification.md
    python -m benchmarks.claims --uncovered     list figures of the pages that no claim covers

Exit codes: 0 ok, 1 a number differs or a quote is gone, 2 usage.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.claims.read import (
    ROOT,
    Claim,
    Quote,
    claims,
    definitions,
    pages,
    problems,
    uncovered,
)

PAGE = ROOT / "docs" / "verification.md"
HEAD = """# What was verified, and how

One row a claim of README and these pages, written by `python -m benchmarks.claims --page` from `benchmarks/claims/claims.yaml`.
`make claims` runs the quick commands again (marked *) and compares what they print with what the pages print.

* **verified**: the command was run on this machine with the code of this commit, and gave what the page says.
* **unverified**: nothing here can check it, or it has not been measured since this commit.
* **compiled only**: compiled for Ascend, never run there.
* **unsupported**: refused.

Machines, two cores of each: AMD, an AMD EPYC (Zen 5, AVX-512); Intel, an Intel Xeon (AVX-512, AMX).
`python -m benchmarks.claims ID` runs the command of a row.

"""


def number(text: str) -> float:
    """Return the value of a printed number."""
    return float(text.replace(",", ""))


def judge(printed: str, measured: float, within: str) -> bool:
    """Return whether a measured number is what a page prints.

    Args:
        printed: As on the page.
        measured: By the command.
        within: ``printed``: to the last printed digit; ``at most``: not above it; else a percentage of it.
    """
    value = number(printed)
    mantissa, _, power = printed.replace(",", "").partition("e")
    digits = len(mantissa.partition(".")[2]) - (int(power) if power else 0)
    half = 0.5000001 * 10.0**-digits
    if within == "printed":
        return abs(measured - value) <= half
    if within == "at most":
        return measured <= value + half
    return abs(measured - value) <= float(within.rstrip(" %")) / 100 * abs(value) + half


def compare(quote: Quote, output: str) -> list[tuple[str, float | None, bool]]:
    """Return printed number, measured one and verdict for each number of a quote."""
    rows: list[tuple[str, float | None, bool]] = []
    for printed, pattern in zip(quote.printed, quote.read, strict=True):
        values = [number(found) for found in re.findall(pattern, output)]
        measured = max(values) if values else None
        rows.append(
            (printed, measured, measured is not None and judge(printed, measured, quote.within))
        )
    return rows


def run(claim: Claim) -> bool:
    """Run a claim's command, print the comparison, and return whether all of it holds."""
    print(f"{claim.id}: {claim.claim}", flush=True)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result"
        command = claim.command.replace("{file}", str(file)).replace("{folder}", folder)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        done = subprocess.run(
            command, shell=True, cwd=ROOT, env={**os.environ, "PATH": path, "COLUMNS": "200"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        output = done.stdout + (file.read_text(encoding="utf-8") if file.exists() else "")
    seconds = time.perf_counter() - began
    good = done.returncode == 0
    if not good:
        print(f"  FAIL: exit code {done.returncode}: {command}\n{output[-2000:]}")
    for quote in claim.quotes if good else ():
        for printed, measured, same in compare(quote, output) if quote.read else ():
            shown = "not found in the output" if measured is None else f"{measured:.6g}"
            print(
                f"  {'ok' if same else 'FAIL'}: {quote.page} prints {printed}, measured {shown} ({quote.within})"
            )
            good = good and same
    print(f"  {'holds' if good else 'FAIL'}, {seconds:.0f} s", flush=True)
    return good


def page(found: list[Claim]) -> str:
    """Return docs/verification.md."""
    rows = ["| claim | status | command | machine, commit, date |", "|---|---|---|---|"]
    for claim in found:
        when = ", ".join(x for x in (claim.machine, claim.commit, claim.date) if x)
        shown = f"`{claim.command}`{' *' if claim.quick else ''}" if claim.command else "none"
        places = ", ".join(
            "README" if p == "README.md" else f"[{Path(p).stem}]({Path(p).name})"
            for p in dict.fromkeys(q.page for q in claim.quotes)
        )
        what = f"`{claim.id}`: {claim.claim}{'. ' + claim.note if claim.note else ''}{' (' + places + ')' if places else ''}"
        rows.append(f"| {what} | {claim.status} | {shown} | {when} |".replace("{file}", "FILE"))
    return HEAD + "\n".join(rows) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.claims",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("ids", nargs="*", metavar="ID")
    parser.add_argument("--page", action="store_true", help="write docs/verification.md")
    parser.add_argument(
        "--uncovered", action="store_true", help="list figures that no claim covers"
    )
    args = parser.parse_args(argv)
    found = claims()
    if unknown := set(args.ids) - {claim.id for claim in found}:
        parser.error(
            f"no claim {', '.join(sorted(unknown))}; there are {', '.join(c.id for c in found)}"
        )
    if args.page:
        PAGE.write_text(page(found), encoding="utf-8")
        return 0
    if args.uncovered:
        missing = [
            f"{p}: {unit}" for p in pages() for unit in uncovered(p, found, definitions().get(p))
        ]
        print("\n".join(missing))
        return int(bool(missing))
    wrong = problems(found)
    for text in wrong:
        print(f"FAIL: {text}")
    chosen = [c for c in found if c.command and (c.id in args.ids or (c.quick and not args.ids))]
    print(
        f"{len(chosen)} commands, about {sum(c.quick for c in chosen) / 60:.0f} minutes or more",
        flush=True,
    )
    bad = []
    for number, claim in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] ", end="")
        bad += [] if run(claim) else [claim.id]
    print(f"{len(chosen)} commands run; {'all hold' if not bad else 'not held: ' + ', '.join(bad)}")
    if wrong:
        print(f"{len(wrong)} quotes are not in their pages; they are listed at the top")
    return int(bool(wrong or bad))


if __name__ == "__main__":
    sys.exit(main())
