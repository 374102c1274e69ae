"""Multi-head latent attention (DeepSeek-V2, section 2.1; TeleChat3-MoE uses it unchanged)."""

from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import SplitWithSize

from telechat_moe.model.init import output_std
from telechat_moe.model.linear import DTYPES, Linear
from telechat_moe.ops.attention import (
    AscendAttention,
    FlashAttention,
    MlaAssemble,
    SoftmaxAttention,
    attention_backend,
)
from telechat_moe.ops.norm import RMSNorm
from telechat_moe.ops.rope import Rope
from telechat_moe.recipe import ModelConfig


class ShareKey(nn.Cell):
    """Give every head its copy of the rotary key."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.tile = ops.Tile()

    def construct(self, k_BS1R: Tensor) -> Tensor:
        """Return ``[B, S, N, R]``."""
        return self.tile(k_BS1R, (1, 1, self.num_heads, 1))


class MultiLatentAttention(nn.Cell):
    """Attention whose keys and values come from one small latent per token.

    With ``c = norm(W_kv_down h)`` the latent and ``k_rope = rope(W_k_rope h)`` one rotary key that
    all heads share::

        q = W_q_up norm(W_q_down h)        (or W_q h without q compression)
        [k_nope; v] = W_kv_up c
        out = W_o softmax([q_nope; rope(q_rope)] [k_nope; k_rope]^T / sqrt(D)) v

    ``kv_down`` holds ``W_kv_down`` and ``W_k_rope`` in one matrix.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.num_heads = config.num_attention_heads
        self.nope, self.rotary = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.v_width = config.v_head_dim
        self.kv_rank = config.kv_lora_rank
        compute, params = DTYPES[config.compute_dtype], DTYPES[config.params_dtype]
        norm_dtype = DTYPES[config.layernorm_compute_dtype]
        hidden, std = config.hidden_size, config.initializer_range
        q_width = self.num_heads * (self.nope + self.rotary)

        q_rank = config.q_lora_rank or 0
        self.compress_query = q_rank > 0
        self.norm_latents = config.qk_layernorm
        if self.compress_query:
            self.q_down = Linear(hidden, q_rank, std, compute, params)
            if self.norm_latents:
                self.q_norm = RMSNorm(q_rank, config.rms_norm_eps, norm_dtype)
            self.q_up = Linear(q_rank, q_width, std, compute, params)
        else:
            self.q_proj = Linear(hidden, q_width, std, compute, params)
        self.kv_down = Linear(hidden, self.kv_rank + self.rotary, std, compute, params)
        if self.norm_latents:
            self.kv_norm = RMSNorm(self.kv_rank, config.rms_norm_eps, norm_dtype)
        kv_width = self.num_heads * (self.nope + self.v_width)
        self.kv_up = Linear(self.kv_rank, kv_width, std, compute, params)
        self.out = Linear(
            self.num_heads * self.v_width, hidden, output_std(config), compute, params
        )

        self.reshape = ops.Reshape()
        self.split_latent = SplitWithSize()
        self.split_query = SplitWithSize()
        self.split_key_value = SplitWithSize()
        rotary_dtype = DTYPES[config.rotary_dtype]
        self.rope_query: nn.Cell = Rope(self.rotary, config.rope_interleave, rotary_dtype)
        self.rope_key: nn.Cell = Rope(self.rotary, config.rope_interleave, rotary_dtype)
        self.share_key: nn.Cell = ShareKey(self.num_heads)
        self.concat_query = ops.Concat(-1)
        self.concat_key = ops.Concat(-1)
        self.query_heads_first = ops.Transpose()
        self.heads_first = ops.Transpose()
        self.tokens_first = ops.Transpose()
        # Keeps the keys of the parts before where a sequence comes in parts (telechat_moe.sharding); the mask is then a
        # pair of the mask and the number of the part.
        self.earlier: nn.Cell | None = None
        scale = (self.nope + self.rotary) ** -0.5
        chosen = attention_backend(compute)
        self.fused = chosen == "fused"
        if self.fused:
            self.assemble = MlaAssemble(self.num_heads, self.nope, config.rope_interleave)
            self.core: nn.Cell = FlashAttention(scale, compute)
        elif chosen == "ascend":
            self.core = AscendAttention(self.num_heads, scale)
        else:
            self.core = SoftmaxAttention(scale, DTYPES[config.softmax_compute_dtype])

    def query(self, x_TH: Tensor) -> Tensor:
        """Return all heads' queries ``[T, N * (nope + rope)]``, not yet rotated."""
        if not self.compress_query:
            return self.q_proj(x_TH)
        latent = self.q_down(x_TH)
        if self.norm_latents:
            latent = self.q_norm(latent)
        return self.q_up(latent)

    def latent(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Return what keys and values are made from: the latent ``[T, C]`` and the rotary key ``[T, R]``, not yet rotated."""
        latent, k_rope = self.split_latent(self.kv_down(x_TH), (self.kv_rank, self.rotary), -1)
        return self.kv_norm(latent) if self.norm_latents else latent, k_rope

    def construct(self, x_TH: Tensor, cos_BS1r: Tensor, sin_BS1r: Tensor, mask: Tensor) -> Tensor:
        """Return ``[T, H]``; ``mask`` comes from :class:`telechat_moe.ops.attention.AttentionMask`, or with ``earlier`` is a pair."""
        B, S = cos_BS1r.shape[:2]
        N = self.num_heads
        q = self.query(x_TH)
        latent, k_rope = self.latent(x_TH)
        if self.fused:
            q, k, v = self.assemble(q, self.kv_up(latent), k_rope, cos_BS1r, sin_BS1r)
            o_BSND, _ = self.core(q, k, v, mask)
            return self.out(self.reshape(o_BSND, (B * S, N * self.v_width)))

        q = self.reshape(q, (B, S, N, self.nope + self.rotary))
        q_nope, q_rope = self.split_query(q, (self.nope, self.rotary), -1)
        q = self.concat_query((q_nope, self.rope_query(q_rope, cos_BS1r, sin_BS1r)))
        k_rope = self.rope_key(self.reshape(k_rope, (B, S, 1, self.rotary)), cos_BS1r, sin_BS1r)
        if self.earlier is not None:
            mask, part = mask
            latent, k_rope = self.earlier(latent, k_rope, part)
        kv = self.reshape(self.kv_up(latent), (B, -1, N, self.nope + self.v_width))
        k_nope, v = self.split_key_value(kv, (self.nope, self.v_width), -1)
        k = self.concat_key((k_nope, self.share_key(k_rope)))

        order = (0, 2, 1, 3)
        o_BNSD, _ = self.core(
            self.query_heads_first(q, order),
            self.heads_first(k, order),
            self.heads_first(v, order),
            mask,
        )
        o_TD = self.reshape(self.tokens_first(o_BNSD, order), (B * S, N * self.v_width))
        return self.out(o_TD)
