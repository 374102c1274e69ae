"""Draw mutants of rooms, run the fast tests that call the changed function, and list those that survive."""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import yaml

from benchmarks.command import answer
from benchmarks.mutants.copies import ROOT, Copy, Outcome
from benchmarks.mutants.operators import Mutant, mutants, parses
from telechat_moe.errors import BadInputError, UsageError

sys.path.append(str(ROOT / "tests" / "support"))
from import_graph import reached, sources  # pyright: ignore[reportMissingImports]

ENOUGH = 0.95
"""Share of the mutants that matter which fast tests must kill."""
SLACK = 60.0
"""Seconds that a run of tests may take beyond three times what it took without a mistake."""
STYLE = {"test_floors.py", "test_docs.py", "test_package.py"}
"""Tests that read sources as texts: they may see a mistake, but not what it does."""
EQUIVALENT = Path(__file__).with_name("equivalent.yaml")


@dataclass(frozen=True)
class Recorded:
    """A test, how long it takes, and the functions that it calls, each a file and the function's first line."""

    test: str
    seconds: float
    functions: frozenset[tuple[str, int]]


def room_files(rooms: Sequence[str]) -> list[Path]:
    """Return the sources of rooms.

    Raises:
        UsageError: A room has none.
    """
    files: list[Path] = []
    for room in rooms:
        path = (ROOT / room).resolve()
        below = [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))
        if not path.exists() or not below or not path.is_relative_to(ROOT):
            raise UsageError(f"{room}: no folder or file of the repository with Python in it")
        files += below
    return files


def test_files(files: Collection[Path]) -> list[str]:
    """Return the test files that may see a mistake in sources: the folder that mirrors their room.

    For a source that none of these names, also those of other folders that do.
    """
    steps = {
        path: reached(path)
        for path in sources("tests", "benchmarks")
        if path.name.startswith("test_") and path.name not in STYLE and "mutants" not in path.parts
    }
    chosen: set[Path] = set()
    for file in files:
        room = file.relative_to(ROOT).parts[1]
        mirror = {path for path in steps if path.is_relative_to(ROOT / "tests" / room)}
        naming = {path for path, names in steps.items() if names.get(file) == 1}
        chosen |= mirror if naming & mirror else mirror | naming
    return sorted(str(path.relative_to(ROOT)) for path in chosen)


def draw(files: Sequence[Path], count: int, seed: int) -> list[Mutant]:
    """Draw mutants that are Python, each line of a room as likely as the mistakes that can be made there."""
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}
    every = [mutant for file, text in texts.items() for mutant in mutants(file, text)]
    random.Random(seed).shuffle(every)
    drawn = (mutant for mutant in every if parses(mutant.apply(texts[mutant.file])))
    return [mutant for _, mutant in zip(range(count), drawn, strict=False)]


def record(copy: Copy, tests: Sequence[str], file: Path, timeout: float) -> list[Recorded]:
    """Return what passes among the fast tests, recorded in a file once.

    Raises:
        BadInputError: Tests take longer than ``timeout`` seconds, or none passes.
    """
    if not file.exists():
        words = ["-p", "benchmarks.mutants.record", "-m", "not slow", "-rfE", *tests]
        partial = file.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        try:
            done = copy.pytest(words, timeout, MUTANTS_RECORD=str(partial))
        except subprocess.TimeoutExpired:
            raise BadInputError(f"the tests take more than {timeout:.0f} s unchanged") from None
        if done.returncode not in (0, 1):  # all passed, some failed
            raise BadInputError(f"the tests do not run unchanged:\n{done.stdout[-2000:]}")
        lines = done.stdout.splitlines()
        bad = {x.split()[1] for x in lines if x.startswith(("FAILED ", "ERROR "))}
        rows = [row for row in _rows(partial) if row["test"] not in bad]
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        partial.rename(file)
    return [
        Recorded(r["test"], r["seconds"], frozenset((f, n) for f, n in r["functions"]))
        for r in _rows(file)
    ]


def _rows(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]


def tests_for(mutant: Mutant, recorded: Sequence[Recorded], budget: float) -> list[Recorded]:
    """Return the quickest tests that call the function of a mutant, together of at most so many seconds, one at least.

    Where none does, or outside functions, those that call any function of the file: the place ran at import.
    """
    place = (mutant.file, mutant.function)
    calling = [test for test in recorded if place in test.functions] or [
        test for test in recorded if any(file == mutant.file for file, _ in test.functions)
    ]
    chosen: list[Recorded] = []
    for test in sorted(calling, key=lambda test: test.seconds):
        budget -= test.seconds
        if chosen and budget < 0:
            break
        chosen.append(test)
    return chosen


def equivalent(mutant: Mutant, listed: Sequence[Mapping[str, str]]) -> str:
    """Return why a mutant changes nothing that matters, as a person wrote it; empty: nobody did."""
    place = (mutant.file, mutant.before.strip(), mutant.after.strip())
    for row in listed:
        if (row["file"], row["before"].strip(), row["after"].strip()) == place:
            return row["reason"]
    return ""


def judged(
    drawn: Sequence[Mutant],
    recorded: Sequence[Recorded],
    copies: Sequence[Copy],
    budget: float,
    file: Path,
) -> Iterator[tuple[Mutant, Outcome]]:
    """Yield mutants with what tests said, from a file if they were run before; others are appended to it."""
    known = {json.dumps(r["mutant"], sort_keys=True): Outcome(*r["outcome"]) for r in _rows(file)}
    idle: SimpleQueue[Copy] = SimpleQueue()
    for copy in copies:
        idle.put(copy)

    def judge(mutant: Mutant) -> tuple[Mutant, Outcome]:
        if outcome := known.get(json.dumps(asdict(mutant), sort_keys=True)):
            return mutant, outcome
        tests = tests_for(mutant, recorded, budget)
        timeout = 3 * sum(test.seconds for test in tests) + SLACK
        copy = idle.get()
        try:
            outcome = copy.judge(mutant, [test.test for test in tests], timeout)
        finally:
            idle.put(copy)
        row = {"mutant": asdict(mutant), "outcome": outcome}
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")
        return mutant, outcome

    with ThreadPoolExecutor(len(copies)) as pool:
        yield from pool.map(judge, drawn)


def state(rooms: Sequence[str]) -> str:
    """Return a hash of rooms and of the working tree, so that results of others are not taken for theirs."""
    digest = hashlib.sha256(repr(rooms).encode())
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.yaml", "*.cc", "*.h"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file() and name != str(EQUIVALENT.relative_to(ROOT)):
            digest.update(name.encode() + (ROOT / name).read_bytes())
    return digest.hexdigest()[:16]


def run(args: argparse.Namespace) -> int:
    """Draw, run and report; return the exit code."""
    files = room_files(args.rooms)
    drawn = draw(files, args.count, args.seed)
    listed = yaml.safe_load(EQUIVALENT.read_text(encoding="utf-8")) or []
    name = args.rooms[0].strip("/").replace("/", "_")
    folder = Path(args.out) / f"{name}-{state(args.rooms)}"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        copies = [Copy(Path(place) / str(job)) for job in range(args.jobs)]
        recorded = record(
            copies[0],
            test_files({ROOT / mutant.file for mutant in drawn}),
            folder.resolve() / f"tests-{args.seed}-{args.count}.jsonl",
            args.record_timeout,
        )
        print(
            f"{len(recorded)} fast tests, {sum(t.seconds for t in recorded):.0f} s recorded; {folder}"
        )
        counts: Counter[str] = Counter()
        rows: list[dict[str, Any]] = []
        results = folder / f"mutants-{args.seed}.jsonl"
        for mutant, outcome in judged(drawn, recorded, copies, args.seconds, results):
            reason = equivalent(mutant, listed)
            verdict = "equivalent" if reason and outcome.verdict != "killed" else outcome.verdict
            counts[verdict] += 1
            rows.append(
                {**asdict(mutant), **outcome._asdict(), "verdict": verdict, "reason": reason}
            )
            print(
                f"{mutant.file}:{mutant.line}: {mutant.kind}: {verdict} {outcome.by or reason}",
                flush=True,
            )
            if verdict in ("survived", "no tests"):
                print(mutant.diff(), flush=True)
    matter = len(rows) - counts["equivalent"]
    killed = counts["killed"] + counts["hung"]
    share = killed / matter if matter else 0.0
    print(
        f"{len(rows)} mutants: {killed} killed ({counts['hung']} of them hung), {counts['survived']} survived, "
        f"{counts['no tests']} that no test calls, {counts['equivalent']} equivalent; "
        f"{share:.1%} of those that matter"
    )
    if args.json:
        report = {"rooms": args.rooms, "seed": args.seed, "killed": share, "mutants": rows}
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if share >= ENOUGH else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__)
    parser.add_argument(
        "rooms", nargs="+", metavar="ROOM", help="folder or file, as telechat_moe/recipe"
    )
    parser.add_argument("--count", type=int, default=60, help="how many mutants (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="which (default 0)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="at a time (default: cores)"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of tests for each (default 60)"
    )
    parser.add_argument(
        "--record-timeout", type=float, default=3600.0, help="seconds for all tests once"
    )
    parser.add_argument("--out", default="output/mutants", help="results, from which a run goes on")
    parser.add_argument("--json", metavar="FILE", help="write a report")
    return answer(parser, run, argv)


if __name__ == "__main__":
    sys.exit(main())
