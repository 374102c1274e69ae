"""Hugging Face's DeepseekV3ForCausalLM with the weights of one of our models."""

from pathlib import Path

import numpy as np
import torch
from tiny_models import Arrays, Batch, save_weights
from transformers import DeepseekV3ForCausalLM

from telechat_moe.interop.hf import convert
from telechat_moe.interop.names import pairs
from telechat_moe.recipe import ModelConfig

torch.set_num_threads(1)  # more would only spin, the models are so small


def through_convert(
    folder: Path, config: ModelConfig, weights: Arrays
) -> tuple[DeepseekV3ForCausalLM, set[str]]:
    """Export the weights and let transformers load the folder; return also what it had no use for."""
    save_weights(folder / "ours.safetensors", weights)
    convert(folder / "ours.safetensors", folder / "hf", config, "hf")
    model, info = DeepseekV3ForCausalLM.from_pretrained(
        folder / "hf", output_loading_info=True, attn_implementation="eager"
    )
    assert not info["missing_keys"], info
    assert not info["mismatched_keys"], info
    return model.train(), set(info["unexpected_keys"])


def loss(model: DeepseekV3ForCausalLM, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(loss, logits [T, V])``; transformers shifts the labels itself."""
    ids = torch.from_numpy(batch.input_ids.astype(np.int64))
    out = model(input_ids=ids, labels=ids, use_cache=False)
    return out.loss, out.logits.reshape(-1, out.logits.shape[-1])


def gradients(
    model: DeepseekV3ForCausalLM, batch: Batch
) -> tuple[float, np.ndarray, dict[str, np.ndarray]]:
    """Return ``(loss, logits, gradients by Hugging Face's name)``; no gradient counts as zeros."""
    model.zero_grad()
    value, logits = loss(model, batch)
    value.backward()
    grads = {
        name: np.zeros(p.shape, np.float32) if p.grad is None else p.grad.numpy().copy()
        for name, p in model.named_parameters()
    }
    return value.item(), logits.detach().numpy(), grads


def to_hf_names(config: ModelConfig, ours: Arrays) -> Arrays:
    """Rename and unstack arrays of ours, without the interop code that converts files."""
    named: Arrays = {}
    for pair in pairs(config):
        if pair.name not in ours:
            continue
        array = ours[pair.name]
        parts = [a.T for a in array] if array.ndim == 3 else [array]
        named |= dict(zip(pair.hf, parts, strict=True))
    return named
