"""Cross-entropy of logits against token ids."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from telechat_moe.ops.custom import Tensors, custom_op
from telechat_moe.ops.select import backend


class CrossEntropy(nn.Cell):
    """Mean negative log-likelihood over the tokens that the mask keeps, in fp32.

    A batch whose mask is all zero has loss 0. The fused backend reads the logits once forward and once
    backward and keeps two numbers a row; on Ascend the elementary primitives serve.

    Attributes:
        sums: In training return the sum instead of the mean.
        by_token: Also return what each token adds to the sum.
        marked: The mask also names sources (``model.by_source``): all that is above 0 counts as 1.
    """

    def __init__(self, sums: bool = False) -> None:
        super().__init__()
        self.sums = sums
        self.by_token = self.marked = False
        self.unmark, self.one = ops.Minimum(), Tensor(1.0, ms.float32)
        self.to_float = ops.Cast()
        self.fused = FusedCrossEntropy() if backend("cross_entropy") == "fused" else None
        self.log_softmax = ops.LogSoftmax(-1)
        self.pick = ops.GatherD()
        self.reshape = ops.Reshape()
        self.weigh = ops.Mul()
        self.sum = ops.ReduceSum()
        self.add_tiny = ops.Add()
        self.mean = ops.RealDiv()
        self.neg = ops.Neg()
        self.tiny = Tensor(1e-8, ms.float32)  # MindFormers' guard

    def construct(
        self, logits_TV: Tensor, label_T: Tensor, mask_T: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the loss, shape ``(1,)`` fp32; with :attr:`by_token` also ``[T]`` fp32, which gives no gradient.

        Args:
            logits_TV: Any float.
            label_T: int32 in ``[0, V)``, also where the mask is 0.
            mask_T: fp32 weights, usually 0 or 1.
        """
        if self.marked:
            mask_T = self.unmark(mask_T, self.one)
        if self.fused is not None:
            logits_TV = self.to_float(logits_TV, ms.float32)
            loss, row_T2 = self.fused(logits_TV, label_T, mask_T)
            if self.sums and self.training:
                loss = self.weigh(loss, self.add_tiny(self.sum(mask_T, 0), self.tiny))
            if self.by_token:
                row_T2, logits_TV = ops.stop_gradient(row_T2), ops.stop_gradient(logits_TV)
                picked = self.pick(logits_TV, 1, self.reshape(label_T, (-1, 1)))
                below_T = row_T2[:, 0] - self.reshape(picked, (-1,))  # first: shifts cancel
                return loss, self.weigh(below_T + row_T2[:, 1], mask_T)
            return loss
        log_p = self.log_softmax(self.to_float(logits_TV, ms.float32))
        picked = self.reshape(self.pick(log_p, 1, self.reshape(label_T, (-1, 1))), (-1,))
        kept_T = self.weigh(picked, mask_T)
        total = self.sum(kept_T, 0)
        if self.sums and self.training:
            loss = self.reshape(self.neg(total), (1,))
        else:
            loss = self.neg(self.mean(total, self.add_tiny(self.sum(mask_T, 0), self.tiny)))
            loss = self.reshape(loss, (1,))
        if self.by_token:
            return loss, self.neg(ops.stop_gradient(kept_T))
        return loss


class FusedCrossEntropy(nn.Cell):
    """The fused backend; ``z_loss`` is the coefficient of PaLM's mean squared log-sum-exp."""

    def __init__(self, z_loss: float = 0.0) -> None:
        super().__init__()
        self.forward = custom_op("CrossEntropy", lambda x, label, mask: (x, x), 2, z_loss=z_loss)
        self.backward = custom_op(
            "CrossEntropyGrad", lambda x, label, mask, lse, dloss: x, z_loss=z_loss
        )

    def construct(
        self, logits_TV: Tensor, label_T: Tensor, mask_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the loss ``(1,)`` and each row's maximum and log-sum-exp above it ``[T, 2]``."""
        return self.forward(logits_TV, label_T, mask_T)

    def bprop(
        self, logits_TV: Tensor, label_T: Tensor, mask_T: Tensor, out: Tensors, dout: Tensors
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradient of the logits; label, mask and the log-sum-exp have none."""
        dx = self.backward(logits_TV, label_T, mask_T, out[1], dout[0])
        return dx, ops.zeros_like(label_T), ops.zeros_like(mask_T)


def cross_entropy_reference(
    logits_TV: np.ndarray, label_T: np.ndarray, mask_T: np.ndarray, z_loss: float = 0.0
) -> np.ndarray:
    """Define :class:`CrossEntropy` in float64."""
    x = logits_TV.astype(np.float64)
    top = x.max(-1, keepdims=True)
    lse = (top + np.log(np.exp(x - top).sum(-1, keepdims=True)))[:, 0]
    loss = lse - np.take_along_axis(x, label_T[:, None], 1)[:, 0] + z_loss * lse**2
    return (loss * mask_T).sum() / (mask_T.sum() + 1e-8)
