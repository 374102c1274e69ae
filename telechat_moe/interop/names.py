"""Which tensor of ours is which tensor of Hugging Face's DeepseekV3ForCausalLM, and of what shape.

Ours hold the experts of a layer in one stack ``[E, inputs, outputs]``; Hugging Face has one
``[outputs, inputs]`` matrix for each expert. Everything else is the same bytes under another name.
MTP layers follow the decoder layers, as in the published DeepSeek-V3 checkpoints
(``README_WEIGHTS.md`` there), which also repeat the embedding and the head in each. MindFormers' table for TeleChat3
has the MTP layer of a model with 45 layers at 46 instead of 45; :func:`first_mtp_layer` tells which it is.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from telechat_moe.recipe import ModelConfig

Shape = tuple[int, ...]

OUR_STATE = re.compile(r".*\.moe\.(router\.expert_load|dispatch\.dropped)")
"""Counters in a training checkpoint that are no weights."""

HF_STATE = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Buffers in older Hugging Face checkpoints that follow from the configuration."""


@dataclass(frozen=True)
class Pair:
    """One tensor of ours and what it is called in a Hugging Face checkpoint.

    Attributes:
        ours: Our name.
        shape: Our shape; three dimensions are a stack of experts.
        hf: Hugging Face's name, or with a stack one name for each expert.
        copies: Further tensors that Hugging Face's checkpoint holds with the same content.
            Written on the way out; on the way in they may be absent, but not different.
        spare: Names that are not written, but may stand in a checkpoint if the content is the same.
        is_bias: The selection bias of a router.
    """

    ours: str
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

    The one after the decoder's last, or with the MTP layers all one higher (TeleChat3 in MindFormers), the next.
    """
    L = config.num_hidden_layers
    matches = (re.fullmatch(r"model\.layers\.(\d+)\.enorm\.weight", name) for name in names)
    found = sorted(int(match[1]) for match in matches if match is not None)
    return L + 1 if found and found[0] == L + 1 else L


def pairs(config: ModelConfig, mtp_layer: int | None = None) -> list[Pair]:
    """Return all tensors of a model, in the order of its layers.

    Args:
        config: Model section of the recipe.
        mtp_layer: First MTP layer in Hugging Face's names; None: the one after the decoder's last.
    """
    return list(_model(config, config.num_hidden_layers if mtp_layer is None else mtp_layer))


def empty_shared_experts(config: ModelConfig, mtp_layer: int | None = None) -> dict[str, Shape]:
    """Return the tensors without elements that transformers has in place of no shared experts."""
    if config.shared_width or not config.num_moe_layers:
        return {}
    L, H = config.num_hidden_layers, config.hidden_size
    mtp = L if mtp_layer is None else mtp_layer
    layers = [
        *range(config.first_k_dense_replace, L),
        *range(mtp, mtp + config.num_nextn_predict_layers),
    ]
    return {
        f"model.layers.{i}.mlp.shared_experts.{part}_proj.weight": shape
        for i in layers
        for part, shape in (("gate", (0, H)), ("up", (0, H)), ("down", (H, 0)))
    }


def _model(config: ModelConfig, mtp_layer: int) -> Iterator[Pair]:
    H, V, L = config.hidden_size, config.vocab_size, config.num_hidden_layers
    mtp = [f"model.layers.{mtp_layer + d}" for d in range(config.num_nextn_predict_layers)]
    table_copies = tuple(f"{hf}.embed_tokens.weight" for hf in mtp)
    head_copies = tuple(f"{hf}.shared_head.head.weight" for hf in mtp)
    if config.tie_word_embeddings:
        copies, spare = table_copies + head_copies, ("lm_head.weight",)
    else:
        copies, spare = table_copies, ()
    yield Pair("embedding.weight", (V, H), ("model.embed_tokens.weight",), copies, spare)
    for i in range(L):
        is_moe = i >= config.first_k_dense_replace
        yield from _block(config, f"layers.{i}", f"model.layers.{i}", is_moe)
    yield Pair("norm.weight", (H,), ("model.norm.weight",))
    if not config.tie_word_embeddings:
        yield Pair("head.weight", (V, H), ("lm_head.weight",), head_copies)
    for d, hf in enumerate(mtp):
        yield Pair(f"mtp.{d}.embed_norm.weight", (H,), (f"{hf}.enorm.weight",))
        yield Pair(f"mtp.{d}.hidden_norm.weight", (H,), (f"{hf}.hnorm.weight",))
        yield Pair(f"mtp.{d}.proj.weight", (H, 2 * H), (f"{hf}.eh_proj.weight",))
        yield from _block(config, f"mtp.{d}.block", hf, is_moe=config.num_moe_layers > 0)
        yield Pair(f"mtp.{d}.norm.weight", (H,), (f"{hf}.shared_head.norm.weight",))


def _block(config: ModelConfig, ours: str, hf: str, is_moe: bool) -> Iterator[Pair]:
    H = config.hidden_size
    yield Pair(f"{ours}.input_norm.weight", (H,), (f"{hf}.input_layernorm.weight",))
    yield from _attention(config, f"{ours}.attention", f"{hf}.self_attn")
    yield Pair(f"{ours}.ffn_norm.weight", (H,), (f"{hf}.post_attention_layernorm.weight",))
    if is_moe:
        yield from _moe(config, f"{ours}.moe", f"{hf}.mlp")
    else:
        yield from _mlp(f"{ours}.ffn", f"{hf}.mlp", H, config.intermediate_size)


def _attention(config: ModelConfig, ours: str, hf: str) -> Iterator[Pair]:
    H, N, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    nope, rope, v = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim

    def pair(name: str, shape: Shape, hf_name: str) -> Pair:
        return Pair(f"{ours}.{name}.weight", shape, (f"{hf}.{hf_name}.weight",))

    if config.q_lora_rank:
        yield pair("q_down", (config.q_lora_rank, H), "q_a_proj")
        yield pair("q_norm", (config.q_lora_rank,), "q_a_layernorm")
        yield pair("q_up", (N * (nope + rope), config.q_lora_rank), "q_b_proj")
    else:
        yield pair("q_proj", (N * (nope + rope), H), "q_proj")
    yield pair("kv_down", (rank + rope, H), "kv_a_proj_with_mqa")
    yield pair("kv_norm", (rank,), "kv_a_layernorm")
    yield pair("kv_up", (N * (nope + v), rank), "kv_b_proj")
    yield pair("out", (H, N * v), "o_proj")


def _mlp(ours: str, hf: str, hidden: int, width: int) -> Iterator[Pair]:
    yield Pair(f"{ours}.gate.weight", (width, hidden), (f"{hf}.gate_proj.weight",))
    yield Pair(f"{ours}.up.weight", (width, hidden), (f"{hf}.up_proj.weight",))
    yield Pair(f"{ours}.down.weight", (hidden, width), (f"{hf}.down_proj.weight",))


def _moe(config: ModelConfig, ours: str, hf: str) -> Iterator[Pair]:
    H, E, F = config.hidden_size, config.n_routed_experts, config.moe_intermediate_size
    yield Pair(f"{ours}.router.weight", (E, H), (f"{hf}.gate.weight",))
    bias = (f"{hf}.gate.e_score_correction_bias",)
    yield Pair(f"{ours}.router.expert_bias", (E,), bias, is_bias=True)
    for part, shape in (("gate", (E, H, F)), ("up", (E, H, F)), ("down", (E, F, H))):
        names = tuple(f"{hf}.experts.{j}.{part}_proj.weight" for j in range(E))
        yield Pair(f"{ours}.experts.{part}", shape, names)
    if config.shared_width:
        yield from _mlp(f"{ours}.shared", f"{hf}.shared_experts", H, config.shared_width)
