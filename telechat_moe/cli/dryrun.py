"""`telechat-moe dryrun`: compile a rank's real graph without its devices, and say what it does in a step."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING, Any

from telechat_moe.cli.arguments import arg, check_rank, exclusive
from telechat_moe.cli.output import show_table, write_json, write_text
from telechat_moe.cli.progress import counted
from telechat_moe.cli.verb import Verb
from telechat_moe.errors import BadInputError, UsageError
from telechat_moe.units import size_text

if TYPE_CHECKING:
    from telechat_moe.recipe import Problem, Recipe

NOTES = """\
MindSpore's front end compiles the training step of a rank for Ascend on this machine; nothing is run. One rank of each pipeline
stage is compiled, for the others differ in their groups only; --check-rank compiles another one and compares. --run compiles every
graph of a run instead: the step of each batch size, evaluation and samples, and moves of experts.

With --confirm the graph is compared with the planner's prediction: trained parameters and collectives must be equal, the
activations at the peak within 5 %. With --mindformers it is MindFormers' own model (extra `mindformers`), from the same recipe
or from one that comes with MindFormers. docs/graph.md explains the report.
"""
HIDDEN_ON = "ascend-910b"


def run(args: argparse.Namespace) -> int:
    """Compile, report; return the exit code."""
    if args.html and not Path(args.html).parent.is_dir():
        raise UsageError(f"--html {args.html}: its folder does not exist")
    from telechat_moe.graph.report import check_derived, difference

    if args.mindformers and args.target != "Ascend":
        raise UsageError(f"--target {args.target}: MindFormers' model has Ascend's operators only")
    if args.run_graphs:
        return _run_graphs(args)
    confirms = _confirms(args) if args.confirm else None
    result, mesh, graphs, checked = _compile(args, args.recipe, args.mindformers)
    confirmed = True
    if confirms is not None:
        result["confirm"] = confirms(result)
        confirmed = not any(stage["differences"] for stage in result["confirm"])
    is_same = checked is None or check_derived(result, mesh, graphs, checked)
    compared = None
    if args.diff or args.diff_mindformers:
        mindformers = args.mindformers or args.diff_mindformers
        other, *_ = _compile(args, args.diff or args.recipe, mindformers, other=True)
        compared = difference(result, other)
        result["difference"] = compared
    if args.html:
        from telechat_moe.graph.page import page

        write_text("--html ", args.html, lambda: page(result, compared))
    if not write_json(args.json, result):
        _show(result, compared)
    return 0 if is_same and confirmed and not result["unmatched_transfers"] else 1


def _run_graphs(args: argparse.Namespace) -> int:
    """Compile every graph of a run for a rank of each stage, report; return the exit code."""
    with_steps = ("mindformers", "diff", "diff_mindformers", "confirm", "html", "check_rank", "hidden_on")  # fmt: skip
    for option in with_steps:
        if getattr(args, option) not in (None, False):
            name = option.replace("_", "-")
            raise UsageError(f"--run with --{name}, which is about the step alone; use one of them")
    if args.target != "Ascend":
        raise UsageError(
            f"--run with --target {args.target}: the graphs of a run are those for Ascend"
        )
    from telechat_moe.recipe import load

    recipe = load(args.recipe, args.overrides, devices=args.devices, use="train")
    from telechat_moe.sharding.recipe import mesh_of
    from telechat_moe.train import run_graphs

    mesh, graphs = mesh_of(recipe), run_graphs.run_graphs(recipe)
    if args.rank is not None:
        check_rank("--rank", args.rank, mesh, args.recipe)
        graphs = run_graphs.of_stage(graphs, mesh, mesh.stage(args.rank))
    title = f"compiling {len(graphs)} graph(s) of {Path(args.recipe).name}, {mesh.describe()}"
    with counted(title, sum(len(graph.ranks) for graph in graphs)) as step:
        compiled = run_graphs.compile_run(graphs, step)
    result = run_graphs.report(recipe, graphs, compiled)
    if not write_json(args.json, result):
        _show_run(result)
    return 0


def _show_run(result: dict[str, Any]) -> None:
    print(
        f"{result['recipe']}: {result['layout']}, {result['devices']} devices; every graph of a run"
    )
    heads = ["graph", "stage ", "rank ", "operators ", "collectives ", "stays ", "needs ", "sum ", "compiled "]  # fmt: skip
    rows: list[list[str]] = []
    for row in result["graphs"]:
        memory = row["memory"]
        needs = memory["copies"] + memory["activations"]
        cells = [str(row[key]) for key in ("graph", "stage", "rank")]
        cells += [f"{row[key]:,}" for key in ("operators", "collectives")]
        cells += [size_text(n) for n in (memory["total"] - needs, needs, memory["total"])]
        rows.append([*cells, f"{row['compile_seconds']:.1f} s"])
    show_table(heads, rows)
    for moment in result["largest_moment"]:
        size = size_text(moment["total"])
        print(f"stage {moment['stage']}: a device holds at most {size}, in the {moment['graph']}")
    print(f"a host reads {size_text(result['batch'])} a global batch")
    if (save := result["save"]) is None:
        print("the recipe saves no checkpoints")
        return
    sizes = {key: size_text(save[key]) for key in ("nbytes", "largest", "copies")}
    print(
        "a save: {files:,} files, {nbytes}; a rank writes at most {largest}, in the background, and its host's memory holds "
        "{copies} of it meanwhile".format(files=save["files"], **sizes)
    )


def _confirms(args: argparse.Namespace) -> Callable[[dict[str, Any]], list[dict[str, Any]]]:
    """Return what holds a report against the planner's prediction; refuses before anything is compiled."""
    from telechat_moe.recipe import load
    from telechat_moe.tools.plan.cost import expected_graph as planner

    if args.mindformers or args.target != "Ascend":
        raise UsageError("--confirm: the planner predicts our own model's graph for target Ascend")
    recipe = load(args.recipe, args.overrides, devices=args.devices, use="dryrun")
    planner.refuse(recipe)
    return lambda report: planner.differences(recipe, report)


def _compile(
    args: argparse.Namespace, name: str, mindformers: bool, other: bool = False
) -> tuple[dict[str, Any], Any, list[Any], Any]:
    """Return report, mesh, the graph of each stage asked for, and the one to check."""
    from telechat_moe.graph.report import report
    from telechat_moe.tools.plan.cost.device import load_device

    devices = None if other else args.devices
    find = _mindformers if mindformers else _our_model
    subject, compile_ = find(name, args.overrides, devices, args.target)
    mesh = subject.mesh
    ranks = mesh.first_ranks() if args.stage else [args.rank or 0]
    check = None if other else args.check_rank
    for option, rank in (("--rank", ranks[0]), ("--check-rank", check)):
        if rank is not None:
            check_rank(option, rank, mesh, name)
    if check is not None and mesh.stage(check) not in [mesh.stage(r) for r in ranks]:
        raise UsageError(
            f"--check-rank {check} is in stage {mesh.stage(check)}, which is not compiled; "
            f"use --rank {mesh.stage(check) * mesh.stage_devices} or --stage all"
        )
    if check in ranks:
        raise UsageError(f"--check-rank {check} is the rank that others are derived from")
    if args.hidden_on and not subject.overlapped and not other:
        raise UsageError(
            f"--hidden-on {args.hidden_on}: {name} pairs no passes; it needs context.ascend_config."
            "parallel_speed_up_json_path with pp_1f1b_overlap"
        )
    device = load_device(args.hidden_on or HIDDEN_ON) if subject.overlapped else None
    compiled_ranks = [*ranks, *([check] if check is not None else [])]
    title = f"compiling {subject.model}'s {Path(name).name}, {mesh.describe()}"
    with counted(title, len(compiled_ranks)) as step:
        graphs = compile_(compiled_ranks, step)
    stages, checked = graphs[: len(ranks)], graphs[len(ranks) :]
    result = report(subject, stages, args.target)
    if device is not None:
        from telechat_moe.tools.plan.cost.graph_overlap import hide

        for stage in result["stages"]:
            hide(stage["overlap"], device)
        result["hidden_on"] = device.name
    return result, mesh, stages, checked[0] if checked else None


Compile = Callable[[Sequence[int], Callable[[], object]], list[Any]]


def _our_model(
    name: str, overrides: Sequence[str], devices: int | None, target: str
) -> tuple[Any, Compile]:
    """Return what the report is about, and what compiles ranks of our model."""
    from telechat_moe.graph.read import Expected
    from telechat_moe.graph.report import Subject
    from telechat_moe.recipe import load
    from telechat_moe.recipe.speed_up import overlapped
    from telechat_moe.sharding.recipe import even_exchange, mesh_of

    look = partial(_for_target, target)
    recipe = load(name, overrides, devices=devices, use="dryrun", look=look)
    mesh = mesh_of(recipe)
    sizes, states = Expected(*even_exchange(recipe, mesh)), recipe.optimizer.swap
    subject = Subject(str(recipe.source), mesh, sizes, "telechat-moe", overlapped(recipe), states)

    def compile_(ranks: Sequence[int], advance: Callable[[], object]) -> list[Any]:
        # unknown to pyright: MindSpore has no types
        from telechat_moe.train import rank_graph

        return rank_graph.compile_recipe(recipe, ranks, target=target, done=advance)

    return subject, compile_


def _for_target(
    target: str, recipe: "Recipe", problems: "Sequence[Problem]"
) -> "Iterator[Problem]":
    """Yield what a graph for a target cannot compute."""
    from telechat_moe.recipe.problems import Missing
    from telechat_moe.recipe.uses import in_plain_graph

    if target == "CPU":
        for broken in Missing(bool(problems)).until(in_plain_graph(recipe)):
            yield recipe.problem(*broken)


def _mindformers(
    name: str, overrides: Sequence[str], devices: int | None, target: str
) -> tuple[Any, Compile]:
    """Return what the report is about, and what compiles ranks of MindFormers' model."""
    from telechat_moe.interop import mindformers_dryrun as upstream

    label, sections = upstream.sections_of(name, overrides)
    layout_devices = upstream.devices_of(label, sections)
    if devices is not None and devices != layout_devices:
        text = f"its layout has {layout_devices} devices; {devices} were given"
        raise BadInputError(f"{name}: {text}")

    def compile_(ranks: Sequence[int], advance: Callable[[], object]) -> list[Any]:
        return upstream.compile_mindformers(name, ranks, overrides=overrides, done=advance)

    return upstream.subject_of(label, sections), compile_


def _show(result: dict[str, Any], compared: dict[str, Any] | None) -> None:
    from telechat_moe.graph import report

    print(
        f"{result['recipe']}, {result['model']}'s model: {result['layout']}, {result['devices']} devices, target {result['target']}, "
        f"MindSpore {result['mindspore']}"
    )
    if compared is not None:
        two = compared["two"]
        print("against {recipe}, {model}'s model: {layout}, {devices} devices".format(**two))
        _tables(report.difference_tables(compared))
        return
    _tables(report.tables(result))
    for stage in result["stages"]:
        name = f"stage {stage['stage']}, rank {stage['rank']}"
        print()
        if stage["order"]:
            text = f"{name}: order {stage['order_text']}"
            print(fill(text, get_terminal_size().columns, subsequent_indent="  "))
        recomputation = stage["recomputation"]
        print(
            f"{name}: {recomputation['operators']} forward operators run again, {recomputation['collectives']} of them "
            f"collectives ({size_text(recomputation['sent'])} sent)"
        )
        if sentence := report.swap_text(stage):
            print(f"{name}: {sentence}")
        if ranks := stage["derived_ranks"]:
            print(f"{name}: ranks {ranks[0]} to {ranks[-1]} derived by substituting groups")
        memory = size_text(stage["peak_memory"])
        print(f"{name}: compiled in {stage['compile_seconds']:.1f} s, peak memory {memory}")
    for problem in result["unmatched_transfers"]:
        print(f"NOT MATCHED: {problem}")
    if nothing := report.overlap_text(result):
        print(f"NOT OVERLAPPED: {nothing}")
    if check := result["check"]:
        print("\n  ".join((report.check_text(check), *check["differences"])))
    _show_confirm(result.get("confirm", []))
    for name, text in result["notes"].items():
        print(f"{name}: {text}")
    print(result["limits"])


def _show_confirm(stages: list[dict[str, Any]]) -> None:
    if not stages:
        return
    rows: list[list[str]] = []
    for s in stages:
        planned, compiled = s["activations"]
        cells = [f"{n:,}" for n in (*s["parameters"], *s["calls"])]
        cells += [size_text(n) for n in (*s["bytes"], planned, compiled)]
        off = f"{planned / compiled - 1:+.1%}"
        rows.append([str(s["stage"]), *cells, off, "differs" if s["differences"] else "confirmed"])
    heads = ("parameters", "collectives", "bytes", "activations")
    both = [f"{head} {side} " for head in heads for side in ("planned", "compiled")]
    print("\nwhat was planned against what is compiled")
    show_table(["stage", *both, "off ", "verdict"], rows)
    for s in stages:
        for line in s["differences"]:
            print(f"stage {s['stage']}: {line}")


def _tables(report_tables: Sequence[tuple[str, list[str], list[list[str]]]]) -> None:
    for title, headers, rows in report_tables:
        print(f"\n{title}")
        show_table(headers, rows)


VERB = Verb(
    name="dryrun",
    help="compile a rank's graph without devices: collectives, memory, pipeline order",
    description="Compile a rank's real graph for Ascend on this machine, and report what it does in a step.",
    notes=NOTES,
    examples="telechat-moe dryrun my_recipe.yaml --devices 256 --stage all --html dryrun.html\n"
    "telechat-moe dryrun planned.yaml --stage all --confirm",
    exits={
        1: "the rank checked has another graph, a send has no receive, or --confirm found a difference",
        3: "bad recipe, MindSpore refuses the layout, or MindFormers is asked for and not installed",
    },
    recipe=True,
    overrides="override a value, of RECIPE and of OTHER_RECIPE",
    arguments=[
        exclusive(
            arg("--rank R", "global rank (default 0)", type=int),
            arg("--stage", "the first rank of every pipeline stage", choices=["all"]),
        ),
        arg("--devices N", "number of devices; must be the recipe's", type=int),
        arg(
            "--check-rank R2",
            "compile this rank too and compare it with what is derived for it",
            type=int,
        ),
        arg(
            "--run",
            "compile every graph of a run, for a rank of each stage (with --rank of its stage only): memory of a device and of its host, files of a save",
            dest="run_graphs",
        ),
        arg("--confirm", "compare with what the planner predicts of the recipe"),
        arg(
            "--hidden-on DEVICE",
            "where `pp_1f1b_overlap` pairs passes, say how much of each all-to-all they hide on this device "
            f"(a device of `plan`; default {HIDDEN_ON})",
        ),
        arg(
            "--target",
            "operators: Ascend's own primitives, or the plain ones that CPU processes can run",
            "Ascend",
            choices=["Ascend", "CPU"],
        ),
        arg("--mindformers", "compile MindFormers' own model, not ours"),
        arg("--diff OTHER_RECIPE", "compare with another recipe"),
        arg(
            "--diff-mindformers",
            "compare with MindFormers' own model, of OTHER_RECIPE if there is one, else of RECIPE",
        ),
        arg("--html FILE", "write the report as one page"),
    ],
    run=run,
)
