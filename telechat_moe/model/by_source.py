"""Next-token loss by source: what the tokens of each source of a mixture add to it.

The loss mask of a marked batch is one plus the number of the source where a label counts, and 0 elsewhere, so that sources reach
the loss in every layout without an input of their own. The cross-entropies unmark it.
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops


class LossBySource(nn.Cell):
    """Add up what tokens add to the loss, by source."""

    def __init__(self, sources: int) -> None:
        super().__init__()
        self.number_Z1 = Tensor(1 + np.arange(sources, dtype=np.float32)[:, None])
        self.equal, self.cast, self.reshape = ops.Equal(), ops.Cast(), ops.Reshape()
        self.take, self.sum, self.count = ops.Mul(), ops.ReduceSum(), ops.ReduceSum()
        self.concat = ops.Concat()

    def construct(self, loss_T: Tensor, marked_T: Tensor) -> Tensor:
        """Return ``[2 Z]`` fp32, which gives no gradient: losses, then tokens, of each of Z sources."""
        of_ZT = self.equal(self.number_Z1, self.reshape(marked_T, (1, -1)))
        of_ZT = self.cast(of_ZT, ms.float32)
        loss_ZT = self.take(of_ZT, self.reshape(ops.stop_gradient(loss_T), (1, -1)))
        return self.concat((self.sum(loss_ZT, 1), self.count(of_ZT, 1)))
