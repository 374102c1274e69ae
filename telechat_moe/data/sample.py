"""What a sample contains: labels, loss mask, positions and attention mask of a token window.

Shapes: B samples, S = ``seq_length``.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from telechat_moe.errors import BadInputError

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class SampleOptions:
    """What a sample contains; names as in ``train_dataset.data_loader.config`` of a recipe.

    Attributes:
        eod: Token that ends a document.
        pad: Token whose label is not learned, and which is replaced by token 0; -1 for none.
        eod_mask_loss: Give no loss where the input is the end of a document.
        reset_position_ids: Count positions from 0 after each end of a document.
        create_attention_mask: Add ``attention_mask``.
        reset_attention_mask: Let no token see across an end of a document.
        create_compressed_eod_mask: Add ``actual_seq_len`` instead of ``attention_mask``.
        eod_pad_length: Length of ``actual_seq_len``.
        add_extra_token_to_sequence: Take ``S + 1`` tokens, so that the last input has a label.
        vocab_size: Refuse tokens outside [0, vocab_size); None does not check.
    """

    eod: int = -1
    pad: int = -1
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    create_attention_mask: bool = False
    reset_attention_mask: bool = False
    create_compressed_eod_mask: bool = False
    eod_pad_length: int = 128
    add_extra_token_to_sequence: bool = True
    vocab_size: int | None = None

    of_eod: ClassVar = (
        "eod_mask_loss",
        "reset_position_ids",
        "reset_attention_mask",
        "create_compressed_eod_mask",
    )
    """Options that need the end-of-document token."""

    def __post_init__(self) -> None:
        """Refuse options that need the end-of-document token where it is not given."""
        needing = [name for name in self.of_eod if getattr(self, name)]
        if needing and self.eod < 0:
            raise BadInputError(
                f"{', '.join(needing)} need the end-of-document token, but eod is {self.eod}; "
                "set eod to its id (the build prints it and writes it to manifest.json)"
            )


def collate(window: np.ndarray, seq_length: int, options: SampleOptions) -> Batch:
    """Make inputs, labels, masks and positions of bare token windows.

    Args:
        window: int32 ``[B, S + 1]``, or ``[B, S]`` without the extra token.
    """
    tokens_BS = window[:, :seq_length].copy()
    if options.add_extra_token_to_sequence:
        labels_BS = window[:, 1:].copy()
    else:
        labels_BS = np.roll(window, -1, axis=1)
        labels_BS[:, -1] = options.pad
    is_eod_BS = tokens_BS == options.eod
    batch = {
        "input_ids": tokens_BS,
        "labels": labels_BS,
        "loss_mask": (labels_BS != options.pad).astype(np.float32),
    }
    if options.eod_mask_loss:
        batch["loss_mask"][is_eod_BS] = 0.0
    with_masks(batch, is_eod_BS, options)
    if options.pad >= 0 or not options.add_extra_token_to_sequence or (window < 0).any():
        tokens_BS[tokens_BS == options.pad] = 0
        labels_BS[labels_BS == options.pad] = 0
    return batch


def with_masks(batch: Batch, is_eod_BS: np.ndarray, options: SampleOptions) -> Batch:
    """Add positions and what tokens may see to a batch, and return it.

    Args:
        is_eod_BS: Where documents end, bool ``[B, S]``.
    """
    count, seq_length = is_eod_BS.shape
    # Documents of a sample are numbered from 0; an end of document still belongs to its own.
    document_BS = np.cumsum(is_eod_BS, axis=1, dtype=np.int32) - is_eod_BS
    batch["position_ids"] = _positions(is_eod_BS, options.reset_position_ids)
    if options.create_compressed_eod_mask:
        batch["actual_seq_len"] = _actual_lengths(is_eod_BS, options.eod_pad_length)
    elif options.create_attention_mask:
        hidden = np.triu(np.ones((seq_length, seq_length), dtype=bool), k=1)[None]
        if options.reset_attention_mask:
            hidden = hidden | (document_BS[:, :, None] != document_BS[:, None, :])
        batch["attention_mask"] = np.empty((count, 1, seq_length, seq_length), np.uint8)
        batch["attention_mask"][:, 0] = hidden
    return batch


def put_together(count: int, parts: Iterable[tuple[Batch, np.ndarray | slice]]) -> Batch:
    """Return one batch of ``count`` rows from parts of it and the rows to which these belong."""
    result: Batch = {}
    for part, rows in parts:
        for name, array in part.items():
            if name not in result:
                result[name] = np.empty((count, *array.shape[1:]), array.dtype)
            result[name][rows] = array
    return result


def _positions(is_eod_BS: np.ndarray, reset: bool) -> np.ndarray:
    """Count tokens from the start of the sample, or of the document where ``reset``."""
    place = np.arange(is_eod_BS.shape[1], dtype=np.int32)
    if not reset:
        return np.tile(place, (len(is_eod_BS), 1))
    start_BS = np.zeros_like(is_eod_BS, dtype=np.int32)
    start_BS[:, 1:] = np.where(is_eod_BS[:, :-1], place[1:], 0)
    return place - np.maximum.accumulate(start_BS, axis=1)


def _actual_lengths(is_eod_BS: np.ndarray, length: int) -> np.ndarray:
    """List where the documents of each sample end, filled up with ``S``."""
    seq_length = is_eod_BS.shape[1]
    result = np.full((len(is_eod_BS), length), seq_length, dtype=np.int32)
    for row, is_eod_S in zip(result, is_eod_BS, strict=True):
        ends = np.flatnonzero(is_eod_S[:-1]) + 1
        if len(ends) > length:
            raise BadInputError(
                f"a sample holds {len(ends)} ends of documents, more than eod_pad_length "
                f"({length}); raise eod_pad_length"
            )
        row[: len(ends)] = ends
    return result
