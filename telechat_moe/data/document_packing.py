"""Pack whole documents into samples; a document sees only itself.

Documents are shuffled anew for each epoch. Each is put into a sample that it fits into; what is left of a sample is padding.
A token has a loss where the next one belongs to the same document and, in a conversation, is learned.

Source of best fit, and of cutting only what is longer than a sample: Ding et al. 2024, "Fewer Truncations Improve Language
Modeling". Theirs sorts all documents by length first; here they come as shuffled, and a window bounds how far they move.
"""

import os
from bisect import bisect_left, insort

import numpy as np

from telechat_moe.data.conversations import bare
from telechat_moe.data.dataset import Indices, PackedDataset, check_vocabulary, in_range
from telechat_moe.data.index import open_arrays
from telechat_moe.data.indexed import IndexedDataset
from telechat_moe.data.pack import Allocate
from telechat_moe.data.sample import Batch, SampleOptions, with_masks
from telechat_moe.errors import BadInputError
from telechat_moe.files import Progress

_PART = 1 << 20
"""Documents that are placed at a time."""
_BITS = 40
"""Of a sample's number, below the tokens that it has room for."""


class BestFit:
    """Put documents, one after another, into the fullest of the last ``window`` samples that have room for them.

    Of equally full ones the first is taken; a document that fits into none begins a new sample. So none comes later than
    packed one after another (a window of 1), and each fewer than ``window`` samples before the newest one that was begun.
    """

    def __init__(self, seq_length: int, window: int = 1) -> None:
        self.seq_length, self.window, self.samples = seq_length, window, 0
        self._rooms: list[int] = []  # of the samples with room, sorted: room << _BITS | sample
        self._room_of: dict[int, int] = {}  # the same by sample

    def place(self, lengths: np.ndarray) -> np.ndarray:
        """Return the samples of the next documents, int64, of their lengths (1 to ``seq_length``)."""
        rooms, room_of, window, placed = self._rooms, self._room_of, self.window, list[int]()
        for length in lengths.tolist():
            position = bisect_left(rooms, length << _BITS)
            if position < len(rooms):
                entry = rooms.pop(position)
                room, sample = (entry >> _BITS) - length, entry & ((1 << _BITS) - 1)
                del room_of[sample]
            else:
                room, sample = self.seq_length - length, self.samples
                self.samples += 1
                closed = room_of.pop(sample - window, None)
                if closed is not None:
                    del rooms[bisect_left(rooms, closed)]
            if room:
                room_of[sample] = entry = room << _BITS | sample
                insort(rooms, entry)
            placed.append(sample)
        return np.array(placed, np.int64)


def cut(lengths: np.ndarray, seq_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut documents every ``seq_length`` tokens; return where each begins in the pieces, and the end, and the pieces' tokens."""
    first = np.concatenate([[0], np.cumsum(-(-lengths.astype(np.int64) // seq_length))])
    tokens, filled = np.full(first[-1], seq_length, np.int32), np.flatnonzero(lengths)
    tokens[first[filled + 1] - 1] = (lengths[filled] - 1) % seq_length + 1
    return first, tokens


def build_packing(
    lengths: np.ndarray,
    seq_length: int,
    num_samples: int | None,
    seed: int,
    window: int,
    progress: Progress | None = None,
) -> dict[str, np.ndarray]:
    """Build the index of whole documents.

    Returns:
        ``first``: where each document begins in the pieces, and the end, int64; ``row``: the pieces of all samples, sample by
        sample, int32 (int64 from 2^31 pieces on); ``cuts``: where each sample begins in the row, and the end, int64.
    """
    say = progress or (lambda action, count_done, total: None)
    first, sizes = cut(lengths, seq_length)
    count = len(sizes)
    generator, packer = np.random.RandomState(seed), BestFit(seq_length, window)
    epochs, placed = list[np.ndarray](), list[np.ndarray]()
    while not epochs or (num_samples is not None and packer.samples < num_samples):
        say("shuffling documents", 0, None)
        order = generator.permutation(count).astype(np.int32 if count >> 31 == 0 else np.int64)
        epochs.append(order)
        for begin in range(0, count, _PART):
            placed.append(packer.place(sizes[order[begin : begin + _PART]]))
            count_done = packer.samples if num_samples else begin
            say("packing documents", count_done, num_samples or count)
    sample = np.concatenate(placed)
    row = np.concatenate(epochs)[np.argsort(sample, kind="stable")]
    ends = np.cumsum(np.bincount(sample, minlength=packer.samples))
    return {"first": first, "row": row, "cuts": np.concatenate([[0], ends])}


class WholeDataset(PackedDataset):
    """Samples of whole documents of one dataset; those of text that are longer than a sample are cut into pieces.

    A sample has the columns of a :class:`telechat_moe.data.dataset.GptDataset`. Labels are the next tokens also where
    ``loss_mask`` is 0, because multi-token prediction reads them as inputs; that of a full piece is the document's next token.

    Args:
        prefix: Path of the .bin/.idx pair without suffix, or an open dataset.
        num_samples: At least this many samples, from as many epochs as that takes; None for one epoch.
        documents: Documents to use, a range; None for all.
        options: What a sample contains; ``pad`` fills it up (-1: token 0). Document ends come from the index.
        window: See :class:`BestFit`; 1: one document after another.
        conversations: They are what ``data build`` made of conversations, which are not cut.

    Raises:
        BadInputError: The files are broken or have no tokens; or they are not of conversations, or hold one of more than
            ``S`` tokens.
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
        window: int = 1,
        conversations: bool = False,
        progress: Progress | None = None,
    ) -> None:
        settings = {"num_samples": num_samples, "seed": seed, "documents": documents, "whole": True}
        settings |= {} if conversations else {"text": True}
        settings |= {"window": window} if window > 1 else {}
        super().__init__(prefix, seq_length, options, settings)
        self.conversations = conversations
        self._start, stop = documents or (0, len(self.source))
        lengths = self.source.sequence_lengths[self._start : stop]
        tokens = self.source.tokens_in(self._start, stop)
        epochs = -(-(num_samples or 0) * seq_length // max(tokens, 1)) or 1
        entries = epochs * (len(lengths) + tokens // seq_length)

        def build(allocate: Allocate | None) -> dict[str, np.ndarray]:
            self._check(lengths)
            say = None if allocate is None else progress
            return build_packing(lengths, seq_length, num_samples, seed, window, say)

        # Not of the masks: they do not decide which documents a sample holds.
        arrays = open_arrays(
            self.source, [self.settings], entries, build, f"{len(lengths):,} documents, packed"
        )
        self._first, self._row, self._cuts = (arrays[name] for name in ("first", "row", "cuts"))
        self.epochs = len(self._row) // int(self._first[-1])

    def _check(self, lengths: np.ndarray) -> None:
        prefix, kind = self.source.prefix, "conversations" if self.conversations else "tokens"
        if not lengths.sum():
            raise BadInputError(f"{prefix}: no {kind} to train on; build the data from more")
        if not self.conversations:
            return
        if self.source.dtype.kind != "i":
            raise BadInputError(
                f"{prefix}: tokens of type {self.source.dtype}, which say nothing about the loss; build it from "
                "conversations with `telechat-moe data build --recipe RECIPE`, or remove telechat_moe.conversations"
            )
        long = np.flatnonzero(lengths > self.seq_length)
        if long.size:
            first = ", ".join(f"{i} ({lengths[i]} tokens)" for i in long[:3].tolist())
            raise BadInputError(
                f"{prefix}: {long.size} of {len(lengths)} conversations are longer than seq_length ({self.seq_length}): "
                f"number {first}{', ...' if long.size > 3 else ''}; build the data again for this length, which lists them"
            )

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._cuts) - 1

    def pieces(self, sample: int) -> np.ndarray:
        """Return what a sample holds, int64 ``[pieces, 3]``: document, first token of it, and tokens."""
        return self._describe(self._row[self._cuts[sample] : self._cuts[sample + 1]])

    def _describe(self, piece: np.ndarray) -> np.ndarray:
        document = np.searchsorted(self._first, piece, side="right") - 1
        begin = (piece - self._first[document]) * self.seq_length
        document += self._start
        left = self.source.sequence_lengths[document] - begin
        return np.stack([document, begin, np.minimum(left, self.seq_length)], axis=1)

    def batch(self, indices: Indices) -> Batch:
        """See :meth:`SampleSource.batch`."""
        samples = in_range(indices, len(self))
        S = self.seq_length
        filler = ~max(self.options.pad, 0)  # as a token of a conversation that is not learned
        stored = np.full((len(samples), S + 1), filler, np.int32)
        stored[:, S] = ~0
        is_end_BS = np.zeros((len(samples), S), bool)
        learned_BS = np.ones((len(samples), S), bool)
        for row, sample in enumerate(samples.tolist()):
            pieces = self.pieces(sample)
            # A full piece brings the token after it, the label of its last one.
            parts = [self.source[i][begin : begin + S + 1] for i, begin, _ in pieces.tolist()]
            tokens, ends = np.concatenate(parts), np.cumsum(pieces[:, 2])
            stored[row, : len(tokens)] = tokens
            is_end_BS[row, ends - 1] = True
            learned_BS[row, ends - 1] = len(tokens) > S
        learned_BS &= stored[:, 1:] >= 0
        tokens = bare(stored)
        checked = tokens if self.conversations else np.where(stored == filler, 0, stored)
        check_vocabulary(self.source, checked, samples, self.options)
        batch = {
            "input_ids": tokens[:, :S].copy(),
            "labels": tokens[:, 1:].copy(),
            "loss_mask": learned_BS.astype(np.float32),
        }
        return with_masks(batch, is_end_BS, self.options)

    def index_problems(self) -> list[str]:
        """Say which documents are not served once for each epoch, and which samples are too long."""
        problems, prefix = [], self.source.prefix
        wrong = int((np.bincount(self._row, minlength=self._first[-1]) != self.epochs).sum())
        if wrong:
            problems.append(f"{prefix}: {wrong} document(s) are not served {self.epochs} time(s)")
        tokens = np.add.reduceat(self._describe(self._row)[:, 2], self._cuts[:-1])
        long = int((tokens > self.seq_length).sum())
        if long:
            problems.append(f"{prefix}: {long} sample(s) hold more than {self.seq_length} tokens")
        return problems

    def visible_pairs(self, indices: Indices) -> np.ndarray:
        """See :meth:`SampleSource.visible_pairs`."""
        samples = in_range(indices, len(self))
        pairs_B = np.empty(len(samples), np.int64)
        for row, sample in enumerate(samples.tolist()):
            length = self.pieces(sample)[:, 2]
            length = np.append(length, self.seq_length - length.sum())  # the padding sees itself
            pairs_B[row] = (length * (length + 1) // 2).sum()
        return pairs_B
