"""A cause of lost time, as the judge names it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A cause of lost time.

    Attributes:
        kinds: What it is; several: the records cannot tell these apart.
        scope: ``rank``, ``host`` (all ranks of it), ``link`` or ``run`` (all ranks alike).
        ranks: Ranks to blame; of a link that joins a group all that it may be.
        host: Name of their host, empty for several.
        part: Column in which they are late.
        first_step: First step in which it shows.
        last_step: Last step.
        seconds: Mean excess of a step there.
        share: That, over the median step.
        sigmas: Standard deviations of the peers; 0 where all ranks are alike.
        lost: Share of the run's time that would not have passed without it.
    """

    kinds: tuple[str, ...]
    scope: str
    ranks: tuple[int, ...]
    host: str
    part: str
    first_step: int
    last_step: int
    seconds: float
    share: float
    sigmas: float
    lost: float
