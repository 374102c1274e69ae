"""Choose which rank writes each shard, and gather whole tensors from shards through files.

Of a shard that several ranks hold, one writes the values, all write its checksum, and rank 0 refuses copies that
differ: a layout that lets replicas drift apart is wrong, however good the loss looks.
"""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from telechat_moe.checkpoint.joint_save import TensorShard, replicas_differ
from telechat_moe.checkpoint.manifest import Region, slices
from telechat_moe.graph.compile import RankGraph
from telechat_moe.graph.parameter_layout import shard_slices
from telechat_moe.processes import Control
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


class ShardExchange:
    """Gather shards on rank 0 through files.

    Args:
        sharing: Which rank holds what.
        folder: A folder that all processes see.
    """

    def __init__(self, sharing: ShardOwners, rank: int, folder: Path, control: Control) -> None:
        self.sharing, self.rank, self.folder, self.control = sharing, rank, folder, control
        self.ranks = len(sharing.regions)
        self.count = 0

    def gather(self, pieces: Mapping[str, np.ndarray]) -> dict[str, np.ndarray] | None:
        """Return whole tensors on rank 0, None on others, from each rank's shards of them.

        Raises:
            CheckFailedError: On rank 0, if copies of a shard differ.
        """
        self.count += 1
        place = self.folder / f"{self.count}"
        self._write(place, pieces)
        self.control.barrier(f"gather-{self.count}", self.rank, self.ranks)
        if self.rank:
            return None
        try:
            return self._merge(place)
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def _write(self, place: Path, pieces: Mapping[str, np.ndarray]) -> None:
        place.mkdir(parents=True, exist_ok=True)
        sums, written = {}, {}
        for name, piece in pieces.items():
            sums[name] = hashlib.blake2b(piece.tobytes()).hexdigest()
            if self.sharing.shard(self.rank, name, piece).writes:
                written[name] = piece
        with (place / f"rank_{self.rank}.npz").open("wb") as file:
            np.savez(file, **written)
        (place / f"rank_{self.rank}.json").write_text(json.dumps(sums))

    def _merge(self, place: Path) -> dict[str, np.ndarray]:
        sums = [json.loads((place / f"rank_{r}.json").read_text()) for r in range(self.ranks)]
        tensors: dict[str, np.ndarray] = {}
        for rank in range(self.ranks):
            with np.load(place / f"rank_{rank}.npz", allow_pickle=False) as archive:
                for name in archive.files:
                    self._check_copies(name, rank, sums)
                    piece = archive[name]
                    if name not in tensors:
                        tensors[name] = np.empty(self.sharing.shapes[name], piece.dtype)
                    tensors[name][slices(self.sharing.regions[rank][name])] = piece
        return tensors

    def _check_copies(self, name: str, owner: int, sums: list[dict[str, str]]) -> None:
        bounds = self.sharing.regions[owner][name]
        for rank in self.sharing.holders[name, bounds]:
            if sums[rank][name] != sums[owner][name]:
                raise replicas_differ(owner, rank, name)


def grouped(values: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Return values of tensors by the groups of a checkpoint (``model``, ``optimizer``, ``ema``), by the tensors' names."""
    groups: dict[str, dict[str, T]] = {"model": {}, "optimizer": {}}
    for name, value in values.items():
        groups.setdefault(group_of(name), {})[name] = value
    return groups
