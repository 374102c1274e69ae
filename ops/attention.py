"""Softmax attention: over explicit scores (plain), or a block of queries at a time (fused)."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import FlashAttentionScore

from telechat_moe.ops.custom import Tensors, custom_op
from telechat_moe.ops.select import backend


def attention_backend(compute_dtype: ms.Type) -> str:
    """Return the backend that serves attention in this data type: the fused one has no float16."""
    chosen = backend("attention")
    return "plain" if chosen == "fused" and compute_dtype == ms.float16 else chosen


class AttentionMask(nn.Cell):
    """Say which keys each query sees, once for all layers: a mask to add, or the first visible key.

    The fused backend takes the first key (``start``): a query sees its document up to itself. It
    refuses any other mask when it is called with one. The plain backend takes any mask, ``S`` times as much memory.

    The mask is stretched over the heads here: adding a tensor of the scores' own shape is four
    times faster on CPU than broadcasting one inside every layer. Where the attribute ``stretch`` is False it is not.
    ``compute_dtype`` is that of attention's products: mask and attention must agree on the backend.
    """

    MASKED = -1e30  # finite, so that a row with no visible key gives no NaN

    def __init__(self, num_heads: int, compute_dtype: ms.Type = ms.float32) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.to_float = ops.Cast()
        self.scale = ops.Mul()
        self.tile = ops.Tile()
        self.masked = Tensor(self.MASKED, ms.float32)
        self.stretch = True
        self.backend = attention_backend(compute_dtype)
        if self.backend == "fused":
            self.start = custom_op("AttentionStart", lambda mask: ms.int32)

    def construct(self, batch: int, length: int, mask_B1SS: Tensor | None) -> Tensor:
        """Return the mask as the chosen backend wants it.

        Plain: ``[B, N, S, S]`` fp32, 0 where a key is visible; fused: ``[B, S]`` int32; Ascend: the mask, or
        the 2048 x 2048 triangle of its compressed causal mode. ``mask_B1SS`` is uint8, 1 = hidden, as Megatron's
        dataset gives it; None = causal.
        """
        if self.backend == "fused":
            if mask_B1SS is None:
                return Tensor(np.zeros((batch, length), np.int32))
            return self.start(mask_B1SS)
        if self.backend == "ascend":
            if mask_B1SS is None:
                return Tensor(np.triu(np.ones((2048, 2048), np.uint8), 1))
            return mask_B1SS
        if mask_B1SS is None:
            causal = Tensor(np.triu(np.full((1, 1, length, length), self.MASKED, np.float32), 1))
            return self.tile(causal, (batch, self.num_heads, 1, 1)) if self.stretch else causal
        mask = self.scale(self.to_float(mask_B1SS, ms.float32), self.masked)
        return self.tile(mask, (1, self.num_heads, 1, 1)) if self.stretch else mask


class PlainAttention(nn.Cell):
    """``softmax(q k^T * scale + mask) v`` with the scores in memory, differentiated by MindSpore.

    Scores and softmax are in ``softmax_dtype``, the product with v is in v's.
    """

    def __init__(self, scale: float, softmax_dtype: ms.Type = ms.float32) -> None:
        super().__init__()
        self.softmax_dtype = softmax_dtype
        self.scale = Tensor(scale, softmax_dtype)
        self.cast_scale = ops.Cast()
        self.scale_query = ops.Mul()
        self.scores = ops.BatchMatMul(transpose_b=True)
        self.to_softmax = ops.Cast()
        self.add_mask = ops.Add()
        self.softmax = ops.Softmax(-1)
        self.to_value = ops.Cast()
        self.weighted_sum = ops.BatchMatMul()

    def construct(
        self, q_BNSD: Tensor, k_BNSD: Tensor, v_BNSD: Tensor, mask_BNSS: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the output ``[B, N, S, D of v]`` and the weights, both in v's data type."""
        q = self.scale_query(q_BNSD, self.cast_scale(self.scale, q_BNSD.dtype))
        scores = self.to_softmax(self.scores(q, k_BNSD), self.softmax_dtype)
        weight = self.to_value(self.softmax(self.add_mask(scores, mask_BNSS)), v_BNSD.dtype)
        return self.weighted_sum(weight, v_BNSD), weight


class SoftmaxAttention(PlainAttention):
    """:class:`PlainAttention` with a faster backward pass, written out.

    With ``P`` the weights and ``O = P v``, the row sums of ``P * dP`` that softmax needs are those of
    ``O * dO`` (Dao et al. 2022, appendix B.2), which is ``S / D`` times less work; and subtracting them
    costs nothing where they are one more column of the product that gives ``dP``.
    """

    def __init__(self, scale: float, softmax_dtype: ms.Type = ms.float32) -> None:
        super().__init__(scale, softmax_dtype)
        self.left = ops.BatchMatMul(transpose_a=True)
        self.row_product = ops.Mul()
        self.row_sum = ops.ReduceSum(keep_dims=True)
        self.append = ops.Concat(-1)
        self.d_weight = ops.BatchMatMul(transpose_b=True)
        self.d_scores = ops.Mul()
        self.d_query = ops.BatchMatMul()

    def bprop(
        self,
        q_BNSD: Tensor,
        k_BNSD: Tensor,
        v_BNSD: Tensor,
        mask_BNSS: Tensor,
        out: Tensors,
        dout: Tensors,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of q, k, v; the mask has none and the weights give none."""
        o, weight = out
        do = dout[0]
        scale = self.cast_scale(self.scale, q_BNSD.dtype)
        row = self.row_sum(self.row_product(o, do), -1)
        minus_one = ops.zeros_like(row) - ops.ones_like(row)
        d_weight = self.d_weight(self.append((do, row)), self.append((v_BNSD, minus_one)))
        d_scores = self.d_scores(d_weight, weight)
        dq = self.scale_query(self.d_query(d_scores, k_BNSD), scale)
        dk = self.left(d_scores, self.scale_query(q_BNSD, scale))
        return dq, dk, self.left(weight, do), ops.zeros_like(mask_BNSS)


class AscendAttention(nn.Cell):
    """The Ascend backend: ``FlashAttentionScore``; built, but not run here."""

    def __init__(self, num_heads: int, scale: float) -> None:
        super().__init__()
        settings = {"scale_value": scale, "input_layout": "BNSD"}
        self.flash = FlashAttentionScore(num_heads, **settings)
        self.flash_causal = FlashAttentionScore(num_heads, next_tokens=0, sparse_mode=2, **settings)

    def construct(
        self, q_BNSD: Tensor, k_BNSD: Tensor, v_BNSD: Tensor, mask_B1SS: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the output ``[B, N, S, D of v]`` and the scores' row sums.

        The mask has 1 = hidden; one of two dimensions is the triangle of causal attention.
        """
        # Written out twice: an operator that is called with an unpacked tuple loses its module in the graph.
        if mask_B1SS.ndim == 2:
            _, row_sum, _, o = self.flash_causal(
                q_BNSD, k_BNSD, v_BNSD, None, None, None, mask_B1SS, None, None, None
            )
        else:
            _, row_sum, _, o = self.flash(
                q_BNSD, k_BNSD, v_BNSD, None, None, None, mask_B1SS, None, None, None
            )
        return o, row_sum


class FlashAttention(nn.Cell):
    """``softmax(q k^T * scale) v`` over the visible keys; no more than 128 rows of scores exist at once.

    Args:
        compute_dtype: Data type of the products' operands; sums and softmax are fp32.
        first: Key at which the first query stands, where there are more keys than queries.

    Source: Dao et al. 2022, algorithms 1 and 4.
    """

    def __init__(self, scale: float, compute_dtype: ms.Type = ms.float32, first: int = 0) -> None:
        super().__init__()
        attributes = {"scale": scale, "bf16": compute_dtype == ms.bfloat16, "first": first}
        self.forward = custom_op("FlashAttention", lambda q, k, v, start: (q, q), 2, **attributes)
        self.backward = custom_op(
            "FlashAttentionGrad", lambda q, k, v, start, o, lse, do: (q, q, q), 3, **attributes
        )

    def construct(
        self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, start_BS: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the output ``[B, S, N, D of v]`` and the scores' log-sum-exp ``[B, N, S]``, fp32.

        Args:
            q_BSND: Queries, fp32.
            k_BSND: Keys, as wide as the queries; with ``first`` at least as many.
            v_BSND: Values, of any width.
            start_BS: First key that each query sees, int32, at most its own position.
        """
        return self.forward(q_BSND, k_BSND, v_BSND, start_BS)

    def bprop(
        self,
        q_BSND: Tensor,
        k_BSND: Tensor,
        v_BSND: Tensor,
        start_BS: Tensor,
        out: Tensors,
        dout: Tensors,
    ) -> Tensors:
        """Return the gradients of q, k, v; the log-sum-exp gives none."""
        grads = self.backward(q_BSND, k_BSND, v_BSND, start_BS, out[0], out[1], dout[0])
        return *grads, ops.zeros_like(start_BS)


class MlaAssemble(nn.Cell):
    """Rotate and put together the queries, keys and values of multi-head latent attention."""

    def __init__(self, heads: int, nope: int, interleaved: bool) -> None:
        super().__init__()
        attributes = {"heads": heads, "nope": nope, "interleaved": interleaved}
        self.forward = custom_op(
            "MlaAssemble", lambda q, kv, kr, cos, sin: (q, q, q), 3, **attributes
        )
        self.backward = custom_op(
            "MlaAssembleGrad", lambda q, k, v, cos, sin: (q, q, q), 3, **attributes
        )

    def construct(
        self, q_TA: Tensor, kv_TA: Tensor, k_rope_TR: Tensor, cos_BS1r: Tensor, sin_BS1r: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k ``[B, S, N, nope + R]`` and v ``[B, S, N, D]``.

        Args:
            q_TA: ``[T, N * (nope + R)]``, not yet rotated.
            kv_TA: ``[T, N * (nope + D)]``.
            k_rope_TR: The rotary key that all heads share.
            cos_BS1r: ``[B, S, 1, R / 2]`` fp32.
            sin_BS1r: ``[B, S, 1, R / 2]`` fp32.
        """
        return self.forward(q_TA, kv_TA, k_rope_TR, cos_BS1r, sin_BS1r)

    def bprop(
        self,
        q_TA: Tensor,
        kv_TA: Tensor,
        k_rope_TR: Tensor,
        cos_BS1r: Tensor,
        sin_BS1r: Tensor,
        out: Tensors,
        dout: Tensors,
    ) -> Tensors:
        """Return the gradients of the projections; angles have none."""
        grads = self.backward(*dout, cos_BS1r, sin_BS1r)
        return *grads, ops.zeros_like(cos_BS1r), ops.zeros_like(sin_BS1r)


def attention_reference(
    q_BNSD: np.ndarray,
    k_BNSD: np.ndarray,
    v_BNSD: np.ndarray,
    visible_BNSS: np.ndarray,
    scale: float,
) -> np.ndarray:
    """Define :class:`SoftmaxAttention` in float64; ``visible`` is boolean."""
    scores = q_BNSD.astype(np.float64) @ k_BNSD.astype(np.float64).swapaxes(-1, -2) * scale
    scores = np.where(visible_BNSS, scores, -np.inf)
    weight = np.exp(scores - scores.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True) @ v_BNSD.astype(np.float64)
