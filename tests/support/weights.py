"""Weights of made-up models for the tests of this folder: layouts of any size, without holding them in memory."""

import json
from pathlib import Path

import numpy as np

from telechat_moe.interop.names import pairs
from telechat_moe.recipe import ModelConfig

BYTES = {"BF16": 2, "F32": 4}


def layout(**changes: int) -> ModelConfig:
    """Return a model section in the proportions of TeleChat3-MoE."""
    sizes = {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "first_k_dense_replace": 1,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 192,
        "num_nextn_predict_layers": 1,
    }
    return ModelConfig(qk_layernorm=True, **{**sizes, **changes})


def write_hf(folder: Path, config: ModelConfig, shard_bytes: int, *, sparse: bool) -> int:
    """Write a checkpoint in Hugging Face's names, BF16 with an index; return its bytes.

    Args:
        folder: Folder to make.
        config: Model section.
        shard_bytes: Largest file.
        sparse: All zeros, by truncate: a file takes no room. Else random bits of numbers below 2.
    """
    folder.mkdir()
    named = [(name, p.hf_shape) for p in pairs(config) for name in p.hf]
    files: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled = 0
    for name, shape in named:
        size = 2 * int(np.prod(shape))
        if files[-1] and filled + size > shard_bytes:
            files.append([])
            filled = 0
        files[-1].append((name, shape))
        filled += size
    weight_map, total = {}, 0
    for number, tensors in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):06d}.safetensors"
        weight_map |= {name: file for name, _ in tensors}
        total += _write_file(folder / file, tensors, number if not sparse else None)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _write_file(path: Path, tensors: list[tuple[str, tuple[int, ...]]], seed: int | None) -> int:
    header, offset = {}, 0
    for name, shape in tensors:
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if seed is None:
            file.truncate(8 + len(text) + offset)
        else:
            dice = np.random.default_rng(seed)
            for start in range(0, offset, 1 << 22):
                bits = np.frombuffer(dice.bytes(min(1 << 22, offset - start)), np.uint16)
                file.write((bits & 0xBFFF).tobytes())
    return offset
