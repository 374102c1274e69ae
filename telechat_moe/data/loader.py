"""Batches for training, prepared ahead in a thread, and resumable at any sample.

::

    loader = Loader(dataset, batch_size=8)
    for batch in loader:
        ...
        state = loader.state()          # the next sample to serve; JSON
    loader.load_state(state)

The order is that of MindFormers: samples 0, 1, 2, ... of the dataset (which is shuffled already), and the same order in
every further epoch, whatever the batch (:mod:`telechat_moe.data.epochs`). With ``deal_to`` the samples of a step are
dealt to ranks and micro-batches by their attention; which step they belong to stays.
"""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np

from telechat_moe.data.balance import deal
from telechat_moe.data.blend import Blend
from telechat_moe.data.dataset import Dataset
from telechat_moe.data.epochs import Epochs
from telechat_moe.data.mixture import MixedDataset
from telechat_moe.data.sample import Batch
from telechat_moe.errors import BadInputError, UsageError

STATE_VERSION = 1


class Batches(AbstractContextManager["Batches"], ABC):
    """Batches of training samples in order, and the position among them.

    Args:
        epoch_samples: Samples of a pass.
        epochs: Passes; None never ends.
        unit: Samples that are of one epoch (:class:`telechat_moe.data.epochs.Epochs`); None: a batch.

    Attributes:
        next_sample: Place of the next sample, counted over all epochs.
        earlier_samples: Samples of other data that the run read before these, and that count as read.
        deal_to: Data-parallel ranks and micro-batches of a step, to which its samples are dealt (see ``balance``); a
            batch is a micro-batch of all ranks, rank by rank. None: in the order of the dataset.
        order: How the samples of the last step were dealt, ``[micro-batches, ranks, samples]``, counted from the
            step's first; None without ``deal_to``.
    """

    def __init__(
        self,
        batch_size: int,
        epoch_samples: int,
        epochs: int | None,
        deal_to: tuple[int, int] | None,
        unit: int | None = None,
    ) -> None:
        self.batch_size, self.deal_to = batch_size, deal_to
        self.step_samples = batch_size * (deal_to[1] if deal_to else 1)
        self.next_sample = self._first = self.earlier_samples = 0
        self.order: np.ndarray | None = None
        end = math.inf if epochs is None else epoch_samples * epochs
        self._epochs = Epochs(epoch_samples, unit or self.step_samples, end)

    @property
    def epochs(self) -> Epochs:
        """The passes over the samples, which end earlier where others were read before."""
        return replace(self._epochs, end=self._epochs.end - self.earlier_samples)

    def _next(self, place: int) -> tuple[int, int] | None:
        """Return where the batch that comes next begins, and its step; None: the data end before."""
        epochs = self.epochs
        first = max(self._first, place - place % epochs.size)  # steps follow each other from here
        if (place - first) % epochs.unit == 0:
            place = epochs.begin(place)
            first = max(first, place - place % epochs.size)
        step = place - (place - first) % epochs.unit
        return None if step + epochs.unit > epochs.end else (place, step)

    def __iter__(self) -> Iterator[Batch]:
        """Return the batches themselves: iteration continues where it stopped."""
        return self

    @abstractmethod
    def __next__(self) -> Batch:
        """Return the next batch; its arrays may be overwritten when the one after it is asked for."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a hash of all that decides which samples are served."""

    @abstractmethod
    def past(self, sample: int) -> list[Any] | None:
        """Return what decided the samples of a mixture before this one (:meth:`MixedDataset.past`); None: it is none."""

    @property
    def blend(self) -> Blend[Any] | None:
        """The sources that are mixed; None: there is one, or another process reads them."""
        return None

    def close(self) -> None:
        """Let go of batches that were prepared ahead; the next one is prepared anew."""

    def __exit__(self, *_: object) -> None:
        """Close them."""
        self.close()

    def seek(self, sample: int) -> None:
        """Continue at a sample, counted over all epochs; where samples are dealt, a step begins there."""
        if sample < 0:
            raise UsageError(f"cannot start at sample {sample}")
        self.close()
        self.next_sample = self._first = sample

    def state(self) -> dict[str, Any]:
        """Return the position in the batches, as JSON values.

        Batches prepared ahead but not yet taken do not count. The state does not depend on the batch size: it can be
        loaded with another one.

        Raises:
            UsageError: Samples are dealt, and some of a step are not served yet.
        """
        following = self._next(self.next_sample)
        if self.deal_to and following and following[0] != following[1]:
            raise UsageError(
                f"{following[0] - following[1]} samples are no whole steps of {self.step_samples} samples, which are "
                "dealt together; take the state after a step"
            )
        state: dict[str, Any] = {
            "version": STATE_VERSION,
            "next_sample": self.next_sample,
            "samples_per_epoch": self._epochs.size,
            "earlier_samples": self.earlier_samples,
            "dataset": self.fingerprint(),
        }
        if (past := self.past(self.next_sample)) is not None:
            state["mixture"] = past
        return state

    def counts(self, first: int, count: int) -> list[int] | None:
        """Return how many samples of a step are of each source; None: there is one source only."""
        if self.blend is None:
            return None
        return self.blend.counts(self._epochs.samples(first, count))

    def load_state(self, state: dict[str, Any], other_data: bool = False) -> bool:
        """Continue where ``state`` was taken; return whether it was with other data, which begin at their first sample.

        A mixture's data are the same if they are so up to the state's sample.

        Args:
            other_data: Whether the state may be of another dataset.

        Raises:
            BadInputError: If the state is of another version or another dataset.
        """
        missing = {"version", "next_sample", "samples_per_epoch", "dataset"} - set(state)
        if missing or state["version"] != STATE_VERSION:
            raise BadInputError(
                f"data state {state} cannot be read: expected version {STATE_VERSION} with "
                "next_sample, samples_per_epoch and dataset"
            )
        other, sample = state["dataset"] != self.fingerprint(), int(state["next_sample"])
        size, earlier = int(state["samples_per_epoch"]), int(state.get("earlier_samples", 0))
        if not other and (past := self.past(sample)) is not None:
            other = state.get("mixture") != past
            if other and not other_data:
                raise BadInputError(
                    f"the checkpoint saw {sample} samples of another mixture: sources, weights, seed, sequence length or "
                    f"masks before that sample differ; leave telechat_moe.mixture as it was up to sample {sample}, where "
                    "an item may begin, begin with these data (telechat_moe.resume_data: new), or start from the beginning"
                )
            if not other and size != self._epochs.size < sample:
                raise BadInputError(
                    f"the checkpoint saw {sample} samples of a mixture of {size}, the recipe's has {self._epochs.size}; "
                    f"at least {sample} in train_dataset.data_loader.sizes"
                )
        if other and not other_data:
            raise BadInputError(
                "the checkpoint was made with other training data: files, seed, sizes, sequence length or masks "
                "differ; resume with the old ones, begin with these ones (telechat_moe.resume_data: new), or start "
                "from the beginning"
            )
        self.earlier_samples = earlier + other * sample
        self.seek(0 if other else self._epochs.place_of(sample, size))
        return other


class Loader(Batches):
    """Read batches from a dataset.

    A batch is a dict of the dataset's columns with a leading axis ``batch_size``.

    Args:
        prefetch: Batches prepared ahead by a thread.
        epoch_samples: Samples of a pass; the whole dataset if None.
        deal_to, unit: See :class:`Batches`.
        mark_sources: Multiply the loss mask of each sample by one plus the number of its source, where there are several.

    Raises:
        BadInputError: If the samples do not fill one unit.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        prefetch: int = 2,
        *,
        epochs: int | None = 1,
        epoch_samples: int | None = None,
        deal_to: tuple[int, int] | None = None,
        unit: int | None = None,
        mark_sources: bool = False,
    ) -> None:
        if batch_size < 1 or prefetch < 0:
            raise UsageError(
                f"batch_size {batch_size}, prefetch {prefetch}: expected a size of 1 or more, prefetch >= 0"
            )
        available = len(dataset) if epoch_samples is None else min(epoch_samples, len(dataset))
        super().__init__(batch_size, available, epochs, deal_to, unit)
        if available < self._epochs.unit:
            raise BadInputError(
                f"{available} samples do not fill one batch of {self._epochs.unit}; lower the batch size or add text"
            )
        self.dataset = dataset
        self._mark_sources = mark_sources
        self._dealt: tuple[int, np.ndarray] | None = None  # a step's first sample, and its order
        self._prefetch = prefetch
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: deque[tuple[int, Future[tuple[Batch, np.ndarray | None]]]] = deque()

    def fingerprint(self) -> str:
        """See :meth:`Batches.fingerprint`."""
        return self.dataset.fingerprint()

    def past(self, sample: int) -> list[Any] | None:
        """See :meth:`Batches.past`."""
        return self.dataset.past(sample) if isinstance(self.dataset, MixedDataset) else None

    @property
    def blend(self) -> Blend[Any] | None:
        """See :attr:`Batches.blend`."""
        return self.dataset if isinstance(self.dataset, Blend) else None

    def __next__(self) -> Batch:
        """Return the next batch; an error in the thread is raised here."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "telechat-moe-data")
        while len(self._ahead) <= self._prefetch:
            end = self._ahead[-1][0] + self.batch_size if self._ahead else self.next_sample
            if (following := self._next(end)) is None:
                break
            place, step = following
            self._ahead.append((place, self._thread.submit(self._prepare, step, place)))
        if not self._ahead:
            self.close()
            raise StopIteration
        place, future = self._ahead[0]
        try:
            batch, self.order = future.result()
        except BaseException:
            self.close()
            raise
        self._ahead.popleft()
        self.next_sample = place + self.batch_size
        return batch

    def _prepare(self, step: int, start: int) -> tuple[Batch, np.ndarray | None]:
        """Return the batch of the samples from ``start`` on, of the step that begins at ``step``, and the step's order."""
        return self.batch(self.rows(step, start)), self._dealt[1] if self._dealt else None

    def rows(self, step: int, start: int) -> np.ndarray:
        """Return the samples, counted over all epochs, of the batch from ``start`` on, of the step that begins at ``step``."""
        if self.deal_to is None:
            return np.arange(start, start + self.batch_size)
        if self._dealt is None or self._dealt[0] != step:
            # By batches, which bounds the memory for long sequences.
            rows = np.arange(step, step + self.step_samples) % self._epochs.size
            parts = np.split(rows, self.deal_to[1])
            pairs = np.concatenate([self.dataset.visible_pairs(part) for part in parts])
            self._dealt = step, deal(pairs, *self.deal_to)
        return step + self._dealt[1][(start - step) // self.batch_size].ravel()

    def batch(self, rows: np.ndarray) -> Batch:
        """Return samples of the dataset, counted over all epochs."""
        indices = rows % self._epochs.size
        batch = self.dataset.batch(indices)
        if self._mark_sources and self.blend is not None and len(self.blend.datasets) > 1:
            marks_B = 1 + self.blend.chosen[indices].astype(np.float32)
            batch["loss_mask"] = batch["loss_mask"] * marks_B[:, None]
        return batch

    def close(self) -> None:
        """End the thread. The loader stays usable: it starts a new thread where it stopped."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._thread = None
        self._ahead.clear()
