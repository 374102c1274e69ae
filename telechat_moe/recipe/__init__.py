"""What a recipe means: schema, strict loader, rules, weights and arithmetic.

`load` reads a YAML file and reports every problem at once; `schema/` says which keys there are, `rules/` which of
their values go together, `weights.py` and `arithmetic.py` what follows for the model. May import `errors`, `units` and
`files`; never mindspore. Begin with `load.py`, then `schema/__init__.py`.
"""

from telechat_moe.recipe.load import (
    COMPUTED_WITH,
    find,
    load,
    loads,
    schema_file,
    sections,
    shipped_names,
)
from telechat_moe.recipe.problems import Problem, RecipeError
from telechat_moe.recipe.schema import Recipe
from telechat_moe.recipe.schema.model import ModelConfig, OtherModelConfig
from telechat_moe.recipe.schema.own import TelechatMoe

__all__ = [
    "COMPUTED_WITH",
    "ModelConfig",
    "OtherModelConfig",
    "Problem",
    "Recipe",
    "RecipeError",
    "TelechatMoe",
    "find",
    "load",
    "loads",
    "schema_file",
    "sections",
    "shipped_names",
]
