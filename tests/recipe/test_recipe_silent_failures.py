"""What MindFormers 1.9.0 takes without a word (or with a false one), and we refuse.

One test per row of the list in the project's notes on MindFormers, each found by running it.
"""

from __future__ import annotations

import pytest
from yaml_edit import recipe_text

from telechat_moe.recipe import RecipeError, load, loads

NAME = "telechat3_moe/pretrain_105b_a4b_4k.yaml"


def refused(old: str, new: str) -> tuple[str, int, str]:
    """Replace text in the 105B recipe; return key, line and message of the one problem."""
    text = recipe_text(NAME)
    assert text.count(old) == 1, old
    text = text.replace(old, new)
    with pytest.raises(RecipeError) as caught:
        loads(text)
    problem = caught.value.problems[0]
    changed = text[: text.index(new)].count("\n") + 1
    assert problem.line in (changed, changed + new.count("\n"))
    return problem.key, problem.line, str(problem)


def test_misspelt_section() -> None:
    key, _, said = refused("recompute_config:\n", "recompute_confg:\n")
    assert key == "recompute_confg"
    assert "'recompute_config'" in said


def test_no_false_alarm_on_keys_that_the_trainer_reads() -> None:
    text = recipe_text(NAME) + "profiler_level: 1\n"
    assert loads(text).profiler_level == 1
    assert loads(text).remove_redundancy is True
    grouped = text.replace(
        "lr_schedule:\n", "grouped_lr_schedule:\n  grouped: []\n  default:\n"
    ).replace("\n  type: ConstantWarmUpLR\n  learning_rate: 2.e-4\n  warmup_steps: 2000\n"
              "  total_steps: 2400000\n",
              "\n    type: ConstantWarmUpLR\n    learning_rate: 2.e-4\n    warmup_steps: 2000\n"
              "    total_steps: 2400000\n")  # fmt: skip
    recipe = loads(grouped)
    assert recipe.grouped_lr_schedule is not None
    assert recipe.lr_schedule is None


def test_misspelt_degree() -> None:
    key, _, said = refused("pipeline_stage: 8", "pipline_stage: 8")
    assert key == "parallel_config.pipline_stage"
    assert "'parallel_config.pipeline_stage'" in said


def test_misspelt_key_of_a_section_that_mindformers_does_not_check() -> None:
    key, _, _ = refused("enable_parallel_optimizer: True", "enable_paralel_optimizer: True")
    assert key == "parallel.enable_paralel_optimizer"


def test_misspelt_model_key_does_not_fall_back_to_another_models_default() -> None:
    text = recipe_text(NAME).replace("num_experts_per_tok: 4", "num_expert_per_tok: 4")
    with pytest.raises(RecipeError) as caught:
        loads(text)
    keys = {p.key for p in caught.value.problems}
    assert "model.model_config.num_expert_per_tok" in keys
    assert "model.model_config.num_experts_per_tok" in keys


def test_duplicate_key() -> None:
    key, _, said = refused("model_parallel: 8", "model_parallel: 8\n  model_parallel: 4")
    assert key == "parallel_config.model_parallel"
    assert "second time" in said


def test_override_of_a_boolean_is_a_boolean() -> None:
    assert load(NAME).recompute_config.recompute is True
    assert load(NAME, ["recompute_config.recompute=False"]).recompute_config.recompute is False
    assert load(NAME, ["recompute_config.recompute=True"]).recompute_config.recompute is True


def test_exponent_without_a_point() -> None:
    key, _, said = refused("eps: 1.e-8", "eps: 1e-8")
    assert key == "optimizer.eps"
    assert "1.0e-8" in said


def test_device_number_is_derived_not_commented() -> None:
    assert load(NAME, devices=256).devices == 256
    with pytest.raises(RecipeError, match="256, but 8 devices"):
        load(NAME, devices=8)
