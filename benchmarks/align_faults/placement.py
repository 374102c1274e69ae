"""Describe how a program's tensors are sharded over its ranks, as a dump does, to compare across layouts."""

from collections.abc import Sequence

import numpy as np

from benchmarks.align_faults.kernels import Array
from benchmarks.align_faults.layouts import RankLayout
from telechat_moe.tools.align.dump.records import TensorLayout as Spread

AXES = ("replica", "expert", "tensor")
"""Of a stage's ranks, outermost first: rank = (replica ep + expert) tp + tensor."""


def _mesh(layout: RankLayout) -> tuple[int, int, int]:
    return layout.stage_size // layout.tp // layout.ep, layout.ep, layout.tp


def weight_layout(
    layout: RankLayout,
    shape: tuple[int, ...],
    groups: Sequence[Sequence[int]],
    tensor: int | None,
    halves: bool,
    cut: bool,
) -> Spread:
    """Return how a weight, its gradient and its moments are sharded over the ranks of its stage.

    Args:
        shape: Of the shard that a rank computes with; a stack of experts has three dimensions.
        groups: Ranks that hold the same shard.
        tensor: The dimension that is sharded over ``tp``.
        halves: Whether that dimension holds two things (gate and up), each of them sharded.
        cut: Whether rows are sharded once more over the ranks that hold the same (ZeRO).
    """
    experts, tp = len(shape) == 3, layout.tp
    dims: list[tuple[str, ...]] = [() for _ in shape]
    owned: dict[int, tuple[tuple[int, ...], ...]] = {}
    if experts:
        dims[0] = ("expert", "tensor") if layout.extend else ("expert",)
    if tensor is not None and tp > 1:
        dims[tensor] = (*dims[tensor], "tensor")
        if halves:
            owned[tensor] = _halves(tp * shape[tensor], tp)
    if cut:
        dims[0] = (*dims[0], *(("replica",) if experts else ("replica", "expert")))
        if 0 in owned:
            n = len(groups[0])
            owned[0] = tuple(tuple(p) for held in owned[0] for p in np.split(np.array(held), n))
    ranks = sorted(rank for group in groups for rank in group)
    return Spread(_mesh(layout), AXES, tuple(ranks), tuple(dims), owned=owned)


def _halves(size: int, pieces: int) -> tuple[tuple[int, ...], ...]:
    """Return the indices of each shard where both halves of a dimension are sharded."""
    halves: list[list[Array]] = [np.split(h, pieces) for h in np.split(np.arange(size), 2)]
    return tuple(tuple(int(i) for h in halves for i in h[p]) for p in range(pieces))


def chosen_layout(layout: RankLayout, ranks: Sequence[int]) -> Spread:
    """Return how the rows of routing are divided over the ranks of a stage and the micro-batches of a step."""
    rows = ("micro", *AXES[:2], *(("tensor",) if layout.sp else ()))
    mesh = (layout.micro, *_mesh(layout))
    return Spread(mesh, ("micro", *AXES), tuple(ranks), (rows, ()), calls="micro")
