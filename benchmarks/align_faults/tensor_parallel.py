"""A small model whose linear layers are split over ranks as Megatron splits them, in plain torch; see msprobe_runs.py."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import distributed, nn


def _sum(x: Any) -> Any:
    x = x.contiguous()
    if distributed.is_initialized():
        distributed.all_reduce(x)
    return x


class _ToRegion(torch.autograd.Function):
    """Copy forward, sum the gradients of all ranks backward."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _sum(g)


class _FromRegion(torch.autograd.Function):
    """Sum over all ranks forward, copy backward."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _sum(x)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return g


class ColumnParallelLinear(nn.Module):
    """Holds a block of the rows of a weight."""

    def __init__(self, weight: Any, ranks: int, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.chunk(ranks, 0)[rank].clone())

    def forward(self, x: Any) -> Any:
        """Return a block of the columns of the result."""
        return nn.functional.linear(_ToRegion.apply(x), self.weight)


class RowParallelLinear(nn.Module):
    """Holds a block of the columns of a weight."""

    def __init__(self, weight: Any, ranks: int, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.chunk(ranks, 1)[rank].clone())

    def forward(self, x: Any) -> Any:
        """Return the whole result."""
        return _FromRegion.apply(nn.functional.linear(x, self.weight))


class _Layer(nn.Module):
    def __init__(self, ranks: int, rank: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32)
        self.linear_fc1 = ColumnParallelLinear(0.2 * torch.randn(64, 32), ranks, rank)
        self.linear_fc2 = RowParallelLinear(0.2 * torch.randn(32, 64), ranks, rank)

    def forward(self, x: Any) -> Any:
        return x + self.linear_fc2(nn.functional.silu(self.linear_fc1(self.norm(x))))


class TokenModel(nn.Module):
    """Two layers between an embedding and a head, with the loss."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layers = nn.ModuleList([layer() for _ in range(2)])
        self.head = nn.Linear(32, 50, bias=False)

    def forward(self, tokens: Any, labels: Any) -> Any:
        """Return an output with the mean cross-entropy as its ``loss``."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        loss = nn.functional.cross_entropy(self.head(x).reshape(-1, 50), labels.reshape(-1))
        return type("Output", (), {"loss": loss})()


def build(ranks: int, rank: int, batches: int) -> tuple[nn.Module, list[dict[str, Any]]]:
    """Return the model of a rank and the batches, the same for every number of ranks."""
    torch.manual_seed(3)
    model = TokenModel(partial(_Layer, ranks, rank))
    tokens = torch.randint(0, 50, (batches, 2, 12))
    return model, [{"tokens": t, "labels": t.roll(-1, 1)} for t in tokens]
