"""Cross-entropy of logits against token ids."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops


class CrossEntropy(nn.Cell):
    """Mean negative log-likelihood over the tokens that the mask keeps, in fp32.

    A batch whose mask is all zero has loss 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.to_float = ops.Cast()
        self.log_softmax = ops.LogSoftmax(-1)
        self.pick = ops.GatherD()
        self.reshape = ops.Reshape()
        self.weigh = ops.Mul()
        self.sum = ops.ReduceSum()
        self.add_tiny = ops.Add()
        self.mean = ops.RealDiv()
        self.neg = ops.Neg()
        self.tiny = Tensor(1e-8, ms.float32)  # MindFormers' guard

    def construct(self, logits_TV: Tensor, label_T: Tensor, mask_T: Tensor) -> Tensor:
        """Return the loss, shape ``(1,)`` fp32.

        Args:
            logits_TV: Any float.
            label_T: int32 in ``[0, V)``, also where the mask is 0.
            mask_T: fp32 weights, usually 0 or 1.
        """
        log_p = self.log_softmax(self.to_float(logits_TV, ms.float32))
        picked = self.reshape(self.pick(log_p, 1, self.reshape(label_T, (-1, 1))), (-1,))
        total = self.sum(self.weigh(picked, mask_T), 0)
        loss = self.neg(self.mean(total, self.add_tiny(self.sum(mask_T, 0), self.tiny)))
        return self.reshape(loss, (1,))


def cross_entropy_reference(
    logits_TV: np.ndarray, label_T: np.ndarray, mask_T: np.ndarray
) -> np.ndarray:
    """Define :class:`CrossEntropy` in float64."""
    x = logits_TV.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    log_p = x - np.log(np.exp(x).sum(-1, keepdims=True))
    picked = np.take_along_axis(log_p, label_T[:, None], 1)[:, 0]
    return -(picked * mask_T).sum() / (mask_T.sum() + 1e-8)
