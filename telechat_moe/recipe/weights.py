"""Name, shape and cell of every weight of our model, from the model section of a recipe alone.

A checkpoint, a shard, a Hugging Face name and a parameter count all follow from this list. Shapes are those of the
whole model, before sharding; a matrix of a linear layer is ``[outputs, inputs]``, the experts of a layer are one stack
``[E, inputs, outputs]``.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from telechat_moe.recipe.schema.model import ModelConfig

Shape = tuple[int, ...]
Cell = Literal["", "Embedding", "Linear.column", "Linear.column_whole", "Linear.row", "Experts"]


class Weight(NamedTuple):
    """One weight of the whole model."""

    name: str
    """Its name in a checkpoint."""

    shape: Shape
    """Its shape before sharding."""

    cell: Cell = ""
    """Row of `telechat_moe.sharding.layouts.WEIGHTS` that shards it; empty: every device holds all of it."""

    trained: bool = True
    """False: the selection bias of a router, which follows from the load and has no gradient."""

    @property
    def stacked(self) -> bool:
        """Whether it holds one matrix for each expert."""
        return len(self.shape) == 3


def weights(c: ModelConfig) -> list[Weight]:
    """Return all weights of a model in the order of its layers, multi-token prediction last."""
    return list(_model(c))


def _model(c: ModelConfig) -> Iterator[Weight]:
    H, V = c.hidden_size, c.vocab_size
    yield Weight("embedding.weight", (V, H), "Embedding")
    for i in range(c.num_hidden_layers):
        yield from _block(c, f"layers.{i}", is_moe=i >= c.first_k_dense_replace)
    yield Weight("norm.weight", (H,))
    if not c.tie_word_embeddings:
        yield Weight("head.weight", (V, H), "Linear.column")
    for d in range(c.num_nextn_predict_layers):
        yield Weight(f"mtp.{d}.embed_norm.weight", (H,))
        yield Weight(f"mtp.{d}.hidden_norm.weight", (H,))
        yield Weight(f"mtp.{d}.proj.weight", (H, 2 * H))
        yield from _block(c, f"mtp.{d}.block", is_moe=c.num_moe_layers > 0)
        yield Weight(f"mtp.{d}.norm.weight", (H,))


def _block(c: ModelConfig, name: str, *, is_moe: bool) -> Iterator[Weight]:
    H = c.hidden_size
    yield Weight(f"{name}.input_norm.weight", (H,))
    yield from _attention(c, f"{name}.attention")
    yield Weight(f"{name}.ffn_norm.weight", (H,))
    if is_moe:
        yield from _moe(c, f"{name}.moe")
    else:
        yield from _feed_forward(f"{name}.ffn", H, c.intermediate_size)


def _attention(c: ModelConfig, name: str) -> Iterator[Weight]:
    H, N, rank = c.hidden_size, c.num_attention_heads, c.kv_lora_rank
    if c.q_lora_rank:
        yield Weight(f"{name}.q_down.weight", (c.q_lora_rank, H))
        if c.qk_layernorm:
            yield Weight(f"{name}.q_norm.weight", (c.q_lora_rank,))
        yield Weight(f"{name}.q_up.weight", (N * c.query_width, c.q_lora_rank), "Linear.column")
    else:
        yield Weight(f"{name}.q_proj.weight", (N * c.query_width, H), "Linear.column")
    yield Weight(f"{name}.kv_down.weight", (rank + c.qk_rope_head_dim, H))
    if c.qk_layernorm:
        yield Weight(f"{name}.kv_norm.weight", (rank,))
    width = N * (c.qk_nope_head_dim + c.v_head_dim)
    yield Weight(f"{name}.kv_up.weight", (width, rank), "Linear.column_whole")
    yield Weight(f"{name}.out.weight", (H, N * c.v_head_dim), "Linear.row")


def _feed_forward(name: str, hidden: int, width: int) -> Iterator[Weight]:
    yield Weight(f"{name}.gate.weight", (width, hidden), "Linear.column")
    yield Weight(f"{name}.up.weight", (width, hidden), "Linear.column")
    yield Weight(f"{name}.down.weight", (hidden, width), "Linear.row")


def _moe(c: ModelConfig, name: str) -> Iterator[Weight]:
    H, E, F = c.hidden_size, c.n_routed_experts, c.moe_intermediate_size
    yield Weight(f"{name}.router.weight", (E, H))
    yield Weight(f"{name}.router.expert_bias", (E,), trained=False)
    yield Weight(f"{name}.experts.gate", (E, H, F), "Experts")
    yield Weight(f"{name}.experts.up", (E, H, F), "Experts")
    yield Weight(f"{name}.experts.down", (E, F, H), "Experts")
    if c.shared_width:
        yield from _feed_forward(f"{name}.shared", H, c.shared_width)
