"""Which expert-parallel degrees fit the other degrees of a layout.

Experts take the innermost devices first: each degree is used up before the next. Whole experts spread over tensor, then
context, then data parallelism, ``(tp, cp, dp)``; experts that tensor parallelism shards spread over ``(dp,)``.
"""

import math
from collections.abc import Sequence


def expert_shares(ep: int, degrees: Sequence[int]) -> list[int] | None:
    """Return over how many devices of each degree the experts spread; None: ``ep`` does not fit.

    Args:
        ep: Expert parallelism.
        degrees: Degrees of the devices, the innermost first.
    """
    shares: list[int] = []
    for degree in degrees:
        shares.append(math.gcd(ep, degree))
        ep //= shares[-1]
        if ep > 1 and shares[-1] != degree:
            return None
    return shares if ep == 1 else None


def expert_degrees(degrees: Sequence[int]) -> list[int]:
    """Return every expert parallelism that fits, in rising order.

    Args:
        degrees: Degrees of the devices, the innermost first.
    """
    found, inner = {1}, 1
    for degree in degrees:
        found |= {inner * d for d in range(1, degree + 1) if degree % d == 0}
        inner *= degree
    return sorted(found)
