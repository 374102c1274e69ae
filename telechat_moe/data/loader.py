"""Batches for training, prepared ahead in a thread, and resumable at any sample.

::

    loader = Loader(dataset, batch_size=8)
    for batch in loader:
        ...
        state = loader.state()          # the next sample to serve; JSON
    loader.load_state(state)

The order is that of MindFormers: samples 0, 1, 2, ... of the dataset (which is shuffled already),
and the same order in every further epoch.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from telechat_moe.data.dataset import Dataset
from telechat_moe.data.sample import Batch
from telechat_moe.errors import BadInputError, UsageError

STATE_VERSION = 1
Slicing = Literal["interleaved", "contiguous"]


@dataclass(frozen=True)
class _Batches:
    """Which samples make which batch.

    Samples are counted through all epochs; the g-th sample is number ``g % epoch_samples`` of the
    dataset.
    """

    batch_size: int
    dp_rank: int
    dp_size: int
    slicing: Slicing
    epoch_samples: int
    total_samples: int | None

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.dp_size

    def has(self, start: int) -> bool:
        return self.total_samples is None or start + self.global_batch <= self.total_samples

    def rows(self, start: int) -> np.ndarray:
        """Return this rank's samples of the global batch that begins at ``start``."""
        place = np.arange(self.batch_size)
        if self.slicing == "interleaved":
            place = place * self.dp_size + self.dp_rank
        else:
            place = place + self.dp_rank * self.batch_size
        return (start + place) % self.epoch_samples


@dataclass(frozen=True)
class _Failure:
    error: BaseException


_END = object()


def _work(
    dataset: Dataset,
    plan: _Batches,
    start: int,
    ready: queue.Queue[Any],
    stop: threading.Event,
) -> None:
    """Fill the queue until the samples end or ``stop`` is set."""
    item: Any = None
    while item is not _END and not isinstance(item, _Failure):
        try:
            item = dataset.batch(plan.rows(start)) if plan.has(start) else _END
        except BaseException as error:  # it is raised in the consumer
            item = _Failure(error)
        start += plan.global_batch
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                break
            except queue.Full:
                continue
        if stop.is_set():
            return


class Loader:
    """Iterate over batches.

    A batch is a dict of the dataset's columns with a leading axis ``batch_size``. A last batch that
    cannot be filled is dropped, so within an epoch no sample is served twice.

    Args:
        dataset: What to read.
        batch_size: Samples of this rank in a batch.
        start_sample: First sample to serve, counted over all ranks and epochs.
        prefetch: Batches prepared ahead by a thread; 0 prepares each when it is asked for.
        dp_rank: This rank among those that share the data.
        dp_size: Number of ranks that share the data. Rank r gets samples ``r, r + dp_size, ...``,
            as MindFormers gives them where ``full_batch`` is false.
        epochs: Passes over the samples; None never ends.
        epoch_samples: Samples of a pass; the whole dataset if None. Rounded down to whole global
            batches.
        slicing: "contiguous" gives rank r the r-th run of ``batch_size`` samples of each global
            batch instead, as a layout does that slices the full batch (``full_batch: true``).

    Raises:
        BadInputError: If the samples do not fill one global batch.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        start_sample: int = 0,
        prefetch: int = 2,
        dp_rank: int = 0,
        dp_size: int = 1,
        *,
        epochs: int | None = 1,
        epoch_samples: int | None = None,
        slicing: Slicing = "interleaved",
    ) -> None:
        if batch_size < 1 or dp_size < 1 or not 0 <= dp_rank < dp_size or prefetch < 0:
            raise UsageError(
                f"batch_size {batch_size}, dp_rank {dp_rank} of dp_size {dp_size}, prefetch "
                f"{prefetch}: expected sizes of 1 or more, a rank below dp_size, prefetch >= 0"
            )
        available = len(dataset) if epoch_samples is None else min(epoch_samples, len(dataset))
        global_batch = batch_size * dp_size
        per_epoch = available // global_batch * global_batch
        if per_epoch == 0:
            raise BadInputError(
                f"{available} samples do not fill one batch of {batch_size} x {dp_size} rank(s); "
                "lower the batch size or add text"
            )
        total = None if epochs is None else per_epoch * epochs
        self.dataset = dataset
        self._plan = _Batches(batch_size, dp_rank, dp_size, slicing, per_epoch, total)
        self._prefetch = prefetch
        self._next = 0
        self._ready: queue.Queue[Any] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._finalizer = weakref.finalize(self, self._stop.set)
        self.seek(start_sample)

    @property
    def samples_per_epoch(self) -> int:
        """Samples served in a pass, over all ranks."""
        return self._plan.epoch_samples

    @property
    def next_sample(self) -> int:
        """First sample of the next batch, counted over all ranks and epochs."""
        return self._next

    def __len__(self) -> int:
        """Return the number of batches that are left."""
        if self._plan.total_samples is None:
            raise TypeError("a loader without an end has no length")
        return max(0, self._plan.total_samples - self._next) // self._plan.global_batch

    def __iter__(self) -> Iterator[Batch]:
        """Return the loader itself: iteration continues where it stopped."""
        return self

    def __next__(self) -> Batch:
        """Return the next batch; an error in the thread is raised here."""
        if self._prefetch == 0:
            if not self._plan.has(self._next):
                raise StopIteration
            batch = self.dataset.batch(self._plan.rows(self._next))
        else:
            batch = self._take()
        self._next += self._plan.global_batch
        return batch

    def _take(self) -> Batch:
        if not self._plan.has(self._next):
            self.close()
            raise StopIteration
        if self._ready is None:
            self._start()
        assert self._ready is not None
        item = self._ready.get()
        if isinstance(item, _Failure):
            self.close()
            raise item.error
        return item

    def _start(self) -> None:
        self._ready = queue.Queue(maxsize=self._prefetch)
        self._stop = threading.Event()
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, self._stop.set)
        # The thread does not hold the loader: one that is dropped unclosed ends its thread.
        self._thread = threading.Thread(
            target=_work,
            args=(self.dataset, self._plan, self._next, self._ready, self._stop),
            name="telechat-moe-data",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread. The loader stays usable: it starts a new thread where it stopped."""
        self._stop.set()
        if self._thread is not None:
            while self._thread.is_alive():
                self._thread.join(timeout=0.1)
        self._thread = self._ready = None

    def __enter__(self) -> Loader:
        """Return the loader; it is closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the loader."""
        self.close()

    def seek(self, sample: int) -> None:
        """Continue at a sample, counted over all ranks and epochs."""
        if sample < 0:
            raise UsageError(f"cannot start at sample {sample}")
        self.close()
        self._next = sample

    def state(self) -> dict[str, Any]:
        """Return the position of the loader, as JSON values.

        Batches prepared ahead but not yet taken do not count. The state does not depend on the rank,
        nor on the batch size: it can be loaded with another one.
        """
        return {
            "version": STATE_VERSION,
            "next_sample": self._next,
            "samples_per_epoch": self._plan.epoch_samples,
            "dataset": self.dataset.fingerprint(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken.

        Raises:
            BadInputError: If the state is of another version or another dataset.
        """
        missing = {"version", "next_sample", "dataset"} - set(state)
        if missing or state["version"] != STATE_VERSION:
            raise BadInputError(
                f"data state {state} cannot be read: expected version {STATE_VERSION} with "
                "next_sample and dataset"
            )
        if state["dataset"] != self.dataset.fingerprint():
            raise BadInputError(
                "the checkpoint was made with other training data: files, seed, sizes, sequence "
                "length or masks differ; resume with the old ones or start anew"
            )
        self.seek(int(state["next_sample"]))
