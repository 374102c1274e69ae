"""`telechat-moe align compare`: the tensors of two dumps by a published standard."""

import argparse
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

from telechat_moe.cli.arguments import add_runs
from telechat_moe.cli.output import (
    VERDICT_CODES,
    show_coverage,
    show_left,
    show_table,
    write_json,
    write_text,
)
from telechat_moe.cli.progress import bar
from telechat_moe.cli.verb import Verb
from telechat_moe.errors import UsageError
from telechat_moe.units import size_text

NOTES = """\
Tensors are paired by step, rank, call and place, and judged one after another, worst first in the table. Profiles:

  ascend-l0 -l1 -l2  MARE, MERE and RMSE over those of a third run (--benchmark): 10, 2, 2; 5, 1.5, 1.5; 2, 1.2, 1.2
  ecosystem          MERE < T, MARE < 10 T: float16 2^-10, bfloat16 2^-7, float32 2^-13
  mixed              99 % within rtol and atol, largest error at most max(floor, 32 ULP); -0924: as revised then
  mindformers        cosine > 0.999, L1 ratio - 1 < 0.01, KL divergence < 0.005
  msprobe            cosine > 0.99, then largest error < 0.001 or shares of 1 %, 0.1 %, 0.01 %
  torch              torch.testing.assert_close
  close              |target - reference| <= atol + rtol |reference| (--rtol 1e-5 --atol 1e-8)
  ulp                at most --max (1) numbers of the target's type are between the two
  bitwise            equal bytes

A choice (top-k, arg-max, sort) that comes out differently is legal where the reference's scores nearly tie; then
tokens that went the same way are compared, and where tokens mix, calls are replayed in isolation. Dumps without
values are judged as far as fingerprints, checksums and statistics go. Runs of other layouts are merged first (--said
as for `align merge`). Runs whose calls are not the same, of another layout's graph or another framework, need --map
as for `align bisect`: what it names is made whole from all ranks and compared. `--map weights`: gradients, weights
and states of all updates. docs/align_compare.md has all numbers and their sources.
"""
EXAMPLES = """\
telechat-moe align compare gpu_dump npu_dump --profile ecosystem
telechat-moe align compare golden npu_dump --benchmark gpu_dump --profile ascend-l1 --json -
telechat-moe align compare hf ours --map map.json --profile torch
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_runs(parser)
    parser.add_argument(
        "--profile", metavar="NAME", help="the standard (mixed; with --benchmark ascend-l0)"
    )
    parser.add_argument("--benchmark", metavar="DUMP", help="third run, for ascend-l0, -l1, -l2")
    for name, what in (("rtol", "relative tolerance"), ("atol", "absolute tolerance")):
        parser.add_argument(f"--{name}", type=_number, metavar="X", help=f"{what} of close")
    parser.add_argument(
        "--max", type=_number, metavar="N", help="numbers that may be between the two: ulp"
    )
    parser.add_argument(
        "--as",
        dest="kind",
        metavar="TYPE",
        help="wider tensors were computed from bfloat16, float16 or hf32: its thresholds",
    )
    parser.add_argument(
        "--equal-nan", action="store_true", help="NaN at the same places agree: torch, close"
    )
    parser.add_argument("--step", type=int, metavar="N", help="only this step")
    parser.add_argument(
        "--common", action="store_true", help="ignore what only one of the dumps has"
    )
    parser.add_argument(
        "--said", metavar="FILE", help="what the dumps do not say of layouts: merge"
    )
    parser.add_argument(
        "--map",
        metavar="FILE",
        help="tensors that both runs have, where calls differ; or `weights`",
    )
    parser.add_argument("--rows", type=int, default=20, metavar="N", help="lines of the table (20)")
    parser.add_argument("--junit", metavar="FILE", help="write the answer as JUnit XML")


def _number(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError
    return value


def run(args: argparse.Namespace) -> int:
    """Compare, print; return the exit code."""
    from telechat_moe.tools.align.compare import profiles

    name = args.profile or ("ascend-l0" if args.benchmark else profiles.DEFAULT)
    options = profiles.Options(args.rtol, args.atol, args.max, args.kind, args.equal_nan)
    chosen = profiles.profile(name, options)
    if chosen.third != (args.benchmark is not None):
        needed = "needs a third run: --benchmark DUMP" if chosen.third else "takes no --benchmark"
        raise UsageError(f"--profile {name} {needed}")
    if args.map and (args.benchmark or args.said):
        raise UsageError("--map takes neither --benchmark nor --said")
    outcome = _compare(args, chosen)
    write_text("--junit ", args.junit, lambda: _junit(outcome, args.target))
    code = VERDICT_CODES[outcome.verdict]
    if write_json(args.json, outcome.as_json()):
        return code
    _show(outcome, max(0, args.rows))
    return code


def _compare(args: argparse.Namespace, chosen: Any) -> Any:
    from telechat_moe.tools.align.compare import merged as merger
    from telechat_moe.tools.align.compare.compare import compare
    from telechat_moe.tools.align.dump import summary

    paths = [args.reference, args.target, *([args.benchmark] if args.benchmark else [])]
    dumps: list[Any] = [summary.read(Path(path)) for path in paths]
    steps = None if args.step is None else [args.step]
    if args.map:
        return _linked(args, chosen, dumps, steps)
    parts: Path | None = None
    problems: list[Any] = []
    try:
        if args.said or any(merger.needs_merge(dumps[0], d) for d in dumps[1:]):
            from telechat_moe.tools.align.dump import merge

            said = merge.Said.read(Path(args.said)) if args.said else merge.Said()
            parts = Path(tempfile.mkdtemp(prefix="align-compare-"))
            common = set(dumps[0].steps).intersection(*(d.steps for d in dumps))
            wanted = sorted(common if steps is None else common & set(steps))
            for i, dump in enumerate(dumps):
                dumps[i], rows = merger.merged(dump, said, parts / str(i), wanted)
                problems += rows
        with bar("comparing") as progress:
            third = dumps[2] if len(dumps) > 2 else None
            return compare(
                dumps[0], dumps[1], chosen, third, steps, args.common, progress, problems
            )
    finally:
        if parts is not None:
            shutil.rmtree(parts, ignore_errors=True)


def _linked(args: argparse.Namespace, chosen: Any, dumps: list[Any], steps: Any) -> Any:
    from telechat_moe.tools.align.compare import mapped
    from telechat_moe.tools.align.maps import links as maps

    given = args.map == "weights"
    links: list[Any] = mapped.weight_links(dumps[1]) if given else maps.read_map(Path(args.map))
    with bar("comparing") as progress:
        return mapped.compare_linked(
            dumps[0], dumps[1], chosen, links, steps, args.common, progress
        )


def _show(outcome: Any, most: int) -> None:
    rows = outcome.sorted()
    shown = [_line(row) for row in rows[:most]]
    if shown:
        titles = ["status", "step ", "rank ", "tensor"]
        titles += ["metric", "observed ", "limit ", "ratio ", "why"]
        show_table(titles, shown)
    show_left(len(rows) - most, "--rows N, --json FILE")
    print()
    counts = [*outcome.counts.most_common()]
    counts += [(f"not judged: {why}", n) for why, n in outcome.unknown.most_common(12)]
    counts += [(f"{word} flips", len(said)) for word, said in outcome.flips.items() if said]
    show_table(["tensors", "number "], counts)
    for sentences in outcome.flips.values():
        for sentence in sentences[:5]:
            print(sentence)
        show_left(len(sentences) - 5, "--json FILE")
    show_coverage(outcome.coverage.as_json())
    for note in outcome.notes:
        print(f"note: {note}")
    passed, judged = outcome.counts["pass"], outcome.counts["pass"] + outcome.counts["diverged"]
    said = outcome.reason or f"{passed} of {judged} judged tensors meet {outcome.profile}"
    print(f"\n{outcome.verdict}: {said} ({size_text(outcome.nbytes)} of values read)")


def _line(row: Any) -> list[object]:
    worst = row.worst
    numbers = ["-", "-", "-", "-"]
    if worst is not None:
        ratio = "-" if math.isinf(row.ratio) else f"{row.ratio:.3g}"
        numbers = [worst.metric, f"{worst.observed:.3g}", f"{worst.limit:.3g}", ratio]
    where = f" at {list(row.element)}" if row.element and row.status == "diverged" else ""
    why = "; ".join(text for text in (row.reason[:120], row.note) if text)
    tensor = f"{row.key} {row.place}".strip()
    return [row.status, row.step, row.rank, tensor, *numbers, (why + where).strip()]


def _junit(outcome: Any, target: str) -> str:
    from telechat_moe.tools.align.report import junit

    cases: list[Any] = []
    for row in outcome.rows:
        name = f"step {row.step} rank {row.rank} {row.key} {row.place}"
        worst = row.worst
        numbers = f"{worst.metric} {worst.observed:.6g}, limit {worst.limit:.6g}" if worst else ""
        said = "; ".join(text for text in (numbers, row.reason, row.note) if text)
        if row.status == "diverged":
            cases.append(junit.JunitCase(target, name, failure=said, text=said))
        else:
            skipped = None if row.status == "pass" else f"{row.status}: {row.reason}"
            cases.append(junit.JunitCase(target, name, skipped=skipped))
    return junit.suite("align compare", cases)


VERB = Verb(
    name="compare",
    help="compare two dumps tensor by tensor by a published standard",
    description="Compare the tensors of TARGET with those of REFERENCE by a published standard.",
    notes=NOTES,
    examples=EXAMPLES,
    exits={
        0: "pass",
        1: "diverged",
        4: "inconclusive: too little could be judged, or tensors lack a counterpart",
    },
    json_keys="verdict, reason, profile, tensors (by status), basis (what judged ones were judged by), not_judged "
    "(reasons, with their number), coverage and to_dump (as of bisect, by tensors), flips (legal, illegal, not judged), notes, bytes (of values read), "
    "rows (step, rank, key, place, phase, dtype, shape, status, basis, metric, observed, limit, "
    "observed_over_limit, element, elements, checks, reason, note)",
    arguments=_arguments,
    run=run,
)
