"""Recipes of MindFormers 2's dynamic mode (mode 1): recognised, read strictly, judged and translated.

`kinds.py` says what kind of recipe a file is, `keys.txt` which keys mode 1 has (`schema.py` makes sections of them),
`loader.py` reads one, `rules.py` says which values go together, `to_mode0.py` and `to_mode1.py` write the same
training in the other words, by `table.py`. Facts are of MindFormers 2.1.0 (`mindformers/pynative`). May import `recipe.schema` and `recipe.check`.
Begin with `loader.py`.
"""

from telechat_moe.recipe.mode1.loader import kind_of_file as kind_of_file
from telechat_moe.recipe.mode1.loader import load as load
from telechat_moe.recipe.mode1.loader import loads as loads
from telechat_moe.recipe.mode1.plan import priced as priced
from telechat_moe.recipe.mode1.rules import layers_of as layers_of
from telechat_moe.recipe.mode1.schema import VERSION as VERSION
from telechat_moe.recipe.mode1.schema import DynamicRecipe as DynamicRecipe
from telechat_moe.recipe.mode1.table import Translation as Translation
from telechat_moe.recipe.mode1.to_mode0 import network as network
from telechat_moe.recipe.mode1.to_mode0 import to_mode0 as to_mode0
from telechat_moe.recipe.mode1.to_mode1 import to_mode1 as to_mode1
