"""Move experts between the ranks of a run, between two of its steps.

A rank's tensors of experts are in the order of slots. Which expert is in which slot is data of the graph
(:class:`telechat_moe.sharding.cells.dispatch.ExpertSlots`); routers, loads and checkpoints name experts. A move is an
all-to-all of the rows of each tensor (:mod:`telechat_moe.sharding.cells.expert_rows`) among ranks that together hold each row
once; copies of a row move among themselves.
"""

from collections.abc import Callable, Mapping, Sequence
from json import dumps, loads
from typing import Any, NamedTuple

import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from telechat_moe.checkpoint.manifest import Region
from telechat_moe.checkpoint.rank_shards import ShardOwners
from telechat_moe.errors import BadInputError
from telechat_moe.moe.forecast import LoadWindow
from telechat_moe.moe.placement import ExpertMove, SlotMap, moves
from telechat_moe.moe.planner import MoveRule, Proposal, plan
from telechat_moe.recipe import Recipe
from telechat_moe.sharding.cells.dispatch import slots_name
from telechat_moe.sharding.shards import weight_of
from telechat_moe.train.programs.program import RankProgram
from telechat_moe.train.ranks import RankCoordinator

Planner = Callable[[NDArray[np.float64], SlotMap, MoveRule], Proposal]


def rule_of(recipe: Recipe) -> MoveRule:
    """Return what a better balance is worth in a run, and what a move costs."""
    rules, config = recipe.telechat_moe.moe.placement, recipe.model_config
    assert rules is not None
    # Three matrices, each with two moments and an average if one is kept, fp32.
    copies = 3 if recipe.telechat_moe.ema is None else 4
    expert_bytes = 3 * copies * config.hidden_size * config.moe_intermediate_size * 4
    return MoveRule(rules.seconds_per_pair, rules.every, expert_bytes, rules.bandwidth)


class MovingExperts:
    """Where the experts of a run are, on one of its ranks.

    Args:
        routers: Names of the routers' weights, in the order of the loads.
        sharing: Which rank holds what, by slots.

    Attributes:
        current: The map that the graph has.
        planner: Decides; all ranks do what rank 0's says.
    """

    def __init__(
        self,
        recipe: Recipe,
        routers: Sequence[str],
        program: RankProgram,
        sharing: ShardOwners,
        ranks: RankCoordinator,
    ) -> None:
        rules, config = recipe.telechat_moe.moe.placement, recipe.model_config
        assert rules is not None
        self.program, self.sharing, self.ranks = program, sharing, ranks
        self.layers = {
            f"{name.removesuffix('router.weight')}experts.{weight}": layer
            for layer, name in enumerate(routers)
            for weight in ("gate", "up", "down")
        }
        layers = {self.layer(name) for name in sharing.regions[ranks.rank]}
        self.slots = {slots_name(x): i for i, x in enumerate(routers) if i in layers}
        experts, devices = config.n_routed_experts, recipe.parallel_config.expert_parallel
        self.current = SlotMap.identity(len(routers), experts, devices)
        pairs = recipe.global_batch * config.seq_length * config.num_experts_per_tok
        self.window, self.every, self.steps = LoadWindow(rules.window, pairs), rules.every, 0
        self.rule = rule_of(recipe)
        self.planner: Planner = plan
        self.members = {
            name: members(name, ranks.rank, sharing.regions)
            for name in sharing.regions[ranks.rank]
            if self.layer(name) is not None
        }
        groups = {
            members(name, rank, sharing.regions)
            for rank, regions in enumerate(sharing.regions)
            for name in regions
            if self.layer(name) is not None
        }
        self.exchanges = program.row_exchanges(sorted(groups))

    def layer(self, name: str) -> int | None:
        """Return the MoE layer of a weight of experts, or of a moment or average of one; None: it is another."""
        return self.layers.get(weight_of(name))

    def in_order(self, name: str, tensor: np.ndarray) -> np.ndarray:
        """Return a whole tensor, given in the order of slots, in that of experts."""
        layer = self.layer(name)
        return tensor if layer is None else tensor[self.current.slots[layer]]

    def rows(self, name: str, region: Region) -> tuple[int, ...]:
        """Return the experts that a region of slots holds; empty: those of the same numbers, as everywhere in the layer."""
        layer = self.layer(name)
        if layer is None:
            return ()
        slot_E, (begin, end) = self.current.slots[layer], region[0]
        if (slot_E == np.arange(len(slot_E))).all():
            return ()
        return tuple(int(e) for e in self.current.experts[layer, begin:end])

    def maps(self) -> dict[str, np.ndarray]:
        """Return the values of the parameters that hold the map in this rank's graph, by name."""
        return {name: self.current.slots[layer] for name, layer in self.slots.items()}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the map, JSON values. Its tensors are in the order of experts."""
        window = self.window.loads().astype(np.int64).tolist() if len(self.window) else []
        slots, devices = self.current.slots.tolist(), self.current.devices
        return {"slots": slots, "devices": devices, "window": window, "steps": self.steps}

    def load_state(self, state: Mapping[str, Any] | None) -> str:
        """Restore map and loads from a checkpoint, whose tensors fit any map; return a note if its map does not fit."""
        now = self.current
        self.current = SlotMap.identity(*now.slots.shape, now.devices)
        self.window.clear()
        self.steps = 0
        if state is None:
            return ""
        try:
            placement = SlotMap(np.asarray(state["slots"]), state["devices"])
            moves(self.current, placement)  # of as many layers, experts and devices
            for load_LE in state["window"]:
                self.window.add(np.asarray(load_LE))
            self.current, self.steps = placement, int(state["steps"])
        except (BadInputError, KeyError, TypeError, ValueError) as error:
            self.window.clear()
            return f"the experts begin in their own slots, because the checkpoint has another map ({error})"
        return ""

    def is_due(self) -> bool:
        """Return whether experts may move after the next step."""
        return (self.steps + 1) % self.every == 0

    def after_step(self, load_LE: NDArray[np.number]) -> list[dict[str, Any]]:
        """Add the loads of a step to the window; every `every` steps decide and move experts. Return records for the log.

        Args:
            load_LE: (token, expert) pairs of each expert of each MoE layer, over all devices. All ranks have the same.
        """
        self.steps += 1
        try:
            self.window.add(load_LE)
        except BadInputError as error:
            return [{"refused": str(error)}]
        if self.steps % self.every:
            return []
        proposal: list[Proposal] = []

        def choose() -> str:
            proposal.append(self.planner(self.window.loads(), self.current, self.rule))
            return dumps(proposal[0].placement.slots.tolist())

        position = f"deciding on experts ({self.steps})"
        chosen = loads(self.ranks.agree(position, choose))
        new = SlotMap(np.asarray(chosen), self.current.devices)
        changes = moves(self.current, new)
        if not changes:
            return []
        self.move(new)
        return _records(changes, proposal[0], self.rule.expert_bytes) if proposal else []

    def move(self, new: SlotMap) -> None:
        """Move experts to their new slots; all ranks call it together."""
        for name, group in sorted(self.members.items()):
            layer = self.layer(name)
            assert layer is not None
            old_E, new_E = self.current.slots[layer], new.slots[layer]
            if (old_E == new_E).all():
                continue
            begins = [self.sharing.regions[rank][name][0] for rank in group]
            plan = route(old_E, new_E, begins, group.index(self.ranks.rank))
            rows = self.exchanges[group](self.program.value(name), *map(Tensor, plan))
            self.program.put(name, rows)
        self.current = new
        for name, value in self.maps().items():
            self.program.put(name, value)


class Route(NamedTuple):
    """The rows that a rank sends in a move and receives, as :class:`ExchangeRows` asks for them; int32."""

    order: NDArray[np.int32]
    sent: NDArray[np.int32]
    received: NDArray[np.int32]
    arrival: NDArray[np.int32]


def route(
    old_E: NDArray[np.integer],
    new_E: NDArray[np.integer],
    slots: Sequence[tuple[int, int]],
    member: int,
) -> Route:
    """Return which rows a member of a group sends to which, and where those that it receives go.

    Args:
        old_E: Slot of each expert now.
        new_E: Slot of each expert afterwards.
        slots: Each member's, (begin, end), in ascending order and as many each.
    """
    ends = np.array([end for _, end in slots])
    begin, end = slots[member]
    expert_S, expert_after_S = np.argsort(old_E), np.argsort(new_E)
    target_e = new_E[expert_S[begin:end]]
    order_e = np.argsort(target_e, kind="stable")
    source_e = old_E[expert_after_S[begin:end]]
    receiver_e, sender_e = (np.searchsorted(ends, x, side="right") for x in (target_e, source_e))
    # Rows come by sender, and those of one sender in the order of their new slots.
    by_sender_e = np.argsort(sender_e, kind="stable")
    counts = (np.bincount(x, minlength=len(slots)) for x in (receiver_e, sender_e))
    return Route(*(x.astype(np.int32) for x in (order_e, *counts, np.argsort(by_sender_e))))


def members(name: str, rank: int, regions: Sequence[Mapping[str, Region]]) -> tuple[int, ...]:
    """Return the ranks that hold the rows of a tensor each once, by their slots, and are this rank's for a move.

    Args:
        regions: What each rank holds.
    """
    holders: dict[tuple[int, int], list[int]] = {}
    for other, regions_of_other in enumerate(regions):
        if name in regions_of_other and regions_of_other[name][1:] == regions[rank][name][1:]:
            holders.setdefault(regions_of_other[name][0], []).append(other)
    copy = holders[regions[rank][name][0]].index(rank)
    return tuple(holders[rows][copy] for rows in sorted(holders))


def _records(
    changes: list[ExpertMove], proposal: Proposal, expert_bytes: float
) -> list[dict[str, Any]]:
    """Return what was moved in each layer; `bytes` counts what goes to another device."""
    numbers = {"gain_s": proposal.gain_s, "cost_s": proposal.cost_s}
    numbers |= {"load_before": proposal.before, "load_after": proposal.after}
    records: list[dict[str, Any]] = []
    for layer in sorted({move.layer for move in changes}):
        travels = [m for m in changes if m.layer == layer and m.source_device != m.target_device]
        size, experts = round(len(travels) * expert_bytes), [move.expert for move in travels]
        predicted = {name: float(value_L[layer]) for name, value_L in numbers.items()}
        records.append({"layer": layer, "experts": experts, "bytes": size, **predicted})
    return records
