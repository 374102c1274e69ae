"""Simulate a list's streams event by event: when its kernels run, and how much communication is hidden.

Read: durations, streams, names, grids and the order within each stream. Predicted: every start. A kernel starts when
its stream is free, what it waits for (`kernel_order`) has ended, the host has launched it, and a multiprocessor is free;
kernels of communication need all their blocks at once (they are launched as cooperative groups).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.overlap.kernel_list import PAYLOAD, Kernel, KernelList, by_stream
from benchmarks.overlap.kernel_order import Order, infer_order
from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.cost.expert_overlap import OverlapSummary
from telechat_moe.tools.plan.cost.expert_overlap import summarise as summarise_intervals

GAP_US = 2.0
"""From the end of a kernel to the start of the next that waits for it: median in DeepSeek's list of 983 kernels."""

LAUNCH_US = 50.0
"""Host time of one kernel in eager PyTorch with autograd: start-up of the same list, where the device waits for it."""

MULTIPROCESSORS = 132
"""Of an H100 or H800."""


@dataclass(frozen=True)
class Prediction:
    """Predicted starts of a kernel list."""

    kernels: tuple[Kernel, ...]
    order: Order
    start_us: tuple[float, ...]
    device: OverlapSummary
    chunk_us: float
    """What the host sees: from its first launch to the return of its last. The device may still be working then."""
    measured: OverlapSummary | None
    measured_start_us: tuple[float, ...] | None


def summarise(kernels: Sequence[Kernel], start_us: Sequence[float]) -> OverlapSummary:
    """Return how busy the device is when kernels start at given times."""
    spans = [(s, s + k.duration_us) for k, s in zip(kernels, start_us, strict=True)]
    talk = [span for span, k in zip(spans, kernels, strict=True) if k.communicates]
    compute = [span for span, k in zip(spans, kernels, strict=True) if not k.communicates]
    return summarise_intervals(compute, talk)


def predict(
    kernel_list: KernelList,
    *,
    launch_us: float = LAUNCH_US,
    gap_us: float = GAP_US,
    multiprocessors: int = MULTIPROCESSORS,
) -> Prediction:
    """Predict when each kernel of a list starts.

    Args:
        kernel_list: The kernels; their measured starts are only compared with, in `Prediction.measured`.
        launch_us: Host time of one launch; 0 for a captured graph.
        gap_us: Between a kernel and the next.
        multiprocessors: Of the device.
    """
    kernels = kernel_list.kernels
    order = infer_order(kernels)
    try:
        start, chunk = run_streams(kernels, order, launch_us, gap_us, multiprocessors)
    except (
        BadInputError
    ):  # the inferred dependencies contradict each other: keep only the certain ones
        order.only_streams(kernels)
        start, chunk = run_streams(kernels, order, launch_us, gap_us, multiprocessors)
    known = kernel_list.measured_start_us
    return Prediction(
        kernels,
        order,
        tuple(start),
        summarise(kernels, start),
        chunk,
        summarise(kernels, known) if known is not None else None,
        known,
    )


class _Host:
    """The host, which launches kernels one after the other and waits where it needs a size."""

    def __init__(self, order: Order, count: int, launch_us: float) -> None:
        self.order, self.launch_us = order, launch_us
        self.now, self.next = 0.0, 0
        self.ready = np.full(count, np.inf)

    def advance(self, end: np.ndarray) -> None:
        """Launch everything that does not wait for an unknown end."""
        issue = self.order.issue
        while self.next < len(issue):
            kernel = issue[self.next]
            until = self.order.sync.get(kernel)
            if until is not None:
                if not np.isfinite(end[until]):
                    return
                self.now = max(self.now, end[until])
            self.now += self.launch_us
            self.ready[kernel] = self.now
            self.next += 1


def _free(running: dict[int, float], holds: Sequence[int], count: int) -> int:
    left = count
    for kernel in running:  # in the order of their start: the first one takes what it needs
        left -= min(holds[kernel], left)
    return left


def run_streams(
    kernels: Sequence[Kernel], order: Order, launch_us: float, gap_us: float, multiprocessors: int
) -> tuple[list[float], float]:
    """Return each kernel's start and the host's time, in us from the first start on the device.

    Raises:
        BadInputError: Kernels wait for each other in a circle.
    """
    count = len(kernels)
    start, end = np.full(count, np.inf), np.full(count, np.inf)
    streams = by_stream(kernels)
    main = kernels[order.main[0]].stream
    queues = [streams.pop(main), *streams.values()]  # of those ready together, main goes first
    heads = [0] * len(queues)
    running: dict[int, float] = {}
    holds = [_holds(k, multiprocessors) for k in kernels]
    host = _Host(order, count, launch_us)
    now = 0.0
    for _ in range(count * 8 + 8):
        host.advance(end)
        waiting: list[tuple[float, int]] = []
        for q, queue in enumerate(queues):
            if heads[q] < len(queue):
                kernel = queue[heads[q]]
                before = max((end[d] for d in order.after[kernel]), default=-np.inf) + gap_us
                waiting.append((max(float(before), float(host.ready[kernel])), q))
        if not waiting:
            first = float(start.min())
            return [float(s) - first for s in start], host.now
        begun = False
        for ready, q in sorted(waiting):
            if ready > now:
                break
            kernel = queues[q][heads[q]]
            blocks = min(kernels[kernel].blocks, multiprocessors)
            wanted = blocks if kernels[kernel].communicates else 1
            if _free(running, holds, multiprocessors) >= wanted:
                start[kernel] = now
                end[kernel] = running[kernel] = now + kernels[kernel].duration_us
                heads[q] += 1
                begun = True
        if not begun:
            later = [r for r, _ in waiting if now < r < np.inf]
            now = min([*later, *running.values()], default=np.inf)
            if not np.isfinite(now):
                break
        running = {k: e for k, e in running.items() if e > now}
    stuck = [
        kernels[queue[h]].name for queue, h in zip(queues, heads, strict=True) if h < len(queue)
    ]
    raise BadInputError(
        "the kernel list cannot finish: its streams wait for each other at "
        + "; ".join(name[:60] for name in stuck)
    )


def _holds(kernel: Kernel, multiprocessors: int) -> int:
    """Return the multiprocessors that a kernel keeps until it ends.

    A grid of more blocks than the device holds frees them one by one; what precedes a transfer mostly waits in one block.
    """
    if kernel.communicates:
        return kernel.blocks if kernel.role in PAYLOAD else 0
    return kernel.blocks if kernel.blocks <= multiprocessors else 0
