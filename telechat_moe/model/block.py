"""Transformer blocks: attention, then a dense MLP or a mixture of experts."""

from mindspore import Tensor, nn, ops

from telechat_moe.model.attention import MultiLatentAttention
from telechat_moe.model.dispatch import build_dispatch
from telechat_moe.model.experts import Experts
from telechat_moe.model.init import output_std
from telechat_moe.model.linear import DTYPES, MLP
from telechat_moe.model.router import Router
from telechat_moe.ops.norm import AddRMSNorm, RMSNorm
from telechat_moe.recipe import ModelConfig


def _mlp(config: ModelConfig, width: int) -> MLP:
    return MLP(
        config.hidden_size,
        width,
        config.initializer_range,
        output_std(config),
        DTYPES[config.compute_dtype],
        DTYPES[config.params_dtype],
    )


class MoE(nn.Cell):
    """``sum_k weight_k expert_k(x) + shared(x)``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.dispatch = build_dispatch(config)
        self.experts = Experts(config)
        self.has_shared = config.shared_width > 0
        if self.has_shared:
            self.shared = _mlp(config, config.shared_width)
        self.add_shared: nn.Cell | ops.Primitive = ops.Add()

    def construct(self, x_TH: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Return ``(y_TH, aux)``; ``aux`` is the balance and z-loss, ``(1,)`` fp32."""
        index_TK, weight_TK, aux = self.router(x_TH, batch)
        y_TH = self.dispatch(x_TH, index_TK, weight_TK, self.experts)
        if self.has_shared:
            y_TH = self.add_shared(y_TH, self.shared(x_TH))
        return y_TH, aux


class Block(nn.Cell):
    """Pre-norm block: ``h = x + attention(norm(x)); y = h + ffn(norm(h))``.

    The residual stream is fp32 with ``fp32_residual_connection``, else ``compute_dtype``.

    Args:
        is_moe: Mixture of experts, or dense MLP.
    """

    def __init__(self, config: ModelConfig, is_moe: bool) -> None:
        super().__init__()
        norm_dtype = DTYPES[config.layernorm_compute_dtype]
        self.is_moe = is_moe
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, norm_dtype)
        self.attention = MultiLatentAttention(config)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, norm_dtype)
        if is_moe:
            self.moe = MoE(config)
        else:
            self.ffn = _mlp(config, config.intermediate_size)
        self.to_residual = ops.Cast()
        self.add_attention = AddRMSNorm(self.ffn_norm, config.hidden_size, config.rms_norm_eps)
        self.add_ffn: nn.Cell | ops.Primitive = ops.Add()
        self.add_aux = ops.Add()

    def construct(
        self, x_TH: Tensor, aux: Tensor, cos_BS1r: Tensor, sin_BS1r: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return ``(y_TH, aux)``, this block's balance losses added to ``aux``.

        They are added here, not between blocks, so that a pipeline chunk can end with a block.
        """
        o = self.attention(self.input_norm(x_TH), cos_BS1r, sin_BS1r, mask)
        normed, h = self.add_attention(x_TH, self.to_residual(o, x_TH.dtype))
        if self.is_moe:
            y, layer_aux = self.moe(normed, cos_BS1r.shape[0])
            aux = self.add_aux(aux, layer_aux)
        else:
            y = self.ffn(normed)
        return self.add_ffn(h, self.to_residual(y, h.dtype)), aux
