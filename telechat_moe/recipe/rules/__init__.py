"""Cross-field rules: settings that are right alone and wrong together.

A rule is a generator that takes the recipe and yields (dotted key, found, expected) for each place
that breaks it. Its docstring says what happens in MindFormers otherwise. The rules stand in
`rules_model.py`, `rules_parallel.py`, `rules_data.py` and `rules_train.py`.
"""

from collections.abc import Callable, Iterator

from telechat_moe.recipe.rules import data as rules_data
from telechat_moe.recipe.rules import model as rules_model
from telechat_moe.recipe.rules import parallel as rules_parallel
from telechat_moe.recipe.rules import train as rules_train
from telechat_moe.recipe.schema import Recipe

Broken = tuple[str, str, str]
Rule = Callable[[Recipe], Iterator[Broken]]

RULES: tuple[Rule, ...] = (
    *rules_model.RULES,
    *rules_parallel.RULES,
    *rules_data.RULES,
    *rules_train.RULES,
)


def documented() -> tuple[Callable[..., Iterator[Broken]], ...]:
    """Return every rule in the form that has a name and a docstring."""
    return (
        *rules_model.DOCUMENTED,
        *rules_parallel.DOCUMENTED,
        *rules_data.DOCUMENTED,
        *rules_train.DOCUMENTED,
    )


def broken(recipe: Recipe, devices: int | None, *, lenient: bool) -> Iterator[Broken]:
    """Yield (key, found, expected) for each rule that the recipe breaks.

    Args:
        recipe: The recipe.
        devices: Devices that there are, if known.
        lenient: Some values had problems and are missing from the recipe; a rule that needs one
            of them is skipped.
    """
    for rule in RULES:
        try:
            yield from rule(recipe)
        except AttributeError:
            if not lenient:
                raise
    if devices is not None:
        try:
            yield from rules_parallel.device_count(recipe, devices)
        except AttributeError:
            if not lenient:
                raise
