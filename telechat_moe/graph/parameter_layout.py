"""Cut a rank's shard of a tensor, as MindSpore has split it over the devices of a stage."""

from collections.abc import Sequence

import numpy as np

from telechat_moe.graph.compile import RankGraph


def shard_slices(shape: Sequence[int], graph: RankGraph, name: str) -> tuple[slice, ...] | None:
    """Return the slices of a whole tensor that are a rank's shard; None: the rank holds all of it."""
    entry = graph.layouts.get(name)
    if entry is None:
        return None
    matrix = entry.device_matrix
    coordinates = np.unravel_index(graph.rank % int(np.prod(matrix)), matrix)
    bounds: list[tuple[int, int]] = []
    for length, axes in zip(shape, entry.axes_by_dimension(shape), strict=True):
        start = 0
        for axis in axes:
            length //= matrix[-1 - axis]
            start += int(coordinates[-1 - axis]) * length
        bounds.append((start, start + length))
    if entry.shard_group:
        members = graph.groups[entry.shard_group]
        begin, end = bounds[0]
        rows = (end - begin) // len(members)
        begin += members.index(graph.rank) * rows
        bounds[0] = begin, begin + rows
    return tuple(slice(begin, end) for begin, end in bounds)


def shard_of(tensor: np.ndarray, graph: RankGraph, name: str) -> np.ndarray:
    """Return a rank's shard of a whole tensor."""
    slices = shard_slices(tensor.shape, graph, name)
    return tensor if slices is None else np.ascontiguousarray(tensor[slices])
