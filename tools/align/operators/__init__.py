"""What operators compute: float64 formulas, written from the definitions, never from a kernel of ours.

``registry.py`` finds the formula of a dumped call by its name; importing this package fills it.
"""

from telechat_moe.tools.align.operators import (
    elementwise,
    fused,
    indexing,
    linear,
    ms_custom,
    ms_primitives,
    optimizers,
    reductions,
    shapes,
)
from telechat_moe.tools.align.operators.registry import Arguments, Formula, find

__all__ = [
    "Arguments",
    "Formula",
    "elementwise",
    "find",
    "fused",
    "indexing",
    "linear",
    "ms_custom",
    "ms_primitives",
    "optimizers",
    "reductions",
    "shapes",
]
