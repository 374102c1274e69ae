"""Engines compute the steps of a run: one process here, a rank's graph in :mod:`telechat_moe.train.rank_engine`."""

import ctypes
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor

from telechat_moe.checkpoint import checkpoint as checkpoints
from telechat_moe.checkpoint.background import WriteSave
from telechat_moe.data import Tokenizer
from telechat_moe.data.recipe import sources_of
from telechat_moe.graph import cache
from telechat_moe.model import CausalLM, initialize
from telechat_moe.model.init import count_parameters
from telechat_moe.ops import select
from telechat_moe.ops.rewrite import fuse_cells
from telechat_moe.recipe import Recipe
from telechat_moe.sharding.recipe import device_context
from telechat_moe.sharding.shards import EMA
from telechat_moe.tensor_files import TensorOutput
from telechat_moe.train import optimizer, parameters
from telechat_moe.train.average import WeightAverage
from telechat_moe.train.callbacks import Losses
from telechat_moe.train.evaluate import validation_loss
from telechat_moe.train.sample import Drawing, continue_prompts
from telechat_moe.train.step import (
    Evaluate,
    RunningStep,
    StepOutput,
    TensorBatch,
    TrainStep,
    tensors,
    update_rules,
)

HostBatches = Iterator[dict[str, Any]]


class Engine(ABC):
    """What computes the steps of a run and holds its weights.

    Attributes:
        operators: Backends of the operators, for the user.
        peers: Processes that this one exchanges messages with.
        say: Called with lines for the user.
        average: The average of the weights; None: the recipe keeps none.
        limits: Gradient norm and loss that the graph compares with now; None: only the device knows.
        running: The step that was launched last, until it is fetched.
        runs_ahead: :meth:`launch` returns before the device has computed the step, and takes the next one meanwhile.
    """

    operators: str
    peers: Sequence[int] = ()
    say: Callable[[str], object] = staticmethod(lambda text: None)
    micro_batches: int
    average: WeightAverage | None = None
    limits: tuple[float, float] | None = (math.inf, math.inf)
    runs_ahead: bool = False

    @abstractmethod
    def read(self, columns: HostBatches, micro_batches: int | None = None) -> list[TensorBatch]:
        """Return the batches of the next step, as :meth:`launch` takes them.

        Args:
            micro_batches: How many there are in this step; None: as many as the recipe says.
        """

    def launch(
        self,
        batches: list[TensorBatch],
        number: int,
        rate: float,
        limits: tuple[float, float],
        before: RunningStep | None = None,
    ) -> RunningStep:
        """Give a step to the device.

        Args:
            number: Number of the update, from 1.
            limits: Gradient norm and loss must be below these for the update to be applied.
            before: The step before, if it is still running: this update is applied only if that one's is.
        """
        self.prepare(batches)
        if before is not None or limits != self.limits:
            self.set_limits(limits, None if before is None else before.applied)
            self.limits = limits if before is None else None
        running = self.run(batches, number, rate)
        if self.average is not None:
            self.average.update(number, running.applied)
        return running

    def prepare(self, batches: list[TensorBatch]) -> None:  # noqa: B027
        """Get ready for a step of these batches, before its limits are set."""

    @abstractmethod
    def set_limits(self, limits: tuple[float, float], before: Tensor | None) -> None:
        """Set the limits of the next step, see :func:`telechat_moe.train.step.limit_tensors`."""

    @abstractmethod
    def run(self, batches: list[TensorBatch], number: int, rate: float) -> RunningStep:
        """Run a step with the limits that are set; see :meth:`launch`."""

    def acts_after_step(self) -> bool:
        """Return whether :meth:`after_step` will act on the device, so that no step may be launched before."""
        return False

    def after_step(self, output: StepOutput) -> StepOutput:
        """Act after a step that was fetched, applied or not; before the next one is launched where :meth:`acts_after_step` says so."""
        return output

    @abstractmethod
    def parameters(self) -> dict[str, dict[str, Parameter]]:
        """Return what a checkpoint holds (of this rank), by group and name."""

    def open_checkpoint(self, path: Path) -> checkpoints.Checkpoint:
        """Open a checkpoint that verifies, for :meth:`put`; all ranks call it.

        Raises:
            BrokenCheckpointError: It does not.
        """
        return checkpoints.load(path)

    @abstractmethod
    def put(self, saved: checkpoints.Checkpoint, in_place: bool = False) -> str:
        """Put the tensors of a checkpoint in; after the first step ``in_place``. Return a note for the user, or nothing."""

    @abstractmethod
    def initialize(self, seed: int) -> None:
        """Begin with random weights."""

    @abstractmethod
    def load_weights(self, weights: Sequence[TensorOutput], source: Path) -> None:
        """Begin with weights of all the model, F16 and BF16 widened.

        Raises:
            BadInputError: They do not fit the model; nothing is changed.
        """

    def begin(self) -> None:  # noqa: B027
        """Begin training with the weights that it was given, before the first step."""

    @property
    @abstractmethod
    def parameter_count(self) -> int:
        """How many values of the whole model are trained."""

    @abstractmethod
    def evaluate(self) -> Losses:
        """Return the loss on the validation data, and by source (:func:`telechat_moe.train.evaluate.loss_by_source`); all ranks call it."""

    @abstractmethod
    def continue_prompts(
        self, tokenizer: Tokenizer, prompts: Sequence[str], drawing: Drawing
    ) -> list[str]:
        """Return a continuation of each prompt; all ranks call it."""

    @abstractmethod
    def writer(
        self, root: Path, step: int, state: Mapping[str, Any], keep_last: int | None
    ) -> WriteSave:
        """Return a function that writes :meth:`parameters` as the checkpoint of a step."""

    @abstractmethod
    def culprit(self, output: StepOutput) -> str:
        """Name the tensor from which NaN or Inf came into a step."""

    def rows(self, load_LE: np.ndarray) -> float | None:
        """Return how many of a step's tokens went to the experts of this process, all layers; None: not known."""
        return float(load_LE.sum())


def backends(recipe: Recipe) -> AbstractContextManager[None]:
    """Return a context in which cells are built with the operators that the recipe chooses."""
    settings, target = recipe.telechat_moe, recipe.context.device_target
    by_operator = settings.operators.backends()
    if recipe.devices > 1 and settings.moe_capacity_tokens is not None:
        # As in the graphs of the processes: fused experts give one capacity to all tokens.
        by_operator |= {"permute": "plain", "grouped_matmul": "plain"}
    return select.using(settings.operators.default, by_operator, target, settings.operators.host)


def set_up(recipe: Recipe) -> None:
    """Put MindSpore into graph mode on the target of a recipe; what several devices are opened with, `meet` has set."""
    context = recipe.context
    ms.set_context(mode=ms.GRAPH_MODE, device_target=context.device_target)
    device = device_context(recipe) if recipe.devices == 1 else {}
    ms.set_context(max_call_depth=context.max_call_depth, **device)
    ms.set_seed(recipe.seed)


def build_model(recipe: Recipe) -> tuple[CausalLM, str]:
    """Build the model of a recipe in graph mode; return it and the backends of its operators, for the user."""
    set_up(recipe)
    settings = recipe.telechat_moe
    with backends(recipe):
        sizes = settings.moe_block_rows, settings.moe_capacity_tokens
        model = CausalLM(recipe.model_config, *sizes, sources=len(sources_of(recipe)))
        operators = select.summary()
        if fused := fuse_cells(model) if settings.operators.fuse_plain else []:
            regions = sum(region.program is not None for region in fused)
            operators += f"; the fuser replaced {regions} regions"
    return model, operators


class OneProcess(Engine):
    """An engine that trains the whole model in this process; see :class:`Engine`.

    Args:
        keep_graph: Keep the compiled graph for later starts (:mod:`telechat_moe.graph.cache`).
    """

    def __init__(self, recipe: Recipe, keep_graph: bool = False) -> None:
        self.recipe, self.keep_graph, self.compiled_now = recipe, keep_graph, True
        self.model, self.operators = build_model(recipe)
        self.micro_batches = recipe.micro_batches
        max_grad_norm, bias_rate = update_rules(recipe)
        with backends(recipe):
            self.model.set_train()
            self.optimizer = optimizer.from_recipe(recipe, self.model.trainable_params(), swap=True)
            self.train_step = TrainStep(
                self.model,
                self.optimizer,
                max_grad_norm,
                self.micro_batches,
                bias_rate,
                recipe.model_config,
            )
        self.train_step.set_train()
        ema = recipe.telechat_moe.ema
        if ema is not None:
            self.average = WeightAverage(parameters.saved_weights(self.model), ema.decay)
        self.evaluate_cell = Evaluate(self.model)

    @property
    def parameter_count(self) -> int:
        """See :attr:`Engine.parameter_count`."""
        return count_parameters(self.model)

    def evaluate(self) -> Losses:
        """See :meth:`Engine.evaluate`."""
        return validation_loss(self.recipe, self.model, self.evaluate_cell)

    def continue_prompts(
        self, tokenizer: Tokenizer, prompts: Sequence[str], drawing: Drawing
    ) -> list[str]:
        """See :meth:`Engine.continue_prompts`."""
        return continue_prompts(self.model, tokenizer, prompts, drawing)

    def read(self, columns: HostBatches, micro_batches: int | None = None) -> list[TensorBatch]:
        """Return the micro-batches of the next step."""
        return [tensors(next(columns)) for _ in range(micro_batches or self.micro_batches)]

    def set_limits(self, limits: tuple[float, float], before: Tensor | None) -> None:
        """See :meth:`Engine.set_limits`."""
        self.train_step.set_limits(limits, before)

    def run(self, batches: list[TensorBatch], number: int, rate: float) -> RunningStep:
        """See :meth:`Engine.run`."""
        self.train_step.set_micro_batches(len(batches))
        self.train_step.count_tokens(batches)
        scalars = self.optimizer.scalars(number, rate)
        with self._cached(batches):
            if self.train_step.accumulate is not None:
                for batch in batches[:-1]:
                    self.train_step.accumulate(*batch)
            outputs = self.train_step(*scalars, *batches[-1])
        if self.compiled_now and self.recipe.optimizer.swap:
            _give_back_memory()
        self.compiled_now = False
        return RunningStep(*outputs)

    def _cached(self, batches: Sequence[TensorBatch]) -> AbstractContextManager[None]:
        """Return a context in which the graphs of a step are taken from an earlier start, or kept for later ones."""
        if not self.keep_graph:
            return nullcontext()
        self.keep_graph = False
        values = {k: v for k, v in self.recipe.to_dict().items() if k != "output_dir"}
        weights = self.train_step.parameters_dict().values()
        tensors = [(x.name, x.shape, str(x.dtype)) for x in weights]
        inputs = [(x.shape, str(x.dtype)) for x in batches[-1]]
        made_from = [values, self.operators, tensors, inputs]
        return cache.compile_cache(made_from, 1 + (len(batches) > 1), self.say)

    def parameters(self) -> dict[str, dict[str, Parameter]]:
        """See :meth:`Engine.parameters`."""
        average = {} if self.average is None else {EMA: self.average.averages}
        return parameters.parameters(self.model, self.optimizer) | average

    def initialize(self, seed: int) -> None:
        """See :meth:`Engine.initialize`."""
        initialize(self.model, seed)

    def load_weights(self, weights: Sequence[TensorOutput], source: Path) -> None:
        """See :meth:`Engine.load_weights`."""
        parameters.load_weights(self.model, weights, source)

    def put(self, saved: checkpoints.Checkpoint, in_place: bool = False) -> str:
        """See :meth:`Engine.put`."""
        groups = self.parameters()
        average = self.average if EMA not in saved.tensors else None
        if average is not None:
            del groups[EMA]
        parameters.put(groups, saved.tensors, saved.path, in_place)
        if average is None:
            return ""
        average.begin()
        return average.absence_note(saved.path)

    def writer(
        self, root: Path, step: int, state: Mapping[str, Any], keep_last: int | None
    ) -> WriteSave:
        """See :meth:`Engine.writer`."""
        return lambda groups, copied: checkpoints.save(
            root, step, groups, state, keep_last=keep_last, copied=copied
        )

    def culprit(self, output: StepOutput) -> str:
        """See :meth:`Engine.culprit`.

        A weight that is not finite, or else the gradient nearest to the loss: the backward pass
        carries NaN and Inf from there to all layers below.
        """
        params, square_sums = self.optimizer.params, output.square_sums
        broken = [p.name for p in params if not np.isfinite(p.asnumpy()).all()]
        if broken:
            return f"the weight {broken[0]} is not finite" + _count_of_others(broken)
        assert square_sums is not None
        sums = zip(params, square_sums.asnumpy(), strict=True)
        bad = [p.name for p, x in sums if not np.isfinite(x)]
        if not bad:
            return "the loss is not finite although all gradients are"
        if len(bad) == len(params):
            return f"the loss is not finite, and so is every gradient, {bad[-1]} the last"
        return f"the gradient of {bad[-1]} is not finite" + _count_of_others(bad[::-1])


def _give_back_memory() -> None:
    """Give what MindSpore's compiler has freed back to the system, as far as the C library is one that keeps it (glibc)."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _count_of_others(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
