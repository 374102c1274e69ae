"""An engine that runs one rank's graph of a model that is spread over processes.

Every rank takes the whole batch, runs its graph and writes its share of the checkpoints, which rank 0 completes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from json import dumps, loads
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor
from mindspore.nn.utils import no_init_parameters

from telechat_moe.checkpoint import checkpoint as checkpoints
from telechat_moe.checkpoint.background import WriteSave
from telechat_moe.checkpoint.checkpoint import Copied
from telechat_moe.checkpoint.joint_save import JointSave, TensorShard
from telechat_moe.checkpoint.manifest import BrokenCheckpointError
from telechat_moe.checkpoint.rank_shards import ShardOwners, grouped
from telechat_moe.checkpoint.snapshot import ArrayGroups
from telechat_moe.checkpoint.stored import open_shards
from telechat_moe.checkpoint.weights import differing_shapes, is_transient, refuse
from telechat_moe.data import Tokenizer
from telechat_moe.data.sample import put_together
from telechat_moe.errors import BadInputError
from telechat_moe.model import CausalLM
from telechat_moe.model.init import InitialWeight
from telechat_moe.ops import select
from telechat_moe.recipe import Recipe
from telechat_moe.recipe.weights import weights
from telechat_moe.sharding.recipe import has_mask, head_stage, interleaved, mesh_of
from telechat_moe.sharding.shards import EMA, MOMENTS, Region, group_of, weight_of
from telechat_moe.tensor_files import TensorOutput
from telechat_moe.train import optimizer, parameters
from telechat_moe.train.average import WeightAverage
from telechat_moe.train.callbacks import Losses
from telechat_moe.train.engine import Engine, HostBatches, backends, set_up
from telechat_moe.train.evaluate import loss_by_source
from telechat_moe.train.expert_moves import MovingExperts
from telechat_moe.train.programs import Programs
from telechat_moe.train.programs.program import RankProgram
from telechat_moe.train.ranks import RankCoordinator
from telechat_moe.train.sample import Drawing, PromptRows, padded
from telechat_moe.train.step import RunningStep, StepOutput, TensorBatch, tensors
from telechat_moe.train.token_weights import LOSS_MASK, token_weights

PLACEMENT = "placement"
"""Key of a checkpoint's state under which the map of experts is."""


ReadRegion = Callable[[Region], np.ndarray]
"""Return a region of a whole tensor, and read or draw nothing else."""


class RankEngine(Engine):
    """An engine that runs the graph of one rank; see :class:`telechat_moe.train.engine.Engine`.

    MindSpore's communication is initialised.

    Args:
        programs: Loads the program of steps of so many micro-batches.
    """

    def __init__(self, recipe: Recipe, programs: Programs, ranks: RankCoordinator) -> None:
        assert ranks.control is not None
        self.rank, self.ranks, self.control = ranks.rank, ranks, ranks.control
        self.recipe, self.config = recipe, recipe.model_config
        self.micro_batches, self.mesh = recipe.micro_batches, mesh_of(recipe)
        self.layout = self.mesh.describe()
        self.parts, self.saves = recipe.parallel_config.seq_split_num, 0
        self.readers: dict[str, ReadRegion] = {}  # of what is not in the graph yet, by name
        set_up(recipe)
        self.weights = {weight.name: weight for weight in weights(self.config)}
        self.micro_rows, self.ema = recipe.micro_batch_samples, recipe.telechat_moe.ema
        self.programs = programs
        self.program = self._load()
        self.peers, self.runs_ahead = self.program.peers, self.program.runs_ahead
        fused = " but for attention" * (recipe.telechat_moe.operators.attention == "fused")
        self.operators = (
            f"{self.program.operators}{fused}, in the graphs of {ranks.count} ranks ({self.layout})"
        )
        with select.using("plain"):
            self.optimizer = optimizer.from_recipe(recipe, [])  # computes its scalars on the host
        self.names = [name for name in self.program.parameters if self._is_saved(name)]
        self.sharing = ShardOwners(self.program.ranks, self._is_saved)
        head = head_stage(recipe)
        self.has_head = self.mesh.stage(self.rank) == head
        self.head_rank = head * self.mesh.stage_devices
        self.has_mask = has_mask(recipe)
        self.experts: MovingExperts | None = None
        if recipe.telechat_moe.moe.placement is not None:
            routers = [name for name in self.weights if name.endswith(".router.weight")]
            self.experts = MovingExperts(recipe, routers, self.program, self.sharing, ranks)

    def _load(self) -> RankProgram:
        """Return the program of steps of as many micro-batches as now, with the averages beside its parameters."""
        program = self.programs(self.micro_batches)
        if self.ema is None:
            return program
        weights = {n: p for n, p in program.parameters.items() if self._averaged(n)}
        if self.average is None:
            self.average = program.average(weights, self.ema.decay)
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

    def set_limits(self, limits: tuple[float, float], before: Tensor | None) -> None:
        """See :meth:`telechat_moe.train.engine.Engine.set_limits`."""
        self.program.set_limits(limits, before)

    def run(self, batches: list[TensorBatch], number: int, rate: float) -> RunningStep:
        """See :meth:`telechat_moe.train.engine.Engine.run`."""
        scalars = self.optimizer.scalars(number, rate)
        masks = [batch[LOSS_MASK].asnumpy() for batch in batches]
        factors = token_weights(self.config, masks, self.micro_batches, self.parts)
        self.program.set_token_weights(factors)
        losses, norm, *outputs = self.program(*scalars, *batches[0])
        return RunningStep(losses, norm, None, *outputs)

    def prepare(self, batches: list[TensorBatch]) -> None:
        """See :meth:`telechat_moe.train.engine.Engine.prepare`; steps of another size have another graph."""
        count = batches[0][0].shape[0] // self.micro_rows
        if count != self.micro_batches:
            self._go_on_with(count)

    def acts_after_step(self) -> bool:
        """See :meth:`telechat_moe.train.engine.Engine.acts_after_step`: experts may move."""
        return self.experts is not None and self.experts.is_due()

    def after_step(self, output: StepOutput) -> StepOutput:
        """See :meth:`telechat_moe.train.engine.Engine.after_step`: let experts move where that is due."""
        if self.experts is None:
            return output
        return output._replace(moves=self.experts.after_step(output.load_LE))

    def parameters(self) -> dict[str, dict[str, Parameter]]:
        """See :meth:`telechat_moe.train.engine.Engine.parameters`."""
        return grouped({name: self.program.parameters[name] for name in self.names})

    def initialize(self, seed: int) -> None:
        """See :meth:`telechat_moe.train.engine.Engine.initialize`; a rank draws the values that it holds."""
        with no_init_parameters(), backends(self.recipe):
            model = CausalLM(self.config)
        weights = map(InitialWeight.of, model.get_parameters())
        self.readers = {w.name: partial(w.draw, seed) for w in weights}

    def load_weights(self, weights: Sequence[TensorOutput], source: Path) -> None:
        """See :meth:`telechat_moe.train.engine.Engine.load_weights`; a rank reads what it holds."""
        self.readers = {w.name: partial(_finite_region, w, source) for w in weights}

    def open_checkpoint(self, path: Path) -> checkpoints.Checkpoint:
        """See :meth:`telechat_moe.train.engine.Engine.open_checkpoint`; each rank compares the checksums of some files."""

        def verify() -> None:
            try:
                checkpoints.verify(path, (self.rank, self.ranks.count))
            except BrokenCheckpointError as error:
                raise OSError("; ".join(error.problems)) from error

        if problem := self.ranks.problem("reading a checkpoint", verify):
            raise BrokenCheckpointError(path, [problem])
        return open_shards(path, verify=False)

    def put(self, saved: checkpoints.Checkpoint, in_place: bool = False) -> str:
        """Take the tensors of a checkpoint (:meth:`open_checkpoint`) for this rank's shards; ``in_place`` now, else to begin with."""
        averages = saved.tensors.get(EMA, {}) if self.average is not None else {}
        notes = list[str]()
        if self.average is not None and not averages:
            notes = [WeightAverage.absence_note(saved.path)]
        tensors = {
            **saved.tensors.get("model", {}),
            **saved.tensors.get("optimizer", {}),
            **averages,
        }
        trained = [weight.name for weight in self.weights.values() if weight.trained]
        expected = [*self.weights, *(f"{m}.{name}" for m in MOMENTS for name in trained)]
        expected += [f"{EMA}.{name}" for name in self.weights] if averages else []
        shapes = {name: self.weights[weight_of(name)].shape for name in expected}
        if problems := differing_shapes(tensors, shapes):
            text = "\n  ".join(problems)
            raise BadInputError(f"{saved.path} does not fit the model:\n  {text}")
        self.readers = {name: tensor.read_region for name, tensor in tensors.items()}
        if self.experts is not None:
            notes.append(self.experts.load_state(saved.state.get(PLACEMENT)))
        if in_place:
            self._set_shards(in_place=True)
        return "; ".join(filter(None, notes))

    def begin(self) -> None:
        """Put this rank's shards of weights and moments into its graph, and an average that begins with its weights."""
        self._set_shards(in_place=False)

    def _set_shards(self, in_place: bool) -> None:
        self.maps = self.experts.maps() if self.experts is not None else {}
        self.program.set_shards(self._shard_named, in_place)
        self.readers = {}

    def _shard_named(self, name: str) -> np.ndarray | None:
        """Return this rank's shard of a parameter of the graph; None: it is unknown."""
        base = weight_of(name)
        read = self.readers.get(name) or (self.readers.get(base) if group_of(name) == EMA else None)
        if read is None or is_transient(base):
            is_zero = base in self.weights or is_transient(base)
            return (
                np.zeros(self.program.parameters[name].shape, np.float32)
                if is_zero
                else self.maps.get(name)
            )
        region = self.sharing.regions[self.rank][name]
        rows = self.experts.rows(name, region) if self.experts is not None else ()
        if not rows:
            return read(region)
        shard = np.empty([end - begin for begin, end in region], np.float32)
        for i, row in enumerate(rows):
            shard[i : i + 1] = read(((row, row + 1), *region[1:]))
        return shard

    @property
    def parameter_count(self) -> int:
        """See :attr:`telechat_moe.train.engine.Engine.parameter_count`."""
        return sum(math.prod(w.shape) for w in self.weights.values() if w.trained)

    def evaluate(self) -> Losses:
        """See :meth:`telechat_moe.train.engine.Engine.evaluate`; the stage with the head tells the others."""
        loss_of = self._loss_by_step if interleaved(self.recipe) else self._loss
        losses = loss_by_source(self.recipe, loss_of)
        if self.mesh.pp == 1:
            return losses
        position = "telling the validation loss"
        return tuple(loads(self.ranks.agree(position, lambda: dumps(losses), self.head_rank)))

    def _loss_by_step(self, columns: Mapping[str, np.ndarray]) -> float:
        """Return the loss of a micro-batch by a step that changes nothing; nothing counts in its other micro-batches.

        MindSpore compiles an interleaved pipeline with a backward pass only.
        """
        batch = _filled(columns, self.micro_batches * self.micro_rows)
        masks = [batch["loss_mask"]]
        self.limits = (-math.inf, -math.inf)
        self.program.set_limits(self.limits)
        factors = token_weights(self.config, masks, self.micro_batches, self.parts)
        self.program.set_token_weights(factors)
        losses, *_ = self.program(*self.optimizer.scalars(1, 0.0), *tensors(batch))
        share = 1 if self.config.calculate_per_token_loss else self.micro_batches
        return float(losses.asnumpy()[0]) * share

    def _loss(self, columns: Mapping[str, np.ndarray]) -> float:
        """Return the loss of a micro-batch, which is filled up with rows that do not count; 0 on stages without the head."""
        loss = self._forward(_filled(columns, self.micro_rows))[0]
        return float(loss[0]) if loss is not None else 0.0

    def _forward(self, columns: Mapping[str, np.ndarray]) -> Sequence[np.ndarray | None]:
        """Return the outputs of the forward graph; None for each on stages without the head."""
        outputs = self.program.evaluate(*tensors(columns))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        values = [x.asnumpy() for x in outputs]  # waits, on every stage
        return values if self.has_head else (None, None)

    def continue_prompts(
        self, tokenizer: Tokenizer, prompts: Sequence[str], drawing: Drawing
    ) -> list[str]:
        """See :meth:`telechat_moe.train.engine.Engine.continue_prompts`; a rank with the head draws for all."""
        length, generator = self.config.seq_length, drawing.generator()
        prompt_rows = PromptRows(tokenizer, prompts, length, drawing.max_new_tokens)

        def choose(rows: Sequence[Sequence[int]], unfinished: Sequence[int]) -> list[int]:
            logits = self._next_logits(rows, length)
            chosen = (logits[i] for i in unfinished)
            draw = lambda: dumps(drawing.choose(chosen, generator))  # noqa: E731
            return loads(self.ranks.agree("drawing tokens", draw, self.head_rank))

        return prompt_rows.continue_with(choose)

    def _next_logits(self, rows: Sequence[Sequence[int]], length: int) -> np.ndarray:
        """Return the logits of the token after each row, ``[rows, V]``; zeros on stages without the head."""
        logits = np.zeros((len(rows), self.config.vocab_size), np.float32)
        for begin in range(0, len(rows), self.micro_rows):
            prompts = [*rows[begin : begin + self.micro_rows]]
            ids_BS = padded([*prompts, *[[]] * (self.micro_rows - len(prompts))], length)
            mask_BS = np.zeros(ids_BS.shape, np.float32)
            mask_BS[np.arange(len(prompts)), [len(row) - 1 for row in prompts]] = 1.0
            position_BS = np.tile(np.arange(length, dtype=np.int32), (self.micro_rows, 1))
            columns = {"input_ids": ids_BS, "labels": ids_BS, "loss_mask": mask_BS}
            columns["position_ids"] = position_BS
            if self.has_mask:
                hidden = np.triu(np.ones((length, length), np.uint8), 1)
                columns["attention_mask"] = np.tile(hidden, (self.micro_rows, 1, 1, 1))
            picked = self._forward(columns)[1]
            if picked is not None:
                logits[begin : begin + len(prompts)] = picked[: len(prompts)]
        return logits

    def writer(
        self, root: Path, step: int, state: Mapping[str, Any], keep_last: int | None
    ) -> WriteSave:
        """Return a function that writes this rank's share of the parameters; ranks wait for each other only in its thread."""
        self.saves += 1
        save, about = f"{self.control.read('nonce')}-{self.saves}", {"layout": self.layout}
        together = JointSave(
            root, step, save, self.rank, self.ranks.count, self.control, about, keep_last
        )

        rows: dict[str, tuple[int, ...]] = {}  # now: experts may move while it is written
        if self.experts is not None:
            regions = self.sharing.regions[self.rank]
            rows = {name: self.experts.rows(name, regions[name]) for name in self.names}
            state = {**state, PLACEMENT: self.experts.state()}

        def shard(name: str, data: np.ndarray) -> TensorShard:
            return replace(self.sharing.shard(self.rank, name, data), rows=rows.get(name, ()))

        def write(groups: ArrayGroups, copied: Copied) -> None:
            pieces = {
                group: {name: shard(name, data) for name, data in arrays.items()}
                for group, arrays in groups.items()
            }
            together.write(pieces, state, copied)

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


def _filled(columns: Mapping[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
    """Return a batch filled up to so many rows by zeros, which the mask does not keep."""
    missing = rows - len(columns["loss_mask"])
    return {n: np.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) for n, x in columns.items()}


def _finite_region(weight: TensorOutput, source: Path, region: Region) -> np.ndarray:
    """Return a region of a weight in float32; refuse values that are not finite."""
    assert weight.read_region is not None
    values = parameters.to_float32(weight.read_region(region))
    if not np.isfinite(values).all():
        nan, begins = int(np.isnan(values).sum()), [begin for begin, _ in region]
        infinite = int(np.isinf(values).sum())
        refuse(
            f"{source}: {weight.name} holds {nan:,} NaN and {infinite:,} infinite values in the shard at {begins}"
        )
    return values


def _copy(parameter: Parameter) -> np.ndarray:
    return parameter.asnumpy().copy()
