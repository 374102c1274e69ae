"""Faults of the reduction of gradients."""

from typing import Any

import numpy as np

from benchmarks.align_faults.classes.common import (
    add,
)
from benchmarks.align_faults.faults import (
    SUMS,
    at_one,
    collective,
    exchange,
)
from benchmarks.align_faults.kernels import (
    Array,
    rounded,
)

GRADS = collective(SUMS, ("reduction",))


def _rank(got: list[Array], r: Any) -> int:
    return int(r.integers(len(got)))


def _kept(got: list[Array], parts: list[Array], r: Any, info: Any) -> list[Array]:
    i = _rank(got, r)
    n = len(parts)
    own = parts[i] if got[i].shape == parts[i].shape else np.split(parts[i], n, 0)[i]
    return [own.copy() if j == i else g for j, g in enumerate(got)]


def all_kept(got: list[Array], parts: list[Array], r: Any, info: Any) -> list[Array]:
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
    i = _rank(got, r)
    return info["make"](
        [np.zeros_like(p) if j == i else p for j, p in enumerate(parts)],
        info["given"],
        info["engine"].numerics,
        info["x"].dtype,
    )


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
    return info["make"](values, info["given"], info["engine"].numerics, x.dtype)


def _largest(got: list[Array], parts: list[Array], r: Any, info: Any) -> list[Array]:
    most = np.max(parts, 0)
    return info["make"](
        [most, *[np.zeros_like(most)] * (len(parts) - 1)],
        info["given"],
        info["engine"].numerics,
        info["x"].dtype,
    )


_FIRST = {"whole": True}
add(
    "gradient not reduced",
    "reduction",
    "missing reduction",
    "exchange",
    GRADS,
    exchange(all_kept),
    whole=True,
)
add(
    "one rank's gradient not reduced",
    "reduction",
    "missing reduction",
    "exchange",
    GRADS,
    exchange(_kept),
)
add(
    "gradient reduced twice",
    "reduction",
    "doubled reduction",
    "exchange",
    GRADS,
    exchange(times(lambda n: n)),
    whole=True,
)
add(
    "mean for sum",
    "reduction",
    "scale | wrong reduction",
    "exchange",
    GRADS,
    exchange(times(lambda n: 1 / n)),
    whole=True,
)
add(
    "gradient over another group",
    "reduction",
    "wrong group | missing reduction",
    "exchange",
    GRADS,
    exchange(other_group),
    whole=True,
)
add(
    "a rank left out of a sum",
    "reduction",
    "wrong group | missing reduction",
    "exchange",
    GRADS,
    exchange(_left_out),
    whole=True,
)
add(
    "largest for sum",
    "reduction",
    "wrong reduction",
    "exchange",
    GRADS,
    exchange(_largest),
    whole=True,
)
add(
    "one element of a reduced gradient",
    "reduction",
    "single element",
    "exchange",
    GRADS,
    exchange(
        lambda got, p, r, i: [
            at_one(g, r, lambda v: 2 * v) if j == 0 else g for j, g in enumerate(got)
        ]
    ),
)
add(
    "gradient handed over doubled",
    "reduction",
    "scale",
    "send",
    collective(SUMS, ("reduction",), 16),
    lambda r: lambda parts, *_: [2 * parts[0], *parts[1:]],
)
add(
    "expert gradients doubled",
    "reduction",
    "doubled reduction | scale",
    "exchange",
    lambda s: GRADS(s) and len(s.shape) == 3,
    exchange(times(lambda n: n)),
    whole=True,
)
