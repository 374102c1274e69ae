"""Sequences that go through the pipeline in parts, one after the other (``seqpipe``, ``seqvpp``).

Attention of a part sees the keys of the parts before it: what they are made from stays in a parameter. The backward passes
run from the last part to the first, and add up the gradients of these rows in a second parameter, which each part takes its own from.
The last part clears the first parameter, and the first part the second.

MindSpore's passes find these cells by names and shapes, which are therefore those of MindFormers' DeepSeek-V3: the slices
by ``seq_split_slice``; and a sum with a parameter ``key_cache`` beside a ``Select`` by a ``Mul`` of a ``NotEqual``, in front
of which they put the operator (``_VirtualAssignKvCache``) whose backward adds to ``key_cache_grad``.

Legend: B sequences, S tokens of one, L of its part, W width, C of the latent, R of the rotary key; b, l: of this device.
"""

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Zero, initializer

from telechat_moe.ops.attention import AttentionMask
from telechat_moe.sharding.cells.collective import Morphed, one_number


class _Part(nn.Cell):
    """Cut one part out of each column of a batch."""

    def __init__(self, index: int, parts: int) -> None:
        super().__init__()
        self.index, self.parts = index, parts
        self.slice = ops.StridedSlice()
        self.slice.add_prim_attr("strided_slice_flag", True)
        self.slice.add_prim_attr("seq_split_slice", True)
        self.slice.add_prim_attr("split_num", parts)

    def construct(self, *columns: Tensor) -> tuple[Tensor, ...]:
        cut = ()
        for column_BS in columns:
            B, S = column_BS.shape
            begin, end = self.index * S // self.parts, (self.index + 1) * S // self.parts
            cut += (self.slice(column_BS, (0, begin), (B, end), (1, 1)),)
        return cut


class SequenceParts(nn.Cell):
    """Call a network on each part of its sequences and add up what it returns.

    Args:
        network: Takes ids, labels, loss mask and positions, ``[B, L]``, then labels and mask of each MTP depth;
            micro-batches share its graph.
        depth: MTP depths.
        shift: Moves a sequence one token to the left; None without MTP.
    """

    def __init__(self, network: nn.Cell, parts: int, depth: int, shift: nn.Cell | None) -> None:
        super().__init__(auto_prefix=False)
        self.network, self.depth = network, depth
        self.shift: Any = shift
        self.cut = nn.CellList([_Part(i, parts) for i in range(parts)], auto_prefix=False)
        self.add = ops.Add().add_prim_attr("seq_split_add", True)

    def construct(self, *columns: Tensor) -> Tensor:
        """Return the sum over the parts; the columns are ``[B, S]``."""
        label, keep = columns[1:3]
        for _ in range(self.depth):
            label, keep = self.shift(label), self.shift(keep)
            columns += (label, keep)
        total: Any = 0.0
        for cut in self.cut:
            total = self.add(total, self.network(*cut(*columns)))
        return total


class PartMask(nn.Cell):
    """What attention must know of a part: which keys are hidden, and which part it is.

    Args:
        length: ``S``.
        backend: Of attention: ``plain`` or ``ascend``.
    """

    def __init__(self, length: int, parts: int, backend: str) -> None:
        super().__init__()
        self.part_length = length // parts
        self.plain = backend == "plain"
        self.key_111S = Tensor(np.arange(length, dtype=np.int32).reshape(1, 1, 1, length))
        self.masked = Tensor(AttentionMask.MASKED, ms.float32)
        self.reshape, self.cast = ops.Reshape(), ops.Cast()
        self.greater, self.hide = ops.Greater(), ops.Mul()
        self.slice, self.divide = ops.StridedSlice(), ops.FloorDiv()
        dtype = ms.float32 if self.plain else ms.uint8

        def shape_of(position: Any) -> Any:  # MindSpore parses it, and parses no lambda here
            return [position[0], 1, position[1], length]

        def type_of(position: Any) -> Any:
            return dtype

        self.run = Morphed(self.body, shape_of, type_of)
        self.find = Morphed(self.part, one_number)

    def body(self, position_bl: Tensor) -> Tensor:
        """Return ``[b, 1, l, S]``: -1e30 (plain) or 1 (Ascend) where a key comes later, else 0."""
        b, rows = position_bl.shape
        hidden = self.greater(self.key_111S, self.reshape(position_bl, (b, 1, rows, 1)))
        if self.plain:
            return self.hide(self.cast(hidden, ms.float32), self.masked)
        return self.cast(hidden, ms.uint8)

    def part(self, position_bl: Tensor) -> Tensor:
        """Return the number of the part, ``[1]`` int32."""
        first = self.reshape(self.slice(position_bl, (0, 0), (1, 1), (1, 1)), (1,))
        return self.divide(first, Tensor(self.part_length, ms.int32))

    def construct(self, position_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mask ``[B, 1, L, S]`` and the number of the part ``[1]``.

        Args:
            position_BL: ``position_ids`` of the part; they count from the first token of a sequence.
        """
        return self.run(position_BL), self.find(position_BL)


class KeptRows(nn.Cell):
    """Rows of the parts of a sequence so far.

    Args:
        sequences: ``B``, over all devices.
        replicas: Groups of devices that hold different sequences.
        length: ``S``.
        width: ``W``.
        dtype: Data type of the rows.
    """

    def __init__(
        self, sequences: int, replicas: int, length: int, width: int, parts: int, dtype: ms.Type
    ) -> None:
        super().__init__()
        self.parts = parts
        owner_S = np.arange(length, dtype=np.int32) // (length // parts)
        self.owner_1S1 = Tensor(owner_S.reshape(1, length, 1))
        self.zero, self.one = Tensor(0.0, dtype), Tensor(1.0, dtype)
        self.last = Tensor(parts - 1, ms.int32)
        self.key_cache = _zeros("key_cache", (sequences, length, width), dtype)
        # In shapes of one device: MindSpore's pass reads it when the other tensors are sliced.
        local = (sequences // replicas, length, width)
        self.key_cache_grad = _zeros("key_cache_grad", local, dtype)
        self.tile, self.own, self.equal, self.cast = ops.Tile(), ops.Mul(), ops.Equal(), ops.Cast()
        self.add, self.nothing, self.always = ops.Add(), ops.Mul(), ops.NotEqual()
        self.not_last, self.stay, self.select = ops.NotEqual(), ops.Mul(), ops.Select()
        self.assign, self.depend = ops.Assign(), ops.Depend()

        def shape_of(x: Any, part: Any) -> Any:  # MindSpore parses it, and parses no lambda here
            return [x[0], length, x[2]]

        self.run = Morphed(self.body, shape_of)

    def body(self, x_bLW: Tensor, part_1: Tensor) -> Tensor:
        """Return ``[b, S, W]``: the rows at their places, zeros elsewhere."""
        own_1S1 = self.cast(self.equal(self.owner_1S1, part_1), x_bLW.dtype)
        return self.own(self.tile(x_bLW, (1, self.parts, 1)), own_1S1)

    def construct(self, x_BLW: Tensor, part_1: Tensor) -> Tensor:
        """Keep the rows of a part; return them and those before ``[B, S, W]``, zeros behind them."""
        so_far = self.add(self.run(x_BLW, part_1), self.key_cache)
        nothing = self.nothing(so_far, self.zero)
        stay = self.stay(self.always(nothing, self.one), self.not_last(part_1, self.last))
        next_rows = ops.stop_gradient(self.select(stay, so_far, nothing))
        return self.depend(so_far, self.assign(self.key_cache, next_rows))


def _zeros(name: str, shape: tuple[int, ...], dtype: ms.Type) -> Parameter:
    zeros = initializer(Zero(), shape, dtype)
    return Parameter(zeros, name=name, requires_grad=False, parallel_optimizer=False)


class EarlierParts(nn.Cell):
    """What the keys and values of this part and those before it are made from."""

    def __init__(self, latent: KeptRows, key: KeptRows) -> None:
        super().__init__()
        self.latent, self.key, self.reshape = latent, key, ops.Reshape()

    def construct(
        self, latent_TC: Tensor, key_BL1R: Tensor, part_1: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return latents ``[B * S, C]`` and rotary keys ``[B, S, 1, R]``."""
        B, L, _, R = key_BL1R.shape
        latent_BSC = self.latent(self.reshape(latent_TC, (B, L, -1)), part_1)
        key_BSR = self.key(self.reshape(key_BL1R, (B, L, R)), part_1)
        latent_TC = self.reshape(latent_BSC, (-1, latent_BSC.shape[2]))
        return latent_TC, self.reshape(key_BSR, (B, -1, 1, R))
