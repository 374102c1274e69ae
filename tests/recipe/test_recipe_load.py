"""Loading: names, problems all at once, overrides and their origin, and back to YAML."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from yaml_edit import RECIPES, line_of, put, recipe_text, remove

from telechat_moe.errors import BadInputError
from telechat_moe.recipe import (
    ModelConfig,
    OtherModelConfig,
    Problem,
    Recipe,
    RecipeError,
    find,
    load,
    loads,
    shipped_names,
)

TINY = "telechat3_moe/pretrain_tiny.yaml"
NAMES = sorted(p.relative_to(RECIPES).as_posix() for p in RECIPES.glob("*/*.yaml"))


def problems(text: str, overrides: tuple[str, ...] = ()) -> list[Problem]:
    with pytest.raises(RecipeError) as caught:
        loads(text, overrides, name="r.yaml")
    return caught.value.problems


def test_shipped_names_are_the_files() -> None:
    assert shipped_names() == NAMES
    assert len(NAMES) >= 6


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_recipe_loads(name: str) -> None:
    recipe = load(name)
    assert isinstance(recipe.model_config, ModelConfig)
    assert recipe.train_steps > 0


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_recipe_has_a_header(name: str) -> None:
    text = recipe_text(name)
    assert text.startswith("# yaml-language-server: $schema=../schema.json\n")
    for word in ("What:", "Devices:", "Prerequisite:", "Launch:", "Expected:"):
        assert f"# {word}" in text
    config = load(name)
    if config.context.device_target == "CPU":
        assert not config.runner_config.sink_mode
        assert config.model_config.compute_dtype == "float32"


def test_values_are_the_files() -> None:
    recipe = load(TINY)
    data = yaml.safe_load(recipe_text(TINY))
    assert recipe.model_config.hidden_size == data["model"]["model_config"]["hidden_size"]
    assert recipe.optimizer.betas == data["optimizer"]["betas"]
    assert recipe.telechat_moe.corpus.paths == []
    assert recipe.lr_schedule is not None
    assert recipe.lr_schedule.warmup_steps == data["lr_schedule"]["warmup_steps"]
    assert [c.type for c in recipe.callbacks] == [c["type"] for c in data["callbacks"]]
    assert recipe.given == data
    with pytest.raises(AttributeError):
        recipe.seed = 3  # type: ignore[misc]


def test_batch_arithmetic() -> None:
    tiny = load(TINY, ["runner_config.gradient_accumulation_steps=2",
                       "callbacks.1.gradient_accumulation_steps=2"])  # fmt: skip
    assert (tiny.devices, tiny.global_batch) == (1, 8)
    sizes = tiny.train_dataset.data_loader.sizes
    assert sizes is not None
    assert tiny.train_steps == sizes[0] // 8
    large = load("telechat3_moe/pretrain_105b_a4b_4k.yaml")
    assert (large.devices, large.global_batch) == (256, 1 * 4 * 8)
    assert large.train_steps == 8000 // 32


def test_names_with_and_without_suffix_and_paths(tmp_path: Path) -> None:
    assert load("telechat3_moe/pretrain_tiny") == load(TINY)
    copy = tmp_path / "mine.yaml"
    copy.write_text(recipe_text(TINY), encoding="utf-8")
    assert load(copy).model_config == load(TINY).model_config
    assert load(copy).source == copy


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(RecipeError) as caught:
        find("telechat3_moe/pretrain_tinny")
    assert caught.value.problems[0].suggestion == TINY
    assert isinstance(caught.value, BadInputError)
    assert caught.value.exit_code == 3
    with pytest.raises(RecipeError, match="folder"):
        load(RECIPES)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    broken = tmp_path / "a.yaml"
    broken.write_bytes(b"seed: 1\nname: \xff\xfe\n")
    with pytest.raises(RecipeError) as caught:
        load(broken)
    assert caught.value.problems[0].line == 2
    broken.write_bytes(b"\xef\xbb\xbf" + recipe_text(TINY).encode())
    assert load(broken).model_config == load(TINY).model_config


def test_all_problems_at_once_in_the_order_of_the_file() -> None:
    text = recipe_text(TINY)
    text = text.replace("  hidden_size:", "  hiden_size:")
    text = text.replace("eps: 1.e-8", "eps: 1e-8")
    text = text.replace("weight_decay: 0.1", "weight_decay: -0.1")
    text = text.replace("parallel_config:\n", "parallel_config:\n  data_parallel: 2\n")
    text = text.replace("warmup_steps: 100", "warmup_steps: 100000")
    reported = problems(text)
    keys = [p.key for p in reported]
    assert keys == [
        "use_parallel",
        "optimizer.eps",
        "optimizer.weight_decay",
        "lr_schedule.warmup_steps",
        "parallel_config.data_parallel",
        "model.model_config.hidden_size",
        "model.model_config.hiden_size",
    ]
    assert [p.line for p in reported] == sorted(p.line for p in reported)
    assert all(p.file == "r.yaml" for p in reported)


def test_message_has_place_key_and_suggestion() -> None:
    text = recipe_text(TINY).replace("pipeline_stage: 1", "pipline_stage: 1")
    (problem,) = problems(text)
    line = next(i for i, s in enumerate(text.splitlines(), 1) if "pipline_stage" in s)
    assert str(problem).startswith(f"r.yaml:{line}: parallel_config.pipline_stage: ")
    assert problem.suggestion == "parallel_config.pipeline_stage"
    with pytest.raises(RecipeError, match="nothing was started"):
        loads(text)


@pytest.mark.parametrize(
    ("path", "suggestion"),
    [
        ("recompute_confg", "recompute_config"),
        ("runner_config.epoch", "runner_config.epochs"),
        ("train_dataset.data_loader.config.seq_lenght", "seq_length"),
        ("context.device_targt", "device_target"),
        ("callbacks.2.keep_checkpoint_mx", "keep_checkpoint_max"),
        ("model.model_config.n_routed_expert", "n_routed_experts"),
        ("model.model_config.num_layers", "num_hidden_layers"),
        ("model.model_config.moe_router_topk", "num_experts_per_tok"),
        ("telechat_moe.evaluation.intervall", "interval"),
        ("parallel.enable_paralel_optimizer", "enable_parallel_optimizer"),
    ],
)
def test_unknown_keys_at_any_depth(path: str, suggestion: str) -> None:
    text = put(recipe_text(TINY), path, "1")
    matching = [p for p in problems(text) if p.key == path]
    assert matching
    assert matching[0].line == line_of(text, path)
    assert matching[0].suggestion.endswith(suggestion)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("seed", "-1", ">= 0"),
        ("seed", "'1'", "integer"),
        ("seed", "1.5", "integer"),
        ("seed", "True", "integer"),
        ("output_dir", "no", "quote"),
        ("output_dir", "''", "not empty"),
        ("optimizer.eps", "1e-8", "1.0e-8"),
        ("optimizer.weight_decay", "1e-1", "0.1"),
        ("optimizer.betas", "[0.9]", "2 x"),
        ("optimizer.betas", "[0.9, 1.0]", "< 1"),
        ("optimizer.type", "AdamV", "AdamW"),
        ("runner_config.batch_size", "010", "octal"),
        ("runner_config.epochs", "1:30", "base 60"),
        ("runner_config.sink_mode", "off", "write False"),
        ("runner_config.sink_mode", "0", "True or False"),
        ("train_dataset.data_loader.sizes", "[1, 2]", "3 x"),
        ("train_dataset.input_columns", "input_ids", "list"),
        ("context.mode", "True", "one of 0, 1"),
        ("context", "3", "a section"),
        ("callbacks", "{type: MFLossMonitor}", "list"),
        ("callbacks.0.type", "MFLosMonitor", "one of"),
        ("callbacks.0", "{per_print_times: 1}", "type is one of"),
        ("model.model_config.rms_norm_eps", "0", "> 0"),
        ("model.model_config.num_hidden_layers", "0", ">= 1"),
        ("model.model_config.hidden_dropout", "1.0", "< 1"),
        ("model.model_config.scoring_func", "softmax", "sigmoid"),
        ("model.model_config.hidden_act", "gelu", "silu"),
        ("model.model_config.compute_dtype", "float31", "float32"),
        ("model.model_config.model_type", "telechat3_mo", "telechat3_moe"),
        ("model.model_config.vocab_size", "12345678901234567890123456789012345", "too long"),
        ("model.model_config.rope_theta", ".inf", "special"),
        ("model.model_config.initializer_range", "99999999999999999999999.0", None),
        ("telechat_moe.corpus.valid_fraction", "0.9", "<= 0.5"),
        ("lr_schedule.learning_rate", "None", "write null"),
        ("use_legacy", "True", "False"),
    ],
)
def test_values_of_the_wrong_kind(path: str, value: str, expected: str | None) -> None:
    text = put(recipe_text(TINY), path, value)
    if expected is None:
        assert loads(text)
        return
    matching = [p for p in problems(text) if p.key in (path, f"{path}.type", f"{path}.1")]
    assert matching, [str(p) for p in problems(text)]
    assert matching[0].line == line_of(text, path)
    assert expected in str(matching[0])


@pytest.mark.parametrize(
    "path",
    [
        "run_mode",
        "use_legacy",
        "model",
        "model.model_config.hidden_size",
        "model.model_config.n_group",
        "model.model_config.num_nextn_predict_layers",
        "model.model_config.routed_scaling_factor",
        "train_dataset.data_loader.config.seq_length",
        "lr_schedule.type",
        "lr_schedule.learning_rate",
        "train_dataset_task.type",
    ],
)
def test_keys_that_must_be_written(path: str) -> None:
    text = remove(
        recipe_text(TINY).replace("&seq_length 256", "256").replace("*seq_length", "256"), path
    )
    matching = [p for p in problems(text) if p.key == path]
    assert matching
    assert "missing" in matching[0].found or "nothing" in matching[0].found


def test_overrides_and_their_origin() -> None:
    recipe = load(TINY, ["seed=7", "optimizer.weight_decay = 0.2", "callbacks.0.per_print_times=5"])
    assert recipe.seed == 7
    assert recipe.optimizer.weight_decay == 0.2
    assert recipe.callbacks[0].per_print_times == 5  # type: ignore[union-attr]
    (wrong,) = problems(recipe_text(TINY), ("optimizer.eps=1e-8",))
    assert (wrong.file, wrong.line, wrong.key) == ("--set optimizer.eps=1e-8", 0, "optimizer.eps")
    (unknown,) = problems(recipe_text(TINY), ("optimizer.ebs=1",))
    assert unknown.file == "--set optimizer.ebs=1"
    assert unknown.suggestion == "optimizer.eps"
    (rule,) = problems(recipe_text(TINY), ("model.model_config.num_experts_per_tok=99",))
    assert rule.file == "--set model.model_config.num_experts_per_tok=99"
    (nested,) = problems(recipe_text(TINY), ("optimizer.betas=[0.9, 2.0]",))
    assert (nested.file, nested.key) == ("--set optimizer.betas=[0.9, 2.0]", "optimizer.betas.1")


def test_an_override_beats_the_file_and_the_last_override_wins() -> None:
    text = put(recipe_text(TINY), "seed", "-5")
    assert loads(text, ["seed=3", "seed=4"]).seed == 4


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("seed", "a.b=c"),
        ("=3", "a.b=c"),
        ("a..b=3", "a.b=c"),
        ("seed.x=3", "a key of a section"),
        ("callbacks.9.type=X", "no item 9"),
        ("callbacks.x=1", "no item x"),
        ("seed=[1", "not YAML"),
        ("seed=*x", "no anchor"),
        ("nowhere.deep.key=1", "unknown key"),
    ],
)
def test_overrides_that_cannot_be_applied(override: str, says: str) -> None:
    reported = problems(recipe_text(TINY), (override,))
    assert reported[0].file == f"--set {override}"
    assert says in str(reported[0])


def test_overriding_an_anchor_changes_its_aliases() -> None:
    name = "telechat3_moe/pretrain_105b_a4b_4k.yaml"
    recipe = load(name, ["parallel_config.data_parallel=8"], devices=512)
    assert recipe.parallel.dataset_strategy == [[8, 1]] * 4
    assert recipe.devices == 512
    recipe = load(name, ["train_dataset.data_loader.config.seed=9"])
    assert recipe.train_dataset_task is not None
    assert recipe.train_dataset_task.dataset_config == recipe.train_dataset


def test_overriding_an_alias_changes_that_place_only() -> None:
    name = "telechat3_moe/pretrain_105b_a4b_4k.yaml"
    with pytest.raises(RecipeError) as caught:
        load(name, ["parallel.dataset_strategy.0.0=8"])
    (problem,) = caught.value.problems
    assert problem.key == "parallel.dataset_strategy.0"
    assert "[8, 1]" in problem.found
    assert "data_parallel (4)" in problem.expected
    with pytest.raises(RecipeError) as caught:
        load(name, ["train_dataset_task.dataset_config.data_loader.config.seed=9"])
    (problem,) = caught.value.problems
    assert problem.key == "train_dataset_task.dataset_config"


def test_a_problem_in_an_aliased_section_is_reported_once() -> None:
    text = recipe_text(TINY).replace("prefetch_size: 1", "prefetch_size: 0")
    (problem,) = problems(text)
    assert problem.key == "train_dataset.prefetch_size"


@pytest.mark.parametrize("name", NAMES)
def test_the_resolved_recipe_loads_to_the_same(name: str, tmp_path: Path) -> None:
    """As YAML, and as the recipe.json of a run, whose floats have no point (1e-08)."""
    recipe = load(name)
    data = recipe.to_dict()
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(data, indent=2))
    for reloaded in (loads(yaml.safe_dump(data, sort_keys=False)), load(path)):
        for field in Recipe.__dataclass_fields__:
            if field not in ("source", "given", "tree"):
                assert getattr(reloaded, field) == getattr(recipe, field), field
        assert reloaded.to_dict() == data
    path.write_text('{"seed": 1,')
    with pytest.raises(RecipeError, match="no JSON"):
        load(path)


def test_the_resolved_recipe_keeps_everything_written() -> None:
    data = yaml.safe_load(recipe_text(TINY))
    resolved = load(TINY).to_dict()

    def inside(small: object, large: object, path: str) -> None:
        if isinstance(small, dict):
            assert isinstance(large, dict)
            for key, value in small.items():
                inside(value, large[key], f"{path}.{key}")
        elif isinstance(small, list):
            assert isinstance(large, list)
            for index, (one, other) in enumerate(zip(small, large, strict=True)):
                inside(one, other, f"{path}.{index}")
        else:
            assert small == large, path

    inside(data, resolved, "")


def test_other_names_for_the_same_key() -> None:
    text = recipe_text(TINY)
    renamed = text.replace("mtp_loss_factor:", "mtp_loss_scaling_factor:")
    assert loads(renamed).model_config.mtp_loss_factor == 0.3
    assert "mtp_loss_factor" in loads(renamed).to_dict()["model"]["model_config"]
    both = text.replace(
        "mtp_loss_factor: 0.3", "mtp_loss_factor: 0.3\n    mtp_loss_scaling_factor: 0.3"
    )
    (problem,) = problems(both)
    assert "same setting" in problem.found


def test_deepseek_v3_takes_its_published_dimensions() -> None:
    text = recipe_text(TINY).replace('"telechat3_moe"\n    arch', '"deepseek_v3"\n    arch')
    text = remove(text, "model.model_config.q_lora_rank")
    config = loads(text).model_config
    assert config.q_lora_rank == 1536
    assert config.hidden_size == 128
    assert loads(text).to_dict()["model"]["model_config"]["q_lora_rank"] == 1536


def test_a_hugging_face_folder_completes_the_model(tmp_path: Path) -> None:
    text = put(recipe_text(TINY), "pretrained_model_dir", f"'{tmp_path}'")
    for key in ("q_lora_rank", "num_experts_per_tok"):
        text = remove(text, f"model.model_config.{key}")
    partial = loads(text)
    assert isinstance(partial.model.model_config, OtherModelConfig)
    with pytest.raises(RecipeError, match="pretrained_model_dir"):
        _ = partial.model_config
    config = {"q_lora_rank": 64, "num_experts_per_tok": 2, "hidden_size": 999, "unread": 1}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    full = loads(text).model_config
    assert (full.q_lora_rank, full.num_experts_per_tok, full.hidden_size) == (64, 2, 128)
    without = remove(text, "model.model_config.rope_theta")
    for fields in (
        {"rope_theta": 5e4},
        {"rope_parameters": {"rope_theta": 5e4}},
    ):  # transformers 4, 5
        (tmp_path / "config.json").write_text(json.dumps(config | fields), encoding="utf-8")
        assert loads(without).model_config.rope_theta == 5e4
    config["num_experts_per_tok"] = 1000
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (problem,) = problems(text)
    assert problem.file == str(tmp_path / "config.json")


def test_another_model_type_is_checked_but_not_trained() -> None:
    text = recipe_text(TINY).replace('"telechat3_moe"\n    arch', '"qwen3_moe"\n    arch')
    recipe = loads(text)
    with pytest.raises(RecipeError, match="qwen3_moe"):
        _ = recipe.model_config
    reported = problems(text.replace("n_shared_experts:", "n_shared_expert:"))
    assert reported[0].suggestion.endswith("n_shared_experts")


def test_device_count_is_checked_when_known() -> None:
    name = "telechat3_moe/pretrain_105b_a4b_4k.yaml"
    with pytest.raises(RecipeError) as caught:
        load(name, devices=128)
    (problem,) = caught.value.problems
    assert problem.key == "parallel_config"
    assert "256, but 128 devices" in problem.found
    assert "data_parallel to 2" in problem.expected
    assert load(name, devices=256)
