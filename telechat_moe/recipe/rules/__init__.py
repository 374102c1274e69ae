"""Cross-field rules: settings that are right alone and wrong together.

A rule is a public generator function of `model.py`, `parallel.py`, `swap.py`, `data.py` or `train.py`. It takes the recipe, in
`model.py` the model section, and yields (dotted key, found, expected) for each place that breaks it. Its docstring says
what happens in MindFormers otherwise. The rules of `effect*.py` hold where this package trains or compiles the recipe.
"""

import inspect
from collections.abc import Callable, Iterator

from telechat_moe.recipe.problems import Missing
from telechat_moe.recipe.rules import data, effect, effect_swap, model, parallel, swap, train
from telechat_moe.recipe.schema import Broken, Recipe


def documented(*, effects: bool = False) -> list[Callable[..., Iterator[Broken]]]:
    """Return every rule that always holds, or those of ``effects`` in our trainer and compiler."""
    always, in_ours = (model, parallel, swap, data, train), (effect, effect_swap)
    return [
        rule
        for module in (in_ours if effects else always)
        for name, rule in vars(module).items()
        if inspect.isgeneratorfunction(rule) and rule.__module__ == module.__name__
        if not name.startswith("_")
    ]


def broken(recipe: Recipe, devices: int | None, missing: Missing) -> Iterator[Broken]:
    """Yield (key, found, expected) for each rule that the recipe breaks.

    Args:
        devices: Devices that there are, if known.
        missing: A rule ends where it needs a value that is missing.
    """
    for rule in documented():
        yield from missing.until(_applied(rule, recipe, devices))


def _applied(
    rule: Callable[..., Iterator[Broken]], recipe: Recipe, devices: int | None
) -> Iterator[Broken]:
    if rule is parallel.device_count:
        yield from rule(recipe, devices)
    elif rule.__module__ == model.__name__:
        yield from rule(recipe.model.model_config)
    else:
        yield from rule(recipe)


def without_effect(recipe: Recipe, missing: Missing, *, compiled: bool) -> Iterator[Broken]:
    """Yield (key, found, expected) for each setting that would have no effect in our trainer, or that it lacks.

    Args:
        missing: A rule ends where it needs a value that is missing.
        compiled: The recipe is compiled only (`telechat-moe dryrun`).
    """
    for rule in documented(effects=True):
        yield from missing.until(rule(recipe, compiled))
