"""What a recipe means: schema, strict loader, rules, weights and arithmetic.

`load` reads a YAML file and reports every problem at once; `schema/` says which keys there are, `rules/` which of
their values go together, `weights.py` and `arithmetic.py` what follows for the model. May import `errors`, `units` and
`files`; never mindspore. Begin with `load.py`, then `schema/__init__.py`.
"""

from telechat_moe.recipe.load import find as find
from telechat_moe.recipe.load import load as load
from telechat_moe.recipe.load import loads as loads
from telechat_moe.recipe.load import schema_file as schema_file
from telechat_moe.recipe.load import sections as sections
from telechat_moe.recipe.load import shipped_names as shipped_names
from telechat_moe.recipe.problems import Problem as Problem
from telechat_moe.recipe.problems import RecipeError as RecipeError
from telechat_moe.recipe.reader import COMPUTED_WITH as COMPUTED_WITH
from telechat_moe.recipe.schema import Recipe as Recipe
from telechat_moe.recipe.schema.model import ModelConfig as ModelConfig
from telechat_moe.recipe.schema.model import OtherModelConfig as OtherModelConfig
from telechat_moe.recipe.schema.own import TelechatMoe as TelechatMoe
