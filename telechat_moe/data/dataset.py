"""Packed samples of one pair of .bin/.idx files.

Every sample equals that of MindFormers 2.1.0 for the same files and settings. So do those of 1.9.0, but for one thing:
where ``pad`` is a token that occurs in the data and no mask option is set, 1.9.0 lets the positions masked in one sample
stay masked in all samples that follow.

Shapes: B samples, S = ``seq_length``.
"""

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from telechat_moe.data.balance import visible_pairs
from telechat_moe.data.index import open_indices
from telechat_moe.data.indexed import IndexedDataset
from telechat_moe.data.sample import Batch, SampleOptions, collate
from telechat_moe.errors import BadInputError
from telechat_moe.files import Progress

Indices = Sequence[int] | np.ndarray
FEW_PIECES = 16
"""Up to this many documents are copied one by one; of more, all tokens at once."""


class SampleSource(ABC):
    """Samples that can be taken by number."""

    @abstractmethod
    def batch(self, indices: Indices) -> Batch:
        """Return samples stacked along a first axis B.

        Raises:
            IndexError: An index is outside [0, len).
            BadInputError: A token is outside the vocabulary.
        """

    @abstractmethod
    def visible_pairs(self, indices: Indices) -> np.ndarray:
        """Return the pairs of tokens of which one sees the other within documents, int64 ``[B]``."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a hash of all that decides which samples are served."""

    def __getitem__(self, index: int) -> Batch:
        """Return one sample."""
        return {name: array[0] for name, array in self.batch([index]).items()}


class Dataset(SampleSource):
    """What the loader needs of a dataset: samples by number, and how many there are."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""


class PackedDataset(Dataset):
    """Samples that are made of the tokens of one pair of .bin/.idx files.

    Args:
        settings: What decides the samples beside the files and the options, JSON values.

    Raises:
        BadInputError: The files are broken.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str] | IndexedDataset,
        seq_length: int,
        options: SampleOptions | None,
        settings: dict[str, Any],
    ) -> None:
        self.source = prefix if isinstance(prefix, IndexedDataset) else IndexedDataset(prefix)
        self.seq_length, self.options = seq_length, options or SampleOptions()
        self.settings = {"seq_length": seq_length, **settings}

    def fingerprint(self) -> str:
        """Return a hash of the index file and of all settings that decide the samples."""
        about = {"options": asdict(self.options) | {"vocab_size": None}}
        return hash_settings({"index": self.source.fingerprint(), **self.settings, **about})


class GptDataset(PackedDataset):
    """Packed samples of one dataset, as Megatron cuts them.

    A sample has ``input_ids``, ``labels`` and ``position_ids`` int32 ``[S]``, ``loss_mask`` float32
    ``[S]``, where asked for ``attention_mask`` uint8 ``[1, S, S]`` (1 = may not see) or
    ``actual_seq_len`` int32 ``[eod_pad_length]``.

    Args:
        prefix: Path of the .bin/.idx pair without suffix, or an open dataset.
        seq_length: Tokens of a sample's input, ``S``.
        num_samples: At least this many samples, from as many epochs as that takes; None for one
            epoch. ``len()`` is all samples of those epochs, as in MindFormers.
        documents: Documents to use, a range; None for all.

    Raises:
        BadInputError: If the files are broken or hold fewer tokens than one sample.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str] | IndexedDataset,
        seq_length: int,
        num_samples: int | None = None,
        seed: int = 1234,
        *,
        documents: tuple[int, int] | None = None,
        options: SampleOptions | None = None,
        progress: Progress | None = None,
    ) -> None:
        order = {"seq_length": seq_length, "num_samples": num_samples, "seed": seed}
        settings = {**order, "documents": documents, "drop_last": True}
        super().__init__(prefix, seq_length, options, settings)
        if seq_length < 1:
            raise BadInputError(f"seq_length must be 1 or more, found {seq_length}")
        order["extra_token"] = self.options.add_extra_token_to_sequence
        chosen = documents or (0, len(self.source))
        try:
            self.indices = open_indices(self.source, chosen, progress=progress, **order)
        except ValueError as error:
            raise BadInputError(
                f"{self.source.prefix}: {error}; lower seq_length ({seq_length}) or add text"
            ) from None

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.indices.samples) - 1

    def batch(self, indices: Indices) -> Batch:
        """See :meth:`SampleSource.batch`."""
        return collate(self.windows(indices), self.seq_length, self.options)

    def visible_pairs(self, indices: Indices) -> np.ndarray:
        """See :meth:`SampleSource.visible_pairs`."""
        return visible_pairs(self.windows(indices)[:, : self.seq_length], self.options.eod)

    def windows(self, indices: Indices) -> np.ndarray:
        """Return the bare tokens of samples, int32 ``[B, S + 1]`` (``[B, S]`` without the extra)."""
        samples = in_range(indices, len(self))
        extra = int(self.options.add_extra_token_to_sequence)
        width = self.seq_length + extra
        window = np.full((len(samples), width), self.options.pad, dtype=np.int32)
        cuts = self.indices.samples
        for row_number, cut in enumerate(self.indices.shuffle[samples].tolist()):
            (first, begin), (last, end) = cuts[cut].tolist(), cuts[cut + 1].tolist()
            row = self.indices.documents[first : last + 1]
            lengths = self.source.sequence_lengths[row].astype(np.int64)
            starts = self.source.sequence_pointers[row] // self.source.dtype.itemsize
            lengths[-1] = end + extra
            lengths[0] -= begin
            starts[0] += begin
            _gather(self.source.tokens, starts, lengths, window[row_number])
        check_vocabulary(self.source, window, samples, self.options)
        return window


def _gather(tokens: np.ndarray, starts: np.ndarray, lengths: np.ndarray, out: np.ndarray) -> None:
    """Copy ranges of ``tokens`` one after another to the front of ``out``."""
    ends = np.cumsum(lengths)
    if len(lengths) <= FEW_PIECES:
        for start, length, end in zip(
            starts.tolist(), lengths.tolist(), ends.tolist(), strict=True
        ):
            out[end - length : end] = tokens[start : start + length]
        return
    # The j-th token is at j plus a shift that is constant within each range.
    places = np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1])
    out[: len(places)] = tokens[places]


def check_vocabulary(
    source: IndexedDataset, tokens: np.ndarray, indices: np.ndarray, options: SampleOptions
) -> None:
    """Raise BadInputError if a token of the samples ``indices`` is outside the vocabulary."""
    limit = options.vocab_size
    if limit is None or not tokens.size:
        return
    bad = (tokens >= limit) | ((tokens < 0) & (tokens != options.pad))
    if bad.any():
        sample, place = np.argwhere(bad)[0]
        token = tokens[sample, place]
        todo = "raise vocab_size or build the dataset with the model's tokenizer"
        if token < -1:
            todo = "data built from conversations need the section telechat_moe.conversations"
        raise BadInputError(
            f"{source.prefix}.bin: sample {indices[sample]} holds token {token}, but the model's vocab_size is {limit}; {todo}"
        )


def in_range(indices: Indices, count: int) -> np.ndarray:
    """Return indices as int64; raise IndexError if one is outside [0, count)."""
    samples = np.asarray(indices, dtype=np.int64)
    outside = samples[(samples < 0) | (samples >= count)]
    if outside.size:
        raise IndexError(f"sample {outside[0]} of {count}")
    return samples


def hash_settings(value: dict[str, Any]) -> str:
    """Return the SHA-256 of JSON values; the order of their keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
