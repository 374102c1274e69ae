"""Define the benchmark's layouts: which logical rank computes what."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class RankLayout:
    """How a model is split over logical ranks; rank = ((stage dp + data) cp + context) tp + tensor.

    Attributes:
        dp: Data parallel replicas.
        cp: Shards of a sequence.
        tp: Shards of weights.
        pp: Stages.
        chunks: Chunks of the model on a stage (VPP).
        sp: Whether norms and router see one shard of the sequence on each rank of ``tp``.
        ep: Ranks of ``dp`` and ``cp`` that share the experts; with ``extend`` also those of ``tp``.
        extend: TP-extend-EP: the ranks of ``tp`` hold whole experts, too.
        zero: Optimizer states are sharded over ``dp`` and ``cp``.
        micro: Micro-batches of a step.
    """

    name: str
    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    sp: bool = False
    ep: int = 1
    extend: bool = False
    zero: bool = False
    micro: int = 1

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.pp * self.stage_size

    @property
    def stage_size(self) -> int:
        """Ranks of a stage."""
        return self.dp * self.cp * self.tp

    def ranks(self, stage: int) -> list[int]:
        """Return the ranks of a stage."""
        return list(range(stage * self.stage_size, (stage + 1) * self.stage_size))

    def place(self, rank: int) -> tuple[int, int, int]:
        """Return data, context and tensor index of a rank."""
        rest, t = divmod(rank % self.stage_size, self.tp)
        d, c = divmod(rest, self.cp)
        return d, c, t

    def groups(self, stage: int, key: Callable[[int], object]) -> list[list[int]]:
        """Return the ranks of a stage that have the same key together."""
        found: dict[object, list[int]] = {}
        for rank in self.ranks(stage):
            found.setdefault(key(rank), []).append(rank)
        return list(found.values())

    def tensor(self, stage: int) -> list[list[int]]:
        """Groups that share weights."""
        return self.groups(stage, lambda r: r // self.tp)

    def context(self, stage: int) -> list[list[int]]:
        """Groups that share a sequence."""
        return self.groups(stage, lambda r: (self.place(r)[0], self.place(r)[2]))

    def data(self, stage: int) -> list[list[int]]:
        """Groups that hold the same weights: gradients are added over them."""
        return self.groups(stage, lambda r: self.place(r)[2])

    def experts(self, stage: int) -> list[list[int]]:
        """Groups that exchange tokens."""
        return self.groups(stage, self._expert_group)

    def same_experts(self, stage: int) -> list[list[int]]:
        """Groups that hold the same experts."""
        return self.groups(stage, self.expert_place)

    def expert_place(self, rank: int) -> object:
        """Return which experts a rank has: its index in its group, and its shard of them."""
        index, t = divmod(rank % self.stage_size, self.tp)
        if self.extend:
            return (rank % self.stage_size) % (self.ep * self.tp), 0
        return index % self.ep, t

    def _expert_group(self, rank: int) -> object:
        index, t = divmod(rank % self.stage_size, self.tp)
        if self.extend:
            return (rank % self.stage_size) // (self.ep * self.tp)
        return index // self.ep, t


LAYOUTS = {
    layout.name: layout
    for layout in (
        RankLayout("one"),
        RankLayout("dp2", dp=2),
        RankLayout("dp4", dp=4),
        RankLayout("tp2", tp=2),
        RankLayout("tp4", tp=4),
        RankLayout("tp2 sp", tp=2, sp=True),
        RankLayout("tp4 sp", tp=4, sp=True),
        RankLayout("cp2", cp=2),
        RankLayout("cp2 tp2", cp=2, tp=2),
        RankLayout("pp2", pp=2, micro=2),
        RankLayout("pp4", pp=4, micro=2),
        RankLayout("pp2 vpp2", pp=2, chunks=2, micro=2),
        RankLayout("ep2", dp=2, ep=2),
        RankLayout("ep4", dp=4, ep=4),
        RankLayout("ep2 dp2", dp=4, ep=2),
        RankLayout("ep2 cp2", cp=2, ep=2),
        RankLayout("ep2 tp2", dp=2, tp=2, ep=2),
        RankLayout("ep2 tp2 sp", dp=2, tp=2, sp=True, ep=2),
        RankLayout("tp2 extends ep", tp=2, sp=True, ep=1, extend=True),
        RankLayout("tp2 extends ep2", dp=2, tp=2, sp=True, ep=2, extend=True),
        RankLayout("zero dp2", dp=2, zero=True),
        RankLayout("zero dp4 ep2", dp=4, ep=2, zero=True),
        RankLayout("zero dp2 tp2", dp=2, tp=2, zero=True),
        RankLayout("pp2 dp2 ep2", pp=2, dp=2, ep=2, micro=2),
        RankLayout("pp2 tp2 sp", pp=2, tp=2, sp=True),
        RankLayout("dp4 tp2 ep2", dp=4, tp=2, ep=2),
        RankLayout("dp2 cp2 tp2 ep4", dp=2, cp=2, tp=2, ep=4),
        RankLayout("pp2 dp2 cp2 tp2 ep4 zero", pp=2, dp=2, cp=2, tp=2, sp=True, ep=4, zero=True),
        RankLayout("dp4 tp4 sp extends ep", dp=4, tp=4, sp=True, ep=1, extend=True),
        RankLayout("dp8 ep4 zero", dp=8, ep=4, zero=True),
    )
}
"""Layouts by name."""
