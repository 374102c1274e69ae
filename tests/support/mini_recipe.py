"""A recipe so small that its graph compiles in seconds, and data for it."""

from pathlib import Path

import numpy as np

from telechat_moe.checkpoint import checkpoint
from telechat_moe.data import write_indexed
from telechat_moe.recipe import load
from telechat_moe.recipe.weights import weights

STEPS = 12
SPREAD = {"use_parallel": True, "parallel__parallel_mode": 1, "parallel__full_batch": True}
_HALF = {**SPREAD, "runner_config__batch_size": 2, "model__model_config__batch_size": 2}
DP2 = {**_HALF, "parallel_config__data_parallel": 2}
DP2_EP2 = {**DP2, "parallel_config__expert_parallel": 2}
PP2 = {
    **_HALF,
    "parallel_config__pipeline_stage": 2,
    "parallel_config__micro_batch_num": 2,
    "callbacks__1__micro_batch_num": 2,
}
TP2_PP2 = {
    **PP2,
    "parallel_config__model_parallel": 2,
    "parallel_config__use_seq_parallel": True,
}
OVERRIDES = {
    "model.model_config.vocab_size": 64,
    "model.model_config.hidden_size": 32,
    "model.model_config.intermediate_size": 48,
    "model.model_config.num_hidden_layers": 2,
    "model.model_config.num_attention_heads": 2,
    "model.model_config.num_key_value_heads": 2,
    "model.model_config.q_lora_rank": 16,
    "model.model_config.kv_lora_rank": 16,
    "model.model_config.qk_nope_head_dim": 8,
    "model.model_config.qk_rope_head_dim": 8,
    "model.model_config.v_head_dim": 8,
    "model.model_config.moe_intermediate_size": 16,
    "model.model_config.moe_shared_expert_intermediate_size": 16,
    "model.model_config.num_nextn_predict_layers": 0,
    "model.model_config.seq_length": 16,
    "train_dataset.data_loader.config.seq_length": 16,
    "model.model_config.max_position_embeddings": 16,
    "runner_config.batch_size": 4,
    "model.model_config.batch_size": 4,
    "train_dataset.data_loader.sizes": f"[{STEPS * 4},0,0]",
    "lr_schedule.warmup_steps": 2,
    "telechat_moe.evaluation.interval": 0,
    "telechat_moe.evaluation.batches": 8,
    "telechat_moe.sample": "null",
    "callbacks.2.save_checkpoint_steps": 3,
}


def write_data(folder: Path, seed: int = 0) -> Path:
    """Write learnable token files (each document counts upwards with its own stride)."""
    generator = np.random.default_rng(seed)
    documents = []
    for _ in range(60):
        start, stride = generator.integers(1, 64), generator.integers(1, 4)
        tokens = (start + stride * np.arange(generator.integers(10, 40))) % 63 + 1
        documents.append(np.append(tokens, 0).astype(np.uint16))
    for name in ("train", "valid"):
        write_indexed(folder / name, documents, np.dtype(np.uint16))
    return folder


def flipped_weights(folder: Path, arguments: list[str]) -> Path:
    """Write weights for a recipe as a checkpoint, with one bit flipped, which only its checksum shows."""
    config = load(arguments[1], arguments[4::2]).model_config
    model = {w.name: np.ones(w.shape, np.float32) for w in weights(config)}
    path = checkpoint.save(folder / "flipped", 1, {"model": model}, {})
    file = next(path.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return path


def arguments(data: Path, output: Path, **changes: object) -> list[str]:
    """Return the arguments of ``telechat-moe train`` for the mini recipe."""
    values = {
        **OVERRIDES,
        "train_dataset.data_loader.config.data_path": f"['1', '{data}/train']",
        "telechat_moe.evaluation.data_path": f"['1', '{data}/valid']",
        "output_dir": str(output),
    }
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    sets = [x for key, value in values.items() for x in ("--set", f"{key}={value}")]
    return ["train", "telechat3_moe/pretrain_tiny.yaml", "--plain", *sets]
