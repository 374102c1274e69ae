"""One training step as one graph: forward, backward, clipping, AdamW, expert bias."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common.initializer import Zero, initializer

from telechat_moe.graph.execute import LIMITS
from telechat_moe.model.balance import BiasUpdate
from telechat_moe.model.dispatch import CapacityDispatch
from telechat_moe.model.gradient import ForwardBackward
from telechat_moe.model.router import Router
from telechat_moe.ops.adamw import FusedNorm
from telechat_moe.ops.select import backend
from telechat_moe.recipe import ModelConfig, Recipe
from telechat_moe.train.optimizer import AdamW
from telechat_moe.train.token_weights import LOSS_MASK, token_weights, weights_parameter

TensorBatch = tuple[Tensor, ...]


def tensors(columns: Mapping[str, np.ndarray]) -> TensorBatch:
    """Return the columns of a batch in the order of the model's arguments."""
    names = ("input_ids", "labels", "loss_mask", "position_ids", "attention_mask")
    return tuple(Tensor(columns[name]) for name in names if name in columns)


class StepOutput(NamedTuple):
    """What a step returns, on the host; :meth:`RunningStep.fetch` makes it.

    Attributes:
        losses: ``[3]`` fp32: next-token, MTP, balance and z-loss; means over micro-batches.
        norm: Global norm of the gradient before clipping.
        square_sums: ``[parameters]``, to name the one that is not finite, still on the device; None where a process
            has a shard of the gradient only.
        applied: ``[]``, False when the step was skipped because loss or gradient norm is not finite or too high.
        load_LE: Tokens each expert of each MoE layer got.
        dropped: Pairs dropped, all layers (capacity dispatch; else 0); None if not counted.
        moves: Experts that moved after the step, an entry for each layer.
        by_source: ``[2, sources]``, sums over the tokens of each source of next-token loss and mask; None of one source.
    """

    losses: np.ndarray
    norm: np.ndarray
    square_sums: Tensor | None
    applied: np.ndarray
    load_LE: np.ndarray  # noqa: N815
    dropped: np.ndarray | None
    moves: Sequence[Mapping[str, Any]] = ()
    by_source: np.ndarray | None = None


class RunningStep(NamedTuple):
    """What a step will return, while the device may still compute it; see :class:`StepOutput`."""

    losses: Tensor
    norm: Tensor
    square_sums: Tensor | None
    applied: Tensor
    load_LE: Tensor  # noqa: N815
    dropped: Tensor | None
    by_source: Tensor | None = None

    def fetch(self) -> StepOutput:
        """Wait for the end of the step and bring what it returned to the host: the only place where a step waits.

        The first tensor is waited for; the others are ready then and only copied.
        """
        return StepOutput(
            _copy(self.losses),
            _copy(self.norm),
            self.square_sums,
            _copy(self.applied),
            _copy(self.load_LE),
            None if self.dropped is None else _copy(self.dropped),
            by_source=None if self.by_source is None else _copy(self.by_source),
        )


def _copy(tensor: Tensor) -> np.ndarray:
    return np.array(tensor.asnumpy())


class GlobalNorm(nn.Cell):
    """Square sums of all gradients and the root of their sum.

    A square sum is the product of the gradient with itself: on CPU that takes a quarter of the time
    of ``ReduceSum``, and ``L2Loss`` adds up one by one (relative error 4e-4 at a million values).
    """

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.fused = FusedNorm(tensors) if backend("adamw") == "fused" else None
        self.square_sum = ops.MatMul(transpose_b=True)
        self.reshape = ops.Reshape()
        self.concat = ops.Concat(0)
        self.add = ops.AddN()
        self.sqrt = ops.Sqrt()

    def construct(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return ``(norm, square_sums)``: scalar and ``[parameters]``, fp32."""
        if self.fused is not None:
            return self.fused(gradients)
        squares = ()
        for gradient in gradients:
            row = self.reshape(gradient, (1, -1))
            squares += (self.reshape(self.square_sum(row, row), (1,)),)
        return self.sqrt(self.reshape(self.add(squares), ())), self.concat(squares)


class Accumulate(nn.Cell):
    """Add the gradient and losses of a micro-batch to the sums that :class:`TrainStep` uses.

    The sums are the main gradients. Cells with ``accumulate_into`` (linear layers, experts) add to
    theirs while they compute it (GMMAdd); the gradients of all other parameters are added here.
    """

    def __init__(
        self, model: nn.Cell, params: ParameterTuple, token_weights: Parameter | None = None
    ) -> None:
        super().__init__(auto_prefix=False)
        sums = [_main_grad(p) for p in params]
        self.main_grads = ParameterTuple(sums)
        by_name = {p.name: main for p, main in zip(params, sums, strict=True)}
        accumulating: set[str] = set()
        for _, cell in model.cells_and_names():
            if hasattr(cell, "accumulate_into"):
                accumulating.update(cell.accumulate_into(by_name))
        self.others = [i for i, p in enumerate(params) if p.name not in accumulating]
        self.forward_backward = ForwardBackward(
            model, ParameterTuple([params[i] for i in self.others]), token_weights
        )
        zeros = initializer(Zero(), (3 + 2 * getattr(model, "sources", 0),), ms.float32)
        self.losses = Parameter(zeros, name="accumulated_losses", requires_grad=False)
        self.add = ops.AssignAdd()
        self.assign = ops.Assign()
        self.scale = ops.Mul()

    def construct(self, *batch: Tensor) -> Tensor:
        """Process one micro-batch; return its losses ``[3]``, and of Z sources 2 Z sums."""
        losses, gradients = self.forward_backward(*batch)
        for i in range(len(self.others)):
            self.add(self.main_grads[self.others[i]], gradients[i])
        self.add(self.losses, losses)
        return losses

    def take(self, losses: Tensor, share: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the means over all micro-batches and clear the sums."""
        means = ()
        for main_grad in self.main_grads:
            means += (self.scale(ops.depend(main_grad, losses), share),)
        losses = self.scale(ops.depend(self.losses, losses), share)
        outputs = (losses, means)
        for main_grad in self.main_grads:
            self.assign(main_grad, ops.depend(ops.zeros_like(main_grad), outputs))
        self.assign(self.losses, ops.depend(ops.zeros_like(losses), outputs))
        return losses, means


def _main_grad(parameter: Parameter) -> Parameter:
    zeros = initializer(Zero(), parameter.shape, ms.float32)
    return Parameter(zeros, name=f"{parameter.name}.main_grad", requires_grad=False)


def scalar_parameter(name: str, value: float = 0.0) -> Parameter:
    """Return a number of a step that the host sets, fp32; it is not trained."""
    number = Tensor(value, ms.float32)
    return Parameter(number, name=name, requires_grad=False, parallel_optimizer=False)


def limit_tensors(limits: tuple[float, float], before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the limits of gradient norm and total loss, fp32 on the device.

    Args:
        before: Whether the update of the step before is applied, which the host need not know yet; if it is not, no update is
            below these limits. None: that step has ended.
    """
    norm, loss = (Tensor(limit, ms.float32) for limit in limits)
    if before is not None:
        norm = ops.select(before, norm, Tensor(-np.inf, ms.float32))
    return norm, loss


def update_rules(recipe: Recipe) -> tuple[float | None, float]:
    """Return ``max_grad_norm`` and ``bias_rate`` of a recipe, as :class:`UpdateStep` takes them."""
    wrapper, config = recipe.runner_wrapper, recipe.model_config
    rate = config.moe_router_bias_update_rate if config.moe_router_enable_expert_bias else 0.0
    return wrapper.max_grad_norm if wrapper.use_clip_grad else None, rate


class UpdateStep(nn.Cell):
    """The end of a training step: decide whether the update counts, clip, run AdamW, move the expert biases.

    Args:
        max_grad_norm: Clip the global gradient norm to this; None = no clipping.
        bias_rate: Rate of the expert bias; 0 = no update.
        norm_limit: Parameter; the gradient norm must be below it.
        loss_limit: Parameter; the total loss must be below it.
    """

    def __init__(
        self,
        optimizer: AdamW,
        max_grad_norm: float | None,
        bias_rate: float,
        norm_limit: Parameter,
        loss_limit: Parameter,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer
        self.norm_limit, self.loss_limit = norm_limit, loss_limit
        self.below, self.both = ops.Less(), ops.LogicalAnd()
        self.clip = max_grad_norm is not None
        self.max_norm = Tensor(max_grad_norm or 0.0, ms.float32)
        self.no_clipping = Tensor(1.0, ms.float32)
        self.no_change = Tensor(0.0, ms.float32)
        self.select = ops.Select()
        self.update_bias = bias_rate > 0
        self.bias_update = BiasUpdate(bias_rate)

    def set_routers(self, routers: Sequence[tuple[int, Router]]) -> None:
        """Take the routers of this process with their rows in the table of loads.

        Call it after the model has become an attribute: MindSpore names a cell's scope by the first attribute that
        leads to it, and dumps and maps name routers by their path in the model.
        """
        self.routers = nn.CellList([router for _, router in routers], auto_prefix=False)
        self.load_rows = tuple(row for row, _ in routers)

    def counts(self, norm: Tensor, total: Tensor) -> Tensor:
        """Return whether gradient norm and total loss are finite and below their limits."""
        tame = self.both(self.below(norm, self.norm_limit), self.below(total, self.loss_limit))
        return self.both(ops.isfinite(norm + total), tame)

    def apply(
        self,
        gradients: tuple[Tensor, ...],
        norm: Tensor,
        loads: Tensor | tuple[Tensor, ...],
        scalars: tuple[Tensor, Tensor, Tensor],
        applied: Tensor | None = None,
    ) -> Tensor:
        """Clip, update the parameters, move the expert biases; see :class:`telechat_moe.train.optimizer.AdamW`."""
        factor = self.no_clipping
        if self.clip:
            factor = self.max_norm / ops.maximum(norm, self.max_norm)
        token = self.optimizer(gradients, *scalars, factor, applied)
        if self.update_bias:
            for i in range(len(self.routers)):
                change_E = self.bias_update(loads[self.load_rows[i]])
                if applied is not None:
                    change_E = self.select(applied, change_E, self.no_change)
                ops.assign_add(self.routers[i].expert_bias, change_E)
        return token


class TrainStep(UpdateStep):
    """Train on one batch, or on the last micro-batch of one.

    A step whose loss or gradient is not finite, or not below the limits of :meth:`set_limits`, changes nothing.

    Args:
        model: See :class:`ForwardBackward`; its routers and capacity dispatches are found in it.
        optimizer: See :class:`UpdateStep`, also for ``max_grad_norm`` and ``bias_rate``.
        micro_batches: Micro-batches of a step; all but the last go through :attr:`accumulate`.
        config: The model's; with ``calculate_per_token_loss`` call :meth:`count_tokens` before each step.
    """

    def __init__(
        self,
        model: nn.Cell,
        optimizer: AdamW,
        max_grad_norm: float | None = 1.0,
        micro_batches: int = 1,
        bias_rate: float = 0.0,
        config: ModelConfig | None = None,
    ) -> None:
        cells = [cell for _, cell in model.cells_and_names()]
        # Parameters, so that a change does not recompile the graph; AdamW's scalars come with every call.
        limits = (scalar_parameter(name, float("inf")) for name in LIMITS)
        super().__init__(optimizer, max_grad_norm, bias_rate, *limits)
        self.accumulate = None
        self.config, self.micro_batches = config, micro_batches
        self.token_weights = weights_parameter(config) if config is not None else None
        if micro_batches > 1:
            self.accumulate = Accumulate(model, optimizer.params, self.token_weights)
            self.share = scalar_parameter("micro_batch_share", 1.0 / micro_batches)
        else:
            self.forward_backward = ForwardBackward(model, optimizer.params, self.token_weights)
        self.norm = GlobalNorm(len(optimizer.params))
        self.sum = ops.ReduceSum()
        self.set_routers(list(enumerate(cell for cell in cells if isinstance(cell, Router))))
        self.droppers = nn.CellList(
            [cell for cell in cells if isinstance(cell, CapacityDispatch)], auto_prefix=False
        )
        self.sources = getattr(model, "sources", 0)
        self.stack, self.reshape = ops.Stack(0), ops.Reshape()
        self.assign = ops.Assign()
        self.zero = Tensor([0.0], ms.float32)

    def set_limits(self, limits: tuple[float, float], before: Tensor | None = None) -> None:
        """Set the limits below which gradient norm and total loss must be for the next updates to be applied.

        Args:
            before: See :func:`limit_tensors`.
        """
        parameters = (self.norm_limit, self.loss_limit)
        for parameter, limit in zip(parameters, limit_tensors(limits, before), strict=True):
            ops.assign(parameter, limit)

    def set_micro_batches(self, count: int) -> None:
        """Set the micro-batches of the next steps, at most as many as the step was built for."""
        if count != self.micro_batches:
            self.micro_batches = count
            ops.assign(self.share, Tensor(1.0 / count, ms.float32))

    def count_tokens(self, batches: Sequence[Sequence[Tensor]]) -> None:
        """Count the tokens of all micro-batches of the next step; no effect where losses are means."""
        if self.token_weights is not None and self.config is not None:
            masks = [batch[LOSS_MASK].asnumpy() for batch in batches]
            weights = token_weights(self.config, masks, self.micro_batches)
            ops.assign(self.token_weights, Tensor(weights))

    def take_loads(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return what routers and dispatches counted, and clear the counters."""
        loads, dropped = (), self.zero
        for router in self.routers:
            loads += (router.expert_load + 0.0,)
        for dispatch in self.droppers:
            dropped = dropped + dispatch.dropped
        for router in self.routers:
            self.assign(router.expert_load, ops.zeros_like(router.expert_load))
        for dispatch in self.droppers:
            self.assign(dispatch.dropped, self.zero)
        return loads, dropped

    def construct(
        self, rate: Tensor, epsilon: Tensor, decay: Tensor, *batch: Tensor
    ) -> tuple[Tensor, ...]:
        """Return what :class:`RunningStep` takes.

        The first three arguments come from ``optimizer.scalars``.
        """
        if self.accumulate is not None:
            losses, gradients = self.accumulate.take(self.accumulate(*batch), self.share)
        else:
            losses, gradients = self.forward_backward(*batch)
        by_source = ()
        if self.sources:
            by_source = (self.reshape(losses[3:], (2, self.sources)),)
            if self.accumulate is not None:
                by_source = (by_source[0] / self.share,)
            losses = losses[:3]
        norm, square_sums = self.norm(gradients)
        applied = self.counts(norm, self.sum(losses))
        loads, dropped = self.take_loads()
        if applied:
            self.apply(gradients, norm, loads, (rate, epsilon, decay))
        load_LE = self.stack(loads) if loads else self.zero
        return (losses, norm, square_sums, applied, load_LE, dropped, *by_source)


class Evaluate(nn.Cell):
    """Next-token loss of a batch, no gradient; set its training flag to False before use."""

    def __init__(self, model: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.model = model

    def construct(self, *batch: Tensor) -> Tensor:
        """Return the loss, ``(1,)``."""
        return self.model(*batch)[0]
