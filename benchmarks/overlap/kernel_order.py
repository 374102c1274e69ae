"""Infer which kernels of a list wait for which, from their names and their order within each stream.

An overlapped step alternates between two micro-batches: attention of one, experts of the other, and so on. Each such
phase of the main stream hands its result to one transfer on a communication stream (dispatch after attention, combine
after experts), and waits for the transfer that its own micro-batch started before.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.overlap.kernel_list import PAYLOAD, Kernel, by_stream, runs

ROUTER_RUN = 4
"""Fewest consecutive short kernels that count as a router."""


@dataclass
class Phase:
    """A stretch of the main stream for one micro-batch. Positions count kernels of that stream."""

    kind: str
    """`attention`, `attention_backward` or `expert`."""
    begin: int
    """First kernel: waits for the transfer that the phase consumes."""
    anchor: tuple[int, int]
    """First and last kernel that tells the kind."""
    hands_over: int = 0
    """Last kernel that the phase's transfer waits for; kernels after it are weight gradients."""
    backward: bool = False


@dataclass
class Transfer:
    """Consecutive kernels of a communication stream that move one phase's result."""

    kind: str
    kernels: tuple[int, ...]
    produced_by: int | None = None
    consumed_by: int | None = None
    position: int = -1
    """Main kernel after which it is launched; -1: before all."""


@dataclass
class Order:
    """Dependencies of a kernel list."""

    main: list[int]
    """Kernels of the main stream."""
    phases: list[Phase]
    transfers: list[Transfer]
    after: list[list[int]]
    """For each kernel those that must have ended before it starts."""
    issue: list[int]
    """Order in which the host launches kernels."""
    sync: dict[int, int]
    """Kernels before whose launch the host waits for the end of another one."""
    helpers: int = 0
    """Kernels on other compute streams."""
    notes: list[str] = field(default_factory=list)
    """What could not be inferred, and what was assumed instead."""

    def only_streams(self, kernels: Sequence[Kernel]) -> None:
        """Forget all that was inferred between streams."""
        self.after = _stream_order(kernels)
        self.sync.clear()
        self.notes.append(
            "what the names say of who waits for whom contradicts itself: streams are taken as independent"
        )


def infer_order(kernels: Sequence[Kernel]) -> Order:
    """Infer the dependencies of kernels from their names and streams.

    Args:
        kernels: All kernels; each stream's in its order. The order across streams is not used.
    """
    streams = by_stream(kernels)
    time = {s: sum(kernels[i].duration_us for i in ids) for s, ids in streams.items()}
    talking = {s for s, ids in streams.items() if any(kernels[i].role in PAYLOAD for i in ids)}
    quiet = [s for s in streams if s not in talking]
    main_stream = max(quiet or streams, key=lambda s: time[s])
    main = streams[main_stream]
    order = Order(main, [], [], _stream_order(kernels), [], {})
    order.phases = find_phases([kernels[i] for i in main])
    groups = [_transfers(kernels, streams[s]) for s in sorted(talking - {main_stream}, key=str)]
    order.transfers = [t for group in groups for t in group]
    if order.phases:
        _produced(order.phases, groups)
        _consumed(order.phases, order.transfers)
    lost = [t for t in order.transfers if t.produced_by is None and t.consumed_by is None]
    if lost:
        order.notes.append(
            f"{len(lost)} of {len(order.transfers)} transfers have no attention or expert kernels to "
            "belong to: assumed to start evenly along the main stream and to be waited for at its next transfer"
        )
    _wire(kernels, order, lost)
    slots: dict[int, list[int]] = {}
    for stream in quiet:
        if stream != main_stream:
            _helpers(kernels, streams[stream], order, slots)
    _host(kernels, order, slots)
    return order


def _stream_order(kernels: Sequence[Kernel]) -> list[list[int]]:
    after: list[list[int]] = [[] for _ in kernels]
    for ids in by_stream(kernels).values():
        for before, kernel in itertools.pairwise(ids):
            after[kernel].append(before)
    return after


def find_phases(main: Sequence[Kernel]) -> list[Phase]:
    """Divide the main stream into phases by the kernels that tell attention and experts apart."""
    typical = float(np.mean([k.duration_us for k in main])) if main else 0.0
    phases: list[Phase] = []
    for i, kernel in enumerate(main):
        kind = "expert" if kernel.role.startswith("expert") else kernel.role
        if kind not in ("attention", "attention_backward", "expert"):
            continue
        last = phases[-1] if phases else None
        if last is not None and last.kind == kind and not _new_phase(main, last, i, typical):
            last.anchor = (last.anchor[0], i)
        else:
            phases.append(Phase(kind, i, (i, i)))
    if not phases:
        return []
    for before, phase in itertools.pairwise(phases):
        phase.begin = _begin(main, before, phase, typical)
    phases[0].begin = 0
    ends = [p.begin for p in phases[1:]] + [len(main)]
    for phase, end in zip(phases, ends, strict=True):
        inside = range(phase.begin, end)
        phase.backward = phase.kind == "attention_backward" or (
            phase.kind == "expert"
            and any(main[i].backward for i in range(phase.begin, phase.anchor[1]))
        )
        phase.hands_over = end - 1
        if phase.backward:
            wanted = "expert_out" if phase.kind == "expert" else "norm_backward"
            found = [i for i in inside if main[i].role == wanted and i >= phase.anchor[0]]
            phase.hands_over = found[-1] if found else end - 1
    return phases


def _new_phase(main: Sequence[Kernel], last: Phase, i: int, typical: float) -> bool:
    """Return whether kernel i, of the kind of the last phase, belongs to the other micro-batch already."""
    if last.kind == "expert":
        return main[i].role == "expert_in" and main[last.anchor[1]].role == "expert_out"
    return _router(main, last.anchor[1] + 1, i, typical) is not None


def _router(
    main: Sequence[Kernel], first: int, last: int, typical: float
) -> tuple[int, int] | None:
    """Return the longest run of short kernels, counted from `first`, if it is long enough to be a router."""
    short = [main[i].duration_us < typical and main[i].role == "" for i in range(first, last)]
    begin, end = max(runs(short), key=lambda r: r[1] - r[0], default=(0, 0))
    return (begin, end) if end - begin >= ROUTER_RUN else None


def _begin(main: Sequence[Kernel], before: Phase, phase: Phase, typical: float) -> int:
    """Return the first kernel of a phase, between the anchors of the one before it and its own.

    The router is the longest run of short kernels; forward it ends its phase, backward it begins one.
    """
    first, last = before.anchor[1] + 1, phase.anchor[0]
    window = [main[i].role for i in range(first, last)]
    if before.kind == "attention_backward":
        done = max((i for i, role in enumerate(window) if role == "norm_backward"), default=-1)
        return first + next(
            (i for i in range(done + 1, len(window)) if window[i] == "norm"), len(window)
        )
    if before.kind == "expert" and phase.kind == "expert":
        return last
    if before.kind == "expert" and phase.kind == "attention":
        return first + next((i for i, role in enumerate(window) if role == "norm"), 0)
    run = _router(main, first, last, typical)
    if run is None:
        return last if before.kind == "attention" else first
    return first + (run[0] if phase.kind == "attention_backward" else run[1])


def _transfers(kernels: Sequence[Kernel], ids: Sequence[int]) -> list[Transfer]:
    found: list[Transfer] = []
    pending: list[int] = []
    for i in ids:
        pending.append(i)
        if kernels[i].role in PAYLOAD:
            found.append(Transfer(kernels[i].role, tuple(pending)))
            pending = []
    return found


def _fits(transfer: Transfer, phase: Phase) -> bool:
    if transfer.kind in ("dispatch", "combine"):
        return (transfer.kind == "combine") == (phase.kind == "expert")
    return True


def _produced(phases: Sequence[Phase], groups: Sequence[Sequence[Transfer]]) -> None:
    """Assign each transfer to its phase in order; a stream's first few may belong to phases before the list."""
    best: tuple[int, list[tuple[Transfer, int | None]]] | None = None
    for outside in itertools.product(range(3), repeat=len(groups)):
        cost, taken, pairs = 0, set[int](), list[tuple[Transfer, int | None]]()
        for group, skip in zip(groups, outside, strict=True):
            reached = -1
            cost += skip
            for number, transfer in enumerate(group):
                options = (
                    i
                    for i in range(reached + 1, len(phases))
                    if i not in taken and _fits(transfer, phases[i])
                )
                phase = None if number < skip else next(options, None)
                pairs.append((transfer, phase))
                if phase is None:
                    cost += 0 if number < skip else 2 * len(phases)
                else:
                    cost += phase - reached - 1 if len(groups) == 1 else 0
                    taken.add(phase)
                    reached = phase
        if best is None or cost < best[0]:
            best = cost, pairs
    for transfer, phase in best[1] if best else ():
        transfer.produced_by = phase


def _consumed(phases: Sequence[Phase], transfers: Sequence[Transfer]) -> None:
    """Assign each transfer to the next phase of its micro-batch: same direction, first come, first served."""
    taken: set[int] = set()

    def wants(transfer: Transfer, i: int) -> bool:
        if i in taken or transfer.kind not in ("dispatch", "combine"):
            return i not in taken
        return (transfer.kind == "dispatch") == (phases[i].kind == "expert")

    inside = [t for t in transfers if t.produced_by is not None]
    for transfer in sorted(inside, key=lambda t: t.produced_by or 0):
        made = transfer.produced_by or 0
        options = (
            i
            for i in range(made + 1, len(phases))
            if phases[i].backward == phases[made].backward and wants(transfer, i)
        )
        transfer.consumed_by = next(options, None)
        if transfer.consumed_by is not None:
            taken.add(transfer.consumed_by)
    lags = [t.consumed_by - (t.produced_by or 0) for t in inside if t.consumed_by is not None]
    lag = int(np.median(lags)) if lags else 1
    early = [t for t in transfers if t.produced_by is None]
    for number, transfer in enumerate(early):  # as if phases -n .. -1 had produced them
        earliest = max(number - len(early) + lag, 0)
        transfer.consumed_by = next(
            (i for i in range(earliest, len(phases)) if wants(transfer, i)), None
        )
        taken |= {transfer.consumed_by} if transfer.consumed_by is not None else set()


def _wire(kernels: Sequence[Kernel], order: Order, lost: Sequence[Transfer]) -> None:
    for t in order.transfers:
        if t.produced_by is not None:
            t.position = order.phases[t.produced_by].hands_over
            order.after[t.kernels[0]].append(order.main[t.position])
        if t.consumed_by is not None:
            order.after[order.main[order.phases[t.consumed_by].begin]].append(t.kernels[-1])
    work = np.cumsum([kernels[i].duration_us for i in order.main])
    for number, t in enumerate(lost):
        place = [work[-1] * (number + s) / (len(lost) + 1) for s in (1, 2)]
        start, need = (min(int(np.searchsorted(work, p)), len(work) - 1) for p in place)
        t.position = start
        order.after[t.kernels[0]].append(order.main[start])
        if need + 1 < len(order.main) and need > start:
            order.after[order.main[need + 1]].append(t.kernels[-1])


def _helpers(
    kernels: Sequence[Kernel], ids: Sequence[int], order: Order, slots: dict[int, list[int]]
) -> None:
    """Tie a second compute stream to the main one: it runs twins of the main stream's kernels beside them.

    A run of helpers starts with the run of its twins; what follows the twins waits for it.
    """
    main = [kernels[i] for i in order.main]
    groups = _same_runs([kernels[i] for i in ids])
    places = _same_runs(main)
    order.helpers += len(ids)
    for (begin, end), place in zip(
        groups, _twins([kernels[i] for i in ids], groups, main, places), strict=True
    ):
        if place is None:
            order.notes.append(
                f"{end - begin} kernels on stream {kernels[ids[0]].stream} have no twin on the main stream: "
                "only the order of their own stream constrains them"
            )
            continue
        slots.setdefault(place[0], []).extend(ids[begin:end])
        if place[0] > 0:
            order.after[ids[begin]].append(order.main[place[0] - 1])
        if place[1] < len(main):
            order.after[order.main[place[1]]].append(ids[end - 1])


def _same_runs(kernels: Sequence[Kernel]) -> list[tuple[int, int]]:
    """Return first and one past the last of each run of kernels of one name and size."""
    size = [(k.name, k.grid) for k in kernels]
    cuts = [0, *(i for i in range(1, len(size)) if size[i] != size[i - 1]), len(size)]
    return list(itertools.pairwise(cuts))


def _twins(
    helpers: Sequence[Kernel],
    groups: Sequence[tuple[int, int]],
    main: Sequence[Kernel],
    places: Sequence[tuple[int, int]],
) -> list[tuple[int, int] | None]:
    """Pair runs of helpers with runs of main kernels of the same name, size and count, in order.

    Of all such pairings the one with the most similar durations counts: the least sum of |log of their ratio|.
    """
    work = np.array([sum(k.duration_us for k in main[b:e]) + 1e-3 for b, e in places])
    cost = np.zeros(len(places) + 1)  # least cost of the groups so far within places[:j]
    choices: list[np.ndarray | None] = []
    for begin, end in groups:
        one, count = helpers[begin], end - begin
        same = [
            (main[b].name, main[b].grid, e - b) == (one.name, one.grid, count) for b, e in places
        ]
        mine = sum(k.duration_us for k in helpers[begin:end]) + 1e-3
        total = np.where(same, np.abs(np.log(work / mine)), np.inf) + cost[:-1]
        least = np.minimum.accumulate(total)
        if not len(least) or not np.isfinite(least[-1]):
            choices.append(None)
            continue
        new = np.arange(len(places))
        choices.append(np.maximum.accumulate(np.where(total == least, new, -1)))
        cost = np.concatenate([[np.inf], least])
    found: list[tuple[int, int] | None] = []
    j = len(places) - 1
    for choice in reversed(choices):
        found.append(places[int(choice[j])] if choice is not None else None)
        j = int(choice[j]) - 1 if choice is not None else j
    return found[::-1]


def _host(kernels: Sequence[Kernel], order: Order, slots: dict[int, list[int]]) -> None:
    """Fix the host's order of launches.

    A transfer is launched where its phase hands over. Where its size is not known beforehand (a `notify` that is not
    `cached`), the host launches the next phase, waits for the `notify`, then launches the payload.
    """
    at: dict[int, list[int]] = {}
    for t in order.transfers:
        position = t.position
        asks = [
            i for i in t.kernels if kernels[i].role == "notify" and "cached" not in kernels[i].name
        ]
        late = 0
        if asks:
            order.sync[t.kernels[-1]] = asks[-1]
            late = len(t.kernels) - t.kernels.index(asks[-1]) - 1
        at.setdefault(position, []).extend(t.kernels[: len(t.kernels) - late])
        if late:
            at.setdefault(_payload_position(order, t), [])[:0] = t.kernels[-late:]
    order.issue += at.pop(-1, [])
    for position, kernel in enumerate(order.main):
        order.issue += slots.get(position, [])
        order.issue.append(kernel)
        order.issue += at.get(position, [])
    order.issue += [i for i in range(len(kernels)) if i not in set(order.issue)]


def _payload_position(order: Order, transfer: Transfer) -> int:
    """Return the main kernel after which a payload of unknown size is launched: the last of the next phase.

    Not later than that phase hands over its own transfer, because the communication stream has an order.
    """
    if not order.phases or (transfer.produced_by is None and transfer.position >= 0):
        return transfer.position
    following = 0 if transfer.produced_by is None else transfer.produced_by + 1
    ends = [p.begin for p in order.phases[1:]] + [len(order.main)]
    hands = [p.hands_over for p in order.phases if p.hands_over > transfer.position]
    return min([ends[min(following, len(ends) - 1)] - 1, *hands])
