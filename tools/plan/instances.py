"""A configuration of the outer space as an inner problem, and its solution as a layout again."""

import math

import numpy as np

from telechat_moe.tools.plan.architecture import Architecture
from telechat_moe.tools.plan.bounds import Costs, shares
from telechat_moe.tools.plan.columns import stage_of_chunk
from telechat_moe.tools.plan.layout import Layout
from telechat_moe.tools.plan.placement import (
    Group,
    Option,
    Problem,
    Solution,
)
from telechat_moe.tools.plan.space import (
    NAMES,
    POLICIES,
    SCHEDULES,
)
from telechat_moe.tools.plan.step import Table

NS = 1e9


def c_kept(problem: Problem) -> tuple[int, int]:
    """Return the time of a layer of the bulk and of one of the other kind, not recomputed where that may be chosen."""
    bulk = problem.groups[problem.bulk].options[0].time
    rest = [g.options[0].time for i, g in enumerate(problem.groups) if i != problem.bulk]
    return bulk, rest[0] if rest else 0


def pipeline_seconds(table: Table) -> float:
    """Return the makespan without sends."""
    sends = float(table.parts["neighbours"][0])
    return float(table.pipeline_s[0]) - sends


def problem_of(a: Architecture, layout: Layout, c: Costs, room: float) -> tuple[Problem, float]:
    """Return the inner problem of a configuration, and the seconds that one unit of its objective is."""
    counted = bool(c.counted[0])
    share = shares(layout.schedule, layout.vpp, layout.pp)
    unit = share.denominator
    groups = []
    for name, count, took, again, states, kept, entry, working in (
        (
            "dense",
            a.dense_layers,
            c.dense_s,
            c.dense_again_s,
            c.dense_bytes,
            c.dense_kept,
            c.dense_entry,
            c.dense_working,
        ),
        (
            "moe",
            a.moe_layers,
            c.moe_s,
            c.moe_again_s,
            c.moe_bytes,
            c.moe_kept,
            c.moe_entry,
            c.moe_working,
        ),
    ):
        if not count:
            continue
        whole = Option(
            name="kept",
            time=_ns(took[0]),
            kept=math.ceil(kept[0] / layout.vpp),
            working=math.ceil(c.dense_working[0]),
        )
        once_more = Option(
            name="recomputed",
            time=_ns(took[0] + again[0]),
            kept=math.ceil(entry[0] / layout.vpp),
            working=math.ceil(working[0]),
        )
        options = (whole, once_more) if counted else (once_more,)
        groups.append(Group(name=name, count=count, states=math.ceil(states[0]), options=options))
    place = stage_of_chunk(layout)
    last = place[-1]
    fixed_time, logits = [0] * layout.pp, [0] * layout.pp
    fixed_memory = [math.ceil(c.always[0])] * layout.pp
    fixed_time[0] += _ns(c.first_s[0])
    fixed_time[last] += _ns(c.last_s[0])
    fixed_memory[0] += math.ceil(c.first_bytes[0])
    fixed_memory[last] += math.ceil(c.last_bytes[0])
    logits[last] = math.ceil(c.logits[0])
    problem = Problem(
        groups=tuple(groups),
        stage_of_chunk=tuple(place),
        in_flight=tuple(round(c.flight[0, s] * layout.vpp) for s in place),
        memory=(math.floor(room),) * layout.pp,
        fixed_time=tuple(fixed_time),
        fixed_memory=tuple(fixed_memory),
        fixed_working=tuple(logits),
        max_weight=layout.micro_batches * unit - share.numerator,
        sum_weight=share.numerator,
    )
    return problem, 1 / NS / unit


def _ns(seconds: float) -> int:
    return round(float(seconds) * NS)


def placed_layout(layout: Layout, problem: Problem, answer: Solution) -> Layout:
    """Return the layout with its layers and recomputation."""
    again = None
    if layout.recompute == "full":
        again = tuple(sum(numbers[1] for numbers in chunk) for chunk in answer.items)
    return layout.but(chunks=answer.layers(problem), recompute_layers=again)


def expressible(problem: Problem, answer: Solution) -> bool:
    """Return whether the recomputed layers are the first ones of every chunk, as recipes say it."""
    for chunk in answer.items:
        kept = False
        for group, numbers in zip(problem.groups, chunk, strict=True):
            if len(group.options) > 1:
                if kept and numbers[1]:
                    return False
                kept = kept or numbers[0] > 0
    return True


def describe(row: np.ndarray) -> str:
    """Return a configuration in a few words."""
    v = dict(zip(NAMES, (int(n) for n in row), strict=True))
    words = [
        f"{n}{v[n]}" for n in ("dp", "tp", "cp", "pp", "vpp", "ep", "etp") if v[n] > 1 or n == "dp"
    ]
    words += ["sp"] if v["sp"] else []
    words += [f"mbs{v['micro_batch']}", f"m{v['micro_batches']}", f"zero{v['zero']}"]
    return " ".join([*words, SCHEDULES[v["schedule"]], "recompute " + POLICIES[v["policy"]]])
