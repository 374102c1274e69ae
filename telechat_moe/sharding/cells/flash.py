"""Flash attention of a process that has some of the heads and queries, and all keys of its heads."""

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from telechat_moe.ops.attention import FlashAttention
from telechat_moe.ops.custom import custom_op
from telechat_moe.sharding.cells.collective import Morphed


class FlashSlice(nn.Cell):
    """:class:`telechat_moe.ops.attention.FlashAttention` on the slices of this device.

    Args:
        first: Position of its first query in the sequence.
    """

    def __init__(self, scale: float, first: int) -> None:
        super().__init__()
        self.to_tokens, self.to_heads = ops.Transpose(), ops.Transpose()
        self.flash = FlashAttention(scale, ms.float32, first)

        def shape_of(q: Any, k: Any, v: Any, start: Any) -> Any:  # MindSpore parses no lambda here
            return [q[0], q[1], q[2], v[3]]

        self.run = Morphed(self.body, shape_of)

    def body(self, q_BNSD: Tensor, k_BNSD: Tensor, v_BNSD: Tensor, start_BS: Tensor) -> Tensor:
        """Return ``[B, N, S, D of v]`` of local shapes."""
        order = (0, 2, 1, 3)
        q, k = self.to_tokens(q_BNSD, order), self.to_tokens(k_BNSD, order)
        o_BSND, _ = self.flash(q, k, self.to_tokens(v_BNSD, order), start_BS)
        return self.to_heads(o_BSND, order)

    def construct(
        self, q_BNSD: Tensor, k_BNSD: Tensor, v_BNSD: Tensor, start_BS: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the output ``[B, N, S, D of v]``, and the first keys in the place of the scores' sums."""
        return self.run(q_BNSD, k_BNSD, v_BNSD, start_BS), start_BS


class FirstKeys(nn.Cell):
    """The first key that each query of this device sees, from its rows of a mask.

    Args:
        first: Position of its first query in the sequence.
    """

    def __init__(self, first: int) -> None:
        super().__init__()

        def shape_of(mask: Any) -> Any:
            return [mask[0], mask[2]]

        def type_of(mask: Any) -> Any:
            return ms.int32

        self.start = custom_op("AttentionStart", type_of, first=first)
        self.run = Morphed(self.body, shape_of, type_of)

    def body(self, mask_B1SS: Tensor) -> Tensor:
        """Return ``[B, S]`` int32 of local shapes."""
        return self.start(mask_B1SS)

    def construct(self, mask_B1SS: Tensor) -> Tensor:
        """Return ``[B, S]`` int32; ``mask`` is uint8, 1 = hidden.

        Raises:
            NativeError: A mask is not "its document up to itself".
        """
        return self.run(mask_B1SS)
