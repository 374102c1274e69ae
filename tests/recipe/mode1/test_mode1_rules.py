"""What `check` refuses in a recipe of mode 1: keys that nobody reads, settings without effect, and what devices refuse.

The 16 settings of the first test pass MindFormers 2.1.0's own schema without a word (test_mode1_mindformers.py asks it).
"""

from __future__ import annotations

import pytest
from dynamic_recipe import TEXT, problems

ACCEPTED_THERE = {
    "traning.steps=5": "traning: unknown key; a recipe has no such key; did you mean 'training'?",
    "runner_config.epochs=2": "runner_config: a section of mode 0 in a recipe of mode 1; training, or remove it",
    "optimizer.beta=[0.9, 0.95]": "optimizer.beta: unknown key",
    "model.n_routed_expert=8": "did you mean 'model.n_routed_experts'?",
    "lr_scheduler.warmup_step=3": "did you mean 'lr_scheduler.warmup_steps'?",
    "train_dataset.dataloader.sufle=True": "did you mean 'train_dataset.dataloader.shuffle'?",
    "parallelism.pipeline_parallel_schedule=zero_bubble_v": "expected one of 1f1b, interleaved_1f1b, gpipe",
    "parallelism.data_parallel_shard_strategy=zero9": "never read by MindFormers 2.1.0 in mode 1; write reshard_after",
    "parallelism.context_parallel_method=ring": "expected one of colossal, ulysses, hybrid",
    "parallelism.reshard_after_forward_policy=sometimes": "expected one of always, never, default",
    "parallelism.moe_token_dispatcher_type=alltoall_zero_redundancy": "expected one of alltoall, alltoall_deredundancy",
    "parallelism.expert_parallel=3": "parallelism.expert_parallel: 3, with model.n_routed_experts 8; a divisor of 8",
    "training.steps=-1": "training.steps: -1; expected an integer >= 1",
    "parallelism.enable_mc2=True": "enable_mc2: True, without effect: tensor_parallel is 1",
    "parallelism.enable_loss_parallel=True": "enable_loss_parallel: True, without effect: tensor_parallel is 1",
    "training.max_norm=-1": "training.max_norm: -1; expected a number >= 0",
}
NEVER_READ = {
    "parallelism.data_parallel_shard_strategy=optim_grads_params": "reshard_after_forward_policy",
    "checkpoint.load_worker_number=1": "remove it",
    "monitor.health_checkpoint.embedding_local_norm_threshold=100.0": "remove it",
    "monitor.health_checkpoint.global_norm_skip_threshold=100.0": "use_skip_step_on_nan",
    "monitor.health_checkpoint.global_norm_skip_time=10": "max_consecutive_skipped_steps",
    "context.max_device_memory=59GB": "remove it",
    "context.device_target=Ascend": "remove it",
    "lr_scheduler.total_steps=100": "training.steps replaces it",
}
ON_DEVICES = {
    "parallelism.tensor_parallel=3": "3, with model.num_attention_heads 4; a divisor of 4",
    "parallelism.sequence_parallel=False": "False, with tensor_parallel 2; True",
    "parallelism.expert_parallel=8": None,  # 4 x 1 x 2 devices share parameters
    "parallelism.data_parallel_shard=2": None,
    "parallelism.dense_fsdp_shard_size=3": "3, with data_parallel_shard x context_parallel 4; a divisor of 4",
    "parallelism.disable_gradient_division=False": "gradients would be divided again; True",
    "training.global_batch_size=18": "18, with local_batch_size x data-parallel devices 4; a multiple of 4",
    "training.rampup_batch_size=[4, 4, 100]": None,
    "training.rampup_batch_size=[4, 5, 100]": "4 in steps of 5 to global_batch_size 16",
    "training.rampup_batch_size=[4, 2, 100]": "multiples of 4",
    "training.rampup_batch_size=[20, 4, 100]": "20 in steps of 4 to global_batch_size 16",
    "training.rampup_batch_size=[4, 4]": "expected a list of 3 x an integer >= 0",
    "training.max_consecutive_skipped_steps=3": "3, without effect: use_skip_step_on_nan is False",
    "parallelism.moe_token_dispatcher_type=alltoall_deredundancy": "expert_parallel of 8 (a node) at least",
    "parallelism.npu_nums_per_device=4": "without effect: tokens take one hop",
    "parallelism.pipeline_parallel_interleave_num=2": "2, without effect: pipeline_parallel is 1",
    "parallelism.pipeline_parallel_overlap_b_f=True": "without effect: it hides the alltoall",
    "parallelism.pipeline_parallel_enable_dxdw_split=True": "pipeline_parallel_overlap_b_f is False",
    "parallelism.ulysses_degree_in_cp=2": "colossal shares no heads",
    "parallelism.context_parallel=3": "3, with model.seq_length 128; a divisor of 128",
    "model.q_lora_rank=0": "0, with tensor_parallel above 1",
    "model.moe_aux_loss_coeff=0.1": "mode 1 does not know its default, sub_seq_aux_loss",
    "model.topk_group=2": "2, with n_group 0; at most n_group",
    "model.model_type=telechat3_moe": "one of deepseek_v3, deepseek_v4, qwen3; TeleChat3-MoE is written as deepseek_v3",
    "model.rotary_scaling_factor=null": "multiplies attention scores by 1.59; 1.0 with position_embedding_type rope",
    "model.position_embedding_type=yarn": None,
    "model.seq_length=null": "128, but model.seq_length is 4096; 4096",
    "model.hidden_act=swiglu": "swiglu, which mode 1 does not have alone; fusedswiglu",
    "model.fp32_residual_connection=True": "never read by MindFormers 2.1.0 in mode 1",
    "model.use_pad_tokens=False": "write parallelism.expert_parallel_use_safe_tokens",
    "model.router_dense_type=float32": "did you mean 'model.moe_router_dtype'?",
    "model.compress_ratios=[0]": "model.compress_ratios: unknown key",
    "model.num_nextn_predict_layers=2": "2; at most 1",
    "model.enable_hc_head=True": "True, without effect: enable_hyper_connections is not True",
    "model.dsa_warmup_layerwise_backward=True": "True, without effect: attention is not dsa",
    "recompute.mode=full": "recompute.full_recompute_layer: nothing, with mode full",
    "recompute.full_recompute_layer=['0-3']": "without effect: recompute.mode is None",
    "recompute.mode='None'": None,
    "recompute.mode=None": None,
    "recompute.mode=null": "recompute.mode: nothing (null); expected one of None, full, select",
    "recompute={mode: full, full_recompute_layer: ['0-8']}": "0-8; ranges that rise, such as '0-3', up to 7",
    "recompute={mode: full, full_recompute_layer: ['3-5', 2]}": "2; ranges that rise",
    "swap={enable: True, layer_swap: [{layers: ['0-7']}]}": "0-7; ranges that rise, such as '0-3', up to 6",
    "swap.layer_swap=[{layers: ['0']}]": "without effect: swap.enable is False",
    "checkpoint.save_path=''": "empty, so that nothing is saved",
    "checkpoint.save_trainable_only=True": "checkpoint.base_load_path: empty, with save_trainable_only",
    "lr_scheduler.warmup_ratio=0.1": "10, beside warmup_ratio, which counts alone; one of them",
    "lr_scheduler.decay_steps=3": "lr_scheduler.decay_steps: unknown key",
    "train_dataset.balance_enabled=True": "True, without the ends of all documents",
    "train_dataset.dataloader.column_names=[input_ids, labels]": "but the masks give others",
    "train_dataset.dataloader.config.seq_length=64": "64, but model.seq_length is 128; 128",
    "callbacks=[{type: MFLossMonitor}]": "callbacks.0.type: the text 'MFLossMonitor'",
    "lora_config={target_modules: '('}": "lora_config.target_modules: missing ), unterminated subpattern",
    "profiler={start_step: 3, end_step: 2}": "profiler.start_step: 3, with end_step 2",
    "run_mode=predict": "inference: is missing, with run_mode predict",
    "optimizer={type: Muon, betas: [0.9, 0.95]}": "never read by MindFormers 2.1.0 in mode 1; write adamw_betas",
    "optimizer={type: Muon, swap: True}": "optimizer.swap: True; expected False",
    "optimizer={weight_decay: 0.1}": None,  # AdamW is the default
}
V4 = (
    "model={model_type: deepseek_v4, architectures: DeepseekV4ForCausalLM, seq_length: 128, num_attention_heads: 64, "
    "qk_nope_head_dim: 448, qk_rope_head_dim: 64, v_head_dim: 512, hidden_act: fusedswiglu, index_topk: 512}"
)
SECOND_NAMES = {
    # MindFormers' own conversion of the network takes or refuses these (test_mode1_mindformers.py asks it)
    "num_residual_streams=2": "2, but hc_mult, the same setting, is 4 by default; hc_mult: 2",
    "num_residual_streams=4": None,
    "hc_mult=2": None,
    "mhc_layernorm_epsilon=1.e-3": "but hc_eps, the same setting, is 1e-06 by default",
    "mhc_sinkhorn_iterations=7": "but hc_sinkhorn_iters, the same setting, is 20 by default",
    "hc_sinkhorn_iters=7": None,
    "csa_window_size=64": "but sliding_window, the same setting, is 128 by default",
    "sliding_window=64": "64, with apply_dsa_kernel_fusion, also where that is left out; 128, or",
    "sliding_window=128": None,
    "activation_func_clamp_value=5.0": "but swiglu_limit, the same setting, is 10.0 by default",
    "swiglu_limit=5.0": None,
    "dsa_indexer_topk=77": "77, but index_topk, the same setting, is 512; index_topk: 77",
    "index_topk=77": None,
    "add_qkv_bias=True": "but attention_bias, the same setting, is False by default",
    "enable_hc_head=True": None,
    "dsa_index_topk_freq=3": "3, without effect: attention is not dsa; remove it",
}
PIPELINE = ("parallelism.pipeline_parallel=2", "parallelism.pipeline_parallel_interleave_num=2")
RANGES = {
    "auto": None,
    "['0-1,4-5', '2-3,6-7']": None,
    "['0-3,4-5', '2-3,6-7']": "the layers 0 to 7 once, the first chunks of all stages first",
    "['0-1,4-5', '2-3,6']": "the layers 0 to 7 once",
    "['0-3', '4-7']": "with 2 stages of 2 chunks; auto, or 2 texts of 2 ranges each",
    "null": "None, with 2 stages of 2 chunks",
}


def test_the_recipe_has_no_problem() -> None:
    assert problems() == []
    assert problems(devices=16) == []


@pytest.mark.parametrize("change", ACCEPTED_THERE)
def test_what_the_schema_there_takes(change: str) -> None:
    alone = ["parallelism.tensor_parallel=1", "parallelism.sequence_parallel=False"]
    (problem,) = problems(*alone, change)
    assert ACCEPTED_THERE[change] in problem


@pytest.mark.parametrize("change", NEVER_READ)
def test_keys_that_nobody_reads_are_refused_with_a_remedy(change: str) -> None:
    (problem,) = problems(change)
    assert ", never read by MindFormers 2.1.0 in mode 1; " in problem
    assert NEVER_READ[change] in problem


@pytest.mark.parametrize("change", ON_DEVICES)
def test_what_fails_on_devices_or_has_no_effect(change: str) -> None:
    expected, lines = ON_DEVICES[change], problems(change)
    assert bool(lines) == bool(expected), lines
    assert not expected or any(expected in line for line in lines), lines


@pytest.mark.parametrize("change", SECOND_NAMES)
def test_a_key_with_two_names(change: str) -> None:
    expected, lines = SECOND_NAMES[change], problems(V4, f"model.{change}")
    assert len(lines) == bool(expected), lines
    assert not expected or expected in lines[0], lines


@pytest.mark.parametrize("ranges", RANGES)
def test_layers_of_stages(ranges: str) -> None:
    lines = problems(*PIPELINE, f"parallelism.pipeline_parallel_layers_per_stage={ranges}")
    assert bool(lines) == bool(RANGES[ranges]), lines
    assert all((RANGES[ranges] or "") in line for line in lines), lines


def test_degrees_against_devices() -> None:
    (problem,) = problems(devices=15)
    assert problem.endswith("tensor x context x pipeline = 2, on 15 devices; a divisor of 15")
    of_batch, of_shards = problems(devices=12)
    assert of_batch.endswith("16, with local_batch_size x data-parallel devices 6; a multiple of 6")
    assert of_shards.endswith(
        "data_parallel_shard: 4, with data-parallel devices 6; a divisor of 6"
    )
    any_devices = "parallelism.data_parallel_shard=-1"
    assert problems(any_devices) == problems(any_devices, devices=16) == []
    (problem,) = problems(any_devices, "parallelism.expert_parallel=3", "model.n_routed_experts=9")
    assert (
        "3, with global_batch_size / local_batch_size x context_parallel x tensor_paral" in problem
    )
    assert problem.endswith(
        " 32; a divisor of 32"
    )  # whatever divides the batch of 16 on 2 devices each
    (problem,) = problems(any_devices, "parallelism.expert_parallel=8", devices=4)
    assert problem.endswith(
        "8, with data_parallel_shard x context_parallel x tensor_parallel 4; a divisor of 4"
    )


def test_a_problem_names_its_line() -> None:
    text = TEXT.replace("  tensor_parallel: 2", "  tensor_paralel: 2")
    (line,) = [line for line in problems(text=text) if "unknown" in line]
    number = text.splitlines().index("  tensor_paralel: 2") + 1
    assert line == (
        f"recipe.yaml:{number}: parallelism.tensor_paralel: unknown key; the section parallelism has no such key; "
        "did you mean 'parallelism.tensor_parallel'?"
    )


def test_all_problems_at_once() -> None:
    assert (
        len(problems("training.step=3", "model.compute_dtype=fp8", "parallelism.expert_parallel=3"))
        == 3
    )
