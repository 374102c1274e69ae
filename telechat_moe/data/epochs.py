"""Places among the samples of a run, whose epochs are passes over the same samples in the same order.

A place counts samples through all epochs: place ``p`` is sample ``p mod size``. It does not depend on the batch, so a run
goes on at its place with any other. What is left of an epoch and does not fill a step is not read: the next step begins
with the next epoch, as in MindFormers.
"""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Epochs:
    """Passes over samples.

    Attributes:
        size: Samples of an epoch.
        unit: Samples that are of one epoch: those of a step, or with a growing batch of a micro-batch.
        end: Place at which the run ends; infinite: it does not.
    """

    size: int
    unit: int
    end: float = math.inf

    def begin(self, place: int) -> int:
        """Return the place at which the next unit begins: this one, or the next epoch if too few samples are left."""
        left = self.size - place % self.size
        return place + left if left < self.unit else place

    def samples_left(self, place: int) -> int:
        """Return how many samples whole units have from a place to the end, which is finite."""
        end = max(place, int(self.end))
        edge = min(place - place % self.size + self.size, end)
        epochs, last = divmod(end - edge, self.size)
        return (
            self._round_down(edge - place)
            + epochs * self._round_down(self.size)
            + self._round_down(last)
        )

    def _round_down(self, samples: int) -> int:
        return samples // self.unit * self.unit

    def ranges(self, place: int, count: int) -> list[tuple[int, int]]:
        """Return the samples of a step that begins at a place, as (first, end) of the parts in one epoch."""
        ranges = list[tuple[int, int]]()
        while count > 0:
            place = self.begin(place)
            full = self._round_down(self.size - place % self.size)
            ranges.append((place, place + min(full, count)))
            place, count = ranges[-1][1], count - full
        return ranges

    def after(self, place: int, count: int) -> int:
        """Return the place that so many samples after a place have reached."""
        return self.ranges(place, count)[-1][1] if count else place

    def samples(self, place: int, count: int) -> np.ndarray:
        """Return the samples of a step that begins at a place, each counted within its epoch."""
        return np.concatenate([np.arange(*part) for part in self.ranges(place, count)]) % self.size

    def place_of(self, place: int, size: int) -> int:
        """Return a place that was counted in epochs of another size."""
        epoch, sample = divmod(place, size)
        if epoch and not sample:  # the end of the epoch before, whose last samples may be to come
            epoch, sample = epoch - 1, size
        return epoch * self.size + sample
