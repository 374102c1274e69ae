"""An engine that runs one rank's graph of a model that is spread over CPU processes.

Every rank takes the whole batch, runs its graph and writes its share of the checkpoints; rank 0 completes them and holds the
whole weights when they are needed.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor

from telechat_moe.checkpoint import checkpoint as checkpoints
from telechat_moe.checkpoint.joint_save import JointSave, TensorShard
from telechat_moe.checkpoint.rank_shards import ShardExchange, ShardOwners, grouped
from telechat_moe.checkpoint.snapshot import ArrayGroups
from telechat_moe.checkpoint.weights import is_transient
from telechat_moe.data.sample import put_together
from telechat_moe.errors import BadInputError
from telechat_moe.model.router import Router
from telechat_moe.ops import select
from telechat_moe.recipe import Recipe
from telechat_moe.sharding.recipe import mesh_of
from telechat_moe.sharding.shards import EMA, MOMENTS, group_of, weight_of
from telechat_moe.train import optimizer, parameters
from telechat_moe.train.engine import Engine, HostBatches, TensorBatch, build_model, tensors
from telechat_moe.train.expert_moves import MovingExperts
from telechat_moe.train.optimizer import WeightAverage
from telechat_moe.train.programs import Programs
from telechat_moe.train.programs.program import RankProgram
from telechat_moe.train.ranks import RankCoordinator
from telechat_moe.train.step import Evaluate, StepOutput
from telechat_moe.train.token_weights import LOSS_MASK, token_weights

PLACEMENT = "placement"
"""Key of a checkpoint's state under which the map of experts is."""


class RankEngine(Engine):
    """An engine that runs the graph of one rank; see :class:`telechat_moe.train.engine.Engine`.

    MindSpore's communication is initialised.

    Args:
        programs: Loads the program of steps of so many micro-batches.
    """

    def __init__(self, recipe: Recipe, programs: Programs, ranks: RankCoordinator) -> None:
        assert ranks.control is not None
        self.rank, self.ranks, self.control = ranks.rank, ranks.count, ranks.control
        self.micro_batches, self.mesh = recipe.micro_batches, mesh_of(recipe)
        self.layout = self.mesh.describe()
        self.parts, self.saves = recipe.parallel_config.seq_split_num, 0
        self.loaded: Mapping[str, np.ndarray] = {}  # of a checkpoint, by name; not in the graph yet
        self.model, _ = build_model(recipe)
        fused = " but for attention" * (recipe.telechat_moe.operators.attention == "fused")
        self.operators = f"plain{fused}, in the graphs of {self.ranks} ranks ({self.layout})"
        self.weights = {p.name: p for p in self.model.get_parameters()}
        self.micro_rows, self.ema = recipe.micro_batch_samples, recipe.telechat_moe.ema
        self.programs = programs
        self.program = self._load()
        self.peers = self.program.peers
        with select.using("plain"):
            self.optimizer = optimizer.from_recipe(recipe, [])  # computes its scalars on the host
        self.evaluate_cell = Evaluate(self.model)
        self.names = [name for name in self.program.parameters if self._is_saved(name)]
        self.sharing = ShardOwners(self.program.ranks, self._is_saved)
        folder = Path(recipe.output_dir) / ".pieces"
        self.exchange = ShardExchange(self.sharing, self.rank, folder, self.control)
        self.experts: MovingExperts | None = None
        if recipe.telechat_moe.moe.placement is not None:
            cells = [cell for _, cell in self.model.cells_and_names()]
            routers = [cell.weight.name for cell in cells if isinstance(cell, Router)]
            self.experts = MovingExperts(recipe, routers, self.program, self.sharing, ranks)

    def _load(self) -> RankProgram:
        """Return the program of steps of as many micro-batches as now, with the averages beside its parameters."""
        program = self.programs(self.micro_batches)
        if self.ema is None:
            return program
        weights = {n: p for n, p in program.parameters.items() if self._averaged(n)}
        if self.average is None:
            self.average = WeightAverage(weights, self.ema.decay)
        self.average.weights = {name: weights[name] for name in self.average.weights}
        program.add_copies(EMA, self.average.averages, self._averaged)
        return program

    def _go_on_with(self, micro_batches: int) -> None:
        """Go on in the graph of steps of so many micro-batches, which all ranks load together."""
        before, self.micro_batches = self.program, micro_batches
        self.program = self._load()
        self.program.take_over(before)

    def _is_saved(self, name: str) -> bool:
        """Return whether a parameter of this rank belongs in a checkpoint."""
        return weight_of(name) in self.weights and not is_transient(name)

    def _averaged(self, name: str) -> bool:
        """Return whether a parameter of the graph is a weight that is averaged."""
        return group_of(name) == "model" and self._is_saved(name)

    def read(self, columns: HostBatches, micro_batches: int | None = None) -> list[TensorBatch]:
        """Return the whole batch; the graph takes micro-batches and this rank's rows from it."""
        count, rows = micro_batches or self.micro_batches, self.micro_rows
        # One after another: what other processes share is overwritten.
        parts = ((next(columns), slice(i * rows, (i + 1) * rows)) for i in range(count))
        return [tensors(put_together(count * rows, parts))]

    def update(
        self, batches: list[TensorBatch], number: int, rate: float, limits: tuple[float, float]
    ) -> StepOutput:
        """See :meth:`telechat_moe.train.engine.Engine.update`."""
        scalars = self.optimizer.scalars(number, rate)
        count = batches[0][0].shape[0] // self.micro_rows
        if count != self.micro_batches:
            self._go_on_with(count)
        if limits != self.limits:
            self.program.set_limits(*limits)
            self.limits = limits
        masks = [batch[LOSS_MASK].asnumpy() for batch in batches]
        weights = token_weights(self.model.config, masks, self.micro_batches, self.parts)
        self.program.set_token_weights(weights)
        losses, norm, *outputs = self.program(*scalars, *batches[0])
        output = StepOutput.fetch(losses, norm, None, *outputs)
        if self.average is not None and output.applied:
            self.average.update(number)
        moves = self.experts.after_step(output.load_LE) if self.experts is not None else ()
        return output._replace(moves=moves)

    def parameters(self) -> dict[str, dict[str, Parameter]]:
        """See :meth:`telechat_moe.train.engine.Engine.parameters`."""
        return grouped({name: self.program.parameters[name] for name in self.names})

    def put(self, saved: checkpoints.Checkpoint, in_place: bool = False) -> str:
        """Put the tensors of a checkpoint into the model; with ``in_place`` also into the graph."""
        parameters.put({"model": parameters.saved_weights(self.model)}, saved.tensors, saved.path)
        names = [f"{m}.{p.name}" for m in MOMENTS for p in self.model.trainable_params()]
        averages, notes = saved.tensors.get(EMA, {}), list[str]()
        if averages and self.average is not None:
            names += [f"{EMA}.{name}" for name in parameters.saved_weights(self.model)]
        elif self.average is not None:
            notes = [WeightAverage.absence_note(saved.path)]
        self.loaded = {**saved.tensors.get("optimizer", {}), **averages}
        if missing := sorted(set(names) - set(self.loaded)):
            raise BadInputError(f"{saved.path} does not fit the model: {missing[0]} is missing")
        if self.experts is not None:
            notes.append(self.experts.load_state(saved.state.get(PLACEMENT)))
        if in_place:
            self._shard(in_place=True)
        return "; ".join(filter(None, notes))

    def begin(self) -> None:
        """Put this rank's shards of weights and moments into its graph, and an average that begins with its weights."""
        self._shard(in_place=False)

    def _shard(self, in_place: bool) -> None:
        values: dict[str, np.ndarray] = {}
        for name in self.program.parameters:
            base = weight_of(name)
            if name in self.loaded:
                values[name] = self.loaded[name]
            elif base in self.weights:
                weight = self.weights[base]
                transient = group_of(name) == "optimizer" or is_transient(base)
                values[name] = np.zeros(weight.shape, np.float32) if transient else _copy(weight)
        if self.experts is not None:
            values = {name: self.experts.in_slots(name, value) for name, value in values.items()}
            values |= self.experts.maps()
        self.program.set_parameters(values, in_place)
        self.loaded = {}

    def collect_weights(self) -> None:
        """Put the whole weights into rank 0's model."""
        weights = [name for name in self.names if group_of(name) == "model"]
        gathered = self.exchange.gather({n: _copy(self.program.parameters[n]) for n in weights})
        for name, value in (gathered or {}).items():
            if self.experts is not None:
                value = self.experts.in_order(name, value)
            self.weights[name].set_data(Tensor(value))

    def writer(
        self, root: Path, step: int, state: Mapping[str, Any], keep_last: int | None
    ) -> Callable[[ArrayGroups], object]:
        """Return a function that writes this rank's share of a copy; ranks wait for each other only in its thread."""
        self.saves += 1
        save, about = f"{self.control.read('nonce')}-{self.saves}", {"layout": self.layout}
        together = JointSave(
            root, step, save, self.rank, self.ranks, self.control, about, keep_last
        )

        rows: dict[str, tuple[int, ...]] = {}  # now: experts may move while a copy is written
        if self.experts is not None:
            regions = self.sharing.regions[self.rank]
            rows = {name: self.experts.rows(name, regions[name]) for name in self.names}
            state = {**state, PLACEMENT: self.experts.state()}

        def shard(name: str, data: np.ndarray) -> TensorShard:
            return replace(self.sharing.shard(self.rank, name, data), rows=rows.get(name, ()))

        def write(groups: ArrayGroups) -> None:
            pieces = {
                group: {name: shard(name, data) for name, data in arrays.items()}
                for group, arrays in groups.items()
            }
            together.write(pieces, state)

        return write

    def culprit(self, output: StepOutput) -> str:
        """Say which weight of this rank is not finite."""
        for name in self.names:
            if not np.isfinite(_copy(self.program.parameters[name])).all():
                return f"the weight {name} is not finite"
        return "the loss or a gradient is not finite although all weights of rank 0 are"

    def rows(self, load_LE: np.ndarray) -> float | None:
        """See :meth:`telechat_moe.train.engine.Engine.rows`; not known where experts move."""
        if self.experts is not None or load_LE.ndim != 2:
            return None
        experts = load_LE.shape[1] // self.mesh.ep
        first = self.mesh.index(self.rank, self.mesh.axes("ep")) * experts
        return float(load_LE[:, first : first + experts].sum())


def _copy(parameter: Parameter) -> np.ndarray:
    return parameter.asnumpy().copy()
