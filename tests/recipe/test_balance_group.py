"""A balance loss over expert groups is refused where it would do nothing; MindFormers' kinds are taken."""

import pytest

from telechat_moe.recipe import RecipeError, load
from telechat_moe.recipe.uses import Use

KEY = "telechat_moe.moe.balance_group"
KIND = "model.model_config.moe_router_load_balancing_type"
GROUPS: dict[str, object] = {
    "use_parallel": True,
    "parallel.parallel_mode": 1,
    "parallel.full_batch": True,
    "parallel_config.data_parallel": 4,
    "parallel_config.expert_parallel": 2,
    KIND: "aux_loss",
    KEY: "ep",
}


def read(use: Use, changes: dict[str, object]) -> None:
    values = {**GROUPS, **changes}
    load("telechat3_moe/pretrain_tiny.yaml", [f"{k}={v}" for k, v in values.items()], use=use)


@pytest.mark.parametrize("use", ["train", "dryrun"])
@pytest.mark.parametrize("kind", ["seq_aux_loss", "sub_seq_aux_loss", "gbs_aux_loss", "none"])
def test_every_kind_is_taken(use: Use, kind: str) -> None:
    read(use, {})
    read(use, {KIND: kind, KEY: "dp"})


@pytest.mark.parametrize("use", ["train", "dryrun"])
@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({KIND: "gbs_aux_loss"}, "ep with gbs_aux_loss"),
        ({KIND: "seq_aux_loss"}, "ep with seq_aux_loss"),
        ({"model.model_config.moe_aux_loss_coeff": 0}, "moe_aux_loss_coeff 0"),
        (
            {
                "use_parallel": False,
                "parallel_config.data_parallel": 1,
                "parallel_config.expert_parallel": 1,
            },
            "ep on one device",
        ),
    ],
)
def test_groups_without_effect_are_refused(
    use: Use, changes: dict[str, object], found: str
) -> None:
    with pytest.raises(RecipeError) as error:
        read(use, changes)
    (problem,) = error.value.problems
    assert problem.key == KEY
    assert found in problem.found
    assert problem.expected.startswith("remove it, or")
