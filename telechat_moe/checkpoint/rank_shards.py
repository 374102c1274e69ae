"""Choose which rank writes each shard.

Of a shard that several ranks hold, one writes the values, all write its checksum, and rank 0 refuses copies that
differ: a layout that lets replicas drift apart is wrong, however good the loss looks.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from telechat_moe.checkpoint.joint_save import TensorShard
from telechat_moe.checkpoint.manifest import Region
from telechat_moe.graph.compile import RankGraph
from telechat_moe.graph.parameter_layout import shard_slices
from telechat_moe.sharding.shards import elements, group_of

T = TypeVar("T")


def region(graph: RankGraph, name: str) -> Region | None:
    """Return the (begin, end) of a rank's shard in every dimension of a tensor; None if it holds none."""
    entry = graph.layouts.get(name)
    if entry is None:
        return None
    bounds = shard_slices(entry.shape, graph, name)
    assert bounds is not None
    return tuple((s.start, s.stop) for s in bounds)


class ShardOwners:
    """Say which ranks hold each shard that is kept, and which one writes it; all write about as many bytes."""

    def __init__(self, ranks: Sequence[RankGraph], keep: Callable[[str], bool]) -> None:
        self.regions: list[dict[str, Region]] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.holders: dict[tuple[str, Region], list[int]] = {}
        for rank, graph in enumerate(ranks):
            regions: dict[str, Region] = {}
            for name, entry in graph.layouts.items():
                shard = region(graph, name) if keep(name) else None
                if shard is not None:
                    regions[name] = shard
                    self.shapes[name] = tuple(int(n) for n in entry.shape)
                    self.holders.setdefault((name, shard), []).append(rank)
            self.regions.append(regions)
        self.owner = balance({piece: (elements(piece[1]), r) for piece, r in self.holders.items()})

    def shard(self, rank: int, name: str, data: np.ndarray) -> TensorShard:
        """Return a rank's shard of a tensor for a checkpoint."""
        bounds = self.regions[rank][name]
        writes, shared = self.owner[name, bounds] == rank, len(self.holders[name, bounds]) > 1
        return TensorShard(data, self.shapes[name], bounds, writes, shared)


def balance(
    pieces: Mapping[tuple[str, Region], tuple[int, list[int]]],
) -> dict[tuple[str, Region], int]:
    """Return which holder writes each shard, so that all write about as many bytes; equal on every rank."""
    written, owner = Counter[int](), dict[tuple[str, Region], int]()
    # Shards with one holder first: those with several then even out what each rank writes.
    order = sorted(pieces.items(), key=lambda p: (len(p[1][1]) > 1, -p[1][0], p[0]))
    for piece, (size, holders) in order:
        owner[piece] = min(holders, key=lambda rank: (written[rank], rank))
        written[owner[piece]] += size
    return owner


def grouped(values: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Return values of tensors by the groups of a checkpoint (``model``, ``optimizer``, ``ema``), by the tensors' names."""
    groups: dict[str, dict[str, T]] = {"model": {}, "optimizer": {}}
    for name, value in values.items():
        groups.setdefault(group_of(name), {})[name] = value
    return groups
