"""What a Hugging Face config.json and the model section of a recipe say of one model: one table, read in both directions.

:func:`read` reads a file as transformers 4 and 5 do, :func:`differences` compares it with a recipe, :func:`hf_config`
writes one. A field is compared, fixed (one value is possible here), without effect on what weights compute, of another
family (refused where it is active), or not judged, which is said.

Source: transformers 4.57.1 and 5.24.0, DeepseekV3Config and modeling_rope_utils; DeepSeek-V3, configuration_deepseek.py.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import yaml

from telechat_moe.errors import BadInputError
from telechat_moe.narrowing import equal_values, is_list, is_object, short
from telechat_moe.reading import read_object, real_path
from telechat_moe.recipe.problems import Problem
from telechat_moe.recipe.schema import Recipe
from telechat_moe.recipe.schema.model import DEEPSEEK_V3, ModelConfig

CONFIG = "config.json"
_SHOWN = 10

FAMILY = {"deepseek_v3": "DeepseekV3ForCausalLM", "telechat3_moe": "TeleChat3MoeForCausalLM"}
"""Model types that this package trains, and their class. Absent fields have transformers' defaults in the first."""

COMPARED: dict[str, Any] = {
    **{k: v for k, v in DEEPSEEK_V3.items() if k not in ("seq_length", "num_nextn_predict_layers")},
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_interleave": True,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
"""Fields that have the recipe's key as name, and what transformers takes where they are absent."""

_NULLABLE = {"q_lora_rank", "n_shared_experts"}  # null: none

ALIASES = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}
"""Second names that transformers 5 reads."""

FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "scoring_func": (("sigmoid",), "the router's scores are sigmoids"),
    "topk_method": (("noaux_tc",), "experts are chosen by score plus bias"),
    "hidden_act": (("silu", "swish"), "the gate is SiLU"),
    "attention_bias": ((False, None), "the projections have no bias"),
    "qk_layernorm": ((True, None), "the latents are normalised"),
    "partial_rotary_factor": ((1, None), "the whole rotary part is rotated"),
}
"""Fields of which one value can be expressed; an absent field has it."""

IDLE = re.compile(
    r"architectures|model_type|auto_map|_.*|transformers_version|torch_dtype|dtype|torchscript|use_cache|use_bfloat16"
    r"|max_position_embeddings|initializer_range|attention_dropout|num_nextn_predict_layers|mtp_loss_factor"
    r"|(bos|eos|pad|sep|decoder_start|forced_bos|forced_eos)_token_id|tokenizer_class|pretraining_tp|ep_size|seq_length"
    r"|aux_loss_alpha|seq_aux|router_aux_loss_coef|output_.*|return_dict.*|is_decoder|is_encoder_decoder|add_cross_attention"
    r"|cross_attention_hidden_size|tie_encoder_decoder|chunk_size_feed_forward|pruned_heads|tf_legacy_loss"
    r"|id2label|label2id|finetuning_task|task_specific_params|problem_type|prefix|remove_invalid_values|do_sample|early_stopping"
    r"|num_beams|num_beam_groups|diversity_penalty|temperature|top_k|top_p|typical_p|repetition_penalty|length_penalty"
    r"|max_length|min_length|(encoder_)?no_repeat_ngram_size|bad_words_ids|num_return_sequences|(begin_)?suppress_tokens"
    r"|exponential_decay_length_penalty|rope_scaling|rope_parameters|quantization_config"
    r"|num_key_value_heads|head_dim|qk_head_dim|moe_layer_freq"
)
"""Fields that change nothing in what weights compute here, or that have a function of their own below."""

FOREIGN = re.compile(
    r"(m?hc_|mhc|hyper_|index_|indexer|qk_clip|clip_qkv|(use_)?sliding_|layer_types|mlp_layer_types|linear_|compress|zero_expert|ngram"
    r"|mla_|quantization|swiglu_|attention_chunk|no_rope|nope_layer|sandwich|enable_hyper|num_residual_streams|text_config"
    r"|use_qk_norm|mrope|alibi|scale_emb|scale_depth|dim_model_base|softmax_scale|attn_scale|attention_scale|query_pre_attn).*"
    r"|(?!moe_router).*(latent|softcap|_multiplier|_bias$|use_bias|sink|logit_scale|logits_scaling|output_gate).*"
)
"""Fields of other families (hyper-connections, sparse or sliding attention, latent experts ...)."""


class ModelDifference(NamedTuple):
    """What weights were made for, against what a recipe computes."""

    key: str
    """Key of the model section; empty: no key expresses it."""

    found: str
    """Both values, and where each stands."""

    expected: str
    """What to set."""


class OtherModelError(BadInputError):
    """Weights belong to a model that computes something else than the recipe's (exit code 3)."""

    def __init__(self, differences: Sequence[ModelDifference]) -> None:
        self.differences = list(differences)
        keys = [f"model.model_config.{d.key}: " if d.key else "" for d in differences]
        lines = [f"{key}{d.found}; {d.expected}" for key, d in zip(keys, differences, strict=True)]
        text = f"these are weights of another model ({len(lines)} difference(s)):"
        super().__init__("\n  ".join([text, *lines]))

    def problems(self, recipe: Recipe, key: str) -> list[Problem]:
        """Return the differences at the recipe's keys.

        Args:
            key: Key that names the weights, for what no key of the model section can say.
        """
        return [
            recipe.problem(f"model.model_config.{d.key}" if d.key else key, d.found, d.expected)
            for d in self.differences
        ]


@dataclass
class HfConfig:
    """A config.json.

    Attributes:
        values: What it says, by the recipe's key; routing without groups is 0 of 0 groups, no query latent 0.
        texts: How the file says it, by the recipe's key.
        refused: What no recipe can say, and what would be right.
        notes: What is not judged, and what acts in another way.
        block: Rows and columns of a block of FP8 weights.
        end_tokens: ``eos_token_id``.
        longest: ``max_position_embeddings``.
    """

    file: Path
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    texts: dict[str, str] = field(default_factory=dict[str, str])
    refused: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    notes: list[str] = field(default_factory=list[str])
    block: tuple[int, int] = (128, 128)
    end_tokens: tuple[int, ...] = ()
    longest: int | None = None

    def refuse(self, name: str, value: Any, expected: str) -> None:
        """Note a field that no recipe can say."""
        self.refused.append((f"{name} is {_json(value)}", expected))


def config_beside(source: Path) -> Path | None:
    """Return the config.json in a folder of weights or beside a file, also where a link to the file leads."""
    folders = [source] if source.is_dir() else [source.parent, real_path(source).parent]
    files = [folder / CONFIG for folder in folders]
    return next((file for file in files if file.is_file()), None)


def of_recipe(config: ModelConfig) -> dict[str, Any]:
    """Return what a recipe's model computes, as :attr:`HfConfig.values`."""
    values = {key: getattr(config, key) for key in COMPARED}
    width, unit = config.shared_width, config.moe_intermediate_size
    values["n_shared_experts"] = width / unit if width % unit else width // unit
    return _plain(values)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Write what computes the same in the same way."""
    if values.keys() >= {"n_group", "topk_group"}:
        groups, chosen = values["n_group"], values["topk_group"]
        if not (groups > 1 and chosen < groups):
            values |= {"n_group": 0, "topk_group": 0}
    for key in _NULLABLE & values.keys():
        values[key] = values[key] or 0
    if values.get("num_experts_per_tok") == 1:  # the weight of a single expert is its score
        values["norm_topk_prob"] = False
    return values


def best_of_group(top_k: int, groups: int, chosen: int) -> int | None:
    """Return by how many of its experts this model ranks a group; None: it has no group limit. transformers: always 2."""
    return max(1, top_k // chosen) if 0 < chosen < groups else None


def hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of transformers' DeepseekV3ForCausalLM for a model section.

    Args:
        dtype: Data type of the weights, as PyTorch names it.
    """
    values = of_recipe(config)
    return {
        "architectures": [FAMILY["deepseek_v3"]],
        "model_type": "deepseek_v3",
        **values,
        "num_key_value_heads": config.num_attention_heads,
        "num_nextn_predict_layers": config.num_nextn_predict_layers,
        "q_lora_rank": values["q_lora_rank"] or None,
        "n_group": max(1, values["n_group"]),
        "topk_group": max(1, values["topk_group"]),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
        "initializer_range": config.initializer_range,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_scaling": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "torch_dtype": dtype,
    }


def differences(hf: HfConfig, config: ModelConfig) -> list[ModelDifference]:
    """Return where a config.json and a recipe's model differ."""
    values = of_recipe(config)
    differing = [ModelDifference("", f"{hf.file}: {text}", remedy) for text, remedy in hf.refused]
    for key, value in hf.values.items():
        if values[key] != value:
            text = f"{_written(config, key)}, but {hf.file}: {hf.texts[key]}"
            differing.append(ModelDifference(key, text, f"set it to {_yaml(value)}"))
    return differing


def changed(before: ModelConfig, now: ModelConfig) -> list[ModelDifference]:
    """Return where a recipe's model computes something else than the one that a checkpoint was trained with."""
    was, after = of_recipe(before), of_recipe(now)
    for key in ("qk_layernorm", "moe_router_enable_expert_bias"):
        was[key], after[key] = getattr(before, key), getattr(now, key)
    text = "{}, but the weights were trained with {}"
    return [
        ModelDifference(key, text.format(after[key], value), f"set it to {_yaml(value)}")
        for key, value in was.items()
        if after[key] != value
    ]


def _written(config: ModelConfig, key: str) -> str:
    if key == "n_shared_experts" and config.moe_shared_expert_intermediate_size:
        return f"{config.n_shared_experts} of width {config.shared_width}"
    return str(getattr(config, key))


# ----------------------------------------------------------------------------------------- reading


def read(file: Path) -> HfConfig:
    """Read a config.json.

    Raises:
        BadInputError: It cannot be read, or is no JSON object.
    """
    fields, config = read_object(file), HfConfig(file)
    if (kind := _family(fields, config)) is None:
        return config
    for alias, name in ALIASES.items():
        if alias in fields:
            other = fields.setdefault(name, fields[alias])
            if other != fields[alias]:
                config.refused.append(_two(name, other, alias, fields[alias]))
    values = _values(fields, kind, config)
    if config.refused:
        return config
    _consistent(fields, values, config)
    if kind == "deepseek_v3":
        _as_transformers(values, config)
    config.values = _plain(values)
    config.block = _block(fields, config)
    _others(fields, config)
    return config


def _values(fields: Mapping[str, Any], kind: str, config: HfConfig) -> dict[str, Any]:
    """Return the values that are compared; refuse those of another type."""
    rope, values, absent = _rope(fields, config), dict[str, Any](), list[str]()
    for key, default in COMPARED.items():
        name, value, text = key, fields.get(key), ""
        if key == "rope_theta" and rope is not None:
            name, value = rope
        elif key not in fields and kind == "deepseek_v3":
            value, text = default, " (absent: transformers' default)"
        elif key not in fields:
            absent.append(key)
            continue
        values[key], config.texts[key] = value, f"{name} is {_json(value)}{text}"
        if not (_fits(value, default) or (value is None and key in _NULLABLE)):
            config.refuse(name, value, f"a value such as {_json(default)}")
    if absent:
        text = f"not judged, absent without a known default: {', '.join(absent)}"
        config.notes.append(f"{config.file}: {text}")
    return values


def _family(fields: Mapping[str, Any], config: HfConfig) -> str | None:
    """Return the model type, empty where the file names none; None: another one, which is refused."""
    kind, classes = fields.get("model_type"), cast("Any", fields.get("architectures") or [])
    by_class = {name: key for key, name in FAMILY.items()}
    if not is_list(classes) or not all(_is_text(name) and name in by_class for name in classes):
        config.refuse("architectures", classes, f"one of {', '.join(by_class)}")
        return None
    if kind is None and classes:
        kind = by_class[classes[0]]
    if kind is None or (_is_text(kind) and kind in FAMILY):
        return str(kind or "")
    expected = f"weights of another family cannot be read; {' or '.join(FAMILY)}"
    config.refuse("model_type", kind, expected)
    return None


def _rope(fields: Mapping[str, Any], config: HfConfig) -> tuple[str, Any] | None:
    """Return name and value of the base of the rotary frequencies, None where the file has none; refuse scaled ones.

    transformers 4 has ``rope_theta`` and ``rope_scaling``, 5 has ``rope_parameters`` and reads all three.
    """
    bases = {"rope_theta": fields["rope_theta"]} if "rope_theta" in fields else {}
    for name in ("rope_scaling", "rope_parameters"):
        section = cast("Any", fields.get(name) or {})
        if not is_object(section):
            config.refuse(name, section, "an object, or null")
            continue
        parameters = {key: value for key, value in section.items() if value is not None}
        if "rope_theta" in parameters:
            bases[f"{name}.rope_theta"] = parameters.pop("rope_theta")
        named = [key for key in ("rope_type", "type") if _is_text(parameters.get(key, ""))]
        kinds = {parameters.pop(key, "default") for key in named}
        neutral = {"factor": 1, "partial_rotary_factor": 1}
        scales = any(neutral.get(k) != v for k, v in parameters.items())
        if scales or not kinds <= {"default", "linear"}:
            expected = "cannot be expressed: this model has no scaled rotary frequencies"
            config.refuse(name, section, expected)
    places = list(bases.items())
    for name, value in places[1:]:
        if value != places[0][1]:
            config.refused.append(_two(*places[0], name, value))
    return places[-1] if places else None


def _consistent(fields: Mapping[str, Any], values: Mapping[str, Any], config: HfConfig) -> None:
    """Refuse fields that contradict others, or that this model cannot express."""
    derived: dict[str, Any] = {"moe_layer_freq": 1}
    freq, layers = fields.get("moe_layer_freq"), values.get("num_hidden_layers")
    if is_list(freq) and len(freq) == layers and "first_k_dense_replace" in values:
        first = values["first_k_dense_replace"]
        derived["moe_layer_freq"] = [int(i >= first) for i in range(len(freq))]
    if "num_attention_heads" in values:
        derived["num_key_value_heads"] = values["num_attention_heads"]
    if values.keys() >= {"qk_rope_head_dim", "qk_nope_head_dim"}:
        derived["head_dim"] = values["qk_rope_head_dim"]
        derived["qk_head_dim"] = values["qk_rope_head_dim"] + values["qk_nope_head_dim"]
    for name, right in derived.items():
        if (value := fields.get(name)) not in (right, None):
            config.refuse(name, value, f"cannot be expressed; {right} with the other fields")
    for name, (right, reason) in FIXED.items():
        if name in fields and not any(equal_values(fields[name], value) for value in right):
            text = f"cannot be expressed: {reason} ({_json(right[0])})"
            config.refuse(name, fields[name], text)


def _as_transformers(values: Mapping[str, Any], config: HfConfig) -> None:
    """Refuse what transformers computes in another way than this model and MindFormers do."""
    keys = ("num_experts_per_tok", "n_group", "topk_group")
    top_k, groups, chosen = (values[key] for key in keys)
    if values["norm_topk_prob"] and top_k == 1:
        expected = "cannot be expressed: transformers weighs a single expert with 1, this model with its score"
        config.refused.append(("norm_topk_prob is true with num_experts_per_tok 1", expected))
    if (best := best_of_group(top_k, groups, chosen)) not in (None, 2):
        expected = f"cannot be expressed: transformers ranks a group by its best 2 experts, this model by its best {best}"
        routing = f"num_experts_per_tok is {top_k}, n_group {groups}, topk_group {chosen}"
        config.refused.append((routing, expected))


def _others(fields: Mapping[str, Any], config: HfConfig) -> None:
    """Judge the fields that are not compared."""
    unknown: list[str] = []
    for name, value in fields.items():
        if name in COMPARED or name in FIXED or name in ALIASES or IDLE.fullmatch(name):
            continue
        if not FOREIGN.fullmatch(name):
            unknown += [name]
        elif _is_active(name, value, fields):
            config.refuse(name, value, "cannot be expressed: a feature of another family")
    if unknown:
        named = ", ".join(short(name) for name in sorted(unknown)[:_SHOWN])
        suffix = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        config.notes.append(f"{config.file}: not judged, unknown here: {named}{suffix}")
    if dropout := fields.get("attention_dropout"):
        text = f"attention_dropout {_json(dropout)} acts in training only; here it is the recipe's"
        config.notes.append(f"{config.file}: {text}")
    tokens = fields.get("eos_token_id")
    tokens = tokens if is_list(tokens) else [tokens]
    config.end_tokens = tuple(token for token in tokens if isinstance(token, int))
    longest = fields.get("max_position_embeddings")
    config.longest = longest if isinstance(longest, int) else None


def _block(fields: Mapping[str, Any], config: HfConfig) -> tuple[int, int]:
    """Return the block size of FP8 weights; refuse another quantisation."""
    section = cast("Any", fields.get("quantization_config") or {})
    readable = {"quant_method": "fp8", "fmt": "e4m3"}
    if not is_object(section) or any(section.get(k, v) != v for k, v in readable.items()):
        expected = "cannot be read: FP8 (e4m3) with block scales, or no quantisation"
        config.refuse("quantization_config", section, expected)
        return HfConfig.block
    block = section.get("weight_block_size", list(HfConfig.block))
    if is_list(block) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
        return block[0], block[1]
    expected = "cannot be read: rows and columns of a block, such as [128, 128]"
    config.refuse("quantization_config.weight_block_size", block, expected)
    return HfConfig.block


def _is_active(name: str, value: Any, fields: Mapping[str, Any]) -> bool:
    if name == "sliding_window" and fields.get("use_sliding_window") is False:
        return False
    if name == "layer_types" and is_list(value):
        return set(map(str, value)) > {"full_attention"} or "full_attention" not in value
    return value not in (None, False, 0, "", [], {}) and not (name == "hc_mult" and value == 1)


def _fits(value: Any, default: Any) -> bool:
    """Return whether a value is of the kind of a default; a whole number may stand for a float."""
    if isinstance(default, bool):
        return isinstance(value, bool)
    kinds = (int, float) if isinstance(default, float) else (int,)
    return isinstance(value, kinds) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _two(name: str, value: Any, other: str, second: Any) -> tuple[str, str]:
    return f"{name} is {_json(value)} and {other} {_json(second)}", "one value"


def _yaml(value: Any) -> str:
    """Return a value as a recipe writes it; YAML reads 1e-06 as text."""
    return short(yaml.safe_dump(value).splitlines()[0])


def _json(value: Any) -> str:
    return short(json.dumps(value))


# ----------------------------------------------------------------------------- a recipe that fits


def overrides(hf: HfConfig, config: ModelConfig, written: Mapping[str, Any]) -> Iterator[str]:
    """Yield the overrides ``key=value`` with which a recipe's model is that of a config.json.

    Args:
        hf: The file, which no part of is refused.
    """
    recipe_values = of_recipe(config)
    values = {key: value for key, value in hf.values.items() if value != recipe_values[key]}
    second = {
        "num_key_value_heads": "num_attention_heads",
        "qk_pos_emb_head_dim": "qk_rope_head_dim",
        "qk_head_dim": "qk_nope_head_dim",
    }
    values |= {k: values[of] for k, of in second.items() if k in written and of in values}
    if "moe_layer_freq" in written:
        values["moe_layer_freq"] = 1
    key = "moe_shared_expert_intermediate_size"
    if key in written and values.keys() & {"n_shared_experts", "moe_intermediate_size"}:
        values[key] = None
    if hf.longest is not None:
        values["max_position_embeddings"] = max(hf.longest, config.seq_length)
    for key, value in values.items():
        yield f"model.model_config.{key}={_yaml(value)}"
