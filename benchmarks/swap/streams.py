"""How long a step waits for copies of activations: measured, and predicted from sizes, a bandwidth and computation."""

from collections.abc import Sequence

from benchmarks.ranks import Transfer


def measured(copies: Sequence[Transfer]) -> float:
    """Return the seconds that a step waited."""
    return sum(copy.goes_on - copy.waits for copy in copies)


def predicted(copies: Sequence[Transfer], seconds_per_byte: float) -> float:
    """Return the seconds that a step will wait, with the computation between starts and waits of a step on another link.

    Each direction takes copies one after the other; what that step waited is left out.
    """
    events = [(copy.started, False, copy) for copy in copies]
    events += [(copy.waits, True, copy) for copy in copies]
    now = stall = 0.0
    computed = min((at for at, *_ in events), default=0.0)
    free, done = {False: 0.0, True: 0.0}, dict[int, float]()
    for at, waits, copy in sorted(events, key=lambda event: event[0]):
        now += at - computed
        computed = copy.goes_on if waits else at
        back = bool(copy.tag % 2)
        if not waits:
            free[back] = max(free[back], now) + copy.bytes * seconds_per_byte
            done[copy.tag] = free[back]
        elif done[copy.tag] > now:
            stall += done[copy.tag] - now
            now = done[copy.tag]
    return stall
