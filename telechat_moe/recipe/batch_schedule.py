"""The global batch as a function of the samples that were consumed, as Megatron's ``--step-batch-size-schedule``.

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
    """

    entries: tuple[tuple[int, int], ...]

    @staticmethod
    @cache
    def parse(text: str, seq_length: int) -> BatchSchedule:
        """Return the schedule of a text such as ``0:768 250B:1536``, tokens and samples a step.

        Thresholds in tokens become samples by floor division by the sequence length.

        Raises:
            ValueError: A number cannot be read, thresholds do not rise from 0 or a batch is 0; says which.
        """
        pairs = [entry.partition(":")[::2] for entry in text.replace(",", " ").split()]
        entries = tuple((_number(at) // seq_length, _number(batch)) for at, batch in pairs)
        thresholds = [at for at, _ in entries]
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

    def _runs(self) -> Iterator[tuple[int, int, int, int | None]]:
        """Yield (first step, samples before it, batch, steps) of each run of equal steps; the last has no end."""
        step, consumed = 0, 0
        for threshold, _ in (*self.entries[1:], (None, 0)):
            batch = self.after(consumed)
            if threshold is None:
                yield step, consumed, batch, None
            elif threshold > consumed:  # else a step has gone beyond it
                steps = -(-(threshold - consumed) // batch)
                yield step, consumed, batch, steps
                step, consumed = step + steps, consumed + steps * batch

    def at(self, step: int) -> int:
        """Return the batch of a step, counted from 0."""
        return next(
            batch
            for first, _, batch, steps in self._runs()
            if steps is None or step < first + steps
        )

    def steps(self, samples: int) -> int:
        """Return how many whole steps so many samples give."""
        done = 0
        for first, consumed, batch, steps in self._runs():
            fit = max(0, (samples - consumed) // batch)
            done = first + (fit if steps is None else min(fit, steps))
            if steps is None or fit < steps:
                break
        return done
