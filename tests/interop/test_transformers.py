"""Folders that transformers saves and loads; no mindspore. `tests/model` compares with our model."""

import dataclasses
import json

import pytest

pytest.importorskip("torch", reason="compares with torch: pip install torch==2.13.0")
pytest.importorskip("transformers", reason="compares with transformers (pip install '.[test]')")

import torch
from test_convert import CONFIG, random_tensors, read, same, write
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from telechat_moe.interop.hf import convert, hf_config

pytestmark = pytest.mark.torch

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def save_random(folder, config, dtype):
    torch.manual_seed(0)
    with torch.random.fork_rng():
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**hf_config(config, "float32")))
    for name, b in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            b.uniform_()
    model.to(DTYPES[dtype]).save_pretrained(folder, max_shard_size="15KB")
    return model


def logits(model):
    return model(torch.arange(12)[None] * 3).logits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [False, True])
def test_saved_by_transformers_and_back(tmp_path, dtype, tied):
    config = dataclasses.replace(CONFIG, num_nextn_predict_layers=0, tie_word_embeddings=tied)
    model = save_random(tmp_path / "theirs", config, dtype)
    convert(tmp_path / "theirs", tmp_path / "ours", config, "telechat")
    result = convert(tmp_path / "ours", tmp_path / "hf", config, "hf", shard_bytes=15_000)
    assert "model.safetensors.index.json" in result.files
    again, info = DeepseekV3ForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True, dtype="auto"
    )
    assert not any(info.values())
    assert again.dtype == DTYPES[dtype]
    same(read(tmp_path / "hf"), read(tmp_path / "theirs"))
    # Only the router computes in float32 at all times; elsewhere the model computes in its own type.
    with torch.no_grad():
        assert torch.equal(logits(again), logits(model))


def test_config_says_what_transformers_would(tmp_path):
    config = dataclasses.replace(CONFIG, num_nextn_predict_layers=0, n_group=3, topk_group=1)
    write(tmp_path / "ours.safetensors", random_tensors(config, "BF16"))
    convert(tmp_path / "ours.safetensors", tmp_path / "hf", config, "hf")
    loaded = DeepseekV3Config.from_pretrained(tmp_path / "hf")
    written = json.loads((tmp_path / "hf/config.json").read_text())
    for key, value in written.items():
        if key != "torch_dtype":
            assert getattr(loaded, key) == value, key
    assert loaded.dtype == torch.bfloat16
    for key in ("vocab_size", "hidden_size", "n_group", "topk_group", "q_lora_rank", "rope_theta"):
        assert getattr(loaded, key) == getattr(config, key)


def test_no_shared_experts_and_mtp(tmp_path):
    """Transformers has tensors without elements for no shared experts, and skips MTP layers."""
    config = dataclasses.replace(CONFIG, n_shared_experts=0, n_group=0, topk_group=0)
    write(tmp_path / "ours.safetensors", random_tensors(config))
    convert(tmp_path / "ours.safetensors", tmp_path / "hf", config, "hf")
    _, info = DeepseekV3ForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    layers = {name.split(".")[2] for name in info["unexpected_keys"]}
    assert layers == {"3", "4"}
    result = convert(tmp_path / "hf", tmp_path / "back", config, "telechat")
    assert len(result.ignored) == 3 * 4
    same(read(tmp_path / "back"), read(tmp_path / "ours.safetensors"))
