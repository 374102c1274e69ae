"""Sums of gradients in a fixed order: micro-batch by micro-batch, and of one micro-batch use by use."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]
Arrays = list[Array]
Named = dict[str, Array]
Uses = dict[int, Array]
"""The gradient of a weight by each of its uses, numbered in the model's order."""


@dataclass
class InOrder:
    """Gradients, summed in the order of the micro-batches whatever the order in which they come.

    Attributes:
        sums: Sums for the weights that only one chunk on one stage uses.
        apart: Gradients of all others, by weight, micro-batch and use; the process that has all of them sums.
    """

    sums: Named = field(default_factory=dict)
    apart: dict[str, dict[int, Uses]] = field(default_factory=lambda: defaultdict(dict))
    _next: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _early: dict[str, dict[int, Array]] = field(default_factory=lambda: defaultdict(dict))

    def add(self, name: str, micro: int, uses: Uses, *, alone: bool) -> None:
        """Add the gradients of a weight's uses for a micro-batch."""
        if not alone:
            self.apart[name][micro] = uses
            return
        self._early[name][micro] = in_order(uses)
        while (gradient := self._early[name].pop(self._next[name], None)) is not None:
            self._next[name] += 1
            before = self.sums.get(name)
            self.sums[name] = gradient if before is None else before + gradient


def in_order(uses: Uses) -> Array:
    """Return the sum in fp32, use by use from the first."""
    total, *rest = (uses[k] for k in sorted(uses))
    for term in rest:
        total = total + term
    return total
