"""A Hugging Face config.json against a recipe's model: spellings, defaults, refusals, and what is not judged."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from weights import layout

from telechat_moe.errors import BadInputError
from telechat_moe.recipe import hugging_face

CONFIG = layout(n_group=4, topk_group=2)
FIELDS = hugging_face.hf_config(CONFIG, "bfloat16")
DEEPSEEK = {"model_type": "deepseek_v3"}

# What transformers 5.24.0 writes for DeepseekV3Config() besides what version 4 writes.
FIVE = {
    "dtype": "bfloat16",
    "output_router_logits": False,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "num_mtp_layers": 1,
    "num_local_experts": 16,
}


def judged(fields: dict[str, Any], folder: Path) -> hugging_face.HfConfig:
    (folder / "config.json").write_text(json.dumps(fields))
    return hugging_face.read(folder / "config.json")


def keys(fields: dict[str, Any], folder: Path) -> list[str]:
    """Return the keys that differ; empty where no recipe can say it."""
    return [d.key for d in hugging_face.differences(judged(fields, folder), CONFIG)]


def test_our_config_fits_our_model(tmp_path: Path) -> None:
    hf_settings = judged(FIELDS, tmp_path)
    assert hugging_face.differences(hf_settings, CONFIG) == []
    assert hf_settings.notes == []


@pytest.mark.parametrize("key", hugging_face.COMPARED)
def test_every_field_is_compared(tmp_path: Path, key: str) -> None:
    """With the place in the file, both values and the key, in both spellings of the rotary base."""
    value = FIELDS[key]
    other = not value if isinstance(value, bool) else (value or 0) * 2 or 3
    if key in ("n_group", "topk_group"):  # another limit, or none, with the best 2 of a group
        other = {"n_group": 8, "topk_group": 4}[key]
    if key == "num_experts_per_tok":
        # Groups would be ranked by their best 4, which transformers does not do.
        assert keys(FIELDS | {key: 8}, tmp_path) == ["", key]
        return
    if key in ("qk_rope_head_dim", "qk_nope_head_dim", "num_attention_heads"):
        fields = {k: v for k, v in FIELDS.items() if k != "num_key_value_heads"}
    else:
        fields = FIELDS
    differing = hugging_face.differences(judged(fields | {key: other}, tmp_path), CONFIG)
    assert key in [d.key for d in differing]
    assert {d.key for d in differing} <= {key, "n_group", "topk_group"}
    assert f"{tmp_path}/config.json: {key} is {json.dumps(other)}" in str(differing)
    assert str(getattr(CONFIG, key)) in differing[-1].found


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 10000},
        {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
        {"rope_scaling": {"rope_type": "default", "factor": None}},
        {"rope_scaling": {"type": "linear", "factor": 1.0}},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}, "rope_theta": 1e4},
        {"hidden_act": "swish"},
        {"num_key_value_heads": None, "head_dim": 16, "qk_head_dim": 48},
        {"moe_layer_freq": [0, 1, 1, 1]},
        {"moe_layer_freq": 1, "partial_rotary_factor": 1.0, "attention_bias": None},
        {"architectures": None},
        {"model_type": None},
        {
            "sliding_window": None,
            "layer_types": ["full_attention"] * 4,
            "index_topk": None,
            "hc_mult": 1,
        },
        {"sliding_window": 4096, "use_sliding_window": False},
        {"mlp_bias": False, "quantization_config": None, "initializer_range": 0.006},
        {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0"}},
        {"num_local_experts": 16},
        {"_name_or_path": "x", "auto_map": {"AutoConfig": "y"}, "ep_size": 1, "seq_aux": True},
    ],
)
def test_other_spellings_of_the_same(tmp_path: Path, changes: dict[str, Any]) -> None:
    hf_settings = judged(FIELDS | changes, tmp_path)
    assert hugging_face.differences(hf_settings, CONFIG) == []
    assert hf_settings.notes == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"rope_scaling": {"type": "default", "mscale_all_dim": 1.0, "factor": 4}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 8.0}}, "rope_parameters"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e4}}}, "rope_parameters"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters"),
        ({"rope_parameters": {"rope_theta": 5e4}}, "rope_theta is 10000.0 and rope_parameters"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"norm_topk_prob": 1}, "norm_topk_prob"),
        ({"vocab_size": True}, "vocab_size"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"moe_layer_freq": [0, 1, 0, 1]}, "moe_layer_freq"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"head_dim": 48}, "head_dim"),
        ({"qk_head_dim": 32}, "qk_head_dim"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"num_experts_per_tok": 1}, "norm_topk_prob"),
        ({"model_type": "deepseek_v2"}, "model_type"),
        ({"model_type": ["deepseek_v3"]}, "model_type"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "architectures"),
        ({"architectures": [{}]}, "architectures"),
        ({"hc_mult": 4}, "hc_mult"),
        ({"index_topk": 2048}, "index_topk"),
        ({"qk_clip_threshold": 100}, "qk_clip_threshold"),
        ({"moe_latent_size": 64}, "moe_latent_size"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ({"quantization_config": {"weight_block_size": None}}, "weight_block_size"),
        ({"quantization_config": {"weight_block_size": [0, 8]}}, "weight_block_size"),
    ],
)
def test_what_no_recipe_can_say_is_refused(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    differing = hugging_face.differences(judged(FIELDS | changes, tmp_path), CONFIG)
    assert any(d.key == "" and named in d.found for d in differing)


def test_what_is_not_judged_is_said(tmp_path: Path) -> None:
    assert "not judged, unknown here: my_gate" in judged(FIELDS | {"my_gate": 3}, tmp_path).notes[0]
    many = judged(FIELDS | {f"my_{i:02}": 3 for i in range(30)}, tmp_path).notes
    assert len(many) == 1
    assert many[0].endswith("my_09 and 20 more")
    assert "training only" in judged(FIELDS | {"attention_dropout": 0.1}, tmp_path).notes[0]
    half = {k: v for k, v in FIELDS.items() if k not in ("rope_theta", "n_group", "v_head_dim")}
    for kind in (
        {"model_type": "telechat3_moe", "architectures": None},
        {"model_type": None, "architectures": None},
    ):
        hf_settings = judged(half | kind, tmp_path)
        assert hugging_face.differences(hf_settings, CONFIG) == []
        (note,) = hf_settings.notes
        assert note.endswith(
            "not judged, absent without a known default: v_head_dim, n_group, rope_theta"
        )
    assert keys(
        half | {"model_type": "telechat3_moe", "architectures": None, "hidden_size": 8}, tmp_path
    ) == ["hidden_size"]


def test_a_single_expert_is_weighed_by_its_score(tmp_path: Path) -> None:
    """Here whatever norm_topk_prob says, in transformers where it is false."""
    single = layout(num_experts_per_tok=1, norm_topk_prob=True)
    fields = hugging_face.hf_config(single, "float32")
    assert fields["norm_topk_prob"] is False
    assert hugging_face.differences(judged(fields, tmp_path), single) == []


def test_all_groups_kept_is_no_limit(tmp_path: Path) -> None:
    none = dataclasses.replace(CONFIG, n_group=0, topk_group=0)
    for groups, kept in ((1, 1), (4, 4), (16, 16)):
        hf_settings = judged(FIELDS | {"n_group": groups, "topk_group": kept}, tmp_path)
        assert hugging_face.differences(hf_settings, none) == []
        same = dataclasses.replace(CONFIG, n_group=groups, topk_group=kept)
        assert hugging_face.differences(hf_settings, same) == []


@given(
    st.dictionaries(
        st.sampled_from(
            [*FIELDS, "rope_parameters", "quantization_config", "head_dim", "layer_types"]
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
            lambda x: (
                st.lists(x, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["rope_type", "type", "factor", "rope_theta", "fmt"]),
                    x,
                    max_size=3,
                )
            ),
            max_leaves=5,
        ),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=60, deadline=None)
def test_nonsense_is_refused_in_words(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]
) -> None:
    """Whatever stands in a field: what passes is equal, and all else is an error of ours."""
    folder = tmp_path_factory.getbasetemp()
    try:
        hf_settings = judged(FIELDS | changes, folder)
        differing = hugging_face.differences(hf_settings, CONFIG)
    except BadInputError:
        return
    if not differing:
        for key in hugging_face.COMPARED.keys() & changes.keys():
            assert changes[key] == FIELDS[key]
            assert isinstance(changes[key], bool) == isinstance(FIELDS[key], bool)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_overrides_give_the_recipe_that_fits(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    groups = [{"n_group": g, "topk_group": k} for g, k in ((0, 0), (1, 1), (4, 2), (8, 2), (8, 8))]
    other = layout(
        hidden_size=data.draw(st.integers(1, 9)),
        num_attention_heads=data.draw(st.integers(1, 5)),
        q_lora_rank=data.draw(st.integers(0, 3)),
        n_shared_experts=data.draw(st.integers(0, 3)),
        **data.draw(st.sampled_from(groups)),
        rms_norm_eps=data.draw(st.sampled_from([1e-6, 1e-5])),
        tie_word_embeddings=data.draw(st.booleans()),
    )
    folder = tmp_path_factory.getbasetemp()
    hf_settings = judged(hugging_face.hf_config(other, "float32"), folder)
    changes = dict(
        o.removeprefix("model.model_config.").split("=")
        for o in hugging_face.overrides(hf_settings, CONFIG, {})
    )
    fitted = dataclasses.replace(CONFIG, **{k: yaml.safe_load(v) for k, v in changes.items()})
    assert hugging_face.differences(hf_settings, fitted) == []


@pytest.mark.torch
def test_defaults_and_fields_of_transformers(tmp_path: Path) -> None:
    config = pytest.importorskip("transformers").DeepseekV3Config
    absent = judged(DEEPSEEK, tmp_path)
    for key in hugging_face.COMPARED:
        assert absent.values[key] == getattr(config(), key), key
    written = config(
        n_group=4,
        topk_group=2,
        **{k: FIELDS[k] for k in hugging_face.COMPARED if k not in ("n_group", "topk_group")},
        num_key_value_heads=4,
    )
    for fields in (
        written.to_dict(),
        json.loads(written.to_json_string()),
        written.to_dict() | FIVE,
    ):
        hf_settings = judged(
            json.loads(
                json.dumps(fields | {"architectures": ["DeepseekV3ForCausalLM"]}, default=str)
            ),
            tmp_path,
        )
        assert hugging_face.differences(hf_settings, CONFIG) == []
        assert hf_settings.notes == []


@pytest.mark.torch
def test_our_config_goes_through_transformers_unchanged(tmp_path: Path) -> None:
    config = pytest.importorskip("transformers").DeepseekV3Config
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    config.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    reloaded = json.loads((tmp_path / "again/config.json").read_text())
    for key, value in FIELDS.items():
        name = "dtype" if key == "torch_dtype" else key
        assert reloaded.get(name) == value, key
    hf_settings = hugging_face.read(tmp_path / "again/config.json")
    assert hugging_face.differences(hf_settings, CONFIG) == []
