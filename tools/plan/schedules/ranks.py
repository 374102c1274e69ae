"""What each rank of a recipe runs where the recipe chooses one of the planner's programs as its pipeline schedule."""

import json
from pathlib import Path
from typing import Any, cast

from telechat_moe.errors import BadInputError
from telechat_moe.recipe import Recipe
from telechat_moe.sharding.recipe import mesh_of, micro_batches, stages_of
from telechat_moe.tools.plan.schedules.check import check
from telechat_moe.tools.plan.schedules.program import Program, Times, loop_route, v_route
from telechat_moe.tools.plan.schedules.published import GENERATORS, generate

KEY = "telechat_moe.sharding.pipeline_schedule"
RankOrder = list[tuple[str, int, int]]
"""Passes in order: `F`, `D`, `W` or `B`; number of the chunk among those of the stage; micro-batch."""


def rank_orders(recipe: Recipe) -> dict[int, RankOrder] | None:
    """Return the passes of each rank in their order; None where the recipe leaves the order to MindSpore.

    A pair of a forward and a backward becomes the one after the other.

    Raises:
        BadInputError: No such program, or it deadlocks, or it has other stages, chunks or micro-batches, or its chunks
            are on other stages than the recipe's.
    """
    program = program_of(recipe)
    if program is None:
        return None
    mesh = mesh_of(recipe)
    return {rank: stage_order(program, mesh.stage(rank)) for rank in range(mesh.devices)}


def stage_order(program: Program, stage: int) -> RankOrder:
    """Return the passes of a stage."""
    held = program.chunks_of_stage[stage]
    parts = (part for op in program.ops[stage] for part in op.parts())
    return [(kind.value, held.index(chunk), micro) for kind, chunk, micro in parts]


def program_of(recipe: Recipe) -> Program | None:
    """Return the program that a recipe chooses, checked against its layout; None: it chooses none."""
    name = recipe.telechat_moe.sharding.pipeline_schedule
    stages = stages_of(recipe)
    if name is None or stages is None:
        return None
    pp, micro = mesh_of(recipe).pp, micro_batches(recipe)
    chunks = stages.chunks
    route = v_route(pp, chunks) if stages.v_shape else loop_route(pp, chunks)
    where = f"{recipe.source}: {KEY}: {name}"
    try:
        program = _program(name, pp, micro, chunks, "v" if stages.v_shape else "loop")
        _check_fit(program, pp, micro, route)
        check(program)
    except BadInputError as error:
        raise BadInputError(f"{where}: {error}") from None
    return program


def _program(name: str, stages: int, micro: int, chunks: int, placement: str) -> Program:
    if name == "synthesised":
        from telechat_moe.tools.plan.schedules.synthesise import synthesise

        times = Times.even(stages, chunks)
        return synthesise(times, stages, micro, placements=[placement]).program
    if name in GENERATORS:
        return generate(name, stages, micro, chunks)
    if not name.endswith(".json"):
        known = ", ".join(GENERATORS)
        raise BadInputError(f"expected one of {known}, synthesised, or a JSON file of a program")
    try:
        data = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInputError(f"cannot be read: {error}") from None
    if isinstance(data, dict) and "program" in data:
        data = cast("dict[str, Any]", data)["program"]
    return Program.from_json(data)


def _check_fit(program: Program, stages: int, micro: int, route: tuple[int, ...]) -> None:
    """Refuse a program of another layout."""
    (route_of_program, *others) = program.routes
    if others:
        raise BadInputError(
            "its micro-batches enter from both ends, so every stage would hold the weights of two; a layout of the recipe "
            "holds each weight once. Take dualpipev, which needs each once"
        )
    if (program.stages, program.micro_batches) != (stages, micro):
        raise BadInputError(
            f"it is for {program.stages} stages and {program.micro_batches} micro-batches; the recipe has "
            f"{stages} (parallel_config.pipeline_stage) and {micro} (parallel_config.micro_batch_num)"
        )
    if route_of_program == route:
        return
    per_stage = program.chunks // stages
    expected = "pp_interleave_num 1 and no pipeline_interleave"
    if route_of_program == v_route(stages, 2):
        expected = "pipeline_scheduler zero_bubble_v with pp_interleave_num 2"
    elif per_stage > 1 and route_of_program == loop_route(stages, per_stage):
        expected = f"pipeline_interleave True with pp_interleave_num {per_stage}, and a scheduler other than zero_bubble_v"
    elif per_stage > 1:
        expected = (
            "another program: MindSpore places chunks in turn, or two of them in the shape of a V"
        )
    raise BadInputError(
        f"its chunks are on the stages {list(route_of_program)}, the recipe's on {list(route)}; expected {expected}"
    )
