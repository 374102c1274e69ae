"""Parameters, floating-point operations and bytes of a model, from its configuration alone.

Conventions, the same everywhere in this package:

* A parameter is a trained number. The expert bias, which is set from the load and not trained, is
  not one.
* Active parameters are those that one token uses: K of E routed experts, all of the rest, the
  embedding and the head included.
* FLOPs count matrix products only, two per multiply-add. Attention is causal: a token at position
  t attends to t + 1 keys, so a sequence of S tokens counts (S + 1) / 2 keys per token. The backward pass
  counts twice the forward pass; recomputation is not counted.
"""

import math
import re
from dataclasses import dataclass

from telechat_moe.recipe.schema import Recipe
from telechat_moe.recipe.schema.model import ModelConfig
from telechat_moe.recipe.weights import Weight, weights

BYTES = {"float32": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPart:
    """Parameters of one kind of layer or module."""

    name: str
    count: int
    """How many of these layers or modules there are."""

    each: int
    """Parameters of one."""

    active: int
    """Parameters of one that a token uses."""

    mtp: bool = False
    """Belongs to multi-token prediction."""

    @property
    def total(self) -> int:
        """Parameters of all layers or modules of this kind."""
        return self.count * self.each

    @property
    def total_active(self) -> int:
        """Parameters of all of them that one token uses."""
        return self.count * self.active


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """Parameters of a model, by kind of layer or module."""

    parts: tuple[ModelPart, ...]

    def totals(self) -> dict[str, int]:
        """Return all parameters (``total``) and those that a token uses (``active``), also those without MTP."""
        without_mtp = [part for part in self.parts if not part.mtp]
        return {
            "total": sum(part.total for part in self.parts),
            "total_without_mtp": sum(part.total for part in without_mtp),
            "active": sum(part.total_active for part in self.parts),
            "active_without_mtp": sum(part.total_active for part in without_mtp),
        }

    @property
    def total(self) -> int:
        """All parameters, multi-token prediction included."""
        return self.totals()["total"]


_PARTS = (
    ("embedding", r"embedding\..*"),
    ("attention", r"layers\.\d+\.attention\..*"),
    ("dense feed-forward", r"layers\.\d+\.ffn\..*"),
    ("router", r"layers\.\d+\.moe\.router\..*"),
    ("routed experts", r"layers\.\d+\.moe\.experts\..*"),
    ("shared experts", r"layers\.\d+\.moe\.shared\..*"),
    ("layer norms", r"layers\.\d+\.\w+_norm\..*"),
    ("final norm", r"norm\..*"),
    ("head", r"head\..*"),
    ("MTP", r"mtp\..*"),
)


def _active(c: ModelConfig, weight: Weight) -> int:
    """Return the elements of a weight that a token uses."""
    if not weight.stacked:
        return math.prod(weight.shape)
    return math.prod(weight.shape[1:]) * c.num_experts_per_tok


def parameters(c: ModelConfig) -> Parameters:
    """Count the parameters of a model."""
    trained = [weight for weight in weights(c) if weight.trained]
    parts: list[ModelPart] = []
    for name, pattern in _PARTS:
        members = [weight for weight in trained if re.fullmatch(pattern, weight.name)]
        if not members:
            continue
        count = len({weight.name.split(".")[1] for weight in members})  # numbers of layers
        size = sum(math.prod(weight.shape) for weight in members) // count
        active = sum(_active(c, weight) for weight in members) // count
        parts.append(ModelPart(name=name, count=count, each=size, active=active, mtp=name == "MTP"))
    return Parameters(parts=tuple(parts))


@dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """FLOPs per token, in the convention of this module."""

    products: float
    """Forward pass: products with weights."""

    attention: float
    """Forward pass: scores and weighted values, causal."""

    @property
    def forward(self) -> float:
        """FLOPs of the forward pass per token."""
        return self.products + self.attention

    @property
    def training(self) -> float:
        """FLOPs of a training step per token: forward and backward."""
        return 3 * self.forward


def flops_per_token(c: ModelConfig, seq_length: int | None = None, *, mtp: bool = True) -> Flops:
    """Count the FLOPs per token.

    Args:
        seq_length: Tokens per sequence; the recipe's if None.
    """
    length = seq_length or c.seq_length
    depth = c.num_nextn_predict_layers if mtp else 0
    layers, tables = c.num_hidden_layers + depth, ("embedding.weight", "head.weight")
    products = (1 + depth) * c.vocab_size * c.hidden_size + sum(
        _active(c, weight)
        for weight in weights(c)
        if len(weight.shape) > 1 and weight.name not in tables
        if mtp or not weight.name.startswith("mtp.")
    )
    keys = (length + 1) / 2
    scores = 2 * layers * c.num_attention_heads * (c.query_width + c.v_head_dim) * keys
    return Flops(products=2 * products, attention=scores)


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """Bytes of everything that training keeps per parameter, over all devices together."""

    parameters: int
    """Parameters in `params_dtype`."""

    gradients: int
    """Gradients in `params_dtype`."""

    optimizer: int
    """Two moments of AdamW in float32."""

    @property
    def total(self) -> int:
        """Bytes of parameters, gradients and optimizer together."""
        return self.parameters + self.gradients + self.optimizer


def state_bytes(c: ModelConfig) -> StateBytes:
    """Count the bytes of parameters, gradients and optimizer states; activations not included."""
    count, width = parameters(c).total, BYTES[c.params_dtype]
    return StateBytes(parameters=count * width, gradients=count * width, optimizer=count * 8)


def least_bytes(r: Recipe) -> int:
    """Return what the devices of a recipe hold at least, all together: weights, and moments unless they are swapped."""
    state = state_bytes(r.model_config)
    return state.parameters + (0 if r.optimizer.swap else state.optimizer)
