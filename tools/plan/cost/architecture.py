"""What a model computes, as numbers: the left-hand side of every cost."""

from dataclasses import dataclass, replace
from typing import Literal

from telechat_moe.errors import BadInputError
from telechat_moe.recipe.schema import Recipe
from telechat_moe.recipe.schema.model import ModelConfig

LayerKind = Literal["dense", "moe"]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder-only transformer; every width is a number of elements."""

    name: str = ""
    hidden: int
    """Width of the residual stream."""
    layers: tuple[LayerKind, ...]
    """Decoder layers in order, without MTP."""
    heads: int
    kv_heads: int = 0
    """Key/value heads; 0: `heads`, as for MLA."""
    head_dim: int = 0
    """Width of a head; 0: `qk_nope + qk_rope` for MLA, else the width over the heads."""
    q_lora_rank: int = 0
    """MLA: width of the query latent; 0: queries are projected directly."""
    kv_lora_rank: int = 0
    """MLA: width of the key-value latent; 0: another kind of attention."""
    qk_nope: int = 0
    qk_rope: int = 0
    v_head_dim: int = 0
    """Width of a value head; 0: `head_dim`."""
    ffn: int = 0
    """Inner width of a dense layer's feed-forward; 0: four times the width."""
    gated: bool = True
    """Feed-forwards are SwiGLU (three matrices); False: two matrices with an activation between them."""
    experts: int = 0
    top_k: int = 0
    expert_groups: int = 1
    kept_groups: int = 1
    """Groups of experts, and of how many of them a token may choose; 1: no groups."""
    shared_experts: int = 0
    moe_ffn: int = 0
    """Inner width of one routed expert."""
    shared_ffn: int = 0
    """Inner width of all shared experts together; 0: `shared_experts * moe_ffn`."""
    mtp: int = 0
    """Multi-token prediction layers; each is like the last decoder layer, with its own head pass."""
    vocab: int
    tied: bool = False
    """The head's matrix is the embedding's."""
    seq: int
    """Tokens per sequence."""
    window: int = 0
    """How many keys back a query may look (sliding-window attention); 0: all."""
    pair_share: float = 0.0
    """Share of a sequence's `seq**2` query-key pairs within documents (`documents.pack`); 0: causal, one document."""
    positions: int = 0
    """Rows of a learned position table; 0: none (rotary or ALiBi)."""
    biases: bool = False
    """Linear layers have biases and norms have shifts (GPT-2/3)."""

    def __post_init__(self) -> None:
        usual = {
            "kv_heads": self.heads,
            "head_dim": self.qk_nope + self.qk_rope or self.hidden // self.heads,
            "ffn": 4 * self.hidden,
        }
        for name, value in usual.items():
            object.__setattr__(self, name, getattr(self, name) or value)
        if not self.layers:
            raise BadInputError(f"model {self.name or '?'}: no layers")
        if "moe" in self.layers and not (self.experts and self.top_k and self.moe_ffn):
            raise BadInputError(
                f"model {self.name or '?'}: MoE layers need experts, top_k and moe_ffn, found "
                f"{self.experts}, {self.top_k}, {self.moe_ffn}"
            )

    @property
    def mla(self) -> bool:
        """Whether attention is MLA."""
        return self.kv_lora_rank > 0

    @property
    def dense_layers(self) -> int:
        """Decoder layers with a dense feed-forward."""
        return sum(kind == "dense" for kind in self.layers)

    @property
    def moe_layers(self) -> int:
        """Decoder layers with experts."""
        return len(self.layers) - self.dense_layers

    @property
    def value_dim(self) -> int:
        """Width of a value head."""
        return self.v_head_dim or self.head_dim

    @property
    def shared_width(self) -> int:
        """Inner width of all shared experts together."""
        return self.shared_ffn or self.shared_experts * self.moe_ffn

    @property
    def attention_weights(self) -> int:
        """Elements of one attention layer's matrices."""
        h, width = self.hidden, self.heads * self.head_dim
        out = self.heads * self.value_dim * h
        if not self.mla:
            return h * width + 2 * h * self.kv_heads * self.head_dim + out
        q = self.q_lora_rank * (h + width) if self.q_lora_rank else h * width
        down = h * (self.kv_lora_rank + self.qk_rope)
        up = self.kv_lora_rank * self.heads * (self.qk_nope + self.value_dim)
        return q + down + up + out

    @property
    def matrices(self) -> int:
        """Matrices of one feed-forward: 3 with a gate, 2 without."""
        return 3 if self.gated else 2

    @property
    def dense_weights(self) -> int:
        """Elements of one dense feed-forward's matrices."""
        return self.matrices * self.hidden * self.ffn

    @property
    def expert_weights(self) -> int:
        """Elements of one routed expert's matrices."""
        return self.matrices * self.hidden * self.moe_ffn

    @property
    def shared_weights(self) -> int:
        """Elements of all shared experts of a layer, and the router's."""
        return self.matrices * self.hidden * self.shared_width + self.hidden * self.experts

    @property
    def small_weights(self) -> int:
        """Elements of one layer's norms and, with `biases`, of a dense layer's biases; experts have none."""
        if not self.biases:
            return 2 * self.hidden + self.q_lora_rank + self.kv_lora_rank
        bias = (self.heads + 2 * self.kv_heads) * self.head_dim + 2 * self.hidden + self.ffn
        return 4 * self.hidden + bias

    @property
    def embedding_weights(self) -> int:
        """Elements of the embedding and of the position table."""
        return (self.vocab + self.positions) * self.hidden

    @property
    def mtp_weights(self) -> int:
        """Elements of one MTP layer: its projection, norms and a layer; the head is shared."""
        h, last = self.hidden, self.dense_weights
        if self.layers[-1] == "moe":
            last = self.experts * self.expert_weights + self.shared_weights
        return 2 * h**2 + 3 * h + self.attention_weights + last + self.small_weights

    @property
    def parameters(self) -> int:
        """Number of all trained parameters."""
        return (
            self.embedding_weights
            + (0 if self.tied else self.vocab * self.hidden)
            + len(self.layers) * (self.attention_weights + self.small_weights)
            + self.dense_layers * self.dense_weights
            + self.moe_layers * (self.experts * self.expert_weights + self.shared_weights)
            + self.mtp * self.mtp_weights
            + (2 if self.biases else 1) * self.hidden
        )

    @property
    def active_parameters(self) -> int:
        """Parameters that compute one token, with embedding and head, without MTP."""
        idle = (self.experts - self.top_k) * self.expert_weights
        return self.parameters - self.mtp * self.mtp_weights - self.moe_layers * idle

    @classmethod
    def from_model(cls, c: ModelConfig, name: str = "", seq: int | None = None) -> "Architecture":
        """Return the architecture of a model section."""
        dense = c.num_hidden_layers - c.num_moe_layers
        layers: tuple[LayerKind, ...] = ("dense",) * dense + ("moe",) * c.num_moe_layers
        return cls(
            name=name,
            hidden=c.hidden_size,
            layers=layers,
            heads=c.num_attention_heads,
            q_lora_rank=c.q_lora_rank or 0,
            kv_lora_rank=c.kv_lora_rank,
            qk_nope=c.qk_nope_head_dim,
            qk_rope=c.qk_rope_head_dim,
            v_head_dim=c.v_head_dim,
            ffn=c.intermediate_size,
            experts=c.n_routed_experts if c.num_moe_layers else 0,
            top_k=c.num_experts_per_tok if c.num_moe_layers else 0,
            expert_groups=max(1, c.n_group),
            kept_groups=max(1, c.topk_group),
            shared_experts=c.n_shared_experts,
            moe_ffn=c.moe_intermediate_size,
            shared_ffn=c.shared_width,
            mtp=c.num_nextn_predict_layers,
            vocab=c.vocab_size,
            tied=c.tie_word_embeddings,
            seq=seq or c.seq_length,
        )

    @classmethod
    def from_recipe(cls, recipe: Recipe, pair_share: float = 0.0) -> "Architecture":
        """Return the architecture of a recipe's model; attention counts only the pairs within documents."""
        name = recipe.source.stem if recipe.source else ""
        return replace(cls.from_model(recipe.model_config, name), pair_share=pair_share)
