"""Sequences in parts are taken where a scheduler knows the parts, and what a whole sequence decides is refused."""

import pytest

from telechat_moe.recipe import RecipeError, load
from telechat_moe.recipe.uses import Use

SCHEDULER = "parallel.pipeline_config.pipeline_scheduler"
PARTS = "parallel_config.seq_split_num"
MODEL = "model.model_config."
RECIPE = {
    "use_parallel": True,
    "parallel.parallel_mode": 1,
    "parallel.full_batch": True,
    "parallel_config.pipeline_stage": 2,
    "parallel_config.micro_batch_num": 4,
    "callbacks": "[]",
    "parallel.pipeline_config.pipeline_interleave": True,
    SCHEDULER: "seqpipe",
    PARTS: 2,
    f"{MODEL}moe_router_enable_expert_bias": False,
    f"{MODEL}num_hidden_layers": 4,
    f"{MODEL}calculate_per_token_loss": True,
    f"{MODEL}moe_router_load_balancing_type": "none",
}
VPP = {SCHEDULER: "seqvpp", f"{MODEL}pp_interleave_num": 2}
DATA = "train_dataset.data_loader.config."


def read(use: Use, changes: dict[str, object]) -> None:
    values = {**RECIPE, **changes}
    if use == "train":  # a graph of a step has no samples
        values["telechat_moe.sample"] = "null"
    load("telechat3_moe/pretrain_tiny.yaml", [f"{k}={v}" for k, v in values.items()], use=use)


@pytest.mark.parametrize("use", ["train", "dryrun"])
@pytest.mark.parametrize("changes", [{}, VPP, {PARTS: 8}], ids=["seqpipe", "seqvpp", "many"])
def test_they_are_taken(changes: dict[str, object], use: Use) -> None:
    read(use, changes)


@pytest.mark.parametrize(
    ("changes", "key", "problem"),
    [
        ({PARTS: 1}, SCHEDULER, "whole sequences"),
        ({SCHEDULER: "gpipe", f"{MODEL}pp_interleave_num": 2}, PARTS, "the scheduler gpipe"),
        ({SCHEDULER: "seqvpp"}, SCHEDULER, "of 1 chunks"),
        ({**VPP, PARTS: 4}, SCHEDULER, "2 stages of 2 chunks and 4 parts"),
        ({PARTS: 3}, PARTS, "3 with seq_length"),
        ({f"{MODEL}calculate_per_token_loss": False}, f"{MODEL}calculate_per_token_loss", "mean"),
        (
            {f"{MODEL}moe_router_load_balancing_type": "aux_loss"},
            f"{MODEL}moe_aux_loss_coeff",
            "balance",
        ),
        (
            {
                f"{MODEL}moe_token_drop_policy": "probs",
                f"{MODEL}moe_expert_capacity_factor": 2.0,
            },
            f"{MODEL}moe_token_drop_policy",
            "capacity",
        ),
        ({f"{DATA}reset_position_ids": True}, f"{DATA}reset_position_ids", "first token"),
        ({"recompute_config.recompute": True}, "recompute_config.recompute", "twice"),
        (
            {"telechat_moe.sharding.pipeline_schedule": "1f1b"},
            "telechat_moe.sharding.pipeline_schedule",
            "planner",
        ),
        (
            {"telechat_moe.operators.attention": "fused"},
            "telechat_moe.operators.attention",
            "hides keys otherwise",
        ),
    ],
)
def test_the_key_that_does_not_fit_is_named(
    changes: dict[str, object], key: str, problem: str
) -> None:
    with pytest.raises(RecipeError) as error:
        read("train", changes)
    assert any(p.key == key and problem in p.found for p in error.value.problems), error.value


@pytest.mark.parametrize("use", ["plan", "mindformers"])
def test_others_do_not_split_our_sequences(use: Use) -> None:
    with pytest.raises(RecipeError) as error:
        read(use, {})
    assert any(p.key == PARTS for p in error.value.problems), error.value
