"""Exchanges beside computation are refused where nothing travels, nothing is beside them, or MindSpore overlaps them."""

import pytest

from telechat_moe.recipe import RecipeError, load
from telechat_moe.recipe.uses import Use

KEY = "telechat_moe.sharding.overlap_exchange"
EXCHANGES = {
    "use_parallel": True,
    "parallel.parallel_mode": 1,
    "parallel.full_batch": True,
    "parallel_config.data_parallel": 2,
    "parallel_config.expert_parallel": 2,
    "telechat_moe.sharding.dispatcher": "alltoallv",
    "runner_config.gradient_accumulation_steps": 2,
    "callbacks": "[]",
    "model.model_config.moe_router_enable_expert_bias": False,
    KEY: True,
}
STAGES = {
    "parallel_config.pipeline_stage": 2,
    "parallel_config.micro_batch_num": 4,
    "model.model_config.num_hidden_layers": 4,
    "runner_config.gradient_accumulation_steps": 1,
}
HOPS = {
    "parallel_config.data_parallel": 4,
    "parallel_config.expert_parallel": 4,
    "model.model_config.npu_nums_per_device": 2,
    "model.model_config.moe_token_dispatcher_type": "alltoall_zero_redundancy",
    "telechat_moe.sharding.dispatcher": "auto",
}


def read(use: Use, changes: dict[str, object]) -> None:
    values = {**EXCHANGES, **changes}
    load("telechat3_moe/pretrain_tiny.yaml", [f"{k}={v}" for k, v in values.items()], use=use)


@pytest.mark.parametrize(
    "changes",
    [{}, {**STAGES, "telechat_moe.sharding.pipeline_schedule": "1f1b-overlap"}, HOPS],
    ids=["micro-batches", "stages", "hops"],
)
def test_it_is_taken_where_rows_travel_and_passes_pair(changes: dict[str, object]) -> None:
    read("train", changes)


@pytest.mark.parametrize(
    ("changes", "found", "use"),
    [
        ({"parallel_config.expert_parallel": 1}, "no rows travel", "train"),
        ({"telechat_moe.sharding.dispatcher": "alltoall"}, "dispatcher alltoall", "train"),
        ({"telechat_moe.sharding.dispatcher": "auto"}, "dispatcher auto", "train"),
        ({"runner_config.gradient_accumulation_steps": 1}, "one micro-batch", "train"),
        (STAGES, "which pairs none", "train"),
        ({}, "whose exchanges MindSpore overlaps", "dryrun"),
        (
            {
                **HOPS,
                "model.model_config.npu_nums_per_device": 1,
                "model.model_config.moe_token_dispatcher_type": "alltoall_deredundency",
                "telechat_moe.sharding.dispatcher": "alltoallv",
            },
            "nodes of 1 devices",
            "train",
        ),
        (
            {
                "use_parallel": False,
                "parallel_config.data_parallel": 1,
                "parallel_config.expert_parallel": 1,
                "telechat_moe.sharding.dispatcher": "auto",
            },
            "no rows travel",
            "train",
        ),
    ],
)
def test_it_is_refused_where_it_would_do_nothing(
    changes: dict[str, object], found: str, use: Use
) -> None:
    with pytest.raises(RecipeError) as error:
        read(use, changes)
    (problem,) = [p for p in error.value.problems if p.key == KEY]
    assert found in problem.found
    assert problem.expected
