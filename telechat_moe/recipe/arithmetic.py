"""Parameters, floating-point operations and bytes of a model, from its configuration alone.

Conventions, the same everywhere in this package:

* A parameter is a trained number. The expert bias, which is set from the load and not trained, is
  not one.
* Active parameters are those that one token meets: K of E routed experts, all of the rest, the
  embedding and the head included.
* FLOPs count matrix products only, two per multiply-add. Attention is causal: a token at position
  t meets t + 1 keys, so a sequence of S tokens counts (S + 1) / 2 keys per token. The backward pass
  counts twice the forward pass; recomputation is not counted.
"""

from collections.abc import Callable
from dataclasses import dataclass

from telechat_moe.recipe.schema.model import ModelConfig

BYTES = {"float32": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Parameters of one kind of part."""

    name: str
    count: int
    """How many of these parts there are."""

    each: int
    """Parameters of one."""

    active: int
    """Parameters of one that a token meets."""

    mtp: bool = False
    """Belongs to multi-token prediction."""

    @property
    def total(self) -> int:
        """Parameters of all."""
        return self.count * self.each

    @property
    def total_active(self) -> int:
        """Active parameters of all."""
        return self.count * self.active


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """Parameters of a model, part by part."""

    parts: tuple[Part, ...]

    def _sum(self, of: Callable[[Part], int], mtp: bool) -> int:
        return sum(of(part) for part in self.parts if mtp or not part.mtp)

    @property
    def total(self) -> int:
        """All parameters, multi-token prediction included."""
        return self._sum(lambda part: part.total, True)

    @property
    def total_without_mtp(self) -> int:
        """All parameters of the model that answers."""
        return self._sum(lambda part: part.total, False)

    @property
    def active(self) -> int:
        """Active parameters in training, multi-token prediction included."""
        return self._sum(lambda part: part.total_active, True)

    @property
    def active_without_mtp(self) -> int:
        """Active parameters of the model that answers."""
        return self._sum(lambda part: part.total_active, False)


def attention_parameters(c: ModelConfig) -> int:
    """Return the parameters of one MLA layer, its latent norms included."""
    heads = c.num_attention_heads
    queries = heads * c.query_width
    norms = (c.q_lora_rank or 0) + c.kv_lora_rank if c.qk_layernorm else 0
    q = c.q_lora_rank * (c.hidden_size + queries) if c.q_lora_rank else c.hidden_size * queries
    kv_down = c.hidden_size * (c.kv_lora_rank + c.qk_rope_head_dim)
    kv_up = c.kv_lora_rank * heads * (c.qk_nope_head_dim + c.v_head_dim)
    return norms + q + kv_down + kv_up + heads * c.v_head_dim * c.hidden_size


def parameters(c: ModelConfig) -> Parameters:
    """Count the parameters of a model."""
    h, depth, moe = c.hidden_size, c.num_nextn_predict_layers, c.num_moe_layers
    dense = c.num_hidden_layers - moe
    expert, shared = 3 * h * c.moe_intermediate_size, 3 * h * c.shared_width
    chosen = c.num_experts_per_tok * expert
    experts = c.n_routed_experts * expert
    attention, router = attention_parameters(c), h * c.n_routed_experts
    feed_forward = 3 * h * c.intermediate_size
    head = 0 if c.tie_word_embeddings else c.vocab_size * h
    inside = 0 if moe else feed_forward  # an MTP block is like the last decoder layer
    extra = router + experts + shared if moe else inside
    extra_active = router + chosen + shared if moe else inside
    rest = 2 * h * h + attention + 5 * h

    def part(name: str, count: int, each: int, active: int | None = None) -> Part:
        return Part(name=name, count=count, each=each, active=each if active is None else active)

    parts = [
        part("embedding", 1, c.vocab_size * h),
        part("attention", c.num_hidden_layers, attention),
        part("dense feed-forward", dense, feed_forward),
        part("router", moe, router),
        part("routed experts", moe, experts, chosen),
        part("shared experts", moe, shared),
        part("layer norms", c.num_hidden_layers, 2 * h),
        part("final norm", 1, h),
        part("head", 1, head),
        Part(name="MTP", count=depth, each=rest + extra, active=rest + extra_active, mtp=True),
    ]
    return Parameters(parts=tuple(p for p in parts if p.total))


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
        c: The model.
        seq_length: Tokens per sequence; the recipe's if None.
        mtp: Count multi-token prediction too, as training does.
    """
    length = seq_length or c.seq_length
    depth = c.num_nextn_predict_layers if mtp else 0
    layers, h = c.num_hidden_layers + depth, c.hidden_size
    latents = (c.q_lora_rank or 0) + c.kv_lora_rank if c.qk_layernorm else 0
    attention = attention_parameters(c) - latents
    moe_layer = h * c.n_routed_experts + 3 * h * (
        c.num_experts_per_tok * c.moe_intermediate_size + c.shared_width
    )
    dense_layer = 3 * h * c.intermediate_size
    weights = (
        layers * attention
        + (c.num_hidden_layers - c.num_moe_layers) * dense_layer
        + c.num_moe_layers * moe_layer
        + depth * (2 * h * h + (moe_layer if c.num_moe_layers else dense_layer))
        + (1 + depth) * c.vocab_size * h
    )
    keys = (length + 1) / 2
    scores = 2 * layers * c.num_attention_heads * (c.query_width + c.v_head_dim) * keys
    return Flops(products=2 * weights, attention=scores)


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
        """Sum of all."""
        return self.parameters + self.gradients + self.optimizer


def state_bytes(c: ModelConfig) -> StateBytes:
    """Count the bytes of parameters, gradients and optimizer states; activations not included."""
    count, width = parameters(c).total, BYTES[c.params_dtype]
    return StateBytes(parameters=count * width, gradients=count * width, optimizer=count * 8)
