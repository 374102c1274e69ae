"""Every operator of ``operators/``: how arguments are drawn, and programs that compute it correctly."""

from telechat_moe.tools.align.bounds_specs import (  # noqa: F401 (each registers its operators)
    elementwise,
    indices,
    losses,
    moves,
    products,
    reductions,
    updates,
)
from telechat_moe.tools.align.bounds_specs.table import SPECS as SPECS
