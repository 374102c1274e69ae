"""`swap_config` through MindFormers' own object, as our trainer inside MindFormers gets it."""

import json
from typing import Any

import pytest

pytest.importorskip("mindformers", reason="MindFormers is not installed (extra `mindformers`)")

from mindformers.modules.transformer import TransformerSwapConfig

from telechat_moe.interop.mindformers_config import recipe_of
from telechat_moe.recipe import load
from telechat_moe.recipe.swap import swapped

LARGE = "telechat3_moe/pretrain_105b_a4b_4k.yaml"
ITEM = {"layers": [0, 3], "backward_prefetch": 2}
OPERATORS = [
    {"op_name": ["moe", r"attention\.core"], "layers": True, "backward_prefetch": 4},
    {"op_name": "ffn", "layers": [0], "backward_prefetch": 7},
]


@pytest.mark.parametrize(
    "written",
    [
        {},
        {"default_prefetch": 3},
        {"layer_swap": [ITEM]},
        {"op_swap": OPERATORS},
        {"layer_swap": [ITEM], "op_swap": [{**OPERATORS[0], "layers": [5]}]},
    ],
)
@pytest.mark.parametrize("made", [True, False])
def test_it_means_what_was_written(written: dict[str, Any], made: bool) -> None:
    sections = load(LARGE, ["recompute_config.recompute=False"]).to_dict()
    section = {"swap": True, **written}
    config = TransformerSwapConfig(**section) if made else section
    found = recipe_of({**sections, "swap_config": config})
    sets = [f"swap_config.{key}={json.dumps(value)}" for key, value in section.items()]
    meant = load(LARGE, ["recompute_config.recompute=False", *sets])
    assert swapped(found) == swapped(meant) != {}


def test_what_it_makes_up_is_left_out() -> None:
    sections = load(LARGE).to_dict()
    found = recipe_of({**sections, "swap_config": TransformerSwapConfig()})
    assert found.swap_config == load(LARGE).swap_config


def test_it_reads_a_list_of_operators_only() -> None:
    with pytest.raises(KeyError, match="op_name"):
        TransformerSwapConfig(swap=True, op_swap={"moe": [ITEM]})
