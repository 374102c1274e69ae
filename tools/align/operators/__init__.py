"""What operators compute: float64 formulas, written from the definitions, never from a kernel of ours.

``registry.py`` finds the formula of a dumped call by its name; importing this package fills it.
"""

from telechat_moe.tools.align.operators import (
    attention,
    fused,
    indexing,
    linear,
    ms_custom,
    ms_primitives,
    optimizers,
)
from telechat_moe.tools.align.operators.registry import Arguments, Formula, find

_FILLING = (attention, fused, indexing, linear, ms_custom, ms_primitives, optimizers)
"""The modules that import all others."""

__all__ = ["Arguments", "Formula", "find"]
