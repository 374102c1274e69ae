"""Cross-field rules: settings that are right alone and wrong together."""

from collections.abc import Iterator

from telechat_moe.recipe.schema import Recipe

Broken = tuple[str, str, str]


def broken(recipe: Recipe, devices: int | None, *, lenient: bool) -> Iterator[Broken]:
    """Yield (key, found, expected) for each rule that the recipe breaks."""
    yield from ()
