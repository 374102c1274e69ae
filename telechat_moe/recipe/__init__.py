"""What a recipe means: schema, strict loader, rules, parameter and FLOP arithmetic.

Nothing here imports mindspore.
"""

from telechat_moe.recipe.load import find, load, loads, schema_file, sections, shipped_names
from telechat_moe.recipe.problems import Problem, RecipeError
from telechat_moe.recipe.schema import Recipe
from telechat_moe.recipe.schema.model import ModelConfig
from telechat_moe.recipe.schema.other import OtherModelConfig
from telechat_moe.recipe.schema.own import TelechatMoe

__all__ = [
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
