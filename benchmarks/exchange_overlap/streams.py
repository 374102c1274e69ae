"""What computation hides of the exchanges of a step: measured, and simulated with the same computation."""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.ranks import Transfer
from telechat_moe.tools.plan.cost.expert_overlap import Interval, OverlapSummary, summarise


class Step(NamedTuple):
    """A step of a rank: when it began and ended, and its exchanges."""

    begin: float
    end: float
    exchanges: list[Transfer]

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin


class Link(NamedTuple):
    """Seconds that a message takes, and that each of its bytes holds the link."""

    latency: float
    seconds_per_byte: float


def measured(step: Step) -> OverlapSummary:
    """Return how busy a rank was; it computes whenever its graph does not wait for an exchange."""
    waits = sorted((x.waits, x.goes_on) for x in step.exchanges)
    edges = [step.begin, *(t for wait in waits for t in wait), step.end]
    compute = [(a * 1e6, b * 1e6) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return summarise(compute, [(x.started * 1e6, x.arrived * 1e6) for x in step.exchanges])


class Event(NamedTuple):
    """The start or the wait of an exchange, and the seconds of computation before it."""

    kind: str
    exchange: int
    computed: float


def events(step: Step) -> list[Event]:
    """Return starts and waits in their order, and the computation behind the last as `end`."""
    found = [(x.started, 0, i) for i, x in enumerate(step.exchanges)]
    found += [(x.waits, 1, i) for i, x in enumerate(step.exchanges)]
    order, at = list[Event](), step.begin
    for moment, is_wait, i in sorted(found):
        order.append(Event("wait" if is_wait else "start", i, moment - at))
        at = step.exchanges[i].goes_on if is_wait else moment
    return [*order, Event("end", -1, step.end - at)]


class Ranks:
    """All ranks of a step at once, each with its own computation in its own order, so that a late one delays the others.

    A link from one rank to another takes messages one after the other; each is taken to be as large as the largest part of its
    exchange that its receiver got.
    """

    def __init__(self, steps: Sequence[Step], link: Link) -> None:
        self._steps, self._link = steps, link
        self._left = [deque(events(step)) for step in steps]
        self._bytes = [{x.tag: x.bytes for x in step.exchanges} for step in steps]
        self._now = [0.0] * len(steps)
        self._free = defaultdict[tuple[int, int], float](float)  # by sender and receiver
        self._started: dict[tuple[int, int], float] = {}  # by receiver and tag
        self._parts = defaultdict[tuple[int, int], list[float]](list)  # when they arrive, likewise
        self._computing: list[list[Interval]] = [[] for _ in steps]

    def run(self) -> list[OverlapSummary]:
        """Return how busy each rank is.

        Raises:
            ValueError: A rank waits for an exchange that another never starts.
        """
        while any(self._left):
            if not any(self._advance(rank) for rank in range(len(self._steps))):
                raise ValueError(
                    f"{len(self._steps)} ranks wait for exchanges that none of them starts"
                )
        exchanges: list[list[Interval]] = [[] for _ in self._steps]
        for (rank, tag), begun in self._started.items():
            exchanges[rank].append((begun * 1e6, max(self._parts[rank, tag]) * 1e6))
        return [summarise(*both) for both in zip(self._computing, exchanges, strict=True)]

    def _advance(self, rank: int) -> bool:
        """Run a rank up to a wait for what a peer has not started; return whether it did anything."""
        queue, moved = self._left[rank], False
        while queue:
            kind, i, computed = queue[0]
            tag = self._steps[rank].exchanges[i].tag
            parts = self._parts[rank, tag]
            if kind == "wait" and len(parts) < len(self._steps) - 1:
                break
            queue.popleft()
            begun, moved = self._now[rank], True
            self._now[rank] += computed
            self._computing[rank].append((begun * 1e6, self._now[rank] * 1e6))
            if kind == "start":
                self._send(rank, tag)
            elif kind == "wait":
                self._now[rank] = max(self._now[rank], *parts)
        return moved

    def _send(self, rank: int, tag: int) -> None:
        """Start an exchange of a rank: its parts go to all others."""
        self._started[rank, tag] = self._now[rank]
        for peer in range(len(self._steps)):
            if peer != rank:
                way = rank, peer
                lasts = self._bytes[peer][tag] * self._link.seconds_per_byte
                self._free[way] = max(self._free[way], self._now[rank]) + lasts
                self._parts[peer, tag].append(self._free[way] + self._link.latency)


def simulated(steps: Sequence[Step], link: Link) -> list[OverlapSummary]:
    """Return how busy the ranks of a step would be with their measured computation and links of this speed."""
    return Ranks(steps, link).run()
