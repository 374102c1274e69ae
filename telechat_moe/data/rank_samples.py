"""The samples of one data-parallel rank by number, for programs that make the batches themselves, as MindSpore's data sets do."""

import numpy as np

from telechat_moe.data.loader import Loader
from telechat_moe.errors import BadInputError


class RankSamples:
    """The samples that a rank trains on in a pass, step after step and within a step micro-batch after micro-batch.

    A sample is a tuple of int32 arrays, in the order of the columns. Every pass has the same samples.

    Args:
        loader: Serves the batches, each a micro-batch of all ranks; its position is where step ``first_step`` begins.
        micro_batches: Micro-batches of a step.
        first_step: Steps before the loader's position, which are not read.
        share: This rank and the number of ranks among which a micro-batch is divided; None: the whole micro-batch.

    Raises:
        BadInputError: The position is not that of so many steps, and there are several passes.
    """

    def __init__(
        self, loader: Loader, micro_batches: int, first_step: int, share: tuple[int, int] | None
    ) -> None:
        self.loader, self.micro_batches, self.first_step = loader, micro_batches, first_step
        self.rank, ranks = share or (0, 1)
        self.rows, self.step_samples = loader.batch_size // ranks, loader.batch_size * micro_batches
        self._place, epochs = loader.next_sample, loader.epochs
        self.steps = epochs.size // self.step_samples
        regular = epochs.after(0, first_step * self.step_samples)
        if epochs.begin(self._place) == epochs.begin(regular):
            self.first_step = self._place = 0  # each pass is whole
        elif epochs.end > epochs.size:
            raise BadInputError(
                f"the data go on at sample {self._place} after {first_step} steps of {self.step_samples}, which "
                "MindFormers cannot do with several passes; runner_config.epochs 1 and all samples in "
                "train_dataset.data_loader.sizes, or `telechat-moe train`"
            )
        else:
            self.steps = first_step + epochs.samples_left(self._place) // self.step_samples
        self._part: tuple[int, list[np.ndarray]] = (-1, [])

    def __len__(self) -> int:
        """Return the number of samples of a pass."""
        return self.steps * self.micro_batches * self.rows

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        """Return a sample; those of a micro-batch are read together."""
        number, row = divmod(int(index), self.rows)
        if self._part[0] != number:
            step, part = divmod(number, self.micro_batches)
            begin = self._place + (step - self.first_step) * self.step_samples
            rows = self.loader.rows(begin, begin + part * self.loader.batch_size)
            batch = self.loader.batch(rows[self.rank * self.rows :][: self.rows])
            self._part = number, [column.astype(np.int32) for column in batch.values()]
        return tuple(column[row] for column in self._part[1])
