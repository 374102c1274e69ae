"""How documents become samples: the three indices of a Megatron GPT dataset.

The documents of all epochs are laid out in a shuffled row (document index), the row is divided every
``seq_length`` tokens (sample index; a sample takes one token more, so that it has a label for each
input), and the samples are served in a shuffled order (shuffle index). All three equal those of
MindFormers 1.9.0's ``GPTDataset``, sample for sample; tests/data/test_mindformers.py compares them.

Source: Megatron-LM ``megatron/core/datasets/gpt_dataset.py`` and ``helpers.cpp`` (the algorithm).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from telechat_moe.files import Progress

Allocate = Callable[[str, tuple[int, ...], np.dtype[Any]], np.ndarray]

_PART = 1 << 20
"""Documents and cuts of which arrays are in memory at a time."""
FINAL_EPOCH_THRESHOLD = 0.80
"""A final epoch used to less than this share is shuffled apart from the full epochs before it."""


@dataclass(frozen=True)
class SampleIndices:
    """The three indices.

    Attributes:
        documents: int32 ``[epochs * documents]``, the row of documents.
        samples: int32 (int64 from 2^31 documents on) ``[samples + 1, 2]``, (position in ``documents``, token offset) where
            each starts.
        shuffle: uint32 ``[samples]``, which sample of the row is served as the i-th.
    """

    documents: np.ndarray
    samples: np.ndarray
    shuffle: np.ndarray
    epochs: int


class IndexSizes(NamedTuple):
    """How large the indices are.

    Attributes:
        documents: Documents of an epoch.
        samples: Samples of all epochs.
        together: Samples that are shuffled together, the first ones; the others are those of a separate final epoch.
    """

    documents: int
    epochs: int
    samples: int
    together: int

    @property
    def entries(self) -> int:
        """Numbers in the three indices."""
        return self.documents * self.epochs + 3 * self.samples


def sizes_of(
    tokens: int,
    documents: int,
    *,
    seq_length: int,
    num_samples: int | None,
    extra_token: bool = True,
) -> IndexSizes:
    """Return how large the indices of so many tokens in so many documents are; see :func:`build_indices`.

    Raises:
        ValueError: If the documents hold fewer tokens than one sample needs.
    """
    extra = int(extra_token)
    if tokens == 0:
        raise ValueError("the documents hold no tokens")
    epochs = 1
    if num_samples is not None:
        epochs = max(1, -(-(num_samples * seq_length + extra) // tokens))
    total = epochs * tokens
    samples = together = (total - extra) // seq_length
    if samples <= 0:
        raise ValueError(f"{total} tokens are fewer than the {seq_length + extra} of one sample")
    if epochs > 1:
        assert num_samples is not None
        full = ((epochs - 1) * tokens - extra) // seq_length
        samples_per_epoch = (tokens - extra) // seq_length
        if num_samples - full < int(FINAL_EPOCH_THRESHOLD * samples_per_epoch):
            together = full
    return IndexSizes(documents, epochs, samples, together)


def build_indices(
    lengths: np.ndarray,
    documents: tuple[int, int],
    *,
    seq_length: int,
    num_samples: int | None,
    seed: int,
    extra_token: bool = True,
    allocate: Allocate | None = None,
    progress: Progress | None = None,
) -> SampleIndices:
    """Build the indices of a dataset, a bounded part of them at a time.

    Args:
        lengths: int32, tokens of every document of the file.
        documents: The documents to use, a range.
        num_samples: At least this many samples are made, from as many whole epochs as that takes;
            None means one epoch.
        extra_token: A sample has ``seq_length + 1`` tokens, so neighbours share one.
        allocate: Returns the array of a name, shape and type to fill; None: in memory.

    Raises:
        ValueError: If the documents hold fewer tokens than one sample needs.
    """
    first, end = documents
    sizes = sizes_of(
        int(lengths[first:end].sum(dtype=np.int64)),
        end - first,
        seq_length=seq_length,
        num_samples=num_samples,
        extra_token=extra_token,
    )
    allocate = allocate or (lambda name, shape, dtype: np.empty(shape, dtype))
    say = progress or (lambda action, count_done, total: None)
    # The legacy generator is what defines the order in Megatron and MindFormers.
    generator = np.random.RandomState(seed)
    count = sizes.documents
    row = allocate("documents", (count * sizes.epochs,), np.dtype(np.int32))
    separate = sizes.together != sizes.samples
    for part in np.split(row, [(sizes.epochs - 1) * count] if separate else []):
        for begin in range(0, len(part), count):
            _count_up(part[begin : begin + count], first)
        say("shuffling documents", 0, None)
        generator.shuffle(part)
    places = np.int32 if len(row) < np.iinfo(np.int32).max else np.int64
    samples = allocate("samples", (sizes.samples + 1, 2), np.dtype(places))
    _cut(lengths, row, seq_length, int(extra_token), samples, say)
    small = sizes.samples < np.iinfo(np.uint32).max - 1
    shuffle = allocate("shuffle", (sizes.samples,), np.dtype(np.uint32 if small else np.int64))
    for begin, part in zip((0, sizes.together), np.split(shuffle, [sizes.together]), strict=True):
        _count_up(part, begin)
        say("shuffling samples", 0, None)
        generator.shuffle(part)
    return SampleIndices(row, samples, shuffle, sizes.epochs)


def _count_up(out: np.ndarray, first: int) -> None:
    """Fill an array with first, first + 1, ..."""
    for begin in range(0, len(out), _PART):
        part = out[begin : begin + _PART]
        part[:] = np.arange(first + begin, first + begin + len(part))


def _cut(
    lengths: np.ndarray,
    row: np.ndarray,
    seq_length: int,
    extra: int,
    out: np.ndarray,
    say: Progress,
) -> None:
    """Divide the row every ``seq_length`` tokens; write where each sample starts, and the end.

    The k-th sample spans the tokens from ``k * seq_length`` to ``(k + 1) * seq_length``, the last
    one included where ``extra`` is 1. A start is given by the document that holds its token; where
    ``extra`` is 0, by the document that holds the token before it, so its offset may equal that
    document's length.
    """
    before, cut_count = 0, 0  # tokens of the documents before the part, and cuts in them
    for begin in range(0, len(row), _PART):
        tokens = lengths[row[begin : begin + _PART]]
        ends = before + np.cumsum(tokens, dtype=np.int64)
        last = int(ends[-1])
        reached = min(-(-last // seq_length) if extra else last // seq_length + 1, len(out))
        for first in range(cut_count, reached, _PART):
            cuts = np.arange(first, min(first + _PART, reached), dtype=np.int64) * seq_length
            place = np.searchsorted(ends, cuts, side="right" if extra else "left")
            part = out[first : first + len(cuts)]
            part[:, 0] = begin + place
            part[:, 1] = cuts - (ends[place] - tokens[place])
        before, cut_count = last, max(cut_count, reached)
        say("cutting samples", cut_count, len(out))
    out[0] = 0  # also where the row starts with empty documents


def blend_indices(weights: list[float], size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Choose for each sample of a blend the dataset and the sample of that dataset.

    Each sample is taken from the dataset that lags most behind its share.

    Args:
        weights: Share of each dataset; they sum to 1.

    Yields:
        int16 dataset and int64 sample within it, of all samples in order, a part of them at a time.
    """
    counts = [0] * len(weights)
    for begin in range(0, size, _PART):
        count = min(_PART, size - begin)
        if len(weights) == 1:
            yield np.zeros(count, dtype=np.int16), np.arange(begin, begin + count, dtype=np.int64)
            continue
        chosen, within = [0] * count, [0] * count  # lists: this loop is about 0.5 us a sample
        for place in range(count):
            position = float(max(begin + place, 1))
            best, best_lag = 0, weights[0] * position - counts[0]
            for dataset in range(1, len(weights)):
                lag = weights[dataset] * position - counts[dataset]
                if lag > best_lag:
                    best, best_lag = dataset, lag
            chosen[place], within[place] = best, counts[best]
            counts[best] += 1
        yield np.array(chosen, dtype=np.int16), np.array(within, dtype=np.int64)
