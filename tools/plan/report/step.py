"""Report a simulated step as tables, a a trace and plain data."""

from typing import Any, get_args

import numpy as np

from telechat_moe.errors import UsageError
from telechat_moe.recipe.schema import Recipe
from telechat_moe.tools.plan.cost import cpu_step
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.device import load_device
from telechat_moe.tools.plan.cost.expert_exchange import choices, told
from telechat_moe.tools.plan.cost.expert_overlap import hidden
from telechat_moe.tools.plan.cost.flops import utilisation as utilisation_of
from telechat_moe.tools.plan.cost.layout import Layout, ScheduleName
from telechat_moe.tools.plan.cost.simulate_step import SimulatedStep, simulate_step
from telechat_moe.tools.plan.report.timeline import (
    PipelineTimeline,
    Table,
    TimelineBox,
    activations,
    operations,
)
from telechat_moe.tools.plan.schedules.program import Op, OpKind
from telechat_moe.units import count_text, gib_text, seconds_text

PARTS = {
    "matmul": "matrix products", "attention": "attention core", "memory": "elementwise, norms, permutation",
    "tensor": "tensor and context parallel communication", "expert": "expert all-to-all",
    "host": "waiting for the host", "recompute": "recomputation", "neighbours": "sends between stages",
}  # fmt: skip
"""Kinds of operator in the breakdown."""


def of_recipe(
    recipe: Recipe, device: str, schedule: str | None = None, pair_share: float = 0.0
) -> SimulatedStep:
    """Simulate a recipe, with its own schedule or another; `pair_share`: see `Architecture`.

    Raises:
        UsageError: There is no such schedule.
        BadInputError: No such device, or the schedule does not exist for this layout.
    """
    layout = Layout.from_recipe(recipe)
    if schedule is not None:
        schedules = get_args(ScheduleName)
        if schedule not in schedules:
            raise UsageError(f"--schedule {schedule}: there are {', '.join(schedules)}")
        layout = layout.with_changes(schedule=schedule)
    return simulate_step(Architecture.from_recipe(recipe, pair_share), layout, load_device(device))


def tables(step: SimulatedStep) -> list[Table]:
    """Return what the command prints: step, breakdown, bubble, utilisation, stages, hidden all-to-all."""
    printed = [summary(step), breakdown(step), bubble(step), utilisation(step), stages(step)]
    if step.architecture.moe_layers and step.layout.ep * step.layout.etp > 1:
        printed.append(exchange(step))
    return printed


def exchange(step: SimulatedStep) -> Table:
    """Return how much of the experts' all-to-all overlapped schedules hide, whichever the recipe has."""
    h = hidden(step.architecture, step.layout, step.device, layers=max(*step.layers, 1))
    parts = {
        "steady: 16 pairs of a forward and a backward": h.steady,
        "warm-up: a forward alone, in two halves": h.warm_up,
        "warm-up, not halved: under shared experts only": h.shared_only,
        "cool-down: a backward alone, in two halves and under dW": h.cool_down,
        "cool-down, not halved: under dW and shared experts only": h.dw_only,
    }
    rows = [
        [
            part,
            f"{s.communication_us / 1e3:.3f} ms",
            f"{s.exposed_us / 1e3:.3f} ms",
            f"{s.overlap * 100:.2f} %",
        ]
        for part, s in parts.items()
    ]
    heads = ("part of the schedule", "all-to-all ", "shows ", "hidden ")
    return Table("Experts' all-to-all of one chunk, if it is overlapped", heads, rows)


def summary(step: SimulatedStep) -> Table:
    """Return the sections of the step in their order."""
    t, total_s = step.table, step.step_s
    parts = [
        ("pipeline", step.result.makespan),
        ("gradients between copies, what shows", float(t.data_s[0])),
        ("optimizer", float(t.optimizer_s[0])),
        ("host", float(t.host_s[0])),
        ("step", total_s),
    ]
    rows = [[name, seconds_text(s), f"{s / total_s * 100:.2f} %"] for name, s in parts]
    tokens = step.layout.global_batch * step.architecture.seq
    device_rate = f"{tokens / total_s / step.layout.devices:,.1f} tokens/s and device"
    rows.append(["throughput", f"{tokens / total_s:,.0f} tokens/s", device_rate])
    return Table("Step", ("part", "time ", "share "), rows)


def breakdown(step: SimulatedStep) -> Table:
    """Return the slowest stage's seconds by kind of operator."""
    parts = {k: float(np.atleast_1d(v)[0]) for k, v in step.table.parts.items()}
    total = sum(parts.values()) or 1.0
    rows = [
        [PARTS.get(name, name), seconds_text(s), f"{s / total * 100:.1f} %"]
        for name, s in sorted(parts.items(), key=lambda item: -item[1])
        if s > 0
    ]
    return Table("Slowest stage, by kind of operator", ("kind", "time ", "share "), rows)


def bubble(step: SimulatedStep) -> Table:
    """Return the bubble by cause."""
    b = step.bubble
    causes = {
        "schedule (equal chunks, free sends)": b.ideal,
        "unequal chunks": b.imbalance,
        "unequal recomputation": b.recompute,
        "sends between stages": b.neighbours,
        "all": b.total,
    }
    rows = [
        [n, f"{v * 100:.3f} %", seconds_text(v * step.result.makespan)] for n, v in causes.items()
    ]
    title = "Bubble: idle share of the makespan, start-up included, mean over stages"
    return Table(title, ("cause", "share ", "time "), rows)


def utilisation(step: SimulatedStep) -> Table:
    """Return the model FLOPs utilisation under each convention."""
    rows = [
        [CONVENTIONS[name], f"{flops / 1e12:,.1f} TFLOP", f"{share * 100:.2f} %"]
        for name, flops, share in utilisations(step)
    ]
    heads = ("FLOPs counted", "of a step ", "of the peak ")
    return Table("Utilisation, by convention", heads, rows)


CONVENTIONS = {
    "six_n": "6 x active parameters, embedding included, no attention",
    "model": "products and the causal half of attention, with multi-token prediction",
    "full_attention": "the same with attention's whole square (PaLM)",
    "hardware": "the model's with what is recomputed (hardware utilisation)",
}
"""Conventions of `flops.utilisation`, as printed."""


def utilisations(step: SimulatedStep) -> list[tuple[str, float, float]]:
    """Return convention, FLOPs of a step and their share of what all devices could do."""
    peak = step.device.peak(step.layout.compute)
    shares = utilisation_of(step.architecture, step.layout, step.step_s, peak)
    could = peak * step.layout.devices * step.step_s
    return [(name, shares[name] * could, shares[name]) for name in CONVENTIONS]


def per_stage(step: SimulatedStep) -> list[dict[str, Any]]:
    """Return the layers, the idle share and the memory of each stage, as `report` writes them."""
    footprint = step.table.memory
    states = (footprint.parameters + footprint.gradients + footprint.optimizer)[0]
    names = ("parameters", "gradients", "optimizer")
    return [
        {
            "stage": s,
            "layers": [step.layers[c] for c in chunks],
            "idle": float(step.result.idle[s]),
            **{f"{name}_bytes": float(getattr(footprint, name)[0, s]) for name in names},
            "activations_bytes": float(step.kept_bytes[s]),
            "buffers_bytes": float(step.peak_bytes[s] - step.kept_bytes[s] - states[s]),
            "peak_bytes": float(step.peak_bytes[s]),
        }
        for s, chunks in enumerate(step.program.chunks_of_stage)
    ]


def stages(step: SimulatedStep) -> Table:
    """Return time and memory of each stage."""
    rows: list[list[str]] = []
    limit, t = step.device.memory_bytes - step.device.reserved_bytes, step.times
    for row, chunks in zip(per_stage(step), step.program.chunks_of_stage, strict=True):
        times = (float(a[list(chunks)].sum()) for a in (t.forward, t.dx + t.dw, step.recompute_s))
        over = row["peak_bytes"] - limit
        rows.append(
            [
                str(row["stage"]),
                "+".join(map(str, row["layers"])),
                *(seconds_text(seconds * step.layout.micro_batches) for seconds in times),
                f"{row['idle'] * 100:.2f} %",
                *(gib_text(value) for name, value in row.items() if name.endswith("_bytes")),
                "yes" if over <= 0 else f"no, {gib_text(over)} too much",
            ]
        )
    headers = (
        "stage ", "layers", "forward ", "backward ", "of it again ", "idle ", "parameters ", "gradients ",
        "optimizer ", "activations ", "buffers ", "peak ", "fits",
    )  # fmt: skip
    return Table("Stages", headers, rows)


def notes(step: SimulatedStep) -> list[str]:
    """Return what was simulated."""
    a, layout = step.architecture, step.layout
    lines = [
        f"{a.name}: {count_text(a.parameters)} parameters, {count_text(a.active_parameters)} active; "
        f"{layout.short()} on {layout.devices} x {step.device.name}; schedule {step.program.name}, "
        f"global batch {layout.global_batch} sequences of {a.seq} tokens",
        f"predicted step {seconds_text(step.step_s)}, bubble {step.bubble.total * 100:.2f} % (idle share of the makespan, "
        f"start-up included), peak memory {gib_text(float(step.peak_bytes.max()))} of a device",
    ]
    if step.device.step and layout.devices == 1:
        seconds = seconds_text(cpu_step.predict(a, layout, step.device.step))
        lines.insert(0, f"one CPU thread, as this machine measured itself: {seconds} a step")
    if ways := told(choices(a, layout, step.device)):
        lines.append(f"one dispatch of tokens to experts ({layout.exchange} here): {ways}")
    return lines


def timeline(step: SimulatedStep) -> PipelineTimeline:
    """Return every operation of every stage, what follows the pipeline, and memory over time."""
    result, boxes = step.result, operations(step.result)
    sends: list[TimelineBox] = []
    for s, ops in enumerate(step.program.ops):
        for op, finish in zip(ops, result.end[s], strict=True):
            sends += _sends(step, s, op, float(finish))
        _after(step, s, result.makespan, boxes)
    names = [
        f"stage {s}: {'+'.join(str(step.layers[c]) for c in chunks)} layers"
        for s, chunks in enumerate(step.program.chunks_of_stage)
    ]
    return PipelineTimeline(
        f"Step of {step.architecture.name}, {step.layout.short()}",
        names,
        boxes,
        sends,
        activations(result, step.fixed_bytes.tolist(), step.step_s),
        step.device.memory_bytes - step.device.reserved_bytes,
        tables(step),
        notes(step),
    )


def _sends(step: SimulatedStep, stage: int, op: Op, end: float) -> list[TimelineBox]:
    """Return what an operation sends to other stages when it ends."""
    boxes: list[TimelineBox] = []
    for kind, chunk, micro in op.parts():
        to = chunk + 1 if kind is OpKind.F else chunk - 1
        if kind is OpKind.W or not 0 <= to < step.program.chunks or not step.times.comm:
            continue
        other = step.program.stage(to, micro)
        if other != stage:
            content = "activations" if kind is OpKind.F else "gradients"
            text = f"{content} of chunk {chunk}, micro-batch {micro} to stage {other}"
            boxes.append(TimelineBox(stage, end, step.times.comm, "S", text))
    return boxes


def _after(step: SimulatedStep, stage: int, start: float, boxes: list[TimelineBox]) -> None:
    t = step.table
    for seconds, kind, text, label in (
        (float(t.data_s[0]), "C", "gradients between copies, what shows", "gradients"),
        (float(t.optimizer_s[0]), "O", "optimizer", "optimizer"),
        (float(t.host_s[0]), "O", "host: what no operator accounts for", "host"),
    ):
        if seconds > 0:
            boxes.append(TimelineBox(stage, start, seconds, kind, text, label))
        start += seconds


def report(step: SimulatedStep) -> dict[str, Any]:
    """Return the figures as plain data."""
    t, room = step.table, step.device.memory_bytes - step.device.reserved_bytes
    dispatch_s = choices(step.architecture, step.layout, step.device)
    return {
        "model": step.architecture.name,
        "layout": step.layout.short(),
        "devices": step.layout.devices,
        "device": step.device.name,
        "schedule": step.program.name,
        "exchange": {"chosen": step.layout.exchange, "dispatch_s": dispatch_s},
        "step_s": step.step_s,
        "pipeline_s": step.result.makespan,
        "data_parallel_s": float(t.data_s[0]),
        "optimizer_s": float(t.optimizer_s[0]),
        "host_s": float(t.host_s[0]),
        "tokens_per_s": step.layout.global_batch * step.architecture.seq / step.step_s,
        "slowest_stage_s": {k: float(np.atleast_1d(v)[0]) for k, v in t.parts.items()},
        "bubble": vars(step.bubble),
        "bubble_convention": "idle share of the makespan, start-up included, mean over stages",
        "utilisation": [
            {"convention": name, "counted": CONVENTIONS[name], "flops": flops, "share": share}
            for name, flops, share in utilisations(step)
        ],
        "fits": bool((step.peak_bytes <= room).all()),
        "stages": per_stage(step),
    }
