"""A small model whose experts all run, also those that got no token, as Megatron-Core's do, in plain torch; see msprobe_runs.py."""

from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.align_faults.tensor_parallel import TokenModel


class _Quantize(nn.Module):
    def forward(self, x: Any, scale: Any) -> Any:
        return torch.clamp(torch.div(x, scale), -448, 448).to(torch.float8_e4m3fn)


class _Dequantize(nn.Module):
    def forward(self, x: Any, scale: Any) -> Any:
        return torch.mul(x.to(scale.dtype), scale)


class _Layer(nn.Module):
    def __init__(self, float8: bool) -> None:
        super().__init__()
        self.float8 = float8
        self.quantize, self.dequantize = _Quantize(), _Dequantize()
        self.norm = nn.RMSNorm(32)
        self.router = nn.Linear(32, 8, bias=False)
        self.experts = nn.ModuleList([nn.Linear(32, 32) for _ in range(8)])

    def forward(self, x: Any) -> Any:
        tokens = self.norm(x).reshape(-1, 32)
        weights, choices = torch.topk(torch.softmax(self.router(tokens), -1), 2)
        total = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, slots = torch.where(choices == number)
            chosen = tokens[rows]
            if self.float8:
                scale = tokens.detach().abs().amax() / 448
                with torch.no_grad():  # its gradient passes unchanged
                    rounded = self.dequantize(self.quantize(chosen, scale), scale)
                    change = torch.sub(rounded, chosen)
                chosen = torch.add(chosen, change)
            y = nn.functional.gelu(expert(chosen)) * weights[rows, slots].unsqueeze(-1)
            total.index_add_(0, rows, y)
        return x + total.reshape(x.shape)


def build(float8: bool, batches: int) -> tuple[nn.Module, list[dict[str, Any]]]:
    """Return the model and the batches, of so few tokens that some of the experts get none."""
    torch.manual_seed(3)
    model = TokenModel(partial(_Layer, float8))
    tokens = torch.randint(0, 50, (batches, 2, 3))
    return model, [{"tokens": t, "labels": t.roll(-1, 1)} for t in tokens]
