"""Map our weights to those of MindFormers' own TeleChat3-MoE class: names and layouts.

MindFormers 1.9.0's ``TeleChat3MoeForCausalLM`` (and ``DeepseekV3ForCausalLM``: the same cells) holds gate and up
of an MLP in one matrix, rows in turn unless ``use_interleaved_weight_layout_mlp`` is False; the experts of a layer
in two matrices ``[E * H, 2 * F]`` and ``[E * F, H]``; with ``mla_qkv_concat`` the down projections in one. All else
is the same numbers under another name. Needs no MindFormers.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.interop import names
from telechat_moe.recipe import ModelConfig
from telechat_moe.recipe.weights import Shape, Weight, weights

ArraysByName = dict[str, np.ndarray]
Fusion = Literal["same", "rows", "rows in turn", "experts: gate, up", "experts: down"]

STATE = re.compile(r".*\.router\.(expert_load|fi_accu)|.*\.max_logits_val")
"""Counters among upstream's parameters that are no weights."""


@dataclass(frozen=True)
class FusedWeight:
    """One parameter of upstream's class and those of ours that it holds.

    Attributes:
        layout: ``same``; ``rows``: ours stacked by rows; ``rows in turn``: rows of the first and the second of
            ours alternate; ``experts: gate, up``: ours ``[E, H, F]`` side by side, experts stacked by rows;
            ``experts: down``: ours ``[E, F, H]``, experts stacked by rows.
        is_trained: False for the selection bias of a router.
    """

    upstream: str
    shape: Shape
    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    layout: Fusion = "same"
    is_trained: bool = True

    def join(self, arrays: list[np.ndarray]) -> np.ndarray:
        """Return upstream's array from ours, which come in the order of ``names``."""
        if self.layout == "same":
            return arrays[0]
        if self.layout == "rows in turn":
            return np.stack(arrays, axis=1).reshape(self.shape)
        axis = -1 if self.layout == "experts: gate, up" else 0
        return np.concatenate(arrays, axis=axis).reshape(self.shape)

    def split(self, upstream: np.ndarray) -> list[np.ndarray]:
        """Return our arrays from upstream's; the inverse of :meth:`join`."""
        if self.layout in ("same", "experts: down"):
            return [upstream.reshape(self.shapes[0])]
        if self.layout == "rows in turn":
            return [upstream[0::2], upstream[1::2]]
        if self.layout == "rows":
            ends = np.cumsum([shape[0] for shape in self.shapes])[:-1]
            return np.split(upstream, ends, axis=0)
        E, H, _ = self.shapes[0]
        return np.split(upstream.reshape(E, H, -1), 2, axis=-1)


def settings(config: ModelConfig) -> dict[str, object]:
    """Return model keys that upstream's class needs, besides a recipe's own, to compute what the recipe says.

    Its TeleChat3 converter reads the two widths of a query head under Megatron's names only, and takes 128 and 64
    else. ``rotary_scaling_factor`` is 40 by default and ``mscale`` 0.707; although the recipe says ``rope``, attention
    scores are then multiplied by ``(0.1 * 0.707 * ln 40 + 1)^2 = 1.59``. A query rank of 0 would be a latent of
    no width.
    """
    values: dict[str, object] = {
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "rotary_scaling_factor": 1.0,
    }
    return values if config.q_lora_rank else {**values, "q_lora_rank": None}


def pairs(config: ModelConfig) -> list[FusedWeight]:
    """Return all parameters of upstream's class that are weights, or the routers' biases.

    Raises:
        BadInputError: The recipe ties embedding and head, which upstream's class does not.
    """
    if config.tie_word_embeddings:
        raise BadInputError(
            "model.model_config.tie_word_embeddings: found True; MindFormers' class ignores it and has a head of its "
            "own, expected False"
        )
    return list(_table(config))


def to_upstream(
    arrays: Mapping[str, np.ndarray], config: ModelConfig, *, only_trained: bool = False
) -> ArraysByName:
    """Return upstream's parameters from ours; arrays are copied where the layout differs.

    Args:
        arrays: All weights, or, with ``only_trained``, all but the biases of the routers, such as an optimizer's moments.

    Raises:
        BadInputError: A weight is missing, unknown or has another shape; all of them are named.
    """
    table = [pair for pair in pairs(config) if pair.is_trained or not only_trained]
    shapes = {name: shape for p in table for name, shape in zip(p.names, p.shapes, strict=True)}
    _check(arrays, shapes, names.OUR_STATE, "ours")
    return {p.upstream: p.join([arrays[name] for name in p.names]) for p in table}


def to_ours(
    upstream: Mapping[str, np.ndarray], config: ModelConfig, *, only_trained: bool = False
) -> ArraysByName:
    """Return our weights from upstream's parameters, or anything of their shapes, such as gradients.

    Raises:
        BadInputError: See :func:`to_upstream`.
    """
    table = [pair for pair in pairs(config) if pair.is_trained or not only_trained]
    _check(upstream, {p.upstream: p.shape for p in table}, STATE, "MindFormers'")
    return {
        name: part
        for p in table
        for name, part in zip(p.names, p.split(upstream[p.upstream]), strict=True)
    }


def _check(
    arrays: Mapping[str, np.ndarray],
    shapes: Mapping[str, Shape],
    state: re.Pattern[str],
    whose: str,
) -> None:
    missing = shapes.keys() - arrays
    problems = [f"{name}: missing, expected {list(shapes[name])}" for name in missing]
    for name in arrays:
        if name not in shapes and not state.fullmatch(name):
            problems.append(f"{name}: unknown")
        elif name in shapes and arrays[name].shape != shapes[name]:
            shape = list(arrays[name].shape)
            problems.append(f"{name}: found shape {shape}, expected {list(shapes[name])}")
    if problems:
        text = f"{len(problems)} problem(s) with the weights of {whose} model:"
        raise BadInputError("\n  ".join([text, *sorted(problems)]))


_LAYER = re.compile(r"(layers|mtp)\.(\d+)\.(block\.)?(.*)")
_OUTSIDE = {
    "embedding.weight": "embedding.word_embeddings.weight",
    "norm.weight": "decoder.final_layernorm.weight",
    "head.weight": "output_layer.weight",
}
_IN_A_LAYER = {
    "embed_norm.weight": "enorm.weight",
    "hidden_norm.weight": "hnorm.weight",
    "proj.weight": "eh_proj.weight",
    "norm.weight": "final_layernorm.weight",
    "input_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "pre_mlp_layernorm.weight",
    "attention.out.weight": "self_attention.linear_proj.weight",
    "attention.q_norm.weight": "self_attention.q_layernorm.weight",
    "ffn.down.weight": "mlp.linear_fc2.weight",
    "moe.shared.down.weight": "mlp.shared_experts.linear_fc2.weight",
    "moe.router.weight": "mlp.router.weight",
    "moe.router.expert_bias": "mlp.router.expert_bias",
}
_EXPERTS: dict[str, tuple[str, Fusion]] = {
    "moe.experts.gate": ("mlp.experts.weight1", "experts: gate, up"),
    "moe.experts.up": ("mlp.experts.weight1", "experts: gate, up"),
    "moe.experts.down": ("mlp.experts.weight2", "experts: down"),
}
_CONCATENATED = {"q_up": "linear_qb", "kv_norm": "k_layernorm", "kv_up": "linear_kvb"}
_SEPARATE = {
    "q_proj": "linear_q_proj",
    "q_down": "linear_q_down_proj",
    "q_up": "linear_q_up_proj",
    "kv_down": "linear_kv_down_proj",
    "kv_norm": "kv_layernorm",
    "kv_up": "linear_kv_up_proj",
}


def _table(config: ModelConfig) -> Iterator[FusedWeight]:
    by_name: dict[str, tuple[Fusion, list[Weight]]] = {}
    # The head comes last in upstream's class, after the layers for multi-token prediction.
    for weight in sorted(weights(config), key=lambda w: w.name == "head.weight"):
        match = _LAYER.fullmatch(weight.name)
        if match is None:
            name, layout = _OUTSIDE[weight.name], "same"
        else:
            inner, layout = _in_a_layer(match[4], config)
            stack = "decoder" if match[1] == "layers" else "mtp"
            block = ".transformer_layer" if match[3] else ""
            name = f"{stack}.layers.{match[2]}{block}.{inner}"
        by_name.setdefault(name, (layout, []))[1].append(weight)
    for name, (layout, members) in by_name.items():
        shape = members[0].shape
        if layout in ("rows", "rows in turn"):
            shape = (sum(w.shape[0] for w in members), shape[1])
        elif layout != "same":
            shape = (shape[0] * shape[1], shape[2] * len(members))
        names, shapes = tuple(w.name for w in members), tuple(w.shape for w in members)
        yield FusedWeight(name, shape, names, shapes, layout, members[0].trained)


def _in_a_layer(name: str, config: ModelConfig) -> tuple[str, Fusion]:
    """Return upstream's name of a weight within its layer, and its layout."""
    if name in _EXPERTS:
        return _EXPERTS[name]
    if name in _IN_A_LAYER:
        return _IN_A_LAYER[name], "same"
    if name.startswith("attention."):
        cell = name.removeprefix("attention.").removesuffix(".weight")
        if config.mla_qkv_concat is False:
            return f"self_attention.{_SEPARATE[cell]}.weight", "same"
        if cell not in _CONCATENATED:
            return "self_attention.linear_qkv.weight", "rows"
        return f"self_attention.{_CONCATENATED[cell]}.weight", "same"
    mlp = "mlp.shared_experts" if name.startswith("moe.shared.") else "mlp"
    interleaved = config.use_interleaved_weight_layout_mlp is not False
    return f"{mlp}.linear_fc1.weight", "rows in turn" if interleaved else "rows"
