"""The data that a recipe names: training samples as MindFormers or the recipe's mixture orders them, validation by source."""

from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from telechat_moe.data.blend import BlendedDataset, Samples, normalised, open_blend
from telechat_moe.data.mixture import MixedDataset, open_mixture
from telechat_moe.data.sample import SampleOptions
from telechat_moe.errors import BadInputError
from telechat_moe.files import Progress

_RECIPE_OPTIONS = tuple(f.name for f in fields(SampleOptions) if f.name != "vocab_size")


def open_recipe(
    recipe: Any, progress: Progress | None = None
) -> Samples | BlendedDataset | MixedDataset:
    """Open the training data that a loaded recipe names.

    With ``telechat_moe.mixture`` its sources are mixed by that schedule; else ``data_path`` (or ``train_data_path``) of
    ``train_dataset.data_loader.config`` is read as MindFormers reads it.

    Raises:
        BadInputError: If the recipe names no data, or they cannot be opened.
    """
    from telechat_moe.recipe.data_path import parse_data_path, parse_split  # not light

    loader = recipe.train_dataset.data_loader
    config = loader.config
    if config is None or not loader.sizes or not (config.data_path or config.train_data_path):
        raise BadInputError(
            f"{recipe.source}: train_dataset.data_loader needs sizes and config.data_path, the "
            "prefix that `telechat-moe data build` wrote"
        )
    path = config.data_path or config.train_data_path
    split = (config.split or "1, 0, 0") if config.data_path else None
    schedule = recipe.telechat_moe.mixture
    if schedule is None:
        return _open_blend(recipe, path, size=loader.sizes[0], split=split, progress=progress)
    return open_mixture(
        parse_data_path(path)[0],
        [(segment.from_sample, segment.weights) for segment in schedule],
        size=loader.sizes[0],
        share=1.0 if split is None else normalised(parse_split(split))[0],
        progress=progress,
        **_common(recipe),
    )


class ValidSource(NamedTuple):
    """One source of validation data, an epoch; all shares, the weights of the sources' losses, sum to 1."""

    prefix: str
    share: float
    dataset: Samples


def open_valid(recipe: Any) -> list[ValidSource]:
    """Open the validation data of a recipe: ``telechat_moe.evaluation.data_path``, or what is named valid beside training data.

    The shares are the weights of that key, else in proportion to the sources' samples.

    Raises:
        BadInputError: If a source cannot be opened.
    """
    from telechat_moe.recipe.data_path import parse_data_path

    data_path = recipe.telechat_moe.evaluation.data_path
    prefixes, weights = valid_prefixes(recipe), parse_data_path(data_path)[1] if data_path else None
    opened: list[Samples] = []
    for prefix in prefixes:
        dataset = _open_blend(recipe, [prefix], size=None, split=None)
        assert not isinstance(dataset, BlendedDataset)  # without weights
        opened.append(dataset)
    shares = normalised(weights or [len(dataset) for dataset in opened])
    return [ValidSource(*source) for source in zip(prefixes, shares, opened, strict=True)]


def _open_blend(recipe: Any, path: Any, **settings: Any) -> Samples | BlendedDataset:
    section = recipe.telechat_moe
    settings["conversations"] = section.conversations is not None
    settings["window"] = section.packing and section.packing.window
    return open_blend(path, **settings, **_common(recipe))


def _common(recipe: Any) -> dict[str, Any]:
    config = recipe.train_dataset.data_loader.config
    return {"seq_length": config.seq_length, "seed": config.seed, "options": options_of(recipe)}


def sources_of(recipe: Any) -> list[str]:
    """Return the prefixes of a recipe's training data."""
    from telechat_moe.recipe.data_path import parse_data_path

    config = recipe.train_dataset.data_loader.config
    path = config and (config.data_path or config.train_data_path)
    return parse_data_path(path)[0] if path else []


def options_of(recipe: Any) -> SampleOptions:
    """Return what a sample of a recipe contains."""
    config = recipe.train_dataset.data_loader.config
    options = {name: getattr(config, name) for name in _RECIPE_OPTIONS}
    return SampleOptions(**options, vocab_size=recipe.model.model_config.vocab_size)


def valid_prefixes(recipe: Any) -> list[str]:
    """Return the prefixes of a recipe's validation data; see :func:`open_valid`."""
    from telechat_moe.recipe.data_path import parse_data_path

    config = recipe.train_dataset.data_loader.config
    data_path = recipe.telechat_moe.evaluation.data_path
    prefixes, _ = parse_data_path(data_path or config.data_path or config.train_data_path)
    return prefixes if data_path else [valid_prefix(prefix) for prefix in prefixes]


def valid_prefix(prefix: str) -> str:
    """Return the prefix of the validation data beside training data: ``a/train`` -> ``a/valid``.

    Raises:
        BadInputError: If the name does not contain ``train``.
    """
    path = Path(prefix)
    before, train, after = path.name.rpartition("train")
    if not train:
        raise BadInputError(
            f"{prefix}: its name does not contain 'train', so the validation data next to it cannot "
            "be named; set telechat_moe.evaluation.data_path"
        )
    return str(path.with_name(f"{before}valid{after}"))
