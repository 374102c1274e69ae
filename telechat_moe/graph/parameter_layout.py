"""Read how MindSpore has split a parameter over the devices of a stage, and cut a rank's shard."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from telechat_moe.graph.compile import RankGraph


class LayoutEntry(NamedTuple):
    """What is read of an entry of MindSpore's ``parameter_layout_dict``.

    Attributes:
        device_matrix: Sizes of the axes of a stage's devices.
        tensor_map: Axis that splits each dimension, numbered from the right, or a list of them; -1: none. A dimension
            that several axes split may be several dimensions here and in ``shard_view``.
        shard_group: Group among which the sharded optimizer splits the first dimension; empty: it does not.
        shape: Shape of the whole tensor; may be empty.
        shard_view: Shape of the shard.
    """

    device_matrix: list[int]
    tensor_map: list[Any]
    shard_group: str
    shape: list[int]
    shard_view: list[int]

    @staticmethod
    def of(entry: Sequence[Any]) -> "LayoutEntry":
        """Return the parts of MindSpore's entry by name."""
        return LayoutEntry(*entry[:2], *entry[5:8])

    def axes_by_dimension(self, shape: Sequence[int]) -> list[list[int]]:
        """Return the axes that split each dimension of a tensor, numbered from the right of the device matrix."""
        if len(self.tensor_map) == len(shape):
            nested = [
                axes if isinstance(axes, list | tuple) else [axes] for axes in self.tensor_map
            ]
            return [[axis for axis in axes if axis != -1] for axes in nested]
        dimensions: list[list[int]] = []
        position = 0
        for length in shape:
            axes, extent = [], 1
            while position < len(self.tensor_map):
                axis = self.tensor_map[position]
                split = self.device_matrix[-1 - axis] if axis != -1 else 1
                factor = self.shard_view[position] * split
                if extent == length and factor != 1:
                    break
                extent *= factor
                axes += [axis] if axis != -1 else []
                position += 1
            dimensions.append(axes)
        return dimensions


def shard_slices(shape: Sequence[int], graph: "RankGraph", name: str) -> tuple[slice, ...] | None:
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


def shard_of(tensor: np.ndarray, graph: "RankGraph", name: str) -> np.ndarray:
    """Return a rank's shard of a whole tensor."""
    slices = shard_slices(tensor.shape, graph, name)
    return tensor if slices is None else np.ascontiguousarray(tensor[slices])
