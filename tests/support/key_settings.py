"""Values of keys that show what a key does, and the setting in which it acts, where the annotation does not tell."""

from typing import Any

MODEL, RUN, LR = "model.model_config.", "runner_config.", "lr_schedule."
GPT, GUARD = "train_dataset.data_loader.config.", "telechat_moe.loss_guard."
TWO = {"use_parallel": True, "parallel.parallel_mode": 1, "parallel.full_batch": True}
TWO_COPIES = {**TWO, "parallel_config.data_parallel": 2}
HALVES = {**TWO, "parallel_config.model_parallel": 2}
STAGES = {
    **{**TWO, "parallel_config.pipeline_stage": 2, "parallel_config.micro_batch_num": 4},
    **{"callbacks.1.micro_batch_num": 4, "parallel.pipeline_config.pipeline_interleave": True},
}
SHARDED = {**TWO_COPIES, "parallel.enable_parallel_optimizer": True}
POLICY = {MODEL + "moe_token_drop_policy": "probs"}
PLAIN = {"telechat_moe.operators.default": "plain"}
COPIES = {MODEL + "batch_size": None, "callbacks.1": {"type": "TopkBiasBalanceCallback"}}
V3 = {MODEL + "model_type": "deepseek_v3"}
HEADS = {MODEL + "num_key_value_heads": None}
WSD = {LR + "type": "WarmUpStableDecayLR", LR + "decay_start_steps": 6}
BACK = {GUARD + "action": "rollback", GUARD + "window": 4, GUARD + "min_steps": 2}
COLUMNS = {"train_dataset.input_columns": None, "train_dataset.construct_args_key": None}
ONE_ROW = {**TWO, RUN + "batch_size": 1, MODEL + "batch_size": 1}

OPERATORS = (
    *("adamw", "attention", "cross_entropy", "grouped_matmul", "matmul", "permute"),
    *("rms_norm", "rope", "routing", "swiglu"),
)

SETTINGS: dict[str, tuple[list[Any] | None, dict[str, Any]]] = {
    "Recipe.use_parallel": ([False], TWO_COPIES),
    "LrSchedule.learning_rate": ([0.002], {}),
    "LrSchedule.lr_end": ([0.0001], {}),
    "LrSchedule.warmup_lr_init": ([0.0001], {}),
    "LrSchedule.total_steps": ([20], {}),
    "LrSchedule.decay_steps": ([5], {}),
    "LrSchedule.decay_ratio": ([0.5], {}),
    "LrSchedule.warmup_ratio": ([0.5], {LR + "warmup_steps": None}),
    "LrSchedule.decay_start_steps": ([7], WSD),
    "LrSchedule.decay_start_ratio": (
        [0.7],
        {**WSD, LR + "decay_start_steps": None, LR + "decay_start_ratio": 0.5},
    ),
    "RunnerConfig.batch_size": ([2], COPIES),
    "RunnerConfig.gradient_accumulation_steps": (
        [2],
        {"callbacks.1": {"type": "MFLossMonitor"}, "callbacks.0": {"type": "MoEDropRateCallback"}}
        | {MODEL + "moe_router_enable_expert_bias": False},
    ),
    "TelechatMoe.max_skipped_steps": ([0, 1], {}),
    "TelechatMoe.moe_block_rows": ([8], PLAIN),
    "TelechatMoe.moe_capacity_tokens": (
        [16],
        {**PLAIN, **POLICY, MODEL + "moe_expert_capacity_factor": 2.0},
    ),
    "ParallelOptimizerConfig.optimizer_level": (["level2"], SHARDED),
    **{f"Operators.{name}": (["plain"], {}) for name in OPERATORS},
    "GptDatasetConfig.eod": ([7], {GPT + "reset_position_ids": True}),
    "DataLoader.sizes": ([[32, 0, 0]], {}),
    "GptDatasetConfig.split": (["1, 1, 0"], {}),
    "GptDatasetConfig.reset_attention_mask": (
        [True],
        {**COLUMNS, GPT + "create_attention_mask": True},
    ),
    "GptDatasetConfig.create_attention_mask": ([True], COLUMNS),
    "CheckpointMonitor.async_save": ([True], {"telechat_moe.saving.background": False}),
    "Saving.background": ([False], {}),
    "LossGuard.max_rollbacks": ([0], BACK),
    "LossGuard.rollback_steps": ([2], BACK),
    "LossGuard.window": ([3], {GUARD + "window": 4, GUARD + "min_steps": 2}),
    "LossGuard.min_steps": ([3], {GUARD + "window": 4, GUARD + "min_steps": 2}),
    "Parallel.full_batch": ([False], TWO_COPIES),
    "Parallel.dataset_strategy": ([[[2, 1]] * 4], {**TWO_COPIES, "parallel.full_batch": False}),
    "Parallel.enable_parallel_optimizer": ([True], TWO_COPIES),
    "PipelineConfig.pipeline_interleave": ([False], STAGES),
    "PipelineConfig.pipeline_scheduler": (["gpipe"], STAGES),
    "ParallelConfig.data_parallel": ([2], TWO),
    "ParallelConfig.model_parallel": ([2], TWO),
    "ParallelConfig.context_parallel": ([2], ONE_ROW),
    "ParallelConfig.expert_parallel": ([2], TWO_COPIES),
    "ParallelConfig.pipeline_stage": ([4], {**STAGES, MODEL + "num_hidden_layers": 4}),
    "ParallelConfig.micro_batch_num": ([6], {**STAGES, "callbacks.1.micro_batch_num": None}),
    "ParallelConfig.use_seq_parallel": ([True], HALVES),
    "RecomputeConfig.recompute": ([True], TWO_COPIES),
    "RecomputeConfig.mp_comm_recompute": (
        [False],
        {**TWO_COPIES, "recompute_config.recompute": True},
    ),
    "Sharding.dispatcher": (
        ["allgather"],
        {**TWO_COPIES, "parallel_config.expert_parallel": 2},
    ),
    "Sharding.expert_tensor_parallel": ([True], HALVES),
    "Sharding.recompute": ([["norms"], ["moe"]], TWO_COPIES),
    "Evaluation.data_path": ([["1", "other"]], {}),
    "ModelConfig.num_hidden_layers": ([3], {}),
    "ModelConfig.num_attention_heads": ([4], HEADS),
    "ModelConfig.qk_nope_head_dim": ([12], {MODEL + "qk_head_dim": None, **V3}),
    "ModelConfig.qk_rope_head_dim": ([4], {MODEL + "qk_pos_emb_head_dim": None, **V3}),
    "ModelConfig.qk_layernorm": ([False], {}),
    "ModelConfig.max_position_embeddings": ([32], {}),
    "ModelConfig.fp32_residual_connection": ([False], {MODEL + "compute_dtype": "bfloat16"}),
    "ModelConfig.params_dtype": (["bfloat16"], {}),
    "ModelConfig.compute_dtype": (["bfloat16", "bf16"], {}),
    "ModelConfig.layernorm_compute_dtype": (["bfloat16"], {}),
    "ModelConfig.softmax_compute_dtype": (["bfloat16", "fp16"], PLAIN),
    "ModelConfig.rotary_dtype": (["bfloat16"], {}),
    "ModelConfig.router_dense_type": (["bfloat16"], {}),
    "ModelConfig.n_routed_experts": ([16], COPIES),
    "ModelConfig.num_experts_per_tok": ([3], {}),
    "ModelConfig.n_shared_experts": (
        [0, 2],
        {MODEL + "moe_shared_expert_intermediate_size": None},
    ),
    "ModelConfig.n_group": ([2], {MODEL + "n_group": 4, MODEL + "topk_group": 1}),
    "ModelConfig.topk_group": ([2], {MODEL + "n_group": 4, MODEL + "topk_group": 1}),
    "ModelConfig.moe_router_enable_expert_bias": ([False], COPIES),
    "ModelConfig.moe_router_bias_update_rate": ([0.5], COPIES),
    "ModelConfig.moe_router_load_balancing_type": (["aux_loss", "none", "gbs_aux_loss"], {}),
    "ModelConfig.moe_z_loss_coeff": ([0.5], {}),
    "ModelConfig.moe_token_drop_policy": (
        ["position"],
        {**POLICY, MODEL + "moe_expert_capacity_factor": 2.0},
    ),
    "ModelConfig.moe_expert_capacity_factor": (
        [1.5],
        {**POLICY, MODEL + "moe_expert_capacity_factor": 2.0},
    ),
    "ModelConfig.num_nextn_predict_layers": ([0, 2], {}),
    "ModelConfig.mtp_loss_factor": ([0.5], {}),
    "ModelConfig.offset": ([[1, 0], [1, -1]], STAGES),
    "ModelConfig.pp_interleave_num": ([2], {**STAGES, MODEL + "num_hidden_layers": 4}),
}

BESIDE: dict[str, dict[str, Any]] = {
    "LossGuard": {GUARD + "window": 4, GUARD + "min_steps": 2},
    "MonitorConfig": {"use_skip_data_by_global_norm": True},
    "ParallelOptimizerConfig": SHARDED,
    "GroupedLr": {
        "grouped_lr_schedule.default": {"type": "ConstantWarmUpLR", "learning_rate": 0.001},
        "grouped_lr_schedule.grouped": [
            {"type": "ConstantWarmUpLR", "learning_rate": 0.001, "params": ["x"]}
        ],
    },
    "ParamInitRule": {MODEL + "param_init_std_rules": [{"target": "x", "init_method_std": 0.1}]},
    "RopeScaling": {MODEL + "rope_scaling": {"factor": 2}},
    "OtherModelConfig": {MODEL + "model_type": "qwen3"},
    "LossScale": {"runner_wrapper.scale_sense": {"type": "FixedLossScaleUpdateCell"}},
}
"""Settings in which the keys of a section act."""

REFUSED = (
    "GroupedLrSchedule",
    "GroupedLr",
    "ParamInitRule",
    "RopeScaling",
    "LossScale",
    "OtherModelConfig",
)
"""Sections that our trainer does not take with any content."""

RULED = (
    *("Recipe.use_legacy", "Recipe.use_parallel", "Recipe.micro_batch_interleave_num"),
    *("Recipe.moe_config", "ProfileMonitor.start_step", "ProfileMonitor.stop_step"),
    *("MoEDropRateCallback.capacity_factor", "LrSchedule.base_lr", "Model.arch"),
    *("ModelConfig.seq_length", "ModelConfig.fp32_residual_connection", "ModelConfig.params_dtype"),
    *("ModelConfig.scoring_func", "ModelConfig.multi_latent_attention"),
    *("ModelConfig.add_bias_linear", "ModelConfig.gated_linear_unit", "ModelConfig.normalization"),
    *("RecomputeConfig.recompute_slice_activation", "RunnerWrapper.global_norm_spike_threshold"),
    *("RunnerWrapper.use_skip_data_by_global_norm", "TrainDataset.input_columns"),
    *("TrainDataset.construct_args_key", "TrainDataset.drop_remainder"),
    *("GptDatasetConfig.seq_length", "GptDatasetConfig.train_data_path"),
    "ParallelConfig.context_parallel",
)
"""Keys that the rest of the recipe fixes, or that this small recipe cannot change alone: other values are refused."""

ELSEWHERE: dict[str, str] = {
    "Recipe.load_checkpoint": "train/test_resume_from.py",
    "Recipe.resume_training": "train/test_resume_from.py",
    "Recipe.pretrained_model_dir": "recipe/test_recipe_load.py",
    "TelechatMoe.resume_data": "train/test_resume_from.py",
    "Context.device_target": "train/test_preflight.py",
}
"""Keys about what lies outside of the recipe, and the tests that show what they do."""
