"""Portable backends for the primitives of MindFormers' TeleChat3-MoE that have no CPU kernel.

Inside ``with replaced():`` the names by which MindFormers' modules refer to those primitives stand for the
backends here; its classes, and all other primitives, stay its own. Graph mode, one device. Each backend is checked
against NumPy in test_upstream_backends.py.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
from mindspore import Tensor, mint, nn, ops
from mindspore.ops import auto_generate as generated
from mindspore.ops import operations as P
from mindspore.ops.operations.nn_ops import FlashAttentionScore

MODULES = "mindformers.parallel_core.training_graph"
HIDDEN = -1e30


class Face(nn.Cell):
    """A cell that can be told how to be split, as primitives can; one device splits nothing."""

    def shard(self, *args: Any, **kwargs: Any) -> "Face":
        return self

    def add_prim_attr(self, name: str, value: Any) -> "Face":
        return self

    def recompute(self, mode: bool = True) -> "Face":
        return self


class RmsNorm(Face):
    """``x / sqrt(mean(x^2) + epsilon) * gamma``, and the reciprocal root."""

    def __init__(self, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.mean = ops.ReduceMean(keep_dims=True)

    def construct(self, x: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        r = ops.rsqrt(self.mean(ops.square(x), -1) + self.epsilon)
        return x * r * gamma, r


class Outer(Face):
    """``a_i b_j``."""

    def construct(self, a: Tensor, b: Tensor) -> Tensor:
        return a.reshape(-1, 1) * b.reshape(1, -1)


class TopkExt(Face):
    """The ``k`` highest of the last dimension, highest first, and where they stand."""

    def __init__(self) -> None:
        super().__init__()
        self.top = ops.TopK(sorted=True)

    def construct(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return self.top(x, k)


class Swiglu(Face):
    """``silu(first half) * second half`` of a dimension."""

    def construct(self, x: Tensor, dim: int = -1) -> Tensor:
        gate, up = ops.split(x, x.shape[dim] // 2, dim)
        return gate * ops.sigmoid(gate) * up


class Attention(Face):
    """``FlashAttentionScore`` in layout BNSD: ``softmax(scale q k^T, hidden where the mask is 1) v``.

    Sparse mode 2 takes any mask as the causal one.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__()
        expected = {"keep_prob": 1.0, "input_layout": "BNSD", "next_tokens": 0}
        found = {key: given[key] for key in expected}
        if found != expected or given["sparse_mode"] not in (0, 2):
            raise NotImplementedError(
                f"this backend has only {expected}, sparse mode 0 or 2: {given}"
            )
        self.scale, self.causal = given["scale_value"], given["sparse_mode"] == 2
        self.softmax = ops.Softmax(-1)

    def construct(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        real_shift: None = None,
        drop_mask: None = None,
        padding_mask: None = None,
        mask: Tensor | None = None,
        prefix: None = None,
        actual_q: None = None,
        actual_k: None = None,
    ) -> tuple[None, None, None, Tensor]:
        score = ops.matmul(q, k.transpose(0, 1, 3, 2)) * self.scale
        if self.causal:
            length = q.shape[2]
            mask = ops.triu(ops.ones((length, length), ms.float32), 1)
        score = ops.masked_fill(score, mask.astype(ms.bool_), HIDDEN)
        return None, None, None, ops.matmul(self.softmax(score), v)


class MoveTo(Face):
    """Leave a tensor where it is: there is one memory."""

    def construct(self, x: Tensor, to: str, blocking: bool = True) -> Tensor:
        return x


# MindFormers makes these inside `construct`, where the parser takes functions but no cells.


def _sort(x: Tensor, dim: int = -1) -> tuple[Tensor, Tensor]:
    return ops.Sort(axis=-1)(x)


def _index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    return ops.gather(x, index, dim)


def _fmod(x: Tensor, n: int) -> Tensor:
    return x - n * (x // n)  # of numbers >= 0


def _cumsum(x: Tensor, dim: int) -> Tensor:
    return ops.cumsum(x, dim)


def _grouped_matmul(
    xs: list[Tensor],
    weights: list[Tensor],
    bias: None,
    scale: None,
    offset: None,
    antiquant_scale: None,
    antiquant_offset: None,
    ends: Tensor,
) -> tuple[Tensor]:
    """Multiply row r by the matrix of the first group that ends behind r."""
    x, weight = xs[0], weights[0]
    rows = x.shape[0]
    behind = ops.arange(rows).reshape(-1, 1) >= ends.reshape(1, -1)
    group = behind.astype(ms.int32).sum(-1)
    y = ops.matmul(x.reshape(rows, 1, -1), ops.gather(weight, group, 0))
    return (y.reshape(rows, -1),)


def sort_ext() -> Callable[..., Any]:
    return _sort


def index_select() -> Callable[..., Any]:
    return _index_select


def fmod_scalar() -> Callable[..., Any]:
    return _fmod


def cumsum_ext() -> Callable[..., Any]:
    return _cumsum


def grouped_matmul(split_item: int = 0, group_type: int = -1) -> Callable[..., Any]:
    return _grouped_matmul


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Rows of a table."""
    return ops.gather(table, ids, 0)


BACKENDS: dict[Any, Any] = {
    P.RmsNorm: RmsNorm,
    generated.Outer: Outer,
    generated.TopkExt: TopkExt,
    generated.Swiglu: Swiglu,
    FlashAttentionScore: Attention,
    P.MoveTo: MoveTo,
    generated.SortExt: sort_ext,
    generated.IndexSelect: index_select,
    generated.FmodScalar: fmod_scalar,
    generated.CumsumExt: cumsum_ext,
    generated.GroupedMatmul: grouped_matmul,
    mint.nn.functional.embedding: embedding,
}


@contextlib.contextmanager
def replaced() -> Iterator[set[str]]:
    """Put the backends in; return the names of what they replace. To be entered before the model is built."""
    import mindformers.models.telechat3_moe  # noqa: F401  imports all of MODULES that it needs

    modules = [module for name, module in sys.modules.items() if name.startswith(MODULES)]
    modules += [ops, P, generated, mint.nn.functional]
    undo: list[tuple[Any, str, Any]] = []
    for module in modules:
        for name, value in list(vars(module).items()):
            if callable(value) and value.__hash__ is not None and value in BACKENDS:
                undo.append((module, name, value))
                setattr(module, name, BACKENDS[value])
    try:
        yield {value.__name__ for _, _, value in undo}
    finally:
        for module, name, value in undo:
            setattr(module, name, value)
