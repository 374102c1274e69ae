"""Shape-only stubs of the cells of other pipeline stages.

A rank's graph keeps only its own stage; MindSpore parses the rest, differentiates some of it and discards it. A stub
has the inputs, outputs and layouts of the cell that it replaces, so that the same tensors cross between stages, and no
weights. What it computes is in no rank's final graph.
"""

from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from telechat_moe.sharding.cells.collective import Morphed, one_number


def _first_and_one(shape: Any, other: Any) -> Any:
    return shape, [1]


def _first_and_float(dtype: Any, other: Any) -> Any:
    return dtype, ms.float32


def _without_first(embedding: Any, x: Any, aux: Any) -> Any:
    return x, aux


def _float(*_: Any) -> Any:
    return ms.float32


class _Sum(nn.Cell):
    """The sum of a tensor, ``(1,)`` fp32."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.to_float, self.sum, self.reshape = ops.Cast(), ops.ReduceSum(), ops.Reshape()

    def construct(self, x: Tensor) -> Tensor:
        return self.reshape(self.sum(self.to_float(x, ms.float32)), (1,))


class EmbeddingStub(nn.Cell):
    """Shape-only stub of :class:`telechat_moe.model.causal_lm.Embedding`: ``[B, S]`` ids to ``[T, H]``."""

    def __init__(self, width: int, dtype: ms.Type) -> None:
        super().__init__(auto_prefix=False)
        self.dtype, self.ones = dtype, Tensor([[1.0] * width], dtype)
        self.reshape, self.cast, self.spread = ops.Reshape(), ops.Cast(), ops.Mul()

        def shape_of(ids: Any) -> Any:  # MindSpore parses it, and parses no lambda here
            return [ids[0], width]

        def type_of(ids: Any) -> Any:
            return dtype

        self.run = Morphed(self.body, shape_of, type_of)

    def body(self, id_t: Tensor) -> Tensor:
        """Return ``[t, H]`` on slices."""
        return self.spread(self.cast(self.reshape(id_t, (-1, 1)), self.dtype), self.ones)

    def construct(self, id_BS: Tensor) -> Tensor:
        """Return ``[T, H]``."""
        return self.run(self.reshape(id_BS, (-1,)))


class BlockStub(nn.Cell):
    """Shape-only stub of :class:`telechat_moe.model.block.Block`.

    Args:
        name: Name of its parameter.
        is_moe: It adds to the balance losses; a dense block hands them on, and nothing is sent before the first.

    It reads a parameter, as a block does: MindSpore orders side effects within a stage, and without this read
    it would make the chunks of a stage wait for each other.
    """

    def __init__(self, name: str, is_moe: bool) -> None:
        super().__init__(auto_prefix=False)
        self.is_moe = is_moe
        self.add, self.to_stream, self.add_aux = ops.Add(), ops.Cast(), ops.Add()
        self.sum = _Sum()
        zero = Tensor([0.0], ms.float32)
        self.read = Parameter(zero, name=name, requires_grad=False, parallel_optimizer=False)
        self.run = Morphed(self.body, _first_and_one, _first_and_float)

    def body(self, x_tH: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``[t, H]`` and a number, on slices."""
        y_tH = self.add(x_tH, self.to_stream(read, x_tH.dtype))
        return y_tH, self.sum(y_tH)

    def construct(self, x_TH: Tensor, aux: Tensor, *context: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(y_TH, aux)``."""
        y, number = self.run(x_TH, self.read)
        return y, self.add_aux(aux, number) if self.is_moe else aux


class MTPStub(nn.Cell):
    """Shape-only stub of :class:`telechat_moe.model.mtp.MTPLayer`."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.add, self.add_aux = ops.Add(), ops.Add()
        self.run = Morphed(self.body, _without_first, _without_first)

    def body(self, embedding_tH: Tensor, x_tH: Tensor, aux: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``[t, H]`` and the auxiliary loss, on slices."""
        return self.add(embedding_tH, x_tH), self.add_aux(aux, aux)

    def construct(self, embedding_TH: Tensor, x_TH: Tensor, aux: Tensor, *context: Tensor) -> Any:
        """Return ``(hidden_TH, aux)``."""
        return self.run(embedding_TH, x_TH, aux)


class HiddenStub(nn.Cell):
    """Shape-only stub of a norm or of the head: ``[T, H]`` to ``[T, H]``, which the loss stub accepts."""

    def __init__(self, dtype: ms.Type | None = None) -> None:
        super().__init__(auto_prefix=False)
        self.dtype = dtype
        self.add, self.cast = ops.Add(), ops.Cast()

        def type_of(x: Any) -> Any:
            return x if dtype is None else dtype

        self.run = Morphed(self.body, infer_dtype=type_of)

    def body(self, x_tH: Tensor) -> Tensor:
        """Return twice the slice ``[t, H]``, in the stub's type."""
        twice = self.add(x_tH, x_tH)
        return twice if self.dtype is None else self.cast(twice, self.dtype)

    def construct(self, x_TH: Tensor) -> Tensor:
        """Return ``[T, H]``."""
        return self.run(x_TH)


class LossStub(nn.Cell):
    """Shape-only stub of :class:`telechat_moe.sharding.cells.collective.ParallelCrossEntropy`: ``(1,)`` fp32."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.sum = _Sum()
        self.run = Morphed(self.body, one_number, _float)

    def body(self, hidden_tH: Tensor) -> Tensor:
        """Return the sum of the slice, ``(1,)`` fp32."""
        return self.sum(hidden_tH)

    def construct(self, hidden_TH: Tensor, label_T: Tensor, keep_T: Tensor) -> Tensor:
        """Return ``(1,)``."""
        return self.run(hidden_TH)
