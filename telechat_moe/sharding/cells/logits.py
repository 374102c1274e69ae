"""Logits of chosen tokens on every device of a stage, from logits that are sharded over tokens and vocabulary."""

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from telechat_moe.sharding.cells.collective import Group, Morphed


class PickedLogits(nn.Cell):
    """Add up the logits of the tokens that a mask keeps, for each sequence of a batch.

    Args:
        sequences: Of the batch.
        length: Tokens of a sequence.
        vocabulary: Group over which the logits are sharded along the vocabulary.
        tokens: Group over which they are sharded along the tokens.
        stage: Group of all devices of the stage.
    """

    def __init__(
        self, sequences: int, length: int, vocabulary: Group, tokens: Group, stage: Group
    ) -> None:
        super().__init__(auto_prefix=False)
        rows = sequences * length // tokens.size
        token_t = tokens.member * rows + np.arange(rows)
        row_Bt = np.arange(sequences)[:, None] == token_t // length
        self.row_Bt = Tensor(row_Bt.astype(np.float32))
        # Zeros where another device of the group has its slice of the vocabulary.
        slice_P = np.arange(vocabulary.size)[:, None] == vocabulary.member
        self.slice_1P1 = Tensor(slice_P.astype(np.float32)[None])
        self.to_float, self.keep, self.add = ops.Cast(), ops.Mul(), ops.MatMul()
        self.spread, self.reshape = ops.Mul(), ops.Reshape()
        self.many = stage.size > 1
        if self.many:
            self.sum_all = ops.AllReduce(ops.ReduceOp.SUM, stage.name)
        parts = vocabulary.size

        def shape_of(
            logits: Any, mask: Any
        ) -> Any:  # MindSpore parses it, and parses no lambda here
            return [sequences, logits[1]]

        def type_of(logits: Any, mask: Any) -> Any:
            return ms.float32

        self.sequences, self.parts = sequences, parts
        self.run = Morphed(self.body, shape_of, type_of)

    def body(self, logits_tv: Tensor, mask_t: Tensor) -> Tensor:
        """Return ``[B, V]`` fp32."""
        kept_tv = self.keep(self.to_float(logits_tv, ms.float32), self.reshape(mask_t, (-1, 1)))
        picked_B1v = self.reshape(self.add(self.row_Bt, kept_tv), (self.sequences, 1, -1))
        picked_BV = self.reshape(self.spread(picked_B1v, self.slice_1P1), (self.sequences, -1))
        return self.sum_all(picked_BV) if self.many else picked_BV

    def construct(self, logits_TV: Tensor, mask_T: Tensor) -> Tensor:
        """Return ``[B, V]`` fp32."""
        return self.run(logits_TV, mask_T)
