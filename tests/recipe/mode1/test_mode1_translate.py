"""`cp --to`: there and back is the same training, and what is not the same is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from dynamic_recipe import TEXT
from yaml_edit import RECIPES

from telechat_moe.cli import main
from telechat_moe.recipe import Recipe, RecipeError, load, loads, mode1
from telechat_moe.recipe.arithmetic import flops_per_token, parameters, state_bytes
from telechat_moe.recipe.uses import Use

NAMES = sorted(p.relative_to(RECIPES).as_posix() for p in RECIPES.glob("[!s]*/*.yaml"))
LARGE, TINY = "telechat3_moe/pretrain_105b_a4b_4k.yaml", "telechat3_moe/pretrain_tiny.yaml"
RENAMED = {"model_type", "architectures", "hidden_act"}
"""Names of the same network and of the same function."""
REPEATED = {"batch_size", "input_sliced_sig", "qk_head_dim", "qk_pos_emb_head_dim"}
NEUTRAL = {"use_pad_tokens": True, "moe_z_loss_coeff": 0.0}
NAMED: dict[str, tuple[str, ...]] = {
    # an override of the shipped recipe: parts of the line that says what it means in mode 1
    "telechat_moe.loss_guard.norm_factor=3.0": ("telechat_moe.loss_guard", "a setting of this package"),
    "telechat_moe.weight_decay_exclude=['.*']": ("telechat_moe.weight_decay_exclude: ['.*']",),
    "optimizer.swap=True": ("optimizer.swap: True",),
    "model.model_config.moe_z_loss_coeff=0.01": ("moe_z_loss_coeff: 0.01", "mode 1 has no z-loss"),
    "model.model_config.moe_router_load_balancing_type=sub_seq_aux_loss": ("sub_seq_aux_loss", "whole sequences: seq_aux_loss"),
    "model.model_config={moe_token_drop_policy: probs, moe_expert_capacity_factor: 1.5}": ("moe_expert_capacity_factor: 1.5", "drops nothing"),
    "model.model_config.fp32_residual_connection=True": ("fp32_residual_connection: True", "never reads"),
    "runner_config.stop_step=3": ("runner_config.stop_step: 3",),
    "lr_schedule={type: CosineWithWarmUpLR, learning_rate: 1.e-3, warmup_steps: 9, total_steps: 500}": (
        "lr_schedule.total_steps: 500; mode 1 ends the schedule at training.steps 1000",
    ),
    "recompute_config.select_recompute=True": ("recompute_config.select_recompute", "takes memory"),
    "monitor_config.monitor_on=True": ("monitor_config.monitor_on: True", "monitor.train_state"),
}  # fmt: skip


def translated(recipe: Recipe) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the YAML of mode 1 as a reader has it, and what is said of it."""
    translation = mode1.to_mode1(recipe)
    return yaml.safe_load(yaml.safe_dump(translation.sections)), translation.notes


def translated_back(sections: dict[str, Any], devices: int) -> tuple[Recipe, tuple[str, ...]]:
    text = yaml.safe_dump(sections, sort_keys=False)
    translation = mode1.to_mode0(mode1.loads(text, path=Path("there.yaml"), devices=devices))
    return loads(yaml.safe_dump(translation.sections, sort_keys=False)), translation.notes


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back_is_the_same_training(name: str) -> None:
    first = load(name)
    sections, notes = translated(first)
    second, _ = translated_back(sections, first.devices)
    training, data = sections["training"], first.train_dataset.data_loader.config
    assert data is not None
    tokens = first.global_batch * data.seq_length * first.train_steps
    assert (
        training["global_batch_size"] * sections["model"]["seq_length"] * training["steps"]
        == tokens
    )
    for number in (
        "devices",
        "global_batch",
        "train_steps",
        "micro_batches",
        "micro_batch_samples",
        "stages",
    ):
        assert getattr(second, number) == getattr(first, number), number
    for of_model in (parameters, flops_per_token, state_bytes):
        assert of_model(second.model_config) == of_model(first.model_config)
    assert second.optimizer == first.optimizer
    assert second.runner_wrapper == first.runner_wrapper
    assert second.seed == first.seed
    assert schedule(second) == schedule(first)
    assert degrees(second) == degrees(first)
    assert second.recompute_config.recompute == first.recompute_config.recompute
    assert second.train_dataset.data_loader == first.train_dataset.data_loader
    assert second.train_dataset.input_columns == first.train_dataset.input_columns
    for field in type(first.model_config).__dataclass_fields__.values():
        before, after = (getattr(r.model_config, field.name) for r in (first, second))
        takes = field.metadata.get("takes")
        is_noted = any(f"model.model_config.{field.name}:" in note for note in notes)
        kernel = takes is not None and takes.reason
        if field.name not in RENAMED | REPEATED and not is_noted and not kernel:
            assert before == after or NEUTRAL.get(field.name) == before, field.name


def schedule(recipe: Recipe) -> list[float]:
    """Return the learning rate of each step (all shipped recipes rise and stay)."""
    s = recipe.lr_schedule
    assert s is not None
    if s.type != "ConstantWarmUpLR":
        s_fields = {name: getattr(s, name) for name in type(s).__dataclass_fields__}
        total = s.total_steps if s.total_steps not in (None, -1) else recipe.train_steps
        return [
            total,
            *(value for key, value in s_fields.items() if key not in ("total_steps", "type")),
        ]  # type: ignore[list-item]
    warm, low, high = s.warmup_steps or 0, s.warmup_lr_init or 0.0, s.learning_rate or 0.0
    return [
        low + (high - low) * step / warm if step < warm else high
        for step in range(recipe.train_steps)
    ]


def degrees(recipe: Recipe) -> dict[str, Any]:
    p, names = (
        recipe.parallel_config,
        ("data_parallel", "model_parallel", "pipeline_stage", "expert_parallel"),
    )
    numbers = {name: getattr(p, name) for name in (*names, "context_parallel", "micro_batch_num")}
    sharded = recipe.parallel.enable_parallel_optimizer and recipe.devices > 1
    return numbers | {"sharded": sharded, "sp": p.use_seq_parallel and p.model_parallel > 1}


@pytest.mark.parametrize("override", NAMED)
def test_what_mode_1_lacks_is_named(override: str) -> None:
    key, _, value = override.partition("=")
    inner = yaml.safe_load(value) if value.startswith("{moe") else None
    recipe = load(
        TINY, [f"{key}.{name}={text}" for name, text in inner.items()] if inner else [override]
    )
    _, notes = translated(recipe)
    assert any(all(part in note for part in NAMED[override]) for note in notes), notes


def test_a_growing_batch_is_named() -> None:
    recipe = load(
        TINY,
        [
            "runner_config.gradient_accumulation_steps=2",
            "callbacks.1.gradient_accumulation_steps=2",
            "telechat_moe.step_batch_size_schedule='0:4 100K:8'",
        ],
    )
    sections, notes = translated(recipe)
    assert sections["training"]["global_batch_size"] == 8
    assert any(
        note.startswith("telechat_moe.step_batch_size_schedule: 0:4 100K:8") for note in notes
    )


def test_a_schedule_of_shares_is_one_of_steps() -> None:
    decay = "lr_schedule={type: WarmUpStableDecayLR, learning_rate: 1.e-3, warmup_ratio: 0.1, decay_start_ratio: 0.8, lr_end: 0.0, total_steps: 200}"
    sections, notes = translated(load(TINY, [decay]))
    assert sections["lr_scheduler"]["warmup_steps"] == 20
    assert sections["lr_scheduler"]["decay_start_steps"] == 160
    assert any(note.startswith("lr_schedule.total_steps: 200;") for note in notes)


NUMBERS = (
    "devices",
    "global_batch",
    "train_steps",
    "parameters",
    "flops_per_token",
    "state_bytes",
)
LIKE_SHIPPED = """
position_embedding_type: yarn
rotary_scaling_factor: 40.0
params_dtype: bfloat16
compute_dtype: bfloat16
num_nextn_predict_layers: 1
mtp_loss_factor: 0.3
moe_aux_loss_coeff: 0.001
moe_router_load_balancing_type: seq_aux_loss
num_experts_per_tok: 4
n_group: 4
topk_group: 2
"""
VARIANTS = {
    "as it is": (),
    "stages": (
        "parallelism.pipeline_parallel=2",
        "parallelism.pipeline_parallel_interleave_num=2",
        "parallelism.pipeline_parallel_layers_per_stage=['0-0,3-4', '1-2,5-7']",
        "recompute={mode: full, full_recompute_layer: ['0-1', '3', '5-6']}",
    ),
    "replicas": ("parallelism.data_parallel_shard=2",),
    "context": (
        "parallelism.context_parallel=2",
        "parallelism.context_parallel_method=ulysses",
        "parallelism.data_parallel_shard=2",
        "parallelism.expert_parallel=8",
    ),
    "whole layers": (
        "recompute={mode: full, full_recompute_layer: ['0-7']}",
        "training.max_norm=0.0",
    ),
    "freed": (
        "parallelism.reshard_after_forward_policy=always",
        "parallelism.expert_parallel_use_safe_tokens=False",
    ),
    "nodes": (
        "parallelism.moe_token_dispatcher_type=alltoall_deredundancy",
        "parallelism.npu_nums_per_device=2",
        "checkpoint.load_path=./weights",
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_from_mode_1_and_back(variant: str) -> None:
    first = mode1.loads(TEXT, VARIANTS[variant], path=Path("a.yaml"), devices=16)
    zero = mode1.to_mode0(first)
    notes = zero.notes
    second_sections, _ = translated(loads(yaml.safe_dump(zero.sections, sort_keys=False)))
    second = mode1.loads(yaml.safe_dump(second_sections), path=Path("b.yaml"), devices=16)
    for section in ("checkpoint", "optimizer", "lr_scheduler", "train_dataset", "swap"):
        assert getattr(second.config, section) == getattr(first.config, section), section
    before, after = first.config.parallelism, second.config.parallelism
    for name in type(before).__dataclass_fields__:
        if (
            name == "reshard_after_forward_policy"
        ):  # the default frees parameters where there are no stages
            level = {"always": True, "never": False, "default": before.pipeline_parallel == 1}
            assert (
                level[after.reshard_after_forward_policy]
                == level[before.reshard_after_forward_policy]
            )
        elif name == "context_parallel_method":  # static graphs have one
            noted = any(note.startswith("parallelism.context_parallel_method") for note in notes)
            assert (after.context_parallel_method, noted) == ("colossal", variant == "context")
        elif (name, getattr(before, name)) != ("pipeline_parallel_schedule", "1f1b"):
            assert getattr(after, name) == getattr(before, name), name
    for name in (
        "steps",
        "local_batch_size",
        "global_batch_size",
        "max_norm",
        "seed",
        "deterministic",
    ):
        assert getattr(second.config.training, name) == getattr(first.config.training, name)
    networks = [mode1.network(r) for r in (first, second)]
    for of_model in (parameters, flops_per_token, state_bytes):
        assert of_model(networks[0]) == of_model(networks[1])  # type: ignore[arg-type]
    for name in yaml.safe_load(TEXT)["model"]:
        assert getattr(second.config.model, name) == getattr(first.config.model, name), name
    layers = [r.config.recompute.full_recompute_layer for r in (first, second)]
    assert mode1.layers_of(layers[0]) == mode1.layers_of(layers[1])


QWEN3 = (
    "model={model_type: qwen3, architectures: Qwen3ForCausalLM, vocab_size: 512, seq_length: 128, hidden_size: 64, "
    "intermediate_size: 128, num_hidden_layers: 8, num_attention_heads: 4, num_key_value_heads: 4, head_dim: 16}",
    "parallelism.expert_parallel=1",
)
NETWORKS = {
    "yarn": ("model.position_embedding_type=yarn", "model.rotary_scaling_factor=40.0"),
    "qwen3": QWEN3,
}


@pytest.mark.parametrize("variant", [*VARIANTS, *NETWORKS])
@pytest.mark.parametrize("use", ["mindformers-1.9", "mindformers-2.1"])
def test_check_takes_what_is_written(variant: str, use: Use) -> None:
    """A network that this package lacks is MindFormers' own; level3 is what our trainer lacks, as is noted."""
    changes = (VARIANTS | NETWORKS)[variant]
    keep = "parallelism.reshard_after_forward_policy=never"
    first = mode1.loads(TEXT, [*changes, keep], path=Path("a.yaml"), devices=16)
    zero = mode1.to_mode0(first)
    text = yaml.safe_dump(zero.sections, sort_keys=False)
    recipe = loads(text, use=use)
    is_theirs = recipe.trainer.type == "CausalLanguageModelingTrainer"
    assert is_theirs == (variant in NETWORKS)
    assert any("MindFormers' own is trained" in note for note in zero.notes) == (variant == "yarn")
    model = mode1.to_mode1(recipe).sections["model"]
    assert model["model_type"] == first.config.model.model_type
    for key, value in first.written["model"].items():
        assert model.get(key, value) == value, key


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            [
                "model={model_type: deepseek_v4, architectures: DeepseekV4ForCausalLM, seq_length: 128}"
            ],
            ("deepseek_v4; deepseek_v3 or qwen3",),
        ),
        (
            ["parallelism.data_parallel_shard=-1"],
            ("-1, which does not say on how many devices; --devices N",),
        ),
        (["run_mode=predict", "inference={}"], ("predict; train: only training is translated",)),
    ],
)
def test_what_mode_0_cannot_say_is_a_line(changes: list[str], parts: tuple[str, ...]) -> None:
    recipe = mode1.loads(
        TEXT, [*changes, "parallelism.sequence_parallel=True"], path=Path("r.yaml")
    )
    with pytest.raises(RecipeError) as caught:
        mode1.to_mode0(recipe)
    (problem,) = caught.value.problems
    assert all(part in str(problem) for part in parts)


def test_what_mode_0_lacks_is_named() -> None:
    changes = [
        "optimizer={type: Muon, adamw_betas: [0.9, 0.95]}",
        "lora_config={target_modules: '.*'}",
        "parallelism.enable_mc2=True",
        "training.rampup_batch_size=[4, 4, 100]",
        "train_dataset.dataloader.sizes=[900, 0, 0]",
        "model.chunk_loss_num=4",
    ]
    notes = mode1.to_mode0(mode1.loads(TEXT, changes, path=Path("r.yaml"))).notes
    for part in ("optimizer.type: Muon; mode 0 updates all weights with AdamW", "lora_config.target_modules: .*; adapters",
                 "parallelism.enable_mc2: True", "training.rampup_batch_size: [4, 4, 100]", "model.chunk_loss_num: 4",
                 "train_dataset.dataloader.sizes: [900, 0, 0]; mode 0 has no training.steps, so [1600, 0, 0]"):  # fmt: skip
        assert any(part in note for note in notes), (part, notes)


def shown(path: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return what `show` says of a recipe, one of mode 1 on eight devices."""
    capsys.readouterr()
    devices = ["--devices", "8"] if path.endswith("dynamic.yaml") else []
    assert main(["show", path, *devices, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_recipe_like_the_shipped_one_goes_there_and_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(tmp_path / name) for name in ("dynamic.yaml", "static.yaml", "again.yaml")]
    sections: dict[str, Any] = yaml.safe_load(TEXT)
    sections["parallelism"] = {"data_parallel_shard": -1}
    sections["training"] |= {"steps": 10, "global_batch_size": 8, "deterministic": True}
    sections["model"] |= yaml.safe_load(LIKE_SHIPPED)
    Path(paths[0]).write_text(yaml.safe_dump(sections, sort_keys=False), "utf-8")
    assert main(["check", paths[0], "--devices", "8"]) == 0
    assert main(["cp", *paths[:2], "--to", "mindformers-1", "--devices", "8"]) == 0
    assert main(["cp", *paths[1:], "--to", "mindformers-2"]) == 0
    assert main(["check", paths[1], "--for", "mindformers-2.1"]) == 0
    assert main(["check", paths[2], "--devices", "8"]) == 0
    dynamic, static, again = (shown(path, capsys) for path in paths)
    for key in NUMBERS:
        assert dynamic[key] == static[key] == again[key], key
    assert dynamic["train_steps"] * dynamic["global_batch"] == 80
    for name in ("optimizer", "lr_scheduler"):
        assert dynamic["recipe"][name] == again["recipe"][name]
    for key, value in sections["model"].items():
        assert again["recipe"]["model"][key] == value, key


def test_cp_writes_what_is_not_the_same_into_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    assert main(["cp", LARGE, str(first), "--to", "mindformers-2"]) == 0
    printed, text = capsys.readouterr().out.splitlines(), first.read_text("utf-8")
    assert text.splitlines()[0].endswith(
        "by `telechat-moe cp --to mindformers-2`, for 256 devices."
    )
    assert printed[0] == f"pretrain_105b_a4b_4k.yaml -> {first}"
    assert all(f"# {line}" in text for line in printed[1:])
    assert any("model.model_config.fp32_residual_connection: True" in line for line in printed)
    assert main(["check", str(first), "--devices", "256"]) == 0
    capsys.readouterr()
    assert main(["cp", str(first), str(second), "--to", "mindformers-1", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["differences"] == []
    assert main(["check", str(second)]) == 0
    numbers = [
        {key: shown(path, capsys)[key] for key in NUMBERS}
        for path in (LARGE, str(first), str(second))
    ]
    assert numbers[0] == numbers[1] == numbers[2]


def test_cp_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, dest = tmp_path / "mode1.yaml", str(tmp_path / "dest.yaml")
    path.write_text(TEXT.replace("data_parallel_shard: 4", "data_parallel_shard: -1"), "utf-8")
    assert main(["cp", str(path), dest, "--to", "mindformers-2"]) == 3
    assert "is a recipe of mode 1 already" in capsys.readouterr().err
    assert main(["cp", str(path), dest, "--to", "mindformers-1"]) == 3
    assert "does not say on how many devices" in capsys.readouterr().err
    assert main(["cp", str(path), dest, "--devices", "16"]) == 2
    assert main(["cp", str(path), dest, "--to", "mindformers-1", "--devices", "16"]) == 0
    assert load(dest).devices == 16
    path.write_text(TEXT.replace("  steps: 100", "  step: 100"), "utf-8")
    assert main(["cp", str(path), dest, "--to", "mindformers-1"]) == 3
    assert "training.step: unknown key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("steps", "epochs", "samples"), [(100, 1, 1600), (300, 3, 1600), (150, 1, 2400)]
)
def test_steps_are_passes_over_the_samples(steps: int, epochs: int, samples: int) -> None:
    first = mode1.loads(TEXT, [f"training.steps={steps}"], path=Path("a.yaml"), devices=16)
    translation = mode1.to_mode0(first)
    recipe = loads(yaml.safe_dump(translation.sections, sort_keys=False))
    assert recipe.train_steps == steps
    assert (recipe.runner_config.epochs, recipe.epoch_samples) == (epochs, samples)
    assert any("the order of samples" in note for note in translation.notes) == (samples != 1600)
    assert mode1.to_mode1(recipe).sections["training"]["steps"] == steps
