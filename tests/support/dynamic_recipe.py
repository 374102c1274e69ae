"""A small recipe of mode 1 without a problem, and changes to it by dotted keys."""

from __future__ import annotations

from pathlib import Path

from telechat_moe.recipe import RecipeError, mode1

TEXT = """\
checkpoint:
  save_path: ./output/checkpoint
  save_interleaved_steps: 100
training:
  steps: 100
  local_batch_size: 1
  global_batch_size: 16
parallelism:
  data_parallel_shard: 4
  tensor_parallel: 2
  sequence_parallel: True
  expert_parallel: 4
optimizer:
  type: AdamW
  betas: [0.9, 0.95]
lr_scheduler:
  type: ConstantWarmUpLR
  learning_rate: 1.e-4
  warmup_steps: 10
train_dataset:
  dataloader:
    type: BlendedMegatronDatasetDataLoader
    datasets_type: GPTDataset
    sizes: [1600, 0, 0]
    config:
      seq_length: 128
      create_attention_mask: False
      create_compressed_eod_mask: False
    column_names: [input_ids, labels, loss_mask, position_ids]
model:
  model_type: deepseek_v3
  architectures: DeepseekV3ForCausalLM
  vocab_size: 512
  seq_length: 128
  hidden_size: 64
  intermediate_size: 128
  moe_intermediate_size: 32
  num_hidden_layers: 8
  num_nextn_predict_layers: 0
  num_attention_heads: 4
  q_lora_rank: 48
  kv_lora_rank: 32
  qk_nope_head_dim: 16
  qk_rope_head_dim: 16
  v_head_dim: 16
  n_routed_experts: 8
  num_experts_per_tok: 2
  n_group: 0
  topk_group: 0
  first_k_dense_replace: 1
  rotary_scaling_factor: 1.0
  use_attn_mask_compression: True
"""


def problems(*changes: str, text: str = TEXT, devices: int | None = None) -> list[str]:
    """Return what is wrong with the recipe after changes `a.b=c`, a line each."""
    try:
        mode1.loads(text, changes, path=Path("recipe.yaml"), devices=devices)
    except RecipeError as error:
        return [str(problem) for problem in error.problems]
    return []
