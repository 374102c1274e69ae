"""The decoder block of :mod:`benchmarks.ops.decoder` as a cell of the model's own operators."""

from __future__ import annotations

from collections.abc import Mapping

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from telechat_moe.ops.attention import AttentionMask, FlashAttention, SoftmaxAttention
from telechat_moe.ops.matmul import matmul
from telechat_moe.ops.norm import FusedAddRMSNorm, RMSNorm
from telechat_moe.ops.rope import Rope
from telechat_moe.ops.select import backend
from telechat_moe.ops.swiglu import SwiGLU


class Decoder(nn.Cell):
    """Norm, attention, residual and norm, SwiGLU MLP, residual; of any number of tokens.

    Args:
        weights: By name: ``norm1 q k v o norm2 gate up down``, matrices ``[O, I]``.
        heads: ``N``.
        eps: Of the norms.
    """

    def __init__(self, weights: Mapping[str, np.ndarray], heads: int, eps: float) -> None:
        super().__init__()
        width = len(weights["norm1"])
        self.fused = backend("attention") == "fused"
        self.heads, self.head, self.width = heads, width // heads, width
        for name, value in weights.items():
            setattr(self, name, Parameter(Tensor(value), name=name))
        self.norm = RMSNorm(width, eps)
        self.norm.weight.set_data(Tensor(weights["norm1"]))
        if self.fused:
            self.add_norm = FusedAddRMSNorm(width, eps)
            self.attention = FlashAttention(self.head**-0.5)
        else:
            self.after = RMSNorm(width, eps)
            self.after.weight.set_data(Tensor(weights["norm2"]))
            self.attention = SoftmaxAttention(self.head**-0.5)
        self.matmul = matmul()
        self.rope = Rope(self.head, interleaved=False)
        self.swiglu = SwiGLU()
        self.reshape, self.transpose = ops.Reshape(), ops.Transpose()
        self.add, self.mul, self.greater, self.cast = (
            ops.Add(),
            ops.Mul(),
            ops.Greater(),
            ops.Cast(),
        )
        self.masked = Tensor(AttentionMask.MASKED, ms.float32)

    def construct(
        self, x_SH: Tensor, cos_1S1r: Tensor, sin_1S1r: Tensor, last_1S: Tensor
    ) -> Tensor:
        """Return ``[S, H]``; ``last`` is the first visible key (fused) or the position (plain)."""
        h = self.norm(x_SH)
        q = self.rope(self._heads(self.matmul(h, self.q)), cos_1S1r, sin_1S1r)
        k = self.rope(self._heads(self.matmul(h, self.k)), cos_1S1r, sin_1S1r)
        v = self._heads(self.matmul(h, self.v))
        if self.fused:
            o = self.attention(q, k, v, last_1S)[0]
        else:
            hidden = self.greater(last_1S, self.reshape(last_1S, (-1, 1)))
            mask = self.mul(self.cast(hidden, ms.float32), self.masked)
            swap = (0, 2, 1, 3)
            q, k, v = (self.transpose(y, swap) for y in (q, k, v))
            o = self.transpose(self.attention(q, k, v, mask)[0], swap)
        o = self.matmul(self.reshape(o, (-1, self.width)), self.o)
        if self.fused:
            h, x = self.add_norm(o, x_SH, self.norm2)
        else:
            x = self.add(x_SH, o)
            h = self.after(x)
        a = self.swiglu(self.matmul(h, self.gate), self.matmul(h, self.up))
        return self.add(x, self.matmul(a, self.down))

    def _heads(self, x_SH: Tensor) -> Tensor:
        return self.reshape(x_SH, (1, -1, self.heads, self.head))
