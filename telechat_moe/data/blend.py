"""Several datasets as one, and a ``data_path`` as MindFormers reads it.

::

    dataset = open_blend(["0.3", "a/train", "0.7", "b/train"], seq_length=512, size=4000)
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Generic, TypeVar

import numpy as np

from telechat_moe.data.dataset import (
    Dataset,
    GptDataset,
    Indices,
    SampleSource,
    hash_settings,
    in_range,
)
from telechat_moe.data.document_packing import WholeDataset
from telechat_moe.data.index import open_arrays
from telechat_moe.data.indexed import IndexedDataset
from telechat_moe.data.pack import Allocate, blend_indices
from telechat_moe.data.sample import Batch, SampleOptions, put_together
from telechat_moe.errors import BadInputError
from telechat_moe.files import Progress

Samples = GptDataset | WholeDataset
Blended = TypeVar("Blended", bound=SampleSource)
SIZE_MARGIN = 1.005
"""MindFormers asks 0.5 % more samples of each dataset that has a weight."""


class CombinedSource(SampleSource, Generic[Blended]):
    """Samples that are taken from several sources."""

    @abstractmethod
    def by_part(self, indices: Indices) -> Iterator[tuple[Blended, np.ndarray, np.ndarray]]:
        """Yield the sources of samples: each with the rows that are its own and their samples there."""

    def batch(self, indices: Indices) -> Batch:
        """See :meth:`SampleSource.batch`."""
        parts = ((part.batch(within), rows) for part, rows, within in self.by_part(indices))
        return put_together(len(indices), parts)

    def visible_pairs(self, indices: Indices) -> np.ndarray:
        """See :meth:`SampleSource.visible_pairs`."""
        pairs_B = np.empty(len(indices), np.int64)
        for part, rows, within in self.by_part(indices):
            pairs_B[rows] = part.visible_pairs(within)
        return pairs_B


class Blend(CombinedSource[Blended], Dataset):
    """Samples that are taken from several datasets in an order that is laid out before.

    Attributes:
        chosen: int16, the dataset of each sample.
        within: int64, the sample of that dataset; not there where there is one dataset only.
    """

    datasets: list[Blended]
    chosen: np.ndarray
    within: np.ndarray

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.chosen)

    def by_part(self, indices: Indices) -> Iterator[tuple[Blended, np.ndarray, np.ndarray]]:
        """See :meth:`CombinedSource.by_part`."""
        samples = in_range(indices, len(self))
        chosen, within = self.chosen[samples], samples
        if len(self.datasets) > 1:
            within = self.within[samples]
        for which in np.unique(chosen).tolist():
            rows = np.flatnonzero(chosen == which)
            yield self.datasets[which], rows, within[rows]

    def samples_of(self, number: int) -> np.ndarray:
        """Return the samples that are taken of one dataset, in order, int64."""
        if len(self.datasets) == 1:
            return np.arange(len(self))
        return self.within[self.chosen == number]

    def counts(self, indices: Indices) -> list[int]:
        """Return how many of these samples are of each dataset."""
        return np.bincount(self.chosen[indices], minlength=len(self.datasets)).tolist()


def lay_out(
    segments: Sequence[tuple[int, Sequence[float]]],
    size: int,
    source: IndexedDataset,
    progress: Progress | None = None,
) -> dict[str, np.ndarray]:
    """Return from which dataset each sample is taken; where there are many samples, the answer is kept beside ``source``.

    Args:
        segments: First sample and weights of each part of the samples, which is a blend of its own; datasets continue.

    Returns:
        ``chosen`` and ``within``, see :class:`Blend`, and ``taken``, int64: samples of each dataset.
    """
    count = len(segments[0][1])

    def build(allocate: Allocate | None) -> dict[str, np.ndarray]:
        new = allocate or (lambda name, shape, dtype: np.empty(shape, dtype))
        chosen = new("chosen", (size,), np.dtype(np.int16))
        within = new("within", (size,), np.dtype(np.int64))
        counts = np.zeros(count, np.int64)
        ends = [start for start, _ in segments[1:]]
        for (start, weights), end in zip(segments, [*ends, size], strict=True):
            # A weight of 0 would win where all others are exactly level.
            live = np.flatnonzero(np.array(weights) > 0)
            before = counts.copy()
            for which, number in blend_indices([weights[i] for i in live], end - start):
                part = slice(start, start + len(which))
                chosen[part], within[part] = live[which], number + before[live[which]]
                counts[live] += np.bincount(which, minlength=len(live))
                start = part.stop
                if progress is not None and allocate is not None:
                    progress("mixing sources", start, size)
        return {"chosen": chosen, "within": within, "taken": counts}

    key = ["blend", [list(segment) for segment in segments], size]
    return open_arrays(source, key, 2 * size, build, f"{size:,} samples of {count} sources")


class BlendedDataset(Blend[Samples]):
    """Samples of several datasets in proportion to their weights.

    Args:
        weights: Share of each; any positive scale.

    Raises:
        BadInputError: If a dataset has fewer samples than its share needs.
    """

    def __init__(
        self,
        datasets: Sequence[Samples],
        weights: Sequence[float],
        size: int,
        progress: Progress | None = None,
    ) -> None:
        self.datasets = list(datasets)
        self.weights = normalised(weights)
        needed = [size]
        if len(self.datasets) == 1:  # no memory for each sample
            self.chosen = np.broadcast_to(np.int16(0), size)
        else:
            source = self.datasets[0].source
            order = lay_out([(0, self.weights)], size, source, progress)
            self.chosen, self.within = order["chosen"], order["within"]
            needed = order["taken"].tolist()
        for dataset, count in zip(self.datasets, needed, strict=True):
            if len(dataset) < count:
                raise BadInputError(
                    f"{dataset.source.prefix}: the blend takes {count} samples, but it has "
                    f"{len(dataset)}; change the weights or the size"
                )

    def fingerprint(self) -> str:
        """Return a hash of the datasets, their weights and the size."""
        prints = [dataset.fingerprint() for dataset in self.datasets]
        return hash_settings({"datasets": prints, "weights": self.weights, "size": len(self)})


def open_blend(
    data_path: Sequence[str | float],
    *,
    seq_length: int,
    size: int | None,
    seed: int = 1234,
    split: str | None = "1, 0, 0",
    options: SampleOptions | None = None,
    conversations: bool = False,
    window: int | None = None,
    progress: Progress | None = None,
) -> Samples | BlendedDataset:
    """Open ``data_path`` of a recipe as MindFormers' data loader does.

    Args:
        data_path: ``[weight, prefix, weight, prefix, ...]``, or prefixes alone, which are weighted by their numbers of
            samples.
        size: Samples wanted. With weights the dataset serves 0.5 % more, with a prefix alone all samples of whole
            epochs. None, without weights only: one epoch.
        split: Shares of the documents that go to train, valid and test; those of train are opened. None for files of
            one phase (``train_data_path``): all documents, and a single prefix with a weight is opened as one without.
        conversations: The files are of conversations, which stay whole.
        window: Documents stay whole, packed by :class:`telechat_moe.data.document_packing.BestFit`; None: text is cut.

    Raises:
        BadInputError: If the path list or the split cannot be understood, or a dataset is broken.
    """
    from telechat_moe.recipe.data_path import parse_data_path, parse_split  # not light

    try:
        prefixes, weights = parse_data_path(data_path)
        shares = None if split is None else parse_split(split)
    except ValueError as error:
        raise BadInputError(
            f"data_path is {list(data_path)}, split {split!r}; expected {error}"
        ) from None
    weights = None if split is None and len(prefixes) == 1 else weights and normalised(weights)
    if weights is not None and size is None:
        raise BadInputError(f"data_path {list(data_path)} has weights, so it needs a size")
    sources = [IndexedDataset(prefix) for prefix in prefixes]
    sizes: list[int | None] = [size] if len(sources) == 1 else [None] * len(sources)
    if weights is not None and size is not None:
        sizes = [math.ceil(size * weight * SIZE_MARGIN) for weight in weights]
    share = None if shares is None else normalised(shares)[0]
    kind: Callable[..., Samples] = GptDataset
    if conversations or window is not None:
        kind = partial(WholeDataset, window=window or 1, conversations=conversations)
    datasets = [
        kind(source, seq_length, count, seed, documents=first_of(source, share), options=options, progress=progress)
        for source, count in zip(sources, sizes, strict=True)
    ]  # fmt: skip
    if weights is not None:
        return BlendedDataset(datasets, weights, sum(count or 0 for count in sizes), progress)
    if len(datasets) == 1:
        return datasets[0]
    counts = [len(dataset) for dataset in datasets]
    return BlendedDataset(datasets, counts, min(size or sum(counts), sum(counts)), progress)


def first_of(source: IndexedDataset, share: float | None) -> tuple[int, int] | None:
    """Return the range of a dataset's first documents, a share of all; None: all, without a range."""
    return None if share is None else (0, round(share * len(source)))


def normalised(weights: Sequence[float]) -> list[float]:
    """Return weights of any positive scale as shares that sum to 1."""
    array = np.array(weights, dtype=np.float64)
    return (array / array.sum()).tolist()
