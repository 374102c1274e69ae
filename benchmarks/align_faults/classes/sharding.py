"""Faults of sharding."""

from typing import Any

import numpy as np

from benchmarks.align_faults.classes.collectives import (
    GATHER,
    mixed,
)
from benchmarks.align_faults.classes.common import (
    add,
)
from benchmarks.align_faults.faults import (
    argument,
    at_one,
    collective,
    exchange,
    forward,
    optimizer,
)
from benchmarks.align_faults.kernels import (
    Array,
)


def _of_other_rank(x: Array, ins: list[Array], e: Any, rank: int, r: Any) -> Array:
    """Return the weight's shard on another rank."""
    found = [
        v
        for w in e.weights.values()
        if rank in w.values
        and w.values[rank].shape == x.shape
        and np.array_equal(w.values[rank], x)
        for k, v in w.values.items()
        if k != rank and v.shape == x.shape and not np.array_equal(v, x)
    ]
    return found[int(r.integers(len(found)))].copy() if found else np.roll(x, 1, 0)


def CUT(s: Any) -> bool:  # noqa: N802
    """Pick the first use of weights that are sharded or belong to experts."""
    here = forward({"linear", "grouped_matmul"})(s) and s.step == 0
    return here and s.tag not in ("router", "head")


add(
    "piece of another rank",
    "sharding",
    "wrong tensor | wrong shard | permutation",
    "given",
    CUT,
    argument(1, _of_other_rank),
)
add(
    "piece read of another rank",
    "sharding",
    "wrong tensor | wrong shard | permutation | expert swap",
    "hidden",
    CUT,
    argument(1, _of_other_rank),
)
add(
    "pieces of a weight in another order",
    "sharding",
    "permutation",
    "given",
    CUT,
    argument(1, lambda w, ins, e, k, r: np.roll(w, w.shape[0] // 2 or 1, 0)),
)
add(
    "copies of a weight differ",
    "sharding",
    "scale | part | single element",
    "given",
    lambda s: forward({"rms_norm", "linear"})(s) and s.step == 0,
    argument(1, lambda w, ins, e, k, r: at_one(w, r, lambda v: 1.5 * v)),
)
add(
    "gathered weight in another order",
    "sharding",
    "permutation | wrong order",
    "exchange",
    collective(GATHER, ("optimizer",)),
    exchange(mixed),
    whole=True,
)
add(
    "piece of a reduced gradient of another rank",
    "sharding",
    "wrong order | wrong exchange | permutation",
    "exchange",
    collective({"reduce_scatter_tensor"}, ("reduction",)),
    exchange(lambda got, p, r, i: [*got[1:], got[0]]),
    whole=True,
)
add(
    "state of another weight",
    "sharding",
    "wrong tensor | zero | permutation | scale",
    "given",
    optimizer(step=1),
    argument(3, lambda x, ins, e, k, r: np.roll(x.reshape(-1), 1).reshape(x.shape)),
    steps=2,
)
