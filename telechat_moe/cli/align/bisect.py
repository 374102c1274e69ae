"""`telechat-moe align bisect`: the first wrong call of a run, and what is wrong about it."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from telechat_moe.cli.arguments import arg
from telechat_moe.cli.output import (
    VERDICT_CODES,
    show_advice,
    show_counts,
    show_coverage,
    show_left,
    show_table,
    write_json,
    write_text,
)
from telechat_moe.cli.progress import bars, tracked
from telechat_moe.cli.verb import Verb
from telechat_moe.errors import UsageError

NOTES = """\
Each call of TARGET is recomputed in float64 from its own inputs, with REFERENCE's settings, and must be within a bound derived from types and
lengths; inputs must be what the calls before made. A call that cannot be recomputed is judged by the other run. Other layouts or frameworks are
compared by whole weights, gradients and states.

A pass needs 95 % of the calls and of the bytes of each phase judged; with less the verdict is inconclusive, and what to dump is listed.

--standard judges every tensor by a published standard instead: ascend-l0, -l1, -l2 (with --benchmark), ecosystem, mixed, mindformers, msprobe, torch,
close, ulp or bitwise, with settings (close:rtol=1e-5). --layouts and the map are JSON files, see docs/align.md.
"""


def _standard(args: argparse.Namespace) -> Any:
    """Return the standard that the arguments name; None: derived bounds."""
    from telechat_moe.tools.align.compare import profiles

    if args.standard is None:
        if args.benchmark:
            raise UsageError("--benchmark is for --standard ascend-l0, ascend-l1, ascend-l2")
        return None
    if args.rtol is not None:
        raise UsageError("--rtol does not go with --standard; of close: close:rtol=X")
    profile = profiles.read(args.standard)
    if profile.third != (args.benchmark is not None):
        needed = "needs a third run: --benchmark DUMP" if profile.third else "takes no --benchmark"
        raise UsageError(f"--standard {profile.name} {needed}")
    return profile


def run(args: argparse.Namespace) -> int:
    """Compare, print; return the exit code."""
    from telechat_moe.tools.align import across_layouts, bisect
    from telechat_moe.tools.align.dump import summary
    from telechat_moe.tools.align.judge import pairing, reproduce
    from telechat_moe.tools.align.judge.collectives import with_groups
    from telechat_moe.tools.align.judge.standard import Standard
    from telechat_moe.tools.align.report import bisect_page as page
    from telechat_moe.tools.align.report.neighbourhood import around

    profile = _standard(args)
    alone = args.target is None
    if alone and (args.map or args.map_out or args.rtol or args.standard):
        raise UsageError("--map, --map-out, --rtol and --standard need two dumps: REFERENCE TARGET")
    if args.map and args.map_out:
        raise UsageError("--map reads a map, --map-out makes and writes one; give one of them")
    if not alone and any(map(_is_checkpoint, (args.reference, args.target))):
        return _checkpoints(args, profile)
    name = args.reference if alone else args.target
    dumps = _read([args.reference] if alone else [args.reference, args.target], args)
    reference, target = dumps[0], dumps[-1]
    third = [summary.read(Path(args.benchmark))] if args.benchmark else []
    standard = profile and Standard(profile, reference, target, *third)
    links: Any = [] if alone else _links(args, reference, target)
    with bars() as move:
        if alone:
            grouped = with_groups(target)
            outcome = bisect.bisect(grouped, target, itself=True, progress=move)
        elif args.map or pairing.differ_in_layout(reference, target):
            if third:
                raise UsageError("--benchmark is for runs with the same calls")
            outcome = across_layouts.across(reference, target, links, args.rtol, move, standard)
        elif args.rtol is not None:
            text = "--rtol is for runs whose calls differ; these are judged by derived bounds"
            raise UsageError(text)
        else:
            outcome = bisect.bisect(reference, target, progress=move, standard=standard)
    first = outcome.findings[0] if outcome.findings else None
    graph = around(target, first.step, first.rank, first.verdict.key) if first else None
    report = page.plain(outcome, None if alone else args.reference, name, graph, standard)
    if args.reproducer and first:
        reproduce.write(first, Path(args.reproducer))
    return _written(args, outcome, report, name)


def _read(paths: Sequence[str], args: argparse.Namespace) -> list[Any]:
    """Return dumps, with the layouts of a file and the groups of ranks where they name none."""
    from telechat_moe.tools.align.dump import layout_file, summary
    from telechat_moe.tools.align.judge import rank_groups

    dumps = [summary.read(Path(path)) for path in paths]
    if args.layout is not None:
        texts = args.layout.split("/")
        if len(texts) not in (1, len(dumps)):
            raise UsageError(f"--layout {args.layout}: {len(texts)} layouts for {len(dumps)} dumps")
        degrees = [rank_groups.parsed(text) for text in texts] * (len(dumps) // len(texts))
        pairs = zip(dumps, degrees, strict=True)
        dumps, counts = zip(*(rank_groups.with_degrees(*pair) for pair in pairs), strict=True)
        if not any(counts):
            problem = "without effect: no collective of the dumps has a group that is known by its name only"
            raise UsageError(f"--layout {args.layout}: {problem}")
    return [*dumps] if args.layouts is None else layout_file.with_layouts(dumps, Path(args.layouts))


def _links(args: argparse.Namespace, reference: Any, target: Any) -> Any:
    """Return the map that --map names, or the one that --map-out writes; empty: none is wanted."""
    from telechat_moe.tools.align.maps.links import read_map
    from telechat_moe.tools.align.maps.tensor_map import as_json, tensor_map

    if args.map:
        return read_map(Path(args.map))
    links = tensor_map(reference, target) if args.map_out else []
    write_text("--map-out ", args.map_out, lambda: as_json(links))
    return links


def _is_checkpoint(path: str) -> bool:
    if not any(Path(path).glob("*.json")):  # a dump: the import would take longer than it
        return False
    from telechat_moe.checkpoint.stored import is_checkpoint

    return is_checkpoint(Path(path))


def _checkpoints(args: argparse.Namespace, profile: Any) -> int:
    from telechat_moe.checkpoint.stored import open_checkpoint
    from telechat_moe.tools.align.compare import profiles
    from telechat_moe.tools.align.judge.standard import judge_checkpoints
    from telechat_moe.tools.align.report import bisect_page as page

    options = ("map", "map_out", "layouts", "layout", "rtol", "benchmark", "reproducer")
    if wrong := [name for name in options if getattr(args, name)]:
        option = wrong[0].replace("_", "-")
        raise UsageError(
            f"--{option} needs dumps; {args.reference} or {args.target} is a checkpoint"
        )
    reference, target = map(open_checkpoint, (Path(args.reference), Path(args.target)))
    progress: Any = partial(tracked, task="comparing")
    chosen = profile or profiles.read("bitwise")
    standard, outcome = judge_checkpoints(chosen, reference, target, progress)
    names = [f"{run.path} (step {run.step}, {run.layout})" for run in (reference, target)]
    report = page.plain(outcome, names[0], names[1], standard=standard)
    report["next"] = []  # its commands need dumps
    return _written(args, outcome, report, args.target)


def _written(args: argparse.Namespace, outcome: Any, report: Any, name: str) -> int:
    """Write what the arguments ask for, else print; return the exit code."""
    from telechat_moe.tools.align.report import bisect_page as page

    write_text("--html ", args.html, lambda: page.page(report))
    write_text("--junit ", args.junit, lambda: page.junit(outcome, name))
    if not write_json(args.json, report):
        _show(outcome, report)
    return VERDICT_CODES[outcome.verdict]


def _show(outcome: Any, report: Any) -> None:
    """Print the verdict, what to do next, and then what it rests on."""
    print(f"{outcome.verdict}: {report['sentence']}")
    if outcome.verdict == "inconclusive":
        show_advice(report)
    print()
    if report["next"]:
        show_table(["next", "shows"], [[step["command"], step["shows"]] for step in report["next"]])
        print()
    if outcome.settings:
        show_table(["settings that differ"], [[setting] for setting in outcome.settings])
        print()
    if outcome.findings:
        _show_findings(outcome, report)
    if "standard" in report:
        rows = [
            [t["status"], t["step"], t["rank"], f"{t['operator']} {t['tensor']}", t["reason"]]
            for t in report["standard"]["tensors"]
        ]
        show_table(["status", "step ", "rank ", "tensor", "why"], rows[:20])
        show_left(len(rows) - 20, "--json FILE")
        print()
    show_counts(dict(sorted(outcome.judged.items())), dict(sorted(outcome.unknown.items())))
    show_coverage(report)
    if outcome.verdict != "inconclusive":
        show_advice(report)
    for note in report.get("standard", {}).get("notes", []):
        print(f"note: {note}")


def _show_findings(outcome: Any, report: Any) -> None:
    """Print the first finding, and the others by operator and kind of fault."""
    from telechat_moe.tools.align.report.bisect_page import values_text

    first, layer = outcome.findings[0], report["first"]["layer"]
    rows = [
        ["call", first.verdict.key],
        ["tensor", first.verdict.place],
        ["phase", first.call.stage.value if first.call else "-"],
        ["layer", "-" if layer is None else layer],
        ["step", first.step],
        ["ranks", ", ".join(map(str, outcome.ranks))],
        ["kind of fault", f"{first.family}: {first.evidence}"],
        ["observed / bound", f"{first.verdict.ratio:.3g}"],
        ["where", first.verdict.reason],
        ["values there", values_text(report["first"])],
        ["source", report["first"]["source"] or "-"],
    ]
    show_table(["the first", "wrong call"], rows)
    print()
    others = [f for f in outcome.findings[1:] if f.verdict.key != first.verdict.key]
    groups: dict[tuple[str, str], list[Any]] = {}
    for finding in others:
        name = finding.call.name if finding.call else finding.verdict.key
        groups.setdefault((name, finding.family), []).append(finding)
    rows = [[*key, len(group), group[0].verdict.key] for key, group in groups.items()]
    if rows:
        show_table(
            ["operators after it", "kind of fault", "calls ", "the first of them"], rows[:10]
        )
        show_left(len(rows) - 10, "--json FILE")
        print()


VERB = Verb(
    name="bisect",
    help="name the first wrong call of a run",
    description="Name the first call of TARGET (or of REFERENCE, alone) that is wrong, and the kind of fault.",
    notes=NOTES,
    examples="telechat-moe align bisect gpu_dump npu_dump --html align.html\n"
    "telechat-moe align bisect gpu_dump npu_dump --standard ecosystem",
    exits={0: "pass", 1: "diverged", 4: "inconclusive: too little was judged"},
    json_keys="verdict (pass | diverged | inconclusive), reason, ranks, first and findings (step, rank, phase, "
    "layer, modules (of both runs, across frameworks), operator, tensor, family, evidence, observed_over_bound, reason, basis (replay | other run), element, values (reference, target), wrong_elements, "
    "elements, source), settings (that differ, by module), judged (tensors by answer), not_judged (reasons, with their number), coverage (by "
    "phase: calls, judged_calls, bytes, judged_bytes), by_other_run (tensors), to_dump (reason, calls, bytes, dump: what to dump), runs (reference, null where there is none, and target), "
    "sentence, next (command, shows); of the first wrong call neighbours (in the order of the run), graph (nodes, edges: the "
    "data flow around it), picture (worst error over bound of each field); with --standard: standard (name, source, notes, flips (choices that "
    "legally came out otherwise), tensors (step, rank, operator, tensor, status, observed_over_limit, element, reason, checks))",
    arguments=[
        arg("REFERENCE", "dump or checkpoint of the trusted run"),
        arg(
            "TARGET",
            "the same of the run to judge (none: REFERENCE is judged by itself)",
            nargs="?",
        ),
        arg("--map FILE", "which tensors correspond, where names differ (default: found)"),
        arg("--map-out FILE", "write which tensors correspond"),
        arg("--layouts FILE", "layouts of tensors for which a dump names none"),
        arg(
            "--layout DEGREES",
            "degrees of both runs such as tp=2,ep=2, or of REFERENCE/TARGET, for collectives whose groups have names and no ranks",
        ),
        arg(
            "--rtol X",
            "largest allowed difference of these tensors, relative L2 (default: by type, 2e-5 in float32)",
            type=float,
        ),
        arg("--standard NAME", "judge tensors by this published standard"),
        arg("--benchmark DUMP", "third run, for ascend-l0, -l1, -l2"),
        arg("--html FILE", "write one page with the first wrong call"),
        arg("--junit FILE", "write the answer as JUnit XML"),
        arg(
            "--reproducer DIR",
            "write the first wrong call as data and a script that fails while it is wrong",
        ),
    ],
    run=run,
)
