"""Time peers in turn, and hold the result of a case."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

WARM_UP = 8  # MindSpore tries two ways to run a graph in its first calls and keeps the faster
SPIN = 0.01
"""Seconds; libgomp's threads spin 300,000 times after a parallel region, 5 ms on a Zen 4 processor."""
TURN = 0.003
LINE = 64

Call = Callable[[], Any]
Tell = Callable[[str], None]


@dataclass
class Measurement:
    """One operator on one shape.

    Attributes:
        group: Vector, dynamic, moe, attention, ...
        shape: In words.
        threads: Threads of ours and torch.
        dtype: Of the inputs.
        ours: Name of our peer.
        best: Best time of each peer, microseconds.
        median: Median time of each peer.
        compile: Time to compile, of each peer that does, microseconds.
        error: Largest error against float64 relative to the largest value, ours.
        extra: Further numbers.
        compared: Largest difference of each peer's results from ours, relative to the largest value.
    """

    group: str
    op: str
    shape: str
    threads: int
    dtype: str = "float32"
    ours: str = "ours"
    best: dict[str, float] = field(default_factory=dict)
    median: dict[str, float] = field(default_factory=dict)
    compile: dict[str, float] = field(default_factory=dict)
    error: float | None = None
    extra: dict[str, float] = field(default_factory=dict)
    compared: dict[str, float] = field(default_factory=dict)

    def ratio(self, peer: str) -> float | None:
        """Return how many times faster we are than a peer, by best times."""
        if peer not in self.best or self.ours not in self.best:
            return None
        return self.best[peer] / self.best[self.ours]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, with the ratios."""
        ratios = {peer: self.ratio(peer) for peer in self.best if peer != self.ours}
        return {**asdict(self), "ratios": ratios}


def aligned(value: np.ndarray) -> np.ndarray:
    """Return a copy that begins at a cache line, as tensors of torch and MindSpore do, and NumPy's arrays do not."""
    room = np.empty(value.nbytes + LINE, np.uint8)
    start = -room.ctypes.data % LINE
    copy = room[start : start + value.nbytes].view(value.dtype).reshape(value.shape)
    copy[...] = value
    return copy


def microseconds(peers: dict[Any, Call], seconds: float) -> dict[Any, list[float]]:
    """Return the times of all peers' calls, in turns, for about ``seconds``; at least 7 turns.

    A turn begins when the OpenMP threads of the peer before have stopped spinning, and lasts a few milliseconds.
    """
    for call in peers.values():
        for _ in range(WARM_UP):
            call()
    times: dict[Any, list[float]] = {name: [] for name in peers}
    end, turns = time.perf_counter() + seconds, 0
    while turns < 7 or time.perf_counter() < end:
        turns += 1
        for name, call in peers.items():
            time.sleep(SPIN)
            now = time.perf_counter()
            end_of_turn = now + TURN
            while now < end_of_turn:
                call()
                began, now = now, time.perf_counter()
                times[name].append((now - began) * 1e6)
    return times


def in_turns(case: Measurement, peers: dict[str, Call], seconds: float) -> None:
    """Time all peers for about ``seconds``; see :func:`microseconds`.

    Raises:
        RuntimeError: If the results of a peer were not compared with ours.
    """
    unknown = [name for name in peers if name != "ours" and name not in case.compared]
    if unknown:
        raise RuntimeError(f"{case.op} {case.shape}: not compared with ours: {', '.join(unknown)}")
    for name, values in microseconds(peers, seconds).items():
        case.best[name] = min(values)
        case.median[name] = statistics.median(values)


def relative_error(found: np.ndarray, exact: np.ndarray) -> float:
    """Return the largest error relative to the largest value."""
    scale = max(float(np.abs(exact).max(initial=0)), 1e-30)
    return float(np.abs(found.astype(np.float64) - exact).max(initial=0)) / scale


def check_same(
    case: Measurement, peer: str, ours: np.ndarray, theirs: Any, tolerance: float
) -> None:
    """Stop a benchmark whose peers do not compute the same."""
    error = relative_error(np.asarray(theirs), np.asarray(ours, np.float64))
    case.compared[peer] = max(error, case.compared.get(peer, 0.0))
    if not error <= tolerance:
        raise RuntimeError(f"{case.op} {case.shape}: {peer} differs from ours by {error:.1e}")
