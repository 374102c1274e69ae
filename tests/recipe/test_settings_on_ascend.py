"""What every setting of this package does where our trainer trains the shipped 105B recipe on Ascend."""

import pytest

from telechat_moe.recipe import RecipeError, load

RECIPE = "telechat3_moe/pretrain_105b_a4b_4k.yaml"
OWN, DATA = "telechat_moe.", "train_dataset.data_loader.config."
MASKED = {
    DATA + "reset_attention_mask": "True",
    DATA + "reset_position_ids": "True",
    DATA + "create_attention_mask": "True",
    "train_dataset.input_columns": "null",
    "train_dataset.construct_args_key": "null",
    "parallel.dataset_strategy": "[[4, 1], [4, 1], [4, 1], [4, 1], [4, 1, 1, 1]]",
}
ONE_STAGE = {
    "parallel_config.pipeline_stage": "1",
    "parallel_config.micro_batch_num": "1",
    "parallel_config.data_parallel": "32",
    "parallel.enable_parallel_optimizer": "False",
    "parallel.parallel_optimizer_config": "null",
    "model.model_config.offset": "0",
    "runner_config.gradient_accumulation_steps": "8",
    "parallel.dataset_strategy": "[[32, 1], [32, 1], [32, 1], [32, 1]]",
    "callbacks.1.micro_batch_num": "1",
    "callbacks.1.gradient_accumulation_steps": "8",
}
MIXED = {DATA + "data_path": "[a/train, b/train]"}

ACTS: dict[str, dict[str, str]] = {
    "evaluation": {
        OWN + "evaluation": "{interval: 10, batches: 32, data_path: ['1', a/valid]}",
    },
    "sample": {OWN + "sample": "{prompts: [Once]}"},
    "conversations": {
        **MASKED,
        OWN + "corpus.tokenizer": "tokenizer.json",
        OWN + "conversations": "{message: '{role}: {content}'}",
    },
    "packing": {**MASKED, OWN + "packing": "{window: 4}"},
    "step_batch_size_schedule": {
        "parallel_config.micro_batch_num": "16",
        "callbacks.1.micro_batch_num": "16",
        OWN + "step_batch_size_schedule": "0:32 100K:64",
    },
    "lr_wsd_decay_style": {
        "lr_schedule": "{type: WarmUpStableDecayLR, learning_rate: 1.e-4, warmup_steps: 10, decay_start_ratio: 0.9}",
        OWN + "lr_wsd_decay_style": "cosine",
    },
    "ema": {OWN + "ema": "{decay: 0.999}"},
    "loss_guard": {OWN + "loss_guard": "{loss_factor: 2.0, action: rollback}"},
    "mixture": {**MIXED, OWN + "mixture": "[{from_sample: 0, weights: [3, 1]}]"},
    "balance_attention": {**MASKED, OWN + "balance_attention": "True"},
    "moe.placement": {**ONE_STAGE, OWN + "moe.placement": "{every: 50}"},
    "moe.load_interval": {OWN + "moe.load_interval": "20"},
    "max_skipped_steps": {OWN + "max_skipped_steps": "3"},
    "saving": {OWN + "saving.background": "False"},
    "resume_data": {OWN + "resume_data": "new", "resume_training": "True"},
}
REFUSED: dict[str, tuple[str, str]] = {
    "sharding.pipeline_schedule": ("zb-h1", "parallel.pipeline_config.pipeline_scheduler"),
    "sharding.overlap_exchange": ("True", "pp_1f1b_overlap"),
    "swap": ("{pool_mib: 4096}", "swap_config"),
}


@pytest.mark.parametrize("setting", ACTS)
def test_it_acts(setting: str) -> None:
    recipe = load(RECIPE, [f"{k}={v}" for k, v in ACTS[setting].items()], use="train")
    assert recipe.context.device_target == "Ascend"


@pytest.mark.parametrize("setting", REFUSED)
def test_it_is_refused_with_what_to_use_instead(setting: str) -> None:
    value, instead = REFUSED[setting]
    edits = [f"{OWN}{setting}={value}"]
    if setting == "swap":
        edits += ["swap_config.swap=True", "recompute_config.recompute=False"]
        edits += ["swap_config.layer_swap=[{layers: True, backward_prefetch: 8}]"]
    with pytest.raises(RecipeError) as caught:
        load(RECIPE, edits, use="train")
    (problem,) = caught.value.problems
    assert problem.key == OWN + setting
    assert instead in problem.expected


def test_all_are_listed() -> None:
    assert len(ACTS) + len(REFUSED) == 18
    assert len(ACTS) >= 15
