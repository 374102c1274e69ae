"""Sums in one order for every layout, so that runs are equal to the last bit or one of them is wrong.

Terms have a number of their own in the whole tensor (token, hidden unit, class), and are added in the binary tree over
these numbers: neighbours first, then pairs of neighbours; a node without a sibling moves up. A rank adds up the nodes
that it has all terms of; what is left is exchanged and added in the same tree. So the result depends neither on how many
ranks there are nor on which of them holds what. Arithmetic is that of the arrays' type; nothing is widened.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Piece = tuple[Array, Any]
"""Terms along the first axis, and their numbers in the whole."""

Nodes = list[tuple[Array, Array]]
"""For each level of the tree the numbers of nodes and their values."""


def nodes(terms: Array, numbers: Any, count: int) -> Nodes:
    """Add up what one rank can: the sums of all nodes whose terms it has.

    Args:
        terms: Along the first axis.
        numbers: Of each term, in the whole sum; any order.
        count: Terms of the whole sum, on all ranks.

    Raises:
        ValueError: A number is there twice or not in the sum.
    """
    index = np.asarray(numbers, np.int64).reshape(-1)
    if len(index) != len(terms):
        raise ValueError(f"{len(terms)} terms have {len(index)} numbers")
    order = np.argsort(index, kind="stable")
    _check(index[order], count)
    return _up([(index[order], np.ascontiguousarray(terms[order]))], count)


def total(parts: Iterable[Nodes], count: int) -> Array:
    """Add up the nodes of all ranks.

    Raises:
        ValueError: A term is missing or there twice.
    """
    pending: list[list[tuple[Array, Array]]] = []
    for part in parts:
        for level, entry in enumerate(part):
            while len(pending) <= level:
                pending.append([])
            if len(entry[0]):
                pending[level].append(entry)
    joined: Nodes = []
    for entries in pending:
        if not entries:
            joined.append((np.zeros(0, np.int64), np.zeros(0)))
            continue
        index = np.concatenate([i for i, _ in entries])
        order = np.argsort(index, kind="stable")
        joined.append((index[order], np.concatenate([v for _, v in entries])[order]))
    left = _up(joined, count)
    if sum(len(i) for i, _ in left) != 1 or len(left[-1][0]) != 1 or left[-1][0][0] != 0:
        raise ValueError(f"terms are missing or there twice: the tree over {count} has no root")
    return left[-1][1][0]


def ordered_sum(pieces: Sequence[Piece], count: int) -> Array:
    """Return the sum of all terms of all ranks, see the module."""
    return total([nodes(terms, numbers, count) for terms, numbers in pieces], count)


def ordered_product(pieces: Sequence[tuple[Array, Array, Any]], count: int) -> Array:
    """Return a matrix product ``[m, k] @ [k, n]`` whose inner dimension may lie on several ranks.

    Args:
        pieces: Columns of the left and rows of the right factor, and their numbers in the inner dimension.
        count: Length of the inner dimension.
    """
    return ordered_sum([(_terms(a, b), numbers) for a, b, numbers in pieces], count)


def _terms(a: Array, b: Array) -> Array:
    return a.T[:, :, None] * b[:, None, :]


def _check(index: Array, count: int) -> None:
    if len(index) and (index[0] < 0 or index[-1] >= count):
        raise ValueError(f"terms are numbered {index[0]} to {index[-1]} in a sum of {count}")
    if np.any(np.diff(index) == 0):
        raise ValueError(f"term {index[:-1][np.diff(index) == 0][0]} is there twice")


def _up(levels: Nodes, count: int) -> Nodes:
    """Add neighbours, level by level; return what has no sibling here."""
    left: Nodes = []
    carried: tuple[Array, Array] | None = None
    level = 0
    while True:
        index, values = levels[level] if level < len(levels) else (np.zeros(0, np.int64), None)
        if carried is not None and len(carried[0]):
            if values is None or not len(index):
                index, values = carried
            else:
                index = np.concatenate([index, carried[0]])
                values = np.concatenate([values, carried[1]])
                order = np.argsort(index, kind="stable")
                index, values = index[order], values[order]
                _check(index, count)
        width = -(-count // 2**level)
        if width <= 1:
            left.append((index, values if values is not None else np.zeros(0)))
            return left
        carried, rest = _pairs(index, values, width)
        left.append(rest)
        level += 1


def _pairs(
    index: Array, values: Any, width: int
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Return the nodes one level up, and those that wait for a sibling."""
    if not len(index):
        return (index, np.zeros(0)), (index, np.zeros(0))
    first = np.zeros(len(index), bool)
    first[:-1] = (index[:-1] % 2 == 0) & (index[1:] == index[:-1] + 1)
    second = np.roll(first, 1)
    alone = (index == width - 1) & (width % 2 == 1)  # no sibling anywhere: moves up as it is
    wait = ~(first | second | alone)
    added = values[first] + values[second]
    up = np.concatenate([index[first], index[alone]]) // 2
    return (up, np.concatenate([added, values[alone]])), (index[wait], values[wait])


@dataclass(frozen=True)
class Difference:
    """Where two runs first differ by a bit.

    Attributes:
        step: Step, from 0.
        tensor: Name.
        element: Index of the first element that differs.
        reference: Its value in the run that is believed.
        target: In the other one.
        count: How many elements of this tensor differ.
        missing: Why there is nothing to compare; empty: values differ.
    """

    step: int
    tensor: str
    element: tuple[int, ...] = ()
    reference: float = 0.0
    target: float = 0.0
    count: int = 0
    missing: str = ""

    def __str__(self) -> str:
        """Say it in one sentence."""
        if self.missing:
            return f"step {self.step}, {self.tensor}: {self.missing}"
        return (
            f"step {self.step}, {self.tensor}: {self.count} elements differ, the first at {list(self.element)}: "
            f"{self.target!r}, expected {self.reference!r}"
        )


def first_difference(
    reference: Iterable[Mapping[str, Array]], target: Iterable[Mapping[str, Array]]
) -> Difference | None:
    """Return where two runs first differ, in the order of steps and tensors; None: all bytes are equal.

    Args:
        reference: For each step the tensors by name, in the order in which they are made.
        target: Likewise.
    """
    ours, theirs = list(target), list(reference)
    for step, expected in enumerate(theirs):
        if step >= len(ours):
            return Difference(step, "-", missing=f"the run ended after {len(ours)} steps")
        for name, value in expected.items():
            difference = _differs(step, name, value, ours[step].get(name))
            if difference is not None:
                return difference
        for name in ours[step]:
            if name not in expected:
                return Difference(step, name, missing="the reference has no such tensor")
    if len(ours) > len(theirs):
        return Difference(
            len(theirs), "-", missing=f"the reference ended after {len(theirs)} steps"
        )
    return None


def _differs(step: int, name: str, value: Array, found: Array | None) -> Difference | None:
    if found is None:
        return Difference(step, name, missing="the run has no such tensor")
    if found.shape != value.shape or found.dtype != value.dtype:
        said = f"{found.dtype}{list(found.shape)}, expected {value.dtype}{list(value.shape)}"
        return Difference(step, name, missing=said)
    if value.tobytes() == found.tobytes():
        return None
    size = value.dtype.itemsize
    bytes_ = [np.frombuffer(x.tobytes(), np.uint8).reshape(-1, size) for x in (value, found)]
    wrong = np.any(bytes_[0] != bytes_[1], axis=1)
    at = tuple(int(i) for i in np.unravel_index(int(np.argmax(wrong)), value.shape))
    return Difference(step, name, at, float(value[at]), float(found[at]), int(wrong.sum()))
