"""Round numbers on the axes of our pages."""

import math


def round_step(span: float, most: int) -> float:
    """Return 1, 2 or 5 times a power of ten: the distance of at most about `most` ticks over a span above 0."""
    rough = span / most
    power = 10.0 ** math.floor(math.log10(rough))
    return power * min((s for s in (1, 2, 5, 10) if s * power >= rough), default=10)
