"""Prove lower bounds of the makespan on a placement that no order of operations can beat.

There are four arguments, and the largest bound counts:

path    one micro-batch through all chunks and back, then the longest dW that remains.
stage   a stage cannot begin before the first micro-batch reaches it, must do all its work, and after its last operation
        those of other stages follow. Taken over sets of its operations (kinds and chunks, all micro-batches): the least
        head of the set + its work + its least tail (Carlier and Pinson's one-machine bound on these sets).
memory  an activation stays from the start of its forward to the end of what frees it, no shorter than the way there and
        back; all micro-batches together need that much activation-time on the stage, of which the cap allows
        cap x (makespan - head).
edges   before its first D a stage can only run the forwards that its memory holds, after its last F only the backwards of
        what it holds: where the way to the first D, or from the last F, is longer, it is idle.

Where pairs may overlap, work counts less the most that pairing can save, and no less than its computation.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telechat_moe.tools.plan.schedules.program import Times


@dataclass(frozen=True)
class Rules:
    """What a schedule is allowed to do."""

    split: bool = True
    """Whether dX and dW may be separate operations."""
    pairs: bool = False
    """Whether a forward and a backward of two micro-batches may overlap."""


@dataclass(frozen=True)
class MakespanBound:
    """A proven lower bound of the makespan."""

    makespan: float
    reason: str
    """Which argument proves it, and on which stage."""


@dataclass(frozen=True)
class _Ways:
    """Shortest times on one micro-batch's way through the pipeline; arrays have one value for each chunk."""

    head_f: NDArray[Any]
    """Time until F can start."""
    head_b: NDArray[Any]
    """Time until D (or B) can start."""
    tail_f: NDArray[Any]
    """Time from the end of F to the end of the step."""
    tail_b: NDArray[Any]
    """Time from the end of D (or B) to the end of the step."""
    dx: NDArray[Any]
    """Time of D, or of B where dX and dW are one operation."""
    weight: NDArray[Any]
    """Time of W, or zero where it is included in B."""
    forward: NDArray[Any]
    talk_f: NDArray[Any]
    """Time of F that is communication, which a pair can hide."""
    talk_b: NDArray[Any]
    """The same of D (or B)."""
    activation: NDArray[Any]

    def of_chunks(self, chunks: NDArray[Any]) -> "_Ways":
        return _Ways(**{name: values[chunks] for name, values in vars(self).items()})


def _ways(times: Times, route: tuple[int, ...], rules: Rules) -> _Ways:
    stage = np.array(route)
    link = np.where(stage[1:] != stage[:-1], times.comm, 0.0)
    if rules.split:
        # B may replace D and W where it is shorter than both together
        weight = np.minimum(times.dw, np.maximum(times.backward - times.dx, 0.0))
        dx = np.minimum(times.dx, times.backward)
    else:
        weight, dx = np.zeros(len(stage)), times.backward
    head_f = np.concatenate([[0.0], np.cumsum(times.forward[:-1] + link)])
    turn = head_f[-1] + times.forward[-1]
    steps = (dx[1:] + link)[::-1]
    head_b = turn + np.concatenate([[0.0], np.cumsum(steps)])[::-1]
    tail_b = np.empty(len(stage))
    longest = 0.0
    for c in range(len(stage)):
        onward = link[c - 1] + dx[c - 1] + longest if c else 0.0
        longest = tail_b[c] = max(float(weight[c]), float(onward))
    onward_f = (times.forward[1:] + link)[::-1]
    tail_f = np.cumsum(np.concatenate([[dx[-1] + tail_b[-1]], onward_f]))[::-1]
    talk = times.forward_exposed, times.backward_exposed
    return _Ways(head_f, head_b, tail_f, tail_b, dx, weight, times.forward, *talk, times.activation)


def lower_bound(
    times: Times,
    route: tuple[int, ...],
    stages: int,
    micro_batches: int,
    memory: NDArray[Any],
    rules: Rules,
) -> MakespanBound:
    """Return the largest of the bounds that the module describes.

    Times are filled in (`Times.full`); `memory` is the most activations of each stage.
    """
    ways = _ways(times, route, rules)
    path = float(ways.head_b[0] + ways.dx[0] + ways.tail_b[0])
    best = MakespanBound(path, "path of one micro-batch")
    kept_share = times.kept_for_w if rules.split else 0.0
    # from the start of F to the end of D, and of W
    stay = ways.head_b + ways.dx - ways.head_f + kept_share * ways.weight
    stage = np.array(route)
    for s in range(stages):
        chunks = np.flatnonzero(stage == s)
        if not len(chunks):
            continue
        ways_s = ways.of_chunks(chunks)
        cap = _usable(ways_s.activation, float(memory[s]), kept_share)
        needed = micro_batches * float((ways_s.activation * stay[chunks]).sum())
        candidates = [
            (_stage_bound(ways_s, micro_batches, rules), "work"),
            (float(ways_s.head_f.min()) + needed / cap, "memory"),
            (_edges_bound(ways_s, micro_batches, rules, cap, kept_share), "start and end"),
        ]
        for value, reason in candidates:
            if value > best.makespan:
                best = MakespanBound(value, f"{reason} of stage {s}")
    return best


def _usable(sizes: NDArray[Any], cap: float, kept_share: float) -> float:
    """Return the memory that whole activations can fill, without the remainder that fits none."""
    if kept_share not in (0.0, 1.0) or np.ptp(sizes) > 1e-12 * sizes.max() or not sizes[0]:
        return cap
    return float(np.floor(cap / sizes[0] * (1 + 1e-9)) * sizes[0])


def _edges_bound(
    ways: _Ways, micro_batches: int, rules: Rules, cap: float, kept_share: float
) -> float:
    """Return a stage's work and the idle time that its memory forces at start and end."""
    f, b, w, a = ways.forward, ways.dx, ways.weight, ways.activation
    saved = _savings(ways, np.ones(3 * len(f), bool)) if rules.pairs else 0.0
    work = micro_batches * (float((f + b + w).sum()) - saved)
    with np.errstate(divide="ignore", invalid="ignore"):
        filling = cap * float(np.max(np.where(a > 0, f / a, np.inf)))
        draining = cap * float(np.max(np.where(a > 0, (b + w) / a, np.inf)))
        if kept_share and w.any():
            late = np.where(a > 0, w / (kept_share * a), np.inf)
            draining = max(draining, cap * float(np.max(late)))
        elif w.any():
            draining = np.inf
    # until its first D it can do no more forwards than fit; after its last F no more than what it holds
    start = max(float(ways.head_f.min()), float(ways.head_b.min()) - filling)
    end = max(0.0, float(ways.tail_f.min()) - draining)
    if micro_batches * float(a.sum()) > cap * (1 + 1e-9):  # so the last F comes after the first D
        return start + work + end
    return work + max(start, end)


def _stage_bound(ways: _Ways, micro_batches: int, rules: Rules) -> float:
    head = np.concatenate([ways.head_f, ways.head_b, ways.head_b + ways.dx])
    tail = np.concatenate([ways.tail_f, ways.tail_b, np.zeros(len(ways.dx))])
    work = np.concatenate([ways.forward, ways.dx, ways.weight])
    exposed_w = np.maximum(ways.talk_b - ways.dx, 0)
    quiet = np.concatenate([ways.talk_f, ways.talk_b, exposed_w])
    best = 0.0
    for h in np.unique(head):
        for t in np.unique(tail):
            inside = (head >= h) & (tail >= t)
            if not inside.any():
                continue
            saved = _savings(ways, inside) if rules.pairs else 0.0
            total = max(work[inside].sum() - saved, np.maximum(work - quiet, 0)[inside].sum())
            best = max(best, float(h + micro_batches * total + t))
    return best


def _savings(ways: _Ways, inside: NDArray[Any]) -> float:
    """Return the most time that overlapped pairs can save on a set of operations, for one micro-batch.

    A pair has one forward and one backward, so all pairs save no more than the forwards can, and no more than the
    backwards can. Only operations of the set count: one that overlaps an operation outside the set takes its whole
    time. A forward hides more beside D and W as one backward (FB) than beside D alone.
    `inside` says of F, D and W of each chunk of the stage whether it is in the set.
    """
    f, dx, weight = ways.forward[:, None], ways.dx, ways.weight
    has_f, has_d, has_w = inside.reshape(3, -1)
    part = np.where(has_d, dx, 0.0) + np.where(has_w, weight, 0.0)
    both = np.where(has_w, dx + weight, dx)[None, :]
    talk = ways.talk_f[:, None] + ways.talk_b[None, :]
    lasting = np.maximum(np.maximum(f, both), np.maximum(f + both - talk, talk))
    saved = np.maximum(f + part - lasting, 0.0)[has_f][:, has_d | has_w]
    return float(min(saved.max(1).sum(), saved.max(0).sum())) if saved.size else 0.0
