"""How much later each rank is than its peers, in which steps, and whether that is more than chance.

A rank's peers do the same work: the ranks of its pipeline stage. In every step the median of the peers is taken off, which
removes what all ranks share. What is left is averaged over windows of steps (all, halves, quarters, eighths), without the two
largest steps of a window: a single late step is no cause. A window's averages over the peers give their spread.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from telechat_moe.numerics import Array

LEAST = 0.015
"""Share of the step that an excess must have to be a cause."""
FLOOR = 0.002
"""Share of the step that averages of peers vary by at least."""
FEWEST = 8
"""Steps below which ranks are not compared."""
FEWEST_STEPS = 20
"""Steps of the shortest window."""
LARGEST_LEFT_OUT = 2
"""Steps of a window that are left out of its average."""
MANY = 20
"""From so many peers on, their own spread is known."""
UNSURE = 1.3
"""How many times larger than it looks the spread of fewer peers may be in a part of the steps."""
FEW = 5
"""With fewer peers a row is compared with the others only: it would pull their median."""
SIGMAS = 7.0
"""Robust standard deviations from the median peer: below 1e-10 by chance, for thousands of ranks, parts and windows."""


@dataclass(frozen=True)
class LateRow:
    """A row (rank or group) that is later than its peers.

    Attributes:
        row: Its number.
        begin: First step of the window, as an index.
        end: One after the last.
        seconds: Average of a step of the window above the median peer's, its largest steps included.
        sigmas: How far from the peers that is.
        lasting: The median step of the window is later, too; otherwise it comes in pulses.
    """

    row: int
    begin: int
    end: int
    seconds: float
    sigmas: float
    lasting: bool


def center(x: Array, peers: Array) -> tuple[Array, Array]:
    """Return rows minus the median of their peers in each step, and these medians by group of peers.

    With fewer than `FEW` peers a row is compared with the median of the others: it would pull its own.
    """
    count = int(peers.max()) + 1
    medians = np.empty((count, x.shape[1]), np.float32)
    result = np.empty_like(x)
    for group in range(count):
        rows = np.flatnonzero(peers == group)
        medians[group] = np.median(x[rows], axis=0)
        if len(rows) >= FEW:
            result[rows] = x[rows] - medians[group]
            continue
        for row in rows:
            others = rows[rows != row]
            result[row] = x[row] - np.median(x[others], axis=0) if len(others) else 0.0
    return result, medians


def windows(steps: int) -> list[tuple[int, int]]:
    """Return begin and end of all windows: the whole, halves, quarters, eighths."""
    spans = [(0, steps)]
    for parts in (2, 4, 8):
        if steps // parts >= FEWEST_STEPS:
            edges = np.linspace(0, steps, parts + 1).astype(int)
            spans += [(int(a), int(b)) for a, b in pairwise(edges)]
    return spans


def _robust(x: Array) -> float:
    """Return the standard deviation of numbers, some of which may be of another kind."""
    return 1.4826 * float(np.median(np.abs(x - np.median(x))))


def _wandering(means: Array, spans: list[tuple[int, int]], rows: Array, few: int) -> list[float]:
    """Return for each window by how much averages of windows of its length wander, as a standard deviation.

    Blocks within a window do not show what is slower than it, and the peers of one window are few. Fewer than ``few`` peers say nothing
    of each other: of them only changes between the shortest windows count, of which a cause that begins is one.
    """
    counts = [parts for parts in (1, 2, 4, 8) if len(spans) >= 2 * parts - 1]
    groups = [means[parts - 1 : 2 * parts - 1, rows] for parts in counts]
    if len(rows) >= few:
        by_length = [_robust(group - np.median(group, axis=1, keepdims=True)) for group in groups]
    else:
        changes = np.abs(np.diff(groups[-1], axis=0))
        spread = 1.4826 * float(np.median(changes)) / np.sqrt(2) if changes.size else 0.0
        by_length = [0.0, *([spread] * (len(counts) - 1))]
    if few <= len(rows) < MANY:
        # Twice as long an average of what keeps its sign for a while wanders at most the root of two less.
        for i in range(len(by_length) - 2, -1, -1):
            by_length[i] = max(by_length[i], by_length[i + 1] / np.sqrt(2))
    return [x for parts, x in zip(counts, by_length, strict=True) for _ in range(parts)]


def _averages(x: Array, spans: list[tuple[int, int]]) -> Array:
    """Return the average of each row in each window without the largest steps, ``[windows, rows]``."""
    left = LARGEST_LEFT_OUT
    averages = np.empty((len(spans), x.shape[0]))
    for number, (begin, end) in enumerate(spans):
        part = x[:, begin:end]
        total = part.sum(1, dtype=np.float64)
        if end - begin > 2 * left:
            largest = np.partition(part, end - begin - left, axis=1)[:, -left:]
            total -= largest.sum(1, dtype=np.float64)
            averages[number] = total / (end - begin - left)
        else:
            averages[number] = total / (end - begin)
    return averages


def _spread(means: Array, x: Array, span: tuple[int, int], rows: Array, few: int) -> float:
    """Return the standard deviation of a window's averages among peers that are alike."""
    shown = _robust(means[rows]) if len(rows) >= few else 0.0
    if len(rows) >= MANY:
        return shown
    # Too few to know their spread: the variation of each from block to block, which covers slow drift.
    begin, end = span
    blocks = np.array_split(np.arange(begin, end), min(8, max(2, (end - begin) // 5)))
    values = np.array([np.median(x[rows][:, block], axis=1) for block in blocks])
    return max(shown, float(np.median(values.std(0, ddof=1))) / np.sqrt(len(blocks)))


def late_rows(
    x: Array, peers: Array, calm_s: float, *, lost: bool = False, few: int = FEW
) -> list[LateRow]:
    """Return the rows that are later than their peers, with the window that shows it best.

    Args:
        x: Seconds, rows minus their peers' median (:func:`center`).
        peers: Group of peers of each row.
        calm_s: A step without waiting, of which an excess is a share.
        lost: The seconds were lost, which peers that are alike do not: of few peers only the floor counts, because what varies
            from step to step is the loss itself.
        few: Peers below which they do not show each other's spread, because half of them may be late.
    """
    spans = windows(x.shape[1])
    means = _averages(x, spans)
    best: dict[int, tuple[float, int]] = {}
    for group in range(int(peers.max()) + 1):
        rows = np.flatnonzero(peers == group)
        if len(rows) < 2:
            continue
        scale = 1.0 if len(rows) >= MANY else 1.7 if len(rows) >= FEW else 2.5
        wide = FLOOR * calm_s * scale
        wanders = _wandering(means, spans, rows, few)
        for number, span in enumerate(spans):
            known_spread = len(rows) >= MANY or not lost
            shown = max(_spread(means[number], x, span, rows, few), wanders[number])
            shown *= UNSURE if number and len(rows) < MANY else 1.0
            spread = max(shown, wide) if known_spread else wide
            middle = float(np.median(means[number, rows])) if len(rows) >= FEW else 0.0
            above = means[number, rows] - middle
            for i in np.flatnonzero((above > SIGMAS * spread) & (above > LEAST * calm_s)):
                row, score = int(rows[i]), float(above[i] / spread)
                # The longest window that shows it, unless a shorter one shows more than 1.5 times as much.
                best_window = best.get(row)
                if best_window is None or above[i] > 1.5 * (means[best_window[1], row] - middle):
                    best[row] = (score, number)
    return [_late(x, row, *spans[number], score) for row, (score, number) in sorted(best.items())]


def _late(x: Array, row: int, begin: int, end: int, sigmas: float) -> LateRow:
    part = x[row, begin:end]
    mean = float(part.mean())
    return LateRow(row, begin, end, mean, sigmas, bool(np.median(part) > 0.4 * mean))
