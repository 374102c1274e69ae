"""Faults between ranks: the reduction of gradients, other collectives, sharding."""

from typing import Any

import numpy as np

from benchmarks.align_faults.faults import (
    EVERY,
    SUMS,
    Draw,
    adding,
    always,
    at_one,
    both,
    collective,
    copy_row,
    exchange,
    first_only,
    forward,
    given,
    hidden,
    optimizer,
    other,
    roll,
    rows,
    zero_rows,
)
from benchmarks.align_faults.kernels import Array, rounded

# ------------------------------------------------------------------ reduction

add = adding("reduction")
GRADS = collective(SUMS, ("reduction",))


def _kept(got: list[Array], parts: list[Array], r: Any, info: Any) -> list[Array]:
    i = int(r.integers(len(got)))
    return [
        own if j == i else g
        for j, (own, g) in enumerate(zip(all_kept(got, parts), got, strict=True))
    ]


def all_kept(got: list[Array], parts: list[Array], *_: Any) -> list[Array]:
    """Let every rank keep its own gradient."""
    n = len(parts)
    return [
        (p if g.shape == p.shape else np.split(p, n, 0)[i]).copy()
        for i, (g, p) in enumerate(zip(got, parts, strict=True))
    ]


def times(factor: Any) -> Any:
    """Multiply the result by a factor that depends on the number of ranks."""

    def change(got: list[Array], parts: list[Array], r: Any, info: Any) -> list[Array]:
        kind = info["x"].dtype
        k = factor(len(got))
        return [rounded(np.float32(k) * g, kind) for g in got]

    return change


def _left_out(got: list[Array], parts: list[Array], r: Any, info: Any) -> list[Array]:
    i = int(r.integers(len(got)))
    return info["make"]([np.zeros_like(p) if j == i else p for j, p in enumerate(parts)])


def other_group(got: list[Array], parts: list[Array], r: Any, info: Any) -> list[Array]:
    """Reduce over other ranks: ranks outside the group with the same shape, else only some of the group."""
    x, group = info["x"], info["group"]
    outside = [k for k in x.values if k not in group and x.values[k].shape == parts[0].shape]
    if outside:
        most = min(len(outside), len(group) - 1)
        chosen = [group[0], *list(r.permutation(outside))[:most]]
    else:
        chosen = group[: max(1, len(group) // 2)]
    values = [x.values[k] for k in chosen]
    if len(values) < len(group):
        values += [np.zeros_like(parts[0])] * (len(group) - len(values))
    return info["make"](values)


def _largest(got: list[Array], parts: list[Array], r: Any, info: Any) -> list[Array]:
    most = np.max(parts, 0)
    return info["make"]([most, *[np.zeros_like(most)] * (len(parts) - 1)])


add("gradient not reduced", "missing reduction", GRADS, exchange(all_kept))
add("one rank's gradient not reduced", "missing reduction", GRADS, exchange(_kept))
add("gradient reduced twice", "doubled reduction", GRADS, exchange(times(lambda n: n)))
add("mean for sum", "scale | wrong reduction", GRADS, exchange(times(lambda n: 1 / n)))
add("gradient over another group", "wrong group | missing reduction", GRADS, exchange(other_group))
add("a rank left out of a sum", "wrong group | missing reduction", GRADS, exchange(_left_out))
add("largest for sum", "wrong reduction", GRADS, exchange(_largest))
add(
    "one element of a reduced gradient",
    "single element",
    GRADS,
    exchange(first_only(lambda g, r: at_one(g, r, lambda v: 2 * v))),
)
add(
    "gradient handed over doubled",
    "scale",
    collective(SUMS, ("reduction",), 16),
    always("send", lambda parts, *_: [2 * parts[0], *parts[1:]]),
)
add(
    "expert gradients doubled",
    "doubled reduction | scale",
    lambda s: GRADS(s) and len(s.shape) == 3,
    exchange(times(lambda n: n)),
)

# ------------------------------------------------------------------ collectives

add = adding("collectives")
HERE = ("forward", "backward")
add("sum left out", "missing reduction", collective(SUMS, HERE), exchange(all_kept))
add("summed twice", "doubled reduction", collective(SUMS, HERE), exchange(times(lambda n: n)))
add(
    "over another group",
    "wrong group | missing reduction",
    collective(SUMS, HERE),
    exchange(other_group),
)


def mixed(got: list[Array], parts: list[Array], r: Any, info: Any) -> list[Array]:
    """Give every rank the shards in another order."""
    order = np.roll(np.arange(len(parts)), 1)
    return info["make"]([parts[i] for i in order], [info["given"][i] for i in order])


def _on_one(function: Any) -> Any:
    def change(got: list[Array], parts: list[Array], r: Any, info: Any) -> list[Array]:
        able = [i for i, g in enumerate(got) if len(g) > 1]
        i = int(r.choice(able)) if able else 0
        kind = info["x"].dtype
        got[i] = rounded(np.asarray(function(got[i], r), np.float32), kind)
        return got

    return change


GATHER = {"all_gather_into_tensor"}
add(
    "gathered in another order",
    "permutation | wrong order",
    collective(GATHER, HERE),
    exchange(mixed),
)
add(
    "pieces scattered to other ranks",
    "wrong order | wrong exchange | permutation",
    collective({"reduce_scatter_tensor"}, HERE),
    exchange(lambda got, *_: [*got[1:], got[0]]),
)
add(
    "tokens of two ranks exchanged",
    "permutation",
    both(collective({"all_to_all_single"}, HERE, 32), rows(2)),
    exchange(_on_one(roll)),
)
add(
    "message partly lost",
    "dropped",
    both(collective(EVERY, HERE), rows(2)),
    exchange(_on_one(zero_rows)),
)
add(
    "message partly repeated",
    "duplicated",
    both(collective(EVERY, HERE), rows(2)),
    exchange(_on_one(copy_row)),
)
add(
    "message scaled",
    "scale | doubled reduction",
    collective(EVERY, HERE),
    exchange(_on_one(lambda g, r: 3 * g)),
)
add("message empty", "zero", collective(EVERY, HERE), exchange(_on_one(lambda g, r: 0 * g)))
add(
    "handed another tensor to send",
    "wrong tensor | permutation | scale",
    collective(EVERY, HERE, 32),
    always(
        "send",
        lambda parts, e, group: [
            np.roll(parts[0].reshape(-1), 1).reshape(parts[0].shape),
            *parts[1:],
        ],
    ),
)
RECV = lambda s: s.op == "recv"  # noqa: E731
add(
    "received rolled",
    "permutation",
    RECV,
    Draw("exchange", lambda r: lambda p, *_: [roll(p[0], r)]),
)
add("received zeros", "zero", RECV, always("exchange", lambda p, *_: [np.zeros_like(p[0])]))
add(
    "received another micro-batch",
    "wrong tensor | permutation",
    RECV,
    Draw("exchange", lambda r: lambda p, e, ranks: [other(p[0], r, e, ranks[0])]),
)

# ------------------------------------------------------------------ sharding

add = adding("sharding")


def _of_other_rank(x: Array, r: Any, e: Any, rank: int) -> Array:
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
    "wrong tensor | wrong shard | permutation",
    CUT,
    given(1, _of_other_rank),
)
add(
    "piece read of another rank",
    "wrong tensor | wrong shard | permutation | expert swap",
    CUT,
    hidden(1, _of_other_rank),
)
add(
    "pieces of a weight in another order",
    "permutation",
    CUT,
    given(1, lambda w, *_: np.roll(w, w.shape[0] // 2 or 1, 0)),
)
add(
    "copies of a weight differ",
    "scale | part | single element",
    forward({"rms_norm", "linear"}, step=0),
    given(1, lambda w, r, *_: at_one(w, r, lambda v: 1.5 * v)),
)
add(
    "gathered weight in another order",
    "permutation | wrong order",
    collective(GATHER, ("optimizer",)),
    exchange(mixed),
)
add(
    "piece of a reduced gradient of another rank",
    "wrong order | wrong exchange | permutation",
    collective({"reduce_scatter_tensor"}, ("reduction",)),
    exchange(lambda got, *_: [*got[1:], got[0]]),
)
add(
    "state of another weight",
    "wrong tensor | zero | permutation | scale",
    optimizer(step=1),
    given(3, lambda x, *_: np.roll(x.reshape(-1), 1).reshape(x.shape)),
    steps=2,
)
