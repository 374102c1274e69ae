"""Know every graph of a run before it starts, and what the run needs beside them: memory, files and bytes of a checkpoint.

``telechat-moe dryrun RECIPE --run`` prints this. The graphs are compiled for a rank of each stage; which rank writes which
shard, and into how many files, follows from the layout alone.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor
from mindspore.common.initializer import initializer
from mindspore.communication import create_group

from telechat_moe.checkpoint import checkpoint
from telechat_moe.checkpoint.rank_shards import balance
from telechat_moe.graph.compile import Built, RankGraph, compile_ranks
from telechat_moe.graph.read import Expected, RankMemory, peak, read
from telechat_moe.graph.report import host_sync_rows
from telechat_moe.processes import in_clean_process
from telechat_moe.recipe import Recipe
from telechat_moe.sharding.cells.expert_rows import AscendExchangeRows, group_of
from telechat_moe.sharding.mesh import Mesh
from telechat_moe.sharding.recipe import even_exchange, forward_of, has_mask, mesh_of, smaller_steps
from telechat_moe.sharding.shards import EMA, MOMENTS, Region, WeightShards, elements
from telechat_moe.sharding.shards import group_of as checkpoint_group
from telechat_moe.train.average import AverageStep
from telechat_moe.train.expert_moves import members
from telechat_moe.train.rank_graph import compile_recipe

ITEMSIZE = 4
"""Bytes of an element of a checkpoint's tensors, float32."""
RESIDENT = ("parameters", "optimizer", "gradients", "other")
"""What stays in a device's memory between the graphs of a run."""
NEEDED = ("copies", "activations")
"""What one graph needs while it runs."""
AVERAGES = "averages of weights"


class RunGraph(NamedTuple):
    """A graph that ranks execute in a run.

    Attributes:
        name: What it computes, for the user.
        ranks: Those that are compiled: the first of each stage that executes it.
        compile: Compiles it for ranks, and calls ``done`` after each.
        expected: Sizes of dynamic exchanges.
        is_step: It is a training step.
    """

    name: str
    ranks: Sequence[int]
    compile: Callable[..., list[RankGraph]]
    expected: Expected
    is_step: bool = True


class Save(NamedTuple):
    """A save of a run.

    Attributes:
        files: Files of the checkpoint, ``checkpoint.json`` included.
        nbytes: Bytes of its tensors' files.
        largest: Most bytes that a rank writes.
        copies: Most bytes that a rank copies into its host's memory, from where they are written in the background.
    """

    files: int
    nbytes: int
    largest: int
    copies: int


def run_graphs(recipe: Recipe) -> list[RunGraph]:
    """Return the graphs of a run: the step of each batch size, the largest first, evaluation, averages and what moves experts.

    An interleaved pipeline is evaluated by its step, with an update that changes nothing.
    """
    mesh, graphs = mesh_of(recipe), step_graphs(recipe)
    expected = Expected(*even_exchange(recipe, mesh))
    if forward_of(recipe):
        name = "evaluation" if recipe.telechat_moe.sample is None else "evaluation and samples"
        compile_forward = partial(compile_recipe, recipe, graph="forward")
        graphs.append(RunGraph(name, mesh.first_ranks(), compile_forward, expected, False))
    return [*graphs, *_averages(recipe), *_expert_moves(recipe)]


def step_graphs(recipe: Recipe) -> list[RunGraph]:
    """Return the step of each batch size, the largest first."""
    mesh, steps = mesh_of(recipe), {recipe.micro_batches: recipe, **smaller_steps(recipe)}
    expected = Expected(*even_exchange(recipe, mesh))

    def step(count: int) -> RunGraph:
        name = f"step of {count} micro-batch{'es' if count > 1 else ''}"
        return RunGraph(name, mesh.first_ranks(), partial(compile_recipe, steps[count]), expected)

    return [step(count) for count in sorted(steps, reverse=True)]


def host_waits(
    recipe: Recipe, graphs: Sequence[RunGraph], advance: Callable[[], object] | None = None
) -> list[dict[str, Any]]:
    """Compile steps (:func:`step_graphs`) for a rank of each stage; return the operators for which the host waits in them.

    Raises:
        BadInputError: The layout does not fit the model, or MindSpore refuses it.
    """
    rows = report(recipe, graphs, compile_run(graphs, advance))["graphs"]
    names = ("graph", "stage", "rank")
    return [{**{k: row[k] for k in names}, **wait} for row in rows for wait in row["host_waits"]]


def _averages(recipe: Recipe) -> list[RunGraph]:
    if recipe.telechat_moe.ema is None:
        return []
    ranks, compiling = mesh_of(recipe).first_ranks(), partial(compile_averages, recipe)
    return [RunGraph(AVERAGES, ranks, compiling, Expected(0, 0), False)]


@in_clean_process
def compile_averages(
    recipe: Recipe, ranks: Sequence[int], done: Callable[[], object] | None = None
) -> list[RankGraph]:
    """Compile what averages in the weights of ranks after an update, for Ascend.

    Args:
        done: See :func:`telechat_moe.train.rank_graph.compile_recipe`.
    """
    shards, ema = WeightShards.of(recipe), recipe.telechat_moe.ema
    assert ema is not None

    def build(rank: int) -> Built:
        regions = {name: shards.shard(rank, name) for name in shards.weights}
        shapes = {n: [end - begin for begin, end in x] for n, x in regions.items() if x is not None}
        weights = [initializer("zeros", shape, ms.float32) for shape in shapes.values()]
        averages = ParameterTuple(
            Parameter(initializer("zeros", shape, ms.float32), name=f"{EMA}.{name}")
            for name, shape in shapes.items()
        )
        step = AverageStep(averages, ema.decay)
        return Built(step, (Tensor(True), Tensor(False), *weights))

    settings = {"parallel_mode": "stand_alone"}
    return compile_ranks(build, ranks, recipe.devices, settings, done=done)


def _expert_moves(recipe: Recipe) -> list[RunGraph]:
    """Return the graphs that exchange rows of experts' tensors, one for each shape of a shard."""
    if recipe.telechat_moe.moe.placement is None:
        return []
    mesh, shards = mesh_of(recipe), WeightShards.of(recipe)
    names = [name for name in shards.weights if ".moe.experts." in name]
    regions = [
        {name: region for name in names if (region := shards.shard(rank, name)) is not None}
        for rank in range(recipe.devices)
    ]
    graphs: dict[tuple[int, ...], RunGraph] = {}
    for name in names:
        ranks = [rank for rank in mesh.first_ranks() if name in regions[rank]]
        shape = tuple(end - begin for begin, end in regions[ranks[0]][name])
        earlier = graphs[shape].ranks if shape in graphs else ()
        title = f"moves of experts, {list(shape)} each"
        compile_moves = partial(compile_exchange, recipe.devices, shape, name, regions)
        expected = Expected(math.prod(shape), shape[0])
        graphs[shape] = RunGraph(title, sorted({*earlier, *ranks}), compile_moves, expected, False)
    return list(graphs.values())


@in_clean_process
def compile_exchange(
    devices: int,
    shape: tuple[int, ...],
    name: str,
    regions: Sequence[Mapping[str, Region]],
    ranks: Sequence[int],
    done: Callable[[], object] | None = None,
) -> list[RankGraph]:
    """Compile the exchange of rows of a tensor of experts for Ascend.

    Args:
        shape: Of a rank's shard.
        name: A tensor of that shape.
        regions: What each rank holds of the tensors of experts.
        done: See :func:`telechat_moe.train.rank_graph.compile_recipe`.
    """

    def build(rank: int) -> Built:
        # A rank of another stage holds tensors of this shape of other layers.
        local_name = next(
            n for n in regions[rank] if n.rpartition(".")[2] == name.rpartition(".")[2]
        )
        group = group_of(members(local_name, rank, regions), rank)
        create_group(group.name, list(group.ranks))
        rows = initializer("zeros", shape, ms.float32)
        index = initializer("zeros", (shape[0],), ms.int32)
        counts = initializer("zeros", (group.size,), ms.int32)
        return Built(AscendExchangeRows(group), (rows, index, counts, counts, index))

    return compile_ranks(build, ranks, devices, {"parallel_mode": "stand_alone"}, done=done)


def of_stage(graphs: Sequence[RunGraph], mesh: Mesh, stage: int) -> list[RunGraph]:
    """Return the graphs that the ranks of a stage execute, to be compiled for that stage only."""
    ranks = ([rank for rank in graph.ranks if mesh.stage(rank) == stage] for graph in graphs)
    return [graph._replace(ranks=r) for graph, r in zip(graphs, ranks, strict=True) if r]


def compile_run(
    graphs: Sequence[RunGraph], advance: Callable[[], object] | None = None
) -> list[list[RankGraph]]:
    """Compile each graph for Ascend.

    Raises:
        BadInputError: The layout does not fit the model, or MindSpore refuses it.
    """
    return [graph.compile(graph.ranks, done=advance) for graph in graphs]


def save_of(recipe: Recipe) -> Save | None:
    """Return what a save of a run writes; None: the recipe saves nothing.

    Raises:
        BadInputError: The degrees do not divide a weight.
    """
    if recipe.checkpoints is None:
        return None
    owner, copies = shard_writers(recipe)
    by_rank = sorted(owner.items(), key=lambda item: item[1])
    sizes: list[int] = []
    files = 1
    for _, pieces in groupby(by_rank, key=lambda item: item[1]):
        planned = checkpoint.plan(without_memory(piece for piece, _ in pieces))
        files += len(planned)
        sizes.append(sum(file.nbytes for _, file in planned))
    return Save(files, sum(sizes), max(sizes), max(copies.values()))


def shard_writers(recipe: Recipe) -> tuple[dict[tuple[str, Region], int], Mapping[int, int]]:
    """Return which rank writes each shard of a checkpoint, and the bytes of the shards that each rank has."""
    shards, ranks = WeightShards.of(recipe), range(recipe.devices)
    holders: dict[tuple[str, Region], list[int]] = {}
    copies = Counter[int]()
    for weight, about in shards.weights.items():
        states = MOMENTS if about.trained else ()
        averages = (EMA,) if recipe.telechat_moe.ema is not None else ()
        names = [weight, *(f"{state}.{weight}" for state in (*states, *averages))]
        for rank in ranks:
            if (region := shards.shard(rank, weight)) is None:
                continue
            for name in names:
                holders.setdefault((name, region), []).append(rank)
            copies[rank] += len(names) * elements(region) * ITEMSIZE
    return balance({piece: (elements(piece[1]), r) for piece, r in holders.items()}), copies


def without_memory(
    pieces: Iterable[tuple[str, Region]],
) -> Mapping[str, Mapping[str, np.ndarray]]:
    """Return arrays of the shapes of shards by group and name, which take no memory."""
    groups: dict[str, dict[str, np.ndarray]] = {"model": {}, "optimizer": {}}
    for name, region in pieces:
        shape = tuple(end - begin for begin, end in region)
        array = np.broadcast_to(np.float32(0), shape)
        groups.setdefault(checkpoint_group(name), {})[name] = array
    return groups


def report(
    recipe: Recipe, graphs: Sequence[RunGraph], compiled: Sequence[Sequence[RankGraph]]
) -> dict[str, Any]:
    """Return what a run executes and needs, as plain data; sizes are bytes.

    Args:
        compiled: What :func:`compile_run` returned for the graphs.
    """
    mesh = mesh_of(recipe)
    rows: list[dict[str, Any]] = []
    for graph, ranks in zip(graphs, compiled, strict=True):
        for rank in ranks:
            reading = read(rank, mesh, graph.expected)
            about = {"graph": graph.name, "stage": mesh.stage(rank.rank), "rank": rank.rank}
            counts = {
                "operators": sum(sum(kinds.values()) for kinds in reading.operators.values()),
                "collectives": sum(call.times for call in reading.collectives),
                "compile_seconds": round(rank.compile_seconds, 2),
            }
            counts["host_waits"] = [row for row in host_sync_rows(reading) if row["waits"]]
            of_graph = reading.memory
            if graph.name == AVERAGES:
                of_graph = replace(of_graph, parameters=0)  # counted with the steps
            memory = _memory(recipe, of_graph)
            if not graph.is_step:
                memory |= {"copies": 0, "activations": peak(rank, graph.expected)}
                memory["total"] = sum(memory[name] for name in (*RESIDENT, *NEEDED))
            rows.append({**about, **counts, "memory": memory})
    save = save_of(recipe)
    return {
        "recipe": str(recipe.source),
        "layout": mesh.describe(),
        "devices": recipe.devices,
        "graphs": rows,
        "largest_moment": [_largest(rows, stage) for stage in sorted({r["stage"] for r in rows})],
        "batch": _batch(recipe),
        "save": None if save is None else save._asdict(),
    }


def _memory(recipe: Recipe, memory: RankMemory) -> dict[str, int]:
    average = memory.parameters if recipe.telechat_moe.ema is not None else 0
    sizes = {name: getattr(memory, name) for name in RESIDENT}
    sizes["other"] += average
    if recipe.optimizer.swap:
        sizes["optimizer"] = 0
    sizes |= {"copies": memory.copies, "activations": memory.activations}
    return {**sizes, "total": sum(sizes.values()), "host": memory.host}


def _largest(rows: Sequence[dict[str, Any]], stage: int) -> dict[str, Any]:
    """Return the moment of a run at which a device of a stage holds most: what stays there, and what one graph needs."""
    of_stage = [row for row in rows if row["stage"] == stage]
    resident = {name: max(row["memory"][name] for row in of_stage) for name in RESIDENT}

    def needed(row: dict[str, Any]) -> int:
        return sum(row["memory"][name] for name in NEEDED)

    row = max(of_stage, key=needed)
    total = sum(resident.values()) + needed(row)
    return {"stage": stage, "graph": row["graph"], "resident": resident, "total": total}


def _batch(recipe: Recipe) -> int:
    """Return the bytes of a global batch in a host's memory."""
    length = recipe.model_config.seq_length
    masks = length if has_mask(recipe) else 0
    return recipe.global_batch * length * (4 * ITEMSIZE + masks)
