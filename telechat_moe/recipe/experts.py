"""Which expert-parallel degrees fit the other degrees of a layout, and how tokens reach experts on several nodes.

Experts take the innermost devices first: each degree is used up before the next. Whole experts spread over tensor, then
context, then data parallelism, ``(tp, cp, dp)``; experts that tensor parallelism shards spread over ``(dp,)``.
"""

import math
from collections.abc import Sequence

from telechat_moe.recipe.schema import Recipe
from telechat_moe.recipe.schema.model import ModelConfig, OtherModelConfig

HOPS = {"alltoall_deredundency": "gather", "alltoall_zero_redundancy": "once"}
"""Values of `moe_token_dispatcher_type` with a hop between nodes -> which tokens make it: all, or once to nodes that need it."""


def hop_between_nodes(model: ModelConfig) -> tuple[str, int]:
    """Return a value of :data:`HOPS` and the devices of a node; ``("", 0)``: tokens reach their experts in one hop."""
    hop = HOPS.get(model.moe_token_dispatcher_type or "", "")
    return hop, model.npu_nums_per_device if hop else 0


def drops(model: ModelConfig | OtherModelConfig) -> bool:
    """Return whether experts have a capacity; without policy or factor they do not."""
    return bool(model.moe_token_drop_policy) and model.moe_expert_capacity_factor is not None


def dispatcher(recipe: Recipe, target: str) -> str:
    """Return how rows reach their experts on a target, within a node where there are two hops."""
    form, config = recipe.telechat_moe.sharding.dispatcher, recipe.model_config
    if form != "auto":
        return form
    if hop_between_nodes(config)[0] == "once":
        return "alltoallv"  # buffers for the worst routing would take every token to every node
    blocks = recipe.telechat_moe.operators.of("grouped_matmul") == "plain"
    return "alltoallv" if target == "Ascend" and not drops(config) and not blocks else "alltoall"


def expert_shares(ep: int, degrees: Sequence[int]) -> list[int] | None:
    """Return over how many devices of each degree, the innermost first, the experts spread; None: ``ep`` does not fit."""
    shares: list[int] = []
    for degree in degrees:
        shares.append(math.gcd(ep, degree))
        ep //= shares[-1]
        if ep > 1 and shares[-1] != degree:
            return None
    return shares if ep == 1 else None


def expert_degrees(degrees: Sequence[int]) -> list[int]:
    """Return every expert parallelism that fits, in rising order; the innermost degree comes first."""
    fitting, inner = {1}, 1
    for degree in degrees:
        fitting |= {inner * d for d in range(1, degree + 1) if degree % d == 0}
        inner *= degree
    return sorted(fitting)
