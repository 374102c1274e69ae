"""Multi-token prediction (DeepSeek-V3, section 2.2)."""

from mindspore import Tensor, nn, ops

from telechat_moe.model.block import Block
from telechat_moe.model.linear import DTYPES, Linear
from telechat_moe.ops.matmul import carried
from telechat_moe.ops.norm import RMSNorm
from telechat_moe.recipe import ModelConfig


class MTPLayer(nn.Cell):
    """One depth: from the hidden state of token i and the embedding of token i + k.

    ``h' = norm(block(W [norm(embedding); norm(h)]))``. The paper prints ``[h; embedding]``; published
    DeepSeek-V3 weights, Megatron and MindFormers hold the embedding first, and so do we.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        norm_dtype = DTYPES[config.layernorm_compute_dtype]
        # What their product reads; the embedding crosses a pipeline in this type.
        into = carried(DTYPES[config.compute_dtype])
        self.embed_norm = RMSNorm(
            H, eps, norm_dtype, into
        )  # called by the model, before this layer
        self.hidden_norm = RMSNorm(H, eps, norm_dtype, into)
        self.concat = ops.Concat(-1)
        self.proj = Linear(
            2 * H,
            H,
            config.initializer_range,
            DTYPES[config.compute_dtype],
            DTYPES[config.params_dtype],
        )
        self.to_residual = ops.Cast()
        is_moe = config.num_hidden_layers > config.first_k_dense_replace
        self.block = Block(config, is_moe)
        self.norm = RMSNorm(H, eps, norm_dtype)

    def construct(
        self,
        embedding_TH: Tensor,
        hidden_TH: Tensor,
        aux: Tensor,
        cos_BS1r: Tensor,
        sin_BS1r: Tensor,
        mask: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return ``(hidden_TH, aux)``, as a :class:`telechat_moe.model.block.Block`; the embedding is normalised."""
        pair = self.concat((embedding_TH, self.hidden_norm(hidden_TH)))
        x = self.to_residual(self.proj(pair), hidden_TH.dtype)
        y, aux = self.block(x, aux, cos_BS1r, sin_BS1r, mask)
        return self.norm(y), aux


class ShiftLeft(nn.Cell):
    """Move every sequence one token to the left and fill the end with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.concat = ops.Concat(-1)

    def construct(self, x_BS: Tensor) -> Tensor:
        """Return ``[B, S]``."""
        return self.concat((x_BS[:, 1:], ops.zeros_like(x_BS[:, :1])))
