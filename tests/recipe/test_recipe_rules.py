"""Every cross-field rule: one mutation, the exact keys that complain, and their lines."""

from __future__ import annotations

import pytest
from yaml_edit import line_of, put, recipe_text, remove

from telechat_moe.recipe import RecipeError, loads, rules

TINY = "telechat3_moe/pretrain_tiny.yaml"
LARGE = "telechat3_moe/pretrain_105b_a4b_4k.yaml"
VPP = "pangu_ultra_moe/pretrain_718b.yaml"
M = "model.model_config."
P = "parallel_config."
D = "train_dataset."
C = "train_dataset.data_loader.config."
L = "train_dataset.data_loader."
S = "lr_schedule."
OWN = "telechat_moe."
TIED = {M + "tie_word_embeddings": "True"}
DROPS = {M + "moe_expert_capacity_factor": "1.5", M + "moe_token_drop_policy": "probs"}
MIX = OWN + "mixture"
MIXED: dict[str, str | None] = {
    C + "data_path": "['a', 'b']",
    MIX: "[{from_sample: 0, weights: [1, 0]}, {from_sample: 400, weights: [1, 2.5]}]",
}

TUNE = "telechat3_moe/finetune_tiny.yaml"
DATA_CONFIG = "train_dataset.data_loader.config."
GROWS = OWN + "step_batch_size_schedule"
SPREAD = {
    "use_parallel": "True",
    "parallel.parallel_mode": "1",
    "parallel.full_batch": "True",
    "parallel_config.data_parallel": "2",
}


def swap(text: str, recompute: str = "False") -> dict[str, str | None]:
    return {"swap_config": f"{{swap: True, {text}}}", "recompute_config.recompute": recompute}


ITEM = "{layers: [0, 3], backward_prefetch: 2}"
OPERATOR = "{op_name: 'moe', layers: True, backward_prefetch: 2}"

# rule: [(recipe, {key: value; None removes}, keys that complain), ...]
CASES: dict[str, list[tuple[str, dict[str, str | None], str]]] = {
    "state": [(TINY, {M + "hidden_size": "100000000"}, "model.model_config")],
    "whole_documents": [
        *(
            (TUNE, {DATA_CONFIG + key: value}, DATA_CONFIG + key)
            for key, value in (
                ("reset_position_ids", "False"),
                ("reset_attention_mask", "False"),
                ("eod_mask_loss", "True"),
                ("add_extra_token_to_sequence", "False"),
            )
        ),
        (
            TINY,
            {OWN + "packing": "{}"},
            f"{DATA_CONFIG}reset_position_ids {DATA_CONFIG}reset_attention_mask",
        ),
    ],
    "conversations": [
        (TUNE, {OWN + "corpus.tokenizer": "null"}, OWN + "corpus.tokenizer"),
        *(
            (TUNE, {OWN + "conversations.message": f"'{text}'"}, OWN + "conversations.message")
            for text in ("{content}", "{role}{content}{content}", "{content}{role}")
        ),
        (
            TUNE,
            {OWN + "conversations.ignore_fields": "[id, role]"},
            OWN + "conversations.ignore_fields",
        ),
        (
            TUNE,
            {OWN + "conversations.variables": "{enable_thinking: False}"},
            OWN + "conversations.variables",
        ),
    ],
    "decay_style": [
        (TINY, {OWN + "lr_wsd_decay_style": "cosine"}, OWN + "lr_wsd_decay_style"),
    ],
    "batch_sizes": [
        *(
            (TINY, {GROWS: f"'{text}'"}, GROWS)
            for text in ("0:4 5K:4 5001:8", "0:4 5K:6", "0:4 5K:16", "0:8", "0:4 5K:0")
        ),
        (TINY, SPREAD | {GROWS: "'0:4 5K:8'"}, GROWS),
        *(
            (TINY, {GROWS: "'0:4 5K:8'", **given}, GROWS)
            for given in (
                {OWN + "moe.placement": "{}"},
                SPREAD
                | {
                    "parallel_config.data_parallel": "1",
                    "parallel_config.pipeline_stage": "2",
                    "parallel_config.micro_batch_num": "2",
                    "callbacks.1.micro_batch_num": "2",
                    "runner_config.batch_size": "4",
                    M + "batch_size": "4",
                },
            )
        ),
    ],
    "groups": [
        (TINY, {M + "num_experts_per_tok": "9"}, M + "num_experts_per_tok"),
        (TINY, {M + "n_group": "2"}, M + "topk_group"),
        (TINY, {M + "topk_group": "2"}, M + "topk_group"),
        (TINY, {M + "n_group": "3", M + "topk_group": "1"}, M + "n_group"),
        (TINY, {M + "n_group": "4", M + "topk_group": "5"}, M + "topk_group"),
        (
            TINY,
            {M + "n_group": "8", M + "topk_group": "1", M + "num_experts_per_tok": "2"},
            M + "num_experts_per_tok",
        ),
        (
            TINY,
            {M + "n_group": "4", M + "topk_group": "2", M + "num_experts_per_tok": "3"},
            M + "num_experts_per_tok",
        ),
    ],
    "top_k": [
        (
            TINY,
            {
                M + "model_type": "qwen3_moe",
                M + "n_group": None,
                M + "num_experts_per_tok": "9",
            },
            M + "num_experts_per_tok",
        ),
    ],
    "rotary": [
        (
            TINY,
            {M + "qk_rope_head_dim": "15", M + "qk_pos_emb_head_dim": "15"},
            M + "qk_rope_head_dim",
        ),
        (TINY, {M + "rotary_interleaved": "True"}, M + "rotary_interleaved"),
        (TINY, {M + "apply_rope_fusion": "True"}, M + "apply_rope_fusion"),
        (TINY, {M + "rotary_scaling_factor": "null"}, M + "rotary_scaling_factor"),
    ],
    "dense_layers": [
        (TINY, {M + "first_k_dense_replace": "5"}, M + "first_k_dense_replace"),
        (TINY, {M + "moe_layer_freq": "2"}, M + "moe_layer_freq"),
        (TINY, {M + "moe_layer_freq": "[0, 0, 1, 1]"}, M + "moe_layer_freq"),
    ],
    "shared_experts": [
        (TINY, {M + "n_shared_experts": "0"}, M + "moe_shared_expert_intermediate_size"),
    ],
    "capacity": [
        (TINY, {M + "moe_expert_capacity_factor": "1.5"}, M + "moe_token_drop_policy"),
    ],
    "multi_token": [(TINY, {M + "mtp_loss_factor": "null"}, M + "mtp_loss_factor")],
    "positions": [(TINY, {M + "max_position_embeddings": "255"}, M + "seq_length")],
    "heads": [
        (TINY, {M + "num_key_value_heads": "2"}, M + "num_key_value_heads"),
        (
            TINY,
            {
                M + "model_type": "qwen3_moe",
                M + "multi_latent_attention": "False",
                M + "num_key_value_heads": "3",
            },
            M + "num_key_value_heads",
        ),
    ],
    "flash_attention": [
        (TINY, {M + "use_attn_mask_compression": "True"}, M + "use_attn_mask_compression"),
        (TINY, {M + "use_ring_attention": "True"}, M + "use_ring_attention"),
    ],
    "activation": [(TINY, {M + "bias_swiglu_fusion": "True"}, M + "bias_swiglu_fusion")],
    "tied": [
        (
            TINY,
            {M + "untie_embeddings_and_output_weights": "False"},
            M + "untie_embeddings_and_output_weights",
        ),
    ],
    "token_ids": [
        (TINY, {M + "eos_token_id": "2048"}, M + "eos_token_id"),
        (TINY, {C + "eod": "2048"}, C + "eod"),
        (TINY, {C + "pad": "2048"}, C + "pad"),
    ],
    "converter_names": [
        (LARGE, {M + "qk_nope_head_dim": "64"}, M + "qk_nope_head_dim"),
        (LARGE, {M + "qk_rope_head_dim": "32"}, M + "qk_rope_head_dim"),
        (LARGE, {M + "qk_head_dim": "64"}, M + "qk_head_dim"),
        (VPP, {M + "qk_pos_emb_head_dim": "32"}, M + "qk_pos_emb_head_dim"),
        (VPP, {M + "router_dense_type": "bfloat16"}, M + "router_dense_type"),
    ],
    "device_memory": [
        (LARGE, {M + "moe_intermediate_size": "1048576"}, "context.max_device_memory"),
        (LARGE, {"context.max_device_memory": "1GB"}, "context.max_device_memory"),
    ],
    "home_folders": [
        (TINY, {"output_dir": "~/x"}, "output_dir"),
        (TINY, {"load_checkpoint": "~someone/x"}, "load_checkpoint"),
    ],
    "memory_of_saves": [
        (LARGE, {"telechat_moe.saving.memory_share": "0.1"}, "telechat_moe.saving.memory_share"),
    ],
    "use_parallel": [
        (TINY, {P + "data_parallel": "2"}, "use_parallel"),
        (LARGE, {"use_parallel": "False"}, f"{P}expert_parallel use_parallel"),
    ],
    "parallel_mode": [
        (LARGE, {"parallel.parallel_mode": "0"}, "parallel.parallel_mode"),
        (LARGE, {"parallel.parallel_mode": "STAND_ALONE"}, "parallel.parallel_mode"),
    ],
    "device_number": [
        (
            TINY,
            {"use_parallel": "True", "parallel.parallel_mode": "1", P + "data_parallel": "6"},
            "parallel_config",
        ),
    ],
    "cpu": [
        (TINY, {"runner_config.sink_mode": "True"}, "runner_config.sink_mode"),
        (
            TINY,
            {M + "compute_dtype": "bfloat16", "telechat_moe.operators.matmul": "plain"},
            M + "compute_dtype",
        ),
        (TINY, {M + "compute_dtype": "float16"}, M + "compute_dtype"),
        (TINY, {M + "params_dtype": "bfloat16"}, M + "params_dtype"),
        (
            LARGE,
            {"context.device_target": "CPU"},
            "runner_config.sink_mode",
        ),
    ],
    "tensor_parallel": [
        (
            LARGE,
            {M + "num_attention_heads": "36", M + "num_key_value_heads": "36"},
            P + "model_parallel",
        ),
        (LARGE, {M + "vocab_size": "131071"}, P + "model_parallel"),
        (LARGE, {M + "intermediate_size": "7681"}, P + "model_parallel"),
        (LARGE, {M + "moe_shared_expert_intermediate_size": "1537"}, P + "model_parallel"),
        (
            LARGE,
            {M + "moe_shared_expert_intermediate_size": None, M + "moe_intermediate_size": "1537"},
            P + "model_parallel",
        ),
    ],
    "sequence_parallel": [
        (LARGE, {P + "model_parallel": "1"}, P + "use_seq_parallel"),
        (
            LARGE,
            {C + "seq_length": "4092"},
            P + "use_seq_parallel",
        ),
    ],
    "expert_parallel": [
        (LARGE, {P + "expert_parallel": "5"}, P + "expert_parallel"),
        (LARGE, {P + "expert_parallel": "64"}, P + "expert_parallel"),
    ],
    "expert_mesh": [
        (
            LARGE,
            {P + "model_parallel": "4", P + "data_parallel": "6", P + "expert_parallel": "6"},
            P + "expert_parallel",
        ),
        (
            LARGE,
            {P + "expert_parallel": "8", OWN + "sharding.expert_tensor_parallel": "True"},
            P + "expert_parallel",
        ),
        (
            LARGE,
            {M + "moe_intermediate_size": "1540", OWN + "sharding.expert_tensor_parallel": "True"},
            OWN + "sharding.expert_tensor_parallel",
        ),
    ],
    "rows": [
        (
            LARGE,
            {P + "use_seq_parallel": "False", C + "seq_length": "4092"},
            "runner_config.batch_size",
        ),
        (
            LARGE,
            {P + "context_parallel": "2", "runner_config.batch_size": "2"},
            "runner_config.batch_size",
        ),
    ],
    "tied_table": [
        (LARGE, TIED, M + "tie_word_embeddings"),
    ],
    "capacity_tokens": [
        (LARGE, {**DROPS, OWN + "sharding.dispatcher": "alltoallv"}, OWN + "sharding.dispatcher"),
        (LARGE, {**DROPS, OWN + "moe_capacity_tokens": "1024"}, OWN + "moe_capacity_tokens"),
        (TINY, {**DROPS, OWN + "moe_capacity_tokens": "100"}, OWN + "moe_capacity_tokens"),
    ],
    "expert_backends": [
        (TINY, {OWN + "operators.permute": "plain"}, OWN + "operators.permute"),
        (
            LARGE,
            {"telechat_moe": "{operators: {default: plain}, sharding: {dispatcher: alltoallv}}"},
            OWN + "sharding.dispatcher",
        ),
    ],
    "dispatcher": [
        (LARGE, {M + "moe_token_dispatcher_type": "alltoal"}, M + "moe_token_dispatcher_type"),
        (
            LARGE,
            {M + "moe_token_dispatcher_type": "alltoall_deredundency"},
            M + "moe_token_dispatcher_type",
        ),
    ],
    "context_parallel": [
        (
            LARGE,
            {
                P + "context_parallel": "2",
                M + "use_flash_attention": "False",
                M + "use_attn_mask_compression": "False",
            },
            P + "context_parallel",
        ),
        (
            LARGE,
            {P + "context_parallel": "3", P + "use_seq_parallel": "False"},
            P + "context_parallel",
        ),
    ],
    "interleave": [
        (TINY, {M + "pp_interleave_num": "2"}, M + "pp_interleave_num"),
        (
            VPP,
            {
                "parallel.pipeline_config.pipeline_interleave": "False",
                M + "offset": "[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0]",
            },
            M + "pp_interleave_num",
        ),
    ],
    "offset": [
        (LARGE, {M + "offset": "0"}, M + "offset"),
        (LARGE, {M + "offset": "5"}, M + "offset"),
        (LARGE, {M + "offset": "[0, 1, 1, 1, 1, 1, 0]"}, M + "offset"),
        (LARGE, {M + "offset": "[0, 1, 1, 1, 1, 1, 1, 0]"}, M + "offset"),
        (
            LARGE,
            {M + "offset": "[[0, 1, 1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0]]"},
            M + "offset",
        ),
        (LARGE, {M + "offset": "[-6, 1, 1, 1, 1, 1, 6, 0]"}, M + "offset"),
        (LARGE, {M + "offset": "[0, -5, 5, 1, 1, 1, 1, 1]"}, M + "offset"),
        (TINY, {M + "offset": "1"}, M + "offset"),
        (VPP, {M + "offset": "[2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 3, 0, 0]"}, M + "offset"),
        (LARGE, {M + "num_hidden_layers": "6"}, P + "pipeline_stage"),
    ],
    "micro_batches": [
        (LARGE, {P + "micro_batch_num": "7"}, P + "micro_batch_num"),
        (TINY, {P + "micro_batch_num": "4"}, f"{P}micro_batch_num callbacks.1.micro_batch_num"),
        (
            LARGE,
            {
                "runner_config.gradient_accumulation_steps": "2",
                "callbacks.1.gradient_accumulation_steps": "2",
            },
            "runner_config.gradient_accumulation_steps",
        ),
        (LARGE, {"micro_batch_interleave_num": "2"}, "micro_batch_interleave_num"),
    ],
    "schedule": [
        (
            LARGE,
            {"parallel.pipeline_config.pipeline_scheduler": "gpipe"},
            "parallel.pipeline_config.pipeline_scheduler",
        ),
        (
            LARGE,
            {
                P + "pipeline_stage": "5",
                M + "offset": "0",
                "parallel.pipeline_config": "{pipeline_interleave: True, pipeline_scheduler: seqsmartvpp}",
            },
            "parallel.pipeline_config.pipeline_scheduler",
        ),
        (
            LARGE,
            {"parallel.pipeline_config.pipeline_scheduler": "zero_bubble_v"},
            "parallel.pipeline_config.pipeline_scheduler",
        ),
        (
            LARGE,
            {
                "parallel.pipeline_config": "{pipeline_interleave: True, pipeline_scheduler: seqvpp}",
            },
            "parallel.pipeline_config.pipeline_scheduler",
        ),
    ],
    "sequence_parts": [
        (LARGE, {P + "seq_split_num": "2"}, P + "seq_split_num"),
        (
            LARGE,
            {P + "seq_split_num": "3", M + "moe_router_load_balancing_type": "sub_seq_aux_loss"},
            P + "seq_split_num",
        ),
    ],
    "dataset_strategy": [
        (LARGE, {"parallel.full_batch": "True"}, "parallel.dataset_strategy"),
        (
            LARGE,
            {"parallel.dataset_strategy": "[[4, 1], [4, 1], [4, 1]]"},
            "parallel.dataset_strategy",
        ),
        (
            LARGE,
            {"parallel.dataset_strategy": "[[4, 1], [2, 1], [4, 1], [4, 1]]"},
            "parallel.dataset_strategy.1",
        ),
        (
            LARGE,
            {"parallel.dataset_strategy": "[[4, 1], [4, 1], [4, 1, 1], [4, 2]]"},
            "parallel.dataset_strategy.2 parallel.dataset_strategy.3",
        ),
        (LARGE, {"parallel.dataset_strategy": None}, "parallel.dataset_strategy"),
    ],
    "recompute": [
        (
            LARGE,
            {"recompute_config.recompute_slice_activation": "True"},
            "recompute_config.recompute_slice_activation",
        ),
        (LARGE, {"recompute_config.recompute": "[1, 2]"}, "recompute_config.recompute"),
        (LARGE, swap("", "[0, 45]"), "recompute_config.recompute"),
        (
            LARGE,
            {"recompute_config.recompute": "[9, 9, 9, 9, 9, 9, 9, 9]"},
            "recompute_config.recompute",
        ),
    ],
    "swapped_states": [
        (
            LARGE,
            {"optimizer.swap": "True", "context.memory_optimize_level": "O1"},
            "optimizer.swap",
        )
    ],
    "swap_off": [
        (
            LARGE,
            {"swap_config": f"{{layer_swap: [{ITEM}], op_swap: [{OPERATOR}]}}"},
            "swap_config.layer_swap swap_config.op_swap",
        ),
        (LARGE, {"swap_config.default_prefetch": "2"}, "swap_config.default_prefetch"),
        (LARGE, swap(f"layer_swap: [{ITEM}], default_prefetch: 2"), "swap_config.default_prefetch"),
        (LARGE, swap("layer_swap: []"), "swap_config.layer_swap"),
    ],
    "swapped_layers": [
        (
            LARGE,
            swap("layer_swap: [{layers: [44, 45], backward_prefetch: 1}]"),
            "swap_config.layer_swap.0.layers",
        ),
        (LARGE, swap(f"layer_swap: [{ITEM}, {ITEM}]"), "swap_config.layer_swap.1.layers"),
        (
            LARGE,
            swap(f"op_swap: [{OPERATOR.replace('True', 'False')}]"),
            "swap_config.op_swap.0.layers",
        ),
    ],
    "swap_or_recompute": [
        (LARGE, {"swap_config.swap": "True"}, "swap_config.swap"),
        (LARGE, swap(f"layer_swap: [{ITEM}]", "[2, 3]"), "swap_config.layer_swap.0.layers"),
        (
            LARGE,
            swap(f"op_swap: [{OPERATOR}]", f"{list(range(45))}"),
            "swap_config.op_swap.0.layers",
        ),
    ],
    "swapped_operators": [
        (
            LARGE,
            swap(f"op_swap: [{OPERATOR.replace('moe', 'moe(')}]"),
            "swap_config.op_swap.0.op_name",
        ),
    ],
    "loader_keys": [
        (TINY, {L + "handler": "[{type: take}]"}, L + "handler"),
        (TINY, {L + "dataset_dir": "'./x'"}, L + "dataset_dir"),
    ],
    "megatron": [
        (TINY, {L + "datasets_type": None}, L + "datasets_type"),
        (TINY, {L + "sizes": None}, L + "sizes"),
        (TINY, {L + "config": None}, L + "config"),
        (TINY, {L + "sizes": "[3, 0, 0]"}, L + "sizes"),
    ],
    "task": [
        (TINY, {"train_dataset_task": None}, "train_dataset_task"),
        (
            TINY,
            {"train_dataset_task.dataset_config": "{prefetch_size: 2}"},
            "train_dataset_task.dataset_config",
        ),
        (
            TINY,
            {"train_dataset_task": None, "train_dataset": None, M + "seq_length": "256"},
            f"train_dataset train_dataset_task {L}datasets_type {L}sizes {L}config",
        ),
    ],
    "lengths": [(TINY, {M + "seq_length": "128"}, C + "seq_length")],
    "columns": [
        (
            TINY,
            {D + "input_columns": "[input_ids, labels, position_ids, loss_mask]"},
            D + "input_columns",
        ),
        (TINY, {D + "construct_args_key": "[input_ids, labels]"}, D + "construct_args_key"),
        (TINY, {C + "create_attention_mask": "True"}, f"{D}input_columns {D}construct_args_key"),
        (
            TINY,
            {
                L + "type": "MindDataset",
                L + "sizes": None,
                L + "config": None,
                L + "datasets_type": None,
                D + "construct_args_key": "[labels]",
                M + "seq_length": "256",
            },
            D + "construct_args_key",
        ),
        (
            TINY,
            {
                L + "type": "MindDataset",
                L + "sizes": None,
                L + "config": None,
                L + "datasets_type": None,
                D + "input_columns": "[a, a]",
                D + "construct_args_key": "[a, a]",
                M + "seq_length": "256",
            },
            f"{D}input_columns {D}construct_args_key",
        ),
    ],
    "hugging_face_columns": [
        (
            LARGE,
            {
                L + "type": "HFDataLoader",
                L + "sizes": None,
                L + "config": None,
                L + "datasets_type": None,
                L + "create_attention_mask": "True",
                "parallel.full_batch": "True",
                "parallel.dataset_strategy": None,
                M + "seq_length": "4096",
            },
            D + "input_columns",
        ),
    ],
    "masks": [
        (TINY, {C + "reset_attention_mask": "True"}, C + "reset_attention_mask"),
        (TINY, {C + "reset_position_ids": "True", C + "eod": "-1"}, C + "eod"),
        (
            LARGE,
            {M + "use_eod_attn_mask_compression": "True"},
            M + "use_eod_attn_mask_compression",
        ),
        (
            LARGE,
            {
                C + "create_compressed_eod_mask": "True",
                M + "use_eod_attn_mask_compression": "False",
                D + "input_columns": None,
                D + "construct_args_key": None,
            },
            C + "create_compressed_eod_mask",
        ),
    ],
    "paths": [
        (TINY, {C + "data_path": "['1', 'a', 'b', 'c']"}, C + "data_path"),
        (TINY, {C + "data_path": "['a', '1']"}, C + "data_path"),
        (TINY, {C + "data_path": "[]"}, C + "data_path"),
        (TINY, {C + "data_path": "['0', 'a']"}, C + "data_path"),
        (TINY, {C + "train_data_path": "['a']"}, C + "train_data_path"),
        (TINY, {C + "split": None}, C + "split"),
        (TINY, {C + "split": "'0, 1, 0'"}, C + "split"),
        (TINY, {C + "split": "'all'"}, C + "split"),
        (
            TINY,
            {"telechat_moe.evaluation.data_path": "['1']"},
            "telechat_moe.evaluation.data_path",
        ),
    ],
    "mixture": [
        (TINY, {**MIXED, MIX: "[]"}, MIX),
        (TUNE, MIXED, MIX),
        (TINY, {**MIXED, C + "data_path": "['1', 'a', '1', 'b']"}, C + "data_path"),
        (
            TINY,
            {C + "data_path": "['a']", MIX: "[{from_sample: 0, weights: [1]}]"},
            C + "data_path",
        ),
        (TINY, {**MIXED, C + "data_path": "['a', 'a']"}, C + "data_path"),
        (TINY, {**MIXED, "runner_config.epochs": "2"}, "runner_config.epochs"),
        (TINY, {**MIXED, MIX: "[{from_sample: 4, weights: [1, 1]}]"}, MIX + ".0.from_sample"),
        *(
            (
                TINY,
                {**MIXED, MIX: f"[{{from_sample: 0, weights: [1, 1]}}, {item}]"},
                f"{MIX}.1.{key}",
            )
            for item, key in (
                ("{from_sample: 0, weights: [1, 2]}", "from_sample"),
                ("{from_sample: 4000, weights: [1, 2]}", "from_sample"),
                ("{from_sample: 40, weights: [1, 2, 3]}", "weights"),
                ("{from_sample: 40, weights: [0, 0]}", "weights"),
            )
        ),
    ],
    "batching": [
        (TINY, {D + "drop_remainder": "False"}, D + "drop_remainder"),
    ],
    "evaluation": [(TINY, {"do_eval": "True"}, "do_eval")],
    "one_schedule": [
        (
            TINY,
            {"grouped_lr_schedule": "{default: {type: ConstantWarmUpLR, learning_rate: 0.1}}"},
            "lr_schedule",
        ),
        (TINY, {"lr_schedule": None}, "lr_schedule"),
        (TINY, {"optimizer.learning_rate": "0.1"}, "optimizer.learning_rate"),
    ],
    "schedule_keys": [
        (TINY, {S + "type": "ConstantWarmUpLR"}, S + "lr_end"),
        (TINY, {S + "decay_start_steps": "100"}, S + "decay_start_steps"),
        (TINY, {S + "learning_rate": None, S + "lr_end": None}, S + "learning_rate"),
        (
            TINY,
            {
                "lr_schedule": None,
                "grouped_lr_schedule": "{default: {type: ConstantWarmUpLR, learning_rate: 0.1}, "
                "grouped: [{type: ConstantWarmUpLR, learning_rate: 0.1, power: 2.0, params: [a]}]}",
            },
            "grouped_lr_schedule.grouped.0.power",
        ),
    ],
    "schedule_steps": [
        (TINY, {S + "warmup_steps": "1001"}, S + "warmup_steps"),
        (TINY, {S + "total_steps": "30"}, S + "warmup_steps"),
        (TINY, {S + "total_steps": "0"}, S + "total_steps"),
        (TINY, {S + "warmup_ratio": "0.1"}, S + "warmup_ratio"),
        (TINY, {S + "decay_steps": "901"}, S + "decay_steps"),
        (TINY, {S + "type": "WarmUpStableDecayLR"}, S + "decay_start_steps"),
        (
            TINY,
            {S + "type": "WarmUpStableDecayLR", S + "decay_start_steps": "99"},
            S + "decay_start_steps",
        ),
        (
            TINY,
            {S + "type": "WarmUpStableDecayLR", S + "decay_start_steps": "1001"},
            S + "decay_start_steps",
        ),
    ],
    "schedule_rates": [
        (TINY, {S + "lr_end": "1.0"}, S + "lr_end"),
        (TINY, {S + "warmup_lr_init": "1.0"}, S + "warmup_lr_init"),
    ],
    "regular_expressions": [
        (
            TINY,
            {"telechat_moe.weight_decay_exclude": "['(']"},
            "telechat_moe.weight_decay_exclude.0",
        ),
        (
            TINY,
            {M + "param_init_std_rules": "[{target: '[', init_method_std: 0.1}]"},
            M + "param_init_std_rules.0.target",
        ),
        (
            TINY,
            {
                "lr_schedule": None,
                "grouped_lr_schedule": "{default: {type: ConstantWarmUpLR, learning_rate: 0.1}, "
                "grouped: [{type: ConstantWarmUpLR, learning_rate: 0.1, params: ['*']}]}",
            },
            "grouped_lr_schedule.grouped.0.params.0",
        ),
    ],
    "callbacks": [(TINY, {"callbacks.2": "{type: MFLossMonitor}"}, "callbacks.2.type")],
    "bias_callback": [(TINY, {"callbacks": "[{type: MFLossMonitor}]"}, "callbacks")],
    "copies": [
        (TINY, {M + "batch_size": "8"}, M + "batch_size"),
        (TINY, {D + "batch_size": "8"}, D + "batch_size"),
        (TINY, {D + "micro_batch_num": "4"}, D + "micro_batch_num"),
        (TINY, {"callbacks.1.expert_num": "16"}, "callbacks.1.expert_num"),
        (TINY, {"callbacks.1.topk_bias_update_rate": "0.1"}, "callbacks.1.topk_bias_update_rate"),
        (TINY, {"callbacks.1.balance_via_topk_bias": "False"}, "callbacks.1.balance_via_topk_bias"),
        (TINY, {"callbacks.1.micro_batch_num": "2"}, "callbacks.1.micro_batch_num"),
        (
            TINY,
            {"runner_config.gradient_accumulation_steps": "2"},
            "callbacks.1.gradient_accumulation_steps",
        ),
        (TINY, {"callbacks.0.micro_batch_num": "2"}, "callbacks.0.micro_batch_num"),
        (
            TINY,
            {"callbacks.0.micro_batch_interleave_num": "2"},
            "callbacks.0.micro_batch_interleave_num",
        ),
        (
            TINY,
            {"callbacks.0": "{type: MoEDropRateCallback, num_layers: 9, mtp_depth: 2}"},
            "callbacks.0.num_layers callbacks.0.mtp_depth",
        ),
    ],
    "spikes": [
        (
            TINY,
            {"runner_wrapper.use_skip_data_by_global_norm": "True"},
            "runner_wrapper.use_skip_data_by_global_norm",
        ),
        (
            TINY,
            {"runner_wrapper.global_norm_spike_threshold": "3.0"},
            "runner_wrapper.global_norm_spike_threshold",
        ),
        (
            TINY,
            {OWN + "loss_guard": "{window: 4, min_steps: 5}"},
            OWN + "loss_guard.min_steps",
        ),
    ],
    "profiling": [
        (TINY, {"profile": "True", "profile_start_step": "11"}, "profile_stop_step"),
        (
            TINY,
            {"callbacks.0": "{type: ProfileMonitor, start_step: 20}"},
            "callbacks.0.stop_step",
        ),
    ],
    "sections": [
        (TINY, {"moe_config": "{expert_num: 4}"}, "moe_config"),
        (TINY, {"model.arch": "{type: X}"}, "model.arch"),
        (TINY, {"runner_config.sink_size": "0"}, "runner_config.sink_size"),
        (LARGE, {"parallel.auto_pipeline": "True"}, "parallel.auto_pipeline"),
    ],
}

# right settings that look like the wrong ones above
FINE: list[tuple[str, dict[str, str | None]]] = [
    (TINY, {M + "n_group": "4", M + "topk_group": "2"}),
    (TINY, {M + "n_group": "1", M + "topk_group": "1"}),
    (TINY, {M + "n_shared_experts": "0", M + "moe_shared_expert_intermediate_size": None}),
    (TINY, {M + "n_shared_experts": "2", M + "moe_shared_expert_intermediate_size": None}),
    (TINY, {M + "moe_expert_capacity_factor": "1.5", M + "moe_token_drop_policy": "probs"}),
    (TINY, {M + "num_nextn_predict_layers": "0", M + "mtp_loss_factor": "null"}),
    (TINY, {M + "num_nextn_predict_layers": "2"}),
    (TINY, {M + "q_lora_rank": "0"}),
    (TINY, {M + "q_lora_rank": "null"}),
    (TINY, {M + "moe_layer_freq": "[0, 1, 1, 1]"}),
    (TINY, {M + "first_k_dense_replace": "4"}),
    (TINY, {M + "moe_router_enable_expert_bias": "False", "callbacks": "[]"}),
    (TINY, {M + "hidden_act": "swiglu", M + "bias_swiglu_fusion": "True"}),
    (TINY, {C + "data_path": "['0.3', 'a', '0.7', 'b']"}),
    (TINY, {C + "data_path": "['a', 'b', 'c']"}),
    (TINY, MIXED),
    (TINY, {S + "type": "WarmUpStableDecayLR", S + "decay_start_steps": "300"}),
    (TINY, {S + "total_steps": "1000", S + "decay_steps": "900"}),
    (TINY, {"load_checkpoint": "'./x'", "resume_training": "True"}),
    (LARGE, {M + "offset": "[[0, 1, 1, 1, 1, 1, 0, 0]]"}),
    (LARGE, {M + "offset": "[-5, 2, 2, 2, 2, 2, 0, 0]"}),
    (LARGE, {"recompute_config.recompute": "[5, 6, 6, 6, 6, 6, 5, 5]"}),
    (LARGE, swap(f"layer_swap: [{ITEM}]", "[1, 44]")),
    (LARGE, swap(f"op_swap: [{OPERATOR}]", "[1]")),
    (VPP, {M + "num_hidden_layers": "64", M + "offset": "0"}),
    (VPP, {M + "num_hidden_layers": "64", M + "offset": "[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]"}),
    (LARGE, {P + "expert_parallel": "32"}),
    (LARGE, {P + "expert_parallel": "16"}),
    (LARGE, {OWN + "sharding.expert_tensor_parallel": "True"}),
    (LARGE, {P + "context_parallel": "2"}),
    (LARGE, {**DROPS, OWN + "moe_capacity_tokens": "512"}),
    (VPP, {M + "qk_nope_head_dim": "64"}),
    (VPP, {M + "router_dense_type": None, M + "moe_router_dtype": "bfloat16"}),
    (LARGE, {M + "router_dense_type": "bfloat16"}),
]  # fmt: skip


def edited(name: str, edits: dict[str, str | None]) -> str:
    text = recipe_text(name)
    for path, value in edits.items():
        length = "256" if name == TINY else "4096"
        text = remove(inline(text, length), path) if value is None else put(text, path, value)
    return text


def inline(text: str, length: str) -> str:
    """Replace the alias of the sequence length, so that the section with it can be removed."""
    return text.replace("&seq_length ", "").replace("*seq_length", length)


FLAT = [(rule, *case) for rule, cases in CASES.items() for case in cases]


@pytest.mark.parametrize(
    ("rule", "name", "edits", "keys"),
    FLAT,
    ids=[f"{rule}-{'+'.join(k.rpartition('.')[2] for k in edits)}" for rule, _, edits, _ in FLAT],
)
def test_broken_rule(rule: str, name: str, edits: dict[str, str | None], keys: str) -> None:
    text = edited(name, edits)
    with pytest.raises(RecipeError) as caught:
        loads(text)
    problems = caught.value.problems
    assert sorted({p.key for p in problems}) == sorted(keys.split()), caught.value
    for problem in problems:
        assert problem.line == line_of(text, problem.key), str(problem)
        assert problem.found
        assert problem.expected


@pytest.mark.parametrize(
    ("name", "edits"), FINE, ids=["+".join(k.rpartition(".")[2] for k in e) for _, e in FINE]
)
def test_right_settings_are_not_refused(name: str, edits: dict[str, str | None]) -> None:
    assert loads(edited(name, edits))


def test_every_rule_has_a_case() -> None:
    recorded = {rule.__name__ for rule in rules.documented()}
    assert recorded - {"device_count"} == set(CASES)


def test_rules_still_run_when_other_values_are_broken() -> None:
    text = put(put(recipe_text(TINY), M + "hidden_size", "no"), M + "num_experts_per_tok", "99")
    with pytest.raises(RecipeError) as caught:
        loads(text)
    keys = {p.key for p in caught.value.problems}
    assert keys == {M + "hidden_size", M + "num_experts_per_tok"}
