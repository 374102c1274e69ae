"""Report what `telechat-moe plan schedule` prints and writes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.report.timeline import (
    PipelineTimeline,
    Table,
    activations,
    operations,
    page,
)
from telechat_moe.tools.plan.schedules.bounds import Rules
from telechat_moe.tools.plan.schedules.program import Times
from telechat_moe.tools.plan.schedules.simulate import Simulation, check
from telechat_moe.tools.plan.schedules.synthesise import EFFORT, PLACEMENTS, Synthesis, synthesise

HEADERS = ["schedule", "chunks a stage ", "bubble ", "makespan ", "memory (1F1B = 1) ", "fits"]
"""Headers of `rows`."""

LONGEST = 1e100
"""The longest time that is accepted; sums of longer ones may exceed the range of a float."""


@dataclass(frozen=True, kw_only=True)
class ScheduleRequest:
    """What a schedule is searched for."""

    stages: int
    micro_batches: int
    chunks: int
    """Chunks of a stage."""
    times: Sequence[float]
    """F, D and W of a whole stage."""
    backward: float | None = None
    """B of a whole stage; D + W where it is None."""
    scale: Mapping[int, float] = field(default_factory=dict[int, float])
    """Factors of single chunks' times and activations."""
    comm: float = 0.0
    """Time between neighbouring stages."""
    memory: float = 1.0
    """The most activations that a stage may hold, 1F1B's = 1."""
    kept_for_w: float = 1.0
    """Share of the activations that only dW frees."""
    overlap: float = 0.0
    """Share of F and D that communicates and can be hidden; pairs are allowed where it is positive."""
    split: bool = True
    """Whether dX and dW may be separate operations."""
    placement: str | None = None
    """A key of `PLACEMENTS`; all where it is None."""
    effort: float | None = None
    seed: int = 0


def find(request: ScheduleRequest) -> Synthesis:
    """Search the schedule of a request.

    Raises:
        BadInputError: The numbers make no schedule.
    """
    r = request
    if min(r.stages, r.micro_batches, r.chunks) < 1:
        raise BadInputError(
            f"schedule: {r.stages} stages, {r.micro_batches} micro-batches, {r.chunks} chunks a stage; "
            "expected at least one of each"
        )
    if not r.memory > 0 or not 0 <= (r.effort or 0) < np.inf or r.seed < 0:
        raise BadInputError(
            f"schedule: memory {r.memory}, effort {r.effort}, seed {r.seed}; expected memory above 0, the others "
            "finite and not negative"
        )
    synthesis = synthesise(
        _chunk_times(r),
        r.stages,
        r.micro_batches,
        r.memory * r.stages,
        Rules(r.split, r.overlap > 0),
        tuple(PLACEMENTS) if r.placement is None else (r.placement,),
        EFFORT if r.effort is None else int(r.effort),
        r.seed,
    )
    check(synthesis.program)
    return synthesis


def _chunk_times(r: ScheduleRequest) -> Times:
    """Return the times of every chunk, [P V], from those of a whole stage and the chunk's factor."""
    factor = np.ones(r.stages * r.chunks)
    for chunk, value in r.scale.items():
        if not 0 <= chunk < len(factor) or not value >= 0:
            raise BadInputError(
                f"schedule: chunk {chunk} times {value}; expected a chunk from 0 to {len(factor) - 1} "
                "and a factor that is not negative"
            )
        factor[chunk] = value
    if not 0 <= r.overlap < 1:
        raise BadInputError(f"schedule: overlap {r.overlap}, expected from 0 to below 1")
    if not max(*r.times, r.backward or 0.0) <= LONGEST:  # nan is none
        problem = f"times {list(r.times)}, B {r.backward}"
        raise BadInputError(f"schedule: {problem}; expected up to {LONGEST:g}")
    forward, dx, dw = (factor * t / r.chunks for t in r.times)
    return Times(
        forward,
        dx,
        dw,
        r.comm,
        backward=np.zeros(0) if r.backward is None else factor * r.backward / r.chunks,
        forward_exposed=forward * r.overlap,
        backward_exposed=dx * r.overlap,
        activation=factor / r.chunks,
        kept_for_w=r.kept_for_w,
    )


def rows(s: Synthesis) -> list[list[str]]:
    """Return the table: our schedule, then the published ones from shortest to longest."""
    p = s.program.stages
    name = "ours" if s.source == "synthesised" else f"ours = {s.source}"
    result = [_row(name, s.program.chunks // p, s.result, p, "yes")]
    for k in sorted(s.table, key=lambda k: k.result.makespan):
        fits = "yes" if k.fits else "no"
        if k.copies > 1:
            fits += f", {k.copies}x weights"
        result.append(_row(k.program.name, k.chunks, k.result, p, fits))
    return result


def _row(name: str, chunks: int, result: Simulation, stages: int, fits: str) -> list[str]:
    return [
        name,
        str(chunks),
        f"{result.bubble:.2%}",
        f"{result.makespan:.6g}",
        f"{result.peak.max() / stages:.3f}",
        fits,
    ]


def ideal_bubble(s: Synthesis) -> float:
    """Return the idle share of a schedule as short as the bound."""
    busy = float((1 - s.result.idle).sum()) * s.result.makespan
    return max(0.0, 1 - busy / (s.program.stages * s.bound.makespan))


def summary(s: Synthesis, memory: float) -> list[str]:
    """Return what to print below the table; `memory` is what was allowed, 1F1B's = 1."""
    p = s.program.stages
    peak, lowest = s.result.peak.max() / p, s.result.peak.min() / p
    chunks = s.program.chunks // p
    zigzag = s.program.routes[0] == PLACEMENTS["v"](p, chunks)
    placement = "zigzag (v)" if zigzag else "round-robin (loop)"
    if chunks == 1:
        placement = "one chunk a stage"
    return [
        f"bubble {s.result.bubble:.2%} of the makespan, start-up included; makespan {s.result.makespan:.6g}",
        f"proven lower bound {s.bound.makespan:.6g} ({s.bound.reason}): bubble at least {ideal_bubble(s):.2%}",
        f"gap {s.gap:.2%} of the makespan" + (", proven optimal" if s.gap < 1e-9 else ""),
        f"memory {lowest:.3f} to {peak:.3f} of 1F1B's, allowed {memory:.3f}",
        f"placement: {placement}; found by {s.source}, {s.tries:,} schedules tried",
        "deadlock: none, every operation ran in the simulation",
    ]


def data(s: Synthesis) -> dict[str, Any]:
    """Return the figures and the program as plain data."""
    return {
        "stages": s.program.stages,
        "micro_batches": s.program.micro_batches,
        "chunks_of_a_stage": s.program.chunks // s.program.stages,
        "bubble": s.result.bubble,
        "bubble_convention": "idle share of the makespan over all stages, start-up included",
        "makespan": s.result.makespan,
        "lower_bound": s.bound.makespan,
        "lower_bound_reason": s.bound.reason,
        "lower_bound_bubble": ideal_bubble(s),
        "gap": s.gap,
        "peak_activations": s.result.peak.tolist(),
        "source": s.source,
        "schedules_tried": s.tries,
        "published": [
            {
                "name": k.program.name,
                "chunks_of_a_stage": k.chunks,
                "bubble": k.result.bubble,
                "makespan": k.result.makespan,
                "peak_activations": float(k.result.peak.max()),
                "fits": k.fits,
                "copies_of_weights": k.copies,
            }
            for k in s.table
        ],
        "start": [a.tolist() for a in s.result.start],
        "end": [a.tolist() for a in s.result.end],
        "activations": [a.tolist() for a in s.result.memory],
        "program": s.program.to_json(),
    }


def html(s: Synthesis, memory: float) -> str:
    """Return the page: every operation, and the activations of each stage in units of a micro-batch's."""
    p = s.program
    title = (
        f"Pipeline schedule: {p.stages} stages, {p.micro_batches} micro-batches, "
        f"{p.chunks // p.stages} chunks a stage"
    )
    curves = activations(s.result, [0.0] * p.stages, s.result.makespan)
    tables = [Table("Schedules on the same times", HEADERS, rows(s))]
    names = [f"stage {i}" for i in range(p.stages)]
    notes = ["; ".join(summary(s, memory)[:4]) + "."]
    timeline = PipelineTimeline(
        title, names, operations(s.result), memory=curves, tables=tables, notes=notes, units=False
    )
    return page(timeline)
