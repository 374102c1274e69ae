"""Compute what each rank of a group receives from a collective, given what all ranks send."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.align_faults.kernels import Array, Numerics, rounded

Shards = list[Array]
Settings = list[dict[str, Any]]


def _total(parts: Sequence[Array], n: Numerics, dtype: str) -> Array:
    """Return the sum in the tensor's type, in a ring's order or from the end."""
    ordered = list(parts)[::-1] if n.order == "reversed" else list(parts)
    if n.order == "wide":
        return rounded(np.sum([p.astype(np.float64) for p in ordered], 0).astype(np.float32), dtype)
    total = ordered[0]
    for part in ordered[1:]:
        total = rounded(total + part, dtype) if dtype != "int64" else total + part
    return total


def all_reduce(parts: Shards, given: Settings, n: Numerics, dtype: str) -> Shards:
    """Give the sum to all ranks."""
    total = _total(parts, n, dtype)
    return [total.copy() for _ in parts]


def all_gather(parts: Shards, given: Settings, n: Numerics, dtype: str) -> Shards:
    """Give the rows of all ranks to all ranks."""
    return [np.concatenate(parts, 0) for _ in parts]


def reduce_scatter(parts: Shards, given: Settings, n: Numerics, dtype: str) -> Shards:
    """Give each rank its rows of the sum."""
    return [x.copy() for x in np.split(_total(parts, n, dtype), len(parts), 0)]


def all_to_all(parts: Shards, given: Settings, n: Numerics, dtype: str) -> Shards:
    """Give each rank the rows that are addressed to it."""
    cut = [
        np.split(p, np.cumsum(g["input_split_sizes"])[:-1])
        for p, g in zip(parts, given, strict=True)
    ]
    return [np.concatenate([c[i] for c in cut], 0) for i in range(len(parts))]


Exchange = Callable[[Shards, Settings, Numerics, str], Shards]
EXCHANGES: Mapping[str, Exchange] = {
    "all_reduce": all_reduce,
    "all_gather_into_tensor": all_gather,
    "reduce_scatter_tensor": reduce_scatter,
    "all_to_all_single": all_to_all,
}
"""Function that computes what ranks receive, by the name of the collective."""
