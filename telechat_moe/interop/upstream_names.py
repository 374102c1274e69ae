"""Which weight of ours is which weight of MindFormers' own TeleChat3-MoE class, and in what layout.

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

Shape = tuple[int, ...]
Arrays = dict[str, np.ndarray]
Layout = Literal["same", "rows", "rows in turn", "experts: gate, up", "experts: down"]

STATE = re.compile(r".*\.router\.(expert_load|fi_accu)|.*\.max_logits_val")
"""Counters among upstream's parameters that are no weights."""


@dataclass(frozen=True)
class Pair:
    """One parameter of upstream's class and those of ours that it holds.

    Attributes:
        upstream: Its name there.
        shape: Its shape there.
        ours: Our names.
        layout: ``same``; ``rows``: ours stacked by rows; ``rows in turn``: rows of the first and the second of
            ours alternate; ``experts: gate, up``: ours ``[E, H, F]`` side by side, experts stacked by rows;
            ``experts: down``: ours ``[E, F, H]``, experts stacked by rows.
        our_shapes: Our shapes.
        is_trained: False for the selection bias of a router.
    """

    upstream: str
    shape: Shape
    ours: tuple[str, ...]
    our_shapes: tuple[Shape, ...]
    layout: Layout = "same"
    is_trained: bool = True

    def join(self, ours: list[np.ndarray]) -> np.ndarray:
        """Return upstream's array from ours, which come in the order of ``ours``."""
        if self.layout == "same":
            return ours[0]
        if self.layout == "rows in turn":
            return np.stack(ours, axis=1).reshape(self.shape)
        axis = -1 if self.layout == "experts: gate, up" else 0
        return np.concatenate(ours, axis=axis).reshape(self.shape)

    def split(self, upstream: np.ndarray) -> list[np.ndarray]:
        """Return our arrays from upstream's; the inverse of :meth:`join`."""
        if self.layout in ("same", "experts: down"):
            return [upstream.reshape(self.our_shapes[0])]
        if self.layout == "rows in turn":
            return [upstream[0::2], upstream[1::2]]
        if self.layout == "rows":
            ends = np.cumsum([shape[0] for shape in self.our_shapes])[:-1]
            return np.split(upstream, ends, axis=0)
        E, H, _ = self.our_shapes[0]
        return np.split(upstream.reshape(E, H, -1), 2, axis=-1)


def settings(config: ModelConfig) -> dict[str, object]:
    """Return model keys that upstream's class needs, besides a recipe's own, to compute what the recipe says.

    Its TeleChat3 converter reads the two widths of a query head under Megatron's names only, and takes 128 and 64
    else. ``rotary_scaling_factor`` is 40 by default and ``mscale`` 0.707; although the recipe says ``rope``, attention
    scores are then multiplied by ``(0.1 * 0.707 * ln 40 + 1)^2 = 1.59``. A query rank of 0 would be a latent of
    no width.
    """
    found: dict[str, object] = {
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "rotary_scaling_factor": 1.0,
    }
    return found if config.q_lora_rank else {**found, "q_lora_rank": None}


def pairs(config: ModelConfig) -> list[Pair]:
    """Return all parameters of upstream's class that are weights, or the routers' biases.

    Raises:
        BadInputError: The recipe ties embedding and head, which upstream's class does not.
    """
    if config.tie_word_embeddings:
        raise BadInputError(
            "model.model_config.tie_word_embeddings: found True; MindFormers' class ignores it and has a head of its "
            "own, expected False"
        )
    return list(_Table(config).model())


def to_upstream(ours: Mapping[str, np.ndarray], config: ModelConfig) -> Arrays:
    """Return upstream's parameters from ours; arrays are copied where the layout differs.

    Raises:
        BadInputError: A weight is missing, unknown or has another shape; all of them are named.
    """
    table = pairs(config)
    known = {name: shape for p in table for name, shape in zip(p.ours, p.our_shapes, strict=True)}
    _check(ours, known, names.OUR_STATE, "ours")
    return {p.upstream: p.join([ours[name] for name in p.ours]) for p in table}


def to_ours(upstream: Mapping[str, np.ndarray], config: ModelConfig) -> Arrays:
    """Return our weights from upstream's parameters, or anything of their shapes, such as gradients.

    Raises:
        BadInputError: See :func:`to_upstream`.
    """
    table = pairs(config)
    _check(upstream, {p.upstream: p.shape for p in table}, STATE, "MindFormers'")
    return {
        name: part
        for p in table
        for name, part in zip(p.ours, p.split(upstream[p.upstream]), strict=True)
    }


def _check(
    found: Mapping[str, np.ndarray], known: Mapping[str, Shape], state: re.Pattern[str], whose: str
) -> None:
    problems = [f"{name}: missing, expected {list(known[name])}" for name in known.keys() - found]
    for name in found:
        if name not in known and not state.fullmatch(name):
            problems.append(f"{name}: unknown")
        elif name in known and found[name].shape != known[name]:
            shape = list(found[name].shape)
            problems.append(f"{name}: found shape {shape}, expected {list(known[name])}")
    if problems:
        raise BadInputError(
            f"{len(problems)} problem(s) with the weights of {whose} model:\n  "
            + "\n  ".join(sorted(problems))
        )


class _Table:
    """Makes the pairs of a model, layer by layer."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.shapes = {p.ours: p.shape for p in names.pairs(config)}
        interleaved = config.use_interleaved_weight_layout_mlp is not False
        self.mlp_layout: Layout = "rows in turn" if interleaved else "rows"
        self.concatenated = config.mla_qkv_concat is not False

    def pair(
        self, upstream: str, *ours: str, layout: Layout = "same", trained: bool = True
    ) -> Pair:
        our_shapes = tuple(self.shapes[name] for name in ours)
        shape = our_shapes[0]
        if layout in ("rows", "rows in turn"):
            shape = (sum(s[0] for s in our_shapes), shape[1])
        elif layout == "experts: gate, up":
            shape = (shape[0] * shape[1], 2 * shape[2])
        elif layout == "experts: down":
            shape = (shape[0] * shape[1], shape[2])
        return Pair(upstream, shape, ours, our_shapes, layout, trained)

    def model(self) -> Iterator[Pair]:
        yield self.pair("embedding.word_embeddings.weight", "embedding.weight")
        for i in range(self.config.num_hidden_layers):
            yield from self.block(f"decoder.layers.{i}", f"layers.{i}")
        yield self.pair("decoder.final_layernorm.weight", "norm.weight")
        for d in range(self.config.num_nextn_predict_layers):
            up, our = f"mtp.layers.{d}", f"mtp.{d}"
            yield self.pair(f"{up}.enorm.weight", f"{our}.embed_norm.weight")
            yield self.pair(f"{up}.hnorm.weight", f"{our}.hidden_norm.weight")
            yield self.pair(f"{up}.eh_proj.weight", f"{our}.proj.weight")
            yield from self.block(f"{up}.transformer_layer", f"{our}.block")
            yield self.pair(f"{up}.final_layernorm.weight", f"{our}.norm.weight")
        yield self.pair("output_layer.weight", "head.weight")

    def block(self, up: str, our: str) -> Iterator[Pair]:
        yield self.pair(f"{up}.input_layernorm.weight", f"{our}.input_norm.weight")
        yield from self.attention(f"{up}.self_attention", f"{our}.attention")
        yield self.pair(f"{up}.pre_mlp_layernorm.weight", f"{our}.ffn_norm.weight")
        if f"{our}.moe.router.weight" in self.shapes:
            yield from self.moe(f"{up}.mlp", f"{our}.moe")
        else:
            yield from self.mlp(f"{up}.mlp", f"{our}.ffn")

    def attention(self, up: str, our: str) -> Iterator[Pair]:
        def one(name: str, *parts: str, layout: Layout = "same") -> Pair:
            weights = (f"{our}.{part}.weight" for part in parts)
            return self.pair(f"{up}.{name}.weight", *weights, layout=layout)

        compressed, normed = bool(self.config.q_lora_rank), self.config.qk_layernorm
        if self.concatenated:
            first = "q_down" if compressed else "q_proj"
            yield one("linear_qkv", first, "kv_down", layout="rows")
            renamed = {"q_up": "linear_qb", "kv_norm": "k_layernorm", "kv_up": "linear_kvb"}
        else:
            yield (
                one("linear_q_down_proj", "q_down")
                if compressed
                else one("linear_q_proj", "q_proj")
            )
            yield one("linear_kv_down_proj", "kv_down")
            renamed = {"q_up": "linear_q_up_proj", "kv_norm": "kv_layernorm"}
            renamed["kv_up"] = "linear_kv_up_proj"
        if compressed:
            if normed:
                yield one("q_layernorm", "q_norm")
            yield one(renamed["q_up"], "q_up")
        if normed:
            yield one(renamed["kv_norm"], "kv_norm")
        yield one(renamed["kv_up"], "kv_up")
        yield one("linear_proj", "out")

    def mlp(self, up: str, our: str) -> Iterator[Pair]:
        gate_up = (f"{our}.gate.weight", f"{our}.up.weight")
        yield self.pair(f"{up}.linear_fc1.weight", *gate_up, layout=self.mlp_layout)
        yield self.pair(f"{up}.linear_fc2.weight", f"{our}.down.weight")

    def moe(self, up: str, our: str) -> Iterator[Pair]:
        yield self.pair(f"{up}.router.weight", f"{our}.router.weight")
        bias = "router.expert_bias"
        yield self.pair(f"{up}.{bias}", f"{our}.{bias}", trained=False)
        gate_up = (f"{our}.experts.gate", f"{our}.experts.up")
        yield self.pair(f"{up}.experts.weight1", *gate_up, layout="experts: gate, up")
        yield self.pair(f"{up}.experts.weight2", f"{our}.experts.down", layout="experts: down")
        if self.config.shared_width:
            yield from self.mlp(f"{up}.shared_experts", f"{our}.shared")
