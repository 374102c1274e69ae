"""How documents become samples: the three indices of a Megatron GPT dataset.

The documents of all epochs are laid out in a shuffled row (document index), the row is divided every
``seq_length`` tokens (sample index; a sample takes one token more, so that it has a label for each
input), and the samples are served in a shuffled order (shuffle index). All three equal those of
MindFormers 1.9.0's ``GPTDataset``, sample for sample; tests/data/test_mindformers.py compares them.

Source: Megatron-LM ``megatron/core/datasets/gpt_dataset.py`` and ``helpers.cpp`` (the algorithm).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FINAL_EPOCH_THRESHOLD = 0.80
"""A final epoch used to less than this share is shuffled apart from the full epochs before it."""


@dataclass(frozen=True)
class Indices:
    """The three indices.

    Attributes:
        documents: int32 ``[epochs * documents]``, the row of documents.
        samples: int64 ``[samples + 1, 2]``, (position in ``documents``, token offset) where each starts.
        shuffle: uint32 ``[samples]``, which sample of the row is served as the i-th.
        epochs: How many times the documents are repeated.
    """

    documents: np.ndarray
    samples: np.ndarray
    shuffle: np.ndarray
    epochs: int


def build_indices(
    lengths: np.ndarray,
    documents: np.ndarray,
    *,
    seq_length: int,
    num_samples: int | None,
    seed: int,
    extra_token: bool = True,
) -> Indices:
    """Build the indices of a dataset.

    Args:
        lengths: int32, tokens of every document of the file.
        documents: int32, the documents to use.
        seq_length: Tokens of a sample's input.
        num_samples: At least this many samples are made, from as many whole epochs as that takes;
            None means one epoch.
        extra_token: A sample has ``seq_length + 1`` tokens, so neighbours share one.

    Raises:
        ValueError: If the documents hold fewer tokens than one sample needs.
    """
    extra = int(extra_token)
    per_epoch = int(lengths[documents].sum(dtype=np.int64))
    if per_epoch == 0:
        raise ValueError("the documents hold no tokens")
    epochs = 1
    if num_samples is not None:
        epochs = max(1, -(-(num_samples * seq_length + extra) // per_epoch))
    full = ((epochs - 1) * per_epoch - extra) // seq_length
    separate = False
    if epochs > 1:
        assert num_samples is not None
        samples_per_epoch = (per_epoch - extra) // seq_length
        separate = num_samples - full < int(FINAL_EPOCH_THRESHOLD * samples_per_epoch)

    # The legacy generator is what defines the order in Megatron and MindFormers.
    generator = np.random.RandomState(seed)
    row = _document_row(documents, epochs, generator, separate)
    samples = _cut(lengths[row], seq_length, extra)
    count = len(samples) - 1
    return Indices(row, samples, _shuffle(full if separate else count, count, generator), epochs)


def _document_row(
    documents: np.ndarray,
    epochs: int,
    generator: np.random.RandomState,
    separate: bool,
) -> np.ndarray:
    """Lay the documents of all epochs in a shuffled row; a separate final epoch comes last."""
    if separate and epochs > 1:
        first = _document_row(documents, epochs - 1, generator, False)
        return np.concatenate((first, _document_row(documents, 1, generator, False)))
    row = np.tile(documents.astype(np.int32), epochs)
    generator.shuffle(row)
    return row


def _cut(lengths: np.ndarray, seq_length: int, extra: int) -> np.ndarray:
    """Divide the row every ``seq_length`` tokens; return where each sample starts, and the end.

    The k-th sample spans the tokens from ``k * seq_length`` to ``(k + 1) * seq_length``, the last
    one included where ``extra`` is 1. A start is given by the document that holds its token; where
    ``extra`` is 0, by the document that holds the token before it, so its offset may equal that
    document's length.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1])
    count = (total - extra) // seq_length
    if count <= 0:
        raise ValueError(f"{total} tokens are fewer than the {seq_length + extra} of one sample")
    cuts = np.arange(count + 1, dtype=np.int64) * seq_length
    place = np.searchsorted(ends, cuts, side="right" if extra else "left")
    offset = cuts - (ends[place] - lengths[place])
    place[0] = offset[0] = 0  # also where the row starts with empty documents
    return np.stack((place, offset), axis=1)


def _shuffle(first: int, total: int, generator: np.random.RandomState) -> np.ndarray:
    """Shuffle [0, first) and [first, total) each for itself."""
    dtype = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    parts = [np.arange(first, dtype=dtype)]
    generator.shuffle(parts[0])
    if first != total:
        parts.append(np.arange(first, total, dtype=dtype))
        generator.shuffle(parts[1])
    return np.concatenate(parts)


def blend_indices(weights: list[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Choose for each sample of a blend the dataset and the sample of that dataset.

    Each sample is taken from the dataset that lags most behind its share.

    Args:
        weights: Share of each dataset; they sum to 1.

    Returns:
        int16 dataset and int64 sample within it, each ``[size]``.
    """
    if len(weights) == 1:
        return np.zeros(size, dtype=np.int16), np.arange(size, dtype=np.int64)
    chosen, within = [0] * size, [0] * size  # lists: this loop is about 0.5 us a sample
    taken = [0] * len(weights)
    for sample in range(size):
        at = float(max(sample, 1))
        best, best_lag = 0, weights[0] * at - taken[0]
        for dataset in range(1, len(weights)):
            lag = weights[dataset] * at - taken[dataset]
            if lag > best_lag:
                best, best_lag = dataset, lag
        chosen[sample], within[sample] = best, taken[best]
        taken[best] += 1
    return np.array(chosen, dtype=np.int16), np.array(within, dtype=np.int64)
