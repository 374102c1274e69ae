"""Infer the layout of shards from their shapes: every layout that fits is tried, and their copies decide.

Values of a reference never decide: a layout chosen because it resembles the reference would explain faults away.
"""

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from telechat_moe.tools.align.dump.logical import CopiesDifferError, Shard, logical
from telechat_moe.tools.align.dump.ranges import LayoutError, ShardKey, describe, locate
from telechat_moe.tools.align.dump.records import TensorLayout

MOST = 4096
"""The most candidates that are tried."""


@dataclass(frozen=True)
class LayoutCandidate:
    """A layout that fits the shapes."""

    layout: TensorLayout
    copies: int = 0  # number of shards that could be compared with a copy
    problem: str | None = None  # why it is rejected; None: it is not
    digest: str = ""  # digest of the merged tensor


@dataclass(frozen=True)
class InferredLayout:
    """The result of inferring a layout."""

    # The layout; None: it cannot be inferred, and the tensor is not comparable
    layout: TensorLayout | None
    reason: str  # how it was decided, or why it was not
    candidates: tuple[LayoutCandidate, ...]  # all that fit the shapes


def infer(shards: Sequence[Shard], shape: Sequence[int]) -> InferredLayout:
    """Infer the layout of the shards of a tensor whose shape is known.

    Args:
        shards: What the ranks hold; the mesh, of which every nesting is tried, lists the ranks in ascending order.

    Raises:
        LayoutError: Shards are missing or differ in shape, or there are too many candidates.
        BadInputError: Values were not dumped or cannot be read.
    """
    ranks = tuple(sorted(p.rank for p in shards))
    shapes = {p.values.shape for p in shards}
    if len(shapes) != 1:
        raise LayoutError(
            f"shards of {len(shapes)} different shapes; a layout with unequal shards must be given"
        )
    local = next(iter(shapes))
    if len(local) != len(shape) or any(a < 1 or n % a for n, a in zip(shape, local, strict=False)):
        reason = f"shards {list(local)} do not divide the tensor {list(shape)}"
        return InferredLayout(None, reason, ())
    ratios = [n // a for n, a in zip(shape, local, strict=True)]
    layouts = _distinct(_candidates(ratios, ranks), local)
    tried = tuple(_tried(shards, layout, tuple(shape)) for layout in layouts)
    return _decided(tried, ratios, len(ranks))


def _decided(
    tried: tuple[LayoutCandidate, ...], ratios: Sequence[int], ranks: int
) -> InferredLayout:
    good = [c for c in tried if c.problem is None]
    tensors = {c.digest for c in good}
    if not tried:
        cuts = " x ".join(map(str, ratios))
        reason = f"no mesh of {ranks} ranks shards the dimensions into {cuts}"
    elif not good:
        reason = f"copies differ in each of {len(tried)} layouts: {tried[0].problem}"
    elif len(tensors) > 1:
        names = "; ".join(describe(c.layout) for c in good[:4])
        reason = f"{len(good)} layouts fit and give different tensors: {names}"
    elif len(tried) == 1:
        agree = ", and copies agree" if good[0].copies else ""
        reason = f"the only layout that fits the shapes{agree}"
    elif len(good) == 1:
        reason = f"copies agree in this one of {len(tried)} layouts that fit the shapes"
    else:
        reason = f"all {len(good)} layouts whose copies agree give the same tensor"
    return InferredLayout(good[0].layout if len(tensors) == 1 else None, reason, tried)


def _tried(
    shards: Sequence[Shard], layout: TensorLayout, shape: tuple[int, ...]
) -> LayoutCandidate:
    tensor = logical(shards, layout, shape)
    digest = hashlib.blake2b(digest_size=16)
    try:
        for _, block in tensor.blocks():
            digest.update(np.ascontiguousarray(block).data)
    except CopiesDifferError as error:
        return LayoutCandidate(layout, len(error.copies.compared), str(error))
    return LayoutCandidate(layout, len(tensor.copies.compared), None, digest.hexdigest())


def _distinct(layouts: Iterator[TensorLayout], local: tuple[int, ...]) -> Iterator[TensorLayout]:
    """Leave out layouts that locate every shard where an earlier one does."""
    distinct: set[object] = set()
    for layout in layouts:
        shapes = {ShardKey(rank): local for rank in layout.ranks}
        places = tuple(locate(layout, shapes).places.items())
        if places not in distinct:
            distinct.add(places)
            if len(distinct) > MOST:
                raise LayoutError(f"more than {MOST} layouts fit the shapes")
            yield layout


def _candidates(ratios: Sequence[int], ranks: tuple[int, ...]) -> Iterator[TensorLayout]:
    primes = _primes(len(ranks))
    for order in sorted(set(itertools.permutations(primes))):
        axes = tuple((f"axis{i}", n) for i, n in enumerate(order))
        yield from _roles(ratios, ranks, axes)


def _roles(
    ratios: Sequence[int], ranks: tuple[int, ...], axes: tuple[tuple[str, int], ...]
) -> Iterator[TensorLayout]:
    """Yield layouts in which each axis shards a dimension or holds copies."""
    cut = [d for d, n in enumerate(ratios) if n > 1]
    sizes = dict(axes)
    for roles in itertools.product([-1, *cut], repeat=len(axes)):
        dims = [
            tuple(a for (a, n), r in zip(axes, roles, strict=True) if r == d and n > 1)
            for d in range(len(ratios))
        ]
        if any(math.prod(sizes[a] for a in dim) != n for dim, n in zip(dims, ratios, strict=True)):
            continue
        yield TensorLayout(tuple(sizes.values()), tuple(sizes), ranks, tuple(dims))


def _primes(n: int) -> list[int]:
    primes: list[int] = []
    p = 2
    while n > 1:
        while n % p == 0:
            primes.append(p)
            n //= p
        p += 1
    return primes
