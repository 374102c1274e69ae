"""Train one variant of the pilot's model with one seed, in this process."""

from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from benchmarks.balance_pilot.text import DOMAINS, Text
from telechat_moe.model import CausalLM, initialize
from telechat_moe.model.balance import set_groups
from telechat_moe.model.router import Router
from telechat_moe.ops import select
from telechat_moe.recipe import load
from telechat_moe.train.optimizer import from_recipe
from telechat_moe.train.step import TrainStep

DEVICES, LENGTH, STEPS, LAST = 32, 64, 256, 32
"""Sequences of a batch, one an emulated device; tokens of each; steps; steps at the end whose mean is reported."""
HELD_OUT = 16
"""Batches of validation."""
EXPERTS, TOP_K, VOCABULARY, COEFFICIENT, RATE, WARM_UP = 32, 2, 512, 1e-2, 3e-3, 20
MODEL: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "moe_router_enable_expert_bias": False,
    "seq_length": LENGTH,
    "max_position_embeddings": LENGTH,
    "batch_size": DEVICES,
}


@dataclass(frozen=True)
class Variant:
    """What differs between runs.

    Attributes:
        scope: Devices whose tokens the balance loss counts together; 0: each sequence's; None: no balance loss.
        members: Devices of an expert group, whose pairs share the capacity; 0: dropless.
        capacity: Pairs that an expert takes from its group, as a multiple of the mean.
    """

    scope: int | None
    members: int = 0
    capacity: float = 0.0


SCOPES = {
    "sequence": Variant(0),
    "EP 8": Variant(8),
    "EP 16": Variant(16),
    "DP": Variant(DEVICES),
    "none": Variant(None),
}
DROPS = {
    f"EP {members}, capacity {capacity}": Variant(members, members, capacity)
    for members in (8, 16, 32)
    for capacity in (1.0, 1.5)
}
VARIANTS = SCOPES | DROPS


def arguments(window_BS: np.ndarray) -> tuple[Tensor, ...]:
    """Return the model's arguments for tokens ``[B, S + 1]``."""
    ids, labels = window_BS[:, :-1].copy(), window_BS[:, 1:].copy()
    position = np.tile(np.arange(ids.shape[1], dtype=np.int32), (len(ids), 1))
    return Tensor(ids), Tensor(labels), Tensor(np.ones(ids.shape, np.float32)), Tensor(position)


def build(variant: Variant) -> tuple[CausalLM, Any]:
    """Return the model of a variant and its recipe."""
    settings = {f"model.model_config.{name}": value for name, value in MODEL.items()}
    kind = "none" if variant.scope is None else "aux_loss" if variant.scope else "seq_aux_loss"
    settings |= {
        "callbacks": [],
        "train_dataset.data_loader.config.seq_length": LENGTH,
        "runner_config.batch_size": DEVICES,
        "model.model_config.moe_router_load_balancing_type": kind,
        "model.model_config.moe_aux_loss_coeff": 0.0 if variant.scope is None else COEFFICIENT,
    }
    if variant.members:
        settings |= {
            "model.model_config.moe_token_drop_policy": "probs",
            "model.model_config.moe_expert_capacity_factor": variant.capacity,
            "telechat_moe.moe_capacity_tokens": variant.members * LENGTH,
            "telechat_moe.operators.permute": "plain",  # fused ones give one capacity to all tokens
            "telechat_moe.operators.grouped_matmul": "plain",
        }
    recipe = load("telechat3_moe/pretrain_tiny.yaml", [f"{k}={v}" for k, v in settings.items()])
    own = recipe.telechat_moe
    with select.using(own.operators.default, own.operators.backends(), "CPU"):
        model = CausalLM(recipe.model_config, own.moe_block_rows, own.moe_capacity_tokens)
    if variant.scope:
        set_groups(model, DEVICES // variant.scope)
    return model, recipe


def train(variant: Variant, seed: int, text: Text, steps: int = STEPS) -> dict[str, Any]:
    """Return what was measured.

    Returns:
        ``losses``: next-token loss of each step, nats; ``loss``: its mean over the last steps; ``held_out``: that of
        validation batches; ``drop_rate``: share of the pairs that were dropped in the last steps; ``overload``: load of the
        hottest expert over the mean, mean over layers and last steps; ``specialisation``: see :func:`apart`.
    """
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    model, recipe = build(variant)
    initialize(model, seed)
    model.set_train()
    own, config = recipe.telechat_moe, recipe.model_config
    with select.using(own.operators.default, own.operators.backends(), "CPU"):
        optimizer = from_recipe(recipe, model.trainable_params())
        step = TrainStep(model, optimizer, 1.0, 1, 0.0, config)
    step.set_train()
    losses, drops, overload = list[float](), list[float](), list[float]()
    for number, window_BS in zip(range(1, steps + 1), text.batches(seed, DEVICES), strict=False):
        rate = RATE * min(1.0, number / WARM_UP)
        out = step(*optimizer.scalars(number, rate), *arguments(window_BS))
        losses.append(float(out[0].asnumpy()[0]))
        load_LE = out[4].asnumpy()
        drops.append(float(out[5].asnumpy()[0]) / load_LE.sum())
        overload.append(float((load_LE.max(1) / load_LE.mean(1)).mean()))
    domains_LDE = loads_by_domain(model, text)
    held_out = [float(model(*arguments(x))[0].asnumpy()[0]) for x in text.mixed(DEVICES, HELD_OUT)]
    return {
        "losses": losses,
        "loss": float(np.mean(losses[-LAST:])),
        "held_out": float(np.mean(held_out)),
        "drop_rate": float(np.mean(drops[-LAST:])),
        "overload": float(np.mean(overload[-LAST:])),
        "specialisation": apart(domains_LDE),
    }


def loads_by_domain(model: CausalLM, text: Text) -> np.ndarray:
    """Return the loads ``[layers, domains, E]`` of validation sequences of each domain."""
    routers = [cell for _, cell in model.cells_and_names() if isinstance(cell, Router)]
    found = np.zeros((len(routers), len(DOMAINS), EXPERTS))
    for domain in range(len(DOMAINS)):
        model(*arguments(text.pure(DEVICES, domain)))  # in training: routers count
        for layer, router in enumerate(routers):
            found[layer, domain] = router.expert_load.asnumpy()
            ops.assign(router.expert_load, Tensor(np.zeros(EXPERTS, np.float32)))
    return found


def apart(load_LDE: np.ndarray) -> float:
    """Return which share of a domain's pairs other experts get than of all domains' pairs, mean over layers and domains.

    0: every domain spreads over the experts alike. 2/3: no two of three domains share an expert.
    """
    share_LDE = load_LDE / load_LDE.sum(-1, keepdims=True)
    return float(np.abs(share_LDE - share_LDE.mean(1, keepdims=True)).sum(-1).mean() / 2)
