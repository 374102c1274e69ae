"""Map our tensors to those of Hugging Face's DeepseekV3ForCausalLM: names and shapes.

Ours hold the experts of a layer in one stack ``[E, inputs, outputs]``; Hugging Face has one
``[outputs, inputs]`` matrix for each expert. Everything else is the same bytes under another name.
MTP layers follow the decoder layers, as in the published DeepSeek-V3 checkpoints
(``README_WEIGHTS.md`` there), which also repeat the embedding and the head in each. MindFormers' table for TeleChat3
has the MTP layer of a model with 45 layers at 46 instead of 45; :func:`first_mtp_layer` finds its number.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from telechat_moe.recipe import ModelConfig
from telechat_moe.recipe.weights import Shape, Weight, weights

OUR_STATE = re.compile(r".*\.moe\.(router\.expert_load|dispatch\.dropped)")
"""Counters in a training checkpoint that are no weights."""

HF_STATE = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Buffers in older Hugging Face checkpoints that follow from the configuration."""

_IN_A_BLOCK = {
    "input_norm.weight": "input_layernorm.weight",
    "attention.q_down.weight": "self_attn.q_a_proj.weight",
    "attention.q_norm.weight": "self_attn.q_a_layernorm.weight",
    "attention.q_up.weight": "self_attn.q_b_proj.weight",
    "attention.q_proj.weight": "self_attn.q_proj.weight",
    "attention.kv_down.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attention.kv_up.weight": "self_attn.kv_b_proj.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn.gate.weight": "mlp.gate_proj.weight",
    "ffn.up.weight": "mlp.up_proj.weight",
    "ffn.down.weight": "mlp.down_proj.weight",
    "moe.router.weight": "mlp.gate.weight",
    "moe.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "moe.experts.gate": "mlp.experts.*.gate_proj.weight",
    "moe.experts.up": "mlp.experts.*.up_proj.weight",
    "moe.experts.down": "mlp.experts.*.down_proj.weight",
    "moe.shared.gate.weight": "mlp.shared_experts.gate_proj.weight",
    "moe.shared.up.weight": "mlp.shared_experts.up_proj.weight",
    "moe.shared.down.weight": "mlp.shared_experts.down_proj.weight",
    # Of an MTP layer, beside its block.
    "embed_norm.weight": "enorm.weight",
    "hidden_norm.weight": "hnorm.weight",
    "proj.weight": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
}
_OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_LAYER = re.compile(r"(layers|mtp)\.(\d+)\.(?:block\.)?(.*)")


@dataclass(frozen=True)
class WeightNames:
    """One tensor of ours and what it is called in a Hugging Face checkpoint.

    Attributes:
        shape: Our shape; three dimensions are a stack of experts.
        hf: Hugging Face's name, or with a stack one name for each expert.
        copies: Further tensors that Hugging Face's checkpoint holds with the same content.
            Written on the way out; on the way in they may be absent, but not different.
        spare: Names that are not written, but may occur in a checkpoint if the content is the same.
        is_bias: The selection bias of a router.
    """

    name: str
    shape: Shape
    hf: tuple[str, ...]
    copies: tuple[str, ...] = ()
    spare: tuple[str, ...] = ()
    is_bias: bool = False

    @property
    def stacked(self) -> bool:
        """Whether Hugging Face has one transposed matrix for each expert instead."""
        return len(self.shape) == 3

    @property
    def hf_shape(self) -> Shape:
        """Shape of each tensor in ``hf``, ``copies`` and ``spare``."""
        return (self.shape[2], self.shape[1]) if self.stacked else self.shape


def first_mtp_layer(names: Iterable[str], config: ModelConfig) -> int:
    """Return which layer of a Hugging Face checkpoint is the first MTP layer.

    It is the one after the decoder's last; where they are numbered one higher (TeleChat3 in MindFormers), the next.
    """
    L = config.num_hidden_layers
    numbers = _mtp_numbers(names)
    return L + 1 if numbers and numbers[0] == L + 1 else L


def mtp_layers(names: Iterable[str]) -> int:
    """Return how many MTP layers a Hugging Face checkpoint holds."""
    return len(_mtp_numbers(names))


def _mtp_numbers(names: Iterable[str]) -> list[int]:
    matches = (re.fullmatch(r"model\.layers\.(\d+)\.enorm\.weight", name) for name in names)
    return sorted(int(match[1]) for match in matches if match is not None)


def pairs(config: ModelConfig, mtp_layer: int | None = None) -> list[WeightNames]:
    """Return all tensors of a model, in the order of its layers.

    Args:
        mtp_layer: First MTP layer in Hugging Face's names; None: the one after the decoder's last.
    """
    first = config.num_hidden_layers if mtp_layer is None else mtp_layer
    return [_pair(weight, config, first) for weight in weights(config)]


def empty_shared_experts(config: ModelConfig, mtp_layer: int | None = None) -> dict[str, Shape]:
    """Return the empty tensors that transformers has where a model has no shared experts."""
    if config.shared_width or not config.num_moe_layers:
        return {}
    L, H = config.num_hidden_layers, config.hidden_size
    mtp = L if mtp_layer is None else mtp_layer
    depth = config.num_nextn_predict_layers
    layers = [*range(config.first_k_dense_replace, L), *range(mtp, mtp + depth)]
    return {
        f"model.layers.{i}.mlp.shared_experts.{part}_proj.weight": shape
        for i in layers
        for part, shape in (("gate", (0, H)), ("up", (0, H)), ("down", (H, 0)))
    }


def _pair(weight: Weight, config: ModelConfig, mtp_layer: int) -> WeightNames:
    match = _LAYER.fullmatch(weight.name)
    if match:
        layer = int(match[2]) + (mtp_layer if match[1] == "mtp" else 0)
        hf = f"model.layers.{layer}.{_IN_A_BLOCK[match[3]]}"
    else:
        hf = _OUTSIDE[weight.name]
    names = tuple(hf.replace("*", str(j)) for j in range(weight.shape[0] if weight.stacked else 1))
    copied: list[str] = []
    if weight.name == "embedding.weight":
        copied.append("embed_tokens")
    if weight.name == ("embedding.weight" if config.tie_word_embeddings else "head.weight"):
        copied.append("shared_head.head")
    mtp_layers = range(mtp_layer, mtp_layer + config.num_nextn_predict_layers)
    copies = tuple(f"model.layers.{i}.{name}.weight" for name in copied for i in mtp_layers)
    tied = config.tie_word_embeddings and weight.name == "embedding.weight"
    spare = ("lm_head.weight",) if tied else ()
    return WeightNames(weight.name, weight.shape, names, copies, spare, is_bias=not weight.trained)
