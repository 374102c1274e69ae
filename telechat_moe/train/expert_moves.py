"""Move experts between the ranks of a run, between two of its steps.

A rank's tensors of experts are in the order of slots. Which expert is in which slot is data of the graph
(:class:`telechat_moe.sharding.cells.dispatch.ExpertSlots`); routers, loads and checkpoints name experts. A move goes through
files in a folder that all ranks see: every rank writes the rows that leave it, all read what comes to them, and only
when all have read does any rank change anything.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from json import dumps, loads
from pathlib import Path
from typing import Any

import numpy as np
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
        folder: A folder that all ranks see, for the rows on their way.

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
        folder: Path,
    ) -> None:
        rules, config = recipe.telechat_moe.moe.placement, recipe.model_config
        assert rules is not None
        self.program, self.sharing, self.ranks, self.folder = program, sharing, ranks, folder
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
        self.count = 0
        self.senders: dict[str, list[tuple[Region, int]]] = {}
        for (name, region), sender in sharing.owner.items():
            self.senders.setdefault(name, []).append((region, sender))
        if ranks.leads:  # a run that was killed leaves rows behind
            shutil.rmtree(folder, ignore_errors=True)

    def layer(self, name: str) -> int | None:
        """Return the MoE layer of a weight of experts, or of a moment or average of one; None: it is another."""
        return self.layers.get(weight_of(name))

    def in_slots(self, name: str, tensor: np.ndarray) -> np.ndarray:
        """Return a whole tensor in the order of slots."""
        layer = self.layer(name)
        return tensor if layer is None else tensor[self.current.experts[layer]]

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
        if problem := self.move(new):
            return [{"refused": problem}]
        return _records(changes, proposal[0], self.rule.expert_bytes) if proposal else []

    def move(self, new: SlotMap) -> str:
        """Move experts to their new slots, on all ranks or on none; return the reason if none moved, else an empty text."""
        self.count += 1
        place, position = self.folder / f"{self.count}", f"moving experts ({self.count})"
        values: dict[str, np.ndarray] = {}

        def receive() -> None:
            values.update(self._receive(place, new))

        problem = self.ranks.problem(position, lambda: self._send(place, new))
        problem = problem or self.ranks.problem(position, receive)
        if self.ranks.leads:
            shutil.rmtree(place, ignore_errors=True)
        if problem:
            return f"the experts stay where they are: {problem}"
        self.current = new
        for name, value in (values | self.maps()).items():
            self.program.put(name, value)
        return ""

    def _changed(self, new: SlotMap) -> Iterator[tuple[str, int, Region]]:
        """Yield the tensors of this rank some of whose rows change, with their layer and this rank's region."""
        for name, region in sorted(self.sharing.regions[self.ranks.rank].items()):
            layer = self.layer(name)
            if layer is not None and (new.slots[layer] != self.current.slots[layer]).any():
                yield name, layer, region

    def _leaving(self, layer: int, region: Region, new: SlotMap) -> NDArray[np.intp]:
        """Return the slots of a region whose experts go elsewhere."""
        begin, end = region[0]
        slot = new.slots[layer, self.current.experts[layer, begin:end]]
        return begin + np.flatnonzero((slot < begin) | (slot >= end))

    def _send(self, place: Path, new: SlotMap) -> None:
        """Write the outgoing rows that this rank owns."""
        rows: dict[str, np.ndarray] = {}
        for name, layer, region in self._changed(new):
            leaving = self._leaving(layer, region, new)
            if len(leaving) and self.sharing.owner[name, region] == self.ranks.rank:
                rows[name] = self.program.parameters[name].asnumpy()[leaving - region[0][0]]
        place.mkdir(parents=True, exist_ok=True)
        with (place / f"rank_{self.ranks.rank}.npz").open("wb") as file:
            np.savez(file, **rows)  # pyright: ignore[reportArgumentType]

    def _receive(self, place: Path, new: SlotMap) -> dict[str, np.ndarray]:
        """Return this rank's tensors with incoming rows and its remaining rows in their new slots."""
        tensors: dict[str, np.ndarray] = {}
        files: dict[int, Any] = {}
        try:
            for name, layer, region in self._changed(new):
                begin, end = region[0]
                now = self.program.parameters[name].asnumpy()
                value = now.copy()
                source = self.current.slots[layer, new.experts[layer, begin:end]]
                local = (source >= begin) & (source < end)
                value[local] = now[source[local] - begin]
                for other, sender in self.senders[name]:
                    incoming = (source >= other[0][0]) & (source < other[0][1])
                    if other == region or other[1:] != region[1:] or not incoming.any():
                        continue
                    if sender not in files:
                        path = place / f"rank_{sender}.npz"
                        files[sender] = np.load(path, allow_pickle=False)
                    sent = self._leaving(layer, other, new)
                    value[incoming] = files[sender][name][np.searchsorted(sent, source[incoming])]
                tensors[name] = value
        finally:
            for file in files.values():
                file.close()
        return tensors


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
