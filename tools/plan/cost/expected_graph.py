"""Predict what a recipe's compiled graph must contain, stage by stage, and say where a dry run differs.

Parameters and collectives must be exactly equal, activations at the peak within `TOLERANCE`.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.recipe.experts import dispatcher
from telechat_moe.recipe.schema import Recipe
from telechat_moe.recipe.schema.model import ModelConfig
from telechat_moe.sharding.shards import WeightShards
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.expected_calls import Calls, ExpectedCall
from telechat_moe.tools.plan.cost.layout import MODULES, Layout
from telechat_moe.tools.plan.cost.saved_activations import ChunkActivations
from telechat_moe.tools.plan.cost.simulate_step import make_program
from telechat_moe.tools.plan.schedules.program import Times
from telechat_moe.tools.plan.schedules.simulate import memory

TOLERANCE = 0.05
"""Relative difference up to which peak activations count as equal."""


@dataclass(frozen=True, kw_only=True)
class ExpectedRank:
    """What the graph of a rank must contain."""

    elements: int
    """Trained parameters whose gradients the device holds: of one graph with shared optimizer's states, its share."""
    calls: Counter[ExpectedCall]
    """Collectives of a step."""
    activations: int
    """The most bytes of activations alive at once."""


def predict(recipe: Recipe, rank: int) -> ExpectedRank:
    """Return what the graph of a rank must contain.

    Raises:
        BadInputError: See `refuse`.
    """
    refuse(recipe)
    a, x = Architecture.from_recipe(recipe), Layout.from_recipe(recipe)
    calls = Calls(a, x, WeightShards.of(recipe))
    stage = calls.mesh.stage(rank)
    return ExpectedRank(
        elements=calls.gradients(rank), calls=calls.of(rank), activations=activations(a, x)[stage]
    )


def refuse(recipe: Recipe) -> None:
    """Refuse a recipe of another step than the formulas are for.

    Raises:
        BadInputError: The recipe has something that no formula here covers.
    """
    c, data = recipe.model_config, recipe.train_dataset.data_loader.config
    others = sorted({*recipe.telechat_moe.sharding.recompute} - {*MODULES.values()})
    settings: list[tuple[str, object, object]] = [
        ("model_type", type(c) is ModelConfig, True),
        ("moe_router_load_balancing_type", c.moe_router_load_balancing_type, "seq_aux_loss"),
        ("moe_aux_loss_coeff", bool(c.moe_aux_loss_coeff), True),
        ("moe_z_loss_coeff", c.moe_z_loss_coeff or 0.0, 0.0),
        ("compute_dtype", c.compute_dtype, "bfloat16"),
        ("params_dtype", c.params_dtype, "float32"),
        ("layernorm_compute_dtype", c.layernorm_compute_dtype, "float32"),
        ("router_dense_type", c.router_dense_type, "float32"),
        ("qk_layernorm", c.qk_layernorm, True),
        ("dispatcher", dispatcher(recipe, "Ascend"), "alltoallv"),
        ("moe_token_dispatcher_type", c.moe_token_dispatcher_type or "alltoall", "alltoall"),
        ("use_parallel", recipe.use_parallel, True),
        ("tie_word_embeddings", c.tie_word_embeddings, False),
        ("create_attention_mask", bool(data and data.create_attention_mask), False),
        ("mp_comm_recompute", recipe.recompute_config.mp_comm_recompute, True),
        ("swap_config.swap", recipe.swap_config.swap, False),
        ("telechat_moe.sharding.recompute: other modules", others, []),
    ]
    for name, value, expected in settings:
        if value != expected:
            raise BadInputError(
                f"{recipe.source}: {name} is {value}; the compiled graph is predicted for {expected} only"
            )


def activations(a: Architecture, x: Layout) -> list[int]:
    """Return the most bytes of activations that are alive at once on each stage, by `ChunkActivations`."""
    activation, working = ChunkActivations(a, x).all()
    none = np.zeros_like(activation)
    times = Times(none, none, none, activation=activation, working=working)
    return [round(float(used.max(initial=0.0))) for used in memory(make_program(x), times)]


def differences(recipe: Recipe, report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return expected and found figures, and their differences, for each stage of a report of `telechat-moe dryrun --json`."""
    stages: list[dict[str, Any]] = []
    for stage in report["stages"]:
        expected = predict(recipe, stage["rank"])
        compiled = calls_of(stage)
        lines = [
            f"{c.phase} {c.kind} over {len(c.ranks)} ranks {list(c.ranks[:3])}..., {c.bytes} bytes: "
            f"{expected.calls[c]} predicted, {compiled[c]} compiled"
            for c in sorted(expected.calls.keys() | compiled.keys())
            if expected.calls[c] != compiled[c]
        ]
        memory = stage["memory"]
        elements, alive = memory["gradients"] // 4, memory["activations"]
        if elements != expected.elements:
            lines.append(f"trained parameters: {expected.elements} predicted, {elements} compiled")
        off = expected.activations / alive - 1
        if abs(off) > TOLERANCE:
            lines.append(
                f"activations at the peak: {expected.activations} bytes predicted, {alive} compiled"
            )
        stages.append(
            {
                "stage": stage["stage"],
                "parameters": [expected.elements, elements],
                "calls": [sum(c.values()) for c in (expected.calls, compiled)],
                "bytes": [
                    sum(n * c.bytes for c, n in m.items()) for m in (expected.calls, compiled)
                ],
                "activations": [expected.activations, alive],
                "differences": lines,
            }
        )
    return stages


def calls_of(stage: dict[str, Any]) -> Counter[ExpectedCall]:
    """Return the collectives of a stage of a dry run's report, as its first device has them."""
    calls: Counter[ExpectedCall] = Counter()
    for row in stage["collectives"]:
        size = row["bytes"] // row["count"]
        calls[ExpectedCall(row["phase"], row["kind"], tuple(row["ranks"]), size)] += row["count"]
    return calls
