"""Run the commands behind the pages' numbers and compare: `make claims`.

    python -m benchmarks.claims                 the quick ones: a quarter of an hour
    python -m benchmarks.claims --changed       those whose code or words of a page changed since their commit
    python -m benchmarks.claims ID...           these, also slow ones
    python -m benchmarks.claims --page          write benchmarks/claims/verification.md
    python -m benchmarks.claims --uncovered     list figures of the pages that no claim covers

Exit codes: 0 ok, 1 a number differs or a quote is gone, 2 usage.
"""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.claims.compare import compare
from benchmarks.claims.history import git, holds_here, reworded, stale, this_machine
from benchmarks.claims.read import ROOT, Claim, definitions, pages, problems, read_claims, uncovered
from benchmarks.command import new_parser

PAGE = Path(__file__).with_name("verification.md")
HEAD = """# What was verified, and how

One row a claim of README, docs and the READMEs of benchmarks, written by `python -m benchmarks.claims --page` from `benchmarks/claims/claims.yaml`.
`make claims` runs the quick commands again (marked *) and compares what they print with what the pages print; CI does so where code or words changed.

* **verified**: the command was run on this machine (any: the numbers do not depend on it) with the code of this commit, and gave what the page says.
* **unverified**: nothing here can check it, or it has not been measured since this commit.
* **compiled only**: compiled for Ascend, never run there.
* **unsupported**: refused.

Machines, two cores of each: AMD, an AMD EPYC (Zen 5, AVX-512; Zen 4 where it says so); Intel, an Intel Xeon (AVX-512, AMX).
`python -m benchmarks.claims ID` runs the command of a row.

"""


def run(claim: Claim) -> bool:
    """Run a claim's command, print the comparison, and return whether all of it holds."""
    print(f"{claim.id}: {claim.claim}", flush=True)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result"
        command = claim.command.replace("{file}", str(file)).replace("{folder}", folder)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        process = subprocess.run(
            command, shell=True, cwd=ROOT, env={**os.environ, "PATH": path, "COLUMNS": "200"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        output = process.stdout + (file.read_text(encoding="utf-8") if file.exists() else "")
    seconds = time.perf_counter() - began
    good = process.returncode == 0
    if not good:
        print(f"  FAIL: exit code {process.returncode}: {command}\n{output[-2000:]}")
    for quote in claim.quotes if good else ():
        for printed, measured, equal in compare(quote, output):
            shown = "not found in the output" if measured is None else f"{measured:.6g}"
            print(
                f"  {'ok' if equal else 'FAIL'}: {quote.page} prints {printed}, measured {shown} ({quote.within})"
            )
            good = good and equal
    print(f"  {'holds' if good else 'FAIL'}, {seconds:.0f} s", flush=True)
    return good


def _title(page: str) -> str:
    """Return what a page is called in a list: its name, or that of its benchmark."""
    path = Path(page)
    return path.parent.name if path.name == "README.md" and path.parent.name else path.stem


def page(claims: list[Claim]) -> str:
    """Return benchmarks/claims/verification.md."""
    rows = ["| claim | status | command | machine, commit, date |", "|---|---|---|---|"]
    for claim in claims:
        when = ", ".join(x for x in (claim.machine, claim.commit, claim.date) if x)
        shown = f"`{claim.command}`{' *' if claim.quick else ''}" if claim.command else "none"
        places = ", ".join(
            f"[{_title(p)}](../../{p})" for p in dict.fromkeys(q.page for q in claim.quotes)
        )
        description = f"`{claim.id}`: {claim.claim}{'. ' + claim.note if claim.note else ''}{' (' + places + ')' if places else ''}"
        rows.append(
            f"| {description} | {claim.status} | {shown} | {when} |".replace("{file}", "FILE")
        )
    return HEAD + "\n".join(rows) + "\n"


def select(claims: Sequence[Claim], changed: bool) -> list[Claim]:
    """Return the quick claims that are compared on this machine, in an order that the commit draws.

    Args:
        changed: Only those of which code or words of a page changed since their commit, and whose numbers depend on no
            machine: processors of one name may still round differently, which must not fail CI.
    """
    quick = [c for c in claims if c.quick and not (changed and not (stale(c) or reworded(c)))]
    comparable = [c for c in quick if c.machine == "any" or (not changed and holds_here(c))]
    if others := [f"{c.id} ({c.machine})" for c in quick if c not in comparable]:
        print(
            f"not compared here ({this_machine()}), for they hold on one machine: {', '.join(others)}"
        )
    head = git("rev-parse", "HEAD").stdout
    return sorted(comparable, key=lambda c: hashlib.sha256(f"{head}{c.id}".encode()).digest())


def run_all(chosen: Sequence[Claim], seconds: float) -> list[str]:
    """Run claims one after another while they fit into the time, and return those that do not hold."""
    bad, left, began = [], [], time.perf_counter()
    for number, claim in enumerate(chosen, 1):
        if time.perf_counter() - began + claim.quick > seconds:
            left.append(claim.id)
            continue
        print(f"[{number}/{len(chosen)}] ", end="")
        bad += [] if run(claim) else [claim.id]
    if left:
        print(f"not run, for they do not fit into {seconds / 60:.0f} minutes: {', '.join(left)}")
    ran = len(chosen) - len(left)
    summary = "not held: " + ", ".join(bad) if bad else "all hold" if ran else "nothing is judged"
    print(f"{ran} commands run; {summary}")
    return bad


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = new_parser("claims", __doc__)
    parser.add_argument("ids", nargs="*", metavar="ID")
    parser.add_argument(
        "--changed",
        action="store_true",
        help="only those whose code or words changed since their commit",
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="run no more than fits into this time"
    )
    parser.add_argument(
        "--page", action="store_true", help="write benchmarks/claims/verification.md"
    )
    parser.add_argument(
        "--uncovered", action="store_true", help="list figures that no claim covers"
    )
    args = parser.parse_args(argv)
    claims = read_claims()
    if unknown := set(args.ids) - {claim.id for claim in claims}:
        parser.error(
            f"no claim {', '.join(sorted(unknown))}; there are {', '.join(c.id for c in claims)}"
        )
    if args.page:
        PAGE.write_text(page(claims), encoding="utf-8")
        return 0
    if args.uncovered:
        missing = [
            f"{p}: {unit}" for p in pages() for unit in uncovered(p, claims, definitions().get(p))
        ]
        print("\n".join(missing))
        return int(bool(missing))
    wrong = problems(claims)
    for text in wrong:
        print(f"FAIL: {text}")
    for claim in () if args.ids or args.changed else claims:
        if since := stale(claim):
            print(f"stale since {claim.commit}: {claim.id}: {', '.join(since)}")
    chosen = (
        [c for c in claims if c.id in args.ids and c.command]
        if args.ids
        else select(claims, args.changed)
    )
    print(
        f"{len(chosen)} commands, about {sum(c.quick for c in chosen) / 60:.0f} minutes or more",
        flush=True,
    )
    bad = run_all(chosen, 60 * args.minutes)
    if wrong:
        print(
            f"{len(wrong)} quotes are not in their pages or not compared; they are listed at the top"
        )
    return int(bool(wrong or bad))


if __name__ == "__main__":
    sys.exit(main())
