"""Names and layouts of MindFormers' own class: round trips and refusals, without MindFormers."""

import dataclasses

import numpy as np
import pytest

from telechat_moe.errors import BadInputError
from telechat_moe.interop.upstream_names import pairs, settings, to_ours, to_upstream
from telechat_moe.recipe import ModelConfig

CONFIG = ModelConfig(
    vocab_size=11,
    hidden_size=6,
    intermediate_size=5,
    num_hidden_layers=2,
    num_attention_heads=2,
    q_lora_rank=4,
    kv_lora_rank=3,
    qk_nope_head_dim=3,
    qk_rope_head_dim=2,
    v_head_dim=3,
    qk_layernorm=True,
    first_k_dense_replace=1,
    n_routed_experts=3,
    num_experts_per_tok=2,
    n_shared_experts=1,
    moe_intermediate_size=4,
    num_nextn_predict_layers=1,
    mtp_loss_factor=0.3,
    mla_qkv_concat=False,
)
VARIANTS = {
    "as the 105B recipe": {},
    "other layouts": {"mla_qkv_concat": None, "use_interleaved_weight_layout_mlp": False},
    "no compressed query, no shared experts": {"q_lora_rank": 0, "n_shared_experts": 0},
    "concatenated, no compressed query": {"q_lora_rank": 0, "mla_qkv_concat": True},
    "no norms of latents, no MTP": {"qk_layernorm": False, "num_nextn_predict_layers": 0},
}


def variant(name):
    return dataclasses.replace(CONFIG, **VARIANTS[name])


def weights_of(config):
    """Return numbers that are all different, in the shapes of our weights."""
    found, count = {}, 0
    for pair in pairs(config):
        for name, shape in zip(pair.names, pair.shapes, strict=True):
            size = int(np.prod(shape))
            found[name] = np.arange(count, count + size, dtype=np.float32).reshape(shape)
            count += size
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_round_trip(name):
    config = variant(name)
    ours = weights_of(config)
    theirs = to_upstream(ours, config)
    assert {n: a.shape for n, a in theirs.items()} == {p.upstream: p.shape for p in pairs(config)}
    assert sum(a.size for a in theirs.values()) == sum(a.size for a in ours.values())
    back = to_ours({**theirs, "decoder.layers.1.mlp.router.fi_accu": np.zeros(3)}, config)
    assert back.keys() == ours.keys()
    for key, value in ours.items():
        np.testing.assert_array_equal(back[key], value, err_msg=key)


def test_layouts():
    """Element by element, from what MindFormers' cells do with these matrices."""
    ours = weights_of(CONFIG)
    theirs = to_upstream(ours, CONFIG)
    fc1 = theirs["decoder.layers.0.mlp.linear_fc1.weight"]
    for row in range(5):
        np.testing.assert_array_equal(fc1[2 * row], ours["layers.0.ffn.gate.weight"][row])
        np.testing.assert_array_equal(fc1[2 * row + 1], ours["layers.0.ffn.up.weight"][row])
    E, H, F = 3, 6, 4
    w1 = theirs["decoder.layers.1.mlp.experts.weight1"].reshape(E, H, 2 * F)
    w2 = theirs["decoder.layers.1.mlp.experts.weight2"].reshape(E, F, H)
    for expert in range(E):
        np.testing.assert_array_equal(w1[expert, :, :F], ours["layers.1.moe.experts.gate"][expert])
        np.testing.assert_array_equal(w1[expert, :, F:], ours["layers.1.moe.experts.up"][expert])
        np.testing.assert_array_equal(w2[expert], ours["layers.1.moe.experts.down"][expert])


def test_concatenated():
    config = variant("other layouts")
    ours = weights_of(config)
    theirs = to_upstream(ours, config)
    qkv = theirs["decoder.layers.0.self_attention.linear_qkv.weight"]
    np.testing.assert_array_equal(qkv[:4], ours["layers.0.attention.q_down.weight"])
    np.testing.assert_array_equal(qkv[4:], ours["layers.0.attention.kv_down.weight"])
    fc1 = theirs["mtp.layers.0.transformer_layer.mlp.shared_experts.linear_fc1.weight"]
    np.testing.assert_array_equal(fc1[:4], ours["mtp.0.block.moe.shared.gate.weight"])
    np.testing.assert_array_equal(fc1[4:], ours["mtp.0.block.moe.shared.up.weight"])


def test_wrong_weights_are_all_named():
    theirs = to_upstream(weights_of(CONFIG), CONFIG)
    del theirs["output_layer.weight"]
    theirs["decoder.layers.0.mlp.linear_fc2.weight"] = np.zeros((6, 6), np.float32)
    theirs["decoder.layers.0.mlp.bias"] = np.zeros(6, np.float32)
    with pytest.raises(BadInputError) as e:
        to_ours(theirs, CONFIG)
    assert str(e.value).splitlines() == [
        "3 problem(s) with the weights of MindFormers' model:",
        "  decoder.layers.0.mlp.bias: unknown",
        "  decoder.layers.0.mlp.linear_fc2.weight: found shape [6, 6], expected [6, 5]",
        "  output_layer.weight: missing, expected [11, 6]",
    ]


def test_tied_head_is_refused():
    with pytest.raises(BadInputError, match="tie_word_embeddings: found True"):
        pairs(dataclasses.replace(CONFIG, tie_word_embeddings=True))


def test_settings():
    assert settings(CONFIG) == {
        "qk_head_dim": 3,
        "qk_pos_emb_head_dim": 2,
        "rotary_scaling_factor": 1.0,
    }
    assert settings(dataclasses.replace(CONFIG, q_lora_rank=0))["q_lora_rank"] is None
