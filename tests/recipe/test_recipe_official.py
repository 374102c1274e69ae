"""MindFormers' own recipes, schema and converters against ours (MindFormers 1.9.0).

`test_mindformers_reads.py` holds its shipped recipes against ours.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import typing
from pathlib import Path
from typing import Any

import pytest
from yaml_edit import RECIPES

from telechat_moe.recipe import load
from telechat_moe.recipe.check import section_keys
from telechat_moe.recipe.schema import Recipe
from telechat_moe.recipe.schema.model import DEEPSEEK_V3, ModelConfig, OtherModelConfig

pytestmark = [
    pytest.mark.mindformers,
    pytest.mark.skipif(
        importlib.util.find_spec("mindformers") is None, reason="mindformers is not installed"
    ),
]


def site_packages() -> Path:
    spec = importlib.util.find_spec("mindformers")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


def test_the_complaints_are_true() -> None:
    from mindformers.core.context.build_context import _MSContextApplier
    from mindformers.core.lr.lr_schedule import ConstantWarmUpLR
    from mindformers.models.deepseek3.config_converter_deepseek_v3 import (
        DeepseekV3ConfigConverter,
    )
    from mindformers.parallel_core.transformer_config_utils import (
        DEFAULT_WHITE_KEY,
        ConfigLogHandler,
    )

    mapping = DeepseekV3ConfigConverter._get_final_mapping(ConfigLogHandler(), True)
    assert "scaling_factor" not in mapping
    assert "scaling_factor" in DEFAULT_WHITE_KEY  # so there is not even a warning
    assert "rotary_scaling_factor" in mapping
    assert _MSContextApplier().get_category("enable_graph_kernel") is None
    import inspect

    assert "lr_end" not in inspect.signature(ConstantWarmUpLR.__init__).parameters

    from mindformers.parallel_core.training_graph.transformer import multi_latent_attention
    from mindformers.parallel_core.transformer_config import MLATransformerConfig

    default = MLATransformerConfig(num_layers=1, num_attention_heads=1)
    assert default.position_embedding_type == "rope"
    scale = multi_latent_attention._yarn_get_mscale(default.rotary_scaling_factor, default.mscale)
    assert scale**2 == pytest.approx(1.59, abs=0.005)


def test_model_keys_are_read_by_mindformers() -> None:
    """Every key that we accept has an effect there, is ours, or says that it has none."""
    from mindformers.models.configuration_utils import PretrainedConfig
    from mindformers.models.deepseek3.configuration_deepseek_v3 import DeepseekV3Config
    from mindformers.models.telechat3_moe.config_converter_telechat3_moe import (
        Telechat3MoeConfigConverter,
    )
    from mindformers.models.telechat3_moe.configuration_telechat3_moe import TeleChat3MoeConfig
    from mindformers.parallel_core.transformer_config_utils import (
        DEFAULT_WHITE_KEY,
        ConfigLogHandler,
    )

    mapping = Telechat3MoeConfigConverter._get_final_mapping(ConfigLogHandler(), True)
    read = set(mapping) | set(DEFAULT_WHITE_KEY) | set(PretrainedConfig().to_dict())
    for cls in (TeleChat3MoeConfig, DeepseekV3Config):
        read |= set(cls().to_dict())
    hugging_face = {
        "torch_dtype",
        "scoring_func",
        "use_cache",
    }  # dropped by a decorator, with a notice
    ours = {"rope_interleave"}
    assert {"qk_nope_head_dim", "qk_rope_head_dim"} & set(mapping) == set()  # rule converter_names
    assert {"qk_head_dim", "qk_pos_emb_head_dim"} <= set(mapping)
    assert set(section_keys(ModelConfig).names) - read - hugging_face - ours == set()


def test_deepseek_defaults_are_mindformers() -> None:
    from mindformers.models.deepseek3.configuration_deepseek_v3 import DeepseekV3Config

    hf_config = DeepseekV3Config().to_dict()
    assert {k: hf_config[k] for k in DEEPSEEK_V3} == DEEPSEEK_V3


def test_model_defaults_are_mindformers() -> None:
    """A key that a recipe may leave out has the value here that MindFormers would take."""
    from mindformers.models.telechat3_moe.configuration_telechat3_moe import TeleChat3MoeConfig

    hf_config = TeleChat3MoeConfig().to_dict()
    transformer = TeleChat3MoeConfig().convert_to_transformer_config()
    same = {"bf16": "bfloat16", "fp32": "float32"}
    renamed = {
        "pp_interleave_num": "virtual_pipeline_model_parallel_size",
        "router_dense_type": "moe_router_dtype",
        "mtp_loss_factor": "mtp_loss_scaling_factor",
        "scoring_func": "moe_router_score_function",
    }
    # other name for the same thing, or a word that MindFormers turns into another on the way
    differ = {
        *("pp_interleave_num", "moe_token_drop_policy", "rope_interleave", "architectures"),
        "moe_shared_expert_intermediate_size",
    }
    checked = 0
    for field in dataclasses.fields(ModelConfig):
        own = field.name in ModelConfig.__annotations__
        if not own or field.metadata.get("written") or field.name in differ:
            continue
        missing = object()
        value: Any = hf_config.get(field.name, missing)
        if value is missing:
            value = getattr(transformer, renamed.get(field.name, field.name))
        ours: Any = field.default
        if field.name.endswith("dtype") or field.name == "router_dense_type":
            value = str(value).lower()
        assert same.get(value, value) == ours, field.name
        checked += 1
    assert checked > 20


SECTIONS = {
    "runner_config": "RunnerConfig",
    "parallel_config": "ParallelConfig",
    "recompute_config": "RecomputeConfig",
    "swap_config": "SwapConfig",
    "monitor_config": "MonitorConfig",
    "parallel": "MsParallelConfig",
}


@pytest.mark.parametrize("section", sorted(SECTIONS))
def test_sections_have_mindformers_keys_and_defaults(section: str) -> None:
    from mindformers.tools.register import template

    theirs = getattr(template, SECTIONS[section])
    hints = typing.get_type_hints(Recipe)
    cls = hints[section]
    if not dataclasses.is_dataclass(cls):
        cls = next(c for c in typing.get_args(cls) if dataclasses.is_dataclass(c))
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in theirs.keys():  # noqa: SIM118 - a class method, not a dict
        assert key in fields, key
        value, field = getattr(theirs, key), fields[key]
        if field.default not in (None, dataclasses.MISSING):
            ours = field.default
            allowed = {"num_classes", "strategy_ckpt_save_file"}
            assert ours == value or key in allowed, (key, ours, value)


def test_top_level_keys_are_mindformers() -> None:
    from mindformers.tools.register import template

    names = {f.name for f in dataclasses.fields(Recipe)}
    assert set(template.GeneralConfig.keys()) <= names | {"lr_scale"}
    assert set(template.CONFIG_NAME_TO_CLASS) - {"general_config"} <= names


@pytest.mark.parametrize(
    "name", sorted(p.relative_to(RECIPES).as_posix() for p in RECIPES.glob("*/*.yaml"))
)
def test_mindformers_reads_our_recipes(name: str, tmp_path: Path) -> None:
    """Its config class and converter take the file as it is, and as resolved, with our meaning."""
    import yaml
    from mindformers.models.deepseek3.configuration_deepseek_v3 import DeepseekV3Config
    from mindformers.models.telechat3_moe.configuration_telechat3_moe import TeleChat3MoeConfig
    from mindformers.tools.register import MindFormerConfig

    recipe = load(name)
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(yaml.safe_dump(recipe.to_dict()), encoding="utf-8")
    config = recipe.model_config
    cls = TeleChat3MoeConfig if config.model_type == "telechat3_moe" else DeepseekV3Config
    for path in (RECIPES / name, resolved):
        read = MindFormerConfig(str(path))
        assert read.runner_config.batch_size == recipe.runner_config.batch_size
        assert read.parallel_config.expert_parallel == recipe.parallel_config.expert_parallel
        model = cls(**read.model.model_config).convert_to_transformer_config()
        assert model.num_layers == config.num_hidden_layers
        assert model.hidden_size == config.hidden_size
        assert model.num_moe_experts == config.n_routed_experts
        assert model.moe_router_topk == config.num_experts_per_tok
        assert model.moe_ffn_hidden_size == config.moe_intermediate_size
        assert model.moe_shared_expert_intermediate_size == config.shared_width
        assert (
            model.moe_layer_freq == [0] * config.first_k_dense_replace + [1] * config.num_moe_layers
        )
        assert model.moe_router_topk_scaling_factor == config.routed_scaling_factor
        assert (model.moe_router_num_groups or 0) == config.n_group
        assert model.qk_head_dim == config.qk_nope_head_dim
        assert model.qk_pos_emb_head_dim == config.qk_rope_head_dim
        assert model.v_head_dim == config.v_head_dim
        assert model.kv_lora_rank == config.kv_lora_rank
        assert model.rotary_base == config.rope_theta
        assert str(model.compute_dtype).lower() == config.compute_dtype
        assert str(model.moe_router_dtype).lower() == config.router_dense_type
        assert model.q_lora_rank == config.q_lora_rank
        assert model.qk_layernorm is config.qk_layernorm
        assert model.layernorm_epsilon == config.rms_norm_eps
        assert model.init_method_std == config.initializer_range
        assert model.mtp_num_layers == config.num_nextn_predict_layers
        assert model.mtp_loss_scaling_factor == config.mtp_loss_factor
        assert model.moe_aux_loss_coeff == config.moe_aux_loss_coeff
        assert model.moe_router_load_balancing_type == config.moe_router_load_balancing_type


def test_other_model_keys_cover_qwen() -> None:
    from mindformers.models.configuration_utils import PretrainedConfig
    from mindformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig

    hf_config = set(Qwen3MoeConfig().to_dict()) - set(PretrainedConfig().to_dict())
    assert len(hf_config) > 20
    assert hf_config - set(section_keys(OtherModelConfig).names) == set()
