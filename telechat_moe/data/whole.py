"""Samples of whole conversations, one after another, each seen by itself only.

Documents are shuffled anew for each epoch and put into a sample while they fit; what is left of it is padding. A
token has a loss where the next one belongs to the same document and is learned.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from telechat_moe.data.conversations import bare
from telechat_moe.data.dataset import check_range, check_vocabulary, hash_settings
from telechat_moe.data.indexed import IndexedDataset
from telechat_moe.data.sample import Batch, SampleOptions, with_masks
from telechat_moe.errors import BadInputError


class ConversationDataset:
    """Samples of whole documents of one dataset that ``data build`` made of conversations.

    A sample has the columns of a :class:`telechat_moe.data.dataset.GptDataset`. Labels are the next tokens also where
    ``loss_mask`` is 0, because multi-token prediction reads them as inputs.

    Args:
        prefix: Path of the .bin/.idx pair without suffix, or an open dataset.
        seq_length: Tokens of a sample, ``S``.
        num_samples: At least this many samples, from as many epochs as that takes; None for one epoch.
        documents: Documents to use, a range; None for all.
        options: What a sample contains; ``pad`` fills it up (-1: token 0). Document ends come from the index.

    Raises:
        BadInputError: The files are broken, are not of conversations, or hold one of more than ``S`` tokens.
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
    ) -> None:
        self.source = prefix if isinstance(prefix, IndexedDataset) else IndexedDataset(prefix)
        self.seq_length, self.options = seq_length, options or SampleOptions()
        self._settings = {
            "seq_length": seq_length,
            "num_samples": num_samples,
            "seed": seed,
            "documents": documents,
            "whole": True,
        }
        start, stop = documents or (0, len(self.source))
        lengths = self.source.sequence_lengths[start:stop]
        self._check(lengths)
        generator, cuts = np.random.RandomState(seed), [0]
        epochs: list[np.ndarray] = []
        while not epochs or (num_samples is not None and len(cuts) <= num_samples):
            epochs.append(generator.permutation(stop - start) + start)
            cuts = _pack(lengths[np.concatenate(epochs) - start], seq_length)
        self._row, self._cuts = np.concatenate(epochs), np.array(cuts)

    def _check(self, lengths: np.ndarray) -> None:
        where = self.source.prefix
        if self.source.dtype.kind != "i":
            raise BadInputError(
                f"{where}: tokens of type {self.source.dtype}, which say nothing about the loss; build it from "
                "conversations with `telechat-moe data build --recipe RECIPE`, or remove telechat_moe.conversations"
            )
        if not lengths.sum():
            raise BadInputError(f"{where}: no conversations to train on; build the data from more")
        long = np.flatnonzero(lengths > self.seq_length)
        if long.size:
            first = ", ".join(f"{i} ({lengths[i]} tokens)" for i in long[:3].tolist())
            raise BadInputError(
                f"{where}: {long.size} of {len(lengths)} conversations are longer than seq_length ({self.seq_length}): "
                f"number {first}{', ...' if long.size > 3 else ''}; build the data again for this length, which lists them"
            )

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._cuts) - 1

    def __getitem__(self, index: int) -> Batch:
        """Return one sample."""
        return {name: array[0] for name, array in self.batch([index]).items()}

    def _documents(self, sample: int) -> np.ndarray:
        return self._row[self._cuts[sample] : self._cuts[sample + 1]]

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Return samples stacked along a first axis.

        Raises:
            IndexError: If an index is outside [0, len).
            BadInputError: If a token is outside the vocabulary.
        """
        wanted = np.asarray(indices, dtype=np.int64)
        check_range(wanted, len(self))
        shape = (len(wanted), self.seq_length)
        stored_BS = np.full(shape, ~max(self.options.pad, 0), np.int32)
        is_end_BS = np.zeros(shape, bool)
        for row, sample in enumerate(wanted.tolist()):
            parts = [self.source[i] for i in self._documents(sample).tolist()]
            ends = np.cumsum([len(part) for part in parts])
            stored_BS[row, : ends[-1]] = np.concatenate(parts)
            is_end_BS[row, ends - 1] = True
        tokens_BS = bare(stored_BS)
        check_vocabulary(self.source, tokens_BS, wanted, self.options)
        labels_BS = np.zeros_like(tokens_BS)
        labels_BS[:, :-1] = tokens_BS[:, 1:]
        learned_BS = np.zeros(shape, bool)
        learned_BS[:, :-1] = (stored_BS >= 0)[:, 1:] & ~is_end_BS[:, :-1]
        batch = {
            "input_ids": tokens_BS,
            "labels": labels_BS,
            "loss_mask": learned_BS.astype(np.float32),
        }
        return with_masks(batch, is_end_BS, self.options)

    def index_problems(self) -> list[str]:
        """Say which documents are not served once in each epoch."""
        count = len(np.unique(self._row))
        epochs = self._row.reshape(-1, count)
        wrong = (np.sort(epochs, axis=1) != np.unique(self._row)).any(axis=1).sum()
        return [f"{self.source.prefix}: {wrong} epoch(s) repeat conversations"] if wrong else []

    def visible_pairs(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the pairs of tokens of which one sees the other within documents, int64 ``[B]``."""
        wanted = np.asarray(indices, dtype=np.int64)
        check_range(wanted, len(self))
        pairs_B = np.empty(len(wanted), np.int64)
        for row, sample in enumerate(wanted.tolist()):
            length = self.source.sequence_lengths[self._documents(sample)].astype(np.int64)
            length = np.append(length, self.seq_length - length.sum())  # the padding sees itself
            pairs_B[row] = (length * (length + 1) // 2).sum()
        return pairs_B

    def fingerprint(self) -> str:
        """Return a hash of the index file and of all settings that decide the samples."""
        options = asdict(self.options) | {"vocab_size": None}
        return hash_settings(
            {"index": self.source.fingerprint(), **self._settings, "options": options}
        )


def _pack(lengths: np.ndarray, seq_length: int) -> list[int]:
    """Put documents into samples in order while they fit; return where each sample begins, and the end."""
    ends, cuts = np.cumsum(lengths, dtype=np.int64), [0]
    while cuts[-1] < len(lengths):
        before = ends[cuts[-1] - 1] if cuts[-1] else 0
        cuts.append(int(np.searchsorted(ends, before + seq_length, side="right")))
    return cuts
