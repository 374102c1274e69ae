"""What computation hides of the exchanges of a step: measured, and by the planner's streams with the same times."""

from typing import NamedTuple

from telechat_moe.tools.plan.cost.expert_overlap import OverlapSummary, Streams, summarise


class Exchange(NamedTuple):
    """When an exchange was started and waited for on a rank; seconds of a clock.

    Attributes:
        bytes: Of the largest part that arrived.
        arrived: When the last part was there.
        waits: When the graph began to wait.
        goes_on: When it went on.
    """

    tag: int
    bytes: int
    started: float
    arrived: float
    waits: float
    goes_on: float


class Step(NamedTuple):
    """A step of a rank: when it began and ended, and its exchanges."""

    begin: float
    end: float
    exchanges: list[Exchange]

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


def simulated(step: Step, link: Link) -> OverlapSummary:
    """Return what the planner's streams say of a step's computation, in its order, with a link of this speed."""
    streams, arrives, after = Streams(), dict[int, float](), 0.0
    for kind, i, computed in events(step):
        done = streams.compute(computed, after)
        after = arrives[i] if kind == "wait" else 0.0
        if kind == "start":
            seconds = link.latency + step.exchanges[i].bytes * link.seconds_per_byte
            arrives[i] = streams.exchange(seconds, done)
    return streams.summary()
