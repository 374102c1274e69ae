"""Which settings decide the graphs that a job folder keeps."""

from dataclasses import replace

import pytest

from telechat_moe.recipe import load
from telechat_moe.recipe.uses import graph_settings

TINY = "telechat3_moe/pretrain_tiny.yaml"


@pytest.mark.parametrize(
    "override",
    [
        "model.model_config.hidden_size=256",
        "telechat_moe.operators.attention=fused",
        "telechat_moe.moe.balance_group=ep",
        "telechat_moe.moe_block_rows=8",
        "telechat_moe.moe.placement={every: 5}",
        "telechat_moe.sharding.dispatcher=alltoallv",
        "optimizer.swap=True",
        "recompute_config.recompute=True",
    ],
)
def test_a_setting_of_the_graph_is_told_apart(override: str) -> None:
    assert graph_settings(load(TINY, [override])) != graph_settings(load(TINY))


@pytest.mark.parametrize(
    "override",
    [
        "seed=7",
        "output_dir=elsewhere",
        "telechat_moe.evaluation.interval=3",
        "callbacks.2.save_checkpoint_steps=1",
        "lr_schedule.learning_rate=1.e-3",
    ],
)
def test_a_setting_of_the_run_is_not(override: str) -> None:
    assert graph_settings(load(TINY, [override])) == graph_settings(load(TINY))


def test_a_recipe_whose_values_were_replaced_counts_as_it_is_now() -> None:
    recipe = load(TINY)
    runner = replace(recipe.runner_config, gradient_accumulation_steps=2)
    assert graph_settings(replace(recipe, runner_config=runner)) != graph_settings(recipe)
    every = [
        {**graph_settings(load(TINY, [f"telechat_moe.moe.placement={{every: {n}}}"]))}
        for n in (5, 6)
    ]
    assert every[0] == every[1]  # when experts move, the graph is told
