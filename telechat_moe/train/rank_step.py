"""A training step of a model that is spread over devices, as one graph.

The same step as :class:`telechat_moe.train.step.TrainStep`, written for MindSpore's semi-automatic parallel front end:
micro-batches are split inside the graph, so that the front end can put them through a pipeline, and what all devices
must know (gradient norm, losses, expert loads) is summed by explicit collectives.
"""

from collections.abc import Sequence
from typing import NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.parallel.nn import GradAccumulation, Pipeline

from telechat_moe.graph.execute import LIMITS, SCHEDULE
from telechat_moe.model import CausalLM
from telechat_moe.model.block import MoE
from telechat_moe.model.router import Router
from telechat_moe.recipe import Recipe
from telechat_moe.recipe.experts import drops
from telechat_moe.sharding.cells.dispatch import ParallelDispatch
from telechat_moe.sharding.cells.parts import SequenceParts
from telechat_moe.sharding.placement import ModelPlacement
from telechat_moe.sharding.recipe import shard_threshold
from telechat_moe.sharding.shards import Region, WeightShards
from telechat_moe.train.optimizer import AdamW
from telechat_moe.train.step import UpdateStep, scalar_parameter, update_rules
from telechat_moe.train.token_weights import weights_parameter


class LossVector(nn.Cell):
    """Put what a model returns into one tensor: its losses, ``[3]`` or one for each depth, then its sums by source."""

    def __init__(self, model: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.model = model
        self.concat = ops.Concat()

    def construct(self, *batch: Tensor) -> Tensor:
        """Return next-token, MTP, balance and z-loss, and of Z sources 2 Z numbers."""
        if self.model.part_mask is None:
            losses = self.model(*batch)
        else:
            losses = self.model(*batch[:4], None, batch[4:])
        return self.concat(losses)


class LossTerms(nn.Cell):
    """The three losses of a step from what :class:`LossVector` gives, and what the gradient begins with.

    Args:
        weights: By what sums over tokens are multiplied, see ``token_weights``; None: the losses are means.
    """

    def __init__(self, weights: Parameter | None, micro_batches: int) -> None:
        super().__init__(auto_prefix=False)
        self.weights = weights
        terms = 3 if weights is None else weights.shape[0]
        self.sens = Tensor(np.full(terms, 1.0 / micro_batches, np.float32))
        rows = np.minimum(np.arange(terms), 1) + (np.arange(terms) == terms - 1)
        self.rows_3T = Tensor((np.arange(3)[:, None] == rows).astype(np.float32))
        self.scale, self.spread, self.sum = ops.Mul(), ops.Mul(), ops.ReduceSum()

    def construct(self, losses_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses ``[3]`` and the gradients of the terms."""
        if self.weights is None:
            return losses_T, self.sens
        losses_T = self.scale(losses_T, self.weights)
        return self.sum(self.spread(self.rows_3T, losses_T), 1), self.scale(self.sens, self.weights)


class Mean(nn.Cell):
    """The mean of a tensor over all processes."""

    def __init__(self, processes: int) -> None:
        super().__init__(auto_prefix=False)
        self.share, self.scale = Tensor(1.0 / processes, ms.float32), ops.Mul()
        self.sum = ops.AllReduce()

    def construct(self, x: Tensor) -> Tensor:
        """Return the mean, of the shape of ``x``."""
        return self.scale(self.sum(x), self.share)


class ExpertSquares(nn.Cell):
    """Add up the squares of the gradients of a layer's experts in the order of the experts, wherever they are.

    So the sum, which is the same on all devices, does not depend on where experts are.

    Args:
        slot_E: Slot of each expert.
        group: Name of the group of all devices of the stage.
        places: ``[E, parts]`` int32: where the sums of each slot are among those of all devices; an expert whose
            width is cut has several.
        share: One over the number of these devices.
    """

    def __init__(self, slot_E: Parameter, group: str, places: np.ndarray, share: float) -> None:
        super().__init__(auto_prefix=False)
        self.share, self.scale = Tensor(share, ms.float32), ops.Mul()
        self.slot_E, self.places = slot_E, Tensor(places.astype(np.int32))
        self.square, self.sum_expert, self.add = ops.Mul(), ops.ReduceSum(), ops.Add()
        self.gather, self.find, self.take = ops.AllGather(group), ops.Gather(), ops.Gather()
        self.sum = ops.ReduceSum()

    def construct(self, grads: tuple[Tensor, ...]) -> Tensor:
        """Return this device's share of the sum; ``grads`` are its experts' in the layer's three weights."""
        sum_e = self.sum_expert(self.square(grads[0], grads[0]), (1, 2))
        for grad in grads[1:]:
            sum_e = self.add(sum_e, self.sum_expert(self.square(grad, grad), (1, 2)))
        at_EP = self.find(self.places, self.slot_E, 0)
        return self.scale(self.sum(self.take(self.gather(sum_e), at_EP, 0)), self.share)


class PlacedModel(NamedTuple):
    """The model of one rank, its cells placed.

    Attributes:
        model: Where it tells sources apart, the step returns their sums, too.
        routers: Routers of the whole model, in order.
        placement: Mesh and rank, and which parameters are on the rank's stage.
        has_loss: The rank's stage computes the losses.
        shared_graph: The micro-batches share one graph.
        copies: Every process trains a whole copy of the model on its rows, and none is split.
    """

    model: CausalLM
    routers: list[Router]
    placement: ModelPlacement
    has_loss: bool
    shared_graph: bool
    copies: bool = False


def _cut(recipe: Recipe, placed: PlacedModel, network: nn.Cell) -> nn.Cell:
    """Return a network that cuts a batch into micro-batches, and their sequences into parts."""
    parts, model = recipe.parallel_config.seq_split_num, placed.model
    if parts > 1:
        network = SequenceParts(network, parts, model.mtp_depth, getattr(model, "shift", None))
    # MindSpore refuses GradAccumulation where micro-batches do not share a graph.
    cut = Pipeline if placed.placement.mesh.pp > 1 else GradAccumulation
    return cut(network, recipe.micro_batches)


class RankStep(UpdateStep):
    """Train on one batch.

    Args:
        branches: An update that does not count is a branch that is not taken, for which the host waits on a device;
            without, it is computed and changes nothing.
    """

    def __init__(
        self, recipe: Recipe, placed: PlacedModel, optimizer: AdamW, branches: bool
    ) -> None:
        # Parameters, because MindSpore's dataset strategy must name every input of the graph, and its virtual
        # dataset only those of the model. The names are graph.execute's.
        limits = (scalar_parameter(name, float("inf")) for name in LIMITS)
        super().__init__(optimizer, *update_rules(recipe), *limits)
        self.weights, self.branches = optimizer.params, branches
        model, placement, config = placed.model, placed.placement, recipe.model_config
        self._set_network(recipe, placed)
        routers = [(i, r) for i, r in enumerate(placed.routers) if placement.is_here(r.weight)]
        self.set_routers(routers)
        self.gradient = ops.GradOperation(get_by_list=True, sens_param=True)
        self.terms = LossTerms(weights_parameter(config), recipe.micro_batches)
        # Square sums over all devices count each shard once.
        devices, threshold = placement.mesh.stage_devices, shard_threshold(recipe)
        shards = (placement.shards(p, threshold) for p in self.weights)
        self.shares = tuple(Tensor(n / devices, ms.float32) for n in shards)
        loss_share = 1.0 / devices if placed.has_loss else 0.0
        self.loss_share = Tensor(loss_share / recipe.micro_batches, ms.float32)
        self.depend, self.assign, self.zeros_like = ops.Depend(), ops.Assign(), ops.ZerosLike()
        self.less, self.to_type = ops.Less(), ops.Cast()
        self.product, self.stack = ops.Mul(), ops.Stack()
        self.sum_keep, self.sum_all = ops.ReduceSum(), ops.ReduceSum()
        self.sum_squares, self.sum_losses, self.sum_loads = (ops.AllReduce() for _ in range(3))
        self.rate, self.epsilon, self.decay = map(scalar_parameter, SCHEDULE)
        self._set_counters(recipe, placed, [row for row, _ in routers])
        token_shards = placement.mesh.dp * placement.mesh.cp  # devices with different tokens
        self._set_sources(model.sources, loss_share * token_shards)
        self._set_movable(_movable(recipe, placed, self.weights))

    def _set_network(self, recipe: Recipe, placed: PlacedModel) -> None:
        model, placement = placed.model, placed.placement
        self.network: nn.Cell = LossVector(model)
        if placed.shared_graph:
            self.network.cell_init_args = "lazy_inline_LossVector"
        several = placement.mesh.pp > 1 or recipe.micro_batches > 1
        # Of whole copies each has the gradient of its own rows, and MindSpore adds up neither these nor micro-batches.
        self.copies = placed.copies
        self.accumulates = several and not self.copies
        means = [Mean(placement.mesh.dp) for _ in self.weights] if self.copies else []
        self.means = nn.CellList(means, auto_prefix=False)
        self.sharded = recipe.parallel.enable_parallel_optimizer
        devices = placement.mesh.stage_devices
        self.unshared = tuple(placement.shards(p) == devices for p in self.weights)
        if several:
            self.network = _cut(recipe, placed, self.network)
        if self.accumulates:
            # MindSpore wants a gradient sum for each cell of a shared graph, those of other stages too.
            others = [p for p in model.trainable_params() if not placement.is_here(p)]
            summed = ParameterTuple([*self.weights, *(others if placed.shared_graph else ())])
            self.accu_grads = summed.clone(prefix="accu_grads", init="zeros")

    def _set_counters(self, recipe: Recipe, placed: PlacedModel, rows: Sequence[int]) -> None:
        cells = (x for _, x in placed.model.cells_and_names() if isinstance(x, ParallelDispatch))
        is_here = placed.placement.is_here
        droppers = [x for x in cells if x.dropped is not None and is_here(x.dropped)]
        self.droppers = nn.CellList(droppers, auto_prefix=False)
        self.router_count, self.experts = len(placed.routers), recipe.model_config.n_routed_experts
        self.drops = drops(recipe.model_config) and self.router_count > 0
        self._set_rows(rows)

    def _set_rows(self, rows: Sequence[int]) -> None:
        # A row for each router of the model, and, if there are any, one that begins with the number of dropped pairs.
        self.count_rows = max(1, self.router_count + self.drops)
        places = np.eye(self.count_rows, dtype=np.float32)[:, :, None]
        self.rows = tuple(Tensor(places[row]) for row in rows)
        self.last_row = Tensor(places[-1] * np.eye(1, self.experts, dtype=np.float32))
        self.add = ops.AddN()

    def _set_sources(self, sources: int, share: float) -> None:
        self.sources, self.source_share = sources, Tensor(share, ms.float32)
        self.sum_sources, self.reshape = ops.AllReduce(), ops.Reshape()
        self.concat, self.no_gradient = ops.Concat(), Tensor(np.zeros(2 * sources, np.float32))

    def _set_movable(self, movable: Sequence[tuple[Sequence[int], ExpertSquares]]) -> None:
        """Set the layers whose experts may move; the squares of all other gradients are added up as they are."""
        self.moving = tuple(tuple(indices) for indices, _ in movable)
        self.expert_squares = nn.CellList([cell for _, cell in movable], auto_prefix=False)
        moving = {i for indices in self.moving for i in indices}
        self.staying = tuple(i for i in range(len(self.weights)) if i not in moving)

    def gradients(
        self, batch: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return losses (sum over micro-batches), sums by source, and gradients (of the losses' mean)."""
        vector, by_source = self.network(*batch), ()
        if self.sources:
            vector, by_source = vector[: -2 * self.sources], (vector[-2 * self.sources :],)
        losses, sens = self.terms(vector)
        if self.sources:
            sens = self.concat((sens, self.no_gradient))
        grads = self.gradient(self.network, self.weights)(*batch, sens)
        if self.accumulates and not self.sharded:
            grads = self.depend(self.accu_grads, grads)[: len(grads)]
        elif self.accumulates and any(self.unshared):
            # MindSpore gives a zero for a weight that has no copies to reduce over; the sum is right.
            sums, reduced, grads = self.depend(self.accu_grads, grads), grads, ()
            for i in range(len(reduced)):
                grads += (sums[i] if self.unshared[i] else reduced[i],)
        if self.copies:
            local, grads = grads, ()
            for i in range(len(local)):
                grads += (self.means[i](local[i]),)
        return losses, by_source, grads

    def global_norm(self, grads: tuple[Tensor, ...]) -> Tensor:
        """Return the norm of the whole gradient, the same on all devices."""
        squares = ()
        for i in self.staying:
            square = self.sum_keep(self.product(grads[i], grads[i]))
            squares += (self.product(square, self.shares[i]),)
        for i in range(len(self.moving)):
            expert_grads = ()
            for j in self.moving[i]:
                expert_grads += (grads[j],)
            squares += (self.expert_squares[i](expert_grads),)
        return ops.sqrt(self.sum_squares(self.sum_all(self.stack(squares))))

    def construct(self, *batch: Tensor) -> tuple[Tensor, ...]:
        """Return ``(losses [3], norm, applied, loads [layers, E], dropped [1])``, the same on all devices.

        Of several sources a sixth, ``[2, sources]``: sums over their tokens of next-token loss and mask.
        ``optimizer.scalars`` are in the parameters of :data:`SCHEDULE`.
        """
        losses, by_source, grads = self.gradients(batch)
        norm = self.global_norm(grads)
        losses = self.sum_losses(losses * self.loss_share)
        applied = self.counts(norm, ops.reduce_sum(losses))
        loads, dropped = self.take_loads(losses)
        if self.sources:
            sums = self.sum_sources(by_source[0] * self.source_share)
            by_source = (self.reshape(sums, (2, self.sources)),)
        scalars = (self.rate, self.epsilon, self.decay)
        if not self.branches:
            self.apply(grads, norm, loads, scalars, applied)
        elif applied:
            self.apply(grads, norm, loads, scalars)
        if self.accumulates:
            # Not before the update: MindSpore 2.9.0 does not end compiling a tuple of all that passes a condition.
            outputs = (losses, norm, applied, loads, dropped, *by_source)
            for accumulated in self.accu_grads:
                self.assign(accumulated, self.zeros(self.depend(accumulated, outputs)))
        return (losses, norm, applied, loads, dropped, *by_source)

    def zeros(self, x: Tensor) -> Tensor:
        """Return zeros like ``x``, not as a constant: ``ZerosLike`` would become one as large as ``x``."""
        return self.to_type(self.less(x, x), x.dtype)

    def take_loads(self, losses: Tensor) -> tuple[Tensor, Tensor]:
        """Return what routers ``[layers, E]`` and dispatches ``[1]`` of all devices counted, and clear the counters."""
        nothing = ops.zeros((self.count_rows, self.experts), ms.float32)
        counted = (self.depend(nothing, losses),)
        for i in range(len(self.routers)):
            load_E = self.depend(self.routers[i].expert_load, losses)
            counted += (self.product(self.rows[i], load_E),)
        for dispatch in self.droppers:
            counted += (self.product(self.last_row, self.depend(dispatch.dropped, losses)),)
        # A stage without routers has nothing to add, and AddN on CPU takes two at least.
        loads = self.sum_loads(self.add(counted) if len(self.routers) > 0 else counted[0])
        for router in self.routers:
            self.assign(router.expert_load, self.depend(self.zeros_like(router.expert_load), loads))
        for dispatch in self.droppers:
            self.assign(dispatch.dropped, self.depend(self.zeros_like(dispatch.dropped), loads))
        if not self.drops:
            return loads, self.zeros(losses[:1])
        return loads[: self.router_count], loads[self.router_count, :1]


def _movable(
    recipe: Recipe, placed: PlacedModel, params: Sequence[Parameter]
) -> list[tuple[list[int], ExpertSquares]]:
    """Return, for each MoE layer of a rank whose experts may move, their parameters and how their squares are added."""
    if recipe.telechat_moe.moe.placement is None:
        return []
    placement, mesh, shards = placed.placement, placed.placement.mesh, WeightShards.of(recipe)
    first = mesh.stage(placement.rank) * mesh.stage_devices
    stage = range(first, first + mesh.stage_devices)
    index = {id(p): i for i, p in enumerate(params)}
    movable = []
    for _, moe in placed.model.cells_and_names():
        if not isinstance(moe, MoE) or not placement.is_here(moe.router.weight):
            continue
        weights = [moe.experts.gate, moe.experts.up, moe.experts.down]
        places = places_of_rows([shards.shard(rank, weights[0].name) for rank in stage])
        group = placement.group_of("stage", stage).name
        slot_E = moe.dispatch.slots.slot_E
        squares = ExpertSquares(slot_E, group, places, 1 / mesh.stage_devices)
        movable.append(([index[id(p)] for p in weights], squares))
    return movable


def places_of_rows(regions: Sequence[Region | None]) -> np.ndarray:
    """Return where each row of a tensor is among the rows of all devices, one after the other, ``[rows, parts]`` int32.

    Args:
        regions: What each device holds. Of equal ones the first counts; a row that is cut has as many parts.
    """
    shards = [region for region in regions if region is not None]
    parts = {columns: i for i, columns in enumerate(dict.fromkeys(x[1:] for x in shards))}
    places = np.full((max(region[0][1] for region in shards), len(parts)), -1, np.int32)
    for device, ((begin, end), *columns) in reversed(list(enumerate(shards))):
        rows = np.arange(end - begin) + device * (end - begin)
        places[begin:end, parts[tuple(columns)]] = rows
    return places
