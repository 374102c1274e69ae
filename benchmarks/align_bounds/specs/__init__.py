"""Every operator of ``operators/``: how arguments are drawn, and programs that compute it correctly."""

from benchmarks.align_bounds.specs import (
    elementwise,
    indices,
    losses,
    moves,
    products,
    reductions,
    updates,
)
from benchmarks.align_bounds.specs.table import SPECS

__all__ = [
    "SPECS",
    "elementwise",
    "indices",
    "losses",
    "moves",
    "products",
    "reductions",
    "updates",
]
