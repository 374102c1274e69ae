"""What each rank of a recipe runs where the recipe chooses one of the planner's programs as its pipeline schedule."""

from pathlib import Path
from typing import Any, cast

from telechat_moe.errors import BadInputError
from telechat_moe.reading import parse_json
from telechat_moe.recipe import Recipe, RecipeError
from telechat_moe.sharding.recipe import mesh_of, stages_of
from telechat_moe.tools.plan.schedules.program import (
    PAIRS,
    PROGRAM_FILE,
    Program,
    Times,
    loop_route,
    v_route,
)
from telechat_moe.tools.plan.schedules.published import GENERATORS, generate
from telechat_moe.tools.plan.schedules.simulate import check

KEY = "telechat_moe.sharding.pipeline_schedule"
ONE_STAGE = "1f1b-overlap-full"
RankOrder = list[tuple[str, int, int] | tuple[str, int, int, int, int]]
"""Passes in order: `F`, `D`, `W` or `B`; number of the chunk among those of the stage; micro-batch. Pairs: `FB` or
`FD`; both of the forward, then of the backward."""


def rank_orders(recipe: Recipe) -> dict[int, RankOrder] | None:
    """Return the passes of each rank in their order; None where the recipe leaves the order to MindSpore.

    A pair of a forward and a backward becomes the one after the other, unless exchanges run beside computation.

    Raises:
        RecipeError: No such program, or it deadlocks, or it has other stages, chunks or micro-batches, or its chunks
            are on other stages than the recipe's, or it has no pairs where exchanges run beside computation.
    """
    program, paired = program_of(recipe), recipe.telechat_moe.sharding.overlap_exchange
    if program is None:
        return None
    if paired and not any(op.kind in PAIRS for ops in program.ops for op in ops):
        problem = (
            f"{program.name} with {program.micro_batches} micro-batches has no pair of a forward and a backward, so "
            "telechat_moe.sharding.overlap_exchange would have no effect"
        )
        expected = "a program with pairs, such as 1f1b-overlap, or more micro-batches"
        raise RecipeError([recipe.problem(KEY, problem, expected)])
    mesh = mesh_of(recipe)
    return {rank: stage_order(program, mesh.stage(rank), paired) for rank in range(mesh.devices)}


def stage_order(program: Program, stage: int, paired: bool = False) -> RankOrder:
    """Return the passes of a stage; ``paired``: with its pairs, else the forward of each, then the backward."""
    chunks = program.chunks_of_stage[stage]
    order: RankOrder = []
    for op in program.ops[stage]:
        if paired and op.kind in PAIRS:
            place = (chunks.index(op.chunk), op.micro, chunks.index(op.back_chunk), op.back_micro)
            order.append((op.kind.value, *place))
        else:
            order += [(kind.value, chunks.index(chunk), micro) for kind, chunk, micro in op.parts()]
    return order


def program_of(recipe: Recipe) -> Program | None:
    """Return the program that a recipe chooses, checked against its layout; None: it chooses none."""
    sharding, stages = recipe.telechat_moe.sharding, stages_of(recipe)
    name, pp, micro = sharding.pipeline_schedule, mesh_of(recipe).pp, recipe.micro_batches
    if stages is None and sharding.overlap_exchange:
        return generate(ONE_STAGE, 1, micro, 1)
    if name is None or stages is None:
        return None
    chunks = stages.chunks
    route = v_route(pp, chunks) if stages.v_shape else loop_route(pp, chunks)
    try:
        program = _program(name, pp, micro, chunks, "v" if stages.v_shape else "loop")
        _check_fit(program, pp, micro, route)
        check(program)
    except BadInputError as error:
        reason, _, expected = str(error).partition("; expected ")
        problem = recipe.problem(KEY, f"{name}: {reason}", expected or "a program that can run")
        raise RecipeError([problem]) from None
    return program


def _program(name: str, stages: int, micro: int, chunks: int, placement: str) -> Program:
    if name == "synthesised":
        from telechat_moe.tools.plan.schedules.synthesise import synthesise

        times = Times.even(stages, chunks)
        return synthesise(times, stages, micro, placements=[placement]).program
    if name in GENERATORS:
        return generate(name, stages, micro, chunks)
    if not name.endswith(".json"):
        names = ", ".join(GENERATORS)
        raise BadInputError(
            f"no such schedule; expected one of {names}, synthesised, or a JSON file of a program"
        )
    try:
        data = parse_json(Path(name).read_bytes())
    except OSError as error:
        raise BadInputError(
            f"cannot be read: {error.strerror}; expected a file, found from the working folder"
        ) from None
    except ValueError as error:
        raise BadInputError(f"not JSON ({error}); expected a program, {PROGRAM_FILE}") from None
    if isinstance(data, dict) and "program" in data:
        data = cast("dict[str, Any]", data)["program"]
    return Program.from_json(data)


def _check_fit(program: Program, stages: int, micro: int, route: tuple[int, ...]) -> None:
    (route_of_program, *others) = program.routes
    if others:
        raise BadInputError(
            "its micro-batches enter from both ends, so every stage would hold the weights of two, and a layout of the "
            "recipe holds each weight once; expected dualpipev, which needs each once"
        )
    if (program.stages, program.micro_batches) != (stages, micro):
        raise BadInputError(
            f"it is for {program.stages} stages and {program.micro_batches} micro-batches; expected {stages} stages "
            f"(parallel_config.pipeline_stage) and {micro} micro-batches (parallel_config.micro_batch_num)"
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
