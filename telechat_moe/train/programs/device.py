"""Compile the step of a rank natively on the device of this process, and run it.

On Ascend MindSpore's semi-automatic parallel mode splits the step, as the dry run compiles it. On CPU, which has no such mode, whole
copies of the model are trained on parts of a batch, in its data-parallel mode.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.communication import create_group, get_process_group_ranks

from telechat_moe.graph.compile import LayoutEntry, RankGraph, layouts_of, set_parallel
from telechat_moe.graph.execute import TOKEN_WEIGHTS
from telechat_moe.recipe import Recipe
from telechat_moe.sharding.cells.expert_rows import AscendExchangeRows, group_of
from telechat_moe.sharding.mesh import Mesh
from telechat_moe.sharding.recipe import mesh_of, whole_copies
from telechat_moe.train.average import DeviceAverage, WeightAverage
from telechat_moe.train.programs.program import Exchange, RankProgram
from telechat_moe.train.rank_graph import StepSource, step_source
from telechat_moe.train.ranks import RankCoordinator


class CompiledStep(NamedTuple):
    """A step that was compiled for the device of this process.

    Attributes:
        graph: How it splits its parameters, and its groups; without MindIR.
        parameters: This rank's, by name.
        run: Runs it on this rank's batch.
    """

    graph: RankGraph
    parameters: dict[str, Any]
    run: Callable[..., Any]


def compile_step(recipe: Recipe, rank: int) -> CompiledStep:
    """Compile the step of a rank on the device of this process; nothing else here needs the device.

    MindSpore's communication is initialised.

    Raises:
        BadInputError: The layout does not fit the model.
    """
    copies, devices = whole_copies(recipe), recipe.devices
    chosen: dict[str, Any] = {"target": recipe.context.device_target, "copies": copies}
    if copies:
        chosen |= {"full_batch": False, "shared_graph": False}
    source = step_source(recipe, **chosen)
    ms.set_context(mode=ms.GRAPH_MODE, **source.context)
    if source.switches is not None:  # of Ascend alone, as a rule of the recipe says
        ms.set_context(ascend_config={"parallel_speed_up_json_path": str(source.switches)})
    _set_mode(source, rank, devices, copies)
    began = time.perf_counter()
    built = source.build(rank)
    ready = time.perf_counter()
    step = built.step
    step.compile(*built.inputs)
    layouts = _whole(step, devices) if copies else layouts_of(step)
    groups = {entry.shard_group for entry in layouts.values()} - {""}
    graph = RankGraph(
        rank=rank,
        devices=devices,
        mindir=b"",
        groups={name: list(get_process_group_ranks(name)) for name in sorted(groups)},
        layouts=layouts,
        build_seconds=ready - began,
        compile_seconds=time.perf_counter() - ready,
        peak_memory=0,
    )
    names = None if copies else set(step.parallel_parameter_name_list)
    parameters = {p.name: p for p in step.get_parameters() if names is None or p.name in names}
    return CompiledStep(graph, parameters, step)


def _set_mode(source: StepSource, rank: int, devices: int, copies: bool) -> None:
    """Set MindSpore's parallel mode: data parallel for whole copies, else semi-automatic."""
    if copies:
        set_parallel("data_parallel", rank, devices, {"parameter_broadcast": False})
    else:
        set_parallel("semi_auto_parallel", rank, devices, source.settings)


def _whole(step: Any, devices: int) -> dict[str, LayoutEntry]:
    """Return the layouts of parameters that every device holds whole."""
    shapes = {p.name: list(p.shape) for p in step.get_parameters()}
    return {
        name: LayoutEntry([devices], [-1] * len(shape), "", shape, shape)
        for name, shape in shapes.items()
    }


def compile_forward(
    recipe: Recipe, rank: int, parameters: Mapping[str, Parameter]
) -> Callable[..., Any]:
    """Compile the forward graph of a rank; its parameters share the memory of those of the step.

    Of whole copies each takes the whole micro-batch.
    """
    copies, target = whole_copies(recipe), recipe.context.device_target
    full_batch = True if copies else None
    source = step_source(
        recipe, target=target, full_batch=full_batch, copies=copies, graph="forward"
    )
    _set_mode(source, rank, recipe.devices, copies)
    built = source.build(rank)
    built.step.compile(*built.inputs)
    for parameter in built.step.get_parameters():
        # The others are of other stages, or no forward pass reads them.
        if parameter.name in parameters:
            parameter.set_data(parameters[parameter.name], slice_shape=True)
    return built.step


class DeviceProgram(RankProgram):
    """The step of a rank on the device of this process. See :class:`RankProgram`.

    Args:
        recipe: Of steps of as many micro-batches as the program has.
        ranks: The processes of the run, which tell each other how they split their parameters.
    """

    def __init__(self, recipe: Recipe, ranks: RankCoordinator) -> None:
        rank, control = ranks.rank, ranks.control
        assert control is not None
        self.recipe, self.rank, self.mesh = recipe, rank, mesh_of(recipe)
        if recipe.context.device_target != "CPU":
            self.operators, self.runs_ahead = f"{recipe.context.device_target}'s", True
        self.forward: Callable[..., Any] | None = None
        self.copies, self.micro_batches = whole_copies(recipe), recipe.micro_batches
        self.takes_all = recipe.parallel.full_batch and not self.copies
        self.step = compile_step(recipe, rank)
        self.parameters = self.step.parameters
        about = f"layouts of {recipe.micro_batches} micro-batches"
        control.write(f"{about}, rank {rank}", json.dumps(self.step.graph.content()))
        ranks.meet(f"telling the {about}")
        texts = (control.read(f"{about}, rank {other}") or "" for other in range(recipe.devices))
        self.ranks = [RankGraph.of(json.loads(text)) for text in texts]

    def run(self, *batch: Any) -> Any:
        """See :meth:`RankProgram.run`."""
        if self.takes_all:
            return self.step.run(*batch)
        rows = (self._rows(column.asnumpy(), self.micro_batches) for column in batch)
        return self.step.run(*map(Tensor, rows))

    def evaluate(self, *batch: Any) -> Any:
        """See :meth:`RankProgram.evaluate`."""
        if self.forward is None:
            self.forward = compile_forward(self.recipe, self.rank, self.parameters)
        if self.takes_all or self.copies:
            return self.forward(*batch)
        return self.forward(*(Tensor(self._rows(column.asnumpy(), 1)) for column in batch))

    def _rows(self, column: np.ndarray, micro_batches: int) -> np.ndarray:
        """Return this rank's rows of every micro-batch of a batch."""
        mesh: Mesh = self.mesh
        by_micro = column.reshape(micro_batches, mesh.dp, -1, *column.shape[1:])
        rows = by_micro[:, mesh.index(self.rank, mesh.axes("dp"))]
        return np.ascontiguousarray(rows.reshape(-1, *column.shape[1:]))

    def take(self, parameter: Parameter, source: Parameter) -> None:
        """See :meth:`RankProgram.take`; the memory is shared: a device may have no room for the values twice."""
        parameter.set_data(source, slice_shape=True)

    def set_token_weights(self, weights: np.ndarray) -> None:
        """See :meth:`RankProgram.set_token_weights`; of copies each has the sums of its own tokens, and their mean counts."""
        if TOKEN_WEIGHTS in self.parameters:
            factors = weights.copy()
            factors[:-1] *= self.mesh.dp if self.copies else 1
            self.put(TOKEN_WEIGHTS, factors)

    def average(self, weights: Mapping[str, Any], decay: float) -> WeightAverage:
        """See :meth:`RankProgram.average`."""
        return DeviceAverage(weights, decay, _unsplit)

    def row_exchanges(self, groups: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Exchange]:
        """See :meth:`RankProgram.row_exchanges`."""
        exchanges: dict[tuple[int, ...], Exchange] = {}
        for ranks in groups:
            if self.rank in ranks:
                group = group_of(ranks, self.rank)
                create_group(group.name, list(ranks))
                exchanges[ranks] = partial(_unsplit, AscendExchangeRows(group))
        return exchanges


def _unsplit(cell: nn.Cell, *inputs: Tensor) -> Tensor:
    """Run a cell that has collectives of its own, where MindSpore splits no operators."""
    mode = ms.get_auto_parallel_context("parallel_mode")
    ms.set_auto_parallel_context(parallel_mode="stand_alone")
    try:
        return cell(*inputs)
    finally:
        ms.set_auto_parallel_context(parallel_mode=mode)
