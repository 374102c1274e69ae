"""Faults of collectives."""

from typing import Any

import numpy as np

from benchmarks.align_faults.classes.common import (
    add,
)
from benchmarks.align_faults.classes.reduction import (
    all_kept,
    other_group,
    times,
)
from benchmarks.align_faults.faults import (
    both,
    collective,
    copy_row,
    exchange,
    other,
    roll,
    rows,
    zero_rows,
)
from benchmarks.align_faults.kernels import (
    Array,
    rounded,
)

SHARE = {"all_reduce", "reduce_scatter_tensor"}
HERE = ("forward", "backward")
add(
    "sum left out",
    "collectives",
    "missing reduction",
    "exchange",
    collective(SHARE, HERE),
    exchange(all_kept),
    whole=True,
)
add(
    "summed twice",
    "collectives",
    "doubled reduction",
    "exchange",
    collective(SHARE, HERE),
    exchange(times(lambda n: n)),
    whole=True,
)
add(
    "over another group",
    "collectives",
    "wrong group | missing reduction",
    "exchange",
    collective(SHARE, HERE),
    exchange(other_group),
    whole=True,
)


def mixed(got: list[Array], parts: list[Array], r: Any, info: Any) -> list[Array]:
    """Give every rank the shards in another order."""
    order = np.roll(np.arange(len(parts)), 1)
    return info["make"](
        [parts[i] for i in order],
        [info["given"][i] for i in order],
        info["engine"].numerics,
        info["x"].dtype,
    )


def _on_one(function: Any) -> Any:
    def change(got: list[Array], parts: list[Array], r: Any, info: Any) -> list[Array]:
        able = [i for i, g in enumerate(got) if len(g) > 1]
        i = int(r.choice(able)) if able else 0
        kind = info["x"].dtype
        got[i] = rounded(np.asarray(function(got[i], r), np.float32), kind)
        return got

    return change


GATHER = {"all_gather_into_tensor"}
EVERY = {"all_gather_into_tensor", "all_to_all_single", "reduce_scatter_tensor", "all_reduce"}
add(
    "gathered in another order",
    "collectives",
    "permutation | wrong order",
    "exchange",
    collective(GATHER, HERE),
    exchange(mixed),
    whole=True,
)
add(
    "pieces scattered to other ranks",
    "collectives",
    "wrong order | wrong exchange | permutation",
    "exchange",
    collective({"reduce_scatter_tensor"}, HERE),
    exchange(lambda got, p, r, i: [*got[1:], got[0]]),
    whole=True,
)
add(
    "tokens of two ranks exchanged",
    "collectives",
    "permutation",
    "exchange",
    both(collective({"all_to_all_single"}, HERE, 32), rows(2)),
    exchange(_on_one(roll)),
)
add(
    "message partly lost",
    "collectives",
    "dropped",
    "exchange",
    both(collective(EVERY, HERE), rows(2)),
    exchange(_on_one(zero_rows)),
)
add(
    "message partly repeated",
    "collectives",
    "duplicated",
    "exchange",
    both(collective(EVERY, HERE), rows(2)),
    exchange(_on_one(copy_row)),
)
add(
    "message scaled",
    "collectives",
    "scale | doubled reduction",
    "exchange",
    collective(EVERY, HERE),
    exchange(_on_one(lambda g, r: 3 * g)),
)
add(
    "message empty",
    "collectives",
    "zero",
    "exchange",
    collective(EVERY, HERE),
    exchange(_on_one(lambda g, r: 0 * g)),
)
add(
    "handed another tensor to send",
    "collectives",
    "wrong tensor | permutation | scale",
    "send",
    collective(EVERY, HERE, 32),
    lambda r: (
        lambda parts, e, group: [
            np.roll(parts[0].reshape(-1), 1).reshape(parts[0].shape),
            *parts[1:],
        ]
    ),
)
RECV = lambda s: s.op == "recv"  # noqa: E731
add(
    "received rolled",
    "collectives",
    "permutation",
    "exchange",
    RECV,
    lambda r: lambda p, *_: [roll(p[0], r)],
)
add(
    "received zeros",
    "collectives",
    "zero",
    "exchange",
    RECV,
    lambda r: lambda p, *_: [np.zeros_like(p[0])],
)
add(
    "received another micro-batch",
    "collectives",
    "wrong tensor | permutation",
    "exchange",
    RECV,
    lambda r: lambda p, e, ranks: [other(p[0], p, e, ranks[0], r)],
)
