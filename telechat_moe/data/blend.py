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
from telechat_moe.errors import BadInputError

Phase = Literal["train", "valid"]
PHASES = ("train", "valid", "test")
SIZE_MARGIN = 1.005
"""MindFormers asks 0.5 % more samples of each dataset that has a weight."""
_RECIPE_OPTIONS = tuple(name for name in SampleOptions.__dataclass_fields__ if name != "vocab_size")


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
            samples of whole epochs. None, without weights only: one epoch.
        seed: Seed of the order.
        split: Shares of the documents that go to train, valid and test. None if the files are for
            one phase only (``train_data_path``): all documents, and a single prefix with a weight
            is then opened as one without.
        phase: Which of these to open.
        drop_last: Drop the last short sample; MindFormers allows otherwise for valid only.
        options: What a sample contains.

    Raises:
        BadInputError: If the path list or the split cannot be understood, or a dataset is broken.
    """
    prefixes, weights = parse_data_path(data_path)
    if split is None and len(prefixes) == 1:
        weights = None
    if weights is not None and size is None:
        raise BadInputError(f"data_path {list(data_path)} has weights, so it needs a size")
    sources = [IndexedDataset(prefix) for prefix in prefixes]
    sizes: list[int | None]
    if weights is not None and size is not None:
        sizes = [math.ceil(size * weight * SIZE_MARGIN) for weight in weights]
    else:
        sizes = [size] if len(sources) == 1 else [None] * len(sources)
    datasets = [
        GptDataset(
            source,
            seq_length,
            count,
            seed,
            documents=None if split is None else split_range(split, phase, len(source)),
            drop_last=drop_last,
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


def open_recipe(recipe: Any, phase: Phase = "train") -> GptDataset | BlendedDataset:
    """Open the data that a loaded recipe names.

    Args:
        recipe: A ``telechat_moe.recipe.Recipe``.
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
    if config.data_path and config.train_data_path:
        raise BadInputError(
            f"{recipe.source}: train_dataset.data_loader.config has both data_path and "
            "train_data_path; keep one"
        )
    options = SampleOptions(
        **{name: getattr(config, name) for name in _RECIPE_OPTIONS},
        vocab_size=recipe.model_config.vocab_size,
    )
    common = {"seq_length": config.seq_length, "seed": config.seed, "options": options}
    path = config.data_path or config.train_data_path
    if phase == "valid":
        given = recipe.telechat_moe.evaluation.data_path
        prefixes, _ = parse_data_path(given or path)
        if not given:
            prefixes = [valid_prefix(prefix) for prefix in prefixes]
        return open_blend(prefixes, size=None, split=None, **common)
    split = (config.split or "1, 0, 0") if config.data_path else None
    return open_blend(path, size=loader.sizes[0], split=split, **common)


def valid_prefix(prefix: str) -> str:
    """Return the prefix of the validation data beside training data: ``a/train`` -> ``a/valid``.

    Raises:
        BadInputError: If the name does not contain ``train``.
    """
    path = Path(prefix)
    before, found, after = path.name.rpartition("train")
    if not found:
        raise BadInputError(
            f"{prefix}: its name does not contain 'train', so the validation data beside it cannot "
            "be named; set telechat_moe.evaluation.data_path"
        )
    return str(path.with_name(f"{before}valid{after}"))


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
    understood = len(shares) == len(parts) and 0 < len(shares) <= len(PHASES)
    if not understood or min(shares) < 0 or not 0 < sum(shares) < math.inf:
        raise BadInputError(f"split is {split!r}; expected three shares such as '98, 2, 0'")
    shares = _normalised(shares + [0.0] * (len(PHASES) - len(shares)))
    which = PHASES.index(phase)
    if not shares[which] > 0:
        raise BadInputError(f"split {split!r} gives no documents to {phase!r}")
    bounds = [0.0]
    for share in shares:
        bounds.append(bounds[-1] + share)
    return round(bounds[which] * documents), round(bounds[which + 1] * documents)


def _number(item: str | float) -> float | None:
    try:
        return float(item)
    except ValueError:
        return None


def _normalised(weights: Sequence[float]) -> list[float]:
    array = np.array(weights, dtype=np.float64)
    return (array / array.sum()).tolist()
