"""The global batch as a function of the samples that were consumed: constant, or as Megatron's ``--step-batch-size-schedule``.

Source: Megatron-LM, ``megatron/core/num_microbatches_calculator.py`` (the meaning only).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

PATTERN = r"0:[0-9.]+[KMBT]?([ ,]+[0-9.]+[KMBT]?:[0-9.]+[KMBT]?)*"
_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def _number(text: str) -> int:
    unit = _UNITS.get(text[-1:], 1)
    return int(float(text.rstrip("KMBT")) * unit)


@dataclass(frozen=True)
class BatchSchedule:
    """Global batches by threshold.

    Attributes:
        entries: (consumed samples from which it holds, batch), in rising order.
        unit: Samples that are of one epoch: those of a step, or with a growing batch of a micro-batch.
    """

    entries: tuple[tuple[int, int], ...]
    unit: int = 1

    @staticmethod
    @cache
    def parse(text: str, seq_length: int) -> BatchSchedule:
        """Return the schedule of a text such as ``0:768 250B:1536``, tokens and samples a step.

        Thresholds in tokens become samples by floor division by the sequence length.

        Raises:
            ValueError: A number cannot be read, thresholds do not rise from 0 or a batch is 0; says which.
        """
        pairs = [entry.partition(":")[::2] for entry in text.replace(",", " ").split()]
        entries = tuple((_number(start) // seq_length, _number(batch)) for start, batch in pairs)
        thresholds = [threshold for threshold, _ in entries]
        if not thresholds or thresholds[0] != 0:
            raise ValueError("a first threshold of 0")
        if any(a >= b for a, b in pairwise(thresholds)):
            raise ValueError(f"thresholds that rise, in samples they are {thresholds}")
        if min(batch for _, batch in entries) < 1:
            raise ValueError("batches of at least 1")
        return BatchSchedule(entries)

    def after(self, consumed: int) -> int:
        """Return the batch of the step that begins after so many samples."""
        return self.entries[bisect_right(self.entries, consumed, key=lambda entry: entry[0]) - 1][1]

    def _runs(self, consumed: int = 0) -> Iterator[tuple[int, int, int, int | None]]:
        """Yield (first step, samples before it, batch, steps) of each run of equal steps; the last has no end."""
        step = 0
        for threshold, _ in (*self.entries[1:], (None, 0)):
            batch = self.after(consumed)
            if threshold is None:
                yield step, consumed, batch, None
            elif threshold > consumed:  # else a step has gone beyond it
                steps = -(-(threshold - consumed) // batch)
                yield step, consumed, batch, steps
                step, consumed = step + steps, consumed + steps * batch

    def consumed(self, steps: int, before: int = 0) -> int:
        """Return the samples that are consumed after so many steps, of which some were consumed before them."""
        return next(
            samples + (steps - first) * batch
            for first, samples, batch, count in self._runs(before)
            if count is None or steps < first + count
        )

    def position(self, consumed: int) -> float:
        """Return how many steps, in parts of them too, have consumed so many samples."""
        for first, before, batch, count in self._runs():
            if count is None or consumed < before + count * batch:
                steps, remainder = divmod(consumed - before, batch)
                return first + (steps + remainder / batch if remainder else steps)
        raise AssertionError("the last run has no end")

    def steps(self, samples: int, consumed: int = 0) -> int:
        """Return how many whole steps so many samples give, after those that were consumed."""
        step, end = 0, consumed + samples
        for first, before, batch, steps in self._runs(consumed):
            fit = max(0, (end - before) // batch)
            step = first + (fit if steps is None else min(fit, steps))
            if steps is None or fit < steps:
                break
        return step

    def total(self, epoch_samples: int, epochs: int) -> int:
        """Return the steps of a whole run."""
        return self.steps(epoch_samples // self.unit * self.unit * epochs)
