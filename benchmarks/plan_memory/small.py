"""A small model of the 105B recipe's kind, whose graph compiles in seconds."""

RECIPE = "telechat3_moe/pretrain_105b_a4b_4k.yaml"
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "moe_shared_expert_intermediate_size": 96,
    "vocab_size": 2048,
    "max_position_embeddings": 256,
    "offset": 0,
}
SETTINGS = [f"model.model_config.{name}={value}" for name, value in SMALL.items()] + [
    "train_dataset.data_loader.config.seq_length=256",
    "parallel_config.pipeline_stage=1",
    "parallel_config.model_parallel=1",
    "parallel_config.use_seq_parallel=False",
    "parallel_config.micro_batch_num=1",
]
