"""Sizes that follow from choices: how many rows ranks exchange, where a program is followed with other choices.

A dump gives such sizes as plain numbers, so a call's sizes are found by value: integers that an earlier call of the rank
made, or sums of groups of them (counts of experts, added up for each rank).
"""

from collections.abc import Sequence
from dataclasses import replace

from telechat_moe.tools.align.dump.records import Call, Scalar, Value
from telechat_moe.tools.align.narrowing import is_list
from telechat_moe.tools.align.operators.approx import Array

Numbers = tuple[int, ...]

_COUNTS = 4096  # the most integers that a program may use as sizes


class Sizes:
    """The integers that the calls of a rank made in its dump, and what they make of other choices."""

    def __init__(self) -> None:
        self.differ = False
        self._here: dict[Numbers, set[Numbers]] = {}

    def keep(self, dumped: Array, here: Array) -> None:
        """Keep a tensor of integers of the dump, and as it is with other choices."""
        if 1 < here.size <= _COUNTS:
            one, other = (tuple(x.reshape(-1).tolist()) for x in (dumped, here))
            self._here.setdefault(one, set()).add(other)
            self.differ |= one != other

    def resized(self, call: Call) -> Call:
        """Return a call with its lists of sizes as they follow from the choices.

        Raises:
            ValueError: The dump does not tell which sizes they are.
        """
        kwargs = {name: self._sized(value) for name, value in call.kwargs.items()}
        return replace(call, inputs=[self._sized(v) for v in call.inputs], kwargs=kwargs)

    def _sized(self, value: Value) -> Value:
        own: object = value.value if isinstance(value, Scalar) else value
        items = own if is_list(own) else []
        numbers = [v.value if isinstance(v, Scalar) else v for v in items]
        if len(numbers) < 2 or not all(type(n) is int for n in numbers):
            return value
        known = self._here.get(tuple(numbers), set())
        if len(known) > 1:
            raise ValueError("sizes that follow from other choices")
        for sizes in known:
            if isinstance(value, Scalar):
                return replace(value, value=[*sizes])
            return [Scalar("int", n) for n in sizes]
        return value

    def options(self, numbers: Sequence[int], rows: int | None = None) -> set[Numbers]:
        """Return what the numbers of rows to or from each rank may be here; in all as many as ``rows``."""
        n = len(numbers)
        found = {
            _summed(new, n)
            for dumped, news in self._here.items()
            for new in (news if _summed(dumped, n) == tuple(numbers) else ())
        } or {tuple(numbers)}
        return {sizes for sizes in found if rows is None or sum(sizes) == rows}


def agreed(sent: Sequence[set[Numbers]], received: Sequence[set[Numbers]]) -> list[Numbers]:
    """Return the rows that each rank sends to each, of what all ranks may send and may receive.

    Args:
        received: Empty for a rank that does not say.

    Raises:
        ValueError: Several are possible, or none.
    """
    left = -1
    while left != (left := sum(map(len, (*sent, *received)))):
        sent = [
            {
                s
                for s in own
                if all(any(r[i] == s[j] for r in to) for j, to in enumerate(received) if to)
            }
            for i, own in enumerate(sent)
        ]
        received = [
            {r for r in own if all(any(s[j] == r[i] for s in by) for i, by in enumerate(sent))}
            for j, own in enumerate(received)
        ]
    if any(len(own) != 1 for own in sent):
        raise ValueError("sizes that follow from other choices")
    return [next(iter(own)) for own in sent]


def _summed(numbers: Numbers, groups: int) -> Numbers:
    """Return the sums of as many groups of numbers; nothing where they cannot be divided."""
    each = len(numbers) // groups if groups else 0
    starts = range(0, len(numbers), each) if each * groups == len(numbers) else ()
    return tuple(sum(numbers[i : i + each]) for i in starts)
