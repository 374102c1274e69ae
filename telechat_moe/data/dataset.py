"""Samples for training: packed token windows with labels, masks and positions.

``GptDataset`` serves one pair of .bin/.idx files, ``BlendedDataset`` mixes several, and
``open_blend`` reads ``data_path`` of a recipe exactly as MindFormers' data loader does::

    dataset = open_blend(["1", "output/data/train"], seq_length=512, size=4000, seed=1234,
                         options=SampleOptions(eod=0))
    dataset[0]["input_ids"]

Every sample equals that of MindFormers 1.9.0 for the same files and settings, but for one thing:
where ``pad`` is a token that occurs in the data and no mask option is set, MindFormers lets the
positions masked in one sample stay masked in all samples that follow; here they do not.

Shapes: B samples, S = ``seq_length``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from telechat_moe.data.indexed import IndexedDataset
from telechat_moe.data.pack import blend_indices, build_indices
from telechat_moe.errors import BadInputError

Batch = dict[str, np.ndarray]
PHASES = ("train", "valid", "test")
SIZE_MARGIN = 1.005
"""MindFormers asks 0.5 % more samples of each dataset that has a weight."""


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

    def __post_init__(self) -> None:
        """Refuse options that need the end-of-document token where it is not given."""
        needing = [
            name
            for name in (
                "eod_mask_loss",
                "reset_position_ids",
                "reset_attention_mask",
                "create_compressed_eod_mask",
            )
            if getattr(self, name)
        ]
        if needing and self.eod < 0:
            raise BadInputError(
                f"{', '.join(needing)} need the end-of-document token, but eod is {self.eod}; "
                "set eod to its id (the build prints it and writes it to manifest.json)"
            )


class Dataset(Protocol):
    """What the loader needs of a dataset."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Return the samples stacked along a first axis B."""
        ...

    def fingerprint(self) -> str:
        """Return a hash of all that decides which samples are served."""
        ...


class GptDataset:
    """Packed samples of one dataset.

    A sample has ``input_ids``, ``labels`` and ``position_ids`` int32 ``[S]``, ``loss_mask`` float32
    ``[S]``, where asked for ``attention_mask`` uint8 ``[1, S, S]`` (1 = may not see) or
    ``actual_seq_len`` int32 ``[eod_pad_length]``.

    Args:
        prefix: Path of the .bin/.idx pair without suffix, or an open dataset.
        seq_length: Tokens of a sample's input, ``S``.
        num_samples: At least this many samples, from as many epochs as that takes; None for one
            epoch. ``len()`` is all samples of those epochs, as in MindFormers.
        seed: Of the order.
        documents: Documents to use, a range; None for all.
        drop_last: Drop the tokens at the end that do not fill a sample; else they are padded.
        options: What a sample contains.

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
        drop_last: bool = True,
        options: SampleOptions | None = None,
    ) -> None:
        self.source = prefix if isinstance(prefix, IndexedDataset) else IndexedDataset(prefix)
        self.seq_length = seq_length
        self.seed = seed
        self.options = options or SampleOptions()
        self._settings = {
            "seq_length": seq_length,
            "num_samples": num_samples,
            "seed": seed,
            "documents": documents,
            "drop_last": drop_last,
        }
        if seq_length < 1:
            raise BadInputError(f"seq_length must be 1 or more, found {seq_length}")
        start, stop = documents or (0, len(self.source))
        try:
            self.indices = build_indices(
                self.source.sequence_lengths,
                np.arange(start, stop, dtype=np.int32),
                seq_length=seq_length,
                num_samples=num_samples,
                seed=seed,
                drop_last=drop_last,
                extra_token=self.options.add_extra_token_to_sequence,
            )
        except ValueError as error:
            raise BadInputError(
                f"{self.source.prefix}: {error}; lower seq_length ({seq_length}) or add text"
            ) from None
        # In tokens, for every document of the row: where it starts and how long it is.
        row = self.indices.documents
        self._row_starts = self.source.sequence_pointers[row] // self.source.dtype.itemsize
        self._row_lengths = self.source.sequence_lengths[row]

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.indices.samples) - 1

    def __getitem__(self, index: int) -> Batch:
        """Return one sample."""
        return {name: array[0] for name, array in self.batch([index]).items()}

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Return samples stacked along a first axis.

        Raises:
            IndexError: If an index is outside [0, len).
            BadInputError: If a token lies outside the vocabulary.
        """
        return collate(self.windows(indices), self.seq_length, self.options)

    def windows(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the bare tokens of samples, int32 ``[B, S + 1]`` (``[B, S]`` without the extra)."""
        wanted = np.asarray(indices, dtype=np.int64)
        _check_range(wanted, len(self))
        extra = int(self.options.add_extra_token_to_sequence)
        width = self.seq_length + extra
        window = np.full((len(wanted), width), self.options.pad, dtype=np.int32)
        cuts = self.indices.samples
        for sample, cut in enumerate(self.indices.shuffle[wanted].tolist()):
            (first, begin), (last, end) = cuts[cut].tolist(), cuts[cut + 1].tolist()
            lengths = self._row_lengths[first : last + 1].astype(np.int64)
            starts = self._row_starts[first : last + 1].copy()
            lengths[-1] = end + extra
            lengths[0] -= begin
            starts[0] += begin
            ends = np.cumsum(lengths)
            # Token j of the sample lies at shift + j, shift constant over each document.
            places = np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1])
            window[sample, : len(places)] = self.source.tokens[places]
        self._check_vocabulary(window, wanted)
        return window

    def _check_vocabulary(self, window: np.ndarray, indices: np.ndarray) -> None:
        limit = self.options.vocab_size
        if limit is None or not window.size:
            return
        bad = (window >= limit) | ((window < 0) & (window != self.options.pad))
        if bad.any():
            sample, place = np.argwhere(bad)[0]
            raise BadInputError(
                f"{self.source.prefix}.bin: sample {indices[sample]} holds token "
                f"{window[sample, place]}, but the model's vocab_size is {limit}; raise vocab_size "
                "or build the dataset with the model's tokenizer"
            )

    def fingerprint(self) -> str:
        """Return a hash of the index file and of all settings that decide the samples."""
        return _hash(
            {
                "index": self.source.fingerprint(),
                **self._settings,
                "options": asdict(self.options) | {"vocab_size": None},
            }
        )


class BlendedDataset:
    """Samples of several datasets in proportion to their weights.

    Args:
        datasets: What to mix.
        weights: Share of each; any positive scale.
        size: Samples of the mixture.

    Raises:
        BadInputError: If a dataset has fewer samples than its share needs.
    """

    def __init__(self, datasets: Sequence[GptDataset], weights: Sequence[float], size: int) -> None:
        self.datasets = list(datasets)
        self.weights = _normalised(weights)
        self.chosen, self.within = blend_indices(self.weights, size)
        needed = np.bincount(self.chosen, minlength=len(self.datasets))
        for dataset, count in zip(self.datasets, needed.tolist(), strict=True):
            if len(dataset) < count:
                raise BadInputError(
                    f"{dataset.source.prefix}: the blend takes {count} samples, but it has "
                    f"{len(dataset)}; change the weights or the size"
                )

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.chosen)

    def __getitem__(self, index: int) -> Batch:
        """Return one sample."""
        return self.datasets[self.chosen[index]][int(self.within[index])]

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Return samples stacked along a first axis; see ``GptDataset.batch``."""
        wanted = np.asarray(indices, dtype=np.int64)
        _check_range(wanted, len(self))
        chosen, within = self.chosen[wanted], self.within[wanted]
        result: Batch = {}
        for which in np.unique(chosen).tolist():
            rows = np.flatnonzero(chosen == which)
            for name, array in self.datasets[which].batch(within[rows]).items():
                if name not in result:
                    result[name] = np.empty((len(wanted), *array.shape[1:]), array.dtype)
                result[name][rows] = array
        return result

    def fingerprint(self) -> str:
        """Return a hash of the datasets, their weights and the size."""
        return _hash(
            {
                "datasets": [dataset.fingerprint() for dataset in self.datasets],
                "weights": self.weights,
                "size": len(self),
            }
        )


def collate(window: np.ndarray, seq_length: int, options: SampleOptions) -> Batch:
    """Make inputs, labels, masks and positions of bare token windows.

    Args:
        window: int32 ``[B, S + 1]``, or ``[B, S]`` without the extra token.
        seq_length: ``S``.
        options: What to make.
    """
    tokens_BS = window[:, :seq_length].copy()
    if options.add_extra_token_to_sequence:
        labels_BS = window[:, 1:].copy()
    else:
        labels_BS = np.roll(window, -1, axis=1)
        labels_BS[:, -1] = options.pad
    is_eod_BS = tokens_BS == options.eod
    # Documents of a sample are numbered from 0; an end of document still belongs to its own.
    document_BS = np.cumsum(is_eod_BS, axis=1, dtype=np.int32) - is_eod_BS

    batch = {
        "input_ids": tokens_BS,
        "labels": labels_BS,
        "loss_mask": (labels_BS != options.pad).astype(np.float32),
        "position_ids": _positions(is_eod_BS, options.reset_position_ids),
    }
    if options.eod_mask_loss:
        batch["loss_mask"][is_eod_BS] = 0.0
    if options.create_compressed_eod_mask:
        batch["actual_seq_len"] = _actual_lengths(is_eod_BS, options.eod_pad_length)
    elif options.create_attention_mask:
        hidden = np.triu(np.ones((seq_length, seq_length), dtype=bool), k=1)[None]
        if options.reset_attention_mask:
            hidden = hidden | (document_BS[:, :, None] != document_BS[:, None, :])
        batch["attention_mask"] = np.empty((len(window), 1, seq_length, seq_length), np.uint8)
        batch["attention_mask"][:, 0] = hidden
    if options.pad >= 0 or not options.add_extra_token_to_sequence or (window < 0).any():
        tokens_BS[tokens_BS == options.pad] = 0
        labels_BS[labels_BS == options.pad] = 0
    return batch


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


def open_blend(
    data_path: Sequence[str | float],
    *,
    seq_length: int,
    size: int,
    seed: int = 1234,
    split: str = "1, 0, 0",
    phase: str = "train",
    drop_last: bool = True,
    options: SampleOptions | None = None,
) -> GptDataset | BlendedDataset:
    """Open ``data_path`` of a recipe as MindFormers' data loader does.

    Args:
        data_path: ``[prefix]``, ``[weight, prefix, weight, prefix, ...]``, or prefixes alone, which
            are then weighted by their numbers of samples.
        seq_length: Tokens of a sample's input.
        size: Samples wanted. With weights the dataset serves 0.5 % more, with a prefix alone all
            samples of whole epochs.
        seed: Of the order.
        split: Shares of the documents that go to train, valid and test.
        phase: Which of these to open.
        drop_last: Drop the last short sample; MindFormers allows otherwise for valid only.
        options: What a sample contains.

    Raises:
        BadInputError: If the path list or the split cannot be understood, or a dataset is broken.
    """
    prefixes, weights = parse_data_path(data_path)
    sources = [IndexedDataset(prefix) for prefix in prefixes]
    ranges = [split_range(split, phase, len(source)) for source in sources]
    sizes: list[int | None]
    if weights is not None:
        sizes = [math.ceil(size * weight * SIZE_MARGIN) for weight in weights]
    else:
        sizes = [size] if len(sources) == 1 else [None] * len(sources)
    datasets = [
        GptDataset(
            source, seq_length, count, seed, documents=span, drop_last=drop_last, options=options
        )
        for source, count, span in zip(sources, sizes, ranges, strict=True)
    ]
    if weights is not None:
        return BlendedDataset(datasets, weights, sum(count or 0 for count in sizes))
    if len(datasets) == 1:
        return datasets[0]
    counts = [len(dataset) for dataset in datasets]
    return BlendedDataset(datasets, counts, min(size, sum(counts)))


def open_recipe(recipe: Any) -> GptDataset | BlendedDataset:
    """Open the training data that a loaded recipe names (``train_dataset.data_loader``)."""
    loader = recipe.train_dataset.data_loader
    config = loader.config
    values = {name: getattr(config, name, None) for name in SampleOptions.__dataclass_fields__}
    values["vocab_size"] = recipe.model.model_config.vocab_size
    return open_blend(
        config.data_path,
        seq_length=config.seq_length,
        size=loader.sizes[0],
        seed=config.seed,
        split=getattr(config, "split", None) or "1, 0, 0",
        options=SampleOptions(**{k: v for k, v in values.items() if v is not None}),
    )


def parse_data_path(data_path: Sequence[str | float]) -> tuple[list[str], list[float] | None]:
    """Tell weights from prefixes.

    Returns:
        The prefixes, and weights that sum to 1 or None.

    Raises:
        BadInputError: If only some prefixes have a weight, or a weight is not a positive number.
    """
    items = list(data_path)
    if not items:
        raise BadInputError("data_path is empty; expected [weight, prefix, ...] or [prefix, ...]")
    numbers = [_number(item) for item in items]
    if all(number is None for number in numbers):
        return [str(item).strip() for item in items], None
    weights, names = numbers[0::2], items[1::2]
    if (
        len(items) % 2
        or any(w is None for w in weights)
        or any(n is not None for n in numbers[1::2])
    ):
        raise BadInputError(
            f"data_path is {items}; expected weight, prefix, weight, prefix, ... or prefixes alone"
        )
    found = [weight for weight in weights if weight is not None]
    if not all(weight > 0 and math.isfinite(weight) for weight in found):
        raise BadInputError(f"data_path has the weights {found}; each must be a number above 0")
    return [str(name).strip() for name in names], _normalised(found)


def split_range(split: str, phase: str, documents: int) -> tuple[int, int]:
    """Return the range of documents that a split string such as "99, 1, 0" gives to a phase."""
    parts = [_number(part) for part in split.split(",") if part.strip()]
    shares = [part for part in parts if part is not None]
    if len(shares) != len(parts) or len(shares) > len(PHASES) or min(shares, default=-1) < 0:
        raise BadInputError(f"split is {split!r}; expected three shares such as '98, 2, 0'")
    shares = _normalised(shares + [0.0] * (len(PHASES) - len(shares)))
    which = PHASES.index(phase)
    if not shares[which] > 0:
        raise BadInputError(f"split {split!r} gives no documents to {phase!r}")
    bounds = [0.0]
    for share in shares:
        bounds.append(bounds[-1] + share)
    return round(bounds[which] * documents), round(bounds[which + 1] * documents)


def _check_range(wanted: np.ndarray, count: int) -> None:
    outside = wanted[(wanted < 0) | (wanted >= count)]
    if outside.size:
        raise IndexError(f"sample {outside[0]} of {count}")


def _number(item: str | float) -> float | None:
    try:
        return float(item)
    except ValueError:
        return None


def _normalised(weights: Sequence[float]) -> list[float]:
    array = np.array(weights, dtype=np.float64)
    return (array / array.sum()).tolist()


def _hash(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
