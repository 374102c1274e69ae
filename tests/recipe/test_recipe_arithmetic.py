"""Parameters, FLOPs and bytes against independent counts."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import pytest

from telechat_moe.recipe import ModelConfig, load
from telechat_moe.recipe.arithmetic import flops_per_token, parameters, state_bytes

LARGE = "telechat3_moe/pretrain_105b_a4b_4k.yaml"

BASE: dict[str, Any] = {
    "vocab_size": 512,
    "seq_length": 64,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "qk_layernorm": True,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
    "num_nextn_predict_layers": 0,
}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"q_lora_rank": None},
    {"q_lora_rank": 0},
    {"n_shared_experts": 0},
    {"n_shared_experts": 2},
    {"tie_word_embeddings": True},
    {"first_k_dense_replace": 0},
    {"first_k_dense_replace": 3},
    {"num_hidden_layers": 7, "first_k_dense_replace": 2, "v_head_dim": 20},
]


def test_the_official_105b() -> None:
    """Closed numbers, counted by hand from the published dimensions."""
    counts = parameters(load(LARGE).model_config)
    h, vocab, heads = 2560, 131072, 32
    attention = (
        h * 1536
        + 1536
        + 1536 * heads * 192
        + h * (512 + 64)
        + 512
        + 512 * heads * 256
        + heads * 128 * h
    )
    moe = 192 * h + 192 * 3 * h * 1536 + 3 * h * 1536
    body = 45 * (attention + 2 * h) + 3 * h * 7680 + 44 * moe + h + 2 * vocab * h
    assert counts.totals()["total_without_mtp"] == body
    mtp = 2 * h * h + 2 * h + attention + 2 * h + moe + h
    assert counts.total == body + mtp
    assert f"{counts.totals()['total_without_mtp'] / 1e9:.1f}" == "102.3"
    assert f"{counts.total / 1e9:.1f}" == "104.6"
    active = body - 44 * (192 - 4) * 3 * h * 1536
    assert counts.totals()["active_without_mtp"] == active
    assert f"{active / 1e9:.2f}" == "4.68"


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("pangu_ultra_moe/pretrain_718b.yaml", (715e9, 722e9), (38e9, 41e9)),
        ("pangu_ultra_moe/pilot_20b.yaml", (19e9, 21e9), (1e9, 2e9)),
        ("telechat3_moe/pretrain_1t.yaml", (1.0e12, 1.1e12), (25e9, 40e9)),
        ("telechat3_moe/pretrain_19m.yaml", (18.8e6, 19.1e6), (8e6, 10e6)),
        ("telechat3_moe/pretrain_tiny.yaml", (1.5e6, 4e6), (1e6, 3e6)),
    ],
)
def test_sizes_that_the_recipes_promise(
    name: str, total: tuple[float, float], active: tuple[float, float]
) -> None:
    counts = parameters(load(name).model_config)
    assert total[0] < counts.totals()["total_without_mtp"] < total[1]
    assert active[0] < counts.totals()["active_without_mtp"] < active[1]


@pytest.mark.torch
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_parameters_against_hugging_face(variant: dict[str, Any]) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = ModelConfig(**{**BASE, **variant})
    hf_config = DeepseekV3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        moe_intermediate_size=config.moe_intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_attention_heads,
        n_shared_experts=config.n_shared_experts,
        n_routed_experts=config.n_routed_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        q_lora_rank=config.q_lora_rank or None,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        first_k_dense_replace=config.first_k_dense_replace,
        n_group=1,
        topk_group=1,
        tie_word_embeddings=config.tie_word_embeddings,
    )
    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(hf_config)
    model.tie_weights()
    unique = {id(p): p.numel() for p in model.parameters()}
    assert parameters(config).total == sum(unique.values())


@pytest.mark.torch
@pytest.mark.parametrize("variant", [{}, {"q_lora_rank": None}, {"n_shared_experts": 2}], ids=str)
def test_flops_against_torchs_counter(variant: dict[str, Any]) -> None:
    """torch counts the products that it really runs; ours differ by the causal half only."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    config = ModelConfig(**{**BASE, **variant, "first_k_dense_replace": 3})
    dense = torch_forward(config)
    length, batch = 16, 2
    ids = torch.zeros((batch, length), dtype=torch.long)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        dense(ids, use_cache=False)
    ours = flops_per_token(config, length)
    full = ours.attention * length / ((length + 1) / 2)
    rotary = 2 * (config.qk_rope_head_dim // 2) * length  # Hugging Face's table is a product too
    assert counter.get_total_flops() == batch * length * (ours.products + full) + rotary


def torch_forward(config: ModelConfig) -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    hf_config = DeepseekV3Config(
        **{
            name: getattr(config, name)
            for name in (
                *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"),
                *("num_hidden_layers", "num_attention_heads", "n_shared_experts", "q_lora_rank"),
                *("n_routed_experts", "num_experts_per_tok", "kv_lora_rank", "v_head_dim"),
                *("qk_nope_head_dim", "qk_rope_head_dim", "first_k_dense_replace"),
            )
        },
        num_key_value_heads=config.num_attention_heads,
        n_group=1,
        topk_group=1,
        attn_implementation="eager",
    )
    return DeepseekV3ForCausalLM(hf_config)


def test_flops_by_parts() -> None:
    """Linear in what they should be linear in."""
    config = ModelConfig(**BASE)
    one = flops_per_token(config)
    more = flops_per_token(dataclasses.replace(config, num_experts_per_tok=3))
    moe_layers = config.num_hidden_layers - 1
    assert more.products - one.products == 2 * 3 * moe_layers * 64 * 48
    assert flops_per_token(config, 127).attention == pytest.approx(one.attention * 128 / 65)
    assert one.training == 3 * one.forward
    mtp = dataclasses.replace(config, num_nextn_predict_layers=1)
    assert flops_per_token(mtp, mtp=False) == one
    assert flops_per_token(mtp).products > one.products + 2 * config.vocab_size * config.hidden_size


def test_parts_add_up() -> None:
    counts = parameters(ModelConfig(**{**BASE, "num_nextn_predict_layers": 2}))
    assert sum(p.total for p in counts.parts) == counts.total
    assert sum(p.total_active for p in counts.parts) == counts.totals()["active"]
    (mtp,) = [p for p in counts.parts if p.mtp]
    assert counts.total - counts.totals()["total_without_mtp"] == mtp.total
    assert mtp.count == 2


def test_bytes_of_states() -> None:
    config = ModelConfig(**BASE)
    count = parameters(config).total
    assert state_bytes(config).total == count * (4 + 4 + 8)
    half = dataclasses.replace(config, params_dtype="bfloat16")
    assert state_bytes(half).total == count * (2 + 2 + 8)
