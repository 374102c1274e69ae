"""What a model section may ask for that this model has."""

from typing import cast

from telechat_moe.errors import BadInputError
from telechat_moe.recipe import ModelConfig
from telechat_moe.recipe.check import section_keys
from telechat_moe.recipe.fields import Takes


def check_supported(config: ModelConfig) -> None:
    """Refuse settings that a recipe may hold for MindFormers but that this model would ignore.

    Raises:
        BadInputError: Naming each such key, its value and what this model has.
    """
    problems: list[str] = []
    for name, field in section_keys(ModelConfig).fields.items():
        takes, value = cast("Takes | None", field.metadata.get("takes")), getattr(config, name)
        if takes is not None and not takes.allows(value, field):
            only = " or ".join(repr(v) for v in takes.neutral(field))
            problems.append(
                f"model.model_config.{name}: found {value!r}, this model has only {only}"
            )
    if problems:
        raise BadInputError("\n".join(problems))
