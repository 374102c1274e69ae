"""Several datasets as one, and ``data_path`` of a recipe as MindFormers reads it.

::

    dataset = open_blend(["0.3", "a/train", "0.7", "b/train"], seq_length=512, size=4000)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from telechat_moe.data.dataset import GptDataset, check_range, hash_settings
from telechat_moe.data.indexed import IndexedDataset
from telechat_moe.data.pack import blend_indices
from telechat_moe.data.sample import Batch, SampleOptions
from telechat_moe.data.whole import ConversationDataset
from telechat_moe.errors import BadInputError

Phase = Literal["train", "valid"]
Samples = GptDataset | ConversationDataset
SIZE_MARGIN = 1.005
"""MindFormers asks 0.5 % more samples of each dataset that has a weight."""
_RECIPE_OPTIONS = tuple(name for name in SampleOptions.__dataclass_fields__ if name != "vocab_size")


class BlendedDataset:
    """Samples of several datasets in proportion to their weights.

    Args:
        weights: Share of each; any positive scale.

    Raises:
        BadInputError: If a dataset has fewer samples than its share needs.
    """

    def __init__(self, datasets: Sequence[Samples], weights: Sequence[float], size: int) -> None:
        self.datasets = list(datasets)
        self.weights = normalised(weights)
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
        check_range(wanted, len(self))
        chosen, within = self.chosen[wanted], self.within[wanted]
        result: Batch = {}
        for which in np.unique(chosen).tolist():
            rows = np.flatnonzero(chosen == which)
            for name, array in self.datasets[which].batch(within[rows]).items():
                if name not in result:
                    result[name] = np.empty((len(wanted), *array.shape[1:]), array.dtype)
                result[name][rows] = array
        return result

    def visible_pairs(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the pairs of tokens of which one sees the other within documents, int64 ``[B]``."""
        wanted = np.asarray(indices, dtype=np.int64)
        check_range(wanted, len(self))
        chosen, within = self.chosen[wanted], self.within[wanted]
        pairs_B = np.empty(len(wanted), np.int64)
        for which in np.unique(chosen).tolist():
            rows = chosen == which
            pairs_B[rows] = self.datasets[which].visible_pairs(within[rows])
        return pairs_B

    def fingerprint(self) -> str:
        """Return a hash of the datasets, their weights and the size."""
        return hash_settings(
            {
                "datasets": [dataset.fingerprint() for dataset in self.datasets],
                "weights": self.weights,
                "size": len(self),
            }
        )


def open_blend(
    data_path: Sequence[str | float],
    *,
    seq_length: int,
    size: int | None,
    seed: int = 1234,
    split: str | None = "1, 0, 0",
    options: SampleOptions | None = None,
    conversations: bool = False,
) -> Samples | BlendedDataset:
    """Open ``data_path`` of a recipe as MindFormers' data loader does.

    Args:
        data_path: ``[weight, prefix, weight, prefix, ...]``, or prefixes alone, which are weighted by their numbers of
            samples.
        seq_length: Tokens of a sample's input.
        size: Samples wanted. With weights the dataset serves 0.5 % more, with a prefix alone all samples of whole
            epochs. None, without weights only: one epoch.
        split: Shares of the documents that go to train, valid and test; those of train are opened. None for files of
            one phase (``train_data_path``): all documents, and a single prefix with a weight is opened as one without.
        options: What a sample contains.
        conversations: The files are of conversations, which stay whole.

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
    kind = ConversationDataset if conversations else GptDataset
    datasets = [
        kind(
            source,
            seq_length,
            count,
            seed,
            documents=None if shares is None else (0, round(normalised(shares)[0] * len(source))),
            options=options,
        )
        for source, count in zip(sources, sizes, strict=True)
    ]
    if weights is not None:
        return BlendedDataset(datasets, weights, sum(count or 0 for count in sizes))
    if len(datasets) == 1:
        return datasets[0]
    counts = [len(dataset) for dataset in datasets]
    return BlendedDataset(datasets, counts, min(size or sum(counts), sum(counts)))


def open_recipe(recipe: Any, phase: Phase = "train") -> Samples | BlendedDataset:
    """Open the data that a loaded recipe names.

    Args:
        phase: "train" opens ``train_dataset.data_loader.config.data_path`` (or
            ``train_data_path``) as MindFormers does. "valid" opens one epoch of
            ``telechat_moe.evaluation.data_path``, or of the training data's sibling whose name
            says ``valid`` instead of ``train``.

    Raises:
        BadInputError: If the recipe names no data, or it cannot be opened.
    """
    loader = recipe.train_dataset.data_loader
    config = loader.config
    if config is None or not loader.sizes or not (config.data_path or config.train_data_path):
        raise BadInputError(
            f"{recipe.source}: train_dataset.data_loader needs sizes and config.data_path, the "
            "prefix that `telechat-moe data build` wrote"
        )
    common = {
        "seq_length": config.seq_length,
        "seed": config.seed,
        "options": options_of(recipe),
        "conversations": recipe.telechat_moe.conversations is not None,
    }
    path = config.data_path or config.train_data_path
    if phase == "valid":
        return open_blend(valid_prefixes(recipe), size=None, split=None, **common)
    split = (config.split or "1, 0, 0") if config.data_path else None
    return open_blend(path, size=loader.sizes[0], split=split, **common)


def options_of(recipe: Any) -> SampleOptions:
    """Return what a sample of a recipe contains."""
    config = recipe.train_dataset.data_loader.config
    given = {name: getattr(config, name) for name in _RECIPE_OPTIONS}
    return SampleOptions(**given, vocab_size=recipe.model_config.vocab_size)


def valid_prefixes(recipe: Any) -> list[str]:
    """Return the prefixes of a recipe's validation data; see :func:`open_recipe`."""
    from telechat_moe.recipe.data_path import parse_data_path

    config = recipe.train_dataset.data_loader.config
    given = recipe.telechat_moe.evaluation.data_path
    prefixes, _ = parse_data_path(given or config.data_path or config.train_data_path)
    return prefixes if given else [valid_prefix(prefix) for prefix in prefixes]


def valid_prefix(prefix: str) -> str:
    """Return the prefix of the validation data beside training data: ``a/train`` -> ``a/valid``.

    Raises:
        BadInputError: If the name does not contain ``train``.
    """
    path = Path(prefix)
    before, found, after = path.name.rpartition("train")
    if not found:
        raise BadInputError(
            f"{prefix}: its name does not contain 'train', so the validation data next to it cannot "
            "be named; set telechat_moe.evaluation.data_path"
        )
    return str(path.with_name(f"{before}valid{after}"))


def normalised(weights: Sequence[float]) -> list[float]:
    """Return weights that sum to 1."""
    array = np.array(weights, dtype=np.float64)
    return (array / array.sum()).tolist()
