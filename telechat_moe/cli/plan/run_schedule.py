"""`telechat-moe plan run-schedule`: run a pipeline schedule on CPU processes and compare its gradients."""

import argparse
import os
import sys
from collections import defaultdict
from typing import Any

from telechat_moe.cli.output import show_table, write_json
from telechat_moe.cli.progress import counted
from telechat_moe.cli.verb import Verb
from telechat_moe.errors import UsageError
from telechat_moe.units import MIB, count_text

MAX_PARAMETERS = 50_000_000
WIDTH = 96
NOTES = """\
Every stage is a process with MindSpore's graphs of its chunks: forward, dX and dW apart. Activations and gradients go
between the processes. The same micro-batches go through the whole model in one graph; gradients, losses and expert
loads must be the same bytes. The step is run twice: the first one compiles, the second one is timed.

The simulated times are those of the program with the mean of each operation's measured times. Processes that share
cores take turns, which the simulator knows nothing of; --pace makes every operation last at least so long (it sleeps
for the rest), so that all stages can run at once.
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--stages", type=int, required=True, metavar="P", help="pipeline stages")
    add("--chunks", type=int, default=1, metavar="V", help="chunks of a stage (default 1)")
    add("--schedule", required=True, metavar="S", help="1f1b, zb-v, dualpipev ... or synthesised")
    add("--micro-batches", type=int, required=True, metavar="M", help="micro-batches of the step")
    add("--layout", metavar="L", help="chunks in Megatron's notation, Et|tt|mL; default: even")
    add("--pace", type=float, metavar="MS", help="least time of F, dX and dW of a stage, in ms")
    add("--operations", action="store_true", help="list every operation with its times")


def run(args: argparse.Namespace) -> int:
    """Run, compare, print; return the exit code."""
    from telechat_moe.pipeline import chunks
    from telechat_moe.pipeline.run import Pipeline, different
    from telechat_moe.pipeline.spec import Spec, random_batches
    from telechat_moe.recipe import load
    from telechat_moe.recipe.arithmetic import parameters
    from telechat_moe.tools.plan.schedules.check import check

    recipe = load(args.recipe, args.overrides, use="plan")
    spec = Spec.of(recipe)
    units = chunks.even(1, spec.config)
    _check_arguments(args, parameters(recipe.model_config).total, units)
    program = _program(args)
    check(program)
    schedule = plain(program)
    layout = args.layout or chunks.even(schedule.chunks, spec.config)
    if len(chunks.parse(layout, spec.config)) != schedule.chunks:
        raise UsageError(
            f"--layout {layout} has {len(layout.split('|'))} chunks, {program.name} {schedule.chunks}"
        )
    batches = random_batches(
        spec.config, args.micro_batches, recipe.runner_config.batch_size, recipe.seed
    )
    pace: dict[str, list[float]] | None = None
    if args.pace is not None:
        each = args.pace / 1e3 * args.stages / schedule.chunks
        pace = {kind: [each] * schedule.chunks for kind in "FDW"}
    runs = 2 * sum(len(ops) for ops in schedule.ops)
    with (
        counted("compiling, then running", runs) as one_more,
        Pipeline(spec, args.stages, watch=lambda stage, operation: one_more()) as pipeline,
    ):
        pipeline.begin_whole(batches)
        first = pipeline.run(schedule, layout, batches)
        whole = pipeline.whole()
        step = pipeline.run(schedule, layout, batches, pace)
    problems = [*different(first, whole), *different(step, whole)]
    figures = report(program, schedule, layout, step, problems, args)
    if not write_json(args.json, figures):
        _show(figures, args.operations, len(whole.gradients))
    for line in problems[:20]:
        print(f"error: {line}", file=sys.stderr)
    return 1 if problems else 0


def _check_arguments(args: argparse.Namespace, parameters: int, units: str) -> None:
    for name in ("stages", "chunks", "micro_batches"):
        if getattr(args, name) < 1:
            raise UsageError(
                f"--{name.replace('_', '-')} {getattr(args, name)}: expected 1 or more"
            )
    if args.stages > len(units):
        raise UsageError(
            f"--stages {args.stages}: each is a process; the model has {len(units)} units ({units}) to share"
        )
    if args.pace is not None and not 0 <= args.pace < float("inf"):
        raise UsageError(f"--pace {args.pace:g}: expected milliseconds, 0 or more")
    if parameters > MAX_PARAMETERS:
        raise UsageError(
            f"{args.recipe} has {count_text(parameters)} parameters, and every process holds some of them: take a "
            f"model of at most {count_text(MAX_PARAMETERS)} (--set model.model_config.hidden_size=...)"
        )


def _program(args: argparse.Namespace) -> Any:
    """Return the schedule asked for; a synthesised one for equal F, dX and dW."""
    from telechat_moe.tools.plan.schedules.program import Times
    from telechat_moe.tools.plan.schedules.published import generate
    from telechat_moe.tools.plan.schedules.synthesise import synthesise

    if args.schedule != "synthesised":
        return generate(args.schedule, args.stages, args.micro_batches, args.chunks)
    times = Times.even(args.stages, args.chunks)
    return synthesise(times, args.stages, args.micro_batches).result.program


def plain(program: Any) -> Any:
    """Return a planner's program as the executor takes it."""
    from telechat_moe.pipeline.schedule import Schedule

    ops = tuple(
        tuple(tuple((kind.value, chunk, micro) for kind, chunk, micro in op.parts()) for op in own)
        for own in program.ops
    )
    return Schedule(program.name, program.chunks, program.micro_batches, ops)


def measured_times(program: Any, step: Any) -> Any:
    """Return the mean time of each chunk's F, dX, dW and B in a step, seconds; what never ran apart is the other's sum."""
    import numpy as np  # not for every start of the program

    from telechat_moe.tools.plan.schedules.program import Times

    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for events in step.events:
        for event in events:
            found[event.part[:2]].append(event.end_s - event.start_s)
    each = {
        kind: np.array([np.mean(found.get((kind, c), [0.0])) for c in range(program.chunks)])
        for kind in "FDWB"
    }
    both = np.where(each["B"] > 0, each["B"], each["D"] + each["W"])
    return Times(each["F"], each["D"], each["W"], 0.0, both)


def report(
    program: Any, schedule: Any, layout: str, step: Any, problems: list[str], args: Any
) -> dict[str, Any]:
    """Return what `--json` writes."""
    from telechat_moe.tools.plan.schedules.simulate import simulate

    result = simulate(program, measured_times(program, step))
    zero = min(events[0].start_s for events in step.events if events)
    last = max(events[-1].end_s for events in step.events if events)
    stages: list[dict[str, Any]] = []
    for s, events in enumerate(step.events):
        timeline: list[dict[str, Any]] = []
        at = 0
        for i, op in enumerate(schedule.ops[s]):
            parts = events[at : at + len(op)]
            at += len(op)
            timeline.append(
                {
                    "operation": str(program.ops[s][i]),
                    "start_ms": 1e3 * (parts[0].start_s - zero),
                    "end_ms": 1e3 * (parts[-1].end_s - zero),
                    "simulated_start_ms": 1e3 * float(result.start[s][i]),
                    "simulated_end_ms": 1e3 * float(result.end[s][i]),
                }
            )
        stages.append(
            {
                "operations": len(timeline),
                "busy_ms": 1e3 * sum(e.end_s - e.start_s for e in events),
                "kept_bytes": step.peak_bytes[s],
                "sent_bytes": step.sent_bytes[s],
                "timeline": timeline,
            }
        )
    span = 1e3 * (last - zero)
    return {
        "recipe": args.recipe,
        "schedule": program.name,
        "layout": layout,
        "stages": program.stages,
        "chunks": args.chunks,
        "micro_batches": program.micro_batches,
        "pace_ms": args.pace,
        "equal": not problems,
        "differences": problems,
        "measured_ms": span,
        "simulated_ms": 1e3 * result.makespan,
        "measured_bubble": 1.0 - sum(s["busy_ms"] for s in stages) / (span * len(stages)),
        "simulated_bubble": result.bubble,
        "per_stage": stages,
    }


def _line(timeline: list[dict[str, Any]], prefix: str, span: float) -> str:
    """Draw a stage's operations: the letter of each, in lower case for every other chunk, a point where it waits."""
    cells = ["."] * WIDTH
    for op in timeline:
        name = op["operation"]
        letter = name[0] if "&" not in name else "X"
        chunk = int(name.split("chunk ")[1].split(",")[0])
        first = int(op[f"{prefix}start_ms"] / span * WIDTH)
        for i in range(
            first, min(WIDTH, max(first + 1, int(op[f"{prefix}end_ms"] / span * WIDTH)))
        ):
            cells[i] = letter.lower() if chunk % 2 else letter
    return "".join(cells)


def _show(figures: dict[str, Any], operations: bool, weights: int) -> None:
    print(
        f"{figures['recipe']}: {figures['schedule']} on {figures['stages']} processes, chunks "
        f"{figures['layout']}, {figures['micro_batches']} micro-batches\n"
    )
    cores = len(os.sched_getaffinity(0))
    span = max(figures["measured_ms"], figures["simulated_ms"])
    print(f"measured ({cores} cores) above simulated, {span / WIDTH:.1f} ms a character:")
    for s, stage in enumerate(figures["per_stage"]):
        print(f"stage {s}  {_line(stage['timeline'], '', span)}")
        print(f"         {_line(stage['timeline'], 'simulated_', span)}")
    print()
    rows = [
        [
            str(s),
            str(stage["operations"]),
            f"{stage['busy_ms']:.1f}",
            f"{stage['timeline'][-1]['end_ms']:.1f}",
            f"{stage['timeline'][-1]['simulated_end_ms']:.1f}",
            f"{stage['kept_bytes'] / MIB:.2f}",
            f"{stage['sent_bytes'] / MIB:.2f}",
        ]
        for s, stage in enumerate(figures["per_stage"])
    ]
    titles = (
        "operations ",
        "busy ms ",
        "ends at ms ",
        "simulated ms ",
        "most kept MiB ",
        "sent MiB ",
    )
    show_table(["stage ", *titles], rows)
    if operations:
        for s, stage in enumerate(figures["per_stage"]):
            print(f"\nstage {s}\n")
            show_table(
                ["operation", "start ms ", "end ms ", "simulated start ms ", "simulated end ms "],
                [
                    [
                        op["operation"],
                        *(f"{v:.1f}" for k, v in op.items() if k != "operation"),
                    ]
                    for op in stage["timeline"]
                ],
            )
    print(
        f"\nstep: measured {figures['measured_ms']:.1f} ms, simulated {figures['simulated_ms']:.1f} ms; bubble (idle "
        f"share of the makespan): measured {figures['measured_bubble']:.1%}, simulated "
        f"{figures['simulated_bubble']:.1%}"
    )
    if figures["equal"]:
        print(
            f"gradients of {weights} weights, losses and expert loads: the unpipelined run's, to the last bit"
        )


VERB = Verb(
    name="run-schedule",
    help="run a pipeline schedule on CPU processes, compare gradients with the unpipelined run",
    description="Run one step of a small model through a pipeline schedule, each stage a process.",
    notes=NOTES,
    examples="telechat-moe plan run-schedule telechat3_moe/pretrain_tiny.yaml --stages 2 --chunks 2 --schedule "
    "zb-v --micro-batches 4",
    exits={
        0: "the gradients are the same bytes",
        1: "they are not, or a process died, or the program deadlocked",
        3: "bad recipe, or a program that is incomplete or deadlocks",
    },
    json_keys="recipe, schedule, layout, stages, chunks, micro_batches, pace_ms, equal, differences, measured_ms, "
    "simulated_ms, measured_bubble, simulated_bubble, per_stage (list of operations, busy_ms, kept_bytes,"
    " sent_bytes, timeline: list of operation, start_ms, end_ms, simulated_start_ms, simulated_end_ms).",
    recipe=True,
    overrides="override a value of the recipe",
    arguments=_arguments,
    run=run,
)
