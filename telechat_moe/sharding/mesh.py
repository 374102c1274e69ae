"""The devices as a mesh with named axes.

A pipeline stage is ``data x context x tensor`` devices, tensor-parallel ranks next to each other. Expert parallelism
takes the innermost of them, so its groups are as near as they can be: first the tensor-parallel ranks
(TP-extend-EP, Pangu Ultra MoE section 4.1: they hold whole experts), then context, then data. Each of the three axes
is therefore split into an outer and an inner one; the inner ones are the expert-parallel group.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations, islice, product

from telechat_moe.errors import BadInputError
from telechat_moe.recipe.experts import expert_shares

AXES = ("dp_outer", "dp_inner", "cp_outer", "cp_inner", "tp_outer", "tp_inner")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Parallel degrees and what follows from them.

    Args:
        dp, cp, tp: Data, context and tensor parallel.
        pp: Pipeline stages.
        ep: Expert parallel; its groups are within a stage.
        sp: Sequence parallel: between the matrices, rows are spread over ``tp`` too.
        expert_tp: Split each expert's width over ``tp`` and spread experts over ``dp`` only, instead of
            whole experts over all devices.
        zero1: Optimizer states are spread over the devices that hold the same weights.
        node: Devices of a node, whose ranks follow each other, where tokens reach experts in two hops; 0: in one.

    Raises:
        BadInputError: The degrees do not fit together.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    sp: bool = False
    expert_tp: bool = False
    zero1: bool = False
    node: int = 0

    def __post_init__(self) -> None:
        for name in ("dp", "cp", "tp", "pp", "ep"):
            if getattr(self, name) < 1:
                raise BadInputError(f"mesh: {name} is {getattr(self, name)}, expected 1 or more")
        _ = self.sizes

    @property
    def stage_devices(self) -> int:
        """Return the number of devices of a pipeline stage."""
        return self.dp * self.cp * self.tp

    @property
    def devices(self) -> int:
        """Return the number of devices of all stages."""
        return self.stage_devices * self.pp

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Size of each axis of a stage, in the order of the device matrix."""
        names = ("dp",) if self.expert_tp else ("tp", "cp", "dp")
        shares = expert_shares(self.ep, [getattr(self, name) for name in names])
        if shares is None:
            over = "data_parallel" if self.expert_tp else "tp x cp x dp, the innermost first"
            raise BadInputError(
                f"mesh: expert_parallel {self.ep} does not fit dp {self.dp} x cp {self.cp} x tp {self.tp}; "
                f"experts spread over {over}: each of these must be used up before the next"
            )
        inner = dict(zip(names, shares, strict=True))
        sizes: dict[str, int] = {}
        for axis in ("dp", "cp", "tp"):
            part = inner.get(axis, 1)
            sizes[f"{axis}_outer"], sizes[f"{axis}_inner"] = getattr(self, axis) // part, part
        return sizes

    def axes(self, *degrees: str) -> tuple[str, ...]:
        """Return the axes of degrees ``dp``, ``cp``, ``tp``; of ``ep``: the inner ones."""
        names: list[str] = []
        for degree in degrees:
            if degree == "ep":
                names += ["dp_inner"] + ([] if self.expert_tp else ["cp_inner", "tp_inner"])
            else:
                names += [f"{degree}_outer", f"{degree}_inner"]
        return tuple(axis for axis in AXES if axis in names)

    def size(self, axes: Iterable[str]) -> int:
        """Return the number of devices along ``axes``."""
        return math.prod(self.sizes[axis] for axis in axes)

    @cached_property
    def _places(self) -> list[dict[str, int]]:
        """Position of each rank of a stage along each axis."""
        ends = (range(size) for size in self.sizes.values())
        return [dict(zip(self.sizes, place, strict=True)) for place in product(*ends)]

    def coordinates(self, rank: int) -> Mapping[str, int]:
        """Return the position of a rank within its stage, along each axis."""
        return self._places[rank % self.stage_devices]

    def index(self, rank: int, axes: Iterable[str]) -> int:
        """Return the position of a rank along ``axes``, the first the slowest."""
        place, position = self.coordinates(rank), 0
        for axis in axes:
            position = position * self.sizes[axis] + place[axis]
        return position

    def group(self, rank: int, axes: Iterable[str]) -> list[int]:
        """Return the ranks that differ from ``rank`` along ``axes`` only, in order."""
        chosen, place = set(axes), self.coordinates(rank)
        ranks, stride = [rank], self.stage_devices
        for axis, size in self.sizes.items():
            stride //= size
            if axis in chosen:
                first = -place[axis] * stride
                ranks = [r + first + i * stride for r in ranks for i in range(size)]
        return ranks

    def node_groups(self, rank: int) -> dict[str, list[int]]:
        """Return the two hops of a rank's expert group: ``within`` its node, and ``across`` nodes in the same place."""
        group = self.group(rank, self.axes("ep"))
        if not self.node:
            return {"within": group, "across": [rank]}
        return {
            "within": [r for r in group if r // self.node == rank // self.node],
            "across": [r for r in group if r % self.node == rank % self.node],
        }

    def stage(self, rank: int) -> int:
        """Return the pipeline stage of a rank."""
        return rank // self.stage_devices

    def first_ranks(self) -> list[int]:
        """Return the first rank of each pipeline stage."""
        return [stage * self.stage_devices for stage in range(self.pp)]

    def group_name(self, ranks: Sequence[int], rank: int) -> str:
        """Return the axes that a group of ``rank`` spans, e.g. ``dp``, ``dp x tp = ep``, ``all``."""
        members = sorted(ranks)
        if len({self.stage(r) for r in members}) > 1:
            return "all" if len(members) == self.devices else "pp"
        degrees = [d for d in ("dp", "cp", "tp") if getattr(self, d) > 1]
        subsets = chain.from_iterable(combinations(degrees, n + 1) for n in range(len(degrees)))
        matching = (s for s in subsets if self.group(rank, self.axes(*s)) == members)
        names = [" x ".join(subset) for subset in islice(matching, 1)]
        if self.node:
            hops = self.node_groups(rank).items()
            names += [f"ep {hop} nodes" for hop, group in hops if group == members]
        if self.ep > 1:
            inner = self.axes("ep")
            outer = [a for a in self.axes("dp", "cp", "tp") if a not in inner]
            if self.group(rank, inner) == members:
                names.append("ep")
            elif not names and self.group(rank, outer) == members:
                names.append("dp x cp x tp / ep" if not self.expert_tp else "dp / ep")
        return " = ".join(names) or ",".join(map(str, members))

    def substitute(self, ranks: Sequence[int], old: int, new: int) -> list[int]:
        """Return the group of rank ``new`` that corresponds to a group of rank ``old`` of the same stage.

        Groups along axes of the mesh are :meth:`group` of the new rank; others, and pairs between stages, move
        by the same steps along each axis.
        """
        if self.node:  # no axes of the mesh
            for hop, group in self.node_groups(old).items():
                if sorted(ranks) == group:
                    return self.node_groups(new)[hop]
        origin, target = self.coordinates(old), self.coordinates(new)
        moved: list[int] = []
        for rank in ranks:
            position, coordinates = 0, self.coordinates(rank)
            for axis, size in self.sizes.items():
                place = (coordinates[axis] + target[axis] - origin[axis]) % size
                position = position * size + place
            moved.append(self.stage(rank) * self.stage_devices + position)
        return sorted(moved)

    def degrees(self) -> dict[str, int | bool]:
        """Return dp, cp, tp, pp and ep, and whether tp splits sequences and experts' widths, by name."""
        sizes = {name: getattr(self, name) for name in ("dp", "cp", "tp", "pp", "ep")}
        return {**sizes, "sequence_parallel": self.sp, "expert_tensor_parallel": self.expert_tp}

    def describe(self) -> str:
        """Return the degrees in a few words: ``dp2 tp2 sp ep4 zero1``."""
        parts = [f"{n}{getattr(self, n)}" for n in ("dp", "cp", "tp", "pp") if getattr(self, n) > 1]
        parts += ["sp"] if self.sp and self.tp > 1 else []
        parts += [f"ep{self.ep}" + (" x tp" if self.expert_tp else "")] if self.ep > 1 else []
        parts += [f"nodes of {self.node}"] if self.node else []
        parts += ["zero1"] if self.zero1 and self.dp * self.cp > 1 else []
        return " ".join(parts) or "one device"
