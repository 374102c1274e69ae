"""Logits from a folder that transformers saved with other settings, with the recipe that fits it."""

import dataclasses
import json
from pathlib import Path

import pytest

pytest.importorskip("mindspore", reason="needs mindspore (pip install '.[train]')")
pytest.importorskip("torch", reason="compares with torch: pip install torch==2.13.0")
pytest.importorskip("transformers", reason="compares with transformers (pip install '.[test]')")

import numpy as np
import torch
import yaml
from mindspore import Tensor
from tiny_models import random_batch, tiny_config
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from telechat_moe.interop.hf import weights
from telechat_moe.model import CausalLM, Logits
from telechat_moe.recipe import ModelConfig, hugging_face
from telechat_moe.recipe.hugging_face import OtherModelError
from telechat_moe.train.parameters import load_weights

pytestmark = [pytest.mark.mindspore, pytest.mark.torch]

CONFIG = tiny_config()
OTHER = {
    "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "norm_topk_prob": False, "routed_scaling_factor": 1.7,
    "rope_theta": 50.0, "rope_interleave": False, "q_lora_rank": None, "tie_word_embeddings": True,
    "num_attention_heads": 2, "qk_nope_head_dim": 10, "n_shared_experts": 2, "num_hidden_layers": 3,
}  # fmt: skip


def saved(folder: Path) -> DeepseekV3ForCausalLM:
    """Let transformers make and save a model; rewrite the rotary base as version 5 does."""
    fields = hugging_face.hf_config(CONFIG, "float32") | OTHER | {"num_key_value_heads": 2}
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**fields)).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(0, 0.3)
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    written["rope_parameters"] = {"rope_theta": written.pop("rope_theta"), "rope_type": "default"}
    written.pop("rope_scaling")
    (folder / "config.json").write_text(json.dumps(written))
    return model


def fitted(folder: Path) -> ModelConfig:
    theirs = hugging_face.read(folder / "config.json")
    found = dict(
        text.removeprefix("model.model_config.").split("=")
        for text in hugging_face.overrides(theirs, CONFIG, {})
    )
    return dataclasses.replace(CONFIG, **{k: yaml.safe_load(v) for k, v in found.items()})


def test_logits_of_the_recipe_that_fits(tmp_path: Path) -> None:
    theirs = saved(tmp_path)
    with pytest.raises(OtherModelError) as error:
        weights(tmp_path, CONFIG)
    assert {d.key for d in error.value.differences} == OTHER.keys()
    config = fitted(tmp_path)
    model = CausalLM(config)
    load_weights(model, weights(tmp_path, config), tmp_path)
    batch = random_batch(config, seed=2)
    cell = Logits(model)
    cell.set_train(False)
    ours = cell(Tensor(batch.input_ids), Tensor(batch.position_ids)).asnumpy()
    with torch.no_grad():
        expected = theirs(torch.from_numpy(batch.input_ids.astype(np.int64))).logits.numpy()
    expected = expected.reshape(ours.shape)
    assert np.abs(ours - expected).max() < 2e-5 * np.abs(expected).max()
